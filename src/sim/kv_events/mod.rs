//! Publishes what an engine's cache stores and drops, as vLLM does: frames on a ZMQ PUB socket, and a
//! ROUTER socket that repeats them.
//!
//! [`encode`] turns an engine's batches into frames and is pure: callers in virtual time can use it, or take
//! the engine's own [`KvBatch`](crate::engine::KvBatch)es and spare the hashing. `publish` and `replay` are
//! the sockets. Called by `sim::host` and `sim::fleet`; may import the pure part of `sim`, `clock`, and tokio
//! and zeromq in the sockets.

pub mod encode;
#[cfg_attr(not(feature = "full"), path = "publish_absent.rs")]
pub(crate) mod publish;
#[cfg(feature = "full")]
mod replay;

use crate::vllm_hash::{self, HashAlgorithm};
use tokio::sync::{mpsc, oneshot};

/// 10,000 batches can be repeated: vLLM's default.
pub const DEFAULT_BUFFER_STEPS: usize = 10_000;

/// Socket address for KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outlet {
    /// Subscribers connect to this port of the server's address. In a fleet the first server has it, and the others
    /// have the following ports. With 0 the system chooses each port.
    Bind {
        /// Port of the first server.
        port: u16,
    },
    /// To this address, `tcp://…` or `ipc://…`, where one subscriber listens for all servers.
    Connect {
        /// Address that the server connects to.
        address: String,
    },
}

/// How an event is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EventEncoding {
    /// A map with its kind under `type`, as vLLM 0.24 and later; names of blocks as from 0.31 on (tagged extra keys).
    #[default]
    Map,
    /// An array that begins with its kind, as vLLM 0.22; names of blocks as up to 0.30 (bare extra keys).
    Array,
}

/// How an event names a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum HashForm {
    /// The last 8 bytes of its digest, as a number.
    #[default]
    Int,
    /// The whole digest, as under `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    Bytes,
}

/// How a repeated batch is framed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ReplayFormat {
    /// Topic, sequence, payload: vLLM 0.26 and later.
    #[default]
    Topic,
    /// Sequence, payload: vLLM up to 0.25.
    Legacy,
}

/// Configuration of a server's KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where the events are published.
    pub outlet: Outlet,
    /// The port of the replay socket, for a fleet as in [`Outlet::Bind`]; no such socket when `None`.
    pub replay_port: Option<u16>,
    /// The topic; `kv@<ip:port>@<model>` when `None`.
    pub topic: Option<String>,
    /// Batches that can be repeated.
    pub buffer_steps: usize,
    /// How an event is written.
    pub encoding: EventEncoding,
    /// How it names a block.
    pub hash: HashForm,
    /// How a repeated batch is framed.
    pub replay_format: ReplayFormat,
    /// What a block's name is the digest of.
    pub algorithm: HashAlgorithm,
    /// `PYTHONHASHSEED`, or what stands for it.
    pub seed: String,
    /// Number of blocks that are also reported to lie in host memory, latest first, as by
    /// vLLM's `OffloadingConnector`. 0 for none.
    pub offload_blocks: usize,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            outlet: Outlet::Bind { port: 0 },
            replay_port: None,
            topic: None,
            buffer_steps: DEFAULT_BUFFER_STEPS,
            encoding: EventEncoding::default(),
            hash: HashForm::default(),
            replay_format: ReplayFormat::default(),
            algorithm: HashAlgorithm::default(),
            seed: vllm_hash::DEFAULT_SEED.to_owned(),
            offload_blocks: 0,
        }
    }
}

/// Addresses of one server's events, as `GET /kv_event_sources` shows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSource {
    /// The publisher's address, or the one that it connects to.
    pub endpoint: String,
    /// Address of the replay socket.
    pub replay_endpoint: Option<String>,
    /// The first frame of every message.
    pub topic: String,
    /// Batches that can be repeated.
    pub buffer_steps: usize,
}

/// The publisher is to begin anew, as that of a new process.
#[derive(Debug)]
#[cfg_attr(not(feature = "full"), expect(dead_code, reason = "read by the publisher, which such a build has not"))]
pub(crate) struct Restart {
    /// Number of the process that begins; what earlier ones have not published is lost.
    pub(crate) process: u32,
    /// Completed when the new sockets are open.
    pub(crate) done: oneshot::Sender<()>,
}

/// The ends of a publisher that its server holds.
#[derive(Debug)]
pub(crate) struct KvLink {
    pub(crate) source: KvEventSource,
    pub(crate) frames: mpsc::UnboundedSender<encode::KvFrame>,
    pub(crate) restarts: mpsc::UnboundedSender<Restart>,
}
