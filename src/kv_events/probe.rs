//! A short look at the publisher of one rank, for `attache check --live`. It writes nothing into an index.

use super::replay::frame;
use super::subscription::{DEFAULT_MAX_MESSAGE_BYTES, Timing};
use super::zmtp::{Connection, Message, Role, ZmtpError};
use attache_prefix::wire;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Most different topics that are kept: a publisher has one.
const MAX_TOPICS: usize = 8;
/// A replay from this sequence number has no frames: no publisher has counted that far.
const BEYOND: u64 = u64::MAX - 1;

/// What a publisher sent while it was listened to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Sequence number of the first frame; `None` without a frame.
    pub first: Option<u64>,
    /// Number of frames.
    pub frames: u64,
    /// Topics of the frames.
    pub topics: BTreeSet<String>,
    /// Frames that are no batch of KV events.
    pub malformed: u64,
}

impl Heard {
    fn add(&mut self, message: &Message) {
        self.frames += 1;
        let Some((sequence, payload)) = frame(message) else {
            self.malformed += 1;
            return;
        };
        self.first.get_or_insert(sequence);
        self.malformed += u64::from(wire::envelope(&payload).is_err());
        if let [topic, _, _] = message.as_slice()
            && self.topics.len() < MAX_TOPICS
        {
            self.topics.insert(String::from_utf8_lossy(topic).into_owned());
        }
    }
}

/// The limits of a probe: `answer` for the connection and for each response.
fn timing(answer: Duration) -> Timing {
    Timing { connect: answer, frame: answer, ..Timing::default() }
}

/// Listens to all topics of the publisher at `address` for `listen`, after a handshake that takes at most `answer`.
///
/// # Errors
/// Why the connection failed or ended, in words.
pub async fn listen(address: SocketAddr, answer: Duration, listen: Duration) -> Result<Heard, String> {
    let mut heard = Heard::default();
    let all = async {
        let mut connection = Connection::connect(address, Role::Sub, DEFAULT_MAX_MESSAGE_BYTES, timing(answer)).await?;
        connection.subscribe("").await?;
        let end = Instant::now() + listen;
        while let Ok(message) = timeout_at(end, connection.recv()).await {
            heard.add(&message?);
        }
        Ok::<(), ZmtpError>(())
    };
    all.await.map_err(|error| error.to_string())?;
    Ok(heard)
}

/// The sequence number of the oldest batch that the publisher at `address` can replay; `None` if it keeps none.
///
/// # Errors
/// Why there is no response within `answer`, in words.
pub async fn oldest_kept(address: SocketAddr, answer: Duration) -> Result<Option<u64>, String> {
    let first = async {
        let mut connection =
            Connection::connect(address, Role::Dealer, DEFAULT_MAX_MESSAGE_BYTES, timing(answer)).await?;
        connection.send(&[&[], &0u64.to_be_bytes()]).await?;
        // The other frames of the replay are not read: the connection ends here.
        connection.recv().await
    };
    let message = timeout(answer, first).await.map_err(|_| format!("no response within {answer:?}"))?;
    let (sequence, _) = frame(&message.map_err(|error| error.to_string())?).ok_or("the response is no replay")?;
    Ok((sequence <= BEYOND).then_some(sequence))
}
