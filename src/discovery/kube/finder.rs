//! The task that follows which `InferencePool`s a selector finds, and what configurations they have.

use super::catalogue::{CONFIG_LABEL, Catalogue, Finding};
use super::follow::{Subject, Told};
use super::informer::Informers;
use super::objects::Kind;
use super::table::Unreadable;
use crate::settings::PoolGroup;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// What is looked for.
#[derive(Clone, Debug)]
pub struct Sought {
    /// The namespace of everything.
    pub namespace: String,
    /// The API group of the pools.
    pub group: PoolGroup,
    /// Their labels.
    pub selector: String,
}

/// Changes taken in at a time.
const BATCH: usize = 64;

/// Tells `found` until `shutdown` what there is.
pub async fn run(
    informers: Arc<Informers>,
    sought: Sought,
    found: watch::Sender<Finding>,
    shutdown: CancellationToken,
) {
    let listen = |kind, labels| informers.listen(&Subject { kind, namespace: sought.namespace.clone(), labels });
    let pools = Kind::Pool(sought.group);
    let mut of_pools = listen(pools, None);
    let mut of_configs = listen(Kind::ConfigMap, Some(CONFIG_LABEL.to_owned()));
    let mut catalogue = Catalogue::new(sought.selector.clone());
    loop {
        let (kind, batch) = tokio::select! {
            () = shutdown.cancelled() => return,
            batch = next_of(&mut of_pools) => (pools, batch),
            batch = next_of(&mut of_configs) => (Kind::ConfigMap, batch),
        };
        let mut changed = false;
        for told in batch {
            changed |= take_in(&mut catalogue, kind, told, &sought.namespace);
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

async fn next_of(told: &mut mpsc::Receiver<Told>) -> Vec<Told> {
    let mut batch = Vec::new();
    if told.recv_many(&mut batch, BATCH).await == 0 {
        return std::future::pending().await;
    }
    batch
}

fn take_in(catalogue: &mut Catalogue, kind: Kind, told: Told, namespace: &str) -> bool {
    match told {
        Told::Change(change) => catalogue.apply(kind, change).unwrap_or_else(|Unreadable { name, reason, kept }| {
            let kind = kind.naming().kind;
            if kept {
                tracing::error!(namespace, kind, name, reason, "invalid object; keeping its last valid version");
            } else {
                tracing::error!(namespace, kind, name, reason, "invalid object ignored; it has no last valid version");
            }
            true
        }),
        // What is known stays. That nobody may read configurations keeps no pool waiting; that nobody answers for now does.
        Told::Trouble(setback) if kind == Kind::ConfigMap => !setback.is_loss && catalogue.heard_of_configs(),
        Told::Trouble(setback) => (setback.refused || setback.not_installed) && catalogue.refused(),
        Told::Well => false,
    }
}
