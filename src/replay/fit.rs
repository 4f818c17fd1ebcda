//! Estimates engine constants from a recording: seconds per step, prompt token and context
//! token of the recorded servers.
//!
//! | module | owns | pure |
//! |---|---|---|
//! | this one | the constants, and the result in words | yes |
//! | [`answers`] | times and lengths of recorded responses | no |
//! | `spans` | stretches of time with known work | yes |
//! | [`solve`] | least squares, and which constants it does not identify | yes |
//!
//! The formula is that of [`attache_sim::latency`]: a step takes its base plus the longer of compute and memory reads.
//! The constants decide which of both is longer. They are therefore fitted several times, each time with the
//! classification of steps from the fit before. Step base and weight reads differ only in steps that compute a prompt.
//! With too few of those, their sum is right and one of them comes from the base profile.
//!
//! A recording does not show single steps. Two kinds of stretches have known work:
//!
//! * a response from its first token to its end: one step per token, together with the other work of the same server;
//! * the time from a decision to the first token, where the server had no other work.
//!
//! The overhead of a first token outside the engine (network, HTTP, tokenizing) is fitted and reported as well.
//! Profiles have no field for it.
//!
//! All servers of a recording are assumed to have equal constants. Called by `cli::replay` and tests; imports `record`
//! and `sim`.

pub mod answers;
pub mod solve;
mod spans;

use answers::RecordedLoad;
use attache_sim::engine::EngineConfig;
use attache_sim::profiles::file;
use solve::{COLUMNS, Estimate, Solution, Why, quantile};
use std::fmt;
use std::time::Duration;

/// At least 50 responses. With fewer, noise dominates some of the seven constants.
pub const MIN_ANSWERS: usize = 50;

/// Name of a constant and its field in a profile, ordered by their share of a step.
type Constant = (&'static str, fn(&mut EngineConfig) -> &mut Duration);

const CONSTANTS: [Constant; COLUMNS - 1] = [
    ("weightRead", |e| &mut e.latency.weight_read),
    ("stepBase", |e| &mut e.latency.step_base),
    ("perPrefillToken", |e| &mut e.latency.per_prefill_token),
    ("perContextToken", |e| &mut e.latency.per_context_token),
    ("perDecodeSequence", |e| &mut e.latency.per_decode_sequence),
    ("perPrefillPair", |e| &mut e.latency.per_prefill_pair),
];
const WEIGHTS: usize = 0;
const STEP: usize = 1;
const PREFILL: usize = 2;
const CONTEXT: usize = 3;
const DECODE: usize = 4;
const PAIR: usize = 5;
/// Column of the overhead of a first token outside the engine, behind the constants.
const BESIDE: usize = 6;
/// Rounds of classifying steps as bound by compute or by memory. After two, constants change by less than their error.
const ROUNDS: usize = 4;

/// Why a recording does not identify the constants.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// The recording has too few responses of known length and times.
    #[error(
        "{answers} responses have a time of the first token and a token count ({unmeasured} do not: not streamed, not \
         ended, or without \
         usage); at least {MIN_ANSWERS} are needed"
    )]
    Few {
        /// Responses of known length and times.
        answers: usize,
        /// All other requests of the recording.
        unmeasured: usize,
    },
    /// Not even the most significant constant is identified.
    #[error("{answers} responses identify no constant: record longer responses, and prompts of unequal lengths")]
    Nothing {
        /// Responses of known length and times.
        answers: usize,
    },
}

/// Engine constants, with the quality of their fit.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// The engine with its fitted constants. Constants that the recording does not identify are those of the base.
    pub engine: EngineConfig,
    answers: usize,
    unmeasured: usize,
    servers: usize,
    solution: Solution,
    base: EngineConfig,
    base_name: String,
    cache_reported: bool,
    beside: Duration,
}

