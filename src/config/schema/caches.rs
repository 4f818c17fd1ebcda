//! What is known of the servers' KV caches, and how they go from one to another.

use super::{Bytes, Decider, DisaggregationMode, Fallback, Opt, Scheme, Tokenizer};
use crate::config::decode::{Fields, Read, Sink};
use crate::config::diagnostic::At;
use crate::config::document::Node;
use std::time::Duration;

sections! {
    /// What is known of the servers' KV caches.
    PrefixCache {
        "tokenizer" => tokenizer: Tokenizer,
        "blockSize" => block_size: u32,
        "maxBytes" => max_bytes: Bytes,
        "tenantShare" => tenant_share: f64,
        "tenantHeader" => tenant_header: String,
        "isolateTenants" => isolate_tenants: bool,
        "claimLife" => claim_life: Duration,
        "volatile" => volatile: Vec<At<Volatile>>,
        "chooseRank" => choose_rank: bool,
        "kvEvents" => kv_events: KvEvents,
    }
    /// Text that is left out of the keys.
    Volatile {
        "prefix" => prefix: String,
        "suffix" => suffix: String,
    }
    /// Where KV events come from.
    KvEvents {
        "port" => port: u16,
        "replayPort" => replay_port: u16,
        "ranks" => ranks: u16,
        "topic" => topic: String,
        "bind" => bind: String,
        "requireSenderAddress" => require_sender_address: bool,
    }
    /// Prefill and decode on different servers.
    Disaggregation {
        "mode" => mode: DisaggregationMode,
        "connector" => connector: String,
        "decider" => decider: Decider,
        "together" => together: Vec<At<String>>,
        "prefillTimeout" => prefill_timeout: Duration,
        "hedgeAfter" => hedge_after: Duration,
        "fallback" => fallback: Fallback,
        "scheme" => scheme: Scheme,
        "pathPrefix" => path_prefix: String,
        "insecureSkipVerify" => insecure_skip_verify: bool,
        "bootstrapPort" => bootstrap_port: u16,
        "decoderBlocksTtl" => decoder_blocks_ttl: Duration,
        "cacheSourceTokens" => cache_source_tokens: u32,
    }
}
