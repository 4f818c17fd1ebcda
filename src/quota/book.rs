//! The accounts of all tenants in the memory of one process.

use super::Wall;
use super::account::{Account, Claim, Had, Refused, Taken};
use ahash::{AHashMap, RandomState};
use parking_lot::Mutex;
use std::sync::Arc;

/// Default limit of accounts, 100,000 or some 25 MB. Tenant names come from trusted sources that may be wrong; model
/// names are chosen by clients.
pub const DEFAULT_MAX_TENANTS: usize = 100_000;
/// Number of locks, so that threads rarely contend.
const SHARDS: usize = 16;

#[derive(Debug, Default)]
struct Shard {
    accounts: AHashMap<Arc<str>, Account>,
    /// The day of the last removal of outdated accounts.
    swept: u64,
}

/// The usage of all tenants. Each operation holds one lock, so that no two requests get the same slot.
#[derive(Debug)]
pub struct Book {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    /// Most accounts of a shard.
    room: usize,
}

impl Book {
    /// Creates a book with at most `tenants` accounts. When a shard is full, it evicts the half of its accounts with
    /// the smallest used share, among equals those idle for longest. Accounts that the limits name are evicted only if
    /// there are no others, and accounts with running requests never.
    #[must_use]
    pub fn new(tenants: usize) -> Self {
        let room = tenants.div_ceil(SHARDS).max(1);
        Self { hasher: RandomState::new(), shards: Default::default(), room }
    }

    fn shard(&self, tenant: &str) -> Option<&Mutex<Shard>> {
        let hash = self.hasher.hash_one(tenant);
        // The top bits, since the hash maps use the others.
        self.shards.get((hash >> 60) as usize % SHARDS)
    }

    /// Reserves the claimed quota.
    ///
    /// # Errors
    /// [`Refused`] with the limit that is used up; then nothing was reserved.
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

    /// Records the end of a request that [`Book::take`] admitted.
    pub fn end(&self, tenant: &Arc<str>, taken: &Taken, had: Had, at: Wall) {
        if let Some(account) = self.shard(tenant).map(Mutex::lock).as_mut().and_then(|s| s.accounts.get_mut(tenant)) {
            account.end(taken, had, at);
        }
    }

    /// Returns the number of tenants with running requests.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn busy(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.lock().accounts.values().filter(|account| !account.is_idle()).count())
            .sum()
    }

    /// Returns the number of stored accounts.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().accounts.len()).sum()
    }
}

impl Shard {
    /// Evicts the half of the idle accounts with the smallest used share.
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
