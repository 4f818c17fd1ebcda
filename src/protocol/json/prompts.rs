//! Prompts that are not conversations: text, token ids, lists of them, pairs.

use super::messages::MessageNode;
use super::walk::{Elements, ValueShape, ValueType, Walk, Walked};
use crate::prompt::Builder;
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;

/// Largest token id; servers store ids as signed 32-bit integers.
const MAX_TOKEN_ID: u64 = i32::MAX as u64;

/// `"text"`, `["text", …]`, `[ids…]` or `[[ids…], …]`.
#[derive(Debug)]
pub(super) struct Prompts<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Prompts<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        match got {
            // Null has the same meaning as absent.
            ValueType::Null => Ok(()),
            _ => {
                Err(invalid_prompt(self.field, "a string, an array of strings or arrays of token ids", got.describe()))
            }
        }
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.text(text);
        self.out.end_of_prompt();
        Ok(())
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        let mut ids = Vec::new();
        let mut prompts = 0u32;
        while let Some(element) = walk.element(&mut rest, Element { out: &mut *out, field })? {
            match element {
                Some(id) if prompts == 0 => ids.push(id),
                None if ids.is_empty() => {
                    prompts = prompts.saturating_add(1);
                    check_prompts(walk.limits, field, prompts)?;
                }
                _ => return Err(invalid_tokens(field, "token ids mixed with other values").into()),
            }
        }
        if !ids.is_empty() {
            out.tokens(ids);
            out.end_of_prompt();
        } else if prompts == 0 {
            return Err(invalid_prompt(field, "a prompt or a list of at least one", "an empty array").into());
        }
        Ok(())
    }
}

/// One element of a list: an id, which is returned, or a whole prompt, which is stored.
struct Element<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
}

impl<'de> ValueShape<'de> for Element<'_, 'de> {
    type Out = Option<u32>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        match got {
            ValueType::Null | ValueType::Bool(_) | ValueType::String | ValueType::Array | ValueType::Object => {
                Err(invalid_prompt(self.field, "a list of strings or of token ids", got.describe()))
            }
            number => TokenId { field: self.field }.other(number).map(Some),
        }
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        self.out.text(text);
        self.out.end_of_prompt();
        Ok(None)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Self::Out> {
        let mut ids = Vec::new();
        while let Some(id) = walk.element(&mut rest, TokenId { field: self.field })? {
            ids.push(id);
        }
        self.out.tokens(ids);
        self.out.end_of_prompt();
        Ok(None)
    }
}

/// One token id of a list.
#[derive(Clone, Copy, Debug)]
struct TokenId {
    field: &'static str,
}

impl ValueShape<'_> for TokenId {
    type Out = u32;

    fn other(self, got: ValueType) -> Result<u32, RequestError> {
        match got {
            ValueType::Unsigned(id @ 0..=MAX_TOKEN_ID) => Ok(id as u32),
            ValueType::Unsigned(_) => Err(invalid_tokens(self.field, "a larger number")),
            _ => Err(invalid_tokens(self.field, got.describe())),
        }
    }
}

/// The texts on one side of a rerank or score request: a string, an object with content, or a list
/// of these. Returns their number.
#[derive(Debug)]
pub(super) struct Texts<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Texts<'_, 'de> {
    type Out = u32;

    fn other(self, got: ValueType) -> Result<u32, RequestError> {
        Err(invalid_prompt(self.field, "a string, an object or an array of these", got.describe()))
    }

    fn string(self, text: Text<'de>) -> Result<u32, RequestError> {
        self.out.text(text);
        Ok(1)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<u32> {
        MessageNode::part(self.out, self.field).object(walk)?;
        Ok(1)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<u32> {
        let Self { out, field } = self;
        let mut count = 0u32;
        while walk.element(&mut rest, OneOfTexts { out: &mut *out, field })?.is_some() {
            out.keep(false);
            count = count.saturating_add(1);
            check_prompts(walk.limits, field, count)?;
        }
        out.keep(true);
        if count == 0 {
            return Err(invalid_prompt(field, "a list of at least one text", "an empty array").into());
        }
        Ok(count)
    }
}

/// One text of a list of texts.
struct OneOfTexts<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
}

impl<'de> ValueShape<'de> for OneOfTexts<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        Err(invalid_prompt(self.field, "a list of strings or objects", got.describe()))
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.text(text);
        Ok(())
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        MessageNode::part(self.out, self.field).object(walk)
    }
}

/// A list of token ids, as `/detokenize` has it.
#[derive(Debug)]
pub(super) struct TokenList<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for TokenList<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        Err(invalid_prompt(self.field, "an array of token ids", got.describe()))
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let mut ids = Vec::new();
        while let Some(id) = walk.element(&mut rest, TokenId { field: self.field })? {
            ids.push(id);
        }
        self.out.tokens(ids);
        self.out.end_of_prompt();
        Ok(())
    }
}

/// Rejects a batch with more prompts than allowed.
pub(super) fn check_prompts(limits: &Limits, field: &'static str, count: u32) -> Result<(), RequestError> {
    let allowed = limits.max_prompts;
    if count <= allowed {
        return Ok(());
    }
    let message = format!("`{field}` holds more than the {allowed} prompts allowed");
    Err(RequestError::new(Reason::TooManyPrompts, message).param(field))
}

/// Returns the error for an invalid prompt.
pub(super) fn invalid_prompt(field: &'static str, allowed: &str, got: &str) -> RequestError {
    RequestError::new(Reason::InvalidPrompt, format!("`{field}` must be {allowed}, got {got}")).param(field)
}

fn invalid_tokens(field: &'static str, got: &str) -> RequestError {
    let message = format!("`{field}` must hold token ids from 0 to {MAX_TOKEN_ID} and nothing else, got {got}");
    RequestError::new(Reason::InvalidPromptTokens, message).param(field)
}
