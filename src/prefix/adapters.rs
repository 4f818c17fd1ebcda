//! Names of LoRA adapters that model servers report, by KV events and metrics.
//!
//! The name of an adapter is part of the block keys of its prompts, the name of a base model is not. So a name that
//! counts wrongly as an adapter's hides the blocks of all servers. Each server states facts about itself only: a name
//! is an adapter's while more servers use it so than have it as their base model. What a server no longer reports is
//! forgotten after [`LIFE`], and everything when it leaves or restarts.
//!
//! A server can add [`MAX_PER_SERVER`] names, and all servers of a pool together [`MAX_NAMES`].

use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Most adapter names of one server. A further name displaces the one that the server has not used for longest.
pub const MAX_PER_SERVER: usize = 1_024;
/// Most names of all servers of a pool. Further ones do not count.
pub const MAX_NAMES: usize = 8_192;
/// Longest name, bytes. Requests have shorter ones.
pub const MAX_NAME_BYTES: usize = 1_024;
/// A name that its server has not used for this time is forgotten.
pub const LIFE: Duration = Duration::from_secs(600);
/// A name is recorded again only after this time.
const REFRESH: Duration = Duration::from_secs(30);

/// Which names are LoRA adapters of a pool's servers.
#[derive(Debug, Default)]
pub struct Adapters {
    names: RwLock<Names>,
    /// Number of names, so that pools without adapters need no lock.
    len: AtomicUsize,
    dropped: AtomicU64,
    noticed: AtomicBool,
}

#[derive(Debug, Default)]
struct Names {
    servers: AHashMap<EndpointId, Server>,
    uses: AHashMap<Arc<str>, NameUses>,
}

/// Number of servers that use a name.
#[derive(Clone, Copy, Debug, Default)]
struct NameUses {
    adapter: usize,
    base: usize,
}

/// What one server reports.
#[derive(Debug, Default)]
struct Server {
    base: Option<Arc<str>>,
    /// Its adapters, with their last use.
    adapters: AHashMap<Arc<str>, (Timestamp, u64)>,
    by_age: BTreeMap<(Timestamp, u64), Arc<str>>,
    uses: u64,
}

impl Adapters {
    /// Records that a server uses an adapter of this name.
    pub fn used(&self, server: EndpointId, name: &str, now: Timestamp) {
        if name.len() > MAX_NAME_BYTES {
            return self.drop_name();
        }
        if !self.names.read().is_news(server, name, now) {
            return;
        }
        let mut names = self.names.write();
        if !names.used(server, name, now) {
            self.drop_name();
        }
        self.len.store(names.uses.len(), Relaxed);
    }

    /// Records the base model that a server reports, and forgets its adapters that it has not used for long.
    pub fn reported(&self, server: EndpointId, base: Option<&Arc<str>>, now: Timestamp) {
        let base = base.filter(|name| name.len() <= MAX_NAME_BYTES);
        if !self.names.read().is_stale(server, base, now) {
            return;
        }
        let mut names = self.names.write();
        names.set_base(server, base);
        names.expire(server, now);
        self.len.store(names.uses.len(), Relaxed);
    }

    /// Forgets everything that a server has reported.
    pub fn forget(&self, server: EndpointId) {
        let mut names = self.names.write();
        names.forget(server);
        self.len.store(names.uses.len(), Relaxed);
    }

    /// Forgets the servers that `there` rejects.
    pub fn retain(&self, there: impl Fn(EndpointId) -> bool) {
        let mut names = self.names.write();
        let gone: Vec<EndpointId> = names.servers.keys().copied().filter(|server| !there(*server)).collect();
        gone.into_iter().for_each(|server| names.forget(server));
        self.len.store(names.uses.len(), Relaxed);
    }

    /// Whether more servers use `name` as an adapter than as their base model.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.len.load(Relaxed) > 0 && self.names.read().uses.get(name).is_some_and(|uses| uses.adapter > uses.base)
    }

    /// Number of names of adapters and base models.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    /// Whether there is no name.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of names that did not count, or were displaced, since the limits were reached.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Whether a name was dropped for the first time. True once, for the log.
    #[must_use]
    pub fn is_first_drop(&self) -> bool {
        self.dropped() > 0 && !self.noticed.swap(true, Relaxed)
    }

    fn drop_name(&self) {
        self.dropped.fetch_add(1, Relaxed);
    }
}

impl Names {
    /// Whether a use changes anything.
    fn is_news(&self, server: EndpointId, name: &str, now: Timestamp) -> bool {
        let known = self.servers.get(&server).and_then(|server| server.adapters.get(name));
        known.is_none_or(|(at, _)| at.after(REFRESH) <= now)
    }

