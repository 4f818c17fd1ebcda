//! The KV event feed over real ZeroMQ sockets: publishers of the `zeromq` crate bind, connect, replay in both formats,
//! drop old events, restart, and send false data.

use attache_kv_events::{
    Count, Destination, Doubt, Feed, KvEventStats, MemoryLimits, Residents, Source, Subscription, Timing, Trust,
};
use attache_pool::ports::{PORT_LABEL, REPLAY_PORT_LABEL};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot, Published, SnapshotStore};
use attache_prefix::block_size::BlockSize;
use attache_prefix::{IndexConfig, KeySpace, PrefixIndex, Tier};
use attache_record::KvTape;
use attache_serving::connections::{Closed, ConnectionLimits, Connections};
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use parking_lot::Mutex;
use rmpv::Value as Any;
use std::collections::BTreeSet;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tracing::field::Field;
use tracing::{Event, Level, Metadata, span};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

/// Timeout of each wait in these tests.
const PATIENCE: Duration = Duration::from_secs(20);

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    in_time(what, poll).await;
}

/// Format of replay responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// `topic, seq, payload`, since vLLM 0.26.
    Three,
    /// `seq, payload`, before vLLM 0.26.
    Two,
    /// No response.
    Silent,
}

/// The replay buffer of a publisher.
#[derive(Debug)]
struct Ring {
    topic: String,
    frames: Vec<Bytes>,
    /// Index of the oldest event in the buffer.
    oldest: usize,
    form: Form,
    replay_starts: Vec<u64>,
}

/// A publisher: an XPUB socket, so that a test can wait for a subscription, and a ROUTER socket for replays.
struct Publisher {
    socket: XPubSocket,
    ring: Arc<Mutex<Ring>>,
    rank: u32,
    events: SocketAddr,
    replay: Option<SocketAddr>,
    _replaying: Option<AbortOnDropHandle<()>>,
}

fn address(endpoint: &zeromq::Endpoint) -> SocketAddr {
    endpoint.to_string().strip_prefix("tcp://").unwrap().parse().unwrap()
}

impl Publisher {
    /// Binds to free ports.
    async fn bind(form: Option<Form>) -> Self {
        Self::bind_at("127.0.0.1:0".parse().unwrap(), form).await
    }

    async fn bind_at(at: SocketAddr, form: Option<Form>) -> Self {
        let mut socket = XPubSocket::new();
        let events = address(&socket.bind(&format!("tcp://{at}")).await.unwrap());
        Self::of(socket, events, form).await
    }

    /// Connects to a central socket.
    async fn connect(to: SocketAddr, pod: SocketAddr, form: Option<Form>) -> Self {
        let mut socket = XPubSocket::new();
        socket.connect(&format!("tcp://{to}")).await.unwrap();
        let publisher = Self::of(socket, to, form).await;
        publisher.ring.lock().topic = format!("kv@{pod}@model");
        publisher
    }

    async fn of(socket: XPubSocket, events: SocketAddr, form: Option<Form>) -> Self {
        let topic = "kv@127.0.0.1:8000@model".to_owned();
        let ring = Ring {
            topic,
            frames: Vec::new(),
            oldest: 0,
            form: form.unwrap_or(Form::Silent),
            replay_starts: Vec::new(),
        };
        let ring = Arc::new(Mutex::new(ring));
        let (mut replay, mut replaying) = (None, None);
        if form.is_some() {
            let mut router = RouterSocket::new();
            replay = Some(address(&router.bind("tcp://127.0.0.1:0").await.unwrap()));
            replaying = Some(AbortOnDropHandle::new(tokio::spawn(answer(router, ring.clone()))));
        }
        Self { socket, ring, rank: 0, events, replay, _replaying: replaying }
    }

    /// Drops the connections and keeps the replay buffer.
    fn close(&mut self) {
        self.socket = XPubSocket::new();
    }

