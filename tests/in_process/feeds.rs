//! The feeds together, over real HTTP: discovery lists endpoints, the scraper reads their metrics, the publisher makes
//! snapshots. The servers misbehave as real model servers have done.

use attache_config::settings::ScrapeSettings;
use attache_discovery::{publish, static_source};
use attache_pool::health::{Availability, Contact, HealthOutcome, HealthPolicy};
use attache_pool::ledger::Ticket;
use attache_pool::writer::SourceId;
use attache_pool::{
    EndpointSpec, EndpointState, Engine, MetricsSource, PoolSnapshot, PoolWriter, Published, SnapshotStore,
};
use attache_scrape::{ErrorReason, ModelFeed, Reach, ScrapeStats, Scraper};
use attache_types::clock::Clock;
use parking_lot::Mutex;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const REAL_PAGE: &str = include_str!("../data/metrics/vllm_0.32.0_under_load_lora.txt");
/// Timeout of each wait in these tests.
const PATIENCE: Duration = Duration::from_secs(20);

/// Response of the server.
#[derive(Clone, Debug)]
enum Answer {
    Page(String),
    /// No response.
    Hang,
    /// These bytes, including headers. Then the connection is closed.
    Raw(String),
    /// An endless body.
    Endless,
}

/// A metrics server that counts requests and responds as the test sets.
struct Server {
    address: SocketAddr,
    answer: Mutex<Answer>,
    connections: AtomicUsize,
    requests: AtomicUsize,
    last_head: Mutex<String>,
}

impl Server {
    async fn start(answer: Answer) -> Arc<Self> {
        Self::start_with(answer, None).await
    }

    async fn start_with(answer: Answer, tls: Option<tokio_rustls::TlsAcceptor>) -> Arc<Self> {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer, tls)
    }

    fn on(listener: TcpListener, answer: Answer, tls: Option<tokio_rustls::TlsAcceptor>) -> Arc<Self> {
        let server = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            answer: Mutex::new(answer),
            connections: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            last_head: Mutex::default(),
        });
        let accepting = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                accepting.connections.fetch_add(1, Relaxed);
                let (server, tls) = (accepting.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => server.serve(stream).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                server.serve(stream).await;
                            }
                        }
                    }
                });
            }
        });
        server
    }

    async fn serve(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let mut head = Vec::new();
        while let Ok(byte) = stream.read_u8().await {
            head.push(byte);
            if !head.ends_with(b"\r\n\r\n") {
                continue;
            }
            *self.last_head.lock() = String::from_utf8(std::mem::take(&mut head)).unwrap().to_lowercase();
            self.requests.fetch_add(1, Relaxed);
            let answer = self.answer.lock().clone();
            match answer {
                Answer::Page(page) => {
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", page.len());
                    if stream.write_all((head + &page).as_bytes()).await.is_err() {
                        return;
                    }
                    let _ = stream.flush().await;
                }
                Answer::Hang => std::future::pending().await,
                Answer::Raw(text) => {
                    let _ = stream.write_all(text.as_bytes()).await;
                    let _ = stream.shutdown().await;
                    return;
                }
                Answer::Endless => {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
                    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
                    while stream.write_all(chunk.as_bytes()).await.is_ok() {}
                    return;
                }
            }
        }
    }

    fn set_answer(&self, answer: Answer) {
        *self.answer.lock() = answer;
    }

    fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }

    fn spec(&self) -> EndpointSpec {
        EndpointSpec::at(self.address)
    }
}

fn page(waiting: &str, running: &str, kv: &str, start: &str) -> Answer {
    Answer::Page(format!(
        "vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {kv}\n\
         process_start_time_seconds {start}\n"
    ))
}

fn quick() -> ScrapeSettings {
    ScrapeSettings {
        interval: Duration::from_millis(20),
        idle_interval: Duration::from_millis(40),
        timeout: Duration::from_millis(300),
        max_bytes: 1 << 20,
        stale_after: Duration::from_secs(2),
        insecure_skip_verify: false,
        bearer_token_file: None,
    }
}

