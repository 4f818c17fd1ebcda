//! `chwbl`: consistent hashing with bounded loads. Prompts with the same beginning have one home endpoint on a ring.
//! If it is full, the next one with capacity serves them.
//!
//! ```text
//! ring      MD5("{endpoint's name}:{0..virtualNodes}"), its first 64 bits
//! key       MD5("system:{last system prompt}|user_0:{first}|user_1:{second user message}");
//!           the whole prompt if it has no user message
//! capacity  requests < ceil(loadFactor · mean)  or  requests <= mean + margin · √mean
//!           mean = (all requests + 1) / candidates
//! ```
//!
//! The bound has two parts because the factor alone, rounded down as in Neutree, loses affinity under low load. Below
//! `n / loadFactor` requests no endpoint has capacity, so a hot prompt stays on one endpoint while others are idle.
//! At a mean of 1, 2 or 3 requests the one free slot wins, so nine of ten requests leave their home. Rounded up, some
//! endpoint always has capacity.
//!
//! The margin of two square roots is the spread of a random (Poisson) load, so only a prompt that is really hot
//! leaves its home. Example: 16 endpoints and 2,000 equally likely keys.
//! At 16, 48, 128 or 512 requests in flight, 1 to 2 % leave their home; with Neutree's rule 94, 93, 22 and 5 %. In
//! return, the busiest endpoint has 3.0, 2.0, 1.6 and 1.3 times the mean.
//!
//! `compat: true` is Neutree's own rule: an endpoint takes a request while `requests + 1 <= loadFactor · mean`. The
//! mean is over all endpoints of the pool, whether they may serve the request or not. The key of a request without
//! user messages is its whole body.
//! This rule is the default under Neutree's own name, `consistent_hash`, and with a parameter in Neutree's spelling
//! (`virtual_nodes_per_replica`, `virtual_nodes`, `load_factor`, `max_user_messages_for_cache`). An explicit `margin`
//! or `compat` overrides that.
//!
//! When not: clients share one long system prompt, since they all have the same home, or conversations that differ
//! late. `prefix-cache` knows where prompts diverge. Tools, adapters and media are not in the key. A list of text
//! parts counts as one text.
//! Source: Neutree `consistent_hash`; Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads"
//! (2016).

use crate::messages::{everything, messages, texts};
use crate::ring::{self, RingMatch, SharedRing};
use attache_protocol::Prompt;
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{Inert, ParamError, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use md5::{Digest, Md5};
use serde_json::Value;
use std::borrow::Cow;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "chwbl",
    summary: "Gives prompts with the same system prompt and first user messages one home on a hash ring, and the next \
              one when it is full.",
    source: "Neutree `consistent_hash`; Mirrokni et al. 2016",
    parameters: section::<Params>,
    build: |value, _| params_of(value, is_neutrees(value)).map(|p| Box::new(p.build()) as Box<dyn Strategy>),
};

/// Registry entry of Neutree's own rule.
pub const CONSISTENT_HASH: Descriptor = Descriptor {
    name: "consistent-hash",
    summary: "As `chwbl`, with Neutree's own bound and key: the rule that Neutree documents.",
    source: "Neutree `consistent_hash`",
    parameters: section::<Params>,
    build: |value, _| params_of(value, true).map(|p| Box::new(p.build()) as Box<dyn Strategy>),
};

/// Parameters in Neutree's spelling.
const NEUTREES: [&str; 4] =
    ["virtual_nodes_per_replica", "virtual_nodes", "load_factor", "max_user_messages_for_cache"];
fn is_neutrees(value: &Value) -> bool {
    NEUTREES.iter().any(|name| value.get(name).is_some())
}

/// Reads the parameters. `compat` is the default if neither `compat` nor `margin` is given.
fn params_of(value: &Value, compat: bool) -> Result<Params, ParamError> {
    let mut read = params::<Params>(value)?;
    if value.get("compat").is_none() && value.get("margin").is_none() {
        read.compat = compat;
    }
    Ok(read)
}

/// 4,096 points per endpoint are more than any use needs; more would make the ring of a thousand endpoints slow to
/// build.
pub(super) const MAX_VIRTUAL_NODES: u32 = 4_096;

parameters! {
    // The defaults are Neutree's, except that of `margin`.
    struct Params {
        /// Points of each endpoint on the ring. With 100 points, the busiest of 8 endpoints gets about a sixth more
        /// keys than the mean.
        "virtualNodes" | "virtual_nodes_per_replica" | "virtual_nodes" | "virtualNodesPerReplica"
            => virtual_nodes: u32 { default: 100; range: 1..=MAX_VIRTUAL_NODES; unit: "points"; },
        /// An endpoint has capacity below this multiple of the mean requests, rounded up. The mean includes the new
        /// request.
        "loadFactor" | "load_factor" => load_factor: f64 { default: 1.25; range: 1.0..; unit: "factor"; },
        /// Number of user messages in the key, counted from the first. 0 counts as 1.
        "maxUserMessagesForCache" | "max_user_messages_for_cache" => max_user_messages_for_cache: u32 {
            default: 2; unit: "messages";
        },
        /// An endpoint also has capacity if it exceeds the mean by at most this many standard deviations. One is the
        /// square root of the mean.
        "margin" => margin: f64 { default: 2.0; range: 0.0..; unit: "standard deviations"; },
        /// Whether to use Neutree's own bound and key. `margin` then has no effect.
        "compat" => compat: bool {
            default: false;
            absent: "`true` for `consistent-hash` and with a parameter in Neutree's spelling, unless `margin` is given";
        },
    }
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name, CONSISTENT_HASH.name],
    keys: &["margin"],
    when: |all| all.get("compat").is_some_and(|on| on == true),
    why: "it needs `compat: false`; Neutree's rule has no margin",
}];

