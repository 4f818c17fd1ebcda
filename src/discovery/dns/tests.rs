use super::*;
use attache_pool::{Engine, MetricsSource};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Gives the answers in turn, then the last one again and again.
struct Script(Mutex<VecDeque<Result<Vec<&'static str>, io::ErrorKind>>>);

impl Resolver for Arc<Script> {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        assert_eq!((host, port), ("models.test", 8000));
        let mut answers = self.0.lock();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        let addresses = answer.unwrap().map_err(io::Error::from)?;
        Ok(addresses.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port)).collect())
    }
}

fn name() -> DnsSource {
    DnsSource {
        host: "models.test".into(),
        port: 8000,
        refresh: Duration::ZERO,
        engine: Engine::Sglang,
        metrics: MetricsSource { port: Some(9000), ..MetricsSource::default() },
    }
}

struct Running {
    events: mpsc::Receiver<PoolEvent>,
    stats: Arc<DnsStats>,
    script: Arc<Script>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

fn start(answers: &[Result<Vec<&'static str>, io::ErrorKind>]) -> Running {
    let (send, events) = mpsc::channel(16);
    let script = Arc::new(Script(Mutex::new(answers.iter().cloned().collect())));
    let (stats, shutdown) = (Arc::<DnsStats>::default(), CancellationToken::new());
    let task = tokio::spawn(run(script.clone(), SourceId(4), name(), send, stats.clone(), 1, shutdown.clone()));
    Running { events, stats, script, shutdown, task }
}

impl Running {
    async fn addresses(&mut self) -> Vec<String> {
        match self.events.recv().await {
            Some(PoolEvent::Endpoints { source: SourceId(4), endpoints }) => {
                endpoints.iter().map(|e| e.address.to_string()).collect()
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

#[tokio::test]
async fn every_address_is_an_endpoint() {
    let mut dns = start(&[Ok(vec!["10.0.0.2", "2001:db8::1", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.9"])]);
    let Some(PoolEvent::Endpoints { endpoints, .. }) = dns.events.recv().await else { panic!("no endpoints") };
    let addresses: Vec<String> = endpoints.iter().map(|e| e.address.to_string()).collect();
    assert_eq!(addresses, ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:8000", "[2001:db8::1]:8000"]);
    assert!(endpoints.iter().all(|e| e.engine == Engine::Sglang));
    assert_eq!(endpoints[3].metrics_url().unwrap(), "http://[2001:db8::1]:9000/metrics");
    dns.shutdown.cancel();
    dns.task.await.unwrap();
}

#[tokio::test]
async fn sends_endpoints_only_when_addresses_change() {
    let mut dns = start(&[Ok(vec!["10.0.0.1", "10.0.0.2"]), Ok(vec!["10.0.0.2", "10.0.0.1"]), Ok(vec!["10.0.0.2"])]);
    assert_eq!(dns.addresses().await.len(), 2);
    assert_eq!(dns.addresses().await, ["10.0.0.2:8000"], "another order is no change");
    assert_eq!(dns.stats.lookups(), 3);
}

#[tokio::test]
async fn failed_or_empty_lookup_keeps_last_addresses() {
    let mut dns = start(&[
        Err(io::ErrorKind::TimedOut),
        Ok(vec!["10.0.0.1"]),
        Err(io::ErrorKind::NotFound),
        Ok(vec![]),
        Ok(vec!["10.0.0.1"]),
        Ok(vec!["10.0.0.3"]),
    ]);
    assert_eq!(dns.addresses().await, ["10.0.0.1:8000"], "nothing is said before the first answer");
    assert_eq!(dns.addresses().await, ["10.0.0.3:8000"]);
    assert_eq!(dns.stats.failures(), 3);
    assert_eq!(dns.script.0.lock().len(), 1);
}

#[tokio::test]
async fn ends_when_the_writer_is_gone() {
    let Running { events, task, .. } = start(&[Ok(vec!["10.0.0.1"])]);
    drop(events);
    task.await.unwrap();
}

#[test]
fn failed_lookups_are_retried_with_backoff() {
    let seconds: Vec<f64> = (1..9).map(|n| backoff(n, Duration::from_secs(5)).as_secs_f64()).collect();
    assert_eq!(seconds, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
    assert_eq!(backoff(1, Duration::from_millis(200)), Duration::from_millis(200), "no slower than the refresh");
    assert_eq!(backoff(u32::MAX, Duration::from_secs(5)), MAX_BACKOFF);
}

#[tokio::test]
async fn system_resolver_resolves_addresses_and_localhost() {
    let v6 = SystemResolver.resolve("::1", 80).await.unwrap();
    assert_eq!(v6, ["[::1]:80".parse().unwrap()]);
    let local = SystemResolver.resolve("localhost", 80).await.unwrap();
    assert!(local.iter().all(|a| a.ip().is_loopback()) && !local.is_empty());
}

/// A resolver that returns a given number of addresses, in no order.
struct Endless(u32);

impl Resolver for Endless {
    async fn resolve(&self, _: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok((0..self.0).rev().map(|i| SocketAddr::new(std::net::Ipv4Addr::from(0x0a00_0000 + i).into(), port)).collect())
    }
}

#[tokio::test]
async fn answer_with_too_many_addresses_is_cut_and_counted() {
    for (addresses, used, left_out) in [(4_096, 4_096, 0), (10_000, 4_096, 5_904)] {
        let (found, rest) = lookup(&Endless(addresses), &name()).await.unwrap();
        assert_eq!((found.len(), rest), (used, left_out));
        assert_eq!(found[0].to_string(), "10.0.0.0:8000");
    }
    let (send, mut events) = mpsc::channel(16);
    let (stats, shutdown) = (Arc::<DnsStats>::default(), CancellationToken::new());
    let task = tokio::spawn(run(Endless(5_000), SourceId(4), name(), send, stats.clone(), 1, shutdown.clone()));
    let Some(PoolEvent::Endpoints { endpoints, .. }) = events.recv().await else { panic!("no endpoints") };
    assert_eq!((endpoints.len(), stats.left_out() % 904), (4_096, 0));
    shutdown.cancel();
    task.await.unwrap();
}
