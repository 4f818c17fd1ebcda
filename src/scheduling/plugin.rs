//! What a routing algorithm is, and what it gets to see.

use super::candidates::Candidate;
use super::decision::Ranking;
use crate::clock::Timestamp;
use crate::pool::PoolSnapshot;
use crate::prefix::cache::Found;
use crate::rng::PickRng;
use std::fmt::Debug;
use std::time::Duration;

/// The request as a routing algorithm sees it.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestFacts<'a> {
    /// The model (or LoRA adapter) that the server will be asked for, after rewriting; empty when unknown.
    pub model: &'a str,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u32,
    /// More is more important; negative may be shed.
    pub priority: i32,
}

/// All that a decision may depend on.
#[derive(Clone, Copy, Debug)]
pub struct PickContext<'a> {
    /// The moment of the decision.
    pub now: Timestamp,
    /// The request.
    pub request: RequestFacts<'a>,
    /// The pool at this moment.
    pub snapshot: &'a PoolSnapshot,
    /// Metrics older than this say nothing.
    pub stale_after: Duration,
    /// Who holds how much of the prompt; `None` when nobody has looked.
    pub prefix: Option<&'a Found>,
}

/// One named way to route.
pub trait Strategy: Send + Sync + Debug {
    /// Puts the best candidates first in `ranking`, as many as `ranking` wants, and says why the first won. `candidates` is never
    /// empty and its order carries no meaning.
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking);

    /// Whether it reads [`Candidate::cached`]; prompts of a pool that nobody asks about need not be hashed.
    fn reads_prefix(&self) -> bool {
        false
    }
}

/// How a plugin is known and made: one `pub const PLUGIN` in its file, one line in the registry.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The name in configurations: kebab-case, unique.
    pub name: &'static str,
    /// One sentence: what it does.
    pub summary: &'static str,
    /// Where the algorithm comes from.
    pub source: &'static str,
    /// Makes it from its parameters (`null` for none), which are refused when a name is unknown or a value out of range.
    pub build: fn(&serde_json::Value) -> Result<Box<dyn Strategy>, ParamError>,
}

/// One part of the `pipeline` strategy's sum.
pub trait Scorer: Send + Sync + Debug {
    /// Writes a score in 0..=1 for each candidate; `out` is as long as `candidates`.
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]);

    /// As [`Strategy::reads_prefix`].
    fn reads_prefix(&self) -> bool {
        false
    }
}

/// As [`Descriptor`], for scorers.
#[derive(Clone, Copy, Debug)]
pub struct ScorerDescriptor {
    /// The name in configurations: kebab-case, unique.
    pub name: &'static str,
    /// One sentence: what it prefers.
    pub summary: &'static str,
    /// Where the formula comes from.
    pub source: &'static str,
    /// Makes it from its parameters.
    pub build: fn(&serde_json::Value) -> Result<Box<dyn Scorer>, ParamError>,
}

/// Parameters that a plugin does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParamError(pub String);

/// Reads a plugin's parameters into its own struct; `null` gives the defaults.
pub fn params<P: serde::de::DeserializeOwned + Default>(value: &serde_json::Value) -> Result<P, ParamError> {
    if value.is_null() {
        return Ok(P::default());
    }
    P::deserialize(value).map_err(|e| ParamError(e.to_string()))
}

/// The parameters of a plugin that has none.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}