    /// Binds to the same address again.
    async fn open(&mut self) {
        let at = format!("tcp://{}", self.events);
        in_time("the old socket gone", async {
            while self.socket.bind(&at).await.is_err() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }

    /// Waits for a subscription.
    async fn subscribed(&mut self) {
        loop {
            // A disconnected subscriber appears as a socket error.
            match in_time("a subscription", self.socket.recv()).await {
                Ok(message) if message.get(0).is_some_and(|f| f.first() == Some(&1)) => return,
                _ => {}
            }
        }
    }

    /// Adds a batch to the buffer without sending it, as if it were lost.
    fn lose(&self, events: Vec<Any>) -> (u64, Bytes) {
        let mut ring = self.ring.lock();
        let seq = ring.frames.len() as u64;
        let made = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let batch = Any::Array(vec![Any::from(made), Any::Array(events), Any::from(self.rank)]);
        let mut payload = Vec::new();
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        let payload = Bytes::from(payload);
        ring.frames.push(payload.clone());
        (seq, payload)
    }

    async fn publish(&mut self, events: Vec<Any>) {
        let (seq, payload) = self.lose(events);
        self.send(seq, payload).await;
    }

    async fn send(&mut self, seq: u64, payload: Bytes) {
        let topic = Bytes::from(self.ring.lock().topic.clone());
        self.raw(vec![topic, seq.to_be_bytes().to_vec().into(), payload]).await;
    }

    async fn raw(&mut self, frames: Vec<Bytes>) {
        // A disconnected subscriber does not matter to the publisher.
        let _ = in_time("sending", self.socket.send(ZmqMessage::try_from(frames).unwrap())).await;
    }

    fn replay_starts(&self) -> Vec<u64> {
        self.ring.lock().replay_starts.clone()
    }
}

async fn answer(mut router: RouterSocket, ring: Arc<Mutex<Ring>>) {
    while let Ok(question) = router.recv().await {
        let (Some(who), Some(from)) = (question.get(0), question.iter().last()) else { continue };
        let who = who.clone();
        let from = u64::from_be_bytes(from.as_ref().try_into().unwrap());
        let (topic, frames, form) = {
            let mut ring = ring.lock();
            ring.replay_starts.push(from);
            let first = usize::try_from(from).unwrap().max(ring.oldest);
            let frames: Vec<_> = (first..ring.frames.len()).map(|i| (i as u64, ring.frames[i].clone())).collect();
            (Bytes::from(ring.topic.clone()), frames, ring.form)
        };
        if form == Form::Silent {
            continue;
        }
        let end = (u64::MAX, Bytes::new());
        for (seq, payload) in frames.into_iter().chain([end]) {
            let mut message = vec![who.clone(), Bytes::new()];
            if form == Form::Three {
                message.push(if seq == u64::MAX { Bytes::new() } else { topic.clone() });
            }
            message.extend([Bytes::from(seq.to_be_bytes().to_vec()), payload]);
            let _ = router.send(ZmqMessage::try_from(message).unwrap()).await;
        }
    }
}

fn ints(values: &[u64]) -> Any {
    Any::Array(values.iter().map(|v| Any::from(*v)).collect())
}

/// Blocks of one token each. `hashes` are their hashes and tokens.
fn stored(parent: Option<u64>, hashes: &[u64]) -> Any {
    let fields = vec![
        ("type", Any::from("BlockStored")),
        ("block_hashes", ints(hashes)),
        ("parent_block_hash", parent.map_or(Any::Nil, Any::from)),
        ("token_ids", ints(hashes)),
        ("block_size", Any::from(1)),
    ];
    Any::Map(fields.into_iter().map(|(k, v)| (Any::from(k), v)).collect())
}

/// The event format of old publishers.
fn removed(hashes: &[u64]) -> Any {
    Any::Array(vec![Any::from("BlockRemoved"), ints(hashes), Any::from("GPU")])
}

fn cleared() -> Any {
    Any::Array(vec![Any::from("AllBlocksCleared")])
}

/// Short timeouts for tests. Timers that must not fire are far in the future.
fn quick() -> Timing {
    Timing {
        connect: Duration::from_secs(5),
        frame: Duration::from_secs(3_600),
        heartbeat: Duration::from_secs(3_600),
        reconnect_min: Duration::from_millis(10),
        reconnect_max: Duration::from_millis(50),
        replay_idle: Duration::from_secs(2),
        replay_total: Duration::from_secs(10),
        check_after: Duration::from_secs(3_600),
        retry_after: Duration::from_secs(3_600),
    }
}

fn subscription() -> Subscription {
    Subscription { timing: quick(), ..Subscription::default() }
}

/// A running feed and a pool that the test publishes.
struct Rig {
    index: Arc<PrefixIndex>,
    residents: Arc<Residents>,
    block_size: Arc<BlockSize>,
    stats: Arc<KvEventStats>,
    store: Arc<SnapshotStore>,
    published: watch::Sender<Published>,
    central: Option<SocketAddr>,
    running: JoinHandle<()>,
    stop: DropGuard,
}

impl Rig {
    async fn start(subscription: Subscription) -> Self {
        Self::within(1 << 26, subscription).await
    }

    /// With a prefix index of this size.
    async fn within(budget_bytes: usize, subscription: Subscription) -> Self {
        let index = Arc::new(PrefixIndex::new(IndexConfig {
            budget_bytes,
            tenant_share: 1.0,
            half_life: Duration::from_secs(60),
            seed: 1,
        }));
        let residents: Arc<Residents> = Arc::default();
        let block_size = Arc::new(BlockSize::of_engines(16));
        let store = Arc::new(SnapshotStore::default());
        let published = watch::Sender::new(Published::default());
        let feed = Feed::new(
            Destination {
                index: index.clone(),
                residents: residents.clone(),
                keys: KeySpace::new(1),
                block_size: block_size.clone(),
                recomputed: Arc::default(),
                tape: KvTape::default(),
            },
            store.clone(),
            published.subscribe(),
            subscription,
            Clock::start(),
            1,
        );
        let stats = feed.stats();
        let central = feed.central_address().unwrap();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(feed.run(shutdown.clone()));
        Self { index, residents, block_size, stats, store, published, central, running, stop: shutdown.drop_guard() }
    }

    /// Makes these the pool's endpoints.
    fn pool(&self, specs: Vec<(u32, EndpointSpec)>) {
        self.pool_with(specs, None);
    }

    fn pool_with(&self, specs: Vec<(u32, EndpointSpec)>, num_blocks: Option<u32>) {
        self.pool_of(specs, EndpointMetrics { num_blocks, ..EndpointMetrics::default() });
    }

    fn pool_of(&self, specs: Vec<(u32, EndpointSpec)>, metrics: EndpointMetrics) {
        let generation = self.store.load().generation + 1;
        let states = specs.into_iter().map(|(id, spec)| {
            EndpointState::new(Arc::new(Endpoint::new(EndpointId(id), spec)), Some(Arc::new(metrics.clone())))
        });
        self.store.publish(PoolSnapshot::new(generation, true, states.collect()));
        self.published.send_replace(Published { generation, membership: generation });
    }

    /// Subscribes to one publisher as endpoint 0.
    async fn following(subscription: Subscription, publisher: &mut Publisher) -> Self {
        let rig = Self::start(subscription).await;
        rig.pool(vec![(0, pod(publisher))]);
        publisher.subscribed().await;
        rig
    }

    fn trust(&self, id: u32) -> Option<Trust> {
        self.residents.load().get(&EndpointId(id)).map(attache_kv_events::Resident::trust)
    }

    fn held(&self, id: u32) -> BTreeSet<u64> {
        let residents = self.residents.load();
        let caches = residents.get(&EndpointId(id)).into_iter().flat_map(|r| &r.caches);
        caches.flat_map(|c| self.index.held(c.holder, Tier::Gpu)).map(|h| h.0).collect()
    }

    async fn trusts(&self, id: u32, trust: Trust) {
        until(&format!("{trust:?}, is {:?}", self.trust(id)), || self.trust(id) == Some(trust)).await;
    }

    async fn holds(&self, id: u32, hashes: impl IntoIterator<Item = u64>) {
        let want: BTreeSet<u64> = hashes.into_iter().collect();
        until(&format!("endpoint {id} holding {want:?}"), || self.held(id) == want).await;
    }

    fn count(&self, count: Count) -> u64 {
        self.stats.get(count)
    }
}

/// An endpoint whose labels have the ports of `publisher`.
fn pod(publisher: &Publisher) -> EndpointSpec {
    let mut spec = EndpointSpec::at("127.0.0.1:8000".parse().unwrap());
    spec.labels.insert(PORT_LABEL.into(), publisher.events.port().to_string().into());
    if let Some(replay) = publisher.replay {
        spec.labels.insert(REPLAY_PORT_LABEL.into(), replay.port().to_string().into());
    }
    spec
}

#[tokio::test]
async fn subscriber_from_the_first_event_is_exact() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    assert_eq!(rig.trust(0), Some(Trust::Unknown));
    publisher.publish(vec![stored(None, &[1, 2])]).await;
    publisher.publish(vec![stored(Some(2), &[3]), removed(&[3])]).await;
    publisher.publish(vec![stored(Some(2), &[4])]).await;
    rig.holds(0, [1, 2, 4]).await;
    rig.trusts(0, Trust::Exact).await;
    assert_eq!(rig.count(Count::Frames), 3);
    assert_eq!(rig.count(Count::Events), 4);
    assert!(rig.stats.lag() < PATIENCE);
}

#[tokio::test]
async fn late_subscriber_gets_a_replay_in_both_formats() {
    for form in [Form::Three, Form::Two] {
        let mut publisher = Publisher::bind(Some(form)).await;
        publisher.lose(vec![stored(None, &[1, 2])]);
        publisher.lose(vec![stored(Some(2), &[3])]);
        let rig = Rig::following(subscription(), &mut publisher).await;
        rig.holds(0, [1, 2, 3]).await;
        rig.trusts(0, Trust::Exact).await;
        publisher.publish(vec![stored(Some(3), &[4])]).await;
        rig.holds(0, [1, 2, 3, 4]).await;
        assert_eq!((rig.count(Count::ReplayedFrames), publisher.replay_starts()), (2, vec![0]));
    }
}

#[tokio::test]
async fn empty_replay_of_an_idle_publisher_is_exact() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn repeated_reports_without_an_origin_are_not_exact() {
    let (lines, mut publisher) = (Lines::default(), Publisher::bind(None).await);
    let _logging = tracing::subscriber::set_default(lines.clone());
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1, 2, 3, 4])]).await;
    rig.trusts(0, Trust::Exact).await;
    publisher.publish(vec![stored(None, &[1, 2, 3, 4])]).await;
    rig.trusts(0, Trust::Uncounted).await;
    publisher.publish(vec![removed(&[4, 3, 2, 1]), stored(None, &[9])]).await;
    rig.holds(0, [1, 2, 3, 4, 9]).await;
    assert_eq!(rig.trust(0), Some(Trust::Uncounted), "the second report may have been of the same copy");
    publisher.publish(vec![removed(&[4, 3, 2, 1])]).await;
    rig.holds(0, [9]).await;
    rig.trusts(0, Trust::Exact).await;
    publisher.publish(vec![stored(None, &[9])]).await;
    rig.trusts(0, Trust::Uncounted).await;
    publisher.publish(vec![cleared()]).await;
    rig.trusts(0, Trust::Exact).await;
    assert_eq!(lines.about("reported again"), [Level::INFO], "one line in a minute, without need to act");
}

