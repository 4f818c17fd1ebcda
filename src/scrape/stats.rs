//! Counters of the scraper. Written by [`super::feed`], read by telemetry.

use super::engines::PageError;
use attache_http_client::FetchError;
use attache_types::ids::EndpointId;
use attache_types::labels::Counts;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

attache_types::labels! {
    /// The reason for which a scrape failed: the `reason` label of the error counter.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ErrorReason {
        /// The connection could not be established.
        Connect => "connect",
        /// The response was not complete within the timeout.
        Timeout => "timeout",
        /// The status was not 200.
        Status => "status",
        /// The response was a redirect, which is not followed.
        Redirect => "redirect",
        /// The response exceeded the size limit.
        TooLarge => "too_large",
        /// The response was compressed, although the request did not allow it.
        Encoded => "encoded",
        /// The connection was interrupted, or the response was not HTTP.
        Broken => "broken",
        /// The URL cannot be requested, or TLS cannot be set up.
        Url => "url",
        /// The response is JSON instead of Prometheus text.
        Json => "json",
        /// The response lacks a value that every engine reports.
        MissingFamily => "missing_family",
        /// A value is NaN, infinite, negative or not a number.
        UnusableSample => "unusable_sample",
    }
}

impl ErrorReason {
    /// What an operator can do, for the log and the status page.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            ErrorReason::Connect | ErrorReason::Timeout | ErrorReason::Broken => {
                "is the server up, and are the metrics at this port? A server without metrics needs `--engine none`"
            }
            ErrorReason::Status | ErrorReason::Redirect | ErrorReason::Json => {
                "are the metrics on, and at this path (`metrics.path`)? A server without metrics needs `--engine none`"
            }
            ErrorReason::MissingFamily | ErrorReason::UnusableSample => {
                "is it this engine? `--engine` names another one, and `--engine none` a server without metrics"
            }
            ErrorReason::TooLarge => "`scrape.maxBytes` is the limit; a server without metrics needs `--engine none`",
            ErrorReason::Encoded => "a proxy in front of the server compresses; name the server's own port",
            ErrorReason::Url => {
                "check scheme, port and path of the metrics; a server without metrics needs `--engine none`"
            }
        }
    }
}

/// What to add to the message of an error of `scrape`, whose token model servers may want.
pub(crate) fn token_hint(error: &FetchError) -> &'static str {
    match error {
        FetchError::Status(401 | 403) => "; `scrape.bearerTokenFile` names a file with the token that servers ask for",
        _ => "",
    }
}

