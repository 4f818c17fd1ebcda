//! The request's headers: found once, read where they stand.

use super::tenant::Tenant;
use crate::scheduling::plugin::HeaderSource;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

/// `x-gateway-destination-endpoint`, the header that gateways route by.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The score of each endpoint, in dynamic metadata.
pub const SCORES: &str = "x-gateway-destination-endpoint-scores";
/// The endpoint that served, as gateways report it.
pub const DESTINATION_SERVED: &str = "x-gateway-destination-endpoint-served";

/// The prefill server, for llm-d's sidecar in front of the decode server.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// The servers that encode images and sounds, for the same.
pub const ENCODERS: &str = "x-encoder-hosts-ports";

/// Headers that only the picker or the gateway may set, or that are meant for the picker alone: they never reach a server.
const OURS: &[&str] = &[
    DESTINATION,
    DESTINATION_SERVED,
    "x-gateway-destination-endpoint-subset",
    SCORES,
    "x-gateway-destination-endpoint-fallback",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "x-gateway-model-name-rewrite",
    "x-llm-d-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-llm-d-model-name-rewrite",
    PREFILLER,
    ENCODERS,
    super::hints::SOURCE_HEADER,
    "x-data-parallel-host-port",
    "test-epp-endpoint-selection",
    "x-conformance-test-served-endpoint",
];

impl HeaderSource for Head {
    fn header(&self, name: &str) -> Option<&str> {
        self.get(name)
    }

    fn user(&self, name: &str) -> Option<&str> {
        self.tenant.or(|| self.get(name))
    }
}

/// The headers of one request.
#[derive(Debug, Default)]
pub struct Head {
    headers: Vec<HeaderValue>,
    path: Option<u16>,
    /// In place of `:path`, where the gateway does not send it.
    assumed_path: &'static str,
    method: Option<u16>,
    authority: Option<u16>,
    content_type: Option<u16>,
    content_encoding: Option<u16>,
    request_id: Option<u16>,
    traceparent: Option<u16>,
    objective: Option<u16>,
    fairness_id: Option<u16>,
    model_rewrite: Option<u16>,
    upgrade: bool,
    content_length: Option<u64>,
    bytes: usize,
    spoofed: SmallVec<[&'static str; 4]>,
    tenant: Tenant,
}

impl Head {
    /// Goes through the headers once and remembers where those stand that matter.
    #[must_use]
    pub fn read(map: Option<HeaderMap>) -> Self {
        let headers = map.map(|m| m.headers).unwrap_or_default();
        let mut head = Self::default();
        for (at, header) in (0u16..).zip(&headers) {
            head.bytes += header.key.len() + value(header).len();
            head.note(header, at);
        }
        head.headers = headers;
        head.headers.shrink_to_fit();
        head
    }

    fn note(&mut self, header: &HeaderValue, at: u16) {
        let slot = match header.key.as_str() {
            ":path" => &mut self.path,
            ":method" => &mut self.method,
            ":authority" => &mut self.authority,
            "content-type" => &mut self.content_type,
            "content-encoding" => &mut self.content_encoding,
            "x-request-id" => &mut self.request_id,
            "traceparent" => &mut self.traceparent,
            "content-length" => {
                self.content_length = std::str::from_utf8(value(header)).ok().and_then(|v| v.parse().ok());
                return;
            }
            "upgrade" | ":protocol" => {
                self.upgrade = true;
                return;
            }
            name => {
                if let Some(ours) = OURS.iter().find(|o| **o == name)
                    && !self.spoofed.contains(ours)
                {
                    self.spoofed.push(ours);
                }
                match name {
                    "x-gateway-inference-objective" | "x-llm-d-inference-objective" => &mut self.objective,
                    "x-gateway-inference-fairness-id" | "x-llm-d-inference-fairness-id" => &mut self.fairness_id,
                    "x-gateway-model-name-rewrite" | "x-llm-d-model-name-rewrite" => &mut self.model_rewrite,
                    _ => return,
                }
            }
        };
        slot.get_or_insert(at);
    }

