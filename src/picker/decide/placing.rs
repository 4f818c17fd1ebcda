//! The last steps of a decision: look up the prompt, schedule, report, book.

use super::entering::{Admission, Deciding, Rewritten, Scope};
use super::{AdmittedRequest, Plan, PoolRuntime, PrefillTime, Step};
use crate::ceiling::Ceiling;
use crate::conversation::Conversation;
use crate::event::{Degraded, Event, RequestEvent, SplitOutcome};
use crate::explained::Explained;
use crate::hints::{Hints, RANK_HEADER};
use crate::lookup::{self, PendingUpdates, Prepared, PromptLookup};
use crate::placement::{self, BookingRequest, CacheUpdates};
use crate::prefix::{PoolPrefix, Tail};
use crate::preset::preset;
use crate::quotas::Permits;
use crate::reading::report_unsplit;
use crate::recording::{DecisionDraft, RequestReads};
use crate::sharing::SharedBookings;
use crate::split::PrefillOutcome;
use crate::warming::Warming;
use attache_disagg::Mode;
use attache_pool::PoolSnapshot;
use attache_pool::health::ClientSlot;
use attache_record::{Booked, Decided, Kept, Looked, RequestTape};
use attache_scheduling::choice::Choice;
use attache_scheduling::plugin::UserCharge;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{AssumedBooking, Decision, PickContext, RequestFacts, Strategy};
use attache_sync::OwnRecord;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::{RngExt, SeedableRng};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Outcome of [`Deciding::place`].
#[expect(clippy::large_enum_variant, reason = "it lives for one call; a box would cost each request an allocation")]
#[derive(Debug)]
pub(super) enum Placed {
    /// The prompt's keys must be computed first.
    Warm(Warming, Option<AdmittedRequest>),
    /// The endpoints are chosen and booked.
    Booked(Placement),
}

/// A decided request, without the parts of its plan that the first steps made.
#[derive(Debug)]
pub(super) struct Placement {
    scheduled: Scheduled,
    splittable: bool,
    prompt_tokens: u32,
    matched_tokens: u32,
    pick_matched_tokens: u32,
    hints: Hints,
    conversation: Option<Box<Conversation>>,
    bookings: Bookings,
    admitted: Option<AdmittedRequest>,
    /// Facts about the request that its plan keeps.
    known: Known,
}

/// Facts about the request that its plan keeps.
#[derive(Debug)]
struct Known {
    runtime: Arc<PoolRuntime>,
    client: ClientSlot,
    understood: bool,
    max_tokens: Option<u32>,
    priority: i32,
    choices: u32,
    ceiling: Ceiling,
    seen: usize,
    queued: Option<Duration>,
}

/// A decision that is not booked.
#[derive(Debug)]
pub(crate) struct Proposal<'p> {
    pub(crate) scheduled: Scheduled,
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

/// The decision of a strategy or of a preset.
#[derive(Debug)]
pub(crate) struct Scheduled {
    pub(crate) decision: Decision,
    is_preset: bool,
    /// Share of the first pick that the request takes, by its strategy.
    share: f64,
    /// What the strategy charged the user of the request, for peers.
    charge: Option<UserCharge>,
}

/// The bookings of a request, and the key chain that its response extends.
#[derive(Debug, Default)]
struct Bookings {
    booked: Option<Booked>,
    prefill: Option<Box<Booked>>,
    tail: Option<(Arc<PoolPrefix>, Tail)>,
}

