//! The exchange over NATS.

use super::*;
use anyhow::Context;
use attache_config::settings::{NatsSettings, SyncSettings};
use attache_discovery::watch;
use attache_nats::{NatsConfig, NatsStats};
use attache_pool::PoolEvent;
use attache_serving::tls::CertificateFile;
use attache_sync::{CacheLossSink, ReplicaSettings, SnapshotState, sender_of, token_of};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// Time between two looks at the import of a peer's prefix index.
const SNAPSHOT_POLL: Duration = Duration::from_millis(20);

/// This picker in its cluster.
#[derive(Debug)]
pub(in super::super) struct Sync {
    replica: Arc<Replica>,
    link: Arc<NatsStats>,
    certificate: Option<Arc<CertificateFile>>,
    cache_seed: u64,
    wait_for_snapshot: Duration,
}

impl Sync {
    /// Starts the exchange with other pickers, which ends on `stop`. NATS may be away. They share `pressure`.
    ///
    /// # Errors
    /// If the key or the credentials can't be read, or NATS can't be used with these settings.
    pub(in super::super) async fn start(
        settings: &Settings,
        pressure: Arc<SharedPressure>,
        clock: Clock,
        stop: CancellationToken,
    ) -> anyhow::Result<Option<Self>> {
        let Some(wanted) = &settings.sync else { return Ok(None) };
        let cache_seed = seed(wanted)?;
        warn_of_open_bus(&wanted.nats);
        let random = rng::system_seed();
        let name = wanted.name.clone().or_else(|| std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty()));
        let name = name.unwrap_or_else(|| format!("{random:016x}"));
        let sender = sender_of(&token_of(&name), random);
        let (outbox, queue, link) = attache_nats::outbox();
        let origin = clock.wall(Timestamp(0)).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let origin = u64::try_from(origin.as_millis()).unwrap_or(u64::MAX);
        let identity = ReplicaSettings { name, sender, seed: cache_seed, origin };
        let replica = Arc::new(Replica::new(identity, Arc::new(outbox), pressure));
        let nats = wanted.nats.clone();
        let prefix = nats.subject_prefix.clone();
        let certificate = nats.client_certificate.as_ref().map(|(path, _)| follow(path.clone(), stop.clone()));
        let client = attache_nats::connect(&config(nats), &queue, clock).await?;
        tokio::spawn(attache_nats::run(client, queue, replica.clone(), prefix, clock, stop));
        Ok(Some(Self { replica, link, certificate, cache_seed, wait_for_snapshot: wanted.wait_for_snapshot }))
    }

    /// The metrics of the exchange.
    pub(in super::super) fn collector(&self, clock: Clock) -> SyncCollector {
        SyncCollector { replica: self.replica.clone(), link: self.link(), clock }
    }

    /// Reads the state of the connection to NATS.
    pub(in super::super) fn link(&self) -> Source<LinkStatus> {
        let link = self.link.clone();
        Arc::new(move || LinkStatus { connected: link.connected.load(Relaxed), dropped: link.dropped.load(Relaxed) })
    }

    /// Reads the state of the certificate that this picker shows to NATS; no state before its file could be read. `None`
    /// without one.
    pub(in super::super) fn certificate(&self) -> Option<Source<Option<CertificateStatus>>> {
        let file = self.certificate.clone()?;
        Some(Arc::new(move || {
            let expires_at = file.expires_at()?;
            Some(CertificateStatus { name: "NATS client certificate", expires_at, refused: file.refused() })
        }))
    }

    pub(in super::super) fn replica(&self) -> &Arc<Replica> {
        &self.replica
    }

    /// The seed of the prefix caches: equal on all pickers, so that they make equal block keys.
    pub(in super::super) fn cache_seed(&self) -> u64 {
        self.cache_seed
    }

    /// Applies what peers send to the pools of `config` from now on.
    pub(in super::super) fn set_pools(&self, config: &ActiveConfig, feeds: &Feeds) {
        let view = |runtime: &Arc<attache_picker::PoolRuntime>| {
            let events = feeds.pool(&runtime.pool.name)?.events();
            Some(runtime.shared_view(Arc::new(Losses(events))))
        };
        self.replica.set_pools(config.pools().iter().filter_map(view).collect());
    }

    /// Holds readiness back until the prefix index of a peer was imported, at most for `sync.waitForSnapshot`.
    pub(in super::super) fn hold(&self, readiness: &Readiness) {
        let (replica, wait) = (self.replica.clone(), self.wait_for_snapshot);
        if wait.is_zero() {
            return;
        }
        let latch = readiness.latch("prefix index of a peer imported");
        tokio::spawn(async move {
            let done = async {
                while replica.snapshot().state != SnapshotState::Done {
                    tokio::time::sleep(SNAPSHOT_POLL).await;
                }
            };
            let in_time = tokio::time::timeout(wait, done).await.is_ok();
            let (chunks, blocks) = (replica.snapshot().chunks, replica.stats().imported_blocks.load(Relaxed));
            if in_time {
                tracing::info!(chunks, blocks, "prefix index of a peer imported");
            } else {
                tracing::warn!(chunks, blocks, "prefix index of a peer not imported within `sync.waitForSnapshot`");
            }
            latch.release();
        });
    }
}

