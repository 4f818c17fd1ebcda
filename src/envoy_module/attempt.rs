//! The upstream filter: one attempt of Envoy to get a response from a server.
//!
//! Envoy retries requests, and the HTTP filter sees the last response only. With this filter in the cluster, it learns
//! which servers failed before. The HTTP filter leaves the number of its request in dynamic metadata, which both filters
//! see, and the attempts of a request are collected under this number.

use crate::callbacks::{Callbacks, Headers, Metadatum};
use crate::messages::SERVED;
use crate::stream::{Flow, StreamFilter};
use attache_picker::in_flight::EarlierAttempt;
use attache_scheduling::router::DESTINATION_NAMESPACE;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Key of the request's number in dynamic metadata.
const NUMBER: (&str, &str) = ("attache", "request");
/// Attempts of a request that are kept. Envoy's own limit of retries is far lower.
const MAX_ATTEMPTS: usize = 64;

/// Number of configurations with this filter. Without one, no request has a number.
static CONFIGURATIONS: AtomicUsize = AtomicUsize::new(0);
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);
static REQUESTS: Mutex<BTreeMap<u64, Arc<Attempts>>> = Mutex::new(BTreeMap::new());

/// A cluster's configuration with this filter. While there is one, requests are numbered.
#[derive(Debug)]
pub struct AttemptConfig(());

impl Default for AttemptConfig {
    fn default() -> Self {
        CONFIGURATIONS.fetch_add(1, Relaxed);
        Self(())
    }
}

impl Drop for AttemptConfig {
    fn drop(&mut self) {
        CONFIGURATIONS.fetch_sub(1, Relaxed);
    }
}

/// The attempts of one request, in their order.
#[derive(Debug, Default)]
struct Attempts(Mutex<Vec<EarlierAttempt>>);

/// A request whose attempts are collected, until it is dropped.
#[derive(Debug)]
pub struct NumberedRequest {
    number: u64,
    attempts: Arc<Attempts>,
}

impl NumberedRequest {
    /// Gives the stream a number; `None` if no cluster has the upstream filter.
    pub fn new(envoy: &dyn Callbacks) -> Option<Self> {
        if CONFIGURATIONS.load(Relaxed) == 0 {
            return None;
        }
        let (number, attempts) = (NEXT_NUMBER.fetch_add(1, Relaxed), Arc::<Attempts>::default());
        REQUESTS.lock().insert(number, attempts.clone());
        #[expect(clippy::cast_precision_loss, reason = "2^53 requests take centuries")]
        envoy.set_metadata_number(NUMBER.0, NUMBER.1, number as f64);
        Some(Self { number, attempts })
    }

    /// The attempts before the last one.
    #[must_use]
    pub fn earlier(&self) -> Vec<EarlierAttempt> {
        let attempts = self.attempts.0.lock();
        attempts.split_last().map(|(_, earlier)| earlier.to_vec()).unwrap_or_default()
    }
}

impl Drop for NumberedRequest {
    fn drop(&mut self) {
        REQUESTS.lock().remove(&self.number);
    }
}

/// One attempt.
#[derive(Debug, Default)]
pub struct Attempt {
    /// The attempts of its request, and its place among them.
    place: RefCell<Option<(Arc<Attempts>, usize)>>,
}

impl StreamFilter for Attempt {
    fn request_headers(&self, envoy: &dyn Callbacks, _end: bool) -> Flow {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the number is a whole one")]
        let number = match envoy.metadata(NUMBER.0, NUMBER.1) {
            Some(Metadatum::Number(number)) => number as u64,
            _ => return Flow::Continue,
        };
        let server = match envoy.metadata(DESTINATION_NAMESPACE, SERVED) {
            Some(Metadatum::Text(server)) => server.parse().ok(),
            _ => None,
        };
        let Some(attempts) = REQUESTS.lock().get(&number).cloned() else { return Flow::Continue };
        let mut list = attempts.0.lock();
        if list.len() < MAX_ATTEMPTS {
            list.push(EarlierAttempt { server, status: None });
            let place = list.len() - 1;
            drop(list);
            self.place.replace(Some((attempts, place)));
        }
        Flow::Continue
    }

    fn response_headers(&self, envoy: &dyn Callbacks, _end: bool) -> Flow {
        if let Some((attempts, place)) = &*self.place.borrow() {
            let status = envoy.headers(Headers::Response).into_iter().find(|(name, _)| name == ":status");
            let status = status.and_then(|(_, value)| std::str::from_utf8(&value).ok()?.parse().ok());
            if let Some(attempt) = attempts.0.lock().get_mut(*place) {
                attempt.status = status;
            }
        }
        Flow::Continue
    }
}
