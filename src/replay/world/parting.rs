//! Requests that two servers share: the prefill's leg on one, the transfer, and what becomes of it when a server dies in between.
//!
//! A leg is a job of one token whose blocks the prefill server keeps under a lease; its answer takes [`LEG_DELAY`] to the picker; the
//! decode server receives what it lacks, and the blocks are free to go when it has. Blocks that are gone before that (their server
//! died, or the lease was over) make the decode server compute the prompt itself, as vLLM does with `kv_load_failure_policy: recompute`.
//! Called by [`super::World`]; pure.

use super::{Flying, Origin, World};
use crate::front::Sent;
use crate::legs::{Came, Legs};
use crate::queue::Due;
use attache_disagg::Failure;
use attache_disagg::attempts::Attempt;
use attache_pool::Endpoint;
use attache_protocol::Usage;
use attache_report::served::{Ending, Handover};
use attache_sim::engine::{DEFAULT_LEASE, FinishReason, Handoff, Job, JobId, JobPrompt, JobReport};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use std::time::Duration;

/// 1 ms: a leg's answer within a data centre, and the picker that reads it. Everything else that goes over the network is free here, for
/// whole and for split requests alike.
const LEG_DELAY: Duration = Duration::from_millis(1);

/// Numbers of legs begin here: those of requests stay below.
const LEGS: u64 = 1 << 62;
/// More tries than any request has.
const TRIES: u64 = 16;

/// A request whose prompt is being computed.
#[derive(Debug)]
pub(super) struct Parted {
    request: Request,
    sent: Sent,
    legs: Legs,
}

/// The job of a try.
fn leg_id(number: u64, attempt: Attempt) -> JobId {
    JobId(LEGS | (number * TRIES + attempt as u64))
}

/// The request and the try of a leg's job; `None` for the job of a request.
fn leg_of(job: JobId) -> Option<(u64, Attempt)> {
    let leg = job.0.checked_sub(LEGS)?;
    Some((leg / TRIES, usize::try_from(leg % TRIES).ok()?))
}