/// A pool with all its feeds running.
struct Feeds {
    store: Arc<SnapshotStore>,
    published: watch::Receiver<Published>,
    endpoints: watch::Sender<Vec<EndpointSpec>>,
    settings: watch::Sender<ScrapeSettings>,
    stats: Arc<ScrapeStats>,
    reach: watch::Receiver<Reach>,
    shutdown: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Feeds {
    fn start(specs: Vec<EndpointSpec>, settings: ScrapeSettings) -> Self {
        let (events, received) = mpsc::channel(publish::EVENT_QUEUE);
        let (tell, published) = watch::channel(Published::default());
        let (endpoints, specs) = watch::channel(specs);
        let (settings, scrape_settings) = watch::channel(settings);
        let (store, shutdown) = (Arc::new(SnapshotStore::default()), CancellationToken::new());
        let writer = PoolWriter::new(vec![SourceId(0)]);
        let scraper =
            Scraper::new(store.clone(), published.clone(), scrape_settings, events.clone(), Clock::start(), 1).unwrap();
        let (stats, reach) = (scraper.stats(), scraper.reach());
        let tasks = vec![
            tokio::spawn(publish::run(
                writer,
                received,
                store.clone(),
                |_| {},
                tell,
                attache_record::PoolTape::default(),
                shutdown.clone(),
            )),
            tokio::spawn(static_source::run(SourceId(0), specs, events, shutdown.clone())),
            tokio::spawn(scraper.run(shutdown.clone())),
        ];
        Self { store, published, endpoints, settings, stats, reach, shutdown, tasks }
    }

    /// Waits for a snapshot for which `holds` is true.
    async fn snapshot(&mut self, what: &str, holds: impl Fn(&PoolSnapshot) -> bool) -> Arc<PoolSnapshot> {
        let wait = async {
            loop {
                let snapshot = self.store.load_full();
                if holds(&snapshot) {
                    return snapshot;
                }
                self.published.changed().await.unwrap();
            }
        };
        in_time(what, wait).await
    }

    async fn first_round(&mut self) {
        in_time("the first round", self.reach.wait_for(|reach| *reach != Reach::Unknown)).await.unwrap();
    }

    async fn stop(self) {
        self.shutdown.cancel();
        for task in self.tasks {
            in_time("the end of a task", task).await.unwrap();
        }
    }
}

async fn in_time<T>(what: &str, wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Polls until `holds` is true.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let poll = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    in_time(what, poll).await;
}

fn waiting_requests(state: &EndpointState) -> Option<u32> {
    state.metrics().map(|m| m.waiting)
}

#[tokio::test]
async fn recorded_vllm_metrics_are_scraped_over_one_connection() {
    let server = Server::start(Answer::Page(REAL_PAGE.into())).await;
    let mut feeds = Feeds::start(vec![server.spec()], quick());
    feeds.first_round().await;
    let snapshot = feeds.snapshot("metrics", |s| s.endpoints.iter().any(|e| e.metrics().is_some())).await;
    let metrics = snapshot.endpoints[0].metrics().cloned().unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.block_size), (22, 8, Some(16)));
    assert!(snapshot.synced);
    until("ten pages", || feeds.stats.pages() >= 10).await;
    assert_eq!(server.connections.load(Relaxed), 1, "the connection is used again");
    assert!(feeds.stats.bytes() >= 10 * REAL_PAGE.len() as u64);
    let head = server.last_head.lock().clone();
    assert!(head.starts_with("get /metrics http/1.1\r\n") && head.contains("accept-encoding: identity\r\n"), "{head}");
    feeds.stop().await;
}

