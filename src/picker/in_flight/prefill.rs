//! The prefill of the request on another worker, and the blocks that this worker keeps for the decode worker.

use crate::event::{Degraded, Event, Observer};
use crate::split::{LegCall, NotAccepted, PrefillOutcome, ReleaseOutcome};
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;

/// How the prefill on another worker went, and the call that releases its blocks if no decode worker fetches them.
#[derive(Debug)]
pub(super) struct PinnedBlocks {
    /// `None` if the request is not split.
    pub(super) outcome: Option<PrefillOutcome>,
    /// The call to make, if there is one. Its result is not awaited.
    pub(super) release: Option<LegCall>,
}

impl PinnedBlocks {
    /// The token counts of the response; as [`PrefillOutcome::token_counts`].
    pub(super) fn token_counts(&self, usage: Usage) -> Usage {
        self.outcome.as_ref().map_or(usage, |outcome| outcome.token_counts(usage))
    }

    /// The response has begun; as [`PrefillOutcome::answered`].
    pub(super) fn answered(&mut self, retried: Option<bool>) {
        self.outcome.iter_mut().for_each(|outcome| outcome.answered(retried));
    }

    /// A decode worker has fetched the blocks or may have, so they are left to their lease.
    pub(super) fn leave(&mut self) {
        self.outcome.iter_mut().for_each(|outcome| outcome.pinned = None);
    }

    /// If `server` did not accept the request, releases the blocks that the prefill worker keeps.
    pub(super) fn release(
        &mut self,
        untaken: Option<NotAccepted>,
        server: &Endpoint,
        pool: &Pool,
        now: Timestamp,
        observer: &dyn Observer,
    ) {
        let Some(why) = untaken else { return };
        let Some(pinned) = self.outcome.as_mut().and_then(|outcome| outcome.pinned.take()) else { return };
        match pinned.release_outcome(why, server, pool, now) {
            ReleaseOutcome::Release(call) => self.release = Some(call),
            ReleaseOutcome::AttemptUnknown => observer.event(Event::Degraded(Degraded::AttemptsUntold)),
            ReleaseOutcome::LeaseExpires => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::tests::fixture::{NOW, Parts};
    use crate::split::{CachedBy, PinnedPrefill, Release};
    use attache_disagg::connector;
    use attache_pool::EndpointSpec;
    use attache_types::ids::EndpointId;
    use bytes::Bytes;
    use std::sync::Arc;

    const REPLY: &[u8] = br#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids":[[7]]}}"#;

    #[test]
    fn transferred_tokens_are_not_cached_ones() {
        let decoded = |cached| Usage { prompt_tokens: Some(100), completion_tokens: Some(5), cached_tokens: cached };
        let worker = Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(([10, 0, 0, 1], 8000).into())));
        for (cached_by, decode, expected) in [
            (CachedBy::Prefill(Some(32)), Some(99), Some(32)),
            (CachedBy::Prefill(None), Some(99), None),
            (CachedBy::Prefill(Some(32)), None, Some(32)),
            (CachedBy::Sidecar, Some(99), None),
            (CachedBy::Sidecar, Some(32), Some(32)),
            (CachedBy::Decode, Some(99), Some(99)),
        ] {
            let split = PrefillOutcome { prefill: Some(worker.clone()), cached_by, ..PrefillOutcome::default() };
            assert_eq!(split.token_counts(decoded(decode)), decoded(expected), "{cached_by:?}");
            let whole = PrefillOutcome { cached_by, ..PrefillOutcome::default() };
            assert_eq!(whole.token_counts(decoded(decode)), decoded(decode), "the decode worker computed it");
        }
    }

    fn blocks() -> PinnedBlocks {
        let servers = [([10, 0, 0, 1], 8000).into(), ([10, 0, 0, 2], 8000).into()];
        let body = br#"{"model":"m","prompt":"p","max_tokens":1}"#;
        let release = Release::for_test(connector::named("nixl").unwrap().connector, servers, body);
        let pinned = PinnedPrefill::new(Arc::new(release), Bytes::from_static(REPLY), &Arc::default());
        let outcome = PrefillOutcome { pinned: Some(Box::new(pinned)), ..PrefillOutcome::default() };
        PinnedBlocks { outcome: Some(outcome), release: None }
    }

    #[test]
    fn blocks_are_released_once_and_only_if_no_worker_fetched_them() {
        let fixture = Parts::default().build();
        let plan = fixture.chat("hello").unwrap();
        let release = |blocks: &mut PinnedBlocks, why: Option<NotAccepted>| {
            blocks.release(why, &plan.decision.picks[0], &plan.runtime.pool, NOW, &fixture.events);
            blocks.release.take().is_some()
        };
        let mut refused = blocks();
        assert!(!release(&mut refused, None), "the worker accepted the request");
        assert!(release(&mut refused, Some(NotAccepted::Malformed)));
        assert!(!release(&mut refused, Some(NotAccepted::Malformed)), "the blocks are released already");
        let mut fetched = blocks();
        fetched.leave();
        assert!(!release(&mut fetched, Some(NotAccepted::Malformed)));
        assert!(fixture.events.take().is_empty());
        let mut unknown = blocks();
        assert!(!release(&mut unknown, Some(NotAccepted::Declined)));
        assert_eq!(fixture.events.take(), ["Degraded(AttemptsUntold)"]);
        let mut first = blocks();
        first.answered(Some(false));
        assert!(release(&mut first, Some(NotAccepted::Declined)));
    }
}
