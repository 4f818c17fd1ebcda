//! Endpoints behind a DNS name: each address of the name is one. The name is resolved periodically.
//!
//! A name that can't be resolved, or resolves to no address, keeps its last addresses, so that a failing name server
//! does not empty a pool of healthy model servers. (Passive health ejects those that are really gone.) Until the first
//! successful lookup the source sends nothing, and the pool is not ready.

use attache_pool::source::DnsSource;
use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, PoolEvent};
use attache_types::rng;
use rand::RngExt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A lookup that takes longer counts as failed; the default of resolv.conf is 5 s for each name server and attempt.
pub(crate) const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before the first retry after a failure.
pub(crate) const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Longest delay between retries after failures.
pub const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Shortest refresh interval, whatever is configured.
pub(crate) const MIN_REFRESH: Duration = Duration::from_millis(100);
/// Addresses of one name that are used, as many as a pool has pods at most. A name server may answer any number.
pub(crate) const MAX_ADDRESSES: usize = 4_096;
/// Relative spread of delays to both sides, so that replicas don't query at the same time.
const JITTER: f64 = 0.1;

/// Resolves names to addresses.
pub trait Resolver: Send + Sync + 'static {
    /// All addresses of `host`, with `port`.
    fn resolve(&self, host: &str, port: u16) -> impl Future<Output = io::Result<Vec<SocketAddr>>> + Send;
}

/// The system's resolver, by getaddrinfo.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolver for SystemResolver {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((host, port)).await?.collect())
    }
}

/// Counters of the lookups of one name.
#[derive(Debug, Default)]
pub struct DnsStats {
    lookups: AtomicU64,
    failures: AtomicU64,
    left_out: AtomicU64,
}

impl DnsStats {
    /// Number of lookups so far.
    #[must_use]
    pub fn lookups(&self) -> u64 {
        self.lookups.load(Relaxed)
    }

    /// Number of lookups that failed or returned no address.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Number of addresses beyond [`MAX_ADDRESSES`] in all answers.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }
}

/// Resolves one name until `shutdown`, or until the pool's writer is gone. Sends endpoints only
/// when the addresses have changed.
pub async fn run(
    resolver: impl Resolver,
    source: SourceId,
    name: DnsSource,
    events: mpsc::Sender<PoolEvent>,
    stats: Arc<DnsStats>,
    seed: u64,
    shutdown: CancellationToken,
) {
    let mut rng = rng::for_request(seed, u64::from(source.0));
    let mut known: Option<Vec<SocketAddr>> = None;
    let mut failures = 0u32;
    let mut was_cut = false;
    loop {
        let answer = tokio::select! {
            () = shutdown.cancelled() => return,
            answer = lookup(&resolver, &name) => answer,
        };
        stats.lookups.fetch_add(1, Relaxed);
        let delay = match answer {
            Ok((addresses, left_out)) => {
                stats.left_out.fetch_add(left_out as u64, Relaxed);
                if left_out > 0 && !was_cut {
                    tracing::warn!(
                        host = name.host,
                        left_out,
                        "DNS name has more than {MAX_ADDRESSES} addresses; only the first in their order serve"
                    );
                }
                was_cut = left_out > 0;
                if failures > 0 {
                    tracing::info!(host = name.host, "DNS name resolves again");
                }
                failures = 0;
                if known.as_ref() != Some(&addresses) {
                    let endpoints = addresses.iter().map(|a| Arc::new(spec(&name, *a))).collect();
                    known = Some(addresses);
                    let sent = tokio::select! {
                        () = shutdown.cancelled() => return,
                        sent = events.send(PoolEvent::Endpoints { source, endpoints }) => sent,
                    };
                    if sent.is_err() {
                        return;
                    }
                }
                name.refresh.max(MIN_REFRESH)
            }
            Err(error) => {
                stats.failures.fetch_add(1, Relaxed);
                if failures == 0 {
                    let kept = known.as_ref().map_or(0, Vec::len);
                    tracing::warn!(
                        host = name.host, %error, kept,
                        "DNS name can't be resolved; keeping its last addresses"
                    );
                }
                failures = failures.saturating_add(1);
                backoff(failures, name.refresh.max(MIN_REFRESH))
            }
        };
        let spread = 1.0 + JITTER * (2.0 * rng.random::<f64>() - 1.0);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(delay.mul_f64(spread)) => {}
        }
    }
}

/// Delay after `failures`: starts at [`FIRST_BACKOFF`] (or `refresh`, if shorter) and doubles up to [`MAX_BACKOFF`].
fn backoff(failures: u32, refresh: Duration) -> Duration {
    let first = FIRST_BACKOFF.min(refresh);
    first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_BACKOFF)
}

/// Looks the name up once. Addresses are sorted and unique; IPv4 addresses that the resolver
/// maps into IPv6 become IPv4. Also returns the number of addresses beyond [`MAX_ADDRESSES`].
async fn lookup(resolver: &impl Resolver, name: &DnsSource) -> io::Result<(Vec<SocketAddr>, usize)> {
    let answer = tokio::time::timeout(LOOKUP_TIMEOUT, resolver.resolve(&name.host, name.port)).await;
    let mut addresses = answer.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))??;
    for address in &mut addresses {
        address.set_ip(address.ip().to_canonical());
    }
    addresses.sort_unstable();
    addresses.dedup();
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the answer holds no address"));
    }
    let left_out = addresses.len().saturating_sub(MAX_ADDRESSES);
    addresses.truncate(MAX_ADDRESSES);
    Ok((addresses, left_out))
}

fn spec(name: &DnsSource, address: SocketAddr) -> EndpointSpec {
    EndpointSpec { engine: name.engine, metrics: name.metrics.clone(), ..EndpointSpec::at(address) }
}

#[cfg(test)]
mod tests;
