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
use crate::clock::Timestamp;
use crate::flow::registry::Descriptor;
use crate::rng::PickRng;
use crate::scheduling::plugin::{ParamError, params};
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
