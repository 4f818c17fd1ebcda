//! The models in use, and circuit breakers for failing tokenizers. No I/O: times are arguments.

use ahash::AHashMap;
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// Time from a failure to the first probe, 1 s; later pauses double up to the probe interval.
pub(crate) const DEFAULT_FIRST_RETRY: Duration = Duration::from_secs(1);

/// The reason for which a model's tokenizer is not called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenizerRefusal {
    /// It has failed, and no probe has succeeded since.
    Unhealthy,
    /// The limit of models is reached.
    Full,
}

/// The result of a probe of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Probe {
    /// The probe returned tokens.
    Succeeded,
    /// The probe failed through the servers' fault.
    Failed,
    /// The servers do not have the model.
    Unknown,
    /// No server was available for the probe.
    NoEndpoint,
}

/// State of one model's tokenizer.
#[derive(Clone, Copy, Debug)]
struct ModelCircuit {
    last_used: Timestamp,
    /// Time of the next probe, unless a call succeeds before.
    next_probe: Timestamp,
    probing: bool,
    /// Whether it has returned tokens at least once, which proves that the model exists.
    proven: bool,
    /// Number of failures since the last success; 0 means healthy.
    failures: u32,
}

/// The models in use with the state of their tokenizers.
#[derive(Debug)]
pub(crate) struct Models {
    entries: AHashMap<Arc<str>, ModelCircuit>,
    max_models: usize,
    probe_interval: Duration,
    idle_timeout: Duration,
}

impl Models {
    /// Creates an empty set of models.
    #[must_use]
    pub(crate) fn new(max_models: usize, probe_interval: Duration, idle_timeout: Duration) -> Self {
        Self { entries: AHashMap::new(), max_models, probe_interval, idle_timeout }
    }

    /// Checks whether the tokenizer of a request's `model` may be called. At the limit, a new name replaces one that
    /// has never returned tokens, but never one that has.
    ///
    /// # Errors
    /// [`TokenizerRefusal`] with the reason for which it must not be called.
    pub(crate) fn admit(&mut self, model: &str, now: Timestamp) -> Result<(), TokenizerRefusal> {
        if let Some(entry) = self.entries.get_mut(model) {
            entry.last_used = now;
            return if entry.failures == 0 { Ok(()) } else { Err(TokenizerRefusal::Unhealthy) };
        }
        if self.entries.len() >= self.max_models {
            let unproven = self.entries.iter().filter(|(_, e)| !e.proven).min_by_key(|(_, e)| e.last_used);
            let gone = unproven.map(|(name, _)| name.clone()).ok_or(TokenizerRefusal::Full)?;
            self.entries.remove(&gone);
        }
        if self.max_models == 0 {
            return Err(TokenizerRefusal::Full);
        }
        let next_probe = now.after(self.probe_interval);
        let entry = ModelCircuit { last_used: now, next_probe, probing: false, proven: false, failures: 0 };
        self.entries.insert(model.into(), entry);
        Ok(())
    }

    /// Records a request that needed no call: the model is in use.
    pub(crate) fn touch(&mut self, model: &str, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(model) {
            entry.last_used = now;
        }
    }

    /// Whether a model has returned tokens.
    #[must_use]
    pub(crate) fn is_proven(&self, model: &str) -> bool {
        self.entries.get(model).is_some_and(|entry| entry.proven)
    }

    /// Records a successful call. An unhealthy model stays so, since the call may have begun before the failure.
    pub(crate) fn succeeded(&mut self, model: &str, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(model) {
            entry.proven = true;
            if entry.failures == 0 {
                entry.next_probe = now.after(self.probe_interval);
            }
        }
    }

    /// Records a failure of the servers. Returns true when it made the model unhealthy.
    pub(crate) fn failed(&mut self, model: &str, now: Timestamp) -> bool {
        let retry = retry_after(1, self.probe_interval);
        match self.entries.get_mut(model) {
            Some(entry) if entry.failures == 0 => {
                entry.failures = 1;
                entry.next_probe = now.after(retry);
                true
            }
            _ => false,
        }
    }

    /// Records that the servers rejected the request. This is not a failure, but a name that never
    /// returned tokens may not exist.
    pub(crate) fn refused(&mut self, model: &str) {
        if self.entries.get(model).is_some_and(|e| !e.proven && e.failures == 0) {
            self.entries.remove(model);
        }
    }

    /// Returns the models to probe now.
    pub(crate) fn due_probes(&mut self, now: Timestamp) -> Vec<Arc<str>> {
        let due = self.entries.iter_mut().filter(|(_, e)| !e.probing && e.next_probe <= now);
        due.map(|(name, entry)| {
            entry.probing = true;
            name.clone()
        })
        .collect()
    }

    /// Records the result of a probe. Returns true when the model has recovered, or has just become unhealthy.
    pub(crate) fn probed(&mut self, model: &str, outcome: Probe, now: Timestamp) -> bool {
        let Some(entry) = self.entries.get_mut(model) else { return false };
        entry.probing = false;
        let before = entry.failures;
        match outcome {
            Probe::Succeeded => {
                entry.failures = 0;
                entry.proven = true;
                entry.next_probe = now.after(self.probe_interval);
                before > 0
            }
            Probe::Failed => {
                entry.failures = before.saturating_add(1);
                entry.next_probe = now.after(retry_after(entry.failures, self.probe_interval));
                before == 0
            }
            Probe::NoEndpoint => {
                entry.next_probe = now.after(retry_after(1, self.probe_interval));
                false
            }
            Probe::Unknown => {
                self.entries.remove(model);
                false
            }
        }
    }

