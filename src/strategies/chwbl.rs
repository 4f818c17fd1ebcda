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
use attache_scheduling::plugin::{Inert, ParamError, params, written};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::rng::PickRng;
use md5::{Digest, Md5};
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "chwbl",
    summary: "Gives prompts with the same system prompt and first user messages one home on a hash ring, and the next \
              one when it is full.",
    source: "Neutree `consistent_hash`; Mirrokni et al. 2016",
    build: |value, _| params_of(value, is_neutrees(value))?.build(value).map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// Registry entry of Neutree's own rule.
pub const CONSISTENT_HASH: Descriptor = Descriptor {
    name: "consistent-hash",
    summary: "As `chwbl`, with Neutree's own bound and key: the rule that Neutree documents.",
    source: "Neutree `consistent_hash`",
    build: |value, _| params_of(value, true)?.build(value).map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// Parameters in Neutree's spelling.
const NEUTREES: [&str; 4] =
    ["virtual_nodes_per_replica", "virtual_nodes", "load_factor", "max_user_messages_for_cache"];
/// The names of the points of an endpoint on the ring.
const VIRTUAL_NODES: &[&str] =
    &["virtualNodes", "virtual_nodes_per_replica", "virtual_nodes", "virtualNodesPerReplica"];
/// The names of the bound.
const LOAD_FACTOR: &[&str] = &["loadFactor", "load_factor"];

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

/// 100 points per endpoint, Neutree's default: the endpoint with the most keys of 8 gets a sixth more than the mean.
const DEFAULT_VIRTUAL_NODES: u32 = 100;
/// A quarter above the mean, Neutree's default.
const DEFAULT_LOAD_FACTOR: f64 = 1.25;
/// The first two user messages, Neutree's default: they distinguish conversations.
const DEFAULT_MAX_USER_MESSAGES: u32 = 2;
/// Two standard deviations of a random load: of equally likely keys, 1 to 2 % leave their home.
const DEFAULT_MARGIN: f64 = 2.0;
/// 4,096 points per endpoint are more than any use needs; more would make the ring of a thousand endpoints slow to
/// build.
pub(super) const MAX_VIRTUAL_NODES: u32 = 4_096;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    #[serde(alias = "virtual_nodes_per_replica", alias = "virtual_nodes", alias = "virtualNodesPerReplica")]
    virtual_nodes: u32,
    #[serde(alias = "load_factor")]
    load_factor: f64,
    #[serde(alias = "max_user_messages_for_cache")]
    max_user_messages_for_cache: u32,
    margin: f64,
    compat: bool,
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name, CONSISTENT_HASH.name],
    keys: &["margin"],
    when: |all| all.get("compat").is_some_and(|on| on == true),
    why: "it needs `compat: false`; Neutree's rule has no margin",
}];

impl Default for Params {
    fn default() -> Self {
        Self {
            virtual_nodes: DEFAULT_VIRTUAL_NODES,
            load_factor: DEFAULT_LOAD_FACTOR,
            max_user_messages_for_cache: DEFAULT_MAX_USER_MESSAGES,
            margin: DEFAULT_MARGIN,
            compat: false,
        }
    }
}

impl Params {
    /// The strategy with these parameters, which were `given`.
    fn build(self, given: &Value) -> Result<Chwbl, ParamError> {
        let Params { virtual_nodes, load_factor, margin, .. } = self;
        if !(1..=MAX_VIRTUAL_NODES).contains(&virtual_nodes) {
            return Err(ParamError::value(
                written(given, VIRTUAL_NODES),
                virtual_nodes,
                &format!("1 to {MAX_VIRTUAL_NODES} is allowed"),
            ));
        }
        if !load_factor.is_finite() || load_factor < 1.0 {
            return Err(ParamError::value(written(given, LOAD_FACTOR), load_factor, "1 or more is allowed"));
        }
        if !margin.is_finite() || margin < 0.0 {
            return Err(ParamError::value("margin", margin, "0 or more is allowed"));
        }
        let ring =
            SharedRing::new(|name, i| first_64_bits(Md5::new().chain_update(format!("{name}:{i}"))), virtual_nodes);
        Ok(Chwbl { ring, params: self })
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
