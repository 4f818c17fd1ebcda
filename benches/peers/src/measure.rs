//! Clocks and summaries. Times are CPU time of a thread: a busy machine changes them little.

use std::fmt;

/// CPU seconds that a clock has counted.
#[must_use]
pub fn clock(id: libc::clockid_t) -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place to write one timespec to.
    unsafe { libc::clock_gettime(id, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// CPU seconds of the calling thread.
#[must_use]
pub fn cpu() -> f64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Median and the whole range of a few runs.
#[derive(Clone, Debug, Default)]
pub struct Runs(pub Vec<f64>);

impl Runs {
    /// The median.
    #[must_use]
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = self.0.iter().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
        write!(f, "{:8.3} [{low:.3} to {high:.3}]", self.median())
    }
}

/// One figure of each contender, in the order of [`crate::backends::NAMES`], printed with the ratio of ours to the best peer's.
pub fn table(what: &str, unit: &str, figures: &[(&str, Runs)]) {
    let ours = figures.iter().find(|(n, _)| *n == "attache").map(|(_, r)| r.median());
    let peers = figures.iter().filter(|(n, r)| *n != "attache" && !r.0.is_empty());
    let best = peers.min_by(|a, b| a.1.median().total_cmp(&b.1.median()));
    println!("{what} ({unit})");
    for (name, runs) in figures.iter().filter(|(_, r)| !r.0.is_empty()) {
        println!("  {name:10} {runs}");
    }
    if let (Some(ours), Some((name, best))) = (ours, best) {
        println!("  ratio      {:8.2} of {name}", ours / best.median());
    }
}

/// `key=value` among the arguments.
#[must_use]
pub fn argument(key: &str, default: &str) -> String {
    let prefix = format!("{key}=");
    std::env::args().find_map(|a| a.strip_prefix(&prefix).map(str::to_owned)).unwrap_or_else(|| default.to_owned())
}

/// The trace: the first argument without `=`.
#[must_use]
pub fn trace_argument() -> String {
    let found = std::env::args().skip(1).find(|a| !a.contains('='));
    found.expect("the path of a Mooncake trace (conversation_trace.jsonl) as the first argument")
}
