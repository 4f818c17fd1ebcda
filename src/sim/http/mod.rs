//! One simulated server over HTTP: routes, faults, and what every kind of request has in common.
//!
//! Called by `sim::fleet` for every request. May import everything in `sim` and `clock`.

mod aborts;
mod anthropic;
mod astrai;
mod body;
mod error;
mod generate;
mod kv;
mod legs;
mod openai;
mod pages;
mod pooling;
mod requests;
mod responses;
mod service;
mod spans;
mod stream;

use crate::answer::{AnswerLimits, GeneratedText};
use crate::config::{MetricsStyle, ServerConfig};
use crate::engine::{EngineConfig, Handoff, Job, JobId, JobPrompt, JobReport};
use crate::fault_board::FaultBoard;
use crate::faults::{DEFAULT_HUGE_METRICS_BYTES, MetricsFault};
use crate::host::{EngineHost, KvOutput, RemoteBlocks, Subscription};
use crate::kv_events::KvLink;
use crate::kv_events::encode::KvEncoder;
use crate::pd::{PeerCounts, Peers, ServerRole};
use aborts::Aborts;
use attache_types::clock::Clock;
use body::{SimBody, event_response, full_response};
use bytes::Bytes;
use error::ApiError;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use legs::{LegReply, Legs, Pd, Totals};
use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use stream::{EventStream, EventWriter};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The port of the server that answered.
const SERVER_HEADER: HeaderName = HeaderName::from_static("x-sim-server");
/// SHA-256 of the body as it came, lower-case hex.
const BODY_HEADER: HeaderName = HeaderName::from_static("x-sim-body-sha256");
/// The data-parallel rank that a request is for, where the server has several.
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// Response header with the rank that served the request.
const SERVED_RANK_HEADER: HeaderName = HeaderName::from_static("x-sim-rank");
/// Comes back as it was sent and becomes part of the answer's id.
const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// What a path is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Chat,
    Completions,
    Messages,
    CountTokens,
    Responses,
    Generate,
    Embeddings,
    Rerank,
    Score,
    Abort,
    Tokenize,
    Render,
    Detokenize,
    Models,
    LoadLora,
    UnloadLora,
    Health,
    Ping,
    Version,
    Load,
    Stats,
    Metrics,
    PrometheusMetrics,
    KvEventSources,
    ResetPrefixCache,
    KvBlocks,
    Restart,
    Pd,
    Faults,
}

const POST: &[Method] = &[Method::POST];
const GET: &[Method] = &[Method::GET, Method::HEAD];
const BOTH: &[Method] = &[Method::GET, Method::HEAD, Method::POST];

/// Every path and the methods that it takes.
const ROUTES: &[(&str, &[Method], Route)] = &[
    ("/v1/chat/completions", POST, Route::Chat),
    ("/v1/completions", POST, Route::Completions),
    ("/v1/messages", POST, Route::Messages),
    ("/v1/messages/count_tokens", POST, Route::CountTokens),
    ("/v1/responses", POST, Route::Responses),
    ("/inference/v1/generate", POST, Route::Generate),
    ("/abort_request", POST, Route::Abort),
    ("/v1/embeddings", POST, Route::Embeddings),
    ("/rerank", POST, Route::Rerank),
    ("/v1/rerank", POST, Route::Rerank),
    ("/v2/rerank", POST, Route::Rerank),
    ("/score", POST, Route::Score),
    ("/v1/score", POST, Route::Score),
    ("/tokenize", POST, Route::Tokenize),
    ("/v1/chat/completions/render", POST, Route::Render),
    ("/v1/completions/render", POST, Route::Render),
    ("/detokenize", POST, Route::Detokenize),
    ("/v1/models", GET, Route::Models),
    ("/v1/load_lora_adapter", POST, Route::LoadLora),
    ("/v1/unload_lora_adapter", POST, Route::UnloadLora),
    ("/health", GET, Route::Health),
    ("/ping", BOTH, Route::Ping),
    ("/version", GET, Route::Version),
    ("/load", GET, Route::Load),
    ("/stats", GET, Route::Stats),
    ("/metrics", GET, Route::Metrics),
    ("/prometheus/metrics", GET, Route::PrometheusMetrics),
    ("/kv_event_sources", GET, Route::KvEventSources),
    ("/reset_prefix_cache", POST, Route::ResetPrefixCache),
    ("/sim/kv_blocks", GET, Route::KvBlocks),
    ("/sim/restart", POST, Route::Restart),
    ("/sim/pd", GET, Route::Pd),
    ("/sim/faults", BOTH, Route::Faults),
];

