//! `vtc-pred`: as `vtc-fair`, with the response charged beforehand by the usual length of the flow's responses.
//!
//! ```text
//! predicted = (4 · predicted + last) / 5; starts as the length of the first response, and is 0 before it
//! ```
//!
//! Further tokens are charged as they arrive, and missing ones are refunded at the end. A flow with long responses
//! therefore gets few of them in flight before the first is charged. When not: response lengths vary wildly within a
//! flow. Source: Sheng et al. (OSDI 2024), section 4.4 and artifact (`vtc_len_predict`).

use super::vtc_fair::{LengthPredictor, Params, Vtc};
use super::{Fairness, Meter};
use crate::registry::PolicyDescriptor;
use ahash::AHashMap;
use attache_scheduling::plugin::{params, section};
use attache_types::rng::PickRng;
use serde_json::Value;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Fairness> = PolicyDescriptor {
    name: "vtc-pred",
    aliases: &[],
    summary: "As vtc-fair, with responses charged beforehand by their usual length.",
    source: "Sheng et al. 2024, VTC with length prediction",
    parameters: section::<Params>,
    build: |value: &Value| params::<Params>(value).map(|params| Vtc::boxed(params.account(), Usual::default())),
};

/// 4, so that about the last five responses count, as in the artifact.
const MEMORY: f64 = 4.0;

/// Usual response length of each flow, tokens.
#[derive(Debug, Default)]
struct Usual(AHashMap<u32, f64>);

impl LengthPredictor for Usual {
    fn fresh(&self) -> Self {
        Self::default()
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of lengths that are u32")]
    fn predict(&mut self, flow: u32, _: &Meter, _: &mut PickRng) -> u32 {
        self.0.get(&flow).map_or(0, |usual| usual.round() as u32)
    }

    fn ended(&mut self, flow: u32, meter: &Meter) {
        if meter.cut {
            return;
        }
        let actual = f64::from(meter.output);
        let usual = self.0.entry(flow).or_insert(actual);
        *usual = (MEMORY * *usual + actual) / (MEMORY + 1.0);
    }

    fn forget(&mut self, flow: u32) {
        self.0.remove(&flow);
    }
}
