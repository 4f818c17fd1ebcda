//! Shutdown in phases, which listeners, health and streams wait for.
//!
//! ```text
//! Running ──SIGTERM──▶ Lame ──min delay──▶ Draining ──deadline──▶ Forced
//!                       └────────────second signal───────────────▶
//! ```
//!
//! Lame: no longer ready, but all requests are still served, because load balancers need time to react. SIGINT comes
//! from a person at a terminal and not from an orchestrator, so it skips this phase. Draining: new
//! streams are rejected, open ones continue. Forced: open streams are closed. The owner of the streams may end the
//! process as soon as Draining has begun and no stream is open. Used by `app`.

use std::io;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// Progress of the shutdown. Phases only advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// No shutdown was requested.
    Running,
    /// Shutdown was requested; requests are still served, but the process is not ready.
    Lame,
    /// New streams are rejected.
    Draining,
    /// The deadline has passed, or a second signal arrived.
    Forced,
}

/// A request to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM, from an orchestrator.
    Terminate,
    /// SIGINT, from a person at a terminal.
    Interrupt,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Signal::Terminate => "SIGTERM",
            Signal::Interrupt => "SIGINT",
        }
    }
}

/// Durations of the phases, both measured from the first signal.
#[derive(Clone, Copy, Debug)]
pub struct DrainTimes {
    /// Time until new streams are rejected.
    pub min_delay: Duration,
    /// Time until open streams are closed.
    pub deadline: Duration,
}

/// A handle to wait for a phase, cheap to clone.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// Starts to follow `signals`; each item is a request to shut down. Must be called inside a tokio runtime.
    #[must_use]
    pub fn start(mut signals: mpsc::Receiver<Signal>, times: DrainTimes) -> Self {
        let (phase, handle) = watch::channel(Phase::Running);
        tokio::spawn(async move {
            let Some(signal) = signals.recv().await else {
                // All senders are gone, so no shutdown can be requested: the process runs until it is killed.
                return phase.closed().await;
            };
            let asked = Instant::now();
            let min_delay = if signal == Signal::Interrupt { Duration::ZERO } else { times.min_delay };
            tracing::info!(
                signal = signal.name(),
                min_delay_ms = millis(min_delay),
                deadline_ms = millis(times.deadline),
                "shutting down: not ready, still serving; a second signal ends the process at once"
            );
            phase.send_replace(Phase::Lame);
            let drain = async {
                sleep_until(asked + min_delay.min(times.deadline)).await;
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

    /// Returns the current phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Waits until `phase` or a later one is reached.
    pub async fn reached(&self, phase: Phase) {
        let mut receiver = self.0.clone();
        if receiver.wait_for(|now| *now >= phase).await.is_err() {
            // The task that follows the signals ends only with the runtime.
            std::future::pending::<()>().await;
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns SIGTERM and SIGINT as a stream. Must be called inside a tokio runtime.
///
/// # Errors
/// When the operating system rejects a signal handler.
#[cfg(unix)]
pub fn signals() -> io::Result<mpsc::Receiver<Signal>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        loop {
            let received = tokio::select! {
                Some(()) = term.recv() => Signal::Terminate,
                Some(()) = int.recv() => Signal::Interrupt,
                else => return,
            };
            if sender.send(received).await.is_err() {
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
    async fn phases_follow_in_order_and_in_time() {
        let (ask, signals) = mpsc::channel(1);
        let shutdown = Shutdown::start(signals, TIMES);
        assert_eq!(shutdown.phase(), Phase::Running);
        ask.send(Signal::Terminate).await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        shutdown.reached(Phase::Draining).await;
        assert_eq!(asked.elapsed().as_secs(), 5);
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed().as_secs(), 60);
        shutdown.reached(Phase::Lame).await;
    }

    #[tokio::test(start_paused = true)]
    async fn interrupt_drains_without_the_delay() {
        let (ask, signals) = mpsc::channel(1);
        let shutdown = Shutdown::start(signals, TIMES);
        let asked = Instant::now();
        ask.send(Signal::Interrupt).await.unwrap();
        shutdown.reached(Phase::Draining).await;
        assert_eq!((asked.elapsed(), shutdown.phase()), (Duration::ZERO, Phase::Draining));
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed().as_secs(), 60);
    }

    #[tokio::test(start_paused = true)]
    async fn second_signal_closes_streams_at_once() {
        let (ask, signals) = mpsc::channel(2);
        let shutdown = Shutdown::start(signals, TIMES);
        ask.send(Signal::Terminate).await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        ask.send(Signal::Interrupt).await.unwrap();
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn deadline_before_the_delay_is_respected() {
        let (ask, signals) = mpsc::channel(1);
        let shutdown = Shutdown::start(signals, DrainTimes { deadline: Duration::from_secs(1), ..TIMES });
        ask.send(Signal::Terminate).await.unwrap();
        shutdown.reached(Phase::Lame).await;
        let asked = Instant::now();
        shutdown.reached(Phase::Forced).await;
        assert_eq!(asked.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn without_senders_the_process_keeps_running() {
        let (ask, signals) = mpsc::channel(1);
        drop(ask);
        let shutdown = Shutdown::start(signals, TIMES);
        let ended = tokio::time::timeout(Duration::from_secs(3600), shutdown.reached(Phase::Lame)).await;
        assert!(ended.is_err());
    }
}
