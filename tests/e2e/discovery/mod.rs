//! Discovery through Kubernetes: the picker's own binary against an API server over real HTTP. Requests arrive as Envoy
//! sends them.

use crate::api::picks;

mod churn;
mod faults;
mod leases;
mod members;
mod models;
mod pools;
mod recording;
mod reviews;
mod rules;
mod status;
