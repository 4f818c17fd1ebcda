//! The part of ZMTP 3 that a subscriber needs: SUB and DEALER, NULL mechanism, over TCP, with heartbeats
//! if the peer supports them.
//!
//! It is an own implementation because peers are not trusted: libraries allocate what a frame's header claims, so that
//! nine bytes can end the process. Here memory grows only with received bytes; the size of a message, its number of
//! frames and its duration are limited. Buffers of an accepted connection are accounted to its listener.
//!
//! Nothing is buffered beyond one read. When a subscriber is slow, TCP flow control stops the
//! publisher, which drops frames at its high-water mark; the gap shows in the sequence numbers.
//! Sources: <https://rfc.zeromq.org/spec/23/>, <https://rfc.zeromq.org/spec/37/> for heartbeats.

use super::subscription::Timing;
use attache_serving::connections::{ConnectionMemory, Slot};
use bytes::{Buf, Bytes, BytesMut};
use smallvec::SmallVec;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, Interval, MissedTickBehavior, sleep_until};

/// Most frames in a message; KV events have 3, messages of a replay 4.
const MAX_FRAMES: usize = 8;
/// Bytes that are read at once.
pub(super) const READ_CHUNK: usize = 32 * 1024;
/// The buffer is replaced when it has less free space than this.
const MIN_ROOM: usize = 1024;
/// Length of a greeting in bytes.
const GREETING: usize = 64;
/// Largest command in bytes, including the handshake's; ours have some 30.
const MAX_COMMAND: usize = 4 * 1024;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Number of TCP keepalive probes that a peer's host may leave unanswered.
const PROBES: u32 = 3;

/// The frames of one message.
pub(super) type Message = SmallVec<[Bytes; 4]>;

/// Our socket type towards the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Receives from a PUB or XPUB socket.
    Sub,
    /// Sends requests to a ROUTER or REP socket.
    Dealer,
}

impl Role {
    fn name(self) -> &'static [u8] {
        match self {
            Role::Sub => b"SUB",
            Role::Dealer => b"DEALER",
        }
    }

    fn peers(self) -> [&'static [u8]; 2] {
        match self {
            Role::Sub => [b"PUB", b"XPUB"],
            Role::Dealer => [b"ROUTER", b"REP"],
        }
    }
}

/// The reason for which a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
    #[error("no sign of life within {0:?}")]
    Silent(Duration),
    #[error("a replay had events that the connection has not delivered")]
    Deaf,
    #[error("no handshake within {0:?}")]
    Timeout(Duration),
    #[error("a message is not complete after {0:?}")]
    Unfinished(Duration),
    #[error("all connections together buffer too much, and this peer most of it")]
    Memory,
    #[error("a new connection took its place, or another peer its memory")]
    Evicted,
    #[error("the peer does not speak ZMTP 3 with the NULL mechanism")]
    Greeting,
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    #[error("the peer's socket type {got} is not the expected one")]
    SocketType { got: String },
    #[error("a message of {got} bytes is too large, {allowed} are allowed")]
    TooLarge { got: u64, allowed: usize },
    #[error("a message of more than {MAX_FRAMES} frames")]
    TooManyFrames,
    #[error("a frame violates the protocol")]
    Frame,
}

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
    frames: Message,
    max_message: usize,
    life: Life,
    /// When an incomplete message was first waited for.
    begun: Option<Instant>,
    frame_timeout: Duration,
    /// Accounting of the buffered bytes, for accepted connections.
    held: Option<ConnectionMemory>,
}

/// Detection of a dead peer by heartbeats.
#[derive(Debug)]
struct Life {
    beat: Interval,
    /// Whether the peer supports heartbeats.
    beats: bool,
    /// Whether anything was received since the last heartbeat.
    heard: bool,
    /// Whether a heartbeat was sent and nothing was received since.
    asked: bool,
}

impl Life {
    fn new(beat: Duration) -> Self {
        let mut beat = tokio::time::interval(beat.max(Duration::from_millis(1)));
        // After a delay, received bytes are read before the peer counts as dead.
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { beat, beats: false, heard: true, asked: false }
    }
}

/// One frame as received.
struct Frame {
    flags: u8,
    body: Bytes,
}

impl Connection {
    /// Connects and does the handshake.
    pub(super) async fn connect(
        address: SocketAddr,
        role: Role,
        max_message: usize,
        timing: Timing,
    ) -> Result<Self, ZmtpError> {
        let open = async { Self::handshake(TcpStream::connect(address).await?, role, max_message, timing, None).await };
        tokio::time::timeout(timing.connect, open).await.map_err(|_| ZmtpError::Timeout(timing.connect))?
    }

    /// Does the handshake on a connection that a peer has opened; `slot` accounts for its buffers.
    pub(super) async fn accept(
        stream: TcpStream,
        slot: &Slot,
        role: Role,
        max_message: usize,
        timing: Timing,
    ) -> Result<Self, ZmtpError> {
        let held = slot.hold(0).ok_or(ZmtpError::Memory)?;
        let shake = Self::handshake(stream, role, max_message, timing, Some(held));
        tokio::time::timeout(timing.connect, shake).await.map_err(|_| ZmtpError::Timeout(timing.connect))?
    }