    /// Whether a server's base model is another one, or one of its adapters is to be forgotten.
    fn is_stale(&self, server: EndpointId, base: Option<&Arc<str>>, now: Timestamp) -> bool {
        match self.servers.get(&server) {
            None => base.is_some(),
            Some(server) => server.base.as_ref() != base || server.oldest().is_some_and(|at| at.after(LIFE) <= now),
        }
    }

    /// Records a use. False if a name was dropped.
    fn used(&mut self, id: EndpointId, name: &str, now: Timestamp) -> bool {
        let is_full = self.uses.len() >= MAX_NAMES;
        let server = self.servers.entry(id).or_default();
        if server.base.as_deref() == Some(name) {
            return true;
        }
        server.uses += 1;
        let (mut kept, use_now) = (true, (now, server.uses));
        let name = match server.adapters.get_key_value(name) {
            Some((known, before)) => {
                server.by_age.remove(before);
                known.clone()
            }
            None => {
                let known = self.uses.get_key_value(name).map(|(known, _)| known.clone());
                if known.is_none() && is_full {
                    return false;
                }
                if server.adapters.len() >= MAX_PER_SERVER
                    && let Some((_, oldest)) = server.by_age.pop_first()
                {
                    server.adapters.remove(&oldest);
                    release(&mut self.uses, &oldest, |uses| &mut uses.adapter);
                    kept = false;
                }
                let name = known.unwrap_or_else(|| name.into());
                self.uses.entry(name.clone()).or_default().adapter += 1;
                name
            }
        };
        server.adapters.insert(name.clone(), use_now);
        server.by_age.insert(use_now, name);
        kept
    }

    fn set_base(&mut self, id: EndpointId, base: Option<&Arc<str>>) {
        let server = self.servers.entry(id).or_default();
        if server.base.as_ref() == base {
            return;
        }
        if let Some(before) = std::mem::replace(&mut server.base, base.cloned()) {
            release(&mut self.uses, &before, |uses| &mut uses.base);
        }
        let Some(base) = base else { return };
        if let Some(used) = server.adapters.remove(base) {
            server.by_age.remove(&used);
            release(&mut self.uses, base, |uses| &mut uses.adapter);
        }
        self.uses.entry(base.clone()).or_default().base += 1;
    }

    fn expire(&mut self, id: EndpointId, now: Timestamp) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        while let Some(oldest) = server.by_age.first_entry().filter(|oldest| oldest.key().0.after(LIFE) <= now) {
            let name = oldest.remove();
            server.adapters.remove(&name);
            release(&mut self.uses, &name, |uses| &mut uses.adapter);
        }
    }

    fn forget(&mut self, id: EndpointId) {
        let Some(server) = self.servers.remove(&id) else { return };
        server.adapters.keys().for_each(|name| release(&mut self.uses, name, |uses| &mut uses.adapter));
        server.base.iter().for_each(|name| release(&mut self.uses, name, |uses| &mut uses.base));
    }
}

impl Server {
    fn oldest(&self) -> Option<Timestamp> {
        self.by_age.first_key_value().map(|(key, _)| key.0)
    }
}

