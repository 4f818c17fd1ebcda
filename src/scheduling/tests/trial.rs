//! A small pool on which filters and scorers are tried.

use super::{NOW, STALE_AFTER};
use crate::clock::Timestamp;
use crate::ids::EndpointId;
use crate::pool::ledger::Ticket;
use crate::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState, PoolSnapshot};
use crate::rng::for_request;
use crate::scheduling::candidates::Cached;
use crate::scheduling::plugin::{AnswerHeaders, Filter, Headers, Plugin, Scorer};
use crate::scheduling::{Candidate, PickContext, RequestFacts, registry};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One server, and what it holds of the prompt.
#[derive(Debug)]
pub(in crate::scheduling) struct Server {
    pub(in crate::scheduling) metrics: Option<EndpointMetrics>,
    labels: BTreeMap<Arc<str>, Arc<str>>,
    name: Option<&'static str>,
    cached: u32,
    tickets: Vec<u32>,
}

/// A server that reports nothing.
pub(in crate::scheduling) fn silent() -> Server {
    Server { metrics: None, labels: BTreeMap::new(), name: None, cached: 0, tickets: Vec::new() }
}

/// A server that reports this.
pub(in crate::scheduling) fn reports(metrics: EndpointMetrics) -> Server {
    Server { metrics: Some(EndpointMetrics { scraped_at: NOW, ..metrics }), ..silent() }
}

/// A server with this queue and this part of its KV cache in use.
pub(in crate::scheduling) fn load(waiting: u32, kv_usage: f32) -> Server {
    reports(EndpointMetrics { waiting, kv_usage, ..EndpointMetrics::default() })
}

/// A server with so many running requests.
pub(in crate::scheduling) fn running(running: u32) -> Server {
    reports(EndpointMetrics { running, ..EndpointMetrics::default() })
}

/// A server with these adapters running and waiting, and room for `max`.
pub(in crate::scheduling) fn lora(running: &[&str], waiting: &[&str], max: u32) -> Server {
    let names = |list: &[&str]| list.iter().map(|n| Arc::from(*n)).collect();
    let lora = Some(LoraState { max, running: names(running), waiting: names(waiting) });
    reports(EndpointMetrics { lora, ..EndpointMetrics::default() })
}

impl Server {
    /// Read so many milliseconds ago.
    pub(in crate::scheduling) fn aged(mut self, ms: u64) -> Self {
        if let Some(metrics) = &mut self.metrics {
            metrics.scraped_at = Timestamp(NOW.0 - ms * 1_000_000);
        }
        self
    }

    pub(in crate::scheduling) fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    pub(in crate::scheduling) fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// It holds so many tokens of the prompt.
    pub(in crate::scheduling) fn holding(mut self, tokens: u32) -> Self {
        self.cached = tokens;
        self
    }

    /// Requests that we have sent there, by their uncached prompt tokens.
    pub(in crate::scheduling) fn sent(mut self, tokens: &[u32]) -> Self {
        self.tickets.extend(tokens);
        self
    }
}

/// The pool and the request.
#[derive(Debug)]
pub(in crate::scheduling) struct Trial {
    pub(in crate::scheduling) pool: PoolSnapshot,
    cached: Vec<u32>,
    headers: BTreeMap<String, String>,
    prompt_tokens: u32,
    now: Timestamp,
    _tickets: Vec<Ticket>,
}

/// A request of 100 tokens for the model `A` among `servers`, whose ids count from 0.
pub(in crate::scheduling) fn among(servers: Vec<Server>) -> Trial {
    let (mut states, mut cached, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
    for (id, server) in (0u32..).zip(servers) {
        let mut spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into());
        spec.labels = server.labels;
        spec.name = server.name.map_or(spec.name, Into::into);
        let endpoint = Arc::new(Endpoint::new(EndpointId(id), spec));
        tickets.extend(server.tickets.iter().map(|tokens| Ticket::book(endpoint.clone(), *tokens)));
        cached.push(server.cached);
        states.push(EndpointState { endpoint, metrics: server.metrics.map(Arc::new) });
    }
    let pool = PoolSnapshot::new(1, true, states);
    Trial { pool, cached, headers: BTreeMap::new(), prompt_tokens: 100, now: NOW, _tickets: tickets }
}

impl Trial {
    pub(in crate::scheduling) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The request has a prompt of so many tokens.
    pub(in crate::scheduling) fn long(self, prompt_tokens: u32) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// It comes so many milliseconds later.
    pub(in crate::scheduling) fn later(self, ms: u64) -> Self {
        Self { now: Timestamp(self.now.0 + ms * 1_000_000), ..self }
    }

    pub(in crate::scheduling) fn context(&self) -> PickContext<'_> {
        let request = RequestFacts {
            model: "A",
            prompt_tokens: self.prompt_tokens,
            headers: Headers::of(&self.headers),
            ..RequestFacts::default()
        };
        PickContext { request, ..PickContext::new(&self.pool, self.now, STALE_AFTER) }
    }

    pub(in crate::scheduling) fn candidates(&self) -> Vec<Candidate<'_>> {
        let states = self.pool.endpoints.iter().zip(&self.cached);
        let candidate = |(state, cached): (_, &u32)| Candidate {
            cached: Cached { gpu: *cached, any: *cached },
            ..Candidate::new(state, self.now, STALE_AFTER, 0)
        };
        states.map(candidate).collect()
    }

    /// Who stays.
    pub(in crate::scheduling) fn kept(&self, filter: &dyn Filter) -> Vec<usize> {
        self.kept_by_draw(filter, 0)
    }

    /// Who stays, by the draw of this seed.
    pub(in crate::scheduling) fn kept_by_draw(&self, filter: &dyn Filter, seed: u64) -> Vec<usize> {
        let candidates = self.candidates();
        let mut keep = vec![true; candidates.len()];
        filter.keep(&self.context(), &candidates, &mut for_request(seed, 0), &mut keep);
        (0..keep.len()).filter(|i| keep[*i]).collect()
    }

    pub(in crate::scheduling) fn scores(&self, scorer: &dyn Scorer) -> Vec<f32> {
        let candidates = self.candidates();
        let mut out = vec![f32::NAN; candidates.len()];
        scorer.score(&self.context(), &candidates, &mut out);
        out
    }

    pub(in crate::scheduling) fn endpoint(&self, i: usize) -> &Endpoint {
        &self.pool.endpoints[i].endpoint
    }
}

pub(in crate::scheduling) fn filter(name: &str, parameters: &Value) -> Arc<dyn Filter> {
    match (registry::plugin(name).unwrap().build)(parameters).unwrap() {
        Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter,
        other => panic!("{name} is {other:?}"),
    }
}

pub(in crate::scheduling) fn scorer(name: &str, parameters: &Value) -> Arc<dyn Scorer> {
    match (registry::plugin(name).unwrap().build)(parameters).unwrap() {
        Plugin::Scorer(scorer) | Plugin::FilterAndScorer(_, scorer) => scorer,
        other => panic!("{name} is {other:?}"),
    }
}

/// The headers that a plugin has for the client when `endpoint` serves, as `name: value`.
pub(in crate::scheduling) fn answer(tell: impl Fn(&mut AnswerHeaders)) -> Vec<String> {
    let mut headers = AnswerHeaders::new();
    tell(&mut headers);
    headers.into_iter().map(|(name, value)| format!("{name}: {value}")).collect()
}
