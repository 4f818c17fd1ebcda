use super::rows::TRITON_REQUESTS;
use super::*;
use attache_pool::{Counter, Histogram};

const V0_32_LOAD: &[u8] = include_bytes!("../../../tests/data/metrics/vllm_0.32.0_under_load_lora.txt");
const V0_32_IDLE: &[u8] = include_bytes!("../../../tests/data/metrics/vllm_0.32.0_idle_after_load.txt");
const V0_22: &[u8] = include_bytes!("../../../tests/data/metrics/vllm_0.22.1.txt");

fn read(engine: Engine, page: &str) -> Result<EndpointMetrics, PageError> {
    EngineMap::of(engine).unwrap().read(page.as_bytes(), Timestamp(7), 3).map(|r| r.metrics)
}

fn names(list: &[&str]) -> Vec<Arc<str>> {
    list.iter().copied().map(Arc::from).collect()
}

#[test]
fn recorded_metrics_of_vllm_under_load() {
    let reading = EngineMap::of(Engine::Vllm).unwrap().read(V0_32_LOAD, Timestamp(7), 3).unwrap();
    assert_eq!(reading.skipped, Skipped::default());
    let expected = EndpointMetrics {
        scraped_at: Timestamp(7),
        waiting: 22,
        running: 8,
        kv_usage: 0.304_985_34,
        model: Some("tiny".into()),
        // The series with the greatest value is the newest; the others are outdated.
        lora: Some(LoraState { max: 2, running: names(&["chat", "sql"]), waiting: names(&["chat", "sql"]) }),
        block_size: Some(16),
        num_blocks: Some(1024),
        process_start: Some(1_795_203_441.68),
        prefix_queries: Some(8792.0),
        prefix_hits: Some(1216.0),
        counters: counters(&[
            (Counter::PromptTokens, 8794.0),
            (Counter::GenerationTokens, 247.0),
            (Counter::Finished, 70.0),
            (Counter::Sum(Histogram::Queue), 0.001_083_148_997_167_882),
            (Counter::Count(Histogram::Queue), 70.0),
            (Counter::Sum(Histogram::Prefill), 2.015_880_346_002_632),
            (Counter::Count(Histogram::Prefill), 70.0),
            (Counter::Sum(Histogram::Decode), 0.189_276_670_997_969_63),
            (Counter::Count(Histogram::Decode), 70.0),
            (Counter::Sum(Histogram::PromptTokens), 3994.0),
            (Counter::Count(Histogram::PromptTokens), 70.0),
            (Counter::Sum(Histogram::GenerationTokens), 155.0),
            (Counter::Count(Histogram::GenerationTokens), 70.0),
        ]),
        in_flight_at_scrape: 3,
        ..EndpointMetrics::default()
    };
    assert_eq!(reading.metrics, expected);
}

fn counters(list: &[(Counter, f64)]) -> Counters {
    let mut counters = Counters::default();
    for (counter, value) in list {
        counters.set(*counter, *value);
    }
    counters
}

#[test]
fn adapters_that_are_no_longer_in_use_are_not_listed() {
    let metrics = EngineMap::of(Engine::Vllm).unwrap().read(V0_32_IDLE, Timestamp(7), 0).unwrap().metrics;
    assert_eq!(metrics.lora, Some(LoraState { max: 2, ..LoraState::default() }));
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (0, 0, 0.0));
}

#[test]
fn metrics_of_an_older_vllm() {
    let metrics = EngineMap::of(Engine::Vllm).unwrap().read(V0_22, Timestamp(7), 0).unwrap().metrics;
    assert_eq!((metrics.block_size, metrics.num_blocks), (Some(16), Some(1024)));
    assert_eq!((metrics.prefix_queries, metrics.prefix_hits), (Some(24932.0), Some(208.0)));
    for counter in [Counter::Finished, Counter::Count(Histogram::Decode), Counter::Sum(Histogram::PromptTokens)] {
        assert!(metrics.counters.get(counter).is_some_and(|n| n > 0.0), "{counter:?}");
    }
}

