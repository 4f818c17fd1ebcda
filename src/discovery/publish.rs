//! The writer task of a pool: the only one that changes the snapshots that requests read.

use attache_pool::{PoolEvent, PoolSnapshot, PoolWriter, Published, SnapshotStore};
use attache_record::PoolTape;
use attache_record::tape::PoolChange;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Capacity of a writer's channel, events. A feed waits while it is full; no event is dropped.
pub const EVENT_QUEUE: usize = 1_024;
/// Shortest time between two snapshots: a hundred scrapes that end together make one snapshot, and a removed endpoint
/// is out of every decision within 10 ms.
pub const PUBLISH_INTERVAL: Duration = Duration::from_millis(10);
/// Most events that are applied before the time is checked.
const BATCH: usize = 256;

/// Applies `events` to `writer` and publishes snapshots to `store`, at most one every [`PUBLISH_INTERVAL`]. `prepare`
/// sees each snapshot before any request does, and `published` is called after it is visible. `tape` records each
/// change. Ends on `shutdown`, or when all feeds are gone.
pub async fn run(
    mut writer: PoolWriter,
    mut events: mpsc::Receiver<PoolEvent>,
    store: Arc<SnapshotStore>,
    prepare: impl Fn(&PoolSnapshot) + Send,
    published: watch::Sender<Published>,
    tape: PoolTape,
    shutdown: CancellationToken,
) {
    let publish = |writer: &mut PoolWriter| {
        if let Some(snapshot) = writer.snapshot() {
            tape.change(|report| {
                report(PoolChange::Publish);
                prepare(&snapshot);
                store.publish(snapshot);
            });
            published.send_replace(writer.published());
        }
    };
    let take_in = |writer: &mut PoolWriter, batch: &mut Vec<PoolEvent>| {
        tape.change(|report| {
            for event in batch.drain(..) {
                report(PoolChange::Event(&event));
                writer.apply(event);
            }
        });
    };
    let mut batch = Vec::with_capacity(BATCH);
    let mut not_before = Instant::now();
    let mut pending = true;
    loop {
        let received = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep_until(not_before), if pending => None,
            received = events.recv_many(&mut batch, BATCH) => Some(received),
        };
        match received {
            Some(0) => {
                // All feeds are gone; their last events still count.
                publish(&mut writer);
                return;
            }
            Some(_) => {
                take_in(&mut writer, &mut batch);
                pending = true;
            }
            None => {
                publish(&mut writer);
                pending = false;
                not_before = Instant::now() + PUBLISH_INTERVAL;
            }
        }
    }
}

#[cfg(test)]
mod tests;
