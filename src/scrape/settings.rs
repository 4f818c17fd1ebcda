//! Settings of a pool's scrapes.

use std::path::PathBuf;
use std::time::Duration;

/// How the endpoints of a pool are scraped.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ScrapeSettings {
    /// Interval for an endpoint with requests in flight.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub interval: Duration,
    /// Interval for an idle endpoint.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub idle_interval: Duration,
    /// Longest duration of one scrape; a longer one fails.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub timeout: Duration,
    /// Largest response in bytes; a larger one fails the scrape.
    pub max_bytes: u64,
    /// Age from which on metrics are stale and not used.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub stale_after: Duration,
    /// Whether any certificate of an `https` metrics endpoint is accepted.
    pub insecure_skip_verify: bool,
    /// File with the bearer token for metrics and model lists.
    pub bearer_token_file: Option<PathBuf>,
}
