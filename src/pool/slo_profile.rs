//! SLO profiles: what a deployment can serve within its service-level objectives, measured beforehand. AIBrix's format.
//!
//! A profile is a JSON object, as AIBrix's GPU optimizer (`gen_profile.py`) writes it:
//!
//! ```json
//! {"gpu": "llama-a100",
//!  "indexes": [[4, 8], [128, 256]],            tokens: of responses (rows), of prompts (columns)
//!  "tputs": [[9.0, 5.0], [7.0, 0.0]],          requests a second that still meet the objectives; 0 where none does
//!  "e2e":   [[0.3, 0.4], [0.5, 0.9]],          seconds from the request to the last token at that rate
//!  "ttft":  [[0.1, 0.2], [0.1, 0.2]],          seconds to the first token; optional, as are `slos`
//!  "slos":  {"ttft": 1.0}}                     seconds; `tpot`, `ttft`, `tpat`, `e2e`; 0 or missing is no objective
//! ```
//!
//! A profile in a file applies to the deployment that `gpu` names, for any model. A profile in Redis applies to the
//! model and the deployment in its key, `aibrix:profile_{model}_{deployment}`. Other fields are ignored. The reader of
//! files publishes their profiles in [`SloProfiles`], the reader of Redis in [`RedisProfiles`]; strategies of the `slo`
//! family read both through [`SloProfiles`]. Source: AIBrix v0.4.

use arc_swap::{ArcSwap, ArcSwapOption};
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Largest profile that is read, 1 MiB: one of 256 by 256 lengths.
pub const MAX_PROFILE_BYTES: u64 = 1 << 20;
/// Prefix of a profile's key in Redis, as AIBrix writes it; a model, an underscore and a deployment follow.
pub const REDIS_KEY_PREFIX: &str = "aibrix:profile_";
/// Most lengths on an axis, far more than are measured in practice.
const MAX_LENGTHS: usize = 256;

/// The reason for which a text is not a valid profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The text is not JSON of this form.
    #[error("not a valid profile: {0}")]
    Json(#[from] serde_json::Error),
    /// The value of a field is invalid or does not fit the other fields.
    #[error("`{field}` {wrong}")]
    Field {
        /// Name of the invalid field.
        field: &'static str,
        /// The problem, and the allowed values.
        wrong: String,
    },
}

fn wrong(field: &'static str, wrong: impl Into<String>) -> ProfileError {
    ProfileError::Field { field, wrong: wrong.into() }
}

/// Objectives in seconds; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objectives {
    /// Time per output token after the first.
    pub tpot: Option<f64>,
    /// Time to the first token.
    pub ttft: Option<f64>,
    /// Time per token of prompt and response, from the request to the last token.
    pub tpat: Option<f64>,
    /// Time from the request to the last token.
    pub e2e: Option<f64>,
}

/// A cell of a profile's tables: one length of response and of prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    row: usize,
    column: usize,
}

/// The profile of one deployment.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The deployment named in the profile.
    pub deployment: String,
    /// The model and the deployment from the key in Redis, joined by an underscore; both may contain underscores.
    key: Option<String>,
    /// Base-2 logarithms of the lengths of responses and of prompts, ascending.
    lengths: [Vec<f64>; 2],
    /// Requests per second that meet the objectives, by cell.
    rates: Vec<Vec<f64>>,
    /// Seconds from the request to the last token at that rate, by cell.
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
    /// Parses a profile.
    ///
    /// # Errors
    /// [`ProfileError`] for invalid JSON, fields or values.
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
            key: None,
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

    /// Parses a profile from Redis that has the key [`REDIS_KEY_PREFIX`] followed by `key`.
    ///
    /// # Errors
    /// [`ProfileError`] for invalid JSON, fields or values.
    pub fn parse_keyed(key: &str, bytes: &[u8]) -> Result<Self, ProfileError> {
        Ok(Self { key: Some(key.to_owned()), ..Self::parse(bytes)? })
    }

    /// Returns the part of its key after [`REDIS_KEY_PREFIX`], if it has a key.
    #[must_use]
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Returns the deployment for requests of `model` according to the key; `None` when the
    /// profile is for another model.
    fn deployment_of(&self, model: &str) -> Option<&str> {
        match &self.key {
            Some(key) => key.strip_prefix(model)?.strip_prefix('_'),
            None => Some(&self.deployment),
        }
    }

    /// Returns the cell for requests with these numbers of tokens: on each axis the nearest length by its logarithm.
    /// Values beyond an end count as the end.
    #[must_use]
    pub fn cell(&self, answer: u32, prompt: u32) -> Cell {
        let [rows, columns] = &self.lengths;
        Cell { row: nearest(rows, answer), column: nearest(columns, prompt) }
    }

    fn at(table: &[Vec<f64>], cell: Cell) -> Option<f64> {
        table.get(cell.row)?.get(cell.column).copied()
    }

    /// Returns how many seconds requests of these lengths have left before the most urgent objective; negative if they
    /// miss it. `None` without an objective or a measurement.
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

    /// Returns the part of a server that a request of these lengths uses while it runs. By Little's law, `rate ·
    /// time` requests run at once at the highest rate that meets the objectives, and together they use 1. `None`
    /// where no rate meets them.
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