/// Log lines of the thread: level and message.
#[derive(Clone, Debug, Default)]
struct Lines(Arc<Mutex<Vec<(Level, String)>>>);

impl Lines {
    /// Levels of the lines with `text` in their message.
    fn about(&self, text: &str) -> Vec<Level> {
        let lines = self.0.lock();
        lines.iter().filter(|(_, message)| message.contains(text)).map(|(level, _)| *level).collect()
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = String::new();
        event.record(&mut |field: &Field, value: &dyn std::fmt::Debug| {
            if field.name() == "message" {
                message = format!("{value:?}");
            }
        });
        self.0.lock().push((*event.metadata().level(), message));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[tokio::test]
async fn endpoints_with_wrong_or_shared_ports_are_named_and_not_read() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::start(subscription()).await;
    let labelled = |address: &str, label: &str, value: &str| {
        let mut spec = EndpointSpec::at(address.parse().unwrap());
        spec.labels.insert(label.into(), value.into());
        spec
    };
    let other = |port: u16| labelled("127.0.0.1:8001", PORT_LABEL, &port.to_string());
    let at = publisher.events.port();
    rig.pool(vec![
        (0, pod(&publisher)),
        (1, labelled("127.0.0.2:8000", PORT_LABEL, "65536")),
        (2, labelled("127.0.0.3:8000", REPLAY_PORT_LABEL, "many")),
        (3, labelled("127.0.0.4:8000", REPLAY_PORT_LABEL, "5557")),
    ]);
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.trusts(0, Trust::Exact).await;
    for id in 1..=3 {
        rig.trusts(id, Trust::Suspect(Doubt::Ports)).await;
    }
    // Whose events come from a port that two endpoints name is unknown.
    rig.pool(vec![(0, pod(&publisher)), (5, other(at))]);
    rig.trusts(0, Trust::Suspect(Doubt::Ports)).await;
    rig.trusts(5, Trust::Suspect(Doubt::Ports)).await;
    rig.pool(vec![(0, pod(&publisher)), (5, other(at ^ 1))]);
    publisher.subscribed().await;
    publisher.publish(vec![cleared()]).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn gap_is_replayed_in_both_formats() {
    for form in [Form::Three, Form::Two] {
        let mut publisher = Publisher::bind(Some(form)).await;
        let rig = Rig::following(subscription(), &mut publisher).await;
        publisher.publish(vec![stored(None, &[1])]).await;
        rig.holds(0, [1]).await;
        publisher.lose(vec![stored(Some(1), &[2]), removed(&[1])]);
        publisher.lose(vec![stored(None, &[5])]);
        publisher.publish(vec![stored(Some(5), &[6])]).await;
        rig.holds(0, [2, 5, 6]).await;
        rig.trusts(0, Trust::Exact).await;
        assert_eq!(rig.count(Count::Gaps), 1);
    }
}

#[tokio::test]
async fn gap_without_replay_is_suspect_until_the_cache_is_cleared() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1, 2, 3])]).await;
    rig.trusts(0, Trust::Exact).await;
    publisher.lose(vec![removed(&[3])]);
    publisher.publish(vec![stored(None, &[9])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::Gap)).await;
    rig.holds(0, [9]).await;
    publisher.publish(vec![cleared(), stored(None, &[7])]).await;
    rig.trusts(0, Trust::Exact).await;
    rig.holds(0, [7]).await;
    assert_eq!(rig.count(Count::TrustLost), 1);
}

