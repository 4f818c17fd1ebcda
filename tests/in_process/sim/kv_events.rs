//! KV events over real ZMQ sockets: the stream, replay, gaps, restarts, and the resulting page table.

use super::*;
use attache_kv_events::{Destination, Feed as PickersFeed, Residents, Subscription, Trust};
use attache_pool::ports::{PORT_LABEL, REPLAY_PORT_LABEL};
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot, Published, SnapshotStore};
use attache_prefix::block_size::BlockSize;
use attache_prefix::{IndexConfig, KeySpace, PrefixIndex};
use attache_record::KvTape;
use attache_sim::kv_events::{EventEncoding, HashForm, KvEventSource, KvEventsConfig, Outlet, ReplayFormat};
use attache_sim::vllm_hash::HashAlgorithm;
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use rmpv::Value as Msg;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use zeromq::{DealerSocket, ReqSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

/// Time in which no message must arrive.
const SILENCE: Duration = Duration::from_millis(300);
/// Without a message in this time, the subscription has not reached the server yet.
const KNOCK: Duration = Duration::from_millis(100);
const END: u64 = u64::MAX;

fn publishing_fleet(endpoints: u16, change: impl FnOnce(&mut ServerConfig, &mut KvEventsConfig)) -> SimHandle {
    fleet(endpoints, |server| {
        let mut kv_events = KvEventsConfig { replay_port: Some(0), ..KvEventsConfig::default() };
        change(server, &mut kv_events);
        server.kv_events = Some(kv_events);
    })
}

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what} never came"))
}

/// A hash as text, for any form.
fn name(hash: &Msg) -> String {
    match hash {
        Msg::Binary(bytes) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        hash => hash.as_u64().expect("a hash").to_string(),
    }
}

/// The events of a message as maps. Array events get the names of their fields.
fn events(payload: &[u8]) -> Vec<BTreeMap<String, Msg>> {
    const STORED: [&str; 12] = [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ];
    const REMOVED: [&str; 4] = ["type", "block_hashes", "medium", "group_idx"];
    let batch = rmpv::decode::read_value(&mut &*payload).expect("msgpack");
    let [_, events, rank] = batch.as_array().expect("a batch").as_slice() else { panic!("{batch}") };
    assert_eq!(rank, &Msg::from(0));
    let fields = |event: &Msg| match event {
        Msg::Map(pairs) => pairs.iter().map(|(key, value)| (key.as_str().unwrap().to_owned(), value.clone())).collect(),
        event => {
            let values = event.as_array().expect("a map or an array");
            let names: &[&str] = if values[0].as_str() == Some("BlockStored") { &STORED } else { &REMOVED };
            names.iter().map(|name| (*name).to_owned()).zip(values.iter().cloned()).collect()
        }
    };
    events.as_array().expect("events").iter().map(fields).collect()
}

fn number(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("eight bytes"))
}

/// A subscriber's view of one server.
#[derive(Debug, Default)]
struct Known {
    blocks: BTreeMap<String, usize>,
    next: u64,
    removals: usize,
}

impl Known {
    fn apply(&mut self, sequence: u64, payload: &[u8]) {
        assert_eq!(sequence, self.next, "a gap");
        self.next += 1;
        for event in events(payload) {
            let hashes = event.get("block_hashes").and_then(Msg::as_array).into_iter().flatten().map(name);
            match event["type"].as_str().unwrap() {
                "BlockStored" => {
                    let parent = &event["parent_block_hash"];
                    assert!(
                        parent.is_nil() || self.blocks.contains_key(&name(parent)),
                        "a block behind an unknown one"
                    );
                    hashes.for_each(|hash| *self.blocks.entry(hash).or_default() += 1);
                }
                "BlockRemoved" => {
                    for hash in hashes {
                        self.removals += 1;
                        let copies = self.blocks.get_mut(&hash).expect("removed, and never stored");
                        *copies -= 1;
                        if *copies == 0 {
                            self.blocks.remove(&hash);
                        }
                    }
                }
                "AllBlocksCleared" => self.blocks.clear(),
                other => panic!("{other}"),
            }
        }
    }
}

/// A subscriber.
struct Feed {
    socket: SubSocket,
}

