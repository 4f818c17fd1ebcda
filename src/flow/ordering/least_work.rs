//! `least-work`: short work goes before long work, which ages.
//!
//! ```text
//! key = arrival + min(stretch * expected work, maxDelay)
//! ```
//!
//! The key of a queued request does not change, and newcomers get later keys: this is the ageing. It gives two
//! guarantees. A request goes before all that arrive more than `maxDelay` after it, so its wait is at most that
//! of first come, first served for an arrival `maxDelay` later. And short work delays a request by at most
//! `stretch` times the request's own work: a prompt that takes a hundredth of another's time does not wait for
//! it, unless it arrives very much later.
//!
//! Useful because the queue is here and not in the engines: an engine takes prompts in order of arrival, so one of
//! 100,000 tokens delays a hundred short ones behind it. When not: requests are alike; then the order is that of
//! arrival. Source: ageing of shortest job first. The stretch bounds the slowdown, as in highest response ratio next,
//! whose keys would have to be computed anew for each turn.

use super::{Facts, Ordering};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{params, section};
use attache_types::parameters;
use serde_json::Value;
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "least-work",
    aliases: &[],
    summary: "Short work goes before long work, which is delayed for a bounded time at most.",
    source: "attache: shortest job first with ageing",
    parameters: section::<LeastWork>,
    build: |value: &Value| params::<LeastWork>(value).map(|p| Box::new(p) as Box<dyn Ordering>),
};

/// 10: a request may be delayed by ten times its own work.
const DEFAULT_STRETCH: f64 = 10.0;
/// 10 s: a sixth of the time that clients usually wait, so that delayed long work is still served.
pub const DEFAULT_MAX_DELAY: Duration = Duration::from_secs(10);

parameters! {
    /// Shortest work first, with ageing.
    #[derive(Clone, Copy)]
    pub struct LeastWork {
        /// Later requests delay a request by at most this multiple of its own work.
        "stretch" => stretch: f64 { default: DEFAULT_STRETCH; range: 0.0..; unit: "factor"; },
        /// Longest delay by later requests. The default is a sixth of the time that clients usually wait.
        "maxDelay" => max_delay: Duration { default: DEFAULT_MAX_DELAY; },
    }
}

impl Default for LeastWork {
    fn default() -> Self {
        Self { stretch: DEFAULT_STRETCH, max_delay: DEFAULT_MAX_DELAY }
    }
}

impl LeastWork {
    /// A request waits for work that arrived after it during `stretch` times its own work, and during `max_delay` at most.
    pub(crate) const fn new(stretch: f64, max_delay: Duration) -> Self {
        Self { stretch, max_delay }
    }
}

impl Ordering for LeastWork {
    fn key(&self, facts: &Facts) -> u64 {
        let longest = self.max_delay.as_secs_f64();
        // An estimate that is NaN counts as long work.
        let delay = (self.stretch * facts.work).max(0.0);
        let delay = if delay < longest { Duration::from_secs_f64(delay) } else { self.max_delay };
        facts.arrived.after(if facts.work.is_nan() { self.max_delay } else { delay }).0
    }
}