    async fn handshake(
        stream: TcpStream,
        role: Role,
        max_message: usize,
        timing: Timing,
        held: Option<ConnectionMemory>,
    ) -> Result<Self, ZmtpError> {
        let beat = timing.heartbeat;
        stream.set_nodelay(true)?;
        // In whole seconds, at least one each.
        let idle = beat.max(Duration::from_secs(PROBES.into()));
        let probes = TcpKeepalive::new().with_time(idle).with_interval(idle / PROBES).with_retries(PROBES);
        SockRef::from(&stream).set_tcp_keepalive(&probes)?;
        let mut connection = Self {
            stream,
            buffer: BytesMut::new(),
            frames: Message::new(),
            max_message,
            life: Life::new(beat),
            begun: None,
            frame_timeout: timing.frame,
            held,
        };
        connection.stream.write_all(&greeting()).await?;
        while connection.buffer.len() < GREETING {
            connection.fill().await?;
        }
        let theirs = connection.buffer.split_to(GREETING);
        let version_3 = theirs.first() == Some(&0xff) && theirs.get(9) == Some(&0x7f) && theirs.get(10) >= Some(&3);
        let mechanism = theirs.get(12..32).unwrap_or_default();
        if !version_3 || mechanism.strip_prefix(b"NULL").is_none_or(|pad| pad.iter().any(|b| *b != 0)) {
            return Err(ZmtpError::Greeting);
        }
        // Heartbeats need ZMTP 3.1. Some peers with 3.0 close a connection on an unknown command.
        connection.life.beats = theirs.get(10..12) >= Some(&[3, 1]);
        connection.stream.write_all(&ready(role)).await?;
        let Frame { flags, body } = loop {
            if let Some(frame) = connection.frame()? {
                break frame;
            }
            connection.fill().await?;
        };
        if flags & COMMAND == 0 {
            return Err(ZmtpError::Frame);
        }
        let got = socket_type(&body)?;
        if role.peers().contains(&got) {
            Ok(connection)
        } else {
            Err(ZmtpError::SocketType { got: String::from_utf8_lossy(got).into_owned() })
        }
    }

    /// Subscribes to topics that begin with `topic`.
    pub(super) async fn subscribe(&mut self, topic: &str) -> Result<(), ZmtpError> {
        let body = [&[1], topic.as_bytes()].concat();
        self.send(&[&body]).await
    }

