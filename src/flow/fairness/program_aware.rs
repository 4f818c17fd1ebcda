//! `program-aware-fairness`: the flow with little recent service and a long wait goes first. With
//! `strategy: turn-priority` it is [`super::turn_priority`].
//!
//! ```text
//! score   = lasWeightService · (1 − service normalised) + lasWeightHeadWait · (wait of the first request normalised)
//!           the greatest goes
//! service = Σ (prompt + 2 · response tokens), counted when a response ends; halved after each lasHalfLifeSeconds in
//!           which the flow has nothing queued and nothing in flight
//! ```
//!
//! With `sync`, service by other pickers counts when their responses end. Requests in flight there do not keep service
//! from decaying.
//!
//! Both figures are normalised over the flows that have something queued, so a score depends on all other flows. The
//! best flow is found without a look at all of them. Flows are sorted by service and by the arrival of their first
//! request; a walk follows both orders side by side and ends when no flow further down can score higher (Fagin's
//! threshold algorithm). Service decays only while its flow is in neither order, so decay changes no order: it is
//! applied when the flow returns.
//!
//! One difference from llm-d: `lasDecayFactor` without a half-life decays by the second, as llm-d documents it.
//! When not: requests last long against the half-life. Requests in flight do not count yet; `vtc-fair` charges them
//! as tokens arrive. Source: llm-d.

use super::turn_priority::TurnPriority;
use super::{Fairness, Meter, QueueHead};
use crate::registry::PolicyDescriptor;
use ahash::AHashMap;
use attache_scheduling::plugin::{Inert, params, section};
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "program-aware-fairness",
    aliases: &["program-aware-fairness-policy", "program-aware"],
    summary: "The flow with the least recent service and the longest wait.",
    source: "llm-d `program-aware-fairness` (`las`, `turn-priority`)",
    parameters: section::<Params>,
    build: |value: &Value| params(value).map(Params::build),
};

/// A response token counts twice, as in llm-d.
const OUTPUT_WEIGHT: f64 = 2.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProgramStrategy {
    Las,
    TurnPriority,
}

keywords! {
    ProgramStrategy: "las" => Las, "turn-priority" => TurnPriority;
}

parameters! {
    // The defaults are llm-d's.
    struct Params {
        /// `las`: the flow with little recent service and a long wait goes first. `turn-priority`: the flow with the
        /// most turns.
        "strategy" => strategy: ProgramStrategy { default: ProgramStrategy::Las; },
        /// With `las`: weight of a flow's recent service; less service scores higher.
        "lasWeightService" => las_weight_service: f64 { default: 0.8; range: 0.0..; unit: "weight"; },
        /// With `las`: weight of the wait of a flow's first request; a longer wait scores higher.
        "lasWeightHeadWait" => las_weight_head_wait: f64 { default: 0.2; range: 0.0..; unit: "weight"; },
        /// With `las`: time in which the service of an idle flow halves. 0: `lasDecayFactor` applies.
        "lasHalfLifeSeconds" => las_half_life_seconds: f64 { default: 60.0; range: 0.0..; unit: "seconds"; },
        /// With `las` and `lasHalfLifeSeconds: 0`: share of an idle flow's service that remains after a second.
        "lasDecayFactor" => las_decay_factor: f64 {
            default: 0.999_97; range: (Excluded(0.0), Included(1.0)); unit: "share";
        },
        /// With `turn-priority`: turns that a second of waiting is worth.
        "turnPriorityTimeWeight" => turn_priority_time_weight: f64 { default: 0.05; range: 0.0..; unit: "turns"; },
        /// With `turn-priority`: time without requests in flight after which a flow starts again at its first turn.
        "turnPriorityInactivitySeconds" => turn_priority_inactivity_seconds: f64 {
            default: 120.0; range: 0.0..; unit: "seconds";
        },
        ignored {
            /// Without effect: idle flows are forgotten after a fixed time.
            "evictionTtlSeconds": Value, "evictionSweepSeconds": Value,
        }
    }
}

