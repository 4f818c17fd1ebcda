//! The checks of `flowControl`.

use super::given;
use super::templates::searches;
use crate::defaults::DEFAULT_STRATEGY;
use crate::schema::{self, Strategy, word_of};
use attache_config_schema::decode::{Bytes, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span, closest};
use attache_flow::admitter::Admitter;
use attache_flow::ceiling::Ceiling;
use attache_flow::registry::{self, ADMITTERS, CEILINGS, DETECTORS, FAIRNESS, ORDERINGS, PolicyDescriptor};
use attache_flow::saturation::Detector;
use attache_flow::saturation::recompute::Recompute;
use attache_flow::settings::{DEFAULT_BAND_BYTES, DEFAULT_BAND_REQUESTS, DEFAULT_EMPTY_TTL};
use attache_flow::{BandSettings, Overflow, PoolFlow, Queueing, Settings};
use attache_types::limits::DEFAULT_MAX_BUFFERED_BYTES;
use attache_types::units::show_duration;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Default detector: keeps the model servers' queues short, so that most requests wait in
/// Attaché, which can reorder them.
const DEFAULT_DETECTOR: &str = "backlog-detector";
/// The default detector of GIE and llm-d.
const SHEDDING_DETECTOR: &str = "utilization-detector";
/// Default ceiling: a band may use all of the pool, since bands are served in order anyway.
const DEFAULT_CEILING: &str = "static-usage-limit-policy";
/// Default fairness: tenants compete for tokens.
const DEFAULT_FAIRNESS: &str = "vtc-fair";
/// 32,768, some seconds of one server: lets a tenant that asks for less than its share go before
/// one that floods the pool.
const DEFAULT_BURST_TOKENS: u32 = 32_768;
/// Default ordering: a long prompt does not delay short ones, and is delayed by 10 s at most.
const DEFAULT_ORDERING: &str = "least-work";
/// Default overflow: one flow can't lock others out.
const DEFAULT_OVERFLOW: Overflow = Overflow::LongestFlow;

/// A selected policy: its name, its parameters and the policy itself.
struct Chosen<P: ?Sized + 'static> {
    descriptor: &'static PolicyDescriptor<P>,
    parameters: Value,
    built: Box<P>,
}

impl<P: ?Sized> Chosen<P> {
    fn said(&self) -> Value {
        json!({"name": self.descriptor.name, "parameters": self.parameters})
    }
}

/// The policy that `file` names, else the default with its parameters; errors are reported to `sink`.
fn choose<P: ?Sized>(
    kind: &str,
    policies: &'static [&'static PolicyDescriptor<P>],
    file: Option<&Strategy>,
    (default, usual): (&str, Value),
    path: &str,
    sink: &mut Sink,
) -> Option<Chosen<P>> {
    let (name, span) = file.map_or((default, Span::default()), |s| (s.name.value.as_str(), s.name.span));
    let Some(descriptor) = registry::find(policies, name) else {
        let names: Vec<&str> = policies.iter().map(|d| d.name).collect();
        let shown: String = name.chars().take(60).collect();
        let message = format!("no {kind} is called `{shown}`; there are: {}", names.join(", "));
        let mut diagnostic = Diagnostic::new(Code::OutOfRange, path, message).at(span);
        if let Some(meant) = closest(name, names) {
            diagnostic = diagnostic.help(format!("did you mean `{meant}`?"));
        }
        sink.push(diagnostic);
        return None;
    };
    let given = file.and_then(|s| s.parameters.as_ref());
    let none = if file.is_some() { Value::Null } else { usual };
    let parameters = given.map_or(none, |at| at.value.clone());
    match (descriptor.build)(&parameters) {
        Ok(built) => {
            if let Some(given) = given.filter(|given| given.is_written()) {
                for error in registry::inert(descriptor.name, &given.value) {
                    sink.push(given.without_effect(name, &error, path));
                }
            }
            Some(Chosen { descriptor, parameters, built })
        }
        Err(error) => {
            let (below, span) = given.map_or((String::new(), span), |given| given.culprit(&error));
            let message = format!("{kind} `{name}` does not take these parameters: {error}");
            let path = format!("{path}.parameters{below}");
            sink.push(Diagnostic::new(Code::BadParameters, path, message).at(span));
            None
        }
    }
}

