//! What scraping costs: `cargo bench --bench scrape_idle`.
//!
//! A hundred endpoints serve a real 80 kB page over HTTP. The feeds (discovery, scraper, publisher) run on a thread of their own, so
//! that the kernel tells their CPU time from that of the servers. Linux only, because it reads /proc.

use attache_config::settings::ScrapeSettings;
use attache_discovery::{publish, static_source};
use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, PoolWriter, Published, SnapshotStore};
use attache_scrape::{ErrorReason, ScrapeStats, Scraper};
use attache_types::clock::Clock;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

const ENDPOINTS: usize = 100;
const PAGE: &str = include_str!("../tests/data/metrics/vllm_0.32.0_idle_after_load.txt");
const WARM_UP: Duration = Duration::from_secs(5);
const MEASURED: Duration = Duration::from_secs(10);
/// USER_HZ: the kernel counts CPU time in hundredths of a second.
const TICK: f64 = 0.01;

/// CPU seconds of the calling thread.
fn thread_cpu() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    let mut after_name = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || after_name.next()?.parse::<f64>().ok();
    Some((next()? + next()?) * TICK)
}

async fn serve(listener: TcpListener, answer: Arc<str>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let answer = answer.clone();
        tokio::spawn(async move {
            let mut request = [0; 4096];
            while stream.read(&mut request).await.is_ok_and(|n| n > 0) {
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }
}

fn settings(interval: Duration, idle_interval: Duration) -> ScrapeSettings {
    ScrapeSettings {
        interval,
        idle_interval,
        timeout: Duration::from_secs(1),
        max_bytes: 4 << 20,
        stale_after: Duration::from_secs(2),
        insecure_skip_verify: true,
        bearer_token_file: None,
    }
}

/// Runs the feeds on this thread; CPU seconds and pages of the measured time.
async fn measure(addresses: &[SocketAddr], settings: ScrapeSettings) -> Option<(f64, u64, Arc<ScrapeStats>)> {
    let (events, received) = mpsc::channel(publish::EVENT_QUEUE);
    let (tell, published) = watch::channel(Published::default());
    let (_endpoints, specs) = watch::channel(addresses.iter().copied().map(EndpointSpec::at).collect());
    let (_settings, scrape_settings) = watch::channel(settings);
    let (store, shutdown) = (Arc::new(SnapshotStore::default()), CancellationToken::new());
    let scraper = Scraper::new(store.clone(), published, scrape_settings, events.clone(), Clock::start(), 1).ok()?;
    let stats = scraper.stats();
    let writer = PoolWriter::new(vec![SourceId(0)]);
    let tasks = [
        tokio::spawn(publish::run(
            writer,
            received,
            store,
            |_| {},
            tell,
            attache_record::PoolTape::default(),
            shutdown.clone(),
        )),
        tokio::spawn(static_source::run(SourceId(0), specs, events, shutdown.clone())),
        tokio::spawn(scraper.run(shutdown.clone())),
    ];
    tokio::time::sleep(WARM_UP).await;
    let before = (thread_cpu()?, stats.pages());
    tokio::time::sleep(MEASURED).await;
    let after = (thread_cpu()?, stats.pages());
    shutdown.cancel();
    for task in tasks {
        task.await.ok()?;
    }
    Some((after.0 - before.0, after.1 - before.1, stats))
}

fn main() -> std::io::Result<()> {
    let servers = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let answer: Arc<str> = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{PAGE}", PAGE.len()).into();
    let mut addresses = Vec::new();
    for _ in 0..ENDPOINTS {
        let listener = servers.block_on(TcpListener::bind("127.0.0.1:0"))?;
        addresses.push(listener.local_addr()?);
        servers.spawn(serve(listener, answer.clone()));
    }
    let feeds = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    println!("{ENDPOINTS} endpoints, {} bytes a page, {MEASURED:?}", PAGE.len());
    println!("{:<28} {:>10} {:>8} {:>12} {:>8}", "interval", "pages/s", "cores", "us a page", "errors");
    for (name, interval, idle) in [("idle, 1 s", 100, 1_000), ("every 100 ms", 100, 100)] {
        let settings = settings(Duration::from_millis(interval), Duration::from_millis(idle));
        let Some((cpu, pages, stats)) = feeds.block_on(measure(&addresses, settings)) else { continue };
        let seconds = MEASURED.as_secs_f64();
        let errors: u64 = ErrorReason::ALL.iter().map(|r| stats.errors(*r)).sum();
        println!(
            "{name:<28} {:>10.0} {:>8.3} {:>12.0} {errors:>8}",
            pages as f64 / seconds,
            cpu / seconds,
            cpu / pages.max(1) as f64 * 1e6,
        );
    }
    Ok(())
}
