//! The messages that Envoy would send to an ext-proc service, from what its filter shows.

use crate::callbacks::{Attribute, Callbacks, Headers, Metadatum};
use attache_ext_proc::metadata::{Attributes, SUBSET_KEY, SUBSET_NAMESPACE};
use attache_scheduling::router::DESTINATION_NAMESPACE;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value};
use std::collections::HashMap;

/// A key of dynamic metadata: namespace and key.
pub type MetadataKey = (String, String);

/// The served endpoint, which the policy `override_host` reports there.
pub(crate) const SERVED: &str = "x-gateway-destination-endpoint-served";

/// A message without attributes, and the attributes that the filter has read.
pub type AttributedMessage = (ProcessingRequest, Attributes);

/// The message with the request headers, and the metadata under `claim`, which has the tenant.
pub fn request_headers(envoy: &dyn Callbacks, end_of_stream: bool, claim: Option<&MetadataKey>) -> AttributedMessage {
    let headers = Request::RequestHeaders(http_headers(envoy, Headers::Request, end_of_stream));
    let attributes = Attributes {
        connection: envoy.number(Attribute::ConnectionId).map(number),
        client_address: envoy.text(Attribute::SourceAddress),
        ..Attributes::default()
    };
    let claim = claim.map(|(namespace, key)| (&**namespace, &**key));
    let metadata_context = metadata(envoy, [Some((SUBSET_NAMESPACE, SUBSET_KEY)), claim]);
    (ProcessingRequest { metadata_context, ..message(headers) }, attributes)
}

/// Whether a filter in front allows only some servers for the request.
pub fn has_subset(envoy: &dyn Callbacks) -> bool {
    envoy.metadata(SUBSET_NAMESPACE, SUBSET_KEY).is_some()
}

/// Whether the client speaks HTTP/1.
pub fn is_http1(envoy: &dyn Callbacks) -> bool {
    envoy.text(Attribute::RequestProtocol).is_some_and(|protocol| protocol.starts_with("HTTP/1"))
}

/// The message with the response headers.
pub fn response_headers(envoy: &dyn Callbacks, end_of_stream: bool) -> AttributedMessage {
    let headers = Request::ResponseHeaders(http_headers(envoy, Headers::Response, end_of_stream));
    let attributes = Attributes {
        code_details: envoy.text(Attribute::ResponseCodeDetails),
        upstream_address: envoy.text(Attribute::UpstreamAddress),
        attempts: envoy.number(Attribute::RequestAttemptCount).map(number),
        ..Attributes::default()
    };
    let metadata_context = metadata(envoy, [Some((DESTINATION_NAMESPACE, SERVED)), None]);
    (ProcessingRequest { metadata_context, ..message(headers) }, attributes)
}

/// A message with a chunk of the request body.
#[must_use]
pub fn request_body(body: Vec<u8>, end_of_stream: bool) -> AttributedMessage {
    without_attributes(Request::RequestBody(HttpBody { body, end_of_stream, ..HttpBody::default() }))
}

/// A message with a chunk of the response body.
#[must_use]
pub fn response_body(body: Vec<u8>, end_of_stream: bool) -> AttributedMessage {
    without_attributes(Request::ResponseBody(HttpBody { body, end_of_stream, ..HttpBody::default() }))
}

/// The message that trailers follow the request body. Attaché does not read them.
#[must_use]
pub fn request_trailers() -> AttributedMessage {
    without_attributes(Request::RequestTrailers(HttpTrailers::default()))
}

/// The message that trailers follow the response body.
#[must_use]
pub fn response_trailers() -> AttributedMessage {
    without_attributes(Request::ResponseTrailers(HttpTrailers::default()))
}

/// A message of a hook in which Attaché reads no attribute.
fn without_attributes(request: Request) -> AttributedMessage {
    (message(request), Attributes::default())
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn http_headers(envoy: &dyn Callbacks, map: Headers, end_of_stream: bool) -> HttpHeaders {
    let header = |(key, raw_value)| HeaderValue { key, raw_value, value: String::new() };
    let headers = envoy.headers(map).into_iter().map(header).collect();
    HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream, ..HttpHeaders::default() }
}

fn metadata(envoy: &dyn Callbacks, keys: [Option<(&str, &str)>; 2]) -> Option<Metadata> {
    let mut filter_metadata: HashMap<String, Struct> = HashMap::new();
    for (namespace, key) in keys.into_iter().flatten() {
        if let Some(found) = envoy.metadata(namespace, key) {
            filter_metadata.entry(namespace.to_owned()).or_default().fields.insert(key.to_owned(), value(kind(found)));
        }
    }
    (!filter_metadata.is_empty()).then(|| Metadata { filter_metadata, ..Metadata::default() })
}

fn kind(found: Metadatum) -> Kind {
    match found {
        Metadatum::Text(text) => Kind::StringValue(text),
        Metadatum::Number(number) => Kind::NumberValue(number),
        Metadatum::Bool(bool) => Kind::BoolValue(bool),
        Metadatum::Texts(texts) => {
            let element = |text: Option<String>| value(text.map_or(Kind::NullValue(0), Kind::StringValue));
            Kind::ListValue(ListValue { values: texts.into_iter().map(element).collect() })
        }
    }
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

#[expect(clippy::cast_precision_loss, reason = "ids that are equal in their first 53 bits share their limits")]
fn number(number: u64) -> f64 {
    number as f64
}
