//! How the endpoints of a pool are scraped.

use std::path::PathBuf;
use std::time::Duration;

/// How endpoints are scraped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrapeSettings {
    /// Interval for an endpoint with requests on it.
    pub interval: Duration,
    /// Interval for an endpoint without.
    pub idle_interval: Duration,
    /// Longest time for one page.
    pub timeout: Duration,
    /// Largest page, bytes.
    pub max_bytes: u64,
    /// Pages older than this say nothing.
    pub stale_after: Duration,
    /// Accept any certificate of an `https` metrics endpoint.
    pub insecure_skip_verify: bool,
    /// Holds the token that servers ask for, for their metrics and for the list of their models.
    pub bearer_token_file: Option<PathBuf>,
}