/// Takes one use back, and forgets a name without uses.
fn release(uses: &mut AHashMap<Arc<str>, NameUses>, name: &Arc<str>, which: fn(&mut NameUses) -> &mut usize) {
    if let Some(of_name) = uses.get_mut(name) {
        let count = which(of_name);
        *count = count.saturating_sub(1);
        if of_name.adapter + of_name.base == 0 {
            uses.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: EndpointId = EndpointId(1);
    const TWO: EndpointId = EndpointId(2);
    const THREE: EndpointId = EndpointId(3);

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    fn base(adapters: &Adapters, server: EndpointId, name: &str) {
        adapters.reported(server, Some(&name.into()), at(0));
    }

    #[test]
    fn adapter_is_forgotten_when_its_server_has_not_used_it_for_long() {
        let adapters = Adapters::default();
        adapters.used(ONE, "sql", at(0));
        adapters.used(TWO, "sql", at(300));
        let expire = |seconds| [ONE, TWO].map(|server| adapters.reported(server, None, at(seconds)));
        expire(599);
        assert_eq!(adapters.names.read().uses.get("sql").map(|uses| uses.adapter), Some(2));
        expire(600);
        assert!(adapters.contains("sql"), "the other server has used it since");
        adapters.used(TWO, "sql", at(800));
        expire(1_399);
        assert!(adapters.contains("sql"));
        expire(1_400);
        assert!(!adapters.contains("sql") && adapters.is_empty());
    }

    #[test]
    fn base_model_of_a_server_is_its_own_adapter_never() {
        let adapters = Adapters::default();
        adapters.used(ONE, "llama", at(0));
        assert!(adapters.contains("llama"), "nothing contradicts it yet");
        base(&adapters, ONE, "llama");
        assert!(!adapters.contains("llama"));
        adapters.used(ONE, "llama", at(1));
        assert!(!adapters.contains("llama"));
        base(&adapters, ONE, "qwen");
        adapters.used(ONE, "llama", at(2));
        assert!(adapters.contains("llama"), "it is another server now");
    }

    #[test]
    fn claim_of_one_server_does_not_outvote_the_others_and_ends_with_it() {
        let adapters = Adapters::default();
        base(&adapters, ONE, "llama");
        base(&adapters, THREE, "other");
        adapters.used(TWO, "llama", at(0));
        assert!(!adapters.contains("llama"), "one against one: as the base model");
        adapters.used(THREE, "llama", at(0));
        assert!(adapters.contains("llama"), "most servers have it as an adapter");
        adapters.forget(THREE);
        assert!(!adapters.contains("llama"));
        // The reverse claim.
        adapters.used(ONE, "sql", at(0));
        adapters.used(TWO, "sql", at(0));
        base(&adapters, THREE, "sql");
        assert!(adapters.contains("sql"));
        adapters.retain(|server| server == ONE);
        assert_eq!((adapters.contains("sql"), adapters.len()), (true, 2));
    }

    #[test]
    fn names_of_one_server_and_of_all_are_bounded() {
        let adapters = Adapters::default();
        adapters.used(ONE, "sql", at(0));
        for i in 0..20_000 {
            adapters.used(TWO, &format!("adapter-{i}"), at(1));
        }
        assert_eq!((adapters.len(), adapters.dropped()), (MAX_PER_SERVER + 1, 20_000 - MAX_PER_SERVER as u64));
        assert!(adapters.contains("adapter-19999") && !adapters.contains("adapter-0"), "the oldest went");
        assert!(adapters.contains("sql"), "another server's name stays");
        assert!(adapters.is_first_drop() && !adapters.is_first_drop());
        for server in 10..30 {
            (0..MAX_PER_SERVER).for_each(|i| adapters.used(EndpointId(server), &format!("{server}-{i}"), at(1)));
        }
        assert_eq!(adapters.len(), MAX_NAMES);
        adapters.used(THREE, "sql", at(2));
        adapters.forget(ONE);
        assert!(adapters.contains("sql"), "a known name counts for a further server");
        adapters.retain(|server| server == THREE);
        assert_eq!(adapters.len(), 1);
        adapters.used(THREE, &"x".repeat(MAX_NAME_BYTES + 1), at(2));
        assert_eq!(adapters.len(), 1);
    }

    #[test]
    fn name_in_use_is_displaced_last() {
        let adapters = Adapters::default();
        adapters.used(ONE, "busy", at(0));
        for i in 0..3 * MAX_PER_SERVER as u64 {
            adapters.used(ONE, "busy", at(100 * i));
            adapters.used(ONE, &format!("adapter-{i}"), at(100 * i));
        }
        assert!(adapters.contains("busy"));
    }

    #[test]
    fn counts_equal_what_servers_report_after_any_history() {
        use proptest::prelude::*;
        let step = (0..4u8, 0..4u32, 0..4u8, 0..400u64);
        proptest!(ProptestConfig::with_cases(64), |(steps in proptest::collection::vec(step, 0..200))| {
            let (adapters, mut now) = (Adapters::default(), 0);
            for (what, server, name, pause) in steps {
                now += pause;
                let (server, name) = (EndpointId(server), format!("m{name}"));
                match what {
                    0 => adapters.used(server, &name, at(now)),
                    1 => adapters.reported(server, Some(&name.as_str().into()), at(now)),
                    2 => adapters.reported(server, None, at(now)),
                    _ => adapters.forget(server),
                }
                let names = adapters.names.read();
                for (name, uses) in &names.uses {
                    let adapter = names.servers.values().filter(|s| s.adapters.contains_key(name)).count();
                    let base = names.servers.values().filter(|s| s.base.as_ref() == Some(name)).count();
                    prop_assert_eq!((uses.adapter, uses.base), (adapter, base));
                }
                let reported = names.servers.values().flat_map(|s| s.adapters.keys().chain(&s.base));
                prop_assert!(reported.into_iter().all(|name| names.uses.contains_key(name)));
                prop_assert!(names.servers.values().all(|s| s.adapters.len() == s.by_age.len()));
            }
        });
    }
}
