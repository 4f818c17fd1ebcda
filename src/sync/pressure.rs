//! Pressure of models: requests of the last minute that load kept from the endpoint with their cached prefix, of all
//! pickers together.
//!
//! Each picker numbers its own diversions of a model and sends the last number. A receiver keeps the largest number of
//! each picker, so a message that arrives twice or late counts nothing twice. To consume is to say, for each picker,
//! up to which number its diversions are dealt with. The largest such number counts, so two reconcilers that consume
//! the same diversions at two pickers consume them once.

use crate::bus::Outbox;
use crate::generated::v1;
use crate::wire::MAX_PEERS;
use ahash::AHashMap;
use attache_scheduling::window::{SlidingSum, Window};
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use v1::event::Kind;

/// 1 minute, as in LocalAI.
pub const PRESSURE_WINDOW: Duration = Duration::from_secs(60);
/// Most pairs of pool and model. Diversions of further pairs are dropped.
const MAX_MODELS: usize = 4_096;
/// Longest model name that a peer may send, bytes.
const MAX_NAME: usize = 256;
/// Most diversions of one picker for one model in the window; further ones do not count.
const MAX_RECENT: u64 = 1_000_000;
/// Shortest time between two searches for models that are forgotten, while there are too many.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);
/// Diversions of further pickers are dropped.
const MAX_PICKERS: usize = MAX_PEERS + 1;
/// A peer can consume at most this many diversions that have not arrived yet, so that it can't hide all later ones.
const MAX_AHEAD: u64 = 1_000;

/// The diversions of one picker for one model.
#[derive(Debug, Default)]
struct PickerDiversions {
    /// Number of the last one.
    last: u64,
    /// Those of the last minute that are not consumed: the last numbers up to `last`.
    recent: SlidingSum,
    /// All up to this number are consumed, also those that have not arrived yet.
    consumed: u64,
    changed: Timestamp,
}

impl PickerDiversions {
    /// Adds all up to number `last`, of which at most `recent` are of the last minute.
    fn add(&mut self, last: u64, recent: u64, now: Timestamp) {
        let new = last.saturating_sub(self.last).min(recent).min(MAX_RECENT - self.recent.total().min(MAX_RECENT));
        self.last = self.last.max(last);
        if new > 0 {
            self.recent.add(Window::new(PRESSURE_WINDOW).slot(now), new);
            self.changed = now;
        }
        self.consume(self.consumed);
    }

    /// Removes those up to number `through`.
    fn consume(&mut self, through: u64) {
        // The first number of a picker may have any size.
        let most = if self.last == 0 { u64::MAX } else { self.last.saturating_add(MAX_AHEAD) };
        self.consumed = self.consumed.max(through.min(most));
        let before = self.last.saturating_sub(self.recent.total());
        self.recent.take(self.consumed.saturating_sub(before));
    }
}

/// The diversions for one model, by the picker that counted them.
#[derive(Debug, Default)]
struct ModelDiversions {
    pickers: AHashMap<u64, PickerDiversions>,
    /// The own number must be sent.
    diverted: bool,
    /// The consumed numbers must be sent.
    consumed: bool,
}

impl ModelDiversions {
    fn expire(&mut self, now: Timestamp) {
        let slot = Window::new(PRESSURE_WINDOW).slot(now);
        self.pickers.values_mut().for_each(|picker| picker.recent.expire(slot));
        // What is older can be in no message that is still under way.
        self.pickers.retain(|_, picker| picker.recent.total() > 0 || now.since(picker.changed) < 2 * PRESSURE_WINDOW);
    }

    /// The counts of a picker; `None` if there are too many pickers.
    fn of(&mut self, sender: u64) -> Option<&mut PickerDiversions> {
        if self.pickers.len() >= MAX_PICKERS && !self.pickers.contains_key(&sender) {
            return None;
        }
        Some(self.pickers.entry(sender).or_default())
    }

    fn total(&self) -> u64 {
        self.pickers.values().map(|picker| picker.recent.total()).sum()
    }

