//! Whatever a bus loses, repeats and reorders: after it, all pickers have equal views.

use super::cluster::{Cluster, ENDPOINTS, Routed};
use crate::{HEARTBEAT_EVERY, MemoryBusSettings};
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use proptest::prelude::*;
use std::time::Duration;

/// Whatever follows the last fault takes at most this long: one heartbeat, and the answers to two requests.
const HEALED_AFTER: Duration = Duration::from_millis(1_500);

#[derive(Clone, Debug)]
enum Step {
    Route { picker: usize, endpoint: usize, prompt: usize },
    First(usize),
    Moved(usize, usize),
    End(usize, bool),
    Disconnect(usize),
    Divert(usize),
    Consume(usize, u64),
    Pass(u64),
    Part(usize, usize, bool),
}

const PICKERS: usize = 3;
const PROMPTS: usize = 6;

/// Prompts that share prefixes.
fn prompt(number: usize) -> Vec<BlockKey> {
    let branch = number as u64 % 3;
    (0..12 + 5 * number as u64).map(|at| BlockKey(1 + at + if at < 9 { 0 } else { 1_000 * branch })).collect()
}

/// The blocks that a long response adds to its prompt.
fn response() -> impl Iterator<Item = u64> {
    500..504
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..PICKERS, 0..ENDPOINTS, 0..PROMPTS)
            .prop_map(|(picker, endpoint, prompt)| Step::Route { picker, endpoint, prompt }),
        4 => any::<usize>().prop_map(Step::First),
        1 => (any::<usize>(), 0..ENDPOINTS).prop_map(|(request, to)| Step::Moved(request, to)),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(request, long)| Step::End(request, long)),
        1 => any::<usize>().prop_map(Step::Disconnect),
        3 => (0..PICKERS).prop_map(Step::Divert),
        1 => (0..PICKERS, 1u64..4).prop_map(|(picker, count)| Step::Consume(picker, count)),
        5 => (1u64..400).prop_map(Step::Pass),
        1 => (0..PICKERS, 0..PICKERS, any::<bool>()).prop_map(|(a, b, parted)| Step::Part(a, b, parted)),
        1 => Just(Step::Pass(4_000)),
    ];
    prop::collection::vec(step, 1..60)
}

fn faults() -> impl Strategy<Value = MemoryBusSettings> {
    (0u64..20, 0u64..40, 0.0..0.6, 0.0..0.5, any::<u64>()).prop_map(|(delay, jitter, loss, duplicates, seed)| {
        let (delay, jitter) = (Duration::from_millis(delay), Duration::from_millis(jitter));
        MemoryBusSettings { delay, jitter, loss, duplicates, seed }
    })
}

fn take(step: Step, cluster: &mut Cluster, routed: &mut Vec<Routed>) {
    let at = |request: usize, routed: &[Routed]| (!routed.is_empty()).then(|| request % routed.len());
    match step {
        Step::Route { picker, endpoint, prompt: number } => {
            let request = cluster.route(picker, endpoint, &prompt(number));
            routed.push(request);
        }
        Step::First(request) => {
            let request = at(request, routed).and_then(|at| routed.get_mut(at)).filter(|request| !request.begun);
            if let Some(request) = request {
                request.begun = true;
                request.booking.first_byte(true, true, cluster.now);
                request.shared.first_byte(true, true, cluster.now);
            }
        }
        Step::Moved(request, to) => {
            let request = at(request, routed).and_then(|at| routed.get_mut(at)).filter(|request| !request.begun);
            if let Some(request) = request {
                let to = cluster.members[request.picker].store.load().endpoints[to].endpoint.clone();
                request.booking.move_to(&to, cluster.now);
                request.shared.moved(&to, cluster.now);
            }
        }
        Step::End(request, long) => {
            let Some(at) = at(request, routed) else { return };
            let Routed { booking, shared, .. } = routed.swap_remove(at);
            let added: Vec<u64> = if long { response().collect() } else { Vec::new() };
            let usage = Usage { completion_tokens: Some(20), ..Usage::default() };
            let mut extended = false;
            let extend = |keys: &mut Vec<BlockKey>| {
                keys.extend(added.iter().copied().map(BlockKey));
                extended = !added.is_empty();
                extended
            };
            booking.end(true, &usage, extend, cluster.now);
            shared.ended(true, &usage, if extended { added } else { Vec::new() }, cluster.now);
        }
        Step::Disconnect(request) => {
            if let Some(at) = at(request, routed) {
                drop(routed.swap_remove(at));
            }
        }
        Step::Divert(picker) => cluster.members[picker].pressure.divert(&"pool".into(), &"m".into(), cluster.now),
        Step::Consume(picker, count) => {
            let _ = cluster.members[picker].pressure.consume("m", None, count, cluster.now);
        }
        Step::Pass(milliseconds) => cluster.pass(Duration::from_millis(milliseconds)),
        Step::Part(a, b, parted) => {
            if a != b {
                cluster.bus.part(a, b, parted);
            }
        }
    }
}

/// The faults end: what is in flight on the bus arrives, and then everything is repaired.
fn heal(cluster: &mut Cluster) {
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        cluster.bus.part(a, b, false);
    }
    cluster.bus.set(MemoryBusSettings { delay: Duration::from_millis(5), ..MemoryBusSettings::default() });
    cluster.pass(HEARTBEAT_EVERY + HEALED_AFTER);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn views_are_equal_after_any_fault_and_nothing_counts_twice(faults in faults(), steps in steps()) {
        let mut cluster = Cluster::new(PICKERS, faults);
        let mut routed = Vec::new();
        for step in steps {
            take(step, &mut cluster, &mut routed);
        }
        heal(&mut cluster);
        let loads = cluster.loads();
        prop_assert!(loads.iter().all(|load| *load == loads[0]), "{loads:?}");
        let in_flight: u32 = loads[0].iter().map(|(requests, _)| requests).sum();
        prop_assert_eq!(in_flight as usize, routed.len());
        let pressures = cluster.pressures();
        prop_assert!(pressures.iter().all(|count| *count == pressures[0]), "{pressures:?}");
        for number in 0..PROMPTS {
            let answered: Vec<BlockKey> = prompt(number).into_iter().chain(response().map(BlockKey)).collect();
            let depths = cluster.depths(&answered);
            prop_assert!(depths.iter().all(|depth| *depth == depths[0]), "prompt {number}: {depths:?}");
        }
        drop(routed);
        cluster.pass(Duration::from_millis(200));
        prop_assert!(cluster.loads().iter().flatten().all(|load| *load == (0, 0)), "{:?}", cluster.loads());
    }
}
