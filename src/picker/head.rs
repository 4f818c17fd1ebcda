//! The request headers. They are scanned once; values are borrowed, not copied.

use super::hints::{RANK_HEADER, SOURCE_HEADER};
use super::identity::may_name_session;
use super::reservations::RESERVATION_HEADER;
use super::tenant::Tenant;
use attache_pool::health::ClientSlot;
use attache_scheduling::choice::DEFAULT_STRATEGY_HEADER;
use attache_scheduling::plugin::HeaderSource;
pub use attache_scheduling::router::DESTINATION;
use smallvec::SmallVec;

/// Dynamic metadata key of the endpoints' scores.
pub const SCORES: &str = "x-gateway-destination-endpoint-scores";
/// Dynamic metadata key of the endpoint that served the request, as gateways report it.
pub const DESTINATION_SERVED: &str = "x-gateway-destination-endpoint-served";

/// Header with the flow of a request, which an earlier filter sets.
pub const FAIRNESS_ID: &str = "x-gateway-inference-fairness-id";

/// Header with the prefill worker, for llm-d's sidecar of the decode worker.
pub const PREFILLER: &str = "x-prefiller-host-port";
/// Header with the encode workers for images and audio, for the same sidecar.
pub const ENCODERS: &str = "x-encoder-hosts-ports";

/// 32 bytes: overhead of a header in addition to its name and value, as in HTTP/2 (RFC 9113, 6.5.2).
const FIELD_BYTES: usize = 32;
/// Longest request id that is kept, in characters.
const MAX_REQUEST_ID: usize = 128;

/// From which clients a header is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removal {
    /// From all clients: only Attaché or the gateway may set it, or only Attaché may read it.
    Always,
    /// From untrusted clients (`exchange.trustClientHeaders`): it lets a client bypass Attaché's decision, or overtake
    /// other requests, in a model server, a sidecar or another router.
    Untrusted,
}

/// Headers that are removed if a client sends them, sorted by name. Session headers are not among them, because model
/// servers do not act on them.
const RESERVED: &[(&str, Removal)] = &[
    // vLLM reports its load to the client.
    ("endpoint-load-metrics-format", Removal::Untrusted),
    // AIBrix. Its gateway connects to the address in `target-pod`.
    (DEFAULT_STRATEGY_HEADER, Removal::Untrusted),
    ("target-pod", Removal::Always),
    ("test-epp-endpoint-selection", Removal::Always),
    (RESERVATION_HEADER, Removal::Always),
    ("x-conformance-test-served-endpoint", Removal::Always),
    ("x-data-parallel-host-port", Removal::Always),
    // vLLM, SGLang and Dynamo.
    (RANK_HEADER, Removal::Untrusted),
    // Dynamo.
    ("x-dp-rank", Removal::Untrusted),
    ("x-dynamo-routing-mode", Removal::Untrusted),
    (ENCODERS, Removal::Always),
    (DESTINATION, Removal::Always),
    ("x-gateway-destination-endpoint-fallback", Removal::Always),
    (SCORES, Removal::Always),
    (DESTINATION_SERVED, Removal::Always),
    ("x-gateway-destination-endpoint-subset", Removal::Always),
    (FAIRNESS_ID, Removal::Always),
    ("x-gateway-inference-objective", Removal::Always),
    ("x-gateway-model-name-rewrite", Removal::Always),
    (SOURCE_HEADER, Removal::Always),
    ("x-llm-d-inference-fairness-id", Removal::Always),
    ("x-llm-d-inference-objective", Removal::Always),
    ("x-llm-d-model-name-rewrite", Removal::Always),
    // Dynamo.
    ("x-prefill-dp-rank", Removal::Untrusted),
    ("x-prefill-instance-id", Removal::Untrusted),
    (PREFILLER, Removal::Always),
    ("x-routing-strategy", Removal::Untrusted),
    // SGLang's gateway.
    ("x-smg-target-worker", Removal::Untrusted),
    // vLLM's scheduler prefers such requests.
    ("x-vllm-priority", Removal::Untrusted),
    ("x-worker-instance-id", Removal::Untrusted),
];

impl HeaderSource for Head {
    fn header(&self, name: &str) -> Option<&str> {
        self.get(name)
    }

    fn user(&self, name: &str) -> Option<&str> {
        self.tenant.or(|| self.get(name))
    }

    fn tenant(&self) -> Option<&str> {
        self.tenant.name()
    }
}

/// One header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Name, lower case.
    pub name: String,
    /// Value; may not be UTF-8.
    pub value: Vec<u8>,
}

