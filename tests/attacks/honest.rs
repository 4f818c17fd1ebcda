//! Honest clients that send requests one after another, with and without a concurrent attack.

use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat, sha256};
use crate::support::client::{self, Http};
use crate::support::process::eventually;
use http::{HeaderValue, Request};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::Instant;

/// Concurrent clients. Each sends its requests one after another.
const CLIENTS: usize = 4;
/// Requests of each client without an attack.
const QUIET_REQUESTS: usize = 12;
/// Minimum number of requests of each client during an attack.
const ATTACKED_REQUESTS: usize = 8;
/// A stream of ten events, 10 ms apart: at about 100 ms, noise of a busy machine is comparatively small.
const TARGET: &str = "/v1/chat/completions?kind=sse&size=2000&events=10&pace_ms=10";
/// Latencies below this count as this long. Smaller differences are noise, because clients, Envoy, picker and servers
/// share the cores.
const QUIET_FLOOR: Duration = Duration::from_millis(150);
/// Longest latency of one request that a busy machine can explain. Limits of the picker take as long or longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Size of a request body, bytes.
const BODY_BYTES: usize = 2_000;
/// Size of a response body, bytes.
const RESPONSE_BYTES: usize = 2_000;

/// Honest clients of one Envoy listener, whose server is an [`crate::support::echo::Echo`].
#[derive(Clone)]
pub(crate) struct Honest {
    to: SocketAddr,
    headers: Vec<(&'static str, &'static str)>,
}

/// Sorted latencies of honest requests, and the failures.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) latencies: Vec<Duration>,
    pub(crate) failures: Vec<String>,
}

impl Honest {
    pub(crate) fn new(to: SocketAddr) -> Self {
        Self { to, headers: Vec::new() }
    }

    /// The same clients with this additional header.
    pub(crate) fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Sends requests without an attack.
    pub(crate) async fn quiet(&self) -> Report {
        let report = self.run(QUIET_REQUESTS, Arc::new(AtomicBool::new(true))).await;
        assert!(report.failures.is_empty(), "honest requests fail without an attack: {:?}", report.failures);
        report
    }

    /// Sends requests until the attack has ended. Also returns the result of the attack.
    pub(crate) async fn during<T>(&self, attack: impl Future<Output = T>) -> (Report, T) {
        let over = Arc::new(AtomicBool::new(false));
        let clients = tokio::spawn({
            let (honest, over) = (self.clone(), over.clone());
            async move { honest.run(ATTACKED_REQUESTS, over).await }
        });
        let outcome = attack.await;
        over.store(true, Relaxed);
        (clients.await.expect("the honest clients"), outcome)
    }

    /// Each client sends at least `least` requests, and continues until `over` is true.
    async fn run(&self, least: usize, over: Arc<AtomicBool>) -> Report {
        let mut clients = tokio::task::JoinSet::new();
        for seed in 0..CLIENTS {
            let (honest, over) = (self.clone(), over.clone());
            clients.spawn(async move {
                let mut report = Report::default();
                let mut sent = 0;
                while sent < least || !over.load(Relaxed) {
                    let begun = Instant::now();
                    match honest.send(seed as u64).await {
                        Ok(()) => report.latencies.push(begun.elapsed()),
                        Err(failure) => report.failures.push(failure),
                    }
                    sent += 1;
                }
                report
            });
        }
        let mut all = Report::default();
        for report in clients.join_all().await {
            all.latencies.extend(report.latencies);
            all.failures.extend(report.failures);
        }
        all.latencies.sort_unstable();
        all
    }

