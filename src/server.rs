//! The ext-proc listener: one acceptor, N single-threaded runtimes that serve what it hands them.
//!
//! A request is a few microseconds of work, so threads that share nothing beat a work-stealing pool by a third, and a stall in one can't reach
//! the others. Envoy keeps one connection per worker; the acceptor gives each to the thread with the fewest, which `SO_REUSEPORT`'s hash would
//! not do with a handful of connections.
//!
//! Called by `app`. May import `connections`, `ext_proc`, `health`, `tls`, tonic, tokio.

mod authority;
mod lenient;

use crate::connections::{Connections, Slot};
use crate::ext_proc::service::Service;
use crate::ext_proc::wire::Wire;
use crate::health::Health;
use crate::tls::{Acceptor, Handshaker, ServerIo, Tcp, handshake};
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

/// h2 closes a connection, with every stream on it, when more than this many streams are reset before it looked at them. Its default of 20 is
/// reached by a handful of clients that leave during a stall; Envoy is trusted, so the bound is only there to be one.
const MAX_PENDING_RESETS: usize = 100_000;
/// Bytes of one stream that Envoy may send before the picker has read them, 1 MiB. Smaller windows halve the
/// throughput of large bodies.
const STREAM_WINDOW: u32 = 1 << 20;
/// Bytes of all streams of a connection that Envoy may send before the picker has read them, 1 MiB. Bodies of 128 KiB
/// and more are a third slower with 4 MiB, because what waits no longer fits into the processor's cache. h2's budget
/// for small DATA frames is half of it: see `lenient`.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// A dead peer is noticed after this long without traffic.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// And given up after this long without an answer.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that wait for their thread; more wait in the kernel.
const HANDOVER_QUEUE: usize = 256;

/// The threads that serve ext-proc.
#[derive(Debug)]
pub struct Shards {
    shards: Vec<Shard>,
}

#[derive(Debug)]
struct Shard {
    connections: Arc<AtomicUsize>,
    hand_over: mpsc::Sender<Accepted>,
    done: CancellationToken,
}

impl Shards {
    /// Starts `count` threads. Each serves until `drain` is cancelled and its streams have ended.
    ///
    /// # Errors
    /// When a thread or its runtime can't be made.
    pub fn start(
        count: usize,
        service: &Service,
        tls: Option<&Handshaker>,
        health: Option<&Health>,
        drain: &CancellationToken,
    ) -> io::Result<Self> {
        let shards = (0..count.max(1))
            .map(|number| Shard::start(number, service.clone(), tls.cloned(), health.cloned(), drain.clone()))
            .collect::<io::Result<Vec<_>>>()?;
        Ok(Self { shards })
    }

    /// Accepts until `stop` is cancelled, within the limits of `connections`.
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

    /// Ready when every stream has ended after a drain.
    pub async fn drained(&self) {
        for shard in &self.shards {
            shard.done.cancelled().await;
        }
    }
}

impl Shard {
    fn start(
        number: usize,
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
            // However this thread ends, whoever waits for it is told.
            let _finished = finished.drop_guard();
            if let Err(error) = runtime.block_on(serve(service, tls, health, handed, counted, drain)) {
                tracing::error!(%error, "ext-proc server failed");
            }
        })?;
        Ok(Self { connections, hand_over, done })
    }
}

async fn serve(
    service: Service,
    tls: Option<Handshaker>,
    health: Option<Health>,
    mut handed: mpsc::Receiver<Accepted>,
    connections: Arc<AtomicUsize>,
    drain: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let (ready, incoming) = mpsc::channel::<io::Result<Lenient<ServerIo<Open>>>>(HANDOVER_QUEUE);
    tokio::spawn(async move {
        while let Some(stream) = handed.recv().await {
            let open = Open(connections.clone());
            let (tls, ready) = (tls.clone(), ready.clone());
            tokio::spawn(async move {
                // A handshake that fails has been logged and counted.
                if let Ok(connection) = adopt(stream, tls.as_ref(), open).await {
                    // Full or closed only when the server is going down.
                    drop(ready.send(Ok(Lenient::new(connection))).await);
                }
            });
        }
    });
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_max_pending_accept_reset_streams(Some(MAX_PENDING_RESETS))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(Wire::new(service))
        .add_optional_service(health.map(|h| h.service()))
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), drain.cancelled_owned())
        .await
}

/// A connection on its way to its thread.
type Accepted = (std::net::TcpStream, Slot);

/// Takes over a connection from the acceptor's runtime.
async fn adopt((stream, slot): Accepted, tls: Option<&Handshaker>, open: Open) -> io::Result<ServerIo<Open>> {
    handshake(Tcp::from_std(stream, slot)?, tls, open).await
}

/// Counts an open connection of a shard.
#[derive(Debug)]
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