/// The headers of one request.
#[derive(Debug, Default)]
pub struct Head {
    headers: Vec<Header>,
    path: Option<u16>,
    /// Used instead of `:path` if the gateway does not send it.
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
    names_session: bool,
    accepts_encoding: bool,
    accepts_grpc_encoding: bool,
    content_length: Option<u64>,
    bytes: usize,
    reserved: SmallVec<[(&'static str, Removal); 4]>,
    tenant: Tenant,
    client: ClientSlot,
}

impl Head {
    /// Scans the headers once and stores the positions of those that Attaché needs. Keeps at most 65,535 headers.
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
            "accept-encoding" => {
                self.accepts_encoding |= !is_identity(&header.value);
                return;
            }
            "grpc-accept-encoding" => {
                self.accepts_grpc_encoding |= !is_identity(&header.value);
                return;
            }
            "upgrade" | ":protocol" => {
                self.upgrade = true;
                return;
            }
            name => {
                self.names_session |= may_name_session(name);
                if may_be_reserved(name)
                    && let Ok(found) = RESERVED.binary_search_by(|(reserved, _)| (*reserved).cmp(name))
                    && let Some(reserved) = RESERVED.get(found)
                    && !self.reserved.contains(reserved)
                {
                    self.reserved.push(*reserved);
                }
                match name {
                    "x-gateway-inference-objective" | "x-llm-d-inference-objective" => &mut self.objective,
                    FAIRNESS_ID | "x-llm-d-inference-fairness-id" => &mut self.fairness_id,
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

    /// The first value of a header (lower-case name); `None` if it is not UTF-8.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|h| h.name == name).and_then(|h| std::str::from_utf8(&h.value).ok())
    }

    /// Whether the request has a header of this name, with any value.
    pub fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|h| h.name == name)
    }

    /// All values of a header.
    pub fn get_all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.headers.iter().filter(move |h| h.name == name).filter_map(|h| std::str::from_utf8(&h.value).ok())
    }

    /// `:path` with its query, or the assumed path.
    #[must_use]
    pub fn path(&self) -> &str {
        self.at(self.path).unwrap_or(self.assumed_path)
    }

    /// Sets the path of a request for which the gateway sent no `:path`.
    pub fn assume_path(&mut self, path: &'static str) {
        self.assumed_path = path;
    }

    /// Whether the gateway sent no `:path`.
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

    /// Whether `content-encoding` says that the body is compressed.
    #[must_use]
    pub fn encoded(&self) -> bool {
        self.at(self.content_encoding).is_some_and(|codings| !is_identity(codings.as_bytes()))
    }

    /// `content-length`; `None` if it is missing or not a number.
    #[must_use]
    pub fn content_length(&self) -> Option<u64> {
        self.content_length
    }

    /// `x-request-id`, cut to 128 printable ASCII characters: it goes into logs and records.
    #[must_use]
    pub fn request_id(&self) -> String {
        let id = self.at(self.request_id).unwrap_or_default();
        if id.len() <= MAX_REQUEST_ID && id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return id.to_owned();
        }
        id.chars().filter(char::is_ascii_graphic).take(MAX_REQUEST_ID).collect()
    }

    /// The W3C trace context.
    #[must_use]
    pub fn traceparent(&self) -> Option<&str> {
        self.at(self.traceparent)
    }

    /// The tenant of the request.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Sets the tenant of the request.
    pub fn belongs_to(&mut self, tenant: Tenant) {
        self.tenant = tenant;
    }

    /// The slot of the client, in which the health of endpoints counts its errors.
    #[must_use]
    pub fn client(&self) -> ClientSlot {
        self.client
    }

    /// Identifies the client: by its tenant if `exchange.tenant` is configured, otherwise by the `address` in Envoy's
    /// attribute `source.address`, otherwise by its credential. All clients without these count as one.
    pub fn identify_client(&mut self, address: Option<&str>) {
        let ip = address.map(|address| address.rsplit_once(':').map_or(address, |(ip, _)| ip));
        let credential = || Some(self.headers.get(usize::from(self.credential?))?.value.as_slice());
        let identity = match &self.tenant {
            Tenant::Unconfigured => ip.map(str::as_bytes).or_else(credential),
            tenant => tenant.name().map(str::as_bytes),
        };
        self.client = identity.map(ClientSlot::of).unwrap_or_default();
    }

    /// Whether the request has a header in which an agent names its session.
    #[must_use]
    pub fn names_session(&self) -> bool {
        self.names_session
    }

    /// The fairness id, which an earlier filter sets.
    #[must_use]
    pub fn fairness_id(&self) -> Option<&str> {
        self.at(self.fairness_id).filter(|id| !id.is_empty())
    }

    /// The first of these headers (lower-case names) that has a value.
    #[must_use]
    pub fn first_of(&self, names: &[Box<str>]) -> Option<&str> {
        names.iter().filter_map(|name| self.get(name)).map(str::trim).find(|value| !value.is_empty())
    }

    /// The name of the client's InferenceObjective.
    #[must_use]
    pub fn objective(&self) -> Option<&str> {
        self.at(self.objective)
    }

    /// The model name that an earlier filter, or a trusted client, sets for the model server.
    #[must_use]
    pub fn model_rewrite(&self) -> Option<&str> {
        self.at(self.model_rewrite).filter(|m| !m.is_empty())
    }

    /// Whether the request is a WebSocket or CONNECT, which sends no body before the response.
    #[must_use]
    pub fn is_upgrade(&self) -> bool {
        self.upgrade || self.method() == "CONNECT"
    }

    /// Number of headers, pseudo-headers included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.headers.len()
    }

    /// Size of all headers, bytes, as HTTP/2 counts it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the request has [`DEFAULT_STRATEGY_HEADER`].
    #[must_use]
    pub fn names_strategy(&self) -> bool {
        self.reserved.iter().any(|(name, _)| *name == DEFAULT_STRATEGY_HEADER)
    }

    /// Whether the request has [`RESERVATION_HEADER`].
    #[must_use]
    pub fn names_reservation(&self) -> bool {
        self.reserved.iter().any(|(name, _)| *name == RESERVATION_HEADER)
    }

    /// The headers by which the client lets the server compress the response.
    pub fn accepted_encodings(&self) -> impl Iterator<Item = &'static str> {
        let accepted =
            [("accept-encoding", self.accepts_encoding), ("grpc-accept-encoding", self.accepts_grpc_encoding)];
        accepted.into_iter().filter(|(_, accepts)| *accepts).map(|(name, _)| name)
    }

    /// Headers of the request to remove; `trusted`: the client is trusted.
    pub fn reserved(&self, trusted: bool) -> impl Iterator<Item = &'static str> {
        self.reserved.iter().filter(move |(_, who)| !trusted || *who == Removal::Always).map(|(name, _)| *name)
    }
}

