//! Asks one model server for everything that the checks judge.

use super::members::Member;
use crate::clock::{self, ClockOffset};
use crate::http::{Http, Reply};
use attache_config::settings::PoolSettings;
use attache_http_client::FetchError;
use attache_kv_events::probe::{Heard, listen, oldest_kept};
use attache_pool::ports::{KvEventPorts, PortError};
use attache_pool::{EndpointMetrics, Engine, ModelList};
use attache_scrape::BearerToken;
use attache_scrape::engines::{EngineMap, PageError};
use attache_scrape::exposition::{Families, Scan};
use attache_types::clock::Timestamp;
use reqwest::header::HeaderValue;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

/// Time for a connection to a publisher of KV events, and for its response.
const EVENTS_ANSWER: Duration = Duration::from_secs(2);
/// Time in which events of a busy server arrive.
const EVENTS_LISTEN: Duration = Duration::from_secs(1);
/// The engines whose metrics have names of their own.
const ENGINES: [Engine; 5] = [Engine::Vllm, Engine::Sglang, Engine::TrtllmServe, Engine::Triton, Engine::Xllm];

/// The labels of vLLM's cache configuration that the checks read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheLabels {
    pub(super) prefix_caching: Option<String>,
    pub(super) hash_algorithm: Option<String>,
}

/// The page with the metrics of a server.
#[derive(Debug)]
pub(super) struct MetricsPage {
    pub(super) url: String,
    pub(super) reply: Result<Reply, FetchError>,
    /// What the page says by the names of the configured engine.
    pub(super) read: Option<Result<EndpointMetrics, PageError>>,
    /// Another engine whose names the page has.
    pub(super) looks_like: Option<Engine>,
    pub(super) cache: CacheLabels,
    /// Whether the page has metrics of vLLM's NIXL connector.
    pub(super) has_nixl: bool,
}

/// The publisher of one rank.
#[derive(Debug)]
pub(super) struct RankEvents {
    pub(super) address: SocketAddr,
    pub(super) heard: Result<Heard, String>,
    /// Its replay socket, and the oldest batch there.
    pub(super) replay: Option<(SocketAddr, Result<Option<u64>, String>)>,
}

/// The KV events of a server.
#[derive(Debug)]
pub(super) struct ServerEvents {
    /// The publishers, or why their ports can't be used.
    pub(super) ranks: Result<Vec<RankEvents>, PortError>,
    /// vLLM's own description of its publishers, by rank.
    pub(super) sources: Option<Value>,
    /// Prompt tokens that the server has computed while its publishers were listened to; `None` if unknown.
    pub(super) computed: Option<f64>,
}

/// All responses of one server.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) member: Member,
    pub(super) health: Result<Reply, FetchError>,
    pub(super) version: Option<String>,
    pub(super) models: Option<Result<ModelList, String>>,
    pub(super) metrics: Option<MetricsPage>,
    /// The server's own description of its flags, if it shows it.
    pub(super) info: Option<Value>,
    pub(super) events: Option<ServerEvents>,
    pub(super) clock: Option<ClockOffset>,
}

/// The bearer token for the servers of a pool.
pub(super) fn token(pool: &PoolSettings) -> Option<HeaderValue> {
    BearerToken::default().header(pool.scrape.bearer_token_file.as_deref(), tokio::time::Instant::now())
}

/// One server, and how it is asked.
struct Asking<'a> {
    http: &'a Http,
    base: String,
    token: Option<HeaderValue>,
    insecure_skip_verify: bool,
}

impl Asking<'_> {
    async fn get(&self, path: &str) -> Result<Reply, FetchError> {
        self.reply(&format!("{}{path}", self.base)).await
    }

    async fn reply(&self, url: &str) -> Result<Reply, FetchError> {
        self.http.reply(url, self.token.clone(), self.insecure_skip_verify).await
    }

    /// A JSON page; `None` if the server has none there.
    async fn json(&self, path: &str) -> Option<Value> {
        let reply = self.get(path).await.ok().filter(|reply| reply.status == 200)?;
        serde_json::from_slice(&reply.body).ok()
    }

    /// Version and flags, where the engine shows them.
    async fn described(&self, engine: Engine) -> (Option<String>, Option<Value>) {
        let (version, info) = match engine {
            Engine::Sglang => {
                let info = match self.json("/get_server_info").await {
                    Some(info) => Some(info),
                    None => self.json("/server_info").await,
                };
                (info.clone(), info)
            }
            // Only with VLLM_SERVER_DEV_MODE=1.
            Engine::Vllm => tokio::join!(self.json("/version"), self.json("/server_info?config_format=json")),
            _ => (self.json("/version").await, None),
        };
        let version = version.as_ref().and_then(|version| version.get("version")?.as_str().map(str::to_owned));
        (version, info)
    }

    async fn models(&self) -> Result<ModelList, String> {
        let reply = self.get("/v1/models").await.map_err(|error| error.to_string())?;
        match reply.status {
            200 => ModelList::read(&reply.body).map_err(|error| error.to_string()),
            status => Err(format!("status {status}")),
        }
    }
}

