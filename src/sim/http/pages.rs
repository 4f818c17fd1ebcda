//! The metrics page, with the names of the engine that the server plays.

use super::{MetricsStyle, Server};
use crate::host::{HostSnapshot, LoraSet};
use crate::stats::{EngineStats, Histogram};
use std::fmt::Write;
use std::time::SystemTime;

/// One engine of the server: its labels, and how it is.
struct EngineView {
    labels: String,
    snapshot: HostSnapshot,
}

pub(super) fn render(server: &Server) -> String {
    let parts: Vec<EngineView> = server
        .hosts()
        .enumerate()
        .map(|(rank, host)| {
            let labels = format!("engine=\"{rank}\",model_name=\"{}\"", escaped(server.base_model()));
            EngineView { labels, snapshot: host.snapshot() }
        })
        .collect();
    let mut page = Page::default();
    let Some(EngineView { snapshot, .. }) = parts.first() else { return page.text };
    page.family("process_start_time_seconds", "gauge", "Start time of the server since the Unix epoch in seconds.");
    let started = server.clock.wall(snapshot.started).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    page.sample("process_start_time_seconds", "", started.as_secs_f64());
    match server.config.metrics_style {
        MetricsStyle::Vllm => vllm(server, &parts, &mut page),
        // The others have no ranks behind one port.
        MetricsStyle::Sglang => sglang(server, snapshot, &mut page),
        MetricsStyle::Trtllm => trtllm(server, snapshot, &mut page),
        MetricsStyle::Triton => triton(server, snapshot, &mut page),
    }
    page.text
}

/// A page of Prometheus text exposition.
#[derive(Default)]
struct Page {
    text: String,
}