/// Reads a band; returns it with its form in the dump.
fn band(
    file: &schema::Band,
    like: Option<&(BandSettings, Value)>,
    path: &str,
    sink: &mut Sink,
) -> Option<(BandSettings, Value)> {
    let inherit = |said: bool| like.filter(|_| !said);
    let (fairness, fairness_said) = match inherit(file.fairness.is_some()) {
        Some((band, said)) => (band.fairness.clone(), said.get("fairness").cloned().unwrap_or_default()),
        None => {
            let file = file.fairness.as_ref().map(|at| &at.value);
            let usual = (DEFAULT_FAIRNESS, json!({"burstTokens": DEFAULT_BURST_TOKENS}));
            let chosen = choose("fairness", FAIRNESS, file, usual, &format!("{path}.fairness"), sink)?;
            let said = chosen.said();
            (chosen.built.into(), said)
        }
    };
    let (ordering, ordering_said) = match inherit(file.ordering.is_some()) {
        Some((band, said)) => (band.ordering.clone(), said.get("ordering").cloned().unwrap_or_default()),
        None => {
            let file = file.ordering.as_ref().map(|at| &at.value);
            let usual = (DEFAULT_ORDERING, Value::Null);
            let chosen = choose("ordering", ORDERINGS, file, usual, &format!("{path}.ordering"), sink)?;
            let said = chosen.said();
            (chosen.built.into(), said)
        }
    };
    let usual = like.map(|(band, _)| band);
    let requests = usual.map_or(DEFAULT_BAND_REQUESTS, |b| b.max_requests);
    let held = usual.map_or(DEFAULT_BAND_BYTES, |b| b.max_bytes);
    let overflow = given(file.overflow, usual.map_or(DEFAULT_OVERFLOW, |b| b.overflow));
    let max_requests = given(file.max_requests, requests);
    let max_bytes = given(file.max_bytes, Bytes(held)).0;
    let ttl = file.ttl.map(|at| at.value).or_else(|| usual.and_then(|b| b.ttl));
    let said = json!({
        "fairness": fairness_said,
        "ordering": ordering_said,
        "maxRequests": max_requests,
        "maxBytes": max_bytes,
        "overflow": word_of(overflow),
        "ttl": ttl.map(show_duration),
    });
    Some((BandSettings { ordering, fairness, max_requests, max_bytes, overflow, ttl }, said))
}

/// Reads the bands that differ from the default, with their forms in the dump.
fn bands(
    file: &[At<schema::Band>],
    like: &(BandSettings, Value),
    path: &str,
    sink: &mut Sink,
) -> (BTreeMap<i32, BandSettings>, Vec<Value>) {
    let (mut bands, mut shown) = (BTreeMap::new(), Vec::new());
    for (i, at) in file.iter().enumerate() {
        let path = format!("{path}.bands[{i}]");
        let Some(priority) = at.value.priority else {
            let message = "`priority` is missing; it says which requests the band is for";
            sink.push(Diagnostic::new(Code::OutOfRange, format!("{path}.priority"), message).at(at.span));
            continue;
        };
        let Some((settings, mut said)) = band(&at.value, Some(like), &path, sink) else { continue };
        if let Value::Object(said) = &mut said {
            said.insert("priority".into(), priority.value.into());
        }
        if bands.insert(priority.value, settings).is_some() {
            sink.out_of_range(priority.span, &format!("{path}.priority"), priority.value, "one band for each priority");
        }
        shown.push(said);
    }
    (bands, shown)
}

fn shares(file: &[(At<String>, At<f64>)], path: &str, sink: &mut Sink) -> HashMap<Arc<str>, f64> {
    let mut shares = HashMap::new();
    for (flow, share) in file {
        // Counters have 64 bits, and a smaller share would overflow one.
        if !(1e-6..=1e6).contains(&share.value) {
            sink.out_of_range(share.span, &format!("{path}.shares"), share.value, "0.000001 to 1,000,000");
        }
        shares.insert(flow.value.as_str().into(), share.value);
    }
    shares
}

/// Flow control for `enabled: true` alone.
#[must_use]
pub fn recommended() -> Option<PoolFlow> {
    let enabled = Some(At { value: true, span: Span::default() });
    let room = Room::shared(DEFAULT_MAX_BUFFERED_BYTES, &[]);
    flow(&schema::FlowControl { enabled, ..schema::FlowControl::default() }, room, "flowControl", &mut Sink::default())
}

/// Flow control of a pool outside of Kubernetes without `flowControl`, for its `strategy`.
#[must_use]
pub fn usual(strategy: &str) -> Option<PoolFlow> {
    implied(strategy, false, Room::shared(DEFAULT_MAX_BUFFERED_BYTES, &[]), &mut Sink::default())
}

