//! `vtc-fair`: the flow that has been served least, in tokens (Virtual Token Counter).
//!
//! A flow's counter grows by what its requests cost: the prompt when it is let through, the answer as its tokens come. A flow that comes anew is
//! lifted to the least counter of those who wait, or, when nobody does, to that of the last who did, less `burstTokens`: 0 as in the paper,
//! where who was away has saved nothing up.
//!
//! ```text
//! U = max(inputTokenWeight · longest prompt, outputTokenWeight · tokens under way) / least share
//! B = burstTokens / least share
//! what two flows have had while both waited differs by 2U + B at most; by what one waits while another comes and goes, by 4U + B
//! ```
//!
//! Without a burst a flow that asks for somewhat less than its share still waits as it would on a server of its own with that share, since its
//! requests come at random. With one, what it has not used of late lets it go first, up to so many tokens; a flow that is new has none.
//!
//! Work-conserving: with room, somebody who waits goes. When not: there is one tenant; then its order is all that matters. Source: Sheng et
//! al., "Fairness in serving large language models" (OSDI 2024), with real token counts and shares.

use super::counters::{Counters, Weights};
use super::{Fairness, Head, Meter};
use crate::registry::Descriptor;
use attache_scheduling::plugin::{ParamError, params};
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Debug;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-fair",
    aliases: &[],
    summary: "The flow that has been served the fewest tokens.",
    source: "Sheng et al. 2024, VTC",
    build: |value: &Value| Ok(Vtc::boxed(params::<Params>(value)?.account()?, Unknown)),
};

/// Parameters of `vtc-fair` and `vtc-pred`.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct Params {
    input_token_weight: f64,
    output_token_weight: f64,
    burst_tokens: f64,
}

impl Default for Params {
    fn default() -> Self {
        let Weights { input_token_weight, output_token_weight } = Weights::default();
        Self { input_token_weight, output_token_weight, burst_tokens: 0.0 }
    }
}

impl Params {
    pub(super) fn account(self) -> Result<Account, ParamError> {
        let Self { input_token_weight, output_token_weight, burst_tokens } = self;
        Account::new(Weights { input_token_weight, output_token_weight }, burst_tokens)
    }
}

/// Counters, and how far behind the others one may come back.
#[derive(Debug)]
pub(super) struct Account {
    counters: Counters,
    /// Tokens of a weight of 1.
    burst: f64,
}

impl Account {
    pub(super) fn new(weights: Weights, burst: f64) -> Result<Self, ParamError> {
        if !(0.0..=1e9).contains(&burst) {
            return Err(ParamError::value("burstTokens", burst, "0 to 1,000,000,000 is allowed"));
        }
        Ok(Self { counters: Counters::of(weights.checked()?), burst })
    }

    fn fresh(&self) -> Self {
        Self { counters: self.counters.fresh(), burst: self.burst }
    }
}

/// How long an answer will be, for those who charge it beforehand.
pub(super) trait Foretells: Debug + Send + Sync + 'static {
    /// The same, of which nothing has been seen.
    fn fresh(&self) -> Self;

    /// Tokens that the answer to a request of `flow` will have; 0 charges it as it comes.
    fn foretell(&mut self, flow: u32, meter: &Meter, rng: &mut PickRng) -> u32;

    /// An answer has ended.
    fn ended(&mut self, _flow: u32, _meter: &Meter) {}

    /// `flow` is no more.
    fn forget(&mut self, _flow: u32) {}
}

/// The Virtual Token Counter, with answers charged as they come beyond what was foretold of them.
#[derive(Debug)]
pub(super) struct Vtc<F> {
    account: Account,
    answers: F,
}

impl<F: Foretells> Vtc<F> {
    pub(super) fn boxed(account: Account, answers: F) -> Box<dyn Fairness> {
        Box::new(Self { account, answers })
    }
}

impl<F: Foretells> Fairness for Vtc<F> {
    fn fresh(&self) -> Box<dyn Fairness> {
        Self::boxed(self.account.fresh(), self.answers.fresh())
    }

    fn wakes(&mut self, flow: u32, weight: f64, _: Head, _: Timestamp) {
        let Account { counters, burst } = &mut self.account;
        counters.queue_anew(flow, weight, *burst);
    }

    fn head(&mut self, _: u32, _: Head) {}

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
        meter.charged = self.answers.foretell(flow, meter, rng);
        self.account.counters.charge(flow, i64::from(meter.input), i64::from(meter.charged));
    }

    fn answered(&mut self, flow: u32, meter: &mut Meter, output: u32, _: Timestamp) {
        self.account.counters.answered(flow, meter, output);
    }

    fn ended(&mut self, flow: u32, meter: &Meter, input: Option<u32>, _: Timestamp) {
        self.account.counters.ended(flow, meter, input);
        self.answers.ended(flow, meter);
    }

    fn forget(&mut self, flow: u32) {
        self.account.counters.forget(flow);
        self.answers.forget(flow);
    }
}

/// Nobody says.
#[derive(Debug)]
struct Unknown;

impl Foretells for Unknown {
    fn fresh(&self) -> Self {
        Self
    }

    fn foretell(&mut self, _: u32, _: &Meter, _: &mut PickRng) -> u32 {
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

    /// A request that comes: of a flow, with so many tokens in and out; the part of its prompt that the server tells of, percent.
    type Request = (u32, u32, u32, u32);

    #[derive(Clone, Debug)]
    enum Op {
        Comes(Request),
        Steps(usize, u32),
    }

    /// Seats, who has them, and who waits.
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
                        self.vtc.wakes(request.0, 1.0, Head::default(), Timestamp(0));
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

        /// By how much the counters of those who wait differ, tokens.
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

    /// The widest spread of a history.
    fn widest(ops: Vec<Op>, seats: usize) -> f64 {
        let account = Account::new(Weights::default(), 0.0).unwrap();
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

        /// Lemma 4.3 of the paper: the counters of those who wait are within U.
        #[test]
        fn counters_of_those_who_wait_are_within_the_papers_bound(
            ops in prop::collection::vec(op(100..=100), 1..400), seats in 1..4usize,
        ) {
            let unit = 2.0 * (seats as u32 * (PROMPT + ANSWER)) as f64;
            let widest = widest(ops, seats);
            prop_assert!(widest <= unit, "{widest} of {unit}");
        }

        /// What is given back of prompts that were thought too long adds what was charged of those under way.
        #[test]
        fn and_what_is_given_back_of_prompts_under_way_adds_to_it(
            ops in prop::collection::vec(op(0..=100), 1..400), seats in 1..4usize,
        ) {
            let unit = 2.0 * (seats as u32 * (PROMPT + ANSWER)) as f64 + (seats as u32 * PROMPT) as f64;
            let widest = widest(ops, seats);
            prop_assert!(widest <= unit, "{widest} of {unit}");
        }
    }

    /// The bound is not loose by an order of magnitude: with one seat, the longest request makes a spread of its own cost.
    #[test]
    fn one_long_request_spreads_the_counters_by_what_it_costs() {
        let ops = [(0, 1, 1), (0, PROMPT, ANSWER), (0, 1, 1), (1, 1, 1), (1, 1, 1)];
        let mut ops: Vec<Op> = ops.map(|(flow, prompt, answer)| Op::Comes((flow, prompt, answer, 100))).into();
        ops.extend([Op::Steps(0, 1), Op::Steps(0, ANSWER), Op::Steps(0, ANSWER - 1)]);
        assert!(widest(ops, 1) >= f64::from(PROMPT));
    }
}
