//! Names from requests as metric labels. A client can invent names, and each would be a series for the life of the
//! process. So only some names get a label value of their own, and all others share one, `other`:
//!
//! - names that the operator lists,
//! - a number of the most frequent others. Free label values go to the first names. Once a minute, names that
//!   were much more frequent than one with a label value replace it. Its counters are dropped, not moved, so
//!   that no series ever decreases.
//!
//! The frequency of names without a label value is estimated in bounded memory (Space-Saving, Metwally et al.
//! 2005) by its lower bound.

use ahash::AHashMap;
use attache_request::settings::NameSettings;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The label value that all other names share.
pub const OTHER: &str = "other";
/// Longest name with a label value of its own, bytes: the limit of model names.
const MAX_NAME_BYTES: usize = 256;
/// 1 minute between two evaluations of frequencies.
const TURN: Duration = Duration::from_secs(60);
/// Names that are watched for each label value.
const WATCHED: usize = 4;
/// A newcomer must be this many times as frequent as the name that it replaces, so that label values do not alternate.
const TIMES: u64 = 2;
/// And more frequent by this number: rare names do not replace each other.
const MARGIN: u64 = 10;

/// Counters by name, for a bounded number of names.
#[derive(Debug, Default)]
pub struct Names<T> {
    state: Mutex<NameState<T>>,
    other: Arc<T>,
}

#[derive(Debug)]
struct NameState<T> {
    allowed: BTreeSet<String>,
    top: usize,
    shown: AHashMap<Arc<str>, Shown<T>>,
    watched: Vec<Watched>,
    turned: Timestamp,
}

#[derive(Debug)]
struct Shown<T> {
    counters: Arc<T>,
    /// Occurrences since the last evaluation.
    seen: u64,
    /// Whether the operator lists the name.
    stays: bool,
}

#[derive(Debug)]
struct Watched {
    name: Arc<str>,
    seen: u64,
    /// Occurrences that may belong to other names.
    doubtful: u64,
}

impl<T> Default for NameState<T> {
    fn default() -> Self {
        let NameSettings { allow, top } = NameSettings::default();
        Self { allowed: allow, top, shown: AHashMap::new(), watched: Vec::new(), turned: Timestamp::default() }
    }
}

impl<T: Default> Names<T> {
    /// Sets the limits in `settings`. Must be called before any name is seen.
    pub fn bound(&self, settings: &NameSettings) {
        let mut state = self.state.lock();
        state.allowed.clone_from(&settings.allow);
        state.top = settings.top;
    }

    /// The counters of `name`, seen at `now`.
    #[must_use]
    pub fn of(&self, name: &str, now: Timestamp) -> Arc<T> {
        self.see(name, now).map_or_else(|| self.other.clone(), |(_, counters)| counters)
    }

    /// The label value of `name`, seen at `now`.
    #[must_use]
    pub fn label(&self, name: &str, now: Timestamp) -> Arc<str> {
        self.see(name, now).map_or_else(|| OTHER.into(), |(label, _)| label)
    }

    /// Label value and counters of `name`; `None` if it has no label value of its own.
    fn see(&self, name: &str, now: Timestamp) -> Option<(Arc<str>, Arc<T>)> {
        let mut state = self.state.lock();
        if now.since(state.turned) >= TURN {
            state.turned = now;
            state.turn();
        }
        let known = state.shown.get_key_value(name).map(|(label, shown)| (label.clone(), shown.counters.clone()));
        if known.is_some() {
            state.shown.get_mut(name).into_iter().for_each(|shown| shown.seen += 1);
            return known;
        }
        if name.is_empty() || name == OTHER || name.len() > MAX_NAME_BYTES {
            return None;
        }
        let stays = state.allowed.contains(name);
        if stays || state.has_place() {
            let label: Arc<str> = name.into();
            return Some((label.clone(), state.show(label, 1, stays)));
        }
        state.watch(name);
        None
    }

    /// Calls `look` with each label value and its counters.
    pub fn each<E>(&self, mut look: impl FnMut(&str, &T) -> Result<(), E>) -> Result<(), E> {
        let shown: Vec<_> = {
            let state = self.state.lock();
            state.shown.iter().map(|(name, shown)| (name.clone(), shown.counters.clone())).collect()
        };
        shown.iter().try_for_each(|(name, counters)| look(name, counters))?;
        look(OTHER, &self.other)
    }
}

impl<T: Default> NameState<T> {
    fn has_place(&self) -> bool {
        self.shown.values().filter(|shown| !shown.stays).count() < self.top
    }