fn is_turn_priority(parameters: &Value) -> bool {
    parameters.get("strategy").is_some_and(|strategy| strategy == "turn-priority")
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["lasWeightService", "lasWeightHeadWait", "lasHalfLifeSeconds", "lasDecayFactor"],
        when: is_turn_priority,
        why: "it needs `strategy: las`",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["turnPriorityTimeWeight", "turnPriorityInactivitySeconds"],
        when: |all| !is_turn_priority(all),
        why: "it needs `strategy: turn-priority`",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["lasDecayFactor"],
        when: |all| !is_turn_priority(all) && all.get("lasHalfLifeSeconds").and_then(Value::as_f64) != Some(0.0),
        why: "it needs `lasHalfLifeSeconds: 0`; here the half-life says how service decays",
    },
    Inert {
        plugins: &[PLUGIN.name],
        keys: &["evictionTtlSeconds", "evictionSweepSeconds"],
        when: |_| true,
        why: "idle flows are forgotten after a fixed time",
    },
];

/// An amount of service, totally ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Service(f64);

impl Eq for Service {}

impl PartialOrd for Service {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Service {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct FlowService {
    service: Service,
    queued_since: Option<Timestamp>,
    in_flight: u32,
    /// Since when the flow is idle and its service decays.
    idle_since: Option<Timestamp>,
}

#[derive(Debug)]
struct ProgramAware {
    weight_service: f64,
    weight_wait: f64,
    half_life: f64,
    /// The latest time that a call has passed.
    now: Timestamp,
    flows: AHashMap<u32, FlowService>,
    // Each order holds the other figure as well, so that a walk needs no further look-up.
    by_service: BTreeMap<(Service, u32), Timestamp>,
    by_wait: BTreeMap<(Timestamp, u32), Service>,
}

impl Params {
    fn build(self) -> Box<dyn Fairness> {
        let p = self;
        if p.strategy == ProgramStrategy::TurnPriority {
            let inactivity = Duration::try_from_secs_f64(p.turn_priority_inactivity_seconds).unwrap_or(Duration::MAX);
            return Box::new(TurnPriority::new(p.turn_priority_time_weight, inactivity));
        }
        // A factor of 1 never decays: the half-life is infinite.
        let by_factor = -1.0 / p.las_decay_factor.log2();
        let half_life = if p.las_half_life_seconds > 0.0 { p.las_half_life_seconds } else { by_factor };
        Box::new(ProgramAware::with(p.las_weight_service, p.las_weight_head_wait, half_life))
    }
}

impl ProgramAware {
    fn with(weight_service: f64, weight_wait: f64, half_life: f64) -> Self {
        let (by_service, by_wait) = (BTreeMap::new(), BTreeMap::new());
        let (now, flows) = (Timestamp::default(), AHashMap::new());
        Self { weight_service, weight_wait, half_life, now, flows, by_service, by_wait }
    }

    fn queue(&mut self, flow: u32, since: Option<Timestamp>) {
        let entry = self.flows.entry(flow).or_default();
        let (service, before) = (entry.service, std::mem::replace(&mut entry.queued_since, since));
        if before == since {
            return;
        }
        if let Some(before) = before {
            self.by_wait.remove(&(before, flow));
        }
        match since {
            Some(since) => {
                self.by_wait.insert((since, flow), service);
                self.by_service.insert((service, flow), since);
            }
            None => {
                self.by_service.remove(&(service, flow));
            }
        }
    }

    /// Sets the service of a flow, also where it is sorted.
    fn set_service(&mut self, flow: u32, service: Service) {
        let entry = self.flows.entry(flow).or_default();
        let before = std::mem::replace(&mut entry.service, service);
        if let Some(since) = entry.queued_since {
            self.by_service.remove(&(before, flow));
            self.by_service.insert((service, flow), since);
            self.by_wait.insert((since, flow), service);
        }
    }

    /// The service of an idle flow has decayed until `now`.
    fn decay(&mut self, flow: u32, now: Timestamp) {
        let half_life = self.half_life.abs();
        let entry = self.flows.entry(flow).or_default();
        if let Some(since) = entry.idle_since.take() {
            entry.service.0 *= (-now.since(since).as_secs_f64() / half_life).exp2();
        }
    }

    /// Counts these tokens of prompt and response.
    fn charge(&mut self, flow: u32, input: u32, output: u32) {
        let tokens = f64::from(input) + OUTPUT_WEIGHT * f64::from(output);
        let served = self.flows.get(&flow).map_or(0.0, |entry| entry.service.0);
        self.set_service(flow, Service(served + tokens));
    }

