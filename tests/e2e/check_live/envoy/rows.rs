//! The table of mistakes.

/// A mistake in a shipped bootstrap.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) file: &'static str,
    changes: &'static [Change],
    /// The ids that must be found, each with a word of its fix, and no others.
    pub(super) faults: &'static [(&'static str, &'static str)],
}

/// A change of a text that must be in the bootstrap.
pub(super) enum Change {
    /// Replaces every occurrence.
    Set(&'static str, &'static str),
    /// Removes from the first text up to the second one.
    Cut(&'static str, &'static str),
}

use Change::{Cut, Set};

impl Row {
    /// The bootstrap with the mistake.
    pub(super) fn plant(&self, bootstrap: &str) -> String {
        plant(self.name, self.changes, bootstrap)
    }
}

/// The text of the row `name` with these changes.
pub(super) fn plant(name: &str, changes: &[Change], text: &str) -> String {
    changes.iter().fold(text.to_owned(), |text, change| match change {
        Set(from, to) => {
            assert!(text.contains(from), "{name}: no {from:?}");
            text.replace(from, to)
        }
        Cut(from, until) => {
            let (before, rest) = text.split_once(from).unwrap_or_else(|| panic!("{name}: no {from:?}"));
            let (_, after) = rest.split_once(until).unwrap_or_else(|| panic!("{name}: no {until:?}"));
            format!("{before}{until}{after}")
        }
    })
}

const HEADER: &str = "original-dst.yaml";
const LIST: &str = "override-host.yaml";
const HELD: &str = "buffered.yaml";

