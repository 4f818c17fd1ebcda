//! Background work for decisions: text to tokens on threads that serve nothing, and calls to other servers, never for longer than a decision
//! may wait.
//!
//! Work whose request was decided or has gone is cancelled. The bytes that it holds are counted with the request bodies ([`Buffered`]).

use attache_picker::body::Buffered;
use attache_picker::event::Limit;
use attache_picker::warming::{Job, Warming};
use attache_prompt::work::WorkLimit;
use attache_telemetry::metrics::Metrics;
use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// What a decision waits for. Dropping it cancels the work.
pub struct Running(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Future for Running {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Running")
    }
}

/// 400 ms, after which llm-d's picker decides without tokens.
pub const DEFAULT_PATIENCE: Duration = Duration::from_millis(400);
/// Requests that may wait for a thread; the next ones are decided without tokens at once, or the queue alone would use up their patience.
pub const DEFAULT_MAX_WAITING: usize = 256;
/// 64 MiB of body copies may wait or be worked on at once. A request that would exceed it is decided without tokens.
pub const DEFAULT_MAX_WAITING_BYTES: usize = 64 << 20;

/// The unit in which bytes are taken from [`DEFAULT_MAX_WAITING_BYTES`].
const KIB: usize = 1 << 10;

/// Runs [`Warming`]s.
#[derive(Debug)]
pub struct Warmer {
    threads: Arc<Semaphore>,
    places: Arc<Semaphore>,
    kibibytes: Arc<Semaphore>,
    buffered: Arc<Buffered>,
    metrics: Arc<Metrics>,
}

impl Warmer {
    /// With one thread at work fewer than there are cores, and one at least: the gateway's streams are served beside it. Bytes are counted in
    /// `buffered`.
    #[must_use]
    pub fn new(buffered: Arc<Buffered>, metrics: Arc<Metrics>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1);
        Self {
            threads: Arc::new(Semaphore::new(threads)),
            places: Arc::new(Semaphore::new(threads + DEFAULT_MAX_WAITING)),
            kibibytes: Arc::new(Semaphore::new(DEFAULT_MAX_WAITING_BYTES / KIB)),
            buffered,
            metrics,
        }
    }

    /// Starts it. What is returned is ready when it has run, and after [`DEFAULT_PATIENCE`] at the latest. The outcome of work that has not
    /// run by then is absent.
    #[must_use]
    pub fn start(&self, warming: Warming) -> Running {
        let Some(reserved) = self.reserve(warming.bytes) else {
            self.metrics.limit(Limit::TokenizeQueue);
            return Running(Box::pin(ready(())));
        };
        let held = self.buffered.hold(warming.bytes as u64);
        match warming.job {
            Job::Call(call) => Running(Box::pin(async move {
                call.await;
                drop((reserved, held));
            })),
            Job::Cpu(computation) => {
                let Ok(place) = self.places.clone().try_acquire_owned() else {
                    self.metrics.limit(Limit::TokenizeQueue);
                    return Running(Box::pin(ready(())));
                };
                let (threads, buffered) = (self.threads.clone(), self.buffered.clone());
                let cancel = CancelOnDrop(computation.work().clone());
                let done = async move {
                    let Ok(thread) = threads.acquire_owned().await else { return };
                    let working = buffered.hold(computation.work().left() as u64);
                    // A panic in a tokenizer ends here; the request is then decided without tokens.
                    let task = tokio::task::spawn_blocking(move || {
                        computation.compute();
                        drop((thread, place, reserved, held, working));
                    });
                    let _ = task.await;
                };
                Running(Box::pin(async move {
                    let _ = timeout(DEFAULT_PATIENCE, done).await;
                    drop(cancel);
                }))
            }
        }
    }

    /// Takes so many bytes from [`DEFAULT_MAX_WAITING_BYTES`]; `None` when fewer are left.
    fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kibibytes = u32::try_from(bytes.div_ceil(KIB)).ok()?;
        self.kibibytes.clone().try_acquire_many_owned(kibibytes).ok()
    }
}

/// Does it without a time-out.
pub async fn run(warming: Warming) {
    match warming.job {
        Job::Cpu(computation) => drop(tokio::task::spawn_blocking(move || computation.compute()).await),
        Job::Call(call) => call.await,
    }
}

/// Cancels work that is given up.
struct CancelOnDrop(WorkLimit);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use prometheus_client::registry::Registry;
    use std::sync::mpsc;

    fn warmer() -> (Warmer, Arc<Buffered>, Registry) {
        let mut registry = Registry::default();
        let buffered = Arc::<Buffered>::default();
        (Warmer::new(buffered.clone(), Metrics::register(&mut registry)), buffered, registry)
    }

    /// How often the queue was full.
    fn refused(registry: &Registry) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let line = text.lines().find(|line| line.contains("limit=\"tokenize_queue\"")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Work that runs until it is cancelled, and a message when it begins and when it ends.
    fn endless(bytes: usize) -> (Warming, mpsc::Receiver<()>) {
        let (sender, steps) = mpsc::channel();
        let warming = Warming::cpu(bytes, move |work| {
            sender.send(()).unwrap();
            while work.check().is_ok() {
                std::thread::yield_now();
            }
            sender.send(()).unwrap();
            None
        });
        (warming, steps)
    }

    async fn received(steps: mpsc::Receiver<()>) -> mpsc::Receiver<()> {
        tokio::task::spawn_blocking(|| steps.recv().map(|()| steps).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn work_is_cancelled_when_its_request_has_gone() {
        let (warmer, buffered, _) = warmer();
        let (warming, steps) = endless(1_000);
        let mut running = warmer.start(warming);
        assert!((&mut running).now_or_never().is_none());
        let steps = received(steps).await;
        assert_eq!(buffered.bytes(), 1_000 + WorkLimit::for_body(1_000).left() as u64);
        drop(running);
        received(steps).await;
        while buffered.bytes() > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn work_is_cancelled_when_its_time_is_over() {
        let (warmer, _, _) = warmer();
        let (warming, steps) = endless(1_000);
        let made = warming.made().unwrap();
        warmer.start(warming).await;
        received(received(steps).await).await;
        assert!(made.get().is_none());
    }

    #[tokio::test]
    async fn work_beyond_the_bytes_that_may_wait_is_not_begun_and_counted() {
        let (warmer, buffered, registry) = warmer();
        let limit = || refused(&registry);
        let held: Vec<Running> = (0..4).map(|_| warmer.start(endless(DEFAULT_MAX_WAITING_BYTES / 4).0)).collect();
        assert_eq!((buffered.bytes(), limit()), (DEFAULT_MAX_WAITING_BYTES as u64, 0));
        warmer.start(endless(1).0).now_or_never().expect("decided without tokens at once");
        warmer.start(Warming::call(1, Box::pin(std::future::pending()))).now_or_never().expect("nor is a server asked");
        assert_eq!((buffered.bytes(), limit()), (DEFAULT_MAX_WAITING_BYTES as u64, 2));
        warmer.start(Warming::call(0, Box::pin(ready(())))).await;
        assert_eq!(limit(), 2, "a call that holds no copy is not bounded");
        drop(held);
        assert_eq!(buffered.bytes(), 0);
    }
}
