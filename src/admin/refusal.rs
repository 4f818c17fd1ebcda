//! Requests to the admin port that are refused, and their count.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It comes from another machine.
    Peer,
    /// Its token is missing, unknown, or does not allow the page.
    Token,
    /// It names a host that is not the picker.
    Host,
    /// A browser sent it for a page of another origin.
    Origin,
    /// Its body is too large.
    BodySize,
    /// Its body did not arrive in time.
    BodyTimeout,
    /// Too many requests of its kind run.
    Busy,
}

impl Refusal {
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

/// Requests to the admin port that were refused, by reason.
#[derive(Clone, Debug, Default)]
pub struct Refusals(Family<RefusalLabels, Counter>);

impl Refusals {
    /// Counters in `registry`, one for each reason.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let refusals = Self::default();
        for reason in Refusal::ALL {
            drop(refusals.0.get_or_create(&reason.labels()));
        }
        registry.register("admin_requests_refused", "rejected requests to the admin port: `peer`, `token`, `host`, `origin`, `body_size`, `body_timeout`, `busy`", refusals.0.clone());
        refusals
    }

    /// The requests that were refused for this reason.
    #[cfg(test)]
    pub(super) fn get(&self, why: Refusal) -> u64 {
        self.0.get_or_create(&why.labels()).get()
    }
}

/// A response that refuses a request; [`count`] counts it.
pub(super) fn refuse(why: Refusal, status: StatusCode, text: impl IntoResponse) -> Response {
    let mut response = (status, text).into_response();
    response.extensions_mut().insert(why);
    response
}

/// Counts the response if it refuses its request.
pub(super) async fn count(State(refusals): State<Refusals>, response: Response) -> Response {
    if let Some(why) = response.extensions().get::<Refusal>() {
        refusals.0.get_or_create(&why.labels()).inc();
    }
    response
}