impl Params {
    fn build(self) -> Chwbl {
        let ring = SharedRing::new(
            |name, i| first_64_bits(Md5::new().chain_update(format!("{name}:{i}"))),
            self.virtual_nodes,
        );
        Chwbl { ring, params: self }
    }
}

#[derive(Debug)]
struct Chwbl {
    ring: SharedRing,
    params: Params,
}

/// The first 64 bits of the checksum, big-endian.
fn first_64_bits(md5: Md5) -> u64 {
    md5.finalize().first_chunk().map_or(0, |head| u64::from_be_bytes(*head))
}

/// Writes the text that the key of a prompt is hashed from; returns false if there is none. For a prompt without user
/// messages, that is `payload` if given, else all of the prompt.
fn write_key(prompt: &Prompt<'_>, payload: Option<&[u8]>, max_user_messages: u32, mut to: impl FnMut(&[u8])) -> bool {
    // Neutree checks the limit after it has taken a message, so 0 takes one.
    let wanted = max_user_messages.max(1);
    let (mut system, mut users) = (None, 0);
    for message in messages(prompt) {
        match message.role {
            "system" => system = Some(message),
            "user" => users += 1,
            _ => {}
        }
        if users >= wanted {
            break;
        }
    }
    let mut parts = 0;
    let mut part = |name: &str, texts: &mut dyn Iterator<Item = Cow<'_, str>>| {
        to(if parts > 0 { b"|" } else { b"" });
        parts += 1;
        to(name.as_bytes());
        texts.for_each(|text| to(text.as_bytes()));
    };
    match system {
        Some(system) if system.texts().any(|text| !text.is_empty()) => part("system:", &mut system.texts()),
        None if texts(&prompt.system).any(|text| !text.is_empty()) => part("system:", &mut texts(&prompt.system)),
        _ => {}
    }
    let named = messages(prompt).filter(|m| m.role == "user").take(users as usize);
    for (i, user) in named.enumerate() {
        part(&format!("user_{i}:"), &mut user.texts());
    }
    match payload.filter(|payload| parts == 0 && !payload.is_empty()) {
        Some(payload) => to(payload),
        None => return parts > 0 || everything(prompt, to),
    }
    true
}

impl Chwbl {
    fn key(&self, prompt: &Prompt<'_>, payload: Option<&[u8]>) -> Option<u64> {
        let mut md5 = Md5::new();
        let payload = payload.filter(|_| self.params.compat);
        let known = write_key(prompt, payload, self.params.max_user_messages_for_cache, |bytes| md5.update(bytes));
        known.then(|| first_64_bits(md5))
    }

    /// Most requests that an endpoint may have, including the new one; may be fractional.
    fn bound(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>]) -> f64 {
        let Params { load_factor, margin, compat, .. } = self.params;
        if compat {
            let (requests, n) = load_of_all(cx);
            return (requests + 1) as f64 / n.max(1) as f64 * load_factor;
        }
        let (requests, n) = ring::load(candidates);
        let mean = (requests + 1) as f64 / n.max(1) as f64;
        (mean * load_factor).ceil().max((mean + margin * mean.sqrt()).floor() + 1.0)
    }
}

/// As [`ring::load`], over every endpoint of the pool.
pub(super) fn load_of_all(cx: &PickContext<'_>) -> (u64, usize) {
    let requests = |s| u64::from(Candidate::new(s, cx.now, cx.stale_after, 0).requests);
    (cx.snapshot.endpoints.iter().map(requests).sum(), cx.snapshot.endpoints.len())
}

/// Sets the ranking's reason from how the key found its endpoint.
pub(super) fn explain_match(found: RingMatch, ranking: &mut Ranking) {
    match found {
        RingMatch::Home => ranking.because("first on the hash ring"),
        RingMatch::Next => {
            ranking.because("next on the hash ring below its bound");
            ranking.divert();
        }
        RingMatch::AllFull => ranking.because("first on the hash ring; every endpoint is at its bound"),
    }
}

impl Strategy for Chwbl {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let rule = if self.params.compat { " compat" } else { "" };
        let name = || format!("chwbl {}{rule}", self.params.max_user_messages_for_cache);
        let digest = cx.request.digest(name, |prompt| self.key(prompt, cx.request.payload).into_iter().collect());
        let Some(key) = digest.and_then(|digest| digest.first().copied()) else {
            ranking.lacks(Signal::Prompt);
            return LeastRequest.rank(cx, candidates, rng, ranking);
        };
        let bound = self.bound(cx, candidates);
        ranking.note("free slots", 1.0, candidates, |i| {
            candidates.get(i).map_or(f64::NAN, |c| bound - f64::from(c.requests))
        });
        let found =
            ring::rank(&self.ring.of(cx.snapshot), key, candidates, ranking, |c| f64::from(c.requests) + 1.0 <= bound);
        explain_match(found, ranking);
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}

#[cfg(test)]
pub(super) mod tests;
