//! How the ext-proc exchange behaves.

use super::declare;
use crate::settings::{ExchangeSettings, ExplainSettings, ModelsAnswer, OnUnparseable, UsageCount};
use attache_config_schema::diagnostic::At;
use std::ops::Bound;

sections! {
    /// How the ext-proc exchange behaves.
    Exchange fills ExchangeSettings {
        /// What happens to a body that is no valid request. `fallback` routes it by load and lets the server answer.
        "onUnparseable" => on_unparseable: OnUnparseable { default: OnUnparseable::default(); },
        /// `true` only for the conformance suite: every client may choose its endpoint by a header.
        "conformanceHeaders" => conformance_headers: bool { default: false; flag: "conformance-headers"; },
        /// Whether `x-gateway-inference-objective` and similar headers are believed. A filter in front must then set them and
        /// remove those of clients.
        "trustClientHeaders" => trust_client_headers: bool { default: false; flag: "trust-client-headers"; },
        /// With `trustClientHeaders`: headers that name the flow if `x-gateway-inference-fairness-id` is absent. The first one
        /// that is present counts. Without them, `program-aware-fairness` names flows by the programs of agents.
        "sessionHeaders" => session_headers: Vec<At<String>> { absent: "none"; },
        /// Whether `x-attache-prefill-endpoint` shows every client the internal address of the server that computed the
        /// prompt.
        "prefillEndpointHeader" => prefill_endpoint_header: bool { default: false; },
        /// Whether `x-attache-route` shows every client the endpoint, cached tokens, queue time and reason.
        "routeHeader" => route_header: bool { default: false; },
        /// Whether servers may compress responses as clients allow. Attaché then reads no tokens, errors and model names of
        /// those.
        "keepAcceptEncoding" => keep_accept_encoding: bool { default: false; },
        /// Where the name of a request's tenant is.
        "tenant" => tenant: Tenant { absent: "no tenants"; },
        /// Whether the gateway's subset of endpoints is ignored.
        "disableEndpointSubsetFilter" => disable_endpoint_subset_filter: bool {
            default: false; flag: "disable-endpoint-subset-filter";
        },
        /// Who answers `GET /v1/models`: one server, or Attaché with the models of all servers and rewrites.
        "models" => models: ModelsAnswer { default: ModelsAnswer::default(); },
        /// Reports the tokens of a response to the gateway, as dynamic metadata with its last message.
        "reportUsage" => report_usage: ReportUsage { absent: "nothing is reported"; },
        /// Why an endpoint was chosen.
        "explain" => explain: Explain,
        /// Priorities by the name of an objective. Requests below 0 are sheddable.
        "objectives" => objectives: Vec<(At<String>, At<i32>)> { absent: "none"; unit: "priority"; },
    }
    /// Where the name of a request's tenant is.
    Tenant {
        /// Header with the name, which a filter in front must set. Beside `metadata` it is removed from requests.
        "header" => header: String { absent: "none"; },
        /// Namespace of dynamic metadata with the name, such as `envoy.filters.http.jwt_authn`. Needs `path`.
        "metadata" => metadata: String { absent: "none"; },
        /// Keys that lead to the name in the metadata, such as `[payload, sub]`.
        "path" => path: Vec<At<String>> { absent: "none"; },
    }
    /// Explanations of decisions, for gateways and logs.
    Explain fills ExplainSettings {
        /// Whether each endpoint's score is dynamic metadata beside the destination.
        "metadata" => metadata: bool { default: false; flag: "emit-endpoint-scores"; },
        /// Share of the decisions that are logged with the score of each endpoint.
        "logRatio" => log_ratio: f64 { default: 0.0; range: 0.0..=1.0; unit: "share"; },
        /// Latest decisions that `GET /explain?request_id=ID` of the admin port explains, within 64 MiB. Those of 8 endpoints
        /// take some 10 MB.
        "kept" => kept: usize { default: 4_096; range: 0..=65_536; unit: "decisions"; },
        /// Share of the time of one core for explanations that are kept. At 1 % most decisions of a quiet pool are explained.
        "timeRatio" => time_ratio: f64 {
            default: 0.01;
            range: (Bound::Excluded(0.0), Bound::Included(1.0));
            unit: "share";
        },
    }
    /// Token usage of a response, reported to the gateway.
    ReportUsage {
        /// Namespace of the metadata, as in GIE's example.
        "namespace" => namespace: String { default: "envoy.lb".to_owned(); },
        /// Key of the metadata, as in GIE's example.
        "key" => key: String { default: "x-gateway-inference-request-cost".to_owned(); },
        /// Which tokens are counted.
        "count" => count: UsageCount { default: UsageCount::default(); },
    }
}
