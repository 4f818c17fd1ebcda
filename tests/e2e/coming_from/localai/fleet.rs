//! A strategy with requests in flight that the test sets, without a picker.

use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_protocol::Api;
use attache_scheduling::digest::Digest;
use attache_scheduling::{Candidate, ModelPolicy, PickContext, Ranking, Strategy};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use attache_types::rng::for_request;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const STALE_AFTER: Duration = Duration::from_secs(2);
/// Default time of requests, seconds.
const NOW: u64 = 5;

pub(in crate::coming_from) struct Fleet {
    pub(in crate::coming_from) strategy: Box<dyn Strategy>,
    pub(in crate::coming_from) policy: ModelPolicy,
    /// Endpoints that may serve requests. Empty means all.
    pub(in crate::coming_from) candidates: Vec<u32>,
}

/// The decision for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::coming_from) struct Picked {
    pub(in crate::coming_from) endpoint: u32,
    pub(in crate::coming_from) diverted: bool,
    pub(in crate::coming_from) reason: &'static str,
}

/// A chat with one message.
pub(in crate::coming_from) fn chat(text: &str) -> Value {
    serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]})
}

/// A request with a prompt instead of messages.
pub(in crate::coming_from) fn completion(model: &str, prompt: &str) -> Value {
    serde_json::json!({"model": model, "prompt": prompt})
}

impl Fleet {
    pub(in crate::coming_from) fn of(strategy: &str, parameters: &str) -> Self {
        let parameters: Value = serde_json::from_str(parameters).expect("JSON");
        let strategy = attache::plugins::registry().build(strategy, &parameters).expect("a strategy");
        Self { strategy, policy: ModelPolicy::default(), candidates: Vec::new() }
    }

    /// Runs `then` with the request `body` and endpoints that have these requests in flight, at `at` seconds.
    fn with<T>(
        &self,
        body: &Value,
        requests: &[u32],
        at: u64,
        then: impl FnOnce(&PickContext<'_>, &[Candidate<'_>]) -> T,
    ) -> T {
        let now = Timestamp(at * 1_000_000_000);
        let state = |(id, waiting): (u32, &u32)| {
            let spec = EndpointSpec::at(([10, 0, 0, 1], 8_000 + id as u16).into());
            let metrics = EndpointMetrics { scraped_at: now, waiting: *waiting, ..EndpointMetrics::default() };
            EndpointState::new(Arc::new(Endpoint::new(EndpointId(id), spec)), Some(Arc::new(metrics)))
        };
        let pool = PoolSnapshot::new(1, true, (0..).zip(requests).map(state).collect());
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let bytes = body.to_string().into_bytes();
        let limits = Limits::default();
        let request = attache_protocol::parse(Api::from_path(path).0, None, &bytes, &limits).expect("a request");
        let mut cx = PickContext::new(&pool, now, STALE_AFTER);
        cx.request.model = body["model"].as_str().unwrap_or_default();
        cx.request.prompt = Some(&request.prompt);
        cx.request.payload = Some(&bytes);
        cx.policy = self.policy;
        let may = |id: u32| self.candidates.is_empty() || self.candidates.contains(&id);
        let states = pool.endpoints.iter().filter(|s| may(s.id().0));
        let candidates: Vec<_> = states.map(|s| Candidate::new(s, now, STALE_AFTER, 0)).collect();
        then(&cx, &candidates)
    }

    /// The decision for the request. The strategy does not record it.
    pub(in crate::coming_from) fn ask(&self, body: &Value, requests: &[u32]) -> Picked {
        self.ask_at(body, requests, NOW)
    }

    pub(in crate::coming_from) fn ask_at(&self, body: &Value, requests: &[u32], at: u64) -> Picked {
        self.with(body, requests, at, |cx, candidates| {
            let mut ranking = Ranking::new(1);
            self.strategy.rank(cx, candidates, &mut for_request(1, 0), &mut ranking);
            let decision = ranking.decide().expect("a decision");
            Picked { endpoint: decision.picks[0].id.0, diverted: decision.diverted, reason: decision.reason }
        })
    }

    /// Records that the request was sent to this endpoint.
    pub(in crate::coming_from) fn sent(&self, body: &Value, to: u32) {
        let _ = self.sent_at(body, to, NOW);
    }

    pub(in crate::coming_from) fn sent_at(&self, body: &Value, to: u32, at: u64) -> Option<Digest> {
        let requests = vec![0; to as usize + 1];
        self.with(body, &requests, at, |cx, _| self.strategy.picked(cx, &cx.snapshot.endpoints[to as usize].endpoint))
    }

    /// The hash chain that the strategy records for the request, which is sent to this endpoint.
    pub(in crate::coming_from) fn trail(&self, body: &Value, to: u32) -> Option<Digest> {
        self.sent_at(body, to, NOW)
    }

    /// Records that the request was sent to `from` and served by `to` after Envoy's fallback.
    pub(in crate::coming_from) fn moved(&self, body: &Value, from: u32, to: u32) {
        let trail = self.trail(body, from).expect("a trail");
        let model = body["model"].as_str().unwrap_or_default();
        let now = Timestamp(NOW * 1_000_000_000);
        self.strategy.moved(model, &trail, EndpointId(from), EndpointId(to), now);
    }
}
