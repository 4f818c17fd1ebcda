//! Whether the servers of the pools respond: logged when it changes, and shown at the start on a terminal.

use attache_admin::pools::{PoolView, PoolViews};
use attache_admin::warnings::PoolReach;
use attache_types::clock::{Clock, Timestamp};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{IsTerminal, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval};

/// 1 s: how often the state of the pools is read.
const PERIOD: Duration = Duration::from_secs(1);
/// 5 s: how long a pool must be unreachable before it is logged. The servers of a rollout are away for a shorter time.
const PATIENCE: Duration = Duration::from_secs(5);
/// 3 s: the longest wait for the first responses, before the summary is shown.
const SUMMARY_WAIT: Duration = Duration::from_secs(3);
/// How often the first responses are looked for, meanwhile.
const SUMMARY_PERIOD: Duration = Duration::from_millis(50);

/// What the log knows of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Its servers respond, or nothing was logged yet.
    Fine,
    /// It can serve no request since this time.
    Failing(Timestamp),
    /// The same, and it is logged with this code.
    Logged(&'static str),
}

/// Logs when a pool has no server that responds, and when it has one again.
#[derive(Debug, Default)]
struct ReachLog {
    pools: BTreeMap<Arc<str>, Known>,
}

impl ReachLog {
    /// Takes the state of a pool at `now`.
    fn observe(&mut self, pool: &Arc<str>, reach: &PoolReach, now: Timestamp) {
        let known = self.pools.entry(pool.clone()).or_insert(Known::Fine);
        let (warning, pool) = (reach.warning(pool), &**pool);
        *known = match (*known, warning) {
            (Known::Fine, None) => Known::Fine,
            (Known::Fine, Some(_)) => Known::Failing(now),
            (Known::Failing(_), None) => Known::Fine,
            (Known::Failing(since), Some(_)) if now.since(since) < PATIENCE => Known::Failing(since),
            (Known::Logged(code), Some(warning)) if code == warning.code => Known::Logged(code),
            (_, Some(warning)) => {
                tracing::warn!(pool, code = warning.code, help = warning.help, "pool can't serve: {}", warning.message);
                Known::Logged(warning.code)
            }
            (Known::Logged(_), None) => {
                let (reached, endpoints) = (reach.reached, reach.endpoints);
                tracing::info!(pool, reached, endpoints, "pool can serve again");
                Known::Fine
            }
        };
    }

    /// Forgets pools that are no longer served.
    fn keep(&mut self, views: &[PoolView]) {
        self.pools.retain(|pool, _| views.iter().any(|view| view.name == *pool));
    }
}

/// Watches the pools for as long as the process runs.
pub(super) async fn watch(views: Arc<PoolViews>, clock: Clock) {
    let (mut log, mut ticks) = (ReachLog::default(), interval(PERIOD));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (pools, now) = (views.load(), clock.now());
        pools.iter().for_each(|view| log.observe(&view.name, &PoolReach::of(view), now));
        log.keep(&pools);
    }
}

/// The addresses of the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) grpc: SocketAddr,
    pub(super) health: SocketAddr,
    pub(super) admin: SocketAddr,
}

/// On a terminal without JSON logs, shows pools, endpoints and addresses once the servers have responded, or did not
/// within [`SUMMARY_WAIT`].
pub(super) async fn summarize(views: Arc<PoolViews>, addresses: Addresses, log_json: bool) {
    if log_json || !std::io::stderr().is_terminal() {
        return;
    }
    let all_known = async {
        let mut ticks = interval(SUMMARY_PERIOD);
        let is_known = |view: &PoolView| {
            let reach = PoolReach::of(view);
            reach.is_synced && reach.awaited == 0
        };
        while !views.load().iter().all(is_known) {
            ticks.tick().await;
        }
    };
    let _ = tokio::time::timeout(SUMMARY_WAIT, all_known).await;
    let pools: Vec<_> =
        views.load().iter().map(|view| (view.name.clone(), view.strategy.clone(), PoolReach::of(view))).collect();
    let _ = std::io::stderr().lock().write_all(summary(&pools, addresses).as_bytes());
}

