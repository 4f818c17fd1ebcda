//! Where a pool's KV events come from, and the bounds of what is kept of them.

use attache_serving::connections::Connections;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// The port of vLLM's `--kv-events-config` examples.
pub const DEFAULT_PORT: u16 = 5557;
/// Every topic: vLLM's default topic is empty.
pub const DEFAULT_TOPIC: &str = "";
/// A label that names an endpoint's own port, where several share a host.
pub const PORT_LABEL: &str = "attache.dev/kv-events-port";
/// A label that names an endpoint's own replay port.
pub const REPLAY_PORT_LABEL: &str = "attache.dev/kv-events-replay-port";

/// A batch of a million tokens is 6 MB.
pub const DEFAULT_MAX_MESSAGE_BYTES: usize = 16 << 20;
/// A busy engine publishes some hundred frames a second: enough for a replay of half a minute.
pub const DEFAULT_BACKLOG_FRAMES: usize = 4_096;
/// For the same half minute of long prompts.
pub const DEFAULT_BACKLOG_BYTES: usize = 8 << 20;
/// Frames between the shared socket and one endpoint's task, with central bind.
pub const DEFAULT_QUEUE_FRAMES: usize = 1_024;
/// A million tokens of 16-token blocks whose beginning was missed, 1.5 MiB an engine.
pub const DEFAULT_MAX_ORPHAN_BLOCKS: usize = 65_536;

/// Who opens the connections.
#[derive(Clone, Debug)]
pub enum Source {
    /// We connect to every endpoint of the pool, at its address and this port.
    Endpoints {
        /// The port of rank 0; rank r is at `port + r`.
        port: u16,
    },
    /// All engines connect to us; their topic `kv@<ip:port>@<model>` says who they are.
    Central {
        /// Where we listen. Feeds that follow each other share it, so that no engine finds it closed.
        socket: Arc<TcpListener>,
        /// The connections to all central sockets, and their limits.
        connections: Arc<Connections>,
        /// Events count only if they come from the IP address of the endpoint that they name.
        require_sender_address: bool,
    },
}

/// How one pool's KV events are read.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// Who opens the connections.
    pub source: Source,
    /// Where an endpoint's rank 0 replays; rank r is at `replay_port + r`. `None`: what is missed is lost.
    pub replay_port: Option<u16>,
    /// Only topics that begin so.
    pub topic: String,
    /// Data-parallel ranks of an endpoint, at least 1.
    pub ranks: u16,
    /// Bounds.
    pub bounds: Bounds,
    /// Times.
    pub timing: Timing,
}

impl Default for Subscription {
    fn default() -> Self {
        Self {
            source: Source::Endpoints { port: DEFAULT_PORT },
            replay_port: None,
            topic: DEFAULT_TOPIC.to_owned(),
            ranks: 1,
            bounds: Bounds::default(),
            timing: Timing::default(),
        }
    }
}

/// How much may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes of a message; a larger one ends the connection.
    pub message_bytes: usize,
    /// Frames of an endpoint that wait for a replay; what is beyond is fetched again.
    pub backlog_frames: usize,
    /// Bytes of the same.
    pub backlog_bytes: usize,
    /// Frames of an endpoint that wait between the central socket and its task; what is beyond is fetched again.
    pub queue_frames: usize,
    /// Blocks of an endpoint that wait for their parent; the oldest go.
    pub orphan_blocks: usize,
}

impl Default for Bounds {
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

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From the first packet to the end of the handshake.
    pub connect: Duration,
    /// A message that has begun must be complete after this time; the connection ends otherwise.
    pub frame: Duration,
    /// A publisher that has been silent for so long is asked for a sign of life, and given up when it gives none in as long again. One
    /// that knows no heartbeats (before ZMTP 3.1) is known to be alive by TCP's own.
    pub heartbeat: Duration,
    /// The first pause before a connection is tried again; it doubles, and is drawn from its upper half.
    pub reconnect_min: Duration,
    /// The longest pause.
    pub reconnect_max: Duration,
    /// A replay that says nothing for so long has failed: engines answer between two steps of theirs. And so has a connection that does not
    /// bring what a check has brought.
    pub replay_idle: Duration,
    /// A replay that takes longer has failed.
    pub replay_total: Duration,
    /// After so much silence a publisher with replay is asked whether anything was missed.
    pub check_after: Duration,
    /// The first pause before everything is learned anew when that is the only way back; it doubles up to 16 times as much.
    pub retry_after: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            // The largest message in it is 1.6 MB a second.
            frame: Duration::from_secs(10),
            // A dead node is known after 20 to 30 s, about as long as a silent end is looked for.
            heartbeat: Duration::from_secs(10),
            reconnect_min: Duration::from_millis(500),
            // A refused connection costs next to nothing, and a server that is back is believed so much sooner.
            reconnect_max: Duration::from_secs(5),
            replay_idle: Duration::from_secs(2),
            replay_total: Duration::from_secs(120),
            check_after: Duration::from_secs(30),
            retry_after: Duration::from_secs(30),
        }
    }
}
