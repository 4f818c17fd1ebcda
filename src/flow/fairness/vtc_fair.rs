//! `vtc-fair`: the flow that received the least service goes first, in tokens (Virtual Token Counter).
//!
//! A flow's counter grows by the cost of its requests: the prompt on dispatch, the response as its tokens arrive. When
//! a flow returns, its counter is raised to the least of the queued flows, or to that of the last queued flow if none
//! is queued, minus `burstTokens`. 0 is the paper's value: an idle flow saves nothing up.
//!
//! ```text
//! U = max(inputTokenWeight · longest prompt, outputTokenWeight · tokens in flight) / least share
//! B = burstTokens / least share
//! service of two flows while both are queued differs by at most 2U + B
//! service of one queued flow and one that comes and goes differs by at most 4U + B
//! ```
//!
//! Without a burst, a flow that demands less than its share still waits as it would on a server of its own with that
//! share, because its requests arrive at random. With one, recently unused service lets it go first, up to that many
//! tokens. A new flow has none.
//!
//! Work-conserving: while the pool has capacity, a queued request is dispatched. When not: there is one tenant; then
//! only the ordering matters. Source: Sheng et al., "Fairness in serving large language models" (OSDI 2024), with
//! real token counts and shares.

use super::counters::{Counters, DEFAULT_INPUT_WEIGHT, DEFAULT_OUTPUT_WEIGHT, TokenWeights};
use super::{Fairness, Meter, QueueHead};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{params, section};
use attache_types::clock::Timestamp;
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;
use std::fmt::Debug;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "vtc-fair",
    aliases: &[],
    summary: "The flow that has received the fewest tokens.",
    source: "Sheng et al. 2024, VTC",
    parameters: section::<Params>,
    build: |value: &Value| params::<Params>(value).map(|params| Vtc::boxed(params.account(), Unknown)),
};

parameters! {
    /// Parameters of `vtc-fair` and `vtc-pred`.
    pub(super) struct Params {
        /// Cost of a prompt token.
        "inputTokenWeight" => input_token_weight: f64 {
            default: DEFAULT_INPUT_WEIGHT; range: 0.0..=1e6; unit: "weight";
        },
        /// Cost of a response token.
        "outputTokenWeight" => output_token_weight: f64 {
            default: DEFAULT_OUTPUT_WEIGHT; range: 0.0..=1e6; unit: "weight";
        },
        /// Unused service, in weighted tokens, that a returning flow may receive before others. 0: none.
        "burstTokens" => burst_tokens: f64 { default: 0.0; range: 0.0..=MAX_BURST; unit: "tokens"; },
    }
}

/// A billion tokens, which no flow uses in a day.
pub(super) const MAX_BURST: f64 = 1e9;

impl Params {
    pub(super) fn account(self) -> Account {
        let Self { input_token_weight, output_token_weight, burst_tokens } = self;
        Account::new(TokenWeights { input_token_weight, output_token_weight }, burst_tokens)
    }
}

/// The counters, and how far behind the others a returning flow may start.
#[derive(Debug)]
pub(super) struct Account {
    counters: Counters,
    /// Burst in tokens, for a flow of share 1.
    burst: f64,
}

impl Account {
    pub(super) fn new(weights: TokenWeights, burst: f64) -> Self {
        Self { counters: Counters::of(weights), burst }
    }

    fn fresh(&self) -> Self {
        Self { counters: self.counters.fresh(), burst: self.burst }
    }
}

/// Predicts the length of responses, for policies that charge them beforehand.
pub(super) trait LengthPredictor: Debug + Send + Sync + 'static {
    /// The same predictor without state.
    fn fresh(&self) -> Self;

    /// Predicted tokens of the response to a request of `flow`; 0 charges it as it arrives.
    fn predict(&mut self, flow: u32, meter: &Meter, rng: &mut PickRng) -> u32;

    /// Learns from a response that has ended.
    fn ended(&mut self, _flow: u32, _meter: &Meter) {}

    /// Removes the state of `flow`.
    fn forget(&mut self, _flow: u32) {}
}

/// The Virtual Token Counter. Response tokens beyond the prediction are charged as they arrive.
#[derive(Debug)]
pub(super) struct Vtc<F> {
    account: Account,
    answers: F,
}

impl<F: LengthPredictor> Vtc<F> {
    pub(super) fn boxed(account: Account, answers: F) -> Box<dyn Fairness> {
        Box::new(Self { account, answers })
    }
}

impl<F: LengthPredictor> Fairness for Vtc<F> {
    fn fresh(&self) -> Box<dyn Fairness> {
        Self::boxed(self.account.fresh(), self.answers.fresh())
    }

    fn wakes(&mut self, flow: u32, weight: f64, _: QueueHead, _: Timestamp) {
        let Account { counters, burst } = &mut self.account;
        counters.queue_anew(flow, weight, *burst);
    }

    fn head(&mut self, _: u32, _: QueueHead) {}

    fn sleeps(&mut self, flow: u32) {
        self.account.counters.unqueue(flow);
    }

    fn next(&mut self) -> Option<u32> {
        self.account.counters.first()
    }

    fn last(&mut self) -> Option<u32> {
        self.account.counters.last()
    }

    fn dispatched(&mut self, flow: u32, meter: &mut Meter, _: Timestamp, rng: &mut PickRng) {
        meter.charged = self.answers.predict(flow, meter, rng);
        self.account.counters.charge(flow, i64::from(meter.input), i64::from(meter.charged));
    }

    fn counts_output(&self) -> bool {
        true
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.account.counters.answered(flow, meter, output);
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.account.counters.ended(flow, meter, input);
        self.answers.ended(flow, meter);
    }

