//! The ext-proc listener: one acceptor, and N single-threaded runtimes that serve its connections.
//!
//! A request is a few microseconds of work. Threads that share nothing are therefore a third faster than a
//! work-stealing pool, and a stall in one does not affect the others. Envoy keeps one connection for each of its
//! workers. The acceptor assigns each connection to the thread with the fewest connections. The hash of `SO_REUSEPORT`
//! would distribute so few connections unevenly.

mod authority;
mod lenient;

use crate::service::Service;
use crate::wire::Wire;
use attache_serving::connections::{Connections, Slot};
use attache_serving::health::Health;
use attache_serving::tls::{Acceptor, Handshaker, ServerIo, Tcp, handshake};
use lenient::Lenient;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

/// h2 closes a connection with all its streams if more than this many streams are reset before it has processed them. A
/// few clients that disconnect during a stall reach its default of 20. Envoy is trusted, so a high limit suffices.
const MAX_PENDING_RESETS: usize = 100_000;
/// Bytes of one stream that Envoy may send before Attaché has read them, 1 MiB. Smaller windows halve the throughput of
/// large bodies.
const STREAM_WINDOW: u32 = 1 << 20;
/// Bytes of all streams of a connection that Envoy may send before Attaché has read them, 1 MiB. Bodies of 128 KiB and
/// more are a third slower with 4 MiB, because unread bytes exceed the processor's cache. Half of it is h2's budget for
/// small DATA frames: see `lenient`.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Time without traffic after which the peer is probed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time without a response to the probe after which the connection is closed.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Accepted connections that one thread has not taken yet. Further connections wait in the kernel's accept queue.
const HANDOVER_QUEUE: usize = 256;

/// The threads that serve ext-proc.
#[derive(Debug)]
pub struct Shards {
    shards: Vec<Shard>,
}

/// One thread of the server, as the acceptor sees it.
#[derive(Debug)]
struct Shard {
    /// Number of connections that the thread has, or is about to get.
    connections: Arc<AtomicUsize>,
    hand_over: mpsc::Sender<Accepted>,
    /// Cancelled when the thread ends.
    done: CancellationToken,
}

impl Shards {
    /// Starts `count` threads. Each serves until `drain` is cancelled and its streams have ended. A connection may have
    /// `max_streams` open.
    ///
    /// # Errors
    /// If a thread or its runtime can't be created.
    pub fn start(
        count: usize,
        max_streams: u32,
        service: &Service,
        tls: Option<&Handshaker>,
        health: Option<&Health>,
        drain: &CancellationToken,
    ) -> io::Result<Self> {
        let shards = (0..count.max(1))
            .map(|number| {
                Shard::start(number, max_streams, service.clone(), tls.cloned(), health.cloned(), drain.clone())
            })
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self { shards })
    }

    /// Accepts connections until `stop` is cancelled, within the limits of `connections`.
    pub async fn accept(&self, listener: TcpListener, connections: Arc<Connections>, stop: CancellationToken) {
        let mut acceptor = Acceptor::new(listener, connections);
        while let Some(stream) = stop.run_until_cancelled(acceptor.next()).await {
            let Ok(stream) = stream.into_std() else { continue };
            let Some(shard) = self.shards.iter().min_by_key(|s| s.connections.load(Relaxed)) else { return };
            shard.connections.fetch_add(1, Relaxed);
            if shard.hand_over.send(stream).await.is_err() {
                return;
            }
        }
    }

    /// Completes when every stream has ended after a drain.
    pub async fn drained(&self) {
        for shard in &self.shards {
            shard.done.cancelled().await;
        }
    }
}

impl Shard {
    fn start(
        number: usize,
        max_streams: u32,
        service: Service,
        tls: Option<Handshaker>,
        health: Option<Health>,
        drain: CancellationToken,
    ) -> io::Result<Self> {
        let (hand_over, handed) = mpsc::channel(HANDOVER_QUEUE);
        let connections = Arc::new(AtomicUsize::new(0));
        let done = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (counted, finished) = (connections.clone(), done.clone());
        std::thread::Builder::new().name(format!("ext-proc-{number}")).spawn(move || {
            // The guard cancels `done` even if this thread panics.
            let _finished = finished.drop_guard();
            if let Err(error) = runtime.block_on(serve(max_streams, service, tls, health, handed, counted, drain)) {
                tracing::error!(%error, "ext-proc server failed");
            }
        })?;
        Ok(Self { connections, hand_over, done })
    }
}

async fn serve(
    max_streams: u32,
    service: Service,
    tls: Option<Handshaker>,
    health: Option<Health>,
    mut handed: mpsc::Receiver<Accepted>,
    connections: Arc<AtomicUsize>,
    drain: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let (ready, incoming) = mpsc::channel::<io::Result<Lenient<ServerIo<OpenConnection>>>>(HANDOVER_QUEUE);
    tokio::spawn(async move {
        while let Some(stream) = handed.recv().await {
            let open = OpenConnection(connections.clone());
            let (tls, ready) = (tls.clone(), ready.clone());
            tokio::spawn(async move {
                // A failed handshake was logged and counted.
                if let Ok(connection) = adopt(stream, tls.as_ref(), open).await {
                    // The receiver is gone only during shutdown.
                    drop(ready.send(Ok(Lenient::new(connection))).await);
                }
            });
        }
    });
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(Some(max_streams))
        .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(Wire::new(service))
        .add_optional_service(health.map(|h| h.service()))
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), drain.cancelled_owned())
        .await
}

/// An accepted connection that its thread has not taken yet.
type Accepted = (std::net::TcpStream, Slot);

/// Registers a connection with this thread's runtime, and runs the TLS handshake if there is one.
async fn adopt(
    (stream, slot): Accepted,
    tls: Option<&Handshaker>,
    open: OpenConnection,
) -> io::Result<ServerIo<OpenConnection>> {
    handshake(Tcp::from_std(stream, slot)?, tls, open).await
}

/// Counts an open connection of a thread while it exists.
#[derive(Debug)]
struct OpenConnection(Arc<AtomicUsize>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
