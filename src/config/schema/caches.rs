//! Prefix cache, tokenizers, KV events and disaggregation.

use super::{Bytes, Decider, DisaggregationMode, Opt, Scheme, TokenizerKind, word};
use crate::settings::TokenizerFallback;
use attache_config_schema::decode::{Fields, Read, Sink};
use attache_config_schema::diagnostic::{At, Span};
use attache_config_schema::document::{Node, Value};
use attache_disagg::Fallback;
use std::time::Duration;

sections! {
    /// Prefix index: tokenizer, block size, memory, KV events.
    PrefixCache {
        "tokenizer" => tokenizer: Tokenizer,
        "blockSize" => block_size: u32,
        "maxBytes" => max_bytes: Bytes,
        "maxBlocks" => max_blocks: u64,
        "tenantShare" => tenant_share: f64,
        "tenantHeader" => tenant_header: String,
        "isolateTenants" => isolate_tenants: bool,
        "claimLife" => claim_life: Duration,
        "volatile" => volatile: Vec<At<Volatile>>,
        "chooseRank" => choose_rank: bool,
        "kvEvents" => kv_events: KvEvents,
    }
    /// A block of text that is left out of block keys.
    Volatile {
        "prefix" => prefix: String,
        "suffix" => suffix: String,
    }
    /// How KV events are received.
    KvEvents {
        "port" => port: u16,
        "replayPort" => replay_port: u16,
        "ranks" => ranks: u16,
        "topic" => topic: String,
        "bind" => bind: String,
        "requireSenderAddress" => require_sender_address: bool,
    }
    /// Prefill and decode on different workers.
    Disaggregation {
        "mode" => mode: DisaggregationMode,
        "connector" => connector: String,
        "decider" => decider: Decider,
        "together" => together: Vec<At<String>>,
        "prefillTimeout" => prefill_timeout: Duration,
        "messageTimeout" => message_timeout: Duration,
        "hedgeAfter" => hedge_after: Duration,
        "fallback" => fallback: Fallback = word,
        "scheme" => scheme: Scheme,
        "pathPrefix" => path_prefix: String,
        "insecureSkipVerify" => insecure_skip_verify: bool,
        "bootstrapPort" => bootstrap_port: u16,
        "decoderBlocksTtl" => decoder_blocks_ttl: Duration,
        "cacheSourceTokens" => cache_source_tokens: u32,
    }
}

/// A tokenizer: its type alone, or with parameters.
#[derive(Debug)]
pub struct Tokenizer {
    /// `type`
    pub kind: At<TokenizerKind>,
    /// `encoding`, of tiktoken.
    pub encoding: Opt<String>,
    /// `directory`, of huggingface.
    pub directory: Opt<String>,
    /// `url`, of remote.
    pub url: Opt<String>,
    /// `render`, of remote.
    pub render: Opt<bool>,
    /// `timeout`, of remote.
    pub timeout: Opt<Duration>,
    /// `requestTimeout`, of remote.
    pub request_timeout: Opt<Duration>,
    /// `healthCheckPeriod`, of remote.
    pub health_check_period: Opt<Duration>,
    /// `ttl`, of remote.
    pub ttl: Opt<Duration>,
    /// `maxModels`, of remote.
    pub max_models: Opt<u32>,
    /// `modelUrls`, of remote.
    pub model_urls: Opt<Vec<(At<String>, At<String>)>>,
    /// `fallback`, of remote.
    pub fallback: Opt<TokenizerFallback>,
}

impl Tokenizer {
    /// A tokenizer of this type without parameters.
    #[must_use]
    pub fn plain(kind: TokenizerKind) -> Self {
        let kind = At { value: kind, span: Span::default() };
        Self {
            kind,
            encoding: None,
            directory: None,
            url: None,
            render: None,
            timeout: None,
            request_timeout: None,
            health_check_period: None,
            ttl: None,
            max_models: None,
            model_urls: None,
            fallback: None,
        }
    }
}

impl Read for Tokenizer {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        if let Value::Text(_) = node.value {
            let kind = TokenizerKind::read(node, path, sink)?;
            return Some(Self { kind: At { value: kind, span: node.span }, ..Self::plain(kind) });
        }
        let mut f = Fields::of(node, path, sink)?;
        let kind = f.required("type", sink);
        let (encoding, directory) = (f.get("encoding", sink), f.get("directory", sink));
        let (url, render, timeout) = (f.get("url", sink), f.get("render", sink), f.get("timeout", sink));
        let (request_timeout, health_check_period) = (f.get("requestTimeout", sink), f.get("healthCheckPeriod", sink));
        let (ttl, max_models) = (f.get("ttl", sink), f.get("maxModels", sink));
        let (model_urls, fallback) = (f.get("modelUrls", sink), f.get("fallback", sink));
        f.finish(sink);
        Some(Self {
            kind: kind?,
            encoding,
            directory,
            url,
            render,
            timeout,
            request_timeout,
            health_check_period,
            ttl,
            max_models,
            model_urls,
            fallback,
        })
    }
}
