//! The encodings of OpenAI's models, by tiktoken-rs, which contains their tables.
//!
//! A table is loaded when it is first used and takes tens of MiB: [`Tables`] shares one of each. Ordinary text is
//! encoded by [`words`]. Hostile text can break tiktoken-rs: a megabyte without a space overflows the backtracking
//! stack of its regex engine and panics, and its cost grows faster than the text. Text is therefore passed in [`runs`],
//! long ones are cut and limited, and a panic becomes an error.
//!
//! gpt-oss is the only model family here that a pool's engine can serve. For other models, a tiktoken encoding
//! estimates the number of tokens within some percent; its ids are not the engine's.

mod runs;
mod words;

use crate::memo::Cuts;
use crate::{EncodeError, Encoder};
use runs::{DEFAULT_MAX_LONG_RUN_BYTES, DEFAULT_MAX_TEXT_BYTES};
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use tiktoken_rs::CoreBPE;
use tiktoken_rs::tokenizer::{Tokenizer, get_tokenizer};
use words::Words;

/// The encoding of models that tiktoken does not know: the newest, whose vocabulary has about the
/// size of today's open models.
pub const DEFAULT_ENCODING: Encoding = Encoding::O200kBase;

/// A vocabulary with its merge rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// For GPT-4o, GPT-5 and the o series.
    O200kBase,
    /// For gpt-oss: `o200k_base` with the special tokens of the harmony format.
    O200kHarmony,
    /// For GPT-3.5 and GPT-4.
    Cl100kBase,
    /// For Codex and the later GPT-3.
    P50kBase,
    /// For the edit models.
    P50kEdit,
    /// For GPT-2 and the first GPT-3.
    R50kBase,
}

impl Encoding {
    /// All encodings, in the order of [`Tables`].
    pub const ALL: [Encoding; 6] = [
        Encoding::O200kBase,
        Encoding::O200kHarmony,
        Encoding::Cl100kBase,
        Encoding::P50kBase,
        Encoding::P50kEdit,
        Encoding::R50kBase,
    ];

    /// Returns tiktoken's name of the encoding.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Encoding::O200kBase => "o200k_base",
            Encoding::O200kHarmony => "o200k_harmony",
            Encoding::Cl100kBase => "cl100k_base",
            Encoding::P50kBase => "p50k_base",
            Encoding::P50kEdit => "p50k_edit",
            Encoding::R50kBase => "r50k_base",
        }
    }

    /// Returns the encoding of this name; `gpt2` is the first name of `r50k_base`.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        match name {
            "gpt2" => Some(Encoding::R50kBase),
            _ => Self::ALL.into_iter().find(|e| e.name() == name),
        }
    }

    /// Returns the encoding of a model, with or without its owner (`openai/gpt-oss-20b`);
    /// [`DEFAULT_ENCODING`] for an unknown one.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let name = model.rsplit_once('/').map_or(model, |(_, name)| name);
        match get_tokenizer(name) {
            Some(Tokenizer::O200kBase) => Encoding::O200kBase,
            Some(Tokenizer::O200kHarmony) => Encoding::O200kHarmony,
            Some(Tokenizer::Cl100kBase) => Encoding::Cl100kBase,
            Some(Tokenizer::P50kBase) => Encoding::P50kBase,
            Some(Tokenizer::P50kEdit) => Encoding::P50kEdit,
            Some(Tokenizer::R50kBase | Tokenizer::Gpt2) => Encoding::R50kBase,
            None => DEFAULT_ENCODING,
        }
    }

    fn load(self) -> Result<LoadedEncoding, String> {
        let bpe = match self {
            Encoding::O200kBase => tiktoken_rs::o200k_base(),
            Encoding::O200kHarmony => tiktoken_rs::o200k_harmony(),
            Encoding::Cl100kBase => tiktoken_rs::cl100k_base(),
            Encoding::P50kBase => tiktoken_rs::p50k_base(),
            Encoding::P50kEdit => tiktoken_rs::p50k_edit(),
            Encoding::R50kBase => tiktoken_rs::r50k_base(),
        };
        let bpe = bpe.map_err(|e| format!("{}: {e}", self.name()))?;
        let marks = {
            let all = bpe.special_tokens();
            let id = |mark: &str| bpe.encode(mark, &all).ok()?.0.first().copied();
            all.iter().filter_map(|mark| Some(((*mark).to_owned(), id(mark)?))).collect::<HashMap<_, _>>()
        };
        let cuts = Cuts::new(marks.keys().cloned(), true);
        let words = Words::new(self, &bpe, marks.values().copied()).map_err(|e| format!("{}: {e}", self.name()))?;
        Ok(LoadedEncoding { bpe, words, marks, cuts })
    }
}

