//! What the configuration says of a request's way through the picker.

use std::collections::BTreeMap;

/// What to do with a body that can't be understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnUnparseable {
    /// Answer 400 in the client's dialect.
    #[default]
    Reject,
    /// Route it by load and let the server answer.
    Fallback,
}

/// Who answers when a client asks which models there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelsAnswer {
    /// One server, for itself.
    #[default]
    Server,
    /// The picker, for all servers of the pools that the request may reach, which it asks every ten seconds.
    Pool,
}

/// A token count of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsageCount {
    /// Tokens of the prompt, cached ones included.
    Prompt,
    /// Tokens of the prompt that were found in a cache.
    Cached,
    /// Tokens generated.
    Completion,
    /// Prompt and completion.
    #[default]
    Total,
}

/// Which count goes where in the dynamic metadata. GIE's `request-attribute-reporter` with an expression over `usage`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportUsage {
    /// The namespace.
    pub namespace: String,
    /// The key in it.
    pub key: String,
    /// The count.
    pub count: UsageCount,
}

/// Who is told why an endpoint was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExplainSettings {
    /// The gateway: each endpoint's score, as dynamic metadata beside the destination.
    pub metadata: bool,
    /// The log: this part of the decisions, 0..=1, with what each part of the algorithm made of each endpoint.
    pub log_ratio: f64,
}

/// How the ext-proc exchange behaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExchangeSettings {
    /// What to do with a body that can't be understood.
    pub on_unparseable: OnUnparseable,
    /// Honour `test-epp-endpoint-selection` and answer with the conformance suite's headers. Lets clients choose endpoints.
    pub conformance_headers: bool,
    /// Believe the client's objective, priority and fairness headers, and let those through that steer servers.
    pub trust_client_headers: bool,
    /// Headers that name the flow of requests without a fairness header, lower case; the first one that is there counts. Believed as
    /// `trust_client_headers` says.
    pub session_headers: Vec<Box<str>>,
    /// Name the server that computed the prompt of a split request in a response header.
    pub prefill_endpoint_header: bool,
    /// How a request's tenant is found; nobody has one when `None`.
    pub tenant: Option<TenantRule>,
    /// Ignore the gateway's subset hint.
    pub disable_endpoint_subset_filter: bool,
    /// Who answers `GET /v1/models`.
    pub models: ModelsAnswer,
    /// Tell the gateway what an answer cost, as dynamic metadata with its last message.
    pub report_usage: Option<ReportUsage>,
    /// Who is told why an endpoint was chosen.
    pub explain: ExplainSettings,
    /// Priorities by objective name.
    pub objectives: BTreeMap<String, i32>,
}

/// How a request's tenant is found. Whoever can write there is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// Where its name is.
    pub source: TenantSource,
    /// A header of clients that must not reach servers, lower case: it claims to name the tenant and does not.
    pub strip: Option<String>,
}

/// Where a tenant's name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSource {
    /// In a header that a filter before this one sets, lower case.
    Header(String),
    /// In Envoy's dynamic metadata, as the JWT filter leaves claims there.
    Metadata {
        /// The filter that wrote it.
        namespace: String,
        /// The keys that lead to it, from the outermost.
        path: Vec<String>,
    },
}
