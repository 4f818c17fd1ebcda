//! Rejected requests to the admin port, and their counters.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RefusalReason {
    /// It comes from another machine.
    Peer,
    /// Its token is missing, invalid, or not sufficient for the page.
    Token,
    /// Its host is not a name of the picker.
    Host,
    /// A browser sent it for a page of another origin.
    Origin,
    /// Its body exceeds the size limit.
    BodySize,
    /// Its body did not arrive in time.
    BodyTimeout,
    /// Too many requests of its kind are in progress.
    Busy,
}

impl RefusalReason {
    const ALL: [Self; 7] =
        [Self::Peer, Self::Token, Self::Host, Self::Origin, Self::BodySize, Self::BodyTimeout, Self::Busy];

    fn labels(self) -> RefusalLabels {
        let reason = match self {
            Self::Peer => "peer",
            Self::Token => "token",
            Self::Host => "host",
            Self::Origin => "origin",
            Self::BodySize => "body_size",
            Self::BodyTimeout => "body_timeout",
            Self::Busy => "busy",
        };
        RefusalLabels { reason }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: &'static str,
}

/// Counters of rejected requests, by reason.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Family<RefusalLabels, Counter>);

impl Refusals {
    /// Registers a counter for each reason in `registry`.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let refusals = Self::default();
        for reason in RefusalReason::ALL {
            drop(refusals.0.get_or_create(&reason.labels()));
        }
        let help = "rejected requests to the admin port: `peer`, `token`, `host`, `origin`, `body_size`, \
                    `body_timeout`, `busy`";
        registry.register("admin_requests_refused", help, refusals.0.clone());
        refusals
    }

    /// Number of requests rejected for this reason.
    #[cfg(test)]
    pub(super) fn get(&self, why: RefusalReason) -> u64 {
        self.0.get_or_create(&why.labels()).get()
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
        refusals.0.get_or_create(&why.labels()).inc();
    }
    response
}
