//! SLO profiles from Redis, under AIBrix's keys (`aibrix:profile_{model}_{deployment}`): read on each new connection
//! and at an interval. While Redis does not respond, or a profile is invalid, the last valid profiles stay in use.
//!
//! Called by the composition of the process.

use crate::redis_link::{LinkError, RedisLink};
use attache_pool::slo_profile::{MAX_PROFILE_BYTES, Profile, REDIS_KEY_PREFIX, RedisProfiles};
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// Most profiles that are read, far more than deployments exist.
const MAX_PROFILES: usize = 1_024;
/// Total size of all profiles as text, 64 MiB.
const MAX_BYTES: usize = 64 << 20;
/// Keys that Redis scans per call, so that other clients need not wait.
const PAGE: usize = 1_000;

/// Result of reading the profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The profiles were read.
    Read {
        /// Number of profiles in use, including those from earlier reads.
        good: usize,
        /// Number of these whose current value is invalid, including those over the limits.
        malformed: usize,
    },
    /// Redis did not respond; the previous profiles stay in use.
    Failed,
}

/// Reads the profiles in the Redis of `link` and publishes them in the returned value, until either is dropped.
/// `before` are the profiles known so far. `on_look` is called after each read.
#[must_use]
pub fn follow(
    link: &Arc<RedisLink>,
    every: Duration,
    before: Arc<Vec<Profile>>,
    on_look: impl Fn(Look) + Send + 'static,
) -> Arc<RedisProfiles> {
    let published = Arc::new(RedisProfiles::new(before));
    tokio::spawn(run(Arc::downgrade(link), link.connected(), every, Arc::downgrade(&published), on_look));
    published
}

async fn run(
    link: Weak<RedisLink>,
    mut connected: watch::Receiver<bool>,
    every: Duration,
    published: Weak<RedisProfiles>,
    on_look: impl Fn(Look),
) {
    let mut complaints: Vec<String> = Vec::new();
    let mut fails = false;
    if !*connected.borrow_and_update() && !wait(&mut connected, every).await {
        return;
    }
    loop {
        connected.mark_unchanged();
        let (Some(link), Some(published)) = (link.upgrade(), published.upgrade()) else { return };
        let before = published.load_full();
        match read(&link, &before).await {
            Ok(StoredProfiles { good, wrong }) => {
                on_look(Look::Read { good: good.len(), malformed: wrong.len() });
                fails = false;
                if wrong != complaints {
                    for complaint in wrong.iter().filter(|complaint| !complaints.contains(complaint)) {
                        tracing::warn!(%complaint, "SLO profile in Redis ignored");
                    }
                    complaints = wrong;
                }
                if good != *before {
                    tracing::info!(profiles = good.len(), "SLO profiles reloaded from Redis");
                    published.store(Arc::new(good));
                }
            }
            Err(error) => {
                on_look(Look::Failed);
                // The missing connection has been logged already.
                if !std::mem::replace(&mut fails, true) && !matches!(error, LinkError::Away) {
                    let profiles = before.len();
                    tracing::warn!(%error, profiles, "SLO profiles can't be read from Redis; keeping the last valid \
                     ones");
                }
            }
        }
        // Dropped while waiting, so that the task does not keep them alive.
        drop((link, published));
        if !wait(&mut connected, every).await {
            return;
        }
    }
}

/// Waits for `every`, or until a connection is made. Returns false when there will be none any more.
async fn wait(connected: &mut watch::Receiver<bool>, every: Duration) -> bool {
    let made = async {
        while connected.changed().await.is_ok() {
            if *connected.borrow_and_update() {
                return true;
            }
        }
        false
    };
    tokio::time::timeout(every, made).await.unwrap_or(true)
}

/// The profiles in Redis.
struct StoredProfiles {
    good: Vec<Profile>,
    /// The problems of invalid profiles, with their keys.
    wrong: Vec<String>,
}

async fn read(link: &RedisLink, before: &[Profile]) -> Result<StoredProfiles, LinkError> {
    let (mut good, mut wrong, mut bytes) = (Vec::new(), Vec::new(), 0);
    for key in keys(link).await? {
        let shown = String::from_utf8_lossy(&key).into_owned();
        if good.len() >= MAX_PROFILES || bytes > MAX_BYTES {
            wrong.push(format!("{shown}: {MAX_PROFILES} profiles, {MAX_BYTES} bytes together, are allowed"));
            continue;
        }
        let mut question = redis::cmd("GETRANGE");
        question.arg(&key).arg(0).arg(MAX_PROFILE_BYTES);
        let text: Result<Vec<u8>, String> = match link.ask::<Vec<u8>>(&question).await {
            // It was deleted since its key was scanned.
            Ok(text) if text.is_empty() => continue,
            Ok(text) if text.len() as u64 > MAX_PROFILE_BYTES => {
                Err(format!("it is longer than {MAX_PROFILE_BYTES} bytes"))
            }
            Ok(text) => Ok(text),
            Err(error) if error.is_of_the_wrong_type() => Err("it is not text".to_owned()),
            Err(error) => return Err(error),
        };
        bytes += text.as_ref().map_or(0, Vec::len);
        let of = std::str::from_utf8(&key).ok().and_then(|key| key.strip_prefix(REDIS_KEY_PREFIX));
        let of = of.ok_or_else(|| "its key is not UTF-8".to_owned());
        let profile = of.and_then(|of| Profile::parse_keyed(of, &text?).map_err(|error| error.to_string()));
        match profile {
            Ok(profile) => good.push(profile),
            Err(error) => {
                wrong.push(format!("{shown}: {error}"));
                good.extend(before.iter().find(|known| of_key(known, &key)).cloned());
            }
        }
    }
    Ok(StoredProfiles { good, wrong })
}

fn of_key(profile: &Profile, key: &[u8]) -> bool {
    profile.key().is_some_and(|of| key.strip_prefix(REDIS_KEY_PREFIX.as_bytes()) == Some(of.as_bytes()))
}

/// Returns the keys of all profiles, in order.
async fn keys(link: &RedisLink) -> Result<BTreeSet<Vec<u8>>, LinkError> {
    let (mut keys, mut cursor) = (BTreeSet::new(), 0u64);
    loop {
        let mut question = redis::cmd("SCAN");
        question.arg(cursor).arg("MATCH").arg(format!("{REDIS_KEY_PREFIX}*")).arg("COUNT").arg(PAGE);
        let (next, page): (u64, Vec<Vec<u8>>) = link.ask(&question).await?;
        keys.extend(page);
        cursor = next;
        // With too many keys, the first ones are used and the rest is reported as left out.
        if cursor == 0 || keys.len() > 2 * MAX_PROFILES {
            return Ok(keys);
        }
    }
}
