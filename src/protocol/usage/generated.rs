//! Token counts of SGLang's `/generate`: each response has its own in `meta_info`, and a stream
//! repeats them as they grow.

use super::Usage;
use super::count::{Count, UnreadCount};

/// Most responses of one request whose counts are stored, 4,096 in 192 KiB: more than any request may ask for by
/// default. With more responses, the counts are unknown.
const MAX_ANSWERS: usize = 4_096;

/// Counts of one response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnswerCounts {
    pub(super) prompt: Count,
    pub(super) completion: Count,
    pub(super) cached: Count,
}

impl AnswerCounts {
    /// Why one of the counts was not read; `None` if all were.
    pub(super) fn unread(&self) -> Option<UnreadCount> {
        [self.prompt, self.completion, self.cached].into_iter().find_map(Count::unread)
    }

    fn merge(&mut self, later: &Self) {
        self.prompt.merge(later.prompt);
        self.completion.merge(later.completion);
        self.cached.merge(later.cached);
    }
}

/// Counts of all responses of a request.
#[derive(Debug, Default)]
pub(super) struct Generated {
    /// Number of responses to each prompt, at least 1. They follow each other, and each has the counts of the prompt.
    per_prompt: usize,
    answers: Vec<AnswerCounts>,
    too_many: bool,
    /// The number of the response that the current object belongs to, and its counts.
    pub(super) index: Option<u64>,
    pub(super) current: AnswerCounts,
}

impl Generated {
    /// Creates counts for a request with this many responses to each of its prompts.
    pub(super) fn new(per_prompt: u32) -> Self {
        Self { per_prompt: usize::try_from(per_prompt).unwrap_or(usize::MAX).max(1), ..Self::default() }
    }

    /// Ends the current object, which has this `number` in its document. Its counts replace earlier
    /// ones of the same response.
    pub(super) fn end(&mut self, number: usize) {
        let index = self.index.map_or(number, |index| usize::try_from(index).unwrap_or(usize::MAX));
        if self.current == AnswerCounts::default() {
            return;
        }
        if index >= MAX_ANSWERS {
            self.too_many = true;
            return;
        }
        if index >= self.answers.len() {
            self.answers.resize(index + 1, AnswerCounts::default());
        }
        if let Some(answer) = self.answers.get_mut(index) {
            answer.merge(&self.current);
        }
    }

    /// Returns the counts of the request; `None` when no response has any, or there are too many responses.
    pub(super) fn total(&self) -> Option<Usage> {
        if self.answers.is_empty() || self.too_many {
            return None;
        }
        let prompts = || self.answers.iter().step_by(self.per_prompt);
        Some(Usage {
            prompt_tokens: sum(prompts().map(|answer| answer.prompt)),
            completion_tokens: sum(self.answers.iter().map(|answer| answer.completion)),
            cached_tokens: sum(prompts().map(|answer| answer.cached)),
        })
    }
}

/// Returns the sum of the known counts; `None` when none is known.
fn sum(counts: impl Iterator<Item = Count>) -> Option<u64> {
    counts.filter_map(Count::get).reduce(u64::saturating_add)
}