#[test]
fn oldest_names_are_used_if_new_ones_are_missing() {
    let old = "vllm:num_requests_waiting 1\nvllm:num_requests_running 2\nvllm:gpu_cache_usage_perc 0.5\n\
               vllm:gpu_prefix_cache_queries_total 10\nvllm:gpu_prefix_cache_hits_total 4\n\
               vllm:cpu_cache_usage_perc 0.125\n";
    let metrics = read(Engine::Vllm, old).unwrap();
    assert_eq!(metrics.cpu_cache_usage, Some(0.125));
    assert_eq!((metrics.kv_usage, metrics.prefix_queries, metrics.prefix_hits), (0.5, Some(10.0), Some(4.0)));
    let both = format!("{old}vllm:kv_cache_usage_perc 0.25\nvllm:prefix_cache_queries_total 11\n");
    let metrics = read(Engine::Vllm, &both).unwrap();
    assert_eq!((metrics.kv_usage, metrics.prefix_queries, metrics.prefix_hits), (0.25, Some(11.0), Some(4.0)));
}

#[test]
fn engines_of_a_data_parallel_server_are_combined() {
    let page = "vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} 4\n\
        vllm:num_requests_running{engine=\"0\"} 10\nvllm:num_requests_running{engine=\"1\"} 20\n\
        vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.75\n\
        vllm:cache_config_info{engine=\"0\",block_size=\"16\",num_gpu_blocks=\"100\"} 1\n\
        vllm:cache_config_info{engine=\"1\",block_size=\"16\",num_gpu_blocks=\"50\"} 1\n\
        vllm:prefix_cache_hits_total{engine=\"0\"} 1\nvllm:prefix_cache_hits_total{engine=\"1\"} 2\n";
    let metrics = read(Engine::Vllm, page).unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (7, 30, 0.75));
    assert_eq!(metrics.ranks, [13, 24]);
    let alone = page.replace("engine=\"1\"", "engine=\"0\"");
    assert!(read(Engine::Vllm, &alone).unwrap().ranks.is_empty(), "there is only one engine");
    for elsewhere in ["4000000000", "2"] {
        let wrong = page.replace("engine=\"1\"", &format!("engine=\"{elsewhere}\""));
        assert!(read(Engine::Vllm, &wrong).unwrap().ranks.is_empty(), "{elsewhere} is not a rank of two");
    }
    assert_eq!((metrics.block_size, metrics.num_blocks, metrics.prefix_hits), (Some(16), Some(150), Some(3.0)));
}

#[test]
fn metrics_of_sglang() {
    let page = "sglang:num_queue_reqs{model_name=\"m\",tp_rank=\"0\"} 3.0\nsglang:num_running_reqs{model_name=\"m\"} 5.0\n\
        sglang:token_usage{model_name=\"m\"} 0.28\nsglang:cache_config_info{page_size=\"64\",num_pages=\"512\"} 1\n\
        sglang:prompt_tokens_total{model_name=\"m\"} 8.128902e+06\nsglang:cached_tokens_total{cache_source=\"device\"} 90\n\
        sglang:cached_tokens_total{cache_source=\"host\"} 10\n";
    let metrics = read(Engine::Sglang, page).unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (3, 5, 0.28));
    assert_eq!((metrics.block_size, metrics.num_blocks, metrics.lora), (Some(64), Some(512), None));
    assert_eq!((metrics.prefix_queries, metrics.prefix_hits), (Some(8_128_902.0), Some(100.0)));
    assert_eq!(metrics.counters, counters(&[(Counter::PromptTokens, 8_128_902.0)]));
}

