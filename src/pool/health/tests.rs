use super::*;
use proptest::prelude::*;
use std::sync::atomic::AtomicUsize;

const S: u64 = 1_000_000_000;

fn policy() -> HealthPolicy {
    HealthPolicy::default()
}

fn at(seconds: f64) -> Timestamp {
    Timestamp(S).after(Duration::from_secs_f64(seconds))
}

fn fail(health: &EndpointHealth, times: u32, now: Timestamp) -> Vec<bool> {
    (0..times).map(|_| health.record(HealthOutcome::Failure, now, &policy())).collect()
}

#[test]
fn five_consecutive_failures_eject() {
    let health = EndpointHealth::default();
    assert_eq!(fail(&health, 4, at(0.0)), [false; 4]);
    assert!(!health.record(HealthOutcome::Success, at(0.0), &policy()));
    assert_eq!(fail(&health, 4, at(0.0)), [false; 4], "a success resets the count");
    assert_eq!(health.availability(at(0.0), &policy()), Availability::Open);
    assert_eq!(fail(&health, 1, at(0.0)), [true]);
    assert_eq!(health.availability(at(4.9), &policy()), Availability::Ejected);
    assert_eq!(health.availability(at(5.0), &policy()), Availability::HalfOpen);
}

#[test]
fn two_consecutive_connect_failures_eject() {
    let health = EndpointHealth::default();
    let p = policy();
    assert!(!health.record(HealthOutcome::ConnectFailure, at(0.0), &p));
    assert!(!health.record(HealthOutcome::Failure, at(0.0), &p), "a 5xx response proves a connection");
    assert!(!health.record(HealthOutcome::ConnectFailure, at(0.0), &p));
    assert!(health.record(HealthOutcome::ConnectFailure, at(0.0), &p));
    assert_eq!(health.availability(at(0.1), &p), Availability::Ejected);
}

#[test]
fn zero_disables_a_rule() {
    let off = HealthPolicy { consecutive_failures: 0, ..policy() };
    let health = EndpointHealth::default();
    for _ in 0..20 {
        assert!(!health.record(HealthOutcome::ConnectFailure, at(0.0), &off));
    }
    assert_eq!(health.availability(at(0.0), &off), Availability::Open);
    fail(&health, 5, at(0.0));
    assert_eq!(health.availability(at(0.0), &off), Availability::Open, "disabled during the ejection");

    let no_connect_rule = HealthPolicy { consecutive_connect_failures: 0, ..policy() };
    let health = EndpointHealth::default();
    let ejected: Vec<bool> =
        (0..5).map(|_| health.record(HealthOutcome::ConnectFailure, at(0.0), &no_connect_rule)).collect();
    assert_eq!(ejected, [false, false, false, false, true]);
}

#[test]
fn consecutive_ejections_double_up_to_the_longest() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    let mut now = at(0.0);
    for seconds in [5, 10, 20, 40, 80, 160, 300, 300, 300] {
        let length = Duration::from_secs(seconds);
        assert_eq!(health.availability(now.after(length - Duration::from_millis(1)), &policy()), Availability::Ejected);
        now = now.after(length);
        assert_eq!(health.availability(now, &policy()), Availability::HalfOpen, "{seconds} s");
        assert!(health.claim_probe(now, &policy()));
        assert!(health.record(HealthOutcome::Failure, now, &policy()), "one failed probe ejects");
    }
    let now = now.after(Duration::from_secs(300));
    health.record(HealthOutcome::Success, now, &policy());
    fail(&health, 5, now);
    assert_eq!(
        health.availability(now.after(Duration::from_secs(5)), &policy()),
        Availability::HalfOpen,
        "from the start"
    );
}

