//! One replay: a question to a publisher's ring and its answers, as a task that ends when nobody listens any more.

use super::cursor::End;
use super::subscription::Timing;
use super::zmtp::{Connection, Message, Role, ZmtpError};
use bytes::Bytes;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::AbortOnDropHandle;

/// Replays of one pool at once: a picker that starts beside a thousand engines does not ask all of them together.
pub(super) const MAX_CONCURRENT_REPLAYS: usize = 8;
/// Frames that may wait for the one who asked.
const QUEUE: usize = 64;
/// The sequence number of the end marker.
const END: u64 = u64::MAX;

/// What a replay brings.
#[derive(Debug)]
pub(super) enum Answer {
    Frame(u64, Bytes),
    End(End),
}

/// A replay that runs. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Replay {
    answers: mpsc::Receiver<Answer>,
    _task: AbortOnDropHandle<()>,
}

impl Replay {
    /// Asks `address` for everything from `from` on.
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
                Ok(Ok(())) => End::Complete,
                Ok(Err(error)) => {
                    tracing::debug!(%address, from, %error, "replay of KV events failed");
                    End::Failed
                }
                Err(_) => End::Failed,
            };
            let _ = sender.send(Answer::End(end)).await;
        });
        Self { answers, _task: AbortOnDropHandle::new(task) }
    }

    /// The next answer. Safe to drop and call again.
    pub(super) async fn next(&mut self) -> Answer {
        self.answers.recv().await.unwrap_or(Answer::End(End::Failed))
    }
}

async fn ask(
    address: SocketAddr,
    from: u64,
    timing: Timing,
    max_message: usize,
    answers: &mpsc::Sender<Answer>,
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
                if answers.send(Answer::Frame(seq, payload)).await.is_err() {
                    return Ok(());
                }
            }
            None => return Err(ZmtpError::Frame),
        }
    }
}

/// Sequence number and payload of a live frame (`topic, seq, payload`) or of a replayed one, with or without topic and delimiter: they
/// are always the last two.
pub(super) fn frame(message: &Message) -> Option<(u64, Bytes)> {
    let [.., seq, payload] = message.as_slice() else { return None };
    let seq = <[u8; 8]>::try_from(seq.as_ref()).ok()?;
    Some((u64::from_be_bytes(seq), payload.clone()))
}
