//! Continuous requests, so that a test can make changes under load.

use crate::support::body::chat;
use crate::support::client;
use crate::support::process::eventually;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Concurrent clients. Each sends its requests one after another.
const CLIENTS: usize = 4;

/// Sends requests until [`Traffic::stop`].
pub(crate) struct Traffic {
    ended: Arc<AtomicBool>,
    answered: Vec<Arc<AtomicUsize>>,
    clients: tokio::task::JoinSet<Vec<String>>,
}

impl Traffic {
    pub(crate) fn start(to: SocketAddr, target: &'static str) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let answered: Vec<Arc<AtomicUsize>> = (0..CLIENTS).map(|_| Arc::default()).collect();
        let mut clients = tokio::task::JoinSet::new();
        for (seed, answered) in (1..).zip(answered.clone()) {
            clients.spawn(ask(to, target, seed, ended.clone(), answered));
        }
        Self { ended, answered, clients }
    }

    /// Waits until each client has got `count` more responses. With 2, earlier requests have ended.
    pub(crate) async fn more(&self, count: usize) {
        let wanted: Vec<usize> = self.answered.iter().map(|answered| answered.load(SeqCst) + count).collect();
        eventually("more answers", || async {
            self.answered.iter().zip(&wanted).all(|(got, wanted)| got.load(SeqCst) >= *wanted).then_some(())
        })
        .await;
    }

    /// Ends the traffic. Panics if any request had no 200.
    pub(crate) async fn stop(self) {
        self.ended.store(true, SeqCst);
        let failures: Vec<String> = self.clients.join_all().await.into_iter().flatten().collect();
        let answered: usize = self.answered.iter().map(|answered| answered.load(SeqCst)).sum();
        assert!(failures.is_empty(), "{} of {answered} failed: {:?}", failures.len(), failures.first());
    }
}

async fn ask(
    to: SocketAddr,
    target: &str,
    seed: u64,
    ended: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
) -> Vec<String> {
    let mut failures = Vec::new();
    while !ended.load(SeqCst) {
        match client::post(to, target, chat(300, false, seed)).await {
            Ok(reply) if reply.status == 200 => {}
            Ok(reply) => failures.push(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body))),
            Err(error) => failures.push(error.to_string()),
        }
        answered.fetch_add(1, SeqCst);
    }
    failures
}
