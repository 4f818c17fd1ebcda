//! `vtc-oracle`: as `vtc-pred`, with the response's real length known beforehand, exactly or with a relative error.
//!
//! For replays, where traces have the lengths: it bounds what better predictions could bring. `range` 0.5 predicts
//! evenly between half and one and a half of the real length. A request of unknown length is charged as by `vtc-fair`.
//! When not: live traffic. Source: Sheng et al. (OSDI 2024), artifact.

use super::counters::TokenWeights;
use super::vtc_fair::{Account, LengthPredictor, Vtc};
use super::{Fairness, Meter};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{ParamError, params};
use attache_types::rng::PickRng;
use rand::RngExt;
use serde::Deserialize;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "vtc-oracle",
    aliases: &[],
    summary: "As vtc-fair, with responses charged beforehand by their known length; for replays.",
    source: "Sheng et al. 2024, VTC (oracle)",
    build: |value: &Value| {
        let Params { range, input_token_weight, output_token_weight, burst_tokens } = params(value)?;
        if !(0.0..=1.0).contains(&range) {
            return Err(ParamError::value("range", range, "0 to 1 is allowed"));
        }
        let account = Account::new(TokenWeights { input_token_weight, output_token_weight }, burst_tokens)?;
        Ok(Vtc::boxed(account, KnownLength { range }))
    },
};

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    /// Largest relative error of a prediction, 0 to 1.
    range: f64,
    input_token_weight: f64,
    output_token_weight: f64,
    burst_tokens: f64,
}

impl Default for Params {
    fn default() -> Self {
        let TokenWeights { input_token_weight, output_token_weight } = TokenWeights::default();
        Self { range: 0.0, input_token_weight, output_token_weight, burst_tokens: 0.0 }
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
