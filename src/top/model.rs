//! Typed data of the admin pages. Fields are read one by one: an unknown field is ignored, and a field that is missing
//! or of another type is `None`. So the view also works with pickers of other versions.

pub(crate) mod explanation;

use serde_json::Value;
use std::time::Duration;

/// What the admin pages said at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) version: Option<String>,
    pub(crate) ready: Option<bool>,
    /// Conditions of readiness that do not hold.
    pub(crate) missing: Vec<String>,
    /// Rejections since the picker's start, by reason.
    pub(crate) rejections: Vec<(String, u64)>,
    /// Uses of degraded modes since the picker's start, by mode.
    pub(crate) degraded: Vec<(String, u64)>,
    pub(crate) warnings: Vec<Warning>,
    pub(crate) pools: Vec<Pool>,
    /// The latest decisions, newest first.
    pub(crate) decisions: Vec<Decision>,
    pub(crate) peers: Vec<Peer>,
    pub(crate) pressure: Vec<Pressure>,
    /// Samples of pools; `None` if the picker has none.
    pub(crate) samples: Option<Samples>,
}

impl Reading {
    /// Reads the pages `/endpoints`, `/decisions`, `/api/peers` and `/api/pressure`. `Null` stands for a page that the
    /// picker does not have.
    pub(crate) fn of(endpoints: &Value, decisions: &Value, peers: &Value, pressure: &Value) -> Self {
        Self {
            version: text(&endpoints["version"]),
            ready: endpoints["ready"].as_bool(),
            missing: list(&endpoints["missing"]).iter().filter_map(text).collect(),
            rejections: counts(&endpoints["rejections"]),
            degraded: counts(&endpoints["degraded"]),
            warnings: list(&endpoints["warnings"]).iter().map(Warning::of).collect(),
            pools: list(&endpoints["pools"]).iter().map(Pool::of).collect(),
            decisions: list(decisions).iter().map(Decision::of).collect(),
            peers: list(&peers["peers"]).iter().map(Peer::of).collect(),
            pressure: list(&pressure["models"]).iter().map(Pressure::of).collect(),
            samples: None,
        }
    }
}

/// What the picker warns of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warning {
    pub(crate) pool: Option<String>,
    pub(crate) message: String,
}

impl Warning {
    fn of(v: &Value) -> Self {
        Self { pool: text(&v["pool"]), message: text(&v["message"]).unwrap_or_default() }
    }
}

/// Samples of each pool, oldest first: a part of the page `/api/history`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    /// Number of the last sample.
    pub(crate) sequence: u64,
    /// Whether these are all samples that the picker has.
    pub(crate) is_whole: bool,
    pub(crate) pools: Vec<(String, PoolSamples)>,
}

/// Samples of one pool. `None` stands for nothing measured.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolSamples {
    /// Requests per second that ended.
    pub(crate) requests: Vec<Option<f64>>,
    /// Median and 95th percentile of the time to the first token, milliseconds.
    pub(crate) ttft: [Vec<Option<f64>>; 2],
}

impl Samples {
    /// Reads the page that was asked for the samples after number `after`. `None` if it has no number.
    pub(crate) fn of(v: &Value, after: u64) -> Option<Self> {
        let column = |pool: &Value, name: &str| list(&pool[name]).iter().map(Value::as_f64).collect();
        let samples = |pool: &Value| PoolSamples {
            requests: column(pool, "requests"),
            ttft: ["ttft_p50", "ttft_p95"].map(|name| column(pool, name)),
        };
        let pools = v["pools"].as_object().into_iter().flatten();
        Some(Self {
            sequence: v["sequence"].as_u64()?,
            is_whole: after == 0,
            pools: pools.map(|(name, pool)| (name.clone(), samples(pool))).collect(),
        })
    }
}

/// A pool with its endpoints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) strategy: Option<String>,
    pub(crate) synced: Option<bool>,
    pub(crate) queued: Option<u64>,
    /// Prompts without tokens, by model and reason.
    pub(crate) unread: Vec<Unread>,
    pub(crate) endpoints: Vec<Endpoint>,
}

impl Pool {
    fn of(v: &Value) -> Self {
        Self {
            name: text(&v["name"]).unwrap_or_default(),
            strategy: text(&v["strategy"]),
            synced: v["synced"].as_bool(),
            queued: v["queued_requests"].as_u64(),
            unread: list(&v["unread_prompts"]).iter().map(Unread::of).collect(),
            endpoints: list(&v["endpoints"]).iter().map(Endpoint::of).collect(),
        }
    }
}

/// Prompts of one model that were routed without a prefix lookup.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unread {
    pub(crate) model: String,
    pub(crate) reason: String,
    pub(crate) prompts: Option<u64>,
}

