//! The socket that engines connect to, and the assignment of their frames to lanes.
//!
//! An engine's topic `kv@<ip:port>@<model>` names its endpoint. A frame counts only if the connection comes from that
//! endpoint's IP address; others are dropped and counted. A pod can therefore publish only for endpoints with its own
//! address. Engines that share an IP address (several ranks of a pod, pods with `hostNetwork`) are distinguished by the
//! topic alone. Where NAT changes addresses, `requireSenderAddress: false` accepts every sender.
//!
//! [`Connections`] limits the connections, and the bytes that they buffer and queue, over all pools.

use super::lane::FromCentral;
use super::replay;
use super::stats::{Count, KvEventStats};
use super::subscription::{MemoryLimits, Timing};
use super::zmtp::{Connection, Message, READ_CHUNK, Role, ZmtpError};
use ahash::AHashMap;
use arc_swap::ArcSwap;
use attache_prefix::wire;
use attache_serving::connections::{Connections, OpenStream, Slot};
use bytes::Bytes;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pause after a failed accept, which usually means that file descriptors are exhausted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Shortest time between two warnings about wrong senders.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// The address of an endpoint, and the rank of one of its engines.
pub(super) type Speaker = (SocketAddr, u16);

/// The sending end of a lane's queue.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    pub(super) sender: mpsc::Sender<FromCentral>,
    /// Whether a frame was dropped since the lane last checked.
    pub(super) overflowed: Arc<AtomicBool>,
    /// Number of connections that have published for the lane.
    pub(super) connections: Arc<AtomicUsize>,
}

/// The current lanes by endpoint address and rank.
pub(super) type Inboxes = ArcSwap<AHashMap<Speaker, Inbox>>;

/// The central socket of one pool.
#[derive(Clone, Debug)]
pub(super) struct Central {
    pub(super) connections: Arc<Connections>,
    pub(super) require_sender_address: bool,
    /// When a wrong sender was last logged.
    pub(super) warned: Arc<Mutex<Option<Instant>>>,
    pub(super) inboxes: Arc<Inboxes>,
    pub(super) topic: Arc<str>,
    pub(super) ranks: u16,
    pub(super) bounds: MemoryLimits,
    pub(super) timing: Timing,
    pub(super) stats: Arc<KvEventStats>,
}

