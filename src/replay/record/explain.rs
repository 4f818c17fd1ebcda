//! Explains one recorded decision: the candidates, their cached tokens and scores, the choice and the runner-up, and
//! what another strategy would have chosen. Called by `cli::explain`.

use super::decision::{rng, with_request};
use super::player::RecordingPlayer;
use super::pools::{LivePool, PoolState};
use super::{Lines, RecordError, open};
use attache_picker::decide;
use attache_picker::explained::{DecisionExplanation, StrategyChoice};
use attache_record::{Decided, Line};
use attache_scheduling::{Registry, Strategy};
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::Path;

/// The explanation of a recorded decision.
#[derive(Debug, Serialize)]
pub struct RecordedExplanation {
    /// The line of the recording.
    pub line: u64,
    /// The request's number in the recording.
    pub request: u64,
    /// The decision that the replay makes.
    #[serde(flatten)]
    pub decision: DecisionExplanation,
    /// The endpoints (`ip:port`) that the live picker chose, best first; empty if it rejected the request.
    pub recorded: Vec<String>,
    /// The prefill servers that the live picker chose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recorded_prefill: Vec<String>,
    /// The encode servers that the live picker chose.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recorded_encode: Vec<String>,
    /// Reason of the recorded decision.
    pub recorded_reason: String,
    /// What another strategy would choose in the same state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<OtherChoice>,
    /// Inputs that the decision needs and the recording lacks.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub missing: BTreeSet<String>,
}

/// The choice of another strategy.
#[derive(Debug, Serialize)]
pub struct OtherChoice {
    /// Name of the strategy.
    pub strategy: String,
    /// What it chooses.
    #[serde(flatten)]
    pub choice: StrategyChoice,
}

/// Explains the decision about `request` in the recording at `path`, by its number or its `x-request-id`; the last
/// decision if it is `None`.
/// `other` is the name of a strategy that decides as well, and the strategy. Returns `None` if the recording has no
/// such request.
///
/// # Errors
/// If the file can't be read or a line is invalid.
pub fn explain(
    path: &Path,
    request: Option<&str>,
    other: Option<(&str, &dyn Strategy)>,
    registry: &Registry,
) -> Result<Option<RecordedExplanation>, RecordError> {
    let number = match request.map(str::parse) {
        Some(Ok(number)) => Some(number),
        _ => find(path, request)?,
    };
    match number {
        Some(number) => explain_in(open(path)?, number, other, registry),
        None => Ok(None),
    }
}

/// As [`explain`], for the request with this number of the recording in `source`.
///
/// # Errors
/// As [`explain`].
pub fn explain_in(
    source: impl BufRead,
    request: u64,
    other: Option<(&str, &dyn Strategy)>,
    registry: &Registry,
) -> Result<Option<RecordedExplanation>, RecordError> {
    let mut lines = Lines::open(source)?;
    let mut player = RecordingPlayer::new(&lines.header, None, registry)?;
    while let Some((line, number)) = lines.line()? {
        if let Line::Decide(decided) = &line
            && decided.r == request
        {
            let (pool, state) = player.deciding(decided, number)?;
            return Ok(Some(RecordedRequest { pool, state, d: decided, line: number }.explain(other)));
        }
        player.apply(line, number)?;
    }
    Ok(None)
}

/// The number of the last decided request with this `x-request-id`; of the last one if it is `None`.
fn find(path: &Path, id: Option<&str>) -> Result<Option<u64>, RecordError> {
    let (mut lines, mut last) = (Lines::open(open(path)?)?, None);
    while let Some((line, _)) = lines.line()? {
        if let Line::Decide(decided) = line
            && id.is_none_or(|id| decided.id == id)
        {
            last = Some(decided.r);
        }
    }
    Ok(last)
}

/// A recorded request, in the state of its pool before the decision.
struct RecordedRequest<'a> {
    pool: &'a LivePool,
    state: &'a PoolState,
    d: &'a Decided,
    line: u64,
}

impl RecordedRequest<'_> {
    fn explain(&self, other: Option<(&str, &dyn Strategy)>) -> RecordedExplanation {
        let (d, mut missing) = (self.d, BTreeSet::new());
        let explained = with_request(self.pool, self.state, d, &mut missing, |q, reads| {
            let (picker, other) = (&self.pool.picker, other.map(|(_, strategy)| strategy));
            decide::explain_known(picker, &picker.config(), q, reads, &rng(d), other)
        });
        let (mut decision, choice) = explained.unwrap_or_else(|error| (self.rejected(&error), None));
        if d.preset {
            decision.choice.reason.clone_from(&d.reason);
        }
        let other = other.zip(choice).map(|((name, _), choice)| OtherChoice { strategy: name.to_owned(), choice });
        RecordedExplanation {
            line: self.line,
            request: d.r,
            decision,
            recorded: self.authorities(&d.picks),
            recorded_prefill: self.authorities(&d.prefill),
            recorded_encode: self.authorities(&d.encode),
            recorded_reason: d.reason.clone(),
            other,
            missing,
        }
    }

    /// A request that is rejected before endpoints are considered.
    fn rejected(&self, error: &RequestError) -> DecisionExplanation {
        let d = self.d;
        DecisionExplanation {
            request_id: d.id.clone(),
            pool: d.pool.to_string(),
            model: d.model.to_string(),
            understood: d.readable,
            strategy: d.strategy.to_string(),
            profile: None,
            priority: d.priority,
            agent: None,
            waited_ms: d.waited.as_secs_f64() * 1e3,
            prompt_tokens: d.estimated,
            endpoints: Vec::new(),
            choice: StrategyChoice::rejected(error),
        }
    }

    /// `ip:port` of recorded endpoints.
    fn authorities(&self, ids: &[EndpointId]) -> Vec<String> {
        ids.iter().map(|id| self.state.authority(*id)).collect()
    }
}