#[tokio::test]
async fn gap_without_replay_becomes_incomplete_after_enough_events() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1, 2, 3])]).await;
    rig.trusts(0, Trust::Exact).await;
    publisher.lose(vec![]);
    publisher.publish(vec![stored(None, &[11, 12])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::Gap)).await;
    // This block follows one that was stored before the gap. Hot prefixes are such blocks: no event reports them
    // again.
    publisher.publish(vec![stored(Some(1), &[21]), stored(Some(12), &[13, 14])]).await;
    rig.holds(0, [11, 12, 13, 14]).await;
    assert_eq!(rig.trust(0), Some(Trust::Suspect(Doubt::Gap)), "something older is there");
    publisher.publish(vec![removed(&[21])]).await;
    rig.trusts(0, Trust::Incomplete).await;
    publisher.publish(vec![stored(Some(14), &[15])]).await;
    rig.holds(0, [11, 12, 13, 14, 15]).await;
    assert_eq!(rig.trust(0), Some(Trust::Incomplete), "as much is not the same");
    publisher.publish(vec![cleared(), stored(None, &[1])]).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn late_subscriber_without_replay_is_incomplete_after_turnover() {
    let mut publisher = Publisher::bind(None).await;
    (0..5).for_each(|_| drop(publisher.lose(vec![])));
    let rig = Rig::start(subscription()).await;
    rig.pool_with(vec![(0, pod(&publisher))], Some(4));
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1, 2, 3])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::JoinedLate)).await;
    publisher.publish(vec![removed(&[3]), stored(None, &[4])]).await;
    rig.trusts(0, Trust::Incomplete).await;
}

