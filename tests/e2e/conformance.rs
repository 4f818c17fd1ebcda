//! Cases of the conformance suite of the Gateway API Inference Extension, through real Envoy, with pods of an
//! `InferencePool`: `GatewayFollowingEPPRouting`, the same with data parallelism, `GatewayDestinationEndpointServed`,
//! and a picker that is down. `EppUnAvailableFailOpen` with a server list is in `faults.rs`.
//!
//! Each runs with both ways in which gateways follow a picker. ORIGINAL_DST takes one endpoint from a header.
//! `override_host` walks a list in the metadata.

use crate::api::{FakeApi, STABLE, pod, pool};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::{EnvoyProcess, shipped};
use crate::support::process::eventually;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderName, HeaderValue};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use tokio::net::TcpListener;

/// The path that the suite requests. It belongs to no known API.
const PATH: &str = "/primary-gateway-test";
/// The suite's body.
const BODY: &[u8] = br#"{"model":"conformance-fake-model","prompt":"Write as if you were a critic: San Francisco"}"#;
const SELECTION: &str = "test-epp-endpoint-selection";
const SERVED: &str = "x-conformance-test-served-endpoint";
/// The value of `SERVED` behind a gateway that does not report the serving endpoint, such as ORIGINAL_DST.
const NOT_REPORTED: &str = "fail: missing envoy lb metadata";
/// Concurrent requests.
const CONCURRENCY: usize = 10;
/// Requests for each selection: ten rounds of `CONCURRENCY`, as in the suite.
const REQUESTS: usize = 100;
const FIRST_SERVER: &str = "address: 127.0.0.1, port_value: 8001}";

/// How a gateway follows the picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gateway {
    OriginalDst,
    OverrideHost,
}

impl Gateway {
    const BOTH: [Self; 2] = [Self::OriginalDst, Self::OverrideHost];

    /// `destination.mode` of a pool behind it.
    fn mode(self) -> &'static str {
        match self {
            Self::OriginalDst => "single",
            Self::OverrideHost => "list",
        }
    }

    /// The value of `SERVED` for a response by `served`.
    fn reports(self, served: &str) -> &str {
        match self {
            Self::OriginalDst => NOT_REPORTED,
            Self::OverrideHost => served,
        }
    }

    /// The shipped bootstrap for this gateway. The one of `override_host` lists `servers`.
    fn bootstrap(self, picker: &AttacheProcess, servers: &[SocketAddr]) -> String {
        match self {
            Self::OriginalDst => by_header("original-dst.yaml", picker),
            Self::OverrideHost => knowing("override-host.yaml", picker, servers),
        }
    }
}

/// A shipped bootstrap with these servers instead of its own four.
fn knowing(file: &str, picker: &AttacheProcess, servers: &[SocketAddr]) -> String {
    let text = shipped(file, &[(8080, 0), (9901, 0), (9002, picker.grpc.port()), (9003, picker.health.port())]);
    assert!(text.contains(FIRST_SERVER), "{file} has no `{FIRST_SERVER}`");
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.contains(FIRST_SERVER) {
            let at = |server: &SocketAddr| format!("address: {}, port_value: {}}}", server.ip(), server.port());
            lines.extend(servers.iter().map(|server| line.replace(FIRST_SERVER, &at(server))));
        } else if !(8002..=8004).any(|port| line.contains(&format!("port_value: {port}}}"))) {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n")
}

/// A cluster in which an `InferencePool` has pods, each at a loopback address of its own, all with the same ports.
struct Cluster {
    api: FakeApi,
    /// By pod, then by rank.
    pods: Vec<Vec<Echo>>,
    ports: Vec<u16>,
}

impl Cluster {
    /// `pods` pods, each of which serves on `ranks` ports.
    async fn of(pods: u8, ranks: usize) -> Self {
        let ips: Vec<IpAddr> = (2..2 + pods).map(|n| IpAddr::V4(Ipv4Addr::new(127, 0, 0, n))).collect();
        let mut by_pod: Vec<Vec<Echo>> = ips.iter().map(|_| Vec::new()).collect();
        let mut ports = Vec::new();
        while ports.len() < ranks {
            // A port that is free at all addresses.
            let Some(listeners) = same_port(&ips).await else { continue };
            ports.push(listeners[0].local_addr().expect("an address").port());
            by_pod.iter_mut().zip(listeners).for_each(|(pod, listener)| pod.push(Echo::on(listener)));
        }
        let api = FakeApi::start().await;
        for (n, ip) in ips.iter().enumerate() {
            api.pod(pod(&format!("pod-{n}"), "primary", &ip.to_string()));
        }
        let cluster = Self { api, pods: by_pod, ports };
        cluster.target(ranks);
        cluster
    }

    /// Sets the pool's target ports to the first `ranks` ports.
    fn target(&self, ranks: usize) {
        self.api.apply(STABLE, "inferencepools", pool("primary", "primary", &self.ports[..ranks]));
    }

    /// A ready picker for the pool, behind a gateway of this kind.
    async fn picker(&self, gateway: Gateway) -> AttacheProcess {
        let config = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{conformanceHeaders: true}}\npools:\n- name: default\n  \
             strategy: round-robin\n  destination: {{mode: {}, max: 3}}\n  kubernetes: {{pool: primary}}\n",
            gateway.mode()
        );
        let picker = AttacheProcess::in_cluster(&self.api.kubeconfig(), &["--config-text", &config]).await;
        picker.until_ready().await;
        picker
    }

    fn servers(&self) -> Vec<SocketAddr> {
        self.pods.iter().flatten().map(|echo| echo.address).collect()
    }
}

