//! The simulated fleet: endpoints, servers that join, die and restart, discovery, scrapes. Called by [`super::World`];
//! pure.

use super::{FleetChange, KvEventLink, TimedChange, World, WorldServer};
use crate::page::MetricsHistory;
use crate::queue::SimEvent;
use attache_pool::EndpointSpec;
use attache_pool::role::ROLE_LABEL;
use attache_prefix::by_endpoint::ByEndpoint;
use attache_prefix::residents::{Cache, Resident};
use attache_prefix::trust::{Trust, TrustCell};
use attache_report::served::Sample;
use attache_sim::engine::{Engine, EngineConfig};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// The endpoint of server number `i`, without further labels.
#[must_use]
pub fn spec(i: usize) -> EndpointSpec {
    let [_, a, b, c] = u32::try_from(i + 1).unwrap_or(u32::MAX).to_be_bytes();
    EndpointSpec { name: format!("server-{i}").into(), ..EndpointSpec::at(([10, a, b, c], 8000).into()) }
}

/// The endpoint with the value `role` of the role label; unchanged when `None`.
#[must_use]
pub fn with_role(mut spec: EndpointSpec, role: Option<&Arc<str>>) -> EndpointSpec {
    if let Some(role) = role {
        spec.labels.insert(ROLE_LABEL.into(), role.clone());
    }
    spec
}

impl World<'_> {
    /// Scrapes every server; the picker gets the metrics after their delay.
    pub(super) fn scrape(&mut self, now: Timestamp) {
        let delay = self.signals.metrics_delay;
        for i in 0..self.servers.len() {
            self.advance(i, now);
            let Some(server) = self.servers.get_mut(i).filter(|s| s.alive) else { continue };
            let Some(id) = server.known else { continue };
            let snapshot = &self.front.snapshot;
            let state = snapshot.position(server.spec.address).and_then(|p| snapshot.get(p));
            let in_flight = state.map_or(0, |s| s.endpoint.ledger.in_flight());
            let (mut page, restarted) = server.pages.read(&server.engine, server.started, in_flight, now);
            page.num_blocks = self.signals.reported_blocks.or(page.num_blocks);
            if delay.is_zero() {
                self.front.scraped(id, page, restarted);
            } else {
                self.queue.push(now.after(delay), SimEvent::Page(i, Box::new(page), restarted));
            }
        }
        self.front.publish();
        self.freed(now);
        self.queue.push(now.after(self.signals.metrics_every), SimEvent::Scrape);
    }

    /// Reports the load of all servers to the observer.
    pub(super) fn sample(&mut self, at: Timestamp) {
        for i in 0..self.servers.len() {
            self.advance(i, at);
        }
        self.samples.clear();
        self.samples.extend(self.servers.iter().map(|server| {
            let (load, stats) = (server.engine.load(), server.engine.stats());
            Sample {
                running: u32::try_from(load.running).unwrap_or(u32::MAX),
                waiting: u32::try_from(load.waiting).unwrap_or(u32::MAX),
                #[expect(clippy::cast_possible_truncation, reason = "a part of one")]
                kv_usage: load.kv_usage as f32,
                prefix_queries: stats.prefix_queries,
                prefix_hits: stats.prefix_hits,
            }
        }));
        self.observer.sampled(at, &self.samples);
    }

    /// Adds a server to the fleet; the picker learns of it by discovery.
    pub(super) fn join(&mut self, spec: EndpointSpec, mut engine: EngineConfig, now: Timestamp) {
        engine.every_token = false;
        engine.kv_events = self.signals.kv_events.is_some();
        self.servers.push(WorldServer {
            spec: spec.into(),
            engine: Engine::new(engine),
            started: now,
            alive: true,
            known: None,
            pages: MetricsHistory::default(),
            due: None,
            events: None,
        });
    }

    /// Makes the change at position `i` of the configured changes.
    pub(super) fn change(&mut self, i: usize, now: Timestamp) {
        let Some(TimedChange { change, .. }) = self.changes.get(i).cloned() else { return };
        match change {
            FleetChange::Join(engine, role) => {
                let spec = with_role(spec(self.servers.len()), role.as_ref());
                self.join(spec, *engine, now);
                self.queue.push(now.after(self.signals.discovery_delay), SimEvent::Discovery);
            }
            FleetChange::Lose(i) => {
                self.die(i, now);
                if let Some(server) = self.servers.get_mut(i) {
                    server.alive = false;
                }
                self.queue.push(now.after(self.signals.discovery_delay), SimEvent::Discovery);
            }
            FleetChange::Restart(i) => {
                self.die(i, now);
                self.restart_kv(i, now);
            }
        }
    }

    /// The process of a server ends, and its requests are lost.
    fn die(&mut self, i: usize, now: Timestamp) {
        self.advance(i, now);
        let mut events = Vec::new();
        if let Some(server) = self.servers.get_mut(i) {
            server.engine.restart(now, &mut events);
            server.started = now;
            server.due = None;
        }
        events.into_iter().for_each(|event| self.take(event));
        self.forsake(i, now);
    }

    /// Discovery publishes which servers are alive.
    pub(super) fn discover(&mut self) {
        let specs = self.servers.iter().filter(|s| s.alive).map(|s| s.spec.clone()).collect();
        self.front.discover(specs);
        self.places.clear();
        for (i, server) in self.servers.iter_mut().enumerate() {
            let at = self.front.snapshot.position(server.spec.address);
            server.known = at.and_then(|p| self.front.snapshot.get(p)).map(|state| state.endpoint.id);
            self.places.extend(server.known.map(|id| (id, i)));
            match (&server.events, server.known) {
                (None, Some(_)) if self.signals.kv_events.is_some() => {
                    let trust = Arc::new(TrustCell::default());
                    trust.set(Trust::Exact);
                    let holder = self.front.cache.index().add_holder();
                    server.events =
                        Some(KvEventLink { holder, trust, missed: Vec::new(), replayed: Timestamp(0), sequence: 0 });
                }
                (Some(link), None) => {
                    self.front.cache.index().remove_holder(link.holder);
                    server.events = None;
                }
                _ => {}
            }
        }
        let resident = |server: &WorldServer| {
            let link = server.events.as_ref()?;
            let cache = Cache { holder: link.holder, trust: link.trust.clone() };
            Some((server.known?, Resident { caches: [cache].into_iter().collect() }))
        };
        let residents: ByEndpoint<Resident> = self.servers.iter().filter_map(resident).collect();
        self.front.cache.residents().publish(residents);
    }
}
