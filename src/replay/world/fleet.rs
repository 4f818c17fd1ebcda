//! What discovery says of simulated servers.

use attache_pool::EndpointSpec;
use attache_pool::role::ROLE_LABEL;
use std::sync::Arc;

/// What discovery says of server number `i` when nobody has said more.
#[must_use]
pub fn spec(i: usize) -> EndpointSpec {
    let [_, a, b, c] = u32::try_from(i + 1).unwrap_or(u32::MAX).to_be_bytes();
    EndpointSpec { name: format!("server-{i}").into(), ..EndpointSpec::at(([10, a, b, c], 8000).into()) }
}

/// The same server, there for `role`, when there is a word for that.
#[must_use]
pub fn with_role(mut spec: EndpointSpec, role: Option<&Arc<str>>) -> EndpointSpec {
    if let Some(role) = role {
        spec.labels.insert(ROLE_LABEL.into(), role.clone());
    }
    spec
}
