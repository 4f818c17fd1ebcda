//! Prompts that can't be looked up, because their tokens are unknown: how many, by model and reason.

use attache_types::clock::Timestamp;
use attache_types::throttle::Throttle;
use parking_lot::Mutex;
use std::sync::Arc;

/// 16: most pairs of model and reason of a pool. Clients choose models and parts of reasons, so the last pair stands
/// for all further ones.
const MAX_KINDS: usize = 16;
/// Longest stored reason and name in characters.
const MAX_CHARS: usize = 240;
/// Model and reason of what exceeds [`MAX_KINDS`].
const OTHER: &str = "(other)";

/// The prompts of one pool that can't be looked up.
#[derive(Debug, Default)]
pub struct UnreadPrompts {
    kinds: Mutex<Vec<Kind>>,
}

#[derive(Debug)]
struct Kind {
    shown: UnreadKind,
    throttle: Throttle,
}

/// Prompts of one model that can't be looked up for one reason.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct UnreadKind {
    /// The model's name.
    pub model: Arc<str>,
    /// Why the prompts have no tokens.
    pub reason: Arc<str>,
    /// The number of such prompts since the start of the process.
    pub prompts: u64,
}

impl UnreadPrompts {
    /// Counts a prompt. If its kind is to be logged now, returns it with the number of prompts that were not logged.
    pub fn record(&self, model: &str, reason: &str, now: Timestamp) -> Option<(UnreadKind, u64)> {
        let short = |text: &str| text.chars().take(MAX_CHARS).collect::<String>();
        let (mut model, mut reason) = (short(model), short(reason));
        let mut kinds = self.kinds.lock();
        let find = |kinds: &[Kind], model: &str, reason: &str| {
            kinds.iter().position(|kind| *kind.shown.model == *model && *kind.shown.reason == *reason)
        };
        let mut at = find(&kinds, &model, &reason);
        if at.is_none() && kinds.len() + 1 >= MAX_KINDS {
            (model, reason) = (OTHER.to_owned(), OTHER.to_owned());
            at = find(&kinds, OTHER, OTHER);
        }
        let at = at.unwrap_or_else(|| {
            let shown = UnreadKind { model: model.into(), reason: reason.into(), prompts: 0 };
            kinds.push(Kind { shown, throttle: Throttle::default() });
            kinds.len() - 1
        });
        let kind = kinds.get_mut(at)?;
        kind.shown.prompts += 1;
        kind.throttle.admit(now).map(|skipped| (kind.shown.clone(), skipped))
    }

    /// All kinds, in the order in which they first occurred.
    #[must_use]
    pub fn kinds(&self) -> Vec<UnreadKind> {
        self.kinds.lock().iter().map(|kind| kind.shown.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn second(n: u64) -> Timestamp {
        Timestamp(n * 1_000_000_000)
    }

    #[test]
    fn each_model_and_reason_is_logged_once_a_minute() {
        let unread = UnreadPrompts::default();
        let logged = |model, reason, at| unread.record(model, reason, second(at)).map(|(_, skipped)| skipped);
        assert_eq!(logged("a", "x", 1), Some(0));
        assert_eq!(logged("a", "x", 2), None);
        assert_eq!(logged("a", "y", 2), Some(0));
        assert_eq!(logged("b", "x", 2), Some(0));
        assert_eq!(logged("a", "x", 70), Some(1));
        assert_eq!(unread.kinds().iter().map(|kind| kind.prompts).collect::<Vec<_>>(), [3, 1, 1]);
    }

    #[test]
    fn invented_models_and_reasons_share_one_kind() {
        let unread = UnreadPrompts::default();
        for n in 0..1_000 {
            unread.record(&format!("m{n}"), &"r".repeat(n), second(1));
        }
        let kinds = unread.kinds();
        assert_eq!(kinds.len(), MAX_KINDS);
        assert_eq!((&*kinds[MAX_KINDS - 1].model, kinds[MAX_KINDS - 1].prompts), (OTHER, 985));
        assert!(kinds.iter().all(|kind| kind.reason.len() <= MAX_CHARS));
    }
}