    /// Removes at most `count`, the oldest first. Returns how many.
    fn take(&mut self, count: u64) -> u64 {
        let mut taken = 0;
        while taken < count {
            let oldest =
                self.pickers.iter_mut().filter_map(|(id, picker)| Some((picker.recent.expires()?, *id, picker)));
            let Some((.., picker)) = oldest.min_by_key(|(slot, id, _)| (*slot, *id)) else { break };
            taken += picker.recent.take_oldest(count - taken);
            picker.consumed = picker.last - picker.recent.total();
        }
        self.consumed |= taken > 0;
        taken
    }
}

/// The diversions for one model of one pool in the last minute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCount {
    /// Name of the pool.
    pub pool: Arc<str>,
    /// Name of the model.
    pub model: Arc<str>,
    /// Requests that any picker diverted.
    pub all: u64,
    /// Requests that this picker diverted.
    pub own: u64,
}

#[derive(Debug, Default)]
struct Models {
    by_name: AHashMap<(Arc<str>, Arc<str>), ModelDiversions>,
    /// The largest number of an own diversion of any model. The numbers of a model that was forgotten here continue
    /// from it, because peers may still remember the numbers before.
    last: u64,
    /// When forgotten models were searched for because there were too many.
    expired: Timestamp,
}

impl Models {
    /// The counts of a pair; `None` if there are too many.
    fn of(&mut self, pool: &Arc<str>, model: &Arc<str>, now: Timestamp) -> Option<&mut ModelDiversions> {
        let name = (pool.clone(), model.clone());
        if self.by_name.len() >= MAX_MODELS && !self.by_name.contains_key(&name) {
            if self.expired.after(EXPIRE_EVERY) <= now {
                self.expired = now;
                self.expire(now);
            }
            if self.by_name.len() >= MAX_MODELS {
                return None;
            }
        }
        let diversions = self.by_name.entry(name).or_default();
        diversions.expire(now);
        Some(diversions)
    }

    /// The counts that a message names; `None` if a name is too long, or if there are too many.
    fn named(&mut self, pool: &str, model: &str, now: Timestamp) -> Option<&mut ModelDiversions> {
        (model.len() <= MAX_NAME).then(|| self.of(&pool.into(), &model.into(), now)).flatten()
    }

    fn expire(&mut self, now: Timestamp) {
        self.by_name.retain(|_, model| {
            model.expire(now);
            !model.pickers.is_empty()
        });
    }
}

/// The pressure of all models, as far as this picker knows.
#[derive(Debug, Default)]
pub struct SharedPressure {
    models: Mutex<Models>,
    /// The identity of this picker, and what sends its changes. Unset without peers.
    member: OnceLock<(u64, Arc<dyn Outbox>)>,
}

impl SharedPressure {
    /// Sends changes from now on, as the picker `sender`. Must be called before the first diversion.
    pub(crate) fn join(&self, sender: u64, outbox: Arc<dyn Outbox>) {
        // A second member would send the changes of the first one.
        let _ = self.member.set((sender, outbox));
    }

    /// The identity of this picker; 0 without peers.
    fn own(&self) -> u64 {
        self.member.get().map_or(0, |(sender, _)| *sender)
    }

    fn wake(&self) {
        if let Some((_, outbox)) = self.member.get() {
            outbox.wake();
        }
    }

    /// Counts a request for `model` that load kept from the endpoint with its cached prefix.
    pub fn divert(&self, pool: &Arc<str>, model: &Arc<str>, now: Timestamp) {
        let mut models = self.models.lock();
        let before = models.last;
        let Some(diversions) = models.of(pool, model, now) else { return };
        let is_first = !std::mem::replace(&mut diversions.diverted, true);
        let Some(own) = diversions.of(self.own()) else { return };
        if own.last == 0 {
            own.last = before;
        }
        own.add(own.last + 1, 1, now);
        let last = own.last;
        models.last = models.last.max(last);
        drop(models);
        if is_first {
            self.wake();
        }
    }

