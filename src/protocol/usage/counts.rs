//! Token counts of a `usage` member in the spellings of all APIs.

use super::Usage;
use serde::Deserialize;

/// The counts in the spellings of all APIs.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Counts {
    // OpenAI's completions and chat, and vLLM's.
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    // A misspelling that some servers and gateways use.
    prompt_token_details: Option<Details>,
    // OpenAI's Responses API, and Anthropic's.
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    // Only Anthropic: `input_tokens` includes neither of these.
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Counts {
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        // Serde would accept an array in place of an object.
        value.starts_with(b"{").then(|| serde_json::from_slice(value).ok()).flatten()
    }

    /// A stream may report its counts in parts (Anthropic's `message_start`, then `message_delta`) or
    /// repeatedly: the last value counts.
    pub(super) fn merge(&mut self, later: Counts) {
        fn take<T>(to: &mut Option<T>, from: Option<T>) {
            if from.is_some() {
                *to = from;
            }
        }
        take(&mut self.prompt_tokens, later.prompt_tokens);
        take(&mut self.completion_tokens, later.completion_tokens);
        take(&mut self.prompt_tokens_details, later.prompt_tokens_details);
        take(&mut self.prompt_token_details, later.prompt_token_details);
        take(&mut self.input_tokens, later.input_tokens);
        take(&mut self.output_tokens, later.output_tokens);
        take(&mut self.input_tokens_details, later.input_tokens_details);
        take(&mut self.cache_read_input_tokens, later.cache_read_input_tokens);
        take(&mut self.cache_creation_input_tokens, later.cache_creation_input_tokens);
    }

    pub(super) fn total(&self) -> Option<Usage> {
        let uncounted = self
            .cache_read_input_tokens
            .unwrap_or_default()
            .saturating_add(self.cache_creation_input_tokens.unwrap_or_default());
        let details = self.prompt_tokens_details.or(self.prompt_token_details).or(self.input_tokens_details);
        let usage = Usage {
            prompt_tokens: self.prompt_tokens.or(self.input_tokens.map(|n| n.saturating_add(uncounted))),
            completion_tokens: self.completion_tokens.or(self.output_tokens),
            cached_tokens: details.and_then(|d| d.cached_tokens).or(self.cache_read_input_tokens),
        };
        (usage != Usage::default()).then_some(usage)
    }
}
