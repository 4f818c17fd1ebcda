//! AIBrix's routing algorithms and their fallbacks.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::aibrix::ask::{IDLE, PendingRequest, Pool, refused};
use crate::coming_from::aibrix::library::{settings, strategy, winners, work};
use crate::coming_from::rows;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::sim::SimProcess;
use attache_config::settings::TenantSource;
use attache_pool::{Counter, EndpointMetrics, Histogram, Means, Rates};
use attache_types::limits::Limits;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::HeaderValue;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const COMPAT: (&str, &str) = ("ATTACHE_AIBRIX_COMPAT", "true");

fn page() -> EndpointMetrics {
    EndpointMetrics::default()
}

fn picked(asked: &PendingRequest) -> usize {
    asked.answer.as_ref().unwrap_or_else(|refusal| panic!("{refusal:?}")) + 1
}

/// Users in the order in which a server with one slot completes their requests. Six requests of `heavy` arrive before
/// two of `light`.
async fn served_under_load(strategy: &str) -> Vec<&'static str> {
    let sim = SimProcess::start(1, &["--model", "m", "--max-num-seqs", "1", "--step-base", "200ms"]).await;
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  endpoints: [\"{}\"]\n  flowControl: {{detector: \
         {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}}}\n",
        sim.servers[0]
    );
    let picker = AttacheProcess::configured_with(&text, &[("ROUTING_ALGORITHM", strategy)]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let (ended, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let mut first = None;
    for (number, user) in [["heavy"; 7].as_slice(), &["light"; 2]].concat().into_iter().enumerate() {
        // The first request occupies the server until all others are queued in order of arrival. Then its client
        // disconnects.
        let tokens = if number == 0 { 1_000 } else { 1 };
        let messages = [json!({"role": "user", "content": format!("{number}")})];
        let body = json!({"model": "m", "max_tokens": tokens, "messages": messages});
        let payload = Payload::sized(body.to_string().into());
        let mut request = client::request("POST", to, Http::H1, "/v1/chat/completions", payload);
        request.headers_mut().insert("user", HeaderValue::from_static(user));
        let ended = ended.clone();
        let task = tokio::spawn(async move {
            let reply = client::send(to, Http::H1, request).await.expect("an answer");
            ended.send((user, reply.status.as_u16())).expect("the test waits");
        });
        first.get_or_insert(task);
        picker.until_metric("attache_queued_requests", number as f64).await;
    }
    drop(ended);
    first.expect("a request").abort();
    let mut order = Vec::new();
    while let Some((user, status)) = ends.recv().await {
        assert_eq!(status, 200, "{user}");
        order.push(user);
    }
    picker.assert_settled().await;
    order
}

/// Sends `count` requests to the server `at` (from 1) and keeps them in flight.
async fn hold(pool: &Pool, at: usize, prompt: &str, count: usize) -> Vec<PendingRequest> {
    let filter = format!("pod=p{at}");
    let mut held = Vec::new();
    for _ in 0..count {
        held.push(pool.ask(prompt, &[("external-filter", &filter)]).await);
    }
    assert!(held.iter().all(|asked| picked(asked) == at));
    held
}

/// The block keys of a chat under AIBrix's settings.
fn keys(body: &[u8]) -> Vec<attache_prefix::key::BlockKey> {
    use attache_prefix::key::{BlockKeys, KeySpace};
    use attache_prompt::characters::Characters;
    let request = attache_protocol::parse(attache_protocol::Api::ChatCompletions, None, body, &Limits::default());
    let characters = Characters {
        block_size: std::sync::Arc::new(attache_prefix::block_size::BlockSize::given(32)),
        ..Characters::new(KeySpace::new(0))
    };
    characters.keys(&request.expect("a request").prompt, 0).upto(usize::MAX).to_vec()
}

/// The work that `prefix-cache-preble` with `compat` counts for one request with this prompt, seconds.
fn preble_work(prompt: &str) -> f64 {
    let body = json!({"model": "m", "prompt": prompt}).to_string();
    let api = attache_protocol::Api::Completions;
    let request = attache_protocol::parse(api, None, body.as_bytes(), &Limits::default()).expect("a request");
    work("prefix-cache-preble", &json!({"compat": true}), &request.prompt)
}

/// Completes all of them.
async fn finish(held: Vec<PendingRequest>) {
    for asked in held {
        asked.finish().await;
    }
}

/// Number of the first identical request that is sent to another server while all requests stay in flight.
async fn first_diverted_request(pool: &Pool, at_most: usize) -> usize {
    let prompt = "a long prompt ".repeat(40);
    let mut held = vec![pool.ask(&prompt, &[]).await];
    for number in 2..=at_most {
        held.push(pool.ask(&prompt, &[]).await);
        if picked(&held[number - 1]) != picked(&held[0]) {
            return number;
        }
    }
    panic!("all {at_most} requests stay");
}

/// With two servers that report no value for the strategy: whether the busy one is picked as well.
async fn draws_at_random(strategy: &str, variables: &[(&str, &str)]) -> bool {
    let set = [&[("ROUTING_ALGORITHM", strategy)], variables].concat();
    let pool = Pool::with(2, "", &set).await;
    let _held = hold(&pool, 1, "hello", 3).await;
    let mut picks = BTreeSet::new();
    for _ in 0..20 {
        picks.insert(picked(&pool.ask("hello", &[]).await));
    }
    picks.contains(&1)
}

rows! { ROWS;
    random: "`random`", "any ready endpoint", Same => {
        let pool = Pool::with(3, "", &[("ROUTING_ALGORITHM", "random")]).await;
        let mut picks = BTreeSet::new();
        for _ in 0..60 {
            picks.insert(picked(&pool.ask("hello", &[]).await));
        }
        assert_eq!(picks, [1, 2, 3].into());
    }
    no_endpoint: "no ready endpoint", "503", Same => {
        let pool = Pool::with(1, "", &[("ROUTING_ALGORITHM", "random")]).await;
        assert_eq!(pool.refusal(&[("external-filter", "pod=none")]).await.status, 503);
    }
    least_request: "`least-request`", "the fewest running requests by the gateway's own count; ties at random",
        Differs {
            default: "also counts what servers report of other senders",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            let busy = IDLE.replacen("} 0", "} 40", 1);
            for (compat, expected) in [(&[][..], &[2][..]), (&[COMPAT], &[1, 2])] {
                let set = [&[("ROUTING_ALGORITHM", "least-request")], compat].concat();
                let pool = Pool::reporting(&[&busy, IDLE], "", &set).await;
                assert_eq!(pool.picks(20, "hello", &[]).await, expected.iter().copied().collect(), "{compat:?}");
            }
            let pool = Pool::with(3, "", &[("ROUTING_ALGORITHM", "least-request")]).await;
            let held = [hold(&pool, 1, "hello", 2).await, hold(&pool, 2, "hello", 1).await];
            assert_eq!(picked(&pool.ask("hello", &[]).await), 3);
            drop(held);
            let reports = |waiting| Some(EndpointMetrics { waiting, ..page() });
            assert_eq!(winners("least-request", &Value::Null, &[reports(1), reports(5), reports(1)]), [1, 3].into());
        }
    throughput: "`throughput`", "the lowest 2 × prompt tokens/s + generated tokens/s",
        Differs {
            default: "the same figure, from the counters of today's vLLM; there those are not read, and chance decides",
            exact: "`random`",
        } => {
            let reports = |prompt, generation| {
                let (prompt_tokens, generation_tokens) = (Some(prompt), Some(generation));
                let rates = Rates { prompt_tokens, generation_tokens, ..Rates::default() };
                Some(EndpointMetrics { rates, ..page() })
            };
            let all = [reports(1.0, 4.0), reports(5.0, 5.0), reports(2.0, 2.0)];
            assert_eq!(winners("throughput", &Value::Null, &all), [1, 3].into(), "aibrix 10.2");
        }
    least_busy_time: "`least-busy-time`", "the lowest `gpu_busy_time_ratio`, which nothing collects: chance decides",
        Differs { default: "read from the metrics page, where an exporter adds it", exact: "`random`" } => {
            let pages = [0.9, 0.1].map(|busy| format!("{IDLE}gpu_busy_time_ratio {busy}\n"));
            let pages: Vec<&str> = pages.iter().map(String::as_str).collect();
            let pool = Pool::reporting(&pages, "", &[("ROUTING_ALGORITHM", "least-busy-time")]).await;
            assert_eq!(pool.picks(5, "hello", &[]).await, [2].into());
        }
    least_kv_cache: "`least-kv-cache`",
        "the least GPU cache + CPU cache in use; endpoints that do not report both are skipped",
        Differs {
            default: "either name of the GPU figure counts; an absent CPU cache counts as empty",
            exact: "`random`, which is what AIBrix does on today's vLLM",
        } => {
            let cache = |gpu, cpu| Some(EndpointMetrics { kv_usage: gpu, cpu_cache_usage: cpu, ..page() });
            let all = [cache(0.2, Some(0.3)), cache(0.1, Some(0.5)), cache(0.6, Some(0.6)), cache(0.6, Some(0.8))];
            assert_eq!(winners("least-kv-cache", &Value::Null, &all), [1].into(), "aibrix 10.3");
            assert_eq!(winners("least-kv-cache", &Value::Null, &[cache(0.9, None), cache(0.5, None)]), [2].into());
        }
    least_gpu_cache: "`least-gpu-cache`", "the least `gpu_cache_usage_perc`, which today's vLLM calls otherwise",
        Differs {
            default: "`gpu_cache_usage_perc` or `kv_cache_usage_perc`",
            exact: "`random`, which is what AIBrix does on today's vLLM",
        } => {
            let used = |name: &str, used: f64| {
                let page = IDLE.replace("kv_cache_usage_perc", name);
                page.strip_suffix("0\n").map(|page| format!("{page}{used}\n")).expect("a page that ends with it")
            };
            for name in ["gpu_cache_usage_perc", "kv_cache_usage_perc"] {
                let pages = [used(name, 0.9), used(name, 0.1), used(name, 0.5)];
                let pages: Vec<&str> = pages.iter().map(String::as_str).collect();
                let pool = Pool::reporting(&pages, "", &[("ROUTING_ALGORITHM", "least-gpu-cache")]).await;
                assert_eq!(pool.picks(5, "hello", &[]).await, [2].into(), "{name}");
            }
        }
    least_utilization: "`least-utilization`",
        "the lowest `engine_utilization`, which xLLM reports; ties at random", Same => {
        let used = |used| Some(EndpointMetrics { engine_utilization: Some(used), ..page() });
        assert_eq!(winners("least-utilization", &Value::Null, &[used(0.25), used(0.5), used(0.25)]), [1, 3].into());
    }
    least_latency: "`least-latency`",
        "queue + prefill and decode times for a request of mean length, over the server's whole life",
        Differs { default: "over the last minute, with the queue", exact: "`compat: true`" } => {
            let means = Means {
                queue_seconds: Some(0.0), prefill_seconds: Some(1.0), decode_seconds: Some(1.0),
                prompt_tokens: Some(10.0), generation_tokens: Some(100.0),
            };
            let server = |lately: f64, life: f64| {
                let mut metrics = page();
                for histogram in [Histogram::Prefill, Histogram::Decode] {
                    metrics.counters.set(Counter::Sum(histogram), life);
                    metrics.counters.set(Counter::Count(histogram), 1.0);
                }
                metrics.rates.means = Means { prefill_seconds: Some(lately), ..means };
                Some(metrics)
            };
            let all = [server(9.0, 1.0), server(1.0, 9.0)];
            assert_eq!(winners("least-latency", &Value::Null, &all), [2].into());
            assert_eq!(winners("least-latency", &json!({"compat": true}), &all), [1].into());
        }
    load_balance: "`load-balance`",
        "the least running requests by drain rate; ties by KV cache; a gate of 8 requests", Same => {
        let drains = |waiting, rate, kv_usage| {
            let rates = Rates { finished: Some(rate), ..Rates::default() };
            Some(EndpointMetrics { waiting, kv_usage, rates, ..page() })
        };
        let win = |all: &[_]| winners("load-balance", &Value::Null, all);
        assert_eq!(win(&[drains(4, 2.0, 0.0), drains(3, 1.0, 0.0)]), [1].into(), "aibrix 2.5");
        assert_eq!(win(&[drains(4, 2.0, 0.5), drains(2, 1.0, 0.2)]), [2].into(), "aibrix 2.5: by cache");
        assert_eq!(win(&[drains(9, 99.0, 0.0), drains(0, 0.1, 0.0)]), [2].into(), "aibrix 2.5: the gate");
    }
    power_of_two: "`power-of-two`",
        "two endpoints are drawn, the one with fewer requests wins; needs Redis for its counters",
        Differs {
            default: "the same, with what servers report of other senders; no Redis",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`: the picker's own count",
        } => {
            for compat in [&[][..], &[COMPAT]] {
                let set = [&[("ROUTING_ALGORITHM", "power-of-two")], compat].concat();
                let pool = Pool::with(2, "", &set).await;
                let _held = hold(&pool, 1, "hello", 1).await;
                assert_eq!(picked(&pool.ask("hello", &[]).await), 2, "{compat:?}");
            }
        }
    session_affinity: "`session-affinity`, headers `x-session-id`, `x-aibrix-session-key`",
        "the endpoint that the id holds (base64), else one by the key, else any; the response has the id", Same => {
            let pool = Pool::with(3, "", &[("ROUTING_ALGORITHM", "session-affinity")]).await;
            let id = |at: usize| BASE64_STANDARD.encode(pool.servers[at].address.to_string());
            for at in 0..3 {
                assert_eq!(pool.picks(3, "hello", &[("x-session-id", &id(at))]).await, [at + 1].into());
                let both = [("x-session-id", &*id(at)), ("x-aibrix-session-key", "agent-session-42")];
                assert_eq!(pool.picks(2, "hello", &both).await, [at + 1].into(), "the id outranks the key");
            }
            assert_eq!(pool.picks(5, "hello", &[("x-aibrix-session-key", "agent-session-42")]).await.len(), 1);
            for gone in ["%%%INVALID", &BASE64_STANDARD.encode("10.0.0.9:8000")] {
                let mut asked = pool.ask("hello", &[("x-session-id", gone)]).await;
                let at = picked(&asked) - 1;
                assert_eq!(asked.response_headers().await.get("x-session-id"), Some(&id(at)), "aibrix 10.10");
            }
        }
    prefix_cache: "`prefix-cache`",
        "the endpoint with the longest known prefix and at most mean + factor × deviation requests",
        Same => {
            for compat in [&[][..], &[COMPAT]] {
                let set = [&[("ROUTING_ALGORITHM", "prefix-cache")], compat].concat();
                let pool = Pool::with(3, "", &set).await;
                let (a, b) = ("first prompt ".repeat(60), "another prompt ".repeat(60));
                let first = hold(&pool, 1, &a, 1).await;
                let other = pool.pick(&b, &[]).await;
                assert_ne!(other, 1, "aibrix 10.5, step 2: nobody holds it; fewest requests");
                finish(first).await;
                assert_eq!(pool.picks(4, &a, &[]).await, [1].into(), "aibrix 10.5, step 3");
                assert_eq!(pool.picks(4, &b, &[]).await, [other].into());
            }
        }
    prefix_cache_imbalance: "`prefix-cache` under imbalance",
        "prefixes are ignored; the fewest requests by the gateway's own count, when they differ by more than the limit",
        Differs {
            default: "the endpoints with the fewest requests, and of those the longest prefix; \
                      scraped requests of other senders count too",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            let running = IDLE.replacen("} 0", "} 40", 1);
            let exact = [("ROUTING_ALGORITHM", "prefix-cache"), COMPAT];
            // Servers report requests of other senders, which `compat` does not count.
            let pool = Pool::reporting(&[&running, IDLE], "", &exact).await;
            assert_eq!(first_diverted_request(&pool, 20).await, 18, "17 requests differ by more than 16");
            let small = [&exact[..], &[("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "3")]].concat();
            let pool = Pool::reporting(&[&running, IDLE], "", &small).await;
            assert_eq!(first_diverted_request(&pool, 20).await, 5, "4 requests differ by more than 3");
        }
    prefix_cache_hotspot: "`prefix-cache` with a busy holder",
        "a holder above mean + factor × deviation is passed over",
        Same => {
            for (factor, expected) in [("1", 4), ("2", 1)] {
                let set = [
                    ("ROUTING_ALGORITHM", "prefix-cache"), COMPAT,
                    ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", factor),
                ];
                let pool = Pool::with(4, "", &set).await;
                let prompt = "a long prompt ".repeat(60);
                let _held = [
                    hold(&pool, 1, &prompt, 4).await,
                    hold(&pool, 2, "hello", 1).await,
                    hold(&pool, 3, "hello", 1).await,
                ];
                assert_eq!(picked(&pool.ask(&prompt, &[]).await), expected, "aibrix 10.4, factor {factor}");
            }
        }
    prefix_cache_in_flight: "`prefix-cache`: prompts in flight", "a prompt counts to the block as soon as it is routed",
        Differs {
            default: "a prompt counts at 1, 2, 4, 8, … blocks and at its end, to the block once the server has responded",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            // Blocks of 128 bytes: one prompt in flight shares three of four blocks, the other one two.
            let (shared, own) = ("s".repeat(460), |letter: &str| letter.repeat(60));
            for (variables, to_the_block) in [
                (&[("ROUTING_ALGORITHM", "prefix-cache"), COMPAT][..], true),
                (&[("ROUTING_ALGORITHM", "prefix-cache")], false),
            ] {
                let pool = Pool::with(2, "", variables).await;
                let _held = [
                    hold(&pool, 1, &format!("{}{}", &shared[..460], own("a")), 1).await,
                    hold(&pool, 2, &format!("{}{}", &shared[..330], own("b").repeat(3)), 1).await,
                ];
                // Requests that are dropped teach the picker nothing.
                let mut picks = BTreeSet::new();
                for _ in 0..24 {
                    picks.insert(picked(&pool.ask(&format!("{shared}{}", own("c")), &[]).await));
                }
                assert_eq!(picks, if to_the_block { [1].into() } else { [1, 2].into() }, "{variables:?}");
            }
        }
    prefix_cache_blocks: "`prefix-cache` with the tokenizer `character`: content of blocks",
        "the texts of all messages, joined by a space; roles and tools are no part of it",
        Differs {
            default: "roles, tools and media too, each with a mark, since servers' caches differ by them",
            exact: "",
        } => {
            let chat = |role: &str| json!({"model": "m", "messages": [{"role": role, "content": "text ".repeat(90)}]}).to_string();
            let (user, system) = (chat("user"), chat("system"));
            assert_ne!(keys(user.as_bytes()), keys(system.as_bytes()));
            assert_eq!(keys(user.as_bytes()).len(), 3, "of 128 bytes");
        }
    preble_tokens: "`prefix-cache-preble`: lengths of prompts", "tokens of `cl100k_base`",
        Differs {
            default: "4 bytes of text are a token, also with `compat`: encoding a long prompt would hold up a decision",
            exact: "",
        } => {
            let words = preble_work(&"some words of a plain text ".repeat(60));
            let digits = preble_work(&"31415926535897932384626433 ".repeat(60));
            assert_eq!(words, digits, "equal lengths in bytes, different ones in tokens");
            assert!(words > 0.0);
        }
    preble: "`prefix-cache-preble`", "a radix tree with a cost model; a prefix over half of the prompt is followed",
        Differs {
            default: "the work of each endpoint and this prompt's own prefill, over the exact prefix index",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            let pool = Pool::with(3, "", &[("ROUTING_ALGORITHM", "prefix-cache-preble"), COMPAT]).await;
            let (a, b) = ("first prompt ".repeat(60), "another prompt ".repeat(60));
            let first = pool.pick(&a, &[]).await;
            assert_eq!(pool.picks(4, &a, &[]).await, [first].into(), "aibrix 10.7 b");
            let second = pool.pick(&b, &[]).await;
            assert_ne!(second, first, "least work");
            let third = pool.pick(&"yet another one ".repeat(60), &[]).await;
            assert_eq!(BTreeSet::from([first, second, third]).len(), 3, "least work");
        }
    preble_gate: "`prefix-cache-preble`: only the least loaded when requests differ by more than 8",
        "absent in 0.4, added later",
        Differs { default: "on", exact: "`gate: false`; off with `compat: true`, unless `gate: true`" } => {
            let prompt = "a long prompt ".repeat(60);
            let gate = "  strategy: {name: prefix-cache-preble, parameters: {compat: true, gate: true}}\n  \
                        requestStrategy: {filterHeader: external-filter}\n";
            for (more, variables, stays) in [
                ("", &[("ROUTING_ALGORITHM", "prefix-cache-preble"), COMPAT][..], true),
                ("", &[("ROUTING_ALGORITHM", "prefix-cache-preble")], false),
                (gate, &[], false),
            ] {
                let pool = Pool::with(2, more, variables).await;
                let _held = hold(&pool, 1, &prompt, 9).await;
                assert_eq!(picked(&pool.ask(&prompt, &[]).await) == 1, stays, "{more}{variables:?}");
            }
        }
    vtc_basic: "`vtc-basic`, header `user`",
        "a heavy user goes to the second pod, a new one to the first; only three pods are ever preferred",
        Differs {
            default: "heavy users share the last endpoints, whatever the size of the pool; others have all",
            exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            let heavy = "many tokens ".repeat(1_000);
            let compat = Pool::with(4, "", &[("ROUTING_ALGORITHM", "vtc-basic"), COMPAT]).await;
            compat.pick(&heavy, &[("user", "heavy")]).await;
            assert_eq!(compat.picks(5, "hello", &[("user", "heavy")]).await, [2].into());
            assert_eq!(compat.pick("hello", &[("user", "new")]).await, 1);
            let own = Pool::with(4, "", &[("ROUTING_ALGORITHM", "vtc-basic")]).await;
            own.pick("hello", &[("user", "light")]).await;
            own.pick(&heavy, &[("user", "heavy")]).await;
            assert_eq!(own.picks(5, "hello", &[("user", "heavy")]).await, [4].into());
        }
    vtc_basic_no_user: "`vtc-basic` without the header `user`", "any endpoint; nothing is charged",
        Differs { default: "the fewest requests", exact: "`compat: true` or `ATTACHE_AIBRIX_COMPAT=true`" } => {
            assert!(!draws_at_random("vtc-basic", &[]).await);
            assert!(draws_at_random("vtc-basic", &[COMPAT]).await);
        }
    vtc_fair: "`vtc-fair`, `vtc-max-fair`, `vtc-pred`", "named as future variants; not there",
        Differs {
            default: "a fair queue before the pool (`flowControl`), then the fewest requests; \
                      users by the header `user`, or `exchange.tenant`",
            exact: "",
        } => {
            for name in ["vtc-fair", "vtc-max-fair", "vtc-pred"] {
                let (settings, warnings) = settings("", &[("ROUTING_ALGORITHM", name)]).expect("good settings");
                let flow = settings.pools[0].flow.as_ref().expect("a queue");
                assert_eq!(flow.said["defaultBand"]["fairness"]["name"], name);
                let tenant = settings.exchange.tenant.as_ref().map(|rule| &rule.source);
                assert!(matches!(tenant, Some(TenantSource::Header(user)) if user == "user"), "{tenant:?}");
                assert!(warnings.iter().any(|w| w.starts_with("W304 exchange.tenant")), "{warnings:?}");
            }
            let pool = Pool::with(2, "", &[("ROUTING_ALGORITHM", "vtc-fair")]).await;
            let _held = hold(&pool, 1, "hello", 1).await;
            assert_eq!(picked(&pool.ask("hello", &[("user", "a"), ("routing-strategy", "vtc-fair")]).await), 2);
            assert_eq!(pool.refusal(&[("routing-strategy", "vtc-pred")]).await.status, 400, "the queue is another's");
        }
    vtc_fair_in_a_saturated_pool: "`vtc-fair`, `vtc-max-fair`, `vtc-pred` in a saturated pool",
        "named as future variants; not there",
        Differs {
            default: "users take turns by their tokens: one with two requests does not wait for all of one with many",
            exact: "",
        } => {
            let names = ["vtc-fair", "vtc-max-fair", "vtc-pred"];
            let orders = futures_util::future::join_all(names.map(served_under_load)).await;
            for (name, order) in names.into_iter().zip(orders) {
                let last = order.iter().rposition(|user| *user == "light").expect("served");
                assert!(order.len() == 8 && last <= 4, "{name}: {order:?}");
            }
        }
    vtc_fair_without_queue: "`vtc-fair` with `flowControl` off or with another fairness policy", "-",
        Differs { default: "the start fails and says what to change", exact: "`least-request`" } => {
            for flow in ["{enabled: false}", "{queue: false}", "{defaultBand: {fairness: round-robin}}"] {
                let pool = format!("  strategy: vtc-fair\n  flowControl: {flow}\n");
                let errors = settings(&pool, &[]).expect_err("an error");
                assert!(errors.iter().any(|e| e.starts_with("E207")), "{flow}: {errors:?}");
            }
            let elsewhere = "  strategy: random\n  strategies: [{models: [m], strategy: vtc-fair}]\n";
            let errors = settings(elsewhere, &[]).expect_err("an error");
            assert!(errors.iter().any(|e| e.starts_with("E207")), "{errors:?}");
            assert!(refused("  strategy: vtc-fair\n  flowControl: {enabled: false}\n", &[]).await.contains("vtc-fair"));
        }
    no_figure: "a metric strategy of whose figure no server reports anything", "any endpoint",
        Differs {
            default: "the fewest requests; counted in `attache_degraded_total`",
            exact: "`fallback: random`, or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            assert!(!draws_at_random("least-busy-time", &[]).await);
            assert!(draws_at_random("least-busy-time", &[COMPAT]).await);
            for name in ["throughput", "least-busy-time", "least-utilization", "least-latency"] {
                let busy = |waiting| Some(EndpointMetrics { waiting, ..page() });
                assert_eq!(winners(name, &Value::Null, &[busy(5), busy(0)]), [2].into(), "{name}");
                assert_eq!(winners(name, &json!({"fallback": "random"}), &[busy(5), busy(0)]), [1, 2].into(), "{name}");
            }
            for name in ["least-kv-cache", "least-gpu-cache"] {
                assert_eq!(winners(name, &json!({"fallback": "random"}), &[None, None]), [1, 2].into(), "{name}");
            }
        }
    fallback_router: "the fallback router", "a random endpoint for requests that the primary cannot decide",
        Differs {
            default: "`fallback` with the fewest requests",
            exact: "`{name: fallback, parameters: {primary: …, fallback: random}}`, or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
            let busy = |waiting| Some(EndpointMetrics { waiting, ..page() });
            let all = [busy(5), busy(0)];
            let primary = |fallback: &str| json!({"primary": "vtc-basic", "fallback": fallback});
            assert_eq!(winners("fallback", &json!({"primary": "vtc-basic"}), &all), [2].into());
            assert_eq!(winners("fallback", &primary("random"), &all), [1, 2].into());
            assert_eq!(winners("fallback", &primary("least-request"), &all), [2].into());
            let set = [("ROUTING_ALGORITHM", "fallback"), COMPAT];
            assert_eq!(strategy(&set).1, json!({"fallback": "random"}));
        }
}