impl Unread {
    fn of(v: &Value) -> Self {
        Self {
            model: text(&v["model"]).unwrap_or_default(),
            reason: text(&v["reason"]).unwrap_or_default(),
            prompts: v["prompts"].as_u64(),
        }
    }
}

/// An endpoint of a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Endpoint {
    pub(crate) name: String,
    /// `ip:port`.
    pub(crate) address: String,
    pub(crate) role: Option<String>,
    pub(crate) status: Option<String>,
    pub(crate) ejection: Option<Ejection>,
    pub(crate) scrape_error: Option<String>,
    pub(crate) in_flight: Option<u64>,
    /// Prompt tokens in flight that are not computed yet.
    pub(crate) prefill_tokens: Option<u64>,
    /// Requests routed to it since it was found.
    pub(crate) routed: Option<u64>,
    pub(crate) running: Option<f64>,
    pub(crate) waiting: Option<f64>,
    /// Used part of the KV cache, 0 to 1.
    pub(crate) kv_usage: Option<f64>,
    /// Part of the prompt tokens that the model server found in its prefix cache, 0 to 1.
    pub(crate) hit_ratio: Option<f64>,
    pub(crate) metrics_age: Option<Duration>,
    pub(crate) is_stale: bool,
    /// Learned speed of prefill, tokens per second.
    pub(crate) prefill_speed: Option<f64>,
    /// Learned time of one output token, seconds.
    pub(crate) token_seconds: Option<f64>,
    /// How many times longer it takes than the others in its role, if it is slow.
    pub(crate) slowdown: Option<f64>,
    /// Models and LoRA adapters that it names.
    pub(crate) models: Vec<String>,
    /// The whole object of the page.
    pub(crate) all: Value,
}

/// Why an endpoint gets no requests, and until when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ejection {
    pub(crate) cause: Option<String>,
    /// Time until the probe; zero if the next request is the probe.
    pub(crate) returns_in: Option<Duration>,
}

impl Endpoint {
    fn of(v: &Value) -> Self {
        let (metrics, learned, ejection) = (&v["metrics"], &v["learned"], &v["ejection"]);
        let address = text(&v["address"]).unwrap_or_default();
        Self {
            name: text(&v["name"]).unwrap_or_else(|| address.clone()),
            role: text(&v["role"]).or_else(|| text(&v["roles"])),
            status: text(&v["status"]),
            ejection: ejection.is_object().then(|| Ejection {
                cause: text(&ejection["cause"]),
                returns_in: ejection["returns_in_ms"].as_u64().map(Duration::from_millis),
            }),
            scrape_error: text(&v["scrape_error"]),
            in_flight: v["in_flight"].as_u64(),
            prefill_tokens: v["prefill_tokens"].as_u64(),
            routed: v["routed"].as_u64(),
            running: metrics["running"].as_f64(),
            waiting: metrics["waiting"].as_f64(),
            kv_usage: metrics["kv_usage"].as_f64(),
            hit_ratio: metrics["prefix_hit_ratio"].as_f64(),
            metrics_age: metrics["age_ms"].as_u64().map(Duration::from_millis),
            is_stale: metrics["stale"].as_bool().unwrap_or(false),
            prefill_speed: learned["prefill_tokens_per_second"].as_f64(),
            token_seconds: learned["seconds_per_token"].as_f64(),
            slowdown: slowdown(&v["slowdown"]),
            models: models(v),
            all: v.clone(),
            address,
        }
    }

    /// Name and address; the address alone if both are equal.
    pub(crate) fn title(&self) -> String {
        if self.name == self.address { self.address.clone() } else { format!("{} ({})", self.name, self.address) }
    }
}

fn slowdown(v: &Value) -> Option<f64> {
    let times = || Some(v["first_token"].as_f64()?.max(v["per_token"].as_f64()?));
    v["slow"].as_bool().filter(|slow| *slow).and_then(|_| times())
}

fn models(endpoint: &Value) -> Vec<String> {
    let lora = &endpoint["metrics"]["lora"];
    let lists = [&endpoint["models"], &lora["running"], &lora["waiting"]];
    lists.into_iter().flat_map(list).filter_map(text).collect()
}