/// The text of the summary: pools with strategy and reach, then addresses.
fn summary(pools: &[(Arc<str>, String, PoolReach)], addresses: Addresses) -> String {
    let mut text = format!("\nAttaché {} serves {}\n", env!("CARGO_PKG_VERSION"), plural(pools.len(), "pool"));
    let width = pools.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    for (name, strategy, reach) in pools {
        let PoolReach { endpoints, reached, failed, .. } = reach;
        let _ = writeln!(text, "  {name:<width$}  {strategy}, {reached} of {} reached", plural(*endpoints, "endpoint"));
        for (endpoint, cause) in failed {
            let _ = writeln!(text, "    {endpoint}: {cause}");
        }
    }
    let Addresses { grpc, health, admin } = addresses;
    let _ = writeln!(
        text,
        "  ext-proc (Envoy)  {grpc}\n  gRPC health       {health}\n  status page       {}\n",
        url(admin)
    );
    text
}

/// The URL of a port on this machine.
fn url(address: SocketAddr) -> String {
    let host = if address.ip().is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { address.ip() };
    format!("http://{}/", SocketAddr::new(host, address.port()))
}

fn plural(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(n: u64) -> Timestamp {
        Timestamp(n * 1_000_000_000)
    }

    #[test]
    fn unreachable_pool_is_logged_once_after_a_while_and_again_when_it_serves() {
        let (pool, mut log): (Arc<str>, _) = ("chat".into(), ReachLog::default());
        let away = PoolReach { endpoints: 2, ..PoolReach::default() };
        let one = PoolReach { reached: 1, ..away.clone() };
        let mut states = Vec::new();
        for (at, reach) in [(1, &away), (3, &away), (4, &one), (5, &away), (10, &away), (60, &away), (61, &one)] {
            log.observe(&pool, reach, second(at));
            states.push(log.pools[&pool]);
        }
        let (failing, logged) = (|at| Known::Failing(second(at)), Known::Logged("no_endpoint_reached"));
        assert_eq!(states, [failing(1), failing(1), Known::Fine, failing(5), logged, logged, Known::Fine]);
        // All of its endpoints leave: another state, which is logged at once.
        log.observe(&pool, &away, second(70));
        log.observe(&pool, &away, second(80));
        log.observe(&pool, &PoolReach::default(), second(81));
        assert_eq!(log.pools[&pool], Known::Logged("no_endpoints"));
        log.keep(&[]);
        assert!(log.pools.is_empty());
    }

    #[test]
    fn summary_names_pools_first_errors_and_the_status_page() {
        let failed = vec![("10.0.0.3:8000".into(), "http://10.0.0.3:8000/metrics: connection refused".into())];
        let pools = [
            (
                "chat".into(),
                "predicted-latency".to_owned(),
                PoolReach { endpoints: 3, reached: 2, failed, ..PoolReach::default() },
            ),
            (
                "embeddings".into(),
                "least-request".to_owned(),
                PoolReach { endpoints: 1, reached: 1, ..PoolReach::default() },
            ),
        ];
        let port = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
        let text = summary(&pools, Addresses { grpc: port(9002), health: port(9003), admin: port(9090) });
        let expected = [
            "serves 2 pools\n  chat        predicted-latency, 2 of 3 endpoints reached\n",
            "    10.0.0.3:8000: http://10.0.0.3:8000/metrics: connection refused\n",
            "  embeddings  least-request, 1 of 1 endpoint reached\n",
            "0.0.0.0:9002\n",
            "http://127.0.0.1:9090/\n",
        ];
        expected.iter().for_each(|part| assert!(text.contains(part), "{part:?}: {text}"));
    }
}
