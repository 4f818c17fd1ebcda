//! Endpoints that are listed in flags or in the configuration file.

use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, PoolEvent};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Sends the configured endpoints at start and whenever `endpoints` changes. Ends on `shutdown`, or
/// when either channel is closed.
pub async fn run(
    source: SourceId,
    mut endpoints: watch::Receiver<Vec<EndpointSpec>>,
    events: mpsc::Sender<PoolEvent>,
    shutdown: CancellationToken,
) {
    loop {
        let named = endpoints.borrow_and_update().iter().cloned().map(Arc::new).collect();
        let event = PoolEvent::Endpoints { source, endpoints: named };
        let sent_and_changed = async { events.send(event).await.is_ok() && endpoints.changed().await.is_ok() };
        tokio::select! {
            () = shutdown.cancelled() => return,
            goes_on = sent_and_changed => if !goes_on { return },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(port: u16) -> EndpointSpec {
        EndpointSpec::at(([127, 0, 0, 1], port).into())
    }

    #[tokio::test]
    async fn says_the_endpoints_at_start_and_after_each_change() {
        let (change, endpoints) = watch::channel(vec![spec(1)]);
        let (events, mut got) = mpsc::channel(4);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(run(SourceId(7), endpoints, events, shutdown.clone()));
        let ports = |event: Option<PoolEvent>| match event {
            Some(PoolEvent::Endpoints { source: SourceId(7), endpoints }) => {
                endpoints.iter().map(|e| e.address.port()).collect::<Vec<_>>()
            }
            other => panic!("unexpected {other:?}"),
        };
        assert_eq!(ports(got.recv().await), [1]);
        change.send_replace(vec![spec(2), spec(3)]);
        assert_eq!(ports(got.recv().await), [2, 3]);
        shutdown.cancel();
        task.await.unwrap();
    }
}
