//! Reads headers, dynamic metadata and attributes that gateways send: the subset hint, the served endpoint, the origin
//! of a response, tenants.

use attache_picker::head::{Header, is_identity};
use attache_picker::in_flight::{EarlierAttempt, Origin, ResponseHead};
use attache_pool::Endpoint;
use attache_scheduling::Subset;
use attache_scheduling::router::DESTINATION_NAMESPACE;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use std::collections::HashMap;
use std::sync::Arc;

/// Namespace of the subset hint.
pub const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
/// Key of the subset hint.
pub const SUBSET_KEY: &str = "x-gateway-destination-endpoint-subset";
/// Name under which Envoy sends its attributes.
const ATTRIBUTES: &str = "envoy.filters.http.ext_proc";

/// The attributes of a stream that Attaché reads. Envoy sends those that its configuration names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attributes {
    /// `connection.id`: the client's connection, unique within one Envoy. Ids that are equal in their first 53 bits share
    /// the limits of one connection.
    pub connection: Option<f64>,
    /// `source.address`: address of the client, `ip:port`.
    pub client_address: Option<String>,
    /// `response.code_details`: why the response has its status.
    pub code_details: Option<String>,
    /// `upstream.address`: the endpoint that served the request.
    pub upstream_address: Option<String>,
    /// `upstream.request_attempt_count`: endpoints that were tried.
    pub attempts: Option<f64>,
    /// What Envoy tried before the endpoint that served. Only its upstream filter knows it, not an attribute.
    pub earlier: Vec<EarlierAttempt>,
}

impl Attributes {
    /// Takes the attributes out of those of a message. Most messages have none.
    #[must_use]
    pub fn take(sent: &mut HashMap<String, Struct>) -> Self {
        let mut attributes = Self::default();
        if sent.is_empty() {
            return attributes;
        }
        for (name, Value { kind }) in sent.remove(ATTRIBUTES).into_iter().flat_map(|of| of.fields) {
            match (&*name, kind) {
                ("connection.id", Some(Kind::NumberValue(id))) => attributes.connection = Some(id),
                ("source.address", Some(Kind::StringValue(address))) => attributes.client_address = Some(address),
                ("response.code_details", Some(Kind::StringValue(details))) => attributes.code_details = Some(details),
                ("upstream.address", Some(Kind::StringValue(address))) => attributes.upstream_address = Some(address),
                ("upstream.request_attempt_count", Some(Kind::NumberValue(count))) => attributes.attempts = Some(count),
                _ => {}
            }
        }
        attributes
    }

    /// Whether the gateway tried another endpoint before; `None` if it does not say.
    fn retried(&self) -> Option<bool> {
        self.attempts.map(|count| count > 1.0)
    }

    /// The origin of a response. Its headers do not count: a server can set all of them, and echo what a client sent.
    fn origin(&self) -> Origin {
        let Some(details) = self.code_details.as_deref() else { return Origin::Server };
        if details == "via_upstream" {
            Origin::Server
        } else if details.contains("connection_failure") || details.contains("connection_timeout") {
            Origin::Unreachable
        } else if details.contains("{overflow") || !details.starts_with("upstream_") && details != "response_timeout" {
            Origin::Gateway
        } else {
            Origin::Server
        }
    }
}

/// The subset hint and the number of its invalid entries; `None` if the gateway sends no hint.
#[must_use]
pub fn subset(metadata: &Metadata) -> Option<(Subset, u64)> {
    let hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET_KEY)?;
    let mut subset = Subset::default();
    let mut malformed = 0;
    let mut add = |entry: Option<&str>| malformed += u64::from(!entry.is_some_and(|e| subset.add(e)));
    match hint.kind.as_ref() {
        Some(Kind::StringValue(list)) => list.split(',').filter(|e| !e.trim().is_empty()).for_each(|e| add(Some(e))),
        Some(Kind::ListValue(list)) => list.values.iter().for_each(|v| add(text(v))),
        _ => add(None),
    }
    Some((subset, malformed))
}

/// The endpoint that served the request, as the gateway reports it in the metadata of the endpoint picker protocol.
#[must_use]
pub fn reported(metadata: Option<&Metadata>) -> Option<&str> {
    metadata?
        .filter_metadata
        .get(DESTINATION_NAMESPACE)?
        .fields
        .get(attache_picker::head::DESTINATION_SERVED)
        .and_then(text)
}

