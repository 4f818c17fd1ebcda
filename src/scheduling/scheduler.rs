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
use attache_pool::{Endpoint, EndpointSpec, EndpointState, Roles};
use attache_types::error::{Reason, RequestError};
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use smallvec::SmallVec;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Returns the probes of encode and prefill servers that a dropped decision has claimed.
fn return_probes(cx: &PickContext<'_>, decision: &Decision) {
    let unprobed = [
        decision.encode.first().filter(|_| decision.encode_probe),
        decision.split.as_ref().filter(|split| split.probe).and_then(|split| split.prefill.first()),
    ];
    if !cx.dry_run {
        unprobed.into_iter().flatten().for_each(|endpoint| endpoint.health.probe_lost());
    }
}

/// Endpoints that the gateway allows, from its subset hint. An entry without a port allows every port of the address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subset(SmallVec<[(IpAddr, Option<u16>); 4]>);

/// Most entries of a subset hint; further ones are ignored and counted as malformed.
pub const MAX_SUBSET_ENTRIES: usize = 4_096;

impl Subset {
    /// Adds one entry (`10.0.0.1:8000`, `10.0.0.1`, `[::1]:8000`, `::1`). Returns false if it is malformed or exceeds
    /// [`MAX_SUBSET_ENTRIES`].
    pub fn add(&mut self, entry: &str) -> bool {
        let parsed = parse_entry(entry.trim()).filter(|_| self.0.len() < MAX_SUBSET_ENTRIES);
        self.0.extend(parsed);
        parsed.is_some()
    }

    /// The entries, in the format of [`Subset::add`].
    pub fn entries(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(ip, port)| match port {
            Some(port) => SocketAddr::new(*ip, *port).to_string(),
            None => ip.to_string(),
        })
    }

    /// Whether the gateway allows `address`.
    #[must_use]
    pub fn allows(&self, address: SocketAddr) -> bool {
        let (address, at) = (address.ip().to_canonical(), address.port());
        self.0.iter().any(|(ip, port)| *ip == address && port.is_none_or(|p| p == at))
    }
}

