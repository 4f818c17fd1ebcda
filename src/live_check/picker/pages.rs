//! The pages of the picker's admin port, as far as the checks read them.

use attache_pool::Engine;
use attache_scrape::exposition::{Families, Scan};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// `/endpoints`. Fields that another version lacks have their defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointsPage {
    pub(super) version: String,
    pub(super) warnings: Vec<WarningPage>,
    pub(crate) pools: Vec<PoolPage>,
}

/// A warning of the picker.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WarningPage {
    pub(super) code: String,
    pub(super) pool: Option<String>,
    pub(super) message: String,
    pub(super) help: String,
}

/// A pool of `/endpoints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PoolPage {
    pub(crate) name: String,
    pub(super) tokenizer: String,
    pub(super) unread_prompts: Vec<UnreadPage>,
    pub(crate) endpoints: Vec<EndpointPage>,
}

/// Prompts without tokens, by model and reason.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct UnreadPage {
    pub(super) model: String,
    pub(super) reason: String,
    pub(super) prompts: u64,
}

/// An endpoint of `/endpoints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointPage {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) engine: Engine,
    pub(crate) labels: BTreeMap<Arc<str>, Arc<str>>,
    pub(super) status: String,
    pub(super) ejection: Option<EjectionPage>,
    pub(super) scrape_error: Option<String>,
    pub(super) learned: Option<LearnedPage>,
    pub(super) slowdown: Option<SlowdownPage>,
    pub(super) metrics: Option<MetricsAge>,
    pub(super) kv_events: Option<String>,
}

/// Why an endpoint is ejected.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct EjectionPage {
    pub(super) cause: String,
    pub(super) returns_in_ms: u64,
}

/// What the picker has learned of the speed of an endpoint.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LearnedPage {
    pub(super) prefill_tokens_per_second: f64,
    pub(super) seconds_per_token: f64,
}

/// How many times longer an endpoint takes than the median of the others in its role.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlowdownPage {
    pub(super) first_token: f64,
    pub(super) per_token: f64,
    pub(super) slow: bool,
}

/// The age of scraped metrics.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct MetricsAge {
    pub(super) age_ms: u64,
    pub(super) stale: bool,
}

/// `/api/status`, as far as it counts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StatusPage {
    pub(super) rejections: Vec<RejectionPage>,
    pub(super) degraded: Vec<ModePage>,
    pub(super) certificates: Vec<CertificatePage>,
}

/// Rejections of a pool for a reason.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RejectionPage {
    pub(super) reason: String,
    pub(super) requests: u64,
    pub(super) requests_per_second: Option<f64>,
}

/// Uses of a degraded mode.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ModePage {
    pub(super) mode: String,
    pub(super) times: u64,
    pub(super) times_per_second: Option<f64>,
}

/// A certificate of the ext-proc port.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CertificatePage {
    pub(super) name: String,
    pub(super) expires_in_seconds: f64,
    pub(super) refused_replacements: u64,
}

/// `/api/peers`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PeersPage {
    pub(super) shares_state: bool,
    pub(super) peers: Vec<PeerPage>,
}

/// Another picker.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PeerPage {
    pub(super) name: String,
    pub(super) seconds_since_last_message: f64,
    pub(super) behind: bool,
}

/// The metrics that the checks read.
const NAMES: &[&str] = &[
    "attache_config_last_reload_successful",
    "attache_limit_hits_total",
    "attache_limit_store_failures_total",
    "attache_listener_connections_closed_total",
    "attache_panics_total",
    "attache_protocol_errors_total",
    "attache_redis_connected",
    "attache_sync_connected",
    "attache_sync_snapshot_block_mismatches_total",
    "attache_tokenizer_unhealthy_models",
    "attache_kube_out_of_touch",
    "attache_kube_pool_unreadable",
    "attache_kube_endpoints_left_out",
    "process_max_fds",
    "process_open_fds",
];

static FAMILIES: LazyLock<Families> = LazyLock::new(|| Families::new(NAMES));

/// The labels of a sample, and its value.
pub(super) type Sample = (BTreeMap<String, String>, f64);

/// The picker's own metrics.
#[derive(Clone, Debug, Default)]
pub(super) struct PickerMetrics(BTreeMap<&'static str, Vec<Sample>>);

impl PickerMetrics {
    pub(super) fn read(page: &[u8]) -> Self {
        let mut all = Self::default();
        for sample in Scan::new(page, &FAMILIES) {
            let (Some(name), Some(value)) = (FAMILIES.names().get(sample.family), sample.value) else { continue };
            let labels = sample.labels.into_iter().map(|(name, value)| (name.to_owned(), value.into_owned())).collect();
            all.0.entry(name).or_default().push((labels, value));
        }
        all
    }

    /// The samples of a family.
    pub(super) fn each(&self, name: &str) -> &[Sample] {
        self.0.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    /// The value of a family without labels; `None` if the picker does not report it.
    pub(super) fn value(&self, name: &str) -> Option<f64> {
        self.each(name).first().map(|(_, value)| *value)
    }

    /// The sum of a family.
    pub(super) fn sum(&self, name: &str) -> f64 {
        self.each(name).iter().map(|(_, value)| value).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_the_picker_are_read_by_name_and_label() {
        let page = b"# TYPE attache_limit_hits counter\nattache_limit_hits_total{limit=\"body_bytes\"} 3\n\
                     process_open_fds 12\nattache_limit_hits_total{limit=\"streams\"} 1\nother 4\n# EOF\n";
        let metrics = PickerMetrics::read(page);
        assert_eq!(metrics.value("process_open_fds"), Some(12.0));
        assert_eq!(metrics.sum("attache_limit_hits_total"), 4.0);
        assert_eq!(metrics.each("attache_limit_hits_total")[0].0["limit"], "body_bytes");
        assert_eq!(metrics.value("process_max_fds"), None);
    }

    #[test]
    fn every_name_is_documented() {
        let page = include_str!("../../../docs/reference/metrics.md");
        for name in NAMES {
            // The metrics to watch are bold.
            let rows = [format!("| `{name}` |"), format!("| **`{name}`** |")];
            assert!(rows.iter().any(|row| page.contains(row)), "{name}");
        }
    }
}
