//! The accounts of all tenants of one process.

use super::account::{Account, Had, Refused, Taken};
use super::{Limits, Wall};
use ahash::{AHashMap, RandomState};
use parking_lot::Mutex;
use std::sync::Arc;

/// 100,000 tenants of a day, some 15 MB. Names come from whoever the operator trusts, but what is trusted may be wrong.
pub const DEFAULT_MAX_TENANTS: usize = 100_000;
/// Locks, so that threads seldom meet at one.
const SHARDS: usize = 16;

#[derive(Debug, Default)]
struct Shard {
    accounts: AHashMap<Arc<str>, Account>,
    /// The day of the last look for accounts that are over.
    swept: u64,
}

/// What each tenant has had. One step is one hold of a lock, so that no two requests take the same place.
#[derive(Debug)]
pub struct Book {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    /// Accounts of a shard.
    room: usize,
}

impl Book {
    /// A book that remembers `tenants` at most. When it is full, the half is forgotten that was idle longest; never who has requests under way.
    #[must_use]
    pub fn new(tenants: usize) -> Self {
        let room = tenants.div_ceil(SHARDS).max(1);
        Self { hasher: RandomState::new(), shards: Default::default(), room }
    }

    fn shard(&self, tenant: &str) -> Option<&Mutex<Shard>> {
        let hash = self.hasher.hash_one(tenant);
        // The top bits: the maps inside use the others.
        self.shards.get((hash >> 60) as usize % SHARDS)
    }

    /// Books a request of `tokens` for `tenant`.
    ///
    /// # Errors
    /// What is used up. Nothing is booked then.
    pub fn take(&self, tenant: &Arc<str>, limits: &Limits, tokens: u64, at: Wall) -> Result<Taken, Refused> {
        let Some(shard) = self.shard(tenant) else { return Account::default().take(limits, tokens, at) };
        let mut shard = shard.lock();
        if shard.swept < at.day() {
            shard.swept = at.day();
            shard.accounts.retain(|_, account| !account.is_over(at));
        }
        if let Some(account) = shard.accounts.get_mut(tenant) {
            return account.take(limits, tokens, at);
        }
        if shard.accounts.len() >= self.room {
            shard.make_room();
        }
        shard.accounts.entry(tenant.clone()).or_default().take(limits, tokens, at)
    }

    /// What [`Book::take`] booked has ended.
    pub fn end(&self, tenant: &Arc<str>, taken: &Taken, had: Had, at: Wall) {
        if let Some(account) = self.shard(tenant).map(Mutex::lock).as_mut().and_then(|s| s.accounts.get_mut(tenant)) {
            account.end(taken, had, at);
        }
    }

    /// Tenants that are remembered.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().accounts.len()).sum()
    }
}

impl Shard {
    /// Forgets the half of the idle accounts that was asked for nothing longest.
    fn make_room(&mut self) {
        let mut minutes: Vec<u64> = self.accounts.values().filter(|a| a.is_idle()).map(Account::last_minute).collect();
        if minutes.is_empty() {
            return;
        }
        let middle = (minutes.len() - 1) / 2;
        let (_, oldest, _) = minutes.select_nth_unstable(middle);
        let oldest = *oldest;
        self.accounts.retain(|_, account| !account.is_idle() || account.last_minute() > oldest);
    }
}
