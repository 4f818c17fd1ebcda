//! An ext-proc server that decides nothing: the limit that the picker is measured against, and the control of the end-to-end
//! matrix (a fault that shows with this server is not the picker's).
//!
//! One inline stream per request: no task, no channel, no parsing. It holds the request's body as a picker must, answers at the end of
//! the request with a fixed destination, and gives every body piece back as it came.

use envoy_types::pb::envoy::config::core::v3::{
    HeaderValue, HeaderValueOption, header_value_option::HeaderAppendAction,
};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpBody, HttpHeaders,
    ProcessingRequest, ProcessingResponse, StreamedBodyResponse, TrailersResponse, body_mutation::Mutation,
    processing_request::Request as Event, processing_response::Response as Answer,
};
use envoy_types::pb::google::protobuf::{Struct, Value, value::Kind};
use futures_core::Stream;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::{Request, Response, Status, Streaming};

const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Serves until the process ends or the future is dropped. Health checks are answered on the same port.
pub(crate) async fn serve(listener: tokio::net::TcpListener, destination: SocketAddr) {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<ExternalProcessorServer<Noop>>().await;
    let service = ExternalProcessorServer::new(Noop { destination: destination.to_string() })
        .max_decoding_message_size(64 << 20)
        .max_encoding_message_size(64 << 20);
    tonic::transport::Server::builder()
        .http2_max_pending_accept_reset_streams(Some(100_000))
        .add_service(service)
        .add_service(health)
        .serve_with_incoming(tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await
        .expect("serving the no-op picker");
}

pub(crate) struct Noop {
    destination: String,
}

#[tonic::async_trait]
impl ExternalProcessor for Noop {
    type ProcessStream = Exchange;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        Ok(Response::new(Exchange::new(request.into_inner(), self.destination.clone())))
    }
}

/// One stream: drives the input, yields the output.
pub(crate) struct Exchange {
    inbound: Streaming<ProcessingRequest>,
    outbound: VecDeque<ProcessingResponse>,
    destination: String,
    request_duplex: bool,
    response_duplex: bool,
    headers_answered: bool,
    held: Vec<HttpBody>,
}

impl Exchange {
    fn new(inbound: Streaming<ProcessingRequest>, destination: String) -> Self {
        Self {
            inbound,
            outbound: VecDeque::new(),
            destination,
            request_duplex: true,
            response_duplex: true,
            headers_answered: false,
            held: Vec::new(),
        }
    }

    fn take(&mut self, message: ProcessingRequest) {
        if let Some(config) = message.protocol_config {
            self.request_duplex = config.request_body_mode == BodySendMode::FullDuplexStreamed as i32;
            self.response_duplex = config.response_body_mode == BodySendMode::FullDuplexStreamed as i32;
        }
        match message.request {
            Some(Event::RequestHeaders(headers))
                if headers.end_of_stream || !self.request_duplex || is_upgrade(&headers) =>
            {
                self.answer_headers();
            }
            Some(Event::RequestHeaders(_)) | None => {}
            Some(Event::RequestBody(body)) if self.request_duplex => {
                let end = body.end_of_stream;
                self.held.push(body);
                if end || self.headers_answered {
                    self.answer_headers();
                    self.release_body();
                }
            }
            Some(Event::RequestBody(_)) => self.answer(Answer::RequestBody(BodyResponse::default())),
            Some(Event::RequestTrailers(_)) => {
                self.answer_headers();
                self.release_body();
                self.answer(Answer::RequestTrailers(TrailersResponse::default()));
            }
            Some(Event::ResponseHeaders(_)) => self.answer(Answer::ResponseHeaders(HeadersResponse::default())),
            Some(Event::ResponseBody(body)) if self.response_duplex => {
                self.answer(Answer::ResponseBody(streamed(body)));
            }
            Some(Event::ResponseBody(_)) => self.answer(Answer::ResponseBody(BodyResponse::default())),
            Some(Event::ResponseTrailers(_)) => self.answer(Answer::ResponseTrailers(TrailersResponse::default())),
        }
    }

    fn answer_headers(&mut self) {
        if std::mem::replace(&mut self.headers_answered, true) {
            return;
        }
        let header = HeaderValueOption {
            header: Some(HeaderValue {
                key: DESTINATION.to_owned(),
                raw_value: self.destination.clone().into_bytes(),
                ..HeaderValue::default()
            }),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
            ..HeaderValueOption::default()
        };
        let common = CommonResponse {
            header_mutation: Some(HeaderMutation { set_headers: vec![header], ..HeaderMutation::default() }),
            ..CommonResponse::default()
        };
        self.outbound.push_back(ProcessingResponse {
            response: Some(Answer::RequestHeaders(HeadersResponse { response: Some(common) })),
            dynamic_metadata: Some(destination_metadata(&self.destination)),
            ..ProcessingResponse::default()
        });
    }

    fn release_body(&mut self) {
        for body in std::mem::take(&mut self.held) {
            self.answer(Answer::RequestBody(streamed(body)));
        }
    }

    fn answer(&mut self, answer: Answer) {
        self.outbound.push_back(ProcessingResponse { response: Some(answer), ..ProcessingResponse::default() });
    }
}

impl Stream for Exchange {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(answer) = self.outbound.pop_front() {
                return Poll::Ready(Some(Ok(answer)));
            }
            match ready!(Pin::new(&mut self.inbound).poll_next(cx)) {
                Some(Ok(message)) => self.take(message),
                // Envoy ends a stream by a reset as often as by a half-close: both are the end.
                Some(Err(_)) | None => return Poll::Ready(None),
            }
        }
    }
}

fn streamed(body: HttpBody) -> BodyResponse {
    let streamed =
        StreamedBodyResponse { body: body.body, end_of_stream: body.end_of_stream, ..StreamedBodyResponse::default() };
    BodyResponse {
        response: Some(CommonResponse {
            body_mutation: Some(BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) }),
            ..CommonResponse::default()
        }),
    }
}

fn destination_metadata(destination: &str) -> Struct {
    let text = |s: &str| Value { kind: Some(Kind::StringValue(s.to_owned())) };
    let inner = Struct { fields: [(DESTINATION.to_owned(), text(destination))].into() };
    Struct { fields: [("envoy.lb".to_owned(), Value { kind: Some(Kind::StructValue(inner)) })].into() }
}

fn is_upgrade(headers: &HttpHeaders) -> bool {
    headers.headers.iter().flat_map(|map| &map.headers).any(|header| header.key == "upgrade")
}
