//! Simulated model servers: an engine that behaves like vLLM's, and a fleet of them over HTTP.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | [`engine`] | queues, batches, preemption | yes |
//! | [`kv`] | the paged cache | yes |
//! | [`latency`] | what a step costs | yes |
//! | [`profiles`] | engines that have a name | yes |
//! | [`content`] | prompts that are known by name | yes |
//! | [`tokenizer`], [`answer`] | text, tokens and what the model says | yes |
//! | [`stats`] | counts and histograms | yes |
//! | [`vllm_hash`] | vLLM's names of blocks | yes |
//! | [`kv_events`] | what the cache tells: encoding pure, sockets not | partly |
//! | `host` | an engine on the wall clock | no |
//! | [`pd`] | prefill and decode on different servers | no |
//! | `http` | the APIs of one server | no |
//! | `fleet` | listeners and connections | no |
//! | [`config`], [`faults`] | what it is built with, what goes wrong on demand | yes |
//! | `fault_board` | the faults of a running server | no |
//!
//! The pure part takes moments and gives events, so the same engine can run under a virtual clock. **Called by** `cli::sim`,
//! `replay` and tests. **Must not** use the picker's crates, so that it can't share their mistakes.
//!
//! Read first: `engine.rs`, `kv.rs`, `latency.rs`.
//!
//! # The model
//!
//! **Steps.** An engine works in steps, one after the other without a gap while there is work. A step takes
//!
//! ```text
//! t = (base + max(c_prefill * P + c_pair * A + c_decode * D, weights + c_context * C)) / speed
//! ```
//!
//! : what is computed, or what is read from memory, whichever takes longer, with `P` the prompt tokens that it computes, `A` the pairs of a computed prompt token and a token that it looks at (a chunk of `p`
//! tokens after `k` computed ones adds `p * k + p * (p + 1) / 2`), `D` the sequences that get one more token, and `C` the tokens that
//! those have in the cache. The constants and where they come from are in [`latency`]: with the defaults (an 8B model on one H100) a lone
//! request decodes at about 140 tokens a second, and a prompt of 8,000 tokens takes about 0.35 s.
//!
//! **Scheduling.** As vLLM v1, whatever names and peculiarities the HTTP side has: AstrAI's loop of four phases (cleanup, refill, prefill
//! of prompts of equal length, decode of the largest group at the same position) is not modelled. Each step has a budget of `max_num_batched_tokens`. First come the running sequences in the order of their
//! admission: one that decodes takes 1 token of the budget, one in prefill what is left of its prompt or of the budget (chunked prefill).
//! Then waiting ones are admitted first come, first served, while there is budget, a seat (`max_num_seqs`) and room in the cache; one
//! whose LoRA adapter has no slot (`max_loras`) lets others pass. A job that arrives during a step waits for its end.
//!
//! A simulated step costs the machine what happens in it: blocks that are begun and filled, jobs that come, go or say their first token.
//! Sequences that only get one more token are not visited (see `engine::batch`); who wants to hear of every token
//! ([`engine::EngineConfig::every_token`]) pays for the telling alone. Either way every moment, hit and eviction is that of the engine
//! which visits them all.
//!
//! **Cache.** `num_blocks` blocks of `block_size` tokens. A sequence holds `ceil(computed / block_size)` blocks. A full block is known by
//! `h(i) = xxh3(h(i-1), xxh3(tokens of i))`, where `h(-1)` follows from model, adapter and cache salt; where a prompt is known in pieces of
//! named text only ([`content`]), what the pieces make of block `i` stands for its tokens. A new sequence of `n` tokens reuses its
//! longest known chain, at most `floor((n - 1) / block_size)` blocks, since the last token is always computed. Generated tokens are cached
//! as they fill blocks, all but the last one, which is never computed. When a sequence ends its blocks keep their content and join the
//! free list, tail first; new blocks are taken from that list's other end, so the least recently freed goes first and of one prompt the
//! tail before the head. `kv_usage` counts referenced blocks only.
//!
//! **KV events.** At the end of a step the engine tells what its cache has stored and dropped since the last: blocks of one request that
//! the step has filled in one event, copies of blocks that are held already as well; before it, deepest first and one by one, the blocks
//! that made room. An emptied cache is told of with the next step. The names of blocks in the messages are vLLM's own hashes.
//!
//! **Preemption.** When a running sequence needs a block and none is free, the sequence that was admitted last gives up all its blocks, goes
//! to the head of the queue, and later computes prompt and answer anew, as far as they are not still cached. What it has said stands.
//!
//! **Prefill and decode apart.** The blocks of a job that asks for it stay after its end, and count as used, until they are released or
//! its lease ends, which heartbeats begin anew. A job may receive a head of its prompt from another server: it gets its cached blocks and
//! those for what is missing when it is admitted, then waits outside the batch, without a seat, for
//!
//! ```text
//! t = (transfer_setup + c_received * missing tokens) / speed
//! ```
//!
//! and joins at the start of the first step after that, before those who wait. What it received can be found in its cache from then on
//! and is told in KV events; the last token of a prompt is always computed. Transfers don't slow each other down. Once started over, a
//! job computes what it had received.
//!
//! **Limits.** A prompt that leaves no room for one token of answer in `min(max_model_len, num_blocks * block_size)` is refused; a longer
//! answer is cut there. With `max_num_queued` set, a job that finds as many waiting is refused.
//!
//! # What it does not model
//! Sampling parameters, speculative decoding, several GPUs, offloading, multimodal encoders, and jitter: equal runs are equal.

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
pub mod stats;
pub mod tokenizer;
pub mod vllm_hash;

pub use config::{MetricsStyle, Quirks, ServerConfig, SimConfig};
pub use fleet::{SimHandle, serve};
pub use kv_events::{KvEventSource, KvEventsConfig};