/// Whether this header is removed from every request, whoever sent it.
pub(super) fn is_removed_from_all(name: &str) -> bool {
    RESERVED.iter().any(|(reserved, who)| *reserved == name && *who == Removal::Always)
}

/// Whether this list of content codings has nothing but `identity`: a body with it is not compressed.
#[must_use]
pub fn is_identity(codings: &[u8]) -> bool {
    codings.split(|byte| *byte == b',').all(|coding| {
        let coding = coding.trim_ascii();
        coding.is_empty() || coding.eq_ignore_ascii_case(b"identity")
    })
}

/// Whether a reserved header has a name of this length and first letter. Most headers fail this cheap check.
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
            assert_eq!(head.reserved(true).count(), usize::from(*who == Removal::Always), "{name}");
            assert_eq!(head.names_strategy(), *name == "routing-strategy", "{name}");
        }
    }

    #[test]
    fn request_ids_are_short_and_printable() {
        let whole = "x".repeat(MAX_REQUEST_ID);
        let long = format!("{whole}y");
        for (sent, kept) in
            [("5f1c-1", "5f1c-1"), (&whole, &whole), (&long, &whole), ("a b\tc\u{e9}d", "abcd"), ("", "")]
        {
            assert_eq!(read(&[("x-request-id", sent)]).request_id(), kept);
        }
    }

    #[test]
    fn encodings_are_accepted_unless_all_are_identity() {
        for (name, value, accepts) in [
            ("accept-encoding", "gzip, deflate, br, zstd", true),
            ("accept-encoding", "*", true),
            ("accept-encoding", "identity;q=0, gzip", true),
            ("grpc-accept-encoding", "identity,gzip", true),
            ("accept-encoding", "identity", false),
            ("grpc-accept-encoding", " Identity ,", false),
            ("accept-encoding", "", false),
            ("accept", "gzip", false),
        ] {
            let head = read(&[(name, value)]);
            assert!(head.accepted_encodings().eq(accepts.then_some(name)), "{name}: {value}");
            assert!(read(&[(name, "gzip"), (name, value)]).accepted_encodings().count() < 2);
        }
        assert_eq!(read(&[("accept-encoding", "identity"), ("accept-encoding", "br")]).accepted_encodings().count(), 1);
    }

    #[test]
    fn clients_are_identified_by_tenant_then_address_then_credential() {
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
        assert_eq!(
            client(Tenant::Missing, Some("10.0.0.1:1"), &one),
            ClientSlot::default(),
            "all clients without a tenant count as one"
        );
        let untenanted = |address, pairs| client(Tenant::Unconfigured, address, pairs);
        assert_eq!(
            untenanted(Some("10.0.0.1:1"), &one),
            untenanted(Some("10.0.0.1:65535"), &two),
            "the port is not the client"
        );
        assert_ne!(untenanted(Some("10.0.0.1:1"), &one), untenanted(Some("10.0.0.2:1"), &one));
        assert_ne!(untenanted(None, &one), untenanted(None, &two));
        assert_eq!(untenanted(None, &[]), ClientSlot::default());
    }
}
