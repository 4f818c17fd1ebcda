//! The most tokens that a request can cost: an upper bound of what an honest model server reports for it. A server
//! that reports more is charged at the bound, so that one wrong number cannot use up a limit that tenants share.

use super::decide::{RequestView, Seen};
use attache_protocol::{Api, Request, Usage};

/// 2^24 = 16,777,216: bound for the tokens of one prompt or one response, if the request implies no other. It exceeds
/// the context of any model.
const MAX_CONTEXT_TOKENS: u64 = 1 << 24;
/// 8: most tokens for each byte of a body. A token stands for at least one byte. Tokenizers that normalize text turn
/// one character of three bytes into at most 18.
const TOKENS_PER_BYTE: u64 = 8;
/// 16,384: most tokens that a chat template adds to each prompt, for the model's system prompt and tool instructions.
const TEMPLATE_TOKENS: u64 = 1 << 14;
/// 16: most tokens that a model server generates beyond the limit of a response, in the last step of speculative
/// decoding.
const STEP_TOKENS: u64 = 16;

/// The most tokens that a request can cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ceiling {
    prompt: u64,
    answer: u64,
}

impl Ceiling {
    /// The bound for the request of `q`, by its parsed body.
    pub(super) fn of(q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        let read = request.filter(|_| matches!(q.body, Seen::Whole(_)));
        let Some(request) = read else { return Self { prompt: MAX_CONTEXT_TOKENS, answer: MAX_CONTEXT_TOKENS } };
        let prompts = u64::from(request.prompt.count.max(1));
        let answers = u64::from(request.answers());
        let context = MAX_CONTEXT_TOKENS;
        // A request that continues a stored response, or uses tools of the model server, has tokens that its body
        // does not show.
        let continues = q.api == Api::Responses || request.previous_response_id.is_some();
        let is_shown = !continues && request.prompt.media_tokens == 0 && !request.opaque_prompt;
        let shown = || q.body.len().saturating_mul(TOKENS_PER_BYTE).saturating_add(prompts * TEMPLATE_TOKENS);
        // Model servers treat a limit of 0 as no limit. An opaque prompt may ask for any number of responses.
        let asked = request.max_tokens.filter(|tokens| *tokens > 0 && !continues && !request.opaque_prompt);
        Self {
            prompt: answers.saturating_mul(if is_shown { shown().min(context) } else { context }),
            answer: answers
                .saturating_mul(asked.map_or(context, |tokens| u64::from(tokens) + STEP_TOKENS).min(context)),
        }
    }

    /// Whether this bound is at least that of another request.
    pub(super) fn covers(self, other: Self) -> bool {
        self.prompt >= other.prompt && self.answer >= other.answer
    }

    /// Caps the counts of `usage` at the bound; true if that changed any.
    pub(super) fn cap(self, usage: Usage) -> (Usage, bool) {
        let capped = Usage {
            prompt_tokens: usage.prompt_tokens.map(|tokens| tokens.min(self.prompt)),
            completion_tokens: usage.completion_tokens.map(|tokens| tokens.min(self.answer)),
            cached_tokens: usage.cached_tokens.map(|tokens| tokens.min(self.prompt)),
        };
        (capped, capped != usage)
    }
}
