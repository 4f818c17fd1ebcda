//! Prompts that can't be read: embeddings in place of text, and media beside it. They are counted, so that a request
//! with many of them is charged for all.

use super::prompts::check_prompts;
use super::walk::{Elements, ValueShape, ValueType, Walk, Walked};
use crate::prompt::{Builder, MediaKind};
use crate::text::Text;
use attache_types::error::RequestError;

/// vLLM's `prompt_embeds`: a tensor in base64, or a list of them, one for each prompt.
pub(super) struct PromptEmbeddings<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for PromptEmbeddings<'_, 'de> {
    type Out = ();

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.embedded_prompt(text.len());
        Ok(())
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        while walk.element(&mut rest, PromptEmbeddings { out: &mut *out, field })?.is_some() {
            check_prompts(walk.limits, field, out.prompt.count)?;
        }
        Ok(())
    }
}

/// SGLang's `input_embeds`: an array of numbers for each token, in an array for each prompt. Returns whether it is one
/// of these arrays, and counts them.
pub(super) struct EmbeddedTokens<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

/// What an array of embeddings holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Number,
    /// The numbers of one token.
    Token,
    /// The tokens of one prompt, or prompts.
    Prompts,
}

impl<'de> ValueShape<'de> for EmbeddedTokens<'_, 'de> {
    type Out = Held;
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, _got: ValueType) -> Result<Held, RequestError> {
        Ok(Held::Number)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Held> {
        let Self { out, field } = self;
        let (mut tokens, mut prompts) = (0, false);
        while let Some(held) = walk.element(&mut rest, EmbeddedTokens { out: &mut *out, field })? {
            tokens += u64::from(held == Held::Token);
            prompts |= held == Held::Prompts;
        }
        if tokens > 0 {
            out.opaque(tokens);
            out.prompt.count = out.prompt.count.saturating_add(1);
            check_prompts(walk.limits, field, out.prompt.count)?;
        }
        Ok(if tokens > 0 || prompts { Held::Prompts } else { Held::Token })
    }
}

/// SGLang's media: a reference, an object, or lists of them.
pub(super) struct MediaList<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) kind: MediaKind,
}

impl<'de> ValueShape<'de> for MediaList<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        let counts = matches!(got, ValueType::String | ValueType::Object);
        self.out.opaque(if counts { self.kind.estimated_tokens() } else { 0 });
        Ok(())
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, kind } = self;
        while walk.element(&mut rest, MediaList { out: &mut *out, kind })?.is_some() {}
        Ok(())
    }
}
