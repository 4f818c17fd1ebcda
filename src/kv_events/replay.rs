//! One replay: a request to a publisher's ring and its frames, as a task that ends when its receiver is dropped.

use super::cursor::ReplayEnd;
use super::subscription::Timing;
use super::zmtp::{Connection, Message, Role, ZmtpError};
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::AbortOnDropHandle;

/// Most concurrent replays of one pool, so that Attaché does not request them from a thousand engines
/// at once when it starts.
pub(super) const MAX_CONCURRENT_REPLAYS: usize = 8;
/// Frames that may wait for the receiver.
const QUEUE: usize = 64;
/// The sequence number of the end marker.
const END: u64 = u64::MAX;

/// A message of a replay.
#[derive(Debug)]
pub(super) enum ReplayMessage {
    Frame(u64, Bytes),
    End(ReplayEnd),
}

/// A running replay. Drop ends it.
#[derive(Debug)]
pub(super) struct Replay {
    answers: mpsc::Receiver<ReplayMessage>,
    _task: AbortOnDropHandle<()>,
}

impl Replay {
    /// Requests everything from `from` on at `address`.
    pub(super) fn start(
        address: SocketAddr,
        from: u64,
        timing: Timing,
        max_message: usize,
        turns: Arc<Semaphore>,
    ) -> Self {
        let (sender, answers) = mpsc::channel(QUEUE);
        let task = tokio::spawn(async move {
            // The semaphore is never closed.
            let _turn = turns.acquire_owned().await;
            let all = ask(address, from, timing, max_message, &sender);
            let end = match tokio::time::timeout(timing.replay_total, all).await {
                Ok(Ok(())) => ReplayEnd::Complete,
                Ok(Err(error)) => {
                    tracing::debug!(%address, from, %error, "replay of KV events failed");
                    ReplayEnd::Failed
                }
                Err(_) => ReplayEnd::Failed,
            };
            let _ = sender.send(ReplayMessage::End(end)).await;
        });
        Self { answers, _task: AbortOnDropHandle::new(task) }
    }

    /// Returns the next message. Cancel-safe.
    pub(super) async fn next(&mut self) -> ReplayMessage {
        self.answers.recv().await.unwrap_or(ReplayMessage::End(ReplayEnd::Failed))
    }
}

async fn ask(
    address: SocketAddr,
    from: u64,
    timing: Timing,
    max_message: usize,
    answers: &mpsc::Sender<ReplayMessage>,
) -> Result<(), ZmtpError> {
    let mut connection = Connection::connect(address, Role::Dealer, max_message, timing).await?;
    connection.send(&[&[], &from.to_be_bytes()]).await?;
    loop {
        let message = tokio::time::timeout(timing.replay_idle, connection.recv())
            .await
            .map_err(|_| ZmtpError::Timeout(timing.replay_idle))??;
        match frame(&message) {
            Some((END, _)) => return Ok(()),
            Some((seq, payload)) => {
                if answers.send(ReplayMessage::Frame(seq, payload)).await.is_err() {
                    return Ok(());
                }
            }
            None => return Err(ZmtpError::Frame),
        }
    }
}

/// Returns sequence number and payload of a live frame (`topic, seq, payload`) or of a replayed one, with or without
/// topic and delimiter: they are always the last two parts.
pub(super) fn frame(message: &Message) -> Option<(u64, Bytes)> {
    let [.., seq, payload] = message.as_slice() else { return None };
    let seq = <[u8; 8]>::try_from(seq.as_ref()).ok()?;
    Some((u64::from_be_bytes(seq), payload.clone()))
}
