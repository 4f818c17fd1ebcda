//! Chooses the endpoints of a request: narrows a pool to the candidates, and has a strategy rank them.
//!
//! The steps of [`Scheduler::decide`]:
//!
//! 1. Candidates have the roles that the strategy needs, pass the gateway's subset and the label selector, and are not
//!    ejected. If all of them are ejected, ejection is ignored.
//! 2. The strategy ranks the candidates ([`Strategy::rank`]).
//! 3. If the pool splits requests, the strategy also proposes a pair, and the pool's decider accepts or rejects it
//!    ([`super::split`]).
//! 4. If the first pick is half open, this request claims its probe. If another request has the probe, the endpoint is
//!    no candidate any more, and step 2 follows again.
//! 5. The strategy stores what it remembers of the decision ([`Strategy::picked`]).
//!
//! Called by `picker` and `replay`. [`Scheduler::dry_run`] explains a decision without changing state. Pure.

use super::candidates::Candidate;
use super::choice::Choices;
use super::decision::{Decision, Ranking};
use super::facts::media;
use super::least_request::LeastRequest;
use super::objective::Objective;
use super::plugin::{PickContext, Strategy};
use super::split::{self, ComparedPair, Decider, Pair, Split, SplitPolicy, Unpaired};
use attache_pool::health::{Availability, HealthPolicy};
use attache_pool::{Endpoint, EndpointState, Roles};
use attache_types::error::{Reason, RequestError};
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Makes the decisions of one pool.
#[derive(Debug)]
pub struct Scheduler {
    /// Chooses the strategy of a request.
    pub choices: Choices,
    health: HealthPolicy,
    /// Endpoints of a decision, at most: the first pick and its fallbacks.
    wanted: usize,
    split: Option<SplitPolicy>,
    objective: Objective,
    /// Whether a request that could not be split for the gateway's body mode is still to be reported.
    may_report_unsplit: AtomicBool,
}

/// Whether a decision explains the figures of each part of the algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Explain {
    /// No explanation and no cost.
    #[default]
    No,
    /// Fills [`Decision::parts`] and [`Decision::compared`].
    Yes,
    /// Fills [`Decision::runner_up`] too, by another ranking: of an explanation, not of a request.
    Full,
}

impl Scheduler {
    /// Whether to report that a request was not split because the gateway's body mode leaves no time. True once.
    #[must_use]
    pub fn report_unsplit(&self) -> bool {
        self.may_report_unsplit.load(Relaxed) && self.may_report_unsplit.swap(false, Relaxed)
    }

    /// A scheduler that decides by `choices`; a decision has up to `wanted` endpoints.
    #[must_use]
    pub fn new(choices: Choices, health: HealthPolicy, wanted: usize) -> Self {
        Self {
            choices,
            health,
            wanted: wanted.max(1),
            split: None,
            objective: Objective::default(),
            may_report_unsplit: AtomicBool::new(true),
        }
    }

    /// Sets the policy for splitting requests over prefill and decode servers.
    #[must_use]
    pub fn splitting(mut self, policy: Option<SplitPolicy>) -> Self {
        self.split = policy;
        self
    }

    /// Sets the objective for strategies that predict latency.
    #[must_use]
    pub fn aiming_at(mut self, objective: Objective) -> Self {
        self.objective = objective.normalised();
        self
    }

    /// The policy for splitting requests, if there is one.
    #[must_use]
    pub fn split(&self) -> Option<&SplitPolicy> {
        self.split.as_ref()
    }

    /// The policy for ejecting endpoints.
    #[must_use]
    pub fn health(&self) -> &HealthPolicy {
        &self.health
    }

