//! Configuration of the simulated pool's picker.

use crate::legs::Patience;
use attache_flow::PoolFlow;
use attache_picker::prefix::{PoolPrefix, Tokenizer};
use attache_picker::settings::ExchangeSettings;
use attache_prefix::cache::{CacheConfig, PrefixCache};
use attache_prompt::characters::Characters;
use attache_quota::{Subject, TenantSettings};
use attache_scheduling::policy::PolicyMap;
use attache_scheduling::{Pool, Scheduler};
use attache_types::clock::Clock;
use std::sync::Arc;
use std::time::Duration;

/// The part of a configuration that a replay uses.
#[derive(Debug)]
pub struct FrontConfig {
    /// The pool. The simulation publishes its endpoints. All simulated requests belong to it, whatever its conditions.
    pub pool: Pool,
    /// The prefix index. Its tokenizer is not used, and the simulation sets whether events tell ranks apart.
    pub prefix: PoolPrefix,
    /// The queues of flow control, if it is on.
    pub flow: Option<PoolFlow>,
    /// The limits of tenants, and of models.
    pub quotas: Vec<(Subject, TenantSettings)>,
    /// Settings of the request path. Client headers are trusted, and sessions are no flows.
    pub exchange: ExchangeSettings,
    /// Policies of single models, for `prefix-affinity`.
    pub policies: PolicyMap,
    /// Time limits of prefills, and what follows when all attempts fail.
    pub patience: Patience,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// The prefix index of a simulated pool. Simulated prompts are tokens, so no tokenizer is used. The picker chooses no
/// ranks. `clock` is the real one; nothing of a simulation depends on it.
#[must_use]
pub fn simulated_prefix(config: &CacheConfig, tenant_header: Option<String>, clock: Clock) -> PoolPrefix {
    known_prefix(Arc::new(PrefixCache::new(config)), tenant_header, clock)
}

/// The prefix index `cache` of a pool whose prompts are known without their text.
pub(crate) fn known_prefix(cache: Arc<PrefixCache>, tenant_header: Option<String>, clock: Clock) -> PoolPrefix {
    PoolPrefix {
        tokenizer: Tokenizer::Characters(Characters::new(cache.space())),
        cache,
        tenant_header,
        isolate_tenants: false,
        named_by_adapter: false,
        choose_rank: false,
        ranks_tell: false,
        clock,
    }
}

impl FrontConfig {
    /// A pool with this scheduler and prefix index, and without queues, limits and rules for models.
    #[must_use]
    pub fn new(scheduler: Scheduler, prefix: PoolPrefix, stale_after: Duration, seed: u64) -> Self {
        Self::of(Pool::new("replay".into(), Arc::default(), scheduler, stale_after), prefix, seed)
    }

    /// This pool with this prefix index, and without queues and limits.
    #[must_use]
    pub fn of(pool: Pool, prefix: PoolPrefix, seed: u64) -> Self {
        let (exchange, policies, patience) = (ExchangeSettings::default(), PolicyMap::default(), Patience::default());
        Self { pool, prefix, flow: None, quotas: Vec::new(), exchange, policies, patience, seed }
    }
}
