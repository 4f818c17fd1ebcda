//! Pairs of prefill and decode servers, by every strategy.

use super::build;
use attache_pool::place::{DEFAULT_ZONE_LABEL, Nearness};
use attache_pool::{Endpoint, Roles};
use attache_scheduling::facts::cost::{self, Prices};
use attache_scheduling::testing::{TestServer, Trial, among, in_zone, load, observe_transfers, role, silent};
use attache_scheduling::{Candidate, Decider, PickContext, SplitPolicy};
use proptest::prelude::{Strategy as _, any, prop, prop_assert, prop_assert_eq, proptest};

const ROLESET: &str = "roleset-name";

fn policy(decider: Decider) -> SplitPolicy {
    SplitPolicy { decider, together: vec![ROLESET.into()], whole: true, required: false }
}

#[test]
fn servers_with_other_labels_are_in_no_pair() {
    let of = |role_: &str, set: Option<&str>, waiting| {
        let server = role(role_, waiting);
        set.into_iter().fold(server, |s, set| s.label(ROLESET, set))
    };
    for (case, prefill, decode, together) in [
        ("equal", Some("a"), Some("a"), true),
        ("other", Some("a"), Some("b"), false),
        ("the prefill server has none", None, Some("a"), false),
        ("the decode server has none", Some("a"), None, true),
        ("neither has one", None, None, true),
    ] {
        let trial = among(vec![of("prefill", prefill, 0), of("decode", decode, 0)]);
        for name in ["least-request", "predicted-latency", "pd"] {
            let sent = trial.pair(&*build(name), &policy(Decider::Always), 1, 0).unwrap();
            assert_eq!(sent.pair.is_some(), together, "{case}: {name}");
        }
        let free = SplitPolicy { together: Vec::new(), ..policy(Decider::Always) };
        assert!(trial.pair(&*build("least-request"), &free, 1, 0).unwrap().split, "{case}: no label matters");
    }
}

/// Servers of all roles and two rolesets or none, with queues, tokens in flight and a cached part of the prompt.
fn pools() -> impl proptest::strategy::Strategy<Value = Vec<TestServer>> {
    let roles =
        prop::sample::select(vec!["prefill", "prefill", "decode", "decode", "both", "encode", "encode-prefill-decode"]);
    let sets = prop::sample::select(vec![None, Some("a"), Some("b")]);
    let zones = prop::sample::select(vec![None, Some("x"), Some("y")]);
    let server =
        (roles, (sets, zones), 0u32..40, prop::collection::vec(0u32..30_000, 0..4), 0u32..4_000, any::<bool>());
    let server = server.prop_map(|(role_, (set, zone), waiting, tokens, held, reports)| {
        let server = if reports { load(waiting, 0.0) } else { silent() };
        let server = server.label("llm-d.ai/role", role_).sent(&tokens).holding(held);
        let server = set.into_iter().fold(server, |s, set| s.label(ROLESET, set));
        zone.into_iter().fold(server, |s, zone| s.label(DEFAULT_ZONE_LABEL, zone))
    });
    prop::collection::vec(server, 1..12)
}

/// Cost of a pair, from all that is known of both servers.
fn pair_cost(cx: &PickContext<'_>, prefill: &Candidate<'_>, decode: &Candidate<'_>, prices: &Prices) -> f64 {
    let near = prefill.state.endpoint.place.nearness(decode.state.endpoint.place);
    let transfer = prices.transfer(cost::lacked(cx, decode), near);
    cost::prefill(cx, prefill, prices) + transfer + cost::decode(cx, decode, prices)
}

#[test]
fn near_pair_is_preferred_by_as_much_as_its_transfer_is_shorter() {
    let first = |trial: &Trial| trial.pair(&*build("predicted-latency"), &policy(Decider::Always), 1, 7).unwrap().ids();
    // Nothing is known of transfers between zones: of two equal servers, the nearer one wins.
    let idle = || vec![in_zone("prefill", 0, "a"), in_zone("prefill", 0, "b"), in_zone("decode", 0, "b")];
    assert_eq!(first(&among(idle()).long(4_000)), (vec![1, 0], vec![2]));
    // A little more load does not outweigh a slow transfer; much more does.
    for (waiting, far_ms, expected) in [(1, 4, [0, 1]), (1, 800, [1, 0]), (60, 800, [0, 1])] {
        let mut servers = idle();
        servers[1] = in_zone("prefill", waiting, "b");
        let trial = among(servers).long(4_000);
        observe_transfers(&trial, Some(Nearness::Zone), 4);
        observe_transfers(&trial, None, far_ms);
        assert_eq!(first(&trial), (expected.to_vec(), vec![2]), "{waiting} wait, {far_ms} ms");
    }
}

