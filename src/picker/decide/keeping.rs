//! Explanations of decisions: those that are kept for `GET /explain`, and those of recorded requests.

use super::placing::{Proposal, Unproposed};
use super::{ActiveConfig, RequestState, RequestView, Scope};
use crate::event::{KeptExplanation, Unobserved};
use crate::explained::{DecisionExplanation, EndpointExplanation, StrategyChoice};
use crate::lookup::PromptLookup;
use crate::picker::Picker;
use crate::recording::RequestReads;
use crate::warming::Warming;
use attache_pool::{EndpointState, PoolSnapshot};
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{Decision, PickContext, Strategy};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;

/// Explains the decision about a request that is known without a body, as a dry run with the random numbers of `rng`.
/// Returns also the choice of the strategy `other` in the same state.
///
/// # Errors
/// The error response that the request would get before endpoints are considered.
pub fn explain_known(
    picker: &Picker,
    config: &ActiveConfig,
    q: &RequestView<'_>,
    notes: &RequestReads<'_>,
    rng: &PickRng,
    other: Option<&dyn Strategy>,
) -> Result<(DecisionExplanation, Option<StrategyChoice>), RequestError> {
    let scope = Scope { picker, config, observer: &Unobserved, dry_run: true };
    let late = |_| RequestError::new(Reason::Internal, "the prompt's tokens are not available");
    let parsed = scope.parse(q)?;
    let routed = scope.route(q, parsed.as_ref(), &mut rng.clone())?;
    let state = RequestState::new(scope, q, Some(notes), &routed)?;
    state.explain_dry_run(rng, other).map_err(|warming| late(warming).in_pool(&routed.runtime.pool.name))
}

impl RequestState<'_> {
    /// The start of a decision whose explanation is kept; `None` if it is not kept: explanations have taken the time
    /// that the settings allow, or the request has no id.
    pub(super) fn begin_explanation(&self) -> Option<Timestamp> {
        let settings = &self.scope.config.settings.explain;
        let began = self.scope.observer.begin_explanation(settings, self.q.now)?;
        Some(began).filter(|_| !self.q.head.request_id().is_empty())
    }

    /// The explanation to keep, as of before the booking, without the choice. `began`: the start of the decision, if its
    /// explanation is kept.
    pub(super) fn explanation(
        &self,
        began: Option<Timestamp>,
        snapshot: &PoolSnapshot,
        proposal: Option<&Proposal<'_>>,
    ) -> Option<(Timestamp, DecisionExplanation)> {
        began.map(|began| {
            let lookup = proposal.and_then(|proposal| proposal.lookup.as_ref());
            let splittable = proposal.is_some_and(|proposal| proposal.splittable);
            let decision = proposal.map(|proposal| &proposal.decision);
            (began, self.describe(snapshot, lookup, splittable, decision))
        })
    }

    /// The decision in the state of `snapshot`, without the choice. `decision`: its outcome, if the request is not
    /// rejected.
    fn describe(
        &self,
        snapshot: &PoolSnapshot,
        lookup: Option<&PromptLookup<'_>>,
        splittable: bool,
        decision: Option<&Decision>,
    ) -> DecisionExplanation {
        let cx = self.context(lookup, snapshot, splittable);
        let choice = &self.chosen.choice;
        let strategy = if self.routed.request.is_some() { &choice.strategy } else { &self.scope.config.least_loaded };
        let roles = strategy.roles(&cx);
        let excluded = |state: &EndpointState| {
            // The decision has taken the probe of a half-open endpoint that it picked, or ejected ones were candidates.
            let is_picked = |decision: &Decision| decision.picks.iter().any(|pick| pick.id == state.id());
            if decision.is_some_and(|decision| decision.ejection_ignored || is_picked(decision)) {
                return None;
            }
            self.pool().scheduler.exclusion(&cx, roles, state)
        };
        let prompt_tokens = lookup.map_or(cx.request.prompt_tokens, PromptLookup::prompt_tokens);
        let found = lookup.map(|lookup| &lookup.found);
        DecisionExplanation {
            request_id: self.q.head.request_id(),
            pool: self.pool().name.to_string(),
            model: self.facts.model.to_owned(),
            understood: self.routed.request.is_some(),
            strategy: choice.name.to_string(),
            profile: self.chosen.profile.as_ref().map(ToString::to_string),
            priority: self.facts.priority,
            agent: self.agent().cloned(),
            waited_ms: self.facts.waited.as_secs_f64() * 1e3,
            prompt_tokens: cx.request.prompt_tokens,
            endpoints: EndpointExplanation::all(snapshot, found, prompt_tokens, excluded),
            choice: StrategyChoice::default(),
        }
    }

    /// The decision as a dry run, with the choice; and the choice of the strategy `other` in the same state.
    ///
    /// # Errors
    /// Background work that must run first. Requests that are known without a body need none.
    fn explain_dry_run(
        &self,
        rng: &PickRng,
        other: Option<&dyn Strategy>,
    ) -> Result<(DecisionExplanation, Option<StrategyChoice>), Warming> {
        let snapshot = self.pool().store.load();
        let prepared = self.read_tokens()?;
        let lookup = self.look_up(prepared.as_ref(), &snapshot)?;
        let proposed = match self.propose(prepared.as_ref(), &snapshot, Explain::Full, None, &mut rng.clone()) {
            Ok(proposal) => Ok(proposal.decision),
            Err(Unproposed::Refused(error)) => Err(error),
            Err(Unproposed::Warm(warming)) => return Err(warming),
        };
        let splittable = self.may_split(&snapshot);
        let other = other.map(|strategy| {
            let prefix = lookup.as_ref().map(|lookup| &lookup.found).filter(|_| strategy.reads().prefix);
            let cx = PickContext { prefix, ..self.context(lookup.as_ref(), &snapshot, splittable) };
            let scheduler = &self.pool().scheduler;
            let decided = scheduler.dry_run(strategy, &cx, Explain::Full, &mut rng.clone());
            decided.as_ref().map_or_else(StrategyChoice::rejected, StrategyChoice::of)
        });
        let described = self.describe(&snapshot, lookup.as_ref(), splittable, proposed.as_ref().ok());
        let choice = proposed.as_ref().map_or_else(StrategyChoice::rejected, StrategyChoice::of);
        Ok((DecisionExplanation { choice, ..described }, other))
    }
}

impl Scope<'_> {
    /// Keeps an explanation, with the choice or the rejection. Called without the lock of the recording.
    pub(super) fn keep(
        self,
        explanation: Option<(Timestamp, DecisionExplanation)>,
        chosen: Result<&Decision, &RequestError>,
    ) {
        let Some((began, explanation)) = explanation else { return };
        let Scope { observer, config, .. } = self;
        let choice = chosen.map_or_else(StrategyChoice::rejected, StrategyChoice::of);
        let request_id = explanation.request_id.as_str().into();
        if let Ok(json) = serde_json::to_string(&DecisionExplanation { choice, ..explanation }) {
            let explanation = KeptExplanation { request_id, json: json.into() };
            observer.explained(&config.settings.explain, began, explanation);
        }
    }
}
