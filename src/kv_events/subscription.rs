//! The source of a pool's KV events, and limits on buffers and times.

use attache_serving::connections::Connections;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Default port: that of vLLM's `--kv-events-config` examples.
pub const DEFAULT_PORT: u16 = 5557;
/// Default topic prefix: every topic, since vLLM's default topic is empty.
pub(crate) const DEFAULT_TOPIC: &str = "";
/// Default size limit of a message, 16 MiB; a batch of a million tokens has 6 MB.
pub(crate) const DEFAULT_MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Default backlog in frames. A busy engine publishes some hundred frames a second, so this covers a
/// replay of half a minute.
pub(crate) const DEFAULT_BACKLOG_FRAMES: usize = 4_096;
/// Default backlog in bytes, for the same half minute with long prompts.
pub(crate) const DEFAULT_BACKLOG_BYTES: usize = 8 << 20;
/// Default number of frames between the central socket and one endpoint's task.
pub(crate) const DEFAULT_QUEUE_FRAMES: usize = 1_024;
/// Default number of blocks that wait for a parent, a million tokens in blocks of 16; 1.5 MiB per engine.
pub(crate) const DEFAULT_MAX_ORPHAN_BLOCKS: usize = 65_536;

/// Which side opens the connections.
#[derive(Clone, Debug)]
pub enum Source {
    /// Attaché connects to every endpoint of the pool, at its address and this port.
    Endpoints {
        /// The port of rank 0; rank r is at `port + r`.
        port: u16,
    },
    /// All engines connect to Attaché; their topic `kv@<ip:port>@<model>` identifies them.
    Central {
        /// The listening socket. Consecutive feeds share it, so that it stays open for engines.
        socket: Arc<TcpListener>,
        /// The connections to all central sockets, and their limits.
        connections: Arc<Connections>,
        /// Whether events count only if they come from the IP address of the endpoint that they name.
        require_sender_address: bool,
    },
}

/// How the KV events of one pool are read.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// Which side opens the connections.
    pub source: Source,
    /// The replay port of an endpoint's rank 0; rank r is at `replay_port + r`. `None` means
    /// that missed events are lost.
    pub replay_port: Option<u16>,
    /// Prefix of the topics to subscribe to.
    pub topic: String,
    /// Number of data-parallel ranks of an endpoint, at least 1.
    pub ranks: u16,
    /// Limits on the memory for buffered events.
    pub bounds: MemoryLimits,
    /// Timeouts and intervals of connections and replays.
    pub timing: Timing,
}

impl Default for Subscription {
    fn default() -> Self {
        Self {
            source: Source::Endpoints { port: DEFAULT_PORT },
            replay_port: None,
            topic: DEFAULT_TOPIC.to_owned(),
            ranks: 1,
            bounds: MemoryLimits::default(),
            timing: Timing::default(),
        }
    }
}

/// Limits on the memory for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Largest message in bytes; a larger one ends the connection.
    pub message_bytes: usize,
    /// Most frames of an endpoint that wait for a replay; further ones are fetched again.
    pub backlog_frames: usize,
    /// Most bytes of frames that wait for a replay.
    pub backlog_bytes: usize,
    /// Most frames of an endpoint that wait between the central socket and its task; further ones are fetched again.
    pub queue_frames: usize,
    /// Most blocks of an endpoint that wait for their parent; beyond it, the oldest are dropped.
    pub orphan_blocks: usize,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self {
            message_bytes: DEFAULT_MAX_MESSAGE_BYTES,
            backlog_frames: DEFAULT_BACKLOG_FRAMES,
            backlog_bytes: DEFAULT_BACKLOG_BYTES,
            queue_frames: DEFAULT_QUEUE_FRAMES,
            orphan_blocks: DEFAULT_MAX_ORPHAN_BLOCKS,
        }
    }
}

/// Timeouts and intervals of a subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time from the first packet to the end of the handshake.
    pub connect: Duration,
    /// Time in which a message must be complete once it has begun; otherwise the connection ends.
    pub frame: Duration,
    /// Time without traffic after which a heartbeat is sent. The connection ends if as much time passes without a
    /// response. For publishers without heartbeats (before ZMTP 3.1), TCP keepalive is used.
    pub heartbeat: Duration,
    /// First pause before a reconnection; it doubles, and the actual pause is drawn from its upper half.
    pub reconnect_min: Duration,
    /// Longest pause before a reconnection.
    pub reconnect_max: Duration,
    /// Time without a frame after which a replay has failed, since engines answer between two of their steps. The same
    /// limit applies to a connection that does not deliver frames that a check has returned.
    pub replay_idle: Duration,
    /// Longest duration of a replay.
    pub replay_total: Duration,
    /// Time without frames after which a publisher with replay is asked whether any were missed.
    pub check_after: Duration,
    /// First pause before everything is fetched again, when only that restores the state; it doubles up
    /// to 16 times the value.
    pub retry_after: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            // The largest message then takes 1.6 MB per second.
            frame: Duration::from_secs(10),
            // A dead node is detected after 20 to 30 s, about as soon as missed frames at the end of a stream.
            heartbeat: Duration::from_secs(10),
            reconnect_min: Duration::from_millis(500),
            // A refused connection costs little, and a restarted server is trusted sooner.
            reconnect_max: Duration::from_secs(5),
            replay_idle: Duration::from_secs(2),
            replay_total: Duration::from_secs(120),
            check_after: Duration::from_secs(30),
            retry_after: Duration::from_secs(30),
        }
    }
}
