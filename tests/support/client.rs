//! A plain HTTP client: one connection a request, HTTP/1.1 or HTTP/2 without TLS.

use super::Error;
use super::body::{Payload, hex};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sha2::{Digest, Sha256};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// Protocol of a connection to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Http {
    H1,
    H2,
}

/// A complete response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) sha256: String,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Reply {
    /// A header as text; empty if it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
    }

    /// The body as JSON; `Null` if it is not JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A response whose body is still to be read. To drop it is to disconnect.
pub(crate) struct Open {
    pub(crate) response: Response<Incoming>,
    connection: Connection,
}

/// The task that drives a connection; the connection is cut on drop.
struct Connection(tokio::task::JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Open {
    /// The next chunk of the body, `None` at its end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        while let Some(frame) = self.response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// Reads to the end.
    pub(crate) async fn finish(self) -> Result<Reply, Error> {
        let (parts, mut incoming) = self.response.into_parts();
        let (mut body, mut trailers, mut digest) = (Vec::new(), None, Sha256::new());
        while let Some(frame) = incoming.frame().await {
            match frame?.into_data() {
                Ok(data) => {
                    digest.update(&data);
                    body.extend_from_slice(&data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        drop(self.connection);
        let sha256 = hex(&digest.finalize());
        Ok(Reply { status: parts.status, headers: parts.headers, body, sha256, trailers })
    }
}

/// Sends a request and returns when the response's headers are in.
pub(crate) async fn open(to: SocketAddr, http: Http, request: Request<Payload>) -> Result<Open, Error> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let io = TokioIo::new(stream);
    let (response, connection) = match http {
        Http::H1 => {
            let (mut sender, driver) = hyper::client::conn::http1::handshake(io).await?;
            let connection = Connection(tokio::spawn(async move {
                let _ = driver.with_upgrades().await;
            }));
            (sender.send_request(request).await?, connection)
        }
        Http::H2 => {
            let (mut sender, driver) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await?;
            let connection = Connection(tokio::spawn(async move {
                let _ = driver.await;
            }));
            (sender.send_request(request).await?, connection)
        }
    };
    Ok(Open { response, connection })
}

/// Sends a request and reads the whole response; one that takes longer than a minute is an error.
pub(crate) async fn send(to: SocketAddr, http: Http, request: Request<Payload>) -> Result<Reply, Error> {
    tokio::time::timeout(Duration::from_secs(60), async { open(to, http, request).await?.finish().await }).await?
}

/// A request to `target` (path and query) at `to`.
pub(crate) fn request(method: &str, to: SocketAddr, http: Http, target: &str, body: Payload) -> Request<Payload> {
    let builder = Request::builder().method(method).header(header::CONTENT_TYPE, "application/json");
    let builder = match http {
        Http::H1 => builder.uri(target).header(header::HOST, to.to_string()),
        Http::H2 => builder.uri(format!("http://{to}{target}")),
    };
    builder.body(body).expect("a valid request")
}

/// `POST` of a JSON body over HTTP/1.1.
pub(crate) async fn post(to: SocketAddr, target: &str, body: Bytes) -> Result<Reply, Error> {
    send(to, Http::H1, request("POST", to, Http::H1, target, Payload::sized(body))).await
}

/// `GET` over HTTP/1.1.
pub(crate) async fn get(to: SocketAddr, target: &str) -> Result<Reply, Error> {
    send(to, Http::H1, request("GET", to, Http::H1, target, Payload::sized(Bytes::new()))).await
}
