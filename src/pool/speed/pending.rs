//! The prompts that an endpoint still has to compute, in the order in which it computes
//! them. Called by [`super`] alone.
//!
//! It is written once when a request is sent and once when its first token arrives. Every
//! decision reads it without blocking.

use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The work of one prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Prompt {
    /// Number of tokens to compute.
    pub(super) tokens: u32,
    /// Attention pairs of a token to compute and a token before it, in thousands.
    pub(super) kilopairs: u32,
}

/// The queue of prompts of one endpoint.
#[derive(Debug, Default)]
pub(super) struct Pending {
    count: AtomicU32,
    tokens: AtomicU64,
    kilopairs: AtomicU64,
    /// The prompt that is computed first, as one word.
    head: AtomicU64,
    /// Time at which its computation began.
    since: AtomicU64,
    order: Mutex<Order>,
}

#[derive(Debug, Default)]
struct Order {
    /// By their keys, which ascend in the order of the queue.
    prompts: BTreeMap<u64, Prompt>,
    next: u64,
}

/// Sums over the prompts in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Left {
    /// Number of requests.
    pub(super) count: u32,
    /// Tokens of all prompts.
    pub(super) tokens: u64,
    /// Attention pairs of all prompts, in thousands.
    pub(super) kilopairs: u64,
    /// The first prompt in the queue.
    pub(super) head: Prompt,
    /// Time at which the computation of the first prompt began.
    pub(super) since: Timestamp,
}

impl Pending {
    /// Adds a prompt. Returns the key by which it is removed.
    pub(super) fn push(&self, prompt: Prompt, now: Timestamp) -> u64 {
        let mut order = self.order.lock();
        let name = order.next;
        order.next += 1;
        order.prompts.insert(name, prompt);
        if order.prompts.len() == 1 {
            self.lead(prompt, now);
        }
        self.count.fetch_add(1, Relaxed);
        self.tokens.fetch_add(prompt.tokens.into(), Relaxed);
        self.kilopairs.fetch_add(prompt.kilopairs.into(), Relaxed);
        name
    }

    /// Removes a prompt that was computed or is no longer needed. Returns it, and how long it was the first.
    pub(super) fn remove(&self, name: u64, now: Timestamp) -> Option<(Prompt, Duration)> {
        let mut order = self.order.lock();
        let is_first = order.prompts.first_key_value().is_some_and(|(first, _)| *first == name);
        let prompt = order.prompts.remove(&name)?;
        self.count.fetch_sub(1, Relaxed);
        self.tokens.fetch_sub(prompt.tokens.into(), Relaxed);
        self.kilopairs.fetch_sub(prompt.kilopairs.into(), Relaxed);
        if !is_first {
            return Some((prompt, Duration::ZERO));
        }
        let time = now.since(Timestamp(self.since.load(Relaxed)));
        self.lead(order.prompts.values().next().copied().unwrap_or_default(), now);
        Some((prompt, time))
    }

    fn lead(&self, prompt: Prompt, now: Timestamp) {
        self.head.store(u64::from(prompt.tokens) << 32 | u64::from(prompt.kilopairs), Relaxed);
        self.since.store(now.0, Relaxed);
    }

    /// Returns the number of requests.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// Returns the sums. A read during a write may be off by one prompt.
    pub(super) fn left(&self) -> Left {
        let head = self.head.load(Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let head = Prompt { tokens: (head >> 32) as u32, kilopairs: head as u32 };
        Left {
            count: self.count(),
            tokens: self.tokens.load(Relaxed),
            kilopairs: self.kilopairs.load(Relaxed),
            head,
            since: Timestamp(self.since.load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn head_is_the_oldest_remaining_prompt() {
        let pending = Pending::default();
        let prompt = |tokens| Prompt { tokens, kilopairs: tokens * 2 };
        let names: Vec<u64> = (1..=3).map(|i| pending.push(prompt(i), Timestamp(u64::from(i)))).collect();
        assert_eq!((pending.left().head, pending.left().since), (prompt(1), Timestamp(1)));
        assert_eq!(pending.remove(names[1], Timestamp(5)), Some((prompt(2), Duration::ZERO)));
        assert_eq!(
            (pending.left().head, pending.left().since),
            (prompt(1), Timestamp(1)),
            "the removed prompt was not the first"
        );
        assert_eq!(pending.remove(names[0], Timestamp(7)), Some((prompt(1), Duration::from_nanos(6))));
        let left = Left { count: 1, tokens: 3, kilopairs: 6, head: prompt(3), since: Timestamp(7) };
        assert_eq!(pending.left(), left);
        assert_eq!(pending.remove(names[0], Timestamp(8)), None);
        assert_eq!(pending.left(), left, "a second removal has no effect");
        assert_eq!(pending.remove(names[2], Timestamp(9)), Some((prompt(3), Duration::from_nanos(2))));
        assert_eq!(pending.left(), Left { since: Timestamp(9), ..Left::default() });
    }

    proptest! {
        #[test]
        fn sums_equal_those_of_the_queue(
            steps in prop::collection::vec((any::<bool>(), 0u32..1_000, any::<prop::sample::Index>()), 0..100),
        ) {
            let pending = Pending::default();
            let mut model: Vec<(u64, u32)> = Vec::new();
            for (push, tokens, which) in steps {
                if push || model.is_empty() {
                    model.push((pending.push(Prompt { tokens, kilopairs: 1 }, Timestamp(1)), tokens));
                } else {
                    let (name, _) = model.remove(which.index(model.len()));
                    pending.remove(name, Timestamp(2));
                }
                let left = pending.left();
                prop_assert_eq!(left.tokens, model.iter().map(|(_, t)| u64::from(*t)).sum::<u64>());
                prop_assert_eq!(left.head.tokens, model.first().map_or(0, |(_, t)| *t));
                prop_assert_eq!((left.count as usize, left.kilopairs as usize), (model.len(), model.len()));
            }
        }
    }
}
