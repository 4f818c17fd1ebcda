//! A fleet of simulated servers in one process: listeners, connections, the end.
//!
//! Called by `cli::sim` and by tests. May import `sim::http`, `clock`, tokio and hyper.

use crate::config::SimConfig;
use crate::fault_board::FaultBoard;
use crate::http::{FleetPosition, Server};
use crate::kv_events::publish;
use crate::kv_events::{KvEventSource, KvLink};
use crate::pd::{DEFAULT_SIDE_CHANNEL_PORT, Peers};
use attache_types::clock::Clock;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// 4,096 connections may wait to be accepted: a load test opens thousands at once.
const ACCEPT_BACKLOG: u32 = 4_096;
/// 65,536 streams on an HTTP/2 connection: a proxy puts all of its requests on a few connections.
const MAX_CONCURRENT_STREAMS: u32 = 65_536;
/// As many resets in a row are taken as there may be streams: tests abort them in bursts.
const MAX_RESET_STREAMS: usize = 65_536;
/// 1 MiB a stream and 16 MiB a connection: large prompts come in without waiting for window updates.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// 50 ms before accepting again when the process is out of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(50);

/// A running fleet. Dropping it stops it at once.
#[derive(Debug)]
pub struct SimHandle {
    addresses: Vec<SocketAddr>,
    kv_event_sources: Vec<KvEventSource>,
    peers: Arc<Peers>,
    tasks: TaskTracker,
    /// No new connections and requests.
    stop: CancellationToken,
    /// Closes all connections when cancelled.
    abort: CancellationToken,
}

impl SimHandle {
    /// Where the servers listen, in order.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Where their KV events can be had, in order, of each server rank by rank; empty when they tell none.
    #[must_use]
    pub fn kv_event_sources(&self) -> &[KvEventSource] {
        &self.kv_event_sources
    }

    /// Takes nothing new, gives what is under way up to `grace` to end, then stops.
    pub async fn shutdown(self, grace: Duration) {
        self.stop.cancel();
        self.tasks.close();
        // What has not ended by then is cut by the abort.
        let _ = tokio::time::timeout(grace, self.tasks.wait()).await;
        self.abort.cancel();
        self.tasks.wait().await;
    }
}

impl Drop for SimHandle {
    fn drop(&mut self) {
        self.stop.cancel();
        self.abort.cancel();
    }
}

/// Starts the servers; they listen when this returns. Must be called in a tokio runtime.
///
/// # Errors
/// When a port can't be had, or KV events are asked for that can't be sent; none of the servers runs then.
pub fn serve(config: &SimConfig) -> io::Result<SimHandle> {
    let clock = Clock::start();
    let mut listeners = Vec::with_capacity(usize::from(config.endpoints));
    for index in 0..config.endpoints {
        let port = match config.port {
            0 => 0,
            first => first.checked_add(index).ok_or_else(|| {
                let endpoints = config.endpoints;
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("{endpoints} endpoints from port {first} on go beyond port 65535"),
                )
            })?,
        };
        listeners.push(listen(SocketAddr::new(config.bind, port))?);
    }
    let mut fleet = SimHandle {
        addresses: Vec::with_capacity(listeners.len()),
        kv_event_sources: Vec::new(),
        peers: Arc::default(),
        tasks: TaskTracker::new(),
        stop: CancellationToken::new(),
        abort: CancellationToken::new(),
    };
    for (index, listener) in (0..).zip(listeners) {
        fleet.start(config, index, listener, clock)?;
    }
    Ok(fleet)
}

impl SimHandle {
    /// Starts server number `index`. Those before it stop when the handle is dropped.
    fn start(&mut self, config: &SimConfig, index: u16, listener: TcpListener, clock: Clock) -> io::Result<()> {
        let address = listener.local_addr()?;
        let faults = Arc::new(FaultBoard::new(config.server.faults.clone()));
        let ranks = config.server.ranks.max(1);
        let mut links = Vec::with_capacity(usize::from(ranks));
        for rank in 0..ranks {
            let place = index.saturating_mul(ranks).saturating_add(rank);
            links.push(self.start_publisher(config, place, address, clock, &faults)?);
        }
        self.addresses.push(address);
        self.kv_event_sources.extend(links.iter().flatten().map(|link| link.source.clone()));
        let place = FleetPosition {
            address,
            // Who listens everywhere is found here.
            host: if address.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address.ip() },
            // A number only: the simulator has no listener there.
            side_channel: DEFAULT_SIDE_CHANNEL_PORT.wrapping_add(index),
            role: config.roles.get(usize::from(index)).copied().unwrap_or_default(),
            peers: self.peers.clone(),
        };
        let server = Arc::new(Server::new(place, clock, config.server.clone(), faults, links));
        for engine in server.hosts().cloned() {
            let aborted = self.abort.clone();
            // The engine outlives the stop: what is under way shall end.
            tokio::spawn(async move { aborted.run_until_cancelled(engine.drive()).await });
        }
        let (tasks, stop, abort) = (self.tasks.clone(), self.stop.clone(), self.abort.clone());
        let keep_alive = (!config.keep_alive.is_zero()).then_some(config.keep_alive);
        self.tasks.spawn(accept(listener, server, keep_alive, tasks, stop, abort));
        Ok(())
    }

    fn start_publisher(
        &self,
        config: &SimConfig,
        place: u16,
        address: SocketAddr,
        clock: Clock,
        faults: &Arc<FaultBoard>,
    ) -> io::Result<Option<KvLink>> {
        let Some(kv_events) = &config.server.kv_events else { return Ok(None) };
        let model = config.server.models.first().map_or("", String::as_str);
        let (publisher, link) = publish::open(kv_events, place, address, model, clock, faults.clone())?;
        let aborted = self.abort.clone();
        tokio::spawn(async move { aborted.run_until_cancelled(publisher.run()).await });
        Ok(Some(link))
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    let named = |error: io::Error| io::Error::new(error.kind(), format!("listen on {address}: {error}"));
    socket.bind(address).map_err(named)?;
    socket.listen(ACCEPT_BACKLOG).map_err(named)
}

async fn accept(
    listener: TcpListener,
    server: Arc<Server>,
    keep_alive: Option<Duration>,
    tasks: TaskTracker,
    stop: CancellationToken,
    abort: CancellationToken,
) {
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, _)) => {
                tasks.spawn(connection(stream, server.clone(), keep_alive, stop.clone(), abort.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    server: Arc<Server>,
    keep_alive: Option<Duration>,
    stop: CancellationToken,
    abort: CancellationToken,
) {
    // Tokens are small and must not wait for each other; a socket that refuses works all the same.
    let _ = stream.set_nodelay(true);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    // hyper counts the time until the next request's headers, so this closes idle connections as uvicorn does.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(keep_alive);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .max_pending_accept_reset_streams(MAX_RESET_STREAMS)
        .max_local_error_reset_streams(MAX_RESET_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let service = service_fn(move |request| {
        let server = server.clone();
        async move { Ok::<_, Infallible>(server.handle(request).await) }
    });
    let mut serving = pin!(builder.serve_connection(TokioIo::new(stream), service));
    // How a connection ends is the client's affair: a reset is as good an end as any here.
    tokio::select! {
        _ = serving.as_mut() => return,
        () = stop.cancelled() => serving.as_mut().graceful_shutdown(),
    }
    let _ = abort.run_until_cancelled(serving).await;
}
