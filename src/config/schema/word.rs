//! Keywords of types that other crates declare.

use super::{At, Fields, Opt, Sink};
use crate::settings::{CountIn, ModelsAnswer, OnStoreFailure, OnUnknownUser, OnUnparseable, UnknownPaths, UsageCount};
use attache_config_schema::decode::one_of;
use attache_disagg::Fallback;
use attache_flow::{EvictRunning, Overflow};
use attache_pool::Engine;
use attache_scheduling::router::Destination;

/// A type of another crate whose values each have one keyword in the file.
pub(crate) trait Word: Copy + 'static {
    /// The keywords and their values.
    const WORDS: &'static [(&'static str, Self)];
}

/// Reads the keyword under `key`.
pub(crate) fn word<T: Word>(fields: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> Opt<T> {
    let path = fields.path_of(key);
    let node = fields.node(key)?;
    one_of(T::WORDS, node, &path, sink).map(|value| At { value, span: node.span })
}

macro_rules! words {
    ($($t:ty: $($word:literal => $value:expr),*;)*) => {$(
        impl Word for $t {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $value)),*];
        }
    )*};
}

words! {
    Destination: "single" => Destination::Single, "list" => Destination::List;
    Engine: "vllm" => Engine::Vllm, "sglang" => Engine::Sglang, "trtllm-serve" => Engine::TrtllmServe,
        "triton-tensorrt-llm" => Engine::Triton, "xllm" => Engine::Xllm, "astrai" => Engine::Astrai,
        "none" => Engine::None;
    EvictRunning: "never" => EvictRunning::Never, "unanswered" => EvictRunning::Unanswered, "any" => EvictRunning::Any;
    Fallback: "local" => Fallback::Local, "fail" => Fallback::Fail;
    Overflow: "newcomer" => Overflow::Newcomer, "longest-flow" => Overflow::LongestFlow;
    OnUnparseable: "reject" => OnUnparseable::Reject, "fallback" => OnUnparseable::Fallback;
    ModelsAnswer: "server" => ModelsAnswer::Server, "pool" => ModelsAnswer::Pool;
    UsageCount: "prompt" => UsageCount::Prompt, "cached" => UsageCount::Cached,
        "completion" => UsageCount::Completion, "total" => UsageCount::Total;
    CountIn: "memory" => CountIn::Memory, "redis" => CountIn::Redis;
    OnStoreFailure: "allow" => OnStoreFailure::Allow, "refuse" => OnStoreFailure::Refuse;
    OnUnknownUser: "default" => OnUnknownUser::Default, "refuse" => OnUnknownUser::Refuse;
    UnknownPaths: "estimate" => UnknownPaths::Estimate, "reject" => UnknownPaths::Reject;
}
