//! The health service within the limits of its listener's streams.
//!
//! A check is one short message, and a watch lasts as long as its client wants. All of them count as streams without a
//! message, so that no number of them takes the streams of gateways.

use crate::connections::{Client, OpenStream};
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::Status;
use tonic::codegen::{Bytes, Service, StdError};
use tonic::server::NamedService;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthService;

/// Time from the opening of a stream to the end of its only message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// The health service; each of its streams counts as a silent one of its connection.
#[derive(Clone, Debug)]
pub struct BoundedHealth(HealthServer<HealthService>);

impl BoundedHealth {
    pub(super) fn new(service: HealthServer<HealthService>) -> Self {
        Self(service)
    }
}

impl NamedService for BoundedHealth {
    const NAME: &'static str = <HealthServer<HealthService> as NamedService>::NAME;
}

impl<B> Service<Request<B>> for BoundedHealth
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let stream = match request.extensions_mut().remove::<Client>().map(Client::open) {
            Some(None) => {
                let refused = Status::resource_exhausted("too many streams are open").into_http();
                return Box::pin(std::future::ready(Ok(refused)));
            }
            stream => stream.flatten(),
        };
        let stream = stream.map(|mut stream| {
            stream.silent();
            stream
        });
        let answer = self.0.call(request);
        Box::pin(async move {
            match tokio::time::timeout(MESSAGE_TIMEOUT, answer).await {
                Ok(answer) => Ok(answer?.map(|body| tonic::body::Body::new(Counted { body, _stream: stream }))),
                Err(_) => Ok(Status::deadline_exceeded("the request did not end in time").into_http()),
            }
        })
    }
}

/// A response body that counts as an open stream until it is dropped.
struct Counted {
    body: tonic::body::Body,
    _stream: Option<OpenStream>,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
