//! Pools for InferencePools.

use super::{KubernetesSource, PodsOf, PoolSearch, PoolSettings, ScrapeSettings};
use attache_scheduling::router::PoolMatch;

/// Template of the pools that come and go with their `InferencePool`s.
#[derive(Clone, Debug)]
pub struct PoolTemplate {
    /// Selects the InferencePools.
    pub search: PoolSearch,
    /// Settings of pools without a configuration of their own. Name and endpoints are placeholders.
    pub pool: PoolSettings,
    /// Most bytes that are queued for all these pools together.
    pub queued_bytes: u64,
}

impl PoolTemplate {
    /// Settings of the pool for the `InferencePool` of this name, `called` so in Attaché, from its `own` configuration
    /// if it has one. It gets requests for `service`, unless its configuration has other conditions.
    #[must_use]
    pub fn instance(
        &self,
        called: &str,
        name: &str,
        service: Option<String>,
        own: Option<&PoolSettings>,
    ) -> PoolSettings {
        let like = own.unwrap_or(&self.pool);
        let by_service = || PoolMatch { service, ..PoolMatch::default() };
        let (search, scrape) = (&self.search, &self.pool.scrape);
        PoolSettings {
            name: called.into(),
            matches: if like.matches.is_empty() { by_service() } else { like.matches.clone() },
            kubernetes: Some(KubernetesSource {
                namespace: search.namespace.clone(),
                pods: PodsOf::Pool { name: name.to_owned(), group: search.group },
                engine: search.engine,
                metrics: search.metrics.clone(),
                found: true,
            }),
            scrape: ScrapeSettings { bearer_token_file: scrape.bearer_token_file.clone(), ..like.scrape.clone() },
            ..like.clone()
        }
    }
}
