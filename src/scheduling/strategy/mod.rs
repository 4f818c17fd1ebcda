//! The strategies, one file each.

pub mod least_request;
pub mod pipeline;
pub mod power_of_two;
pub mod predicted_latency;
pub mod prefix_cache;
pub mod random;
pub mod round_robin;
