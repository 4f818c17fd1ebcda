//! `vtc-pred`: as `vtc-fair`, with the answer charged beforehand by the length that the flow's answers usually have.
//!
//! ```text
//! predicted = (4 · predicted + last) / 5; the first answer's length to begin with, 0 before it
//! ```
//!
//! What comes beyond is charged as it comes, what does not come is given back at the end. A flow with long answers then doesn't get many
//! of them under way before the first is charged. When not: answers vary wildly within a flow. Source: Sheng et al. (OSDI 2024), section 4.4 and
//! artifact (`vtc_len_predict`).

use super::vtc_fair::{Foretells, Params, Vtc};
use super::{Fairness, Meter};
use crate::registry::Descriptor;
use ahash::AHashMap;
use attache_scheduling::plugin::params;
use attache_types::rng::PickRng;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Fairness> = Descriptor {
    name: "vtc-pred",
    aliases: &[],
    summary: "As vtc-fair, with answers charged beforehand by their usual length.",
    source: "Sheng et al. 2024, VTC with length prediction",
    build: |value: &Value| Ok(Vtc::boxed(params::<Params>(value)?.account()?, Usual::default())),
};

/// 4, so that the last five answers or so count, as in the artifact.
const MEMORY: f64 = 4.0;

/// Tokens of a flow's usual answer.
#[derive(Debug, Default)]
struct Usual(AHashMap<u32, f64>);

impl Foretells for Usual {
    fn fresh(&self) -> Self {
        Self::default()
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of lengths that are u32")]
    fn foretell(&mut self, flow: u32, _: &Meter, _: &mut PickRng) -> u32 {
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