/// Reads the certificate's validity, again whenever its file changes, until `stop`.
fn follow(path: PathBuf, stop: CancellationToken) -> Arc<CertificateFile> {
    let certificate = CertificateFile::read(path);
    let followed = certificate.clone();
    tokio::spawn(async move {
        let mut file = watch::watch([followed.path().to_owned()]);
        while stop.run_until_cancelled(file.changed()).await.is_some() {
            followed.reload();
        }
    });
    certificate
}

/// Drops what is recorded about caches that a peer reports as lost.
#[derive(Debug)]
struct Losses(mpsc::Sender<PoolEvent>);

impl CacheLossSink for Losses {
    fn cache_lost(&self, id: EndpointId) {
        // With a full channel, the scraper of this picker still finds the restart.
        let _ = self.0.try_send(PoolEvent::CacheCleared { id });
    }
}

fn config(nats: NatsSettings) -> NatsConfig {
    let NatsSettings { servers, subject_prefix, credentials, ca_file, client_certificate } = nats;
    NatsConfig { servers, subject_prefix, credentials, ca_file, client_certificate }
}

/// The cluster's key.
fn seed(settings: &SyncSettings) -> anyhow::Result<u64> {
    let Some(path) = &settings.key_file else {
        return Ok(ReplicaSettings::seed_of(settings.nats.subject_prefix.as_bytes()));
    };
    let key = std::fs::read(path).with_context(|| format!("`sync.keyFile`: {} can't be read", path.display()))?;
    anyhow::ensure!(
        key.trim_ascii().len() >= 16,
        "`sync.keyFile`: {} has {} bytes, and at least 16 are needed",
        path.display(),
        key.trim_ascii().len()
    );
    Ok(ReplicaSettings::seed_of(key.trim_ascii()))
}

/// Warns if anyone in the network may be able to send messages.
fn warn_of_open_bus(nats: &NatsSettings) {
    let is_open = |url: &&String| {
        let authority = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
        let host = authority.rsplit('@').next().unwrap_or_default();
        let is_local = ["127.", "localhost", "[::1]"].iter().any(|local| host.starts_with(local));
        !is_local && !authority.contains('@')
    };
    if nats.credentials.is_some() || nats.client_certificate.is_some() {
        return;
    }
    if let Some(server) = nats.servers.iter().find(is_open) {
        tracing::warn!(
            server,
            "the NATS server of `sync` is used without credentials: any client that reaches it can send this picker false \
             load, cache contents and pressure, so that it chooses worse or rejects requests; it can't read or change them"
        );
    }
}
