//! What frees the memory that a prompt's server keeps for the decode server when that does not come for it.
//!
//! Only what nobody can have fetched is released: blocks that were fetched once may hold another prompt by now, and who fetches them
//! again would take them for this one's.

use super::{Ask, Facts};
use crate::body::{Buffered, Held};
use attache_disagg::Direct;
use attache_pool::health::Availability;
use attache_pool::{Endpoint, EndpointState, Roles};
use attache_scheduling::Pool;
use attache_types::clock::Timestamp;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// 10 s for a server to take what frees a prompt that nobody goes on from; then its lease is near its end anyway.
const RELEASE_PATIENCE: Duration = Duration::from_secs(10);

/// A decode leg for a prompt that nobody goes on from: of one token, so that the server fetches what is pinned and frees it.
#[derive(Debug)]
pub struct Release {
    pub(super) direct: Direct,
    pub(super) facts: Facts,
    /// The prefill leg.
    pub(super) body: Bytes,
    pub(super) prefill: Arc<Endpoint>,
    pub(super) decode: Arc<Endpoint>,
    pub(super) headers: Vec<(&'static str, String)>,
}

impl Release {
    /// Of a completion that `connector` splits over servers at these addresses.
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
            fallback: Fallback::Local,
            scheme: "http".into(),
            path_prefix: "".into(),
            insecure_skip_verify: false,
            bootstrap_port: 8998,
            decoder_blocks_ttl: Duration::ZERO,
        };
        let facts = Facts { api: LegApi::Completions, kind: Default::default(), request_id: "r-1".into(), room: 1 };
        let at = |address| Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(address)));
        let headers = vec![("x-request-id", "r-1".to_owned())];
        Self { direct, facts, body: Bytes::from_static(body), prefill: at(prefill), decode: at(decode), headers }
    }

    /// What frees a prompt whose server answered `reply`; `None` when that pins nothing.
    #[must_use]
    pub fn of(&self, reply: &[u8]) -> Option<Ask> {
        self.by(&self.decode, reply)
    }

    /// Whether the server keeps memory for whoever goes on from `reply`.
    pub(super) fn pins(&self, reply: &[u8]) -> bool {
        self.direct.connector.pins(self.facts.api, reply)
    }

    fn by(&self, decode: &Endpoint, reply: &[u8]) -> Option<Ask> {
        if !self.pins(reply) {
            return None;
        }
        let leg = self.facts.leg(&self.direct, &self.prefill, &self.body);
        let body = self.direct.connector.decode_body(&leg, Some(reply)).ok()?.body.into_owned();
        Some(Ask {
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

/// Why a server has not looked at a request's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untaken {
    /// No server takes what stands in it: 400 and 422.
    Malformed,
    /// It does not serve such requests.
    Declined,
    /// It takes none now, or nobody reaches it.
    Away,
}

impl Untaken {
    /// What an answer with this status says; `None` when its server may have looked. That may be so with 503 too: whoever stands before a
    /// server, Envoy or a proxy beside it, answers so when it was lost while it worked.
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

/// What becomes of a prompt that was not taken.
#[derive(Debug)]
pub enum Fate {
    /// This frees it.
    Freed(Ask),
    /// It waits for its lease: no other server can fetch it, or its own words can't be read.
    Left,
    /// It waits for its lease because nobody says whether its request was tried before.
    Unsaid,
}

/// A computed prompt, from the moment on when its server told of it until the decode server has taken the request.
#[derive(Debug)]
pub struct Kept {
    release: Arc<Release>,
    reply: Bytes,
    /// Who has not taken it is the only one that was asked.
    first_try: bool,
    _held: Held,
}

impl Kept {
    pub(super) fn new(release: Arc<Release>, reply: Bytes, buffered: &Arc<Buffered>) -> Self {
        let _held = buffered.hold((release.body.len() + reply.len()) as u64);
        Self { release, reply, first_try: false, _held }
    }

    /// Nobody was asked before the server whose answer comes.
    pub(super) fn is_first_try(&mut self) {
        self.first_try = true;
    }

    /// What becomes of it, now that `server` has not taken the request. Where another has to fetch it, that is the one with the fewest requests
    /// of those that go together with the prompt's server. Where nobody says that it was asked once, another may have fetched it before, unless
    /// that would have refused the request as well.
    #[must_use]
    pub fn fate(&self, why: Untaken, server: &Endpoint, pool: &Pool, now: Timestamp) -> Fate {
        if why != Untaken::Malformed && !self.first_try {
            return Fate::Unsaid;
        }
        let freed = match why {
            Untaken::Malformed | Untaken::Declined => self.release.by(server, &self.reply),
            Untaken::Away => self.other(server, pool, now).and_then(|other| self.release.by(&other, &self.reply)),
        };
        freed.map_or(Fate::Left, Fate::Freed)
    }

    /// Who fetches it in place of `server`.
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
