//! `vtc-oracle`: as `vtc-pred`, with the response's real length known beforehand, exactly or with a relative error.
//!
//! For replays, where traces have the lengths: it bounds what better predictions could bring. `range` 0.5 predicts
//! evenly between half and one and a half of the real length. A request of unknown length is charged as by `vtc-fair`.
//! When not: live traffic. Source: Sheng et al. (OSDI 2024), artifact.

use super::counters::{DEFAULT_INPUT_WEIGHT, DEFAULT_OUTPUT_WEIGHT, TokenWeights};
use super::vtc_fair::{Account, LengthPredictor, MAX_BURST, Vtc};
use super::{Fairness, Meter};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{params, section};
use attache_types::parameters;
use attache_types::rng::PickRng;
use rand::RngExt;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "vtc-oracle",
    aliases: &[],
    summary: "As vtc-fair, with responses charged beforehand by their known length; for replays.",
    source: "Sheng et al. 2024, VTC (oracle)",
    parameters: section::<Params>,
    build: |value: &Value| {
        let Params { range, input_token_weight, output_token_weight, burst_tokens } = params(value)?;
        let account = Account::new(TokenWeights { input_token_weight, output_token_weight }, burst_tokens);
        Ok(Vtc::boxed(account, KnownLength { range }))
    },
};

parameters! {
    struct Params {
        /// Largest relative error of a predicted response length.
        "range" => range: f64 { default: 0.0; range: 0.0..=1.0; unit: "share"; },
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

/// The real length of the response, with a random error of up to `range`.
#[derive(Clone, Copy, Debug)]
struct KnownLength {
    range: f64,
}

impl LengthPredictor for KnownLength {
    fn fresh(&self) -> Self {
        *self
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most twice a u32, and saturating")]
    fn predict(&mut self, _: u32, meter: &Meter, rng: &mut PickRng) -> u32 {
        let off = if self.range > 0.0 { rng.random_range(-self.range..=self.range) } else { 0.0 };
        meter.answer.map_or(0, |answer| (f64::from(answer) * (1.0 + off)).round() as u32)
    }
}
