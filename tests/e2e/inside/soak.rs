//! Attaché inside Envoy while everything changes at once: requests wait in a queue and are resumed, clients leave, and
//! listeners, routes, clusters and the members of the pool are replaced.
//!
//! `ATTACHE_SOAK_SECONDS` says how long, 20 without it. An hour has a thousand updates of Envoy.

use super::waits::{Dynamic, replace};
use super::{CHAT, addresses, four};
use crate::support::body::{Payload, chat, sha256};
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::inside::{Inside, inside_bootstrap};
use crate::support::process::{memory, scratch};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Changes in the whole time, but at most ten a second. Three quarters are updates of Envoy, the others of the pool.
const CHANGES: u32 = 1_340;
/// Prompts of each client. They come again and again, because the prefix index grows with each new one, up to its limit.
const PROMPTS: u64 = 64;
/// Clients at once: more than the servers have room for, so that requests are queued.
const CLIENTS: u64 = 24;

/// A pool whose servers have at most two requests each; the others are queued.
fn pool(servers: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = servers.iter().map(|at| format!("{{address: \"{at}\", engine: none}}")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  destination: {{mode: list}}\n  \
         endpoints: [{}]\n  flowControl:\n    enabled: true\n    \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 2}}}}\n    ttl: 30s\n",
        endpoints.join(", ")
    )
}

/// What one client has seen.
#[derive(Default)]
struct Seen {
    served: u64,
    left: u64,
}

/// Sends requests until `over`. Every fourth one is abandoned after some milliseconds, at a different stage each time.
async fn play(to: SocketAddr, client: u64, over: Arc<AtomicBool>) -> Seen {
    let mut seen = Seen::default();
    for number in 0.. {
        if over.load(Relaxed) {
            break;
        }
        let (body, http) = (chat(3_000, true, number % PROMPTS), if number % 2 == 0 { Http::H1 } else { Http::H2 });
        let target = format!("{CHAT}?kind=sse&size=2000&events=4&pace_ms=5");
        let request = client::request("POST", to, http, &target, Payload::sized(body.clone()));
        let answer = client::send(to, http, request);
        if number % 4 == client % 4 {
            let patience = Duration::from_millis((number * 7 + client) % 40);
            seen.left += u64::from(tokio::time::timeout(patience, answer).await.is_err());
            continue;
        }
        let reply = answer.await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 2_000), "request {number} of client {client}");
        assert_eq!(reply.header("x-echo-sha256"), sha256(&body));
        seen.served += 1;
    }
    seen
}

fn median(values: &[u64]) -> u64 {
    let mut values = values.to_vec();
    values.sort_unstable();
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_while_everything_changes() {
    let seconds = std::env::var("ATTACHE_SOAK_SECONDS").map_or(20, |text| text.parse().expect("seconds"));
    let time = Duration::from_secs(seconds);
    let echoes = four().await;
    let servers = addresses(&echoes);
    let files = scratch("inside-soak");
    let folder = files.path().to_owned();
    let configuration = folder.join("attache.yaml");
    std::fs::write(&configuration, pool(&servers)).expect("writing");
    let Dynamic { bootstrap, listener, routes, cluster } =
        Dynamic::of(&inside_bootstrap(&configuration, servers), &folder);
    let [lds, rds, cds] = ["lds", "rds", "cds"].map(|kind| folder.join(format!("{kind}.yaml")));
    for (file, text) in [(&cds, &cluster), (&rds, &routes), (&lds, &listener)] {
        replace(file, text);
    }
    // Listeners that are replaced end after a second. By default they keep their memory for ten minutes.
    let envoy = EnvoyProcess::with(&bootstrap, 4, &["--drain-time-s", "1"]).await;
    let inside = Inside::of(envoy, files).await;
    let (to, process) = (inside.clients(), inside.envoy.id());

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(play(to, client, over.clone()));
    }
    let mut pace = tokio::time::interval((time / CHANGES).max(Duration::from_millis(100)));
    let (began, mut used) = (tokio::time::Instant::now(), Vec::new());
    let mut updates = 0_usize;
    while began.elapsed() < time {
        pace.tick().await;
        match updates % 4 {
            0 => {
                replace(&lds, &listener.replace("stat_prefix: inference", &format!("stat_prefix: inference{updates}")))
            }
            1 => replace(&rds, &routes.replace("num_retries: 2", &format!("num_retries: {}", 2 + updates % 3))),
            2 => replace(
                &cds,
                &cluster.replace("connect_timeout: 2s", &format!("connect_timeout: 2.{:03}s", updates % 1_000)),
            ),
            _ => replace(&configuration, &pool(&servers[updates / 4 % 2..])),
        }
        updates += 1;
        used.push(memory(process, "VmRSS") >> 10);
    }
    over.store(true, Relaxed);
    let seen = clients.join_all().await;
    let (served, left): (u64, u64) = (seen.iter().map(|c| c.served).sum(), seen.iter().map(|c| c.left).sum());
    let books = inside.assert_settled().await;
    let applied = [
        inside.envoy.stat("listener_manager.lds.update_success").await,
        inside.envoy.stat("rds.inference.update_success").await,
        inside.envoy.stat("cluster_manager.cds.update_success").await,
    ];
    let queued = inside.metric("attache_queue_wait_seconds_count").await;
    let (late_hooks, hooks) = inside.late_hooks().await;
    // The first quarter fills caches and pools.
    let (early, late) = (median(&used[used.len() / 4..used.len() / 2]), median(&used[used.len() * 3 / 4..]));
    println!(
        "{} s: {served} served, {queued} queued, {left} left, {updates} changes, {applied:?} updates of Envoy; {early} then {late} kB; \
         {late_hooks} of {hooks} calls took more than 1 ms\n{books:?}",
        time.as_secs()
    );
    assert!(hooks > 3_000.0, "{hooks} calls");
    assert!(queued > 100.0, "{queued} queued requests say little");
    assert!(served > 300 && left > 30, "{served} and {left} requests say little");
    assert!(applied.iter().all(|&count| count > 10), "{applied:?}");
    assert!(books.outcomes.get("routed").is_some_and(|&routed| routed >= served), "{books:?}");
    assert!(late < early + early / 20 + 8_192, "from {early} to {late} kB");
}