/// Flow control of a pool in Kubernetes without `flowControl`, as in the pickers of GIE and llm-d: requests with a
/// priority below 0 are refused while the pool is saturated, and none is queued.
fn shedding(room: Room, sink: &mut Sink) -> Option<PoolFlow> {
    fn at<T>(value: T) -> At<T> {
        At { value, span: Span::default() }
    }
    let detector = Strategy { name: at(SHEDDING_DETECTOR.to_owned()), parameters: None };
    let (enabled, queue) = (Some(at(true)), Some(at(false)));
    let file = schema::FlowControl { enabled, queue, detector: Some(at(detector)), ..schema::FlowControl::default() };
    flow(&file, room, "flowControl", sink)
}

/// Flow control of a pool without `flowControl`, for its `strategy`: pools in Kubernetes shed (`of_cluster`), and the
/// default strategy holds long prompts back.
pub(super) fn implied(strategy: &str, of_cluster: bool, room: Room, sink: &mut Sink) -> Option<PoolFlow> {
    let shedding = of_cluster.then(|| shedding(room, sink)).flatten();
    if strategy != DEFAULT_STRATEGY {
        return shedding;
    }
    Some(PoolFlow::of_long_prompts(Recompute::default(), shedding, room.held))
}

/// Reports deadlines of a pool that can't predict whether they are met.
pub(super) fn check_deadline_admission(pool: &schema::Pool, path: &str, sink: &mut Sink) {
    let Some(at) = pool.deadline_admission.filter(|at| at.value) else { return };
    if let Some(other) = &pool.disaggregation {
        let message =
            "not with `disaggregation`: what two servers take together is not predicted before they are chosen";
        let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.deadlineAdmission"), message);
        sink.push(diagnostic.at(at.span).related(other.span, "requests are split"));
    }
}

/// Half of the bytes that all bodies may hold: queued requests leave the other half to requests that are not queued.
const DEFAULT_QUEUED_PART: u64 = 2;
/// A quarter of the bytes that all bodies may hold, for prompts that are held back in pools without `flowControl`.
const HELD_PART: u64 = 4;

/// Memory for request bodies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Most bytes of all bodies together.
    buffered: u64,
    /// Default limit of queued bytes in one pool. The pools of a search also share this limit, however many there are.
    pub(super) queued: u64,
    /// Most bytes that a pool without `flowControl` holds back.
    held: u64,
}

impl Room {
    /// Divides the memory for queued bodies among the pools with queues. A search counts as one, since any pool that
    /// it finds may have queues.
    pub(super) fn shared(buffered: u64, pools: &[At<schema::Pool>]) -> Self {
        let has_queues = |flow: &At<schema::FlowControl>| flow.value.enabled() && flow.value.queue();
        let shares = |pool: &schema::Pool| searches(pool) || pool.flow_control.as_ref().is_some_and(has_queues);
        let sharing = pools.iter().filter(|at| shares(&at.value)).count();
        let part = |part: u64, pools: usize| buffered / part / (pools as u64).max(1);
        Self { buffered, queued: part(DEFAULT_QUEUED_PART, sharing), held: part(HELD_PART, pools.len() - sharing) }
    }

    /// For a file whose process's limits are unknown.
    pub(super) fn unknown() -> Self {
        Self { buffered: u64::MAX, queued: u64::MAX, held: DEFAULT_MAX_BUFFERED_BYTES / HELD_PART }
    }
}

/// Most queued bytes of a pool.
fn queued_bytes(file: Option<At<Bytes>>, room: Room, path: &str, sink: &mut Sink) -> u64 {
    if let Some(at) = file.filter(|at| at.value.0 > room.buffered) {
        let message = format!(
            "the queue never holds {} bytes: `limits.maxBufferedBytes` ({}) is reached before, and then requests are \
             refused that need not wait",
            at.value.0, room.buffered
        );
        sink.push(Diagnostic::new(Code::NoEffect, path, message).at(at.span).help("leave it out, or make it smaller"));
    }
    given(file, Bytes(room.queued)).0
}

/// A policy by the file or by default; `None` if the file's is invalid.
type Choice<T> = Option<Chosen<T>>;

/// The detector and the ceiling of a pool.
fn detector_and_ceiling(
    file: &schema::FlowControl,
    path: &str,
    sink: &mut Sink,
) -> (Choice<dyn Detector>, Choice<dyn Ceiling>) {
    let detector = file.detector.as_ref().map(|at| &at.value);
    let detector =
        choose("detector", DETECTORS, detector, (DEFAULT_DETECTOR, Value::Null), &format!("{path}.detector"), sink);
    let ceiling = file.ceiling.as_ref().map(|at| &at.value);
    let ceiling =
        choose("ceiling", CEILINGS, ceiling, (DEFAULT_CEILING, Value::Null), &format!("{path}.ceiling"), sink);
    (detector, ceiling)
}