    /// As [`Scheduler::decide`], without side effects: the strategy remembers nothing, and no endpoint is probed.
    ///
    /// # Errors
    /// As [`Scheduler::decide`].
    pub fn dry_run(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<Decision, RequestError> {
        let cx = &PickContext { dry_run: true, objective: self.objective, ..*cx };
        Round { scheduler: self, strategy, cx, explain, rng }.run()
    }

    /// Decides by `strategy` which endpoints serve the request, among those that `cx` allows, and records the decision in
    /// the strategy.
    ///
    /// # Errors
    /// Status 503:
    ///
    /// * `subset_empty` if the gateway's subset or the request's label selector allows no endpoint of the pool, or a part
    ///   of the strategy removed all ready ones.
    /// * `no_ready_endpoint` if no endpoint is ready, or the strategy picks none.
    /// * `no_prefill_endpoint` and `no_whole_endpoint` if the ready endpoints cannot serve the request alone, or must not
    ///   ([`SplitPolicy::required`]).
    pub fn decide(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<Decision, RequestError> {
        let cx = &PickContext { objective: self.objective, ..*cx };
        let mut decision = Round { scheduler: self, strategy, cx, explain, rng }.run()?;
        if let Some(first) = decision.picks.first() {
            decision.trail = strategy.picked(cx, first).map(Box::new);
        }
        if let Some(prefill) = decision.split.as_ref().and_then(|split| split.prefill.first()) {
            strategy.picked_prefill(cx, prefill);
        }
        for encoder in &decision.encode {
            strategy.picked_encode(cx, encoder);
        }
        Ok(decision)
    }

    /// Why an endpoint is no candidate for a request of a strategy that wants `roles`; `None` if it is one.
    #[must_use]
    pub fn exclusion(&self, cx: &PickContext<'_>, roles: Roles, state: &EndpointState) -> Option<&'static str> {
        let spec = &state.endpoint.spec;
        if state.is_draining() {
            Some("draining")
        } else if !state.serves(roles) {
            Some("has another role")
        } else if cx.subset.is_some_and(|subset| !subset.allows(spec.address)) {
            Some("not in the gateway's subset")
        } else if cx.filter.is_some_and(|filter| !filter.matches(&spec.labels)) {
            Some("its labels do not match the request's selector")
        } else if state.live().health.availability(cx.now, &self.health) == Availability::Ejected {
            Some("ejected")
        } else {
            None
        }
    }

    /// The candidates of a strategy that needs `roles`.
    #[must_use]
    pub fn eligible<'a>(&self, cx: &PickContext<'a>, roles: Roles) -> Vec<Candidate<'a>> {
        self.candidates(cx, roles).candidates
    }

    /// The endpoints with all of `roles` that may serve the request. Calls `ejected` for those that are ejected.
    fn open<'a>(
        &self,
        cx: &PickContext<'a>,
        roles: Roles,
        mut ejected: impl FnMut(&'a EndpointState),
    ) -> Vec<Candidate<'a>> {
        let mut candidates = Vec::with_capacity(cx.snapshot.endpoints.len());
        let is_restricted = cx.subset.is_some() || cx.filter.is_some();
        for state in &cx.snapshot.endpoints {
            if !state.serves(roles) || (is_restricted && !cx.allows(&state.endpoint.spec)) {
                continue;
            }
            let surcharge = match state.live().health.availability(cx.now, &self.health) {
                Availability::Open | Availability::HalfOpen => 0,
                Availability::SlowStart(percent) => percent,
                Availability::Ejected => {
                    ejected(state);
                    continue;
                }
            };
            candidates.push(Candidate::new(state, cx.now, cx.stale_after, surcharge));
        }
        // A separate pass: within the loop above, its cache misses would delay loading the next endpoints.
        Candidate::look_up(&mut candidates, cx);
        candidates
    }

    /// The endpoints that may serve the request. If all of them are ejected, ejection is ignored. The request
    /// would fail anyway, and failures of a whole pool often have a cause outside of its servers.
    fn candidates<'a>(&self, cx: &PickContext<'a>, roles: Roles) -> CandidateSet<'a> {
        let mut ejected: SmallVec<[&'a EndpointState; 4]> = SmallVec::new();
        let candidates = self.open(cx, roles, |state| ejected.push(state));
        let mut field = CandidateSet { candidates, ejected, ejection_ignored: false };
        if field.candidates.is_empty() {
            field.ignore_ejection(cx);
        }
        field
    }
}

/// One scheduling of one request.
struct Round<'r> {
    scheduler: &'r Scheduler,
    strategy: &'r dyn Strategy,
    cx: &'r PickContext<'r>,
    explain: Explain,
    /// The random numbers of the request.
    rng: &'r mut PickRng,
}

