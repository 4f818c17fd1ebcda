//! Limits of single tenants that AIBrix keeps in Redis, under `aibrix-users/<name>`. A result is fresh for some
//! time, including a missing record. An older one is used until it has been read again, which one reader per
//! tenant does at a time.
//!
//! Called by `ext_proc::redis_quotas`.

use crate::redis_link::{LinkError, RedisLink};
use attache_quota::UserRecord;
use attache_types::clock::Timestamp;
use attache_types::throttle::Throttle;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// Prefix of a record's key; the tenant's name follows.
const KEY_PREFIX: &str = "aibrix-users/";
/// Most tenants whose records are cached, 10,000 or some 2 MB. Tenant names come from trusted
/// sources that may be wrong.
const MAX_KNOWN: usize = 10_000;
/// Largest record in bytes; it has three fields. A longer one is cut, and then invalid.
const MAX_RECORD_BYTES: isize = 4_096;

/// The record of a tenant in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordLookup {
    /// The tenant has this record.
    Record(UserRecord),
    /// The tenant has no record.
    Nothing,
    /// The value is not a valid record.
    Malformed,
}

/// A cached result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRecord {
    /// The result of the last read.
    pub found: RecordLookup,
    /// Whether it is recent enough that it need not be read again.
    pub is_fresh: bool,
}

/// The records in one Redis.
#[derive(Debug)]
pub struct UserRecords {
    link: Arc<RedisLink>,
    known: Cache<Arc<str>, (RecordLookup, Timestamp)>,
    /// The tenants whose records are being read.
    again: Mutex<HashSet<Arc<str>>>,
    /// Log messages about invalid records.
    malformed: Throttle,
}

impl UserRecords {
    /// Creates a cache for the Redis of `link`, initially empty.
    #[must_use]
    pub fn new(link: Arc<RedisLink>) -> Self {
        Self { link, known: Cache::new(MAX_KNOWN), again: Mutex::default(), malformed: Throttle::default() }
    }

    /// Returns the connection to its Redis.
    #[must_use]
    pub fn link(&self) -> &Arc<RedisLink> {
        &self.link
    }

    /// Returns the cached result for `tenant`; it is fresh for `ttl`.
    #[must_use]
    pub fn known(&self, tenant: &Arc<str>, ttl: Duration, now: Timestamp) -> Option<CachedRecord> {
        self.known.get(tenant).map(|(found, at)| CachedRecord { found, is_fresh: now.since(at) < ttl })
    }

    /// Returns the right to read the record of `tenant` again; `None` while another task has it.
    #[must_use]
    pub fn again(self: &Arc<Self>, tenant: &Arc<str>) -> Option<Again> {
        let is_first = self.again.lock().insert(tenant.clone());
        is_first.then(|| Again { users: self.clone(), tenant: tenant.clone() })
    }

    /// Returns the result of the last read for `tenant`.
    #[must_use]
    pub fn last(&self, tenant: &Arc<str>) -> Option<RecordLookup> {
        self.known.get(tenant).map(|(found, _)| found)
    }

    fn log_malformed(&self, tenant: &str, error: &str, now: Timestamp) {
        if let Some(skipped) = self.malformed.admit(now) {
            tracing::warn!(tenant, error, skipped, "record of a tenant in Redis is invalid");
        }
    }

    /// Reads the record of `tenant`.
    ///
    /// # Errors
    /// [`LinkError`] when Redis does not respond.
    pub async fn read(&self, tenant: &Arc<str>, now: Timestamp) -> Result<RecordLookup, LinkError> {
        let mut question = redis::cmd("GETRANGE");
        question.arg(format!("{KEY_PREFIX}{tenant}")).arg(0).arg(MAX_RECORD_BYTES - 1);
        let found = match self.link.ask::<Vec<u8>>(&question).await {
            // A missing key and an empty text give the same result.
            Ok(bytes) if bytes.is_empty() => RecordLookup::Nothing,
            Ok(bytes) => match UserRecord::parse(&bytes) {
                Ok(record) => RecordLookup::Record(record),
                Err(error) => {
                    self.log_malformed(tenant, &error.to_string(), now);
                    RecordLookup::Malformed
                }
            },
            Err(error) if error.is_of_the_wrong_type() => {
                self.log_malformed(tenant, "it is not UTF-8 text", now);
                RecordLookup::Malformed
            }
            Err(error) => return Err(error),
        };
        self.known.insert(tenant.clone(), (found, now));
        Ok(found)
    }
}

/// The right to read a tenant's record again, which one task has at a time.
#[derive(Debug)]
pub struct Again {
    users: Arc<UserRecords>,
    tenant: Arc<str>,
}

impl Drop for Again {
    fn drop(&mut self) {
        self.users.again.lock().remove(&self.tenant);
    }
}