    /// The models with diverted requests in the last minute, by pool and model.
    #[must_use]
    pub fn list(&self, now: Timestamp) -> Vec<ModelCount> {
        let mut models = self.models.lock();
        models.expire(now);
        let own = self.own();
        let count = |((pool, model), diversions): (&(Arc<str>, Arc<str>), &ModelDiversions)| ModelCount {
            pool: pool.clone(),
            model: model.clone(),
            all: diversions.total(),
            own: diversions.pickers.get(&own).map_or(0, |picker| picker.recent.total()),
        };
        let mut rows: Vec<ModelCount> = models.by_name.iter().map(count).filter(|row| row.all > 0).collect();
        rows.sort_by(|a, b| (&a.pool, &a.model).cmp(&(&b.pool, &b.model)));
        rows
    }

    /// Consumes at most `count` diversions for `model`, in all pools or in `pool`, the oldest of a pool first. Returns
    /// how many.
    pub fn consume(&self, model: &str, pool: Option<&str>, count: u64, now: Timestamp) -> u64 {
        let mut models = self.models.lock();
        models.expire(now);
        let mut left = count;
        for ((of_pool, name), diversions) in &mut models.by_name {
            if **name == *model && pool.is_none_or(|pool| *pool == **of_pool) {
                left -= diversions.take(left);
            }
        }
        drop(models);
        if left < count {
            self.wake();
        }
        count - left
    }

    /// Drops the counts of a deleted pool.
    pub fn forget(&self, pool: &str) {
        self.models.lock().by_name.retain(|(of_pool, _), _| **of_pool != *pool);
    }

    /// The changes that peers have not been sent.
    pub(crate) fn changes(&self) -> Vec<Kind> {
        self.events(|diversions| (std::mem::take(&mut diversions.diverted), std::mem::take(&mut diversions.consumed)))
    }

    /// All own diversions, and all consumed numbers.
    pub(crate) fn state(&self) -> Vec<Kind> {
        self.events(|_| (true, true))
    }

    fn events(&self, wanted: impl Fn(&mut ModelDiversions) -> (bool, bool)) -> Vec<Kind> {
        let own = self.own();
        let mut events = Vec::new();
        for ((pool, model), diversions) in &mut self.models.lock().by_name {
            let (diverted, consumed) = wanted(diversions);
            let (pool, model) = (&**pool, &**model);
            if let Some(picker) = diversions.pickers.get(&own).filter(|_| diverted) {
                let (last, recent) = (picker.last, picker.recent.total());
                events.push(Kind::Diverted(v1::Diverted { pool: pool.into(), model: model.into(), last, recent }));
            }
            let through = |(sender, picker): (&u64, &PickerDiversions)| {
                (picker.consumed > 0).then_some(v1::DiversionsThrough { sender: *sender, last: picker.consumed })
            };
            let pickers: Vec<_> = diversions.pickers.iter().filter(|_| consumed).filter_map(through).collect();
            if !pickers.is_empty() {
                events.push(Kind::Consumed(v1::Consumed { pool: pool.into(), model: model.into(), pickers }));
            }
        }
        events
    }

    /// Applies diversions of the peer `sender`. Those of too many models are dropped.
    pub(crate) fn diverted(&self, sender: u64, event: &v1::Diverted, now: Timestamp) {
        let mut models = self.models.lock();
        let picker = models.named(&event.pool, &event.model, now).and_then(|diversions| diversions.of(sender));
        if let Some(picker) = picker {
            picker.add(event.last, event.recent, now);
        }
    }

