//! One server's publisher: frames from its engine, out on a PUB socket that binds or connects, with the
//! faults that are asked for.
//!
//! A restart closes the sockets and opens new ones on the same ports, as a new process would. A frame is kept for
//! repetition before it is sent, so that a subscriber that missed it can request it at once. Called by `sim::fleet`.

use super::encode::KvFrame;
use super::replay::{self, BatchRing};
use super::{KvEventSource, KvEventsConfig, KvLink, Outlet, ReplayFormat, Restart};
use crate::fault_board::FaultBoard;
use crate::faults::Faults;
use attache_types::clock::Clock;
use bytes::Bytes;
use futures_util::StreamExt;
use parking_lot::Mutex;
use std::future::pending;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketEvent, SocketOptions, SocketSend, ZmqMessage};

/// After 2 s of trying to reach a subscriber the library's growing pauses begin anew with short ones.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// 50 ms before trying again what has just failed: an address that can't be reached, a port that is not free yet.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Next action of the publisher.
enum NextAction {
    Publish(KvFrame),
    Restart(Restart),
}

/// The publisher of one server.
pub(crate) struct Publisher {
    clock: Clock,
    faults: Arc<FaultBoard>,
    switched: watch::Receiver<Faults>,
    topic: Bytes,
    /// Of a subscriber that listens; without it the publisher does.
    connect: Option<String>,
    publish_at: Option<Port>,
    replay_at: Option<Port>,
    replay_format: ReplayFormat,
    ring: Arc<Mutex<BatchRing>>,
    frames: mpsc::UnboundedReceiver<KvFrame>,
    restarts: mpsc::UnboundedReceiver<Restart>,
    /// Which life of the server it speaks for.
    process: u32,
    /// A frame that waits for its moment, those behind it wait too.
    head: Option<KvFrame>,
}

/// A port that stays the publisher's through restarts.
struct Port {
    address: SocketAddr,
    /// Bound already, for the first life.
    listener: Option<TcpListener>,
}

