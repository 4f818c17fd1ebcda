//! The metric names of each engine.

use attache_pool::{Counter, Histogram};

/// The meaning of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    Waiting,
    Running,
    KvUsage,
    /// Requests of a prefill server that wait until their decode server is ready; they wait.
    BootstrapQueue,
    /// Requests of a prefill server whose KV blocks are being sent; they run.
    InflightQueue,
    /// Requests of a decode server that wait for memory; they wait.
    PreallocQueue,
    /// Requests of a decode server that wait for their KV blocks; they wait.
    TransferQueue,
    /// All requests in the batch manager, for pages without `Waiting`.
    Active,
    /// Blocks in use, for pages without `KvUsage`.
    UsedBlocks,
    /// An info series whose labels have the block size and the number of blocks.
    CacheInfo {
        block_size: &'static str,
        num_blocks: &'static str,
    },
    BlockSize,
    NumBlocks,
    Lora,
    ProcessStart,
    PrefixQueries,
    PrefixHits,
    CpuCacheUsage,
    GpuBusy,
    EngineUtilization,
    Count(Counter),
}

/// One family of an engine, or the part of it with a certain label.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) figure: Figure,
    pub(super) family: &'static str,
    pub(super) only: Option<(&'static str, &'static str)>,
}

const fn row(figure: Figure, family: &'static str) -> Row {
    Row { figure, family, only: None }
}

const fn part(figure: Figure, family: &'static str, label: &'static str, value: &'static str) -> Row {
    Row { figure, family, only: Some((label, value)) }
}

/// The sum of a histogram: its family is `family` with `_sum`.
const fn sum(histogram: Histogram, family: &'static str) -> Row {
    row(Figure::Count(Counter::Sum(histogram)), family)
}

/// The number of values of a histogram: its family is `family` with `_count`.
const fn number(histogram: Histogram, family: &'static str) -> Row {
    row(Figure::Count(Counter::Count(histogram)), family)
}

/// A value that no engine reports itself, and that an exporter may add under AIBrix's name.
const GPU_BUSY: Row = row(Figure::GpuBusy, "gpu_busy_time_ratio");

/// Of several rows for one value, the first with samples counts: new names precede old ones.
pub(super) const VLLM: &[Row] = &[
    row(Figure::Waiting, "vllm:num_requests_waiting"),
    row(Figure::Running, "vllm:num_requests_running"),
    row(Figure::KvUsage, "vllm:kv_cache_usage_perc"),
    row(Figure::KvUsage, "vllm:gpu_cache_usage_perc"),
    row(Figure::CacheInfo { block_size: "block_size", num_blocks: "num_gpu_blocks" }, "vllm:cache_config_info"),
    row(Figure::Lora, "vllm:lora_requests_info"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::PrefixQueries, "vllm:prefix_cache_queries_total"),
    row(Figure::PrefixQueries, "vllm:gpu_prefix_cache_queries_total"),
    row(Figure::PrefixHits, "vllm:prefix_cache_hits_total"),
    row(Figure::PrefixHits, "vllm:gpu_prefix_cache_hits_total"),
    row(Figure::CpuCacheUsage, "vllm:cpu_cache_usage_perc"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "vllm:prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "vllm:generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "vllm:request_success_total"),
    sum(Histogram::Queue, "vllm:request_queue_time_seconds_sum"),
    number(Histogram::Queue, "vllm:request_queue_time_seconds_count"),
    sum(Histogram::Prefill, "vllm:request_prefill_time_seconds_sum"),
    number(Histogram::Prefill, "vllm:request_prefill_time_seconds_count"),
    sum(Histogram::Decode, "vllm:request_decode_time_seconds_sum"),
    number(Histogram::Decode, "vllm:request_decode_time_seconds_count"),
    sum(Histogram::PromptTokens, "vllm:request_prompt_tokens_sum"),
    number(Histogram::PromptTokens, "vllm:request_prompt_tokens_count"),
    sum(Histogram::GenerationTokens, "vllm:request_generation_tokens_sum"),
    number(Histogram::GenerationTokens, "vllm:request_generation_tokens_count"),
];

