//! The socket that engines connect to, and who gets what comes through it.
//!
//! An engine's topic `kv@<ip:port>@<model>` says which endpoint speaks. Whoever can reach the port is believed, as with the engines' own
//! ports: keep both inside the cluster.

use super::lane::FromCentral;
use super::replay;
use super::stats::{Count, KvEventStats};
use super::subscription::{Bounds, Timing};
use super::zmtp::{Connection, Message, Role, ZmtpError};
use crate::prefix::wire;
use ahash::AHashMap;
use arc_swap::ArcSwap;
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The pause after a failed accept: out of file descriptors, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An endpoint's address and the rank of one of its engines.
pub(super) type Speaker = (SocketAddr, u16);

/// The sending end of a lane's inbox.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    pub(super) sender: mpsc::Sender<FromCentral>,
    /// A frame was dropped since the lane looked last.
    pub(super) overflowed: Arc<AtomicBool>,
    /// Connections that have spoken for it.
    pub(super) connections: Arc<AtomicUsize>,
}

/// The lanes of now, by who speaks.
pub(super) type Inboxes = ArcSwap<AHashMap<Speaker, Inbox>>;

/// The central socket.
#[derive(Clone, Debug)]
pub(super) struct Central {
    pub(super) inboxes: Arc<Inboxes>,
    pub(super) topic: Arc<str>,
    pub(super) ranks: u16,
    pub(super) bounds: Bounds,
    pub(super) timing: Timing,
    pub(super) stats: Arc<KvEventStats>,
}

impl Central {
    /// Accepts engines until `shutdown`.
    pub(super) async fn run(self, socket: Arc<TcpListener>, shutdown: CancellationToken) {
        let places = Arc::new(Semaphore::new(self.bounds.connections));
        let connections = TaskTracker::new();
        while let Some(accepted) = shutdown.run_until_cancelled(socket.accept()).await {
            let Ok((stream, peer)) = accepted else {
                self.stats.add(Count::ConnectionErrors, 1);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let Ok(place) = places.clone().try_acquire_owned() else {
                self.stats.add(Count::ConnectionErrors, 1);
                continue;
            };
            let (central, shutdown) = (self.clone(), shutdown.clone());
            connections.spawn(async move {
                let error = shutdown.run_until_cancelled(central.serve(stream)).await;
                if let Some(error) = error {
                    central.stats.add(Count::ConnectionErrors, 1);
                    tracing::debug!(%peer, %error, "a connection for KV events has ended");
                }
                drop(place);
            });
        }
    }

    /// Reads one connection to its end.
    async fn serve(&self, stream: TcpStream) -> ZmtpError {
        let mut spoken: AHashMap<Speaker, Inbox> = AHashMap::new();
        let error = match self.open(stream).await {
            Ok(mut connection) => loop {
                match connection.recv().await {
                    Ok(message) => self.hand_on(&message, &mut spoken).await,
                    Err(error) => break error,
                }
            },
            Err(error) => error,
        };
        for inbox in spoken.into_values() {
            if inbox.connections.fetch_sub(1, Relaxed) == 1 {
                // The lane has gone when it does not take it.
                let _ = inbox.sender.send(FromCentral::Disconnected).await;
            }
        }
        error
    }

    async fn open(&self, stream: TcpStream) -> Result<Connection, ZmtpError> {
        let max_message = self.bounds.message_bytes;
        let mut connection = Connection::accept(stream, Role::Sub, max_message, self.timing).await?;
        connection.subscribe(&self.topic).await?;
        self.stats.add(Count::Connections, 1);
        Ok(connection)
    }

    /// Gives a frame to the lane that it belongs to. A lane that is behind loses it, and is told so.
    async fn hand_on(&self, message: &Message, spoken: &mut AHashMap<Speaker, Inbox>) {
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
        let told = spoken.get(&speaker).is_some_and(|before| before.sender.same_channel(&inbox.sender));
        if !told {
            inbox.connections.fetch_add(1, Relaxed);
            let _ = inbox.sender.send(FromCentral::Connected).await;
            spoken.insert(speaker, inbox.clone());
        }
        if let Err(mpsc::error::TrySendError::Full(_)) = inbox.sender.try_send(FromCentral::Frame(seq, payload)) {
            self.stats.add(Count::OverflowFrames, 1);
            inbox.overflowed.store(true, Relaxed);
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

/// The endpoint that a topic names.
fn speaker(topic: &[u8]) -> Option<SocketAddr> {
    std::str::from_utf8(topic).ok()?.split('@').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_names_its_endpoint() {
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
