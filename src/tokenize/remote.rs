//! The remote tokenizers of one pool: cache, circuit breakers, attempts, probes.

pub use super::client::CallError;

use super::client::{self, CallResponse};
use super::errors::{SetupError, Unavailable};
use super::list::token_list;
use super::models::{Models, Probe, TokenizerRefusal};
use super::request::Call;
use super::settings::RemoteSettings;
use super::stats::{RemoteStats, UNPROVEN};
use ahash::{AHashMap, RandomState};
use attache_pool::health::{Availability, HealthPolicy};
use attache_pool::{Engine, SnapshotStore};
use attache_prompt::remote::TokenCall;
use attache_types::clock::{Clock, Timestamp};
use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use reqwest::{Client, Url};
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Memory of a cache entry besides its tokens, in bytes.
const ENTRY_OVERHEAD: u64 = 96;
/// Expected tokens of a prompt, for sizing the cache's tables.
const EXPECTED_TOKENS: u64 = 1_024;

/// Stands for the server of a model with its own URL, among the addresses of endpoints.
const OWN_URL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
/// The status of a server that does not have the model.
const NOT_FOUND: u16 = 404;

type Outcome = Result<Arc<[u32]>, Unavailable>;

/// Servers that have failed, or that lack a model, and until when they are avoided.
type Avoided = AHashMap<(SocketAddr, Option<Arc<str>>), Timestamp>;

/// The remote tokenizers of one pool.
#[derive(Debug)]
pub struct RemotePool {
    name: Arc<str>,
    settings: RemoteSettings,
    store: Arc<SnapshotStore>,
    clock: Clock,
    client: Client,
    stats: Arc<RemoteStats>,
    models: Mutex<Models>,
    /// Notifies [`RemotePool::run`] of a change.
    changed: Notify,
    /// Calls in flight for client requests, which equal requests wait for.
    flights: Mutex<AHashMap<u128, watch::Receiver<Option<Outcome>>>>,
    permits: Arc<Semaphore>,
    avoided: Mutex<Avoided>,
    turn: AtomicUsize,
    cache: Option<Cache<u128, Arc<[u32]>, ByBytes, RandomState>>,
    seed: u64,
}

/// The weight of an entry is its memory.
#[derive(Clone, Copy, Debug)]
struct ByBytes;

impl Weighter<u128, Arc<[u32]>> for ByBytes {
    fn weight(&self, _: &u128, tokens: &Arc<[u32]>) -> u64 {
        4 * tokens.len() as u64 + ENTRY_OVERHEAD
    }
}

impl RemotePool {
    /// Creates the tokenizers of the pool `name` with the endpoints in `store`. [`RemotePool::run`] must run too.
    ///
    /// # Errors
    /// [`SetupError`] when a URL cannot be requested, or certificates must be verified and the system's
    /// certificate store cannot be read.
    pub fn new(
        name: Arc<str>,
        settings: RemoteSettings,
        store: Arc<SnapshotStore>,
        clock: Clock,
        seed: u64,
    ) -> Result<Self, SetupError> {
        let mut secure = false;
        for url in settings.model_urls.values().chain([&settings.url]) {
            secure |= is_https(&address(url, SocketAddr::from(([127, 0, 0, 1], 8000))))?;
        }
        let client = client::build(secure && !settings.insecure_skip_verify).map_err(SetupError::Client)?;
        let models = Models::new(settings.max_models, settings.probe_interval, settings.idle_timeout);
        let cache = (settings.cache_bytes > 0).then(|| {
            let items = settings.cache_bytes / (4 * EXPECTED_TOKENS + ENTRY_OVERHEAD) + 1;
            let items = usize::try_from(items).unwrap_or(usize::MAX);
            Cache::with(items, settings.cache_bytes, ByBytes, RandomState::new(), Default::default())
        });
        Ok(Self {
            name,
            store,
            clock,
            client,
            stats: Arc::default(),
            models: Mutex::new(models),
            changed: Notify::new(),
            flights: Mutex::default(),
            permits: Arc::new(Semaphore::new(settings.max_concurrent.min(Semaphore::MAX_PERMITS))),
            avoided: Mutex::default(),
            turn: AtomicUsize::new(0),
            cache,
            seed,
            settings,
        })
    }

    /// Returns the counters of the pool's tokenizers.
    #[must_use]
    pub fn stats(&self) -> Arc<RemoteStats> {
        self.stats.clone()
    }

