//! Remote tokenizers over real HTTP: simulated model servers, and a server whose faults the test sets.

use attache_http_client::FetchError;
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use attache_prompt::remote::TokenCall;
use attache_protocol::Api;
use attache_sim::tokenizer::{ChatTurn, Content, render_chat};
use attache_sim::{ServerConfig, SimConfig, SimHandle, serve};
use attache_tokenize::{CallError, Reason, RemoteApi, RemotePool, RemoteSettings, TokenListError, Unavailable};
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Timeout of each wait in these tests.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3600);

const TOKENS: &str = r#"{"count":3,"max_model_len":8192,"tokens":[784,587,198],"token_strs":null}"#;

/// Response of the server.
#[derive(Clone, Debug)]
enum Behaviour {
    /// This status and body.
    Say(u16, String),
    /// The tokens, after the gate opens.
    Gated,
    /// The tokens. For the model `slow`, after the gate opens.
    GatedIfSlow,
    /// The tokens of this model, and 404 for others.
    Has(&'static str),
    /// These bytes, including headers. Then the connection is closed.
    Raw(String),
    /// An endless body.
    Endless,
}

/// A tokenizer server whose behaviour the test sets.
struct Server {
    address: SocketAddr,
    behaviour: Mutex<Behaviour>,
    gate: Semaphore,
    seen: Mutex<Vec<(String, Value)>>,
}

impl Server {
    async fn start(behaviour: Behaviour) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Arc::new(Self {
            address,
            behaviour: Mutex::new(behaviour),
            gate: Semaphore::new(0),
            seen: Mutex::default(),
        });
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = accepting.clone();
                // The client ends it by closing the connection, which is no error.
                tokio::spawn(async move { drop(server.serve(stream).await) });
            }
        });
        server
    }

    async fn good() -> Arc<Self> {
        Self::start(Behaviour::Say(200, TOKENS.to_owned())).await
    }

    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await?);
            }
            let head = String::from_utf8(head).unwrap();
            let path = head.split(' ').nth(1).unwrap().to_owned();
            let length = head.to_lowercase();
            let length = length.split("content-length: ").nth(1).unwrap().split('\r').next().unwrap().parse().unwrap();
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await?;
            let body: Value = serde_json::from_slice(&body).unwrap();
            let model = body["model"].as_str().unwrap().to_owned();
            self.seen.lock().push((path, body));
            let behaviour = match self.behaviour.lock().clone() {
                Behaviour::GatedIfSlow if model == "slow" => Behaviour::Gated,
                Behaviour::GatedIfSlow => Behaviour::Has("m"),
                other => other,
            };
            let (status, body) = match behaviour {
                Behaviour::Say(status, body) => (status, body),
                Behaviour::Gated => {
                    self.gate.acquire().await.unwrap().forget();
                    (200, TOKENS.to_owned())
                }
                Behaviour::Has(name) if name == model => (200, TOKENS.to_owned()),
                Behaviour::Has(_) | Behaviour::GatedIfSlow => (404, String::new()),
                Behaviour::Raw(bytes) => return stream.write_all(bytes.as_bytes()).await,
                Behaviour::Endless => {
                    stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
                    loop {
                        stream.write_all(format!("1000\r\n{}\r\n", " ".repeat(0x1000)).as_bytes()).await?;
                    }
                }
            };
            let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(answer.as_bytes()).await?;
        }
    }

    fn set_behaviour(&self, behaviour: Behaviour) {
        *self.behaviour.lock() = behaviour;
    }

    fn calls(&self) -> usize {
        self.seen.lock().len()
    }
}

/// A remote tokenizer pool over `servers` that runs until the guard is dropped.
fn pool(servers: &[SocketAddr], change: impl FnOnce(&mut RemoteSettings)) -> (Arc<RemotePool>, DropGuard) {
    let store = Arc::new(SnapshotStore::default());
    publish(&store, servers);
    pool_of(store, change)
}

fn pool_of(store: Arc<SnapshotStore>, change: impl FnOnce(&mut RemoteSettings)) -> (Arc<RemotePool>, DropGuard) {
    let mut settings =
        RemoteSettings { probe_interval: NEVER, idle_timeout: NEVER, decision_timeout: PATIENCE, ..Default::default() };
    settings.request_timeout = PATIENCE;
    change(&mut settings);
    let pool = Arc::new(RemotePool::new("p".into(), settings, store, Clock::start(), 7).unwrap());
    let shutdown = CancellationToken::new();
    tokio::spawn(pool.clone().run(shutdown.clone()));
    (pool, shutdown.drop_guard())
}