#[test]
fn one_probe_at_a_time_and_a_success_starts_slowly() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    assert!(!health.claim_probe(at(1.0), &policy()), "still ejected");
    assert!(health.claim_probe(at(6.0), &policy()));
    assert!(!health.claim_probe(at(6.0), &policy()));
    assert_eq!(health.availability(at(7.0), &policy()), Availability::Ejected, "a probe is in flight");
    health.probe_lost();
    assert_eq!(health.availability(at(7.0), &policy()), Availability::HalfOpen);
    assert!(health.claim_probe(at(7.0), &policy()));
    health.record(HealthOutcome::Success, at(10.0), &policy());
    for (after, percent) in [(0.0, 300), (2.5, 225), (5.0, 150), (9.9, 3)] {
        assert_eq!(health.availability(at(10.0 + after), &policy()), Availability::SlowStart(percent), "{after} s");
    }
    assert_eq!(health.availability(at(20.0), &policy()), Availability::Open);
    assert!(health.claim_probe(at(20.0), &policy()), "nothing to claim, since it is open");
    let at_once = HealthPolicy { slow_start: Duration::ZERO, ..policy() };
    assert_eq!(health.availability(at(10.0), &at_once), Availability::Open);
}

#[test]
fn probe_without_a_result_expires() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    assert!(health.claim_probe(at(5.0), &policy()));
    assert_eq!(health.availability(at(304.9), &policy()), Availability::Ejected);
    assert_eq!(health.availability(at(305.1), &policy()), Availability::HalfOpen);
    assert!(health.claim_probe(at(305.1), &policy()));
}

#[test]
fn late_outcomes_do_not_lengthen_an_ejection_but_may_end_it() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    assert_eq!(fail(&health, 20, at(1.0)), [false; 20]);
    assert_eq!(health.availability(at(5.0), &policy()), Availability::HalfOpen);
    fail(&health, 1, at(5.0));
    health.record(HealthOutcome::Success, at(6.0), &policy());
    assert!(matches!(health.availability(at(6.0), &policy()), Availability::SlowStart(_)));
}

#[test]
fn lost_probe_of_an_endpoint_without_probe_changes_nothing() {
    let health = EndpointHealth::default();
    health.probe_lost();
    assert_eq!(health.availability(at(0.0), &policy()), Availability::Open);
    fail(&health, 5, at(0.0));
    health.probe_lost();
    assert_eq!(health.availability(at(1.0), &policy()), Availability::Ejected);
}

#[test]
fn restart_clears_the_record() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    fail(&health, 1, at(5.0));
    health.reset();
    assert_eq!(health.availability(at(5.0), &policy()), Availability::Open);
    assert_eq!(fail(&health, 5, at(6.0)), [false, false, false, false, true]);
    assert_eq!(health.availability(at(11.0), &policy()), Availability::HalfOpen, "5 s, not 20 s");
}

#[test]
fn one_of_many_threads_gets_the_probe_and_one_failure_ejects_once() {
    for round in 0..200 {
        let health = EndpointHealth::default();
        fail(&health, 5, at(0.0));
        let (claimed, ejected) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let barrier = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    if health.claim_probe(at(6.0), &policy()) {
                        claimed.fetch_add(1, Relaxed);
                    }
                    barrier.wait();
                    if health.record(HealthOutcome::Failure, at(7.0), &policy()) {
                        ejected.fetch_add(1, Relaxed);
                    }
                });
            }
        });
        assert_eq!((claimed.load(Relaxed), ejected.load(Relaxed)), (1, 1), "round {round}");
        assert_eq!(health.availability(at(17.0), &policy()), Availability::HalfOpen, "doubled once in round {round}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    HealthOutcome(HealthOutcome),
    Claim,
    ProbeLost,
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let step = prop_oneof![
        2 => Just(Step::HealthOutcome(HealthOutcome::Success)),
        6 => Just(Step::HealthOutcome(HealthOutcome::Failure)),
        3 => Just(Step::HealthOutcome(HealthOutcome::ConnectFailure)),
        6 => Just(Step::Claim),
        1 => Just(Step::ProbeLost),
        1 => Just(Step::Reset),
    ];
    prop::collection::vec((0u64..40_000, step), 0..120)
}