    /// Sends one request. An error describes the unexpected response.
    async fn send(&self, seed: u64) -> Result<(), String> {
        let body = chat(BODY_BYTES, true, seed);
        let mut request: Request<Payload> =
            client::request("POST", self.to, Http::H1, TARGET, Payload::sized(body.clone()));
        for (name, value) in &self.headers {
            request.headers_mut().insert(*name, HeaderValue::from_static(value));
        }
        let reply = client::send(self.to, Http::H1, request).await.map_err(|error| error.to_string())?;
        let (status, length) = (reply.status.as_u16(), reply.body.len());
        if status != 200 || length != RESPONSE_BYTES {
            return Err(format!(
                "status {status}, reason {:?}, {length} bytes: {}",
                reply.header("x-attache-reason"),
                String::from_utf8_lossy(&reply.body[..length.min(300)])
            ));
        }
        if reply.header("x-echo-sha256") != sha256(&body) {
            return Err("the server received another body than the client sent".to_owned());
        }
        Ok(())
    }
}

impl Report {
    /// A percentile of the latencies.
    fn percentile(&self, percent: usize) -> Duration {
        let at = (self.latencies.len() * percent).div_ceil(100).saturating_sub(1);
        self.latencies.get(at).copied().unwrap_or_default()
    }

    /// Panics unless every request completed, the 80th percentile is at most twice that without the attack, and no
    /// request took much longer. A single pause of a busy machine delays the requests of all clients, an eighth of the
    /// fewest: higher percentiles tell of it, and not of an attack, which lasts.
    pub(crate) fn assert_unharmed(&self, quiet: &Report) {
        let sent = self.latencies.len() + self.failures.len();
        assert!(
            self.failures.is_empty(),
            "{} of {sent} honest requests failed, the first: {:?}",
            self.failures.len(),
            self.failures.first()
        );
        let (attacked, quiet) = (self.percentile(80), quiet.percentile(80).max(QUIET_FLOOR));
        assert!(
            attacked <= quiet * 2,
            "p80 of honest requests is {attacked:?} during the attack, {quiet:?} without it"
        );
        let slowest = self.percentile(100);
        assert!(slowest <= LONGEST_PAUSE, "an honest request took {slowest:?} during the attack, {quiet:?} is usual");
    }
}

/// Honest requests whose server responds late.
pub(crate) struct InFlight(tokio::task::JoinSet<Result<(), String>>);

impl InFlight {
    /// Sends `count` requests, each on its own connection, and returns when all are in flight.
    pub(crate) async fn start(to: SocketAddr, picker: &AttacheProcess, count: usize) -> Self {
        let mut requests = tokio::task::JoinSet::new();
        for seed in 0..count {
            requests.spawn(async move {
                let body = chat(BODY_BYTES, false, seed as u64);
                let target = "/v1/chat/completions?delay_ms=4000";
                let reply = client::post(to, target, body.clone()).await.map_err(|error| error.to_string())?;
                let received = reply.header("x-echo-sha256") == sha256(&body);
                let status = reply.status.as_u16();
                if status == 200 && received {
                    Ok(())
                } else {
                    Err(format!("status {status}, body intact: {received}"))
                }
            });
        }
        eventually("honest requests in flight", || async {
            let books = picker.books().await.ok()?;
            (books.in_flight >= count as u64).then_some(())
        })
        .await;
        Self(requests)
    }

    /// Panics unless every request gets its response.
    pub(crate) async fn assert_complete(self) {
        let all = self.0.join_all().await;
        let failures: Vec<_> = all.iter().filter_map(|result| result.as_ref().err()).collect();
        assert!(failures.is_empty(), "{} of {} requests in flight failed: {failures:?}", failures.len(), all.len());
    }
}

/// The control: honest clients complete without an attack.
#[tokio::test(flavor = "multi_thread")]
async fn honest_clients_without_attack_complete() {
    let echo = crate::support::echo::Echo::start().await;
    let picker = crate::support::attache::AttacheProcess::start(&[echo.address], &[]).await;
    let bootstrap = crate::shipped::by_header("original-dst.yaml", &picker);
    let envoy = crate::support::envoy::EnvoyProcess::alone(&bootstrap).await;
    let honest = Honest::new(envoy.listener("inference")).with("x-tenant", "honest");
    let quiet = honest.quiet().await;
    let (report, ()) = honest.during(async {}).await;
    report.assert_unharmed(&quiet);
    picker.assert_settled().await;
}