impl Route {
    /// Uses the engine: what `fail_next` and `first_byte_delay_ms` are about.
    fn is_inference(self) -> bool {
        use Route::{Chat, Completions, Embeddings, Generate, Messages, Rerank, Responses, Score};
        matches!(self, Chat | Completions | Messages | Responses | Generate | Embeddings | Rerank | Score)
    }

    fn is_anthropic(self) -> bool {
        matches!(self, Route::Messages | Route::CountTokens)
    }
}

/// A LoRA adapter that requests may name.
#[derive(Clone, Debug)]
struct LoraAdapter {
    name: Arc<str>,
    path: String,
}

/// One simulated server with its engines.
#[derive(Debug)]
pub(super) struct Server {
    port: u16,
    clock: Clock,
    started: SystemTime,
    config: ServerConfig,
    engine: EngineConfig,
    /// Data-parallel ranks, at least one.
    ranks: Vec<Rank>,
    /// The engine whose turn it is among those that have as little to do.
    turn: AtomicU64,
    loras: RwLock<Vec<LoraAdapter>>,
    faults: Arc<FaultBoard>,
    pd: Arc<Pd>,
    aborts: Aborts,
    responses: Mutex<responses::ResponseStore>,
    sequence: AtomicU64,
}

/// One engine of a server.
#[derive(Debug)]
struct Rank {
    host: Arc<EngineHost>,
    kv: Option<KvLink>,
}

/// A request that was read whole.
struct Call {
    headers: HeaderMap,
    body: Bytes,
    /// The engine that it is for.
    host: Arc<EngineHost>,
}

impl Server {
    /// `kv`: outputs for the KV events of each engine; empty without events. `place`: position of
    /// the server in its fleet.
    pub(super) fn new(
        place: FleetPosition,
        clock: Clock,
        config: ServerConfig,
        faults: Arc<FaultBoard>,
        kv: Vec<Option<KvLink>>,
    ) -> Self {
        let FleetPosition { address, host: reached_at, side_channel, role, peers } = place;
        let mut kv = kv.into_iter();
        let rank = |(number, kv): (u16, Option<KvLink>)| {
            let output = config.kv_events.as_ref().zip(kv.as_ref()).map(|(kv_events, link)| KvOutput {
                encoder: KvEncoder::new(kv_events, config.engine.block_size, number),
                frames: link.frames.clone(),
            });
            Rank { host: Arc::new(EngineHost::new(clock, config.engine.clone(), output)), kv }
        };
        let first = rank((0, kv.next().flatten()));
        // Other servers know the first engine alone: with several there is no prefill for others.
        let own = peers.join(first.host.clone(), reached_at.to_string(), side_channel);
        let ranks: Vec<Rank> = std::iter::once(first).chain((1..).zip(kv).map(rank)).collect();
        let pd = Pd {
            config: config.pd.clone(),
            role,
            peers,
            own,
            counts: Arc::new(PeerCounts::default()),
            hanging: Arc::default(),
            faults: faults.clone(),
            clock,
        };
        let loras: Vec<LoraAdapter> =
            config.loras.iter().map(|name| LoraAdapter::new(name, &format!("lora/{name}"))).collect();
        for (rank, lora) in ranks.iter().flat_map(|rank| loras.iter().map(move |lora| (rank, lora))) {
            rank.host.adapter(&lora.name, &lora.path);
        }
        Self {
            port: address.port(),
            clock,
            pd: Arc::new(pd),
            aborts: Aborts::default(),
            started: clock.wall(clock.now()),
            engine: config.engine.clone(),
            ranks,
            turn: AtomicU64::new(0),
            loras: RwLock::new(loras),
            faults,
            responses: Mutex::new(responses::ResponseStore::default()),
            sequence: AtomicU64::new(0),
            config,
        }
    }

