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
use attache_scheduling::plugin::{params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use std::borrow::Cow;
use xxhash_rust::xxh64::{Xxh64, xxh64};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "prefix-hash",
    summary: "Gives prompts with the same adapter and first characters one home on a hash ring, and the next one when \
              it is full.",
    source: "KubeAI `PrefixHash`",
    parameters: section::<Params>,
    build: |value, _| params::<Params>(value).map(|p| Box::new(p.build()) as Box<dyn Strategy>),
};

/// Characters per token.
const CHARACTERS_PER_TOKEN: usize = 4;

parameters! {
    // The defaults are KubeAI's.
    struct Params {
        /// An endpoint has capacity up to this percentage of the mean requests. The mean includes the new request.
        "meanLoadFactor" => mean_load_factor: u32 { default: 125; range: 100..; unit: "%"; },
        /// Points of each endpoint on the ring.
        "replication" => replication: u32 { default: 256; range: 1..=MAX_VIRTUAL_NODES; unit: "points"; },
        /// Number of characters in the key, from the start of the first user message or of the prompt.
        "prefixCharLength" => prefix_char_length: usize { default: 100; range: 1..; unit: "characters"; },
        /// Whether to use KubeAI's own ring points, keys and bound.
        "compat" => compat: bool { default: false; },
    }
}

impl Params {
    fn build(self) -> PrefixHash {
        let point: ring::PointHash = if self.compat {
            |name, i| xxh64(format!("{name}{i}").as_bytes(), 0)
        } else {
            |name, i| xxh64(format!("{name}:{i}").as_bytes(), 0)
        };
        PrefixHash { ring: SharedRing::new(point, self.replication), params: self }
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
