//! How messages leave a picker, and a bus in memory for tests and virtual time.

use crate::paths::mix;
use attache_types::clock::Timestamp;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::time::Duration;

/// The sending side of a bus. The receiving side calls [`crate::Replica::receive`].
pub trait Outbox: Send + Sync + std::fmt::Debug {
    /// Sends a message to the picker `to`, or to all. It does not block; a message that can't be sent is dropped.
    fn publish(&self, to: Option<u64>, message: Vec<u8>);

    /// [`crate::Replica::tick`] must be called now, because it must be called again earlier than it said.
    fn wake(&self);
}

/// Delay and faults of a [`MemoryBus`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryBusSettings {
    /// Time from a sender to a receiver.
    pub delay: Duration,
    /// Largest further delay, chosen at random for each delivery, so that messages overtake each other.
    pub jitter: Duration,
    /// Share of deliveries that are lost, 0..1.
    pub loss: f64,
    /// Share of deliveries that arrive twice, 0..1.
    pub duplicates: f64,
    /// Seed of all faults.
    pub seed: u64,
}

/// A delivery: time, order, receiver, sender, message.
type Delivery = Reverse<(Timestamp, u64, usize, usize, std::sync::Arc<[u8]>)>;

/// A bus between pickers in one process, with delay, loss, duplication and partitions. Members are numbers from 0.
#[derive(Debug, Default)]
pub struct MemoryBus {
    settings: MemoryBusSettings,
    members: usize,
    deliveries: BinaryHeap<Delivery>,
    /// Pairs of members, in both orders, that can't reach each other.
    parted: HashSet<(usize, usize)>,
    draws: u64,
}

impl MemoryBus {
    /// A bus of `members`.
    #[must_use]
    pub fn new(members: usize, settings: MemoryBusSettings) -> Self {
        Self { settings, members, ..Self::default() }
    }

    /// Replaces delay and faults, for messages that are sent later.
    pub fn set(&mut self, settings: MemoryBusSettings) {
        self.settings = settings;
    }

    /// Drops all messages between two members from now on, or lets them through again.
    pub fn part(&mut self, a: usize, b: usize, parted: bool) {
        for pair in [(a, b), (b, a)] {
            if parted {
                self.parted.insert(pair)
            } else {
                self.parted.remove(&pair)
            };
        }
    }

    /// Sends a message from one member to another one, or to all others.
    pub fn send(&mut self, from: usize, to: Option<usize>, message: &[u8], now: Timestamp) {
        let message: std::sync::Arc<[u8]> = message.into();
        for receiver in 0..self.members {
            if receiver == from || to.is_some_and(|to| to != receiver) || self.parted.contains(&(from, receiver)) {
                continue;
            }
            let lost = self.draw() < self.settings.loss;
            let copies = if self.draw() < self.settings.duplicates { 2 } else { 1 };
            for _ in 0..if lost { 0 } else { copies } {
                let at = now.after(self.settings.delay + self.settings.jitter.mul_f64(self.draw()));
                self.draws += 1;
                self.deliveries.push(Reverse((at, self.draws, receiver, from, message.clone())));
            }
        }
    }

    /// When the next message arrives.
    #[must_use]
    pub fn next(&self) -> Option<Timestamp> {
        self.deliveries.peek().map(|Reverse((at, ..))| *at)
    }

    /// The next message that has arrived by `now`: receiver, sender, content.
    pub fn pop(&mut self, now: Timestamp) -> Option<(usize, usize, std::sync::Arc<[u8]>)> {
        self.next().filter(|at| *at <= now)?;
        self.deliveries.pop().map(|Reverse((_, _, to, from, message))| (to, from, message))
    }

    /// A random number in 0..1.
    fn draw(&mut self) -> f64 {
        self.draws += 1;
        (mix(self.draws ^ mix(self.settings.seed)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