/// A listener at each address, all at one port that was free on the first.
async fn same_port(ips: &[IpAddr]) -> Option<Vec<TcpListener>> {
    let (first, others) = ips.split_first().expect("an address");
    let mut listeners = vec![TcpListener::bind((*first, 0)).await.expect("a free port")];
    let port = listeners[0].local_addr().expect("an address").port();
    for ip in others {
        listeners.push(TcpListener::bind((*ip, port)).await.ok()?);
    }
    Some(listeners)
}

/// Sends one request of the suite, with one header for each selection.
async fn ask(to: SocketAddr, method: &str, selections: &[&str]) -> Reply {
    let body = if method == "GET" { Bytes::new() } else { Bytes::from_static(BODY) };
    let mut request = client::request(method, to, Http::H1, PATH, Payload::sized(body));
    for selection in selections {
        let value = HeaderValue::from_str(selection).expect("a header value");
        request.headers_mut().append(HeaderName::from_static(SELECTION), value);
    }
    client::send(to, Http::H1, request).await.expect("an answer")
}

/// Sends as many requests as the suite. Every response must be 200 and name its server. Returns those servers.
async fn servers_reached(to: SocketAddr, selections: &[&str]) -> BTreeSet<SocketAddr> {
    let mut servers = BTreeSet::new();
    for _ in 0..REQUESTS / CONCURRENCY {
        for reply in join_all((0..CONCURRENCY).map(|_| ask(to, "POST", selections))).await {
            assert_eq!(reply.status, 200, "{selections:?}: {}", String::from_utf8_lossy(&reply.body));
            let allowed = [reply.header("x-echo-server"), NOT_REPORTED];
            assert!(allowed.contains(&reply.header(SERVED)), "{selections:?}: {}", reply.header(SERVED));
            servers.insert(reply.header("x-echo-server").parse().expect("the server's address"));
        }
    }
    servers
}