impl Feed {
    async fn connect(endpoint: &str) -> Self {
        let mut socket = SubSocket::new();
        socket.connect(endpoint).await.expect("a publisher");
        socket.subscribe("kv@").await.expect("a subscription");
        Self { socket }
    }

    async fn bind(endpoint: &str) -> (Self, String) {
        let mut socket = SubSocket::new();
        let endpoint = socket.bind(endpoint).await.expect("a port").to_string();
        socket.subscribe("kv@").await.expect("a subscription");
        (Self { socket }, endpoint)
    }

    /// The next message: topic, sequence, payload.
    async fn next(&mut self) -> (String, u64, Bytes) {
        let message = in_time("a message", self.socket.recv()).await.expect("a message");
        let [topic, sequence, payload] = message.into_vec().try_into().expect("three frames");
        (String::from_utf8(topic.to_vec()).expect("UTF-8"), number(&sequence), payload)
    }

    /// Sends requests until the subscription has reached the server. Returns the first message.
    async fn until_subscribed(&mut self, client: &Client) -> (String, u64, Bytes) {
        let knocking = async {
            for knock in 0.. {
                client.post("/v1/completions", completion(&tokens(1_000_000 + knock, 16), 1)).await;
                if let Ok(message) = tokio::time::timeout(KNOCK, self.next()).await {
                    return message;
                }
            }
            unreachable!("the knocks never end")
        };
        in_time("a subscription", knocking).await
    }

    /// Reads messages until all published events are applied.
    async fn catch_up(&mut self, client: &Client, known: &mut Known) -> Value {
        let table = client.get("/sim/kv_blocks").await.json();
        while known.next < table["next_sequence"].as_u64().unwrap() {
            let (_, sequence, payload) = self.next().await;
            // Messages from an earlier replay are skipped.
            if sequence >= known.next {
                known.apply(sequence, &payload);
            }
        }
        table
    }
}

/// Requests a replay. Returns sequence and payload of every batch, and checks the topics.
async fn replay(source: &KvEventSource, start: u64, format: ReplayFormat) -> Vec<(u64, Bytes)> {
    let mut socket = DealerSocket::new();
    socket.connect(source.replay_endpoint.as_deref().expect("a replay socket")).await.expect("a replay socket");
    let request = vec![Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    socket.send(ZmqMessage::try_from(request).unwrap()).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = in_time("a replay", socket.recv()).await.unwrap().into_vec();
        let (topic, sequence, payload) = match (format, frames.as_slice()) {
            (ReplayFormat::Topic, [empty, topic, sequence, payload]) if empty.is_empty() => {
                (Some(topic), sequence, payload)
            }
            (ReplayFormat::Legacy, [empty, sequence, payload]) if empty.is_empty() => (None, sequence, payload),
            (_, frames) => panic!("{frames:?}"),
        };
        if number(sequence) == END {
            assert!(payload.is_empty() && topic.is_none_or(Bytes::is_empty));
            return batches;
        }
        assert!(topic.is_none_or(|topic| *topic == source.topic));
        batches.push((number(sequence), payload.clone()));
    }
}

/// `n` tokens that are unique to `prompt`.
fn tokens(prompt: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| prompt * 1_000 + i).collect()
}

fn completion(prompt: &[u32], max_tokens: u32) -> Value {
    json!({"model": "sim-8b", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true})
}

fn page_table_blocks(table: &Value) -> BTreeMap<String, usize> {
    let name = |hash: &Value| hash.as_str().map_or_else(|| hash.to_string(), str::to_owned);
    let blocks = table["blocks"].as_array().expect("blocks");
    blocks.iter().map(|block| (name(&block["hash"]), block["copies"].as_u64().unwrap() as usize)).collect()
}

/// Subscribes and applies all earlier events.
async fn join(client: &Client, source: &KvEventSource) -> (Feed, Known) {
    let mut feed = Feed::connect(&source.endpoint).await;
    let mut known = Known::default();
    let (topic, first, payload) = feed.until_subscribed(client).await;
    assert_eq!(topic, source.topic);
    for (sequence, payload) in replay(source, 0, ReplayFormat::Topic).await {
        if sequence < first {
            known.apply(sequence, &payload);
        }
    }
    known.apply(first, &payload);
    (feed, known)
}

async fn set_faults(client: &Client, faults: Value) {
    assert_eq!(client.post("/sim/faults", faults).await.status, StatusCode::OK);
}

