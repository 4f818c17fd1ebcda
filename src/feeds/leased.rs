//! The object that the lease of leader election is named after.

use attache_config::Settings;
use attache_config::settings::{PodsOf, PoolSearch};
use sha2::{Digest, Sha256};

/// What the lease is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    pub of: String,
    pub namespace: Option<String>,
}

/// What the lease is of by these settings, where there is one: the first pool of pods, else the first search.
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

/// What a lease says in place of a pool's name where pools are searched for: something that no other
/// search of the namespace has.
fn search_id(search: &PoolSearch) -> String {
    let meant = [search.group.as_str(), &search.selector].join("\n");
    Sha256::digest(meant).iter().take(6).fold("search-".to_owned(), |id, byte| format!("{id}{byte:02x}"))
}
