//! Builds the replies to Envoy. Header values are always in `raw_value`, because Envoy ignores `value`.

use super::mode::BodyMode;
use attache_picker::body::{Body, MAX_CHUNK_BYTES};
use attache_picker::in_flight::HeaderChanges;
use attache_protocol::{Dialect, dialect};
use attache_types::error::{Reason, RequestError};
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpBody, ImmediateResponse,
    ProcessingResponse, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use std::collections::VecDeque;

/// 256: most characters of a rejected name that a response header repeats.
const MAX_NAME_CHARS: usize = 256;

/// Sets a header, replacing what the client sent.
#[must_use]
pub fn set(name: &str, value: impl Into<Vec<u8>>) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: name.to_owned(), raw_value: value.into(), value: String::new() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

/// The header mutation that makes `changes`.
#[must_use]
pub fn mutation(changes: HeaderChanges) -> HeaderMutation {
    HeaderMutation {
        set_headers: changes.set.into_iter().map(|(name, value)| set(&name, value)).collect(),
        remove_headers: if changes.drops_length { vec!["content-length".to_owned()] } else { Vec::new() },
    }
}

/// A message around `response`.
#[must_use]
pub fn message(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}

/// A common response that changes headers, or nothing when the mutation is empty.
#[must_use]
pub fn common(mutation: HeaderMutation) -> CommonResponse {
    let empty = mutation.set_headers.is_empty() && mutation.remove_headers.is_empty();
    CommonResponse { header_mutation: (!empty).then_some(mutation), ..CommonResponse::default() }
}

/// The reply to request headers.
#[must_use]
pub fn request_headers(response: CommonResponse) -> ProcessingResponse {
    message(Response::RequestHeaders(HeadersResponse { response: Some(response) }))
}

/// The reply to request trailers.
#[must_use]
pub fn request_trailers() -> ProcessingResponse {
    message(Response::RequestTrailers(TrailersResponse::default()))
}

/// The reply to response headers.
#[must_use]
pub fn response_headers(mutation: HeaderMutation) -> ProcessingResponse {
    message(Response::ResponseHeaders(HeadersResponse { response: Some(common(mutation)) }))
}

/// The reply to response trailers.
#[must_use]
pub fn response_trailers() -> ProcessingResponse {
    message(Response::ResponseTrailers(TrailersResponse::default()))
}

/// The direction of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the server.
    Request,
    /// To the client.
    Response,
}

fn body(direction: Direction, common: CommonResponse) -> ProcessingResponse {
    let body = BodyResponse { response: Some(common) };
    message(match direction {
        Direction::Request => Response::RequestBody(body),
        Direction::Response => Response::ResponseBody(body),
    })
}

fn mutated(direction: Direction, mutation: Mutation) -> ProcessingResponse {
    let body_mutation = Some(BodyMutation { mutation: Some(mutation) });
    body(direction, CommonResponse { body_mutation, ..CommonResponse::default() })
}

/// The reply that passes a body message on unchanged.
#[must_use]
pub fn echo(direction: Direction, mode: BodyMode, message: HttpBody) -> ProcessingResponse {
    if mode != BodyMode::FullDuplex {
        return body(direction, CommonResponse::default());
    }
    let streamed = StreamedBodyResponse {
        body: message.body,
        end_of_stream: message.end_of_stream,
        end_of_stream_without_message: message.end_of_stream_without_message,
        grpc_message_compressed: message.grpc_message_compressed,
        drain_complete: false,
    };
    mutated(direction, Mutation::StreamedResponse(streamed))
}

/// The reply that replaces the bytes of a body message.
#[must_use]
pub fn replace(direction: Direction, mode: BodyMode, bytes: Vec<u8>, end_of_stream: bool) -> ProcessingResponse {
    match mode {
        BodyMode::FullDuplex => echo(direction, mode, HttpBody { body: bytes, end_of_stream, ..HttpBody::default() }),
        _ if bytes.is_empty() => mutated(direction, Mutation::ClearBody(true)),
        _ => mutated(direction, Mutation::Body(bytes)),
    }
}

/// The reply to a buffered body, with header changes and optionally a new body.
#[must_use]
pub fn buffered_body(mut response: CommonResponse, new_body: Option<Vec<u8>>) -> ProcessingResponse {
    response.body_mutation = new_body.map(|b| BodyMutation { mutation: Some(Mutation::Body(b)) });
    body(Direction::Request, response)
}

