//! The end of the process, in phases that the listeners, health and streams wait for.
//!
//! ```text
//! Running ──SIGTERM──▶ Lame ──min delay──▶ Draining ──deadline──▶ Forced
//!                       └────────────second signal───────────────▶
//! ```
//!
//! Lame: not ready any more, but everything is still served, because load balancers need time to look away. Draining: nothing new
//! is taken, open streams go on. Forced: what is left is cut. The owner of the streams may end the process as soon as Draining
//! has come and nothing is open. Used by `app`.

use std::io;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// How far the end has come. Phases only go forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Not asked to end.
    Running,
    /// Asked to end; still serving, no longer ready.
    Lame,
    /// Takes nothing new.
    Draining,
    /// Out of time.
    Forced,
}

/// How long the phases last, both from the first signal.
#[derive(Clone, Copy, Debug)]
pub struct DrainTimes {
    /// Until nothing new is taken.
    pub min_delay: Duration,
    /// Until what is open is cut.
    pub deadline: Duration,
}

/// A handle to wait for a phase. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// Starts to follow `signals`; each item asks once. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start(mut signals: mpsc::Receiver<&'static str>, times: DrainTimes) -> Self {
        let (phase, handle) = watch::channel(Phase::Running);
        tokio::spawn(async move {
            let Some(name) = signals.recv().await else {
                // Nobody can ask any more: the process runs until it is killed.
                return phase.closed().await;
            };
            let asked = Instant::now();
            tracing::info!(
                signal = name,
                min_delay_ms = millis(times.min_delay),
                deadline_ms = millis(times.deadline),
                "shutting down: not ready, still serving"
            );
            phase.send_replace(Phase::Lame);
            let drain = async {
                sleep_until(asked + times.min_delay.min(times.deadline)).await;
                tracing::info!("draining: new streams are rejected");
                phase.send_replace(Phase::Draining);
                sleep_until(asked + times.deadline).await;
                "the drain deadline has passed"
            };
            let why = tokio::select! {
                why = drain => why,
                Some(_) = signals.recv() => "a second signal came",
            };
            tracing::warn!(reason = why, "closing streams that are still open");
            phase.send_replace(Phase::Forced);
            phase.closed().await;
        });
        Self(handle)
    }

    /// The current phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Waits until `phase` or a later one has come.
    pub async fn reached(&self, phase: Phase) {
        let mut receiver = self.0.clone();
        if receiver.wait_for(|now| *now >= phase).await.is_err() {
            // The follower is gone only when the runtime ends: there is nothing to wait for.
            std::future::pending::<()>().await;
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// SIGTERM and SIGINT as a stream of their names. Must be called inside a tokio runtime.
///
/// # Errors
/// When the operating system refuses a signal handler.
#[cfg(unix)]
pub fn signals() -> io::Result<mpsc::Receiver<&'static str>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                Some(()) = term.recv() => "SIGTERM",
                Some(()) = int.recv() => "SIGINT",
                else => return,
            };
            if sender.send(name).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: DrainTimes = DrainTimes { min_delay: Duration::from_secs(5), deadline: Duration::from_secs(60) };

    #[tokio::test(start_paused = true)]
    async fn the_phases_come_in_order_and_in_time() {
        let (ask, signals) = mpsc::channel(1);
        let shutdown = Shutdown::start(signals, TIMES);
        assert_eq!(shutdown.phase(), Phase::Running);
        ask.send("SIGTERM").await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        shutdown.reached(Phase::Draining).await;
        assert_eq!(asked.elapsed().as_secs(), 5);
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed().as_secs(), 60);
        shutdown.reached(Phase::Lame).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_cuts_at_once() {
        let (ask, signals) = mpsc::channel(2);
        let shutdown = Shutdown::start(signals, TIMES);
        ask.send("SIGTERM").await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        ask.send("SIGINT").await.unwrap();
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_before_the_delay_still_holds() {
        let (ask, signals) = mpsc::channel(1);
        let shutdown = Shutdown::start(signals, DrainTimes { deadline: Duration::from_secs(1), ..TIMES });
        ask.send("SIGTERM").await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn without_anyone_to_ask_it_runs_on() {
        let (ask, signals) = mpsc::channel(1);
        drop(ask);
        let shutdown = Shutdown::start(signals, TIMES);
        let ended = tokio::time::timeout(Duration::from_secs(3600), shutdown.reached(Phase::Lame)).await;
        assert!(ended.is_err());
    }
}
