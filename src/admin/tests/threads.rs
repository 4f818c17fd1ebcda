use super::*;

/// A page that is rendered until the returned sender is dropped, and a message when that begins.
fn stuck() -> (std::sync::mpsc::Sender<()>, tokio::sync::mpsc::Receiver<()>, impl Fn() + Send + Sync + 'static) {
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (begun, begins) = tokio::sync::mpsc::channel(1);
    let released = std::sync::Mutex::new(released);
    let render = move || {
        let _ = begun.try_send(());
        let _ = released.lock().unwrap().recv();
    };
    (release, begins, render)
}

/// Metrics that take as long as a [`stuck`] page.
struct StuckCollector<F>(F);

impl<F> std::fmt::Debug for StuckCollector<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StuckCollector")
    }
}

impl<F: Fn() + Send + Sync + 'static> prometheus_client::collector::Collector for StuckCollector<F> {
    fn encode(&self, _: prometheus_client::encoding::DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        (self.0)();
        Ok(())
    }
}

/// Requests one page on half of the connections that the port may have, and probes meanwhile.
async fn probes_are_answered_while(page: &'static str, state: AdminState, mut begins: tokio::sync::mpsc::Receiver<()>) {
    let address = start(state).await;
    let requests: Vec<_> = (0..32).map(|_| tokio::spawn(call(address, "GET", page))).collect();
    begins.recv().await.expect("the page is being rendered");
    for probe in ["/live", "/ready"] {
        assert_eq!(call(address, "GET", probe).await.0, 200, "{probe} while {page} is rendered");
    }
    assert!(requests.iter().all(|request| !request.is_finished()));
    requests.iter().for_each(tokio::task::JoinHandle::abort);
}

/// A runtime on a thread of its own, until the returned token is dropped.
fn pages_thread() -> (Handle, tokio_util::sync::DropGuard) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (handle, end) = (runtime.handle().clone(), tokio_util::sync::CancellationToken::new());
    let until = end.clone();
    std::thread::spawn(move || runtime.block_on(until.cancelled()));
    (handle, end.drop_guard())
}

#[tokio::test]
async fn probes_are_answered_while_metrics_are_rendered() {
    let (handle, _guard) = pages_thread();
    let (release, begins, render) = stuck();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(StuckCollector(render)));
    let state = AdminState { pages: handle, metrics: Arc::new(MetricsPage::new(registry)), ..state().0 };
    probes_are_answered_while("/metrics", state, begins).await;
    drop(release);
}

#[tokio::test]
async fn probes_are_answered_while_a_guarded_page_is_rendered() {
    let (handle, _guard) = pages_thread();
    let (release, begins, render) = stuck();
    let config = Arc::new(move || {
        render();
        serde_json::json!({})
    });
    probes_are_answered_while("/config_dump", AdminState { pages: handle, config, ..state().0 }, begins).await;
    drop(release);
}

#[tokio::test]
async fn page_that_panics_gets_500_and_the_next_request_is_answered() {
    let (handle, _guard) = pages_thread();
    let config = Arc::new(|| panic!("a page"));
    let address = start(AdminState { pages: handle, config, ..state().0 }).await;
    assert_eq!(call(address, "GET", "/config_dump").await.0, 500);
    assert_eq!(call(address, "GET", "/endpoints").await.0, 200);
}

/// hyper reads nothing while a page is rendered and another request waits in its buffer.
#[tokio::test]
async fn connection_with_pipelined_requests_is_evicted_for_a_probe() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (handle, _guard) = pages_thread();
    let (release, mut begins, render) = stuck();
    let config = Arc::new(move || {
        render();
        serde_json::json!({})
    });
    let connections = Connections::new(ConnectionLimits::of(2));
    let address = within(connections, AdminState { pages: handle, config, ..state().0 }).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = b"GET /config_dump HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(4);
        stream.write_all(&request).await.unwrap();
        held.push(stream);
    }
    begins.recv().await.expect("a page is being rendered");
    assert_eq!(call(address, "GET", "/live").await.0, 200);
    assert_eq!(held[0].read(&mut [0; 1]).await.unwrap_or(0), 0, "the oldest is closed");
    drop(release);
}
