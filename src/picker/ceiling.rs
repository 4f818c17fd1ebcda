//! The most tokens that a request can cost: an upper bound of what an honest model server reports for it. A server
//! that reports more is charged at the bound, so that one wrong number cannot use up a limit that tenants share.
//! Called by [`super::decide`] and [`super::response`].

use super::decide::{RequestView, Seen};
use attache_protocol::{Api, Request, Usage};

/// 2^24 = 16,777,216 tokens of one prompt or one answer: longer than the context of any model. Holds where the request
/// has no bound of its own.
const MAX_CONTEXT_TOKENS: u64 = 1 << 24;
/// 8 tokens for each byte of a body: a token stands for a byte at least, and tokenizers that normalize text turn one
/// character into 18 at most, which takes three bytes.
const TOKENS_PER_BYTE: u64 = 8;
/// 16,384 tokens that a chat template adds to each prompt: the system prompt of the model, and how tools are described
/// to it.
const TEMPLATE_TOKENS: u64 = 1 << 14;
/// 16 tokens that a server may generate beyond the limit of an answer: those of the last step of speculative decoding.
const STEP_TOKENS: u64 = 16;

/// The most tokens that a request can cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ceiling {
    prompt: u64,
    answer: u64,
}

impl Ceiling {
    /// The bound for the request that `q` is about, as far as it could be read.
    pub(super) fn of(q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        let read = request.filter(|_| matches!(q.body, Seen::Whole(_)));
        let Some(request) = read else { return Self { prompt: MAX_CONTEXT_TOKENS, answer: MAX_CONTEXT_TOKENS } };
        let prompts = u64::from(request.prompt.count.max(1));
        let answers = u64::from(request.answers());
        let context = MAX_CONTEXT_TOKENS;
        // A response that goes on from another, or calls tools of the server, costs what the request does not show.
        let continues = q.api == Api::Responses || request.previous_response_id.is_some();
        let is_shown = !continues && request.prompt.media_tokens == 0 && !request.opaque_prompt;
        let shown = || q.body.len().saturating_mul(TOKENS_PER_BYTE).saturating_add(prompts * TEMPLATE_TOKENS);
        // Servers take a limit of 0 for none, and how many answers a prompt that can't be read asks for is not known.
        let asked = request.max_tokens.filter(|tokens| *tokens > 0 && !continues && !request.opaque_prompt);
        Self {
            prompt: answers.saturating_mul(if is_shown { shown().min(context) } else { context }),
            answer: answers
                .saturating_mul(asked.map_or(context, |tokens| u64::from(tokens) + STEP_TOKENS).min(context)),
        }
    }

    /// `usage` with no count above the bound, and whether any was.
    pub(super) fn cap(self, usage: Usage) -> (Usage, bool) {
        let capped = Usage {
            prompt_tokens: usage.prompt_tokens.map(|tokens| tokens.min(self.prompt)),
            completion_tokens: usage.completion_tokens.map(|tokens| tokens.min(self.answer)),
            cached_tokens: usage.cached_tokens.map(|tokens| tokens.min(self.prompt)),
        };
        (capped, capped != usage)
    }
}
