//! What a deployment of servers can do within its service-level objectives (SLO), measured beforehand: AIBrix's profiles.
//!
//! A profile is a JSON object, as AIBrix's GPU optimizer (`gen_profile.py`) writes it:
//!
//! ```json
//! {"gpu": "llama-a100",
//!  "indexes": [[4, 8], [128, 256]],            tokens: of answers (rows), of prompts (columns)
//!  "tputs": [[9.0, 5.0], [7.0, 0.0]],          requests a second that still meet the objectives; 0 where none does
//!  "e2e":   [[0.3, 0.4], [0.5, 0.9]],          seconds from the request to the last token at that rate
//!  "ttft":  [[0.1, 0.2], [0.1, 0.2]],          seconds to the first token; may be missing, as `slos` may
//!  "slos":  {"ttft": 1.0}}                     seconds; `tpot`, `ttft`, `tpat`, `e2e`: what is 0 or missing is no objective
//! ```
//!
//! `gpu` is the name of the deployment. Other fields are for people. Whoever reads profiles publishes them in a [`SloProfiles`]; the strategies
//! of the `slo` family read them there. Source: AIBrix v0.4.

use arc_swap::ArcSwap;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// 256 lengths on an axis are far more than anybody measures.
const MAX_LENGTHS: usize = 256;

/// Why a text is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It is no JSON object of that shape.
    #[error("it is no profile: {0}")]
    Json(#[from] serde_json::Error),
    /// A field does not fit the others.
    #[error("`{field}` {wrong}")]
    Field {
        /// Its name.
        field: &'static str,
        /// What is wrong with it, and what is allowed.
        wrong: String,
    },
}

fn wrong(field: &'static str, wrong: impl Into<String>) -> ProfileError {
    ProfileError::Field { field, wrong: wrong.into() }
}

/// Objectives, seconds; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objectives {
    /// For each token after the first.
    pub tpot: Option<f64>,
    /// To the first token.
    pub ttft: Option<f64>,
    /// From the request to the last token, for each token of prompt and answer.
    pub tpat: Option<f64>,
    /// From the request to the last token.
    pub e2e: Option<f64>,
}

/// A cell of a profile's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    row: usize,
    column: usize,
}

/// One deployment's profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The deployment.
    pub deployment: String,
    /// Logarithms (base 2) of the lengths of answers and of prompts, ascending.
    lengths: [Vec<f64>; 2],
    /// Requests a second.
    rates: Vec<Vec<f64>>,
    /// Seconds.
    e2e: Vec<Vec<f64>>,
    ttft: Option<Vec<Vec<f64>>>,
    objectives: Objectives,
}

#[derive(Deserialize)]
struct File {
    gpu: String,
    indexes: [Vec<f64>; 2],
    tputs: Vec<Vec<f64>>,
    e2e: Vec<Vec<f64>>,
    #[serde(default)]
    ttft: Option<Vec<Vec<f64>>>,
    #[serde(default)]
    slos: Option<FileObjectives>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct FileObjectives {
    tpot: f64,
    ttft: f64,
    tpat: f64,
    e2e: f64,
}

fn table(
    field: &'static str,
    table: Vec<Vec<f64>>,
    [rows, columns]: [usize; 2],
) -> Result<Vec<Vec<f64>>, ProfileError> {
    if table.len() != rows || table.iter().any(|row| row.len() != columns) {
        return Err(wrong(field, format!("is not of {rows} rows of {columns}, as `indexes` has it")));
    }
    match table.iter().flatten().find(|value| !value.is_finite() || **value < 0.0) {
        Some(value) => Err(wrong(field, format!("holds {value}; 0 or more is allowed"))),
        None => Ok(table),
    }
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// As [`ProfileError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ProfileError> {
        let File { gpu, indexes, tputs, e2e, ttft, slos } = serde_json::from_slice(bytes)?;
        for lengths in &indexes {
            let ascending = lengths.windows(2).all(|pair| matches!(pair, [a, b] if a < b));
            let positive = lengths.iter().all(|length| length.is_finite() && *length > 0.0);
            if lengths.is_empty() || lengths.len() > MAX_LENGTHS || !ascending || !positive {
                let what = format!("holds other than 1 to {MAX_LENGTHS} lengths above 0, ascending, on an axis");
                return Err(wrong("indexes", what));
            }
        }
        let shape = indexes.each_ref().map(Vec::len);
        let FileObjectives { tpot, ttft: first, tpat, e2e: whole } = slos.unwrap_or_default();
        let objective = |seconds: f64| Some(seconds).filter(|s| s.is_finite() && *s > 0.0);
        Ok(Self {
            deployment: gpu,
            lengths: indexes.map(|lengths| lengths.into_iter().map(f64::log2).collect()),
            rates: table("tputs", tputs, shape)?,
            e2e: table("e2e", e2e, shape)?,
            ttft: ttft.filter(|rows| !rows.is_empty()).map(|rows| table("ttft", rows, shape)).transpose()?,
            objectives: Objectives {
                tpot: objective(tpot),
                ttft: objective(first),
                tpat: objective(tpat),
                e2e: objective(whole),
            },
        })
    }