/// The admitters of a pool.
fn admitters(file: &schema::FlowControl, path: &str, sink: &mut Sink) -> Vec<Chosen<dyn Admitter>> {
    let admitters = file.admitters.iter().flat_map(|at| &at.value).enumerate();
    admitters
        .filter_map(|(i, at)| {
            let path = format!("{path}.admitters[{i}]");
            choose("admitter", ADMITTERS, Some(&at.value), ("", Value::Null), &path, sink)
        })
        .collect()
}

/// Warns of priorities in bands that are for all priorities without a band of their own.
fn check_priorities(usual: &schema::Band, sheddable: Option<&schema::Band>, path: &str, sink: &mut Sink) {
    for (key, band) in [("defaultBand", Some(usual)), ("sheddableBand", sheddable)] {
        if let Some(at) = band.and_then(|band| band.priority) {
            let message = format!("`priority` belongs to `bands`: `{key}` is for those that are not named there");
            sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.{key}.priority"), message).at(at.span));
        }
    }
}

/// Checks the section; `None` if flow control is off or invalid.
pub(super) fn flow(file: &schema::FlowControl, room: Room, path: &str, sink: &mut Sink) -> Option<PoolFlow> {
    let (detector, ceiling) = detector_and_ceiling(file, path, sink);
    let admitters = self::admitters(file, path, sink);
    let none = schema::Band::default();
    let usual = file.default_band.as_ref().map_or(&none, |at| &at.value);
    let sheddable = file.sheddable_band.as_ref().map(|at| &at.value);
    check_priorities(usual, sheddable, path, sink);
    let default_band = band(usual, None, &format!("{path}.defaultBand"), sink);
    let ttl = file.ttl.map(|at| at.value);
    let empty_ttl = given(file.empty_ttl, ttl.unwrap_or(DEFAULT_EMPTY_TTL));
    let max_requests = given(file.max_requests, u64::MAX);
    let max_bytes = queued_bytes(file.max_bytes, room, &format!("{path}.maxBytes"), sink);
    let shares = shares(file.shares.as_ref().map(|at| at.value.as_slice()).unwrap_or_default(), path, sink);
    let default_band = default_band?;
    let sheddable = sheddable.map(|file| band(file, Some(&default_band), &format!("{path}.sheddableBand"), sink));
    let (sheddable_band, sheddable_said) = sheddable.flatten().unzip();
    let named = file.bands.as_ref().map(|at| at.value.as_slice()).unwrap_or_default();
    let (bands, bands_said) = bands(named, &default_band, path, sink);
    let (detector, ceiling) = (detector?, ceiling?);
    let (queue, evict_sheddable, evict_running) = (file.queue(), file.evict_sheddable(), file.evict_running());
    let said = json!({
        "enabled": true,
        "queue": queue,
        "detector": detector.said(),
        "ceiling": ceiling.said(),
        "admitters": admitters.iter().map(Chosen::said).collect::<Vec<_>>(),
        "ttl": ttl.map(show_duration),
        "emptyTtl": show_duration(empty_ttl),
        "maxRequests": (max_requests != u64::MAX).then_some(max_requests),
        "maxBytes": (max_bytes != u64::MAX).then_some(max_bytes),
        "evictSheddable": evict_sheddable,
        "evictRunning": word_of(evict_running),
        "shares": shares.iter().map(|(flow, share)| (flow.to_string(), *share)).collect::<BTreeMap<_, _>>(),
        "defaultBand": default_band.1,
        "sheddableBand": sheddable_said,
        "bands": bands_said,
    });
    let settings = Settings {
        bands,
        sheddable_band,
        default_band: default_band.0,
        max_requests,
        max_bytes,
        ttl,
        empty_ttl,
        weights: shares,
        evict_sheddable,
        evict_running,
        ..Settings::default()
    };
    let detector: Arc<dyn Detector> = detector.built.into();
    let (queueing, shedding) = if queue { (Some(Queueing::Saturated(detector)), None) } else { (None, Some(detector)) };
    file.enabled().then(|| PoolFlow {
        settings,
        queueing,
        shedding,
        ceiling: (ceiling.descriptor, ceiling.parameters),
        admitters: admitters.into_iter().map(|chosen| chosen.built.into()).collect(),
        said,
    })
}