/// The published profiles of one Redis, for all strategies that read them.
pub type RedisProfiles = ArcSwap<Vec<Profile>>;

/// Where strategies find profiles: those of files, which a follower publishes here, and those of a Redis.
#[derive(Debug, Default)]
pub struct SloProfiles {
    /// The files or directories that hold profiles.
    paths: Vec<String>,
    reads_redis: bool,
    of_files: ArcSwap<Vec<Profile>>,
    of_redis: ArcSwapOption<RedisProfiles>,
    followed: AtomicBool,
}

impl SloProfiles {
    /// For profiles in files, and in Redis too if `reads_redis`. Initially without any profile.
    #[must_use]
    pub fn new(paths: Vec<String>, reads_redis: bool) -> Self {
        Self { paths, reads_redis, ..Self::default() }
    }

    /// Returns the paths of the files.
    #[must_use]
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Whether profiles in Redis are used.
    #[must_use]
    pub fn reads_redis(&self) -> bool {
        self.reads_redis
    }

    /// Returns the current profiles.
    #[must_use]
    pub fn load(&self) -> Profiles {
        let of_redis = self.of_redis.load().as_ref().map(|published| published.load_full());
        Profiles { of_redis: of_redis.unwrap_or_default(), of_files: self.of_files.load_full() }
    }

    /// Replaces the profiles of files.
    pub fn publish(&self, profiles: Vec<Profile>) {
        self.of_files.store(Arc::new(profiles));
    }

    /// Sets where the profiles of Redis are published.
    pub fn read_there(&self, published: Arc<RedisProfiles>) {
        self.of_redis.store(Some(published));
    }

    /// Returns true once: to the caller that must follow the files.
    #[must_use]
    pub fn follow(&self) -> bool {
        !self.followed.swap(true, Relaxed)
    }
}

/// The profiles at one moment.
#[derive(Clone, Debug)]
pub struct Profiles {
    of_redis: Arc<Vec<Profile>>,
    of_files: Arc<Vec<Profile>>,
}

impl Profiles {
    /// Returns the profiles of files.
    #[must_use]
    pub fn of_files(&self) -> &[Profile] {
        &self.of_files
    }

    /// Returns the profile of a deployment for requests of `model`; one in Redis precedes one in a file. If the
    /// deployment is unknown, returns the only profile for the model, if there is just one.
    #[must_use]
    pub fn find(&self, model: &str, deployment: Option<&str>) -> Option<&Profile> {
        find(&self.of_redis, model, deployment).or_else(|| find(&self.of_files, model, deployment))
    }
}

fn find<'p>(profiles: &'p [Profile], model: &str, deployment: Option<&str>) -> Option<&'p Profile> {
    let mut fitting = profiles.iter().filter_map(|p| Some((p, p.deployment_of(model)?)));
    let (found, _) = match deployment {
        Some(deployment) => fitting.find(|(_, of)| *of == deployment)?,
        None => fitting.next().filter(|_| fitting.next().is_none())?,
    };
    Some(found)
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