/// Address and port of one entry. An IPv4-mapped IPv6 address counts as IPv4.
fn parse_entry(entry: &str) -> Option<(IpAddr, Option<u16>)> {
    let (ip, port) = match entry.parse::<SocketAddr>() {
        Ok(address) => (address.ip(), Some(address.port())),
        Err(_) => {
            let bracketed = entry.strip_prefix('[').and_then(|e| e.strip_suffix(']'));
            let ip = bracketed.map_or_else(|| entry.parse(), |e| e.parse::<Ipv6Addr>().map(IpAddr::V6));
            (ip.ok()?, None)
        }
    };
    Some((ip.to_canonical(), port))
}

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

    fn ranking(&self, explain: Explain) -> Ranking {
        let ranking = Ranking::new(self.wanted);
        if explain == Explain::No { ranking } else { ranking.explained() }
    }

    /// As [`Scheduler::decide`], without side effects: the strategy remembers nothing, and no endpoint is probed.
    ///
    /// # Errors
    /// As [`Scheduler::decide`].
    pub fn dry_run(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<Decision, RequestError> {
        let cx = &PickContext { dry_run: true, objective: self.objective, ..*cx };
        self.rank(strategy, cx, subset, explain, rng)
    }

    /// Decides by `strategy` which endpoints serve the request, among those that `subset` allows (`None`: all), and
    /// records the decision in the strategy.
    ///
    /// # Errors
    /// Status 503:
    ///
    /// * `subset_empty` if the gateway's subset allows no endpoint of the pool.
    /// * `no_ready_endpoint` if no endpoint is ready, or the strategy picks none.
    /// * `no_prefill_endpoint` and `no_whole_endpoint` if the ready endpoints cannot serve the request alone, or must not
    ///   ([`SplitPolicy::required`]).
    pub fn decide(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<Decision, RequestError> {
        let cx = &PickContext { objective: self.objective, ..*cx };
        let mut decision = self.rank(strategy, cx, subset, explain, rng)?;
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
    pub fn exclusion(
        &self,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        roles: Roles,
        state: &EndpointState,
    ) -> Option<&'static str> {
        let spec = &state.endpoint.spec;
        if state.is_draining() {
            Some("draining")
        } else if !state.serves(roles) {
            Some("has another role")
        } else if subset.is_some_and(|subset| !subset.allows(spec.address)) {
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
    pub fn eligible<'a>(&self, cx: &PickContext<'a>, subset: Option<&Subset>, roles: Roles) -> Vec<Candidate<'a>> {
        self.candidates(cx, subset, roles).candidates
    }

    fn rank(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<Decision, RequestError> {
        let mut field = self.candidates(cx, subset, strategy.roles(cx));
        if field.candidates.is_empty() {
            return Err(no_candidate(cx, subset, strategy.roles(cx)));
        }
        // Each round decides, or drops candidates: one whose probe another decision has taken, or those that cannot
        // serve the request. If the strategy wants none of the rest, ejection is ignored and the next round decides.
        loop {
            let drawn = (explain == Explain::Full).then(|| rng.clone());
            let mut ranking = self.ranking(explain);
            strategy.rank(cx, &field.candidates, rng, &mut ranking);
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
            decision = self.divide(strategy, cx, subset, explain, &field.candidates, decision, rng);
            if let Some(drawn) = drawn {
                decision.runner_up = self.runner_up(strategy, cx, &field.candidates, &decision, drawn);
            }
            if !self.can_serve(cx, &mut decision, &mut field) {
                return_probes(cx, &decision);
                if field.candidates.is_empty() {
                    return Err(self.no_pair(cx, subset));
                }
                continue;
            }
            let Some(first) = decision.picks.first().filter(|_| !field.ejection_ignored) else { return Ok(decision) };
            let granted = match first.health.availability(cx.now, &self.health) {
                Availability::Open | Availability::SlowStart(_) => true,
                Availability::HalfOpen => {
                    decision.probe = self.claim_probe(cx, first);
                    decision.probe
                }
                // It was half open when candidates were collected: another decision has taken the probe since.
                Availability::Ejected => false,
            };
            if granted {
                return Ok(decision);
            }
            return_probes(cx, &decision);
            field.exclude(first.id);
            if field.candidates.is_empty() {
                field.ignore_ejection(cx);
            }
        }
    }

    /// Adds prefill and encode servers to the decision `whole`, if the request is split.
    #[expect(clippy::too_many_arguments, reason = "all of a decision's parts")]
    fn divide(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        explain: Explain,
        decode: &[Candidate<'_>],
        whole: Decision,
        rng: &mut PickRng,
    ) -> Decision {
        let Some(policy) = &self.split else { return whole };
        let mut sent = if cx.splittable && policy.decider != Decider::Never {
            self.pair(strategy, cx, subset, explain, policy, decode, whole, rng)
        } else {
            whole
        };
        if cx.encodable {
            self.encode(strategy, cx, subset, decode, &mut sent, rng);
        }
        sent
    }

    /// Sets the encode servers in `sent`, if the request has images or audio.
    fn encode(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        decode: &[Candidate<'_>],
        sent: &mut Decision,
        rng: &mut PickRng,
    ) {
        let (Some(policy), Some(decoder)) = (&self.split, sent.picks.first()) else { return };
        // Counting media visits each image, so pools without encode servers skip it.
        if !cx.snapshot.endpoints.iter().any(|e| e.serves(Roles::ENCODE) && e.endpoint.id != decoder.id) {
            return;
        }
        let items = media::items(cx);
        if items == 0 {
            return;
        }
        let mut encode = self.open(cx, subset, Roles::ENCODE, |_| {});
        encode.retain(|c| c.id == decoder.id || policy.fits(&c.state.endpoint, decoder));
        if encode.is_empty() {
            return;
        }
        let ranking = Ranking::new(items);
        let ranking = if sent.parts.is_some() { ranking.explained() } else { ranking };
        let field = split::Media { encode: &encode, decode, sent };
        let Some(chosen) = strategy.encoders(cx, &field, rng, ranking) else { return };
        sent.encode = chosen.picks.into_vec();
        sent.encode_probe = self.claim_one(cx, &mut sent.encode);
        if let (Some(parts), Some(more)) = (&mut sent.parts, chosen.parts) {
            parts.extend(more);
        }
    }

    /// Has the strategy propose a pair. The pair replaces `whole` if the strategy or the pool's decider requires it, or
    /// if the first pick serves no whole requests.
    #[expect(clippy::too_many_arguments, reason = "all of a decision's parts")]
    fn pair(
        &self,
        strategy: &dyn Strategy,
        cx: &PickContext<'_>,
        subset: Option<&Subset>,
        explain: Explain,
        policy: &SplitPolicy,
        decode: &[Candidate<'_>],
        whole: Decision,
        rng: &mut PickRng,
    ) -> Decision {
        let serves_whole = |endpoint: &Endpoint| !cx.generates || policy.serves_whole(endpoint);
        let alone = whole.picks.first().is_some_and(|first| serves_whole(first));
        // An ejected prefill server is used only if no other prefill server and no whole server is left.
        let prefill = if alone || decode.iter().any(|c| serves_whole(&c.state.endpoint)) {
            self.open(cx, subset, Roles::PREFILL, |_| {})
        } else {
            self.candidates(cx, subset, Roles::PREFILL).candidates
        };
        let unpaired = || {
            let decoder = whole.picks.first().and_then(|first| decode.iter().find(|c| c.id == first.id));
            decoder.and_then(|decoder| policy.unpaired(strategy, cx, decoder))
        };
        let field = split::PairCandidates { prefill: &prefill, decode, whole: &whole, policy };
        let pair = if prefill.is_empty() { None } else { strategy.pair(cx, &field, rng, self.ranking(explain)) };
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
            probe = self.claim(cx, &mut pair.prefill);
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
    fn can_serve(&self, cx: &PickContext<'_>, decision: &mut Decision, field: &mut CandidateSet<'_>) -> bool {
        let Some(policy) = self.split.as_ref().filter(|_| cx.generates && decision.split.is_none()) else {
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

    /// Whether this request is the probe of an endpoint that is half open. A dry run would be, and takes no probe.
    fn claim_probe(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> bool {
        cx.dry_run || endpoint.health.claim_probe(cx.now, &self.health)
    }

    /// The endpoints with all of `roles` that may serve the request. Calls `ejected` for those that are ejected.
    fn open<'a>(
        &self,
        cx: &PickContext<'a>,
        subset: Option<&Subset>,
        roles: Roles,
        mut ejected: impl FnMut(&'a EndpointState),
    ) -> Vec<Candidate<'a>> {
        let mut candidates = Vec::with_capacity(cx.snapshot.endpoints.len());
        let is_restricted = subset.is_some() || cx.filter.is_some();
        let allows = |spec: &EndpointSpec| {
            subset.is_none_or(|s| s.allows(spec.address)) && cx.filter.is_none_or(|f| f.matches(&spec.labels))
        };
        for state in &cx.snapshot.endpoints {
            if !state.serves(roles) || (is_restricted && !allows(&state.endpoint.spec)) {
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
    fn candidates<'a>(&self, cx: &PickContext<'a>, subset: Option<&Subset>, roles: Roles) -> CandidateSet<'a> {
        let mut ejected: SmallVec<[&'a EndpointState; 4]> = SmallVec::new();
        let candidates = self.open(cx, subset, roles, |state| ejected.push(state));
        let mut field = CandidateSet { candidates, ejected, ejection_ignored: false };
        if field.candidates.is_empty() {
            field.ignore_ejection(cx);
        }
        field
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
    let message = match emptied_by {
        Some(part) => format!("`{part}` left none of the pool's ready endpoints for this request"),
        None => "the strategy chose no endpoint".to_owned(),
    };
    RequestError::new(Reason::NoReadyEndpoint, message)
}

/// Error if the pool has no candidate, with the most specific cause.
fn no_candidate(cx: &PickContext<'_>, subset: Option<&Subset>, roles: Roles) -> RequestError {
    let snapshot = cx.snapshot;
    let total = snapshot.endpoints.len();
    let draining = snapshot.endpoints.iter().filter(|s| s.is_draining()).count();
    let allowed = |s: &&EndpointState| subset.is_none_or(|h| h.allows(s.endpoint.spec.address));
    if subset.is_some() && snapshot.endpoints.iter().filter(allowed).count() == 0 {
        return RequestError::new(
            Reason::SubsetEmpty,
            format!("the gateway's subset hint leaves none of the pool's {total} endpoints"),
        );
    }
    let filtered = cx.filter.is_some_and(|f| !snapshot.endpoints.iter().any(|s| f.matches(&s.endpoint.spec.labels)));
    if filtered {
        let message = format!("the request's label selector leaves none of the pool's {total} endpoints");
        return RequestError::new(Reason::NoReadyEndpoint, message);
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
