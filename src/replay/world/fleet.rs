//! The simulated fleet: endpoints, servers that join, die and restart, discovery, scrapes. Called by [`super::World`];
//! pure.

use super::kv_event_delivery::KvEventLink;
use super::server::WorldServer;
use super::{FleetChange, TimedChange, World};
use crate::front::Front;
use crate::queue::{ScrapedPage, SimEvent};
use attache_pool::EndpointSpec;
use attache_pool::role::ROLE_LABEL;
use attache_prefix::by_endpoint::ByEndpoint;
use attache_prefix::residents::{Cache, Resident};
use attache_sim::engine::EngineConfig;
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
            let (mut page, restarted) = server.scrape(now);
            page.num_blocks = self.signals.reported_blocks.or(page.num_blocks);
            for (picker, front) in self.pickers.iter_mut().enumerate() {
                let metrics = front.seen_at_scrape(&server.spec, page.clone());
                if delay.is_zero() {
                    front.scraped(id, metrics, restarted);
                } else {
                    let page = Box::new(ScrapedPage { picker, metrics, restarted });
                    self.queue.push(now.after(delay), SimEvent::Page(i, page));
                }
            }
        }
        self.pickers.iter_mut().for_each(Front::publish);
        self.freed(now);
        self.queue.push(now.after(self.signals.metrics_every), SimEvent::Scrape);
    }

    /// Reports the load of all servers to the observer.
    pub(super) fn sample(&mut self, at: Timestamp) {
        for i in 0..self.servers.len() {
            self.advance(i, at);
        }
        self.samples.clear();
        self.samples.extend(self.servers.iter().map(WorldServer::sample));
        self.observer.sampled(at, &self.samples);
    }

    /// Adds a server to the fleet; the picker learns of it by discovery.
    pub(super) fn join(&mut self, spec: EndpointSpec, mut engine: EngineConfig, now: Timestamp) {
        engine.every_token = self.pickers.first().counts_output;
        engine.kv_events = self.signals.kv_events.is_some();
        self.servers.push(WorldServer::new(spec, engine, self.ranks, now));
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
            server.restart(now, &mut events);
        }
        events.into_iter().for_each(|event| self.take(event));
        self.forsake(i, now);
    }

    /// Discovery publishes which servers are alive.
    pub(super) fn discover(&mut self) {
        let specs: Vec<_> = self.servers.iter().filter(|s| s.alive).map(|s| s.spec.clone()).collect();
        // All pickers discover the same endpoints in the same order, so endpoints have the same ids everywhere.
        self.pickers.iter_mut().for_each(|picker| picker.discover(specs.clone()));
        let picker = self.pickers.first();
        self.places.clear();
        for (i, server) in self.servers.iter_mut().enumerate() {
            let at = picker.snapshot.position(server.spec.address);
            server.known = at.and_then(|p| picker.snapshot.get(p)).map(|state| state.endpoint.id);
            self.places.extend(server.known.map(|id| (id, i)));
            let index = picker.cache.index();
            match server.known {
                Some(_) if self.signals.kv_events.is_some() && server.events.is_empty() => {
                    server.events = server.engines.iter().map(|_| KvEventLink::new(index.add_holder())).collect();
                }
                None => server.events.drain(..).for_each(|link| index.remove_holder(link.holder)),
                Some(_) => {}
            }
        }
        let resident = |server: &WorldServer| {
            let cache = |link: &KvEventLink| Cache { holder: link.holder, trust: link.trust.clone() };
            let caches = server.events.iter().map(cache).collect();
            Some((server.known.filter(|_| !server.events.is_empty())?, Resident { caches, ..Resident::default() }))
        };
        let residents: ByEndpoint<Resident> = self.servers.iter().filter_map(resident).collect();
        picker.cache.residents().publish(residents);
    }
}