/// The beginning of the settings of the ext-proc filter, to which others are added.
const FILTER: &str = "              message_timeout: 10s\n";
/// The router's entry, before which filters are added.
const ROUTER: &str = "          - name: envoy.filters.http.router\n";
/// The beginning of a model servers' cluster.
const MODELS: &str = "  - name: model-servers\n";
/// The connection manager's time-out of uploads, beside which settings are added.
const MANAGER: &str = "          request_timeout: 0s\n";
const ROUTE: &str = "                route: {cluster: model-servers, timeout: 0s}\n";

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "no ext-proc filter",
        file: HEADER,
        changes: &[Cut("          - name: envoy.filters.http.ext_proc\n", ROUTER)],
        faults: &[("envoy-filter", "envoy.filters.http.ext_proc")],
    },
    Row {
        name: "filter switched off by a route",
        file: HEADER,
        changes: &[Set(
            ROUTE,
            "                route: {cluster: model-servers, timeout: 0s}\n                typed_per_filter_config:\n                  \
             envoy.filters.http.ext_proc: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, disabled: true}\n",
        )],
        faults: &[("envoy-filter-disabled", "typed_per_filter_config")],
    },
    Row {
        name: "body mode changed by a route",
        file: HELD,
        changes: &[Set(
            ROUTE,
            "                route: {cluster: model-servers, timeout: 0s}\n                typed_per_filter_config:\n                  \
             envoy.filters.http.ext_proc: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute, \
             overrides: {processing_mode: {response_header_mode: SEND}}}\n",
        )],
        faults: &[("envoy-request-body", "request_body_mode")],
    },
    Row {
        name: "rate limit behind the filter",
        file: HEADER,
        changes: &[Set(
            ROUTER,
            "          - name: limit\n            typed_config: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit, stat_prefix: a}\n          \
             - name: envoy.filters.http.router\n",
        )],
        faults: &[("envoy-filter-order", "move limit before envoy.filters.http.ext_proc")],
    },
    Row {
        name: "authorization behind the filter",
        file: HEADER,
        changes: &[Set(
            ROUTER,
            "          - name: rules\n            typed_config: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC}\n          \
             - name: envoy.filters.http.router\n",
        )],
        faults: &[("envoy-filter-order", "move rules")],
    },
    Row {
        name: "compressor behind the filter",
        file: HEADER,
        changes: &[Set(
            ROUTER,
            "          - name: zip\n            typed_config:\n              \"@type\": type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor\n              \
             compressor_library: {name: gzip, typed_config: {\"@type\": type.googleapis.com/envoy.extensions.compression.gzip.compressor.v3.Gzip}}\n          \
             - name: envoy.filters.http.router\n",
        )],
        faults: &[("envoy-compressor-order", "move zip")],
    },
    Row {
        name: "a second filter in full duplex",
        file: HEADER,
        changes: &[Set(
            ROUTER,
            "          - name: other\n            typed_config:\n              \"@type\": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor\n              \
             grpc_service: {envoy_grpc: {cluster_name: model-servers}}\n              \
             processing_mode: {request_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND}\n          \
             - name: envoy.filters.http.router\n",
        )],
        faults: &[("envoy-two-duplex-filters", "BUFFERED")],
    },
    Row {
        name: "no request headers",
        file: HELD,
        changes: &[Set("request_header_mode: SEND", "request_header_mode: SKIP")],
        faults: &[("envoy-request-headers", "request_header_mode: SEND")],
    },
    Row {
        name: "no request bodies",
        file: HEADER,
        changes: &[Set("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: NONE")],
        faults: &[("envoy-request-body", "FULL_DUPLEX_STREAMED")],
    },
    Row {
        name: "streamed request bodies",
        file: HEADER,
        changes: &[Set("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: STREAMED")],
        faults: &[("envoy-request-body", "BUFFERED")],
    },
    Row {
        name: "partly buffered request bodies",
        file: HELD,
        changes: &[Set("request_body_mode: BUFFERED", "request_body_mode: BUFFERED_PARTIAL")],
        faults: &[("envoy-request-body", "BUFFERED")],
    },
    Row {
        name: "buffered bodies in a bootstrap for full duplex",
        file: HEADER,
        changes: &[Set("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: BUFFERED")],
        faults: &[("envoy-body-limit", "request_body_buffer_limit"), ("envoy-buffered-upgrade", "upgrade_configs")],
    },
    Row {
        name: "no response headers",
        file: HELD,
        changes: &[Set("response_header_mode: SEND", "response_header_mode: SKIP")],
        faults: &[("envoy-response-headers", "response_header_mode: SEND")],
    },
    Row {
        name: "buffered responses",
        file: HELD,
        changes: &[Set("response_body_mode: NONE", "response_body_mode: BUFFERED")],
        faults: &[("envoy-response-body", "STREAMED")],
    },
    Row {
        name: "default message timeout",
        file: HELD,
        changes: &[Set(FILTER, "")],
        faults: &[("envoy-message-timeout", "message_timeout: 10s")],
    },
    Row {
        name: "requests pass without an address",
        file: HEADER,
        changes: &[Set("failure_mode_allow: false", "failure_mode_allow: true")],
        faults: &[("envoy-failure-mode", "failure_mode_allow: false")],
    },
    Row {
        name: "requests pass in full duplex",
        file: LIST,
        changes: &[Set("failure_mode_allow: false", "failure_mode_allow: true")],
        faults: &[("envoy-failure-mode", "fail-open.yaml")],
    },
    Row {
        name: "no immediate responses",
        file: HEADER,
        changes: &[Set(FILTER, "              disable_immediate_response: true\n")],
        faults: &[("envoy-immediate-response", "disable_immediate_response")],
    },
    Row {
        name: "no response attributes",
        file: HEADER,
        changes: &[Cut("              response_attributes:", "              processing_mode:")],
        faults: &[("envoy-attributes", "upstream.request_attempt_count")],
    },
    Row {
        name: "metadata of the picker is dropped",
        file: LIST,
        changes: &[Cut("                receiving_namespaces:", ROUTER)],
        faults: &[("envoy-received-metadata", "receiving_namespaces")],
    },
    Row {
        name: "metadata for the picker is dropped",
        file: LIST,
        changes: &[Set("{untyped: [envoy.lb, envoy.lb.subset_hint]}", "{untyped: [envoy.lb.subset_hint]}")],
        faults: &[("envoy-forwarded-metadata", "forwarding_namespaces")],
    },
    Row {
        name: "no header may change",
        file: HEADER,
        changes: &[Set(FILTER, "              mutation_rules: {disallow_all: true}\n")],
        faults: &[("envoy-mutation-rules", "mutation_rules.disallow_all")],
    },
    Row {
        name: "gateway headers may not change",
        file: HEADER,
        changes: &[Set(FILTER, "              mutation_rules: {disallow_expression: {regex: \"x-gateway-.*\"}}\n")],
        faults: &[("envoy-mutation-rules", "mutation_rules.disallow_expression")],
    },
    Row {
        name: "few headers are forwarded",
        file: HEADER,
        changes: &[Set(
            FILTER,
            "              forward_rules: {allowed_headers: {patterns: [{prefix: \"x-\"}, {exact: \":path\"}]}}\n",
        )],
        faults: &[("envoy-forward-rules", "allowed_headers")],
    },
    Row {
        name: "the request id is hidden",
        file: HEADER,
        changes: &[Set(
            FILTER,
            "              forward_rules: {disallowed_headers: {patterns: [{exact: X-Request-Id}]}}\n",
        )],
        faults: &[("envoy-forward-rules", "disallowed_headers")],
    },
    Row {
        name: "the virtual host removes the destination",
        file: HEADER,
        changes: &[Set(
            "              domains: [\"*\"]\n",
            "              domains: [\"*\"]\n              request_headers_to_remove: [x-gateway-destination-endpoint]\n",
        )],
        faults: &[("envoy-header-removal", "request_headers_to_remove")],
    },
    Row {
        name: "a filter removes the request id",
        file: HEADER,
        changes: &[Set(
            ROUTER,
            "          - name: clean\n            typed_config: {\"@type\": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation, \
             mutations: {request_mutations: [{remove: x-request-id}]}}\n          - name: envoy.filters.http.router\n",
        )],
        faults: &[("envoy-header-removal", "request_mutations")],
    },
    Row {
        name: "clients name a server",
        file: HEADER,
        changes: &[Cut("          early_header_mutation_extensions:", "          http_filters:")],
        faults: &[("envoy-client-destination", "early_header_mutation_extensions")],
    },
    Row {
        name: "clients name a server of a list, and the filter may fail",
        file: LIST,
        changes: &[Set(
            "            override_host_sources:\n",
            "            override_host_sources:\n            - header: x-other\n",
        )],
        faults: &[("envoy-client-destination", "x-other")],
    },
    Row {
        name: "small buffers",
        file: HEADER,
        changes: &[Set("per_connection_buffer_limit_bytes: 1048576", "per_connection_buffer_limit_bytes: 32768")],
        faults: &[("envoy-cluster-buffer", "1048576"), ("envoy-listener-buffer", "1048576")],
    },
    Row {
        name: "short uploads",
        file: HEADER,
        changes: &[Set("request_timeout: 0s", "request_timeout: 10s")],
        faults: &[("envoy-request-timeout", "request_timeout: 0s")],
    },
    Row {
        name: "paths as they are",
        file: HEADER,
        changes: &[Cut("          normalize_path: true", "          merge_slashes")],
        faults: &[("envoy-paths", "normalize_path: true")],
    },
    Row {
        name: "default time-out of routes",
        file: HEADER,
        changes: &[Set("{cluster: model-servers, timeout: 0s}", "{cluster: model-servers}")],
        faults: &[("envoy-route-timeout", "timeout: 0s")],
    },
    Row {
        name: "silent streams are cut",
        file: HEADER,
        changes: &[Set("stream_idle_timeout: 900s", "stream_idle_timeout: 30s")],
        faults: &[("envoy-stream-idle-timeout", "stream_idle_timeout")],
    },
    Row {
        name: "long streams are cut",
        file: HEADER,
        changes: &[Set(
            MANAGER,
            "          request_timeout: 0s\n          common_http_protocol_options: {max_stream_duration: 60s}\n",
        )],
        faults: &[("envoy-stream-duration", "max_stream_duration")],
    },
    Row {
        name: "generation is repeated",
        file: LIST,
        changes: &[Set(
            "retry_on: connect-failure,refused-stream,reset-before-request",
            "retry_on: \"connect-failure,5xx,reset\"",
        )],
        faults: &[("envoy-retry-conditions", "reset-before-request")],
    },
    Row {
        name: "retries at the same address",
        file: HEADER,
        changes: &[Set(
            "{cluster: model-servers, timeout: 0s}",
            "{cluster: model-servers, timeout: 0s, retry_policy: {retry_on: connect-failure}}",
        )],
        faults: &[("envoy-retry-same-server", "override_host")],
    },
    Row {
        name: "no retries along a list",
        file: LIST,
        changes: &[Cut("                  retry_policy:", "\n  clusters:")],
        faults: &[("envoy-no-retry", "num_retries: 2")],
    },
    Row {
        name: "time-out of a try",
        file: LIST,
        changes: &[Set("num_retries: 2\n", "num_retries: 2\n                    per_try_timeout: 30s\n")],
        faults: &[("envoy-try-timeout", "per_try_timeout")],
    },
    Row {
        name: "bodies too large for a retry",
        file: LIST,
        changes: &[Cut("              request_body_buffer_limit: 20971520\n", "              routes:")],
        faults: &[("envoy-retry-buffer", "request_body_buffer_limit")],
    },
    Row {
        name: "round robin",
        file: LIST,
        changes: &[Cut("    load_balancing_policy:", "    load_assignment:\n      cluster_name: model-servers")],
        faults: &[("envoy-destination", "override_host")],
    },
    Row {
        name: "another header",
        file: HEADER,
        changes: &[Set("http_header_name: x-gateway-destination-endpoint", "http_header_name: x-destination")],
        faults: &[("envoy-client-destination", "x-destination"), ("envoy-destination", "http_header_name")],
    },
    Row {
        name: "another metadata key",
        file: LIST,
        changes: &[Set(
            "- metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}",
            "- metadata: {key: envoy.lb, path: [{key: destination}]}",
        )],
        faults: &[("envoy-destination", "x-gateway-destination-endpoint")],
    },
    Row {
        name: "default circuit breakers",
        file: HEADER,
        changes: &[Set("max_connections: 40000, max_pending_requests: 40000, max_requests: 40000, ", "")],
        faults: &[("envoy-circuit-breakers", "40000")],
    },
    Row {
        name: "three retries at once",
        file: LIST,
        changes: &[Set(", max_retries: 1024", "")],
        faults: &[("envoy-retry-breaker", "max_retries: 1024")],
    },
    Row {
        name: "idle connections of a minute",
        file: HEADER,
        changes: &[Set("idle_timeout: 4s", "idle_timeout: 60s")],
        faults: &[("envoy-keep-alive", "idle_timeout: 4s")],
    },
    Row {
        name: "idle connections of an hour",
        file: LIST,
        changes: &[Set("        common_http_protocol_options: {idle_timeout: 4s}\n", "")],
        faults: &[("envoy-keep-alive", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")],
    },
    Row {
        name: "Envoy ejects servers",
        file: LIST,
        changes: &[Set(MODELS, "  - name: model-servers\n    outlier_detection: {consecutive_5xx: 3}\n")],
        faults: &[("envoy-outlier-detection", "outlier_detection")],
    },
    Row {
        name: "long time to connect",
        file: HEADER,
        changes: &[Set("connect_timeout: 2s", "connect_timeout: 1000s")],
        faults: &[("envoy-connect-timeout", "connect_timeout: 2s")],
    },
    Row {
        name: "Envoy does not report the server",
        file: LIST,
        changes: &[Cut("            selected_host_key:", "            fallback_policy:")],
        faults: &[("envoy-served-endpoint", "selected_host_key")],
    },
    Row {
        name: "HTTP/1.1 to the picker",
        file: HEADER,
        changes: &[
            Cut("          http2_protocol_options:\n", "    # TLS to the picker"),
            Set(
                "          # Beyond 1,024 streams Envoy opens the next connection.\n",
                "          http_protocol_options: {}\n",
            ),
            Cut("    health_checks:\n", "    load_assignment:"),
            Cut("            health_check_config:", "\n"),
        ],
        faults: &[
            ("envoy-picker-health-checks", "grpc_health_check"),
            ("envoy-picker-http2", "http2_protocol_options"),
        ],
    },
    Row {
        name: "default limit of frames",
        file: HEADER,
        changes: &[Set("            max_outbound_frames: 1000000\n", "")],
        faults: &[("envoy-picker-frames", "max_outbound_frames: 1000000")],
    },
    Row {
        name: "small windows",
        file: HEADER,
        changes: &[Set(
            "            max_outbound_frames: 1000000\n",
            "            max_outbound_frames: 1000000\n            initial_stream_window_size: 65536\n",
        )],
        faults: &[("envoy-picker-windows", "initial_stream_window_size")],
    },
    Row {
        name: "TLS to a picker without TLS",
        file: HEADER,
        changes: &[
            Set(
                "    health_checks:\n",
                "    transport_socket: {name: tls, typed_config: {\"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext}}\n    health_checks:\n",
            ),
            Cut("    health_checks:\n", "    load_assignment:"),
        ],
        faults: &[
            ("envoy-picker-health-checks", "interval: 1s"),
            ("envoy-picker-identity", "validation_context"),
            ("envoy-picker-sni", "sni: NAME"),
            ("envoy-picker-tls", "--secure-serving=true"),
        ],
    },
    Row {
        name: "no health checks of the picker",
        file: HEADER,
        changes: &[Cut("    health_checks:\n", "    load_assignment:")],
        faults: &[("envoy-picker-health-checks", "health_checks")],
    },
    Row {
        name: "rare health checks without traffic",
        file: HEADER,
        changes: &[Set("      no_traffic_interval: 1s\n", "")],
        faults: &[("envoy-picker-health-checks", "no_traffic_interval: 1s")],
    },
    Row {
        name: "health of an unknown service",
        file: HEADER,
        changes: &[Set("{service_name: envoy.service.ext_proc.v3.ExternalProcessor}", "{service_name: picker}")],
        faults: &[("envoy-picker-health-service", "ExternalProcessor"), ("envoy-picker-healthy", "--grpc-health-port")],
    },
    Row {
        name: "health at a closed port",
        file: HEADER,
        changes: &[Set("health_check_config: {port_value: ", "health_check_config: {port_value: 1} # ")],
        faults: &[("envoy-picker-healthy", "--grpc-health-port")],
    },
];
