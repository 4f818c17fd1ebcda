//! The explanation of a past decision: the page `/explain?request_id=ID`.

use super::{list, text};
use serde_json::Value;

/// All candidates of one decision, and why each was chosen or not.
#[derive(Clone, Debug, Default)]
pub(crate) struct Explanation {
    pub(crate) strategy: Option<String>,
    pub(crate) profile: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) prompt_tokens: Option<u64>,
    /// Names of the parts of the strategy, with their weights.
    pub(crate) parts: Vec<String>,
    /// The chosen endpoints first, then the runner-up, then the others, then those that were no candidates.
    pub(crate) candidates: Vec<Candidate>,
    /// The pair of a pool that splits requests, as lines of name and value.
    pub(crate) pair: Vec<(String, String)>,
}

/// One endpoint at the time of the decision.
#[derive(Clone, Debug, Default)]
pub(crate) struct Candidate {
    pub(crate) address: String,
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) requests: Option<u64>,
    /// One figure for each part of the strategy, a score or a cost.
    pub(crate) figures: Vec<Option<f64>>,
    pub(crate) standing: Standing,
}

/// What the decision made of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Standing {
    /// The response comes from it; the number is its place among those that may be tried.
    Picked(usize),
    /// It computes the prompt.
    Prefill,
    /// It encodes images and audio.
    Encode,
    /// The best one that was not chosen.
    RunnerUp,
    #[default]
    Candidate,
    /// It was no candidate, for this reason.
    Excluded(String),
}

impl Standing {
    /// A few words for a table.
    pub(crate) fn label(&self) -> String {
        match self {
            Standing::Picked(0) => "chosen".to_owned(),
            Standing::Picked(place) => format!("fallback {place}"),
            Standing::Prefill => "prefill".to_owned(),
            Standing::Encode => "encode".to_owned(),
            Standing::RunnerUp => "runner-up".to_owned(),
            Standing::Candidate => String::new(),
            Standing::Excluded(why) => format!("no candidate: {}", crate::format::words(why)),
        }
    }
}

impl Explanation {
    /// Reads the page.
    pub(crate) fn of(v: &Value) -> Self {
        let choice = &v["choice"];
        let parts = list(&choice["parts"]);
        let mut candidates: Vec<_> = list(&v["endpoints"]).iter().map(|e| Candidate::of(e, choice, parts)).collect();
        candidates.sort_by(|a, b| a.standing.cmp(&b.standing));
        Self {
            strategy: text(&v["strategy"]),
            profile: text(&v["profile"]),
            reason: text(&choice["reason"]),
            prompt_tokens: v["prompt_tokens"].as_u64(),
            parts: parts.iter().map(part_name).collect(),
            candidates,
            pair: super::leaves(&choice["pair"]),
        }
    }
}

/// The name of a part, with its weight unless that is 0 or 1.
fn part_name(part: &Value) -> String {
    let name = text(&part["part"]).unwrap_or_default();
    match part["weight"].as_f64() {
        Some(weight) if weight != 0.0 && weight != 1.0 => format!("{name} × {weight}"),
        _ => name,
    }
}

impl Candidate {
    fn of(v: &Value, choice: &Value, parts: &[Value]) -> Self {
        let address = text(&v["address"]).unwrap_or_default();
        let place = |key: &str| list(&choice[key]).iter().position(|picked| picked.as_str() == Some(&address));
        let standing = if let Some(place) = place("picks") {
            Standing::Picked(place)
        } else if place("prefill").is_some() {
            Standing::Prefill
        } else if place("encode").is_some() {
            Standing::Encode
        } else if choice["runner_up"].as_str() == Some(&address) {
            Standing::RunnerUp
        } else if let Some(why) = text(&v["excluded"]) {
            Standing::Excluded(why)
        } else {
            Standing::Candidate
        };
        Self {
            cached_tokens: v["cached_tokens"].as_u64(),
            requests: v["requests"].as_u64(),
            figures: parts.iter().map(|part| part["endpoints"][&address].as_f64()).collect(),
            standing,
            address,
        }
    }
}
