//! Publishers on the bus between pickers: forged messages of others, and invented senders. NATS enforces the permissions
//! that `docs/how-to/replicas.md` gives.

use crate::replicas::strangers::{field, message, varint};
use crate::replicas::{LONG_SSE, Pair, assert_served, open, peers, picker, pool, until_peer};
use crate::support::echo::Echo;
use crate::support::nats::NatsProcess;
use crate::support::process::{eventually, scratch};
use std::fmt::Write;

const HEARTBEAT: u8 = 5;
const COLUMN: u8 = 7;

/// A server with a user for each name, which may publish under this name only.
async fn nats(names: &[&str]) -> NatsProcess {
    let mut users = String::new();
    for name in names {
        writeln!(
            users,
            "{{user: {name}, password: of-{name}, permissions: {{publish: [\"attache.sync.v2.all.{name}.*\", \
             \"attache.sync.v2.to.*.{name}.*\"], subscribe: [\"attache.sync.v2.all.*.*\", \
             \"attache.sync.v2.to.*.*.*\"]}}}}"
        )
        .expect("text");
    }
    let directory = scratch("nats-users");
    let path = directory.path().join("nats.conf");
    std::fs::write(&path, format!("authorization {{users: [\n{users}]}}\n")).expect("a file");
    NatsProcess::with_arguments(&["--config", &path.display().to_string()]).await
}

fn url(nats: &NatsProcess, name: &str) -> String {
    nats.url_for(name, &format!("of-{name}"))
}

/// An empty column at the last number.
fn column(sender: u64) -> Vec<u8> {
    let content = [field(1, 0, &varint(u64::MAX)), field(3, 0, &varint(1))].concat();
    message(sender, COLUMN, &content)
}

fn heartbeat(sender: u64, name: &str, last_batch: u64) -> Vec<u8> {
    let name = field(1, 2, &[varint(name.len() as u64), name.as_bytes().to_vec()].concat());
    message(sender, HEARTBEAT, &[name, field(2, 0, &varint(last_batch))].concat())
}

async fn pair(nats: &NatsProcess, echo: &Echo) -> Pair {
    let config = pool("{name: least-request}", &[echo.address]);
    let pair =
        Pair::of([picker(&config, "a", &url(nats, "a")).await, picker(&config, "b", &url(nats, "b")).await]).await;
    pair.until_peers().await;
    pair
}

/// Checks that both pickers serve, and that no request is left.
async fn assert_settled(pair: &Pair) {
    for to in pair.to {
        assert_served(to).await;
    }
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publisher_cannot_forge_messages_of_another_picker() {
    let (nats, echo) = (nats(&["a", "b", "mallory"]).await, Echo::start().await);
    let pair = pair(&nats, &echo).await;
    let a = until_peer(&pair.pickers[1], "a").await;
    let b = until_peer(&pair.pickers[0], "b").await;
    let sender = u64::from_str_radix(&a, 16).expect("an identity");
    let held = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[1]).await;
    for forged in [heartbeat(sender, "a", u64::MAX), column(sender)] {
        // NATS denies the subjects of others.
        for subject in [format!("attache.sync.v2.all.a.{a}"), format!("attache.sync.v2.to.{b}.a.{a}")] {
            let denied = nats.publish_as("mallory", "of-mallory", &subject, &forged).await;
            assert!(denied.as_ref().is_err_and(|error| error.contains("Permissions Violation")), "{denied:?}");
        }
        // Pickers drop senders of others in its own subjects.
        let own = format!("attache.sync.v2.all.mallory.{a}");
        nats.publish_as("mallory", "of-mallory", &own, &forged).await.expect("its own subject");
    }
    for picker in &pair.pickers {
        picker.until_metric("attache_sync_invalid_messages_total", 2.0).await;
    }
    let more = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[2]).await;
    drop((held, more));
    pair.until_both(&[0]).await;
    assert_settled(&pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invented_senders_of_one_publisher_keep_no_new_picker_out() {
    let (nats, echo) = (nats(&["a", "b", "c", "mallory"]).await, Echo::start().await);
    let pair = pair(&nats, &echo).await;
    for process in 0..200 {
        let sender = attache_sync::sender_of("mallory", process);
        let subject = format!("attache.sync.v2.all.mallory.{sender:016x}");
        let sent = nats.publish_as("mallory", "of-mallory", &subject, &heartbeat(sender, "mallory", u64::MAX)).await;
        sent.expect("its own subject");
    }
    for picker in &pair.pickers {
        eventually("refused senders", async || {
            (picker.metric("attache_sync_refused_senders_total").await > 0.0).then_some(())
        })
        .await;
    }
    let config = pool("{name: least-request}", &[echo.address]);
    let new = picker(&config, "c", &url(&nats, "c")).await;
    for picker in &pair.pickers {
        eventually("the new picker as a peer", async || {
            let peers = peers(picker).await;
            let [a_or_b, c] = [["a", "b"].as_slice(), &["c"]]
                .map(|names| peers.iter().filter(|peer| names.iter().any(|name| peer["name"] == *name)).count());
            (a_or_b == 1 && c == 1 && peers.len() <= 64).then_some(())
        })
        .await;
    }
    let held = open(pair.to[0], LONG_SSE).await;
    pair.until_both(&[1]).await;
    eventually("the new picker to count the request", async || {
        (crate::replicas::in_flight(&new).await == [1]).then_some(())
    })
    .await;
    drop(held);
    pair.until_both(&[0]).await;
    assert_settled(&pair).await;
}
