use super::*;
use crate::RequestFacts;
use crate::subset::{MAX_SUBSET_ENTRIES, Subset};
use crate::testing::{NOW, context, decide, eject, of_roles, snapshot};
use crate::tests::build;
use attache_pool::health::HealthOutcome;
use attache_pool::ledger::Ticket;
use attache_pool::{EndpointSpec, PoolSnapshot};
use attache_protocol::{MediaKind, Piece, Prompt};
use attache_types::rng::for_request;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

fn subset(entries: &[&str]) -> Subset {
    let mut subset = Subset::default();
    for entry in entries {
        subset.add(entry);
    }
    subset
}

fn scheduler(name: &str, wanted: usize) -> Scheduler {
    Scheduler::new(Choices::only(name, build(name)), HealthPolicy::default(), wanted)
}

#[test]
fn entries_of_a_subset_hint() {
    for (entry, allows, forbids) in [
        ("10.0.0.1:8080", "10.0.0.1:8080", "10.0.0.1:8081"),
        ("10.0.0.1", "10.0.0.1:9", "10.0.0.2:9"),
        (" 10.0.0.1:8080 ", "10.0.0.1:8080", "10.0.0.2:8080"),
        ("[2001:db8::1]:80", "[2001:db8::1]:80", "[2001:db8::1]:81"),
        ("[2001:db8::1]", "[2001:db8::1]:80", "[2001:db8::2]:80"),
        ("2001:DB8:0::1", "[2001:db8::1]:80", "[2001:db8::2]:80"),
        ("::ffff:10.0.0.1", "10.0.0.1:80", "10.0.0.2:80"),
        ("10.0.0.1:80", "[::ffff:10.0.0.1]:80", "[::ffff:10.0.0.2]:80"),
    ] {
        let mut subset = Subset::default();
        assert!(subset.add(entry), "{entry}");
        assert!(subset.allows(allows.parse().unwrap()), "{entry} allows {allows}");
        assert!(!subset.allows(forbids.parse().unwrap()), "{entry} forbids {forbids}");
    }
    for entry in [
        "",
        " ",
        "12345",
        "10.0.0.1:",
        "10.0.0.1:99999",
        "10.0.0.256",
        "host:80",
        "[10.0.0.1]",
        "[::1",
        "::1]",
        "[[::1]]",
        "10.0.0.1,10.0.0.2",
    ] {
        let mut subset = Subset::default();
        assert!(!subset.add(entry), "{entry}");
        assert_eq!(subset, Subset::default(), "{entry}");
    }
}

#[test]
fn subset_hint_has_a_maximum_length() {
    let mut subset = Subset::default();
    let taken = (0..10_000u32).filter(|i| subset.add(&std::net::Ipv4Addr::from(*i).to_string())).count();
    assert_eq!(taken, MAX_SUBSET_ENTRIES);
}

/// The reference picker's own cases: three endpoints, and those that each hint allows.
#[test]
fn subset_hint_narrows_the_pool() {
    let pool = snapshot(&[(0, 0), (1, 0), (2, 0)]);
    let all = scheduler("least-request", 8);
    for (hint, expected) in [
        (None, vec![0, 1, 2]),
        (Some(vec!["10.0.0.1:8000"]), vec![0]),
        (Some(vec!["10.0.0.1:8000", "10.0.0.1:8002"]), vec![0, 2]),
        (Some(vec!["10.0.0.1"]), vec![0, 1, 2]),
        (Some(vec!["10.0.0.1:8001", "12345"]), vec![1]),
        (Some(vec!["10.0.0.1:8001", "192.168.1.1:8080"]), vec![1]),
    ] {
        let hint = hint.map(|h| subset(&h));
        let picks: BTreeSet<u32> =
            decide(&all, &pool, hint.as_ref(), 0).unwrap().picks.iter().map(|e| e.id.0).collect();
        assert_eq!(picks.into_iter().collect::<Vec<_>>(), expected, "{hint:?}");
    }
    for hint in [vec![], vec!["192.168.1.1:8080"], vec!["nonsense"]] {
        let error = decide(&all, &pool, Some(&subset(&hint)), 0).unwrap_err();
        assert_eq!((error.reason, error.reason.status()), (Reason::SubsetEmpty, 503), "{hint:?}");
    }
}

