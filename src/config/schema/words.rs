//! Keywords of the file and their values.

use super::declare;
use crate::settings::{
    CountIn, ModelsAnswer, OnStoreFailure, OnUnknownUser, OnUnparseable, TokenizerFallback, UnknownPaths, UsageCount,
};
use attache_disagg::Fallback;
use attache_flow::{EvictRunning, Overflow};
use attache_pool::Engine;
use attache_scheduling::router::Destination;

/// What decides whether a request is split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeciderKind {
    /// Predicted times of both alternatives.
    #[default]
    Predicted,
    /// Every request is split.
    Always,
    /// No request is split.
    Never,
    /// The pool's strategy alone.
    Strategy,
    /// Prompt tokens that the decode worker has not cached.
    PrefixBased,
}

/// Which component sends the prefill request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisaggregationMode {
    /// Attaché sends it directly.
    Direct,
    /// A sidecar of the decode worker, which reads a header.
    Header,
}

/// Turns prompts into tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenizerKind {
    /// No tokens: blocks of text.
    #[default]
    Characters,
    /// An encoding of OpenAI's tiktoken.
    Tiktoken,
    /// A model's own tokenizer files.
    HuggingFace,
    /// The tokenize API of the pool's model servers.
    Remote,
}

/// How the ext-proc port is secured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// Plain HTTP/2 without TLS.
    Off,
    /// A self-signed certificate made at start.
    SelfSigned,
    /// Certificate and key from a directory.
    Files,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Scheme by which servers are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// HTTP without TLS.
    Http,
    /// HTTP with TLS.
    Https,
}

words! {
    TlsMode: "off" => Off, "self-signed" => SelfSigned, "files" => Files;
    LogFormat: "text" => Text, "json" => Json;
    DisaggregationMode: "direct" => Direct, "header" => Header;
    DeciderKind: "predicted" => Predicted, "always" => Always, "never" => Never, "strategy" => Strategy,
        "prefix-based" => PrefixBased;
    TokenizerKind: "characters" => Characters, "tiktoken" => Tiktoken, "huggingface" => HuggingFace, "remote" => Remote;
    TokenizerFallback: "none" => None, "characters" => Characters, "tiktoken" => Tiktoken;
    Scheme: "http" => Http, "https" => Https;
    Destination: "single" => Single, "list" => List;
    Engine: "vllm" => Vllm, "sglang" => Sglang, "trtllm-serve" => TrtllmServe, "triton-tensorrt-llm" => Triton,
        "xllm" => Xllm, "astrai" => Astrai, "none" => None;
    EvictRunning: "never" => Never, "unanswered" => Unanswered, "any" => Any;
    Fallback: "local" => Local, "fail" => Fail;
    Overflow: "newcomer" => Newcomer, "longest-flow" => LongestFlow;
    OnUnparseable: "reject" => Reject, "fallback" => Fallback;
    ModelsAnswer: "server" => Server, "pool" => Pool;
    UsageCount: "prompt" => Prompt, "cached" => Cached, "completion" => Completion, "total" => Total;
    CountIn: "memory" => Memory, "redis" => Redis;
    OnStoreFailure: "allow" => Allow, "refuse" => Refuse;
    OnUnknownUser: "default" => Default, "refuse" => Refuse;
    UnknownPaths: "estimate" => Estimate, "reject" => Reject;
}
