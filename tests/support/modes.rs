//! Every body mode of Envoy, each on its own listener of one Envoy.

use std::fmt::Write;
use std::net::SocketAddr;

/// How Envoy passes bodies to the picker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    FullDuplex,
    Streamed,
    /// STREAMED, where the request's body is sent before the response to its headers.
    StreamedNoWait,
    /// Whole requests, streamed responses.
    Buffered,
    /// Whole requests and whole responses.
    BufferedBoth,
    /// As much as fits into Envoy's buffer, both ways.
    BufferedPartial,
    /// Headers only.
    None,
}

impl Mode {
    pub(crate) const ALL: [Mode; 7] = [
        Mode::FullDuplex,
        Mode::Streamed,
        Mode::StreamedNoWait,
        Mode::Buffered,
        Mode::BufferedBoth,
        Mode::BufferedPartial,
        Mode::None,
    ];

    /// The name of its listener.
    pub(crate) fn name(self) -> String {
        format!("{self:?}")
    }

    /// Largest body that works in both directions. Envoy answers 500 to a BUFFERED response over its buffer, and in
    /// BUFFERED_PARTIAL some requests just over it never end (seen in 1.40).
    pub(crate) fn largest_body(self) -> usize {
        match self {
            Mode::BufferedBoth | Mode::BufferedPartial => 512 << 10,
            _ => 16 << 20,
        }
    }

    /// Whether the picker receives the request's body before it has to choose an endpoint.
    pub(crate) fn shows_body(self) -> bool {
        !matches!(self, Mode::None | Mode::Streamed)
    }

    /// Request and response body mode, trailer mode, waiting.
    fn settings(self) -> (&'static str, &'static str, &'static str, bool) {
        match self {
            Mode::FullDuplex => ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED", "SEND", false),
            Mode::Streamed => ("STREAMED", "STREAMED", "SKIP", false),
            Mode::StreamedNoWait => ("STREAMED", "STREAMED", "SKIP", true),
            Mode::Buffered => ("BUFFERED", "STREAMED", "SKIP", false),
            Mode::BufferedBoth => ("BUFFERED", "BUFFERED", "SKIP", false),
            Mode::BufferedPartial => ("BUFFERED_PARTIAL", "BUFFERED_PARTIAL", "SKIP", false),
            Mode::None => ("NONE", "NONE", "SKIP", false),
        }
    }
}

/// A bootstrap with a listener for each mode and one picker. Upstream speaks the protocol of the client. Client headers
/// are not cleaned here, so that the picker itself is tested against spoofed ones.
pub(crate) fn bootstrap(modes: &[Mode], picker: SocketAddr) -> String {
    let listeners = modes.iter().fold(String::new(), |mut text, mode| {
        let (request, response, trailers, no_wait) = mode.settings();
        let _ = write!(
            text,
            r#"
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          http_protocol_options: {{enable_trailers: true}}
          upgrade_configs: [{{upgrade_type: websocket}}]
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {{envoy_grpc: {{cluster_name: picker}}}}
              message_timeout: 30s
              send_body_without_waiting_for_header_response: {no_wait}
              processing_mode: {{request_header_mode: SEND, response_header_mode: SEND, request_body_mode: {request},
                response_body_mode: {response}, request_trailer_mode: {trailers}, response_trailer_mode: {trailers}}}
              metadata_options:
                forwarding_namespaces: {{untyped: [envoy.lb, envoy.lb.subset_hint]}}
                receiving_namespaces: {{untyped: [envoy.lb]}}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              request_body_buffer_limit: 33554432
              routes: [{{match: {{prefix: /}}, route: {{cluster: model-servers, timeout: 0s}}}}]
"#,
            name = mode.name(),
        );
        text
    });
    format!(
        r#"
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:{listeners}
  clusters:
  - name: model-servers
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    original_dst_lb_config: {{use_http_header: true, http_header_name: x-gateway-destination-endpoint}}
    connect_timeout: 2s
    circuit_breakers: &breakers
      thresholds: [{{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000, max_retries: 1024}}]
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        use_downstream_protocol_config:
          http_protocol_options: {{enable_trailers: true}}
          http2_protocol_options: {{}}
  - name: picker
    type: STATIC
    connect_timeout: 2s
    circuit_breakers: *breakers
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{max_outbound_frames: 1000000, max_outbound_control_frames: 100000}}}}
    load_assignment:
      cluster_name: picker
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: {ip}, port_value: {port}}}}}}}
"#,
        ip = picker.ip(),
        port = picker.port()
    )
}