fn publish(store: &SnapshotStore, servers: &[SocketAddr]) {
    let endpoints = (0..).zip(servers).map(|(id, at)| {
        let endpoint = Arc::new(Endpoint::new(EndpointId(id), EndpointSpec::at(*at)));
        EndpointState::new(endpoint, None)
    });
    store.publish(PoolSnapshot::new(1, true, endpoints.collect()));
}

async fn ask(pool: &Arc<RemotePool>, model: &str, prompt: &str) -> Result<Vec<u32>, Unavailable> {
    let body = json!({"model": "any", "prompt": prompt}).to_string();
    let tokens = pool.tokens(TokenCall { model, api: Api::Completions, body: body.as_bytes() });
    tokio::time::timeout(PATIENCE, tokens).await.expect("an answer in time").map(|tokens| tokens.to_vec())
}

/// Waits until `holds` is true.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

fn fleet(endpoints: u16) -> SimHandle {
    let config = SimConfig { endpoints, port: 0, server: ServerConfig::default(), ..SimConfig::default() };
    serve(&config).expect("ports")
}

/// An address without a listener.
async fn unused_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

#[tokio::test]
async fn remote_tokens_equal_those_of_the_model_server() {
    let fleet = fleet(2);
    let model = ServerConfig::default().models[0].clone();
    let (pool, _running) = pool(fleet.addresses(), |_| {});
    let chat = json!({
        "model": "alias", "stream": true, "temperature": 0,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why \"é\"?"}],
    });
    let turn =
        |role: &str, text: &str| ChatTurn { role: role.to_owned(), content: vec![Content::Text(text.to_owned())] };
    let expected = render_chat(&[turn("system", "Be brief."), turn("user", "Why \"é\"?")], true);
    let body = chat.to_string();
    for _ in 0..3 {
        let tokens = pool.tokens(TokenCall { model: &model, api: Api::ChatCompletions, body: body.as_bytes() }).await;
        assert_eq!(tokens.as_deref(), Ok(expected.as_slice()));
    }
    let stats = pool.stats();
    assert_eq!((stats.requests(), stats.cache_hits(), stats.calls()), (3, 2, 1), "an equal prompt costs no call");
    assert_eq!((stats.active_models(), stats.unhealthy_models()), (1, 0));
    let of_model = stats.by_model()[&*model].clone();
    assert_eq!((of_model.creations, of_model.buckets.iter().sum::<u64>()), (1, 1));
    assert!(of_model.took > Duration::ZERO);
    assert_eq!(ask(&pool, "nobody's", "a").await, Err(Unavailable::Refused(404)));
    assert_eq!(stats.active_models(), 1, "a name that no server knows takes no place");
}

