//! Which requests are split, and over which pair, by the rules that belong to no strategy.

use super::*;
use crate::tests::trial::{Server, Trial, among, load, prefix_cache, silent};
use crate::{Booking, Dispatch, Order, registry};
use attache_pool::place::{DEFAULT_ZONE_LABEL, Nearness, Place};
use attache_pool::{EndpointSpec, PoolSnapshot, Roles};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use proptest::prelude::{Strategy as _, any, prop, prop_assert, prop_assert_eq, proptest};
use serde_json::Value;
use std::time::Duration;

const ROLESET: &str = "roleset-name";

fn policy(decider: Decider) -> SplitPolicy {
    SplitPolicy { decider, together: vec![ROLESET.into()], whole: true }
}

fn strategy(name: &str) -> Box<dyn Strategy> {
    (registry::strategy(name).unwrap().build)(&Value::Null).unwrap()
}

fn role(role: &str, waiting: u32) -> Server {
    load(waiting, 0.0).label("llm-d.ai/role", role)
}

#[test]
fn the_prefix_based_decider_has_llm_ds_rule() {
    // llm-d: tokens >= promptTokens and tokens - cached >= nonCachedTokens; 0 of the latter never splits.
    for (case, tokens, cached, non_cached, prompt, split) in [
        ("off", 1_000, 0, 0, 0, false),
        ("all lacking", 100, 0, 16, 0, true),
        ("exactly enough lacking", 100, 84, 16, 0, true),
        ("one too few lacking", 100, 85, 16, 0, false),
        ("shorter than nonCachedTokens", 15, 0, 16, 0, false),
        ("as long as promptTokens", 100, 0, 16, 100, true),
        ("shorter than promptTokens", 99, 0, 16, 100, false),
        ("all cached", 100, 100, 1, 0, false),
    ] {
        let trial = among(vec![role("prefill", 0), role("decode", 0).holding(cached)]).long(tokens);
        let decider = Decider::PrefixBased { non_cached_tokens: non_cached, prompt_tokens: prompt };
        let sent = trial.pair(&*strategy("least-request"), &policy(decider), 1, 0).unwrap();
        assert_eq!(sent.split, split, "{case}");
    }
}

#[test]
fn always_and_never_look_at_nothing() {
    let trial = among(vec![role("prefill", 900), role("decode", 0).holding(100)]);
    let split = |decider| trial.pair(&*strategy("least-request"), &policy(decider), 1, 0).unwrap().split;
    assert!(split(Decider::Always));
    assert!(!split(Decider::Never));
}

#[test]
fn a_pair_by_rank_is_the_strategys_choice_on_each_side() {
    let trial =
        among(vec![role("prefill", 5), role("prefill", 1), role("prefill", 3), role("decode", 4), role("decode", 2)]);
    let sent = trial.pair(&*strategy("least-request"), &policy(Decider::Always), 3, 0).unwrap();
    assert_eq!(sent.ids(), (vec![1, 2, 0], vec![4, 3]));
    let least = strategy("least-request");
    let nobody = among(vec![role("decode", 4), role("decode", 2)]);
    assert!(nobody.pair(&*least, &policy(Decider::Always), 1, 0).unwrap().pair.is_none(), "no prefill server");
    let both = among(vec![role("both", 0)]);
    assert!(both.pair(&*least, &policy(Decider::Always), 1, 0).unwrap().pair.is_none(), "nobody is its own partner");
}

#[test]
fn servers_with_other_labels_stand_in_no_pair() {
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
            let sent = trial.pair(&*strategy(name), &policy(Decider::Always), 1, 0).unwrap();
            assert_eq!(sent.pair.is_some(), together, "{case}: {name}");
        }
        let free = SplitPolicy { together: Vec::new(), ..policy(Decider::Always) };
        assert!(trial.pair(&*strategy("least-request"), &free, 1, 0).unwrap().split, "{case}: no label matters");
    }
}

