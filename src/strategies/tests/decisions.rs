//! The scheduler with every strategy: probes, roles and pairs.

use super::registry;
use attache_pool::health::{HealthOutcome, HealthPolicy};
use attache_pool::{Endpoint, PoolSnapshot, Roles};
use attache_scheduling::scheduler::Explain;
use attache_scheduling::testing::{NOW, context, decide, eject, of_roles, snapshot};
use attache_scheduling::{Choices, Decider, PickContext, Scheduler, SplitPolicy};
use attache_types::error::Reason;
use attache_types::rng::for_request;
use serde_json::Value;
use std::sync::Arc;

fn scheduler(name: &str, wanted: usize) -> Scheduler {
    let strategy = registry().build(name, &Value::Null).unwrap();
    Scheduler::new(Choices::only(name, strategy), HealthPolicy::default(), wanted)
}

fn policy(decider: Decider) -> Option<SplitPolicy> {
    Some(SplitPolicy { decider, together: Vec::new(), whole: true, required: false })
}

#[test]
fn half_open_endpoint_gets_one_request_until_its_outcome_is_known() {
    for plugin in registry().strategies() {
        let pool = snapshot(&[(0, 0), (1, 5), (2, 5)]);
        eject(&pool, 0, true);
        let scheduler = scheduler(plugin.name, 1);
        let firsts: Vec<(u32, bool)> = (0..200)
            .map(|seed| decide(&scheduler, &pool, None, seed).unwrap())
            .map(|d| (d.picks[0].id.0, d.probe))
            .collect();
        let probes: Vec<_> = firsts.iter().filter(|(id, probe)| *id == 0 || *probe).collect();
        assert_eq!(probes, [&(0, true)], "{}", plugin.name);
        // The probe was lost: another request may probe.
        pool.endpoints[0].endpoint.health.probe_lost();
        let again = (0..200).filter(|seed| decide(&scheduler, &pool, None, 1_000 + seed).unwrap().probe).count();
        assert_eq!(again, 1, "{}", plugin.name);
        // The probe succeeded: all requests may go there.
        pool.endpoints[0].endpoint.health.record(HealthOutcome::Success, NOW, &HealthPolicy::default());
        assert!(
            (0..200).any(|seed| decide(&scheduler, &pool, None, seed).unwrap().picks[0].id.0 == 0),
            "{}",
            plugin.name
        );
    }
}

#[test]
fn requests_that_are_not_split_go_to_decode_servers() {
    let pool = of_roles(&["prefill", "decode", "encode", "both", "prefill", "unheard-of"]);
    for plugin in registry().strategies() {
        for (case, split, splittable) in [
            ("no splitting", None, true),
            ("never", policy(Decider::Never), true),
            ("a request that can't be split", policy(Decider::Always), false),
        ] {
            let scheduler = scheduler(plugin.name, 3).splitting(split);
            for seed in 0..50 {
                let cx = PickContext { splittable, ..context(&pool) };
                let strategy = &*scheduler.choices.default.strategy;
                let decision = scheduler.decide(strategy, &cx, Explain::No, &mut for_request(seed, 0)).unwrap();
                let ids: Vec<u32> = decision.picks.iter().map(|e| e.id.0).collect();
                assert!(ids.iter().all(|id| [1, 3].contains(id)), "{}, {case}: {ids:?}", plugin.name);
                assert!(decision.split.is_none(), "{}, {case}", plugin.name);
            }
        }
    }
    for pool in [of_roles(&["prefill"]), of_roles(&["encode", "unheard-of"])] {
        let error = decide(&scheduler("least-request", 1), &pool, None, 0).unwrap_err();
        assert_eq!(error.reason, Reason::NoReadyEndpoint);
        assert!(error.message.contains("do not generate responses"), "{}", error.message);
    }
}

#[test]
fn split_request_has_two_servers_and_both_are_recorded() {
    let pool = of_roles(&["prefill", "decode", "both", "prefill"]);
    for plugin in registry().strategies() {
        let scheduler = scheduler(plugin.name, 2).splitting(policy(Decider::Always));
        for seed in 0..50 {
            let cx = PickContext { splittable: true, ..context(&pool) };
            let strategy = &*scheduler.choices.default.strategy;
            let decision = scheduler.decide(strategy, &cx, Explain::Yes, &mut for_request(seed, 0)).unwrap();
            assert!(decision.picks[0].roles.has(Roles::DECODE), "{}", plugin.name);
            let Some(split) = &decision.split else { continue };
            assert!(split.prefill.iter().all(|e| e.roles.has(Roles::PREFILL)), "{}", plugin.name);
            assert!(split.prefill.iter().all(|e| e.id != decision.picks[0].id), "{}", plugin.name);
        }
    }
}