    /// Its engines, by data-parallel rank.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &Arc<EngineHost>> {
        self.ranks.iter().map(|rank| &rank.host)
    }

    /// The engine that a request names, in vLLM's header, else for inference the one that has least to do,
    /// as vLLM counts: waiting requests four times. Whatever is not about one engine gets the first. `None`
    /// for a server without engines.
    fn rank(&self, route: Route, headers: &HeaderMap) -> Result<Option<(usize, &Rank)>, ApiError> {
        let count = self.ranks.len();
        let named = headers.get(RANK_HEADER).and_then(|value| value.to_str().ok()?.trim().parse::<i64>().ok());
        if let Some(named) = named.filter(|_| route.is_inference() || route == Route::KvBlocks) {
            let found = usize::try_from(named).ok().and_then(|at| Some((at, self.ranks.get(at)?)));
            let wrong = format!("data_parallel_rank {named} is out of range [0, {count}).");
            return found.map(Some).ok_or_else(|| ApiError::bad_request(wrong).kind("BadRequestError"));
        }
        if count < 2 || !route.is_inference() {
            return Ok(self.ranks.first().map(|rank| (0, rank)));
        }
        let turn = usize::try_from(self.turn.fetch_add(1, Ordering::Relaxed)).unwrap_or(0) % count;
        let in_turn = self.ranks.iter().enumerate().cycle().skip(turn).take(count);
        Ok(in_turn.min_by_key(|(_, rank)| {
            let load = rank.host.snapshot().load;
            4 * load.waiting + load.running
        }))
    }

    /// Responds to one HTTP request.
    pub(super) async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<SimBody> {
        let request_id = request.headers().get(REQUEST_ID_HEADER).cloned();
        let mut response = self.answer(request).await;
        let headers = response.headers_mut();
        headers.insert(SERVER_HEADER, HeaderValue::from(self.port));
        if let Some(id) = request_id {
            headers.insert(REQUEST_ID_HEADER, id);
        }
        response
    }

    async fn answer(self: &Arc<Self>, request: Request<Incoming>) -> Response<SimBody> {
        let (head, body) = request.into_parts();
        let quirks = self.config.quirks;
        let Some((_, methods, route)) = ROUTES.iter().find(|(path, ..)| *path == head.uri.path()) else {
            return ApiError::new(StatusCode::NOT_FOUND, "Not Found").response(false, quirks);
        };
        let route = *route;
        let fail = |error: ApiError| error.response(route.is_anthropic(), quirks);
        if !methods.contains(&head.method) {
            let mut response = fail(ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed"));
            let allow = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
            response.headers_mut().extend(HeaderValue::try_from(allow).ok().map(|allow| (ALLOW, allow)));
            return response;
        }
        if !matches!(route, Route::Faults | Route::Pd) && self.faults.current().refuse {
            if route == Route::Health && quirks.is_astrai() {
                return service::health(false);
            }
            return fail(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "Model not loaded"));
        }
        let body = match Limited::new(body, self.config.max_body_bytes).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(error) => return fail(ApiError::unreadable(error.as_ref(), self.config.max_body_bytes)),
        };
        let digest = self.config.echo_body_sha256.then(|| hex(&Sha256::digest(&body)));
        let (rank, host) = match self.rank(route, &head.headers) {
            Ok(Some((rank, served))) => (rank, served.host.clone()),
            Ok(None) => return fail(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "no engine")),
            Err(error) => return fail(error),
        };
        let call = Call { headers: head.headers, body, host };
        let mut response = match self.route(route, &head.method, call).await {
            Ok(response) => response,
            Err(error) => fail(error),
        };
        let digest = digest.and_then(|digest| HeaderValue::try_from(digest).ok());
        response.headers_mut().extend(digest.map(|digest| (BODY_HEADER, digest)));
        if self.ranks.len() > 1 && route.is_inference() {
            response.headers_mut().insert(SERVED_RANK_HEADER, HeaderValue::from(rank));
        }
        response
    }

    async fn route(self: &Arc<Self>, route: Route, method: &Method, call: Call) -> Result<Response<SimBody>, ApiError> {
        if route.is_inference() {
            self.misbehave().await?;
        }
        if self.config.quirks.is_astrai() && matches!(route, Route::Chat | Route::Messages) {
            astrai::check(&call.body)?;
        }
        match route {
            Route::Chat | Route::Completions => openai::generate(self, route == Route::Chat, &call).await,
            Route::Messages => anthropic::messages(self, &call).await,
            Route::CountTokens => anthropic::count_tokens(&call),
            Route::Responses => responses::create(self, &call).await,
            Route::Generate => generate::generate(self, &call).await,
            Route::Abort => aborts::abort(self, &call),
            Route::Embeddings => pooling::embeddings(self, &call).await,
            Route::Rerank => pooling::rerank(self, &call).await,
            Route::Score => pooling::score(self, &call).await,
            Route::Tokenize => service::tokenize(self, &call),
            Route::Render => service::render(self, &call),
            Route::Detokenize => service::detokenize(&call),
            Route::Models => Ok(service::models(self)),
            Route::LoadLora => service::load_lora(self, &call),
            Route::UnloadLora => service::unload_lora(self, &call),
            Route::Health => Ok(service::health(true)),
            Route::Ping => Ok(full_response(StatusCode::OK, None, Bytes::new())),
            Route::Version => Ok(service::version()),
            Route::Load => Ok(service::server_load(self)),
            Route::Stats => Ok(service::stats(self)),
            // TensorRT-LLM has the statistics of iterations here.
            Route::Metrics if self.config.metrics_style == MetricsStyle::Trtllm => {
                Ok(full_response(StatusCode::OK, Some("application/json"), "[]"))
            }
            Route::Metrics | Route::PrometheusMetrics => Ok(self.metrics()),
            Route::KvEventSources => Ok(kv::sources(self)),
            Route::ResetPrefixCache => Ok(kv::reset_prefix_cache(self)),
            Route::KvBlocks => kv::blocks(self, &call),
            Route::Pd => Ok(body::json_response(StatusCode::OK, &self.pd.page())),
            Route::Restart => Ok(kv::restart(self).await),
            Route::Faults => service::faults(self, method, &call),
        }
    }

    /// The faults that come before an answer.
    async fn misbehave(&self) -> Result<(), ApiError> {
        let delay = Duration::from_millis(self.faults.current().first_byte_delay_ms);
        let failure = self.faults.take_failure();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match failure.and_then(|status| StatusCode::from_u16(status).ok()) {
            Some(status) => Err(ApiError::new(status, "this request fails as /sim/faults requests")),
            None => Ok(()),
        }
    }

    fn metrics(&self) -> Response<SimBody> {
        const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
        let fault = self.faults.current().metrics;
        let mut response = match fault {
            None => full_response(StatusCode::OK, Some(TEXT), pages::render(self)),
            Some(MetricsFault::Garbage) => {
                full_response(StatusCode::OK, Some(TEXT), &b"\x00\xff{{{ not a metric = NaNNaN \n\n}"[..])
            }
            Some(MetricsFault::Error) => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error")
                .response(false, self.config.quirks),
            Some(MetricsFault::Huge) => Response::new(SimBody::Filler { left: DEFAULT_HUGE_METRICS_BYTES }),
            Some(MetricsFault::Hang) => Response::new(SimBody::Hang),
        };
        response.headers_mut().entry(CONTENT_TYPE).or_insert(HeaderValue::from_static(TEXT));
        response
    }

    /// Which model a request means.
    fn model(&self, name: Option<&str>) -> Result<ServedModel, ApiError> {
        let base = self.base_model();
        let Some(name) = name.filter(|name| !self.config.models.iter().any(|model| model == name)) else {
            return Ok(ServedModel { name: base.to_owned(), lora: None });
        };
        match self.loras.read().iter().find(|lora| &*lora.name == name) {
            Some(lora) => Ok(ServedModel { name: name.to_owned(), lora: Some(lora.name.clone()) }),
            None => Err(ApiError::unknown_model(name, &self.config.models.join(", "))),
        }
    }

    fn base_model(&self) -> &str {
        self.config.models.first().map_or("", String::as_str)
    }

    fn unix_seconds(&self) -> u64 {
        self.unix_time().as_secs()
    }

    fn unix_time(&self) -> Duration {
        self.clock.wall(self.clock.now()).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
    }

    /// A unique id: the request's own where it has one, as in vLLM.
    fn id(&self, prefix: &str, call: &Call) -> String {
        match call.headers.get(REQUEST_ID_HEADER).and_then(|id| id.to_str().ok()) {
            Some(id) => format!("{prefix}-{id}"),
            None => format!("{prefix}-{:016x}", self.unique()),
        }
    }

    fn unique(&self) -> u64 {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        xxh3_64_with_seed(&sequence.to_le_bytes(), u64::from(self.port) ^ self.started_nanos())
    }

    fn started_nanos(&self) -> u64 {
        let since = self.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Hands the prompts to the engine, `choices` answers each.
    async fn start(&self, generation: Generation) -> Result<Started, ApiError> {
        let mut leg = self.leg(&generation).await?;
        let Generation { prompts, choices, model, limits, cache_salt, .. } = &generation;
        let cache_salt: Option<Arc<str>> = cache_salt.as_deref().map(Arc::from);
        let mut jobs = Vec::with_capacity(prompts.len() * *choices as usize);
        let mut answers: Vec<GeneratedText> = Vec::with_capacity(jobs.capacity());
        for prompt in prompts {
            let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
            let room = self.engine.max_request_tokens().saturating_sub(length);
            for choice in 0..*choices {
                let seed = GeneratedText::seed(&self.engine.model, model.lora.as_deref(), prompt, choice);
                let answer = GeneratedText::plan(seed, limits, self.config.output_tokens, room);
                jobs.push(Job {
                    id: JobId(0),
                    prompt: JobPrompt::Tokens(prompt.clone()),
                    max_tokens: limits.max_tokens.unwrap_or(u32::MAX),
                    stops_after: answer.stops_after,
                    lora: model.lora.clone(),
                    cache_salt: cache_salt.clone(),
                    answer_seed: seed,
                    // What was fetched is the first job's; the others find it in the cache or compute it.
                    handoff: Handoff {
                        received: if jobs.is_empty() { leg.handoff.received } else { 0 },
                        ..leg.handoff
                    },
                });
                answers.push(answer);
            }
        }
        let claim = leg.claim.take().map(|claim| Box::new(claim) as Box<dyn RemoteBlocks>);
        let submitted = generation.host.submit(jobs, claim, self.span(&generation));
        let subscription = submitted.map_err(|refused| ApiError::refused(&refused))?;
        let (seed, job) = (answers.first().map_or(0, |answer| answer.seed), subscription.job(0).unwrap_or(JobId(0)));
        let reply = self.reply(&leg, &generation, seed, job);
        Ok(Started { subscription, answers, choices: *choices as usize, reply })
    }

    /// Streams the answers; a full queue and a prompt that can't be fetched are errors inside a 200, as in vLLM, which
    /// promises the status before it asks its engine.
    fn stream(
        &self,
        started: Result<Started, ApiError>,
        writer: Box<dyn EventWriter>,
        anthropic: bool,
    ) -> Result<Response<SimBody>, ApiError> {
        let quirks = self.config.quirks;
        let started = match started {
            Ok(started) => started,
            Err(error) if error.status.is_server_error() => {
                let text = EventStream::error(&error, anthropic, quirks);
                return Ok(full_response(StatusCode::OK, Some("text/event-stream; charset=utf-8"), text));
            }
            Err(error) => return Err(error),
        };
        let faults = self.faults.current();
        Ok(event_response(EventStream::new(started, writer, quirks, &faults)))
    }
}