    /// Returns the tokens of a request according to its servers, within the decision timeout. A longer call
    /// continues in the background, up to the request timeout, for the next equal request. The caller may
    /// be cancelled at any time.
    ///
    /// # Errors
    /// [`Unavailable`] with the reason for which there are none; it is counted here.
    pub async fn tokens(self: &Arc<Self>, ask: TokenCall<'_>) -> Result<Arc<[u32]>, Unavailable> {
        self.stats.count_request();
        let outcome = self.find(ask).await;
        if let Err(why) = &outcome {
            self.stats.count_failure(why.reason());
        }
        outcome
    }

    /// Returns the tokens of a request if they are cached. Some requests call it more than
    /// once, so [`RemotePool::count_known`] counts them.
    ///
    /// # Errors
    /// [`Unavailable::Unsupported`] when they cannot be requested; it is counted here, as
    /// [`RemotePool::tokens`] is then not called.
    pub fn known(&self, ask: &TokenCall<'_>) -> Result<Option<Arc<[u32]>>, Unavailable> {
        let call = Call::new(self.settings.api, ask).map_err(|why| {
            let why = Unavailable::Unsupported(why);
            self.stats.count_request();
            self.stats.count_failure(why.reason());
            why
        })?;
        Ok(self.cache.as_ref().and_then(|cache| cache.get(&call.key(self.seed))))
    }

    /// Records that a request uses the result of [`RemotePool::known`]: the model is in use.
    pub fn count_known(&self, model: &str) {
        self.stats.count_request();
        self.stats.count_cache_hit();
        self.models.lock().touch(model, self.clock.now());
    }

    async fn find(self: &Arc<Self>, ask: TokenCall<'_>) -> Outcome {
        let call = Call::new(self.settings.api, &ask).map_err(Unavailable::Unsupported)?;
        let key = call.key(self.seed);
        let now = self.clock.now();
        if let Some(tokens) = self.cache.as_ref().and_then(|cache| cache.get(&key)) {
            self.stats.count_cache_hit();
            self.models.lock().touch(ask.model, now);
            return Ok(tokens);
        }
        self.admit(ask.model, now)?;
        let mut flight = self.board(key, ask.model, call)?;
        let landed = flight.wait_for(Option::is_some);
        match tokio::time::timeout(self.settings.decision_timeout, landed).await {
            Ok(Ok(outcome)) => outcome.clone().unwrap_or(Err(Unavailable::NoEndpoint)),
            // The call was dropped, because the process is shutting down.
            Ok(Err(_)) => Err(Unavailable::NoEndpoint),
            Err(_) => Err(Unavailable::Late(self.settings.decision_timeout)),
        }
    }

    fn admit(&self, model: &str, now: Timestamp) -> Result<(), Unavailable> {
        let mut models = self.models.lock();
        let before = models.active();
        let admitted = models.admit(model, now);
        if models.active() != before {
            self.note(&models);
            self.changed.notify_one();
        }
        admitted.map_err(|why| match why {
            TokenizerRefusal::Unhealthy => Unavailable::Unhealthy,
            TokenizerRefusal::Full => Unavailable::TooManyModels(self.settings.max_models),
        })
    }