impl Central {
    /// Accepts engines until `shutdown`.
    pub(super) async fn run(self, socket: Arc<TcpListener>, shutdown: CancellationToken) {
        let connections = TaskTracker::new();
        while let Some(accepted) = shutdown.run_until_cancelled(socket.accept()).await {
            let Ok((stream, peer)) = accepted else {
                self.stats.add(Count::ConnectionErrors, 1);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let Some(slot) = self.connections.admit(peer).await else {
                self.stats.add(Count::ConnectionErrors, 1);
                continue;
            };
            let (central, shutdown) = (self.clone(), shutdown.clone());
            connections.spawn(async move {
                let error = shutdown.run_until_cancelled(central.serve(stream, &slot)).await;
                if let Some(error) = error {
                    central.stats.add(Count::ConnectionErrors, 1);
                    tracing::debug!(%peer, %error, "KV event connection closed");
                }
            });
        }
    }

    /// Reads one connection to its end.
    async fn serve(&self, stream: TcpStream, slot: &Slot) -> ZmtpError {
        let mut spoken = Spoken::default();
        let error = tokio::select! {
            error = self.read(stream, slot, &mut spoken) => error,
            () = slot.closed() => ZmtpError::Evicted,
        };
        if matches!(error, ZmtpError::Unfinished(_) | ZmtpError::Timeout(_)) {
            slot.timed_out();
        }
        for inbox in spoken.lanes.into_values() {
            if inbox.connections.fetch_sub(1, Relaxed) == 1 {
                // If the send fails, the lane has ended.
                let _ = inbox.sender.send(FromCentral::Disconnected).await;
            }
        }
        error
    }

    async fn read(&self, stream: TcpStream, slot: &Slot, spoken: &mut Spoken) -> ZmtpError {
        let mut connection = match self.open(stream, slot).await {
            Ok(connection) => connection,
            Err(error) => return error,
        };
        loop {
            match connection.recv().await {
                Ok(message) => {
                    slot.touch();
                    self.hand_on(&message, slot, spoken).await;
                }
                Err(error) => return error,
            }
        }
    }

    async fn open(&self, stream: TcpStream, slot: &Slot) -> Result<Connection, ZmtpError> {
        let max_message = self.bounds.message_bytes;
        let mut connection = Connection::accept(stream, slot, Role::Sub, max_message, self.timing).await?;
        connection.subscribe(&self.topic).await?;
        self.stats.add(Count::Connections, 1);
        Ok(connection)
    }

    /// Passes a frame to its lane. If the lane's queue is full, the frame is dropped and the lane is notified.
    async fn hand_on(&self, message: &Message, slot: &Slot, spoken: &mut Spoken) {
        let (Some(topic), Some((seq, payload))) = (message.first(), replay::frame(message)) else {
            self.stats.add(Count::DecodeErrors, 1);
            return;
        };
        let speaker = speaker(topic).map(|address| (address, self.rank(&payload)));
        let known = speaker.and_then(|s| Some((s, self.inboxes.load().get(&s)?.clone())));
        let Some((speaker, inbox)) = known else {
            self.stats.add(Count::UnknownPods, 1);
            return;
        };
        if self.require_sender_address && !same_ip(speaker.0, slot.peer()) {
            self.stats.add(Count::WrongSenders, 1);
            self.warn_of_wrong_sender(speaker.0, slot.peer());
            return;
        }
        let is_known = spoken.lanes.get(&speaker).is_some_and(|before| before.sender.same_channel(&inbox.sender));
        if !is_known {
            spoken.in_use = spoken.in_use.take().or_else(|| slot.client().open());
            inbox.connections.fetch_add(1, Relaxed);
            // Inserted before the send, because the send may be cancelled while the lane's queue is full.
            spoken.lanes.insert(speaker, inbox.clone());
            let _ = inbox.sender.send(FromCentral::Connected).await;
        }
        // A small payload would keep the whole read buffer in memory.
        let payload = if payload.len() < READ_CHUNK { Bytes::copy_from_slice(&payload) } else { payload };
        let queued = match slot.hold(payload.len()) {
            Some(held) => {
                let sent = inbox.sender.try_send(FromCentral::Frame(seq, payload, held));
                !matches!(sent, Err(mpsc::error::TrySendError::Full(_)))
            }
            None => false,
        };
        if !queued {
            self.stats.add(Count::OverflowFrames, 1);
            inbox.overflowed.store(true, Relaxed);
        }
    }

    fn warn_of_wrong_sender(&self, endpoint: SocketAddr, sender: SocketAddr) {
        let mut warned = self.warned.lock();
        if warned.is_none_or(|before| before.elapsed() >= WARN_INTERVAL) {
            *warned = Some(Instant::now());
            tracing::warn!(
                %sender,
                %endpoint,
                dropped = self.stats.get(Count::WrongSenders),
                "KV events dropped: the sender's address is not the endpoint's (`requireSenderAddress`)"
            );
        }
    }

    fn rank(&self, payload: &Bytes) -> u16 {
        if self.ranks <= 1 {
            return 0;
        }
        let rank = wire::envelope(payload).ok().and_then(|b| b.rank).unwrap_or(0);
        u16::try_from(rank).unwrap_or(u16::MAX)
    }
}

/// The endpoints that one connection has published for.
#[derive(Debug, Default)]
struct Spoken {
    lanes: AHashMap<Speaker, Inbox>,
    /// Protects a connection with valid events from eviction by another connection of its peer.
    in_use: Option<OpenStream>,
}

fn same_ip(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip().to_canonical() == b.ip().to_canonical()
}

/// Returns the endpoint that a topic names.
fn speaker(topic: &[u8]) -> Option<SocketAddr> {
    std::str::from_utf8(topic).ok()?.split('@').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_names_its_endpoint() {
        let four: SocketAddr = "10.0.0.1:8000".parse().unwrap();
        let six: SocketAddr = "[fd00::1]:8000".parse().unwrap();
        assert_eq!(speaker(b"kv@10.0.0.1:8000@some/model"), Some(four));
        assert_eq!(speaker(b"kv@10.0.0.1:8000@a@b"), Some(four));
        assert_eq!(speaker(b"kv@10.0.0.1:8000"), Some(four));
        assert_eq!(speaker(b"kv@[fd00::1]:8000@m"), Some(six));
        for odd in [b"".as_slice(), b"kv", b"kv@", b"kv@pod-1@m", b"kv@10.0.0.1@m", b"\xff@10.0.0.1:1@m"] {
            assert_eq!(speaker(odd), None);
        }
    }
}
