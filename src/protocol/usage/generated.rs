//! Token counts of SGLang's `/generate`: each answer has its own, in `meta_info`, and a stream repeats them as they grow.

use super::Usage;

/// 4,096 answers of one request, 96 KiB: more than any request may ask for by default. The counts of a request with more are not known.
const MAX_ANSWERS: usize = 4_096;

/// Counts of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnswerCounts {
    pub(super) prompt: Option<u64>,
    pub(super) completion: Option<u64>,
    pub(super) cached: Option<u64>,
}

/// The counts of all answers of a request.
#[derive(Debug, Default)]
pub(super) struct Generated {
    /// Answers to each prompt, at least 1: they follow each other, and each has the counts of the prompt.
    per_prompt: usize,
    answers: Vec<AnswerCounts>,
    too_many: bool,
    /// What the current object says: which answer it is about, and its counts.
    pub(super) index: Option<u64>,
    pub(super) current: AnswerCounts,
}

impl Generated {
    /// Counts of a request that asks for so many answers to each of its prompts.
    pub(super) fn new(per_prompt: u32) -> Self {
        Self { per_prompt: usize::try_from(per_prompt).unwrap_or(usize::MAX).max(1), ..Self::default() }
    }

    /// The current object has ended, the one of this `number` in its document. Its counts take the place of those that its answer had before.
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
            *answer = self.current;
        }
    }

    /// The counts of the request; `None` when no answer has any, or there are too many answers.
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

/// The sum of the counts that are known; `None` when none is.
fn sum(counts: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    counts.flatten().reduce(u64::saturating_add)
}