/// The path of the health check of an engine.
fn health_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Triton => "/v2/health/ready",
        _ => "/health",
    }
}

impl Probe {
    /// Asks a server of `pool`. Without a connection, nothing else is asked.
    pub(super) async fn new(http: &Http, member: Member, pool: &PoolSettings, token: Option<HeaderValue>) -> Self {
        let engine = member.spec.engine;
        let with_tls = member.spec.metrics_at_serving_port() && &*member.spec.metrics.scheme == "https";
        let scheme = if with_tls { "https" } else { "http" };
        let insecure_skip_verify = pool.scrape.insecure_skip_verify;
        let asking = Asking { http, base: format!("{scheme}://{}", member.spec.address), token, insecure_skip_verify };
        let health = asking.get(health_path(engine)).await;
        let mut probe = Self {
            clock: health.as_ref().ok().and_then(|reply| clock::offset(&member.subject, reply)),
            member,
            health,
            version: None,
            models: None,
            metrics: None,
            info: None,
            events: None,
        };
        if !probe.is_reached() {
            return probe;
        }
        let ((version, info), models, metrics, sources) = tokio::join!(
            asking.described(engine),
            asking.models(),
            MetricsPage::of(&asking, &probe.member),
            asking.json("/kv_event_sources"),
        );
        (probe.version, probe.info, probe.models, probe.metrics) = (version, info, Some(models), metrics);
        let before = probe.prompt_tokens();
        if let Some(ranks) = probe.ranks(pool).await {
            let after = MetricsPage::of(&asking, &probe.member).await.and_then(|page| page.prompt_tokens());
            let computed = after.zip(before).map(|(after, before)| after - before);
            probe.events = Some(ServerEvents { ranks, sources, computed });
        }
        probe
    }

    /// Whether the server answered at all.
    pub(super) fn is_reached(&self) -> bool {
        self.health.is_ok()
    }

    /// The metrics, if they could be read.
    pub(super) fn values(&self) -> Option<&EndpointMetrics> {
        self.metrics.as_ref()?.read.as_ref()?.as_ref().ok()
    }

    /// The models, if they could be read.
    pub(super) fn model_list(&self) -> Option<&ModelList> {
        self.models.as_ref()?.as_ref().ok()
    }

    fn prompt_tokens(&self) -> Option<f64> {
        self.metrics.as_ref()?.prompt_tokens()
    }

    /// Asks the publishers of all ranks, if the pool reads events from its endpoints.
    async fn ranks(&self, pool: &PoolSettings) -> Option<Result<Vec<RankEvents>, PortError>> {
        let wanted = pool.prefix.kv_events.as_ref().filter(|wanted| wanted.bind.is_none())?;
        let spec = &self.member.spec;
        let (first, count) = match spec.rank {
            Some(rank) => (rank, 1),
            None => (0, wanted.ranks.max(1)),
        };
        let ports = KvEventPorts::of(&spec.labels, (Some(wanted.port), wanted.replay_port), (first, count));
        let ports = match ports {
            Ok(ports) => ports,
            Err(error) => return Some(Err(error)),
        };
        let ranks = (0..count).filter_map(|rank| {
            let at = |port: u16| SocketAddr::new(spec.address.ip(), port);
            let address = at(ports.events?.of(rank));
            let replay = ports.replay.map(|ports| at(ports.of(rank)));
            Some(async move {
                let replayed = async {
                    match replay {
                        Some(replay) => Some((replay, oldest_kept(replay, EVENTS_ANSWER).await)),
                        None => None,
                    }
                };
                let (heard, replay) = tokio::join!(listen(address, EVENTS_ANSWER, EVENTS_LISTEN), replayed);
                RankEvents { address, heard, replay }
            })
        });
        Some(Ok(futures_util::future::join_all(ranks).await))
    }
}

static CACHE: LazyLock<Families> = LazyLock::new(|| Families::new(&["vllm:cache_config_info"]));

impl MetricsPage {
    /// The page of a server; `None` for an engine without metrics.
    async fn of(asking: &Asking<'_>, member: &Member) -> Option<Self> {
        let url = member.spec.metrics_url()?;
        let engine = member.spec.engine;
        let reply = asking.reply(&url).await;
        let mut page =
            Self { url, reply, read: None, looks_like: None, cache: CacheLabels::default(), has_nixl: false };
        if let Ok(reply) = page.reply.as_ref()
            && reply.status == 200
        {
            page.read = read(engine, &reply.body);
            page.cache = cache_labels(&reply.body);
            page.has_nixl = memchr::memmem::find(&reply.body, b"\nvllm:nixl_").is_some();
        }
        if !matches!(page.read, Some(Ok(_))) {
            page.looks_like = looks_like(asking, engine, page.reply.as_ref().ok()).await;
        }
        Some(page)
    }