/// The head of a response, from its headers and the gateway's metadata and attributes. `shows_body`: the gateway will
/// send the body.
#[must_use]
pub fn response_head<'a>(
    headers: Option<&HeaderMap>,
    metadata: Option<&'a Metadata>,
    attributes: &'a Attributes,
    shows_body: bool,
) -> ResponseHead<'a> {
    let reported = reported(metadata);
    let served = reported.or(attributes.upstream_address.as_deref());
    let mut head = ResponseHead {
        origin: attributes.origin(),
        // After all retries.
        served: served.and_then(|address| address.parse().ok()),
        reported,
        retried: attributes.retried(),
        earlier: &attributes.earlier,
        shows_body,
        ..ResponseHead::default()
    };
    for header in headers.map(|h| h.headers.as_slice()).unwrap_or_default() {
        let value = value(header);
        match header.key.as_str() {
            ":status" => head.status = std::str::from_utf8(value).ok().and_then(|s| s.parse().ok()).unwrap_or(0),
            "content-encoding" | "grpc-encoding" => head.encoded |= !is_identity(value),
            "content-type" => head.sse = is_event_stream(value),
            _ => {}
        }
    }
    head
}

/// Whether a `content-type` is that of an event stream, in any case and with any parameters.
fn is_event_stream(content_type: &[u8]) -> bool {
    const EVENT_STREAM: &[u8] = b"text/event-stream";
    content_type.trim_ascii_start().get(..EVENT_STREAM.len()).is_some_and(|t| t.eq_ignore_ascii_case(EVENT_STREAM))
}

/// The headers of a request.
#[must_use]
pub fn request_headers(map: Option<HeaderMap>) -> Vec<Header> {
    let header = |header: HeaderValue| {
        let HeaderValue { key, value, raw_value } = header;
        Header { name: key, value: if raw_value.is_empty() { value.into_bytes() } else { raw_value } }
    };
    map.map(|map| map.headers.into_iter().map(header).collect()).unwrap_or_default()
}

/// The bytes of a header. Envoy fills `raw_value`; other gateways may fill `value`.
fn value(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}

/// The destination as dynamic metadata under each of `keys` (namespace and key), with the same value as the header, and
/// the scores of endpoints in `envoy.lb` if `scores` has any.
#[must_use]
pub fn destination(keys: &[(Box<str>, Box<str>)], endpoints: &str, scores: &[(Arc<Endpoint>, f64)]) -> Struct {
    let mut namespaces: HashMap<String, Value> = HashMap::with_capacity(1);
    for (namespace, key) in keys {
        put(&mut namespaces, namespace, key, Kind::StringValue(endpoints.to_owned()));
    }
    if !scores.is_empty() {
        let number =
            |(e, s): &(Arc<Endpoint>, f64)| (e.authority.to_string(), Value { kind: Some(Kind::NumberValue(*s)) });
        let map = Struct { fields: scores.iter().map(number).collect() };
        put(&mut namespaces, DESTINATION_NAMESPACE, attache_picker::head::SCORES, Kind::StructValue(map));
    }
    Struct { fields: namespaces }
}

/// Adds a value to the struct of its namespace.
fn put(namespaces: &mut HashMap<String, Value>, namespace: &str, key: &str, kind: Kind) {
    let value = Value { kind: Some(kind) };
    if let Some(Value { kind: Some(Kind::StructValue(map)) }) = namespaces.get_mut(namespace) {
        map.fields.insert(key.to_owned(), value);
    } else {
        let map = Struct { fields: HashMap::from([(key.to_owned(), value)]) };
        namespaces.insert(namespace.to_owned(), Value { kind: Some(Kind::StructValue(map)) });
    }
}

/// A number as dynamic metadata.
#[must_use]
pub fn number(namespace: &str, key: &str, number: f64) -> Struct {
    let fields = HashMap::from([(key.to_owned(), Value { kind: Some(Kind::NumberValue(number)) })]);
    let value = Value { kind: Some(Kind::StructValue(Struct { fields })) };
    Struct { fields: HashMap::from([(namespace.to_owned(), value)]) }
}