pub(super) const SGLANG: &[Row] = &[
    row(Figure::Waiting, "sglang:num_queue_reqs"),
    row(Figure::Running, "sglang:num_running_reqs"),
    row(Figure::KvUsage, "sglang:token_usage"),
    row(Figure::BootstrapQueue, "sglang:num_prefill_bootstrap_queue_reqs"),
    row(Figure::BootstrapQueue, "sglang:num_prefill_prealloc_queue_reqs"),
    row(Figure::InflightQueue, "sglang:num_prefill_inflight_queue_reqs"),
    row(Figure::PreallocQueue, "sglang:num_decode_prealloc_queue_reqs"),
    row(Figure::TransferQueue, "sglang:num_decode_transfer_queue_reqs"),
    row(Figure::CacheInfo { block_size: "page_size", num_blocks: "num_pages" }, "sglang:cache_config_info"),
    row(Figure::BlockSize, "sglang:page_size"),
    row(Figure::NumBlocks, "sglang:num_pages"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::PrefixQueries, "sglang:prompt_tokens_total"),
    row(Figure::PrefixHits, "sglang:cached_tokens_total"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "sglang:prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "sglang:generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "sglang:num_requests_total"),
    sum(Histogram::Queue, "sglang:queue_time_seconds_sum"),
    number(Histogram::Queue, "sglang:queue_time_seconds_count"),
    sum(Histogram::FirstToken, "sglang:time_to_first_token_seconds_sum"),
    number(Histogram::FirstToken, "sglang:time_to_first_token_seconds_count"),
    sum(Histogram::Latency, "sglang:e2e_request_latency_seconds_sum"),
    number(Histogram::Latency, "sglang:e2e_request_latency_seconds_count"),
    sum(Histogram::PromptTokens, "sglang:prompt_tokens_histogram_sum"),
    number(Histogram::PromptTokens, "sglang:prompt_tokens_histogram_count"),
    sum(Histogram::GenerationTokens, "sglang:generation_tokens_histogram_sum"),
    number(Histogram::GenerationTokens, "sglang:generation_tokens_histogram_count"),
];

pub(super) const TRTLLM_SERVE: &[Row] = &[
    row(Figure::Waiting, "trtllm_num_requests_waiting"),
    row(Figure::Running, "trtllm_num_requests_running"),
    row(Figure::KvUsage, "trtllm_kv_cache_utilization"),
    row(Figure::BlockSize, "trtllm_kv_cache_tokens_per_block"),
    row(Figure::NumBlocks, "trtllm_kv_cache_max_blocks"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "trtllm_prompt_tokens_total"),
    row(Figure::Count(Counter::GenerationTokens), "trtllm_generation_tokens_total"),
    row(Figure::Count(Counter::Finished), "trtllm_request_success_total"),
    sum(Histogram::Queue, "trtllm_request_queue_time_seconds_sum"),
    number(Histogram::Queue, "trtllm_request_queue_time_seconds_count"),
    sum(Histogram::FirstToken, "trtllm_time_to_first_token_seconds_sum"),
    number(Histogram::FirstToken, "trtllm_time_to_first_token_seconds_count"),
    sum(Histogram::Latency, "trtllm_e2e_request_latency_seconds_sum"),
    number(Histogram::Latency, "trtllm_e2e_request_latency_seconds_count"),
];

pub(super) const TRITON_REQUESTS: &str = "nv_trt_llm_request_metrics";
pub(super) const TRITON_BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
pub(super) const TRITON: &[Row] = &[
    part(Figure::Waiting, TRITON_REQUESTS, "request_type", "waiting"),
    part(Figure::Running, TRITON_REQUESTS, "request_type", "scheduled"),
    part(Figure::KvUsage, TRITON_BLOCKS, "kv_cache_block_type", "fraction"),
    part(Figure::BlockSize, TRITON_BLOCKS, "kv_cache_block_type", "tokens_per"),
    part(Figure::NumBlocks, TRITON_BLOCKS, "kv_cache_block_type", "max"),
    // Before release 25.03, these stood for `waiting` and `fraction`.
    part(Figure::Active, TRITON_REQUESTS, "request_type", "active"),
    part(Figure::UsedBlocks, TRITON_BLOCKS, "kv_cache_block_type", "used"),
    GPU_BUSY,
];

/// xLLM's metric names have no prefix.
pub(super) const XLLM: &[Row] = &[
    row(Figure::Waiting, "num_waiting_requests"),
    row(Figure::Running, "num_running_requests"),
    row(Figure::KvUsage, "kv_cache_utilization"),
    row(Figure::KvUsage, "kv_cache_utilization_perc"),
    row(Figure::ProcessStart, "process_start_time_seconds"),
    row(Figure::EngineUtilization, "engine_utilization"),
    GPU_BUSY,
    row(Figure::Count(Counter::PromptTokens), "num_processing_tokens_total_prompt"),
    row(Figure::Count(Counter::GenerationTokens), "num_processing_tokens_total_generated"),
];
