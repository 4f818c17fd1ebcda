//! What gateways say beside the messages: the subset hint, the endpoint that served, why a response is what it is.

use crate::pool::Endpoint;
use crate::scheduling::scheduler::Subset;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Namespace of the destination and of the served endpoint.
pub const LB_NAMESPACE: &str = "envoy.lb";
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET_KEY: &str = "x-gateway-destination-endpoint-subset";
const ATTRIBUTES: &str = "envoy.filters.http.ext_proc";
/// Where Envoy gives the number of the client's connection, if it is asked to (`request_attributes: [connection.id]`).
const CONNECTION_ID: &str = "connection.id";

/// The subset hint and the number of its entries that could not be read; `None` when the gateway gives none.
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

/// The endpoint that really served, after retries.
#[must_use]
pub fn served(metadata: Option<&Metadata>, attributes: &HashMap<String, Struct>) -> Option<SocketAddr> {
    let reported = metadata
        .and_then(|m| m.filter_metadata.get(LB_NAMESPACE))
        .and_then(|s| s.fields.get(super::head::DESTINATION_SERVED))
        .and_then(text);
    reported.or_else(|| attribute(attributes, "upstream.address")).and_then(|a| a.parse().ok())
}

/// Whether Envoy answered itself because it could not connect to a server.
#[must_use]
pub fn connect_failed(attributes: &HashMap<String, Struct>) -> bool {
    attribute(attributes, "response.code_details")
        .is_some_and(|d| d.contains("connection_failure") || d.contains("connection_timeout"))
}

/// Whether a server was asked before the one that this answer is of, or for; `None` where Envoy is not told to say.
#[must_use]
pub fn retried(attributes: &HashMap<String, Struct>) -> Option<bool> {
    match attributes.get(ATTRIBUTES)?.fields.get("upstream.request_attempt_count")?.kind.as_ref()? {
        Kind::NumberValue(count) => Some(*count > 1.0),
        _ => None,
    }
}

/// The client's connection, by a number that is unique in its Envoy; `None` where Envoy is not asked for it.
#[must_use]
pub fn connection(attributes: &HashMap<String, Struct>) -> Option<u64> {
    match attributes.get(ATTRIBUTES)?.fields.get(CONNECTION_ID)?.kind.as_ref()? {
        // Two connections that differ beyond 53 bits share what one may have.
        Kind::NumberValue(number) => Some(number.to_bits()),
        _ => None,
    }
}

/// The same value as dynamic metadata `envoy.lb` that the header carries, and the scores of all endpoints where there are any.
#[must_use]
pub fn destination(endpoints: &str, scores: &[(Arc<Endpoint>, f64)]) -> Struct {
    let value = Value { kind: Some(Kind::StringValue(endpoints.to_owned())) };
    let mut fields = HashMap::from([(super::head::DESTINATION.to_owned(), value)]);
    if !scores.is_empty() {
        let number =
            |(e, s): &(Arc<Endpoint>, f64)| (e.authority.to_string(), Value { kind: Some(Kind::NumberValue(*s)) });
        let map = Struct { fields: scores.iter().map(number).collect() };
        fields.insert(super::head::SCORES.to_owned(), Value { kind: Some(Kind::StructValue(map)) });
    }
    let lb = Value { kind: Some(Kind::StructValue(Struct { fields })) };
    Struct { fields: HashMap::from([(LB_NAMESPACE.to_owned(), lb)]) }
}

/// A number as dynamic metadata.
#[must_use]
pub fn number(namespace: &str, key: &str, number: f64) -> Struct {
    let fields = HashMap::from([(key.to_owned(), Value { kind: Some(Kind::NumberValue(number)) })]);
    let value = Value { kind: Some(Kind::StructValue(Struct { fields })) };
    Struct { fields: HashMap::from([(namespace.to_owned(), value)]) }
}

fn attribute<'a>(attributes: &'a HashMap<String, Struct>, name: &str) -> Option<&'a str> {
    text(attributes.get(ATTRIBUTES)?.fields.get(name)?)
}

fn text(value: &Value) -> Option<&str> {
    match value.kind.as_ref()? {
        Kind::StringValue(s) => Some(s),
        _ => None,
    }
}
