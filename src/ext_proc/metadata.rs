//! What gateways say beside the messages: the subset hint, the endpoint that served, why a response is what it is.

use attache_pool::Endpoint;
use attache_scheduling::scheduler::Subset;
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

/// The endpoint that served by the gateway's word, in the metadata that the endpoint picker protocol names.
#[must_use]
pub fn reported(metadata: Option<&Metadata>) -> Option<&str> {
    metadata?.filter_metadata.get(LB_NAMESPACE)?.fields.get(super::head::DESTINATION_SERVED).and_then(text)
}

/// The endpoint that really served, after retries.
#[must_use]
pub fn served(metadata: Option<&Metadata>, attributes: &HashMap<String, Struct>) -> Option<SocketAddr> {
    reported(metadata).or_else(|| attribute(attributes, "upstream.address")).and_then(|a| a.parse().ok())
}

/// The address of the client, `ip:port`, where Envoy is configured to send it.
#[must_use]
pub fn client_address(attributes: &HashMap<String, Struct>) -> Option<&str> {
    attribute(attributes, "source.address")
}

/// Where a response comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The server, or Envoy in its place once it was connected: a reset, a time-out. So, too, where the gateway does not send
    /// `response.code_details`: a server that is down responds like one that fails on the request.
    Server,
    /// Envoy, which could not connect to the server.
    Unreachable,
    /// Envoy or one of its filters, for a reason that is not the server's: no route, a full circuit breaker.
    Gateway,
}

impl Origin {
    /// The origin of a response by `response.code_details`. Headers of the response do not count: a server can set all of them, and echo what a
    /// client sent.
    #[must_use]
    pub fn of(attributes: &HashMap<String, Struct>) -> Self {
        let Some(details) = attribute(attributes, "response.code_details") else { return Self::Server };
        if details == "via_upstream" {
            Self::Server
        } else if details.contains("connection_failure") || details.contains("connection_timeout") {
            Self::Unreachable
        } else if details.contains("{overflow") || !details.starts_with("upstream_") && details != "response_timeout" {
            Self::Gateway
        } else {
            Self::Server
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_follow_from_code_details_alone() {
        let of = |details: &str| {
            let value = Value { kind: Some(Kind::StringValue(details.to_owned())) };
            let fields = HashMap::from([("response.code_details".to_owned(), value)]);
            Origin::of(&HashMap::from([(ATTRIBUTES.to_owned(), Struct { fields })]))
        };
        for (details, origin) in [
            ("via_upstream", Origin::Server),
            ("upstream_reset_before_response_started{connection_termination}", Origin::Server),
            ("upstream_reset_before_response_started{remote_reset}", Origin::Server),
            ("upstream_response_timeout", Origin::Server),
            ("response_timeout", Origin::Server),
            ("upstream_reset_before_response_started{connection_failure}", Origin::Unreachable),
            (
                "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
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
        assert_eq!(Origin::of(&HashMap::new()), Origin::Server, "where the gateway sends no details");
    }
}
