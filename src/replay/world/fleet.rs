//! Endpoints of simulated servers, as discovery reports them.

use attache_pool::EndpointSpec;
use attache_pool::role::ROLE_LABEL;
use std::sync::Arc;

/// The endpoint of server number `i`, without further labels.
#[must_use]
pub fn spec(i: usize) -> EndpointSpec {
    let [_, a, b, c] = u32::try_from(i + 1).unwrap_or(u32::MAX).to_be_bytes();
    EndpointSpec { name: format!("server-{i}").into(), ..EndpointSpec::at(([10, a, b, c], 8000).into()) }
}

/// The endpoint with the value `role` of the role label; unchanged when `None`.
#[must_use]
pub fn with_role(mut spec: EndpointSpec, role: Option<&Arc<str>>) -> EndpointSpec {
    if let Some(role) = role {
        spec.labels.insert(ROLE_LABEL.into(), role.clone());
    }
    spec
}
