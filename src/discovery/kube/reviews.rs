//! Asks the API server who bears a token (`TokenReview`) and whether that one may see a page (`SubjectAccessReview`), and remembers the answers for
//! a while: Prometheus comes every few seconds with the same token.

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

/// Who may see a page may see it for so long without another question: a right that is taken away holds no longer than this.
pub const ALLOWED_FOR: Duration = Duration::from_secs(60);
/// Who may not is not asked about again for so long: a right that is given is soon one.
pub const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Answers that are remembered at most: a cluster has a few scrapers, and whoever makes up tokens must not fill the memory.
pub const MAX_REMEMBERED: usize = 1_024;
/// An answer that takes longer counts as none, as controller-runtime has it.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Questions at once: whoever makes up tokens must not keep the API server busy.
const MAX_CONCURRENT: usize = 4;

/// What the API server says of somebody who wants to see a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Review {
    /// It may.
    Allowed,
    /// Nobody bears such a token.
    Unknown,
    /// This user may not.
    Denied(String),
}

/// Asks, and remembers.
pub struct Reviews {
    client: Client,
    clock: Clock,
    remembered: Mutex<Remembered>,
    turns: Semaphore,
    /// The last question came to nothing, and that has been told.
    troubled: AtomicBool,
}

impl Reviews {
    /// Asks the API server of `client`.
    #[must_use]
    pub fn new(client: Client, clock: Clock) -> Self {
        let (remembered, turns) = (Mutex::default(), Semaphore::new(MAX_CONCURRENT));
        Self { client, clock, remembered, turns, troubled: AtomicBool::new(false) }
    }

    /// Whether the bearer of `token` may do `verb` (`get`) on the page `path`; `None` when the API server does not say.
    pub async fn review(&self, token: &str, verb: &str, path: &str) -> Option<Review> {
        let key = key(token, verb, path);
        if let Some(known) = self.remembered.lock().get(&key, self.clock.now()) {
            return Some(known);
        }
        let asked = timeout(ANSWER_TIMEOUT, async {
            let _turn = self.turns.acquire().await.map_err(|e| e.to_string())?;
            // Whoever had the turn before may have asked the same.
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
                        "token review failed; admin requests with a token are rejected. The service account needs `create` on `tokenreviews` and `subjectaccessreviews`"
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

/// A digest of the question: tokens are not kept.
fn key(token: &str, verb: &str, path: &str) -> Key {
    let mut digest = Sha256::new();
    for part in [verb, path, token] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// Answers, each until its time is over.
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
            // Those who may see something are few; what fills the memory is refusals.
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
    fn answers_hold_for_their_time() {
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
    fn questions_are_told_apart_by_every_part() {
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
    fn made_up_tokens_neither_fill_the_memory_nor_drive_out_who_may() {
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