    fn prompt_tokens(&self) -> Option<f64> {
        let metrics = self.read.as_ref()?.as_ref().ok()?;
        metrics.counters.get(attache_pool::Counter::PromptTokens)
    }
}

fn read(engine: Engine, page: &[u8]) -> Option<Result<EndpointMetrics, PageError>> {
    let read = EngineMap::of(engine)?.read(page, Timestamp::default(), 0);
    Some(read.map(|reading| reading.metrics))
}

/// Another engine whose names this page has, or the page at that engine's own path.
async fn looks_like(asking: &Asking<'_>, configured: Engine, page: Option<&Reply>) -> Option<Engine> {
    let others = || ENGINES.into_iter().filter(|engine| *engine != configured);
    let named = |body: &[u8]| others().find(|engine| matches!(read(*engine, body), Some(Ok(_))));
    if let Some(engine) = page.and_then(|page| named(&page.body)) {
        return Some(engine);
    }
    let mut paths: Vec<&str> = others().map(Engine::metrics_path).collect();
    paths.dedup();
    for path in paths.into_iter().filter(|path| *path != configured.metrics_path()) {
        if let Some(engine) = asking.get(path).await.ok().and_then(|reply| named(&reply.body)) {
            return Some(engine);
        }
    }
    None
}

fn cache_labels(page: &[u8]) -> CacheLabels {
    let Some(sample) = Scan::new(page, &CACHE).next() else { return CacheLabels::default() };
    let label = |name| sample.labels.get(name).map(|value| value.into_owned());
    CacheLabels { prefix_caching: label("enable_prefix_caching"), hash_algorithm: label("prefix_caching_hash_algo") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Severity, severities};
    use crate::servers::health;
    use attache_config::{ConfigText, Sources};
    use attache_pool::EndpointSpec;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;

    /// The settings of a pool.
    fn pool(insecure_skip_verify: bool) -> PoolSettings {
        let text = format!(
            "{{apiVersion: attache.dev/v1, kind: Attache, pools: [{{name: a, endpoints: ['127.0.0.1:1'], \
             scrape: {{insecureSkipVerify: {insecure_skip_verify}}}}}]}}"
        );
        let text = ConfigText { name: "test".to_owned(), bytes: text.into_bytes() };
        let sources = Sources {
            registry: attache_scheduling::Registry::new(&[attache_strategies::PLUGINS]),
            text: Some(text),
            ..Sources::default()
        };
        let (mut settings, _) = attache_config::load(&sources).unwrap();
        settings.pools.remove(0)
    }

    /// An `https` server with a certificate that no system trusts, and the number of tokens that it has received.
    async fn untrusted_server() -> (SocketAddr, Arc<AtomicUsize>) {
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = own.signing_key.serialize_der().try_into().unwrap();
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key);
        let acceptor = TlsAcceptor::from(Arc::new(config.unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, tokens) = (listener.local_addr().unwrap(), Arc::<AtomicUsize>::default());
        let received = tokens.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, received) = (acceptor.clone(), received.clone());
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        match stream.read_u8().await {
                            Ok(byte) => request.push(byte),
                            Err(_) => return,
                        }
                    }
                    let has_token = memchr::memmem::find(&request, b"Bearer secret").is_some();
                    received.fetch_add(usize::from(has_token), Relaxed);
                    let response = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                    let _ = stream.write_all(response).await;
                    let _ = stream.shutdown().await;
                });
            }
        });
        (address, tokens)
    }

    #[tokio::test]
    async fn token_is_sent_to_an_untrusted_server_only_without_verification() {
        for (insecure_skip_verify, severity) in [(false, Severity::Error), (true, Severity::Ok)] {
            let http = Http::new().unwrap();
            let (address, tokens) = untrusted_server().await;
            let mut spec = EndpointSpec::at(address);
            spec.metrics.scheme = "https".into();
            let roles = attache_pool::Roles::of_labels(&spec.labels);
            let member = Member { spec, roles, subject: "s".into() };
            let token = Some(HeaderValue::from_static("Bearer secret"));
            let probe = Probe::new(&http, member, &pool(insecure_skip_verify), token).await;
            assert_eq!(severities(|report| health::judge(&probe, report))[0], severity);
            assert_eq!(probe.is_reached(), insecure_skip_verify, "{:?}", probe.health);
            assert_eq!(tokens.load(Relaxed) > 0, insecure_skip_verify);
        }
    }
}
