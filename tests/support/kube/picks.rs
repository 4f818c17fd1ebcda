//! Sends requests to the picker as Envoy does.

use crate::support::attache::AttacheProcess;
use crate::support::grpc::{Connection, PROCESS, Stream, request_body, request_headers};
use crate::support::process::eventually;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeadersResponse, ProcessingRequest, ProcessingResponse, body_mutation::Mutation,
};
use envoy_types::pb::google::protobuf::{Struct, Value as PbValue, value::Kind};
use std::collections::BTreeSet;

const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Picked {
    /// The endpoint, and the model name for the model server.
    Endpoint { destination: String, model: String },
    /// A rejection: its status and its body.
    Refused(i32, String),
}

impl Picked {
    pub(crate) fn destination(&self) -> &str {
        match self {
            Self::Endpoint { destination, .. } => destination,
            Self::Refused(status, body) => panic!("refused with {status}: {body}"),
        }
    }

    pub(crate) fn model(&self) -> &str {
        match self {
            Self::Endpoint { model, .. } => model,
            Self::Refused(status, body) => panic!("refused with {status}: {body}"),
        }
    }
}

/// One pick for `model`.
pub(crate) async fn pick(connection: &Connection, model: &str) -> Picked {
    pick_with(connection, model, &[]).await
}

/// One pick for `model`, by a request with more headers.
pub(crate) async fn pick_with(connection: &Connection, model: &str, headers: &[(&str, &[u8])]) -> Picked {
    pick_with_metadata(connection, model, headers, None).await
}

/// One pick with a gateway's subset hint that names only this endpoint.
#[allow(dead_code, reason = "used by `benches/kubernetes.rs`")]
pub(crate) async fn pick_only(connection: &Connection, model: &str, endpoint: &str) -> Picked {
    let value = PbValue { kind: Some(Kind::StringValue(endpoint.to_owned())) };
    let fields = [("x-gateway-destination-endpoint-subset".to_owned(), value)].into();
    let filter_metadata = [("envoy.lb.subset_hint".to_owned(), Struct { fields })].into();
    pick_with_metadata(connection, model, &[], Some(Metadata { filter_metadata, ..Metadata::default() })).await
}

async fn pick_with_metadata(
    connection: &Connection,
    model: &str,
    headers: &[(&str, &[u8])],
    metadata_context: Option<Metadata>,
) -> Picked {
    outcome(&mut sent(connection, model, headers, metadata_context).await).await
}

/// A complete request for `model`. Its stream stays open, as while a server responds.
pub(crate) async fn sent(
    connection: &Connection,
    model: &str,
    headers: &[(&str, &[u8])],
    metadata_context: Option<Metadata>,
) -> Stream {
    let body = format!(r#"{{"model":"{model}","prompt":"hello"}}"#);
    sent_body(connection, &body, headers, metadata_context).await
}

/// The same with this body.
pub(crate) async fn sent_body(
    connection: &Connection,
    body: &str,
    headers: &[(&str, &[u8])],
    metadata_context: Option<Metadata>,
) -> Stream {
    let mut stream = connection.stream(PROCESS, &[]).await.expect("a stream");
    let all = [&[(":path", &b"/v1/completions"[..]), (":method", b"POST")], headers].concat();
    let first = ProcessingRequest { metadata_context, ..request_headers(&all, false) };
    stream.send(&first).expect("sending headers");
    stream.send(&request_body(body.as_bytes(), true)).expect("sending the body");
    stream
}

/// The picker's response to a request.
pub(crate) async fn outcome(stream: &mut Stream) -> Picked {
    let mut destination = String::new();
    loop {
        let answer = stream.answer().await.expect("an answer").expect("a message");
        match answer {
            ProcessingResponse { response: Some(Response::RequestHeaders(HeadersResponse { response })), .. } => {
                destination = header(response.as_ref(), DESTINATION);
            }
            ProcessingResponse { response: Some(Response::RequestBody(body)), .. } => {
                let mutation = body.response.and_then(|common| common.body_mutation?.mutation);
                let sent = match mutation {
                    Some(Mutation::StreamedResponse(streamed)) => streamed.body,
                    Some(Mutation::Body(bytes)) => bytes,
                    _ => Vec::new(),
                };
                let sent: serde_json::Value = serde_json::from_slice(&sent).expect("a body of JSON");
                let model = sent["model"].as_str().expect("a model").to_owned();
                return Picked::Endpoint { destination, model };
            }
            ProcessingResponse { response: Some(Response::ImmediateResponse(refusal)), .. } => {
                let status = refusal.status.map_or(0, |status| status.code);
                return Picked::Refused(status, String::from_utf8_lossy(&refusal.body).into_owned());
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn header(response: Option<&CommonResponse>, name: &str) -> String {
    let set = response.and_then(|r| r.header_mutation.as_ref()).map(|m| &m.set_headers[..]).unwrap_or_default();
    let mut found = set.iter().filter_map(|option| option.header.as_ref()).filter(|h| h.key == name);
    found.next().map(|h| String::from_utf8_lossy(&h.raw_value).into_owned()).unwrap_or_default()
}

/// The names of the endpoints that the picker knows.
pub(crate) async fn known(picker: &AttacheProcess) -> BTreeSet<String> {
    let text = |endpoint: serde_json::Value| endpoint["name"].as_str().expect("a name").to_owned();
    picker.endpoints().await.into_iter().map(text).collect()
}

/// Waits until the picker knows exactly these endpoints.
pub(crate) async fn until_known(picker: &AttacheProcess, names: &[&str]) {
    let want: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    eventually(&format!("the endpoints {want:?}"), || async { (known(picker).await == want).then_some(()) }).await;
}