impl World<'_> {
    /// Begins to have the prompt of a request computed.
    pub(super) fn part(&mut self, request: Request, sent: Sent, legs: Legs, now: Timestamp) {
        let number = request.number;
        self.parted.insert(number, Parted { request, sent, legs });
        self.follow(number, Came::Ask(0), now);
    }

    /// Does what follows from what a request has come to.
    fn follow(&mut self, number: u64, mut came: Came, now: Timestamp) {
        while let Came::Ask(attempt) = came {
            came = match self.ask(number, attempt, now) {
                Ok(()) => Came::Waiting,
                Err(failure) => self.judged(number, |front, legs| front.failed(legs, attempt, failure, now)),
            };
        }
        let goes_on = match came {
            Came::Computed => return,
            Came::Waiting | Came::Ask(_) => {
                let late = self.parted.get(&number).map(|parted| parted.legs.prefilling.deadline());
                if let Some(late) = late.filter(|at| *at > now) {
                    self.queue.push(late, Due::Late(number));
                }
                return;
            }
            Came::Local => true,
            Came::Refused => false,
        };
        match self.parted.remove(&number) {
            Some(parted) if goes_on => self.go_on(parted, None, Origin::FellBack, now),
            // Not the decode server's fault.
            Some(Parted { request, sent, .. }) => {
                self.front.unsent(sent, now);
                self.refuse(&request, None, now);
            }
            None => {}
        }
    }

    /// Sends a request to its decode server; `prefill` has computed the prompt, if anybody has.
    fn go_on(&mut self, parted: Parted, prefill: Option<&Endpoint>, origin: Origin, now: Timestamp) {
        let Parted { request, mut sent, mut legs } = parted;
        let base = self.base();
        match self.front.dispatch(&request, &base, &mut sent, &mut legs, prefill, now) {
            Ok(()) => self.submit(request, sent, origin, now),
            Err(_) => {
                self.front.unsent(sent, now);
                self.refuse(&request, None, now);
            }
        }
    }

    fn judged(&mut self, number: u64, judge: impl FnOnce(&super::Front, &mut Legs) -> Came) -> Came {
        let Some(parted) = self.parted.get_mut(&number) else { return Came::Waiting };
        judge(&self.front, &mut parted.legs)
    }

    /// Asks the server of a try.
    fn ask(&mut self, number: u64, attempt: Attempt, now: Timestamp) -> Result<(), Failure> {
        let server = self.parted.get(&number).and_then(|p| p.legs.prefilling.server(attempt)).map(|server| server.id);
        let place = server.and_then(|id| self.places.get(&id)).copied().ok_or(Failure::Refused)?;
        self.advance(place, now);
        let server = self.servers.get_mut(place).filter(|s| s.alive).ok_or(Failure::Refused)?;
        let parted = self.parted.get(&number).ok_or(Failure::Unusable)?;
        let job = Job {
            id: leg_id(number, attempt),
            max_tokens: 1,
            handoff: Handoff { hold: Some(DEFAULT_LEASE), received: 0 },
            ..job(&parted.request)
        };
        server.engine.submit(now, job).map_err(|_| Failure::Status(400))?;
        self.schedule(place);
        Ok(())
    }

    /// A job has ended; true when it was a leg.
    pub(super) fn finish_leg(&mut self, job: JobId, at: Timestamp, report: JobReport) -> bool {
        let Some((number, attempt)) = leg_of(job) else { return false };
        if report.reason == FinishReason::Abort {
            let came = self.judged(number, |front, legs| front.failed(legs, attempt, Failure::Broken, at));
            if came != Came::Waiting {
                self.follow(number, came, at);
            }
        } else {
            self.queue.push(at.after(LEG_DELAY), Due::Reply(number, attempt, report));
        }
        true
    }

    /// The answer to a leg is back.
    pub(super) fn reply(&mut self, number: u64, attempt: Attempt, report: JobReport, now: Timestamp) {
        let server = self.parted.get(&number).and_then(|p| p.legs.prefilling.server(attempt)).cloned();
        let place = server.as_ref().and_then(|server| self.places.get(&server.id)).copied();
        let usage = Usage {
            prompt_tokens: Some(report.prompt_tokens.into()),
            completion_tokens: Some(report.generated_tokens.into()),
            cached_tokens: Some(report.cached_tokens.into()),
        };
        let came = self.judged(number, |front, legs| front.computed(legs, attempt, &usage, now));
        let job = leg_id(number, attempt);
        if came != Came::Computed {
            // Nobody waits for it any more: what it pins is given back.
            (0..self.servers.len()).for_each(|i| self.release(i, job, now));
            return;
        }
        let Some(mut parted) = self.parted.remove(&number) else { return };
        parted.sent.foretold = parted.legs.foretold;
        let origin = place.map_or(Origin::FellBack, |server| Origin::Server {
            server,
            job,
            cached_tokens: report.cached_tokens,
            pinned: true,
        });
        self.go_on(parted, server.as_deref(), origin, now);
    }

    /// A request has waited long for its prompt.
    pub(super) fn late(&mut self, number: u64, now: Timestamp) {
        let due = |parted: &Parted| parted.legs.prefilling.deadline() <= now;
        if self.parted.get(&number).is_some_and(due) {
            let came = self.judged(number, |front, legs| front.late(legs, now));
            self.follow(number, came, now);
        }
    }

    /// What a server keeps of a job is free to go.
    pub(super) fn release(&mut self, i: usize, job: JobId, now: Timestamp) {
        if self.servers.get(i).is_some_and(|s| s.engine.pinned(now, job).is_some()) {
            self.advance(i, now);
            if let Some(server) = self.servers.get_mut(i) {
                server.engine.release(now, job);
            }
            self.schedule(i);
        }
    }

    /// A decode server has what it lacked of a prompt.
    pub(super) fn received(&mut self, job: JobId, at: Timestamp) {
        if let Some(Flying { origin: Origin::Server { server, job, pinned, .. }, .. }) = self.flying.get_mut(&job.0) {
            *pinned = false;
            self.queue.push(at, Due::Release(*server, *job));
        }
    }

    /// What `server` kept is gone: who was to receive it computes its prompt itself.
    pub(super) fn forsake(&mut self, server: usize, now: Timestamp) {
        let waits =
            |flying: &Flying| matches!(flying.origin, Origin::Server { server: s, pinned: true, .. } if s == server);
        let mut numbers: Vec<u64> = self.flying.iter().filter(|(_, f)| waits(f)).map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        for number in numbers {
            let Some(place) = self.flying.get(&number).map(|flying| flying.server) else { continue };
            self.advance(place, now);
            // It may have received everything, or died, up to now.
            let Some(flying) = self.flying.get_mut(&number).filter(|f| waits(f)) else { continue };
            flying.origin = Origin::FellBack;
            let job = job(&flying.request);
            let Some(server) = self.servers.get_mut(place) else { continue };
            server.engine.cancel(now, job.id, &mut Vec::new());
            // It was taken before, and takes no more room now.
            let _ = server.engine.submit(now, job);
            self.schedule(place);
        }
    }

    /// Whether what is to be received is still kept.
    pub(super) fn holds(&self, origin: &Origin, now: Timestamp) -> bool {
        let Origin::Server { server, job, .. } = origin else { return false };
        self.servers.get(*server).is_some_and(|s| s.alive && s.engine.pinned(now, *job).is_some())
    }

    /// What passed between the servers of a request that has ended.
    pub(super) fn handover(&self, flying: &Flying, report: &JobReport) -> Option<Handover> {
        let Origin::Server { server, .. } = flying.origin else { return None };
        let tokens = report.received_tokens;
        let engine = self.servers.get(flying.server).map(|s| s.engine.config());
        let transfer = engine.filter(|_| tokens > 0).map_or(Duration::ZERO, |e| e.latency.transfer(tokens));
        Some(Handover { prefill: u32::try_from(server).ok()?, received_tokens: tokens, transfer })
    }

    /// Sends a request to the server that answers it.
    pub(super) fn submit(&mut self, request: Request, sent: Sent, origin: Origin, now: Timestamp) {
        let Some(i) = self.places.get(&sent.booking.endpoint().id).copied() else {
            return self.refuse(&request, Some(sent), now);
        };
        self.advance(i, now);
        let origin = if self.holds(&origin, now) || origin == Origin::Own { origin } else { Origin::FellBack };
        let received = if matches!(origin, Origin::Server { .. }) { request.prompt_tokens() } else { 0 };
        let Some(server) = self.servers.get_mut(i) else { return };
        if !server.alive {
            self.front.lost(sent, true, now);
            return self.end_early(&request, u32::try_from(i).ok(), Ending::Lost, now);
        }
        let job = Job { handoff: Handoff { hold: None, received }, ..job(&request) };
        if server.engine.submit(now, job).is_err() {
            return self.refuse(&request, Some(sent), now);
        }
        self.flying.insert(request.number, Flying { request, sent, server: i, first_token: None, origin });
        self.schedule(i);
    }
}

/// The whole of a request.
fn job(request: &Request) -> Job {
    Job {
        id: JobId(request.number),
        prompt: JobPrompt::Pieces(request.prompt.iter().map(|part| part.piece).collect()),
        max_tokens: request.answer.tokens.max(1),
        stops_after: None,
        lora: request.adapter.clone(),
        cache_salt: None,
        answer_seed: request.answer.name,
        handoff: Handoff::default(),
    }
}