    fn show(&mut self, name: Arc<str>, seen: u64, stays: bool) -> Arc<T> {
        let counters = Arc::<T>::default();
        self.shown.insert(name, Shown { counters: counters.clone(), seen, stays });
        counters
    }

    fn watch(&mut self, name: &str) {
        if let Some(watched) = self.watched.iter_mut().find(|w| *w.name == *name) {
            watched.seen += 1;
        } else if self.watched.len() < self.top * WATCHED {
            self.watched.push(Watched { name: name.into(), seen: 1, doubtful: 0 });
        } else if let Some(rarest) = self.watched.iter_mut().min_by_key(|w| w.seen) {
            *rarest = Watched { name: name.into(), seen: rarest.seen + 1, doubtful: rarest.seen };
        }
    }

    /// Replaces names by much more frequent ones, and restarts the counts.
    fn turn(&mut self) {
        let mut watched = std::mem::take(&mut self.watched);
        watched.sort_by_key(|w| std::cmp::Reverse(w.seen - w.doubtful));
        for newcomer in watched {
            let certain = newcomer.seen - newcomer.doubtful;
            let rarest = self.shown.iter().filter(|(_, s)| !s.stays).min_by_key(|(_, s)| s.seen);
            let Some((name, seen)) = rarest.map(|(name, shown)| (name.clone(), shown.seen)) else { break };
            if certain < seen * TIMES + MARGIN {
                break;
            }
            self.shown.remove(&name);
            self.show(newcomer.name, certain, false);
        }
        self.shown.values_mut().for_each(|shown| shown.seen = 0);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

    use super::*;
    use prometheus_client::metrics::counter::Counter;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    fn names(allow: &[&str], top: usize) -> Names<Counter> {
        let names = Names::default();
        names.bound(&NameSettings { allow: allow.iter().map(|n| (*n).to_owned()).collect(), top });
        names
    }

    fn shown(names: &Names<Counter>) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        let noted = names.each(|name, counter| {
            all.push((name.to_owned(), counter.get()));
            Ok::<_, ()>(())
        });
        assert_eq!(noted, Ok(()));
        all.sort();
        all
    }

    #[test]
    fn thousands_of_made_up_names_make_no_more_series_than_there_are_places() {
        let names = names(&["ours"], 5);
        let mut total = 0;
        for minute in 0..5 {
            for i in 0..10_000 {
                let hostile = format!("{minute}\"}} evil{{x=\"{i}");
                names.of(&hostile, at(60 * minute + 61)).inc();
                total += 1;
            }
            names.of("ours", at(60 * minute + 61)).inc();
            total += 1;
            assert!(shown(&names).len() <= 7, "five places, the operator's own, and the rest");
        }
        let all = shown(&names);
        assert_eq!(all.iter().map(|(_, count)| count).sum::<u64>(), total, "nothing is lost");
        assert!(all.contains(&("ours".to_owned(), 5)), "{all:?}");
        assert!(names.state.lock().watched.len() <= 20);
        names.of(&"long".repeat(100), at(400)).inc();
        assert_eq!(shown(&names).len(), all.len());
    }

    #[test]
    fn who_is_seen_most_often_gets_a_place_from_who_is_not() {
        let names = names(&[], 2);
        for name in ["junk1", "junk2"] {
            names.of(name, at(100)).inc();
        }
        for i in 0..1_000 {
            names.of(&format!("noise{i}"), at(101)).inc();
            names.of("busy", at(101)).inc();
            names.of("busier", at(101)).inc_by(2);
        }
        assert_eq!(
            shown(&names).iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["junk1", "junk2", "other"]
        );
        names.of("busy", at(161)).inc();
        names.of("busier", at(161)).inc();
        let all = shown(&names);
        assert_eq!(all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["busier", "busy", "other"]);
        assert_eq!(all.first().unwrap().1, 1, "counted from the moment it has a place");
        for _ in 0..15 {
            names.of("rare", at(222)).inc();
        }
        for name in ["busy", "busier"] {
            for _ in 0..10 {
                names.of(name, at(222)).inc();
            }
        }
        names.of("busy", at(283)).inc();
        assert!(!shown(&names).iter().any(|(name, _)| name == "rare"), "places do not go back and forth");
    }

    #[test]
    fn without_places_only_the_operators_names_are_shown() {
        let names = names(&["a"], 0);
        for name in ["a", "b", "", OTHER] {
            names.of(name, at(1)).inc();
        }
        assert_eq!(shown(&names), [("a".to_owned(), 1), (OTHER.to_owned(), 3)]);
    }
}