/// The reason for which a scrape failed, with its details.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ScrapeError {
    /// The request to the endpoint failed.
    #[error("{0}{hint}", hint = token_hint(.0))]
    Fetch(#[from] FetchError),
    /// The endpoint's metrics are incomplete or invalid.
    #[error(transparent)]
    Page(#[from] PageError),
}

impl ScrapeError {
    /// Returns the reason under which it is counted.
    #[must_use]
    pub(crate) fn reason(&self) -> ErrorReason {
        match self {
            ScrapeError::Fetch(FetchError::Connect(_) | FetchError::Certificate(_)) => ErrorReason::Connect,
            ScrapeError::Fetch(FetchError::Timeout(_)) => ErrorReason::Timeout,
            ScrapeError::Fetch(FetchError::Status(_)) => ErrorReason::Status,
            ScrapeError::Fetch(FetchError::Redirect(_)) => ErrorReason::Redirect,
            ScrapeError::Fetch(FetchError::TooLarge(_)) => ErrorReason::TooLarge,
            ScrapeError::Fetch(FetchError::Encoded) => ErrorReason::Encoded,
            ScrapeError::Fetch(FetchError::Broken(_)) => ErrorReason::Broken,
            ScrapeError::Fetch(FetchError::Url(_)) => ErrorReason::Url,
            ScrapeError::Page(PageError::Json(_)) => ErrorReason::Json,
            ScrapeError::Page(PageError::Missing(_)) => ErrorReason::MissingFamily,
            ScrapeError::Page(PageError::Unusable(_)) => ErrorReason::UnusableSample,
        }
    }
}

/// Counters of one pool's scraper since the process started.
#[derive(Debug, Default)]
pub struct ScrapeStats {
    pages: AtomicU64,
    bytes: AtomicU64,
    restarts: AtomicU64,
    malformed_lines: AtomicU64,
    unusable_samples: AtomicU64,
    errors: Counts<ErrorReason>,
    model_lists: AtomicU64,
    model_list_failures: AtomicU64,
    served_models: AtomicU64,
    /// Why the last scrape of an endpoint failed; none for endpoints whose last scrape succeeded.
    failing: Mutex<BTreeMap<EndpointId, Arc<str>>>,
}

impl ScrapeStats {
    /// Returns why the last scrape of the endpoint failed; `None` if it succeeded, or was not tried.
    #[must_use]
    pub fn failing(&self, id: EndpointId) -> Option<Arc<str>> {
        self.failing.lock().get(&id).cloned()
    }

    pub(crate) fn set_failing(&self, id: EndpointId, why: Option<Arc<str>>) {
        let mut failing = self.failing.lock();
        match why {
            Some(why) => _ = failing.insert(id, why),
            None => _ = failing.remove(&id),
        }
    }

    /// Forgets endpoints that have left.
    pub(crate) fn keep_failing(&self, is_member: impl Fn(EndpointId) -> bool) {
        self.failing.lock().retain(|id, _| is_member(*id));
    }

    /// Returns the number of successful scrapes.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Returns the bytes of all complete responses, valid or not.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Returns the number of detected restarts.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Relaxed)
    }

    /// Returns the number of invalid lines of selected families in successful scrapes.
    #[must_use]
    pub fn malformed_lines(&self) -> u64 {
        self.malformed_lines.load(Relaxed)
    }

    /// Returns the number of NaN, infinite or negative samples in successful scrapes.
    #[must_use]
    pub fn unusable_samples(&self) -> u64 {
        self.unusable_samples.load(Relaxed)
    }

    /// Returns the number of received model lists.
    #[must_use]
    pub fn model_lists(&self) -> u64 {
        self.model_lists.load(Relaxed)
    }

    /// Returns the number of failed requests for model lists.
    #[must_use]
    pub fn model_list_failures(&self) -> u64 {
        self.model_list_failures.load(Relaxed)
    }

    /// Returns the number of different models that the current servers list.
    #[must_use]
    pub fn served_models(&self) -> u64 {
        self.served_models.load(Relaxed)
    }

    pub(super) fn count_model_list(&self, read: bool) {
        let counter = if read { &self.model_lists } else { &self.model_list_failures };
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn serves(&self, models: usize) {
        self.served_models.store(models as u64, Relaxed);
    }

    /// Returns the number of failed scrapes for one reason.
    #[must_use]
    pub fn errors(&self, reason: ErrorReason) -> u64 {
        self.errors.get(reason)
    }

    pub(super) fn count_page(&self, skipped: super::exposition::Skipped) {
        self.pages.fetch_add(1, Relaxed);
        self.malformed_lines.fetch_add(skipped.malformed, Relaxed);
        self.unusable_samples.fetch_add(skipped.unusable, Relaxed);
    }

    pub(super) fn count_bytes(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    pub(super) fn count_restart(&self) {
        self.restarts.fetch_add(1, Relaxed);
    }

    pub(super) fn count_error(&self, reason: ErrorReason) {
        self.errors.count(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unauthorized_scrape_names_the_setting_for_the_token() {
        let message = |status| ScrapeError::from(FetchError::Status(status)).to_string();
        assert!(message(401).contains("401") && message(401).contains("bearerTokenFile"), "{}", message(401));
        assert_eq!(message(404), "got status 404, want 200");
    }
}
