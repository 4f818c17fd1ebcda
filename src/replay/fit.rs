//! An engine's constants from a recording: what steps, prompt tokens and contexts cost on the servers that answered.
//!
//! | module | owns | pure |
//! |---|---|---|
//! | this one | which constants there are, and what was found, in words | yes |
//! | [`answers`] | what a recording says of each answer | no |
//! | `spans` | stretches of time of which the work is known | yes |
//! | [`solve`] | the constants that explain them, and which can't be told | yes |
//!
//! The formula is that of [`attache_sim::latency`]: a step costs its base, and what it computes or what it reads, whichever takes longer. Which
//! of both that is follows from the constants, so they are fitted several times, each time with the steps told apart by those found before. A
//! base and the reading of weights differ only in steps that compute a prompt: where too few of those are seen, the sum of both is right and
//! one of them is that of the base profile. How long single steps take nobody sees, but of two stretches it is known how many there were and what was in them: an answer's, from its first token to its end (a step a token, and
//! whatever the same server did for others meanwhile), and, where the server had nothing else to do, that from a decision to the first
//! token. What a first token takes beside the engine (network, HTTP, tokenizing) is fitted as well and told, as a profile has no place for it.
//!
//! Servers of one recording are taken to be alike. Called by `cli::replay` and tests; imports `record` and `sim`.

pub mod answers;
pub mod solve;
mod spans;

use answers::Heard;
use attache_sim::engine::EngineConfig;
use attache_sim::profiles::file;
use solve::{COLUMNS, Estimate, Solution, Why, quantile};
use std::fmt;
use std::time::Duration;

/// With fewer answers chance has too large a say in seven constants.
pub const MIN_ANSWERS: usize = 50;

/// A constant: how it is called, and where it is in a profile. In the order in which they matter.
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
/// What a first token takes beside the engine: the column behind the constants.
const BESIDE: usize = 6;
/// So often are steps told apart that compute from those that read. The constants change by less than they scatter after two.
const ROUNDS: usize = 4;

/// Why nothing was fitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// Too few answers that tell enough.
    #[error(
        "{answers} answers tell when their first token came and how many they had ({untold} do not: not streamed, not ended, or without \
         usage); at least {MIN_ANSWERS} are needed"
    )]
    Few {
        /// Those that do.
        answers: usize,
        /// Those that don't.
        untold: usize,
    },
    /// Not even the commonest can be told.
    #[error("no constant can be told from {answers} answers: give some of more tokens, and prompts of unequal lengths")]
    Nothing {
        /// Answers that there were.
        answers: usize,
    },
}

/// An engine as it was found to be.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// Its constants, with those of the base where nothing could be told.
    pub engine: EngineConfig,
    answers: usize,
    untold: usize,
    servers: usize,
    solution: Solution,
    base: EngineConfig,
    base_name: String,
    cache_told: bool,
    beside: Duration,
}

/// Fits the constants of an engine to what was `heard`; what can't be told from it is that of `base`, which is called `base_name`.
///
/// # Errors
/// See [`FitError`].
pub fn fit(heard: &Heard, base: &EngineConfig, base_name: &str) -> Result<Fitted, FitError> {
    let (answers, untold) = (heard.answers.len(), heard.untold.len());
    if answers < MIN_ANSWERS {
        return Err(FitError::Few { answers, untold });
    }
    let mut engine = EngineConfig {
        block_size: heard.block_size.unwrap_or(base.block_size),
        num_blocks: heard.num_blocks.unwrap_or(base.num_blocks),
        ..base.clone()
    };
    // A profile's times are those at its own speed.
    let mut before = [0.0; COLUMNS];
    for (before, (_, of)) in before.iter_mut().zip(CONSTANTS) {
        *before = of(&mut engine).as_secs_f64() / base.latency.speed;
    }
    engine.latency.speed = 1.0;
    let mut fixed = [false; COLUMNS];
    let mut rows = spans::rows(heard, base, &before);
    let mut solution = solve::solve(&rows, &before, fixed);
    for _ in 1..ROUNDS {
        rows = spans::rows(heard, base, &solve::values(&solution.estimates, &before));
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
    let mut servers: Vec<u32> = heard.answers.iter().map(|answer| answer.server).collect();
    servers.sort_unstable();
    servers.dedup();
    Ok(Fitted {
        engine,
        answers,
        untold,
        servers: servers.len(),
        solution,
        base: base.clone(),
        base_name: base_name.to_owned(),
        cache_told: heard.num_blocks.is_some(),
        beside: Duration::try_from_secs_f64(values[BESIDE]).unwrap_or_default(),
    })
}

fn whole_nanos(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9).round() as u64)
}

impl Fitted {
    /// By how much the formula misses what was seen, as a part of it: in the median, and what nine of ten stretches do not exceed.
    #[must_use]
    pub fn error(&self) -> (f64, f64) {
        (quantile(&self.solution.misses, 0.5), quantile(&self.solution.misses, 0.9))
    }

    /// How a constant of the profile was found, by its name in the file.
    #[must_use]
    pub fn estimate(&self, name: &str) -> Option<Estimate> {
        let found = CONSTANTS.iter().zip(self.solution.estimates).find(|((constant, _), _)| *constant == name);
        found.map(|(_, estimate)| estimate)
    }
}

impl fmt::Display for Fitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, servers, untold, base_name, .. } = self;
        let servers = if *servers == 1 { "one server".to_owned() } else { format!("{servers} servers") };
        writeln!(f, "fitted from {answers} responses of {servers}")?;
        if *untold > 0 {
            writeln!(
                f,
                "{untold} more had no first token or no token count; they and what ran beside them are ignored"
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
        let cache = if self.cache_told {
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
            Why::Absent => "there is nothing of it in these answers",
            Why::Together => "it rises and falls with the others here",
            Why::Unsure => "it makes less difference than the times scatter",
        }
    }
}

#[cfg(test)]
mod tests;
