//! Outlooks of a pool in virtual time, whose servers keep their speed.

use super::*;
use crate::RequestFacts;
use attache_pool::ledger::Ticket;
use attache_pool::speed::{PoolSpeed, Reservation, Work};
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

const STALE_AFTER: Duration = Duration::from_secs(2);
const SECOND: u64 = 1_000_000_000;
/// Seconds per thousand prompt tokens, and per request.
const KILOTOKEN: f64 = 0.25;
const ALONE: f64 = 0.05;

/// Servers that compute one prompt after another.
struct Fleet {
    snapshot: PoolSnapshot,
    /// Per server: its prompts in order, with their bookings.
    queues: Vec<Vec<(f64, Reservation, Ticket)>>,
    /// Per server: when it will have computed all of its prompts.
    free_at: Vec<f64>,
}

fn at(seconds: f64) -> Timestamp {
    Timestamp((seconds * SECOND as f64) as u64)
}

impl Fleet {
    fn new(servers: u32) -> Self {
        let speed = Arc::<PoolSpeed>::default();
        let state = |id: u32| {
            let spec = EndpointSpec::at(([127, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into());
            EndpointState::new(Arc::new(Endpoint::in_pool(EndpointId(id), spec, &speed)), None)
        };
        let snapshot = PoolSnapshot::new(1, true, (0..servers).map(state).collect());
        let queues = (0..servers).map(|_| Vec::new()).collect();
        Self { snapshot, queues, free_at: vec![0.0; servers as usize] }
    }

    fn send(&mut self, server: usize, tokens: u32, now: f64) {
        let work = Work { prompt_tokens: tokens, uncached_tokens: tokens, adapter_cold: false };
        let endpoint = self.snapshot.endpoints[server].endpoint.clone();
        let reservation = Reservation::begin(endpoint.clone(), None, work, true, at(now));
        let done = self.free_at[server].max(now) + f64::from(tokens) / 1e3 * KILOTOKEN + ALONE;
        self.free_at[server] = done;
        self.queues[server].push((done, reservation, Ticket::book(endpoint, tokens)));
    }

    /// Completes the requests that are computed by `now`: first token and end.
    fn run(&mut self, now: f64) {
        for queue in &mut self.queues {
            queue.retain_mut(|(done, reservation, _)| {
                if *done <= now {
                    reservation.first_token(true, at(*done));
                }
                *done > now
            });
        }
    }

    /// Runs requests until the pool's speed is learned.
    fn learned(mut self) -> Self {
        let mut now = 1.0;
        for round in 0..200 {
            for server in 0..self.queues.len() {
                for i in 0..=round % 3 {
                    self.send(server, 200 + 400 * ((round + i) % 7), now);
                }
            }
            now = self.free_at.iter().copied().fold(now, f64::max) + 0.1;
            self.run(now);
        }
        self
    }

    fn now(&self) -> f64 {
        self.free_at.iter().copied().fold(0.0, f64::max) + 0.2
    }

    fn outlook(&self, tokens: u32, bounds: Bounds, now: f64) -> Option<Outlook> {
        let request = RequestFacts { prompt_tokens: tokens, ..RequestFacts::default() };
        let cx = PickContext { request, ..PickContext::new(&self.snapshot, at(now), STALE_AFTER) };
        let candidates: Vec<_> =
            self.snapshot.endpoints.iter().map(|s| Candidate::new(s, at(now), STALE_AFTER, 0)).collect();
        outlook(&cx, &candidates, bounds, 0.0)
    }
}

fn first_token(seconds: f64) -> Bounds {
    Bounds { first_token: seconds, per_token: f64::INFINITY }
}

#[test]
fn unknown_pool_has_no_outlook() {
    let fleet = Fleet::new(2);
    assert_eq!(fleet.outlook(1_000, first_token(0.001), 1.0), None, "no response yet");
    let fleet = fleet.learned();
    let now = fleet.now();
    assert!(fleet.outlook(1_000, first_token(0.001), now).is_some());
    assert_eq!(fleet.outlook(1_000, first_token(0.001), now + 61.0), None, "no recent response");
}

#[test]
fn idle_pool_serves_every_feasible_request() {
    let fleet = Fleet::new(2).learned();
    let now = fleet.now();
    let good = fleet.outlook(1_000, first_token(1.0), now).unwrap();
    assert!(good.fits_in == 0.0 && (good.spare - (1.0 - KILOTOKEN - ALONE)).abs() < 0.1, "{good:?}");
    let bad = fleet.outlook(20_000, first_token(1.0), now).unwrap();
    assert!(bad.spare < 0.0 && bad.fits_in >= 60.0, "{bad:?}");
    let tokens = Bounds { first_token: 10.0, per_token: 1e-6 };
    assert!(fleet.outlook(1_000, tokens, now).unwrap().spare < 0.0, "its tokens would come too slowly");
}

#[test]
fn request_rejected_for_a_while_is_admitted_after_it() {
    let mut refused = 0;
    for load in 1..12u32 {
        for bound in [0.4, 0.7, 1.1, 2.0] {
            let mut fleet = Fleet::new(2).learned();
            let now = fleet.now();
            for i in 0..load {
                fleet.send(i as usize % 2, 300 + 700 * (i % 4), now);
            }
            let before = fleet.outlook(500, first_token(bound), now).unwrap();
            if before.spare >= 0.0 {
                assert_eq!(before.fits_in, 0.0);
                continue;
            }
            refused += 1;
            // Retry-after as a client gets it, in whole seconds; no other request arrives meanwhile.
            let again = now + before.fits_in.ceil();
            fleet.run(again);
            let after = fleet.outlook(500, first_token(bound), again);
            assert!(after.is_none_or(|o| o.spare >= 0.0), "{load} {bound}: {before:?}, then {after:?}");
        }
    }
    assert!(refused > 10, "{refused}");
}