/// All pairs that are allowed.
fn allowed(trial: &Trial) -> Vec<(Candidate<'_>, Candidate<'_>)> {
    let set = |c: &Candidate<'_>| c.state.endpoint.spec.labels.get(ROLESET).cloned();
    let (prefill, decode) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
    let pairs = prefill.iter().flat_map(|p| decode.iter().map(move |d| (*p, *d)));
    pairs
        .filter(|(p, d)| p.state.endpoint.id != d.state.endpoint.id && (set(d).is_none() || set(p) == set(d)))
        .collect()
}

proptest! {
    /// With every strategy: two servers, each with its role, of one roleset where the decode server has one; the
    /// retries too.
    #[test]
    fn pair_is_two_servers_that_may_form_a_pair(servers in pools(), wanted in 1usize..4, seed in any::<u64>()) {
        let trial = among(servers).long(4_000);
        let allowed: Vec<(u32, u32)> =
            allowed(&trial).iter().map(|(p, d)| (p.state.endpoint.id.0, d.state.endpoint.id.0)).collect();
        for plugin in super::registry().strategies() {
            let strategy = build(plugin.name);
            let Some(sent) = trial.pair(&*strategy, &policy(Decider::Always), wanted, seed) else { continue };
            prop_assert!(sent.whole.picks.iter().all(|e| e.roles.has(Roles::DECODE)), "{}", plugin.name);
            let Some(pair) = &sent.pair else { continue };
            let decode = pair.decode.first().unwrap();
            prop_assert!(!pair.prefill.is_empty(), "{}", plugin.name);
            for prefill in &pair.prefill {
                let is_allowed = allowed.contains(&(prefill.id.0, decode.id.0));
                prop_assert!(is_allowed, "{}: {} {}", plugin.name, prefill.id, decode.id);
            }
            prop_assert!(pair.decode.iter().all(|e| e.roles.has(Roles::DECODE)), "{}", plugin.name);
        }
    }

    /// Without any transfer yet there is no uncertainty: the cheaper choice wins.
    #[test]
    fn predicted_decider_takes_the_cheaper_choice(servers in pools(), seed in any::<u64>()) {
        let trial = among(servers).long(4_000);
        let cx = trial.context();
        for name in ["least-request", "predicted-latency"] {
            let Some(sent) = trial.pair(&*build(name), &policy(Decider::Predicted), 1, seed) else { return Ok(()) };
            let Some(pair) = &sent.pair else { continue };
            let (prefill, decode) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
            let prices = Prices::learned(&cx, [&decode, &prefill], cost::Serving::OneOrTwoServers);
            let of = |side: &[Candidate<'_>], e: &Endpoint| {
                side.iter().position(|c| c.state.endpoint.id == e.id).unwrap()
            };
            let (p, d) = (of(&prefill, &pair.prefill[0]), of(&decode, &pair.decode[0]));
            let whole = cost::whole(&cx, &decode[of(&decode, &sent.whole.picks[0])], &prices);
            let split = pair_cost(&cx, &prefill[p], &decode[d], &prices);
            prop_assert_eq!(sent.split, split < whole, "{}: {} {}", name, split, whole);
        }
    }

    /// The pass over both sides finds the same pair as a search over all pairs.
    #[test]
    fn predicted_pair_is_the_cheapest_of_all(
        servers in pools(), seed in any::<u64>(), far_ms in prop::sample::select(vec![0, 10, 400]),
    ) {
        let trial = among(servers).long(4_000);
        if far_ms > 0 {
            observe_transfers(&trial, Some(Nearness::Zone), 4);
            observe_transfers(&trial, None, far_ms);
        }
        let cx = trial.context();
        let strategy = build("predicted-latency");
        let Some(sent) = trial.pair(&*strategy, &policy(Decider::Always), 1, seed) else { return Ok(()) };
        let (prefill, decode) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
        let prices = Prices::learned(&cx, [&decode, &prefill], cost::Serving::OneOrTwoServers);
        let sum = |(p, d): &(Candidate<'_>, Candidate<'_>)| pair_cost(&cx, p, d, &prices);
        let least = allowed(&trial).iter().map(sum).min_by(f64::total_cmp);
        let chosen = sent.first().map(|(p, d)| {
            let pairs = allowed(&trial);
            sum(pairs.iter().find(|(a, b)| (a.state.endpoint.id.0, b.state.endpoint.id.0) == (p, d)).unwrap())
        });
        match (chosen, least) {
            (Some(chosen), Some(least)) => prop_assert!((chosen - least).abs() <= 1e-9, "{} {}", chosen, least),
            (chosen, least) => prop_assert_eq!(chosen, least),
        }
    }
}
