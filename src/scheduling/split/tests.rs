//! Which requests are split, and over which pair, by rules that no strategy owns.

use super::*;
use crate::testing::{among, in_zone, observe_transfers, prefix_cache, role};
use crate::tests::build;
use crate::{Booking, Dispatch, Order};
use attache_pool::place::{DEFAULT_ZONE_LABEL, Nearness, Place};
use attache_pool::{EndpointSpec, PoolSnapshot, Roles};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::time::Duration;

const ROLESET: &str = "roleset-name";

fn policy(decider: Decider) -> SplitPolicy {
    SplitPolicy { decider, together: vec![ROLESET.into()], whole: true, required: false }
}

#[test]
fn prefix_based_decider_is_llm_ds() {
    // llm-d: tokens >= promptTokens and tokens - cached >= nonCachedTokens; nonCachedTokens 0 never splits.
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
        let sent = trial.pair(&*build("least-request"), &policy(decider), 1, 0).unwrap();
        assert_eq!(sent.split, split, "{case}");
    }
}

#[test]
fn always_and_never_ignore_the_request() {
    let trial = among(vec![role("prefill", 900), role("decode", 0).holding(100)]);
    let split = |decider| trial.pair(&*build("least-request"), &policy(decider), 1, 0).unwrap().split;
    assert!(split(Decider::Always));
    assert!(!split(Decider::Never));
}

#[test]
fn pair_by_rank_is_the_strategys_choice_on_each_side() {
    let trial =
        among(vec![role("prefill", 5), role("prefill", 1), role("prefill", 3), role("decode", 4), role("decode", 2)]);
    let sent = trial.pair(&*build("least-request"), &policy(Decider::Always), 3, 0).unwrap();
    assert_eq!(sent.ids(), (vec![1, 2, 0], vec![4, 3]));
    let least = build("least-request");
    let nobody = among(vec![role("decode", 4), role("decode", 2)]);
    assert!(nobody.pair(&*least, &policy(Decider::Always), 1, 0).unwrap().pair.is_none(), "no prefill server");
    let both = among(vec![role("both", 0)]);
    assert!(both.pair(&*least, &policy(Decider::Always), 1, 0).unwrap().pair.is_none(), "no server pairs with itself");
}

/// The part of the prompt that another server cached in an earlier turn costs its transfer from there.
#[test]
fn cached_turns_cost_the_transfer_from_their_server() {
    let trial = among(vec![in_zone("prefill", 0, "a"), in_zone("decode", 0, "a")]).long(4_000);
    observe_transfers(&trial, Some(Nearness::Zone), 4);
    observe_transfers(&trial, None, 800);
    let cache = prefix_cache();
    let prefill = trial.there_for(Roles::PREFILL)[0];
    let costs = ["a", "b"].map(|zone| {
        let mut found = cache.lookup(&mut [].as_slice(), trial.context().now);
        found.carry(4_000, Place::named(["", "", zone, ""]), [prefill.id].into());
        let cx = PickContext { prefix: Some(&found), ..trial.context() };
        let prices = Prices::learned(&cx, [&[prefill][..]], Serving::OneOrTwoServers);
        cost::prefill(&cx, &prefill, &prices)
    });
    assert!(costs[0] + 0.5 < costs[1], "{costs:?}");
}

/// The delay of a response's first token is learned as transfer time between servers at this distance.
#[test]
fn transfer_times_are_learned_by_distance() {
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
                prefix_update: None,
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
