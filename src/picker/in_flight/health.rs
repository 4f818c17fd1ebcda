//! What a response shows of the health of the endpoints that worked on its request. Each gets one outcome at most.

use super::fields::{Origin, ResponseHead};
use crate::decide::Plan;
use crate::event::Observer;
use crate::health::HealthReporter;
use attache_pool::Endpoint;
use attache_pool::health::{Availability, HealthOutcome, HealthPolicy};
use attache_protocol::Api;
use attache_record::{Booked, RequestTape};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// An endpoint that works on a request. Dropping it while its probe has no outcome lets another request probe.
#[derive(Debug)]
struct Worker {
    endpoint: Arc<Endpoint>,
    /// The request is the half-open probe of the endpoint.
    is_probe: bool,
    /// The probe has no outcome yet.
    awaits_outcome: bool,
    tape: RequestTape,
}

impl Worker {
    fn new(endpoint: Arc<Endpoint>, is_probe: bool, tape: &RequestTape) -> Self {
        Self { endpoint, is_probe, awaits_outcome: is_probe, tape: tape.clone() }
    }

    /// Records `outcome`, which ends the probe; true if it ejects the endpoint.
    fn record(
        &mut self,
        outcome: HealthOutcome,
        reporter: &HealthReporter,
        now: Timestamp,
        observer: &dyn Observer,
    ) -> bool {
        self.awaits_outcome = false;
        reporter.record(&self.endpoint, outcome, now, observer)
    }

    /// The request has ended. If the probe has no outcome, another request may probe the endpoint.
    fn lose_probe(&mut self) {
        if std::mem::take(&mut self.awaits_outcome) {
            self.tape.probe_lost(&self.endpoint);
        }
    }

    /// Whether it was ejected after the decision. An endpoint that is used although it is ejected proves nothing.
    fn is_ejected(&self, now: Timestamp, policy: &HealthPolicy) -> bool {
        !self.is_probe && self.endpoint.health.availability(now, policy) == Availability::Ejected
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.lose_probe();
    }
}

/// The endpoints that work on one request, and how their health learns its outcome.
#[derive(Debug)]
pub(super) struct WorkerHealth {
    reporter: HealthReporter,
    responder: Worker,
    prefill: Option<Worker>,
    /// A sidecar calls the prefill worker, so an error response may be the fault of either.
    has_sidecar: bool,
    encoders: Vec<Worker>,
    /// The decision used the endpoint although it was ejected.
    ejection_ignored: bool,
}

impl WorkerHealth {
    /// The endpoints of `plan`, of which that of `booked` responds.
    pub(super) fn new(plan: &Plan, booked: &Booked, api: Api) -> Self {
        let (decision, tape) = (&plan.decision, booked.tape());
        let (pool, client) = (plan.runtime.pool.clone(), plan.client);
        let prefill = plan.prefill_outcome.as_ref().and_then(|prefill_outcome| prefill_outcome.prefill.clone());
        let has_sidecar = plan.prefill.is_some();
        let probes_prefill = decision.split.as_ref().is_some_and(|split| split.probe);
        let encoder = |(nth, encoder): (usize, &Arc<Endpoint>)| {
            Worker::new(encoder.clone(), nth == 0 && decision.encode_probe, tape)
        };
        Self {
            reporter: HealthReporter { pool, tape: tape.clone(), api, client, role: "endpoint" },
            responder: Worker::new(booked.endpoint().clone(), decision.probe, tape),
            prefill: prefill.map(|endpoint| Worker {
                endpoint,
                is_probe: probes_prefill,
                // If Attaché calls the prefill worker, the prefill leg ends its probe.
                awaits_outcome: probes_prefill && has_sidecar,
                tape: tape.clone(),
            }),
            has_sidecar,
            encoders: decision.encode.iter().enumerate().map(encoder).collect(),
            ejection_ignored: decision.ejection_ignored,
        }
    }

    /// What the gateway's attempts before the last one show about their endpoints.
    pub(super) fn attempted(&mut self, head: &ResponseHead<'_>, now: Timestamp, observer: &dyn Observer) {
        if head.earlier.is_empty() {
            return;
        }
        let snapshot = self.reporter.pool.store.load();
        for attempt in head.earlier {
            let outcome = attempt.status.map_or(Some(unanswered(head)), HealthOutcome::of_status);
            let Some((server, outcome)) = attempt.server.zip(outcome) else { continue };
            if server == self.responder.endpoint.spec.address {
                self.responder.record(outcome, &self.reporter, now, observer);
            } else if let Some(state) = snapshot.position(server).and_then(|place| snapshot.get(place)) {
                self.reporter.record(&state.endpoint, outcome, now, observer);
            }
        }
    }

    /// Envoy has retried on `served`. If it does not say what it tried before, the endpoint of the decision counts as
    /// failed.
    pub(super) fn retried(
        &mut self,
        head: &ResponseHead<'_>,
        served: &Arc<Endpoint>,
        now: Timestamp,
        observer: &dyn Observer,
    ) {
        if head.earlier.is_empty() {
            self.responder.record(unanswered(head), &self.reporter, now, observer);
        }
        self.responder = Worker::new(served.clone(), false, &self.reporter.tape);
    }

