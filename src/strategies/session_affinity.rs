//! `session-affinity`: all requests of a session go to the endpoint that served the previous one.
//!
//! ```text
//! x-session-id          base64 of the endpoint's ip:port, from the previous response: that endpoint, if it may serve
//! x-aibrix-session-key  any text of at most 256 bytes: argmax over endpoints of mix(FNV-1a-64(key, 0, ip:port))
//! neither               fewest requests
//! ```
//!
//! Attaché adds `x-session-id` with the endpoint that served to the response, never the key. An invalid id is
//! ignored, as is one whose endpoint was removed, ejected or is draining. The id shows the endpoint's address to the
//! client, and a client can name another endpoint, as with AIBrix.
//! With a key, an endpoint that joins or leaves moves only its own share of the sessions. The key reaches the model
//! server like any other header.
//!
//! `compat: true` omits the mixing step, as AIBrix does. FNV-1a hardly spreads its last byte: of ten addresses that
//! differ in the last digit, two get a quarter of the sessions each.
//! When not: sessions are long and differ in cost; then load accumulates where the long ones are.
//! Source: AIBrix `session-affinity` (development head, August 2026), which sends new sessions to a random endpoint.

use attache_pool::Endpoint;
use attache_scheduling::plugin::{Better, ParamError, ResponseHeaders, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rand::RngExt;
use smallvec::SmallVec;
use std::cmp::Reverse;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "session-affinity",
    summary: "Keeps a session on the endpoint that its header or key names; new ones go where the fewest requests are.",
    source: "AIBrix `session-affinity`",
    parameters: section::<Params>,
    build: |value, _| params::<Params>(value)?.build().map(|s| Box::new(s) as Box<dyn Strategy>),
};

/// Request and response header with the session id.
const SESSION_HEADER: &str = "x-session-id";
/// 256 bytes, AIBrix's limit: longer keys are ignored.
const MAX_KEY_BYTES: usize = 256;
/// Upper bound of the base64 of the longest `[ipv6%scope]:port`.
const MAX_ID_BYTES: usize = 128;

parameters! {
    struct Params {
        /// Request header with the session key, of at most 256 bytes.
        "keyHeader" => key_header: String { default: "x-aibrix-session-key".to_owned(); },
        /// Whether to omit the final mixing step of the hash, as AIBrix. Keys then spread less evenly.
        "compat" => compat: bool { default: false; },
    }
}

impl Params {
    fn build(self) -> Result<SessionAffinity, ParamError> {
        if self.key_header.parse::<http::HeaderName>().is_err() {
            return Err(ParamError::value(
                "keyHeader",
                format!("`{}`", self.key_header),
                "the name of a header is allowed",
            ));
        }
        Ok(SessionAffinity { key_header: self.key_header.to_ascii_lowercase(), compat: self.compat })
    }
}

#[derive(Debug)]
struct SessionAffinity {
    key_header: String,
    compat: bool,
}

/// The session of a request, from its headers.
enum Session<'a> {
    /// The session id names the candidate at this position.
    At(usize),
    /// The request has this session key.
    Keyed(&'a str),
    /// The request has neither.
    New,
}

impl SessionAffinity {
    fn session<'a>(&self, cx: &PickContext<'a>, candidates: &[Candidate<'_>]) -> Session<'a> {
        let headers = cx.request.headers;
        let id = headers.get(SESSION_HEADER).map(str::trim).filter(|id| (1..=MAX_ID_BYTES).contains(&id.len()));
        if let Some(at) = id.and_then(|id| position(id, candidates)) {
            return Session::At(at);
        }
        let key = headers.get(&self.key_header).filter(|key| (1..=MAX_KEY_BYTES).contains(&key.len()));
        key.map_or(Session::New, Session::Keyed)
    }

    /// Rendezvous weight: the endpoint with the greatest weight serves the key.
    fn weight(&self, key: &str, address: &str) -> u64 {
        let hash = fnv_1a(key, address);
        if self.compat { hash } else { mix(hash) }
    }
}

/// Position of the candidate whose address is encoded in the id.
fn position(id: &str, candidates: &[Candidate<'_>]) -> Option<usize> {
    let mut decoded = [0; MAX_ID_BYTES];
    let length = BASE64_STANDARD.decode_slice(id, &mut decoded).ok()?;
    let address = decoded.get(..length)?;
    candidates.iter().position(|c| c.state.endpoint.authority.as_bytes() == address)
}

/// The final mixing step of MurmurHash3: every input bit affects all output bits.
fn mix(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// 64-bit FNV-1a of the key, a zero byte and the address.
fn fnv_1a(key: &str, address: &str) -> u64 {
    let bytes = key.bytes().chain([0]).chain(address.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Strategy for SessionAffinity {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        match self.session(cx, candidates) {
            Session::At(at) => {
                ranking.because("served the session before");
                if let Some(candidate) = candidates.get(at) {
                    ranking.push(&candidate.state.endpoint);
                }
            }
            Session::Keyed(key) => {
                ranking.because("endpoint of the session key");
                let mut order: SmallVec<[(Reverse<u64>, &str, usize); 16]> = SmallVec::new();
                for (i, c) in candidates.iter().enumerate() {
                    let address = &*c.state.endpoint.authority;
                    order.push((Reverse(self.weight(key, address)), address, i));
                }
                order.sort_unstable();
                for candidate in order.iter().filter_map(|(.., i)| candidates.get(*i)).take(ranking.wanted()) {
                    ranking.push(&candidate.state.endpoint);
                }
                return;
            }
            Session::New => ranking.because("a new session; fewest requests"),
        }
        // One more than needed, since the session's own endpoint may be among them.
        let mut rest = Ranking::new(ranking.wanted() + 1);
        rest.push_lowest(candidates.iter().map(|c| {
            let key = (u64::from(c.requests) << 32) | u64::from(rng.random::<u32>());
            (key, &c.state.endpoint)
        }));
        for endpoint in rest.decide().iter().flat_map(|d| &d.picks) {
            ranking.push(endpoint);
        }
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        out.fill(0.0);
        let at = match self.session(cx, candidates) {
            Session::At(at) => Some(at),
            Session::Keyed(key) => {
                let address = |i: usize| candidates.get(i).map_or("", |c| &*c.state.endpoint.authority);
                (0..candidates.len()).min_by_key(|i| (Reverse(self.weight(key, address(*i))), address(*i)))
            }
            Session::New => None,
        };
        if let Some(score) = at.and_then(|at| out.get_mut(at)) {
            *score = 1.0;
        }
        Some(Better::Higher)
    }

    fn response_headers(&self, served: &Endpoint, out: &mut ResponseHeaders) {
        out.push((SESSION_HEADER.into(), BASE64_STANDARD.encode(served.authority.as_bytes())));
    }
}

#[cfg(test)]
mod tests;
