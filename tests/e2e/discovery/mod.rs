//! Discovery through Kubernetes: the picker's binary with a fake API server over real HTTP. The test sends ext-proc
//! requests as Envoy does.

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
