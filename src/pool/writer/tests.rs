use super::*;
use crate::Engine;
use crate::health::{Availability, HealthOutcome, HealthPolicy};
use crate::ledger::Ticket;
use attache_types::clock::Timestamp;
use proptest::prelude::*;

const A: SourceId = SourceId(0);
const B: SourceId = SourceId(1);

fn spec(port: u16) -> EndpointSpec {
    EndpointSpec::at(([10, 0, 0, 1], port).into())
}

fn pod(port: u16, uid: &str) -> EndpointSpec {
    EndpointSpec { uid: Some(uid.into()), ..spec(port) }
}

fn say(writer: &mut PoolWriter, source: SourceId, endpoints: &[EndpointSpec]) -> PoolSnapshot {
    writer.apply(PoolEvent::Endpoints { source, endpoints: endpoints.iter().cloned().map(Arc::new).collect() });
    writer.snapshot().expect("discovery always makes a snapshot")
}

fn ids(snapshot: &PoolSnapshot) -> Vec<(u32, u16)> {
    snapshot.endpoints.iter().map(|s| (s.endpoint.id.0, s.endpoint.spec.address.port())).collect()
}

fn page(waiting: u32) -> Arc<EndpointMetrics> {
    Arc::new(EndpointMetrics { waiting, ..EndpointMetrics::default() })
}

#[test]
fn ids_are_never_reused() {
    let mut w = PoolWriter::new(vec![A]);
    assert_eq!(ids(&say(&mut w, A, &[spec(1), spec(2)])), [(0, 1), (1, 2)]);
    assert_eq!(ids(&say(&mut w, A, &[spec(2)])), [(1, 2)]);
    assert_eq!(ids(&say(&mut w, A, &[spec(2), spec(1)])), [(1, 2), (2, 1)], "it is back with another id");
    assert_eq!(ids(&say(&mut w, A, &[])), []);
    assert_eq!(ids(&say(&mut w, A, &[spec(9)])), [(3, 9)]);
}

#[test]
fn ledger_health_and_metrics_survive_a_new_specification() {
    let mut w = PoolWriter::new(vec![A]);
    let before = say(&mut w, A, &[spec(1)]);
    let endpoint = before.endpoints[0].endpoint.clone();
    let ticket = Ticket::book(endpoint.clone(), 10);
    w.apply(PoolEvent::Scraped { id: endpoint.id, metrics: page(5) });
    let policy = HealthPolicy::default();
    for _ in 0..5 {
        endpoint.health.record(HealthOutcome::Failure, Timestamp(1), &policy);
    }
    let draining = EndpointSpec { draining: true, ..spec(1) };
    let after = say(&mut w, A, &[draining]);
    let state = &after.endpoints[0];
    assert!(state.endpoint.spec.draining && state.endpoint.id == endpoint.id);
    assert_eq!((state.endpoint.ledger.in_flight(), state.metrics().unwrap().waiting), (1, 5));
    assert_eq!(state.endpoint.health.availability(Timestamp(1), &policy), Availability::Ejected);
    drop(ticket);
    assert_eq!(state.endpoint.ledger.in_flight(), 0, "a ticket from before the change is released");

    let other_engine = EndpointSpec { engine: Engine::Sglang, ..spec(1) };
    assert_eq!(say(&mut w, A, &[other_engine]).endpoints[0].metrics(), None, "metrics of another engine are discarded");
}

#[test]
fn other_uid_at_the_same_address_is_another_endpoint() {
    let mut w = PoolWriter::new(vec![A]);
    let old = say(&mut w, A, &[pod(1, "x")]).endpoints[0].endpoint.clone();
    let _ticket = Ticket::book(old.clone(), 0);
    let new = say(&mut w, A, &[pod(1, "y")]).endpoints[0].endpoint.clone();
    assert_ne!(old.id, new.id);
    assert_eq!((old.ledger.in_flight(), new.ledger.in_flight()), (1, 0));
    // A late scrape of the old endpoint has no effect.
    w.apply(PoolEvent::Scraped { id: old.id, metrics: page(5) });
    w.apply(PoolEvent::Restarted { id: old.id });
    assert!(w.snapshot().is_none());
}