/// A selection of these endpoints in this order.
fn list(endpoints: &[SocketAddr]) -> String {
    endpoints.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sends_requests_to_the_picked_endpoint() {
    let cluster = Cluster::of(3, 1).await;
    let servers = cluster.servers();
    let [a, b, c] = servers[..] else { panic!("three pods") };
    for gateway in Gateway::BOTH {
        let picker = cluster.picker(gateway).await;
        let envoy = EnvoyProcess::start(&gateway.bootstrap(&picker, &servers)).await;
        let to = envoy.listener("inference");
        for only in [a, b, c] {
            assert_eq!(
                servers_reached(to, &[&only.ip().to_string()]).await,
                [only].into(),
                "{gateway:?}: a pod's address"
            );
        }
        assert_eq!(servers_reached(to, &[&list(&[b, a])]).await, [b].into(), "{gateway:?}: the first of two");
        assert_eq!(servers_reached(to, &[&list(&[c, a, b])]).await, [c].into(), "{gateway:?}: the first of three");
        let (first, rest) = (c.ip().to_string(), list(&[a, b]));
        assert_eq!(servers_reached(to, &[&first, &rest]).await, [c].into(), "{gateway:?}: in two headers");
        assert_eq!(
            ask(to, "GET", &[&b.to_string()]).await.header("x-echo-server"),
            b.to_string(),
            "{gateway:?}: a GET"
        );
        assert_eq!(servers_reached(to, &[]).await, [a, b, c].into(), "{gateway:?}: the pool's own strategy");
        let stranger = ask(to, "POST", &["127.0.0.9:1"]).await;
        assert_eq!((stranger.status.as_u16(), stranger.header(SERVED)), (503, ""), "{gateway:?}: no pod of the pool");
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_sends_requests_to_the_picked_rank() {
    let cluster = Cluster::of(2, 8).await;
    let servers = cluster.servers();
    for gateway in Gateway::BOTH {
        cluster.target(8);
        let picker = cluster.picker(gateway).await;
        let envoy = EnvoyProcess::start(&gateway.bootstrap(&picker, &servers)).await;
        let to = envoy.listener("inference");
        for ranks in (1..=8).rev() {
            cluster.target(ranks);
            let known = async || (picker.endpoints().await.len() == 2 * ranks).then_some(());
            eventually("the ranks that the pool has now", known).await;
            for pod in &cluster.pods {
                let own: Vec<SocketAddr> = pod[..ranks].iter().map(|echo| echo.address).collect();
                for rank in &own {
                    let reply = ask(to, "POST", &[&rank.to_string()]).await;
                    let served = (reply.header("x-echo-server"), reply.header(SERVED));
                    assert_eq!(
                        served,
                        (&*rank.to_string(), gateway.reports(&rank.to_string())),
                        "{gateway:?}, {ranks} ranks"
                    );
                }
                let by_pod = servers_reached(to, &[&own[0].ip().to_string()]).await;
                assert!(by_pod.iter().all(|server| own.contains(server)), "{gateway:?}, {ranks} ranks: {by_pod:?}");
                if let Some(gone) = pod.get(ranks) {
                    let reply = ask(to, "POST", &[&gone.address.to_string()]).await;
                    assert_eq!(reply.status, 503, "{gateway:?}: a port that is no target any more");
                }
            }
        }
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_that_served_is_reported_after_fallbacks() {
    let mut cluster = Cluster::of(4, 1).await;
    let servers = cluster.servers();
    let [a, b, c, d] = servers[..] else { panic!("four pods") };
    // Still pods of the pool, but without a listener.
    cluster.pods.drain(..2);
    let gateway = Gateway::OverrideHost;
    let picker = cluster.picker(gateway).await;
    let envoy = EnvoyProcess::start(&gateway.bootstrap(&picker, &servers)).await;
    let to = envoy.listener("inference");
    // `servers_reached` compares the reported endpoint with the server that responded.
    assert_eq!(servers_reached(to, &[&list(&[a, c, d])]).await, [c].into(), "past one");
    assert_eq!(servers_reached(to, &[&list(&[b, d, c])]).await, [d].into(), "past another, in the other order");
    assert_eq!(servers_reached(to, &[&list(&[b, a, d])]).await, [d].into(), "past two");
    assert!(envoy.stat("cluster.model-servers.upstream_rq_retry").await >= 4 * REQUESTS as u64);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;

    // ORIGINAL_DST has one endpoint and no fallback: the client gets an error, and no endpoint is reported.
    let gateway = Gateway::OriginalDst;
    let picker = cluster.picker(gateway).await;
    let envoy = envoy.beside(&gateway.bootstrap(&picker, &servers)).await;
    let to = envoy.listener("inference");
    let reply = ask(to, "POST", &[&list(&[a, c])]).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-echo-server")), (503, ""));
    assert_eq!(servers_reached(to, &[&list(&[c, a])]).await, [c].into());
    picker.assert_settled().await;
}

/// Starts the picker with the flags of `lwepp` and one more, without a configuration file.
#[tokio::test(flavor = "multi_thread")]
async fn conformance_headers_flag_needs_no_configuration_file() {
    let cluster = Cluster::of(3, 1).await;
    let servers = cluster.servers();
    let [a, b, c] = servers[..] else { panic!("three pods") };
    for gateway in Gateway::BOTH {
        let flags =
            ["--pool-name", "primary", "--zap-encoder", "json", "--conformance-headers", "--strategy", "round-robin"];
        let picker = AttacheProcess::in_cluster(&cluster.api.kubeconfig(), &flags).await;
        picker.until_ready().await;
        let envoy = EnvoyProcess::start(&gateway.bootstrap(&picker, &servers)).await;
        let to = envoy.listener("inference");
        for only in [a, b, c] {
            assert_eq!(servers_reached(to, &[&only.ip().to_string()]).await, [only].into(), "{gateway:?}");
            let reply = ask(to, "POST", &[&only.to_string()]).await;
            assert_eq!(reply.header(SERVED), gateway.reports(&only.to_string()), "{gateway:?}");
        }
        assert_eq!(servers_reached(to, &[""]).await, [a, b, c].into(), "{gateway:?}: an empty header means all");
        assert_eq!(ask(to, "POST", &["127.0.0.9"]).await.status, 503, "{gateway:?}: no pod of the pool");
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

/// Sends a destination header from the client, which must have no effect. Returns the number of requests that reached a
/// server.
async fn ask_without_a_picker(to: SocketAddr, cluster: &Cluster, allowed: impl Fn(u16) -> bool) -> usize {
    let served = || cluster.pods.iter().flatten().map(Echo::requests).sum::<usize>();
    let before = served();
    for method in ["GET", "POST"] {
        let mut request = client::request(method, to, Http::H1, PATH, Payload::sized(Bytes::from_static(BODY)));
        let own = HeaderValue::from_str(&cluster.servers()[0].to_string()).expect("a header value");
        request.headers_mut().append("x-gateway-destination-endpoint", own);
        let status = client::send(to, Http::H1, request).await.expect("an answer").status.as_u16();
        assert!(allowed(status), "{method}: {status}");
    }
    served() - before
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_close_rejects_requests_without_a_picker() {
    let cluster = Cluster::of(2, 1).await;
    for gateway in Gateway::BOTH {
        let mut picker = cluster.picker(gateway).await;
        let envoy = EnvoyProcess::start(&gateway.bootstrap(&picker, &cluster.servers())).await;
        let to = envoy.listener("inference");
        assert_eq!(ask(to, "POST", &[]).await.status, 200, "{gateway:?}");
        picker.process.kill();
        let served = ask_without_a_picker(to, &cluster, |status| (500..600).contains(&status)).await;
        assert_eq!(served, 0, "{gateway:?}: no picker, no server: least of all one that a client names");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_open_needs_an_envoy_with_a_server_list() {
    let cluster = Cluster::of(2, 1).await;
    let servers = cluster.servers();
    let mut picker = cluster.picker(Gateway::OverrideHost).await;
    let envoy = EnvoyProcess::start(&knowing("fail-open.yaml", &picker, &servers)).await;
    picker.process.kill();
    let served = ask_without_a_picker(envoy.listener("inference"), &cluster, |status| status == 200).await;
    assert_eq!(served, 2, "Envoy's own choice");

    // ORIGINAL_DST only knows the picker's header: requests that fail open find no server.
    let mut picker = cluster.picker(Gateway::OriginalDst).await;
    let closed = by_header("buffered.yaml", &picker);
    let open = closed.replace("failure_mode_allow: false", "failure_mode_allow: true");
    assert_ne!(open, closed);
    let envoy = envoy.beside(&open).await;
    assert_eq!(ask(envoy.listener("inference"), "POST", &[]).await.status, 200);
    picker.process.kill();
    let served = ask_without_a_picker(envoy.listener("inference"), &cluster, |status| status == 503).await;
    assert_eq!(served, 0);
    assert!(envoy.stat("ext_proc.failure_mode_allowed").await >= 2, "they were let through");
}
