//! Releases the KV blocks that a prefill worker keeps for the decode worker, when the decode worker does not fetch
//! them.
//!
//! Blocks are released only if no decode worker can have fetched them. A prefill worker reuses blocks after the first
//! fetch, so a second fetch would read the blocks of another prompt.

use super::{LegCall, LegFacts};
use crate::body::{Buffered, Held};
use attache_disagg::Direct;
use attache_pool::health::Availability;
use attache_pool::{Endpoint, EndpointState, Roles};
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// 10 s: time limit of a call that releases blocks. After that their lease is about to end anyway.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);

/// Makes calls that release pinned blocks: a decode leg with a limit of one token, because the fetch frees the blocks.
#[derive(Debug)]
pub struct Release {
    pub(super) direct: Direct,
    pub(super) facts: LegFacts,
    /// The body of the prefill leg.
    pub(super) body: Bytes,
    pub(super) prefill: Arc<Endpoint>,
    pub(super) decode: Arc<Endpoint>,
    pub(super) headers: Vec<(&'static str, String)>,
}

impl Release {
    /// For a completion that `connector` splits between a prefill and a decode worker at these addresses.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn for_test(
        connector: &'static dyn attache_disagg::Connector,
        [prefill, decode]: [std::net::SocketAddr; 2],
        body: &'static [u8],
    ) -> Self {
        use attache_disagg::attempts::AttemptLimits;
        use attache_disagg::{Fallback, LegApi};
        use attache_pool::EndpointSpec;
        use attache_types::ids::EndpointId;
        let direct = Direct {
            connector,
            by_label: false,
            bounds: AttemptLimits { timeout: Duration::from_secs(20), hedge_after: None },
            message_timeout: None,
            fallback: Fallback::Local,
            scheme: "http".into(),
            path_prefix: "".into(),
            insecure_skip_verify: false,
            bootstrap_port: 8998,
            decoder_blocks_ttl: Duration::ZERO,
        };
        let facts = LegFacts { api: LegApi::Completions, request_id: "r-1".into(), room: 1 };
        let at = |address| Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(address)));
        let headers = vec![("x-request-id", "r-1".to_owned())];
        Self { direct, facts, body: Bytes::from_static(body), prefill: at(prefill), decode: at(decode), headers }
    }

    /// The call that releases the blocks of the prefill response `reply`; `None` if that response pins no blocks.
    #[must_use]
    pub fn of(&self, reply: &[u8]) -> Option<LegCall> {
        self.by(&self.decode, reply)
    }

    /// Whether the prefill worker keeps blocks for the decode leg that follows from `reply`.
    pub(super) fn pins(&self, reply: &[u8]) -> bool {
        self.direct.connector.pins(self.facts.api, reply)
    }

    fn by(&self, decode: &Endpoint, reply: &[u8]) -> Option<LegCall> {
        if !self.pins(reply) {
            return None;
        }
        let leg = self.facts.leg(&self.direct, &self.prefill, &self.body);
        let body = self.direct.connector.decode_body(&leg, Some(reply)).ok()?.body.into_owned();
        Some(LegCall {
            attempt: None,
            url: self.direct.url(decode, self.facts.api.path()),
            headers: self.headers.clone(),
            body: body.into(),
            timeout: RELEASE_PATIENCE,
            insecure_skip_verify: self.direct.insecure_skip_verify,
            release: None,
        })
    }
}

/// Why a decode worker did not accept a request, so that it has not fetched the blocks of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAccepted {
    /// Status 400 or 422: every worker would reject the request.
    Malformed,
    /// Another client error: this worker does not serve such requests.
    Declined,
    /// The worker is overloaded (429) or unreachable.
    Away,
}

impl NotAccepted {
    /// The reason that an HTTP status implies; `None` if the worker may have fetched the blocks. That includes 503,
    /// with which Envoy or a sidecar responds if the connection to the worker was lost during its work.
    #[must_use]
    pub fn of(status: u16) -> Option<Self> {
        match status {
            400 | 422 => Some(Self::Malformed),
            429 => Some(Self::Away),
            401..=499 => Some(Self::Declined),
            _ => None,
        }
    }
}

/// How the blocks of a request that was not accepted are freed.
#[derive(Debug)]
pub enum ReleaseOutcome {
    /// By this call.
    Release(LegCall),
    /// By the end of their lease: no other worker can fetch them, or the prefill response is invalid.
    LeaseExpires,
    /// By the end of their lease: the gateway does not report whether it tried another worker before.
    AttemptUnknown,
}

/// The blocks that a prefill worker keeps, from its response until the decode worker has accepted the request.
#[derive(Debug)]
pub struct PinnedPrefill {
    release: Arc<Release>,
    reply: Bytes,
    /// The worker that did not accept the request is the only one that the gateway tried.
    first_attempt: bool,
    _held: Held,
}

impl PinnedPrefill {
    pub(crate) fn new(release: Arc<Release>, reply: Bytes, buffered: &Arc<Buffered>) -> Self {
        let _held = buffered.hold((release.body.len() + reply.len()) as u64);
        Self { release, reply, first_attempt: false, _held }
    }

    /// Records that the gateway tried no other worker before the one that responds.
    pub(super) fn mark_first_attempt(&mut self) {
        self.first_attempt = true;
    }

    /// How the blocks are freed after `server` did not accept the request.
    ///
    /// If `server` is overloaded or unreachable, another decode worker fetches them: the one with the fewest requests,
    /// among those that may pair with the prefill worker. If the gateway may have tried a worker before `server`, that
    /// worker may have fetched the blocks, so they are left to their lease. A malformed request is the exception: every
    /// worker would have rejected it.
    #[must_use]
    pub fn release_outcome(&self, why: NotAccepted, server: &Endpoint, pool: &Pool, now: Timestamp) -> ReleaseOutcome {
        if why != NotAccepted::Malformed && !self.first_attempt {
            return ReleaseOutcome::AttemptUnknown;
        }
        let freed = match why {
            NotAccepted::Malformed | NotAccepted::Declined => self.release.by(server, &self.reply),
            NotAccepted::Away => self.other(server, pool, now).and_then(|other| self.release.by(&other, &self.reply)),
        };
        freed.map_or(ReleaseOutcome::LeaseExpires, ReleaseOutcome::Release)
    }

    /// The decode worker that fetches the blocks in place of `server`.
    fn other(&self, server: &Endpoint, pool: &Pool, now: Timestamp) -> Option<Arc<Endpoint>> {
        let (snapshot, policy) = (pool.store.load(), pool.scheduler.split()?);
        let takes = |state: &&EndpointState| {
            let (other, health) = (&state.endpoint, pool.scheduler.health());
            let open =
                matches!(other.health.availability(now, health), Availability::Open | Availability::SlowStart(_));
            let goes_along = other.roles.has(Roles::DECODE) && policy.pairs(&self.release.prefill, other);
            other.id != server.id && goes_along && open && !state.is_draining()
        };
        let other = snapshot.endpoints.iter().filter(takes).min_by_key(|state| state.endpoint.ledger.in_flight());
        other.map(|state| state.endpoint.clone())
    }
}
