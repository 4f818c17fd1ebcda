//! Trace context of both workers of a split request.

use super::splitting::{asked, direct, splitting};
use super::splitting::{give_leg_result, good};
use super::*;
use attache_disagg::Mode;
use attache_picker::split::LegCall;
use attache_scheduling::Decider;

#[test]
fn prefill_joins_the_client_trace() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (_exchange, _, asks) = asked(&world, &[("traceparent", TRACE)]);
    assert_eq!(traceparent(&asks[0]), Some(TRACE));
    let (_exchange, _, asks) = asked(&world, &[]);
    assert_eq!(traceparent(&asks[0]), None);
}

#[test]
fn both_workers_join_the_trace_and_the_prefill_has_a_span_of_its_own() {
    let mut world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    traced(&mut world);
    let (mut exchange, _, asks) = asked(&world, &[("traceparent", TRACE)]);
    let prefill = traceparent(&asks[0]).unwrap().to_owned();
    let decode = give_leg_result(&mut exchange, 0, good(), 10).set["traceparent"].clone();
    for sent in [&prefill, &decode] {
        assert!(sent.starts_with(&TRACE[..36]) && sent != TRACE, "{sent}");
    }
    assert_ne!(prefill, decode, "the prefill server's parent is the call to it");
}

#[test]
fn request_that_is_not_sampled_keeps_its_context() {
    let mut world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    traced(&mut world);
    let unsampled = TRACE.replace("-01", "-00");
    let (mut exchange, _, asks) = asked(&world, &[("traceparent", &unsampled)]);
    assert_eq!(traceparent(&asks[0]), Some(&*unsampled));
    let decode = give_leg_result(&mut exchange, 0, good(), 10);
    assert!(!decode.set.contains_key("traceparent"), "the request has it in its headers");
}

fn traced(world: &mut World) {
    let provider = opentelemetry_sdk::trace::SdkTracerProvider::builder().build();
    let tracer = opentelemetry::trace::TracerProvider::tracer(&provider, "test");
    let clock = attache_types::clock::Clock::start();
    Arc::get_mut(&mut world.processor).unwrap().tracing = Tracing::new(tracer, 1.0, clock);
}

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn traceparent(ask: &LegCall) -> Option<&str> {
    ask.headers.iter().find(|(name, _)| *name == "traceparent").map(|(_, value)| &**value)
}
