//! Requests with prefill and decode on different servers: prefill leg, KV transfer, and servers that die in between.
//!
//! A prefill leg is a job of one token. Its server keeps the blocks under a lease, and its response takes [`LEG_DELAY`]
//! to the picker. The decode server receives the blocks that it lacks, and then the prefill server releases them. When
//! the blocks are gone before that (their server died, or the lease ended), the decode server computes the prompt
//! itself, as vLLM does with `kv_load_failure_policy: recompute`. Called by [`super::World`]; pure.

use super::{Front, InFlight, SERVER_FAILED, TOO_LONG, World};
use crate::front::Sent;
use crate::legs::{PrefillLegs, PrefillProgress};
use crate::queue::SimEvent;
use attache_disagg::Failure;
use attache_disagg::attempts::Attempt;
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_report::served::{Ending, Handover};
use attache_scheduling::Dispatch;
use attache_sim::engine::{DEFAULT_LEASE, FinishReason, Handoff, Job, JobId, JobPrompt, JobReport, Refused};
use attache_types::clock::Timestamp;
use attache_types::error::Reason;
use attache_workload::Request;
use std::sync::Arc;
use std::time::Duration;

/// 1 ms for the response of a leg within a data centre. All other network traffic takes no time, for
/// whole and split requests alike.
pub(super) const LEG_DELAY: Duration = Duration::from_millis(1);

/// First job id of prefill legs; ids of requests and images are smaller.
const LEGS: u64 = 1 << 62;
/// Bound of attempts per request; disaggregation makes fewer.
const TRIES: u64 = 16;

/// The server that computes the prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptOrigin {
    /// The server that decodes it.
    Own,
    /// The server that decodes it, since prefill on another server failed.
    FellBack,
    /// Another server. `job` is its prefill leg, and `cached_tokens` of the prompt were cached there.
    Server {
        server: usize,
        job: JobId,
        cached_tokens: u32,
        /// The server keeps the prompt's blocks; false after the transfer.
        pinned: bool,
    },
}

/// A request whose prefill runs on another server.
#[derive(Debug)]
pub(super) struct PendingPrefill {
    pub(super) request: Request,
    pub(super) sent: Sent,
    pub(super) legs: PrefillLegs,
}

/// Job id of an attempt.
fn leg_id(number: u64, attempt: Attempt) -> JobId {
    JobId(LEGS | (number * TRIES + attempt as u64))
}

/// Request number and attempt of a leg's job; `None` for the job of a request.
fn leg_of(job: JobId) -> Option<(u64, Attempt)> {
    let leg = job.0.checked_sub(LEGS)?;
    Some((leg / TRIES, usize::try_from(leg % TRIES).ok()?))
}

