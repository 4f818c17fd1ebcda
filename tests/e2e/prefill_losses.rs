//! Lost prefill workers, through real Envoy and with several requests in flight: they refuse connections, close them
//! during prefill, or leave the pool. Every request is served, and its response says how.

use crate::disagg::{CLIENTS, PREFILL, course_of_complete_response, load, request};
use crate::faults::refusing;
use crate::operation::replace;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client::{self, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Picks at random, so that servers without metrics are picked too.
fn pool(more: &str, prefill: &[SocketAddr], decode: SocketAddr) -> String {
    let line = |role: &str, address: &SocketAddr| format!("  - {{address: \"{address}\", role: {role}}}\n");
    let prefill: String = prefill.iter().map(|address| line("prefill", address)).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{prefillEndpointHeader: true}}\npools:\n- name: default\n  strategy: random\n{more}  endpoints:\n{prefill}{}",
        line("decode", &decode)
    )
}

/// Without ejection, each request is split, or its response names the reason why not.
const NO_EJECTION: &str = "  health: {consecutiveFailures: 0}\n  disaggregation: {decider: always}\n";

/// Two prefill workers and a decode worker. The picker and Envoy know the servers in the file.
struct Stack {
    sim: SimProcess,
    file: PathBuf,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
    _directory: tempfile::TempDir,
}

impl Stack {
    /// `text` makes the file from the two prefill workers and the decode worker.
    async fn start(text: impl AsyncFnOnce(SocketAddr, SocketAddr, SocketAddr) -> String) -> Self {
        let sim = SimProcess::with_roles("prefill=2,decode=1", 3, &["--speed", "20"]).await;
        let [one, other, decode] = sim.servers[..] else { panic!("three servers") };
        let directory = scratch("config");
        let file = directory.path().join("attache.yaml");
        replace(&file, &text(one, other, decode).await);
        let picker = AttacheProcess::with_file(&file, &[]).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        Self { sim, file, picker, envoy, _directory: directory }
    }

    fn decode(&self) -> SocketAddr {
        self.sim.servers[2]
    }

    fn to(&self) -> SocketAddr {
        self.envoy.listener("inference")
    }

    /// Replaces the file, and waits until the settings are reloaded and the pool has `count` endpoints.
    async fn reload_pool(&self, text: &str, count: usize) {
        const RELOADS: &str = "attache_config_reloads_total";
        let before = self.picker.metric(RELOADS).await;
        replace(&self.file, text);
        eventually("the pool to be another", || async {
            let (reloads, endpoints) = (self.picker.metric(RELOADS).await, self.picker.endpoints().await);
            (reloads > before && endpoints.len() == count).then_some(())
        })
        .await;
    }

    async fn faults(&self, faults: Value) {
        for server in &self.sim.servers[..2] {
            let reply = client::post(*server, "/sim/faults", faults.to_string().into()).await.expect("an answer");
            assert_eq!(reply.status, 200, "{faults}");
        }
    }

    /// A counter of `/sim/pd` of each server.
    async fn counts(&self, pointer: &str) -> [u64; 3] {
        let mut counts = [0; 3];
        for (count, server) in counts.iter_mut().zip(&self.sim.servers) {
            let page = client::get(*server, "/sim/pd").await.expect("a page").json();
            *count = page.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} in {page}"));
        }
        counts
    }

    /// Number of prefill calls with this outcome.
    async fn prefill_calls(&self, outcome: &str) -> usize {
        let page = client::get(self.picker.metrics, "/metrics").await.expect("the picker's metrics");
        let text = String::from_utf8_lossy(&page.body).into_owned();
        let series = format!("attache_prefill_legs_total{{outcome=\"{outcome}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&series));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {series} in {text}"))
    }

    /// Requests in prefill, which get no response until the test ends the fault, and their number on each server.
    async fn requests_in_prefill(&self, count: usize) -> (JoinSet<Reply>, [u64; 3]) {
        self.faults(json!({"prefill": {"hang": true}})).await;
        let (to, mut clients) = (self.to(), JoinSet::new());
        for number in 0..count {
            let body = request(number, number.is_multiple_of(2));
            clients.spawn(async move { client::post(to, "/v1/completions", body).await.expect("an answer") });
        }
        let hanging = eventually("all prompts to be under way", || async {
            let hanging = self.counts("/hanging").await;
            (hanging.iter().sum::<u64>() == count as u64).then_some(hanging)
        });
        (clients, hanging.await)
    }

    /// No worker prefills or keeps blocks, though no lease has ended, and all counters are back at zero.
    async fn assert_nothing_stays(&self) {
        for what in ["/hanging", "/pinned/requests"] {
            eventually(what, || async { (self.counts(what).await == [0; 3]).then_some(()) }).await;
        }
        assert_eq!(self.counts("/leases_expired").await, [0; 3]);
        self.picker.assert_settled().await;
    }
}

