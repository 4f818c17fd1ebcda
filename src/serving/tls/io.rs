//! Connections for tonic: plain or after a TLS handshake.

use super::failures::HandshakeFailures;
use super::hello::Nameless;
use crate::connections::{Client, Connections, Slot};
use crate::log_counter::LogCounter;
use rustls::server::ServerConfig;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// Longest duration of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most concurrent handshakes: they cost CPU, and Attaché has few clients.
const MAX_HANDSHAKES: usize = 256;
/// First and longest pause after a failed accept, when file descriptors are exhausted.
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Bytes after which a connection counts as opened: the length of HTTP/2's preface; hardly
/// any HTTP/1.1 request is shorter.
const OPENING_BYTES: usize = 24;
/// Interval in which connections that take too long to open are closed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// One connection, and a guard that is dropped with it.
#[derive(Debug)]
pub struct ServerIo<G = ()> {
    stream: Stream,
    /// Bytes that must still arrive before the connection counts as opened.
    opening: usize,
    _guard: G,
}

#[derive(Debug)]
enum Stream {
    Plain(Tcp),
    Tls(Box<TlsStream<Nameless<Tcp>>>),
}

/// Does the handshakes of a listener; failures are logged and counted.
#[derive(Clone)]
pub struct Handshaker {
    acceptor: TlsAcceptor,
    failures: Arc<HandshakeFailures>,
}

impl Handshaker {
    /// Creates a handshaker with this configuration.
    #[must_use]
    pub fn new(config: Arc<ServerConfig>) -> Self {
        Self { acceptor: config.into(), failures: Arc::default() }
    }

    /// Returns the counters of failed handshakes.
    #[must_use]
    pub fn failures(&self) -> &Arc<HandshakeFailures> {
        &self.failures
    }

    async fn accept(&self, stream: Tcp) -> io::Result<TlsStream<Nameless<Tcp>>> {
        let peer = stream.slot.peer();
        let done = tokio::time::timeout(HANDSHAKE_TIMEOUT, self.acceptor.accept(Nameless::new(stream))).await;
        done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).inspect_err(|e| self.failures.record(peer, e))
    }
}

impl fmt::Debug for Handshaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshaker").field("failures", &self.failures).finish_non_exhaustive()
    }
}

/// A socket with its place among the listener's connections. It fails once the place is revoked.
#[derive(Debug)]
pub struct Tcp {
    stream: TcpStream,
    slot: Slot,
}

impl Tcp {
    /// Registers a socket with the current runtime.
    ///
    /// # Errors
    /// When the runtime cannot register it.
    pub fn from_std(stream: std::net::TcpStream, slot: Slot) -> io::Result<Self> {
        Ok(Self { stream: TcpStream::from_std(stream)?, slot })
    }

    /// Releases the socket for another runtime.
    ///
    /// # Errors
    /// When the runtime cannot release it.
    pub fn into_std(self) -> io::Result<(std::net::TcpStream, Slot)> {
        Ok((self.stream.into_std()?, self.slot))
    }

    /// Returns the result of an operation on the socket, or an error if the connection must be closed.
    fn unless_closed<T>(
        &mut self,
        cx: &mut Context<'_>,
        operation: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.slot.is_closing() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let polled = operation(Pin::new(&mut self.stream), cx);
        if polled.is_pending() && self.slot.poll_closed(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        polled
    }
}

/// Does the handshake on `stream`, or none without TLS. `guard` is dropped with the connection, or
/// here if the handshake fails.
///
/// # Errors
/// When the handshake fails or takes longer than 10 s. The failure has been logged and counted.
pub async fn handshake<G>(stream: Tcp, tls: Option<&Handshaker>, guard: G) -> io::Result<ServerIo<G>> {
    let stream = match tls {
        None => Stream::Plain(stream),
        Some(tls) => Stream::Tls(Box::new(tls.accept(stream).await?)),
    };
    Ok(ServerIo { stream, opening: OPENING_BYTES, _guard: guard })
}

impl<G> ServerIo<G> {
    fn slot(&self) -> &Slot {
        match &self.stream {
            Stream::Plain(stream) => &stream.slot,
            Stream::Tls(stream) => &stream.get_ref().0.get_ref().slot,
        }
    }
}

/// A listener that survives errors: peers that disconnect before accept are ignored, and accepting pauses when file
/// descriptors are exhausted. It enforces the limits of its connections.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    connections: Arc<Connections>,
    sweep: Interval,
    backoff: Duration,
    /// Log messages about connections that can't be accepted.
    failures: LogCounter,
}