/// The text at `path` in the metadata of `namespace`. A number is formatted as text; other values give `None`.
#[must_use]
pub fn claim(metadata: Option<&Metadata>, namespace: &str, path: &[String]) -> Option<String> {
    let mut fields = metadata?.filter_metadata.get(namespace)?;
    let (last, inner) = path.split_last()?;
    for key in inner {
        fields = match fields.fields.get(key)?.kind.as_ref()? {
            Kind::StructValue(inner) => inner,
            _ => return None,
        };
    }
    match fields.fields.get(last)? {
        Value { kind: Some(Kind::StringValue(text)) } => Some(text.clone()),
        Value { kind: Some(Kind::NumberValue(number)) } => Some(number.to_string()),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value.kind.as_ref()? {
        Kind::StringValue(s) => Some(s),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_picker::head::Head;
    use attache_picker::settings::{TenantRule, TenantSource};
    use attache_picker::tenant::Tenant;

    fn head(tenant: &str) -> Head {
        let raw_value = tenant.as_bytes().to_vec();
        let header = HeaderValue { key: "x-tenant".to_owned(), raw_value, ..HeaderValue::default() };
        Head::read(request_headers(Some(HeaderMap { headers: vec![header] })))
    }

    fn reads(metadata: Option<&Metadata>) -> impl FnOnce(&str, &[String]) -> Option<String> {
        move |namespace, path| claim(metadata, namespace, path)
    }

    fn metadata(kind: Kind) -> Metadata {
        let of = |key: &str, value| Struct { fields: [(key.to_owned(), Value { kind: Some(value) })].into() };
        let payload = Kind::StructValue(of("sub", kind));
        let filter_metadata = [("envoy.filters.http.jwt_authn".to_owned(), of("payload", payload))].into();
        Metadata { filter_metadata, ..Metadata::default() }
    }

    fn by_claim(strip: Option<&str>) -> TenantRule {
        let source = TenantSource::Metadata {
            namespace: "envoy.filters.http.jwt_authn".to_owned(),
            path: vec!["payload".to_owned(), "sub".to_owned()],
        };
        TenantRule { source, strip: strip.map(str::to_owned) }
    }

    #[test]
    fn tenant_is_read_from_the_configured_source_only() {
        let by_header = TenantRule { source: TenantSource::Header("x-tenant".to_owned()), strip: None };
        let claims = metadata(Kind::StringValue("acme".to_owned()));
        let spoofed = head(" liar ");
        assert_eq!(Tenant::of(None, &spoofed, reads(Some(&claims))), Tenant::Unconfigured);
        assert_eq!(Tenant::of(Some(&by_header), &spoofed, reads(Some(&claims))), Tenant::Named("liar".into()));
        assert_eq!(Tenant::of(Some(&by_header), &head(" "), reads(None)), Tenant::Missing);
        let rule = by_claim(None);
        assert_eq!(Tenant::of(Some(&rule), &spoofed, reads(Some(&claims))), Tenant::Named("acme".into()));
        assert_eq!(Tenant::of(Some(&rule), &spoofed, reads(None)), Tenant::Missing);
        let number = metadata(Kind::NumberValue(42.0));
        assert_eq!(Tenant::of(Some(&rule), &spoofed, reads(Some(&number))), Tenant::Named("42".into()));
        assert_eq!(Tenant::of(Some(&rule), &spoofed, reads(Some(&metadata(Kind::BoolValue(true))))), Tenant::Missing);
        let long = metadata(Kind::StringValue("é".repeat(300)));
        assert_eq!(Tenant::of(Some(&rule), &spoofed, reads(Some(&long))).name().map(str::len), Some(256));
    }

    #[test]
    fn origins_follow_from_code_details_alone() {
        let of = |details: &str| {
            let value = Value { kind: Some(Kind::StringValue(details.to_owned())) };
            let fields = HashMap::from([("response.code_details".to_owned(), value)]);
            Attributes::take(&mut HashMap::from([(ATTRIBUTES.to_owned(), Struct { fields })])).origin()
        };
        for (details, origin) in [
            ("via_upstream", Origin::Server),
            ("upstream_reset_before_response_started{connection_termination}", Origin::Server),
            ("upstream_reset_before_response_started{remote_reset}", Origin::Server),
            ("upstream_response_timeout", Origin::Server),
            ("response_timeout", Origin::Server),
            ("upstream_reset_before_response_started{connection_failure}", Origin::Unreachable),
            (
                "upstream_reset_before_response_started\
                 {remote_connection_failure|delayed_connect_error:_Connection_refused}",
                Origin::Unreachable,
            ),
            ("upstream_reset_before_response_started{connection_timeout}", Origin::Unreachable),
            ("upstream_reset_before_response_started{overflow}", Origin::Gateway),
            ("no_healthy_upstream", Origin::Gateway),
            ("route_not_found", Origin::Gateway),
            ("", Origin::Gateway),
        ] {
            assert_eq!(of(details), origin, "{details}");
        }
        assert_eq!(Attributes::default().origin(), Origin::Server, "where the gateway sends no details");
    }
}
