use super::*;
use attache_pool::writer::SourceId;
use attache_pool::{EndpointMetrics, EndpointSpec};
use attache_types::ids::EndpointId;

const SOURCE: SourceId = SourceId(0);

struct Pool {
    events: mpsc::Sender<PoolEvent>,
    store: Arc<SnapshotStore>,
    published: watch::Receiver<Published>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

fn start() -> Pool {
    let (events, received) = mpsc::channel(EVENT_QUEUE);
    let (tell, published) = watch::channel(Published::default());
    let (store, shutdown) = (Arc::new(SnapshotStore::default()), CancellationToken::new());
    let task = tokio::spawn(run(
        PoolWriter::new(vec![SOURCE]),
        received,
        store.clone(),
        |_| {},
        tell,
        PoolTape::default(),
        shutdown.clone(),
    ));
    Pool { events, store, published, shutdown, task }
}

fn endpoints(n: u16) -> PoolEvent {
    let endpoints = (1..=n).map(|port| EndpointSpec::at(([127, 0, 0, 1], port).into()).into()).collect();
    PoolEvent::Endpoints { source: SOURCE, endpoints }
}

#[tokio::test]
async fn an_empty_snapshot_comes_first_and_is_not_complete() {
    let mut pool = start();
    pool.published.changed().await.unwrap();
    let snapshot = pool.store.load_full();
    assert_eq!((snapshot.generation, snapshot.synced, snapshot.endpoints.len()), (1, false, 0));
}

#[tokio::test]
async fn many_events_make_few_snapshots_and_none_is_lost() {
    let mut pool = start();
    pool.events.send(endpoints(10)).await.unwrap();
    let before = Instant::now();
    for i in 0..5_000u32 {
        let metrics = Arc::new(EndpointMetrics { waiting: i, ..EndpointMetrics::default() });
        pool.events.send(PoolEvent::Scraped { id: EndpointId(i % 10), metrics }).await.unwrap();
    }
    let waiting = |pool: &Pool| -> Vec<u32> {
        pool.store.load().endpoints.iter().filter_map(|s| s.metrics().map(|m| m.waiting)).collect()
    };
    while waiting(&pool) != (4_990..5_000).collect::<Vec<_>>() {
        pool.published.changed().await.unwrap();
    }
    let most = before.elapsed().as_millis() / PUBLISH_INTERVAL.as_millis() + 3;
    let generation = pool.published.borrow().generation;
    assert!(u128::from(generation) <= most, "{generation} snapshots, {most} allowed");
    assert_eq!(generation, pool.store.load().generation);
}

#[tokio::test]
async fn ends_on_shutdown() {
    let pool = start();
    pool.shutdown.cancel();
    pool.task.await.unwrap();
    assert!(pool.events.send(endpoints(1)).await.is_err());
}

#[tokio::test]
async fn last_events_are_published_after_feeds_end() {
    let Pool { events, store, task, .. } = start();
    events.send(endpoints(3)).await.unwrap();
    drop(events);
    task.await.unwrap();
    assert_eq!(store.load().endpoints.len(), 3);
}

#[test]
fn labels_without_a_port_are_logged_once_for_each_endpoint() {
    let mut told = PortLabels::default();
    let spec = |port: u16, label: &str, value: &str| {
        let mut spec = EndpointSpec::at(([127, 0, 0, 1], port).into());
        spec.labels.insert(label.into(), value.into());
        spec
    };
    for _ in 0..3 {
        told.check(&spec(1, BOOTSTRAP_PORT_LABEL, "70000"));
        told.check(&spec(2, BOOTSTRAP_PORT_LABEL, "8998"));
        told.check(&spec(2, AIBRIX_METRIC_PORT_LABEL, "0"));
        told.check(&spec(3, AIBRIX_PORT_LABEL, "http"));
        told.check(&spec(4, "another label", "http"));
    }
    let labels: std::collections::BTreeSet<_> =
        told.0.iter().map(|(name, label, _)| format!("{name} {label}")).collect();
    assert_eq!(
        labels.into_iter().collect::<Vec<_>>(),
        [
            "127.0.0.1:1 model.aibrix.ai/sglang-bootstrap-port",
            "127.0.0.1:2 model.aibrix.ai/metric-port",
            "127.0.0.1:3 model.aibrix.ai/port",
        ]
    );
    (0..2 * MAX_TOLD).for_each(|i| told.check(&spec(1, AIBRIX_PORT_LABEL, &format!("p{i}"))));
    assert!(told.0.len() <= MAX_TOLD);
}