/// A request that has ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decision {
    pub(crate) sequence: Option<u64>,
    /// Time since its end, at the time of the reading.
    pub(crate) age: Duration,
    pub(crate) request_id: String,
    pub(crate) pool: String,
    pub(crate) model: String,
    /// `ip:port`; empty if it was rejected.
    pub(crate) endpoint: String,
    /// The endpoint that served it, if that is another one.
    pub(crate) served: Option<String>,
    pub(crate) prefill: Option<String>,
    pub(crate) reason: String,
    pub(crate) queued_ms: Option<f64>,
    /// 0 if there was no response.
    pub(crate) status: Option<u64>,
    pub(crate) ttft_ms: Option<f64>,
    /// What was predicted for `ttft_ms`.
    pub(crate) predicted_ttft_ms: Option<f64>,
    pub(crate) runner_up: Option<RunnerUp>,
    pub(crate) duration_ms: Option<f64>,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) completion_tokens: Option<u64>,
    pub(crate) end: String,
    /// The whole object of the page.
    pub(crate) all: Value,
}

impl Decision {
    fn of(v: &Value) -> Self {
        let word = |key: &str| text(&v[key]).unwrap_or_default();
        Self {
            sequence: v["sequence"].as_u64(),
            age: Duration::from_millis(v["age_ms"].as_u64().unwrap_or_default()),
            request_id: word("request_id"),
            pool: word("pool"),
            model: word("model"),
            endpoint: word("endpoint"),
            served: text(&v["served"]),
            prefill: text(&v["prefill"]),
            reason: word("reason"),
            queued_ms: v["queued_ms"].as_f64(),
            status: v["status"].as_u64(),
            ttft_ms: v["ttft_ms"].as_f64(),
            predicted_ttft_ms: v["predicted_ttft_ms"].as_f64(),
            runner_up: RunnerUp::of(&v["runner_up"]),
            duration_ms: v["duration_ms"].as_f64(),
            prompt_tokens: v["prompt_tokens"].as_u64().or_else(|| v["estimated_prompt_tokens"].as_u64()),
            cached_tokens: v["cached_tokens"].as_u64(),
            completion_tokens: v["completion_tokens"].as_u64(),
            end: word("end"),
            all: v.clone(),
        }
    }

    /// Whether no endpoint was chosen.
    pub(crate) fn is_rejected(&self) -> bool {
        self.end == "rejected"
    }
}

/// The second best endpoint of a decision.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunnerUp {
    /// `ip:port`.
    pub(crate) endpoint: String,
    /// How much worse it was, in milliseconds or in the unit of the scores.
    pub(crate) margin: Option<String>,
}

impl RunnerUp {
    fn of(v: &Value) -> Option<Self> {
        let milliseconds = v["margin_ms"].as_f64().map(|ms| format!("{} ms", crate::format::milliseconds(ms)));
        let score = || v["margin_score"].as_f64().map(crate::format::figure);
        Some(Self { endpoint: text(&v["endpoint"])?, margin: milliseconds.or_else(score) })
    }
}

/// Another picker that shares state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) silent: Option<Duration>,
    pub(crate) requests: Option<u64>,
    pub(crate) is_behind: bool,
}

impl Peer {
    fn of(v: &Value) -> Self {
        let silent = v["seconds_since_last_message"].as_f64();
        Self {
            name: text(&v["name"]).unwrap_or_default(),
            silent: silent.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            requests: v["requests_in_flight"].as_u64(),
            is_behind: v["behind"].as_bool().unwrap_or(false),
        }
    }
}

/// Requests of the last minute that load kept from their cached prefix.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pressure {
    pub(crate) pool: String,
    pub(crate) model: String,
    pub(crate) count: u64,
}

impl Pressure {
    fn of(v: &Value) -> Self {
        Self {
            pool: text(&v["pool"]).unwrap_or_default(),
            model: text(&v["model"]).unwrap_or_default(),
            count: v["count"].as_u64().unwrap_or_default(),
        }
    }
}

/// A string that is not empty.
fn text(v: &Value) -> Option<String> {
    v.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn list(v: &Value) -> &[Value] {
    v.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The counts of an object, by name.
fn counts(v: &Value) -> Vec<(String, u64)> {
    let pairs = v.as_object().into_iter().flatten();
    pairs.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
}

/// All values of `v` with their paths, such as `metrics.kv_usage`. Objects and lists without content are left out.
pub(crate) fn leaves(v: &Value) -> Vec<(String, String)> {
    fn add(path: String, v: &Value, out: &mut Vec<(String, String)>) {
        let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        match v {
            Value::Object(fields) => fields.iter().for_each(|(key, value)| add(below(key), value, out)),
            Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
                items.iter().enumerate().for_each(|(at, item)| add(below(&at.to_string()), item, out));
            }
            Value::Array(items) if items.is_empty() => {}
            Value::Array(items) => out.push((path, items.iter().map(plain).collect::<Vec<_>>().join(", "))),
            value => out.push((path, plain(value))),
        }
    }
    let mut out = Vec::new();
    add(String::new(), v, &mut out);
    out
}

/// A single value without quotes.
fn plain(v: &Value) -> String {
    match v {
        Value::Null => crate::format::MISSING.to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