#[tokio::test]
async fn failures_are_reported_by_reason_until_a_probe_succeeds() {
    let redirect = "HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n".to_owned();
    let gzip = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}".to_owned();
    let huge = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{{", u64::MAX / 2);
    let cut = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"tokens\":[1,2]".to_owned();
    let cases = [
        (Behaviour::Say(500, "dead".to_owned()), Reason::Status),
        (Behaviour::Say(503, String::new()), Reason::Status),
        (Behaviour::Say(429, String::new()), Reason::Status),
        (Behaviour::Say(403, "{}".to_owned()), Reason::Status),
        (Behaviour::Say(204, String::new()), Reason::Status),
        (Behaviour::Raw(redirect), Reason::Redirect),
        (Behaviour::Raw(gzip), Reason::Garbled),
        (Behaviour::Raw(huge), Reason::TooLarge),
        (Behaviour::Raw(cut), Reason::Broken),
        (Behaviour::Raw(String::new()), Reason::Broken),
        (Behaviour::Raw("220 mail ready\r\n".to_owned()), Reason::Broken),
        (Behaviour::Endless, Reason::TooLarge),
        (Behaviour::Say(200, "<html>".to_owned()), Reason::Garbled),
        (Behaviour::Say(200, r#"{"tokens":["a"]}"#.to_owned()), Reason::Garbled),
        (Behaviour::Say(200, r#"{"count":3}"#.to_owned()), Reason::Garbled),
    ];
    for (behaviour, reason) in cases {
        let server = Server::start(behaviour.clone()).await;
        // After a failure, probes are sent every 5 ms.
        let (pool, _running) = pool(&[server.address], |s| {
            s.probe_interval = Duration::from_millis(5);
            s.max_answer_bytes = 64 << 10;
        });
        let stats = pool.stats();
        let error = ask(&pool, "m", "a").await.unwrap_err();
        assert_eq!(error.reason(), reason, "{behaviour:?}: {error}");
        assert_eq!(stats.failures(reason), 1);
        until("a probe fails", || stats.failed_probes() >= 2).await;
        assert_eq!(ask(&pool, "m", "a").await, Err(Unavailable::Unhealthy), "{behaviour:?}");
        assert_eq!(stats.unhealthy_models(), 1);
        server.set_behaviour(Behaviour::Say(200, TOKENS.to_owned()));
        until("a probe succeeds", || stats.unhealthy_models() == 0).await;
        assert_eq!(ask(&pool, "m", "a").await, Ok(vec![784, 587, 198]), "{behaviour:?}");
    }
}

#[tokio::test]
async fn unreachable_server_is_a_connection_failure() {
    let (pool, _running) = pool(&[unused_address().await], |_| {});
    let error = ask(&pool, "m", "a").await.unwrap_err();
    assert!(matches!(error, Unavailable::Failed(CallError::Fetch(FetchError::Connect(_)))), "{error}");
    assert_eq!(pool.stats().calls(), 2, "attempts are bounded");
}

#[tokio::test]
async fn failed_call_is_retried_on_another_server() {
    let (bad, good) = (Server::start(Behaviour::Say(500, String::new())).await, Server::good().await);
    let (pool, _running) = pool(&[bad.address, unused_address().await, good.address], |s| s.max_attempts = 3);
    for prompt in ["a", "b", "c", "d", "e", "f"] {
        assert_eq!(ask(&pool, "m", prompt).await, Ok(vec![784, 587, 198]));
    }
    assert_eq!((bad.calls(), good.calls()), (1, 6), "who has failed is passed over");
    assert_eq!(pool.stats().calls(), 8);
    assert_eq!(pool.stats().unhealthy_models(), 0);
}

#[tokio::test]
async fn hanging_server_leaves_time_for_a_retry() {
    let (hung, good) = (Server::start(Behaviour::Gated).await, Server::good().await);
    let (pool, _running) = pool(&[hung.address, good.address], |s| s.request_timeout = Duration::from_millis(400));
    for prompt in ["a", "b", "c"] {
        assert_eq!(ask(&pool, "m", prompt).await, Ok(vec![784, 587, 198]));
    }
    assert_eq!(hung.calls(), 1);
    good.set_behaviour(Behaviour::Gated);
    let error = ask(&pool, "m", "d").await.unwrap_err();
    assert_eq!(error.reason(), Reason::Timeout, "{error}");
    assert_eq!(pool.stats().unhealthy_models(), 1);
}

#[tokio::test]
async fn rejected_requests_do_not_make_a_model_unhealthy() {
    let server = Server::good().await;
    let (pool, _running) = pool(&[server.address], |_| {});
    ask(&pool, "m", "a").await.unwrap();
    for status in [400, 404, 413, 422] {
        server.set_behaviour(Behaviour::Say(status, String::new()));
        assert_eq!(ask(&pool, "m", "b").await, Err(Unavailable::Refused(status)));
    }
    server.set_behaviour(Behaviour::Say(200, TOKENS.to_owned()));
    assert_eq!(ask(&pool, "m", "b").await, Ok(vec![784, 587, 198]));
    assert_eq!(server.calls(), 6, "no refusal was asked for twice");
    let stats = pool.stats();
    assert_eq!((stats.failures(Reason::Refused), stats.unhealthy_models(), stats.active_models()), (4, 0, 1));
}

#[tokio::test]
async fn decision_timeout_applies_and_late_tokens_are_cached() {
    let server = Server::start(Behaviour::Gated).await;
    let (pool, _running) = pool(&[server.address], |s| s.decision_timeout = Duration::from_millis(20));
    assert_eq!(ask(&pool, "m", "a").await.unwrap_err().reason(), Reason::Late);
    until("the call arrives", || server.calls() == 1).await;
    server.gate.add_permits(1);
    until("the call ends", || Arc::strong_count(&pool) == 2).await;
    assert_eq!(ask(&pool, "m", "a").await, Ok(vec![784, 587, 198]));
    assert_eq!((server.calls(), pool.stats().failures(Reason::Late)), (1, 1));
    assert_eq!(pool.stats().unhealthy_models(), 0, "slow is not broken");
}

#[tokio::test]
async fn equal_requests_share_a_call_and_excess_calls_are_rejected() {
    let server = Server::start(Behaviour::Gated).await;
    let (pool, _running) = pool(&[server.address], |s| s.max_concurrent = 1);
    let askers: Vec<_> = (0..10)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { ask(&pool, "m", "a").await })
        })
        .collect();
    until("all wait", || pool.stats().shared() == 9).await;
    until("the call arrives", || server.calls() == 1).await;
    assert_eq!(ask(&pool, "m", "b").await, Err(Unavailable::Busy(1)));
    // One caller is cancelled, which does not affect the others.
    askers[0].abort();
    server.gate.add_permits(1);
    for (i, outcome) in join_all(askers).await.into_iter().enumerate() {
        match outcome {
            Ok(tokens) => assert_eq!(tokens, Ok(vec![784, 587, 198])),
            Err(gone) => assert!(i == 0 && gone.is_cancelled()),
        }
    }
    assert_eq!(server.calls(), 1);
    server.gate.add_permits(1);
    // The permit is released a moment after the tokens.
    until("the call has ended", || Arc::strong_count(&pool) == 2).await;
    assert_eq!(ask(&pool, "m", "b").await, Ok(vec![784, 587, 198]));
}

#[tokio::test]
async fn hanging_probe_does_not_delay_other_models() {
    let server = Server::start(Behaviour::GatedIfSlow).await;
    let (pool, _running) = pool(&[server.address], |s| s.probe_interval = Duration::from_millis(5));
    let calls = |model: &str| server.seen.lock().iter().filter(|(_, body)| body["model"] == model).count();
    server.gate.add_permits(1);
    ask(&pool, "slow", "a").await.unwrap();
    until("its probe hangs", || calls("slow") >= 2).await;
    let probes = pool.stats().probes();
    ask(&pool, "m", "a").await.unwrap();
    until("the other model's probes go on", || pool.stats().probes() >= probes + 3).await;
    assert_eq!(calls("slow"), 2, "one probe at a time");
}

#[tokio::test]
async fn tokenizer_finds_the_server_that_has_the_model() {
    let mut servers = Vec::new();
    for _ in 0..7 {
        servers.push(Server::start(Behaviour::Has("base")).await);
    }
    servers.push(Server::start(Behaviour::Has("m")).await);
    let addresses: Vec<_> = servers.iter().map(|s| s.address).collect();
    let (pool, _running) = pool(&addresses, |_| {});
    let (stats, calls) = (pool.stats(), || servers.iter().map(|s| s.calls()).sum::<usize>());
    // While the model is unknown, two servers are asked per request.
    let mut asked = 0;
    while let Err(error) = ask(&pool, "m", &format!("p{asked}")).await {
        assert_eq!(error, Unavailable::Refused(404));
        asked += 1;
        assert_eq!(calls(), 2 * asked);
        assert!(asked < 8, "their turns come round");
    }
    // Once the model is known, all servers are tried until one has it, and servers without it are not asked again.
    let before = calls();
    for n in 0..20 {
        assert_eq!(ask(&pool, "m", &format!("q{n}")).await, Ok(vec![784, 587, 198]));
    }
    assert!(calls() <= before + 20 + 7, "{} calls", calls() - before);
    assert_eq!((stats.unhealthy_models(), stats.active_models()), (0, 1));
    // The model moves to another server.
    servers[7].set_behaviour(Behaviour::Has("base"));
    assert_eq!(ask(&pool, "m", "r").await, Err(Unavailable::Refused(404)));
    assert_eq!(stats.active_models(), 1, "it has given tokens: only a probe finds that it is gone");
    servers[3].set_behaviour(Behaviour::Has("m"));
    let mut found = false;
    for n in 0..8 {
        found |= ask(&pool, "m", &format!("s{n}")).await.is_ok();
    }
    assert!(found, "who did not have it is asked again, two at a time");
    assert_eq!(ask(&pool, "m", "t").await, Ok(vec![784, 587, 198]));
}

#[tokio::test]
async fn probe_continues_after_a_server_without_the_model() {
    let mut servers = vec![Server::start(Behaviour::Has("m")).await];
    for _ in 0..3 {
        servers.push(Server::start(Behaviour::Has("base")).await);
    }
    let addresses: Vec<_> = servers.iter().map(|s| s.address).collect();
    let (pool, _running) = pool(&addresses, |s| s.probe_interval = Duration::from_millis(5));
    ask(&pool, "m", "a").await.unwrap();
    until("its probes have met all", || pool.stats().probes() >= 20).await;
    assert_eq!((pool.stats().failed_probes(), pool.stats().active_models()), (0, 1));
}

#[tokio::test]
async fn idle_models_are_closed_and_their_number_is_limited() {
    let server = Server::good().await;
    let (pool, _running) = pool(&[server.address], |s| {
        s.max_models = 2;
        s.idle_timeout = Duration::from_secs(1);
    });
    let stats = pool.stats();
    ask(&pool, "a", "x").await.unwrap();
    ask(&pool, "b", "x").await.unwrap();
    assert_eq!(ask(&pool, "c", "x").await, Err(Unavailable::TooManyModels(2)));
    assert_eq!((stats.active_models(), stats.failures(Reason::TooManyModels)), (2, 1));
    until("all are closed", || stats.active_models() == 0).await;
    assert_eq!(ask(&pool, "c", "x").await, Ok(vec![784, 587, 198]));
}

#[tokio::test]
async fn removed_model_is_dropped_by_a_probe() {
    let server = Server::good().await;
    let (pool, _running) = pool(&[server.address], |s| s.probe_interval = Duration::from_millis(50));
    ask(&pool, "m", "a").await.unwrap();
    assert_eq!(pool.stats().active_models(), 1);
    server.set_behaviour(Behaviour::Say(404, String::new()));
    until("a probe finds out", || pool.stats().active_models() == 0).await;
}

#[tokio::test]
async fn empty_or_draining_pool_has_no_endpoint() {
    let store = Arc::new(SnapshotStore::default());
    let (pool, _running) = pool_of(store.clone(), |_| {});
    assert_eq!(ask(&pool, "m", "a").await, Err(Unavailable::NoEndpoint));
    let server = Server::good().await;
    publish(&store, &[server.address]);
    assert_eq!(ask(&pool, "m", "a").await, Ok(vec![784, 587, 198]));
    // Draining servers get no new calls.
    let endpoint = Endpoint::new(EndpointId(0), EndpointSpec { draining: true, ..EndpointSpec::at(server.address) });
    let state = EndpointState::new(Arc::new(endpoint), None);
    store.publish(PoolSnapshot::new(2, true, vec![state]));
    assert_eq!(ask(&pool, "m", "b").await, Err(Unavailable::NoEndpoint));
}

#[tokio::test]
async fn render_uses_the_path_of_the_api() {
    let answer = r#"[{"request_id":"cmpl-1","token_ids":[784,587],"features":null}]"#;
    let server = Server::start(Behaviour::Say(200, answer.to_owned())).await;
    let (pool, _running) = pool(&[server.address], |s| s.api = RemoteApi::Render);
    for (api, path) in [
        (Api::Completions, "/v1/completions/render"),
        (Api::ChatCompletions, "/v1/chat/completions/render"),
        (Api::Messages, "/v1/messages/render"),
        (Api::Responses, "/v1/responses/render"),
    ] {
        let body = br#"{"prompt":"a","messages":[],"input":"a","top_k":1}"#;
        assert_eq!(pool.tokens(TokenCall { model: "m", api, body }).await.as_deref(), Ok([784, 587].as_slice()));
        let (seen, body) = server.seen.lock().last().cloned().unwrap();
        assert_eq!((seen.as_str(), &body["model"], &body["top_k"]), (path, &json!("m"), &Value::Null));
    }
    // A response in the format of the other API is invalid.
    server.set_behaviour(Behaviour::Say(200, TOKENS.to_owned()));
    let error = ask(&pool, "m", "b").await.unwrap_err();
    assert_eq!(error, Unavailable::Failed(CallError::Garbled(TokenListError::Missing)));
}

#[tokio::test]
async fn tokens_are_not_cached_with_zero_cache_bytes() {
    let server = Server::good().await;
    let (pool, _running) = pool(&[server.address], |s| s.cache_bytes = 0);
    for _ in 0..2 {
        ask(&pool, "m", "a").await.unwrap();
    }
    assert_eq!((server.calls(), pool.stats().cache_hits()), (2, 0));
}