    /// Joins the call of an equal request, or starts one.
    fn board(
        self: &Arc<Self>,
        key: u128,
        model: &str,
        call: Call,
    ) -> Result<watch::Receiver<Option<Outcome>>, Unavailable> {
        let mut flights = self.flights.lock();
        if let Some(flight) = flights.get(&key) {
            self.stats.count_shared();
            return Ok(flight.clone());
        }
        let permit = self.permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Unavailable::Busy(self.settings.max_concurrent))?;
        let (landing, flight) = watch::channel(None);
        flights.insert(key, flight.clone());
        let landing = Landing { pool: self.clone(), key, outcome: landing, _permit: permit };
        tokio::spawn(self.clone().fly(model.into(), call, landing));
        Ok(flight)
    }

    /// Makes one call for a client's request, and records its result.
    async fn fly(self: Arc<Self>, model: Arc<str>, call: Call, landing: Landing) {
        let outcome = self.ask(&model, &call).await;
        let now = self.clock.now();
        let mut models = self.models.lock();
        match &outcome {
            Ok(tokens) => {
                models.succeeded(&model, now);
                if let Some(cache) = &self.cache {
                    cache.insert(landing.key, tokens.clone());
                }
            }
            Err(Unavailable::Refused(_)) => models.refused(&model),
            Err(Unavailable::NoEndpoint) => {}
            Err(error) => {
                if models.failed(&model, now) {
                    self.changed.notify_one();
                    self.warn(&model, error);
                }
            }
        }
        self.note(&models);
        drop(models);
        landing.outcome.send_replace(Some(outcome));
    }

    /// Calls one server after the other, until one returns tokens or an error that all would return. A server
    /// that lacks the model speaks only for itself; if the model has returned tokens before, all servers that
    /// may have it are tried.
    async fn ask(&self, model: &Arc<str>, call: &Call) -> Outcome {
        let deadline = self.clock.now().after(self.settings.request_timeout);
        let is_proven = self.models.lock().is_proven(model);
        let mut left = self.settings.max_attempts.max(1);
        let mut servers = self.servers(model);
        let mut failure = Unavailable::NoEndpoint;
        while left > 0
            && let Some((address, hope)) = servers.pop_front()
        {
            let started = self.clock.now();
            // A hanging server leaves the next one its share of the time.
            let timeout = deadline.since(started) / left;
            if timeout.is_zero() {
                break;
            }
            self.stats.count_call();
            let template = self.settings.model_urls.get(&**model).unwrap_or(&self.settings.url);
            let url = format!("{}{}", self::address(template, address), call.path);
            let body = call.body.clone();
            let answer = client::post(&self.client, &url, body, timeout, self.settings.max_answer_bytes).await;
            let tokens = match answer {
                Ok(CallResponse::Refused(NOT_FOUND)) => {
                    if failure == Unavailable::NoEndpoint {
                        failure = Unavailable::Refused(NOT_FOUND);
                    }
                    // Invented names are not stored, and not tried on further servers.
                    if is_proven {
                        self.avoid(address, Some(model));
                    }
                    left -= u32::from(!is_proven || hope == Hope::Bad);
                    continue;
                }
                Ok(CallResponse::Refused(status)) => return Err(Unavailable::Refused(status)),
                Ok(CallResponse::Body(body)) => token_list(self.settings.api, &body).map_err(CallError::from),
                Err(error) => Err(error.into()),
            };
            match tokens {
                Ok(tokens) => {
                    let took = self.clock.now().since(started);
                    self.count_tokens(model, is_proven, took);
                    let mut avoided = self.avoided.lock();
                    avoided.remove(&(address, None));
                    avoided.remove(&(address, Some(model.clone())));
                    return Ok(tokens.into());
                }
                Err(error) => {
                    self.count_failure(model, is_proven);
                    self.avoid(address, None);
                    failure = error.into();
                    servers.push_back((address, Hope::Bad));
                    left -= 1;
                }
            }
        }
        Err(failure)
    }

    /// Records that a call for `model` returned tokens: its first ones unless `is_proven`.
    fn count_tokens(&self, model: &str, is_proven: bool, took: Duration) {
        self.stats.of_model(model, self.settings.max_models, |stats| {
            stats.creations += u64::from(!is_proven);
            stats.count_success(took);
        });
    }

    /// Records that a call for `model` returned none.
    fn count_failure(&self, model: &str, is_proven: bool) {
        let name = if is_proven { model } else { UNPROVEN };
        self.stats.of_model(name, self.settings.max_models, |stats| stats.failures += 1);
    }

    /// Returns the servers to call, the most promising first: ready servers alternate, and those that failed recently
    /// or lack the model come last.
    fn servers(&self, model: &Arc<str>) -> VecDeque<(SocketAddr, Hope)> {
        if self.settings.model_urls.contains_key(&**model) {
            return VecDeque::from([(OWN_URL, Hope::Good)]);
        }
        let now = self.clock.now();
        // Only the ejection matters here, which does not depend on the policy.
        let policy = HealthPolicy::default();
        let snapshot = self.store.load();
        let avoided = self.avoided.lock();
        let is_avoided = |at, model| avoided.get(&(at, model)).is_some_and(|until| now < *until);
        let count = snapshot.endpoints.len();
        let start = self.turn.fetch_add(1, Relaxed).checked_rem(count).unwrap_or(0);
        let (mut good, mut bad) = (VecDeque::with_capacity(count), VecDeque::new());
        for state in snapshot.endpoints.iter().cycle().skip(start).take(count) {
            let endpoint = &state.endpoint;
            if endpoint.spec.draining || endpoint.spec.engine != Engine::Vllm {
                continue;
            }
            let address = endpoint.spec.address;
            let away =
                matches!(endpoint.health.availability(now, &policy), Availability::Ejected | Availability::HalfOpen);
            if away || is_avoided(address, None) || is_avoided(address, Some(model.clone())) {
                bad.push_back((address, Hope::Bad));
            } else {
                good.push_back((address, Hope::Good));
            }
        }
        good.append(&mut bad);
        good
    }

    /// Avoids a server from now on: for one model, or for all.
    fn avoid(&self, server: SocketAddr, model: Option<&Arc<str>>) {
        let until = self.clock.now().after(self.settings.probe_interval);
        self.avoided.lock().insert((server, model.cloned()), until);
    }

    /// Probes models and removes unused ones, until `shutdown`.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut probes = FuturesUnordered::new();
        loop {
            let now = self.clock.now();
            self.avoided.lock().retain(|_, until| now < *until);
            let (due, wake) = {
                let mut models = self.models.lock();
                for model in models.close_unused(now) {
                    tracing::debug!(pool = %self.name, %model, "remote tokenizer closed: unused");
                }
                self.note(&models);
                let due = models.due_probes(now);
                (due, models.next_wake())
            };
            probes.extend(due.into_iter().map(|model| self.probe(model)));
            let sleep = async {
                match wake {
                    Some(wake) => tokio::time::sleep_until(self.clock.instant(wake)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(()) = probes.next(), if !probes.is_empty() => {}
                () = self.changed.notified() => {}
                () = sleep => {}
            }
        }
    }

    async fn probe(&self, model: Arc<str>) {
        let call = Call::probe(self.settings.api, &model);
        let outcome = self.ask(&model, &call).await;
        let result = match &outcome {
            Ok(_) => Probe::Succeeded,
            Err(Unavailable::Refused(_)) => Probe::Unknown,
            Err(Unavailable::NoEndpoint) => Probe::NoEndpoint,
            Err(_) => Probe::Failed,
        };
        self.stats.count_probe(outcome.is_ok());
        let now = self.clock.now();
        let mut models = self.models.lock();
        let is_change = models.probed(&model, result, now);
        self.note(&models);
        drop(models);
        match outcome {
            Ok(_) if is_change => tracing::info!(pool = %self.name, %model, "remote tokenizer works again"),
            Err(error) if is_change => self.warn(&model, &error),
            _ => {}
        }
    }

    /// Logged once per outage, not per request.
    fn warn(&self, model: &str, error: &Unavailable) {
        let reason = error.reason().label();
        tracing::warn!(
            pool = %self.name, model, reason, %error,
            "remote tokenizer failed: requests for this model have no token keys until a probe succeeds"
        );
    }

    fn note(&self, models: &Models) {
        self.stats.set_models(models.active(), models.unhealthy());
    }
}

