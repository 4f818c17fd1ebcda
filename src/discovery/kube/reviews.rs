//! Asks the API server for the user of a token (`TokenReview`) and whether that user may see an admin page
//! (`SubjectAccessReview`). Results are cached, since Prometheus scrapes every few seconds with the same token.

use super::follow::with_causes;
use attache_types::clock::{Clock, Timestamp};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// How long an allowed access is cached: a revoked right is effective after this time at the latest.
pub const ALLOWED_FOR: Duration = Duration::from_secs(60);
/// How long a refusal is cached: a granted right is effective soon.
pub const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Most cached results: a cluster has few scrapers, and requests with random tokens must not fill the memory.
pub const MAX_REMEMBERED: usize = 1_024;
/// A review that takes longer counts as failed, as in controller-runtime.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Most reviews at once: requests with random tokens must not overload the API server.
const MAX_CONCURRENT: usize = 4;

/// The result of a review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Review {
    /// The user may see the page.
    Allowed,
    /// The token is not valid.
    Unknown,
    /// This user may not see the page.
    Denied(String),
}

/// Reviews tokens, and caches the results.
pub struct Reviews {
    client: Client,
    clock: Clock,
    remembered: Mutex<Remembered>,
    turns: Semaphore,
    /// Whether the last review failed, which is logged once.
    troubled: AtomicBool,
}

impl Reviews {
    /// Creates a cache that asks the API server of `client`.
    #[must_use]
    pub fn new(client: Client, clock: Clock) -> Self {
        let (remembered, turns) = (Mutex::default(), Semaphore::new(MAX_CONCURRENT));
        Self { client, clock, remembered, turns, troubled: AtomicBool::new(false) }
    }

    /// Whether the user of `token` may do `verb` (`get`) on the page `path`; `None` if the API server does not answer.
    pub async fn review(&self, token: &str, verb: &str, path: &str) -> Option<Review> {
        let key = key(token, verb, path);
        if let Some(known) = self.remembered.lock().get(&key, self.clock.now()) {
            return Some(known);
        }
        let asked = timeout(ANSWER_TIMEOUT, async {
            let _turn = self.turns.acquire().await.map_err(|e| e.to_string())?;
            // The previous holder of the permit may have asked the same.
            let known = self.remembered.lock().get(&key, self.clock.now());
            match known {
                Some(known) => Ok(known),
                None => self.ask(token, verb, path).await,
            }
        });
        match asked.await.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            Ok(review) => {
                self.troubled.store(false, Relaxed);
                self.remembered.lock().put(key, review.clone(), self.clock.now());
                Some(review)
            }
            Err(error) => {
                if !self.troubled.swap(true, Relaxed) {
                    tracing::warn!(
                        error,
                        "token review failed; admin requests with a token are rejected. The service account needs \
                         `create` on `tokenreviews` and `subjectaccessreviews`"
                    );
                }
                None
            }
        }
    }

    async fn ask(&self, token: &str, verb: &str, path: &str) -> Result<Review, String> {
        let spec = TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() };
        let status = self.create(TokenReview { spec, ..TokenReview::default() }).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(Review::Unknown);
        }
        let UserInfo { username, uid, groups, extra } = status.user.unwrap_or_default();
        let attributes = NonResourceAttributes { path: Some(path.to_owned()), verb: Some(verb.to_owned()) };
        let spec = SubjectAccessReviewSpec {
            user: username.clone(),
            uid,
            groups,
            extra,
            non_resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = self.create(SubjectAccessReview { spec, ..SubjectAccessReview::default() }).await?;
        let allowed = review.status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if allowed { Review::Allowed } else { Review::Denied(username.unwrap_or_default()) })
    }

    async fn create<K>(&self, review: K) -> Result<K, String>
    where
        K: Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + std::fmt::Debug,
    {
        let api: Api<K> = Api::all(self.client.clone());
        api.create(&PostParams::default(), &review).await.map_err(|error| with_causes(&error))
    }
}

type Key = [u8; 32];

/// A digest of token, verb and path: tokens are not kept.
fn key(token: &str, verb: &str, path: &str) -> Key {
    let mut digest = Sha256::new();
    for part in [verb, path, token] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// Cached results, each until its expiry.
#[derive(Debug, Default)]
struct Remembered(HashMap<Key, (Review, Timestamp)>);

impl Remembered {
    fn get(&self, key: &Key, now: Timestamp) -> Option<Review> {
        self.0.get(key).filter(|(_, until)| now < *until).map(|(review, _)| review.clone())
    }

    fn put(&mut self, key: Key, review: Review, now: Timestamp) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.retain(|_, (_, until)| now < *until);
        }
        if self.0.len() >= MAX_REMEMBERED {
            // Few users are allowed; refusals are what fills the memory.
            self.0.retain(|_, (review, _)| *review == Review::Allowed);
        }
        if self.0.len() < MAX_REMEMBERED {
            let holds_for = if review == Review::Allowed { ALLOWED_FOR } else { REFUSED_FOR };
            self.0.insert(key, (review, now.after(holds_for)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    #[test]
    fn cached_reviews_expire() {
        let mut remembered = Remembered::default();
        let (good, bad) = (key("a", "get", "/metrics"), key("b", "get", "/metrics"));
        remembered.put(good, Review::Allowed, at(0));
        remembered.put(bad, Review::Denied("b".into()), at(0));
        assert_eq!(remembered.get(&good, at(59)), Some(Review::Allowed));
        assert_eq!(remembered.get(&good, at(60)), None);
        assert_eq!(remembered.get(&bad, at(9)), Some(Review::Denied("b".into())));
        assert_eq!(remembered.get(&bad, at(10)), None);
    }

    #[test]
    fn cache_key_differs_by_token_verb_and_path() {
        let keys = [
            key("a", "get", "/m"),
            key("b", "get", "/m"),
            key("a", "put", "/m"),
            key("a", "get", "/n"),
            key("am", "get", "/"),
        ];
        let different: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
    }

    #[test]
    fn random_tokens_neither_fill_memory_nor_evict_allowed_users() {
        let mut remembered = Remembered::default();
        let good = key("good", "get", "/metrics");
        remembered.put(good, Review::Allowed, at(0));
        for n in 0..3 * MAX_REMEMBERED {
            remembered.put(key(&n.to_string(), "get", "/metrics"), Review::Unknown, at(1));
            assert!(remembered.0.len() <= MAX_REMEMBERED);
        }
        assert_eq!(remembered.get(&good, at(1)), Some(Review::Allowed));
    }
}