impl World<'_> {
    /// Begins the prefill of a request.
    pub(super) fn part(&mut self, request: Request, sent: Sent, legs: PrefillLegs, now: Timestamp) {
        let number = request.number;
        self.prefills.insert(number, PendingPrefill { request, sent, legs });
        self.follow(number, PrefillProgress::Ask(0), now);
    }

    /// Acts on the progress of a prefill.
    fn follow(&mut self, number: u64, mut came: PrefillProgress, now: Timestamp) {
        while let PrefillProgress::Ask(attempt) = came {
            came = match self.ask(number, attempt, now) {
                Ok(()) => PrefillProgress::Waiting,
                Err(failure) => self.judged(number, |front, legs| front.failed(legs, attempt, failure, now)),
            };
        }
        let goes_on = match came {
            PrefillProgress::Computed => return,
            PrefillProgress::Waiting | PrefillProgress::Ask(_) => {
                let late = self.prefills.get(&number).map(|prefills| prefills.legs.prefilling.deadline());
                if let Some(late) = late.filter(|at| *at > now) {
                    self.queue.push(late, SimEvent::Late(number));
                }
                return;
            }
            PrefillProgress::Local => true,
            PrefillProgress::Refused => false,
        };
        match self.prefills.remove(&number) {
            Some(prefills) if goes_on => self.go_on(prefills, None, PromptOrigin::FellBack, now),
            // The decode server is not to blame.
            Some(PendingPrefill { request, sent, .. }) => {
                self.pickers.of(number).unsent(&sent);
                drop(sent);
                self.refuse(&request, None, Reason::PrefillFailed.code(), now);
            }
            None => {}
        }
    }

    /// Sends a request to its decode server. `prefill` is the server that computed the prompt; `None` when none did.
    fn go_on(&mut self, prefills: PendingPrefill, prefill: Option<&Endpoint>, origin: PromptOrigin, now: Timestamp) {
        let PendingPrefill { request, mut sent, .. } = prefills;
        match self.pickers.of(request.number).replace_target(&mut sent, prefill, now) {
            Ok(()) => {
                sent.plan.dispatch(prefill.map_or(Dispatch::Whole, |server| Dispatch::Arrives(server, 0.0)), now);
                self.submit(request, sent, origin, now);
                // The prefill has ended, so the queues may dequeue another request.
                self.freed(now);
            }
            Err(error) => {
                self.pickers.of(request.number).unsent(&sent);
                drop(sent);
                self.refuse(&request, None, error.reason.code(), now);
            }
        }
    }

    fn judged(
        &mut self,
        number: u64,
        judge: impl FnOnce(&Front, &mut PrefillLegs) -> PrefillProgress,
    ) -> PrefillProgress {
        let Some(prefills) = self.prefills.get_mut(&number) else { return PrefillProgress::Waiting };
        judge(self.pickers.of(number), &mut prefills.legs)
    }

    /// Sends the prefill leg of an attempt.
    fn ask(&mut self, number: u64, attempt: Attempt, now: Timestamp) -> Result<(), Failure> {
        let server = self.prefills.get(&number).and_then(|p| p.legs.prefilling.server(attempt)).map(|server| server.id);
        let place = server.and_then(|id| self.places.get(&id)).copied().ok_or(Failure::Refused)?;
        self.advance(place, now);
        let server = self.servers.get_mut(place).filter(|s| s.alive).ok_or(Failure::Refused)?;
        let prefills = self.prefills.get(&number).ok_or(Failure::Unusable)?;
        let base = server.config.model.clone();
        let job = Job {
            id: leg_id(number, attempt),
            max_tokens: 1,
            handoff: Handoff { hold: Some(DEFAULT_LEASE), received: 0 },
            ..job(&prefills.request, prefills.sent.adapter(&base), self.pickers.of(number))
        };
        server.submit(now, job, prefills.legs.rank(attempt)).map_err(|_| Failure::Status(400))?;
        self.schedule(place);
        Ok(())
    }

    /// A job has ended. True when it was a prefill leg.
    pub(super) fn finish_leg(&mut self, job: JobId, at: Timestamp, report: JobReport) -> bool {
        let Some((number, attempt)) = leg_of(job) else { return false };
        if report.reason == FinishReason::Abort {
            let came = self.judged(number, |front, legs| front.failed(legs, attempt, Failure::Broken, at));
            if came != PrefillProgress::Waiting {
                self.follow(number, came, at);
            }
        } else {
            self.queue.push(at.after(LEG_DELAY), SimEvent::Reply(number, attempt, report));
        }
        true
    }

    /// The response of a leg has arrived at the picker.
    pub(super) fn reply(&mut self, number: u64, attempt: Attempt, report: JobReport, now: Timestamp) {
        let server = self.prefills.get(&number).and_then(|p| p.legs.prefilling.server(attempt)).cloned();
        let place = server.as_ref().and_then(|server| self.places.get(&server.id)).copied();
        let usage = Usage {
            prompt_tokens: Some(report.prompt_tokens.into()),
            completion_tokens: Some(report.generated_tokens.into()),
            cached_tokens: Some(report.cached_tokens.into()),
        };
        let came = self.judged(number, |front, legs| front.computed(legs, attempt, &usage, now));
        let job = leg_id(number, attempt);
        if came != PrefillProgress::Computed {
            // The request has gone on without this leg: its blocks are released.
            (0..self.servers.len()).for_each(|i| self.release(i, job, now));
            return;
        }
        let Some(mut prefills) = self.prefills.remove(&number) else { return };
        prefills.sent.foretold = prefills.legs.foretold;
        let origin = place.map_or(PromptOrigin::FellBack, |server| PromptOrigin::Server {
            server,
            job,
            cached_tokens: report.cached_tokens,
            pinned: true,
        });
        self.go_on(prefills, server.as_deref(), origin, now);
    }

    /// A prefill has reached its deadline.
    pub(super) fn late(&mut self, number: u64, now: Timestamp) {
        let due = |prefills: &PendingPrefill| prefills.legs.prefilling.deadline() <= now;
        if self.prefills.get(&number).is_some_and(due) {
            let came = self.judged(number, |front, legs| front.late(legs, now));
            self.follow(number, came, now);
        }
    }

    /// Ends all attempts of a prefill whose request is preempted.
    pub(super) fn abandon(&mut self, number: u64, now: Timestamp) {
        for i in 0..self.servers.len() {
            self.advance(i, now);
            if let Some(server) = self.servers.get_mut(i) {
                (0..TRIES as Attempt).for_each(|attempt| {
                    server.cancel(now, leg_id(number, attempt));
                    server.release(now, leg_id(number, attempt));
                });
            }
            self.schedule(i);
        }
    }

    /// Releases the blocks that a server keeps for a job.
    pub(super) fn release(&mut self, i: usize, job: JobId, now: Timestamp) {
        if self.servers.get(i).is_some_and(|s| s.keeps(now, job)) {
            self.advance(i, now);
            if let Some(server) = self.servers.get_mut(i) {
                server.release(now, job);
            }
            self.schedule(i);
        }
    }

    /// A decode server has received the blocks of a prompt.
    pub(super) fn received(&mut self, job: JobId, at: Timestamp) {
        if let Some(InFlight { origin: PromptOrigin::Server { server, job, pinned, .. }, .. }) =
            self.flying.get_mut(&job.0)
        {
            *pinned = false;
            self.queue.push(at, SimEvent::Release(*server, *job));
        }
    }

    /// The blocks that `server` kept are gone: decode servers that wait for them compute the prompts themselves.
    pub(super) fn forsake(&mut self, server: usize, now: Timestamp) {
        let waits = |flying: &InFlight| match flying.origin {
            PromptOrigin::Server { server: s, pinned: true, .. } => s == server,
            _ => false,
        };
        let mut numbers: Vec<u64> = self.flying.iter().filter(|(_, f)| waits(f)).map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        for number in numbers {
            let Some(place) = self.flying.get(&number).map(|flying| flying.server) else { continue };
            self.advance(place, now);
            // Until now it may have received all blocks, or died.
            let Some(flying) = self.flying.get_mut(&number).filter(|f| waits(f)) else { continue };
            flying.origin = PromptOrigin::FellBack;
            let Some(server) = self.servers.get_mut(place) else { continue };
            let job = job(&flying.request, flying.sent.adapter(&server.config.model), self.pickers.of(number));
            let rank = server.cancel(now, job.id);
            // It was taken before, and takes no more room now.
            let _ = server.submit(now, job, rank);
            self.schedule(place);
        }
    }

    /// Whether what is to be received is still kept.
    pub(super) fn holds(&self, origin: &PromptOrigin, now: Timestamp) -> bool {
        let PromptOrigin::Server { server, job, .. } = origin else { return false };
        self.servers.get(*server).is_some_and(|s| s.alive && s.keeps(now, *job))
    }

    /// What passed between the servers of a request that has ended.
    pub(super) fn handover(&self, flying: &InFlight, report: &JobReport) -> Option<Handover> {
        let PromptOrigin::Server { server, .. } = flying.origin else { return None };
        let tokens = report.received_tokens;
        let engine = self.servers.get(flying.server).map(|s| &s.config);
        let transfer = engine.filter(|_| tokens > 0).map_or(Duration::ZERO, |e| e.latency.transfer(tokens));
        Some(Handover { prefill: u32::try_from(server).ok()?, received_tokens: tokens, transfer })
    }

    /// Sends a request to the server that answers it.
    pub(super) fn submit(&mut self, request: Request, sent: Sent, origin: PromptOrigin, now: Timestamp) {
        let place = sent.endpoint().and_then(|endpoint| self.places.get(&endpoint.id));
        let Some(i) = place.copied() else {
            return self.refuse(&request, Some(sent), Reason::NoReadyEndpoint.code(), now);
        };
        self.advance(i, now);
        let origin =
            if self.holds(&origin, now) || origin == PromptOrigin::Own { origin } else { PromptOrigin::FellBack };
        let received = if matches!(origin, PromptOrigin::Server { .. }) { request.prompt_tokens() } else { 0 };
        let Some(server) = self.servers.get_mut(i) else { return };
        if !server.alive {
            self.pickers.of_mut(request.number).lost(sent, true, now);
            return self.end_early(&request, u32::try_from(i).ok(), (Ending::Lost, SERVER_FAILED), now);
        }
        let adapter = sent.adapter(&server.config.model);
        let job = Job {
            handoff: Handoff { hold: None, received },
            ..job(&request, adapter, self.pickers.of(request.number))
        };
        if let Err(refused) = server.submit(now, job, sent.rank()) {
            return self.refuse(&request, Some(sent), refusal(&refused), now);
        }
        self.flying.insert(request.number, InFlight { request, sent, server: i, first_token: None, origin });
        self.schedule(i);
    }
}

/// Why a server rejects a request, without the numbers of the single request.
fn refusal(refused: &Refused) -> &'static str {
    match refused {
        Refused::TooLong { .. } => TOO_LONG,
        Refused::QueueFull { .. } => "the server's queue is full",
        Refused::Empty => "the prompt is empty",
    }
}

/// The whole of a request, for the `adapter` that its picker routed it to.
fn job(request: &Request, adapter: Option<Arc<str>>, picker: &Front) -> Job {
    Job {
        id: JobId(request.number),
        prompt: JobPrompt::Pieces(request.prompt.iter().map(|part| part.piece).collect()),
        max_tokens: request.answer.tokens.max(1),
        stops_after: None,
        lora: adapter,
        // Servers that keep the tenants apart do so by a salt.
        cache_salt: picker.isolated_tenant(request),
        answer_seed: request.answer.name,
        handoff: Handoff::default(),
    }
}