    /// The cell of requests with so many tokens of answer and prompt: on each axis the nearest length, by its logarithm; what lies beyond an end
    /// counts as the end.
    #[must_use]
    pub fn cell(&self, answer: u32, prompt: u32) -> Cell {
        let [rows, columns] = &self.lengths;
        Cell { row: nearest(rows, answer), column: nearest(columns, prompt) }
    }

    fn at(table: &[Vec<f64>], cell: Cell) -> Option<f64> {
        table.get(cell.row)?.get(cell.column).copied()
    }

    /// By how much requests of these lengths meet the objective; `None` when there is none, or it was not measured.
    #[must_use]
    pub fn spare(&self, answer: u32, prompt: u32) -> Option<f64> {
        let cell = self.cell(answer, prompt);
        let e2e = || Self::at(&self.e2e, cell);
        let Objectives { tpot, ttft, tpat, e2e: whole } = self.objectives;
        let (target, expected) = if let Some(tpot) = tpot {
            (tpot * f64::from(answer) + ttft.unwrap_or(0.0), e2e()?)
        } else if let Some(ttft) = ttft {
            (ttft, Self::at(self.ttft.as_ref()?, cell)?)
        } else if let Some(tpat) = tpat {
            (tpat * (f64::from(answer) + f64::from(prompt)), e2e()?)
        } else {
            (whole?, e2e()?)
        };
        Some(target - expected)
    }

    /// The part of one server that a request of these lengths takes while it runs, by Little's law: at the greatest rate that meets the objectives
    /// `rate · time` run at once, and together they are 1. `None` where no rate meets them.
    #[must_use]
    pub fn consumption(&self, answer: u32, prompt: u32) -> Option<f64> {
        let cell = self.cell(answer, prompt);
        let at_once = Self::at(&self.rates, cell)? * Self::at(&self.e2e, cell)?;
        (at_once > 0.0).then(|| 1.0 / at_once)
    }
}

fn nearest(lengths: &[f64], tokens: u32) -> usize {
    let wanted = f64::from(tokens.max(1)).log2();
    let above = lengths.partition_point(|length| *length < wanted);
    let distance = |at: usize| lengths.get(at).map_or(f64::INFINITY, |length| (length - wanted).abs());
    match above.checked_sub(1) {
        Some(below) if distance(below) < distance(above) => below,
        _ => above,
    }
}

/// Where profiles are published: whoever follows them writes, strategies read.
#[derive(Debug, Default)]
pub struct SloProfiles {
    /// Where they come from.
    paths: Vec<String>,
    now: ArcSwap<Vec<Profile>>,
    followed: AtomicBool,
}

impl SloProfiles {
    /// Profiles that stand in files, none of which has been read.
    #[must_use]
    pub fn of_files(paths: Vec<String>) -> Self {
        Self { paths, ..Self::default() }
    }

    /// The files.
    #[must_use]
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    /// The profiles of now.
    #[must_use]
    pub fn load(&self) -> Arc<Vec<Profile>> {
        self.now.load_full()
    }

    /// Replaces them.
    pub fn publish(&self, profiles: Vec<Profile>) {
        self.now.store(Arc::new(profiles));
    }

    /// Whether the caller is the one to follow the files; true once.
    #[must_use]
    pub fn follow(&self) -> bool {
        !self.followed.swap(true, Relaxed)
    }
}

#[cfg(test)]
pub(crate) mod tests;
