//! The counters of the Virtual Token Counter: what each flow has had, and who of those that wait has had least. Called by the `vtc-` policies
//! alone.
//!
//! ```text
//! cost of a request = inputTokenWeight · prompt + outputTokenWeight · answer, divided by the flow's share
//! ```
//!
//! Counters are whole thousandths of a token, so that what is charged and given back leaves no trace.

use super::Meter;
use ahash::AHashMap;
use attache_scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;

/// 1, as in the paper.
pub const DEFAULT_INPUT_WEIGHT: f64 = 1.0;
/// 2, as in the paper: a token of an answer takes a step of its own.
pub const DEFAULT_OUTPUT_WEIGHT: f64 = 2.0;
/// Parts of a token.
const UNITS: f64 = 1_000.0;

/// What tokens cost.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Weights {
    pub(super) input_token_weight: f64,
    pub(super) output_token_weight: f64,
}

impl Default for Weights {
    fn default() -> Self {
        Self { input_token_weight: DEFAULT_INPUT_WEIGHT, output_token_weight: DEFAULT_OUTPUT_WEIGHT }
    }
}

impl Weights {
    pub(super) fn new(parameters: &Value) -> Result<Self, ParamError> {
        params::<Self>(parameters)?.checked()
    }

    pub(super) fn checked(self) -> Result<Self, ParamError> {
        for (name, value) in
            [("inputTokenWeight", self.input_token_weight), ("outputTokenWeight", self.output_token_weight)]
        {
            // More would run over in a day of traffic.
            if !(0.0..=1e6).contains(&value) {
                return Err(ParamError::value(name, value, "0 to 1,000,000 is allowed"));
            }
        }
        Ok(self)
    }
}

#[derive(Clone, Copy, Debug)]
struct Counter {
    served: u64,
    queued: bool,
    weight: f64,
}

impl Default for Counter {
    fn default() -> Self {
        Self { served: 0, queued: false, weight: 1.0 }
    }
}

/// The counters of a band's flows.
#[derive(Debug, Default)]
pub(super) struct Counters {
    weights: Weights,
    flows: AHashMap<u32, Counter>,
    /// Those that have something queued.
    queued: BTreeSet<(u64, u32)>,
    /// The counter of the flow that was the last to have nothing queued any more.
    left: u64,
    /// What everybody who waited has had; it never falls, whoever comes back with less.
    floor: u64,
    /// The greatest that a counter has been.
    greatest: u64,
}

impl Counters {
    pub(super) fn of(weights: Weights) -> Self {
        Self { weights, ..Self::default() }
    }

    pub(super) fn fresh(&self) -> Self {
        Self::of(self.weights)
    }

    /// Something of `flow` is queued, and it counts as having had no less than the floor, but for `burst` tokens if it was here before.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 10^9 thousandths, by a share of 10^-6 at least, saturates"
    )]
    pub(super) fn queue_anew(&mut self, flow: u32, weight: f64, burst: f64) {
        let burst = if self.flows.contains_key(&flow) { burst } else { 0.0 };
        self.floor = self.floor.max(self.queued.first().map_or(self.left, |(served, _)| *served));
        self.lift(flow, self.floor.saturating_sub((burst * UNITS / weight) as u64));
        self.queue(flow, weight);
    }

    /// Something of `flow` is queued.
    pub(super) fn queue(&mut self, flow: u32, weight: f64) {
        let counter = self.flows.entry(flow).or_default();
        counter.weight = weight;
        counter.queued = true;
        self.queued.insert((counter.served, flow));
    }

    /// Nothing of `flow` is queued.
    pub(super) fn unqueue(&mut self, flow: u32) {
        if let Some(counter) = self.flows.get_mut(&flow).filter(|c| c.queued) {
            counter.queued = false;
            self.queued.remove(&(counter.served, flow));
            self.left = counter.served;
        }
    }

    /// The greatest that a counter has been.
    pub(super) fn greatest(&self) -> u64 {
        self.greatest
    }

    /// What `flow` has had.
    pub(super) fn served(&self, flow: u32) -> u64 {
        self.flows.get(&flow).map_or(0, |c| c.served)
    }

    /// `flow` has had so much at least.
    pub(super) fn lift(&mut self, flow: u32, least: u64) {
        self.change(flow, |counter| counter.served.max(least));
    }

    /// What these tokens are worth to `flow`.
    #[expect(clippy::cast_possible_truncation, reason = "tokens of a request, far below 2^53")]
    pub(super) fn worth(&self, flow: u32, input: i64, output: i64) -> i64 {
        let weight = self.flows.get(&flow).map_or(1.0, |c| c.weight);
        let tokens = self.weights.input_token_weight * input as f64 + self.weights.output_token_weight * output as f64;
        (tokens * UNITS / weight).round() as i64
    }

    /// `flow` is charged for these tokens; given back what is below 0.
    pub(super) fn charge(&mut self, flow: u32, input: i64, output: i64) {
        let worth = self.worth(flow, input, output);
        self.change(flow, |counter| counter.served.saturating_add_signed(worth));
    }

    fn change(&mut self, flow: u32, change: impl FnOnce(&Counter) -> u64) {
        let counter = self.flows.entry(flow).or_default();
        let before = counter.served;
        counter.served = change(counter);
        self.greatest = self.greatest.max(counter.served);
        if counter.queued && counter.served != before {
            self.queued.remove(&(before, flow));
            self.queued.insert((counter.served, flow));
        }
    }

    /// The tokens of an answer that have come beyond those that were charged.
    pub(super) fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32) {
        if output > meter.output {
            let beyond = i64::from(output.max(meter.charged)) - i64::from(meter.output.max(meter.charged));
            meter.output = output;
            if beyond > 0 {
                self.charge(flow, 0, beyond);
            }
        }
    }

    /// What was charged for tokens that have not come is given back, and the prompt's length set right.
    pub(super) fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>) {
        let unused = i64::from(meter.charged.saturating_sub(meter.output));
        let prompt = i64::from(input.unwrap_or(meter.input)) - i64::from(meter.input);
        if unused != 0 || prompt != 0 {
            self.charge(flow, prompt, -unused);
        }
    }

    pub(super) fn first(&self) -> Option<u32> {
        self.queued.first().map(|(_, flow)| *flow)
    }

    pub(super) fn last(&self) -> Option<u32> {
        self.queued.last().map(|(_, flow)| *flow)
    }

    pub(super) fn forget(&mut self, flow: u32) {
        self.unqueue(flow);
        self.flows.remove(&flow);
    }
}
