//! Requests that would be split if a prefill server were there.

use super::splitting::{among, answer, asked, direct};
use super::*;
use attache_disagg::{Direct, Fallback, Mode};
use attache_picker::event::Degraded;
use attache_picker::split::DISAGGREGATION_HEADER;
use attache_scheduling::Decider;

/// The mode in which Attaché calls prefill servers itself.
fn calls(connector: &str, fallback: Fallback) -> Mode {
    Mode::Direct(Direct { fallback, ..direct(connector) })
}

#[test]
fn absent_prefill_server_is_told_in_every_mode() {
    let header = || Mode::Header { source_tokens: None };
    let local = |connector| calls(connector, Fallback::Local);
    let cases = [local("nixl"), local("trtllm"), local("shared-storage"), local("shfs"), header()];
    for (mode, decider) in cases.into_iter().flat_map(|m| [(m.clone(), Decider::Always), (m, Decider::Predicted)]) {
        let case = format!("{mode:?}, {decider:?}");
        let world = among(&["decode", "decode"], mode, decider);
        let (mut exchange, out, legs) = asked(&world, &[]);
        assert!(legs.is_empty() && Answered::of(&out).set.contains_key(DESTINATION), "{case}");
        assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=no_prefill_endpoint", "{case}");
        assert_eq!(world.processor.metrics.degraded.get(Degraded::NoPrefillEndpoint), 1, "{case}");
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn declined_split_is_not_told() {
    let declines = Decider::PrefixBased { non_cached_tokens: 1 << 20, prompt_tokens: 0 };
    for decider in [Decider::Never, declines] {
        let world = among(&["decode"], calls("nixl", Fallback::Fail), decider);
        let (mut exchange, ..) = asked(&world, &[]);
        assert!(!answer(&mut exchange).set.contains_key(DISAGGREGATION_HEADER), "{decider:?}");
        assert_eq!(world.processor.metrics.degraded.get(Degraded::NoPrefillEndpoint), 0, "{decider:?}");
    }
}

#[test]
fn absent_prefill_server_fails_the_request_with_fallback_fail() {
    for connector in ["nixl", "trtllm", "sglang"] {
        let world = among(&["decode"], calls(connector, Fallback::Fail), Decider::Always);
        let (exchange, out, _) = asked(&world, &[]);
        let refused = Answered::of(&out);
        let reason = refused.set["x-attache-reason"].as_str();
        assert_eq!((refused.refused.as_ref().unwrap().0, reason), (503, "no_prefill_endpoint"), "{connector}");
        drop(exchange);
        world.assert_books_closed(1);
    }
    // The decider compares times, so it splits nothing if there is nothing to compare.
    let world = among(&["decode"], calls("nixl", Fallback::Fail), Decider::Predicted);
    let (mut exchange, ..) = asked(&world, &[]);
    assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=no_prefill_endpoint");
}
