//! Figures of programs, computed from their tally. Part of [`super::RunFigures`]. Pure.

use crate::tally::latency::Latency;
use crate::tally::programs::Programs;
use crate::tally::spread::jain;
use serde::{Deserialize, Serialize};

/// Groups of programs by the number of their requests, as in the benchmarks of llm-d.
const LENGTHS: [(u32, u32); 3] = [(2, 6), (7, 27), (28, u32::MAX)];

/// A distribution in five figures; times are seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of values in the distribution.
    pub count: u64,
    /// Arithmetic mean; `None` without values.
    pub mean: Option<f64>,
    /// Median.
    pub p50: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// Largest value.
    pub max: Option<f64>,
}

impl Summary {
    /// Of exact values.
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let count = values.len();
        // The least value that the part `q` of all does not exceed.
        let at = |q: f64| values.get(((q * count as f64).ceil() as usize).clamp(1, count.max(1)) - 1).copied();
        let mean = (count > 0).then(|| values.iter().sum::<f64>() / count as f64);
        Self { count: count as u64, mean, p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }

    fn of_times(times: &Latency) -> Self {
        Self {
            count: times.count(),
            mean: times.mean(),
            p50: times.quantile(0.5),
            p99: times.quantile(0.99),
            max: times.quantile(1.0),
        }
    }
}

/// Times of programs with some number of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LengthFigures {
    /// Least number of requests.
    pub least_turns: u32,
    /// Largest number of requests; `null` without limit.
    pub most_turns: Option<u32>,
    /// Times of these programs, seconds.
    pub time_seconds: Summary,
    /// Slowdowns of these programs.
    pub slowdown: Summary,
}

/// Figures of the programs of a run. Times and slowdowns are those of programs whose requests were all answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramFigures {
    /// All programs of which a request has ended.
    pub started: u64,
    /// Programs whose requests were all answered.
    pub complete: u64,
    /// Programs with a rejected or lost request.
    pub incomplete: u64,
    /// From the arrival of the first request to the end of the last response, pauses included.
    pub time_seconds: Summary,
    /// The same by the number of requests.
    pub by_turns: Vec<LengthFigures>,
    /// Time to first token of the first requests of programs and of sub-agents.
    pub ttft_first_seconds: Summary,
    /// Time to first token after the result of a tool.
    pub ttft_tool_seconds: Summary,
    /// Time to first token after a message of a person.
    pub ttft_person_seconds: Summary,
    /// Time to first token after a pause of at least 60 s.
    pub ttft_long_pause_seconds: Summary,
    /// Prompt tokens that earlier prompts of the same program had and that were computed again.
    pub recomputed_tokens: u64,
    /// Mean number of times that an agent's response came from another server than the one before, by program.
    pub moves: Option<f64>,
    /// Sum of the durations of a program's requests, by the same sum if the program has the first server for itself.
    pub slowdown: Summary,
    /// Jain's index of the slowdowns: 1 if all programs are slowed down alike.
    pub jain: Option<f64>,
}

impl ProgramFigures {
    pub(super) fn of(programs: &Programs) -> Self {
        let finished = programs.finished();
        let by_turns = LENGTHS.map(|(least, most)| {
            let of_length = || finished.iter().filter(move |program| (least..=most).contains(&program.turns));
            LengthFigures {
                least_turns: least,
                most_turns: Some(most).filter(|most| *most < u32::MAX),
                time_seconds: Summary::of(of_length().map(|program| program.time.as_secs_f64())),
                slowdown: Summary::of(of_length().filter_map(|program| program.slowdown)),
            }
        });
        let slowdowns = || finished.iter().filter_map(|program| program.slowdown);
        Self {
            started: programs.started(),
            complete: finished.len() as u64,
            incomplete: programs.incomplete(),
            time_seconds: Summary::of(finished.iter().map(|program| program.time.as_secs_f64())),
            by_turns: by_turns.to_vec(),
            ttft_first_seconds: Summary::of_times(programs.first()),
            ttft_tool_seconds: Summary::of_times(programs.tool()),
            ttft_person_seconds: Summary::of_times(programs.person()),
            ttft_long_pause_seconds: Summary::of_times(programs.long_pause()),
            recomputed_tokens: programs.recomputed(),
            moves: (programs.started() > 0).then(|| programs.moves() as f64 / programs.started() as f64),
            slowdown: Summary::of(slowdowns()),
            jain: jain(slowdowns()),
        }
    }
}
