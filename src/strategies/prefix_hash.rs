//! `prefix-hash`: consistent hashing with bounded loads, keyed by the adapter and the start of the first user message.
//!
//! ```text
//! ring      xxh64("{endpoint's name}:{0..replication}")
//! key       xxh64(model or adapter, then the first `prefixCharLength` characters of the first user message or prompt)
//! capacity  requests <= meanLoadFactor/100 · (all requests + 1) / candidates
//! ```
//!
//! When not: system prompts are long and differ late, or most requests share one beginning. At low load the rule lets
//! each endpoint take one request more than its share. That separates keys that share an endpoint by chance; `chwbl`
//! moves fewer. The system prompt is not in the key.
//!
//! `compat: true` restores KubeAI's defects:
//! - Points have no separator (`pod-1` + `11` equals `pod-11` + `1`).
//! - All prompts without such a text (token ids, no user message) have one key.
//! - The mean is over all endpoints of the pool, even those that may not serve the request.
//!
//! Without `compat`, token ids are hashed up to the same length, at four characters per token. A prompt without text
//! goes to the endpoint with the fewest requests.
//! Source: KubeAI `PrefixHash`.

use super::chwbl::{MAX_VIRTUAL_NODES, explain_match, load_of_all};
use crate::messages::{messages, texts};
use crate::ring::{self, SharedRing};
use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{ParamError, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::rng::PickRng;
use serde::Deserialize;
use std::borrow::Cow;
use xxhash_rust::xxh64::{Xxh64, xxh64};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "prefix-hash",
    summary: "Gives prompts with the same adapter and first characters one home on a hash ring, and the next one when \
              it is full.",
    source: "KubeAI `PrefixHash`",
    build: |value, _| params::<Params>(value)?.build().map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// A quarter above the mean, KubeAI's default, in percent.
const DEFAULT_MEAN_LOAD_FACTOR: u32 = 125;
/// 256 points per endpoint, KubeAI's default.
const DEFAULT_REPLICATION: u32 = 256;
/// 100 characters, KubeAI's default.
const DEFAULT_PREFIX_CHAR_LENGTH: usize = 100;
/// Characters per token.
const CHARACTERS_PER_TOKEN: usize = 4;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    mean_load_factor: u32,
    replication: u32,
    prefix_char_length: usize,
    compat: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mean_load_factor: DEFAULT_MEAN_LOAD_FACTOR,
            replication: DEFAULT_REPLICATION,
            prefix_char_length: DEFAULT_PREFIX_CHAR_LENGTH,
            compat: false,
        }
    }
}

impl Params {
    fn build(self) -> Result<PrefixHash, ParamError> {
        let Params { mean_load_factor, replication, prefix_char_length, compat } = self;
        if mean_load_factor < 100 {
            return Err(ParamError::value("meanLoadFactor", mean_load_factor, "100 (percent) or more is allowed"));
        }
        if !(1..=MAX_VIRTUAL_NODES).contains(&replication) {
            return Err(ParamError::value("replication", replication, &format!("1 to {MAX_VIRTUAL_NODES} is allowed")));
        }
        if prefix_char_length == 0 {
            return Err(ParamError::value("prefixCharLength", 0, "1 or more is allowed"));
        }
        let point: ring::PointHash = if compat {
            |name, i| xxh64(format!("{name}{i}").as_bytes(), 0)
        } else {
            |name, i| xxh64(format!("{name}:{i}").as_bytes(), 0)
        };
        Ok(PrefixHash { ring: SharedRing::new(point, replication), params: self })
    }
}

#[derive(Debug)]
struct PrefixHash {
    ring: SharedRing,
    params: Params,
}

/// The first `count` characters of `text`, and how many there are.
fn first_characters(text: &str, count: usize) -> (&str, usize) {
    match text.char_indices().enumerate().nth(count) {
        Some((_, (end, _))) => (text.get(..end).unwrap_or(text), count),
        None => (text, text.chars().count()),
    }
}

impl PrefixHash {
    /// The hash key; `None` if the prompt has no text for it.
    fn key(&self, model: &str, prompt: &Prompt<'_>) -> Option<u64> {
        let mut hash = Xxh64::new(0);
        hash.update(model.as_bytes());
        let length = self.params.prefix_char_length;
        let user = messages(prompt).find(|m| m.role == "user");
        let mut left = length;
        let mut add = |text: Cow<'_, str>| {
            let (head, characters) = first_characters(&text, left);
            hash.update(head.as_bytes());
            left -= characters;
        };
        match user {
            Some(user) => user.texts().for_each(&mut add),
            None if messages(prompt).next().is_none() => texts(&prompt.pieces).for_each(&mut add),
            None => {}
        }
        let mut known = left < length;
        if let (Some(Piece::Tokens(ids)), false) = (prompt.pieces.first(), self.params.compat) {
            for id in ids.iter().take(length.div_ceil(CHARACTERS_PER_TOKEN)) {
                hash.update(&id.to_le_bytes());
                known = true;
            }
        }
        (known || self.params.compat).then(|| hash.digest())
    }
}

impl Strategy for PrefixHash {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let name = || format!("prefix-hash {} {}", self.params.prefix_char_length, self.params.compat);
        let digest = cx.request.digest(name, |prompt| self.key(cx.request.model, prompt).into_iter().collect());
        let Some(key) = digest.and_then(|digest| digest.first().copied()) else {
            ranking.lacks(Signal::Prompt);
            return LeastRequest.rank(cx, candidates, rng, ranking);
        };
        let (requests, n) = if self.params.compat { load_of_all(cx) } else { ring::load(candidates) };
        let bound = f64::from(self.params.mean_load_factor) / 100.0 * (requests + 1) as f64 / n.max(1) as f64;
        ranking.note("free slots", 1.0, candidates, |i| {
            candidates.get(i).map_or(f64::NAN, |c| bound - f64::from(c.requests))
        });
        let found =
            ring::rank(&self.ring.of(cx.snapshot), key, candidates, ranking, |c| f64::from(c.requests) <= bound);
        explain_match(found, ranking);
    }

    fn reads(&self) -> Reads {
        Reads::PROMPT
    }
}

#[cfg(test)]
mod tests;
