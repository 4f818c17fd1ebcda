//! Explains one recorded decision: the candidates, their cached tokens and scores, the choice and the runner-up, and what
//! another strategy would have chosen. Called by `cli::explain`.

use super::decision::{Prepared, prepare, subset};
use super::player::{LivePool, PoolState, RecordingPlayer};
use super::{Lines, RecordError, open};
use attache_pool::{Endpoint, EndpointState, ledger};
use attache_record::{Decided, Line};
use attache_scheduling::{Decision, PickContext, Registry, Strategy, scheduler};
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use rand::SeedableRng;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

/// The explanation of a recorded decision.
#[derive(Debug, Serialize)]
pub struct RecordedExplanation {
    /// The line of the recording.
    pub line: u64,
    /// The request's number in the recording.
    pub request: u64,
    /// The request's `x-request-id`; missing if it has none.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub request_id: String,
    /// Name of the pool.
    pub pool: String,
    /// Model name sent to the model server; empty if unknown.
    pub model: String,
    /// Whether the body was parsed. Other requests go to the endpoint with the fewest requests.
    pub understood: bool,
    /// Name of the strategy.
    pub strategy: String,
    /// The profile that selected the strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Priority of the request.
    pub priority: i32,
    /// How long the request was queued, milliseconds.
    pub waited_ms: f64,
    /// Length of the prompt by which the strategy decides, tokens.
    pub prompt_tokens: u32,
    /// All endpoints of the pool at that time.
    pub endpoints: Vec<RecordedEndpoint>,
    /// What the replay chooses.
    pub choice: StrategyChoice,
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

/// An endpoint at the time of a recorded decision.
#[derive(Debug, Serialize)]
pub struct RecordedEndpoint {
    /// `ip:port`.
    pub address: String,
    /// Prompt tokens that it is expected to have cached in GPU memory.
    pub gpu_tokens: u32,
    /// Prompt tokens that it is expected to have cached in any tier.
    pub cached_tokens: u32,
    /// Requests in flight.
    pub requests: u32,
    /// Why it is no candidate; missing if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<&'static str>,
}

/// The choice of a strategy.
#[derive(Debug, Default, Serialize)]
pub struct StrategyChoice {
    /// The endpoints (`ip:port`), best first; empty if the request is rejected.
    pub picks: Vec<String>,
    /// The servers that prefill the prompt of a split request, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<String>,
    /// The servers that encode its images and audio.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub encode: Vec<String>,
    /// The candidate whose score is closest to that of the choice, if the strategy gives scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<String>,
    /// Why the first endpoint is chosen, or why the request is rejected.
    pub reason: String,
    /// Score of each part of the strategy for each endpoint.
    pub parts: Value,
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
/// `other` is the name of a strategy that decides as well, and the strategy. Returns `None` if the recording has no such
/// request.
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

/// The results of the decision steps for a recorded request.
struct StepResults {
    strategy: String,
    profile: Option<String>,
    prompt_tokens: u32,
    endpoints: Vec<RecordedEndpoint>,
    choice: StrategyChoice,
    other: Option<OtherChoice>,
}

impl RecordedRequest<'_> {
    fn explain(&self, other: Option<(&str, &dyn Strategy)>) -> RecordedExplanation {
        let (d, mut missing) = (self.d, BTreeSet::new());
        let prepared = |prepared: &Prepared<'_>| self.explain_prepared(prepared, other);
        let explained = prepare(self.pool, self.state, d, &mut missing, prepared);
        let StepResults { strategy, profile, prompt_tokens, endpoints, choice, other } =
            explained.unwrap_or_else(|error| StepResults {
                strategy: d.strategy.to_string(),
                profile: None,
                prompt_tokens: d.estimated,
                endpoints: Vec::new(),
                choice: StrategyChoice::rejected(&error),
                other: None,
            });
        RecordedExplanation {
            line: self.line,
            request: d.r,
            request_id: d.id.clone(),
            pool: d.pool.to_string(),
            model: d.model.to_string(),
            understood: d.readable,
            strategy,
            profile,
            priority: d.priority,
            waited_ms: d.waited.as_secs_f64() * 1e3,
            prompt_tokens,
            endpoints,
            choice,
            recorded: self.authorities(&d.picks),
            recorded_prefill: self.authorities(&d.prefill),
            recorded_encode: self.authorities(&d.encode),
            recorded_reason: d.reason.clone(),
            other,
            missing,
        }
    }

