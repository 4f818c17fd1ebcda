//! Model servers that report more than they can know: names of adapters without an end, and the name of the base model
//! as one of their adapters.

use crate::prefix::{SIM, config, load, until_exact};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// The least busy server that has the most of the prompt. The hostile one reports a long queue.
const STRATEGY: &str = "{name: pipeline, parameters: {scorers: [{type: prefix-cache-scorer, weight: 1}, \
                        {type: queue-scorer, weight: 3}]}}";

/// A server of nothing but metrics, whose adapters a test sets. `%` in their names becomes the number of the scrape.
#[derive(Clone)]
struct Hostile {
    address: SocketAddr,
    adapters: Arc<Mutex<String>>,
    scrapes: Arc<AtomicUsize>,
}

impl Hostile {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let hostile = Self { address, adapters: Arc::default(), scrapes: Arc::default() };
        let serving = hostile.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let hostile = serving.clone();
                tokio::spawn(async move {
                    let mut buffer = [0; 4096];
                    while stream.read(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {
                        if stream.write_all(hostile.page().as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        hostile
    }

    fn page(&self) -> String {
        let scrape = self.scrapes.fetch_add(1, SeqCst);
        let adapters = self.adapters.lock().replace('%', &scrape.to_string());
        let page = format!(
            "vllm:num_requests_waiting{{model_name=\"other\"}} 1000\nvllm:num_requests_running{{model_name=\"other\"}} \
             1000\nvllm:kv_cache_usage_perc 1\nvllm:lora_requests_info{{max_lora=\"4\",\
             running_lora_adapters=\"{adapters}\",waiting_lora_adapters=\"\"}} {}\n",
            scrape + 1
        );
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{page}", page.len())
    }

    /// Reports these adapters, and waits until the picker has read several pages with them.
    async fn report(&self, adapters: String) {
        *self.adapters.lock() = adapters;
        let before = self.scrapes.load(SeqCst);
        eventually("scrapes", async || (self.scrapes.load(SeqCst) > before + 4).then_some(())).await;
    }
}

/// Two honest servers with KV events, and a hostile one in the same pool.
struct Pool {
    sim: SimProcess,
    hostile: Hostile,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Pool {
    async fn start() -> Self {
        let (sim, hostile) = (SimProcess::start(2, SIM).await, Hostile::start().await);
        let honest = config(STRATEGY, "tiktoken", &sim.servers).await;
        let picker = AttacheProcess::configured(&format!("{honest}  - \"{}\"\n", hostile.address)).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let pool = Self { sim, hostile, picker, envoy };
        pool.load(0..60).await;
        until_exact(&pool.picker, &pool.sim.servers).await;
        pool
    }

    async fn load(&self, requests: std::ops::Range<u32>) {
        load(self.envoy.listener("inference"), requests).await;
    }

    /// Checks that prompts with known beginnings still find them.
    async fn assert_found(&self, requests: std::ops::Range<u32>) {
        let before = self.picker.metric("attache_prefix_matched_tokens_total").await;
        let count = f64::from(requests.end - requests.start);
        self.load(requests).await;
        let found = self.picker.metric("attache_prefix_matched_tokens_total").await - before;
        // The beginnings have 200 tokens at least.
        assert!(found > 150.0 * count, "{found} tokens of {count} prompts");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn base_model_as_adapter_of_one_server_hides_no_blocks_of_others() {
    let pool = Pool::start().await;
    pool.assert_found(100..130).await;
    pool.hostile.report("sim-8b".into()).await;
    pool.assert_found(130..160).await;
    pool.hostile.report("sim-8b, a%".into()).await;
    pool.assert_found(160..190).await;
    pool.picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_adapter_names_of_one_server_are_bounded_and_hide_no_blocks() {
    let pool = Pool::start().await;
    // About 1,000 new names in each scrape.
    let names: Vec<String> = (0..1_000).map(|i| format!("adapter-%-{i}")).collect();
    pool.hostile.report(names.join(",")).await;
    let known = pool.picker.metric("attache_prefix_adapter_names").await;
    assert!(known <= 1_024.0 + 2.0, "{known} names");
    assert!(pool.picker.metric("attache_prefix_adapter_names_dropped_total").await > 1_000.0);
    pool.assert_found(100..130).await;
    // A page of 20,000 names.
    let names: Vec<String> = (0..20_000).map(|i| format!("%{i}")).collect();
    pool.hostile.report(names.join(",")).await;
    assert!(pool.picker.metric("attache_prefix_adapter_names").await <= 1_024.0 + 2.0);
    pool.assert_found(130..160).await;
    let live = client::get(pool.picker.metrics, "/live").await.expect("a response");
    assert_eq!(live.status, 200);
    let told = |line: &&str| line.contains("more names of LoRA adapters than Attaché keeps");
    let log = eventually("a line about the names", async || {
        let log = pool.picker.process.stderr();
        log.lines().any(|line| told(&line)).then_some(log)
    })
    .await;
    assert_eq!(log.lines().filter(told).count(), 1);
    pool.picker.assert_settled().await;
}
