//! A stream that has sent no byte of a message yet. It holds little memory: a pod can open many streams with 14 bytes
//! each. Gateways send the first message with the headers, so it is there when the stream is polled first.

use super::exchange::GatewayCall;
use super::service::Service;
use super::wire::{End, answer};
use attache_serving::connections::OpenStream;
use bytes::Bytes;
use http::Response;
use http_body::Body as _;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::time::Sleep;
use tonic::body::Body;

/// A stream at its first bytes.
#[derive(Debug)]
pub(super) struct First {
    pub(super) body: Body,
    /// The first bytes, if there are any.
    pub(super) data: Bytes,
    /// Set if the stream has ended.
    pub(super) end: Option<End>,
    pub(super) stream: Option<OpenStream>,
}

impl First {
    pub(super) fn new(body: Body) -> Self {
        Self { body, data: Bytes::new(), end: None, stream: None }
    }
}

/// The response to a stream: it begins when the first bytes arrive.
#[derive(Debug)]
pub struct Opening(State);

#[derive(Debug)]
enum State {
    Refused(Option<Response<Body>>),
    Silent(Silent),
}

#[derive(Debug)]
struct Silent {
    service: Service,
    /// `None` once it has been handed on.
    first: Option<First>,
    call: GatewayCall,
    /// Set at the first poll without any bytes.
    timeout: Option<Pin<Box<Sleep>>>,
}

impl Opening {
    /// A stream that gets this response.
    pub(super) fn refused(response: Response<Body>) -> Self {
        Self(State::Refused(Some(response)))
    }

    pub(super) fn of(service: Service, body: Body, stream: Option<OpenStream>, call: GatewayCall) -> Self {
        let first = Some(First { stream, ..First::new(body) });
        Self(State::Silent(Silent { service, first, call, timeout: None }))
    }
}

impl Silent {
    /// Reads until the first bytes or the end.
    fn poll_first(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(first) = &mut self.first else { return Poll::Pending };
        while first.data.is_empty() && first.end.is_none() {
            match Pin::new(&mut first.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => first.data = frame.into_data().unwrap_or_default(),
                Poll::Ready(Some(Err(_))) => first.end = Some(End::Reset),
                Poll::Ready(None) => first.end = Some(End::HalfClosed),
                Poll::Pending => return Poll::Pending,
            }
        }
        first.stream.iter_mut().for_each(OpenStream::heard);
        Poll::Ready(())
    }

    /// Ready when the first bytes have not arrived in time.
    fn poll_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.timeout.is_none() {
            self.first.iter_mut().flat_map(|first| &mut first.stream).for_each(OpenStream::silent);
        }
        let idle = || Box::pin(tokio::time::sleep(self.service.idle_timeout()));
        self.timeout.get_or_insert_with(idle).as_mut().poll(cx)
    }
}

impl Future for Opening {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let silent = match &mut self.get_mut().0 {
            State::Refused(response) => {
                return response.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response)));
            }
            State::Silent(silent) => silent,
        };
        if silent.poll_first(cx).is_ready() {
            let Some(first) = silent.first.take() else { return Poll::Pending };
            return Poll::Ready(Ok(answer(silent.service.open(first, std::mem::take(&mut silent.call)))));
        }
        if silent.poll_timeout(cx).is_pending() {
            return Poll::Pending;
        }
        silent.first = None;
        Poll::Ready(Ok(silent.service.end_silent().into_http()))
    }
}