proptest! {
    /// After any sequence of outcomes, an endpoint can be probed after the longest ejection; a success always ends an
    /// ejection; a probe is granted only to a half-open endpoint, and only once.
    #[test]
    fn any_sequence_of_outcomes_leaves_a_way_back(steps in steps()) {
        let health = EndpointHealth::default();
        let policy = policy();
        let mut now = at(0.0);
        for (ms, step) in steps {
            now = now.after(Duration::from_millis(ms));
            let before = health.availability(now, &policy);
            match step {
                Step::HealthOutcome(outcome) => {
                    let ejected = health.record(outcome, now, &policy);
                    let after = health.availability(now, &policy);
                    prop_assert!(!ejected || after == Availability::Ejected);
                    if outcome == HealthOutcome::Success {
                        prop_assert!(matches!(after, Availability::Open | Availability::SlowStart(_)));
                    }
                }
                Step::Claim => {
                    let granted = health.claim_probe(now, &policy);
                    prop_assert_eq!(granted, before != Availability::Ejected);
                    if before == Availability::HalfOpen {
                        prop_assert!(!health.claim_probe(now, &policy));
                    }
                }
                Step::ProbeLost => health.probe_lost(),
                Step::Reset => health.reset(),
            }
        }
        let later = now.after(policy.max_ejection + Duration::from_secs(1));
        prop_assert_ne!(health.availability(later, &policy), Availability::Ejected);
        health.record(HealthOutcome::Success, later, &policy);
        prop_assert_eq!(health.availability(later.after(policy.slow_start), &policy), Availability::Open);
    }
}

fn error(api: Api, client: &str) -> Observation {
    Observation { outcome: HealthOutcome::ErrorResponse, api, client: ClientSlot::of(client.as_bytes()) }
}

fn success(api: Api) -> Observation {
    Observation { outcome: HealthOutcome::Success, api, client: ClientSlot::default() }
}

/// The second after the first error response at which error responses to this many clients eject; `None` when those
/// of 10 s do not.
fn ejected_after(clients: usize) -> Option<f64> {
    let health = EndpointHealth::default();
    let mut different: Vec<Observation> = Vec::new();
    // Names with the same slot count as one client.
    for name in 0..1_000 {
        let next = error(Api::ChatCompletions, &name.to_string());
        if different.len() < clients && !different.contains(&next) {
            different.push(next);
        }
    }
    let mut turns = different.iter().cycle();
    (0..=100).map(|tenth| f64::from(tenth) / 10.0).find(|t| health.record(*turns.next().unwrap(), at(*t), &policy()))
}

#[test]
fn more_failing_clients_eject_sooner() {
    assert_eq!([1, 2, 5].map(ejected_after), [Some(5.0), Some(2.5), Some(1.0)]);
    assert_eq!(ejected_after(60), Some(1.0), "not sooner than with five clients");
}

#[test]
fn success_of_any_api_but_the_list_of_models_prevents_ejection() {
    for (api, prevents) in
        [(Api::ChatCompletions, true), (Api::Embeddings, true), (Api::Other, true), (Api::Models, false)]
    {
        let health = EndpointHealth::default();
        let mut ejected = false;
        for tenth in 0..200 {
            let now = at(f64::from(tenth) / 10.0);
            ejected |= health.record(error(Api::Embeddings, "a"), now, &policy());
            if tenth % 9 == 0 {
                health.record(success(api), now, &policy());
            }
            // A success of another kind of request would end the ejection.
            if ejected {
                break;
            }
        }
        assert_eq!(ejected, !prevents, "{api:?}");
    }
}

#[test]
fn statuses_for_unimplemented_features_do_not_count() {
    let outcomes = [200, 404, 429, 500, 501, 502, 503, 504, 505, 507].map(HealthOutcome::of_status);
    let (ok, error) = (Some(HealthOutcome::Success), Some(HealthOutcome::ErrorResponse));
    assert_eq!(outcomes, [ok, ok, ok, error, None, error, error, error, None, error]);
}

#[test]
fn probes_of_one_client_do_not_lengthen_an_ejection() {
    let health = EndpointHealth::default();
    fail(&health, 5, at(0.0));
    let mut now = at(5.0);
    let mut lengths = Vec::new();
    for client in ["a", "a", "a", "b", "b", "c"] {
        assert!(health.claim_probe(now, &policy()));
        assert!(health.record(error(Api::ChatCompletions, client), now, &policy()));
        let began = now;
        while health.availability(now, &policy()) == Availability::Ejected {
            now = now.after(Duration::from_secs(1));
        }
        lengths.push(now.since(began).as_secs());
    }
    assert_eq!(lengths, [10, 10, 10, 20, 20, 40]);
}