#[tokio::test]
async fn truncated_replay_is_used_as_incomplete() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    publisher.lose(vec![stored(None, &[1])]);
    publisher.lose(vec![stored(Some(1), &[2])]);
    publisher.lose(vec![stored(None, &[5])]);
    publisher.ring.lock().oldest = 1;
    let rig = Rig::following(subscription(), &mut publisher).await;
    rig.holds(0, [5]).await;
    rig.trusts(0, Trust::Incomplete).await;
    assert_eq!(rig.count(Count::ReplaysTruncated), 1);
    assert_eq!(rig.count(Count::OrphansParked), 1);
    // The engine computes the missing block again, and its children are found.
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1, 2, 5]).await;
}

#[tokio::test]
async fn restarted_engine_starts_with_an_empty_index() {
    for form in [None, Some(Form::Two), Some(Form::Three)] {
        let mut publisher = Publisher::bind(form).await;
        let rig = Rig::following(subscription(), &mut publisher).await;
        publisher.publish(vec![stored(None, &[1])]).await;
        publisher.publish(vec![stored(None, &[2])]).await;
        rig.holds(0, [1, 2]).await;
        publisher.close();
        rig.trusts(0, Trust::Suspect(Doubt::Interrupted)).await;
        publisher.ring.lock().frames.clear();
        // With replay, events that the new process sent before the reconnect are read too. A process without events is
        // detected as well.
        let early = form.map(|_| 5);
        if form == Some(Form::Three) {
            publisher.lose(vec![stored(None, &[5])]);
        }
        publisher.open().await;
        publisher.subscribed().await;
        if form == Some(Form::Two) {
            rig.holds(0, []).await;
            publisher.publish(vec![stored(None, &[5])]).await;
        }
        publisher.publish(vec![stored(None, &[7])]).await;
        rig.holds(0, early.into_iter().chain([7])).await;
        rig.trusts(0, Trust::Exact).await;
        assert_eq!(rig.count(Count::Restarts), 1);
    }
}