#[test]
fn draining_endpoints_get_nothing_and_an_empty_pool_is_503() {
    let mut pool = snapshot(&[(0, 9), (1, 0)]);
    let mut spec = (*pool.endpoints[1].endpoint.spec).clone();
    spec.draining = true;
    pool.endpoints[1] = pool.endpoints[1].clone().respecified(spec);
    let least = scheduler("least-request", 2);
    let picks: Vec<u32> = decide(&least, &pool, None, 0).unwrap().picks.iter().map(|e| e.id.0).collect();
    assert_eq!(picks, [0]);
    let only_draining = subset(&["10.0.0.1:8001"]);
    let error = decide(&least, &pool, Some(&only_draining), 0).unwrap_err();
    assert_eq!(error.reason, Reason::NoReadyEndpoint, "the hint allows an endpoint, so it is not the reason");
    let error = decide(&least, &PoolSnapshot::default(), None, 0).unwrap_err();
    assert_eq!((error.reason, error.retry_after), (Reason::NoReadyEndpoint, Some(Duration::from_secs(1))));
    assert_eq!(
        decide(&least, &PoolSnapshot::default(), Some(&subset(&["10.0.0.1"])), 0).unwrap_err().reason,
        Reason::SubsetEmpty
    );
}

#[test]
fn ejected_endpoints_are_not_picked_unless_all_are_ejected() {
    let pool = snapshot(&[(0, 0), (1, 50), (2, 60)]);
    let least = scheduler("least-request", 3);
    let picks = |seed| decide(&least, &pool, None, seed).unwrap().picks.iter().map(|e| e.id.0).collect::<Vec<_>>();
    eject(&pool, 0, false);
    assert_eq!(picks(0), [1, 2]);
    eject(&pool, 1, false);
    assert_eq!(picks(0), [2]);
    eject(&pool, 2, false);
    assert_eq!(picks(0), [0, 1, 2], "a pool with all endpoints ejected is tried");
    assert!(!decide(&least, &pool, None, 0).unwrap().probe);
}

#[test]
fn half_open_endpoint_as_a_fallback_is_no_probe() {
    let pool = snapshot(&[(0, 9), (1, 0)]);
    eject(&pool, 0, true);
    let least = scheduler("least-request", 2);
    for _ in 0..3 {
        let decision = decide(&least, &pool, None, 0).unwrap();
        assert_eq!((decision.picks.len(), decision.picks[0].id.0, decision.probe), (2, 1, false));
    }
}

#[test]
fn concurrent_decisions_send_one_probe() {
    for round in 0..50 {
        // All but the last are half open and have fewer requests: every thread prefers one of them.
        let pool = snapshot(&[(0, 0), (1, 0), (2, 0), (3, 100)]);
        (0..3).for_each(|i| eject(&pool, i, true));
        let least = scheduler("least-request", 1);
        let counts: [AtomicU32; 4] = Default::default();
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (pool, least, counts, barrier) = (&pool, &least, &counts, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let decision = decide(least, pool, None, thread).unwrap();
                    let id = decision.picks[0].id.0;
                    assert_eq!(decision.probe, id != 3);
                    counts[id as usize].fetch_add(1, Relaxed);
                });
            }
        });
        assert_eq!(counts.map(|c| c.into_inner()), [1, 1, 1, 5], "round {round}");
    }
}

