//! What an operator should look at now, with what to change: gateways that show too little, pools without a server that
//! responds, and pools that serve requests but could do so faster. The page `/endpoints`, the status page,
//! `attache check --live` and the metric `attache_warnings` show the same list.

mod pool;
mod process;

use crate::history::History;
use crate::pools::PoolView;
use arc_swap::ArcSwap;
use attache_pool::health::Contact;
use attache_pool::speed::Slowdown;
use attache_pool::{EndpointState, Engine};
use attache_request::event::Degraded;
use attache_telemetry::metrics::Metrics;
use attache_types::clock::Clock;
use attache_types::ids::EndpointId;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A condition that an operator should change.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Warning {
    /// Name of the condition, snake case.
    pub code: &'static str,
    /// Name of the pool, if the condition concerns one.
    pub pool: Option<Arc<str>>,
    /// What is wrong, and what follows from it.
    pub message: String,
    /// What to change.
    pub help: &'static str,
}

/// What was found at a reading of the history.
#[derive(Debug, Default)]
pub(crate) struct Judgement {
    /// All warnings: those about the process first, then those of each pool.
    pub(crate) warnings: Vec<Warning>,
    /// The slowdowns of endpoints that were compared, by pool.
    slowdowns: BTreeMap<Arc<str>, BTreeMap<EndpointId, Slowdown>>,
}

impl Judgement {
    /// That of this moment.
    pub(crate) fn of(views: &[PoolView], metrics: &Metrics, history: &History, clock: Clock) -> Self {
        let now = clock.now();
        let minute = history.minute(metrics, now);
        let slowdowns: BTreeMap<_, _> =
            views.iter().map(|view| (view.name.clone(), pool::compared(&view.store.load()))).collect();
        let of_pool = |view: &PoolView| pool::all(view, slowdowns.get(&view.name), history, &minute, clock.wall(now));
        let pools: Vec<Warning> = views.iter().flat_map(of_pool).collect();
        let is_overloaded = pools.iter().any(|warning| pool::OVERLOAD.contains(&warning.code));
        let of_process = process::handshakes(&minute).into_iter().chain(process::flood(&minute, is_overloaded));
        let warnings = of_gateway(&minute.degraded).chain(of_process).chain(pools).collect();
        Self { warnings, slowdowns }
    }

    /// How much longer an endpoint takes than the others in its role; `None` if it was not compared.
    pub(crate) fn slowdown(&self, pool: &str, endpoint: EndpointId) -> Option<Slowdown> {
        self.slowdowns.get(pool)?.get(&endpoint).copied()
    }
}

/// The warnings and slowdowns at the last reading of the history, at most five seconds ago.
#[derive(Debug, Default)]
pub struct LatestWarnings(ArcSwap<Judgement>);

impl LatestWarnings {
    /// Replaces them by those of this moment.
    pub fn update(&self, views: &[PoolView], metrics: &Metrics, history: &History, clock: Clock) {
        self.0.store(Arc::new(Judgement::of(views, metrics, history, clock)));
    }

    pub(crate) fn load(&self) -> Arc<Judgement> {
        self.0.load_full()
    }
}

/// The collector that adds the latest warnings to the registry.
#[derive(Debug)]
pub struct WarningCollector(pub Arc<LatestWarnings>);

impl Collector for WarningCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help =
            "1 for each warning of the picker, by pool and code; the label `pool` is empty if it concerns no pool";
        let mut gauges = encoder.encode_descriptor("warnings", help, None, MetricType::Gauge)?;
        let latest = self.0.load();
        let warnings = &latest.warnings;
        let active: BTreeSet<_> = warnings.iter().map(|w| (w.pool.as_deref().unwrap_or_default(), w.code)).collect();
        for (pool, code) in active {
            ConstGauge::new(1i64).encode(gauges.encode_family(&[("pool", pool), ("code", code)])?)?;
        }
        Ok(())
    }
}

/// Message and help of a degraded mode that a wrong setting of the gateway causes; `None` for the others.
fn gateway_setting(mode: Degraded) -> Option<(&'static str, &'static str)> {
    match mode {
        Degraded::NoBody => Some((
            "Envoy shows the body after the decision or not at all, so requests are routed by load only; pools by model, \
             rewrites and token limits can't work",
            "set `processing_mode.request_body_mode` of the ext_proc filter to FULL_DUPLEX_STREAMED or BUFFERED",
        )),
        Degraded::NoTimeToSplit => Some((
            "prompts are not split between servers, because Envoy's message timeout runs during a prefill",
            "send request bodies FULL_DUPLEX_STREAMED, or BUFFERED with `disaggregation.messageTimeout` of the pool",
        )),
        Degraded::NoTimeToQueue => Some((
            "requests are not queued when their pool is full, because Envoy's message timeout runs while they wait",
            "send request bodies FULL_DUPLEX_STREAMED (`processing_mode.request_body_mode` of the ext_proc filter)",
        )),
        _ => None,
    }
}

