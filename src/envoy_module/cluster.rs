//! The cluster: Envoy gets the servers of a pool from Attaché, by whatever means the pool finds them.
//!
//! A task of the picker compares the pool's servers with those that Envoy has. If they differ, it lets Envoy's main
//! thread call [`Cluster::apply`]. Envoy's own load balancing policy chooses among the servers, as in a static cluster.

use crate::pickers::{Picker, Process};
use crate::settings::ClusterSettings;
use attache::app::embedded::Embedded;
use attache_pool::{PoolSnapshot, Roles};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// 50 ms between comparisons. Until the next one, Envoy does not know a new server, and skips it in the lists of decisions.
const PERIOD: Duration = Duration::from_millis(50);

/// A server as Envoy knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host(pub usize);

/// Envoy's functions for a cluster. Only the main thread may call them.
pub trait HostList {
    /// Adds servers. `None`: Envoy refuses all of them.
    fn add(&self, servers: &[SocketAddr]) -> Option<Vec<Host>>;
    /// Removes servers. Requests that they have go on.
    fn remove(&self, hosts: &[Host]);
    /// Lets Envoy use the cluster.
    fn end_start(&self);
}

/// A cluster of Envoy's configuration.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    picker: Arc<Picker>,
    pool: Option<Box<str>>,
    /// How long Envoy waits for the first servers.
    patience: Duration,
    validates: bool,
}

/// The servers of one pool, as the picker and as Envoy know them.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    wanted: Arc<Wanted>,
    /// The servers that Envoy has.
    hosts: Mutex<BTreeMap<SocketAddr, Host>>,
    is_complete: AtomicBool,
}

/// The servers that Envoy is to have. The task of the cluster writes them.
#[derive(Debug, Default)]
struct Wanted {
    servers: Mutex<BTreeSet<SocketAddr>>,
    /// The cluster was dropped: its task ends.
    is_over: AtomicBool,
}

impl ClusterConfig {
    /// Starts the picker of these settings.
    ///
    /// # Errors
    /// If its configuration file is invalid.
    pub fn open(settings: &ClusterSettings, process: Process) -> Result<Self, String> {
        let picker = Picker::open(&settings.config_file, settings.outputs(), process)?;
        let patience = Duration::from_secs(settings.ready_timeout_seconds);
        Ok(Self { picker, pool: settings.pool.as_deref().map(Box::from), patience, validates: process.validates })
    }
}

impl Cluster {
    /// A cluster without servers.
    #[must_use]
    pub fn new(config: &ClusterConfig) -> Self {
        let (wanted, hosts) = (Arc::default(), Mutex::default());
        Self { config: config.clone(), wanted, hosts, is_complete: AtomicBool::new(false) }
    }

    /// Starts to follow the pool. `changed` makes the main thread call [`Self::apply`]; any thread may call it.
    pub fn start(&self, envoy: &dyn HostList, changed: impl Fn() + Send + 'static) {
        if self.config.validates {
            return self.complete(envoy);
        }
        let Self { config: ClusterConfig { picker, pool, patience, .. }, wanted, .. } = self;
        let (picker, wanted, pool, patience) = (picker.clone(), wanted.clone(), pool.clone(), *patience);
        let follow = move || {
            if !picker.wait_until_ready(patience) {
                tracing::warn!("a cluster of Envoy has no servers yet: the pools are not known in time");
                changed();
                while !picker.wait_until_ready(PERIOD) {
                    if wanted.is_over.load(Ordering::Acquire) {
                        return;
                    }
                }
            }
            if let Some(embedded) = picker.serving() {
                let following = wanted.follow(embedded.clone(), pool, changed);
                drop(embedded.runtime.spawn(following));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("attache-cluster".to_owned()).spawn(follow) {
            tracing::error!(%error, "no thread waits for the servers of a cluster; it stays empty");
            self.complete(envoy);
        }
    }

    /// Gives Envoy the servers of the pool. Runs on the main thread.
    pub fn apply(&self, envoy: &dyn HostList) {
        let wanted = self.wanted.servers.lock().clone();
        let mut hosts = self.hosts.lock();
        let new: Vec<SocketAddr> = wanted.iter().filter(|server| !hosts.contains_key(server)).copied().collect();
        if !new.is_empty() {
            match envoy.add(&new) {
                Some(added) => hosts.extend(new.iter().copied().zip(added)),
                None => tracing::error!(endpoints = new.len(), "Envoy refuses servers of a pool"),
            }
        }
        let gone: Vec<Host> = hosts.iter().filter(|(server, _)| !wanted.contains(server)).map(|(_, at)| *at).collect();
        if !gone.is_empty() {
            envoy.remove(&gone);
            hosts.retain(|server, _| wanted.contains(server));
        }
        drop(hosts);
        self.complete(envoy);
    }

    /// Ends Envoy's wait for the first servers.
    fn complete(&self, envoy: &dyn HostList) {
        if !self.is_complete.swap(true, Ordering::AcqRel) {
            envoy.end_start();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.wanted.is_over.store(true, Ordering::Release);
    }
}

impl Wanted {
    /// Follows the pool until the cluster or the picker ends. The first call of `changed` comes at once.
    async fn follow(self: Arc<Self>, embedded: Embedded, pool: Option<Box<str>>, changed: impl Fn()) {
        let picker = &embedded.processor.picker;
        let (mut ticks, mut is_first, mut is_known) = (interval(PERIOD), true, true);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.is_over.load(Ordering::Acquire) {
            ticks.tick().await;
            let config = picker.config();
            let found = match (&pool, config.pools()) {
                (Some(name), _) => config.pool(name),
                (None, [pool]) => Some(pool),
                (None, _) => None,
            };
            // A reload may remove the pool. Envoy keeps its servers until it is there again.
            if found.is_none() && std::mem::take(&mut is_known) {
                tracing::error!(pool = pool.as_deref(), "`pool` of a cluster must name one of the pools");
            }
            is_known |= found.is_some();
            // A pool that a reload has just added has no servers yet.
            let snapshot = found.map(|runtime| runtime.pool.store.load()).filter(|snapshot| snapshot.synced);
            let is_new = snapshot.is_some_and(|snapshot| {
                let servers = servers(&snapshot);
                let mut wanted = self.servers.lock();
                let is_new = *wanted != servers;
                *wanted = servers;
                is_new
            });
            if std::mem::take(&mut is_first) | is_new {
                changed();
            }
        }
    }
}

/// The servers that may get requests from Envoy: those for prefill get them from Attaché.
fn servers(snapshot: &PoolSnapshot) -> BTreeSet<SocketAddr> {
    let decode = snapshot.endpoints.iter().filter(|state| state.serves(Roles::DECODE));
    decode.map(|state| state.endpoint.spec.address).collect()
}

#[cfg(test)]
mod tests;