    /// Sends one message.
    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        let mut out = Vec::new();
        for (i, body) in frames.iter().enumerate() {
            put_frame(&mut out, if i + 1 < frames.len() { MORE } else { 0 }, body);
        }
        Ok(self.stream.write_all(&out).await?)
    }

    /// Receives the next message. Cancel-safe.
    pub(super) async fn recv(&mut self) -> Result<Message, ZmtpError> {
        // Fairness: a publisher that floods must not block other tasks of the thread. Nothing was taken yet
        // that a cancellation could lose.
        tokio::task::coop::consume_budget().await;
        loop {
            while let Some(Frame { flags, body }) = self.frame()? {
                if flags & COMMAND != 0 {
                    self.command(&body)?;
                    continue;
                }
                self.frames.push(body);
                if flags & MORE == 0 {
                    self.begun = None;
                    return Ok(std::mem::take(&mut self.frames));
                }
                if self.frames.len() >= MAX_FRAMES {
                    return Err(ZmtpError::TooManyFrames);
                }
            }
            let unfinished = !self.buffer.is_empty() || !self.frames.is_empty();
            let begun = if unfinished { *self.begun.get_or_insert_with(Instant::now) } else { Instant::now() };
            let frames = self.frames_held();
            tokio::select! {
                biased;
                read = Self::read(&self.stream, &mut self.buffer, self.held.as_mut(), frames) => {
                    read?;
                    (self.life.heard, self.life.asked) = (true, false);
                }
                _ = self.life.beat.tick() => self.beat()?,
                () = sleep_until(begun + self.frame_timeout), if unfinished => {
                    return Err(ZmtpError::Unfinished(self.frame_timeout));
                }
            }
        }
    }

    /// Sends a heartbeat to a peer that was silent since the last one.
    fn beat(&mut self) -> Result<(), ZmtpError> {
        let was_heard = std::mem::take(&mut self.life.heard);
        if was_heard || !self.life.beats {
            return Ok(());
        }
        if std::mem::replace(&mut self.life.asked, true) {
            return Err(ZmtpError::Silent(self.life.beat.period()));
        }
        // A time to live of 0: the peer need not monitor us.
        self.send_command(b"\x04PING\0\0")
    }

    /// Responds to a heartbeat; other commands need no response.
    fn command(&self, body: &[u8]) -> Result<(), ZmtpError> {
        // PING has a time to live of two bytes and a context that the response repeats.
        match body.strip_prefix(b"\x04PING").and_then(|b| b.get(2..)) {
            Some(context) => self.send_command(&[b"\x04PONG", context].concat()),
            None => Ok(()),
        }
    }

    /// Sends a command at once or fails, so that a cancellation cannot leave half of it. A peer whose receive window is
    /// that full is not reading.
    fn send_command(&self, command: &[u8]) -> Result<(), ZmtpError> {
        let mut out = Vec::new();
        put_frame(&mut out, COMMAND, command);
        match self.stream.try_write(&out)? {
            sent if sent == out.len() => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::WriteZero).into()),
        }
    }

    async fn fill(&mut self) -> Result<(), ZmtpError> {
        let frames = self.frames_held();
        Self::read(&self.stream, &mut self.buffer, self.held.as_mut(), frames).await
    }

    /// Upper bound of the memory held by frames of the incomplete message: a frame can keep its read buffer alive.
    fn frames_held(&self) -> usize {
        self.frames.iter().map(|frame| frame.len() + READ_CHUNK).sum()
    }

    /// Reads at least one byte. `frames` is the memory besides the buffer in bytes. An
    /// empty buffer is released. Cancel-safe.
    async fn read(
        stream: &TcpStream,
        buffer: &mut BytesMut,
        mut held: Option<&mut ConnectionMemory>,
        frames: usize,
    ) -> Result<(), ZmtpError> {
        let mut account =
            |bytes: usize| held.as_mut().is_none_or(|held| held.resize(bytes)).then_some(()).ok_or(ZmtpError::Memory);
        loop {
            if buffer.capacity() - buffer.len() < MIN_ROOM {
                buffer.reserve(READ_CHUNK);
            }
            account(buffer.capacity() + frames)?;
            match stream.try_read_buf(buffer) {
                Ok(0) => return Err(ZmtpError::Closed),
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if buffer.is_empty() {
                *buffer = BytesMut::new();
                account(frames)?;
            }
            stream.readable().await?;
        }
    }

    /// Returns the next frame, if it is complete.
    fn frame(&mut self) -> Result<Option<Frame>, ZmtpError> {
        let Some((&flags, rest)) = self.buffer.split_first() else { return Ok(None) };
        let (head, len) = if flags & LONG != 0 {
            let Some(len) = rest.first_chunk::<8>() else { return Ok(None) };
            (9, u64::from_be_bytes(*len))
        } else {
            let Some(len) = rest.first() else { return Ok(None) };
            (2, u64::from(*len))
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == (MORE | COMMAND) {
            return Err(ZmtpError::Frame);
        }
        let allowed = if flags & COMMAND != 0 { MAX_COMMAND } else { self.max_message };
        let so_far: usize = self.frames.iter().map(Bytes::len).sum();
        let got = len.saturating_add(so_far as u64);
        if got > allowed as u64 {
            return Err(ZmtpError::TooLarge { got, allowed });
        }
        // At most `allowed`, so the conversion cannot fail.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if self.buffer.len() - head < len {
            return Ok(None);
        }
        self.buffer.advance(head);
        let body = self.buffer.split_to(len).freeze();
        // The remaining bytes would keep the memory of this frame.
        if len > READ_CHUNK {
            self.buffer = BytesMut::from(&*self.buffer);
        }
        Ok(Some(Frame { flags, body }))
    }
}

fn greeting() -> [u8; GREETING] {
    let mut out = [0; GREETING];
    let fixed = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL";
    for (to, from) in out.iter_mut().zip(fixed) {
        *to = *from;
    }
    out
}

fn ready(role: Role) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [(b"Socket-Type".as_slice(), role.name()), (b"Identity", b"")] {
        // Our own names and values have a few bytes.
        body.push(u8::try_from(name.len()).unwrap_or_default());
        body.extend_from_slice(name);
        body.extend_from_slice(&u32::try_from(value.len()).unwrap_or_default().to_be_bytes());
        body.extend_from_slice(value);
    }
    let mut out = Vec::new();
    put_frame(&mut out, COMMAND, &body);
    out
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// Returns the peer's socket type from its READY command.
fn socket_type(command: &[u8]) -> Result<&[u8], ZmtpError> {
    if let Some(reason) = command.strip_prefix(b"\x05ERROR") {
        return Err(ZmtpError::Refused(String::from_utf8_lossy(reason.get(1..).unwrap_or_default()).into_owned()));
    }
    let mut rest = command.strip_prefix(b"\x05READY").ok_or(ZmtpError::Frame)?;
    while let Some((name_len, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(*name_len)).ok_or(ZmtpError::Frame)?;
        let (len, after) = after.split_first_chunk::<4>().ok_or(ZmtpError::Frame)?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*len) as usize).ok_or(ZmtpError::Frame)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(value);
        }
        rest = after;
    }
    Err(ZmtpError::Frame)
}

#[cfg(test)]
mod tests;