impl Port {
    fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)
            .map_err(|error| io::Error::new(error.kind(), format!("listen on {address} for KV events: {error}")))?;
        Ok(Self { address: listener.local_addr()?, listener: Some(listener) })
    }

    /// Waits for the port: who had it before us may still be leaving.
    async fn listener(&mut self) -> TcpListener {
        loop {
            match self.listener.take().map_or_else(|| TcpListener::bind(self.address), Ok) {
                Ok(listener) => return listener,
                Err(error) => {
                    tracing::warn!(address = %self.address, %error, "port for KV events is in use");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    async fn give_to(port: Option<&mut Self>, socket: &mut impl Socket) {
        let Some(port) = port else { return };
        let listener = port.listener().await;
        if let Err(error) = socket.bind_listener(listener).await {
            tracing::warn!(address = %port.address, %error, "socket for KV events can't be opened");
        }
    }
}

/// Opens the ports of publisher number `index` of a fleet; [`Publisher::run`] serves them.
///
/// # Errors
/// When a port can't be had or an address can't be read.
pub(crate) fn open(
    config: &KvEventsConfig,
    index: u16,
    server: SocketAddr,
    model: &str,
    clock: Clock,
    faults: Arc<FaultBoard>,
) -> io::Result<(Publisher, KvLink)> {
    let (publish_at, connect) = match &config.outlet {
        Outlet::Bind { port } => (Some(Port::bind(SocketAddr::new(server.ip(), nth_port(*port, index)?))?), None),
        Outlet::Connect { address } => {
            address.parse::<Endpoint>().map_err(|error| {
                let message =
                    format!("kv events: address is {address:?}, allowed are tcp://host:port and ipc://path: {error}");
                io::Error::new(io::ErrorKind::InvalidInput, message)
            })?;
            (None, Some(address.clone()))
        }
    };
    let replay_at = match config.replay_port {
        Some(port) => Some(Port::bind(SocketAddr::new(server.ip(), nth_port(port, index)?))?),
        None => None,
    };
    let endpoint = |port: &Port| format!("tcp://{}", port.address);
    let topic = config.topic.clone().unwrap_or_else(|| format!("kv@{server}@{model}"));
    let source = KvEventSource {
        endpoint: publish_at.as_ref().map(endpoint).or(connect.clone()).unwrap_or_default(),
        replay_endpoint: replay_at.as_ref().map(endpoint),
        topic: topic.clone(),
        buffer_steps: config.buffer_steps,
    };
    // Unbounded: an engine does not wait for its events, and the publisher takes them as fast as they come
    // unless a fault holds it.
    let (frames_in, frames) = mpsc::unbounded_channel();
    let (restarts_in, restarts) = mpsc::unbounded_channel();
    let publisher = Publisher {
        clock,
        switched: faults.watch(),
        faults,
        topic: topic.into(),
        connect,
        publish_at,
        replay_at,
        replay_format: config.replay_format,
        ring: Arc::new(Mutex::new(BatchRing::new(config.buffer_steps))),
        frames,
        restarts,
        process: 0,
        head: None,
    };
    Ok((publisher, KvLink { source, frames: frames_in, restarts: restarts_in }))
}

/// Consecutive ports, or the system's choice for all.
fn nth_port(first: u16, index: u16) -> io::Result<u16> {
    let port = if first == 0 { Some(0) } else { first.checked_add(index) };
    port.ok_or_else(|| {
        let message = format!("kv events: publisher {index} from port {first} on goes beyond port 65535");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })
}

impl Publisher {
    /// Publishes until it is dropped.
    pub(crate) async fn run(mut self) {
        let mut reached: Option<Restart> = None;
        loop {
            let mut options = SocketOptions::default();
            options.connect_timeout(CONNECT_TIMEOUT);
            let mut publisher = PubSocket::with_options(options);
            let mut replayer = RouterSocket::new();
            Port::give_to(self.publish_at.as_mut(), &mut publisher).await;
            Port::give_to(self.replay_at.as_mut(), &mut replayer).await;
            if let Some(restart) = reached.take() {
                // Who asked may have gone.
                let _ = restart.done.send(());
            }
            let repeating = replay::serve(
                &mut replayer,
                self.ring.clone(),
                self.faults.clone(),
                self.topic.clone(),
                self.replay_format,
            );
            let restart = tokio::select! {
                restart = self.publish(&mut publisher) => restart,
                () = repeating => return,
            };
            for error in publisher.close().await.into_iter().chain(replayer.close().await) {
                tracing::debug!(%error, "closing a socket for KV events failed");
            }
            self.ring.lock().clear();
            self.process = restart.process;
            reached = Some(restart);
        }
    }

    /// Publishes until the next restart.
    async fn publish(&mut self, socket: &mut PubSocket) -> Restart {
        let Some(address) = self.connect.clone() else {
            loop {
                match self.next().await {
                    NextAction::Publish(frame) => self.send(socket, frame).await,
                    NextAction::Restart(restart) => return restart,
                }
            }
        };
        let mut monitor = socket.monitor();
        loop {
            if let Err(restart) = self.reach(socket, &address).await {
                return restart;
            }
            loop {
                tokio::select! {
                    event = monitor.next() => match event {
                        Some(SocketEvent::Disconnected(_)) | None => break,
                        Some(_) => {}
                    },
                    next = self.next() => match next {
                        NextAction::Publish(frame) => self.send(socket, frame).await,
                        NextAction::Restart(restart) => return restart,
                    },
                }
            }
        }
    }

    /// Connects to the subscriber, for as long as it takes; frames are meanwhile kept for repetition only.
    async fn reach(&mut self, socket: &mut PubSocket, address: &str) -> Result<(), Restart> {
        loop {
            let outcome = {
                let mut connecting = pin!(socket.connect(address));
                loop {
                    tokio::select! {
                        outcome = &mut connecting => break outcome,
                        next = self.next() => match next {
                            NextAction::Publish(frame) => self.keep(&frame),
                            NextAction::Restart(restart) => return Err(restart),
                        },
                    }
                }
            };
            match outcome {
                Ok(()) => return Ok(()),
                Err(error) => {
                    tracing::debug!(address, %error, "connection to the subscriber of KV events failed");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    /// The next frame at its moment, or a restart. Loses nothing when it is dropped before it is done.
    async fn next(&mut self) -> NextAction {
        loop {
            let fault = self.switched.borrow_and_update().kv_events;
            let process = self.process;
            if self.head.as_ref().is_some_and(|head| head.process < process) {
                self.head = None;
            }
            let due = self.head.as_ref().filter(|head| head.process == process && !fault.pause);
            let due = due.map(|head| self.clock.instant(head.at.after(Duration::from_millis(fault.delay_ms))));
            let moment = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(restart) = self.restarts.recv() => return NextAction::Restart(restart),
                Ok(()) = self.switched.changed() => {}
                () = moment => if let Some(head) = self.head.take() {
                    return NextAction::Publish(head);
                },
                Some(frame) = self.frames.recv(), if self.head.is_none() => self.head = Some(frame),
            }
        }
    }

    async fn send(&mut self, socket: &mut PubSocket, frame: KvFrame) {
        self.keep(&frame);
        if self.faults.take_kv_drop() {
            return;
        }
        let number = Bytes::copy_from_slice(&frame.sequence.to_be_bytes());
        match ZmqMessage::try_from(vec![self.topic.clone(), number, frame.payload]) {
            Ok(message) => {
                if let Err(error) = socket.send(message).await {
                    tracing::debug!(%error, "frame of KV events not sent");
                }
            }
            Err(error) => tracing::debug!(%error, "frame of KV events is not a message"),
        }
    }

    fn keep(&self, frame: &KvFrame) {
        self.ring.lock().push(frame.sequence, frame.payload.clone());
    }
}
