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
use attache_scheduling::plugin::{ParamError, params};
use attache_types::units::parse_duration;
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ordering> = PolicyDescriptor {
    name: "least-work",
    aliases: &[],
    summary: "Short work goes before long work, which is delayed for a bounded time at most.",
    source: "attache: shortest job first with ageing",
    build: |value: &Value| LeastWork::new(value).map(|p| Box::new(p) as Box<dyn Ordering>),
};

/// 10: a request may be delayed by ten times its own work.
pub(crate) const DEFAULT_STRETCH: f64 = 10.0;
/// 10 s: a sixth of the time that clients usually wait, so that delayed long work is still served.
pub const DEFAULT_MAX_DELAY: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    stretch: f64,
    max_delay: Option<String>,
}

impl Default for Params {
    fn default() -> Self {
        Self { stretch: DEFAULT_STRETCH, max_delay: None }
    }
}

/// Shortest work first, with ageing.
#[derive(Clone, Copy, Debug)]
pub struct LeastWork {
    stretch: f64,
    max_delay: Duration,
}

impl Default for LeastWork {
    fn default() -> Self {
        Self { stretch: DEFAULT_STRETCH, max_delay: DEFAULT_MAX_DELAY }
    }
}

impl LeastWork {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { stretch, max_delay } = params(parameters)?;
        if !(0.0..f64::INFINITY).contains(&stretch) {
            return Err(ParamError::value("stretch", stretch, "0 or more is allowed"));
        }
        let max_delay = max_delay.map(|text| parse_duration(&text)).transpose();
        let max_delay = max_delay.map_err(|e| ParamError::new(e).named("maxDelay").under("maxDelay"))?;
        Ok(Self { stretch, max_delay: max_delay.unwrap_or(DEFAULT_MAX_DELAY) })
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
