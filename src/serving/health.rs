//! Readiness, and the gRPC health service that reports it to Envoy and Kubernetes.
//!
//! Named latches hold [`Readiness`] back, one per condition (a pool has synced, the listener is open). The gRPC
//! service follows it: everything but `liveness` is NOT_SERVING until all latches are released, and again while
//! draining. Used by `app` and `admin`.

mod bounded;

pub use bounded::BoundedHealth;

use crate::connections::Connections;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};

/// The service that is SERVING as long as the process runs.
pub const LIVENESS: &str = "liveness";
/// Services that follow readiness: the server as a whole, the names that charts probe, and the one that Envoy checks.
pub const READINESS: &[&str] = &["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"];

/// Concurrent checks and watches on one connection to the health port.
const MAX_STREAMS: u32 = 32;
/// Time without traffic after which a keepalive ping is sent to a peer of the health port.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time without a response to the ping after which the connection is closed.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest request to the health service in bytes; it has the name of a service.
const MAX_REQUEST_BYTES: usize = 4 << 10;

/// Whether requests can be served, and if not, why.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<watch::Sender<ReadinessState>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ReadinessState {
    next: u64,
    missing: BTreeMap<u64, String>,
    draining: bool,
}

impl ReadinessState {
    fn ready(&self) -> bool {
        self.missing.is_empty() && !self.draining
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(ReadinessState::default())))
    }
}

impl Readiness {
    /// Holds readiness back until the latch is released. A latch that is dropped without release holds it back forever,
    /// since the code that should have met the condition has failed.
    pub fn latch(&self, condition: impl Into<String>) -> Latch {
        let mut id = 0;
        self.0.send_modify(|state| {
            id = state.next;
            state.next += 1;
            state.missing.insert(id, condition.into());
        });
        Latch { id, readiness: self.clone() }
    }

    /// Whether all conditions are met and the process is not draining.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.borrow().ready()
    }

    /// Returns the conditions that are not met, in the order of their creation; `draining` is last.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let state = self.0.borrow();
        state.missing.values().cloned().chain(state.draining.then(|| "draining".to_owned())).collect()
    }

    /// Makes the process not ready from now on.
    pub fn set_draining(&self) {
        self.0.send_modify(|state| state.draining = true);
    }

    /// Waits until all conditions are met. Never returns once draining.
    pub async fn ready(&self) {
        let mut state = self.0.subscribe();
        // The sender is in `self`, so the channel stays open meanwhile.
        let _ = state.wait_for(ReadinessState::ready).await;
    }
}

/// One condition of readiness. Dropping it without release keeps the process not ready.
#[derive(Debug)]
#[must_use = "readiness waits until the latch is released"]
pub struct Latch {
    id: u64,
    readiness: Readiness,
}

impl Latch {
    /// Marks the condition as met.
    pub fn release(self) {
        self.readiness.0.send_modify(|state| {
            state.missing.remove(&self.id);
        });
    }
}

/// The gRPC health services of the process.
#[derive(Clone, Debug)]
pub struct Health {
    reporter: HealthReporter,
}

impl Health {
    /// Creates the services in their initial state: `liveness` SERVING, all others NOT_SERVING.
    pub async fn new() -> Self {
        let reporter = HealthReporter::new();
        // tonic-health starts with "" as SERVING, which no client may see.
        for service in READINESS {
            reporter.set_service_status(*service, ServingStatus::NotServing).await;
        }
        reporter.set_service_status(LIVENESS, ServingStatus::Serving).await;
        Self { reporter }
    }

    /// Returns the tonic service, for the health port and, unless `--health-checking=false`, for the ext-proc port.
    #[must_use]
    pub fn service(&self) -> BoundedHealth {
        let service = HealthServer::new(HealthService::from_health_reporter(self.reporter.clone()));
        BoundedHealth::new(service.max_decoding_message_size(MAX_REQUEST_BYTES))
    }

    /// Reports the state of `readiness`, as long as it is polled.
    pub async fn follow(&self, readiness: &Readiness) {
        let mut state = readiness.0.subscribe();
        loop {
            let status =
                if state.borrow_and_update().ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
            for service in READINESS {
                self.reporter.set_service_status(*service, status).await;
            }
            if state.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Serves only the health service on `listener`, within the limits of `connections`, and
/// follows `readiness`, until `end` completes.
///
/// # Errors
/// When the transport fails.
pub async fn serve(
    listener: TcpListener,
    connections: Arc<Connections>,
    health: Health,
    readiness: Readiness,
    end: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let server = tonic::transport::Server::builder()
        .max_concurrent_streams(Some(MAX_STREAMS))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(health.service())
        .serve_with_incoming(crate::tls::incoming(listener, connections, None));
    tokio::select! {
        result = server => result,
        () = health.follow(&readiness) => Ok(()),
        () = end => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Wire;
    use tonic_health::pb::health_client::HealthClient;

    async fn start(readiness: &Readiness) -> HealthClient<tonic::transport::Channel> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Health::new().await;
        let connections = Connections::new(crate::connections::ConnectionLimits::of(16));
        tokio::spawn(serve(listener, connections, health, readiness.clone(), std::future::pending()));
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
        HealthClient::new(endpoint.connect().await.unwrap())
    }

    /// Waits on the Watch stream of `service` until it reports `want`.
    async fn until(client: &mut HealthClient<tonic::transport::Channel>, service: &str, want: Wire) {
        let request = HealthCheckRequest { service: service.to_owned() };
        let mut stream = client.watch(request).await.unwrap().into_inner();
        while let Some(answer) = stream.message().await.unwrap() {
            if answer.status() == want {
                return;
            }
        }
        panic!("the watch of {service:?} ended");
    }

    #[tokio::test]
    async fn services_follow_readiness_and_liveness_stays() {
        let readiness = Readiness::default();
        let (pool, listener) = (readiness.latch("pool default synced"), readiness.latch("listener open"));
        let mut client = start(&readiness).await;
        for service in READINESS {
            let request = HealthCheckRequest { service: (*service).to_owned() };
            assert_eq!(client.check(request).await.unwrap().into_inner().status(), Wire::NotServing, "{service:?}");
        }
        assert_eq!(readiness.missing(), ["pool default synced", "listener open"]);
        until(&mut client, LIVENESS, Wire::Serving).await;

        pool.release();
        assert!(!readiness.is_ready());
        listener.release();
        assert!(readiness.is_ready());
        readiness.ready().await;
        for service in READINESS {
            until(&mut client, service, Wire::Serving).await;
        }

        readiness.set_draining();
        assert_eq!(readiness.missing(), ["draining"]);
        for service in READINESS {
            until(&mut client, service, Wire::NotServing).await;
        }
        until(&mut client, LIVENESS, Wire::Serving).await;
        let unknown = client.check(HealthCheckRequest { service: "else".into() }).await.unwrap_err();
        assert_eq!(unknown.code(), tonic::Code::NotFound);
    }

    #[tokio::test]
    async fn dropped_latch_is_never_met() {
        let readiness = Readiness::default();
        drop(readiness.latch("first scrape"));
        assert_eq!(readiness.missing(), ["first scrape"]);
    }
}
