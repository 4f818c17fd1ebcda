//! The reasons for which there are no tokens, or no remote tokenizers.

use super::client::CallError;
use super::stats::Reason;
use attache_http_client::FetchError;
use std::time::Duration;

/// The reason for which there are no tokens. The request then has no token keys, since keys of other tokens than
/// the engine's would be wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The tokenizer's API does not support the request.
    #[error("can't be tokenized remotely: {0}")]
    Unsupported(&'static str),
    /// No server is available.
    #[error("no server of the pool is ready")]
    NoEndpoint,
    /// The model's tokenizer has failed before.
    #[error("the model's tokenizer is failing; a probe detects its recovery")]
    Unhealthy,
    /// The limit of models is reached.
    #[error("{0} models have remote tokenizers, which is all that are allowed")]
    TooManyModels(usize),
    /// The limit of concurrent calls is reached.
    #[error("{0} calls are in flight, which is all that are allowed")]
    Busy(usize),
    /// The tokens did not arrive in time for the decision.
    #[error("no tokens within {0:?}")]
    Late(Duration),
    /// The tokenizer rejected the request, which its server will reject too.
    #[error("the tokenizer refused the request with status {0}")]
    Refused(u16),
    /// The call failed through the server's fault.
    #[error(transparent)]
    Failed(#[from] CallError),
}

impl Unavailable {
    /// Returns the reason under which it is counted.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Unavailable::Unsupported(_) => Reason::Unsupported,
            Unavailable::NoEndpoint => Reason::NoEndpoint,
            Unavailable::Unhealthy => Reason::Unhealthy,
            Unavailable::TooManyModels(_) => Reason::TooManyModels,
            Unavailable::Busy(_) => Reason::Busy,
            Unavailable::Late(_) => Reason::Late,
            Unavailable::Refused(_) => Reason::Refused,
            Unavailable::Failed(CallError::Fetch(error)) => match error {
                FetchError::Connect(_) | FetchError::Certificate(_) | FetchError::Url(_) => Reason::Connect,
                FetchError::Timeout(_) => Reason::Timeout,
                FetchError::Status(_) => Reason::Status,
                FetchError::Redirect(_) => Reason::Redirect,
                FetchError::TooLarge(_) => Reason::TooLarge,
                FetchError::Broken(_) => Reason::Broken,
                FetchError::Encoded => Reason::Garbled,
            },
            Unavailable::Failed(CallError::Garbled(_)) => Reason::Garbled,
        }
    }
}

/// The reason for which the settings of remote tokenizers cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// A URL that cannot be requested.
    #[error("can't ask `{url}`: {why}")]
    Url {
        /// The URL or template.
        url: String,
        /// The mistake in the URL.
        why: String,
    },
    /// The HTTP client cannot be created.
    #[error("can't make an HTTP client: {0}")]
    Client(String),
}