/// Servers of all roles and two rolesets or none, with queues, tokens under way and a part of the prompt.
pub(crate) fn pools() -> impl proptest::strategy::Strategy<Value = Vec<Server>> {
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

/// What a pair costs by all that is known of both.
fn pair_cost(cx: &PickContext<'_>, prefill: &Candidate<'_>, decode: &Candidate<'_>, prices: &Prices) -> f64 {
    let near = prefill.state.endpoint.place.nearness(decode.state.endpoint.place);
    let transfer = prices.transfer(cost::lacked(cx, decode), near);
    cost::prefill(cx, prefill, prices) + transfer + cost::decode(cx, decode, prices)
}

/// A thousand tokens take so many milliseconds between servers of `trial` that are as near as that.
fn teach(trial: &Trial, near: Option<Nearness>, ms: u32) {
    for state in &trial.pool.endpoints {
        for _ in 0..50 {
            state.endpoint.speed.pool().transfer().observe(1_000, near, f64::from(ms) / 1e3, trial.context().now);
        }
    }
}

fn in_zone(role_: &str, waiting: u32, zone: &str) -> Server {
    role(role_, waiting).label(DEFAULT_ZONE_LABEL, zone)
}

#[test]
fn a_near_pair_is_preferred_by_as_much_as_its_transfer_is_shorter() {
    let first =
        |trial: &Trial| trial.pair(&*strategy("predicted-latency"), &policy(Decider::Always), 1, 7).unwrap().ids();
    // Nothing is known of the way between zones: the nearer of two that are alike.
    let idle = || vec![in_zone("prefill", 0, "a"), in_zone("prefill", 0, "b"), in_zone("decode", 0, "b")];
    assert_eq!(first(&among(idle()).long(4_000)), (vec![1, 0], vec![2]));
    // A little more to do there does not outweigh a slow way, and much more does.
    for (waiting, far_ms, expected) in [(1, 4, [0, 1]), (1, 800, [1, 0]), (60, 800, [0, 1])] {
        let mut servers = idle();
        servers[1] = in_zone("prefill", waiting, "b");
        let trial = among(servers).long(4_000);
        teach(&trial, Some(Nearness::Zone), 4);
        teach(&trial, None, far_ms);
        assert_eq!(first(&trial), (expected.to_vec(), vec![2]), "{waiting} wait, {far_ms} ms");
    }
}

/// What a decode server keeps of the turn before comes from where that stands.
#[test]
fn kept_turns_cost_the_way_from_their_keeper() {
    let trial = among(vec![in_zone("prefill", 0, "a"), in_zone("decode", 0, "a")]).long(4_000);
    teach(&trial, Some(Nearness::Zone), 4);
    teach(&trial, None, 800);
    let cache = prefix_cache();
    let prefill = trial.there_for(Roles::PREFILL)[0];
    let costs = ["a", "b"].map(|zone| {
        let mut found = cache.lookup(&mut [].as_slice(), trial.context().now);
        found.carry(4_000, Place::named(["", "", zone, ""]), [prefill.id].into());
        let cx = PickContext { prefix: Some(&found), ..trial.context() };
        let prices = Prices::learned(&cx, [&[prefill][..]], cost::SHARED_TOKEN_WEIGHT);
        cost::prefill(&cx, &prefill, &prices)
    });
    assert!(costs[0] + 0.5 < costs[1], "{costs:?}");
}

/// What an answer's first token took longer than it should have teaches the way between servers as near as these.
#[test]
fn transfers_teach_the_way_that_they_took() {
    let (pool, now) = (Arc::default(), Timestamp(9_000_000_000));
    let server = |id: u16, zone: &str| {
        let mut spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + id).into());
        spec.labels.insert(DEFAULT_ZONE_LABEL.into(), zone.into());
        Arc::new(Endpoint::in_pool(EndpointId(id.into()), spec, &pool))
    };
    let (near, far, decode) = (server(0, "a"), server(1, "b"), server(2, "a"));
    for _ in 0..50 {
        for (prefill, ms) in [(&near, 5), (&far, 900)] {
            let order = Order {
                model: "m",
                prompt_tokens: 1_000,
                cached_tokens: 0,
                understood: true,
                streams: true,
                arrives: true,
                share: 0.0,
                lesson: None,
            };
            let snapshot = PoolSnapshot::default();
            let mut booking = Booking::new(decode.clone(), &snapshot, Duration::ZERO, order, now);
            booking.dispatch(Dispatch::Arrives(prefill, 0.0), &snapshot, Duration::ZERO, now);
            let expected = Duration::from_secs_f64(booking.expected()) + Duration::from_millis(ms);
            booking.first_byte(true, true, now.after(expected));
        }
    }
    let seconds = |near| pool.transfer().expected(now.after(Duration::from_secs(1))).seconds(1_000, near);
    let (near, far) = (seconds(Some(Nearness::Zone)), seconds(None));
    assert!(near < 0.02 && far > 0.5, "{near} {far}");
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
    /// Whatever the strategy: two servers, each there for its part, of one roleset where the decode server has one; so with the retries.
    #[test]
    fn a_pair_is_two_servers_that_go_together(servers in pools(), wanted in 1usize..4, seed in any::<u64>()) {
        let trial = among(servers).long(4_000);
        let allowed: Vec<(u32, u32)> =
            allowed(&trial).iter().map(|(p, d)| (p.state.endpoint.id.0, d.state.endpoint.id.0)).collect();
        for plugin in registry::STRATEGIES {
            let strategy = strategy(plugin.name);
            let Some(sent) = trial.pair(&*strategy, &policy(Decider::Always), wanted, seed) else { continue };
            prop_assert!(sent.whole.picks.iter().all(|e| e.roles.has(Roles::DECODE)), "{}", plugin.name);
            let Some(pair) = &sent.pair else { continue };
            let decode = pair.decode.first().unwrap();
            prop_assert!(!pair.prefill.is_empty(), "{}", plugin.name);
            for prefill in &pair.prefill {
                prop_assert!(allowed.contains(&(prefill.id.0, decode.id.0)), "{}: {} {}", plugin.name, prefill.id, decode.id);
            }
            prop_assert!(pair.decode.iter().all(|e| e.roles.has(Roles::DECODE)), "{}", plugin.name);
        }
    }

    /// Nothing was transferred yet, so that there is nothing to be uncertain of: the cheaper way wins.
    #[test]
    fn the_predicted_decider_takes_the_cheaper_way(servers in pools(), seed in any::<u64>()) {
        let trial = among(servers).long(4_000);
        let cx = trial.context();
        for name in ["least-request", "predicted-latency"] {
            let Some(sent) = trial.pair(&*strategy(name), &policy(Decider::Predicted), 1, seed) else { return Ok(()) };
            let Some(pair) = &sent.pair else { continue };
            let (prefill, decode) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
            let prices = Prices::learned(&cx, [&decode, &prefill], cost::SHARED_TOKEN_WEIGHT);
            let of = |side: &[Candidate<'_>], e: &Endpoint| {
                side.iter().position(|c| c.state.endpoint.id == e.id).unwrap()
            };
            let (p, d) = (of(&prefill, &pair.prefill[0]), of(&decode, &pair.decode[0]));
            let whole = cost::whole(&cx, &decode[of(&decode, &sent.whole.picks[0])], &prices);
            let split = pair_cost(&cx, &prefill[p], &decode[d], &prices);
            prop_assert_eq!(sent.split, split < whole, "{}: {} {}", name, split, whole);
        }
    }

    /// The pass over both sides finds what looking at every pair finds.
    #[test]
    fn the_predicted_pair_is_the_cheapest_of_all(servers in pools(), seed in any::<u64>(), far_ms in prop::sample::select(vec![0, 10, 400])) {
        let trial = among(servers).long(4_000);
        if far_ms > 0 {
            teach(&trial, Some(Nearness::Zone), 4);
            teach(&trial, None, far_ms);
        }
        let cx = trial.context();
        let Some(sent) = trial.pair(&*strategy("predicted-latency"), &policy(Decider::Always), 1, seed) else { return Ok(()) };
        let (prefill, decode) = (trial.there_for(Roles::PREFILL), trial.there_for(Roles::DECODE));
        let prices = Prices::learned(&cx, [&decode, &prefill], cost::SHARED_TOKEN_WEIGHT);
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