#[test]
fn address_belongs_to_the_lowest_source_and_its_first_entry() {
    let mut w = PoolWriter::new(vec![A, B]);
    let from = |name: &str| EndpointSpec { name: name.into(), ..spec(1) };
    say(&mut w, B, &[from("b"), from("b again"), spec(2)]);
    let both = say(&mut w, A, &[from("a")]);
    assert_eq!(ids(&both), [(0, 1), (1, 2)]);
    assert_eq!(&*both.endpoints[0].endpoint.spec.name, "a");
    w.apply(PoolEvent::SourceGone { source: A });
    let left = w.snapshot().unwrap();
    assert_eq!((&*left.endpoints[0].endpoint.spec.name, left.endpoints[0].endpoint.id.0), ("b", 0));
}

#[test]
fn pool_is_complete_once_every_expected_source_has_reported() {
    let mut w = PoolWriter::new(vec![A, B]);
    assert!(!w.snapshot().unwrap().synced, "the first snapshot precedes all reports");
    assert!(w.snapshot().is_none(), "and no second one without a change");
    assert!(!say(&mut w, A, &[spec(1)]).synced);
    assert!(say(&mut w, B, &[]).synced, "an empty list is a report");
    assert!(PoolWriter::new(vec![]).snapshot().unwrap().synced);

    let mut w = PoolWriter::new(vec![A, B]);
    say(&mut w, A, &[spec(1)]);
    w.apply(PoolEvent::SourceGone { source: B });
    assert!(w.snapshot().unwrap().synced, "a removed source is not awaited");
}

#[test]
fn lost_endpoints_are_listed_once() {
    let mut w = PoolWriter::new(vec![A]);
    let first = say(&mut w, A, &[pod(1, "x"), spec(2), spec(3)]);
    assert_eq!(first.lost.len(), 0);
    w.apply(PoolEvent::Restarted { id: EndpointId(1) });
    w.apply(PoolEvent::Scraped { id: EndpointId(2), metrics: page(5) });
    assert_eq!(*w.snapshot().unwrap().lost, [EndpointId(1)], "its model server restarted");
    w.apply(PoolEvent::CacheCleared { id: EndpointId(2) });
    let cleared = w.snapshot().unwrap();
    assert_eq!(
        (&*cleared.lost, cleared.endpoints[2].metrics().is_some()),
        (&[EndpointId(2)][..], true),
        "it keeps running"
    );
    // Another pod at the same address, and an endpoint that left.
    let mut lost = say(&mut w, A, &[pod(1, "y"), spec(2)]).lost.to_vec();
    lost.sort_unstable();
    assert_eq!(lost, [EndpointId(0), EndpointId(2)]);
    assert_eq!(say(&mut w, A, &[pod(1, "y"), spec(2)]).lost.len(), 0);
}

#[test]
fn new_configuration_removes_sources_that_it_does_not_name() {
    let mut w = PoolWriter::new(vec![A]);
    say(&mut w, A, &[spec(1)]);
    w.apply(PoolEvent::Expect { sources: vec![A, B] });
    let snapshot = w.snapshot().unwrap();
    assert_eq!((ids(&snapshot), snapshot.synced), (vec![(0, 1)], false));
    assert!(say(&mut w, B, &[spec(2)]).synced);
    w.expect(vec![B]);
    assert_eq!(ids(&w.snapshot().unwrap()), [(1, 2)]);
}

#[test]
fn restart_clears_health_and_metrics() {
    let mut w = PoolWriter::new(vec![A]);
    let endpoint = say(&mut w, A, &[spec(1)]).endpoints[0].endpoint.clone();
    let policy = HealthPolicy::default();
    endpoint.health.record(HealthOutcome::ConnectFailure, Timestamp(1), &policy);
    endpoint.health.record(HealthOutcome::ConnectFailure, Timestamp(1), &policy);
    w.apply(PoolEvent::Scraped { id: endpoint.id, metrics: page(5) });
    w.apply(PoolEvent::Restarted { id: endpoint.id });
    let state = &w.snapshot().unwrap().endpoints[0];
    assert_eq!(state.metrics(), None);
    assert_eq!(endpoint.health.availability(Timestamp(1), &policy), Availability::Open);
}

