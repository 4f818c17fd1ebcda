//! Reloads of the configuration: their counters, and the outcome of the last one.

use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Outcome of the last reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastReload {
    /// When it happened.
    pub at: Timestamp,
    /// Why the configuration was refused; `None` if it is in effect.
    pub refusal: Option<String>,
}

/// Counters of reloads.
#[derive(Debug)]
pub struct Reloads {
    applied: Counter,
    refused: Counter,
    /// 1 unless the latest configuration was invalid.
    successful: Gauge,
    last: Mutex<Option<LastReload>>,
}

impl Reloads {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let reloads = Self {
            applied: Counter::default(),
            refused: Counter::default(),
            successful: Gauge::default(),
            last: Mutex::default(),
        };
        reloads.successful.set(1);
        registry.register("config_reloads", "configurations applied after the first", reloads.applied.clone());
        let help = "invalid configurations; the previous one stayed in effect";
        registry.register("config_reload_failures", help, reloads.refused.clone());
        let help =
            "1 if the latest configuration is in effect, 0 if it was invalid and the previous one stayed in effect";
        registry.register("config_last_reload_successful", help, reloads.successful.clone());
        reloads
    }

    /// Records that a configuration was applied, or why it was refused.
    pub fn record(&self, outcome: Result<(), String>, at: Timestamp) {
        let refusal = outcome.err();
        self.successful.set(i64::from(refusal.is_none()));
        let counter = if refusal.is_none() { &self.applied } else { &self.refused };
        counter.inc();
        *self.last.lock() = Some(LastReload { at, refusal });
    }

    /// Outcome of the last reload; `None` before the first.
    #[must_use]
    pub fn last(&self) -> Option<LastReload> {
        self.last.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_is_kept_until_a_configuration_is_applied() {
        let reloads = Reloads::register(&mut Registry::default());
        assert_eq!(reloads.last(), None);
        reloads.record(Err("pools: missing".to_owned()), Timestamp(5));
        assert_eq!(reloads.last().and_then(|last| last.refusal).as_deref(), Some("pools: missing"));
        assert_eq!((reloads.refused.get(), reloads.successful.get()), (1, 0));
        reloads.record(Ok(()), Timestamp(7));
        assert_eq!(reloads.last(), Some(LastReload { at: Timestamp(7), refusal: None }));
        assert_eq!((reloads.applied.get(), reloads.refused.get(), reloads.successful.get()), (1, 1, 1));
    }
}
