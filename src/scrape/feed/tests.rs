//! Processing of metrics, and of one response from a socket. `tests/in_process/feeds.rs` tests the scraper over real
//! HTTP.

use super::*;
use attache_pool::ranks::RankBooking;
use attache_pool::writer::SourceId;
use attache_pool::{EndpointMetrics, EndpointSpec, Engine, PoolWriter};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const SECOND: u64 = 1_000_000_000;

/// A scraper of one endpoint, and the writer of its pool.
struct Bench {
    scraper: Scraper,
    writer: PoolWriter,
    published: watch::Sender<Published>,
}

impl Bench {
    fn new() -> Self {
        let settings = ScrapeSettings {
            interval: Duration::from_millis(100),
            idle_interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            max_bytes: 1 << 20,
            stale_after: Duration::from_secs(2),
            insecure_skip_verify: false,
            bearer_token_file: None,
        };
        let (published, following) = watch::channel(Published::default());
        let (events, _) = mpsc::channel(1);
        let settings = watch::channel(settings).1;
        let scraper = Scraper::new(Arc::default(), following, settings, events, Clock::start(), 1).unwrap();
        let mut bench = Self { scraper, writer: PoolWriter::new(vec![SourceId(0)]), published };
        bench.publish(Engine::Vllm);
        bench
    }

    /// Publishes the endpoint with `engine`.
    fn publish(&mut self, engine: Engine) {
        let spec = EndpointSpec { engine, ..EndpointSpec::at(([127, 0, 0, 1], 8000).into()) };
        self.writer.apply(PoolEvent::Endpoints { source: SourceId(0), endpoints: vec![spec.into()] });
        self.scraper.store.publish(self.writer.snapshot().unwrap());
        self.published.send_replace(self.writer.published());
        self.scraper.follow();
    }

    /// Metrics scraped in `second` of a process that started at `start` and has finished `finished` requests.
    fn page(&mut self, second: u64, start: u32, finished: u32) -> Arc<EndpointMetrics> {
        let target = self.scraper.targets.values().next().unwrap();
        let (id, engine) = (target.endpoint.id, target.engine);
        let page = format!(
            "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n\
             vllm:request_success_total {finished}\nprocess_start_time_seconds {start}\n\
             sglang:num_queue_reqs 0\nsglang:num_running_reqs 0\nsglang:token_usage 0\nsglang:num_requests_total {finished}\n"
        );
        let reading = engine.read(page.as_bytes(), Timestamp(second * SECOND), 0).unwrap();
        let events = self.scraper.finish(Fetched { id, buffer: Vec::new(), outcome: Ok(reading) });
        let scraped = events.into_iter().flatten().find_map(|event| match event {
            PoolEvent::Scraped { metrics, .. } => Some(metrics),
            _ => None,
        });
        scraped.unwrap()
    }
}

#[tokio::test]
async fn metrics_have_the_rates_since_earlier_scrapes() {
    let mut bench = Bench::new();
    assert_eq!(bench.page(100, 1_000, 0).rates.finished, None);
    assert_eq!(bench.page(120, 1_000, 40).rates.finished, Some(2.0));
    // A failure in between changes nothing.
    let id = *bench.scraper.targets.keys().next().unwrap();
    let failed = Fetched { id, buffer: Vec::new(), outcome: Err(FetchError::Encoded.into()) };
    assert!(bench.scraper.finish(failed).into_iter().flatten().next().is_none());
    assert_eq!(bench.page(130, 1_000, 45).rates.finished, Some(1.5));
}

#[tokio::test]
async fn rates_restart_with_a_new_process_or_engine() {
    let mut bench = Bench::new();
    bench.page(100, 1_000, 0);
    bench.page(120, 1_000, 40);
    // The new process has higher counters than the old one had.
    assert_eq!(bench.page(140, 9_000, 500).rates.finished, None);
    assert_eq!(bench.page(150, 9_000, 530).rates.finished, Some(3.0));
    bench.publish(Engine::Sglang);
    assert_eq!(bench.page(170, 9_000, 900).rates.finished, None);
    assert_eq!(bench.page(180, 9_000, 910).rates.finished, Some(1.0));
}

#[tokio::test]
async fn metrics_know_the_requests_in_flight_when_they_were_requested() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let endpoint = Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(address)));
    let booked = RankBooking::choose(&endpoint, &[0, 9], None).unwrap();
    let serve = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(socket.read(&mut [0; 4096]).await.unwrap() > 0);
        // It ends during the fetch, whose response still includes it.
        drop(booked);
        let page = "vllm:num_requests_waiting 0\nvllm:num_requests_running{engine=\"0\"} 0\n\
                    vllm:num_requests_running{engine=\"1\"} 1\nvllm:kv_cache_usage_perc 0\n";
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{page}", page.len());
        socket.write_all(answer.as_bytes()).await.unwrap();
        socket
    };
    let url = format!("http://{address}/metrics").parse().unwrap();
    let engine = EngineMap::of(Engine::Vllm).unwrap();
    let limits = (Duration::from_secs(20), 1 << 20);
    let fetch = scrape(
        Ok((Clients::new().unwrap().plain(), url, None)),
        endpoint.clone(),
        engine,
        limits,
        Vec::new(),
        Clock::start(),
    );
    let (fetched, _socket) = tokio::join!(fetch, serve);
    let metrics = fetched.outcome.unwrap().metrics;
    assert_eq!((&metrics.ranks[..], &metrics.ranks_at_scrape[..]), (&[0, 1][..], &[0, 1][..]));
    let next = RankBooking::choose(&endpoint, &[], Some(&metrics)).unwrap();
    assert_eq!(next.rank(), 0, "both are idle");
}