/// Whether a server is expected to return tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hope {
    /// It has no recent failure.
    Good,
    /// It has failed recently, or lacks the model.
    Bad,
}

/// A call in flight. When it is dropped, equal requests no longer wait for it.
#[derive(Debug)]
struct Landing {
    pool: Arc<RemotePool>,
    key: u128,
    outcome: watch::Sender<Option<Outcome>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.pool.flights.lock().remove(&self.key);
    }
}

/// Fills in the template; removes a slash at its end.
fn address(template: &str, at: SocketAddr) -> String {
    let ip = if at.is_ipv6() { format!("[{}]", at.ip()) } else { at.ip().to_string() };
    template.trim_end_matches('/').replace("{address}", &at.to_string()).replace("{ip}", &ip)
}

fn is_https(url: &str) -> Result<bool, SetupError> {
    let wrong = |why: String| SetupError::Url { url: url.to_owned(), why };
    let parsed = Url::parse(url).map_err(|e| wrong(e.to_string()))?;
    match parsed.scheme() {
        "https" => Ok(true),
        "http" => Ok(false),
        other => Err(wrong(format!("its scheme is `{other}`, allowed are http and https"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(change: impl FnOnce(&mut RemoteSettings)) -> Result<RemotePool, SetupError> {
        let mut settings = RemoteSettings::default();
        change(&mut settings);
        RemotePool::new("p".into(), settings, Arc::default(), Clock::start(), 0)
    }

    #[test]
    fn templates_are_filled_in() {
        let v4 = SocketAddr::from(([10, 0, 0, 1], 8000));
        let v6 = "[fd00::1]:8000".parse().unwrap();
        assert_eq!(address("http://{address}", v4), "http://10.0.0.1:8000");
        assert_eq!(address("https://{address}/vllm/", v6), "https://[fd00::1]:8000/vllm");
        assert_eq!(address("http://{ip}:9000", v4), "http://10.0.0.1:9000");
        assert_eq!(address("http://{ip}:9000", v6), "http://[fd00::1]:9000");
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        assert!(new(|_| {}).is_ok());
        let why = |change: fn(&mut RemoteSettings)| new(change).unwrap_err().to_string();
        assert!(new(|s| s.url = "http://one-service-for-all".to_owned()).is_ok());
        assert!(why(|s| s.url = "{address}".to_owned()).contains("can't ask"));
        assert!(why(|s| s.url = "ftp://{address}".to_owned()).contains("ftp"));
    }
}
