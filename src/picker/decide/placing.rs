//! The last steps of a decision: look up the prompt, schedule, report, book.

use super::admitting::Admission;
use super::{Plan, PrefillTime, RequestState, Routed, Scope};
use crate::ceiling::Ceiling;
use crate::conversation::Conversation;
use crate::event::{Degraded, Event, RequestEvent, SplitOutcome};
use crate::explained::Explained;
use crate::hints::{Hints, RANK_HEADER};
use crate::identity::is_final;
use crate::lookup::{self, Prepared, PromptLookup};
use crate::placement::{BookingRequest, Bookings, CacheUpdates};
use crate::preset::preset;
use crate::queues::AdmittedRequest;
use crate::quotas::Permits;
use crate::reading::report_unsplit;
use crate::recording::{DecisionDraft, recorded_agent};
use crate::sharing::SharedBookings;
use crate::split::PrefillOutcome;
use crate::warming::Warming;
use attache_disagg::Mode;
use attache_pool::PoolSnapshot;
use attache_record::{Booked, Decided, Kept, Looked, RequestTape};
use attache_scheduling::choice::Choice;
use attache_scheduling::plugin::UserCharge;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{AssumedBooking, Decision, PickContext, RequestFacts, Strategy};
use attache_sync::OwnRecord;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::{RngExt, SeedableRng};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A decision that is not booked.
#[derive(Debug)]
pub(crate) struct Proposal<'p> {
    pub(crate) decision: Decision,
    /// A preset decided, not the strategy.
    is_preset: bool,
    /// Share of the first pick that the request takes, by its strategy.
    share: f64,
    /// What the strategy charged the user of the request, for peers.
    charge: Option<UserCharge>,
    /// The prompt's lookup; `None` when it was not looked up.
    pub(super) lookup: Option<PromptLookup<'p>>,
    conversation: Option<Box<Conversation>>,
    pub(super) splittable: bool,
    /// Length of the prompt by which the strategy decided, tokens.
    pub(crate) prompt_tokens: u32,
}

/// Why there is no proposal.
pub(crate) enum Unproposed {
    /// Background work on the prompt must run first.
    Warm(Warming),
    /// The request is rejected.
    Refused(RequestError),
}