#[test]
fn decode_servers_that_serve_nothing_whole_only_get_pairs() {
    let policy = |decider| Some(SplitPolicy { decider, together: Vec::new(), whole: false, required: false });
    let unwilling = Decider::PrefixBased { non_cached_tokens: 1 << 20, prompt_tokens: 0 };
    let sent = |plugin: &str, pool: &PoolSnapshot, decider, splittable, seed| {
        let scheduler = scheduler(plugin, 3).splitting(policy(decider));
        let cx = PickContext { splittable, generates: true, ..context(pool) };
        let strategy = &*scheduler.choices.default.strategy;
        let decision = scheduler.decide(strategy, &cx, Explain::No, &mut for_request(seed, 0));
        let ids = |picks: &[Arc<Endpoint>]| picks.iter().map(|e| e.id.0).collect::<Vec<_>>();
        decision.map(|d| (ids(&d.picks), d.split.map(|split| ids(&split.prefill)))).map_err(|error| error.reason)
    };
    for plugin in registry().strategies().iter().map(|plugin| plugin.name) {
        for (seed, decider) in (0..20).flat_map(|seed| [(seed, Decider::Predicted), (seed, unwilling)]) {
            let pool = of_roles(&["prefill", "decode", "decode"]);
            let (picks, prefill) = sent(plugin, &pool, decider, true, seed).unwrap();
            assert!(!picks.contains(&0) && prefill == Some(vec![0]), "{plugin}: {picks:?} {prefill:?}");
            assert_eq!(sent(plugin, &pool, decider, false, seed), Err(Reason::NoWholeEndpoint), "{plugin}");
            // An ejected or probed server is better than none.
            eject(&pool, 0, seed % 2 == 0);
            for _ in 0..2 {
                assert_eq!(sent(plugin, &pool, decider, true, seed).unwrap().1, Some(vec![0]), "{plugin}");
            }
            let alone = of_roles(&["decode", "decode"]);
            assert_eq!(sent(plugin, &alone, decider, true, seed), Err(Reason::NoPrefillEndpoint), "{plugin}");
            // A server with both roles serves requests whole and is in no pair.
            let pool = of_roles(&["prefill", "decode", "both"]);
            assert_eq!(sent(plugin, &pool, decider, false, seed), Ok((vec![2], None)), "{plugin}");
            let (picks, prefill) = sent(plugin, &pool, decider, true, seed).unwrap();
            let whole = picks == [2] && prefill.is_none();
            assert!(whole || (picks == [1] && prefill == Some(vec![0])), "{plugin}: {picks:?} {prefill:?}");
            let nobody = of_roles(&["decode", "both"]);
            assert_eq!(sent(plugin, &nobody, decider, true, seed), Ok((vec![1], None)), "{plugin}");
        }
    }
    // A request that generates nothing needs no partner.
    let scheduler = scheduler("least-request", 1).splitting(policy(Decider::Always));
    assert!(decide(&scheduler, &of_roles(&["prefill", "decode"]), None, 0).is_ok());
}

#[test]
fn all_decode_picks_continue_from_the_same_prefill() {
    let policy =
        SplitPolicy { decider: Decider::Always, together: vec!["revision".into()], whole: true, required: false };
    let mut pool = of_roles(&["prefill", "prefill", "decode", "decode", "decode", "both"]);
    for (at, revision) in [(0, "r1"), (1, "r2"), (2, "r1"), (3, "r2"), (4, "r2"), (5, "r2")] {
        let state = &mut pool.endpoints[at];
        let mut spec = (*state.endpoint.spec).clone();
        spec.labels.insert("revision".into(), revision.into());
        *state = state.clone().respecified(spec);
    }
    let revision = |e: &Endpoint| e.spec.labels["revision"].clone();
    for plugin in registry().strategies() {
        let scheduler = scheduler(plugin.name, 4).splitting(Some(policy.clone()));
        for seed in 0..50 {
            let cx = PickContext { splittable: true, generates: true, ..context(&pool) };
            let strategy = &*scheduler.choices.default.strategy;
            let decision = scheduler.decide(strategy, &cx, Explain::No, &mut for_request(seed, 0)).unwrap();
            let Some(split) = decision.split else { continue };
            for (prompt, answer) in split.prefill.iter().flat_map(|p| decision.picks.iter().map(move |d| (p, d))) {
                assert_eq!(revision(prompt), revision(answer), "{}", plugin.name);
                assert_ne!(prompt.id, answer.id, "{}", plugin.name);
            }
        }
    }
}
