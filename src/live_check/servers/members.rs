//! The model servers to look at.

use crate::picker::{EndpointsPage, PoolPage};
use attache_config::Settings;
use attache_config::settings::PoolSettings;
use attache_pool::{EndpointSpec, MetricsSource, Roles};
use std::net::SocketAddr;

/// One model server of a pool.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) spec: EndpointSpec,
    pub(super) roles: Roles,
    /// How findings name it.
    pub(super) subject: String,
}

impl Member {
    fn new(spec: EndpointSpec, pool: &str) -> Self {
        let subject = crate::picker::endpoint_subject(&spec.address.to_string(), pool);
        Self { roles: Roles::of_labels(&spec.labels), subject, spec }
    }
}

/// The pools with their servers: those of the picker's page, or else those that the configuration lists.
pub(super) fn of<'s>(settings: &'s Settings, page: Option<&EndpointsPage>) -> Vec<(&'s PoolSettings, Vec<Member>)> {
    let Some(page) = page else {
        let listed = |pool: &PoolSettings| {
            pool.endpoints.iter().map(|spec| Member::new(spec.clone(), &pool.name)).collect::<Vec<_>>()
        };
        return settings.pools.iter().map(|pool| (pool, listed(pool))).collect();
    };
    let known = page.pools.iter().filter_map(|of_page| {
        let named = settings.pools.iter().find(|pool| *pool.name == *of_page.name);
        // A pool that was found in the cluster has the settings of its template.
        let pool = named.or_else(|| settings.templates.first().map(|template| &template.pool))?;
        Some((pool, members(pool, of_page)))
    });
    known.collect()
}

fn members(pool: &PoolSettings, page: &PoolPage) -> Vec<Member> {
    let found = page.endpoints.iter().filter_map(|endpoint| {
        let address: SocketAddr = endpoint.address.parse().ok()?;
        let listed = pool.endpoints.iter().find(|spec| spec.address == address);
        let spec = EndpointSpec {
            name: endpoint.name.as_str().into(),
            labels: endpoint.labels.clone(),
            engine: endpoint.engine,
            metrics: listed.map_or_else(|| metrics_of(pool), |spec| spec.metrics.clone()),
            ..EndpointSpec::at(address)
        };
        Some(Member::new(spec, &page.name))
    });
    found.collect()
}

/// Where discovered servers have their metrics.
fn metrics_of(pool: &PoolSettings) -> MetricsSource {
    let kubernetes = pool.kubernetes.as_ref().map(|source| &source.metrics);
    let file = pool.file.as_ref().map(|source| &source.metrics);
    let dns = pool.dns.first().map(|source| &source.metrics);
    kubernetes.or(file).or(dns).cloned().unwrap_or_default()
}
