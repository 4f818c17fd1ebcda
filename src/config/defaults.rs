//! Defaults and limits that are read beside their keys. All others stand in `schema`, with the key.

use std::time::Duration;

/// Needs no tuning on any mix of servers; its first tokens arrive in about half the time of the others
/// (`tests/in_process/virtual_time/policies.rs`).
pub(crate) const DEFAULT_STRATEGY: &str = "predicted-latency";
/// Name of the pool that flags create without a file.
pub(crate) const DEFAULT_POOL: &str = "default";
/// Shortest interval of anything that is repeated: below it a mistyped unit would load the machine.
pub const MIN_INTERVAL: Duration = Duration::from_millis(5);
/// 16 tokens: vLLM's block on CUDA.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// Largest block, tokens: vLLM's largest is 256; hybrid models use larger ones.
pub(crate) const MAX_BLOCK_SIZE: u32 = 4_096;
/// 400 ms, as in llm-d's picker, which then decides without tokens.
pub(crate) const DEFAULT_REMOTE_TIMEOUT: Duration = Duration::from_millis(400);
/// 5 s, as in AIBrix: the longest prompts tokenize in less.
pub(crate) const DEFAULT_TOKENIZER_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// 30 s, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_HEALTH_CHECK_PERIOD: Duration = Duration::from_secs(30);
/// 5 min, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_TTL: Duration = Duration::from_secs(300);
/// 100 models, as in AIBrix.
pub(crate) const DEFAULT_TOKENIZER_MAX_MODELS: u32 = 100;
/// 10,000 models: probing more of them keeps servers busy.
pub(crate) const MAX_TOKENIZER_MODELS: u32 = 10_000;
/// Most data-parallel ranks of one endpoint.
pub(crate) const MAX_RANKS: u16 = 64;

/// How pickers share state, for messages about settings of other products that do it in another way.
pub(crate) const BY_SYNC: &str = "pickers share prompts and requests in flight over NATS, by `sync.nats.servers` or \
                                  `--sync-nats-url`";