/// Fits engine constants to `load`. Constants that it does not identify come from `base`, whose name is `base_name`.
///
/// # Errors
/// See [`FitError`].
pub fn fit(load: &RecordedLoad, base: &EngineConfig, base_name: &str) -> Result<Fitted, FitError> {
    let (answers, unmeasured) = (load.answers.len(), load.unmeasured.len());
    if answers < MIN_ANSWERS {
        return Err(FitError::Few { answers, unmeasured });
    }
    let mut engine = EngineConfig {
        block_size: load.block_size.unwrap_or(base.block_size),
        num_blocks: load.num_blocks.unwrap_or(base.num_blocks),
        ..base.clone()
    };
    // A profile's times are those at its own speed.
    let mut before = [0.0; COLUMNS];
    for (before, (_, of)) in before.iter_mut().zip(CONSTANTS) {
        *before = of(&mut engine).as_secs_f64() / base.latency.speed;
    }
    engine.latency.speed = 1.0;
    let mut fixed = [false; COLUMNS];
    let mut rows = spans::rows(load, base, &before);
    let mut solution = solve::solve(&rows, &before, fixed);
    for _ in 1..ROUNDS {
        rows = spans::rows(load, base, &solve::values(&solution.estimates, &before));
        solution = solve::solve(&rows, &before, fixed);
    }
    if let Some(Estimate::Fitted { value, error }) = solution.estimates.get(PAIR).copied() {
        // Whole nanoseconds are coarse for it; the others make up for what is lost.
        (before[PAIR], fixed[PAIR]) = (whole_nanos(value).as_secs_f64(), true);
        solution = solve::solve(&rows, &before, fixed);
        solution.estimates[PAIR] = Estimate::Fitted { value: before[PAIR], error };
    }
    if solution.estimates.iter().take(BESIDE).all(|estimate| matches!(estimate, Estimate::Kept(_))) {
        return Err(FitError::Nothing { answers });
    }
    let values = solve::values(&solution.estimates, &before);
    for ((_, of), value) in CONSTANTS.iter().zip(values) {
        *of(&mut engine) = whole_nanos(value);
    }
    let mut servers: Vec<u32> = load.answers.iter().map(|answer| answer.server).collect();
    servers.sort_unstable();
    servers.dedup();
    Ok(Fitted {
        engine,
        answers,
        unmeasured,
        servers: servers.len(),
        solution,
        base: base.clone(),
        base_name: base_name.to_owned(),
        cache_reported: load.num_blocks.is_some(),
        beside: Duration::try_from_secs_f64(values[BESIDE]).unwrap_or_default(),
    })
}

fn whole_nanos(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9).round() as u64)
}

impl Fitted {
    /// Relative errors of the formula over all stretches: median and 90th percentile.
    #[must_use]
    pub fn error(&self) -> (f64, f64) {
        (quantile(&self.solution.misses, 0.5), quantile(&self.solution.misses, 0.9))
    }

    /// The estimate of a constant, by its name in profile files.
    #[must_use]
    pub fn estimate(&self, name: &str) -> Option<Estimate> {
        let found = CONSTANTS.iter().zip(self.solution.estimates).find(|((constant, _), _)| *constant == name);
        found.map(|(_, estimate)| estimate)
    }
}

impl fmt::Display for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, servers, unmeasured, base_name, .. } = self;
        let servers = if *servers == 1 { "one server".to_owned() } else { format!("{servers} servers") };
        writeln!(f, "fitted from {answers} responses of {servers}")?;
        if *unmeasured > 0 {
            writeln!(
                f,
                "{unmeasured} more had no first token or no token count; they and what ran beside them are ignored"
            )?;
        }
        let (mut engine, mut base) = (self.engine.clone(), self.base.clone());
        for ((name, of), estimate) in CONSTANTS.iter().zip(self.solution.estimates) {
            let (now, before) = (file::show(*of(&mut engine)), file::show(*of(&mut base)));
            match estimate {
                Estimate::Fitted { error, .. } => {
                    writeln!(f, "  {name}: {now} ± {:.1} % ({base_name}: {before})", 100.0 * error)?;
                }
                Estimate::Kept(why) => writeln!(f, "  {name}: {now}, from {base_name}: {}", why.words())?,
            }
        }
        let cache = if self.cache_reported {
            "as reported by the servers"
        } else {
            "from the base profile; the servers report none"
        };
        writeln!(f, "  blockSize: {}, numBlocks: {}, {cache}", engine.block_size, engine.num_blocks)?;
        writeln!(f, "  all other constants: from {base_name}; responses do not show them")?;
        if !self.beside.is_zero() {
            writeln!(f, "network and HTTP add {:.1?} to a first token; no profile includes that", self.beside)?;
        }
        let (median, most) = self.error();
        let Solution { misses, outliers, .. } = &self.solution;
        let spans = misses.len();
        write!(f, "of {spans} times that were seen the fit misses one half by less than {:.1} %", 100.0 * median)?;
        writeln!(f, " and nine tenths by less than {:.1} %", 100.0 * most)?;
        if *outliers > 0 {
            writeln!(f, "{outliers} others are left out: they took far longer or shorter than the formula has it")?;
        }
        Ok(())
    }
}

impl Why {
    fn words(self) -> &'static str {
        match self {
            Why::Absent => "no recorded response depends on it",
            Why::Together => "it can't be separated from the others here",
            Why::Unsure => "its effect is smaller than the noise",
        }
    }
}

#[cfg(test)]
mod tests;
