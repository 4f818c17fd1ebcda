//! Where long reading is done: text to tokens on threads that serve nothing, questions to other servers, never for longer than a decision
//! may wait.

use super::prefix::Warming;
use futures_util::FutureExt;
use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// What a decision waits for.
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

/// 400 ms, after which llm-d's picker decides without tokens. Reading goes on, for the next request with the same beginning.
pub const DEFAULT_PATIENCE: Duration = Duration::from_millis(400);
/// Requests that may wait for a thread; the next ones are decided without tokens at once, or the queue alone would use up their patience.
pub const DEFAULT_MAX_WAITING: usize = 256;

/// Runs [`Warming`]s.
#[derive(Debug)]
pub struct Warmer {
    threads: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

impl Default for Warmer {
    /// With as many threads at work as there are cores.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads: Arc::new(Semaphore::new(cores)), places: Arc::new(Semaphore::new(cores + DEFAULT_MAX_WAITING)) }
    }
}

impl Warmer {
    /// Starts it. What is returned is ready when it has run, and after [`DEFAULT_PATIENCE`] at the latest; whoever reads the request then
    /// sees whether it is done, and counts it if not.
    #[must_use]
    pub fn start(&self, warming: Warming) -> Running {
        match warming {
            // It has a patience of its own, by the configuration.
            Warming::Call(call) => Running(call),
            Warming::Cpu(work) => {
                let Ok(place) = self.places.clone().try_acquire_owned() else {
                    return Running(Box::pin(ready(())));
                };
                let threads = self.threads.clone();
                let task = tokio::spawn(async move {
                    let Ok(thread) = threads.acquire_owned().await else { return };
                    // A panic in a tokenizer ends here; the request is then decided without tokens.
                    let _ = tokio::task::spawn_blocking(work).await;
                    drop((thread, place));
                });
                Running(Box::pin(timeout(DEFAULT_PATIENCE, task.map(|_| ())).map(|_| ())))
            }
        }
    }
}