#[test]
fn counters_of_sglang_and_trtllm_serve() {
    let figures = "prompt_tokens_total 600\nqueue_time_seconds_sum{dp_rank=\"0\"} 1\nqueue_time_seconds_sum{dp_rank=\"1\"} 1.5\n\
        queue_time_seconds_count{dp_rank=\"0\"} 2\nqueue_time_seconds_count{dp_rank=\"1\"} 3\n\
        queue_time_seconds_bucket{le=\"0.5\"} 9\ngeneration_tokens_total 50\n\
        time_to_first_token_seconds_sum 8\ntime_to_first_token_seconds_count 4\n\
        e2e_request_latency_seconds_sum 20\ne2e_request_latency_seconds_count 4\n";
    let expected = counters(&[
        (Counter::PromptTokens, 600.0),
        (Counter::GenerationTokens, 50.0),
        (Counter::Finished, 4.0),
        (Counter::Sum(Histogram::Queue), 2.5),
        (Counter::Count(Histogram::Queue), 5.0),
        (Counter::Sum(Histogram::FirstToken), 8.0),
        (Counter::Count(Histogram::FirstToken), 4.0),
        (Counter::Sum(Histogram::Latency), 20.0),
        (Counter::Count(Histogram::Latency), 4.0),
    ]);
    let prefixed =
        |prefix: &str, text: &str| text.lines().map(|l| format!("{prefix}{}\n", l.trim())).collect::<String>();
    let page = "sglang:num_queue_reqs 0\nsglang:num_running_reqs 0\nsglang:token_usage 0\n\
        sglang:num_requests_total{is_streaming=\"true\"} 3\nsglang:num_requests_total{is_streaming=\"false\"} 1\n";
    let metrics = read(Engine::Sglang, &(page.to_owned() + &prefixed("sglang:", figures))).unwrap();
    assert_eq!(metrics.counters, expected);
    let page = "trtllm_num_requests_waiting 0\ntrtllm_num_requests_running 0\ntrtllm_kv_cache_utilization 0\n\
        trtllm_request_success_total{finished_reason=\"length\"} 4\n";
    let figures = figures.replace("queue_time", "request_queue_time");
    let metrics = read(Engine::TrtllmServe, &(page.to_owned() + &prefixed("trtllm_", &figures))).unwrap();
    assert_eq!(metrics.counters, expected);
}

#[test]
fn metrics_of_xllm() {
    let page = "num_waiting_requests 1\nnum_running_requests 2\nkv_cache_utilization_perc 0.5\nengine_utilization 0.25\n\
        num_processing_tokens_total_prompt 10\nnum_processing_tokens_total_generated 20\ngpu_busy_time_ratio 0.75\n";
    let metrics = read(Engine::Xllm, page).unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (1, 2, 0.5));
    assert_eq!((metrics.engine_utilization, metrics.gpu_busy), (Some(0.25), Some(0.75)));
    assert_eq!(metrics.counters, counters(&[(Counter::PromptTokens, 10.0), (Counter::GenerationTokens, 20.0)]));
}

#[test]
fn metrics_of_trtllm_serve() {
    let page = "trtllm_num_requests_waiting{engine_type=\"trtllm\"} 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n\
        trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 101\n";
    let metrics = read(Engine::TrtllmServe, page).unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (1, 2, 0.5));
    assert_eq!((metrics.block_size, metrics.num_blocks), (Some(32), Some(101)));
}

const TRITON_PAGE: &str = "nv_trt_llm_request_metrics{model=\"m\",request_type=\"waiting\",version=\"1\"} 4\n\
    nv_trt_llm_request_metrics{model=\"m\",request_type=\"active\",version=\"1\"} 9\n\
    nv_trt_llm_request_metrics{model=\"m\",request_type=\"scheduled\",version=\"1\"} 5\n\
    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"fraction\"} 0.125\n\
    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"tokens_per\"} 64\n\
    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"used\"} 1\n\
    nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"max\"} 6239\n";

