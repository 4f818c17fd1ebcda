//! A decision in the log, with what each part of the algorithm made of each endpoint.

use attache_scheduling::Decision;
use serde_json::{Value, json};

/// A decision that was explained.
#[derive(Debug)]
pub struct Explained<'a> {
    /// The pool.
    pub pool: &'a str,
    /// The strategy, as configurations spell it.
    pub strategy: &'a str,
    /// The model that the server is asked for.
    pub model: &'a str,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// What was decided.
    pub decision: &'a Decision,
}

impl Explained<'_> {
    /// Writes the line.
    pub fn emit(&self) {
        let picks: Vec<&str> = self.decision.picks.iter().map(|e| &*e.authority).collect();
        tracing::info!(
            pool = self.pool,
            strategy = self.strategy,
            model = self.model,
            prompt_tokens = self.prompt_tokens,
            picks = picks.join(","),
            prefill = self.decision.split.as_ref().and_then(|s| s.prefill.first()).map(|e| &*e.authority),
            reason = self.decision.reason,
            parts = %parts(self.decision),
            "decision"
        );
    }
}

/// What each part made of each endpoint, as JSON: `[{"part", "weight", "endpoints": {"ip:port": figure}}]`; null where there was no figure.
#[must_use]
pub fn parts(decision: &Decision) -> Value {
    let part = |part: &attache_scheduling::decision::Part| {
        let figures = part.figures.iter().map(|(e, figure)| (e.authority.to_string(), json!(figure)));
        json!({"part": part.name, "weight": part.weight, "endpoints": figures.collect::<serde_json::Map<_, _>>()})
    };
    decision.parts.iter().flatten().map(part).collect()
}
