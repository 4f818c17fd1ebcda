//! Runs the background work of decisions: tokenizing on threads that serve no streams, and calls to other servers. The
//! time of each is limited.
//!
//! Work is cancelled when its request is decided or its client disconnects. Its memory counts as that of request bodies
//! ([`Buffered`]).

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

/// Background work that a decision waits for. Dropping it cancels the work.
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

/// 400 ms: longest wait for tokens, as in llm-d's picker. After that, the request is decided without them.
pub const DEFAULT_PATIENCE: Duration = Duration::from_millis(400);
/// 256: most requests that wait for a thread. Further requests are decided without tokens at once, because the wait
/// alone would exceed [`DEFAULT_PATIENCE`].
pub const DEFAULT_MAX_WAITING: usize = 256;
/// 64 MiB: most bytes of body copies in waiting and running work. A request that would exceed it is decided without
/// tokens.
pub const DEFAULT_MAX_WAITING_BYTES: usize = 64 << 20;

/// The unit of permits for [`DEFAULT_MAX_WAITING_BYTES`].
const KIB: usize = 1 << 10;

/// Runs [`Warming`]s.
#[derive(Debug)]
pub struct Warmer {
    threads: Arc<Semaphore>,
    jobs: Arc<Semaphore>,
    kibibytes: Arc<Semaphore>,
    buffered: Arc<Buffered>,
    metrics: Arc<Metrics>,
}

impl Warmer {
    /// Uses one thread fewer than the machine has cores, but at least one, because serving threads need a core.
    /// Memory is accounted in `buffered`.
    #[must_use]
    pub fn new(buffered: Arc<Buffered>, metrics: Arc<Metrics>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1);
        Self {
            threads: Arc::new(Semaphore::new(threads)),
            jobs: Arc::new(Semaphore::new(threads + DEFAULT_MAX_WAITING)),
            kibibytes: Arc::new(Semaphore::new(DEFAULT_MAX_WAITING_BYTES / KIB)),
            buffered,
            metrics,
        }
    }

    /// Starts background work. Computations end after [`DEFAULT_PATIENCE`] at the latest, and then leave no outcome. If
    /// too much work is waiting, the work is not started and the future is ready at once.
    #[must_use]
    pub fn start(&self, warming: Warming) -> Running {
        let Some(reserved) = self.reserve(warming.bytes) else {
            self.metrics.limits.count(Limit::TokenizeQueue);
            return Running(Box::pin(ready(())));
        };
        let held = self.buffered.hold(warming.bytes as u64);
        match warming.job {
            Job::Call(call) => Running(Box::pin(async move {
                call.await;
                drop((reserved, held));
            })),
            Job::Cpu(computation) => {
                let Ok(slot) = self.jobs.clone().try_acquire_owned() else {
                    self.metrics.limits.count(Limit::TokenizeQueue);
                    return Running(Box::pin(ready(())));
                };
                let (threads, buffered) = (self.threads.clone(), self.buffered.clone());
                let cancel = CancelOnDrop(computation.work().clone());
                let done = async move {
                    let Ok(thread) = threads.acquire_owned().await else { return };
                    let working = buffered.hold(computation.work().left() as u64);
                    // A panic in a tokenizer fails only this task; the request is then decided without tokens.
                    let task = tokio::task::spawn_blocking(move || {
                        computation.compute();
                        drop((thread, slot, reserved, held, working));
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

    /// Reserves bytes of [`DEFAULT_MAX_WAITING_BYTES`]; `None` if fewer are left.
    fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let kibibytes = u32::try_from(bytes.div_ceil(KIB)).ok()?;
        self.kibibytes.clone().try_acquire_many_owned(kibibytes).ok()
    }
}

/// Runs background work to its end, without a time limit.
pub async fn run(warming: Warming) {
    match warming.job {
        Job::Cpu(computation) => drop(tokio::task::spawn_blocking(move || computation.compute()).await),
        Job::Call(call) => call.await,
    }
}

/// Cancels the work on drop.
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

    /// How often work was refused because the queue was full.
    fn refused(registry: &Registry) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let line = text.lines().find(|line| line.contains("limit=\"tokenize_queue\"")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    /// Work that runs until it is cancelled, and sends a message when it begins and when it ends.
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
    async fn work_of_dropped_request_is_cancelled() {
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
    async fn work_over_time_limit_is_cancelled_without_outcome() {
        let (warmer, _, _) = warmer();
        let (warming, steps) = endless(1_000);
        let made = warming.made().unwrap();
        warmer.start(warming).await;
        received(received(steps).await).await;
        assert!(made.get().is_none());
    }

    #[tokio::test]
    async fn work_over_byte_limit_is_refused_and_counted() {
        let (warmer, buffered, registry) = warmer();
        let limit = || refused(&registry);
        let held: Vec<Running> = (0..4).map(|_| warmer.start(endless(DEFAULT_MAX_WAITING_BYTES / 4).0)).collect();
        assert_eq!((buffered.bytes(), limit()), (DEFAULT_MAX_WAITING_BYTES as u64, 0));
        warmer.start(endless(1).0).now_or_never().expect("decided without tokens at once");
        warmer.start(Warming::call(1, Box::pin(std::future::pending()))).now_or_never().expect("no call is made");
        assert_eq!((buffered.bytes(), limit()), (DEFAULT_MAX_WAITING_BYTES as u64, 2));
        warmer.start(Warming::call(0, Box::pin(ready(())))).await;
        assert_eq!(limit(), 2, "a call without a body copy is not limited");
        drop(held);
        assert_eq!(buffered.bytes(), 0);
    }
}
