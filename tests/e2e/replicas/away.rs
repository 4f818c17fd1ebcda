//! NATS or a picker is away for some time.

use super::*;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Longest time of a request that does not wait for NATS, if the test has the machine alone.
const AT_ONCE: Duration = Duration::from_secs(3);

async fn assert_served_at_once(to: SocketAddr) {
    let started = Instant::now();
    assert_served(to).await;
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
}

/// Clients that send requests through both Envoys, one after the other, until they are ended.
pub(crate) struct Clients {
    stop: watch::Sender<bool>,
    tasks: JoinSet<usize>,
}

impl Clients {
    pub(crate) fn start(to: [SocketAddr; 2]) -> Self {
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        for to in to.into_iter().cycle().take(8) {
            let stopped = stopped.clone();
            tasks.spawn(async move {
                let mut served = 0;
                while !*stopped.borrow() {
                    assert_served(to).await;
                    let whole = open(to, SHORT_SSE).await.finish().await.expect("a whole response");
                    assert!(whole.body.ends_with(b"[DONE]\n\n"));
                    served += 2;
                }
                served
            });
        }
        Self { stop, tasks }
    }

    /// Ends them after the requests that they are sending. Each request was served, or the test fails here.
    pub(crate) async fn end(self) -> usize {
        self.stop.send_replace(true);
        self.tasks.join_all().await.into_iter().sum()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pickers_start_and_serve_without_nats_and_become_peers_later() {
    let (mut nats, echo) = (NatsProcess::stopped(), Echo::start().await);
    let pair = Pair::start(&pool("{name: least-request}", &[echo.address]), &nats.url()).await;
    for (picker, to) in pair.pickers.iter().zip(pair.to) {
        assert_served(to).await;
        assert_eq!(picker.metric("attache_sync_connected").await, 0.0);
        assert!(peers(picker).await.is_empty());
    }
    let held = open(pair.to[0], LONG_SSE).await;
    nats.restart().await;
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_connected", 1.0).await;
    }
    pair.until_peers().await;
    pair.until_both(&[1]).await;
    drop(held);
    pair.until_both(&[0]).await;
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_outage_loses_no_request_and_views_agree_afterwards() {
    let (mut nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let pair = Pair::start(&pool("{name: least-request}", &[echo.address]), &nats.url()).await;
    pair.until_peers().await;
    let clients = Clients::start(pair.to);
    let ends_meanwhile = [open(pair.to[0], LONG_SSE).await, open(pair.to[1], LONG_SSE).await];
    eventually("the other picker's requests", async || {
        let counts = [peers(&pair.pickers[0]).await, peers(&pair.pickers[1]).await];
        counts.iter().all(|peers| peers[0]["requests_in_flight"].as_u64() > Some(0)).then_some(())
    })
    .await;
    nats.stop();
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_connected", 0.0).await;
    }
    drop(ends_meanwhile);
    let held = [open(pair.to[0], LONG_SSE).await, open(pair.to[0], LONG_SSE).await, open(pair.to[1], LONG_SSE).await];
    // A picker that receives no messages counts its own requests only.
    eventually("the requests of the silent peer to be dropped", async || {
        let peers = [peers(&pair.pickers[0]).await, peers(&pair.pickers[1]).await];
        peers.iter().all(|peers| peers[0]["requests_in_flight"] == 0).then_some(())
    })
    .await;
    let served = clients.end().await;
    assert!(served > 20, "{served} requests say little");
    nats.restart().await;
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_connected", 1.0).await;
    }
    pair.until_both(&[3]).await;
    for picker in &pair.pickers {
        assert!(picker.metric("attache_sync_dropped_messages_total").await > 0.0);
    }
    drop(held);
    pair.until_both(&[0]).await;
    pair.until_peers().await;
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_at_once_while_nats_does_not_answer() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let pair = Pair::alone(&pool("{name: least-request}", &[echo.address]), &nats.url()).await;
    pair.until_peers().await;
    nats.pause();
    let held = open(pair.to[0], LONG_SSE).await;
    for _ in 0..20 {
        assert_served_at_once(pair.to[0]).await;
        assert_served_at_once(pair.to[1]).await;
    }
    assert_eq!((in_flight(&pair.pickers[0]).await, in_flight(&pair.pickers[1]).await), (vec![1], vec![0]));
    // The connection is given up, and so is each attempt to connect again.
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_connected", 0.0).await;
        assert_served_at_once(pair.to[0]).await;
        assert_served_at_once(pair.to[1]).await;
    }
    nats.resume();
    pair.until_peers().await;
    pair.until_both(&[1]).await;
    drop(held);
    pair.until_both(&[0]).await;
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_picker_replaces_its_killed_predecessor() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let config = pool("{name: least-request}", &[echo.address]);
    let mut pair = Pair::start(&config, &nats.url()).await;
    pair.until_peers().await;
    let dead = until_peer(&pair.pickers[1], "a").await;
    let held = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[1]).await;
    pair.pickers[0].process.kill();
    drop(held);
    let restarted = picker(&config, "a", &nats.url()).await;
    eventually("only the new process", async || {
        let peers = peers(&pair.pickers[1]).await;
        (peers.len() == 1 && peers[0]["name"] == "a" && peers[0]["process"] != dead.as_str()).then_some(())
    })
    .await;
    assert_eq!(in_flight(&pair.pickers[1]).await, [0]);
    until_peer(&restarted, "b").await;
    // A picker that starts learns which requests are in flight.
    let held = open(pair.to[1], LONG_SSE).await;
    eventually("the request of the other picker", async || (in_flight(&restarted).await == [1]).then_some(())).await;
    drop(held);
    eventually("its end", async || (in_flight(&restarted).await == [0]).then_some(())).await;
    pair.pickers[1].assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn log_stays_short_while_nats_is_away() {
    let (nats, echo) = (NatsProcess::stopped(), Echo::start().await);
    // It accepts connections and closes them at once.
    let listener = tokio::net::TcpListener::bind(nats.address).await.expect("a port that was free");
    let picker = picker(&pool("{name: least-request}", &[echo.address]), "a", &nats.url()).await;
    for _ in 0..8 {
        let attempt = tokio::time::timeout(Duration::from_secs(10), listener.accept()).await;
        drop(attempt.expect("a further attempt").expect("a connection"));
    }
    let lines = lines_about_nats(&picker.process);
    assert!((1..=3).contains(&lines.len()), "{lines:#?}");
    picker.assert_settled().await;
}
