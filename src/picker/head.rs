//! The request's headers: found once, read where they stand.

use super::hints::{RANK_HEADER, SOURCE_HEADER};
use super::tenant::Tenant;
use attache_pool::health::ClientSlot;
use attache_scheduling::choice::DEFAULT_STRATEGY_HEADER;
use attache_scheduling::plugin::HeaderSource;
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

/// 32 bytes that a header counts as beside its name and value, as HTTP/2 counts them (RFC 9113, 6.5.2).
const FIELD_BYTES: usize = 32;

/// Whose headers of a name never reach a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reserved {
    /// Every client's: only the picker or the gateway may set it, or it is meant for the picker alone.
    Always,
    /// Those of clients that are not trusted (`exchange.trustClientHeaders`): it steers a server, a sidecar or a router
    /// in front of a server, past the picker's decision or before other requests.
    Untrusted,
}

/// Headers that don't reach servers when a client sends them, sorted. Those by which a client names its own session are
/// not here: servers only pass them on.
const RESERVED: &[(&str, Reserved)] = &[
    // Makes vLLM tell its load to the client.
    ("endpoint-load-metrics-format", Reserved::Untrusted),
    // AIBrix.
    (DEFAULT_STRATEGY_HEADER, Reserved::Untrusted),
    ("target-pod", Reserved::Untrusted),
    ("test-epp-endpoint-selection", Reserved::Always),
    ("x-conformance-test-served-endpoint", Reserved::Always),
    ("x-data-parallel-host-port", Reserved::Always),
    // vLLM, SGLang and Dynamo.
    (RANK_HEADER, Reserved::Untrusted),
    // Dynamo.
    ("x-dp-rank", Reserved::Untrusted),
    ("x-dynamo-routing-mode", Reserved::Untrusted),
    (ENCODERS, Reserved::Always),
    (DESTINATION, Reserved::Always),
    ("x-gateway-destination-endpoint-fallback", Reserved::Always),
    (SCORES, Reserved::Always),
    (DESTINATION_SERVED, Reserved::Always),
    ("x-gateway-destination-endpoint-subset", Reserved::Always),
    ("x-gateway-inference-fairness-id", Reserved::Always),
    ("x-gateway-inference-objective", Reserved::Always),
    ("x-gateway-model-name-rewrite", Reserved::Always),
    (SOURCE_HEADER, Reserved::Always),
    ("x-llm-d-inference-fairness-id", Reserved::Always),
    ("x-llm-d-inference-objective", Reserved::Always),
    ("x-llm-d-model-name-rewrite", Reserved::Always),
    // Dynamo.
    ("x-prefill-dp-rank", Reserved::Untrusted),
    ("x-prefill-instance-id", Reserved::Untrusted),
    (PREFILLER, Reserved::Always),
    ("x-routing-strategy", Reserved::Untrusted),
    // SGLang's gateway.
    ("x-smg-target-worker", Reserved::Untrusted),
    // vLLM's scheduler serves it before others.
    ("x-vllm-priority", Reserved::Untrusted),
    ("x-worker-instance-id", Reserved::Untrusted),
];

impl HeaderSource for Head {
    fn header(&self, name: &str) -> Option<&str> {
        self.get(name)
    }

    fn user(&self, name: &str) -> Option<&str> {
        self.tenant.or(|| self.get(name))
    }
}

/// One header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Its name, lower case.
    pub name: String,
    /// Its value, of any bytes.
    pub value: Vec<u8>,
}