#[tokio::test]
async fn event_sources_are_reported_as_by_vllm() {
    let fleet = publishing_fleet(2, |server, kv_events| {
        server.models = vec!["tiny".into()];
        kv_events.buffer_steps = 1_000;
        kv_events.algorithm = HashAlgorithm::Sha256Cbor;
    });
    for (index, source) in fleet.kv_event_sources().iter().enumerate() {
        let client = Client::new(&fleet, index);
        let topic = format!("kv@{}@tiny", fleet.addresses()[index]);
        let expected = json!({"0": {
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": source.endpoint,
            "replay_endpoint": source.replay_endpoint, "buffer_steps": 1_000, "hwm": 100_000,
            "max_queue_size": 100_000, "topic": topic,
        }});
        assert_eq!(client.get("/kv_event_sources").await.json(), expected);
        assert!(client.get("/metrics").await.text.contains("prefix_caching_hash_algo=\"sha256_cbor\""));
    }
    assert_ne!(fleet.kv_event_sources()[0].endpoint, fleet.kv_event_sources()[1].endpoint);

    let silent = super::fleet(1, |_| {});
    let client = Client::new(&silent, 0);
    assert_eq!(client.get("/kv_event_sources").await.json(), json!({}));
    assert_eq!(client.get("/sim/kv_blocks").await.status, StatusCode::NOT_FOUND);
}

#[test]
fn start_fails_if_events_cannot_be_published() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _guard = runtime.enter();
    let start = |outlet| {
        let kv_events = Some(KvEventsConfig { outlet, ..KvEventsConfig::default() });
        let server = ServerConfig { kv_events, ..ServerConfig::default() };
        serve(&SimConfig { endpoints: 2, port: 0, server, ..SimConfig::default() }).unwrap_err().to_string()
    };
    let error = start(Outlet::Connect { address: "pigeon://home".into() });
    assert!(error.contains("pigeon://home") && error.contains("tcp://"), "{error}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _taken = std::net::TcpListener::bind(taken).unwrap();
    let error = start(Outlet::Bind { port: taken.port() });
    assert!(error.contains(&taken.to_string()), "{error}");
    let error = start(Outlet::Bind { port: 65_535 });
    assert!(error.contains("65535"), "{error}");
}

/// Prompts with shared prefixes from concurrent clients, in a cache that is too small: causes evictions and
/// preemptions.
async fn storm(client: &Client) {
    for round in 0..4 {
        let requests = (0..24).map(|i: u32| {
            let shared = tokens(i % 3, 16 * (i % 5));
            let prompt = [shared, tokens(10 + (i * 7 + round) % 40, 1 + i * 11 % 150)].concat();
            client.post("/v1/completions", completion(&prompt, 1 + i * 13 % 80))
        });
        for answer in join_all(requests).await {
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        }
    }
}

#[tokio::test]
async fn events_add_up_to_the_page_table() {
    for (encoding, hash) in [(EventEncoding::Map, HashForm::Int), (EventEncoding::Array, HashForm::Bytes)] {
        let fleet = publishing_fleet(1, |server, kv_events| {
            server.engine.num_blocks = 64;
            server.engine.max_num_seqs = 12;
            // Slow enough for the requests of a round to overlap, also on a busy machine.
            server.engine.latency.speed = 10.0;
            (kv_events.encoding, kv_events.hash) = (encoding, hash);
        });
        let client = Client::new(&fleet, 0);
        let (mut feed, mut known) = join(&client, &fleet.kv_event_sources()[0]).await;
        storm(&client).await;
        let table = feed.catch_up(&client, &mut known).await;
        assert_eq!(known.blocks, page_table_blocks(&table));
        assert!(known.blocks.len() > 40 && known.removals > 100, "{known:?}");
        let page = client.get("/metrics").await.text;
        let preemptions = page.lines().find(|line| line.starts_with("vllm:num_preemptions_total")).unwrap();
        assert!(!preemptions.ends_with(" 0.0"), "{preemptions}");

        // The reset is published with the next request, not before.
        assert_eq!(client.post("/reset_prefix_cache", json!({})).await.json(), json!({"success": true}));
        let table = client.get("/sim/kv_blocks").await.json();
        assert_eq!((page_table_blocks(&table).len(), table["next_sequence"].as_u64().unwrap()), (0, known.next));
        client.post("/v1/completions", completion(&tokens(1, 40), 1)).await;
        let table = feed.catch_up(&client, &mut known).await;
        assert_eq!((known.blocks.len(), &known.blocks), (2, &page_table_blocks(&table)));
    }
}

