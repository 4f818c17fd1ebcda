//! What the scraper counts. Written by [`super::feed`], read by telemetry.

use super::engines::PageError;
use super::fetch::FetchError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Why a scrape came to nothing: the `reason` label of the error counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorReason {
    /// No connection.
    Connect,
    /// Not done within the timeout.
    Timeout,
    /// An answer other than 200.
    Status,
    /// A redirect, which is not followed.
    Redirect,
    /// A page larger than the cap.
    TooLarge,
    /// A compressed page, which was not asked for.
    Encoded,
    /// The connection broke, or what came was not HTTP.
    Broken,
    /// A URL that can't be asked, or no TLS for it.
    Url,
    /// A page without the engine's figures.
    MissingFamily,
    /// A figure that is NaN, infinite, negative or no number.
    UnusableSample,
}

impl ErrorReason {
    /// All of them.
    pub const ALL: [ErrorReason; 10] = [
        ErrorReason::Connect,
        ErrorReason::Timeout,
        ErrorReason::Status,
        ErrorReason::Redirect,
        ErrorReason::TooLarge,
        ErrorReason::Encoded,
        ErrorReason::Broken,
        ErrorReason::Url,
        ErrorReason::MissingFamily,
        ErrorReason::UnusableSample,
    ];

    /// The label's value.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            ErrorReason::Connect => "connect",
            ErrorReason::Timeout => "timeout",
            ErrorReason::Status => "status",
            ErrorReason::Redirect => "redirect",
            ErrorReason::TooLarge => "too_large",
            ErrorReason::Encoded => "encoded",
            ErrorReason::Broken => "broken",
            ErrorReason::Url => "url",
            ErrorReason::MissingFamily => "missing_family",
            ErrorReason::UnusableSample => "unusable_sample",
        }
    }
}

/// A scrape that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScrapeError {
    /// The page did not come.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The page can't be used.
    #[error(transparent)]
    Page(#[from] PageError),
}

impl ScrapeError {
    /// The counter that it belongs to.
    #[must_use]
    pub fn reason(&self) -> ErrorReason {
        match self {
            ScrapeError::Fetch(FetchError::Connect(_)) => ErrorReason::Connect,
            ScrapeError::Fetch(FetchError::Timeout(_)) => ErrorReason::Timeout,
            ScrapeError::Fetch(FetchError::Status(_)) => ErrorReason::Status,
            ScrapeError::Fetch(FetchError::Redirect(_)) => ErrorReason::Redirect,
            ScrapeError::Fetch(FetchError::TooLarge(_)) => ErrorReason::TooLarge,
            ScrapeError::Fetch(FetchError::Encoded) => ErrorReason::Encoded,
            ScrapeError::Fetch(FetchError::Broken(_)) => ErrorReason::Broken,
            ScrapeError::Fetch(FetchError::Url(_)) => ErrorReason::Url,
            ScrapeError::Page(PageError::Missing { .. }) => ErrorReason::MissingFamily,
            ScrapeError::Page(PageError::Unusable { .. }) => ErrorReason::UnusableSample,
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
    errors: [AtomicU64; ErrorReason::ALL.len()],
    model_lists: AtomicU64,
    model_list_failures: AtomicU64,
    served_models: AtomicU64,
}

impl ScrapeStats {
    /// Pages that were read and used.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Bytes of all pages that came whole, used or not.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Restarts of servers that were noticed.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Relaxed)
    }

    /// Lines of wanted families that could not be understood, on pages that were used all the same.
    #[must_use]
    pub fn malformed_lines(&self) -> u64 {
        self.malformed_lines.load(Relaxed)
    }

    /// NaN, infinite or negative samples, on pages that were used all the same.
    #[must_use]
    pub fn unusable_samples(&self) -> u64 {
        self.unusable_samples.load(Relaxed)
    }

    /// Lists of models that servers answered with.
    #[must_use]
    pub fn model_lists(&self) -> u64 {
        self.model_lists.load(Relaxed)
    }

    /// Questions for such a list that came to nothing.
    #[must_use]
    pub fn model_list_failures(&self) -> u64 {
        self.model_list_failures.load(Relaxed)
    }

    /// Models that the servers of now list, each counted once.
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

    /// Scrapes that came to nothing, for one reason.
    #[must_use]
    pub fn errors(&self, reason: ErrorReason) -> u64 {
        self.errors.get(reason as usize).map_or(0, |n| n.load(Relaxed))
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
        if let Some(n) = self.errors.get(reason as usize) {
            n.fetch_add(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_own_counter_and_label() {
        let stats = ScrapeStats::default();
        for (i, reason) in ErrorReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, i);
            stats.count_error(reason);
            assert_eq!(stats.errors(reason), 1, "{}", reason.label());
        }
        let labels: std::collections::BTreeSet<_> = ErrorReason::ALL.map(ErrorReason::label).into();
        assert_eq!(labels.len(), ErrorReason::ALL.len());
    }
}