    /// Records what a response head shows about the endpoints. `waits`: the responder may still wait for the prompt.
    pub(super) fn judge(&mut self, head: &ResponseHead<'_>, waits: bool, now: Timestamp, observer: &dyn Observer) {
        let outcome = match head.origin {
            Origin::Unreachable => Some(HealthOutcome::ConnectFailure),
            Origin::Gateway => None,
            Origin::Server => HealthOutcome::of_status(head.status),
        };
        let Some(outcome) = outcome else { return };
        if outcome == HealthOutcome::ErrorResponse && self.has_ejected_worker(now) {
            return;
        }
        // Only the body will show that the endpoint works.
        if head.is_good() && waits {
            return;
        }
        let Self { reporter, responder, prefill, has_sidecar, encoders, .. } = self;
        if responder.record(outcome, reporter, now, observer) || outcome == HealthOutcome::ConnectFailure {
            return;
        }
        // A sidecar does not say which server failed. The failing one fails in every combination, so it reaches the
        // limit first. Once it is ejected, the others are not blamed.
        let _ = prefill
            .iter_mut()
            .filter(|_| *has_sidecar)
            .chain(encoders)
            .any(|worker| worker.record(outcome, reporter, now, observer));
    }

    /// The response body has begun: the responder, which waited for the prompt, works.
    pub(super) fn succeeded(&mut self, now: Timestamp, observer: &dyn Observer) {
        self.responder.record(HealthOutcome::Success, &self.reporter, now, observer);
    }

    /// The request has ended: another request may probe the responder and the encode worker.
    pub(super) fn lose_probes(&mut self) {
        self.responder.lose_probe();
        self.encoders.iter_mut().for_each(Worker::lose_probe);
    }

    /// The request has ended: another request may probe the prefill worker.
    pub(super) fn lose_prefill_probe(&mut self) {
        self.prefill.iter_mut().for_each(Worker::lose_probe);
    }

    /// Whether an endpoint that worked on this request has been ejected since. That explains the error response.
    fn has_ejected_worker(&self, now: Timestamp) -> bool {
        let ejected = |worker: &Worker| worker.is_ejected(now, self.reporter.pool.scheduler.health());
        let mut others = self.prefill.iter().chain(&self.encoders).peekable();
        let is_alone = others.peek().is_none();
        !is_alone && !self.ejection_ignored && ejected(&self.responder) || others.any(ejected)
    }
}

/// What an attempt without a response shows, if it was not the last one. A request that failed on every endpoint may be
/// the cause itself.
fn unanswered(last: &ResponseHead<'_>) -> HealthOutcome {
    let failed_everywhere = last.origin == Origin::Server && last.status >= 500;
    if failed_everywhere { HealthOutcome::ErrorResponse } else { HealthOutcome::ConnectFailure }
}

#[cfg(test)]
mod tests {
    use super::super::fields::EarlierAttempt;
    use super::*;
    use crate::decide::tests::fixture::{Fixture, NOW, Parts};
    use crate::split::PrefillOutcome;
    use attache_disagg::Mode;
    use std::time::Duration;