#[tokio::test]
async fn misbehaving_servers_do_not_affect_scrapes_of_others() {
    let answers = [
        (ErrorReason::Timeout, Answer::Hang),
        (ErrorReason::Status, Answer::Raw("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n".into())),
        (
            ErrorReason::Redirect,
            Answer::Raw("HTTP/1.1 302 Go\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n".into()),
        ),
        (ErrorReason::TooLarge, Answer::Endless),
        (ErrorReason::TooLarge, Answer::Raw("HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\nx".into())),
        (ErrorReason::Broken, Answer::Raw("what?\r\n\r\n".into())),
        (
            ErrorReason::Broken,
            Answer::Raw("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:num_requests_waiting 1\n".into()),
        ),
        (
            ErrorReason::Encoded,
            Answer::Raw("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nxyz".into()),
        ),
        (ErrorReason::Json, Answer::Page("[]".into())),
        (ErrorReason::MissingFamily, Answer::Page("<html>hello</html>".into())),
        (ErrorReason::UnusableSample, page("NaN", "1", "0", "5")),
        (ErrorReason::UnusableSample, page("1", "-3", "0", "5")),
    ];
    let good = Server::start(page("1", "1", "0.5", "5")).await;
    let mut bad = Vec::new();
    for _ in &answers {
        bad.push(Server::start(page("3", "4", "0.25", "5")).await);
    }
    let specs = bad.iter().chain([&good]).map(|s| s.spec()).collect();
    let mut feeds = Feeds::start(specs, quick());
    let all = answers.len() + 1;
    feeds.snapshot("a page of everyone", |s| s.endpoints.iter().filter(|e| e.metrics().is_some()).count() == all).await;

    for (server, (_, answer)) in bad.iter().zip(&answers) {
        server.set_answer(answer.clone());
    }
    for (reason, _) in &answers {
        let expected = answers.iter().filter(|(r, _)| r == reason).count() as u64;
        until(reason.label(), || feeds.stats.errors(*reason) >= 2 * expected).await;
    }
    let before = good.requests();
    // The misbehaving servers must not delay it: each of them has fewer than 20 connections below.
    until("fifty pages of the good one", || good.requests() >= before + 50).await;
    let snapshot = feeds.store.load_full();
    for state in &snapshot.endpoints[..answers.len()] {
        let metrics = state.metrics().expect("the last page stays");
        assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (3, 4, 0.25));
    }
    // Failing servers are scraped less and less often.
    let most = bad.iter().map(|s| s.connections.load(Relaxed)).max().unwrap();
    assert!(most < 20, "{most} connections to a failing server");

    bad[0].set_answer(page("9", "4", "0.25", "5"));
    feeds.snapshot("a recovery", |s| waiting_requests(&s.endpoints[0]) == Some(9)).await;
    feeds.stop().await;
}

#[tokio::test]
async fn request_to_an_idle_endpoint_triggers_a_scrape() {
    let server = Server::start(page("0", "0", "0", "5")).await;
    let settings = ScrapeSettings { idle_interval: Duration::from_secs(3600), ..quick() };
    let mut feeds = Feeds::start(vec![server.spec()], settings);
    until("nine idle pages", || feeds.stats.pages() >= 9).await;
    // The interval between idle scrapes has doubled eight times, to 5 s. A scrape within that time is caused by the
    // booking, and takes milliseconds.
    let next_idle_scrape = quick().interval * (1 << 8);
    let endpoint = feeds.store.load().endpoints[0].endpoint.clone();
    server.set_answer(page("7", "1", "0", "5"));
    let ticket = Ticket::book(endpoint, 100);
    let started = tokio::time::Instant::now();
    let snapshot = feeds.snapshot("a page with load", |s| waiting_requests(&s.endpoints[0]) == Some(7)).await;
    assert!(started.elapsed() < next_idle_scrape);
    assert_eq!(snapshot.endpoints[0].metrics().unwrap().in_flight_at_scrape, 1);
    drop(ticket);
    let busy = feeds.stats.pages();
    until("more pages while the server is busy", || feeds.stats.pages() >= busy + 10).await;
    feeds.stop().await;
}

#[tokio::test]
async fn server_restart_is_counted_once_and_clears_health() {
    let server = Server::start(page("5", "0", "0", "100")).await;
    let mut feeds = Feeds::start(vec![server.spec()], quick());
    let snapshot = feeds.snapshot("a page", |s| s.endpoints.iter().any(|e| e.metrics().is_some())).await;
    let health = &snapshot.endpoints[0].endpoint.health;
    let (policy, now) = (HealthPolicy::default(), attache_types::clock::Timestamp(1));
    health.record(HealthOutcome::ConnectFailure, now, &policy);
    health.record(HealthOutcome::ConnectFailure, now, &policy);
    assert_eq!(health.availability(now, &policy), Availability::Ejected);
    server.set_answer(page("6", "0", "0", "200"));
    feeds.snapshot("the new process", |s| waiting_requests(&s.endpoints[0]) == Some(6)).await;
    assert_eq!(health.availability(now, &policy), Availability::Open);
    let pages = feeds.stats.pages();
    until("more pages", || feeds.stats.pages() >= pages + 5).await;
    assert_eq!(feeds.stats.restarts(), 1);
    feeds.stop().await;
}

