//! Rejected requests to the admin port, and their counters.

use attache_telemetry::counts;
use attache_types::labels::Counts;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use prometheus_client::registry::Registry;
use std::sync::Arc;

attache_types::labels! {
    /// Why a request was rejected.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum RefusalReason {
        /// It comes from another machine.
        Peer => "peer",
        /// Its token is missing, invalid, or not sufficient for the page.
        Token => "token",
        /// Its host is not a name of the picker.
        Host => "host",
        /// A browser sent it for a page of another origin.
        Origin => "origin",
        /// Its body exceeds the size limit.
        BodySize => "body_size",
        /// Its body did not arrive in time.
        BodyTimeout => "body_timeout",
        /// Too many requests of its kind are in progress.
        Busy => "busy",
    }
}

/// Counters of rejected requests, by reason.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Arc<Counts<RefusalReason>>);

impl Refusals {
    /// Registers a counter for each reason in `registry`.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let help = "rejected requests to the admin port: `peer`, `token`, `host`, `origin`, `body_size`, \
                    `body_timeout`, `busy`";
        Self(counts::register(registry, "admin_requests_refused", help, "reason"))
    }

    /// Number of requests rejected for this reason.
    #[cfg(test)]
    pub(super) fn get(&self, why: RefusalReason) -> u64 {
        self.0.get(why)
    }
}

/// A response that rejects a request; [`count`] counts it.
pub(super) fn refuse(why: RefusalReason, status: StatusCode, text: impl IntoResponse) -> Response {
    let mut response = (status, text).into_response();
    response.extensions_mut().insert(why);
    response
}

/// Counts the response if it is a rejection.
pub(super) async fn count(State(refusals): State<Refusals>, response: Response) -> Response {
    if let Some(why) = response.extensions().get::<RefusalReason>() {
        refusals.0.count(*why);
    }
    response
}