impl Round<'_> {
    /// An empty ranking, for as many endpoints as the pool wants.
    fn ranking(&self) -> Ranking {
        let ranking = Ranking::new(self.scheduler.wanted);
        if self.explain == Explain::No { ranking } else { ranking.explained() }
    }

    /// Narrows the pool to the candidates, has the strategy rank them, and splits the request if the pool does.
    ///
    /// # Errors
    /// As [`Scheduler::decide`].
    fn run(mut self) -> Result<Decision, RequestError> {
        let Self { scheduler, strategy, cx, explain, .. } = self;
        let mut field = scheduler.candidates(cx, strategy.roles(cx));
        if field.candidates.is_empty() {
            return Err(no_candidate(cx, strategy.roles(cx)));
        }
        // Each pass decides, or drops candidates: one whose probe another decision has taken, or those that cannot
        // serve the request. If the strategy wants none of the rest, ejection is ignored and the next pass decides.
        loop {
            let drawn = (explain == Explain::Full).then(|| self.rng.clone());
            let mut ranking = self.ranking();
            strategy.rank(cx, &field.candidates, self.rng, &mut ranking);
            let emptied_by = ranking.emptied_by();
            let Some(mut decision) = ranking.decide() else {
                // The strategy may accept only endpoints that are ejected.
                if field.ejection_ignored || field.ejected.is_empty() {
                    return Err(no_pick(emptied_by));
                }
                field.ignore_ejection(cx);
                continue;
            };
            decision.ejection_ignored = field.ejection_ignored;
            decision = self.divide(&field.candidates, decision);
            if let Some(drawn) = drawn {
                decision.runner_up = self.runner_up(&field.candidates, &decision, drawn);
            }
            if !self.can_serve(&mut decision, &mut field) {
                self.return_probes(&decision);
                if field.candidates.is_empty() {
                    return Err(scheduler.no_pair(cx));
                }
                continue;
            }
            let Some(first) = decision.picks.first().filter(|_| !field.ejection_ignored) else { return Ok(decision) };
            let granted = match first.health.availability(cx.now, &scheduler.health) {
                Availability::Open | Availability::SlowStart(_) => true,
                Availability::HalfOpen => {
                    decision.probe = self.claim_probe(first);
                    decision.probe
                }
                // It was half open when candidates were collected: another decision has taken the probe since.
                Availability::Ejected => false,
            };
            if granted {
                return Ok(decision);
            }
            self.return_probes(&decision);
            field.exclude(first.id);
            if field.candidates.is_empty() {
                field.ignore_ejection(cx);
            }
        }
    }

    /// Adds prefill and encode servers to the decision `whole`, if the request is split.
    fn divide(&mut self, decode: &[Candidate<'_>], whole: Decision) -> Decision {
        let Some(policy) = &self.scheduler.split else { return whole };
        let mut sent = if self.cx.splittable && policy.decider != Decider::Never {
            self.pair(policy, decode, whole)
        } else {
            whole
        };
        if self.cx.encodable {
            self.encode(policy, decode, &mut sent);
        }
        sent
    }

    /// Sets the encode servers in `sent`, if the request has images or audio.
    fn encode(&mut self, policy: &SplitPolicy, decode: &[Candidate<'_>], sent: &mut Decision) {
        let Self { scheduler, strategy, cx, .. } = *self;
        let Some(decoder) = sent.picks.first() else { return };
        // Counting media visits each image, so pools without encode servers skip it.
        if !cx.snapshot.endpoints.iter().any(|e| e.serves(Roles::ENCODE) && e.endpoint.id != decoder.id) {
            return;
        }
        let items = media::items(cx);
        if items == 0 {
            return;
        }
        let mut encode = scheduler.open(cx, Roles::ENCODE, |_| {});
        encode.retain(|c| c.id == decoder.id || policy.fits(&c.state.endpoint, decoder));
        if encode.is_empty() {
            return;
        }
        let ranking = Ranking::new(items);
        let ranking = if sent.parts.is_some() { ranking.explained() } else { ranking };
        let field = split::Media { encode: &encode, decode, sent };
        let Some(chosen) = strategy.encoders(cx, &field, self.rng, ranking) else { return };
        sent.encode = chosen.picks.into_vec();
        sent.encode_probe = self.claim_one(&mut sent.encode);
        if let (Some(parts), Some(more)) = (&mut sent.parts, chosen.parts) {
            parts.extend(more);
        }
    }

    /// Has the strategy propose a pair. The pair replaces `whole` if the strategy or the pool's decider requires it, or
    /// if the first pick serves no whole requests.
    fn pair(&mut self, policy: &SplitPolicy, decode: &[Candidate<'_>], whole: Decision) -> Decision {
        let Self { scheduler, strategy, cx, .. } = *self;
        let serves_whole = |endpoint: &Endpoint| !cx.generates || policy.serves_whole(endpoint);
        let alone = whole.picks.first().is_some_and(|first| serves_whole(first));
        // An ejected prefill server is used only if no other prefill server and no whole server is left.
        let prefill = if alone || decode.iter().any(|c| serves_whole(&c.state.endpoint)) {
            scheduler.open(cx, Roles::PREFILL, |_| {})
        } else {
            scheduler.candidates(cx, Roles::PREFILL).candidates
        };
        let unpaired = || {
            let decoder = whole.picks.first().and_then(|first| decode.iter().find(|c| c.id == first.id));
            decoder.and_then(|decoder| policy.unpaired(strategy, cx, decoder))
        };
        let field = split::PairCandidates { prefill: &prefill, decode, whole: &whole, policy };
        let pair = if prefill.is_empty() { None } else { strategy.pair(cx, &field, self.rng, self.ranking()) };
        let Some(mut pair) = pair else {
            return Decision { unpaired: unpaired(), ..whole };
        };
        let (split, costs) = match pair.split {
            _ if !alone => (true, pair.costs),
            Some(split) => (split, pair.costs),
            None => {
                let (split, costs) = split::is_split(cx, &field, &pair, policy.decider);
                (split, costs.or(pair.costs))
            }
        };
        let compared = whole.parts.is_some().then(|| {
            let decided_by =
                if alone { policy.decider.about() } else { "the decode server, which serves no whole requests" };
            ComparedPair::of(&pair, &whole, costs, (split, decided_by))
        });
        let mut probe = false;
        if split {
            let first = pair.prefill.first().cloned().filter(|_| !alone);
            probe = self.claim(&mut pair.prefill);
            if pair.prefill.is_empty() {
                pair.prefill.extend(first);
            }
        }
        let held = pair.prefill.first().and_then(|p| prefill.iter().find(|c| c.state.endpoint.id == p.id));
        let carried = |c: &Candidate<'_>| cx.prefix.map_or(0, |found| found.carried(c.id).0);
        let (Some(held), false) = (held.map(|c| c.cached.any.max(carried(c))), pair.decode.is_empty()) else {
            // Other requests probe the prefill servers of the pair.
            let unpaired = split.then_some(Unpaired::Wanted);
            return Decision { unpaired, ..whole };
        };
        let mut decision = Decision { compared: compared.flatten(), ..whole };
        if let Some(parts) = &mut decision.parts {
            parts.append(&mut pair.parts);
        }
        if split {
            let Pair { prefill, mut decode, reason, .. } = pair;
            // The other decode servers must be able to continue from the same prefill.
            let first = decode.first().map(|first| first.id);
            decode.retain(|d| Some(d.id) == first || prefill.iter().all(|p| policy.pairs(p, d)));
            decision.picks = decode;
            decision.second = None;
            decision.split = Some(Box::new(Split { prefill, prefill_cached: held, probe, reason }));
        }
        decision
    }

    /// Whether the picks of `decision` can serve the request. Without a split, only picks that serve whole requests
    /// are kept, and none if the request must be split. If none is left, `field` loses the first pick and all candidates
    /// that can never serve it.
    fn can_serve(&self, decision: &mut Decision, field: &mut CandidateSet<'_>) -> bool {
        let cx = self.cx;
        let Some(policy) = self.scheduler.split.as_ref().filter(|_| cx.generates && decision.split.is_none()) else {
            return true;
        };
        let first = decision.picks.first().map(|first| first.id);
        let must_split = policy.required && decision.unpaired == Some(Unpaired::Wanted);
        decision.picks.retain(|endpoint| !must_split && policy.serves_whole(endpoint));
        if let Some(kept) = decision.picks.first() {
            decision.second.take_if(|_| Some(kept.id) != first);
            return true;
        }
        // Another candidate may have a prefill server for this request, or need none.
        let may = |e: &Endpoint| Some(e.id) != first && (cx.splittable || policy.serves_whole(e));
        field.candidates.retain(|c| may(&c.state.endpoint));
        if field.candidates.is_empty() && !field.ejection_ignored {
            field.ignore_ejection(cx);
        }
        false
    }
}

/// The candidates for a request.
struct CandidateSet<'a> {
    candidates: Vec<Candidate<'a>>,
    /// Endpoints that are excluded because they are ejected.
    ejected: SmallVec<[&'a EndpointState; 4]>,
    /// Whether the ejected ones are candidates too, because no others are left.
    ejection_ignored: bool,
}

impl CandidateSet<'_> {
    /// Adds the ejected endpoints to the candidates.
    fn ignore_ejection(&mut self, cx: &PickContext<'_>) {
        let known = self.candidates.len();
        self.candidates.extend(self.ejected.drain(..).map(|s| Candidate::new(s, cx.now, cx.stale_after, 0)));
        Candidate::look_up(self.candidates.get_mut(known..).unwrap_or_default(), cx);
        self.ejection_ignored = true;
    }

    /// Excludes an endpoint whose probe another decision has taken, or that was ejected.
    fn exclude(&mut self, endpoint: EndpointId) {
        let ejected = &mut self.ejected;
        self.candidates.retain(|c| {
            let stays = c.id != endpoint;
            if !stays {
                ejected.push(c.state);
            }
            stays
        });
    }
}

/// Error if the strategy picked no endpoint. `emptied_by` is the part of the strategy that removed all candidates.
fn no_pick(emptied_by: Option<&'static str>) -> RequestError {
    match emptied_by {
        // Endpoints are ready: the request is rejected where a gateway's own load balancer would serve it, too.
        Some(part) => RequestError::new(
            Reason::SubsetEmpty,
            format!("`{part}` left none of the pool's ready endpoints for this request"),
        ),
        None => RequestError::new(Reason::NoReadyEndpoint, "the strategy chose no endpoint"),
    }
}

/// Error if the pool has no candidate, with the most specific cause.
fn no_candidate(cx: &PickContext<'_>, roles: Roles) -> RequestError {
    let snapshot = cx.snapshot;
    let total = snapshot.endpoints.len();
    let draining = snapshot.endpoints.iter().filter(|s| s.is_draining()).count();
    let allowed = |s: &&EndpointState| cx.subset.is_none_or(|h| h.allows(s.endpoint.spec.address));
    if cx.subset.is_some() && snapshot.endpoints.iter().filter(allowed).count() == 0 {
        return RequestError::new(
            Reason::SubsetEmpty,
            format!("the gateway's subset hint leaves none of the pool's {total} endpoints"),
        );
    }
    let filtered = cx.filter.is_some_and(|f| !snapshot.endpoints.iter().any(|s| f.matches(&s.endpoint.spec.labels)));
    if filtered {
        let message = format!("the request's label selector leaves none of the pool's {total} endpoints");
        return RequestError::new(Reason::SubsetEmpty, message);
    }
    let other = snapshot.endpoints.iter().filter(|s| !s.endpoint.roles.has(roles)).count();
    let other = if other == 0 { String::new() } else { format!(", {other} do not generate responses") };
    RequestError::new(
        Reason::NoReadyEndpoint,
        format!("no endpoint of the pool is ready ({total} known, {draining} draining{other})"),
    )
}

/// The strategy of requests without a readable body.
#[must_use]
pub fn least_loaded() -> Arc<dyn Strategy> {
    Arc::new(LeastRequest)
}

mod absence;
mod claims;
mod runner_up;
mod successor;
#[cfg(test)]
mod tests;