impl Acceptor {
    /// Accepts from `listener`, within the limits of `connections`. Must be called inside a tokio runtime.
    #[must_use]
    pub fn new(listener: TcpListener, connections: Arc<Connections>) -> Self {
        let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { listener, connections, sweep, backoff: ACCEPT_BACKOFF.0, failures: LogCounter::default() }
    }

    /// Returns the next admitted connection. While it is polled, connections that do not open in time are closed.
    pub async fn next(&mut self) -> Tcp {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                _ = self.sweep.tick() => {
                    self.connections.sweep();
                    continue;
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    self.backoff = ACCEPT_BACKOFF.0;
                    // Messages are small and responses are awaited: Nagle would add 40 ms.
                    let _ = stream.set_nodelay(true);
                    if let Some(slot) = self.connections.admit(peer).await {
                        return Tcp { stream, slot };
                    }
                }
                Err(error) if is_the_peers(&error) => {}
                Err(error) => {
                    let pause_ms = u64::try_from(self.backoff.as_millis()).unwrap_or(u64::MAX);
                    if let Some(skipped) = self.failures.count(Instant::now()) {
                        tracing::warn!(%error, pause_ms, skipped, "can't accept connections");
                    }
                    tokio::time::sleep(self.backoff).await;
                    self.backoff = (self.backoff * 2).min(ACCEPT_BACKOFF.1);
                }
            }
        }
    }
}

/// Accepts from `listener` within the limits of `connections` and does the handshakes if TLS is
/// configured, concurrently, so that a slow client delays no other. Ends when the stream is dropped. Must
/// be called inside a tokio runtime.
pub fn incoming(
    listener: TcpListener,
    connections: Arc<Connections>,
    tls: Option<Handshaker>,
) -> ReceiverStream<io::Result<ServerIo>> {
    let (sender, receiver) = mpsc::channel(64);
    tokio::spawn(accept(Acceptor::new(listener, connections), tls, sender));
    ReceiverStream::new(receiver)
}

async fn accept(mut acceptor: Acceptor, tls: Option<Handshaker>, sender: mpsc::Sender<io::Result<ServerIo>>) {
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    loop {
        let stream = tokio::select! {
            accepted = acceptor.next() => accepted,
            () = sender.closed() => return,
        };
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let (tls, sender) = (tls.clone(), sender.clone());
        tokio::spawn(async move {
            if let Ok(connection) = handshake(stream, tls.as_ref(), ()).await {
                // If the receiver is gone, the connection closes with the value.
                drop(sender.send(Ok(connection)).await);
            }
            drop(permit);
        });
    }
}

/// Whether an accept error concerns only the peer's connection.
fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

impl<G> Connected for ServerIo<G> {
    type ConnectInfo = Client;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.slot().client()
    }
}

impl AsyncRead for Tcp {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = this.unless_closed(cx, |stream, cx| stream.poll_read(cx, buf));
        if polled.is_ready() {
            this.slot.touch();
        }
        polled
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().unless_closed(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().unless_closed(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().unless_closed(cx, |stream, cx| stream.poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().unless_closed(cx, |stream, cx| stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<G: Unpin> AsyncRead for ServerIo<G> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let polled = match &mut this.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        if this.opening > 0 {
            this.opening = this.opening.saturating_sub(buf.filled().len() - before);
            if this.opening == 0 {
                this.slot().opened();
            }
        }
        polled
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
