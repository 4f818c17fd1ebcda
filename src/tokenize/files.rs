//! The files of a model's own tokenizer, as they lie in the directory of a model.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The files that a `huggingface` tokenizer is built from.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`, if there is one.
    pub config: Option<Vec<u8>>,
    /// `chat_template.jinja`, if there is one.
    pub template: Option<String>,
}

/// The reason for which the files can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A file can't be read.
    #[error("can't read {path}: {error}")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Why it can't be read.
        error: std::io::Error,
    },
    /// The directory has no `tokenizer.json`.
    #[error("`tokenizer.directory`: there is no tokenizer.json in {0}")]
    Missing(PathBuf),
    /// The chat template is not UTF-8.
    #[error("chat_template.jinja is not UTF-8")]
    Template,
}

impl ModelFiles {
    /// Reads the files in `directory`.
    ///
    /// # Errors
    /// [`FilesError`] if the directory is not that of a model.
    pub fn read(directory: &Path) -> Result<Self, FilesError> {
        let read = |name: &str| {
            let path = directory.join(name);
            match std::fs::read(&path) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(FilesError::Unreadable { path, error }),
            }
        };
        let tokenizer = read("tokenizer.json")?.ok_or_else(|| FilesError::Missing(directory.to_owned()))?;
        let (config, template) = (read("tokenizer_config.json")?, read("chat_template.jinja")?);
        let template = template.map(|bytes| String::from_utf8(bytes).map_err(|_| FilesError::Template)).transpose()?;
        Ok(Self { tokenizer, config, template })
    }
}