#[test]
fn membership_follows_discovery_and_not_scrapes() {
    let mut w = PoolWriter::new(vec![A]);
    assert_eq!(w.published(), Published { generation: 0, membership: 1 });
    let id = say(&mut w, A, &[spec(1)]).endpoints[0].endpoint.id;
    assert_eq!(w.published(), Published { generation: 1, membership: 1 });
    w.apply(PoolEvent::Scraped { id, metrics: page(1) });
    assert_eq!(w.snapshot().unwrap().generation, 2);
    assert_eq!(w.published(), Published { generation: 2, membership: 1 });
    say(&mut w, A, &[]);
    assert_eq!(w.published(), Published { generation: 3, membership: 3 });
}

#[derive(Clone, Debug)]
enum Step {
    Say(SourceId, Vec<(u16, Option<u8>)>),
    Gone(SourceId),
    Scraped(u32),
    Restarted(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let source = (0u32..3).prop_map(SourceId);
    let endpoints = prop::collection::vec((0u16..6, prop::option::of(0u8..2)), 0..6);
    let step = prop_oneof![
        6 => (source.clone(), endpoints).prop_map(|(s, e)| Step::Say(s, e)),
        1 => source.prop_map(Step::Gone),
        3 => (0u32..12).prop_map(Step::Scraped),
        1 => (0u32..12).prop_map(Step::Restarted),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    /// After any events: ids ascend and always stand for one identity, addresses are unique, and every address that
    /// a source names is there.
    #[test]
    fn snapshots_are_consistent_after_any_events(steps in steps()) {
        let mut w = PoolWriter::new(vec![A, B, SourceId(2)]);
        let mut said: BTreeMap<SourceId, Vec<EndpointSpec>> = BTreeMap::new();
        let mut identities = BTreeMap::new();
        let mut generation = 0;
        for step in steps {
            w.apply(match step {
                Step::Say(source, endpoints) => {
                    let endpoints: Vec<EndpointSpec> = endpoints
                        .into_iter()
                        .map(|(port, uid)| EndpointSpec { uid: uid.map(|u| u.to_string().into()), ..spec(port + 1) })
                        .collect();
                    said.insert(source, endpoints.clone());
                    PoolEvent::Endpoints { source, endpoints: endpoints.into_iter().map(Arc::new).collect() }
                }
                Step::Gone(source) => {
                    said.remove(&source);
                    PoolEvent::SourceGone { source }
                }
                Step::Scraped(id) => PoolEvent::Scraped { id: EndpointId(id), metrics: page(id) },
                Step::Restarted(id) => PoolEvent::Restarted { id: EndpointId(id) },
            });
            let Some(snapshot) = w.snapshot() else { continue };
            prop_assert_eq!(snapshot.generation, generation + 1);
            generation += 1;
            prop_assert!(snapshot.endpoints.is_sorted_by(|a, b| a.endpoint.id < b.endpoint.id));
            let addresses: std::collections::BTreeSet<_> = snapshot.endpoints.iter().map(|s| s.endpoint.spec.address).collect();
            prop_assert_eq!(addresses.len(), snapshot.endpoints.len());
            let wanted: std::collections::BTreeSet<_> = said.values().flatten().map(|s| s.address).collect();
            prop_assert_eq!(addresses, wanted);
            for (i, state) in (0u32..).zip(&snapshot.endpoints) {
                let e = &state.endpoint;
                let identity = (e.spec.address, e.spec.uid.clone());
                prop_assert_eq!(identities.entry(e.id).or_insert_with(|| identity.clone()), &identity);
                prop_assert_eq!(snapshot.position(e.spec.address), Some(i));
                prop_assert!(state.metrics().is_none_or(|m| m.waiting == e.id.0));
            }
        }
    }
}