struct LoadedEncoding {
    bpe: CoreBPE,
    words: Words,
    marks: HashMap<String, u32>,
    cuts: Cuts,
}

type Shared = Arc<OnceLock<Result<LoadedEncoding, String>>>;

/// One table of each encoding, each loaded when it is first used.
#[derive(Clone, Default)]
pub struct Tables([Shared; Encoding::ALL.len()]);

impl fmt::Debug for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loaded = Encoding::ALL.iter().zip(&self.0).filter(|(_, t)| t.get().is_some()).map(|(e, _)| e);
        f.debug_list().entries(loaded).finish()
    }
}

impl Tables {
    /// Returns the encoder of `encoding` with default limits. Loads nothing yet.
    #[must_use]
    pub fn encoder(&self, encoding: Encoding) -> Tiktoken {
        let table = Encoding::ALL.iter().zip(&self.0).find(|(e, _)| **e == encoding).map(|(_, table)| table.clone());
        Tiktoken {
            encoding,
            table: table.unwrap_or_default(),
            max_text_bytes: DEFAULT_MAX_TEXT_BYTES,
            max_long_run_bytes: DEFAULT_MAX_LONG_RUN_BYTES,
        }
    }
}

/// Encodes as OpenAI's models do; special tokens of the encoding in the text become one id each.
#[derive(Clone)]
pub struct Tiktoken {
    encoding: Encoding,
    table: Shared,
    max_text_bytes: usize,
    max_long_run_bytes: usize,
}

impl fmt::Debug for Tiktoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiktoken").field("encoding", &self.encoding).finish_non_exhaustive()
    }
}

impl Tiktoken {
    /// Returns the encoder with other limits of one text: bytes in total, and bytes in
    /// runs of more than `runs::LONG_RUN_BYTES`.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_budget(self, max_text_bytes: usize, max_long_run_bytes: usize) -> Self {
        Self { max_text_bytes, max_long_run_bytes, ..self }
    }

    /// Returns the encoding.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Returns where texts may be cut without changing their tokens. Loads the table if necessary.
    ///
    /// # Errors
    /// [`EncodeError`] when the table cannot be loaded.
    pub fn cuts(&self) -> Result<Cuts, EncodeError> {
        self.table().map(|table| table.cuts.clone())
    }

    fn table(&self) -> Result<&LoadedEncoding, EncodeError> {
        self.table.get_or_init(|| self.encoding.load()).as_ref().map_err(|e| EncodeError::Failed(e.clone()))
    }

    /// Rejects a text over its limits before encoding begins.
    fn within_budget(&self, text: &str) -> Result<(), EncodeError> {
        let mut windows = runs::Windows::new(text);
        let spent = |long: usize, window: runs::Window<'_>| {
            Some(long + window.long_bytes).filter(|long| *long <= self.max_long_run_bytes)
        };
        if text.len() > self.max_text_bytes || windows.try_fold(0, spent).is_none() {
            return Err(EncodeError::Budget { done: 0, bytes: text.len() });
        }
        Ok(())
    }
}

fn encode_all(table: &LoadedEncoding, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
    for part in table.cuts.at_marks(text) {
        out.extend(part.mark.and_then(|mark| table.marks.get(mark).copied()));
        for window in runs::Windows::new(part.text) {
            let done = catch_unwind(AssertUnwindSafe(|| table.words.encode(&table.bpe, window.text, out)));
            done.map_err(|panic| EncodeError::Failed(panic_message(panic.as_ref())))?;
        }
    }
    Ok(())
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic").to_owned()
}

impl Encoder for Tiktoken {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.within_budget(text)?;
        let table = self.table()?;
        let before = out.len();
        let done = encode_all(table, text, out);
        if done.is_err() {
            out.truncate(before);
        }
        done
    }
}

#[cfg(test)]
mod tests;