/// How a complete response was made, and its prefill worker.
fn course_and_worker(reply: Reply) -> (String, String) {
    let prefill = reply.header(PREFILL).to_owned();
    (course_of_complete_response(reply), prefill)
}

fn split_by(server: SocketAddr) -> (String, String) {
    ("split".to_owned(), server.to_string())
}

fn local(reason: &str) -> (String, String) {
    (format!("local; reason={reason}"), String::new())
}

async fn answers(clients: JoinSet<Reply>) -> Vec<(String, String)> {
    clients.join_all().await.into_iter().map(course_and_worker).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_prefill_worker_costs_no_request() {
    const REQUESTS: usize = 40;
    let gone = refusing().await;
    let ejects = "  health: {ejection: 60s, maxEjection: 60s}\n  disaggregation: {decider: always}\n";
    let stack = Stack::start(async |one, _, decode| pool(ejects, &[gone, one], decode)).await;
    let other = split_by(stack.sim.servers[0]);
    assert_eq!(load(stack.to(), REQUESTS, course_and_worker).await, vec![other.clone(); REQUESTS]);
    // The second refusal in a row ejects the worker. Each other client may have a call to it in flight then.
    let refused = stack.prefill_calls("prefill_refused").await;
    assert!((1..=1 + CLIENTS).contains(&refused), "{refused} of {REQUESTS} were refused");

    // The unreachable worker is the only one, and is never ejected.
    stack.reload_pool(&pool(NO_EJECTION, &[gone], stack.decode()), 2).await;
    assert_eq!(load(stack.to(), REQUESTS, course_and_worker).await, vec![local("prefill_refused"); REQUESTS]);
    assert_eq!(stack.prefill_calls("prefill_refused").await, refused + REQUESTS);
    stack.assert_nothing_stays().await;

    // The unreachable worker is one of two, and is never ejected: all calls to it are retried at the other.
    stack.reload_pool(&pool(NO_EJECTION, &[gone, stack.sim.servers[0]], stack.decode()), 3).await;
    assert_eq!(load(stack.to(), REQUESTS, course_and_worker).await, vec![other; REQUESTS]);
    assert!(stack.prefill_calls("prefill_refused").await > refused + REQUESTS, "it was asked again");
    stack.assert_nothing_stays().await;
}

/// A proxy in front of a server that can close connections and stop listening.
struct Wire {
    address: SocketAddr,
    breaks: watch::Sender<()>,
    listens: JoinHandle<()>,
}

impl Wire {
    async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (breaks, _) = watch::channel(());
        let told = breaks.clone();
        let listens = tokio::spawn(async move {
            loop {
                let (mut client, _) = listener.accept().await.expect("a connection");
                let mut broken = told.subscribe();
                tokio::spawn(async move {
                    let Ok(mut upstream) = TcpStream::connect(server).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut upstream) => {}
                        _ = broken.changed() => {}
                    }
                });
            }
        });
        Self { address, breaks, listens }
    }

    /// Closes all connections, and accepts new ones.
    fn close_connections(&self) {
        self.breaks.send_replace(());
    }

    /// Stops accepting connections. Existing ones stay open.
    async fn stop_listening(&mut self) {
        self.listens.abort();
        let ended = (&mut self.listens).await;
        assert!(ended.is_err_and(|error| error.is_cancelled()), "it has listened until now");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_lost_during_prefill_costs_no_request() {
    const REQUESTS: usize = 3 * CLIENTS;
    let mut wire = None;
    let stack = Stack::start(async |one, other, decode| {
        let before = wire.insert(Wire::before(one).await);
        pool(NO_EJECTION, &[before.address, other], decode)
    })
    .await;
    let wire = wire.expect("a wire");
    let (clients, hanging) = stack.requests_in_prefill(REQUESTS).await;
    let [behind, other, _] = hanging;
    assert!(behind > 0 && other > 0, "both compute prompts: {hanging:?}");
    wire.close_connections();
    // Requests that lost their worker are sent to the other.
    eventually("the other to compute all prompts", || async {
        (stack.counts("/hanging").await == [0, REQUESTS as u64, 0]).then_some(())
    })
    .await;
    stack.faults(json!({})).await;
    assert_eq!(answers(clients).await, vec![split_by(stack.sim.servers[1]); REQUESTS]);
    let broken = stack.prefill_calls("prefill_broken").await;
    assert_eq!(broken as u64, behind);
    stack.assert_nothing_stays().await;

    // The only prefill worker.
    stack.reload_pool(&pool(NO_EJECTION, &[wire.address], stack.decode()), 2).await;
    let (clients, _) = stack.requests_in_prefill(CLIENTS).await;
    wire.close_connections();
    assert_eq!(answers(clients).await, vec![local("prefill_broken"); CLIENTS]);
    assert_eq!(stack.prefill_calls("prefill_broken").await, broken + CLIENTS);
    // As soon as connections stay open, it prefills again.
    stack.faults(json!({})).await;
    assert_eq!(load(stack.to(), CLIENTS, course_and_worker).await, vec![split_by(wire.address); CLIENTS]);
    stack.assert_nothing_stays().await;
}

/// A removed worker may finish its prefills, so the picker waits for it up to the usual timeout.
#[tokio::test(flavor = "multi_thread")]
async fn prefill_workers_removed_during_prefill_cost_no_request() {
    /// How the prefills of removed workers end.
    #[derive(Debug)]
    enum End {
        Computed,
        Never,
        Gone,
    }
    let mut wires = Vec::new();
    let stack = Stack::start(async |one, other, decode| {
        wires.extend([Wire::before(one).await, Wire::before(other).await]);
        pool(NO_EJECTION, &[wires[0].address, wires[1].address], decode)
    })
    .await;
    let both = [wires[0].address, wires[1].address];
    for end in [End::Computed, End::Never, End::Gone] {
        // Long enough for all prefills to start and the pool to change, also on a busy machine.
        let timeout = if matches!(end, End::Never) { "5s" } else { "60s" };
        let disaggregation = format!("decider: always, prefillTimeout: {timeout}");
        let settings = NO_EJECTION.replace("decider: always", &disaggregation);
        stack.reload_pool(&pool(&settings, &both, stack.decode()), 3).await;
        let before: u64 = stack.counts("/prefills").await.iter().sum();
        let (clients, hanging) = stack.requests_in_prefill(2 * CLIENTS).await;
        assert!(hanging[..2].iter().all(|count| *count > 0), "both compute prompts: {hanging:?}");
        stack.reload_pool(&pool(&settings, &[], stack.decode()), 1).await;
        // New requests find no prefill worker, and do not wait behind earlier ones.
        let alone = load(stack.to(), CLIENTS, course_and_worker).await;
        assert_eq!(alone, vec![local("no_prefill_endpoint"); CLIENTS], "{end:?}");
        match end {
            End::Computed => {
                stack.faults(json!({})).await;
                let seen = answers(clients).await;
                let split = both.map(split_by);
                assert!(seen.iter().all(|course| split.contains(course)), "{seen:?}");
            }
            End::Never => {
                assert_eq!(answers(clients).await, vec![local("prefill_late"); 2 * CLIENTS]);
                let asked: u64 = stack.counts("/prefills").await.iter().sum();
                assert_eq!(asked - before, 2 * CLIENTS as u64, "no late prompt waits for another prefill worker");
                eventually("the servers to see that nobody waits", || async {
                    (stack.counts("/hanging").await == [0; 3]).then_some(())
                })
                .await;
                stack.faults(json!({})).await;
            }
            End::Gone => {
                // Both stop listening before the first closes its connections: no retry can succeed, whether or not
                // there is one.
                for wire in &mut wires {
                    wire.stop_listening().await;
                }
                wires.iter().for_each(Wire::close_connections);
                let seen = answers(clients).await;
                let lost = [local("prefill_broken"), local("prefill_refused")];
                assert!(seen.iter().all(|course| lost.contains(course)), "{seen:?}");
            }
        }
        stack.assert_nothing_stays().await;
    }
}
