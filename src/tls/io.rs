//! Connections for tonic: plain or after a handshake.

use super::failures::HandshakeFailures;
use super::hello::Nameless;
use rustls::server::ServerConfig;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// A client that has not finished its handshake by then won't.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Handshakes at once: they cost CPU, and a picker has few clients.
const MAX_HANDSHAKES: usize = 256;
/// First and longest pause after the system refused a connection (no file descriptors).
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// One connection, and what is to be dropped with it.
#[derive(Debug)]
pub struct ServerIo<G = ()> {
    stream: Stream,
    _guard: G,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<Nameless<TcpStream>>>),
}

/// Makes the handshakes of a listener; those that fail are logged and counted.
#[derive(Clone)]
pub struct Handshaker {
    acceptor: TlsAcceptor,
    failures: Arc<HandshakeFailures>,
}

impl Handshaker {
    /// Makes handshakes as `config` says.
    #[must_use]
    pub fn new(config: Arc<ServerConfig>) -> Self {
        Self { acceptor: config.into(), failures: Arc::default() }
    }

    /// The handshakes that failed.
    #[must_use]
    pub fn failures(&self) -> &Arc<HandshakeFailures> {
        &self.failures
    }

    async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<Nameless<TcpStream>>> {
        let peer = stream.peer_addr().ok();
        let done = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.acceptor.accept(Nameless::new(stream))).await;
        done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).inspect_err(|e| self.failures.record(peer, e))
    }
}

impl fmt::Debug for Handshaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshaker").field("failures", &self.failures).finish_non_exhaustive()
    }
}

/// Makes the handshake on `stream`, or none without TLS. `guard` is dropped with the connection, or here when there is none.
///
/// # Errors
/// When the handshake fails or takes longer than 10 s. The failure has been logged and counted.
pub async fn handshake<G>(stream: TcpStream, tls: Option<&Handshaker>, guard: G) -> io::Result<ServerIo<G>> {
    let stream = match tls {
        None => Stream::Plain(stream),
        Some(tls) => Stream::Tls(Box::new(tls.accept(stream).await?)),
    };
    Ok(ServerIo { stream, _guard: guard })
}

/// A listener that outlives errors: a peer that leaves before it is accepted costs nothing, and when the system has no file
/// descriptors left, accepting pauses and goes on.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    backoff: Duration,
}

impl Acceptor {
    /// Accepts from `listener`.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, backoff: ACCEPT_BACKOFF.0 }
    }

    /// The next connection. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    self.backoff = ACCEPT_BACKOFF.0;
                    // Messages are small and answers are awaited: Nagle would add 40 ms.
                    let _ = stream.set_nodelay(true);
                    return (stream, peer);
                }
                Err(error) if is_the_peers(&error) => {}
                Err(error) => {
                    let pause_ms = u64::try_from(self.backoff.as_millis()).unwrap_or(u64::MAX);
                    tracing::warn!(%error, pause_ms, "can't accept connections");
                    tokio::time::sleep(self.backoff).await;
                    self.backoff = (self.backoff * 2).min(ACCEPT_BACKOFF.1);
                }
            }
        }
    }
}

/// Accepts from `listener` and, with a configuration, makes the handshakes: side by side, so that a slow client keeps nobody
/// waiting. Ends when the stream is dropped. Must be called inside a tokio runtime.
pub fn incoming(listener: TcpListener, tls: Option<Handshaker>) -> ReceiverStream<io::Result<ServerIo>> {
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(accept(Acceptor::new(listener), tls, sender));
    ReceiverStream::new(receiver)
}

async fn accept(mut acceptor: Acceptor, tls: Option<Handshaker>, sender: mpsc::Sender<io::Result<ServerIo>>) {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let (stream, _) = tokio::select! {
            accepted = acceptor.next() => accepted,
            () = sender.closed() => return,
        };
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let (tls, sender) = (tls.clone(), sender.clone());
        tokio::spawn(async move {
            if let Ok(connection) = handshake(stream, tls.as_ref(), ()).await {
                // The connection closes with the value when the receiver is gone.
                drop(sender.send(Ok(connection)).await);
            }
            drop(permit);
        });
    }
}

/// Errors of accept that are about the connection, not about us.
fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

impl<G> Connected for ServerIo<G> {
    type ConnectInfo = Option<SocketAddr>;

    fn connect_info(&self) -> Self::ConnectInfo {
        match &self.stream {
            Stream::Plain(stream) => stream.peer_addr().ok(),
            Stream::Tls(stream) => stream.get_ref().0.get_ref().peer_addr().ok(),
        }
    }
}

impl<G: Unpin> AsyncRead for ServerIo<G> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl<G: Unpin> AsyncWrite for ServerIo<G> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Stream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }
}
