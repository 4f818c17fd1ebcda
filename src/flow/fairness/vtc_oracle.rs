//! `vtc-oracle`: as `vtc-pred`, with the answer's real length known beforehand, or known to within a part of it.
//!
//! For replays, where lengths are in the trace: the bound of what better predictions could bring. `range` 0.5 predicts evenly between half and
//! one and a half of the real length. A request whose length is not known is charged as by `vtc-fair`. When not: live. Source: Sheng et al.
//! (OSDI 2024), artifact.

use super::counters::Weights;
use super::vtc_fair::{Account, Foretells, Vtc};
use super::{Fairness, Meter};
use crate::registry::Descriptor;
use attache_scheduling::plugin::{ParamError, params};
use attache_types::rng::PickRng;
use rand::RngExt;
use serde::Deserialize;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-oracle",
    aliases: &[],
    summary: "As vtc-fair, with answers charged beforehand by their known length; for replays.",
    source: "Sheng et al. 2024, VTC (oracle)",
    build: |value: &Value| {
        let Params { range, input_token_weight, output_token_weight, burst_tokens } = params(value)?;
        if !(0.0..=1.0).contains(&range) {
            return Err(ParamError::value("range", range, "0 to 1 is allowed"));
        }
        let account = Account::new(Weights { input_token_weight, output_token_weight }, burst_tokens)?;
        Ok(Vtc::boxed(account, Known { range }))
    },
};

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    /// By how much predictions are off, as a part of the real length.
    range: f64,
    input_token_weight: f64,
    output_token_weight: f64,
    burst_tokens: f64,
}

impl Default for Params {
    fn default() -> Self {
        let Weights { input_token_weight, output_token_weight } = Weights::default();
        Self { range: 0.0, input_token_weight, output_token_weight, burst_tokens: 0.0 }
    }
}

/// The answer's real length, off by up to a part of it.
#[derive(Clone, Copy, Debug)]
struct Known {
    range: f64,
}

impl Foretells for Known {
    fn fresh(&self) -> Self {
        *self
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most twice a u32, and saturating")]
    fn foretell(&mut self, _: u32, meter: &Meter, rng: &mut PickRng) -> u32 {
        let off = if self.range > 0.0 { rng.random_range(-self.range..=self.range) } else { 0.0 };
        meter.answer.map_or(0, |answer| (f64::from(answer) * (1.0 + off)).round() as u32)
    }
}
