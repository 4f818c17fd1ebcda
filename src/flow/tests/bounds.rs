//! The bounds of the Virtual Token Counter on random histories, in delivered tokens:
//!
//! ```text
//! U = max(w_p · longest prompt, w_q · tokens in flight) / least share
//! B = burst / least share
//! f and g always queued            |W_f − W_g| ≤ 2U + B
//! f always queued, g any           W_f ≥ W_g − 4U − B
//! f arrives without requests       service of the n − 1 others until its turn ≤ 2 (n − 1) U   (Theorem 4.11)
//! ```
//!
//! If model servers report shorter prompts than expected, the refunds of those in flight add to U. The unit tests of
//! the counters check that those of queued flows are within U (Lemma 4.3).

use super::{at, fairness, gauge};
use crate::ceiling::fixed::Fixed;
use crate::*;
use attache_types::rng::for_request;
use proptest::prelude::*;
use serde_json::{Value, json};

const FLOWS: usize = 4;
const LONGEST_PROMPT: u32 = 60;
const LONGEST_ANSWER: u32 = 40;
const INPUT: f64 = 1.0;
const OUTPUT: f64 = 2.0;
const NAMES: [&str; FLOWS] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Op {
    Comes {
        flow: usize,
        prompt: u32,
        answer: u32,
    },
    /// Tokens of the response of a request in flight have arrived.
    Steps(usize, u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0..FLOWS, 0..=LONGEST_PROMPT, 0..=LONGEST_ANSWER).prop_map(|(flow, prompt, answer)| Op::Comes {
            flow,
            prompt,
            answer
        }),
        (any::<usize>(), 1..30u32).prop_map(|(i, n)| Op::Steps(i, n)),
    ]
}

struct PreemptibleRequests {
    passage: Passage,
    flow: usize,
    prompt: u32,
    answer: u32,
    come: u32,
}

/// Greatest spread of the difference between two flows' service during an interval.
#[derive(Clone, Copy, Default)]
struct Stretch(Option<(f64, f64)>);

impl Stretch {
    /// Records a difference; returns the spread to both sides, and upwards only.
    fn see(&mut self, holds: bool, difference: f64) -> (f64, f64) {
        if !holds {
            *self = Self(None);
            return (0.0, 0.0);
        }
        let (least, greatest) = self.0.unwrap_or((difference, difference));
        let (least, greatest) = (least.min(difference), greatest.max(difference));
        self.0 = Some((least, greatest));
        (greatest - least, difference - least)
    }
}

struct World {
    flow: FlowControl<(usize, u32, u32)>,
    running: Vec<PreemptibleRequests>,
    capacity: u32,
    shares: [f64; FLOWS],
    served: [f64; FLOWS],
    waiting: [usize; FLOWS],
    both: [[Stretch; FLOWS]; FLOWS],
    one: [[Stretch; FLOWS]; FLOWS],
    worst: (f64, f64),
    /// Fraction of the prompt tokens that model servers report, by flow.
    told: [f64; FLOWS],
    /// Service of the others when an idle flow got a request; kept until it is dispatched.
    came: [Option<f64>; FLOWS],
    /// Most service that others received until then.
    longest: f64,
}

impl World {
    fn new(policy: &str, parameters: &Value, capacity: u32, shares: [f64; FLOWS]) -> Self {
        let default_band = BandSettings { fairness: fairness(policy, parameters), ..BandSettings::default() };
        let weights = NAMES.iter().zip(shares).map(|(name, share)| ((*name).into(), share)).collect();
        let settings = Settings { default_band, weights, ..Settings::default() };
        Self {
            flow: FlowControl::new(settings, Box::new(Fixed::default())),
            running: Vec::new(),
            capacity,
            shares,
            served: [0.0; FLOWS],
            waiting: [0; FLOWS],
            both: Default::default(),
            one: Default::default(),
            worst: (0.0, 0.0),
            told: [1.0; FLOWS],
            came: [None; FLOWS],
            longest: 0.0,
        }
    }

    fn unit(&self) -> f64 {
        let in_flight = f64::from(self.capacity * (LONGEST_PROMPT + LONGEST_ANSWER));
        (INPUT * f64::from(LONGEST_PROMPT)).max(OUTPUT * in_flight) / self.least_share()
    }

