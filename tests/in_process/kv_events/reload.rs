//! Configuration reloads of pools whose engines connect to one central socket.

use super::*;
use attache_config::{ConfigText, Settings, Sources, load};
use attache_feeds::Feeds;
use attache_serving::health::Readiness;

const POD: &str = "127.0.0.1:8000";

/// Settings with the pool `a`, with a socket at `bind` and this block size, and the pools in `more`.
fn pools(bind: SocketAddr, block_size: u32, more: &str) -> Settings {
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: a\n  endpoints: [{{address: \"{POD}\", engine: none}}]\n  \
         prefixCache: {{tokenizer: {{type: remote}}, blockSize: {block_size}, kvEvents: {{bind: \"tcp://{bind}\", topic: kv@}}}}\n{more}"
    );
    let text = Some(ConfigText { name: "test".into(), bytes: text.into_bytes() });
    load(&Sources { registry: attache::plugins::registry(), text, ..Sources::default() }).expect("good settings").0
}

/// A free address.
async fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

fn feeds() -> (Feeds, DropGuard) {
    let stop = CancellationToken::new();
    (Feeds::new(Clock::start(), 1, None, Connections::new(ConnectionLimits::of(64)), stop.clone()), stop.drop_guard())
}

/// Hashes of the blocks that pool `a` knows of its engine.
fn held(feeds: &Feeds) -> BTreeSet<u64> {
    let cache = feeds.pool("a").unwrap().prefix();
    let residents = cache.residents().load();
    let caches = residents.values().flat_map(|resident| &resident.caches);
    caches.flat_map(|c| cache.index().held(c.holder, Tier::Gpu)).map(|h| h.0).collect()
}

/// An event that stores a block of `tokens` tokens.
fn block(hash: u64, tokens: u64) -> Any {
    let tokens: Vec<u64> = (0..tokens).collect();
    Any::Array(vec![
        "BlockStored".into(),
        ints(&[hash]),
        Any::Nil,
        ints(&tokens),
        Any::from(tokens.len()),
        Any::Nil,
        "GPU".into(),
    ])
}

/// Publishes a block until pool `a` knows it.
async fn until_block_is_known(feeds: &Feeds, bind: SocketAddr, hash: u64, tokens: u64) {
    let mut publisher = Publisher::connect(bind, POD.parse().unwrap(), None).await;
    publisher.subscribed().await;
    in_time("the block", async {
        while !held(feeds).contains(&hash) {
            publisher.publish(vec![block(hash, tokens)]).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn changed_block_size_clears_the_index_and_keeps_the_socket() {
    let (bind, readiness) = (free().await, Readiness::default());
    let (mut feeds, _stop) = feeds();
    feeds.apply(&pools(bind, 16, ""), &readiness).await.unwrap();
    until_block_is_known(&feeds, bind, 1, 16).await;
    for (round, block_size) in [(2, 32), (3, 16), (4, 32)] {
        feeds.apply(&pools(bind, block_size, ""), &readiness).await.unwrap();
        assert_eq!(held(&feeds), BTreeSet::new(), "what was known of other blocks is gone");
        until_block_is_known(&feeds, bind, round, u64::from(block_size)).await;
    }
    let elsewhere = free().await;
    feeds.apply(&pools(elsewhere, 32, ""), &readiness).await.unwrap();
    until_block_is_known(&feeds, elsewhere, 5, 32).await;
    until("the old socket is closed", || std::net::TcpListener::bind(bind).is_ok()).await;
}

#[tokio::test]
async fn rejected_reload_changes_no_pool() {
    let (bind, readiness) = (free().await, Readiness::default());
    let (mut feeds, _stop) = feeds();
    let b = "- {name: b, match: {models: [b]}, endpoints: [\"127.0.0.1:1\"]}\n";
    let before = pools(bind, 16, b);
    feeds.apply(&before, &readiness).await.unwrap();
    until("pool b is known", || feeds.pool("b").unwrap().store.load().endpoints.len() == 1).await;
    until_block_is_known(&feeds, bind, 1, 16).await;

    // The new pool's socket is in use, so `b` must not be removed and `a` not changed.
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = taken.local_addr().unwrap();
    let c = format!(
        "- {{name: c, match: {{models: [c]}}, endpoints: [\"127.0.0.1:2\"], prefixCache: {{tokenizer: {{type: remote}}, kvEvents: {{bind: \"tcp://{at}\"}}}}}}\n"
    );
    let error = feeds.apply(&pools(bind, 32, &c), &readiness).await.unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains(&at.to_string()) && error.contains("in use"), "the cause is told: {error}");
    feeds.keep(&before.pools);
    assert!(feeds.pool("c").is_none(), "a pool that came to nothing is gone");
    assert_eq!(held(&feeds), [1].into(), "`a` is as it was");
    until_block_is_known(&feeds, bind, 2, 16).await;
    let shown = feeds.pool("b").unwrap().store.load().generation;
    let moved = b.replace("127.0.0.1:1", "127.0.0.1:3");
    feeds.apply(&pools(bind, 16, &moved), &readiness).await.unwrap();
    until("`b` lives", || feeds.pool("b").unwrap().store.load().generation > shown).await;

    drop(taken);
    let after = pools(bind, 32, &c);
    feeds.apply(&after, &readiness).await.unwrap();
    feeds.keep(&after.pools);
    assert!(feeds.pool("b").is_none() && feeds.pool("c").is_some());
    until_block_is_known(&feeds, bind, 3, 32).await;
}