/// The headers of one request.
#[derive(Debug, Default)]
pub struct Head {
    headers: Vec<Header>,
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
    credential: Option<u16>,
    upgrade: bool,
    content_length: Option<u64>,
    bytes: usize,
    reserved: SmallVec<[(&'static str, Reserved); 4]>,
    tenant: Tenant,
    client: ClientSlot,
}

impl Head {
    /// Goes through the headers once and remembers where those stand that matter.
    #[must_use]
    pub fn read(mut headers: Vec<Header>) -> Self {
        headers.truncate(usize::from(u16::MAX));
        let mut head = Self::default();
        for (at, header) in (0u16..).zip(&headers) {
            head.bytes += header.name.len() + header.value.len() + FIELD_BYTES;
            head.note(header, at);
        }
        head.headers = headers;
        head.headers.shrink_to_fit();
        head
    }

    fn note(&mut self, header: &Header, at: u16) {
        let slot = match header.name.as_str() {
            ":path" => &mut self.path,
            ":method" => &mut self.method,
            ":authority" => &mut self.authority,
            "content-type" => &mut self.content_type,
            "content-encoding" => &mut self.content_encoding,
            "x-request-id" => &mut self.request_id,
            "traceparent" => &mut self.traceparent,
            "authorization" | "x-api-key" | "api-key" => &mut self.credential,
            "content-length" => {
                self.content_length = std::str::from_utf8(&header.value).ok().and_then(|v| v.parse().ok());
                return;
            }
            "upgrade" | ":protocol" => {
                self.upgrade = true;
                return;
            }
            name => {
                if may_be_reserved(name)
                    && let Ok(found) = RESERVED.binary_search_by(|(reserved, _)| (*reserved).cmp(name))
                    && let Some(reserved) = RESERVED.get(found)
                    && !self.reserved.contains(reserved)
                {
                    self.reserved.push(*reserved);
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
        std::str::from_utf8(&self.headers.get(usize::from(slot?))?.value).ok()
    }

    /// The first value of any header (lower-case name), when it is UTF-8.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|h| h.name == name).and_then(|h| std::str::from_utf8(&h.value).ok())
    }

    /// Whether there is a header of this name, whatever its value.
    pub fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|h| h.name == name)
    }

    /// All values of a header.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.headers.iter().filter(move |h| h.name == name).filter_map(|h| std::str::from_utf8(&h.value).ok())
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

    /// The slot of the client, in which the health of endpoints counts its errors.
    #[must_use]
    pub fn client(&self) -> ClientSlot {
        self.client
    }

    /// Identifies the client: by the tenant where `exchange.tenant` is configured, else by the `address` that Envoy
    /// reports as the attribute `source.address`, else by its credential. Clients without any of them are one client.
    pub fn identify_client(&mut self, address: Option<&str>) {
        let ip = address.map(|address| address.rsplit_once(':').map_or(address, |(ip, _)| ip));
        let credential = || Some(self.headers.get(usize::from(self.credential?))?.value.as_slice());
        let identity = match &self.tenant {
            Tenant::Unasked => ip.map(str::as_bytes).or_else(credential),
            tenant => tenant.name().map(str::as_bytes),
        };
        self.client = identity.map(ClientSlot::of).unwrap_or_default();
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

    /// Whether the request has [`DEFAULT_STRATEGY_HEADER`], which was seen when its headers were read.
    #[must_use]
    pub fn names_strategy(&self) -> bool {
        self.reserved.iter().any(|(name, _)| *name == DEFAULT_STRATEGY_HEADER)
    }

    /// Headers of the request that must not reach a server, of a client that is `trusted` or not.
    pub fn reserved(&self, trusted: bool) -> impl Iterator<Item = &'static str> {
        self.reserved.iter().filter(move |(_, who)| !trusted || *who == Reserved::Always).map(|(name, _)| *name)
    }
}

/// Whether a reserved header has a name of this length and first letter: most headers end here, before any comparison
/// of names.
fn may_be_reserved(name: &str) -> bool {
    const LENGTHS: u64 = {
        let (mut lengths, mut left) = (0, RESERVED);
        while let [(name, _), rest @ ..] = left {
            lengths |= 1 << name.len();
            left = rest;
        }
        lengths
    };
    matches!(name.as_bytes(), [b'e' | b'r' | b't' | b'x', ..])
        && u32::try_from(name.len()).ok().and_then(|length| LENGTHS.checked_shr(length)).is_some_and(|l| l & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Head {
        let header =
            |(name, value): &(&str, &str)| Header { name: (*name).to_owned(), value: value.as_bytes().to_vec() };
        Head::read(pairs.iter().map(header).collect())
    }

    #[test]
    fn reserved_headers_are_sorted_and_found() {
        assert!(RESERVED.is_sorted_by(|a, b| a.0 < b.0), "a binary search needs it");
        for (name, who) in RESERVED {
            let head = read(&[(name, "a"), ("x-session-id", "mine"), (name, "b")]);
            assert_eq!(head.reserved(false).collect::<Vec<_>>(), [*name]);
            assert_eq!(head.reserved(true).count(), usize::from(*who == Reserved::Always), "{name}");
            assert_eq!(head.names_strategy(), *name == "routing-strategy", "{name}");
        }
    }

    #[test]
    fn clients_are_told_apart_by_tenant_then_address_then_credential() {
        let client = |tenant: Tenant, address: Option<&str>, pairs: &[(&str, &str)]| {
            let mut head = read(pairs);
            head.belongs_to(tenant);
            head.identify_client(address);
            head.client()
        };
        let (one, two) = ([("authorization", "Bearer 1")], [("x-api-key", "2")]);
        let named = |name: &str| Tenant::Named(name.into());
        assert_eq!(client(named("a"), Some("10.0.0.1:1"), &one), client(named("a"), Some("10.0.0.2:1"), &two));
        assert_ne!(client(named("a"), None, &one), client(named("b"), None, &one));
        assert_eq!(client(Tenant::Nobody, Some("10.0.0.1:1"), &one), ClientSlot::default(), "no tenant is one client");
        let asked = |address, pairs| client(Tenant::Unasked, address, pairs);
        assert_eq!(asked(Some("10.0.0.1:1"), &one), asked(Some("10.0.0.1:65535"), &two), "the port is not the client");
        assert_ne!(asked(Some("10.0.0.1:1"), &one), asked(Some("10.0.0.2:1"), &one));
        assert_ne!(asked(None, &one), asked(None, &two));
        assert_eq!(asked(None, &[]), ClientSlot::default());
    }
}
