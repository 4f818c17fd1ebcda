//! How long a request takes on an engine without other work.

use super::EngineConfig;
use crate::latency::{StepCosts, StepWork};
use std::time::Duration;

impl EngineConfig {
    /// Time from arrival to the end of the response, if the engine has no other work and the cache holds the first
    /// `cached` tokens of the prompt: the steps of the prefill, and one step for each further token.
    #[must_use]
    pub fn alone(&self, prompt: u32, cached: u32, answer: u32) -> Duration {
        let costs = StepCosts::of(&self.latency);
        let block = self.block_size.max(1);
        // Whole blocks are cached, and the last token is always computed.
        let mut computed = cached.min(prompt.saturating_sub(1)) / block * block;
        let mut time = Duration::ZERO;
        while computed < prompt {
            let tokens = (prompt - computed).min(self.max_num_batched_tokens.max(1));
            let (before, count) = (u64::from(computed), u64::from(tokens));
            let prefill_pairs = count * before + count * (count + 1) / 2;
            time += costs.step(StepWork { prefill_tokens: count, prefill_pairs, ..StepWork::default() });
            computed += tokens;
        }
        for token in 0..answer.saturating_sub(1) {
            let context_tokens = u64::from(prompt) + u64::from(token);
            time += costs.step(StepWork { decode_sequences: 1, context_tokens, ..StepWork::default() });
        }
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Piece;
    use crate::engine::{Engine, EngineEvent, Handoff, Job, JobId, JobPrompt};
    use attache_types::clock::Timestamp;

    #[test]
    fn idle_engine_takes_as_long_as_foretold() {
        let config = EngineConfig { num_blocks: 4_096, ..EngineConfig::default() };
        let mut engine = Engine::new(config.clone());
        let mut now = Timestamp(0);
        for (id, prompt, cached, answer) in
            [(0, 20_000, 0, 1), (1, 20_000, 20_000, 300), (2, 24_123, 20_000, 77), (3, 9, 0, 2)]
        {
            let job = Job {
                id: JobId(id),
                prompt: JobPrompt::Pieces(vec![Piece::new(if id == 3 { 9 } else { 7 }, prompt)]),
                max_tokens: answer,
                stops_after: None,
                lora: None,
                cache_salt: None,
                answer_seed: 100 + id,
                handoff: Handoff::default(),
            };
            engine.submit(now, job).expect("it fits");
            let mut events = Vec::new();
            engine.advance(now.after(Duration::from_secs(60)), &mut events);
            let end = events.iter().find_map(|event| match event {
                EngineEvent::Finished { at, .. } => Some(*at),
                _ => None,
            });
            assert_eq!(end.map(|end| end.since(now)), Some(config.alone(prompt, cached, answer)), "job {id}");
            now = now.after(Duration::from_secs(60));
        }
    }
}