#[test]
fn only_endpoint_is_used_while_it_is_probed() {
    let pool = snapshot(&[(0, 0)]);
    eject(&pool, 0, true);
    let least = scheduler("least-request", 1);
    let probes: Vec<bool> = (0..3).map(|seed| decide(&least, &pool, None, seed).unwrap().probe).collect();
    assert_eq!(probes, [true, false, false]);
}

#[test]
fn endpoint_in_slow_start_gets_fewer_requests() {
    let pool = snapshot(&[(0, 2), (1, 5)]);
    eject(&pool, 0, true);
    pool.endpoints[0].endpoint.health.record(HealthOutcome::Success, NOW, &HealthPolicy::default());
    let least = scheduler("least-request", 1);
    assert_eq!(decide(&least, &pool, None, 0).unwrap().picks[0].id.0, 1, "2 requests count as 8");
    let later = PickContext::new(&pool, NOW.after(Duration::from_secs(10)), Duration::from_secs(60));
    let strategy = &*least.choices.default.strategy;
    let decision = least.decide(strategy, &later, Explain::No, &mut for_request(0, 0)).unwrap();
    assert_eq!(decision.picks[0].id.0, 0);
}

#[test]
fn requests_without_a_body_go_to_the_least_loaded() {
    let pool = snapshot(&[(0, 3), (1, 1), (2, 2)]);
    let round_robin = scheduler("round-robin", 1);
    let (least, mut rng) = (least_loaded(), for_request(0, 0));
    let decision = round_robin.decide(&*least, &context(&pool), Explain::No, &mut rng).unwrap();
    assert_eq!(decision.picks[0].id.0, 1);
}

fn policy(decider: Decider) -> Option<SplitPolicy> {
    Some(SplitPolicy { decider, together: Vec::new(), whole: true, required: false })
}

