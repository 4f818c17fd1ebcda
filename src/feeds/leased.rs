//! The name of the lease of leader election.

use attache_config::Settings;
use attache_config::settings::{PodsOf, PoolSearch};
use sha2::{Digest, Sha256};

/// What a lease is named after, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Name of the InferencePool or of the pool; for pools that are found, a hash of their search.
    pub of: String,
    /// Namespace of the lease; `None` as in [`attache_config::settings::KubernetesSource`].
    pub namespace: Option<String>,
}

/// What these settings name the lease after: the first pool whose endpoints are pods, else the first search for
/// InferencePools. `None` without either.
#[must_use]
pub fn leased(settings: &Settings) -> Option<Leased> {
    let pods = settings.pools.iter().find_map(|pool| {
        let source = pool.kubernetes.as_ref()?;
        let name = if let PodsOf::Pool { name, .. } = &source.pods { name } else { &*pool.name };
        Some(Leased { of: name.to_owned(), namespace: source.namespace.clone() })
    });
    let searched = || {
        let search = &settings.templates.first()?.search;
        Some(Leased { of: search_id(search), namespace: search.namespace.clone() })
    };
    pods.or_else(searched)
}

/// Stands for the pool's name if pools are found by a search: a hash that differs between the searches of a namespace.
fn search_id(search: &PoolSearch) -> String {
    let meant = [search.group.as_str(), &search.selector].join("\n");
    Sha256::digest(meant).iter().take(6).fold("search-".to_owned(), |id, byte| format!("{id}{byte:02x}"))
}
