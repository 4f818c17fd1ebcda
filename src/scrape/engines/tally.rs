//! Combines the series of a page: totals instead of their parts, and one rank of each replica.
//!
//! SGLang exports a gauge as a total with `priority=""` and once more for each priority. With
//! `--enable-metrics-for-all-schedulers`, each rank of a replica exports the same requests again. Other labels (`dp_rank`,
//! vLLM's `engine`, a source, a reason) divide a value, so their series are added.

use super::super::exposition::Labels;
use ahash::RandomState;
use std::collections::BTreeMap;

/// The label whose empty value marks the total of all priorities.
const PRIORITY_LABEL: &str = "priority";

/// Whether the label numbers a rank inside one replica, such as `tp_rank`. Data-parallel ranks are replicas.
fn is_inner_rank(label: &str) -> bool {
    label.ends_with("_rank") && !matches!(label, "dp_rank" | "attn_dp_rank")
}

/// The combined samples of one row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) seen: bool,
    pub(super) unusable: bool,
    pub(super) sum: f64,
    pub(super) max: f64,
}

impl Tally {
    fn add(&mut self, value: Option<f64>) {
        self.seen = true;
        match value {
            Some(value) => {
                self.sum += value;
                self.max = self.max.max(value);
            }
            None => self.unusable = true,
        }
    }
}

/// Identifies the series that report one value: those that differ in inner ranks only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SeriesKey {
    /// Position of the row.
    row: usize,
    /// Hash of the other labels.
    group: u64,
    /// Hash of the priority; 0 for the total, which therefore precedes its parts.
    priority: u64,
}

/// The series of the rows of one page.
#[derive(Debug, Default)]
pub(super) struct Series {
    hasher: RandomState,
    /// The largest value of each series' ranks; `None` if one of them is invalid.
    values: BTreeMap<SeriesKey, Option<f64>>,
}

impl Series {
    /// Adds a sample of `row`; `value` is `None` if it is invalid. The label `except` does not distinguish series.
    pub(super) fn add(&mut self, row: usize, labels: Labels<'_>, except: Option<&str>, value: Option<f64>) {
        let (mut group, mut priority) = (0u64, 0);
        for (name, text) in labels {
            if name == PRIORITY_LABEL {
                // An empty label is equal to none.
                priority = if text.is_empty() { 0 } else { self.hasher.hash_one(&text).max(1) };
            } else if !is_inner_rank(name) && except != Some(name) {
                // A sum, because servers print labels in any order.
                group = group.wrapping_add(self.hasher.hash_one((name, &text)));
            }
        }
        let largest = |before: &mut Option<f64>| *before = before.zip(value).map(|(before, now)| before.max(now));
        self.values.entry(SeriesKey { row, group, priority }).and_modify(largest).or_insert(value);
    }

    /// Combines the series of each of `rows` rows.
    pub(super) fn tallies(self, rows: usize) -> Vec<Tally> {
        let mut tallies = vec![Tally::default(); rows];
        let mut with_total = None;
        for (SeriesKey { row, group, priority }, value) in self.values {
            if priority == 0 {
                with_total = Some((row, group));
            } else if with_total == Some((row, group)) {
                continue;
            }
            if let Some(tally) = tallies.get_mut(row) {
                tally.add(value);
            }
        }
        tallies
    }
}