    fn status(status: u16) -> ResponseHead<'static> {
        ResponseHead { status, shows_body: true, ..ResponseHead::default() }
    }

    fn workers(plan: &Plan) -> WorkerHealth {
        WorkerHealth::new(plan, plan.booked.as_ref().unwrap(), Api::ChatCompletions)
    }

    /// How many outcomes were recorded since the last call.
    fn outcomes(fixture: &Fixture) -> usize {
        fixture.events.take().iter().filter(|event| event.starts_with("Health")).count()
    }

    fn eject(endpoint: &Endpoint) {
        for _ in 0..2 {
            endpoint.health.record(HealthOutcome::ConnectFailure, NOW, &HealthPolicy::default());
        }
    }

    /// When an ejection at `NOW` is over.
    fn later() -> Timestamp {
        NOW.after(Duration::from_secs(10))
    }

    fn claim_probe(endpoint: &Endpoint) -> bool {
        endpoint.health.claim_probe(later(), &HealthPolicy::default())
    }

    /// A plan whose request is the probe of its endpoint.
    fn probe(fixture: &Fixture) -> (Box<Plan>, Arc<Endpoint>) {
        let mut plan = fixture.chat("hello").unwrap();
        plan.decision.probe = true;
        let endpoint = plan.decision.picks[0].clone();
        eject(&endpoint);
        assert!(claim_probe(&endpoint) && !claim_probe(&endpoint));
        (plan, endpoint)
    }

    #[test]
    fn probe_without_outcome_is_given_back_once() {
        let fixture = Parts::default().build();
        let (plan, endpoint) = probe(&fixture);
        let mut health = workers(&plan);
        health.lose_probes();
        assert!(claim_probe(&endpoint), "another request probes");
        drop(health);
        assert!(!claim_probe(&endpoint), "the other probe is still running");
        endpoint.health.probe_lost();
        assert!(claim_probe(&endpoint));
        drop(workers(&plan));
        assert!(claim_probe(&endpoint), "a request that is dropped in flight gives its probe back too");
    }

    #[test]
    fn probe_with_outcome_is_not_given_back() {
        let fixture = Parts::default().build();
        let (plan, endpoint) = probe(&fixture);
        let mut health = workers(&plan);
        health.judge(&status(500), false, later(), &fixture.events);
        health.lose_probes();
        drop(health);
        assert_eq!(outcomes(&fixture), 1);
        let availability = endpoint.health.availability(later(), &HealthPolicy::default());
        assert_eq!(availability, Availability::Ejected, "a failed probe ejects again");
    }

    #[test]
    fn success_of_a_waiting_decode_worker_is_recorded_at_the_first_byte() {
        let fixture = Parts::default().build();
        let (plan, endpoint) = probe(&fixture);
        let mut health = workers(&plan);
        health.judge(&status(200), true, later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 0);
        health.succeeded(later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 1);
        let availability = endpoint.health.availability(later(), &HealthPolicy::default());
        assert!(matches!(availability, Availability::SlowStart(_)), "{availability:?}");
    }

    #[test]
    fn retry_blames_the_first_endpoint_and_judges_the_second() {
        let fixture = Parts::default().build();
        let (plan, first) = probe(&fixture);
        let second = fixture.snapshot.load().endpoints[1].endpoint.clone();
        let mut health = workers(&plan);
        health.retried(&status(200), &second, later(), &fixture.events);
        assert_eq!(first.health.availability(later(), &HealthPolicy::default()), Availability::Ejected);
        health.judge(&status(200), false, later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 2);
        assert_eq!(second.health.availability(later(), &HealthPolicy::default()), Availability::Open);
    }

    #[test]
    fn attempts_that_the_gateway_shows_are_judged_one_by_one() {
        let fixture = Parts::default().build();
        let (plan, first) = probe(&fixture);
        let second = fixture.snapshot.load().endpoints[1].endpoint.clone();
        let attempt = |endpoint: &Endpoint, status| EarlierAttempt { server: Some(endpoint.spec.address), status };
        let unknown = EarlierAttempt { server: Some(([10, 9, 9, 9], 1).into()), status: None };
        let earlier = [attempt(&second, None), attempt(&first, Some(503)), unknown, attempt(&second, None)];
        let head = ResponseHead { earlier: &earlier, ..status(200) };
        let mut health = workers(&plan);
        health.attempted(&head, later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 3);
        let ejected = |endpoint: &Endpoint| endpoint.health.availability(later(), &HealthPolicy::default());
        assert_eq!(ejected(&first), Availability::Ejected, "its probe failed");
        assert_eq!(ejected(&second), Availability::Ejected, "two refused connections");
        health.retried(&head, &second, later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 0, "the first endpoint counts once");
        let unsupported = [attempt(&first, Some(501))];
        health.attempted(&ResponseHead { earlier: &unsupported, ..status(200) }, later(), &fixture.events);
        assert_eq!(outcomes(&fixture), 0, "a 501 says nothing about a server");
    }

    /// A request that a prefill worker shares, which a sidecar calls or Attaché.
    fn split(fixture: &Fixture, by_sidecar: bool) -> (Box<Plan>, Arc<Endpoint>) {
        let mut plan = fixture.chat("hello").unwrap();
        let prefill = plan.prefill.as_ref().unwrap().endpoint().clone();
        plan.prefill_outcome = Some(PrefillOutcome { prefill: Some(prefill.clone()), ..PrefillOutcome::default() });
        plan.prefill = plan.prefill.filter(|_| by_sidecar);
        (plan, prefill)
    }

    #[test]
    fn error_response_blames_the_prefill_worker_only_behind_a_sidecar() {
        let disagg = Some(Mode::Header { source_tokens: None });
        let fixture = Parts { disagg, roles: &["prefill", "decode", "decode"], ..Parts::default() }.build();
        for (by_sidecar, blamed) in [(true, 2), (false, 1)] {
            let (plan, _) = split(&fixture, by_sidecar);
            workers(&plan).judge(&status(500), false, NOW, &fixture.events);
            assert_eq!(outcomes(&fixture), blamed);
        }
    }

    #[test]
    fn error_response_after_the_ejection_of_a_worker_blames_none() {
        let disagg = Some(Mode::Header { source_tokens: None });
        let fixture = Parts { disagg, roles: &["prefill", "decode", "decode"], ..Parts::default() }.build();
        let (plan, prefill) = split(&fixture, true);
        eject(&prefill);
        workers(&plan).judge(&status(500), false, NOW, &fixture.events);
        assert_eq!(outcomes(&fixture), 0);
        let alone = Parts::default().build();
        let plan = alone.chat("hello").unwrap();
        eject(&plan.decision.picks[0]);
        workers(&plan).judge(&status(500), false, NOW, &alone.events);
        assert_eq!(outcomes(&alone), 1, "an endpoint that is alone has no other to blame");
    }
}