    /// Records that the flow is idle; its service decays from now on.
    fn rests(&mut self, flow: u32) {
        let now = self.now;
        if let Some(entry) = self.flows.get_mut(&flow).filter(|f| f.queued_since.is_none() && f.in_flight == 0) {
            entry.idle_since = Some(now);
        }
    }

    /// The flow with the greatest or the least score.
    fn extreme(&self, greatest: bool) -> Option<u32> {
        let sign = if greatest { 1.0 } else { -1.0 };
        let (served, waited) = (self.service_span()?, self.wait_span()?);
        let of = |service: f64, since: Timestamp| {
            let service = 1.0 - normalise(service, served);
            let wait = 1.0 - normalise(since.0 as f64, waited);
            sign * (self.weight_service * service + self.weight_wait * wait)
        };
        let mut best: Option<(f64, u32)> = None;
        let mut walks = (self.by_service.iter(), self.by_wait.iter());
        loop {
            let (by_service, by_wait) = if greatest {
                (walks.0.next()?, walks.1.next()?)
            } else {
                (walks.0.next_back()?, walks.1.next_back()?)
            };
            let ((service, one), (since, other)) = (by_service.0, by_wait.0);
            for (score, flow) in [(of(service.0, *by_service.1), *one), (of(by_wait.1.0, *since), *other)] {
                if best.is_none_or(|(s, f)| (score, std::cmp::Reverse(flow)) > (s, std::cmp::Reverse(f))) {
                    best = Some((score, flow));
                }
            }
            // No flow further down has less service or has waited longer than these.
            let bound = of(service.0, *since);
            if let Some((_, flow)) = best.filter(|(score, _)| *score >= bound) {
                return Some(flow);
            }
        }
    }

    fn service_span(&self) -> Option<(f64, f64)> {
        let ((least, _), _) = self.by_service.first_key_value()?;
        let ((most, _), _) = self.by_service.last_key_value()?;
        Some((least.0, most.0))
    }

    fn wait_span(&self) -> Option<(f64, f64)> {
        let ((first, _), _) = self.by_wait.first_key_value()?;
        let ((last, _), _) = self.by_wait.last_key_value()?;
        Some((first.0 as f64, last.0 as f64))
    }
}

fn normalise(value: f64, (least, greatest): (f64, f64)) -> f64 {
    if greatest > least { (value - least) / (greatest - least) } else { 0.0 }
}

impl Fairness for ProgramAware {
    fn orders_programs(&self) -> bool {
        true
    }

    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self::with(self.weight_service, self.weight_wait, self.half_life))
    }

    fn wakes(&mut self, flow: u32, _: f64, head: QueueHead, now: Timestamp) {
        self.now = now;
        self.decay(flow, now);
        self.queue(flow, Some(head.arrived));
    }

    fn head(&mut self, flow: u32, head: QueueHead) {
        self.queue(flow, Some(head.arrived));
    }

    fn sleeps(&mut self, flow: u32) {
        self.queue(flow, None);
        self.rests(flow);
    }

    fn next(&mut self) -> Option<u32> {
        self.extreme(true)
    }

    fn last(&mut self) -> Option<u32> {
        self.extreme(false)
    }

    fn dispatched(&mut self, flow: u32, _: &mut Meter, now: Timestamp, _: &mut PickRng) {
        self.now = now;
        self.flows.entry(flow).or_default().in_flight += 1;
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, now: Timestamp) {
        self.now = now;
        self.charge(flow, input.unwrap_or(meter.input), meter.output);
        if let Some(entry) = self.flows.get_mut(&flow) {
            entry.in_flight = entry.in_flight.saturating_sub(1);
        }
        self.rests(flow);
    }

    fn counts_service(&self) -> bool {
        true
    }

    fn served(&mut self, flow: u32, input: u32, output: u32) {
        self.decay(flow, self.now);
        self.charge(flow, input, output);
        self.rests(flow);
    }

    fn restart(&mut self, flow: u32) {
        self.set_service(flow, Service::default());
    }

    fn forget(&mut self, flow: u32) {
        self.queue(flow, None);
        self.flows.remove(&flow);
    }
}