#[test]
fn families_of_triton_are_divided_by_label() {
    let metrics = read(Engine::Triton, TRITON_PAGE).unwrap();
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (4, 5, 0.125));
    assert_eq!((metrics.block_size, metrics.num_blocks), (Some(64), Some(6239)));
    // An invalid sample of an unused part is ignored; one of a used part is an error.
    assert!(read(Engine::Triton, &TRITON_PAGE.replace("version=\"1\"} 9", "version=\"1\"} NaN")).is_ok());
    let bad = read(Engine::Triton, &TRITON_PAGE.replace("version=\"1\"} 4", "version=\"1\"} NaN"));
    let waiting = SampleName { family: TRITON_REQUESTS, part: Some(("request_type", "waiting")) };
    assert_eq!(bad, Err(PageError::Unusable(waiting)));
    // A line with unreadable labels may belong to any part.
    let bad = read(Engine::Triton, &TRITON_PAGE.replace("request_type=\"active\",", "request_type=active,"));
    assert_eq!(bad, Err(PageError::Unusable(waiting)));
}

/// Waiting, running, cache usage, block size and blocks.
type PageValues = (u32, u32, f32, Option<u32>, Option<u32>);

/// The pages of `tests/data/metrics` with the values that their first lines and labels state.
const PAGES: &[(Engine, &str, PageValues)] = &[
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_one_scheduler.txt"),
        (2, 6, 0.31, Some(64), Some(2048)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_priorities.txt"),
        (5, 11, 0.52, Some(64), Some(2048)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_tp4_all_schedulers.txt"),
        (4, 9, 0.41, Some(64), Some(2048)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_dp2_tp2_pp2_priorities.txt"),
        (7, 8, 0.75, Some(64), Some(4096)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_prefill.txt"),
        (8, 5, 0.6, Some(64), Some(2048)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.5_decode.txt"),
        (22, 24, 0.97, Some(64), Some(2048)),
    ),
    (
        Engine::Sglang,
        include_str!("../../../tests/data/metrics/sglang_0.4_prefill.txt"),
        (6, 4, 0.1, Some(1), Some(65_536)),
    ),
    (Engine::Vllm, include_str!("../../../tests/data/metrics/vllm_0.33_dp2.txt"), (3, 16, 0.6, Some(16), Some(8192))),
    (
        Engine::TrtllmServe,
        include_str!("../../../tests/data/metrics/trtllm_serve_1.2.txt"),
        (4, 13, 0.45, Some(32), Some(1500)),
    ),
    (Engine::Triton, include_str!("../../../tests/data/metrics/triton_25.02.txt"), (4, 8, 0.25, Some(64), Some(6240))),
    (Engine::Triton, include_str!("../../../tests/data/metrics/triton_25.06.txt"), (5, 8, 0.3, Some(64), Some(6240))),
    (Engine::Xllm, include_str!("../../../tests/data/metrics/xllm.txt"), (1, 3, 0.125, None, None)),
];

#[test]
fn pages_with_and_without_ranks_and_priorities() {
    for (engine, page, expected) in PAGES {
        let m = read(*engine, page).unwrap();
        let title = page.lines().next().unwrap();
        assert_eq!((m.waiting, m.running, m.kv_usage, m.block_size, m.num_blocks), *expected, "{title}");
    }
}

#[test]
fn counters_and_histograms_of_ranks_count_once() {
    let expected = [
        ("one_scheduler", (9000.0, 4000.0), (12.0, 1.5, 12.0)),
        ("priorities", (20_000.0, 6000.0), (20.0, 3.0, 20.0)),
        ("tp4", (16_000.0, 5000.0), (16.0, 2.25, 16.0)),
        ("dp2", (17_000.0, 3000.0), (17.0, 3.0, 17.0)),
    ];
    for ((_, page, _), (name, prefix, (finished, queue_sum, queue_count))) in PAGES.iter().zip(expected) {
        let m = read(Engine::Sglang, page).unwrap();
        assert_eq!((m.prefix_queries.unwrap(), m.prefix_hits.unwrap()), prefix, "{name}");
        let counter = |counter| m.counters.get(counter).unwrap();
        assert_eq!(counter(Counter::Finished), finished, "{name}");
        assert_eq!(counter(Counter::Sum(Histogram::Queue)), queue_sum, "{name}");
        assert_eq!(counter(Counter::Count(Histogram::Queue)), queue_count, "{name}");
    }
    let vllm = read(Engine::Vllm, include_str!("../../../tests/data/metrics/vllm_0.33_dp2.txt")).unwrap();
    assert_eq!((vllm.ranks, vllm.prefix_queries, vllm.prefix_hits), (vec![7, 12], Some(1500.0), Some(700.0)));
    assert_eq!(vllm.counters.get(Counter::Finished), Some(31.0));
}

#[test]
fn parts_count_only_without_their_total() {
    let waiting = |queue: &str| {
        let page = format!("{queue}sglang:num_running_reqs 0\nsglang:token_usage 0\n");
        read(Engine::Sglang, &page).map(|m| m.waiting)
    };
    let series = |labels: &str, value: &str| format!("sglang:num_queue_reqs{{{labels}}} {value}\n");
    let parts = series("priority=\"0\"", "2") + &series("priority=\"7\"", "3");
    assert_eq!(waiting(&parts), Ok(5), "an exporter that has no total");
    assert_eq!(waiting(&(parts.clone() + &series("priority=\"\"", "4"))), Ok(4), "the total may be the last series");
    assert_eq!(waiting(&(parts.clone() + &series("", "4"))), Ok(4), "no label is equal to an empty one");
    // Each replica has a total of its own, or none.
    let replicas = series("dp_rank=\"0\",priority=\"\"", "4")
        + &series("dp_rank=\"0\",priority=\"1\"", "4")
        + &series("dp_rank=\"1\",priority=\"1\"", "6");
    assert_eq!(waiting(&replicas), Ok(10));
    // Labels in another order are the same series.
    let ranks = series("tp_rank=\"0\",model=\"m\"", "4") + &series("model=\"m\",tp_rank=\"1\"", "5");
    assert_eq!(waiting(&ranks), Ok(5));
    let invalid = series("priority=\"0\"", "NaN");
    assert_eq!(waiting(&(invalid.clone() + &series("priority=\"\"", "4"))), Ok(4), "an unused part may be invalid");
    let queue = PageError::Unusable(SampleName::of("sglang:num_queue_reqs"));
    assert_eq!(waiting(&invalid), Err(queue));
    assert_eq!(waiting(&(series("tp_rank=\"0\"", "4") + &series("tp_rank=\"1\"", "-1"))), Err(queue));
}

#[test]
fn errors_name_the_label_or_the_path_that_is_missing() {
    let page = include_str!("../../../tests/data/metrics/triton_25.02.txt");
    for (label, expected) in [
        ("active", "nv_trt_llm_request_metrics{request_type=\"waiting\"}"),
        ("scheduled", "nv_trt_llm_request_metrics{request_type=\"waiting\"}"),
        ("used", "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=\"fraction\"}"),
    ] {
        let error = read(Engine::Triton, &page.replace(&format!("\"{label}\""), "\"other\"")).unwrap_err();
        assert_eq!(error.to_string(), format!("the page has no sample of {expected}"));
    }
    for json in ["[]", " {}", include_str!("../../../tests/data/metrics/trtllm_serve_iterations.json")] {
        let error = read(Engine::TrtllmServe, json).unwrap_err();
        assert_eq!(error, PageError::Json("/prometheus/metrics"));
        assert!(error.to_string().contains("/prometheus/metrics"), "{error}");
    }
    assert_eq!(read(Engine::Vllm, "[]"), Err(PageError::Json("/metrics")));
}

#[test]
fn metrics_without_the_values_are_an_error_and_not_an_idle_server() {
    for page in ["", "<html>not found</html>", "# HELP vllm:num_requests_waiting w\n", "sglang:num_queue_reqs 1\n"] {
        assert_eq!(
            read(Engine::Vllm, page),
            Err(PageError::Missing(SampleName::of("vllm:num_requests_waiting"))),
            "{page}"
        );
    }
    let whole = "vllm:num_requests_waiting 1\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5\n";
    assert!(read(Engine::Vllm, whole).is_ok());
    for line in whole.lines() {
        let family = line.split(' ').next().unwrap();
        let without = whole.replace(line, "");
        assert!(
            matches!(read(Engine::Vllm, &without), Err(PageError::Missing(name)) if name == SampleName::of(family)),
            "{line}"
        );
        for value in ["NaN", "-1", "+Inf", "many"] {
            let bad = whole.replace(line, &format!("{family} {value}"));
            assert!(
                matches!(read(Engine::Vllm, &bad), Err(PageError::Unusable(name)) if name == SampleName::of(family)),
                "{line} {value}"
            );
        }
    }
    assert!(EngineMap::of(Engine::None).is_none());
}

#[test]
fn one_invalid_engine_invalidates_the_sum() {
    let page = "vllm:num_requests_waiting{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"1\"} NaN\n\
        vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0\n";
    assert_eq!(read(Engine::Vllm, page), Err(PageError::Unusable(SampleName::of("vllm:num_requests_waiting"))));
}

#[test]
fn values_out_of_range_are_clamped_and_optional_ones_dropped() {
    let page = "vllm:num_requests_waiting 1e30\nvllm:num_requests_running 2.9\nvllm:kv_cache_usage_perc 1.0001\n\
        process_start_time_seconds NaN\nvllm:prefix_cache_hits_total -4\n\
        vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"99999999999\"} 1\n\
        vllm:lora_requests_info{max_lora=\"x\",running_lora_adapters=\" b, a,,b \"} 5\n\
        vllm:lora_requests_info{max_lora=\"9\",running_lora_adapters=\"old\"} NaN\n";
    let reading = EngineMap::of(Engine::Vllm).unwrap().read(page.as_bytes(), Timestamp(0), 0).unwrap();
    let metrics = reading.metrics;
    assert_eq!((metrics.waiting, metrics.running, metrics.kv_usage), (u32::MAX, 2, 1.0));
    assert_eq!((metrics.process_start, metrics.prefix_hits), (None, None));
    assert_eq!((metrics.block_size, metrics.num_blocks), (None, None));
    assert_eq!(metrics.lora, Some(LoraState { max: 0, running: names(&["a", "b"]), waiting: vec![] }));
    assert_eq!(reading.skipped, Skipped { malformed: 0, unusable: 3 });
}

#[test]
fn every_family_fits_the_scanner() {
    for map in MAPS.iter() {
        assert!(map.rows_of.len() <= super::super::exposition::MAX_FAMILIES);
        assert_eq!(map.rows_of.iter().map(Vec::len).sum::<usize>(), map.rows.len());
        assert_eq!(map.families.names().len(), map.rows_of.len());
    }
}

#[test]
fn optional_values_that_the_page_lacks_are_named_once() {
    let map = EngineMap::of(Engine::Vllm).unwrap();
    let unreported = |page: &str| -> Vec<String> {
        let metrics = read(Engine::Vllm, page).unwrap();
        map.unreported(&metrics).iter().map(ToString::to_string).collect()
    };
    let page = std::str::from_utf8(V0_32_LOAD).unwrap();
    assert_eq!(unreported(page), Vec::<String>::new());
    let without: Vec<&str> = page.lines().filter(|line| !line.starts_with("vllm:cache_config_info")).collect();
    assert_eq!(unreported(&(without.join("\n") + "\n")), ["vllm:cache_config_info"]);
    let without = without.into_iter().filter(|line| !line.starts_with("process_start_time_seconds"));
    let without = without.collect::<Vec<_>>().join("\n") + "\n";
    assert_eq!(unreported(&without), ["vllm:cache_config_info", "process_start_time_seconds"]);
}