#[tokio::test]
async fn events_missed_during_a_disconnect_are_replayed() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    publisher.close();
    rig.trusts(0, Trust::Suspect(Doubt::Interrupted)).await;
    publisher.lose(vec![stored(None, &[2])]);
    publisher.open().await;
    publisher.subscribed().await;
    rig.holds(0, [1, 2]).await;
    rig.trusts(0, Trust::Exact).await;
    assert_eq!(rig.count(Count::Restarts), 0);
    assert_eq!(publisher.replay_starts(), [0, 0]);
}

#[tokio::test]
async fn failed_replay_is_retried_later() {
    let mut publisher = Publisher::bind(Some(Form::Silent)).await;
    publisher.lose(vec![stored(None, &[1])]);
    let timing = Timing { replay_idle: Duration::from_millis(10), retry_after: Duration::from_millis(50), ..quick() };
    let rig = Rig::following(Subscription { timing, ..subscription() }, &mut publisher).await;
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::ReplayFailed)).await;
    publisher.ring.lock().form = Form::Two;
    rig.holds(0, [1, 2]).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn lost_last_event_is_found_by_a_check_after_silence() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let timing = Timing { check_after: Duration::from_millis(20), ..quick() };
    let rig = Rig::following(Subscription { timing, ..subscription() }, &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    publisher.lose(vec![removed(&[1]), stored(None, &[2])]);
    rig.holds(0, [2]).await;
    // A connection that lost the last event may be dead, so it is replaced.
    until("a new connection", || rig.count(Count::Connections) == 2).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn removed_endpoints_lose_their_blocks() {
    let (mut first, mut second) = (Publisher::bind(None).await, Publisher::bind(None).await);
    let rig = Rig::start(subscription()).await;
    rig.pool(vec![(0, pod(&first))]);
    first.subscribed().await;
    first.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    rig.pool(vec![(0, pod(&first)), (1, pod(&second))]);
    second.subscribed().await;
    second.publish(vec![stored(None, &[1, 2])]).await;
    rig.holds(1, [1, 2]).await;
    rig.holds(0, [1]).await;
    let holder = rig.residents.load().get(&EndpointId(0)).unwrap().caches[0].holder;
    rig.pool(vec![(1, pod(&second))]);
    until("endpoint 0 gone", || rig.trust(0).is_none()).await;
    until("its blocks gone", || rig.index.held(holder, Tier::Gpu).is_empty()).await;
    rig.holds(1, [1, 2]).await;
    rig.trusts(1, Trust::Exact).await;
}

#[tokio::test]
async fn each_rank_has_its_own_cache() {
    // Two consecutive ports, as for an engine with data-parallel ranks.
    let (mut zero, mut one) = loop {
        let zero = Publisher::bind(None).await;
        let next = SocketAddr::new(zero.events.ip(), zero.events.port() + 1);
        if std::net::TcpListener::bind(next).is_ok() {
            break (zero, Publisher::bind_at(next, None).await);
        }
    };
    one.rank = 1;
    let rig = Rig::start(Subscription { ranks: 2, ..subscription() }).await;
    rig.pool(vec![(0, pod(&zero))]);
    zero.subscribed().await;
    one.subscribed().await;
    zero.publish(vec![stored(None, &[1])]).await;
    until("one rank is exact, the other unknown", || {
        let residents = rig.residents.load();
        let trusts = residents.get(&EndpointId(0)).unwrap().caches.iter().map(|c| c.trust.get()).collect::<Vec<_>>();
        trusts == [Trust::Exact, Trust::Unknown]
    })
    .await;
    assert_eq!(rig.trust(0), Some(Trust::Unknown));
    one.publish(vec![stored(None, &[2])]).await;
    rig.trusts(0, Trust::Exact).await;
    let residents = rig.residents.load();
    let held = residents.get(&EndpointId(0)).unwrap().caches.iter().map(|c| rig.index.held(c.holder, Tier::Gpu).len());
    assert_eq!(held.collect::<Vec<_>>(), [1, 1]);
}

/// A block of two tokens.
fn two(hash: u64) -> Any {
    Any::Map(vec![
        (Any::from("type"), Any::from("BlockStored")),
        (Any::from("block_hashes"), ints(&[hash])),
        (Any::from("token_ids"), ints(&[1, 2])),
        (Any::from("block_size"), Any::from(2)),
    ])
}

fn page_of(block_size: u32) -> EndpointMetrics {
    EndpointMetrics { block_size: Some(block_size), ..EndpointMetrics::default() }
}

#[tokio::test]
async fn block_size_comes_from_scraped_metrics_of_the_pool() {
    let (mut first, mut second) = (Publisher::bind(None).await, Publisher::bind(None).await);
    let third = Publisher::bind(None).await;
    let rig = Rig::start(subscription()).await;
    let pods = || (0..).zip([&first, &second, &third].map(pod)).collect::<Vec<_>>();
    rig.pool_of(pods(), page_of(2));
    until("the size of the pages", || rig.block_size.get() == 2).await;
    first.subscribed().await;
    second.subscribed().await;
    second.publish(vec![two(2)]).await;
    rig.trusts(1, Trust::Exact).await;
    // One engine's block size does not override the pool's.
    first.publish(vec![stored(None, &[1])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::BlockSize)).await;
    assert_eq!(rig.block_size.get(), 2);
    rig.holds(1, [2]).await;
    rig.holds(0, []).await;
}

#[tokio::test]
async fn changed_block_size_of_the_pool_reloads_engines() {
    let (mut old, mut new) = (Publisher::bind(Some(Form::Three)).await, Publisher::bind(Some(Form::Three)).await);
    let (mut third, mut fourth) = (Publisher::bind(None).await, Publisher::bind(None).await);
    let rig = Rig::start(subscription()).await;
    rig.pool_of(vec![(0, pod(&old))], page_of(1));
    old.subscribed().await;
    old.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    rig.trusts(0, Trust::Exact).await;
    // As in a rolling update to another block size.
    rig.pool((0..).zip([&old, &new, &third, &fourth].map(pod)).collect());
    new.subscribed().await;
    new.publish(vec![two(2)]).await;
    rig.trusts(1, Trust::Suspect(Doubt::BlockSize)).await;
    third.subscribed().await;
    third.publish(vec![two(2)]).await;
    rig.trusts(2, Trust::Suspect(Doubt::BlockSize)).await;
    fourth.subscribed().await;
    fourth.publish(vec![two(2)]).await;
    rig.trusts(3, Trust::Exact).await;
    rig.holds(1, [2]).await;
    rig.trusts(1, Trust::Exact).await;
    rig.trusts(0, Trust::Suspect(Doubt::BlockSize)).await;
    rig.holds(0, []).await;
}

#[tokio::test]
async fn events_beyond_the_backlog_are_replayed() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    publisher.ring.lock().form = Form::Silent;
    let bounds = MemoryLimits { backlog_frames: 4, ..MemoryLimits::default() };
    let timing = Timing { replay_idle: Duration::from_millis(200), retry_after: Duration::from_millis(200), ..quick() };
    let rig = Rig::following(Subscription { bounds, timing, ..subscription() }, &mut publisher).await;
    until("the ring is asked", || !publisher.replay_starts().is_empty()).await;
    for i in 0..200 {
        publisher.publish(vec![stored(None, &[i])]).await;
    }
    until("frames overflow", || rig.count(Count::OverflowFrames) > 0).await;
    publisher.ring.lock().form = Form::Three;
    rig.holds(0, 0..200).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn invalid_frames_are_counted_and_unreadable_events_are_suspect() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    publisher.raw(vec![Bytes::from_static(b"kv"), Bytes::from_static(b"short"), Bytes::new()]).await;
    publisher.raw(vec![Bytes::from_static(b"kv")]).await;
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.holds(0, [1, 2]).await;
    assert_eq!((rig.count(Count::DecodeErrors), rig.trust(0)), (2, Some(Trust::Exact)));
    publisher.publish(vec![Any::from("no event")]).await;
    rig.trusts(0, Trust::Suspect(Doubt::Undecodable)).await;
    rig.holds(0, []).await;
    publisher.publish(vec![cleared()]).await;
    rig.trusts(0, Trust::Exact).await;
}

