//! The structure of the configuration file: every section and key, with its note, default, range and unit. Rules about
//! combinations are in `validate`.
//!
//! Keys are camelCase. A section needs only keys without which it means nothing.

use super::diagnostic::{Code, Diagnostic};
use super::endpoint_picker;
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::diagnostic::At;
use attache_config_schema::document::{Node, Value};
use attache_scheduling::Registry;

#[macro_use]
mod declare;
mod caches;
mod discovery;
mod exchange;
mod flow;
mod limits;
mod objective;
mod pool;
mod selection;
mod server;
mod strategy;
mod sync;
mod words;

pub use caches::{Decider, Disaggregation, KvEvents, PrefixCache, Tokenizer, Volatile};
pub use declare::{Catalogue, Flag, Key, Kind, Opt, Range, Section, plain};
pub(crate) use declare::{Setting, below, check, get, word_of};
pub use discovery::{Dns, EndpointsFile, Kubernetes};
pub use exchange::{Exchange, Explain, ReportUsage, Tenant};
pub use flow::{Band, FlowControl};
pub use limits::{LimitValue, LimitsSection, Models, Redis, TenantLimits, Tenants, UserRecords};
pub use objective::{Objective, Slo};
pub use pool::{
    DestinationSection, Endpoint, FromFlags, Header, Health, Match, MetadataKey, MetricsSection, Pool, Rewrite, Scrape,
    Target,
};
pub use selection::{ModelPolicy, Profile, RequestStrategy, StrategyRule};
pub use server::{Drain, Labels, Names, Server, Telemetry, Tls};
pub use strategy::{Parameters, Strategy};
pub use sync::{Nats, NatsTls, Sync};
pub use words::{DeciderKind, DisaggregationMode, LogFormat, Scheme, TlsMode, TokenizerKind};

/// Version of the file format that this build reads.
pub(crate) const API_VERSION: &str = "attache.dev/v1";
/// Kind of document that this build reads.
pub(crate) const KIND: &str = "Attache";

sections! {
    /// The configuration file.
    File {
        /// Version of the format: `attache.dev/v1`.
        "apiVersion" => api_version: String [flat] { absent: "required"; },
        /// Kind of the document: `Attache`.
        "kind" => kind: String [flat] { absent: "required"; },
        "server" => server: Server [flat] { restart: true; },
        "telemetry" => telemetry: Telemetry [flat] { restart: true; },
        "exchange" => exchange: Exchange [flat],
        "limits" => limits: LimitsSection [flat],
        /// Redis, for limits that several pickers share, limits of single tenants, and SLO profiles.
        "redis" => redis: Redis { absent: "none"; },
        /// What this picker shares with others over NATS.
        "sync" => sync: Sync { absent: "nothing is shared"; restart: true; },
        /// How `prefix-affinity` routes single models. `/api/nodes/scheduling` of the admin port changes it until the next
        /// start.
        "modelPolicies" => model_policies: Vec<At<ModelPolicy>> { absent: "the parameters of the strategy"; },
        /// The pools of endpoints.
        "pools" => pools: Vec<At<Pool>> { absent: "one pool, by flags"; },
    }
}

impl File {
    /// Every key of the file.
    #[must_use]
    pub fn keys() -> Section {
        match <Self as Setting>::kind() {
            Kind::Section(section) => section,
            _ => unreachable!("the file is a mapping"),
        }
    }

    /// Reads the document. `None` if its kind or version is unknown: then nothing else in it can be checked.
    pub fn read(root: &Node, registry: &Registry, sink: &mut Sink) -> Option<Self> {
        let file = if endpoint_picker::is(root) {
            endpoint_picker::read(root, registry, sink)?
        } else {
            check_kind(root, sink)?;
            <Self as Setting>::read(root, "", sink)?
        };
        file.check_ranges(&String::new, sink);
        Some(file)
    }
}

fn check_kind(root: &Node, sink: &mut Sink) -> Option<()> {
    let mut fields = Fields::of(root, "", sink)?;
    let other = endpoint_picker::KIND;
    let versions = format!("`{API_VERSION}` for `{KIND}`, or {} for `{other}`", endpoint_picker::versions());
    let mut good = Some(());
    for (key, want, allowed) in
        [("apiVersion", API_VERSION, versions), ("kind", KIND, format!("`{KIND}`, or `{other}` of llm-d and GIE"))]
    {
        let node = fields.node(key);
        if matches!(node.map(|node| &node.value), Some(Value::Text(text)) if text == want) {
            continue;
        }
        good = None;
        let got = node.map_or_else(|| "it is missing".to_owned(), |n| format!("got {}", n.value.describe()));
        sink.push(
            Diagnostic::new(Code::Version, key, format!("`{key}` must be {allowed}; {got}"))
                .at(node.map_or(fields.span, |n| n.span))
                .help(format!("write `{key}: {want}` in Attaché's own file")),
        );
    }
    good
}