/// The warnings about the gateway that follow from these degraded modes.
fn of_gateway(degraded: &[&'static str]) -> impl Iterator<Item = Warning> {
    let modes = Degraded::OF_GATEWAY.into_iter().filter(move |mode| degraded.contains(&mode.label()));
    modes.filter_map(|mode| {
        let (message, help) = gateway_setting(mode)?;
        Some(Warning { code: mode.label(), pool: None, message: message.to_owned(), help })
    })
}

/// How many servers of a pool respond.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolReach {
    /// Endpoints of the pool.
    pub endpoints: usize,
    /// Endpoints that have responded, and those that are never scraped.
    pub reached: usize,
    /// Endpoints that were neither reached nor failed yet.
    pub awaited: usize,
    /// Whether all sources have reported the endpoints of the pool.
    pub is_synced: bool,
    /// Names of the endpoints that do not respond, with the cause; at most [`MAX_CAUSES`].
    pub failed: Vec<(Arc<str>, Arc<str>)>,
}

/// 3: causes that are shown of a pool. The others are usually the same.
pub const MAX_CAUSES: usize = 3;

impl PoolReach {
    /// The state of the pool at this moment.
    #[must_use]
    pub fn of(view: &PoolView) -> Self {
        let snapshot = view.store.load();
        let (endpoints, is_synced) = (snapshot.endpoints.len(), snapshot.synced);
        let mut reach = Self { endpoints, is_synced, ..Self::default() };
        for state in &snapshot.endpoints {
            let cause = || view.scrape.failing(state.endpoint.id);
            if is_reached(state) {
                reach.reached += 1;
            } else if let Some(cause) = cause() {
                if reach.failed.len() < MAX_CAUSES {
                    reach.failed.push((state.endpoint.spec.name.clone(), cause));
                }
            } else if state.endpoint.health.contact() == Contact::Unknown {
                reach.awaited += 1;
            }
        }
        reach
    }

    /// The warning about a pool that can serve no request.
    #[must_use]
    pub fn warning(&self, pool: &Arc<str>) -> Option<Warning> {
        let pool = Some(pool.clone());
        if self.endpoints == 0 {
            let message = "the pool has no endpoints, so its requests are rejected".to_owned();
            let help = "check that the selector, the DNS name or the file of the pool names running servers";
            return Some(Warning { code: "no_endpoints", pool, message, help });
        }
        if self.reached > 0 {
            return None;
        }
        let cause = self
            .failed
            .first()
            .map_or_else(|| "none has responded yet".to_owned(), |(endpoint, cause)| format!("{endpoint}: {cause}"));
        let message = format!("none of the pool's {} endpoints responds; {cause}", self.endpoints);
        let help =
            "check that the model servers run, and that addresses, ports and network policies let Attaché connect";
        Some(Warning { code: "no_endpoint_reached", pool, message, help })
    }
}

/// Whether the endpoint has responded, as far as it is asked.
fn is_reached(state: &EndpointState) -> bool {
    match state.endpoint.health.contact() {
        Contact::Reached => true,
        Contact::Unknown => state.endpoint.spec.engine == Engine::None,
        Contact::Unreachable => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::labels::Listed;

    #[test]
    fn only_modes_of_the_gateway_are_warnings() {
        let all: Vec<&str> = Degraded::values().map(Degraded::label).collect();
        let codes: Vec<&str> = of_gateway(&all).map(|warning| warning.code).collect();
        assert_eq!(codes, Degraded::OF_GATEWAY.map(Degraded::label));
        let codes: Vec<&str> = of_gateway(&["no_body", "encoded_body"]).map(|warning| warning.code).collect();
        assert_eq!(codes, ["no_body"]);
    }

    #[test]
    fn pool_without_a_server_that_responds_has_a_warning_with_the_cause() {
        let pool: Arc<str> = "chat".into();
        let code = |reach: &PoolReach| reach.warning(&pool).map(|warning| (warning.code, warning.message));
        let (code_of_empty, message) = code(&PoolReach::default()).unwrap();
        assert_eq!((code_of_empty, message.contains("no endpoints")), ("no_endpoints", true));
        let two = PoolReach { endpoints: 2, awaited: 2, ..PoolReach::default() };
        assert!(code(&two).unwrap().1.ends_with("2 endpoints responds; none has responded yet"));
        let failed = vec![("vllm-0".into(), "http://10.0.0.1:8000/metrics: connection refused".into())];
        let failing = PoolReach { endpoints: 2, failed, ..PoolReach::default() };
        let (code_of_failing, message) = code(&failing).unwrap();
        assert_eq!(code_of_failing, "no_endpoint_reached");
        assert!(message.contains("vllm-0: http://10.0.0.1:8000/metrics: connection refused"), "{message}");
        assert_eq!(code(&PoolReach { reached: 1, ..failing }), None);
    }
}
