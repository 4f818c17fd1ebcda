//! Prefill and decode on different servers: what servers of one fleet keep for each other, and who may read it.
//!
//! Owns the settings (here), the parameters on the wire (`params`), the fleet's register of servers with what they keep
//! (`peers`) and the counts that tests read (`counts`). Called by `sim::http`; may import the engine, `host` and
//! `clock`. What a request's parameters mean for its answer is in `sim::http`'s `legs`.
//!
//! # What is modelled
//! NIXL as vLLM 0.32 has it on the wire: the prefill's reply names its blocks, the decode leg must name them back,
//! exactly; the blocks stay under a lease, which the decode server's heartbeats extend from the moment on when it
//! has the request, and are free when they were read or the decode's client has gone. Servers of one fleet know
//! each other, all others are unknown. Two things differ: a wrong leg fails when it comes, not when it is
//! scheduled, and the simulator looks at the tokens: a decode leg whose prompt is not what was prefilled fails,
//! where a real server would answer nonsense.

use std::time::Duration;

mod counts;
mod params;
mod peers;

pub(super) use counts::{LoadError, PeerCounts};
pub(super) use params::KvTransferParams;
pub(super) use peers::{BlockClaim, KeptBlocks, Peer, Peers};

/// 480 s: vLLM's `decoder_kv_blocks_ttl`, for which a decode server keeps a conversation's blocks for the next prefill.
pub const DEFAULT_DECODER_TTL: Duration = Duration::from_secs(480);
/// 300 s: SGLang's bootstrap timeout, after which a decode leg without a prefill gives up.
pub const DEFAULT_BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(300);
/// 5600: vLLM's side channel; the first server of a fleet has it, the others those that follow.
pub const DEFAULT_SIDE_CHANNEL_PORT: u16 = 5_600;

/// What a server is for. Any server does what it is asked; the role says what it should be asked,
/// and `/sim/pd` counts the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ServerRole {
    /// Whole requests, and either leg.
    #[default]
    Both,
    /// Prefill legs; `/sim/pd` counts all other requests.
    Prefill,
    /// Decode legs and whole requests.
    Decode,
}

impl ServerRole {
    /// Spelling in flags and labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ServerRole::Both => "both",
            ServerRole::Prefill => "prefill",
            ServerRole::Decode => "decode",
        }
    }
}

/// How keys and values get from server to server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Connector {
    /// vLLM's NixlConnector: `kv_transfer_params`.
    #[default]
    Nixl,
    /// vLLM's ExampleConnector: whatever one server has computed, the others load; requests carry nothing.
    SharedStorage,
    /// SGLang: `bootstrap_host` and `bootstrap_room`, both legs at once; the roles tell the legs apart.
    Sglang,
    /// TensorRT-LLM: `disaggregated_params`.
    Trtllm,
    /// Not at all: such parameters are ignored.
    None,
}

impl Connector {
    pub(super) fn name(self) -> &'static str {
        match self {
            Connector::Nixl => "nixl",
            Connector::SharedStorage => "shared-storage",
            Connector::Sglang => "sglang",
            Connector::Trtllm => "trtllm",
            Connector::None => "none",
        }
    }
}

/// What becomes of a request whose prompt can't be fetched: vLLM's `kv_load_failure_policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadFailure {
    /// The request fails, as by vLLM's default.
    #[default]
    Fail,
    /// Its prompt is computed here.
    Recompute,
}

/// The clock in which a decode server gives the expiry of a conversation's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ExpiryClock {
    /// Seconds of a clock of its own, as vLLM 0.32: Python's `perf_counter`.
    #[default]
    Monotonic,
    /// Seconds of the Unix clock.
    Unix,
}

/// How a server takes part in the split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PdConfig {
    /// How keys and values are passed on.
    pub connector: Connector,
    /// How long a prefill's blocks stay without a heartbeat.
    pub lease: Duration,
    /// Decode servers keep a conversation's blocks too, and prefill servers fetch them (`bidirectional_kv_xfer`).
    pub bidirectional: bool,
    /// How long a decode server keeps blocks.
    pub decoder_ttl: Duration,
    /// By which clock they tell the end of that.
    pub expiry_clock: ExpiryClock,
    /// What becomes of a request whose prompt can't be fetched.
    pub load_failure: LoadFailure,
    /// How long it takes to notice; a real server takes 5 to 30 s when the other is gone.
    pub load_failure_delay: Duration,
    /// How long an SGLang leg waits for the other.
    pub bootstrap_timeout: Duration,
}

impl Default for PdConfig {
    fn default() -> Self {
        Self {
            connector: Connector::default(),
            lease: crate::engine::DEFAULT_LEASE,
            bidirectional: false,
            decoder_ttl: DEFAULT_DECODER_TTL,
            expiry_clock: ExpiryClock::default(),
            load_failure: LoadFailure::default(),
            load_failure_delay: Duration::ZERO,
            bootstrap_timeout: DEFAULT_BOOTSTRAP_TIMEOUT,
        }
    }
}
