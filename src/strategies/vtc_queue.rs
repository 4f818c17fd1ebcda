//! `vtc-fair`, `vtc-max-fair` and `vtc-pred`: a fair queue in front of the pool, then the endpoint with the fewest
//! requests.
//!
//! The Virtual Token Counter (VTC) orders users by the tokens they received. The paper has one queue for one server.
//! Here one queue serves the whole pool: `flowControl` with the fairness policy of the same name.
//! Each dequeued request goes to the endpoint with the fewest requests. A pool with one of these strategies has that
//! queue even without `flowControl`. Users are identified by `exchange.tenant`, or else by the header `user`.
//!
//! Set the policy's parameters in `flowControl.defaultBand.fairness`. When not: prompts share prefixes. Then use
//! `prefix-cache` and name the fairness policy in `flowControl`.
//! Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). AIBrix's documentation names the
//! three as future variants of its `vtc-basic`.

use attache_scheduling::Strategy;
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{NoParams, ParamError, params, section};
use attache_scheduling::registry::{Descriptor, Registry};
use serde_json::Value;

/// Registry entry.
pub const FAIR: Descriptor = Descriptor {
    name: "vtc-fair",
    summary: "Queues requests fairly by the tokens that each user received, and picks the endpoint with the \
              fewest requests.",
    source: "VTC (2024); named by AIBrix",
    parameters: section::<NoParams>,
    build,
};

/// Registry entry.
pub const MAX_FAIR: Descriptor = Descriptor {
    name: "vtc-max-fair",
    summary: "As `vtc-fair`; users that received few tokens lately are lifted to the level of the last one served.",
    source: "VTC (2024); named by AIBrix",
    parameters: section::<NoParams>,
    build,
};

/// Registry entry.
pub const PRED: Descriptor = Descriptor {
    name: "vtc-pred",
    summary: "As `vtc-fair`; the length of each response is predicted and charged when the request leaves the queue.",
    source: "VTC (2024); named by AIBrix",
    parameters: section::<NoParams>,
    build,
};

fn build(value: &Value, _: &Registry) -> Result<Box<dyn Strategy>, ParamError> {
    params::<NoParams>(value).map(|NoParams {}| Box::new(LeastRequest) as Box<dyn Strategy>)
}
