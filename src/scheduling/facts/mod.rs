//! Facts about requests and endpoints that several filters and scorers share: metrics by name, sessions, topology,
//! media, predictions, deadlines, and whether an endpoint is full.

pub mod concurrency;
pub mod cost;
pub mod deadline;
pub mod figure;
pub mod media;
pub mod prediction;
pub mod session;
pub mod topology;
pub mod utilization;