    fn at(&self, slot: Option<u16>) -> Option<&str> {
        std::str::from_utf8(value(self.headers.get(usize::from(slot?))?)).ok()
    }

    /// The first value of any header (lower-case name), when it is UTF-8.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|h| h.key == name).and_then(|h| std::str::from_utf8(value(h)).ok())
    }

    /// Whether there is a header of this name, whatever its value.
    pub fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|h| h.key == name)
    }

    /// All values of a header.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.headers.iter().filter(move |h| h.key == name).filter_map(|h| std::str::from_utf8(value(h)).ok())
    }

    /// `:path`, with its query; else the assumed one.
    #[must_use]
    pub fn path(&self) -> &str {
        self.at(self.path).unwrap_or(self.assumed_path)
    }

    /// Takes the request for one of this path, where the gateway does not send `:path`.
    pub fn assume_path(&mut self, path: &'static str) {
        self.assumed_path = path;
    }

    /// Whether the gateway has sent no `:path`.
    #[must_use]
    pub fn lacks_path(&self) -> bool {
        self.path.is_none()
    }

    /// `:method`.
    #[must_use]
    pub fn method(&self) -> &str {
        self.at(self.method).unwrap_or_default()
    }

    /// `:authority`.
    #[must_use]
    pub fn authority(&self) -> &str {
        self.at(self.authority).unwrap_or_default()
    }

    /// `content-type`.
    #[must_use]
    pub fn content_type(&self) -> Option<&str> {
        self.at(self.content_type)
    }

    /// Whether the body is compressed, so that it can't be read.
    #[must_use]
    pub fn encoded(&self) -> bool {
        self.at(self.content_encoding).is_some_and(|e| !e.is_empty() && !e.eq_ignore_ascii_case("identity"))
    }

    /// `content-length`, when it is a number.
    #[must_use]
    pub fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    /// `x-request-id`, cut to 128 printable ASCII characters: it goes into logs and records.
    #[must_use]
    pub fn request_id(&self) -> String {
        self.at(self.request_id).unwrap_or_default().chars().filter(char::is_ascii_graphic).take(128).collect()
    }

    /// The W3C trace context.
    #[must_use]
    pub fn traceparent(&self) -> Option<&str> {
        self.at(self.traceparent)
    }

    /// Whose request it is.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// It is the request of `tenant`.
    pub fn belongs_to(&mut self, tenant: Tenant) {
        self.tenant = tenant;
    }

    /// Whose request it is, as a filter before us says.
    #[must_use]
    pub fn fairness_id(&self) -> Option<&str> {
        self.at(self.fairness_id).filter(|id| !id.is_empty())
    }

    /// The first of these headers (lower-case names) that has a value.
    #[must_use]
    pub fn first_of(&self, names: &[Box<str>]) -> Option<&str> {
        names.iter().filter_map(|name| self.get(name)).map(str::trim).find(|value| !value.is_empty())
    }

    /// The objective that the client names.
    #[must_use]
    pub fn objective(&self) -> Option<&str> {
        self.at(self.objective)
    }

    /// The model that an earlier filter (or the client) wants the server to be asked for.
    #[must_use]
    pub fn model_rewrite(&self) -> Option<&str> {
        self.at(self.model_rewrite).filter(|m| !m.is_empty())
    }

    /// A websocket or CONNECT: no body, and no end of it, comes before the server has answered.
    #[must_use]
    pub fn is_upgrade(&self) -> bool {
        self.upgrade || self.method() == "CONNECT"
    }

    /// Names and values together, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Headers in the request that are ours to set: to be removed.
    #[must_use]
    pub fn spoofed(&self) -> &[&'static str] {
        &self.spoofed
    }
}

/// A header's bytes. Envoy fills `raw_value`; `value` is for gateways that don't.
#[must_use]
pub fn value(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}
