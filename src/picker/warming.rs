//! Work that a decision waits for. The picker returns it as a value, and `ext_proc` runs it.
//!
//! Made by [`super::prefix`], which needs a prompt's tokens, and by stores of [`super::quotas`] outside of the process.

use super::prefix::made::PromptOutcome;
use attache_prompt::work::WorkLimit;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

/// Work that must finish before the picker can decide a request.
pub struct Warming {
    /// The work.
    pub job: Job,
    /// Bytes of the request that the work has copied.
    pub bytes: usize,
}

/// How the work is done.
pub enum Job {
    /// A computation, for a thread that serves no requests.
    Cpu(Computation),
    /// A call to another server, with its own timeout.
    Call(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// Computes the block keys of one prompt.
pub struct Computation {
    run: Run,
    work: WorkLimit,
    outcome: Made,
}

/// Computes an outcome; `None` if the work was cancelled.
type Run = Box<dyn FnOnce(&WorkLimit) -> Option<PromptOutcome> + Send>;

/// The cell that holds the outcome after the computation.
pub type Made = Arc<OnceLock<PromptOutcome>>;

impl fmt::Debug for Warming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.job {
            Job::Cpu(_) => "Warming::Cpu",
            Job::Call(_) => "Warming::Call",
        })
    }
}

impl Computation {
    /// Memory budget and cancellation of the computation.
    #[must_use]
    pub fn work(&self) -> &WorkLimit {
        &self.work
    }

    /// Runs the computation on this thread.
    pub fn compute(self) {
        if self.work.check().is_ok()
            && let Some(made) = (self.run)(&self.work)
        {
            // No other code sets this cell, so `set` can't fail.
            let _ = self.outcome.set(made);
        }
    }
}

impl Warming {
    /// A computation that holds a copy of a body of `bytes` bytes. Its memory budget is [`WorkLimit::for_body`].
    #[must_use]
    pub fn cpu(bytes: usize, run: impl FnOnce(&WorkLimit) -> Option<PromptOutcome> + Send + 'static) -> Self {
        let computation =
            Computation { run: Box::new(run), work: WorkLimit::for_body(bytes), outcome: Made::default() };
        Self { job: Job::Cpu(computation), bytes }
    }

    /// A call that holds copies of `bytes` bytes and has its own timeout.
    #[must_use]
    pub fn call(bytes: usize, call: Pin<Box<dyn Future<Output = ()> + Send>>) -> Self {
        Self { job: Job::Call(call), bytes }
    }

    /// The cell for the outcome of a computation; `None` for a call.
    #[must_use]
    pub fn made(&self) -> Option<Made> {
        match &self.job {
            Job::Cpu(computation) => Some(computation.outcome.clone()),
            Job::Call(_) => None,
        }
    }
}
