//! Configuration of the request path, and of the labels by which its requests are counted.

use attache_protocol::Usage;
use serde::ser::SerializeMap as _;
use std::collections::{BTreeMap, BTreeSet};

/// 20 names, as many as a graph can show.
const DEFAULT_TOP_NAMES: usize = 20;

/// How a request with an invalid body is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnUnparseable {
    /// Reject it with status 400 in the format of the client's API.
    #[default]
    Reject,
    /// Route it by load, and let the model server respond.
    Fallback,
}

/// Which models a list of models contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelsAnswer {
    /// Those of one endpoint, which gets the request.
    #[default]
    Server,
    /// Those of all endpoints that the request may reach; Attaché asks them every ten seconds and responds itself.
    Pool,
}

/// A token count of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UsageCount {
    /// Prompt tokens, cached ones included.
    Prompt,
    /// Prompt tokens that were found in a cache.
    Cached,
    /// Generated tokens.
    Completion,
    /// Prompt and generated tokens.
    #[default]
    Total,
}

impl UsageCount {
    /// Returns this count; `None` if the server has not reported it.
    #[must_use]
    pub fn of(self, usage: Usage) -> Option<u64> {
        match self {
            Self::Prompt => usage.prompt_tokens,
            Self::Cached => usage.cached_tokens,
            Self::Completion => usage.completion_tokens,
            Self::Total => Some(usage.prompt_tokens.unwrap_or(0).saturating_add(usage.completion_tokens.unwrap_or(0))),
        }
    }
}

/// The token count to report in the dynamic metadata, as GIE's `request-attribute-reporter` does with an expression
/// over `usage`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportUsage {
    /// Namespace of the metadata.
    pub namespace: String,
    /// Key in that namespace.
    pub key: String,
    /// The count to report.
    pub count: UsageCount,
}

/// Where Attaché explains its decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainSettings {
    /// To the gateway: each endpoint's score, as dynamic metadata beside the destination.
    pub metadata: bool,
    /// In the log: this fraction of the decisions, 0..=1, with the score of each part of the algorithm for each
    /// endpoint.
    pub log_ratio: f64,
    /// On the admin page `/explain`: the explanations of this many decisions, the latest ones.
    pub kept: usize,
    /// Decisions whose explanations are kept take at most this part of the time of one core, above 0 and at most 1.
    pub time_ratio: f64,
}

/// How the ext-proc exchange behaves.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExchangeSettings {
    /// How requests with an invalid body are handled.
    pub on_unparseable: OnUnparseable,
    /// Honour `test-epp-endpoint-selection` and add the conformance suite's response headers. Lets clients choose
    /// endpoints.
    pub conformance_headers: bool,
    /// Trust the client's headers for objective, priority and fairness, and pass on those that control model servers.
    pub trust_client_headers: bool,
    /// Headers that name the flow of requests without a fairness header, lower case; the first present one is used.
    /// Trusted if `trust_client_headers` is set.
    pub session_headers: Vec<Box<str>>,
    /// Name the prefill worker of a split request in a response header.
    pub prefill_endpoint_header: bool,
    /// Say in a response header which endpoint got the request, and why.
    pub route_header: bool,
    /// Pass on the client's `accept-encoding`, so that model servers may compress responses. Attaché can't read those.
    pub keep_accept_encoding: bool,
    /// How a request's tenant is determined; `None`: requests have no tenant.
    pub tenant: Option<TenantRule>,
    /// Ignore the gateway's subset hint.
    pub disable_endpoint_subset_filter: bool,
    /// Content of `GET /v1/models`.
    pub models: ModelsAnswer,
    /// Report a token count to the gateway, as dynamic metadata with the last message of a response.
    pub report_usage: Option<ReportUsage>,
    /// Where Attaché explains its decisions.
    pub explain: ExplainSettings,
    /// Priorities by the names of objectives.
    pub objectives: BTreeMap<String, i32>,
}

impl ExchangeSettings {
    /// Whether programs of agents may be flows of the queue: the client's headers are trusted, and nothing else is
    /// configured to name flows.
    #[must_use]
    pub fn has_program_flows(&self) -> bool {
        self.trust_client_headers && self.session_headers.is_empty() && self.tenant.is_none()
    }
}

/// How a request's tenant is determined. The source is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// Where the tenant's name is.
    pub source: TenantSource,
    /// Header of clients, lower case, that must not reach model servers: it claims to name the tenant but is not
    /// trusted.
    pub strip: Option<String>,
}

impl serde::Serialize for TenantRule {
    /// As `exchange.tenant` of the configuration file.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (header, metadata) = match &self.source {
            TenantSource::Header(name) => (Some(name), None),
            TenantSource::Metadata { namespace, path } => (self.strip.as_ref(), Some((namespace, path))),
        };
        let (namespace, path) = metadata.unzip();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("header", &header)?;
        map.serialize_entry("metadata", &namespace)?;
        map.serialize_entry("path", &path)?;
        map.end()
    }
}

/// The source of a tenant's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSource {
    /// A request header that a filter before this one sets, lower case.
    Header(String),
    /// Envoy's dynamic metadata, in which the JWT filter stores claims.
    Metadata {
        /// Namespace of the filter that wrote it.
        namespace: String,
        /// Keys that lead to the name, from the outermost.
        path: Vec<String>,
    },
}

/// Names that become metric labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// Label values for models.
    pub models: NameSettings,
    /// Label values for tenants.
    pub tenants: NameSettings,
}

/// Names that become label values; all others share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameSettings {
    /// Names that always get a label value.
    pub allow: BTreeSet<String>,
    /// Number of further names, chosen by frequency.
    pub top: usize,
}

impl Default for NameSettings {
    fn default() -> Self {
        Self { allow: BTreeSet::new(), top: DEFAULT_TOP_NAMES }
    }
}
