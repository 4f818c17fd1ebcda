//! Limits of single tenants that AIBrix keeps in Redis, under `aibrix-users/<name>`. What was read counts for a while, that there is nothing too; what
//! is older counts until it has been read again, which one reader at a time does for each tenant.
//!
//! Called by `ext_proc::redis_quotas`.

use crate::redis_link::{LinkError, RedisLink};
use attache_quota::UserRecord;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// What a record's key begins with; the tenant's name follows.
const KEY_PREFIX: &str = "aibrix-users/";
/// 10,000 tenants of whom it is known what they have, some 2 MB. Names come from whoever the operator trusts, but what is trusted may be wrong.
const MAX_KNOWN: usize = 10_000;
/// 4 KiB: a record has three fields. Of a longer one no more is fetched, and then it is none.
const MAX_RECORD_BYTES: isize = 4_096;

/// What stands there of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// This record.
    Record(UserRecord),
    /// Nothing.
    Nothing,
    /// Something that is no record.
    Malformed,
}

/// What was found of a tenant when it was read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// This.
    pub found: Found,
    /// It was read so lately that nobody need look again.
    pub is_fresh: bool,
}

/// The records of a Redis.
#[derive(Debug)]
pub struct UserRecords {
    link: Arc<RedisLink>,
    known: Cache<Arc<str>, (Found, Timestamp)>,
    /// Whose records are being read again.
    again: Mutex<HashSet<Arc<str>>>,
}

impl UserRecords {
    /// The records in the Redis of `link`, none of which has been read.
    #[must_use]
    pub fn new(link: Arc<RedisLink>) -> Self {
        Self { link, known: Cache::new(MAX_KNOWN), again: Mutex::default() }
    }

    /// The Redis where they stand.
    #[must_use]
    pub fn link(&self) -> &Arc<RedisLink> {
        &self.link
    }

    /// What was found of `tenant`; it is fresh for `ttl`.
    #[must_use]
    pub fn known(&self, tenant: &Arc<str>, ttl: Duration, now: Timestamp) -> Option<Known> {
        self.known.get(tenant).map(|(found, at)| Known { found, is_fresh: now.since(at) < ttl })
    }

    /// The right to read the record of `tenant` again; `None` while another has it.
    #[must_use]
    pub fn again(self: &Arc<Self>, tenant: &Arc<str>) -> Option<Again> {
        let is_first = self.again.lock().insert(tenant.clone());
        is_first.then(|| Again { users: self.clone(), tenant: tenant.clone() })
    }

    /// What was found of `tenant` when it was read last.
    #[must_use]
    pub fn last(&self, tenant: &Arc<str>) -> Option<Found> {
        self.known.get(tenant).map(|(found, _)| found)
    }

    /// Reads what stands there of `tenant`.
    ///
    /// # Errors
    /// When Redis gives no answer.
    pub async fn read(&self, tenant: &Arc<str>, now: Timestamp) -> Result<Found, LinkError> {
        let mut question = redis::cmd("GETRANGE");
        question.arg(format!("{KEY_PREFIX}{tenant}")).arg(0).arg(MAX_RECORD_BYTES - 1);
        let found = match self.link.ask::<Vec<u8>>(&question).await {
            // No key and an empty text are one.
            Ok(bytes) if bytes.is_empty() => Found::Nothing,
            Ok(bytes) => match UserRecord::parse(&bytes) {
                Ok(record) => Found::Record(record),
                Err(error) => {
                    tracing::warn!(tenant = %tenant, %error, "record of a tenant in Redis is invalid");
                    Found::Malformed
                }
            },
            Err(error) if error.is_of_the_wrong_type() => {
                tracing::warn!(tenant = %tenant, "record of a tenant in Redis is not UTF-8 text");
                Found::Malformed
            }
            Err(error) => return Err(error),
        };
        self.known.insert(tenant.clone(), (found, now));
        Ok(found)
    }
}

/// The right to read a tenant's record again, which one has at a time.
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