    /// Applies what a peer has consumed.
    pub(crate) fn consumed(&self, event: &v1::Consumed, now: Timestamp) {
        let mut models = self.models.lock();
        let Some(diversions) = models.named(&event.pool, &event.model, now) else { return };
        for through in event.pickers.iter().take(MAX_PICKERS) {
            if let Some(picker) = diversions.of(through.sender) {
                picker.changed = picker.changed.max(now);
                picker.consume(through.last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    /// The counts of the models of pool `p`.
    fn counts(pressure: &SharedPressure, second: u64) -> Vec<(String, u64)> {
        pressure.list(at(second)).into_iter().map(|row| ((*row.model).to_owned(), row.all)).collect()
    }

    fn divert(pressure: &SharedPressure, model: &str, second: u64) {
        pressure.divert(&"p".into(), &model.into(), at(second));
    }

    fn diverted(last: u64, recent: u64) -> v1::Diverted {
        v1::Diverted { pool: "p".into(), model: "m".into(), last, recent }
    }

    fn consumed(sender: u64, last: u64) -> v1::Consumed {
        let pickers = vec![v1::DiversionsThrough { sender, last }];
        v1::Consumed { pool: "p".into(), model: "m".into(), pickers }
    }

    #[test]
    fn pressure_is_of_the_last_minute() {
        let pressure = SharedPressure::default();
        [0, 30].into_iter().for_each(|second| divert(&pressure, "m", second));
        divert(&pressure, "n", 30);
        let row = |model: &str, count| (model.to_owned(), count);
        assert_eq!(counts(&pressure, 59), [row("m", 2), row("n", 1)]);
        assert_eq!(counts(&pressure, 60), [row("m", 1), row("n", 1)]);
        assert_eq!(counts(&pressure, 90), []);
        assert!(pressure.models.lock().by_name.len() == 2, "peers may still send older numbers");
        assert_eq!((counts(&pressure, 200), pressure.models.lock().by_name.len()), (Vec::new(), 0));
    }

    #[test]
    fn only_what_was_read_is_consumed_the_oldest_first() {
        let pressure = SharedPressure::default();
        [0, 30, 31, 32].into_iter().for_each(|second| divert(&pressure, "m", second));
        assert_eq!(pressure.consume("m", Some("q"), 9, at(40)), 0);
        assert_eq!(pressure.consume("m", Some("p"), 3, at(40)), 3);
        assert_eq!(counts(&pressure, 91), [("m".to_owned(), 1)], "the newest one is left");
        assert_eq!((pressure.consume("m", None, 9, at(91)), counts(&pressure, 91)), (1, Vec::new()));
    }

    #[test]
    fn repeated_and_reordered_messages_count_nothing_twice() {
        let pressure = SharedPressure::default();
        for event in [diverted(103, 3), diverted(103, 3), diverted(101, 1), diverted(105, 5)] {
            pressure.diverted(7, &event, at(0));
        }
        assert_eq!(counts(&pressure, 1), [("m".to_owned(), 5)]);
        pressure.consumed(&consumed(7, 104), at(1));
        pressure.consumed(&consumed(7, 102), at(1));
        assert_eq!(counts(&pressure, 1), [("m".to_owned(), 1)]);
        // Consumed before they arrive here.
        pressure.consumed(&consumed(7, 107), at(1));
        pressure.diverted(7, &diverted(108, 1), at(1));
        assert_eq!(counts(&pressure, 1), [("m".to_owned(), 1)]);
    }

    #[test]
    fn impossible_number_of_diversions_is_bounded_and_consumed_at_once() {
        let pressure = SharedPressure::default();
        for sender in [7, 8] {
            pressure.diverted(sender, &diverted(1 << 62, u64::MAX), at(0));
        }
        assert_eq!(counts(&pressure, 1), [("m".to_owned(), 2 * MAX_RECENT)]);
        assert_eq!(pressure.consume("m", None, u64::MAX, at(1)), 2 * MAX_RECENT);
        assert_eq!(counts(&pressure, 1), []);
    }

    #[test]
    fn peer_can_neither_hide_later_diversions_nor_fill_the_memory() {
        let pressure = SharedPressure::default();
        pressure.diverted(7, &diverted(1, 1), at(0));
        pressure.consumed(&consumed(7, u64::MAX), at(0));
        pressure.diverted(7, &diverted(2 + MAX_AHEAD, 1), at(1));
        assert_eq!(counts(&pressure, 1), [("m".to_owned(), 1)]);
        for sender in 0..1_000 {
            pressure.diverted(sender, &diverted(u64::MAX, 1), at(2));
            let model = format!("made up {sender}");
            (0..10).for_each(|i| {
                pressure.diverted(7, &v1::Diverted { model: format!("{model} {i}"), ..diverted(1, 1) }, at(2))
            });
        }
        pressure.diverted(7, &v1::Diverted { model: "long".repeat(100), ..diverted(1, 1) }, at(2));
        let models = pressure.models.lock();
        assert_eq!(models.by_name.len(), MAX_MODELS);
        assert!(models.by_name.values().all(|model| model.pickers.len() <= MAX_PICKERS));
    }
}
