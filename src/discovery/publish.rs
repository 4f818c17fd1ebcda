//! The writer task of a pool: the only one that changes the snapshots that requests read.

use attache_pool::ports::{AIBRIX_METRIC_PORT_LABEL, AIBRIX_PORT_LABEL, BOOTSTRAP_PORT_LABEL, port};
use attache_pool::{EndpointSpec, PoolEvent, PoolSnapshot, PoolWriter, Published, SnapshotStore};
use attache_record::PoolTape;
use attache_record::tape::PoolChange;
use std::collections::HashSet;
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
/// Most endpoints whose invalid labels are remembered.
const MAX_TOLD: usize = 4_096;
/// Labels whose value replaces a port of the configuration. The feed of KV events checks its own.
const PORT_LABELS: [&str; 3] = [AIBRIX_PORT_LABEL, AIBRIX_METRIC_PORT_LABEL, BOOTSTRAP_PORT_LABEL];

/// The labels without a port that were logged: each endpoint, label and value once.
#[derive(Debug, Default)]
struct PortLabels(HashSet<(Arc<str>, &'static str, Arc<str>)>);

impl PortLabels {
    fn check(&mut self, endpoint: &EndpointSpec) {
        for label in PORT_LABELS {
            let Some(value) = endpoint.labels.get(label).filter(|value| port(value).is_none()) else { continue };
            if self.0.len() >= MAX_TOLD {
                self.0.clear();
            }
            if self.0.insert((endpoint.name.clone(), label, value.clone())) {
                tracing::warn!(
                    endpoint = %endpoint.name, label, %value,
                    "label is not a port from 1 to 65535; the port of the configuration is used"
                );
            }
        }
    }
}

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
    let mut port_labels = PortLabels::default();
    let mut take_in = |writer: &mut PoolWriter, batch: &mut Vec<PoolEvent>| {
        tape.change(|report| {
            for event in batch.drain(..) {
                if let PoolEvent::Endpoints { endpoints, .. } = &event {
                    endpoints.iter().for_each(|endpoint| port_labels.check(endpoint));
                }
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