impl RequestState<'_> {
    /// Looks the prompt up and chooses the endpoints. Nothing is booked.
    ///
    /// # Errors
    /// Background work that must run first, or the error response for the client.
    pub(crate) fn propose<'p>(
        &self,
        prepared: Option<&'p Prepared<'_>>,
        snapshot: &PoolSnapshot,
        explain: Explain,
        mut draft: Option<&mut DecisionDraft<'_>>,
        rng: &mut PickRng,
    ) -> Result<Proposal<'p>, Unproposed> {
        let mut lookup = self.look_up(prepared, snapshot).map_err(Unproposed::Warm)?;
        let splittable = self.may_split(snapshot);
        let conversation = self.converse(lookup.as_mut().filter(|_| splittable), snapshot);
        if let Some(draft) = &mut draft {
            let kept = conversation.as_ref().and_then(|conversation| conversation.kept());
            self.record(draft, lookup.as_mut(), kept, splittable);
        }
        let cx = self.context(lookup.as_ref(), snapshot, splittable);
        let rng = draft.map_or(rng, |draft| &mut draft.rng);
        let _of_peers = self.assume_peers(&cx, rng);
        let (decision, is_preset) = self.schedule(&cx, explain, rng).map_err(Unproposed::Refused)?;
        let strategy = &self.chosen.choice.strategy;
        let share = decision.picks.first().map_or(0.0, |picked| strategy.share(&cx, picked));
        // Only peers need it.
        let has_peers = self.scope.picker.replica.is_some();
        let charge = if has_peers && !is_preset { strategy.charge(&cx) } else { None };
        let prompt_tokens = cx.request.prompt_tokens;
        Ok(Proposal { decision, is_preset, share, charge, lookup, conversation, splittable, prompt_tokens })
    }

    /// Books what peers have probably sent and this picker does not know yet: requests of mean length. They last until
    /// the decision is made.
    fn assume_peers(&self, cx: &PickContext<'_>, rng: &PickRng) -> Vec<AssumedBooking> {
        let Some(replica) = self.scope.picker.replica.as_ref().filter(|_| self.routed.request.is_some()) else {
            return Vec::new();
        };
        let (scheduler, strategy, now) = (&self.pool().scheduler, &*self.chosen.choice.strategy, self.q.now);
        let (count, prompt_tokens) = replica.unknown_bookings(now);
        // Of the prompts of peers, only the mean length is known.
        let cx = &PickContext { request: RequestFacts { prompt_tokens, ..cx.request }, prefix: None, ..*cx };
        let mut rng = rng.clone();
        let assume = |_| {
            let guarded = AssertUnwindSafe(|| scheduler.dry_run(strategy, cx, Explain::No, &mut rng));
            let decision = catch_unwind(guarded).ok()?.ok()?;
            let split = decision.split.as_ref().and_then(|split| split.prefill.first());
            let endpoint = split.or(decision.picks.first())?;
            let (model, stale_after) = (self.facts.model, self.pool().stale_after);
            Some(AssumedBooking::new(endpoint.clone(), cx.snapshot, stale_after, (model, prompt_tokens), now))
        };
        // Each is booked before the next one is chosen.
        (0..count).map_while(assume).collect()
    }

    /// The endpoints that the next live request like this one would get, with the figures of each part of the
    /// algorithm. It draws from `rng` what that request would draw.
    ///
    /// # Errors
    /// As [`RequestState::propose`].
    pub(crate) fn dry_run<'p>(
        &self,
        prepared: Option<&'p Prepared<'_>>,
        snapshot: &PoolSnapshot,
        rng: &mut PickRng,
    ) -> Result<Proposal<'p>, Unproposed> {
        let _ = self.explains(false, rng);
        let mut recorded = self.scope.picker.recorder.as_ref().map(|_| PickRng::seed_from_u64(rng.random()));
        self.propose(prepared, snapshot, Explain::Full, None, recorded.as_mut().unwrap_or(rng))
    }

    /// Whether the decision is logged, and how far it is explained. `is_kept`: its explanation is kept.
    pub(super) fn explains(&self, is_kept: bool, rng: &mut PickRng) -> (bool, Explain) {
        let settings = self.scope.config.settings.explain;
        let log = settings.log_ratio > 0.0 && rng.random_bool(settings.log_ratio.min(1.0));
        let explain = match () {
            () if is_kept => Explain::Full,
            () if log || settings.metadata => Explain::Yes,
            () => Explain::No,
        };
        (log, explain)
    }

    /// The prompt's cached tokens on each endpoint; `None` when it can't be looked up.
    pub(super) fn look_up<'p>(
        &self,
        prepared: Option<&'p Prepared<'_>>,
        snapshot: &PoolSnapshot,
    ) -> Result<Option<PromptLookup<'p>>, Warming> {
        let Scope { observer, config, .. } = self.scope;
        let Some(prepared) = prepared else { return Ok(None) };
        self.q.trace.inspect(|trace| trace.lookup_begins());
        let (q, prompt_ref) = (self.q, self.prompt_ref);
        let found = PromptLookup::find(observer, config, prepared, q, prompt_ref, snapshot, prompt_ref.keeps_ids);
        self.q.trace.inspect(|trace| trace.lookup_ends());
        found
    }

    /// Records the request before it is scheduled.
    fn record(
        &self,
        draft: &mut DecisionDraft<'_>,
        lookup: Option<&mut PromptLookup<'_>>,
        carried: Option<Kept>,
        splittable: bool,
    ) {
        let (q, facts) = (self.q, &self.facts);
        let prompt = lookup.map(|l| Looked { carried, ..l.recorded(q) });
        draft.set_request(|line| {
            *line = Decided {
                id: q.head.request_id(),
                at: q.now,
                live: self.scope.config.number,
                pool: self.pool().name.clone(),
                model: facts.model.into(),
                agent: self.agent().map(recorded_agent),
                readable: self.routed.request.is_some(),
                estimated: self.size.load,
                max_tokens: facts.max_tokens,
                priority: facts.priority,
                waited: facts.waited,
                subset: q.subset.map(|s| s.entries().collect()),
                policy: self.scope.picker.policies.of(facts.model),
                prompt,
                splittable,
                generates: self.call.generates,
                encodable: self.call.encodable,
                streams: self.call.streams,
                strategy: self.chosen.choice.name.clone(),
                ..std::mem::take(line)
            };
        });
    }

    /// Whether a prefill and a decode worker may share the request, considering the gateway's body mode.
    pub(super) fn may_split(&self, snapshot: &PoolSnapshot) -> bool {
        let (pool, q) = (self.pool(), self.q);
        if !self.call.splittable {
            return false;
        }
        let in_time = match pool.disagg.as_deref() {
            Some(Mode::Direct(direct)) if !direct.is_together_in(snapshot) => match q.prefill_time {
                PrefillTime::None => false,
                PrefillTime::MessageTimeout => direct.message_timeout.is_some(),
                PrefillTime::Unbounded => true,
            },
            // Both workers get the request at once, so the body must be complete to be changed.
            Some(Mode::Direct(_)) => self.q.body.is_whole(),
            Some(Mode::Header { .. }) | None => true,
        };
        if !in_time && pool.scheduler.split().is_some_and(|policy| policy.asks(&self.chosen.choice.name)) {
            self.scope.observer.event(Event::Degraded(Degraded::NoTimeToSplit));
            if pool.scheduler.report_unsplit() {
                report_unsplit(pool);
            }
        }
        in_time
    }

    /// The state of the conversation's previous turn.
    fn converse(&self, lookup: Option<&mut PromptLookup<'_>>, snapshot: &PoolSnapshot) -> Option<Box<Conversation>> {
        let lookup = lookup?;
        let (target, now) = (self.facts.model, self.q.now);
        let tenant = lookup.prefix().tenant(self.q.head);
        let begin = || Conversation::begin(self.pool(), lookup, tenant, target, snapshot, now);
        lookup::guarded(self.scope.observer, begin).flatten()
    }

    /// The input of the strategy.
    pub(super) fn context<'c>(
        &'c self,
        lookup: Option<&'c PromptLookup<'_>>,
        snapshot: &'c PoolSnapshot,
        splittable: bool,
    ) -> PickContext<'c> {
        let lookup = lookup.filter(|_| self.reads_prefix);
        let prompt_tokens = lookup.map_or(self.size.load, PromptLookup::prompt_tokens);
        PickContext {
            request: RequestFacts { prompt_tokens, ..self.facts },
            subset: self.q.subset,
            filter: self.chosen.filter.as_ref(),
            prefix: lookup.map(|l| &l.found),
            policy: self.scope.picker.policies.of(self.facts.model),
            splittable,
            generates: self.call.generates,
            encodable: self.call.encodable,
            ..PickContext::new(snapshot, self.q.now, self.pool().stale_after)
        }
    }

    /// Chooses the endpoints: by a reservation or a preset (true), otherwise by the strategy.
    fn schedule(
        &self,
        cx: &PickContext<'_>,
        explain: Explain,
        rng: &mut PickRng,
    ) -> Result<(Decision, bool), RequestError> {
        if let Some(reserved) = &self.reserved {
            return Ok((reserved.clone(), true));
        }
        let (pool, q, picker) = (self.pool(), self.q, self.scope.picker);
        let previous = q.response_id.or_else(|| self.routed.request.and_then(|r| r.previous_response_id.as_deref()));
        if let Some(decision) = preset(picker, self.scope.config, q, cx, &pool.name, previous)? {
            return Ok((decision, true));
        }
        let decision = self.ask_strategy(|strategy| match self.scope.dry_run {
            true => pool.scheduler.dry_run(strategy, cx, Explain::Full, rng),
            false => pool.scheduler.decide(strategy, cx, explain, rng),
        })?;
        Ok((decision, false))
    }

    /// Calls the strategy. Requests without a parsed body, and those for which the strategy panics, go to the endpoint
    /// with the fewest requests.
    fn ask_strategy(
        &self,
        mut decide: impl FnMut(&dyn Strategy) -> Result<Decision, RequestError>,
    ) -> Result<Decision, RequestError> {
        let (least_loaded, chosen) = (&*self.scope.config.least_loaded, &self.chosen.choice);
        if self.routed.request.is_none() {
            return decide(least_loaded);
        }
        match catch_unwind(AssertUnwindSafe(|| decide(&*chosen.strategy))) {
            Ok(decision) => decision,
            Err(_) => {
                let observer = self.scope.observer;
                observer.event(Event::Panic);
                observer.event(Event::Degraded(Degraded::StrategyPanic));
                if let Some(skipped) = self.scope.picker.panicked.admit(self.q.now) {
                    tracing::error!(
                        pool = %self.pool().name,
                        strategy = %chosen.name,
                        skipped,
                        "strategy panicked; the request is routed by the fewest requests"
                    );
                }
                decide(least_loaded)
            }
        }
    }

    /// Logs the decision if `log` is set, and counts degraded modes.
    pub(super) fn report(&self, proposal: &Proposal<'_>, snapshot: &PoolSnapshot, log: bool) {
        let Proposal { decision, lookup, splittable, prompt_tokens, .. } = proposal;
        let (pool, model, prompt_tokens) = (self.pool(), self.facts.model, *prompt_tokens);
        if log {
            let (strategy, request_id) = (&self.chosen.choice.name, &self.q.head.request_id());
            let agent = self.agent();
            Explained { request_id, pool: &pool.name, strategy, model, prompt_tokens, agent, decision }.emit();
        }
        let degraded = |mode| self.scope.observer.event(Event::Degraded(mode));
        if let Some(signal) = decision.lacking {
            degraded(Degraded::Lacking(signal));
        }
        if decision.diverted {
            self.routed.runtime.observer.event(RequestEvent::Diverted { model, now: self.q.now });
        }
        if pool.rules.is_stale() {
            degraded(Degraded::DiscoveryStale);
        }
        if decision.ejection_ignored {
            degraded(Degraded::AllEjected);
        }
        if decision.unpaired.is_some() {
            let cx = self.context(lookup.as_ref(), snapshot, *splittable);
            degraded(Degraded::NoPrefillEndpoint);
            self.warn_unpaired("the decode server prefills the prompt", || pool.scheduler.absence(&cx));
        }
    }

    /// Records and reports a request that is rejected, and keeps the explanation.
    pub(super) fn refuse(
        &self,
        error: &RequestError,
        draft: Option<DecisionDraft<'_>>,
        began: Option<Timestamp>,
        snapshot: &PoolSnapshot,
    ) {
        let explanation = self.explanation(began, snapshot, None);
        if let Some(draft) = draft {
            draft.refused(self.notes, error);
        }
        if error.reason == Reason::NoPrefillEndpoint {
            self.routed.runtime.observer.event(RequestEvent::Split(SplitOutcome::Refused));
            self.warn_unpaired("request rejected", || error.message.to_string());
        }
        self.scope.keep(explanation, Err(error));
    }

    /// Logs that no prefill server was there for the request, at most once a minute.
    fn warn_unpaired(&self, effect: &'static str, reason: impl FnOnce() -> String) {
        if let Some(skipped) = self.scope.picker.unpaired.admit(self.q.now) {
            let (pool, reason) = (&*self.pool().name, reason());
            tracing::warn!(pool, reason, skipped, "no prefill server for a request; {effect}");
        }
    }

    /// Headers for the model server besides the destination.
    fn hints(&self, lookup: Option<&PromptLookup<'_>>, decision: &Decision, snapshot: &PoolSnapshot) -> Hints {
        let (prefix, head) = (self.routed.runtime.prefix.as_ref(), self.q.head);
        let used = prefix.filter(|_| self.q.api.prefills());
        let hints = used.map(|prefix| Hints::of(self.pool(), prefix, lookup, decision, snapshot, head, self.q.now));
        // The rank header of an untrusted client is removed elsewhere, whatever is chosen.
        let trusted = self.scope.config.settings.trust_client_headers;
        let chooses_rank = trusted && prefix.is_some_and(|prefix| prefix.choose_rank);
        Hints { drops_rank: chooses_rank && head.has(RANK_HEADER), ..hints.unwrap_or_default() }
    }

    /// Books the request, and makes its plan. `new_body` replaces the seen part of the client's body.
    pub(super) fn book(
        self,
        mut proposal: Proposal<'_>,
        snapshot: &PoolSnapshot,
        mut draft: Option<DecisionDraft<'_>>,
        admission: Admission<'_>,
        new_body: Option<Vec<u8>>,
    ) -> Box<Plan> {
        let (q, Routed { runtime, request, rewritten }) = (self.q, self.routed);
        let hints = self.hints(proposal.lookup.as_ref(), &proposal.decision, snapshot);
        self.agent().inspect(|agent| self.scope.picker.programs.booked(agent));
        let ends_session = self.agent().is_some() && is_final(q.head);
        let lookup = proposal.lookup.take();
        // The length that belongs to the matched tokens, also when the strategy decided by another estimate.
        proposal.prompt_tokens = lookup.as_ref().map_or(proposal.prompt_tokens, PromptLookup::prompt_tokens);
        let pending =
            lookup.map(|lookup| lookup.updates(&proposal.decision, q, self.reserved.is_none())).unwrap_or_default();
        let pick_matched_tokens = pending.updates.as_ref().map_or(0, |updates| updates.cached_tokens);
        if let Some(draft) = &mut draft {
            draft.set_request(|line| line.prompt.iter_mut().for_each(|prompt| prompt.cut = pending.cut));
        }
        let (booked, prefill) = self.book_endpoints(&proposal, pending.updates, snapshot, &hints, draft);
        admission.sheds.inspect(|queues| queues.passed());
        let Proposal { decision, conversation, splittable, prompt_tokens, .. } = proposal;
        let Choice { strategy, name: strategy_name } = self.chosen.choice;
        let split = decision.split.as_ref();
        Box::new(Plan {
            matched_tokens: split.map_or(pick_matched_tokens, |split| split.prefill_cached),
            conversation: conversation.filter(|_| split.is_some()),
            prefill_outcome: decision.unpaired.map(|_| PrefillOutcome::absent()),
            decision,
            runtime: Arc::clone(runtime),
            client: q.head.client(),
            ends_session,
            agent: self.identity.into_inner().flatten(),
            strategy,
            strategy_name,
            profile: self.chosen.profile,
            understood: request.is_some(),
            prompt_tokens,
            max_tokens: self.facts.max_tokens,
            priority: self.facts.priority,
            choices: request.map_or(1, |r| r.choices),
            ceiling: Ceiling::of(q, *request),
            target: rewritten.target.clone(),
            pick_matched_tokens,
            booked,
            prefill,
            splittable,
            request_id: None,
            hints,
            tail: pending.tail,
            renamed_from: rewritten.renamed_from.clone(),
            new_body,
            seen: q.body.bytes().len(),
            queued: q.has_turn.then_some(self.facts.waited),
            permits: Permits::new(),
            // A request that was not queued uses capacity too, so its end must trigger the next dequeue.
            admitted: admission
                .admitted
                .or_else(|| admission.holds.filter(|_| !q.has_turn).map(AdmittedRequest::uncounted)),
        })
    }

    /// Books the request on its endpoints: the one of the response, and the prefill worker. A recording gets the decision
    /// first.
    fn book_endpoints(
        &self,
        proposal: &Proposal<'_>,
        updates: Option<CacheUpdates>,
        snapshot: &PoolSnapshot,
        hints: &Hints,
        draft: Option<DecisionDraft<'_>>,
    ) -> (Option<Booked>, Option<Box<Booked>>) {
        let Proposal { decision, is_preset, share, charge, prompt_tokens, .. } = proposal;
        let (q, stale_after) = (self.q, self.pool().stale_after);
        let matched = updates.as_ref().map_or(0, |updates| updates.cached_tokens);
        let request = BookingRequest {
            model: self.facts.model,
            prompt_tokens: *prompt_tokens,
            understood: self.routed.request.is_some(),
            streams: self.call.streams,
            share: *share,
            updates,
        };
        let replica = self.scope.picker.replica.as_ref();
        let (strategy, trail) = (&*self.chosen.choice.name, decision.trail.as_deref());
        let record = OwnRecord { strategy, trail, charge: *charge };
        let publish = |r| SharedBookings::publish(r, self.pool(), decision, &request, (record, hints), q.now);
        let shared = replica.and_then(publish);
        let book = || Bookings::of(decision, request, snapshot, stale_after, q.now);
        let (made, tape) = match draft {
            Some(mut draft) => {
                draft.set_request(|line| line.preset = *is_preset);
                draft.booked(self.notes, decision, matched, book)
            }
            None => (book(), RequestTape::default()),
        };
        let Some(Bookings { first, prefill, encoding }) = made else { return (None, None) };
        let mut prefill = prefill.map(|booking| Box::new(Booked::prefill(booking, tape.clone())));
        let mut booked = Booked::new(first, encoding, tape);
        if let Some(SharedBookings { first, prefill: other, encoding }) = shared {
            booked.share(first, encoding);
            prefill.iter_mut().zip(other).for_each(|(prefill, other)| prefill.share(other, Vec::new()));
        }
        (Some(booked), prefill)
    }
}