    fn explain_prepared(&self, prepared: &Prepared<'_>, other: Option<(&str, &dyn Strategy)>) -> StepResults {
        let (chosen, cx) = (prepared.chosen, &prepared.cx);
        let least_loaded = scheduler::least_loaded();
        let strategy = if self.d.readable { &*chosen.choice.strategy } else { &*least_loaded };
        let other = other.map(|(name, strategy)| {
            let prefix = prepared.found.filter(|_| strategy.reads().prefix);
            OtherChoice { strategy: name.to_owned(), choice: self.choose(strategy, &PickContext { prefix, ..*cx }) }
        });
        StepResults {
            strategy: chosen.choice.name.to_string(),
            profile: chosen.profile.as_ref().map(ToString::to_string),
            prompt_tokens: cx.request.prompt_tokens,
            endpoints: self.endpoints(prepared, strategy),
            choice: if self.d.preset { self.preset() } else { self.choose(strategy, cx) },
            other,
        }
    }

    /// `ip:port` of recorded endpoints.
    fn authorities(&self, ids: &[EndpointId]) -> Vec<String> {
        ids.iter().map(|id| self.state.authority(*id)).collect()
    }

    /// The endpoint that no strategy chose: a stored response or a test header named it.
    fn preset(&self) -> StrategyChoice {
        let picks = self.authorities(&self.d.picks);
        StrategyChoice { picks, reason: self.d.reason.clone(), parts: json!([]), ..StrategyChoice::default() }
    }

    /// The choice of `strategy`, with the random numbers of the recorded decision.
    fn choose(&self, strategy: &dyn Strategy, cx: &PickContext<'_>) -> StrategyChoice {
        let mut rng = PickRng::seed_from_u64(self.d.rng);
        match self.pool.scheduler.dry_run(strategy, cx, subset(self.d).as_ref(), &mut rng) {
            Ok(decision) => StrategyChoice::of(&decision),
            Err(error) => StrategyChoice::rejected(&error),
        }
    }

    fn endpoints(&self, prepared: &Prepared<'_>, strategy: &dyn Strategy) -> Vec<RecordedEndpoint> {
        let Prepared { cx, found, prompt, .. } = prepared;
        let length = found.map_or(cx.request.prompt_tokens, |found| found.prompt_tokens(prompt));
        let (subset, roles) = (subset(self.d), strategy.roles(cx));
        let endpoint = |state: &EndpointState| {
            let depth = found.map(|found| found.depth(state.id())).unwrap_or_default();
            let tokens = |blocks| found.map_or(0, |found| found.tokens(blocks).min(length));
            RecordedEndpoint {
                address: state.endpoint.authority.to_string(),
                gpu_tokens: tokens(depth.gpu),
                cached_tokens: tokens(depth.any),
                requests: ledger::requests(&state.endpoint, state.metrics()),
                excluded: self.pool.scheduler.exclusion(cx, subset.as_ref(), roles, state),
            }
        };
        cx.snapshot.endpoints.iter().map(endpoint).collect()
    }
}

impl StrategyChoice {
    fn of(decision: &Decision) -> Self {
        let authorities =
            |endpoints: &[Arc<Endpoint>]| endpoints.iter().map(|endpoint| endpoint.authority.to_string()).collect();
        Self {
            picks: authorities(&decision.picks),
            prefill: decision.split.as_ref().map(|split| authorities(&split.prefill)).unwrap_or_default(),
            encode: authorities(&decision.encode),
            runner_up: runner_up(decision),
            reason: decision.reason.to_owned(),
            parts: decision.parts_json(),
        }
    }

    fn rejected(error: &RequestError) -> Self {
        let reason = format!("{}: {}", error.reason.code(), error.message);
        Self { reason, parts: json!([]), ..Self::default() }
    }
}

/// The candidate whose score is closest to that of the choice.
fn runner_up(decision: &Decision) -> Option<String> {
    let (scores, first) = (decision.scores(), decision.picks.first()?);
    let (_, best) = scores.iter().find(|(endpoint, _)| endpoint.id == first.id)?;
    let others = scores.iter().filter(|(endpoint, _)| endpoint.id != first.id);
    let closest = others.min_by(|(_, a), (_, b)| (a - best).abs().total_cmp(&(b - best).abs()));
    closest.map(|(endpoint, _)| endpoint.authority.to_string())
}
