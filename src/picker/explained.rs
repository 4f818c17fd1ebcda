//! A log line that explains a decision by the score of each part of the algorithm for each endpoint.

use attache_scheduling::Decision;

/// A decision with its explanation.
#[derive(Debug)]
pub struct Explained<'a> {
    /// Name of the request's pool.
    pub pool: &'a str,
    /// Name of the strategy, as in configurations.
    pub strategy: &'a str,
    /// Model name sent to the model server.
    pub model: &'a str,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// The decision with the scores.
    pub decision: &'a Decision,
}

impl Explained<'_> {
    /// Writes the log line.
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
            parts = %self.decision.parts_json(),
            "decision"
        );
    }
}
