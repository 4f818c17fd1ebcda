//! A gRPC client on plain HTTP/2, so that it can send messages that no correct client would send.

use super::Error;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse};
use h2::client::{ResponseFuture, SendRequest};
use prost::Message;
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncWrite};

/// The path of Envoy's ext-proc streams.
pub(crate) const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// A connection; it is cut on drop.
pub(crate) struct Connection {
    authority: String,
    client: SendRequest<Bytes>,
    driver: tokio::task::JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// One stream. Dropping it resets it.
pub(crate) struct Stream {
    outbound: h2::SendStream<Bytes>,
    response: Option<ResponseFuture>,
    inbound: Option<h2::RecvStream>,
    buffer: BytesMut,
    status: Option<String>,
}

impl Connection {
    pub(crate) async fn open(to: SocketAddr) -> Result<Self, Error> {
        Self::with(to, &h2::client::Builder::new()).await
    }

    /// A connection on which no response body may be sent.
    pub(crate) async fn without_window(to: SocketAddr) -> Result<Self, Error> {
        Self::with(to, h2::client::Builder::new().initial_window_size(0)).await
    }

    async fn with(to: SocketAddr, http: &h2::client::Builder) -> Result<Self, Error> {
        let socket = tokio::net::TcpStream::connect(to).await?;
        socket.set_nodelay(true)?;
        Self::over(socket, http).await
    }

    /// A connection over any kind of socket.
    pub(crate) async fn over(
        socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        http: &h2::client::Builder,
    ) -> Result<Self, Error> {
        let (client, connection) = http.handshake(socket).await?;
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Ok(Self { authority: String::new(), client, driver }.called("picker"))
    }

    /// The same connection, with this `:authority` on its streams.
    pub(crate) fn called(mut self, authority: &str) -> Self {
        self.authority = authority.to_owned();
        self
    }

    /// Opens a stream to `path` with more headers than gRPC asks for.
    pub(crate) async fn stream(&self, path: &str, headers: &[(&str, &str)]) -> Result<Stream, Error> {
        let uri = format!("http://{}{path}", self.authority);
        let mut request = http::Request::builder().method("POST").uri(uri);
        request = request.header("content-type", "application/grpc").header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut client = self.client.clone().ready().await?;
        let (response, outbound) = client.send_request(request.body(())?, false)?;
        Ok(Stream { outbound, response: Some(response), inbound: None, buffer: BytesMut::new(), status: None })
    }
}

impl Stream {
    /// Sends bytes as they are, framed or not.
    pub(crate) fn send_raw(&mut self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        Ok(self.outbound.send_data(bytes.into(), false)?)
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &ProcessingRequest) -> Result<(), Error> {
        self.send_raw(frame(0, &message.encode_to_vec()))
    }

    /// Ends the request side of the stream, after which no messages follow.
    pub(crate) fn half_close(&mut self) -> Result<(), Error> {
        Ok(self.outbound.send_data(Bytes::new(), true)?)
    }

    /// The next response message; `None` at the end of the stream, with [`Stream::status`] set.
    pub(crate) async fn answer(&mut self) -> Result<Option<ProcessingResponse>, Error> {
        if let Some(response) = self.response.take() {
            let response = response.await?;
            self.status = grpc_status(response.headers());
            self.inbound = Some(response.into_body());
        }
        let Some(inbound) = &mut self.inbound else { return Err("a stream that failed".into()) };
        loop {
            if let Some(header) = self.buffer.first_chunk::<5>() {
                let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Ok(Some(ProcessingResponse::decode(self.buffer.split_to(length))?));
                }
            }
            let Some(data) = inbound.data().await else { break };
            let data = data?;
            inbound.flow_control().release_capacity(data.len())?;
            self.buffer.extend_from_slice(&data);
        }
        if let Some(trailers) = inbound.trailers().await? {
            self.status = grpc_status(&trailers);
        }
        Ok(None)
    }

    /// Reads to the end: the status of the stream.
    pub(crate) async fn status(&mut self) -> Result<String, Error> {
        while self.answer().await?.is_some() {}
        self.status.take().ok_or_else(|| "a stream that ended without a status".into())
    }
}

fn grpc_status(headers: &http::HeaderMap) -> Option<String> {
    Some(headers.get("grpc-status")?.to_str().ok()?.to_owned())
}

/// A gRPC message with this compression flag.
pub(crate) fn frame(flag: u8, message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(5 + message.len());
    framed.put_u8(flag);
    framed.put_u32(u32::try_from(message.len()).expect("a message under 4 GiB"));
    framed.put_slice(message);
    framed.freeze()
}

/// The first message of a request: its headers.
pub(crate) fn request_headers(headers: &[(&str, &[u8])], end_of_stream: bool) -> ProcessingRequest {
    let header = |(key, value): &(&str, &[u8])| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.to_vec(),
        ..HeaderValue::default()
    };
    let headers = Some(HeaderMap { headers: headers.iter().map(header).collect() });
    message(Event::RequestHeaders(HttpHeaders { headers, end_of_stream, ..HttpHeaders::default() }))
}

/// A chunk of the request's body.
pub(crate) fn request_body(body: &[u8], end_of_stream: bool) -> ProcessingRequest {
    message(Event::RequestBody(HttpBody { body: body.to_vec(), end_of_stream, ..HttpBody::default() }))
}

/// A message around `event`.
pub(crate) fn message(event: Event) -> ProcessingRequest {
    ProcessingRequest { request: Some(event), ..ProcessingRequest::default() }
}
