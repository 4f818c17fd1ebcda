//! Readiness of a process whose pools are InferencePools by name. It is not ready while none of them exists, so that a
//! gateway uses its configured behaviour without a picker. A single existing pool keeps it ready.

use crate::PoolFeeds;
use attache_serving::health::{Latch, Readiness};
use futures_util::future::select_all;
use std::future::pending;
use tokio::sync::watch;

/// Name of the readiness condition.
const EXISTS: &str = "an InferencePool that exists";

/// For each pool, whether it is missing; `None` for a pool that needs no InferencePool.
type Pools = Vec<Option<watch::Receiver<bool>>>;

/// The current pools, for the task that holds readiness back.
#[derive(Debug, Default)]
pub(crate) struct Presence(watch::Sender<Pools>);

impl Presence {
    /// Holds `readiness` back from now on, until this value is dropped.
    pub(crate) fn hold(&self, readiness: Readiness) {
        tokio::spawn(hold(readiness, self.0.subscribe()));
    }

    /// Sets the current pools.
    pub(crate) fn set<'a>(&self, pools: impl Iterator<Item = &'a PoolFeeds>) {
        self.0.send_replace(pools.map(|feeds| feeds.kube_stats().map(|stats| stats.pool_missing())).collect());
    }
}

async fn hold(readiness: Readiness, mut pools: watch::Receiver<Pools>) {
    let mut held: Option<Latch> = None;
    loop {
        let known: Option<Vec<_>> = pools.borrow_and_update().iter().cloned().collect();
        let mut known = known.unwrap_or_default();
        let none_exists = !known.is_empty() && known.iter_mut().all(|missing| *missing.borrow_and_update());
        held = match held {
            Some(latch) if !none_exists => {
                latch.release();
                None
            }
            None if none_exists => Some(readiness.latch(EXISTS)),
            held => held,
        };
        tokio::select! {
            changed = pools.changed() => if changed.is_err() { return },
            () = any_changes(&mut known) => {}
        }
    }
}

/// Waits until one of the pools changes. Ended pools change no more.
async fn any_changes(all: &mut [watch::Receiver<bool>]) {
    let changes = all.iter_mut().map(|missing| {
        Box::pin(async move {
            if missing.changed().await.is_err() {
                pending().await
            }
        })
    });
    let changes: Vec<_> = changes.collect();
    if changes.is_empty() {
        return pending().await;
    }
    select_all(changes).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn presence(pools: &[Option<&watch::Sender<bool>>]) -> Pools {
        pools.iter().map(|missing| missing.map(watch::Sender::subscribe)).collect()
    }

    async fn until(readiness: &Readiness, ready: bool) {
        while readiness.is_ready() != ready {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn readiness_needs_one_inference_pool_that_exists() {
        let (readiness, pools) = (Readiness::default(), Presence::default());
        pools.hold(readiness.clone());
        let (a, b) = (watch::Sender::new(false), watch::Sender::new(true));
        pools.0.send_replace(presence(&[Some(&b)]));
        until(&readiness, false).await;
        assert_eq!(readiness.missing(), [EXISTS]);
        pools.0.send_replace(presence(&[Some(&a), Some(&b)]));
        until(&readiness, true).await;
        a.send_replace(true);
        until(&readiness, false).await;
        b.send_replace(false);
        until(&readiness, true).await;
        b.send_replace(true);
        until(&readiness, false).await;
        pools.0.send_replace(presence(&[Some(&a), None]));
        until(&readiness, true).await;
    }
}