    fn counts_service(&self) -> bool {
        true
    }

    fn served(&mut self, flow: u32, input: u32, output: u32) {
        self.account.counters.charge(flow, i64::from(input), i64::from(output));
    }

    fn forget(&mut self, flow: u32) {
        self.account.counters.forget(flow);
        self.answers.forget(flow);
    }
}

/// Predicts nothing: responses are charged as they arrive.
#[derive(Debug)]
struct Unknown;

impl LengthPredictor for Unknown {
    fn fresh(&self) -> Self {
        Self
    }

    fn predict(&mut self, _: u32, _: &Meter, _: &mut PickRng) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::rng::for_request;
    use proptest::prelude::*;

    const FLOWS: u32 = 4;
    const PROMPT: u32 = 60;
    const ANSWER: u32 = 40;

    /// An arriving request: flow, prompt tokens, response tokens, and the percentage of its prompt
    /// that the model server reports.
    type Request = (u32, u32, u32, u32);

    #[derive(Clone, Debug)]
    enum Op {
        Comes(Request),
        Steps(usize, u32),
    }

    /// A server with `seats` slots, the requests in them, and the queues.
    struct World {
        vtc: Vtc<Unknown>,
        seats: usize,
        queues: Vec<Vec<Request>>,
        running: Vec<(Request, Meter)>,
        rng: PickRng,
    }

    impl World {
        fn fill(&mut self) {
            while self.running.len() < self.seats {
                let Some(flow) = self.vtc.next() else { return };
                let request = self.queues[flow as usize].remove(0);
                let mut meter = Meter { input: request.1, ..Meter::default() };
                self.vtc.dispatched(flow, &mut meter, Timestamp(0), &mut self.rng);
                if self.queues[flow as usize].is_empty() {
                    self.vtc.sleeps(flow);
                }
                self.running.push((request, meter));
            }
        }

        fn run(&mut self, op: Op) {
            match op {
                Op::Comes(request) => {
                    let queue = &mut self.queues[request.0 as usize];
                    queue.push(request);
                    if queue.len() == 1 {
                        self.vtc.wakes(request.0, 1.0, QueueHead::default(), Timestamp(0));
                    }
                }
                Op::Steps(i, tokens) if !self.running.is_empty() => {
                    let i = i % self.running.len();
                    let ((flow, prompt, answer, told), mut meter) = self.running[i];
                    let come = (meter.output + tokens).min(answer);
                    self.vtc.answered(flow, &mut meter, come, Timestamp(0));
                    self.running[i].1 = meter;
                    if come == answer {
                        self.running.swap_remove(i);
                        self.vtc.ended(flow, &meter, Some(prompt * told / 100), Timestamp(0));
                    }
                }
                Op::Steps(..) => {}
            }
            self.fill();
        }

        /// Greatest difference between the counters of queued flows, tokens.
        fn spread(&self) -> f64 {
            let served = |flow: Option<u32>| flow.map_or(0, |flow| self.vtc.account.counters.served(flow));
            (served(self.vtc.account.counters.last()) - served(self.vtc.account.counters.first())) as f64 / 1e3
        }
    }

    fn op(told: std::ops::RangeInclusive<u32>) -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..FLOWS, 0..=PROMPT, 0..=ANSWER, told).prop_map(Op::Comes),
            (any::<usize>(), 1..30u32).prop_map(|(i, n)| Op::Steps(i, n)),
        ]
    }

    /// The greatest spread in a history.
    fn widest(ops: Vec<Op>, seats: usize) -> f64 {
        let account = Account::new(TokenWeights::default(), 0.0);
        let (queues, running) = (vec![Vec::new(); FLOWS as usize], Vec::new());
        let vtc = Vtc { account, answers: Unknown };
        let mut world = World { vtc, seats, queues, running, rng: for_request(1, 1) };
        let mut widest = 0.0f64;
        for op in ops {
            world.run(op);
            widest = widest.max(world.spread());
        }
        widest
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Lemma 4.3 of the paper: the counters of queued flows are within U.
        #[test]
        fn vtc_fair_counters_of_queued_flows_within_paper_bound(
            ops in prop::collection::vec(op(100..=100), 1..400), seats in 1..4usize,
        ) {
            let unit = 2.0 * (seats as u32 * (PROMPT + ANSWER)) as f64;
            let widest = widest(ops, seats);
            prop_assert!(widest <= unit, "{widest} of {unit}");
        }

        /// Refunds for overestimated prompts add what was charged for those in flight.
        #[test]
        fn vtc_fair_prompt_refunds_widen_bound_by_prompts_in_flight(
            ops in prop::collection::vec(op(0..=100), 1..400), seats in 1..4usize,
        ) {
            let unit = 2.0 * (seats as u32 * (PROMPT + ANSWER)) as f64 + (seats as u32 * PROMPT) as f64;
            let widest = widest(ops, seats);
            prop_assert!(widest <= unit, "{widest} of {unit}");
        }
    }

    /// The bound is tight to an order of magnitude: with one slot, the longest request spreads the
    /// counters by its own cost.
    #[test]
    fn vtc_fair_one_long_request_spreads_counters_by_its_cost() {
        let ops = [(0, 1, 1), (0, PROMPT, ANSWER), (0, 1, 1), (1, 1, 1), (1, 1, 1)];
        let mut ops: Vec<Op> = ops.map(|(flow, prompt, answer)| Op::Comes((flow, prompt, answer, 100))).into();
        ops.extend([Op::Steps(0, 1), Op::Steps(0, ANSWER), Op::Steps(0, ANSWER - 1)]);
        assert!(widest(ops, 1) >= f64::from(PROMPT));
    }
}