#[test]
fn error_responses_eject_only_up_to_the_share() {
    let health = EndpointHealth::default();
    let at_once = HealthPolicy { error_period: Duration::ZERO, ..policy() };
    let observe = |allowed| health.observe(error(Api::ChatCompletions, "a"), at(0.0), &at_once, || allowed);
    let verdicts = [false, false, false, false, false, false, true].map(observe);
    assert_eq!(verdicts[..4], [Verdict::Kept; 4]);
    assert_eq!(verdicts[4..], [Verdict::Capped, Verdict::Capped, Verdict::Ejected]);
    // Late and interrupted prefills are limited in the same way.
    let health = EndpointHealth::default();
    let late = |allowed| health.observe(HealthOutcome::Failure.into(), at(0.0), &policy(), || allowed);
    let verdicts = [false, false, false, false, false, true].map(late);
    assert_eq!(verdicts[4..], [Verdict::Capped, Verdict::Ejected]);
    // For an unreachable server, the limit is not consulted.
    let health = EndpointHealth::default();
    let unreachable = || health.observe(HealthOutcome::ConnectFailure.into(), at(0.0), &policy(), || unreachable!());
    assert_eq!([unreachable(), unreachable()], [Verdict::Kept, Verdict::Ejected]);
}

#[test]
fn share_counts_the_pool_and_allows_one_endpoint() {
    let may = |percent, away, total| HealthPolicy { max_ejection_percent: percent, ..policy() }.may_eject(away, total);
    assert!(may(50, 0, 1) && may(50, 0, 2) && may(50, 1, 4) && may(10, 0, 4) && may(0, 0, 4));
    assert!(!may(50, 1, 2) && !may(50, 1, 3) && !may(50, 2, 4) && !may(10, 1, 4));
    assert!(may(100, 3, 4), "100 % disables the limit");
}

#[test]
fn contact_follows_responses_and_failed_connections() {
    let (health, policy) = (EndpointHealth::default(), HealthPolicy::default());
    assert_eq!(health.contact(), Contact::Unknown);
    health.record(HealthOutcome::ErrorResponse, Timestamp(1), &policy);
    assert_eq!(health.contact(), Contact::Unknown, "a server that does not respond counts as an error response too");
    health.record(HealthOutcome::ConnectFailure, Timestamp(2), &policy);
    assert_eq!(health.contact(), Contact::Unreachable);
    health.record(HealthOutcome::Success, Timestamp(3), &policy);
    assert_eq!(health.contact(), Contact::Reached);
    health.unreachable();
    assert_eq!(health.contact(), Contact::Unreachable);
    assert_eq!(health.availability(Timestamp(4), &policy), Availability::Open, "only requests eject");
    health.reached();
    assert_eq!(health.contact(), Contact::Reached);
}

#[test]
fn ejection_names_its_cause_and_return() {
    for outcome in HealthOutcome::ALL.into_iter().filter(|outcome| outcome.is_failure()) {
        let (health, policy) = (EndpointHealth::default(), HealthPolicy::default());
        assert_eq!(health.ejection(Timestamp(1), &policy), None);
        // Error responses of one client eject after a period.
        let period = policy.error_period.as_nanos() as u64;
        let times = (0..policy.consecutive_failures).map(|n| Timestamp(1 + u64::from(n) * period));
        let ejected = times.clone().find(|at| health.record(outcome, *at, &policy)).unwrap();
        let ejection = health.ejection(ejected, &policy).unwrap();
        assert_eq!((ejection.cause, ejection.returns_in.as_secs_f64().round()), (outcome, 5.0), "{outcome:?}");
        let counted: Vec<_> = health.ejection_counts().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [(outcome, 1)]);
        let later = ejected.after(Duration::from_secs(60));
        assert_eq!(health.ejection(later, &policy).unwrap().returns_in, Duration::ZERO, "half open");
        health.record(HealthOutcome::Success, later, &policy);
        assert_eq!(health.ejection(later, &policy), None);
    }
}