    /// Removes the models without recent requests.
    pub(crate) fn close_unused(&mut self, now: Timestamp) -> Vec<Arc<str>> {
        let idle: Vec<_> = (self.entries.iter())
            .filter(|(_, e)| now >= e.last_used.after(self.idle_timeout))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &idle {
            self.entries.remove(name);
        }
        idle
    }

    /// Returns when the next action is due, if nothing happens before.
    #[must_use]
    pub(crate) fn next_wake(&self) -> Option<Timestamp> {
        let wakes = self.entries.values().map(|e| {
            let unused = e.last_used.after(self.idle_timeout);
            if e.probing { unused } else { unused.min(e.next_probe) }
        });
        wakes.min()
    }

    /// Returns the number of models in use.
    #[must_use]
    pub(crate) fn active(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of models whose tokenizer fails.
    #[must_use]
    pub(crate) fn unhealthy(&self) -> usize {
        self.entries.values().filter(|e| e.failures > 0).count()
    }
}

/// Returns the time from the last of `failures` consecutive failures to the next probe.
fn retry_after(failures: u32, probe_interval: Duration) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    DEFAULT_FIRST_RETRY.saturating_mul(1 << doublings).min(probe_interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn models(max: usize) -> Models {
        Models::new(max, Duration::from_secs(30), Duration::from_secs(300))
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * S)
    }

    #[test]
    fn failure_opens_the_circuit_until_a_probe_succeeds() {
        let mut m = models(2);
        assert_eq!(m.admit("a", at(0)), Ok(()));
        m.succeeded("a", at(0));
        assert!(m.failed("a", at(10)), "the first failure changes the state");
        assert!(!m.failed("a", at(10)), "the second does not");
        assert_eq!(m.admit("a", at(10)), Err(TokenizerRefusal::Unhealthy));
        m.succeeded("a", at(10));
        assert_eq!(
            m.admit("a", at(10)),
            Err(TokenizerRefusal::Unhealthy),
            "a success of an earlier call is not a probe"
        );
        // Probes follow after 1, 2, 4, 8, 16, 30, 30 s.
        let mut now = 10;
        for wait in [1, 2, 4, 8, 16, 30, 30] {
            m.admit("a", at(now)).unwrap_err();
            assert_eq!(m.next_wake(), Some(at(now + wait)));
            assert!(m.due_probes(at(now + wait - 1)).is_empty());
            now += wait;
            assert_eq!(m.due_probes(at(now)), [Arc::<str>::from("a")]);
            assert!(m.due_probes(at(now)).is_empty(), "one probe at a time");
            assert!(!m.probed("a", Probe::Failed, at(now)));
        }
        assert_eq!(m.unhealthy(), 1);
        assert!(m.probed("a", Probe::Succeeded, at(now)), "the recovery changes the state");
        assert_eq!((m.unhealthy(), m.admit("a", at(now))), (0, Ok(())));
    }

    #[test]
    fn empty_pool_changes_nothing() {
        let mut m = models(2);
        m.admit("a", at(0)).unwrap();
        m.due_probes(at(30));
        assert!(!m.probed("a", Probe::NoEndpoint, at(30)));
        assert_eq!((m.unhealthy(), m.next_wake()), (0, Some(at(31))));
        m.failed("a", at(30));
        m.due_probes(at(31));
        assert!(!m.probed("a", Probe::NoEndpoint, at(31)));
        assert_eq!((m.unhealthy(), m.next_wake()), (1, Some(at(32))));
    }

    #[test]
    fn model_with_recent_success_is_not_probed() {
        let mut m = models(2);
        m.admit("a", at(0)).unwrap();
        m.succeeded("a", at(20));
        assert!(m.due_probes(at(49)).is_empty());
        assert_eq!(m.due_probes(at(50)), [Arc::<str>::from("a")]);
        assert!(m.probed("a", Probe::Failed, at(50)), "a failed probe makes it unhealthy");
        assert_eq!(m.admit("a", at(51)), Err(TokenizerRefusal::Unhealthy));
    }

    #[test]
    fn unused_models_are_removed() {
        let mut m = models(2);
        m.admit("a", at(0)).unwrap();
        m.admit("b", at(0)).unwrap();
        m.touch("b", at(100));
        for name in m.due_probes(at(30)) {
            m.probed(&name, Probe::Succeeded, at(299));
        }
        assert_eq!(m.next_wake(), Some(at(300)));
        assert!(m.close_unused(at(299)).is_empty());
        assert_eq!(m.close_unused(at(300)), [Arc::<str>::from("a")]);
        assert_eq!(m.close_unused(at(400)), [Arc::<str>::from("b")]);
        assert_eq!((m.active(), m.next_wake()), (0, None));
    }

    #[test]
    fn invented_names_do_not_displace_real_models() {
        let mut m = models(3);
        for i in 0..50 {
            m.admit(&format!("invented-{i}"), at(i)).unwrap();
        }
        assert_eq!(m.active(), 3);
        for name in ["a", "b", "c"] {
            m.admit(name, at(100)).unwrap();
            m.succeeded(name, at(100));
        }
        assert_eq!(m.admit("d", at(101)), Err(TokenizerRefusal::Full));
        assert_eq!(m.admit("a", at(101)), Ok(()));
        // Rejections do not count against a proven model.
        m.refused("a");
        assert_eq!(m.active(), 3);
        m.close_unused(at(400));
        m.admit("d", at(400)).unwrap();
        m.refused("d");
        assert_eq!(m.active(), 1, "a stays, d does not exist");
        m.due_probes(at(500));
        m.probed("a", Probe::Unknown, at(500));
        assert_eq!(m.active(), 0);
        assert_eq!(models(0).admit("a", at(0)), Err(TokenizerRefusal::Full));
    }
}
