//! The messages that Envoy would send to an ext-proc service, from what its filter shows.

use crate::callbacks::{Attribute, Callbacks, Headers, Metadatum};
use attache_ext_proc::metadata::{ATTRIBUTES, SUBSET_KEY, SUBSET_NAMESPACE};
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
const SERVED: &str = "x-gateway-destination-endpoint-served";

/// The message with the request headers, and the metadata under `claim`, which has the tenant.
pub fn request_headers(envoy: &dyn Callbacks, end_of_stream: bool, claim: Option<&MetadataKey>) -> ProcessingRequest {
    let headers = Request::RequestHeaders(http_headers(envoy, Headers::Request, end_of_stream));
    let subset = (SUBSET_NAMESPACE.to_owned(), SUBSET_KEY.to_owned());
    let connection = envoy.number(Attribute::ConnectionId).map(|id| ("connection.id", number(id)));
    let source = envoy.text(Attribute::SourceAddress).map(|address| ("source.address", Kind::StringValue(address)));
    ProcessingRequest {
        metadata_context: metadata(envoy, [Some(&subset), claim]),
        attributes: attributes([connection, source]),
        ..message(headers)
    }
}

/// The message with the response headers.
pub fn response_headers(envoy: &dyn Callbacks, end_of_stream: bool) -> ProcessingRequest {
    let headers = Request::ResponseHeaders(http_headers(envoy, Headers::Response, end_of_stream));
    let served = (DESTINATION_NAMESPACE.to_owned(), SERVED.to_owned());
    let text = |name, attribute| envoy.text(attribute).map(|text| (name, Kind::StringValue(text)));
    let attempts = envoy.number(Attribute::RequestAttemptCount);
    let found = [
        text("response.code_details", Attribute::ResponseCodeDetails),
        text("upstream.address", Attribute::UpstreamAddress),
        attempts.map(|count| ("upstream.request_attempt_count", number(count))),
    ];
    ProcessingRequest {
        metadata_context: metadata(envoy, [Some(&served), None]),
        attributes: attributes(found),
        ..message(headers)
    }
}

/// A message with a chunk of the request body.
#[must_use]
pub fn request_body(body: Vec<u8>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::RequestBody(HttpBody { body, end_of_stream, ..HttpBody::default() }))
}

/// A message with a chunk of the response body.
#[must_use]
pub fn response_body(body: Vec<u8>, end_of_stream: bool) -> ProcessingRequest {
    message(Request::ResponseBody(HttpBody { body, end_of_stream, ..HttpBody::default() }))
}

/// The message that trailers follow the request body. Attaché does not read them.
#[must_use]
pub fn request_trailers() -> ProcessingRequest {
    message(Request::RequestTrailers(HttpTrailers::default()))
}

/// The message that trailers follow the response body.
#[must_use]
pub fn response_trailers() -> ProcessingRequest {
    message(Request::ResponseTrailers(HttpTrailers::default()))
}

fn message(request: Request) -> ProcessingRequest {
    ProcessingRequest { request: Some(request), ..ProcessingRequest::default() }
}

fn attributes<const N: usize>(found: [Option<(&str, Kind)>; N]) -> HashMap<String, Struct> {
    let fields = found.into_iter().flatten().map(|(name, kind)| (name.to_owned(), value(kind)));
    let fields: HashMap<String, Value> = fields.collect();
    if fields.is_empty() { HashMap::new() } else { HashMap::from([(ATTRIBUTES.to_owned(), Struct { fields })]) }
}

fn http_headers(envoy: &dyn Callbacks, map: Headers, end_of_stream: bool) -> HttpHeaders {
    let header = |(key, raw_value)| HeaderValue { key, raw_value, value: String::new() };
    let headers = envoy.headers(map).into_iter().map(header).collect();
    HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream, ..HttpHeaders::default() }
}

fn metadata(envoy: &dyn Callbacks, keys: [Option<&MetadataKey>; 2]) -> Option<Metadata> {
    let mut filter_metadata: HashMap<String, Struct> = HashMap::new();
    for (namespace, key) in keys.into_iter().flatten() {
        if let Some(found) = envoy.metadata(namespace, key) {
            filter_metadata.entry(namespace.clone()).or_default().fields.insert(key.clone(), value(kind(found)));
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
fn number(number: u64) -> Kind {
    Kind::NumberValue(number as f64)
}
