//! Applies the replies of an exchange to the stream.

use crate::callbacks::{Answer, Callbacks, Chunk, Headers};
use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::value::Kind;

/// The hook in which replies are applied. It decides which bytes of a body exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A hook with a chunk of the request body or the response body.
    Body,
    /// Any other one: nothing is received.
    Other,
}

/// Applies a reply. An answer in place of a server's is returned: the caller sends it when it holds no borrow.
pub fn apply(envoy: &dyn Callbacks, reply: ProcessingResponse, moment: Moment) -> Option<Answer> {
    if let Some(metadata) = &reply.dynamic_metadata {
        set_metadata(envoy, metadata);
    }
    match reply.response? {
        Response::RequestHeaders(HeadersResponse { response }) => change(envoy, Headers::Request, response, moment),
        Response::RequestBody(BodyResponse { response }) => change(envoy, Headers::Request, response, moment),
        Response::ResponseHeaders(HeadersResponse { response }) => change(envoy, Headers::Response, response, moment),
        Response::ResponseBody(BodyResponse { response }) => change(envoy, Headers::Response, response, moment),
        Response::ImmediateResponse(response) => return Some(answer(response)),
        _ => {}
    }
    None
}

fn change(envoy: &dyn Callbacks, map: Headers, response: Option<CommonResponse>, moment: Moment) {
    let Some(response) = response else { return };
    if let Some(HeaderMutation { set_headers, remove_headers }) = response.header_mutation {
        remove_headers.iter().for_each(|name| envoy.remove_header(map, name));
        for (name, value) in set_headers.into_iter().filter_map(header) {
            envoy.set_header(map, &name, &value);
        }
    }
    if response.clear_route_cache {
        envoy.clear_route_cache();
    }
    match response.body_mutation.and_then(|mutation| mutation.mutation) {
        Some(Mutation::Body(bytes)) => replace_body(envoy, map, &bytes, moment),
        Some(Mutation::ClearBody(true)) => replace_body(envoy, map, &[], moment),
        _ => {}
    }
}

/// Replaces what the filter has of a body: what it holds back, and what the hook brings.
fn replace_body(envoy: &dyn Callbacks, map: Headers, bytes: &[u8], moment: Moment) {
    let (received, buffered) = match map {
        Headers::Request => (Chunk::ReceivedRequest, Chunk::BufferedRequest),
        Headers::Response => (Chunk::ReceivedResponse, Chunk::BufferedResponse),
    };
    // Envoy forwards the buffered bytes first. The hook at the end of an HTTP/1 request brings none.
    let is_received = moment == Moment::Body && (map == Headers::Response || envoy.body_len(received) > 0);
    if !is_received {
        return envoy.replace_body(buffered, bytes);
    }
    if map == Headers::Request && envoy.body_len(buffered) > 0 {
        envoy.replace_body(buffered, &[]);
    }
    envoy.replace_body(received, bytes);
}

fn header(option: HeaderValueOption) -> Option<(String, Vec<u8>)> {
    option.header.map(|header| (header.key, header.raw_value))
}

fn answer(response: ImmediateResponse) -> Answer {
    let status = response.status.map_or(500, |status| u32::try_from(status.code).unwrap_or(500));
    let headers = response.headers.map(|mutation| mutation.set_headers).unwrap_or_default();
    let headers = headers.into_iter().filter_map(header).collect();
    Answer { status, headers, body: response.body, details: response.details }
}

/// Sets texts and numbers. Envoy has no function for other values; Attaché has one, the scores of `explain.metadata`.
fn set_metadata(envoy: &dyn Callbacks, metadata: &Struct) {
    for (namespace, value) in &metadata.fields {
        let Some(Kind::StructValue(map)) = &value.kind else { continue };
        for (key, value) in &map.fields {
            match &value.kind {
                Some(Kind::StringValue(text)) => envoy.set_metadata(namespace, key, text),
                Some(Kind::NumberValue(number)) => envoy.set_metadata_number(namespace, key, *number),
                _ => {}
            }
        }
    }
}
