//! Prompts that are not conversations: text, token ids, lists of them, pairs.

use super::messages::MessageNode;
use super::walk::{Elements, Opaque, ValueShape, ValueType, Walk, Walked};
use crate::prompt::Builder;
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;

/// Largest token id; servers store ids as signed 32-bit integers.
const MAX_TOKEN_ID: u32 = i32::MAX as u32;

/// `"text"`, `["text", …]`, `[ids…]` or `[[ids…], …]`. With `takes_objects` also every shape that only some servers know
/// (objects with text and images, typed parts, pairs): these are counted, and the prompt is opaque.
#[derive(Debug)]
pub(super) struct Prompts<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
    pub(super) takes_objects: bool,
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

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        if !self.takes_objects {
            return Ok(self.other(ValueType::Object)?);
        }
        object(self.out, self.field, walk)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field, takes_objects } = self;
        let mut ids = out.token_ids();
        let mut prompts = 0u32;
        while let Some(element) = walk.element(&mut rest, Element { out: &mut *out, field, takes_objects })? {
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

/// Reads an object with text and media as one opaque prompt.
fn object<'de>(out: &mut Builder<'de>, field: &'static str, walk: &mut Walk<'_, 'de>) -> Walked<()> {
    out.is_opaque = true;
    MessageNode::part(out, field).object(walk)?;
    out.end_of_prompt();
    Ok(())
}

/// One element of a list: an id, which is returned, or a whole prompt, which is stored.
struct Element<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
    takes_objects: bool,
}

impl<'de> ValueShape<'de> for Element<'_, 'de> {
    type Out = Option<u32>;
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        match got {
            ValueType::Null | ValueType::String | ValueType::Array | ValueType::Object => {
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

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        if !self.takes_objects {
            return Ok(self.other(ValueType::Object)?);
        }
        object(self.out, self.field, walk).map(|()| None)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Self::Out> {
        let Self { out, field, takes_objects } = self;
        let mut ids = out.token_ids();
        if takes_objects {
            while let Some(id) = walk.element(&mut rest, Part { out: &mut *out })? {
                id.into_iter().for_each(|id| ids.push(id));
            }
        } else {
            while let Some(id) = walk.element(&mut rest, TokenId { field })? {
                ids.push(id);
            }
        }
        if !out.is_opaque {
            out.tokens(ids);
        } else {
            out.count_tokens(&ids);
        }
        out.end_of_prompt();
        Ok(None)
    }
}

/// A part of one prompt or text: a token id, which is returned, or text, or an object with text and media.
struct Part<'p, 'de> {
    out: &'p mut Builder<'de>,
}

impl<'de> ValueShape<'de> for Part<'_, 'de> {
    type Out = Option<u32>;
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        let id = token_id(got);
        self.out.is_opaque |= id.is_none();
        Ok(id)
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        self.out.is_opaque = true;
        self.out.text(text);
        Ok(None)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        self.out.is_opaque = true;
        MessageNode::part(self.out, "content").object(walk)?;
        Ok(None)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, rest: Elements) -> Walked<Self::Out> {
        self.out.is_opaque = true;
        Opaque.array(walk, rest)?;
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
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, got: ValueType) -> Result<u32, RequestError> {
        let larger = |got: ValueType| matches!(got, ValueType::Unsigned(_)).then_some("a larger number");
        token_id(got).ok_or_else(|| invalid_tokens(self.field, larger(got).unwrap_or(got.describe())))
    }

    fn string(self, text: Text<'_>) -> Result<u32, RequestError> {
        let number = text.get().trim().parse().map(ValueType::Fraction);
        self.other(number.unwrap_or(ValueType::String))
    }
}

/// Returns the token id that a value stands for. Servers convert `7.0` and `true`, as for counts.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
fn token_id(got: ValueType) -> Option<u32> {
    match got {
        ValueType::Unsigned(id) => u32::try_from(id).ok().filter(|id| *id <= MAX_TOKEN_ID),
        ValueType::Fraction(id) if id.fract() == 0.0 && (0.0..=f64::from(MAX_TOKEN_ID)).contains(&id) => {
            Some(id as u32)
        }
        ValueType::Bool(id) => Some(id.into()),
        _ => None,
    }
}

/// The texts on one side of a rerank or score request: a string, token ids, an object with content, or a list of these.
/// Returns their number.
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
        let (mut count, mut ids) = (0u32, 0u64);
        while let Some(is_id) = walk.element(&mut rest, OneOfTexts { out: &mut *out, field })? {
            out.keep(false);
            if is_id {
                ids += 1;
                continue;
            }
            count = count.saturating_add(1);
            check_prompts(walk.limits, field, count)?;
        }
        out.keep(true);
        out.prompt.token_ids = out.prompt.token_ids.saturating_add(ids);
        // A flat list of token ids is one text.
        let count = count.max(u32::from(ids > 0));
        if count == 0 {
            return Err(invalid_prompt(field, "a list of at least one text", "an empty array").into());
        }
        Ok(count)
    }
}

/// One text of a list of texts, or one token id. Returns whether it is an id.
struct OneOfTexts<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
}

impl<'de> ValueShape<'de> for OneOfTexts<'_, 'de> {
    type Out = bool;
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, got: ValueType) -> Result<bool, RequestError> {
        let allowed = "a list of strings, objects or token ids";
        token_id(got).map(|_| true).ok_or_else(|| invalid_prompt(self.field, allowed, got.describe()))
    }

    fn string(self, text: Text<'de>) -> Result<bool, RequestError> {
        self.out.text(text);
        Ok(false)
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<bool> {
        MessageNode::part(self.out, self.field).object(walk)?;
        Ok(false)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<bool> {
        let mut ids = 0u64;
        while let Some(id) = walk.element(&mut rest, Part { out: &mut *self.out })? {
            ids += u64::from(id.is_some());
        }
        self.out.prompt.token_ids = self.out.prompt.token_ids.saturating_add(ids);
        Ok(false)
    }
}

/// A list of token ids, as `/detokenize` has it: there it may be a list of lists (`takes_lists`).
#[derive(Debug)]
pub(super) struct TokenList<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
    pub(super) takes_lists: bool,
}

impl<'de> ValueShape<'de> for TokenList<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        Err(invalid_prompt(self.field, "an array of token ids", got.describe()))
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field, takes_lists } = self;
        if takes_lists && walk.is_at(b'[') {
            return Prompts { out, field, takes_objects: false }.array(walk, rest);
        }
        let mut ids = out.token_ids();
        while let Some(id) = walk.element(&mut rest, TokenId { field })? {
            ids.push(id);
        }
        out.tokens(ids);
        out.end_of_prompt();
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