#[tokio::test]
async fn removed_endpoints_are_not_scraped_and_changed_paths_are_followed() {
    let (first, second) =
        (Server::start(page("1", "0", "0", "5")).await, Server::start(page("2", "0", "0", "5")).await);
    let mut feeds = Feeds::start(vec![first.spec()], quick());
    feeds.snapshot("the first", |s| s.endpoints.iter().any(|e| waiting_requests(e) == Some(1))).await;
    feeds.endpoints.send_replace(vec![second.spec()]);
    feeds.snapshot("the second", |s| s.endpoints.iter().map(waiting_requests).eq([Some(2)])).await;
    let (asked, pages) = (first.requests(), feeds.stats.pages());
    until("more pages", || feeds.stats.pages() >= pages + 10).await;
    assert_eq!(first.requests(), asked, "who is gone is not asked");

    // The same endpoint with another metrics path keeps its metrics and is scraped at the new path.
    let mut moved = second.spec();
    moved.metrics.path = Some("/prometheus/metrics".into());
    feeds.endpoints.send_replace(vec![moved]);
    until("the new path", || second.last_head.lock().starts_with("get /prometheus/metrics ")).await;
    assert_eq!(feeds.store.load().endpoints[0].endpoint.id.0, 1);
    feeds.stop().await;
}

#[tokio::test]
async fn new_scrape_settings_apply_immediately() {
    let server = Server::start(page("0", "0", "0", "5")).await;
    let hour = Duration::from_secs(3600);
    let feeds = Feeds::start(vec![server.spec()], ScrapeSettings { interval: hour, idle_interval: hour, ..quick() });
    until("the first page", || feeds.stats.pages() == 1).await;
    feeds.settings.send_replace(quick());
    until("pages at the new pace", || feeds.stats.pages() >= 10).await;
    feeds.stop().await;
}

#[tokio::test]
async fn first_round_ends_even_if_no_server_responds() {
    let refused = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = EndpointSpec::at(refused.local_addr().unwrap());
    drop(refused);
    let unscraped = EndpointSpec { engine: Engine::None, ..EndpointSpec::at(([127, 0, 0, 1], 9).into()) };
    let mut feeds = Feeds::start(vec![nobody, unscraped.clone()], quick());
    feeds.first_round().await;
    assert!(feeds.stats.errors(ErrorReason::Connect) >= 1);
    let snapshot = feeds.store.load_full();
    assert!(snapshot.synced && snapshot.endpoints.iter().all(|e| e.metrics().is_none()));
    feeds.stop().await;

    for specs in [vec![], vec![unscraped]] {
        let mut feeds = Feeds::start(specs, quick());
        feeds.first_round().await;
        feeds.stop().await;
    }
}

fn reach(feeds: &Feeds) -> Reach {
    *feeds.reach.borrow()
}