#[tokio::test]
async fn events_have_the_fields_and_hashes_of_vllm() {
    let fleet = publishing_fleet(1, |server, kv_events| {
        server.loras = vec!["chat".into(), "sql".into()];
        kv_events.seed = "0".into();
    });
    let client = Client::new(&fleet, 0);
    let (mut feed, _) = join(&client, &fleet.kv_event_sources()[0]).await;
    let request = with(with(completion(&tokens(7, 33), 1), "model", json!("sql")), "cache_salt", json!("tenant"));
    client.post("/v1/completions", request).await;
    let stored = loop {
        let (_, _, payload) = feed.next().await;
        let [stored] = events(&payload).try_into().expect("one event");
        if stored["lora_name"].as_str() == Some("sql") {
            break stored;
        }
    };
    let mut hasher = attache_sim::vllm_hash::Hasher::new(HashAlgorithm::Sha256, Default::default(), "0");
    let lora = attache_sim::vllm_hash::Lora { name: "sql", path: "lora/sql" };
    let extra = attache_sim::vllm_hash::ExtraKeys { lora: Some(lora), cache_salt: Some("tenant") };
    let first = hasher.block(None, &tokens(7, 16), &extra);
    let second = hasher.block(Some(&first), &tokens(7, 33)[16..32], &extra);
    let hashes = vec![Msg::from(first.event_hash()), Msg::from(second.event_hash())];
    assert_eq!(stored["block_hashes"], Msg::Array(hashes));
    assert_eq!(stored["parent_block_hash"], Msg::Nil);
    assert_eq!(stored["token_ids"], Msg::Array(tokens(7, 32).into_iter().map(Msg::from).collect()));
    assert_eq!((stored["lora_id"].as_u64(), stored["medium"].as_str()), (Some(2), Some("GPU")));
    let keys = |keys: &[&str]| Msg::Array(keys.iter().map(|key| Msg::from(*key)).collect());
    assert_eq!(stored["extra_keys"], Msg::Array(vec![keys(&["sql", "tenant"]), keys(&["sql"])]));
    assert_eq!(stored["group_idx"].as_u64(), Some(0));
}

#[tokio::test]
async fn replay_returns_buffered_batches_in_both_formats() {
    for format in [ReplayFormat::Topic, ReplayFormat::Legacy] {
        let fleet = publishing_fleet(1, |_, kv_events| {
            kv_events.replay_format = format;
            kv_events.buffer_steps = 5;
        });
        let (client, source) = (Client::new(&fleet, 0), &fleet.kv_event_sources()[0]);
        assert_eq!(replay(source, 0, format).await, []);
        for prompt in 0..8 {
            client.post("/v1/completions", completion(&tokens(prompt, 20), 1)).await;
        }
        // The publisher runs asynchronously to the engine.
        let all = async {
            loop {
                let batches = replay(source, 0, format).await;
                if batches.last().is_some_and(|(sequence, _)| *sequence == 7) {
                    return batches;
                }
            }
        };
        let kept = in_time("all batches", all).await;
        assert_eq!(kept.iter().map(|(sequence, _)| *sequence).collect::<Vec<_>>(), [3, 4, 5, 6, 7]);
        assert_eq!(events(&kept[0].1)[0]["token_ids"].as_array().unwrap()[0], Msg::from(3_000));
        assert_eq!(replay(source, 6, format).await, kept[3..]);
        assert_eq!(replay(source, 100, format).await, []);

        // A REQ socket adds the empty frame itself, and takes one message of the response.
        let mut socket = ReqSocket::new();
        socket.connect(source.replay_endpoint.as_deref().unwrap()).await.unwrap();
        socket.send(ZmqMessage::from(7_u64.to_be_bytes().to_vec())).await.unwrap();
        let frames = in_time("an answer", socket.recv()).await.unwrap().into_vec();
        assert_eq!(number(&frames[frames.len() - 2]), 7);
    }
}

