//! `vtc-fair`, `vtc-max-fair` and `vtc-pred`: a fair queue before the pool, and the endpoint with the fewest requests
//! behind it.
//!
//! The Virtual Token Counter decides the order in which users are served. In its paper one server has one queue. Here
//! the queue stands before the whole pool (`flowControl`), with the fairness policy of the same name, and each
//! dequeued request goes to the endpoint with the fewest requests. A configuration that names one of these strategies
//! has that queue without saying so. Users are found by `exchange.tenant`, or else by the header `user`.
//!
//! The parameters of the policy stand in `flowControl.defaultBand.fairness`. When not: prompts share prefixes; then
//! use `prefix-cache` and name the fairness policy in `flowControl`. Source: Sheng et al., "Fairness in Serving Large
//! Language Models" (OSDI 2024). AIBrix's documentation names the three as future variants of its `vtc-basic`.

use attache_scheduling::Strategy;
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{NoParams, ParamError, params};
use attache_scheduling::registry::{Descriptor, Registry};
use serde_json::Value;

/// Registry entry.
pub const FAIR: Descriptor = Descriptor {
    name: "vtc-fair",
    summary: "Queues requests fairly by the tokens that each user had, and picks the endpoint with the fewest requests.",
    source: "VTC (2024); named by AIBrix",
    build,
};

/// Registry entry.
pub const MAX_FAIR: Descriptor = Descriptor {
    name: "vtc-max-fair",
    summary: "As `vtc-fair`; users that had little lately are lifted to the level of the last one served.",
    source: "VTC (2024); named by AIBrix",
    build,
};

/// Registry entry.
pub const PRED: Descriptor = Descriptor {
    name: "vtc-pred",
    summary: "As `vtc-fair`; the length of each answer is predicted and charged when the request leaves the queue.",
    source: "VTC (2024); named by AIBrix",
    build,
};

fn build(value: &Value, _: &Registry) -> Result<Box<dyn Strategy>, ParamError> {
    params::<NoParams>(value).map(|NoParams {}| Box::new(LeastRequest) as Box<dyn Strategy>)
}
