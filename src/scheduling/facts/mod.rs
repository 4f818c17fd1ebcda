//! What several filters and scorers know about requests and endpoints in the same words: figures that configurations name, the
//! server that a session belongs to, who is near whom, what media there are, how long an answer would take, whether that is in time, when an
//! endpoint is full.

pub mod concurrency;
pub mod cost;
pub mod deadline;
pub mod figure;
pub mod media;
pub mod prediction;
pub mod session;
pub mod topology;
pub mod utilization;