#[tokio::test]
async fn replay_fills_the_gap_of_lost_messages() {
    let fleet = publishing_fleet(1, |_, _| {});
    let (client, source) = (Client::new(&fleet, 0), &fleet.kv_event_sources()[0]);
    let (mut feed, mut known) = join(&client, source).await;
    feed.catch_up(&client, &mut known).await;
    set_faults(&client, json!({"kv_events": {"drop_next": 2}})).await;
    for prompt in 0..3 {
        client.post("/v1/completions", completion(&tokens(prompt, 20), 1)).await;
    }
    let (_, sequence, payload) = feed.next().await;
    assert_eq!(sequence, known.next + 2, "two are missing");
    let missing = replay(source, known.next, ReplayFormat::Topic).await;
    assert_eq!(missing.len(), 3);
    for (sequence, payload) in &missing[..2] {
        known.apply(*sequence, payload);
    }
    known.apply(sequence, &payload);
    assert_eq!(known.blocks, page_table_blocks(&client.get("/sim/kv_blocks").await.json()));
    assert_eq!(client.get("/sim/faults").await.json()["kv_events"]["drop_next"], 0);
}

#[tokio::test]
async fn paused_publisher_sends_all_events_when_resumed() {
    let fleet = publishing_fleet(1, |_, _| {});
    let (client, source) = (Client::new(&fleet, 0), &fleet.kv_event_sources()[0]);
    let (mut feed, mut known) = join(&client, source).await;
    feed.catch_up(&client, &mut known).await;
    set_faults(&client, json!({"kv_events": {"pause": true, "no_replay": true}})).await;
    for prompt in 0..3 {
        client.post("/v1/completions", completion(&tokens(prompt, 20), 1)).await;
    }
    assert!(tokio::time::timeout(SILENCE, feed.socket.recv()).await.is_err(), "a message while paused");
    let unanswered = replay(source, 0, ReplayFormat::Topic);
    assert!(tokio::time::timeout(SILENCE, unanswered).await.is_err(), "a replay while it is disabled");
    set_faults(&client, json!({})).await;
    let table = feed.catch_up(&client, &mut known).await;
    assert_eq!(known.blocks, page_table_blocks(&table));

    set_faults(&client, json!({"kv_events": {"delay_ms": 200}})).await;
    let before = tokio::time::Instant::now();
    client.post("/v1/completions", completion(&tokens(9, 20), 1)).await;
    feed.catch_up(&client, &mut known).await;
    assert!(before.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn restarted_server_has_an_empty_cache_and_sequence_zero() {
    let fleet = publishing_fleet(1, |_, _| {});
    let (client, source) = (Client::new(&fleet, 0), &fleet.kv_event_sources()[0]);
    let (mut feed, mut known) = join(&client, source).await;
    client.post("/v1/completions", completion(&tokens(1, 100), 1)).await;
    feed.catch_up(&client, &mut known).await;
    assert!(known.next >= 2 && known.blocks.len() >= 7);
    // Unsent events of a paused publisher are lost with its process.
    set_faults(&client, json!({"kv_events": {"pause": true}})).await;
    client.post("/v1/completions", completion(&tokens(2, 100), 1)).await;
    assert_eq!(client.post("/sim/restart", json!({})).await.status, StatusCode::OK);
    set_faults(&client, json!({})).await;
    let table = client.get("/sim/kv_blocks").await.json();
    assert_eq!((page_table_blocks(&table).len(), &table["next_sequence"]), (0, &json!(0)));
    assert_eq!(replay(source, 0, ReplayFormat::Topic).await, []);

    // The subscriber's socket reconnects by itself.
    let mut known = Known::default();
    let (_, first, payload) = feed.until_subscribed(&client).await;
    for (sequence, payload) in replay(source, 0, ReplayFormat::Topic).await.into_iter().filter(|(s, _)| *s < first) {
        known.apply(sequence, &payload);
    }
    known.apply(first, &payload);
    client.post("/v1/completions", completion(&tokens(1, 100), 1)).await;
    let table = feed.catch_up(&client, &mut known).await;
    assert_eq!(known.blocks, page_table_blocks(&table));
}

#[tokio::test]
async fn restart_aborts_requests_in_flight() {
    let fleet = publishing_fleet(1, |server, _| server.engine.latency = slow());
    let (client, other) = (Client::new(&fleet, 0), Client::new(&fleet, 0));
    let asking = tokio::spawn(async move { other.post("/v1/completions", completion(&tokens(1, 20), 5)).await });
    client.until("the request", |stats| stats["active_requests"] == 1).await;
    client.post("/sim/restart", json!({})).await;
    let answer = in_time("the end of the request", asking).await.unwrap();
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "abort");
    client.until("an empty server", |stats| stats["active_requests"] == 0 && stats["total_requests"] == 0).await;
}

#[tokio::test]
async fn all_servers_connect_and_reconnect_to_one_subscriber() {
    let (mut feed, address) = Feed::bind("tcp://127.0.0.1:0").await;
    let fleet = publishing_fleet(2, |_, kv_events| kv_events.outlet = Outlet::Connect { address: address.clone() });
    let clients = [Client::new(&fleet, 0), Client::new(&fleet, 1)];
    for (client, source) in clients.iter().zip(fleet.kv_event_sources()) {
        assert_eq!(source.endpoint, address);
        loop {
            let (topic, ..) = feed.until_subscribed(client).await;
            if topic == source.topic {
                break;
            }
        }
    }
    feed.socket.close().await;
    let (mut feed, _) = Feed::bind(&address).await;
    for (client, source) in clients.iter().zip(fleet.kv_event_sources()) {
        loop {
            let (topic, ..) = feed.until_subscribed(client).await;
            if topic == source.topic {
                break;
            }
        }
    }
}

#[tokio::test]
async fn offloaded_blocks_are_indexed_on_both_tiers() {
    for encoding in [EventEncoding::Map, EventEncoding::Array] {
        let fleet = publishing_fleet(1, |server, kv_events| {
            server.engine.num_blocks = 16;
            (kv_events.encoding, kv_events.offload_blocks) = (encoding, 24);
        });
        let (client, source) = (Client::new(&fleet, 0), &fleet.kv_event_sources()[0]);
        let config =
            IndexConfig { budget_bytes: 1 << 24, tenant_share: 1.0, half_life: Duration::from_secs(60), seed: 1 };
        let (index, residents) = (Arc::new(PrefixIndex::new(config)), Arc::<Residents>::default());
        let port = |endpoint: &str| endpoint.rsplit_once(':').expect("a port").1.into();
        let mut spec = EndpointSpec::at(fleet.addresses()[0]);
        spec.labels.insert(PORT_LABEL.into(), port(&source.endpoint));
        spec.labels.insert(REPLAY_PORT_LABEL.into(), port(source.replay_endpoint.as_deref().expect("a replay socket")));
        let store = Arc::new(SnapshotStore::default());
        let state = EndpointState::new(Arc::new(Endpoint::new(EndpointId(0), spec)), None);
        store.publish(PoolSnapshot::new(1, true, vec![state]));
        let published = tokio::sync::watch::Sender::new(Published { generation: 1, membership: 1 });
        let block_size = Arc::new(BlockSize::of_engines(16));
        let (index_of_feed, keys, tape) = (index.clone(), KeySpace::new(1), KvTape::default());
        let recomputed = Arc::default();
        let to = Destination { index: index_of_feed, residents: residents.clone(), keys, block_size, recomputed, tape };
        let feed = PickersFeed::new(to, store, published.subscribe(), Subscription::default(), Clock::start(), 1);
        let stop = CancellationToken::new();
        let _stop = stop.clone().drop_guard();
        tokio::spawn(feed.run(stop));

        for prompt in 0..3 {
            client.post("/v1/completions", completion(&tokens(prompt, 160), 1)).await;
        }
        let on_gpu = u32::try_from(page_table_blocks(&client.get("/sim/kv_blocks").await.json()).len()).unwrap();
        let known = async {
            loop {
                let cache = residents.load().get(&EndpointId(0)).and_then(|resident| resident.caches.first().cloned());
                if let Some(cache) = cache.filter(|cache| cache.trust.get() == Trust::Exact) {
                    let blocks = index.blocks(cache.holder);
                    if (blocks.gpu, blocks.cpu) == (on_gpu, 24) {
                        return blocks;
                    }
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let blocks = in_time("what lies where", known).await;
        assert!(blocks.gpu < 17 && blocks.cpu > blocks.gpu, "{blocks:?}");
    }
}