impl LoraAdapter {
    fn new(name: &str, path: &str) -> Self {
        Self { name: Arc::from(name), path: path.to_owned() }
    }
}

/// The model of a request: the name that its answer carries, and the adapter.
#[derive(Clone, Debug)]
struct ServedModel {
    name: String,
    lora: Option<Arc<str>>,
}

/// A parsed request: what to generate, and where.
struct Generation {
    prompts: Vec<Vec<u32>>,
    choices: u32,
    model: ServedModel,
    limits: AnswerLimits,
    cache_salt: Option<String>,
    legs: Legs,
    /// What the request is called between servers, less the end.
    request_id: String,
    traceparent: Option<String>,
    /// Host of the engine that generates.
    host: Arc<EngineHost>,
}

/// What the engine has taken: one answer for every choice of every prompt.
struct Started {
    subscription: Subscription,
    answers: Vec<GeneratedText>,
    choices: usize,
    reply: LegReply,
}

/// Complete responses of all jobs of a request.
struct Whole {
    answers: Vec<GeneratedText>,
    reports: Vec<JobReport>,
    totals: Totals,
    reply: LegReply,
}

impl Started {
    /// Waits for the end of all answers.
    async fn finish(self) -> Result<Whole, ApiError> {
        let Self { mut subscription, answers, choices, reply } = self;
        let reports = subscription.finished().await.ok_or_else(legs::load_failed)?;
        if reports.len() != answers.len() {
            return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine stopped"));
        }
        let totals = reply.totals(&reports, choices, false);
        reply.read_by_other().await;
        Ok(Whole { answers, reports, totals, reply })
    }
}

/// Position of a server in its fleet.
pub(super) struct FleetPosition {
    pub(super) address: SocketAddr,
    /// Address at which the others reach its blocks.
    pub(super) host: IpAddr,
    /// Port at which the others reach its blocks.
    pub(super) side_channel: u16,
    pub(super) role: ServerRole,
    /// All servers of the fleet.
    pub(super) peers: Arc<Peers>,
}

impl Call {
    /// The body, parsed as JSON.
    fn json<'a, T: serde::Deserialize<'a>>(&'a self) -> Result<T, ApiError> {
        let content_type = self.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if content_type.is_some_and(|value| !value.trim_start().to_ascii_lowercase().starts_with("application/json")) {
            return Err(ApiError::bad_request("Unsupported Media Type: Only 'application/json' is allowed"));
        }
        serde_json::from_slice(&self.body).map_err(|error| ApiError::json(&error))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Quotes and escapes a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
