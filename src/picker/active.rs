//! The part of the picker that a reload replaces: pools, limits, settings.

use super::head::{Head, is_removed_from_all};
use super::prefix::PoolPrefix;
use super::queues::Queues;
use super::quotas::Quotas;
use super::tenant;
use crate::event::PoolObserver;
use crate::settings::ExchangeSettings;
use attache_scheduling::plugin::Strategy;
use attache_scheduling::router::RouteFacts;
use attache_scheduling::{Pool, Router, scheduler};
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Everything that belongs to one pool.
#[derive(Clone, Debug)]
pub struct PoolRuntime {
    /// Endpoints, rules for models, and the scheduler.
    pub pool: Arc<Pool>,
    /// Receives the events of the pool's requests.
    pub observer: Arc<dyn PoolObserver>,
    /// Computes the block keys of prompts and looks up which endpoints hold them. Without it, no prompt is looked up.
    pub prefix: Option<Arc<PoolPrefix>>,
    /// The pool's queue. Without it, no request is queued or shed.
    pub queue: Option<Arc<Queues>>,
}

/// One configuration: a reload replaces all of it at once. A stream keeps the one that it began with.
#[derive(Debug)]
pub struct ActiveConfig {
    /// Selects the pool of a request; has the pools of [`ActiveConfig::pools`] in the same order.
    pub router: Router,
    /// Bounds of requests.
    pub limits: Limits,
    /// Settings of the request path.
    pub settings: ExchangeSettings,
    /// Number of this configuration in a recording.
    pub number: u32,
    /// Strategy of requests without a readable body.
    pub least_loaded: Arc<dyn Strategy>,
    /// Limits of tenants and of models, at most one of each.
    pub quotas: Vec<Arc<Quotas>>,
    pools: Vec<Arc<PoolRuntime>>,
    /// Headers that some pools set and others do not, and that no other rule removes.
    unshared_headers: Vec<Box<str>>,
}

impl ActiveConfig {
    /// A configuration of `pools` in the order of the configuration file, without limits of tenants and models.
    #[must_use]
    pub fn new(pools: Vec<Arc<PoolRuntime>>, limits: Limits, settings: ExchangeSettings) -> Self {
        let router = Router::new(pools.iter().map(|runtime| runtime.pool.clone()).collect());
        let (least_loaded, unshared_headers) = (scheduler::least_loaded(), unshared_headers(&pools));
        Self { router, limits, settings, number: 0, least_loaded, quotas: Vec::new(), pools, unshared_headers }
    }

    /// Headers that must be removed from requests unless the pool of the request sets them: with them, a client would
    /// name its server where a gateway routes by the header of another pool.
    #[must_use]
    pub fn unshared_headers(&self) -> &[Box<str>] {
        &self.unshared_headers
    }

    /// Headers of a request without a decision that must not reach a server: those that only Attaché may set, and the
    /// destinations of all pools.
    #[must_use]
    pub fn headers_to_withhold(&self, head: &Head) -> Vec<String> {
        let reserved = head.reserved(self.settings.trust_client_headers).map(str::to_owned);
        let named = self.pools.iter().flat_map(|runtime| runtime.pool.destination_names.all_headers());
        let named = named.filter(|name| head.has(name)).map(str::to_owned);
        reserved.chain(tenant::untrusted(self.settings.tenant.as_ref(), head)).chain(named).collect()
    }

    /// Whether the request may go to some servers only, because one of its headers has a label selector.
    #[must_use]
    pub fn selects(&self, head: &Head) -> bool {
        let choices = self.pools.iter().map(|runtime| &runtime.pool.scheduler.choices);
        choices.filter_map(|choices| choices.filter_header()).any(|name| head.has(name))
    }

    /// The same with limits of tenants and models, one of each at most.
    #[must_use]
    pub fn with_quotas(self, quotas: Vec<Arc<Quotas>>) -> Self {
        Self { quotas, ..self }
    }

    /// All pools.
    #[must_use]
    pub fn pools(&self) -> &[Arc<PoolRuntime>] {
        &self.pools
    }

    /// The pool of this name.
    #[must_use]
    pub fn pool(&self, name: &str) -> Option<&Arc<PoolRuntime>> {
        self.pools.iter().find(|runtime| *runtime.pool.name == *name)
    }

    /// The pool of a request whose headers `header` reads.
    ///
    /// # Errors
    /// That no pool takes the request, or its pool rejects the model.
    pub fn route<'h>(
        &self,
        facts: RouteFacts<'_>,
        header: impl Fn(&str) -> Option<&'h str>,
    ) -> Result<&Arc<PoolRuntime>, RequestError> {
        self.at(self.router.route(facts, header)?.0)
    }

    /// The pool of this name for a request for `model`.
    ///
    /// # Errors
    /// That there is no such pool, or it rejects the model.
    pub fn named(&self, name: &str, model: Option<&str>) -> Result<&Arc<PoolRuntime>, RequestError> {
        self.at(self.router.named(name, model)?.0)
    }

    /// Whether a rule about such a request depends on its model: the choice or a rule of a pool, or a limit of models.
    pub fn depends_on_model<'h>(&self, facts: RouteFacts<'_>, header: impl Fn(&str) -> Option<&'h str>) -> bool {
        self.quotas.iter().any(|quotas| quotas.limit_models()) || self.router.depends_on_model(facts, header)
    }

    fn at(&self, position: usize) -> Result<&Arc<PoolRuntime>, RequestError> {
        // Never fails: `new` builds the router from the same pools, in the same order.
        self.pools
            .get(position)
            .ok_or_else(|| RequestError::new(Reason::Internal, "the router selected a pool that does not exist"))
    }
}

/// Headers of destinations and strategies that some pools set and others do not, and that are not removed anyway.
fn unshared_headers(pools: &[Arc<PoolRuntime>]) -> Vec<Box<str>> {
    let names_of = |runtime: &PoolRuntime| -> BTreeSet<Box<str>> {
        runtime.pool.destination_names.all_headers().map(Box::from).collect()
    };
    let all: Vec<BTreeSet<Box<str>>> = pools.iter().map(|runtime| names_of(runtime)).collect();
    let union: BTreeSet<&Box<str>> = all.iter().flatten().collect();
    let lacks_one = |name: &str| all.iter().any(|names| !names.contains(name));
    union.into_iter().filter(|name| lacks_one(name) && !is_removed_from_all(name)).cloned().collect()
}