mod connections;
mod hostile;
mod reload;

mod central;

#[tokio::test]
async fn stopped_feed_releases_all_state() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    let holder = rig.residents.load().get(&EndpointId(0)).unwrap().caches[0].holder;
    let Rig { index, residents, running, stop, .. } = rig;
    drop(stop);
    in_time("the feed's end", running).await.unwrap();
    assert_eq!(residents.load().values().count(), 0);
    until("the holder gone", || index.held(holder, Tier::Gpu).is_empty()).await;
}

#[tokio::test]
async fn peer_with_a_false_frame_length_is_disconnected_and_retried() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let attempts = Arc::new(AtomicUsize::new(0));
    let counting = attempts.clone();
    let _liar = AbortOnDropHandle::new(tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counting.fetch_add(1, Relaxed);
            let mut bytes = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec();
            bytes.resize(64, 0);
            bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
            bytes.push(2);
            bytes.extend_from_slice(&(1u64 << 50).to_be_bytes());
            let _ = stream.write_all(&bytes).await;
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }));
    let rig = Rig::start(subscription()).await;
    let mut spec = EndpointSpec::at("127.0.0.1:8000".parse().unwrap());
    spec.labels.insert(PORT_LABEL.into(), port.to_string().into());
    rig.pool(vec![(0, spec)]);
    until("three attempts", || attempts.load(Relaxed) >= 3).await;
    until("errors counted", || rig.count(Count::ConnectionErrors) >= 2).await;
}
