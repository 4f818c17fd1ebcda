//! The accounts of all tenants of one process.

use super::Wall;
use super::account::{Account, Claim, Had, Refused, Taken};
use ahash::{AHashMap, RandomState};
use parking_lot::Mutex;
use std::sync::Arc;

/// 100,000 tenants or models of a day, some 25 MB. Tenants' names come from whoever the operator trusts, but what is trusted may be wrong; names of models
/// are what clients write.
pub const DEFAULT_MAX_TENANTS: usize = 100_000;
/// Locks, so that threads seldom meet at one.
const SHARDS: usize = 16;

#[derive(Debug, Default)]
struct Shard {
    accounts: AHashMap<Arc<str>, Account>,
    /// The day that it was at the last look for accounts that are over.
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
    /// A book that remembers `tenants` at most. When it is full, the half is forgotten that has used up least of what it may have, those first that were
    /// idle longest; nobody that is named in the limits while there are others, and never who has requests under way.
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

    /// Books what is claimed.
    ///
    /// # Errors
    /// What is used up. Nothing is booked then.
    pub fn take(&self, claim: &Claim, at: Wall) -> Result<Taken, Refused> {
        let Some(shard) = self.shard(&claim.name) else { return Account::default().take(claim, at) };
        let mut shard = shard.lock();
        let day = at.windows().day;
        if shard.swept != day {
            shard.swept = day;
            shard.accounts.retain(|_, account| !account.is_over(at));
        }
        if let Some(account) = shard.accounts.get_mut(&claim.name) {
            return account.take(claim, at);
        }
        if shard.accounts.len() >= self.room {
            shard.make_room(at);
        }
        shard.accounts.entry(claim.name.clone()).or_default().take(claim, at)
    }

    /// What [`Book::take`] booked has ended.
    pub fn end(&self, tenant: &Arc<str>, taken: &Taken, had: Had, at: Wall) {
        if let Some(account) = self.shard(tenant).map(Mutex::lock).as_mut().and_then(|s| s.accounts.get_mut(tenant)) {
            account.end(taken, had, at);
        }
    }

    /// Tenants of whom something is under way.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn busy(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.lock().accounts.values().filter(|account| !account.is_idle()).count())
            .sum()
    }

    /// Tenants that are remembered.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().accounts.len()).sum()
    }
}

impl Shard {
    /// Forgets the half of the idle accounts with which least is lost.
    fn make_room(&mut self, at: Wall) {
        let is_named = self.accounts.values().filter(|a| a.is_idle()).all(Account::is_named);
        let may_go = |account: &Account| account.is_idle() && account.is_named() == is_named;
        let mut weights: Vec<_> = self.accounts.values().filter(|a| may_go(a)).map(|a| a.weight(at)).collect();
        if weights.is_empty() {
            return;
        }
        let middle = (weights.len() - 1) / 2;
        let (_, most, _) = weights.select_nth_unstable(middle);
        let most = *most;
        self.accounts.retain(|_, account| !may_go(account) || account.weight(at) > most);
    }
}