impl Deciding<'_> {
    /// Looks the prompt up, schedules the request and books it.
    ///
    /// # Errors
    /// The error response for the client.
    pub(super) fn place(
        &self,
        prepared: Option<&Prepared<'_>>,
        admission: Admission<'_>,
        notes: Option<&RequestReads<'_>>,
        rng: &mut PickRng,
    ) -> Result<Placed, RequestError> {
        let began = self.begin_explanation();
        let (log, explain) = self.explains(began.is_some(), rng);
        // The recording is locked from here to the booking, so that both are one step of it.
        let mut draft = DecisionDraft::begin(self.scope.picker, rng);
        let snapshot = self.pool().store.load();
        let proposal = match self.propose(prepared, &snapshot, explain, draft.as_mut(), rng) {
            Ok(proposal) => proposal,
            Err(Unproposed::Warm(warming)) => return Ok(Placed::Warm(warming, admission.admitted)),
            Err(Unproposed::Refused(error)) => {
                let explanation = self.explanation(began, &snapshot, None);
                if let Some(draft) = draft {
                    draft.refused(notes, &error);
                }
                if error.reason == Reason::NoPrefillEndpoint {
                    self.runtime.observer.event(RequestEvent::Split(SplitOutcome::Refused));
                    self.warn_unpaired("request rejected", || error.message.to_string());
                }
                self.keep(explanation, Err(&error));
                return Err(error);
            }
        };
        let explanation = self.explanation(began, &snapshot, Some(&proposal));
        let Proposal { scheduled, lookup, conversation, splittable, prompt_tokens } = proposal;
        self.report(&scheduled.decision, prompt_tokens, log);
        if scheduled.decision.unpaired.is_some() {
            let cx = self.context(lookup.as_ref(), &snapshot, splittable);
            self.scope.observer.event(Event::Degraded(Degraded::NoPrefillEndpoint));
            let reason = || self.pool().scheduler.absence(&cx);
            self.warn_unpaired("the decode server prefills the prompt", reason);
        }
        let hints = self.hints(lookup.as_ref(), &scheduled.decision, &snapshot);
        // The length that belongs to the matched tokens, also when the strategy decided by another estimate.
        let prompt_tokens = lookup.as_ref().map_or(prompt_tokens, PromptLookup::prompt_tokens);
        let pending = lookup.map(|lookup| lookup.updates(&scheduled.decision, self.q));
        let PendingUpdates { updates, cut, tail } = pending.unwrap_or_default();
        if let Some(draft) = &mut draft {
            draft.set_request(|line| line.prompt.iter_mut().for_each(|prompt| prompt.cut = cut));
        }
        let pick_matched_tokens = updates.as_ref().map_or(0, |updates| updates.cached_tokens);
        let bookings =
            Bookings { tail, ..self.book(&scheduled, &snapshot, (prompt_tokens, updates), &hints, draft, notes) };
        self.keep(explanation, Ok(&scheduled.decision));
        admission.sheds.inspect(|queues| queues.passed());
        let split = scheduled.decision.split.as_ref();
        Ok(Placed::Booked(Placement {
            known: self.known(),
            splittable,
            prompt_tokens,
            matched_tokens: split.map_or(pick_matched_tokens, |split| split.prefill_cached),
            pick_matched_tokens,
            hints,
            conversation: conversation.filter(|_| split.is_some()),
            bookings,
            // A request that was not queued uses capacity too, so its end must trigger the next dequeue.
            admitted: admission
                .admitted
                .or_else(|| admission.holds.filter(|_| !self.q.has_turn).map(AdmittedRequest::uncounted)),
            scheduled,
        }))
    }

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
        let scheduled = self.schedule(&cx, explain, rng).map_err(Unproposed::Refused)?;
        let prompt_tokens = cx.request.prompt_tokens;
        Ok(Proposal { scheduled, lookup, conversation, splittable, prompt_tokens })
    }

    /// Books what peers have probably sent and this picker does not know yet: requests of mean length. They last until
    /// the decision is made.
    fn assume_peers(&self, cx: &PickContext<'_>, rng: &PickRng) -> Vec<AssumedBooking> {
        let Some(replica) = self.scope.picker.replica.as_ref().filter(|_| self.request.is_some()) else {
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
    /// As [`Deciding::propose`].
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

    fn known(&self) -> Known {
        Known {
            runtime: self.runtime.clone(),
            client: self.q.head.client(),
            understood: self.request.is_some(),
            max_tokens: self.facts.max_tokens,
            priority: self.facts.priority,
            choices: self.request.map_or(1, |r| r.choices),
            ceiling: Ceiling::of(self.q, self.request),
            seen: self.q.body.bytes().len(),
            queued: self.q.has_turn.then_some(self.facts.waited),
        }
    }

    /// Whether the decision is logged, and how far it is explained. `is_kept`: its explanation is kept.
    fn explains(&self, is_kept: bool, rng: &mut PickRng) -> (bool, Explain) {
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
                readable: self.request.is_some(),
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
            Some(Mode::Direct(_)) => self.is_whole(),
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

    /// Chooses the endpoints: by a preset, otherwise by the strategy.
    fn schedule(&self, cx: &PickContext<'_>, explain: Explain, rng: &mut PickRng) -> Result<Scheduled, RequestError> {
        let (pool, q, picker) = (self.pool(), self.q, self.scope.picker);
        let previous = q.response_id.or_else(|| self.request.and_then(|r| r.previous_response_id.as_deref()));
        let named = preset(picker, self.scope.config, q, cx, &pool.name, previous)?;
        let is_preset = named.is_some();
        let decision = match named {
            Some(decision) => decision,
            None => self.ask_strategy(|strategy| match self.scope.dry_run {
                true => pool.scheduler.dry_run(strategy, cx, Explain::Full, rng),
                false => pool.scheduler.decide(strategy, cx, explain, rng),
            })?,
        };
        let strategy = &self.chosen.choice.strategy;
        let share = decision.picks.first().map_or(0.0, |picked| strategy.share(cx, picked));
        // Only peers need it.
        let charge = picker.replica.as_ref().filter(|_| !is_preset).and_then(|_| strategy.charge(cx));
        Ok(Scheduled { decision, is_preset, share, charge })
    }

    /// Calls the strategy. Requests without a parsed body, and those for which the strategy panics, go to the endpoint
    /// with the fewest requests.
    fn ask_strategy(
        &self,
        mut decide: impl FnMut(&dyn Strategy) -> Result<Decision, RequestError>,
    ) -> Result<Decision, RequestError> {
        let (least_loaded, chosen) = (&*self.scope.config.least_loaded, &self.chosen.choice);
        if self.request.is_none() {
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
    fn report(&self, decision: &Decision, prompt_tokens: u32, log: bool) {
        let (pool, model) = (self.pool(), self.facts.model);
        if log {
            let (strategy, request_id) = (&self.chosen.choice.name, &self.q.head.request_id());
            Explained { request_id, pool: &pool.name, strategy, model, prompt_tokens, decision }.emit();
        }
        let degraded = |mode| self.scope.observer.event(Event::Degraded(mode));
        if let Some(signal) = decision.lacking {
            degraded(Degraded::Lacking(signal));
        }
        if decision.diverted {
            self.runtime.observer.event(RequestEvent::Diverted { model, now: self.q.now });
        }
        if pool.rules.is_stale() {
            degraded(Degraded::DiscoveryStale);
        }
        if decision.ejection_ignored {
            degraded(Degraded::AllEjected);
        }
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
        let (prefix, head) = (self.runtime.prefix.as_ref(), self.q.head);
        let used = prefix.filter(|_| self.q.api.prefills());
        let hints = used.map(|prefix| Hints::of(self.pool(), prefix, lookup, decision, snapshot, head, self.q.now));
        // The rank header of an untrusted client is removed elsewhere, whatever is chosen.
        let trusted = self.scope.config.settings.trust_client_headers;
        let chooses_rank = trusted && prefix.is_some_and(|prefix| prefix.choose_rank);
        Hints { drops_rank: chooses_rank && head.has(RANK_HEADER), ..hints.unwrap_or_default() }
    }

    /// Books the request on its endpoints. A recording gets the decision first.
    fn book(
        &self,
        scheduled: &Scheduled,
        snapshot: &PoolSnapshot,
        (prompt_tokens, updates): (u32, Option<CacheUpdates>),
        hints: &Hints,
        draft: Option<DecisionDraft<'_>>,
        notes: Option<&RequestReads<'_>>,
    ) -> Bookings {
        let Scheduled { decision, is_preset, share, charge } = scheduled;
        let matched = updates.as_ref().map_or(0, |updates| updates.cached_tokens);
        let request = BookingRequest {
            model: self.facts.model,
            prompt_tokens,
            understood: self.request.is_some(),
            streams: self.call.streams,
            share: *share,
            updates,
        };
        let replica = self.scope.picker.replica.as_ref();
        let (strategy, trail) = (&*self.chosen.choice.name, decision.trail.as_deref());
        let record = OwnRecord { strategy, trail, charge: *charge };
        let publish = |r| SharedBookings::publish(r, self.pool(), decision, &request, (record, hints), self.q.now);
        let shared = replica.and_then(publish);
        let book = || placement::Bookings::of(decision, request, snapshot, self.pool().stale_after, self.q.now);
        let (made, tape) = match draft {
            Some(mut draft) => {
                draft.set_request(|line| line.preset = *is_preset);
                draft.booked(notes, decision, matched, book)
            }
            None => (book(), RequestTape::default()),
        };
        let Some(placement::Bookings { first, prefill, encoding }) = made else { return Bookings::default() };
        let mut prefill = prefill.map(|booking| Box::new(Booked::prefill(booking, tape.clone())));
        let mut booked = Booked::new(first, encoding, tape);
        if let Some(SharedBookings { first, prefill: other, encoding }) = shared {
            booked.share(first, encoding);
            prefill.iter_mut().zip(other).for_each(|(prefill, other)| prefill.share(other, Vec::new()));
        }
        Bookings { booked: Some(booked), prefill, tail: None }
    }
}

impl Placed {
    /// The step, with the results of the first steps.
    pub(super) fn into_step(self, rewritten: Rewritten, choice: Choice, profile: Option<Arc<str>>) -> Step {
        let placement = match self {
            Placed::Warm(warming, admitted) => return Step::Warm(warming, admitted),
            Placed::Booked(placement) => placement,
        };
        let Placement { scheduled, known, bookings, .. } = placement;
        let Bookings { booked, prefill, tail } = bookings;
        let Known { runtime, client, understood, max_tokens, priority, choices, ceiling, seen, queued } = known;
        let unpaired = scheduled.decision.unpaired;
        Step::Decided(Box::new(Plan {
            decision: scheduled.decision,
            runtime,
            client,
            strategy: choice.strategy,
            strategy_name: choice.name,
            profile,
            understood,
            prompt_tokens: placement.prompt_tokens,
            max_tokens,
            priority,
            choices,
            ceiling,
            target: rewritten.target,
            matched_tokens: placement.matched_tokens,
            pick_matched_tokens: placement.pick_matched_tokens,
            booked,
            prefill,
            splittable: placement.splittable,
            prefill_outcome: unpaired.map(|_| PrefillOutcome::absent()),
            request_id: None,
            conversation: placement.conversation,
            hints: placement.hints,
            tail,
            renamed_from: rewritten.renamed_from,
            new_body: rewritten.new_body,
            seen,
            queued,
            permits: Permits::new(),
            admitted: placement.admitted,
        }))
    }
}
