//! The strategies, one file each.

pub mod cache_aware;
pub mod chwbl;
pub mod dynamo_kv;
pub mod fallback;
mod floor;
pub mod least_busy_time;
pub mod least_gpu_cache;
pub mod least_kv_cache;
pub mod least_latency;
pub mod least_utilization;
pub mod load_balance;
pub mod pd;
pub mod pipeline;
pub mod power_of_two;
pub mod predicted_latency;
pub mod prefix_affinity;
pub mod prefix_cache;
pub mod prefix_cache_preble;
pub mod prefix_hash;
pub mod random;
pub mod round_robin;
pub mod session_affinity;
pub mod slo;
pub mod throughput;
pub mod vtc_basic;
pub mod vtc_queue;

#[cfg(test)]
mod metric_tests;
