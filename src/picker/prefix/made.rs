//! Computes all keys of a prompt in the background: renders the prompt with the model's template, if there is one, and
//! encodes it to its end.
//!
//! The outcome contains only keys, half a byte for each token. It contains token ids only if they are requested, and
//! never the rendered text.

use super::Tokenizer;
use super::{PoolPrefix, PromptRef, Reading, Source};
use crate::warming::Warming;
use attache_prompt::blocks::TokenBlocks;
use attache_prompt::blocks::{MadeKeys, TokenKeys};
use attache_prompt::huggingface::{HuggingFace, RenderError, Rendered};
use attache_prompt::work::Stopped;
use attache_prompt::work::WorkLimit;
use attache_protocol as protocol;
use attache_types::limits::Limits;
use std::borrow::Cow;
use std::sync::Arc;

/// Outcome of background work on one prompt.
#[derive(Debug)]
pub enum PromptOutcome {
    /// The keys of the prompt.
    Keys(Arc<MadePrompt>),
    /// The prompt contains media, which the template does not render as text.
    NotText,
    /// The template or the tokenizer failed, for this reason.
    Refused(Box<str>),
    /// The work needs more memory than the size of the body allows.
    TooLarge,
}

/// The keys of a prompt.
#[derive(Debug)]
pub struct MadePrompt {
    pub(super) keys: MadeKeys,
    /// All token ids of the prompt, if they were requested.
    pub(super) ids: Option<Vec<u32>>,
    pub(super) has_engine_tokens: bool,
    pub(super) has_own_keys: bool,
}

/// What the background work must compute.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    root: u64,
    ids: bool,
    has_engine_tokens: bool,
    has_own_keys: bool,
}

impl Wanted {
    /// Computes all keys; `None` if the work is stopped before their end.
    fn make(self, keys: TokenKeys<'_>, work: &WorkLimit) -> Option<PromptOutcome> {
        let mut ids = self.ids.then(Vec::new);
        let keys = keys.make_all(|| work.check().is_ok(), ids.as_mut())?;
        let Self { has_engine_tokens, has_own_keys, .. } = self;
        Some(PromptOutcome::Keys(Arc::new(MadePrompt { keys, ids, has_engine_tokens, has_own_keys })))
    }
}

impl PoolPrefix {
    /// Background work that encodes the whole prompt, and remembers the tokens of its segments. Blocks that no
    /// endpoint has cached now will be cached after this request, and the next turn will look them up.
    pub fn warming(self: &Arc<Self>, prompt_ref: PromptRef<'_>, reading: &Reading<'_>, limits: &Limits) -> Warming {
        let wanted = Wanted {
            root: reading.root,
            ids: prompt_ref.keeps_ids,
            has_engine_tokens: reading.has_engine_tokens(),
            has_own_keys: reading.has_own_keys(),
        };
        if let Source::Rendered(..) = reading.source {
            return self.rendering(prompt_ref, reading.root);
        }
        let (this, limits) = (self.clone(), limits.clone());
        let (api, body) = (prompt_ref.api, prompt_ref.body.to_vec());
        let content_type = prompt_ref.content_type.map(str::to_owned);
        let encodes = matches!(reading.source, Source::Fields(..));
        Warming::cpu(prompt_ref.body.len(), move |work| {
            if !encodes {
                return None;
            }
            let request = protocol::parse_unnamed(api, content_type.as_deref(), &body, &limits).ok()?;
            wanted.make(this.tokenizer.text_blocks()?.keys(&request.prompt, wanted.root), work)
        })
    }

    /// Background work that renders the prompt with the model's template and encodes it.
    pub(super) fn rendering(self: &Arc<Self>, prompt_ref: PromptRef<'_>, root: u64) -> Warming {
        let wanted = Wanted { root, ids: prompt_ref.keeps_ids, has_engine_tokens: true, has_own_keys: false };
        let (this, api, body) = (self.clone(), prompt_ref.api, prompt_ref.body.to_vec());
        Warming::cpu(prompt_ref.body.len(), move |work| {
            let Tokenizer::HuggingFace { model, blocks, .. } = &this.tokenizer else { return None };
            let time = this.clock.wall(this.clock.now());
            let rendered = (|| {
                let bytes = body.len();
                work.charge(bytes)?;
                let read = model.read(api, &body, work)?;
                // `read` holds copies of the messages.
                drop(body);
                work.release(bytes);
                model.finish(read, bytes, time)
            })();
            match rendered {
                Ok(rendered) => wanted.make(keys(model, blocks, &rendered, root), work),
                Err(RenderError::NotText(_)) => Some(PromptOutcome::NotText),
                Err(RenderError::Stopped(Stopped::Cancelled)) => None,
                Err(RenderError::Stopped(Stopped::TooLarge)) => Some(PromptOutcome::TooLarge),
                Err(error) => Some(PromptOutcome::Refused(error.to_string().into())),
            }
        })
    }
}

fn keys<'r>(model: &'r HuggingFace, blocks: &'r TokenBlocks, rendered: &'r Rendered, root: u64) -> TokenKeys<'r> {
    match rendered {
        Rendered::Tokens(ids) => blocks.ids(Cow::Borrowed(ids), root),
        Rendered::Text { text, add_special_tokens: true } => blocks.text_behind(model.prefix(), text, root),
        Rendered::Text { text, add_special_tokens: false } => blocks.text(text, root),
    }
}