#[test]
fn images_are_encoded_on_the_least_loaded_servers_one_per_item() {
    let least = scheduler("least-request", 1).splitting(policy(Decider::Never));
    let split = scheduler("least-request", 1).splitting(policy(Decider::Always));
    let image = |name: &'static str| Piece::Media { kind: MediaKind::Image, reference: name.into() };
    let asking =
        |names: &[&'static str]| Prompt { pieces: names.iter().copied().map(image).collect(), ..Prompt::default() };
    let sent = |scheduler: &Scheduler,
                pool: &PoolSnapshot,
                prompt: &Prompt<'static>,
                encodable: bool,
                subset: Option<&Subset>| {
        let request = RequestFacts { prompt: Some(prompt), ..RequestFacts::default() };
        let cx = PickContext { request, subset, splittable: true, encodable, ..context(pool) };
        let strategy = &*scheduler.choices.default.strategy;
        let decision = scheduler.decide(strategy, &cx, Explain::No, &mut for_request(0, 0)).unwrap();
        assert_eq!(decision.picks[0].id.0, 0);
        decision.encode.iter().map(|e| e.id.0).collect::<Vec<_>>()
    };
    let (one, two) = (asking(&["a", "a"]), asking(&["a", "b"]));
    let pool = of_roles(&["decode", "encode", "encode", "encode", "prefill"]);
    let _busy =
        [Ticket::book(pool.endpoints[1].endpoint.clone(), 0), Ticket::book(pool.endpoints[1].endpoint.clone(), 0)];
    let _less = Ticket::book(pool.endpoints[2].endpoint.clone(), 0);
    assert_eq!(sent(&least, &pool, &one, true, None), [3], "the same image twice is one");
    assert_eq!(sent(&least, &pool, &two, true, None), [3, 2]);
    assert_eq!(sent(&split, &pool, &two, true, None), [3, 2], "for any prefill server");
    assert_eq!(sent(&least, &pool, &Prompt::default(), true, None), [0; 0], "a text");
    assert_eq!(sent(&least, &pool, &two, false, None), [0; 0], "no sidecar");
    assert_eq!(sent(&scheduler("least-request", 1), &pool, &two, true, None), [0; 0], "no disaggregation");
    let address = |at: usize| pool.endpoints[at].endpoint.spec.address.to_string();
    let allowed = subset(&[&address(0), &address(2)]);
    assert_eq!(sent(&least, &pool, &two, true, Some(&allowed)), [2], "only what the gateway allows");
    // Servers that encode by themselves need no encode server; if another server prefills, its role counts.
    let own = of_roles(&["encode-decode", "encode", "prefill"]);
    assert_eq!((sent(&least, &own, &two, true, None), sent(&split, &own, &two, true, None)), (vec![], vec![1]));
    // One request at a time probes a half-open server.
    eject(&pool, 3, true);
    assert_eq!(sent(&least, &pool, &two, true, None), [3, 2]);
    assert_eq!(sent(&least, &pool, &two, true, None), [2, 1]);
    pool.endpoints[3].endpoint.health.probe_lost();
    assert_eq!(sent(&least, &pool, &two, true, None), [3, 2]);
    // Servers of one revision stay together.
    let together =
        SplitPolicy { decider: Decider::Never, together: vec!["revision".into()], whole: true, required: false };
    let mut pool = of_roles(&["decode", "encode", "encode"]);
    for (at, revision) in [(0, "r2"), (1, "r1"), (2, "r2")] {
        let state = &mut pool.endpoints[at];
        let mut spec = (*state.endpoint.spec).clone();
        spec.labels.insert("revision".into(), revision.into());
        *state = state.clone().respecified(spec);
    }
    let kept = scheduler("least-request", 1).splitting(Some(together));
    assert_eq!(sent(&kept, &pool, &two, true, None), [2]);
}

#[test]
fn unhealthy_or_disallowed_prefill_server_is_not_used() {
    let least = scheduler("least-request", 1).splitting(policy(Decider::Always));
    let split = |pool: &PoolSnapshot, allowed: Option<&Subset>| {
        let cx = PickContext { subset: allowed, splittable: true, ..context(pool) };
        let strategy = &*least.choices.default.strategy;
        let decision = least.decide(strategy, &cx, Explain::No, &mut for_request(0, 0)).unwrap();
        decision.split.map(|split| split.prefill.iter().map(|e| e.id.0).collect::<Vec<_>>())
    };
    let pool = of_roles(&["prefill", "decode"]);
    assert_eq!(split(&pool, None), Some(vec![0]));
    assert_eq!(split(&pool, Some(&subset(&["10.0.0.1:8001"]))), None, "the gateway's hint leaves the decode server");
    eject(&pool, 0, false);
    assert_eq!(split(&pool, None), None);
}

/// Why no prefill server may be asked.
#[derive(Clone, Copy, Debug)]
enum Cause {
    Absent,
    Draining,
    Ejected,
    Probed,
    OutsideSubset,
    OtherLabels,
}

/// A decode server, and a prefill server that may not be asked. The subset leaves the decode server.
fn without_partner(cause: Cause) -> (PoolSnapshot, Option<Subset>) {
    let mut pool = of_roles(if matches!(cause, Cause::Absent) { &["decode"] } else { &["decode", "prefill"] });
    let respecified = |pool: &mut PoolSnapshot, at: usize, change: &dyn Fn(&mut EndpointSpec)| {
        let mut spec = (*pool.endpoints[at].endpoint.spec).clone();
        change(&mut spec);
        pool.endpoints[at] = pool.endpoints[at].clone().respecified(spec);
    };
    match cause {
        Cause::Absent | Cause::OutsideSubset => {}
        Cause::Draining => respecified(&mut pool, 1, &|spec| spec.draining = true),
        Cause::Ejected => eject(&pool, 1, false),
        Cause::Probed => {
            eject(&pool, 1, true);
            assert!(pool.endpoints[1].endpoint.health.claim_probe(NOW, &HealthPolicy::default()));
        }
        Cause::OtherLabels => {
            for (at, revision) in [(0, "a"), (1, "b")] {
                respecified(&mut pool, at, &|spec| _ = spec.labels.insert("revision".into(), revision.into()));
            }
        }
    }
    let only = pool.endpoints[0].endpoint.spec.address.to_string();
    (pool, matches!(cause, Cause::OutsideSubset).then(|| subset(&[&only])))
}

#[test]
fn missing_prefill_server_is_no_decision_against_a_split() {
    use Cause::{Absent, Draining, Ejected, OtherLabels, OutsideSubset, Probed};
    let lacking = |non_cached_tokens| Decider::PrefixBased { non_cached_tokens, prompt_tokens: 0 };
    let deciders = [
        (Decider::Always, Some(Unpaired::Wanted)),
        (lacking(10), Some(Unpaired::Wanted)),
        (Decider::Predicted, Some(Unpaired::Undecided)),
        // The decider declines.
        (lacking(1_000), None),
        (lacking(0), None),
        (Decider::Never, None),
        (Decider::Strategy, None),
    ];
    for (cause, named) in [
        (Absent, "the pool has none"),
        (Draining, "of 1: 1 draining"),
        (Ejected, "of 1: 1 ejected"),
        (Probed, "of 1: 1 ejected"),
        (OutsideSubset, "of 1: 1 not in the gateway's subset"),
        (OtherLabels, "of 1: 1 in no pair with the decode server"),
    ] {
        for ((decider, expected), required) in deciders.iter().flat_map(|d| [(d, false), (d, true)]) {
            let (pool, allowed) = without_partner(cause);
            let policy = SplitPolicy { decider: *decider, together: vec!["revision".into()], whole: true, required };
            let scheduler = scheduler("least-request", 2).splitting(Some(policy));
            let request = RequestFacts { prompt_tokens: 100, ..RequestFacts::default() };
            let subset = allowed.as_ref();
            let cx = PickContext { request, subset, splittable: true, generates: true, ..context(&pool) };
            let strategy = &*scheduler.choices.default.strategy;
            let rng = &mut for_request(0, 0);
            let case = format!("{cause:?}, {decider:?}, required: {required}");
            match scheduler.decide(strategy, &cx, Explain::No, rng) {
                Ok(decision) => {
                    assert!(!required || *expected != Some(Unpaired::Wanted), "{case}");
                    assert_eq!(decision.unpaired, *expected, "{case}");
                    assert!(decision.split.is_none() && decision.picks[0].id.0 == 0, "{case}");
                }
                Err(error) => {
                    assert!(required && *expected == Some(Unpaired::Wanted), "{case}: {error:?}");
                    assert_eq!(error.reason, Reason::NoPrefillEndpoint, "{case}");
                    assert!(error.message.contains(named), "{case}: {}", error.message);
                }
            }
        }
    }
}

/// If the request must be split, the decode server without a partner is passed over.
#[test]
fn required_pair_is_found_at_another_decode_server() {
    let mut pool = of_roles(&["decode", "decode", "prefill"]);
    for (at, revision) in [(0, "a"), (1, "b"), (2, "b")] {
        let mut spec = (*pool.endpoints[at].endpoint.spec).clone();
        spec.labels.insert("revision".into(), revision.into());
        pool.endpoints[at] = pool.endpoints[at].clone().respecified(spec);
    }
    let _busy = Ticket::book(pool.endpoints[1].endpoint.clone(), 0);
    let together = vec!["revision".into()];
    let policy = SplitPolicy { decider: Decider::Always, together, whole: true, required: true };
    let scheduler = scheduler("least-request", 1).splitting(Some(policy));
    let cx = PickContext { splittable: true, generates: true, ..context(&pool) };
    let strategy = &*scheduler.choices.default.strategy;
    let decision = scheduler.decide(strategy, &cx, Explain::No, &mut for_request(0, 0)).unwrap();
    assert_eq!((decision.picks[0].id.0, decision.split.unwrap().prefill[0].id.0), (1, 2));
}
