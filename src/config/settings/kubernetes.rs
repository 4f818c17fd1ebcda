//! InferencePools as pools.

use super::{KubernetesSource, PodsOf, PoolSearch, PoolSettings, ScrapeSettings};
use attache_scheduling::router::PoolMatch;

/// Pools that come and go with their `InferencePool`s.
#[derive(Clone, Debug)]
pub struct PoolTemplate {
    /// Which.
    pub search: PoolSearch,
    /// What those are like that have no configuration of their own. Its name is nobody's, and it has no endpoints.
    pub pool: PoolSettings,
    /// Bytes that may wait before all of them together.
    pub queued_bytes: u64,
}

impl PoolTemplate {
    /// The pool that the `InferencePool` of this name is and that is `called` so here, by its `own` configuration where it has one. Requests that
    /// come by `service` are its own, unless its configuration names other conditions.
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
