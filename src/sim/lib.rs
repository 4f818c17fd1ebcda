//! Simulated model servers: an engine with vLLM's scheduling and paged KV cache, and fleets of such servers over HTTP.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | [`engine`] | waiting queue, batches, preemption, sequences | yes |
//! | [`kv`] | paged KV cache | yes |
//! | [`latency`] | duration of a step | yes |
//! | [`profiles`] | engines by name | yes |
//! | [`content`] | prompts that are known by name | yes |
//! | [`tokenizer`], [`answer`] | text, tokens and generated text | yes |
//! | [`stats`] | counters and histograms | yes |
//! | [`vllm_hash`] | vLLM's block hashes | yes |
//! | [`kv_events`] | KV events: the encoding is pure, the sockets are not | partly |
//! | `host` | an engine in real time | no |
//! | [`pd`] | prefill and decode on different servers | no |
//! | `http` | HTTP APIs of one server | no |
//! | `fleet` | listeners and connections | no |
//! | [`spans`] | spans of finished requests | yes |
//! | [`config`], [`faults`] | settings, and faults on demand | yes |
//! | `fault_board` | faults of a running server | no |
//!
//! The pure part takes timestamps and returns events, so the same engine also runs in virtual time.
//!
//! **Called by** `cli::sim`, `workload` (names of texts), `replay`, `loadgen` and tests.
//! **Must not** use the picker's crates, so that both can't share a mistake.
//!
//! Read first: `engine.rs`, `kv.rs`, `latency.rs`.
//!
//! # The model
//!
//! **Steps.** An engine with work runs one step after the other. A step takes
//!
//! ```text
//! t = (base + max(c_prefill * P + c_pair * A + c_decode * D, weights + c_context * C)) / speed
//! ```
//!
//! The maximum is that of compute and memory reads.
//!
//! | symbol | meaning |
//! |---|---|
//! | `P` | prompt tokens that the step computes |
//! | `A` | pairs of a computed prompt token and a token that it attends to: a chunk of `p` tokens after `k` computed ones adds `p * k + p * (p + 1) / 2` |
//! | `D` | sequences that decode one token |
//! | `C` | tokens of those sequences in the cache |
//!
//! The constants and their sources are in [`latency`]. With the defaults (an 8B model on one H100) a lone request
//! decodes about 140 tokens per second, and a prompt of 8,000 tokens takes about 0.35 s.
//!
//! **Scheduling.** As in vLLM v1, whatever API the HTTP side imitates. AstrAI's loop of four phases is not modelled.
//! Each step has a budget of `max_num_batched_tokens`:
//!
//! 1. Running sequences, in order of admission. A sequence in decode takes 1 token of the budget. A sequence in prefill
//!    takes the rest of its prompt or of the budget (chunked prefill).
//! 2. Waiting sequences, first come, first served, while there is budget, a free seat (`max_num_seqs`) and cache
//!    capacity. A sequence whose LoRA adapter has no slot (`max_loras`) lets others pass.
//!
//! A job that arrives during a step waits for the end of the step.
//!
//! The cost of simulating a step grows with its events: blocks begun and filled, jobs that arrive, end or generate
//! their first token. Sequences that only decode one more token are not visited (see `engine::batch`). A caller that
//! needs every token sets [`engine::EngineConfig::every_token`]. Times, hits and evictions are the same in both modes.
//!
//! **Cache.** `num_blocks` blocks of `block_size` tokens. A sequence holds `ceil(computed / block_size)` blocks. The
//! hash of a full block is `h(i) = xxh3(h(i-1), xxh3(tokens of i))`, where `h(-1)` follows from model, adapter and
//! cache salt. Prompts that are known by name ([`content`]) use the hash of their pieces in place of `xxh3(tokens of
//! i)`.
//!
//! * A new sequence of `n` tokens reuses its longest cached chain, at most `floor((n - 1) / block_size)` blocks, since
//!   the last token is always computed.
//! * Generated tokens are cached as they fill blocks, except the last one, which is never computed.
//! * The blocks of a finished sequence keep their content and join the free list, tail first. New blocks
//!   come from the other end of that list: the least recently freed block is evicted first, and of one
//!   prompt the tail before the head.
//! * `kv_usage` counts referenced blocks only.
//!
//! **KV events.** At the end of a step the engine publishes what its cache has stored and evicted since the last step.
//! The blocks that one request filled in the step are one event, also copies of blocks that are cached already.
//! Evicted blocks come before it, deepest first, one event each. A cleared cache is published with the next step. The
//! hashes in the messages are vLLM's.
//!
//! **Preemption.** When a running sequence needs a block and none is free, the sequence that was admitted last loses
//! all its blocks and moves to the head of the queue. It later computes its prompt and its generated tokens again,
//! except those that are still cached. Tokens that it has streamed stay valid.
//!
//! **Prefill and decode on different servers.** A job can ask that its blocks stay after its end. They count as used
//! until they are released or their lease ends; heartbeats renew the lease. A job can receive the beginning of its
//! prompt from another server. When it is admitted, it gets its cached blocks and blocks for the missing tokens. It
//! then waits outside the batch, without a seat, for
//!
//! ```text
//! t = (transfer_setup + c_received * missing tokens) / speed
//! ```
//!
//! It joins at the start of the first step after that, before waiting sequences. Received blocks are in the cache from
//! then on, and KV events report them. The last token of a prompt is always computed. Transfers don't slow each other
//! down. A preempted job computes what it had received.
//!
//! **Limits.** A prompt that leaves no room for one generated token in `min(max_model_len, num_blocks * block_size)` is
//! rejected. Longer responses end there. With `max_num_queued`, a job is rejected while that many jobs wait.
//!
//! # What it does not model
//! Sampling parameters, speculative decoding, several GPUs, offloading, multimodal encoders (in `replay`, an image is
//! encoded as a prompt of its tokens), and jitter: equal runs are equal.

pub mod answer;
pub mod config;
pub mod content;
pub mod engine;
mod fault_board;
pub mod faults;
mod fleet;
mod host;
mod http;
pub mod kv;
pub mod kv_events;
pub mod latency;
pub mod pd;
pub mod profiles;
pub mod spans;
pub mod stats;
pub mod tokenizer;
pub mod vllm_hash;

pub use config::{MetricsStyle, Quirks, ServerConfig, SimConfig};
pub use fleet::{SimHandle, serve};
pub use kv_events::{KvEventSource, KvEventsConfig};