#[tokio::test]
async fn pool_is_unreachable_until_an_endpoint_responds_or_may_serve_unseen() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let nobody = EndpointSpec::at(address);
    let other = EndpointSpec::at(([127, 0, 0, 1], 9).into());
    let unscraped = EndpointSpec { engine: Engine::None, ..other.clone() };
    let pod = EndpointSpec { uid: Some("u".into()), ..other.clone() };
    let elsewhere = MetricsSource { port: Some(address.port()), ..MetricsSource::default() };
    let elsewhere = EndpointSpec { metrics: elsewhere, ..other };
    let refused = Server::start(Answer::Raw("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into())).await.spec();
    for (may_serve, why) in
        [(unscraped, "not scraped"), (pod, "probed by the kubelet"), (elsewhere, "another port"), (refused, "404")]
    {
        let mut feeds = Feeds::start(vec![nobody.clone(), may_serve], quick());
        feeds.first_round().await;
        assert_eq!(reach(&feeds), Reach::Reached, "{why}");
        feeds.stop().await;
    }
    let mut feeds = Feeds::start(vec![nobody], quick());
    feeds.first_round().await;
    assert_eq!(reach(&feeds), Reach::Unreachable);
    let id = feeds.store.load().endpoints[0].endpoint.id;
    let why = feeds.stats.failing(id).expect("a failed scrape");
    assert!(why.starts_with(&format!("http://{address}/metrics: can't connect")), "{why}");
    assert!(why.contains("`--engine none`"), "{why}");
    let contact = || feeds.store.load().endpoints[0].endpoint.health.contact();
    assert_eq!(contact(), Contact::Unreachable);
    let _server = Server::on(TcpListener::bind(address).await.unwrap(), page("0", "0", "0", "1"), None);
    in_time("the server", feeds.reach.wait_for(|reach| *reach == Reach::Reached)).await.unwrap();
    assert_eq!((contact(), feeds.stats.failing(id)), (Contact::Reached, None));
    feeds.stop().await;
}

#[tokio::test]
async fn hanging_servers_beyond_the_concurrency_limit_block_no_others() {
    let good = Server::start(page("1", "0", "0", "5")).await;
    let mut specs: Vec<EndpointSpec> = Vec::new();
    for _ in 0..attache_scrape::feed::MAX_CONCURRENT_FETCHES + 16 {
        specs.push(Server::start(Answer::Hang).await.spec());
    }
    specs.push(good.spec());
    let mut feeds = Feeds::start(specs, quick());
    feeds.first_round().await;
    feeds.snapshot("the good one", |s| s.endpoints.iter().any(|e| waiting_requests(e) == Some(1))).await;
    let pages = feeds.stats.pages();
    until("more pages of the good one", || feeds.stats.pages() >= pages + 20).await;
    feeds.stop().await;
}

#[tokio::test]
async fn bearer_token_is_sent_with_metrics_and_model_requests() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "secret-1\n").unwrap();
    let (server, other) = (Server::start(page("8", "0", "0", "5")).await, Server::start(Answer::Hang).await);
    let mut feeds = Feeds::start(vec![server.spec()], quick());
    feeds.snapshot("a page", |s| s.endpoints.iter().any(|e| waiting_requests(e) == Some(8))).await;
    assert!(!server.last_head.lock().contains("authorization"), "nobody is shown what nobody has set");
    feeds.settings.send_replace(ScrapeSettings { bearer_token_file: Some(file), ..quick() });
    let shown = "authorization: bearer secret-1\r\n";
    until("the token", || server.last_head.lock().contains(shown)).await;

    feeds.endpoints.send_replace(vec![EndpointSpec { engine: Engine::None, ..other.spec() }]);
    let models = ModelFeed::new(
        feeds.store.clone(),
        feeds.published.clone(),
        feeds.settings.subscribe(),
        Arc::default(),
        feeds.stats.clone(),
    );
    let asking = tokio::spawn(models.unwrap().run(feeds.shutdown.clone()));
    let asked = || other.last_head.lock().clone();
    until("the question for models", || asked().starts_with("get /v1/models ")).await;
    assert!(asked().contains(shown), "{}", asked());
    feeds.stop().await;
    asking.await.unwrap();
}

#[tokio::test]
async fn https_certificates_are_verified_unless_disabled() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config =
        rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key);
    let tls = tokio_rustls::TlsAcceptor::from(Arc::new(config.unwrap()));
    let server = Server::start_with(page("8", "0", "0", "5"), Some(tls)).await;
    let mut spec = server.spec();
    spec.metrics.scheme = "https".into();
    let mut feeds = Feeds::start(vec![spec], quick());
    let refusals = || feeds.stats.errors(ErrorReason::Connect) + feeds.stats.errors(ErrorReason::Url);
    until("a refusal", || refusals() >= 1).await;
    assert_eq!(feeds.stats.pages(), 0);
    feeds.settings.send_replace(ScrapeSettings { insecure_skip_verify: true, ..quick() });
    feeds.snapshot("a page over TLS", |s| s.endpoints.iter().any(|e| waiting_requests(e) == Some(8))).await;
    feeds.stop().await;
}
