//! The tokenizer `huggingface` in a build without the feature `full`: no model can be loaded.

use super::memo::Cuts;
use super::work::{Stopped, WorkLimit};
use super::{EncodeError, Encoder};
use attache_protocol::{Api, MediaKind};
use std::time::SystemTime;

/// No model can be loaded.
#[derive(Debug, thiserror::Error)]
#[error("this build has no tokenizer `huggingface` (feature `full`)")]
pub struct LoadError;

/// As in a build with models.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The prompt has media.
    #[error("the prompt holds media: {0:?}")]
    NotText(MediaKind),
    /// The request's work was stopped.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// There is no model.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// A request that can't exist.
#[derive(Debug)]
pub enum Unrendered {}

/// As in a build with models.
#[derive(Debug)]
pub enum Rendered {
    /// Text that must be encoded.
    Text {
        /// The text.
        text: String,
        /// Whether special tokens surround it.
        add_special_tokens: bool,
    },
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A model that can't exist.
#[derive(Debug)]
pub enum HuggingFace {}

impl HuggingFace {
    /// Loads no model.
    ///
    /// # Errors
    /// Always.
    pub fn from_parts(_: &[u8], _: Option<&[u8]>, _: Option<&str>) -> Result<Self, LoadError> {
        Err(LoadError)
    }

    /// As in a build with models.
    ///
    /// # Errors
    /// Never, since there is no model.
    pub fn render(&self, _: Api, _: &[u8], _: SystemTime) -> Result<Rendered, RenderError> {
        match *self {}
    }

    /// As in a build with models.
    ///
    /// # Errors
    /// Never, since there is no model.
    pub fn read(&self, _: Api, _: &[u8], _: &WorkLimit) -> Result<Unrendered, RenderError> {
        match *self {}
    }

    /// As in a build with models.
    ///
    /// # Errors
    /// Never, since there is no model.
    pub fn finish(&self, _: Unrendered, _: usize, _: SystemTime) -> Result<Rendered, RenderError> {
        match *self {}
    }

    /// As in a build with models.
    #[must_use]
    pub fn cuts(&self) -> Cuts {
        match *self {}
    }

    /// As in a build with models.
    #[must_use]
    pub fn prefix(&self) -> &[u32] {
        match *self {}
    }
}

impl Encoder for HuggingFace {
    fn encode(&self, _: &str, _: &mut Vec<u32>) -> Result<(), EncodeError> {
        match *self {}
    }
}
