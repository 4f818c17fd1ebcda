//! Work that a decision waits for, as a value: the picker returns it, and its caller runs it.
//!
//! Made by [`super::prefix`], which needs a prompt's tokens, and by stores of [`super::quotas`] outside of the process.

use super::prefix::made::Outcome;
use attache_prompt::work::Work;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

/// What must be done before a request can be decided.
pub struct Warming {
    /// The work.
    pub job: Job,
    /// Bytes of the copies that it holds from the beginning.
    pub bytes: usize,
}

/// How the work is done.
pub enum Job {
    /// It computes: to be run on a thread that serves nothing.
    Cpu(Computation),
    /// It waits for another server, with a time-out of its own.
    Call(Pin<Box<dyn Future<Output = ()> + Send>>),
}

/// Turns one prompt into keys.
pub struct Computation {
    run: Run,
    work: Work,
    outcome: Made,
}

/// What computes an outcome, unless its work is stopped.
type Run = Box<dyn FnOnce(&Work) -> Option<Outcome> + Send>;

/// Where the outcome of computing is found once it has run.
pub type Made = Arc<OnceLock<Outcome>>;

impl fmt::Debug for Warming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.job {
            Job::Cpu(_) => "Warming::Cpu",
            Job::Call(_) => "Warming::Call",
        })
    }
}

impl Computation {
    /// Budget of the work in bytes, and how it is cancelled.
    #[must_use]
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Computes on this thread.
    pub fn compute(self) {
        if self.work.check().is_ok()
            && let Some(made) = (self.run)(&self.work)
        {
            // It is set here alone.
            let _ = self.outcome.set(made);
        }
    }
}

impl Warming {
    /// Runs `run` in the background, which holds a copy of a body of so many bytes. Its work may hold what
    /// [`Work::for_body`] allows.
    #[must_use]
    pub fn cpu(bytes: usize, run: impl FnOnce(&Work) -> Option<Outcome> + Send + 'static) -> Self {
        let computation = Computation { run: Box::new(run), work: Work::for_body(bytes), outcome: Made::default() };
        Self { job: Job::Cpu(computation), bytes }
    }

    /// Waits for `call`, which holds copies of so many bytes and has a time-out of its own.
    #[must_use]
    pub fn call(bytes: usize, call: Pin<Box<dyn Future<Output = ()> + Send>>) -> Self {
        Self { job: Job::Call(call), bytes }
    }

    /// Where its outcome will be found; `None` for a call.
    #[must_use]
    pub fn made(&self) -> Option<Made> {
        match &self.job {
            Job::Cpu(computation) => Some(computation.outcome.clone()),
            Job::Call(_) => None,
        }
    }
}
