//! The task that follows the `InferencePool`s which a selector finds, and their configurations.

use super::catalogue::{CONFIG_LABEL, Catalogue, Finding};
use super::follow::{Subject, WatchUpdate};
use super::informer::Informers;
use super::objects::ObjectKind;
use super::table::Unreadable;
use attache_pool::source::PoolGroup;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Selects the `InferencePool`s to find.
#[derive(Clone, Debug)]
pub struct PoolQuery {
    /// Namespace of the pools and their `ConfigMap`s.
    pub namespace: String,
    /// API group of the pools.
    pub group: PoolGroup,
    /// Label selector of the pools.
    pub selector: String,
}

/// Most changes that are applied in one step.
const BATCH: usize = 64;

/// Publishes the pools that exist to `found` until `shutdown`.
pub async fn run(
    informers: Arc<Informers>,
    query: PoolQuery,
    found: watch::Sender<Finding>,
    shutdown: CancellationToken,
) {
    let listen = |kind, labels| informers.listen(&Subject { kind, namespace: query.namespace.clone(), labels });
    let pools = ObjectKind::Pool(query.group);
    let mut of_pools = listen(pools, None);
    let mut of_configs = listen(ObjectKind::ConfigMap, Some(CONFIG_LABEL.to_owned()));
    let mut catalogue = Catalogue::new(query.selector.clone());
    loop {
        let (kind, batch) = tokio::select! {
            () = shutdown.cancelled() => return,
            batch = next_of(&mut of_pools) => (pools, batch),
            batch = next_of(&mut of_configs) => (ObjectKind::ConfigMap, batch),
        };
        let mut changed = false;
        for updates in batch {
            changed |= take_in(&mut catalogue, kind, updates, &query.namespace);
        }
        if changed {
            let now = catalogue.found();
            found.send_if_modified(|before| {
                let other = *before != now;
                *before = now;
                other
            });
        }
    }
}

async fn next_of(updates: &mut mpsc::Receiver<WatchUpdate>) -> Vec<WatchUpdate> {
    let mut batch = Vec::new();
    if updates.recv_many(&mut batch, BATCH).await == 0 {
        return std::future::pending().await;
    }
    batch
}

fn take_in(catalogue: &mut Catalogue, kind: ObjectKind, updates: WatchUpdate, namespace: &str) -> bool {
    match updates {
        WatchUpdate::Change(change) => {
            catalogue.apply(kind, change).unwrap_or_else(|Unreadable { name, reason, kept }| {
                let kind = kind.naming().kind;
                if kept {
                    tracing::error!(namespace, kind, name, reason, "invalid object; keeping its last valid version");
                } else {
                    tracing::error!(
                        namespace,
                        kind,
                        name,
                        reason,
                        "invalid object ignored; it has no last valid version"
                    );
                }
                true
            })
        }
        // Known pools stay. Pools do not wait for configurations that may not be read, but for an API
        // server that does not answer.
        WatchUpdate::Failed(setback) if kind == ObjectKind::ConfigMap => {
            !setback.is_loss && catalogue.configs_resolved()
        }
        WatchUpdate::Failed(setback) => (setback.refused || setback.not_installed) && catalogue.refused(),
        WatchUpdate::Recovered => false,
    }
}