/// Sends a body in pieces; with `end`, the last piece ends the stream. Pieces up to 64 KiB are passed on without a
/// copy, longer ones are divided.
pub fn stream_body(pieces: Vec<Vec<u8>>, end: bool, out: &mut impl Extend<ProcessingResponse>) {
    let mut send = |piece: Vec<u8>, end_of_stream: bool| {
        let message = HttpBody { body: piece, end_of_stream, ..HttpBody::default() };
        out.extend([echo(Direction::Request, BodyMode::FullDuplex, message)]);
    };
    let last = pieces.iter().rposition(|p| !p.is_empty());
    for (at, piece) in pieces.into_iter().enumerate() {
        let is_last = Some(at) == last;
        if piece.len() <= 64 << 10 {
            if !piece.is_empty() {
                send(piece, end && is_last);
            }
            continue;
        }
        let mut chunks = piece.chunks(MAX_CHUNK_BYTES).peekable();
        while let Some(chunk) = chunks.next() {
            send(chunk.to_vec(), end && is_last && chunks.peek().is_none());
        }
    }
    if last.is_none() && end {
        send(Vec::new(), true);
    }
}

/// The replies to a request whose `body` was buffered: `head` with the destination, then the body of the client or the
/// new one.
pub fn forward(
    mode: BodyMode,
    head: ProcessingResponse,
    mut body: Body,
    new_body: Option<Vec<u8>>,
    end: bool,
    out: &mut VecDeque<ProcessingResponse>,
) {
    out.push_back(head);
    match (mode, new_body) {
        (BodyMode::FullDuplex, Some(new)) => stream_body(vec![new], end, out),
        (BodyMode::FullDuplex, None) => stream_body(body.take(), end, out),
        // Each chunk needs a reply. The last one carries the new body.
        (mode, Some(new)) => {
            for _ in 1..body.messages() {
                out.push_back(replace(Direction::Request, mode, Vec::new(), false));
            }
            out.push_back(replace(Direction::Request, mode, new, end));
        }
        (mode, None) => {
            let answer = || echo(Direction::Request, mode, HttpBody::default());
            out.extend((0..body.messages()).map(|_| answer()));
        }
    }
}

/// A response of Attaché itself: JSON, with status 200.
#[must_use]
pub fn answer(json: Vec<u8>) -> ProcessingResponse {
    message(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: 200 }),
        headers: Some(HeaderMutation {
            set_headers: vec![set("content-type", "application/json")],
            remove_headers: Vec::new(),
        }),
        body: json,
        details: "attache_answered".to_owned(),
        grpc_status: None,
    }))
}

/// An error response in the format of the client's API.
#[must_use]
pub fn refuse(error: &RequestError, dialect: Dialect) -> ProcessingResponse {
    let answer = dialect::render(error, dialect);
    let mut set_headers = vec![set("content-type", answer.content_type), set("x-attache-reason", error.reason.code())];
    let known_to_aibrix = aibrix_header(error);
    // AIBrix repeats the rejected name. Envoy sets no header with an empty value, so an empty name becomes `true`.
    let rejected = error.rejected_name.as_deref().filter(|name| !name.is_empty());
    let value: String = rejected.unwrap_or("true").chars().filter(|c| !c.is_control()).take(MAX_NAME_CHARS).collect();
    set_headers.extend(known_to_aibrix.map(|name| set(name, &*value)));
    if let Some(wait) = error.retry_after {
        set_headers.push(set("retry-after", wait.as_secs().max(1).to_string()));
    }
    message(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(answer.status) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: answer.body,
        details: format!("attache_{}", error.reason.code()),
        grpc_status: None,
    }))
}

/// The header that AIBrix's clients check after this rejection.
fn aibrix_header(error: &RequestError) -> Option<&'static str> {
    Some(match error.reason {
        Reason::InvalidRoutingStrategy => "x-error-invalid-routing-strategy",
        Reason::RequestsPerMinute => "x-error-rpm-exceeded",
        Reason::TokensPerMinute => "x-error-tpm-exceeded",
        Reason::ModelRequestsPerSecond => "x-error-model-rps-exceeded",
        Reason::UnknownUser => "x-error-user",
        Reason::InvalidModel => "x-error-no-model-in-request",
        Reason::NoPool if error.param == Some("model") => "x-error-no-model-in-request",
        Reason::ModelNotFound => "x-error-no-model-backends",
        Reason::NoReadyEndpoint
        | Reason::SubsetEmpty
        | Reason::NoPrefillEndpoint
        | Reason::NoWholeEndpoint
        | Reason::PrefillFailed => "x-error-routing",
        Reason::EmptyBody
        | Reason::InvalidJson
        | Reason::InvalidUtf8
        | Reason::JsonTooDeep
        | Reason::JsonTooComplex
        | Reason::DuplicateField
        | Reason::InvalidMessages
        | Reason::InvalidPrompt
        | Reason::InvalidPromptTokens
        | Reason::TooManyPrompts
        | Reason::InvalidType
        | Reason::InvalidCacheSalt => "x-error-request-body-processing",
        _ => return None,
    })
}
