//! The counters of the Virtual Token Counter: the service that each flow received, and the queued flow that received
//! least. Called by the `vtc-` policies alone.
//!
//! ```text
//! cost of a request = inputTokenWeight · prompt + outputTokenWeight · answer, divided by the flow's share
//! ```
//!
//! Counters are whole thousandths of a token, so that a charge and its refund cancel exactly.

use super::Meter;
use ahash::AHashMap;
use attache_types::parameters;
use std::collections::BTreeSet;

/// 1, as in the paper.
pub(crate) const DEFAULT_INPUT_WEIGHT: f64 = 1.0;
/// 2, as in the paper: each response token takes a step of its own.
pub(crate) const DEFAULT_OUTPUT_WEIGHT: f64 = 2.0;
/// Counter units in a token.
const UNITS: f64 = 1_000.0;

parameters! {
    /// What a prompt token and a response token cost. Higher weights would overflow in a day of traffic.
    #[derive(Clone, Copy)]
    pub(super) struct TokenWeights {
        /// Cost of a prompt token.
        "inputTokenWeight" => pub(super) input_token_weight: f64 {
            default: DEFAULT_INPUT_WEIGHT; range: 0.0..=1e6; unit: "weight";
        },
        /// Cost of a response token.
        "outputTokenWeight" => pub(super) output_token_weight: f64 {
            default: DEFAULT_OUTPUT_WEIGHT; range: 0.0..=1e6; unit: "weight";
        },
    }
}

impl Default for TokenWeights {
    fn default() -> Self {
        Self { input_token_weight: DEFAULT_INPUT_WEIGHT, output_token_weight: DEFAULT_OUTPUT_WEIGHT }
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
    weights: TokenWeights,
    flows: AHashMap<u32, Counter>,
    /// The flows that have something queued, by counter.
    queued: BTreeSet<(u64, u32)>,
    /// The counter of the flow that most recently ran out of queued requests.
    left: u64,
    /// Service that every queued flow has received at least. It never falls when a flow with less returns.
    floor: u64,
    /// The greatest value of any counter so far.
    greatest: u64,
}

impl Counters {
    pub(super) fn of(weights: TokenWeights) -> Self {
        Self { weights, ..Self::default() }
    }

    pub(super) fn fresh(&self) -> Self {
        Self::of(self.weights)
    }

    /// Adds `flow` to the queued ones. Its counter becomes the floor at least, minus `burst` if the flow is known.
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

    /// Adds `flow` to the queued ones, with its counter unchanged.
    pub(super) fn queue(&mut self, flow: u32, weight: f64) {
        let counter = self.flows.entry(flow).or_default();
        counter.weight = weight;
        counter.queued = true;
        self.queued.insert((counter.served, flow));
    }

    /// Removes `flow` from the queued ones.
    pub(super) fn unqueue(&mut self, flow: u32) {
        if let Some(counter) = self.flows.get_mut(&flow).filter(|c| c.queued) {
            counter.queued = false;
            self.queued.remove(&(counter.served, flow));
            self.left = counter.served;
        }
    }

    /// The greatest value of any counter so far.
    pub(super) fn greatest(&self) -> u64 {
        self.greatest
    }

    /// The counter of `flow`.
    pub(super) fn served(&self, flow: u32) -> u64 {
        self.flows.get(&flow).map_or(0, |c| c.served)
    }

    /// Raises the counter of `flow` to `least` if it is lower.
    pub(super) fn lift(&mut self, flow: u32, least: u64) {
        self.change(flow, |counter| counter.served.max(least));
    }

    /// The cost of these tokens for `flow`, in counter units.
    #[expect(clippy::cast_possible_truncation, reason = "tokens of a request, far below 2^53")]
    pub(super) fn worth(&self, flow: u32, input: i64, output: i64) -> i64 {
        let weight = self.flows.get(&flow).map_or(1.0, |c| c.weight);
        let tokens = self.weights.input_token_weight * input as f64 + self.weights.output_token_weight * output as f64;
        (tokens * UNITS / weight).round() as i64
    }

    /// Charges `flow` for these tokens; negative numbers are a refund.
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

    /// Charges the tokens of a response beyond those that were charged before.
    pub(super) fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32) {
        if output > meter.output {
            let beyond = i64::from(output.max(meter.charged)) - i64::from(meter.output.max(meter.charged));
            meter.output = output;
            if beyond > 0 {
                self.charge(flow, 0, beyond);
            }
        }
    }

    /// Refunds what was charged for tokens that did not arrive, and corrects the length of the prompt.
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