    fn least_share(&self) -> f64 {
        self.shares.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Checks all pairs after each change of service.
    fn look(&mut self) {
        for f in 0..FLOWS {
            for g in 0..FLOWS {
                let difference = self.served[g] - self.served[f];
                let (spread, _) = self.both[f][g].see(self.waiting[f] > 0 && self.waiting[g] > 0, difference);
                let (_, ahead) = self.one[f][g].see(self.waiting[f] > 0, difference);
                self.worst = (self.worst.0.max(spread), self.worst.1.max(ahead));
            }
        }
    }

    fn serve(&mut self, flow: usize, tokens: f64) {
        self.served[flow] += tokens / self.shares[flow];
        self.look();
    }

    /// Service of all flows other than `flow`.
    fn others(&self, flow: usize) -> f64 {
        self.served.iter().sum::<f64>() - self.served[flow]
    }

    fn goes(&mut self, (flow, prompt, answer): (usize, u32, u32), mut passage: Passage) {
        if let Some(before) = self.came[flow].take() {
            self.longest = self.longest.max(self.others(flow) - before);
        }
        self.flow.landed(&mut passage);
        self.running.push(PreemptibleRequests { passage, flow, prompt, answer, come: 0 });
        self.serve(flow, INPUT * f64::from(prompt));
    }

    fn gauge(&self) -> Gauge {
        gauge(self.capacity, u32::try_from(self.running.len()).unwrap())
    }

    fn settle(&mut self, left: Vec<Left<(usize, u32, u32)>>) {
        for left in left {
            let Left::Dispatched(_, request, passage) = left else { panic!("nobody is turned away") };
            // The flow still counts as queued at the dispatch.
            self.goes(request, passage);
            self.waiting[request.0] -= 1;
            self.look();
        }
    }

    fn run(&mut self, op: Op, rng: &mut attache_types::rng::PickRng) {
        let mut left = Vec::new();
        match op {
            Op::Comes { flow, prompt, answer } => {
                let request = (flow, prompt, answer);
                let (name, answer_tokens) = (NAMES[flow], Some(answer));
                let arrival = Arrival { flow: name, prompt_tokens: prompt, answer_tokens, ..Arrival::default() };
                let gauge = self.gauge();
                match self.flow.enqueue(&arrival, |_| request, &gauge, at(0), rng, &mut left) {
                    Verdict::Dispatch(passage) => self.goes(request, passage),
                    Verdict::Parked(_) => {
                        if self.waiting[flow] == 0 && self.running.iter().all(|one| one.flow != flow) {
                            self.came[flow] = Some(self.others(flow));
                        }
                        self.waiting[flow] += 1;
                        self.look();
                    }
                    Verdict::Rejected(refusal) => panic!("{refusal:?}"),
                }
            }
            Op::Steps(i, tokens) if !self.running.is_empty() => {
                let i = i % self.running.len();
                let one = &mut self.running[i];
                let (flow, new) = (one.flow, tokens.min(one.answer - one.come));
                one.come += new;
                self.flow.answered(&mut one.passage, one.come, at(0));
                let ends = one.come == one.answer;
                self.serve(flow, OUTPUT * f64::from(new));
                if ends {
                    let done = self.running.swap_remove(i);
                    let prompt = (f64::from(done.prompt) * self.told[flow]).round();
                    self.flow.ended(done.passage, Some(prompt as u32), at(0));
                    self.serve(flow, INPUT * (prompt - f64::from(done.prompt)));
                    let gauge = self.gauge();
                    self.flow.freed(&gauge, at(0), rng, &mut left);
                }
            }
            Op::Steps(..) => {}
        }
        self.settle(left);
        // Work conservation: while the pool has capacity, no request is queued.
        assert!(self.flow.is_empty() || self.running.len() >= self.capacity as usize);
    }
}

fn shares() -> impl Strategy<Value = [f64; FLOWS]> {
    prop::array::uniform4(prop_oneof![Just(1.0), Just(1.0), Just(0.5), Just(3.0)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn vtc_fair_service_within_paper_bounds(
        ops in prop::collection::vec(op(), 1..400), capacity in 1..4u32, shares in shares(), burst in prop_oneof![Just(0.0), 1.0..600.0],
        alone in 0..60u32,
    ) {
        let (mut world, mut rng) = (World::new("vtc-fair", &json!({"burstTokens": burst}), capacity, shares), for_request(3, 3));
        // All flows were active, and then one has the pool for itself. The others return with all that
        // they may have saved up.
        for flow in 0..FLOWS {
            world.run(Op::Comes { flow, prompt: 1, answer: 1 }, &mut rng);
            world.run(Op::Steps(0, 1), &mut rng);
        }
        for _ in 0..alone {
            world.run(Op::Comes { flow: 0, prompt: LONGEST_PROMPT, answer: 1 }, &mut rng);
            world.run(Op::Steps(0, 1), &mut rng);
        }
        for op in ops {
            world.run(op, &mut rng);
        }
        let ((both, one), unit, burst) = (world.worst, world.unit(), burst / world.least_share());
        prop_assert!(both <= 2.0 * unit + burst + 0.01, "|W_f - W_g| = {both}, 2U + B = {}", 2.0 * unit + burst);
        prop_assert!(one <= 4.0 * unit + burst + 0.01, "W_g - W_f = {one}, 4U + B = {}", 4.0 * unit + burst);
    }

    /// Charges in advance and their refunds add the tokens in flight, once for each of the two flows
    /// and once for the refund.
    #[test]
    fn vtc_pred_service_within_multiple_of_bounds(
        ops in prop::collection::vec(op(), 1..400), capacity in 1..4u32, shares in shares(),
        policy in prop_oneof![
            Just(("vtc-pred", Value::Null)), Just(("vtc-oracle", Value::Null)), Just(("vtc-oracle", json!({"range": 0.5})))
        ],
    ) {
        let (mut world, mut rng) = (World::new(policy.0, &policy.1, capacity, shares), for_request(3, 3));
        for op in ops {
            world.run(op, &mut rng);
        }
        prop_assert!(world.worst.0 <= 6.0 * world.unit() + 0.01, "{} of {}", world.worst.0, world.unit());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn vtc_fair_returning_flow_waits_within_paper_bound(
        ops in prop::collection::vec(op(), 1..400), capacity in 1..4u32,
    ) {
        let (mut world, mut rng) = (World::new("vtc-fair", &Value::Null, capacity, [1.0; FLOWS]), for_request(3, 3));
        for op in ops {
            world.run(op, &mut rng);
        }
        let bound = 2.0 * (FLOWS - 1) as f64 * world.unit();
        prop_assert!(world.longest <= bound, "{} of {bound}", world.longest);
    }
}

/// One request at a time; `a` and `b` are always queued, and reported prompts of `a` are a quarter of the estimate.
#[test]
fn vtc_fair_overestimated_prompt_is_refunded() {
    for policy in ["vtc-fair", "vtc-pred", "vtc-oracle"] {
        let (mut world, mut rng) = (World::new(policy, &Value::Null, 1, [1.0; FLOWS]), for_request(3, 3));
        world.told[0] = 0.25;
        for _ in 0..600 {
            for flow in 0..2 {
                while world.waiting[flow] < 2 {
                    world.run(Op::Comes { flow, prompt: LONGEST_PROMPT, answer: 1 }, &mut rng);
                }
            }
            world.run(Op::Steps(0, 1), &mut rng);
        }
        let bound = 2.0 * (world.unit() + INPUT * f64::from(LONGEST_PROMPT));
        assert!(world.worst.0 <= bound, "{policy}: {} of {bound}", world.worst.0);
        assert!(world.served[0] > 3.0 * bound, "{policy}: it would show");
    }
}

/// Two hundred requests of `a` are queued when `b` arrives: it waits less than without turns.
#[test]
fn vtc_fair_flood_does_not_delay_newcomer() {
    let flood = |policy: &str| {
        let (mut world, mut rng) = (World::new(policy, &Value::Null, 1, [1.0; FLOWS]), for_request(3, 3));
        for _ in 0..200 {
            world.run(Op::Comes { flow: 0, prompt: 10, answer: 1 }, &mut rng);
        }
        world.run(Op::Comes { flow: 1, prompt: 10, answer: 1 }, &mut rng);
        for _ in 0..210 {
            world.run(Op::Steps(0, 1), &mut rng);
        }
        (world.longest, 2.0 * (FLOWS - 1) as f64 * world.unit())
    };
    let ((fair, bound), (strict, _)) = (flood("vtc-fair"), flood("global-strict"));
    assert!(fair <= bound && strict > bound, "{fair} and {strict} of {bound}");
}

/// One request at a time; `a` sends long prompts, `b` short ones, and both are always queued.
fn unequal(policy: &str, shares: [f64; FLOWS]) -> World {
    let (mut world, mut rng) = (World::new(policy, &Value::Null, 1, shares), for_request(3, 3));
    for _ in 0..600 {
        for (flow, prompt) in [(0, LONGEST_PROMPT), (1, 3)] {
            while world.waiting[flow] < 2 {
                world.run(Op::Comes { flow, prompt, answer: 1 }, &mut rng);
            }
        }
        world.run(Op::Steps(0, 1), &mut rng);
    }
    world
}

#[test]
fn round_robin_ignores_tokens_vtc_fair_shares_them() {
    let equal = [1.0; FLOWS];
    for policy in ["vtc-fair", "vtc-pred", "vtc-oracle"] {
        let world = unequal(policy, equal);
        assert!(world.worst.0 <= 2.0 * world.unit(), "{policy}: {} of {}", world.worst.0, world.unit());
    }
    let by_turns = unequal("round-robin", equal);
    assert!(by_turns.worst.0 > 10.0 * by_turns.unit(), "{} of {}", by_turns.worst.0, by_turns.unit());
    // Shares: `served` is counted by share, so three times the tokens are the same.
    let shared = unequal("vtc-fair", [3.0, 1.0, 1.0, 1.0]);
    assert!((shared.served[0] - shared.served[1]).abs() <= 2.0 * shared.unit());
    assert!(shared.served[0] > 100.0);
}

#[test]
fn vtc_fair_idle_flow_saves_nothing() {
    for (policy, waits) in [("vtc-fair", 2), ("vtc-pred", 2), ("vtc-oracle", 2), ("vtc-max-fair", 2)] {
        let (mut world, mut rng) = (World::new(policy, &Value::Null, 1, [1.0; FLOWS]), for_request(3, 3));
        let comes = |flow| Op::Comes { flow, prompt: 10, answer: 1 };
        world.run(comes(0), &mut rng);
        // `a` alone is served forty times, and is always queued.
        for _ in 0..40 {
            world.run(comes(0), &mut rng);
            world.run(Op::Steps(0, 1), &mut rng);
        }
        for _ in 0..10 {
            world.run(comes(0), &mut rng);
            world.run(comes(1), &mut rng);
        }
        let before = world.served;
        for _ in 0..10 {
            world.run(Op::Steps(0, 1), &mut rng);
        }
        let got = |flow: usize| (world.served[flow] - before[flow]) / 12.0;
        assert!(got(0) >= 5.0 - f64::from(waits), "{policy}: a has {}, b {}", got(0), got(1));
        assert!(got(1) >= 5.0 - f64::from(waits), "{policy}: a has {}, b {}", got(0), got(1));
    }
}

/// One request at a time; `a` is always queued, and `b` returns after a long time with many requests.
#[test]
fn vtc_fair_burst_tokens_limit_priority_of_returning_flow() {
    // Requests of 12 tokens: ten of them are 120.
    for (burst, first) in [(0.0, 1), (120.0, 10)] {
        let (mut world, mut rng) =
            (World::new("vtc-fair", &json!({"burstTokens": burst}), 1, [1.0; FLOWS]), for_request(3, 3));
        let comes = |flow| Op::Comes { flow, prompt: 10, answer: 1 };
        // A new flow has no burst.
        world.run(comes(1), &mut rng);
        world.run(comes(0), &mut rng);
        for _ in 0..40 {
            world.run(comes(0), &mut rng);
            world.run(Op::Steps(0, 1), &mut rng);
        }
        for _ in 0..30 {
            world.run(comes(0), &mut rng);
            world.run(comes(1), &mut rng);
        }
        let mut order = Vec::new();
        for _ in 0..30 {
            world.run(Op::Steps(0, 1), &mut rng);
            order.push(world.running[0].flow);
        }
        let in_a_row = order.iter().skip_while(|flow| **flow == 0).take_while(|flow| **flow == 1).count();
        assert!(in_a_row.abs_diff(first) <= 1, "{burst}: {order:?}");
        let after = &order[order.len() - 10..];
        assert_eq!(after.iter().filter(|flow| **flow == 1).count(), 5, "{burst}: {order:?}");
    }
}