// Writing to a String can't fail, so the results are dropped.
impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = if labels.is_empty() {
            writeln!(self.text, "{name} {value:?}")
        } else {
            writeln!(self.text, "{name}{{{labels}}} {value:?}")
        };
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, labels: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, labels, value);
    }

    /// A family of one figure for each engine.
    fn each(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        parts: &[EngineView],
        figure: impl Fn(&HostSnapshot) -> f64,
    ) {
        self.family(name, kind, help);
        for EngineView { labels, snapshot } in parts {
            self.sample(name, labels, figure(snapshot));
        }
    }

    fn histogram(&mut self, name: &str, help: &str, labels: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        self.buckets(name, labels, histogram);
    }

    fn buckets(&mut self, name: &str, labels: &str, histogram: &Histogram) {
        let comma = if labels.is_empty() { "" } else { "," };
        for (bound, count) in histogram.cumulative() {
            let _ = writeln!(self.text, "{name}_bucket{{{labels}{comma}le=\"{bound:?}\"}} {}", as_f64(count));
        }
        let count = as_f64(histogram.count());
        let _ = writeln!(self.text, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {count}");
        self.sample(&format!("{name}_count"), labels, count);
        self.sample(&format!("{name}_sum"), labels, histogram.sum());
    }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus has floats only")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

fn length(count: usize) -> f64 {
    as_f64(u64::try_from(count).unwrap_or(u64::MAX))
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn vllm(server: &Server, parts: &[EngineView], page: &mut Page) {
    type Count = fn(&EngineStats) -> u64;
    type Times = fn(&EngineStats) -> &Histogram;
    vllm_gauges(server, parts, page);
    let counters: [(&str, &str, Count); 5] = [
        ("vllm:prefix_cache_queries_total", "Prefix cache queries, in queried tokens.", |s| s.prefix_queries),
        ("vllm:prefix_cache_hits_total", "Prefix cache hits, in cached tokens.", |s| s.prefix_hits),
        ("vllm:num_preemptions_total", "Preemptions.", |s| s.preemptions),
        ("vllm:prompt_tokens_total", "Prefill tokens processed.", |s| s.prompt_tokens),
        ("vllm:generation_tokens_total", "Generation tokens processed.", |s| s.generation_tokens),
    ];
    for (name, help, value) in counters {
        page.each(name, "counter", help, parts, |snapshot| as_f64(value(&snapshot.stats)));
    }
    if let (Some(EngineView { labels, snapshot }), true) = (parts.first(), server.pd.is_in_use()) {
        nixl(server, &snapshot.stats, labels, page);
    }
    page.family("vllm:num_requests_waiting_by_reason", "gauge", "Waiting requests by reason.");
    for EngineView { labels, snapshot: HostSnapshot { load, .. } } in parts {
        for (reason, count) in [("capacity", load.waiting - load.deferred), ("deferred", load.deferred)] {
            let labels = format!("{labels},reason=\"{reason}\"");
            page.sample("vllm:num_requests_waiting_by_reason", &labels, length(count));
        }
    }
    let model = escaped(server.base_model());
    page.family("vllm:request_success_total", "counter", "Requests that were processed successfully.");
    for (rank, EngineView { snapshot: HostSnapshot { stats, .. }, .. }) in parts.iter().enumerate() {
        // An aborted request is not counted, as observed on a real server.
        for (reason, count) in
            [("stop", stats.finished_stop), ("length", stats.finished_length), ("abort", 0), ("error", 0)]
        {
            let labels = format!("engine=\"{rank}\",finished_reason=\"{reason}\",model_name=\"{model}\"");
            page.sample("vllm:request_success_total", &labels, as_f64(count));
        }
    }
    page.one(
        "vllm:admission_rejections_total",
        "counter",
        "Requests refused by a queue limit, by reason.",
        &format!("model_name=\"{model}\",reason=\"max_num_queued_reqs\""),
        as_f64(parts.iter().map(|part| part.snapshot.stats.rejected_queue_full).sum()),
    );
    let histograms: [(&str, &str, Times); 9] = [
        ("vllm:time_to_first_token_seconds", "Time to first token.", |s| &s.ttft),
        ("vllm:inter_token_latency_seconds", "Time between tokens.", |s| &s.inter_token),
        ("vllm:e2e_request_latency_seconds", "Time from arrival to end.", |s| &s.e2e),
        ("vllm:request_queue_time_seconds", "Time in the queue.", |s| &s.queue),
        ("vllm:request_inference_time_seconds", "Time in the batch.", |s| &s.inference),
        ("vllm:request_prefill_time_seconds", "Time in prefill.", |s| &s.prefill),
        ("vllm:request_decode_time_seconds", "Time in decode.", |s| &s.decode),
        ("vllm:request_prompt_tokens", "Prompt tokens a request.", |s| &s.request_prompt_tokens),
        ("vllm:request_generation_tokens", "Generated tokens a request.", |s| &s.request_generation_tokens),
    ];
    for (name, help, histogram) in histograms {
        page.family(name, "histogram", help);
        for EngineView { labels, snapshot } in parts {
            page.buckets(name, labels, histogram(&snapshot.stats));
        }
    }
}

/// What vLLM adds where it has a connector to other servers.
fn nixl(server: &Server, stats: &EngineStats, labels: &str, page: &mut Page) {
    let counts = &server.pd.counts;
    let counters = [
        (
            "vllm:external_prefix_cache_queries_total",
            "Tokens looked for at other servers.",
            stats.prefix_queries.saturating_sub(stats.prefix_hits),
        ),
        ("vllm:external_prefix_cache_hits_total", "Tokens found there.", stats.received_tokens),
        ("vllm:nixl_num_failed_transfers_total", "Failed KV cache transfers.", counts.failures()),
        (
            "vllm:nixl_num_kv_expired_reqs_total",
            "Requests whose KV expired, reported by the prefill server.",
            stats.leases_expired,
        ),
        ("vllm:nixl_num_notifications_after_expiry_total", "Reads that ended after that.", counts.lost()),
    ];
    for (name, help, value) in counters {
        page.one(name, "counter", help, labels, as_f64(value));
    }
    page.family("vllm:prompt_tokens_by_source_total", "counter", "Prompt tokens by source.");
    let elsewhere = stats.prefix_hits + stats.received_tokens;
    for (source, tokens) in [
        ("local_compute", stats.prompt_tokens.saturating_sub(elsewhere)),
        ("local_cache_hit", stats.prefix_hits),
        ("external_kv_transfer", stats.received_tokens),
    ] {
        page.sample("vllm:prompt_tokens_by_source_total", &format!("{labels},source=\"{source}\""), as_f64(tokens));
    }
    page.histogram("vllm:nixl_xfer_time_seconds", "Time of a KV cache transfer.", labels, &stats.transfer);
}

fn vllm_gauges(server: &Server, parts: &[EngineView], page: &mut Page) {
    page.each("vllm:num_requests_running", "gauge", "Requests in the batch.", parts, |s| length(s.load.running));
    page.each("vllm:num_requests_waiting", "gauge", "Requests in the queue.", parts, |s| length(s.load.waiting));
    page.each("vllm:kv_cache_usage_perc", "gauge", "KV cache in use, 1 is all of it.", parts, |s| s.load.kv_usage);
    let engine = &server.engine;
    let (block_size, blocks) = (engine.block_size, engine.num_blocks);
    let tokens = u64::from(block_size) * u64::from(blocks);
    let algorithm = server.config.kv_events.as_ref().map_or("xxh3_64", |kv_events| kv_events.algorithm.name());
    let caching = if engine.prefix_caching { "True" } else { "False" };
    page.family("vllm:cache_config_info", "gauge", "Configuration of the cache.");
    for rank in 0..parts.len() {
        let labels = format!(
            "block_size=\"{block_size}\",cache_dtype=\"auto\",enable_prefix_caching=\"{caching}\",engine=\"{rank}\",\
             kv_cache_size_tokens=\"{tokens}\",num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\",\
             prefix_caching_hash_algo=\"{algorithm}\",sliding_window=\"None\""
        );
        page.sample("vllm:cache_config_info", &labels, 1.0);
    }
    if !server.loras.read().is_empty() {
        page.family(
            "vllm:lora_requests_info",
            "gauge",
            "Adapters with requests; the newest series is the one that holds.",
        );
        for set in parts.iter().flat_map(|part| &part.snapshot.loras) {
            page.sample("vllm:lora_requests_info", &lora_labels(engine.max_loras, set), wall(server, set));
        }
    }
}

fn lora_labels(max: u32, set: &LoraSet) -> String {
    let names = |names: &[std::sync::Arc<str>]| escaped(&names.join(","));
    format!(
        "max_lora=\"{max}\",running_lora_adapters=\"{}\",waiting_lora_adapters=\"{}\"",
        names(&set.running),
        names(&set.waiting)
    )
}

fn wall(server: &Server, set: &LoraSet) -> f64 {
    server.clock.wall(set.at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn sglang(server: &Server, snapshot: &HostSnapshot, page: &mut Page) {
    let labels = format!("model_name=\"{}\"", escaped(server.base_model()));
    let (load, stats) = (&snapshot.load, &snapshot.stats);
    page.one("sglang:num_running_reqs", "gauge", "Requests in the batch.", &labels, length(load.running));
    page.one("sglang:num_queue_reqs", "gauge", "Requests in the queue.", &labels, length(load.waiting));
    page.one("sglang:token_usage", "gauge", "KV cache in use, 1 is all of it.", &labels, load.kv_usage);
    page.one(
        "sglang:cache_config_info",
        "gauge",
        "Configuration of the cache.",
        &format!("{labels},num_pages=\"{}\",page_size=\"{}\"", server.engine.num_blocks, server.engine.block_size),
        1.0,
    );
    page.one(
        "sglang:prompt_tokens_total",
        "counter",
        "Prefill tokens processed.",
        &labels,
        as_f64(stats.prompt_tokens),
    );
    page.one(
        "sglang:generation_tokens_total",
        "counter",
        "Generation tokens processed.",
        &labels,
        as_f64(stats.generation_tokens),
    );
    page.one(
        "sglang:num_requests_total",
        "counter",
        "Number of requests processed.",
        &labels,
        as_f64(stats.finished_stop + stats.finished_length),
    );
    page.histogram("sglang:queue_time_seconds", "Time in the queue.", &labels, &stats.queue);
    page.histogram("sglang:time_to_first_token_seconds", "Time to first token.", &labels, &stats.ttft);
    page.histogram("sglang:e2e_request_latency_seconds", "Time from arrival to end.", &labels, &stats.e2e);
}

fn trtllm(server: &Server, snapshot: &HostSnapshot, page: &mut Page) {
    let labels = format!("engine_type=\"trtllm\",model_name=\"{}\"", escaped(server.base_model()));
    let load = &snapshot.load;
    let gauges = [
        ("trtllm_num_requests_running", "Requests in the batch.", length(load.running)),
        ("trtllm_num_requests_waiting", "Requests in the queue.", length(load.waiting)),
        ("trtllm_kv_cache_utilization", "KV cache in use, 1 is all of it.", load.kv_usage),
        ("trtllm_kv_cache_tokens_per_block", "Tokens in a block.", f64::from(server.engine.block_size)),
        ("trtllm_kv_cache_max_blocks", "Blocks of the cache.", f64::from(server.engine.num_blocks)),
    ];
    for (name, help, value) in gauges {
        page.one(name, "gauge", help, &labels, value);
    }
}

fn triton(server: &Server, snapshot: &HostSnapshot, page: &mut Page) {
    const REQUESTS: &str = "nv_trt_llm_request_metrics";
    const BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
    let labels = format!("model=\"{}\",version=\"1\"", escaped(server.base_model()));
    let (load, engine) = (&snapshot.load, &server.engine);
    page.family(REQUESTS, "gauge", "TRT LLM request metrics");
    for (kind, count) in
        [("waiting", load.waiting), ("scheduled", load.running), ("active", load.running + load.waiting)]
    {
        page.sample(REQUESTS, &format!("{labels},request_type=\"{kind}\""), length(count));
    }
    page.family(BLOCKS, "gauge", "TRT LLM KV cache block metrics");
    let total = f64::from(engine.num_blocks);
    let kinds = [
        ("fraction", load.kv_usage),
        ("tokens_per", f64::from(engine.block_size)),
        ("used", (load.kv_usage * total).round()),
        ("free", ((1.0 - load.kv_usage) * total).round()),
        ("max", total),
    ];
    for (kind, value) in kinds {
        page.sample(BLOCKS, &format!("kv_cache_block_type=\"{kind}\",{labels}"), value);
    }
}
