//! Selects the pool of a request, and the model name that its servers use.

use super::scheduler::Scheduler;
use attache_pool::{Engine, ModelList, ModelStore, SnapshotStore};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use rand::RngExt;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

mod rules;
pub use rules::{MISSING_FOR, MissingTarget, PoolRules, RuleStore};

/// Conditions for a request to be served by a pool. All of them must hold; a pool without conditions serves the
/// requests that match no other pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolMatch {
    /// Names of models that the pool serves.
    pub models: Vec<String>,
    /// A header (lower-case name) and the value it must have.
    pub header: Option<(String, String)>,
    /// The `:authority` (host, port optional).
    pub authority: Option<String>,
    /// The Service that the gateway's ext_proc call must name, in lower case. It has as much of the name as makes it
    /// unique (`llama-epp.default`), and the port if pools share a Service (`llama-epp.default:9002`).
    pub service: Option<String>,
}

impl PoolMatch {
    /// Whether there is no condition.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// How far both pools match the same requests; `None` if their conditions differ.
    #[must_use]
    pub fn overlap(&self, other: &Self) -> Option<PoolOverlap> {
        let alike = self.models == other.models && self.header == other.header && self.authority == other.authority;
        match (alike, &self.service, &other.service) {
            (true, None, None) => Some(PoolOverlap::Whole),
            (true, Some(service), Some(other)) => {
                let ((service, port), (other, other_port)) = (with_port(service), with_port(other));
                let overlap = if port == other_port { PoolOverlap::Whole } else { PoolOverlap::WithoutPort };
                same_host(service, other).then_some(overlap)
            }
            _ => None,
        }
    }
}

/// Overlap of two pools; the first of them serves the requests in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolOverlap {
    /// All requests of one pool.
    Whole,
    /// Only requests of calls without a port of their Service.
    WithoutPort,
}

/// One target of a rewrite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewriteTarget {
    /// The model name that the servers use.
    pub model: Arc<str>,
    /// Share of the traffic, relative to the other targets.
    pub weight: u32,
}

/// Maps the model names that clients use to those that the pool's servers use. An exact name takes precedence over
/// the general rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelRewrites {
    /// Targets by the client's name.
    pub exact: BTreeMap<String, Vec<RewriteTarget>>,
    /// Targets of every other name.
    pub any: Vec<RewriteTarget>,
}

impl ModelRewrites {
    /// The server's name for `model`, drawn by weight, or evenly if all weights are 0; `None` if no rule applies.
    #[must_use]
    pub fn rewrite(&self, model: &str, rng: &mut PickRng) -> Option<Arc<str>> {
        draw(self.exact.get(model).unwrap_or(&self.any), rng)
    }
}

/// Draws a number only if there are targets, so that most requests draw none.
fn draw(targets: &[RewriteTarget], rng: &mut PickRng) -> Option<Arc<str>> {
    if targets.is_empty() {
        return None;
    }
    let total: u64 = targets.iter().map(|t| u64::from(t.weight)).sum();
    let target = if total == 0 {
        targets.get(rng.random_range(0..targets.len()))
    } else {
        let mut at = rng.random_range(0..total);
        targets.iter().find(|t| {
            let here = at < u64::from(t.weight);
            at = at.saturating_sub(u64::from(t.weight));
            here
        })
    };
    target.map(|t| t.model.clone())
}

/// How the picked endpoints are passed to the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Destination {
    /// One endpoint, for ORIGINAL_DST clusters and most gateways.
    #[default]
    Single,
    /// The endpoint and its fallbacks, comma-separated, for gateways that try them in order (Envoy's
    /// `override_host`).
    List,
}

/// Request header and dynamic metadata key of the destination in the endpoint picker protocol.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Namespace of that metadata key.
pub const DESTINATION_NAMESPACE: &str = "envoy.lb";

/// Under which names the gateway gets the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DestinationNames {
    /// Request headers, lower case. Never empty.
    pub headers: Vec<Box<str>>,
    /// Keys of dynamic metadata, each after its namespace.
    pub metadata: Vec<(Box<str>, Box<str>)>,
    /// Request header, lower case, that gets the name of the deciding strategy. AIBrix's gateway selects its route by
    /// this header.
    pub strategy_header: Option<Box<str>>,
}

impl Default for DestinationNames {
    fn default() -> Self {
        Self {
            headers: vec![DESTINATION.into()],
            metadata: vec![(DESTINATION_NAMESPACE.into(), DESTINATION.into())],
            strategy_header: None,
        }
    }
}

impl DestinationNames {
    /// Every request header that Attaché sets under these names.
    pub fn all_headers(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().chain(&self.strategy_header).map(|name| &**name)
    }
}

/// Settings of a pool that are on or off. In JSON: the keys of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSwitches {
    /// Reject models that neither `matches.models` nor a rewrite names.
    pub reject_unknown_models: bool,
    /// Reject requests that are predicted to miss their deadline.
    pub deadline_admission: bool,
}

/// The parts of a pool that serve requests.
#[derive(Debug)]
pub struct Pool {
    /// Name of the pool.
    pub name: Arc<str>,
    /// Conditions for requests.
    pub matches: PoolMatch,
    /// Endpoints of the pool.
    pub store: Arc<SnapshotStore>,
    /// Decides which endpoint serves a request.
    pub scheduler: Scheduler,
    /// Configured model names.
    pub rewrites: ModelRewrites,
    /// Rules of Kubernetes objects for the pool's models.
    pub rules: Arc<RuleStore>,
    /// Models that the servers report, if Attaché queries them.
    pub models: Arc<ModelStore>,
    /// Settings that are on or off.
    pub switches: PoolSwitches,
    /// Age at which metrics become stale.
    pub stale_after: Duration,
    /// How the picked endpoints are passed to the gateway.
    pub destination: Destination,
    /// The names under which the gateway gets them.
    pub destination_names: DestinationNames,
    /// How a split request's prompt is prefilled on another server; `None` splits none.
    pub disagg: Option<Arc<attache_disagg::Mode>>,
    /// Model of requests without one.
    pub default_model: Option<String>,
}

impl Pool {
    /// A pool without rules for models, deadlines and disaggregation.
    #[must_use]
    pub fn new(name: Arc<str>, store: Arc<SnapshotStore>, scheduler: Scheduler, stale_after: Duration) -> Self {
        Self {
            name,
            matches: PoolMatch::default(),
            store,
            scheduler,
            rewrites: ModelRewrites::default(),
            rules: Arc::default(),
            models: Arc::default(),
            switches: PoolSwitches::default(),
            stale_after,
            destination: Destination::default(),
            destination_names: DestinationNames::default(),
            disagg: None,
            default_model: None,
        }
    }

    fn knows(&self, model: &str) -> bool {
        self.matches.models.iter().any(|m| m == model)
            || self.rewrites.exact.contains_key(model)
            || self.rules.load().rewrites.exact.contains_key(model)
    }

    /// The server's name for `model`. An exact rule takes precedence over a general one, and the configuration's over
    /// one of an object. `None` if no rule applies.
    #[must_use]
    pub fn rewrite(&self, model: &str, rng: &mut PickRng) -> Option<Arc<str>> {
        let rules = self.rules.load();
        let exact = self.rewrites.exact.get(model).or_else(|| rules.rewrites.exact.get(model));
        let general = if self.rewrites.any.is_empty() { &rules.rewrites.any } else { &self.rewrites.any };
        draw(exact.unwrap_or(general), rng)
    }

    /// The models that clients may request: those that the servers report, and those that the configuration and
    /// Kubernetes objects name.
    fn listed(&self) -> ModelList {
        let (served, rules) = (self.models.load(), self.rules.load());
        let mut listed = ModelList::clone(&served);
        for model in self.matches.models.iter().filter(|model| served.get(model).is_none()) {
            listed.alias(model, [], &served);
        }
        // The configuration's rules come last, so they win for names that both define.
        for (name, targets) in rules.rewrites.exact.iter().chain(&self.rewrites.exact) {
            listed.alias(name, targets.iter().map(|t| &*t.model), &served);
        }
        listed
    }

    /// The model of requests without one: the configured default, else the only known model if this is the only pool.
    fn model_of_unnamed(&self, is_alone: bool) -> Option<String> {
        let only = || {
            let listed = self.listed();
            let mut ids = listed.ids();
            ids.next().filter(|_| ids.next().is_none()).map(str::to_owned)
        };
        self.default_model.clone().or_else(|| only().filter(|_| is_alone))
    }

    /// Whether all servers run an engine whose API needs no model.
    fn needs_no_model(&self) -> bool {
        let snapshot = self.store.load();
        !snapshot.endpoints.is_empty() && snapshot.endpoints.iter().all(|e| e.endpoint.spec.engine == Engine::Astrai)
    }

    /// Whether a rule of the pool depends on the model: which requests it takes, rejects or rewrites.
    fn depends_on_model(&self) -> bool {
        let (rules, none) = (self.rules.load(), ModelRewrites::default());
        !self.matches.models.is_empty()
            || self.switches.reject_unknown_models
            || rules.models_only
            || !rules.reserved.is_empty()
            || self.rewrites != none
            || rules.rewrites != none
    }

    /// Why the pool rejects requests for `model`, if it does.
    fn refuses(&self, model: &str) -> Option<ModelRejection> {
        let rules = self.rules.load();
        if rules.reserved.contains(model) && !self.rewrites.exact.contains_key(model) {
            return Some(ModelRejection::Reserved);
        }
        let known_only = self.switches.reject_unknown_models || rules.models_only;
        (known_only && !self.knows(model)).then_some(ModelRejection::Unknown)
    }
}

/// The model of a request that names none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DefaultModel {
    /// The model with this name.
    Named(String),
    /// No name is needed: the server has one model.
    Servers,
}

/// Why a pool rejects a model.
enum ModelRejection {
    /// No pool, rewrite or object names the model.
    Unknown,
    /// An object reserves the name, but no server serves it yet.
    Reserved,
}

/// Most pools that an error message lists.
const SHOWN_POOLS: usize = 20;

/// All pools of the process.
#[derive(Debug, Default)]
pub struct Router {
    pools: Vec<Arc<Pool>>,
}

/// The parts of a request that select its pool.
#[derive(Clone, Copy, Debug)]
pub struct RouteFacts<'a> {
    /// The model in the body, if it could be read.
    pub model: Option<&'a str>,
    /// The `:authority`.
    pub authority: &'a str,
    /// The `:authority` of the gateway's own ext_proc call.
    pub called: &'a str,
}

impl Router {
    /// A router over `pools`, in the order of the configuration.
    #[must_use]
    pub fn new(pools: Vec<Arc<Pool>>) -> Self {
        Self { pools }
    }

    /// All pools.
    #[must_use]
    pub fn pools(&self) -> &[Arc<Pool>] {
        &self.pools
    }

    /// Names of the headers in the pools' conditions.
    pub fn headers(&self) -> impl Iterator<Item = &str> {
        self.pools.iter().filter_map(|p| p.matches.header.as_ref().map(|(name, _)| name.as_str()))
    }

    /// The pool of a request and its position: the first one whose conditions all hold, else the first pool without
    /// conditions.
    ///
    /// Conditions on the called port take precedence over those on the Service, then header, authority and model. A
    /// request without a known model never meets a condition on the model.
    ///
    /// # Errors
    /// 404 `model_not_found` if only the model ruled out the pools, or the pool rejects unknown models; 404 `no_pool`
    /// otherwise.
    pub fn route<'h>(
        &self,
        facts: RouteFacts<'_>,
        header: impl Fn(&str) -> Option<&'h str>,
    ) -> Result<(usize, &Arc<Pool>), RequestError> {
        let mut best: Option<(u8, usize, &Arc<Pool>)> = None;
        let mut missed_model_only = false;
        for (position, pool) in self.pools.iter().enumerate() {
            let Some([by_port, by_service, by_header, by_authority]) = self.holds(pool, facts, &header) else {
                continue;
            };
            let by_model = !pool.matches.models.is_empty();
            if by_model && !facts.model.is_some_and(|model| pool.knows(model)) {
                missed_model_only = true;
                continue;
            }
            let conditions = [by_port, by_service, by_header, by_authority, by_model];
            let rank = conditions.into_iter().fold(0, |rank: u8, holds| 2 * rank + u8::from(holds));
            if best.is_none_or(|(r, _, _)| rank > r) {
                best = Some((rank, position, pool));
            }
        }
        match best {
            Some((_, position, pool)) => self.admitted(position, pool, facts.model),
            None if missed_model_only => Err(facts.model.map_or_else(
                || {
                    RequestError::new(
                        Reason::NoPool,
                        "every pool selects requests by model, and this request names none",
                    )
                    .param("model")
                },
                |model| self.unknown_model(model),
            )),
            None => Err(self.no_pool(facts.called)),
        }
    }

    /// Which conditions other than the model `pool` has: on the called port, the Service, a header, the authority.
    /// `None` if one of them does not hold.
    fn holds<'h>(
        &self,
        pool: &Pool,
        facts: RouteFacts<'_>,
        header: impl Fn(&str) -> Option<&'h str>,
    ) -> Option<[bool; 4]> {
        let m = &pool.matches;
        let header_holds = m.header.as_ref().map(|(name, value)| header(name) == Some(value.as_str()));
        let authority_holds = m.authority.as_ref().map(|a| same_authority(a, facts.authority));
        let by_service = m.service.as_ref().map(|service| match self.pools.as_slice() {
            // A gateway in Attaché's own pod calls a loopback address, not a Service; with one pool there is
            // nothing to select.
            [_] if is_loopback(facts.called) => Some(ByPort(false)),
            _ => same_service(service, facts.called),
        });
        let service_holds = by_service.map(|holds| holds.is_some());
        if [header_holds, authority_holds, service_holds].contains(&Some(false)) {
            return None;
        }
        let by_port = by_service.flatten() == Some(ByPort(true));
        Some([by_port, service_holds.is_some(), header_holds.is_some(), authority_holds.is_some()])
    }

    /// Whether the model decides about the pool of such a request, or about the request in its pool.
    pub fn depends_on_model<'h>(&self, facts: RouteFacts<'_>, header: impl Fn(&str) -> Option<&'h str>) -> bool {
        self.pools.iter().any(|pool| pool.depends_on_model() && self.holds(pool, facts, &header).is_some())
    }

    /// The model of a request that names none: the default of a pool that also serves requests for that model. `None`
    /// if there is no default.
    pub fn default_model<'h>(
        &self,
        facts: RouteFacts<'_>,
        header: impl Fn(&str) -> Option<&'h str>,
    ) -> Option<DefaultModel> {
        let is_alone = self.pools.len() == 1;
        for (position, pool) in self.pools.iter().enumerate() {
            let Some(model) = pool.model_of_unnamed(is_alone) else { continue };
            let facts = RouteFacts { model: Some(&model), ..facts };
            if self.route(facts, &header).is_ok_and(|(at, _)| at == position) {
                return Some(DefaultModel::Named(model));
            }
        }
        let (_, pool) = self.route(RouteFacts { model: None, ..facts }, &header).ok()?;
        pool.needs_no_model().then_some(DefaultModel::Servers)
    }

    /// The pool with this name and its position, regardless of its conditions.
    ///
    /// # Errors
    /// 404 `no_pool`, with the names of the pools; 404 `model_not_found` if the pool rejects unknown models.
    pub fn named(&self, name: &str, model: Option<&str>) -> Result<(usize, &Arc<Pool>), RequestError> {
        match self.pools.iter().enumerate().find(|(_, pool)| *pool.name == *name) {
            Some((position, pool)) => self.admitted(position, pool, model),
            None => {
                let message = format!("there is no pool `{}`; there are: {}", shown(name), self.names());
                Err(RequestError::new(Reason::NoPool, message))
            }
        }
    }

    /// Names of the pools for messages, at most [`SHOWN_POOLS`].
    #[must_use]
    pub fn names(&self) -> String {
        let names: Vec<String> = self.pools.iter().take(SHOWN_POOLS).map(|pool| format!("`{}`", pool.name)).collect();
        let more = if self.pools.len() > SHOWN_POOLS { ", …" } else { "" };
        if names.is_empty() { "none".to_owned() } else { names.join(", ") + more }
    }

    fn admitted<'p>(
        &self,
        position: usize,
        pool: &'p Arc<Pool>,
        model: Option<&str>,
    ) -> Result<(usize, &'p Arc<Pool>), RequestError> {
        match model.and_then(|model| Some((model, pool.refuses(model)?))) {
            Some((model, ModelRejection::Unknown)) => Err(self.unknown_model(model)),
            Some((model, ModelRejection::Reserved)) => Err(reserved_model(model)),
            None => Ok((position, pool)),
        }
    }

    /// The models that requests to this host, with these headers, may use: of each pool those for which it would be
    /// selected.
    pub fn models<'h>(&self, facts: RouteFacts<'_>, header: impl Fn(&str) -> Option<&'h str>) -> ModelList {
        let mut all = ModelList::default();
        for (position, pool) in self.pools.iter().enumerate() {
            let mut listed = pool.listed();
            listed.retain(|id| {
                let facts = RouteFacts { model: Some(id), ..facts };
                self.route(facts, &header).is_ok_and(|(at, _)| at == position)
            });
            all.merge(&listed);
        }
        all
    }

    fn no_pool(&self, called: &str) -> RequestError {
        let message = "no pool takes this host and these headers";
        let by_service = self.pools.iter().any(|pool| pool.matches.service.is_some());
        let called: String = called.chars().take(120).collect();
        // The operator needs this value to correct the configuration and cannot see it elsewhere.
        let message =
            if by_service { format!("{message}; the gateway calls the picker `{called}`") } else { message.to_owned() };
        RequestError::new(Reason::NoPool, message)
    }

    /// The error for an unknown model, with some known ones.
    #[must_use]
    pub fn unknown_model(&self, model: &str) -> RequestError {
        let rules: Vec<_> = self.pools.iter().map(|p| p.rules.load()).collect();
        let mut known: Vec<&str> = self
            .pools
            .iter()
            .flat_map(|p| p.matches.models.iter().chain(p.rewrites.exact.keys()))
            .chain(rules.iter().flat_map(|r| r.rewrites.exact.keys()))
            .map(String::as_str)
            .collect();
        known.sort_unstable();
        known.dedup();
        let more = if known.len() > 5 { ", …" } else { "" };
        known.truncate(5);
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") + more };
        let message = format!("the model `{}` does not exist; known models: {known}", shown(model));
        RequestError::new(Reason::ModelNotFound, message).param("model").rejecting(model)
    }
}

fn reserved_model(model: &str) -> RequestError {
    let message = format!("no valid target model is found for `{}`: the name is reserved", shown(model));
    RequestError::new(Reason::ModelNotFound, message).param("model").rejecting(model)
}

fn shown(model: &str) -> String {
    model.chars().filter(|c| !c.is_control()).take(64).collect()
}

fn same_authority(configured: &str, got: &str) -> bool {
    let without_port =
        got.rsplit_once(':').filter(|(_, p)| p.bytes().all(|b| b.is_ascii_digit())).map_or(got, |(h, _)| h);
    configured.eq_ignore_ascii_case(got) || configured.eq_ignore_ascii_case(without_port)
}

/// Whether a call names the configured port of the Service. False if one of the two has no port.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ByPort(bool);

/// Whether `called`, the authority of a call, names this Service; `None` if not. Either may omit trailing parts of
/// the name and the port: `epp`, `epp.default:9002`, `epp.default.svc.cluster.local`.
/// Istio uses its cluster names, `outbound|9002||epp.default.svc.cluster.local`, with `~` for characters that an
/// authority cannot have.
fn same_service(service: &str, called: &str) -> Option<ByPort> {
    let (service, wanted) = with_port(service);
    let (host, port) = match called.rsplit_once('~') {
        Some((cluster, host)) => (host, cluster.split('~').nth(1)),
        None => with_port(called),
    };
    let by_port = match (wanted, port) {
        (Some(wanted), Some(port)) if wanted != port => return None,
        (wanted, port) => ByPort(wanted.is_some() && port.is_some()),
    };
    (!host.is_empty() && same_host(service, host)).then_some(by_port)
}

/// Whether an authority is a loopback address: `localhost:9002`, `127.0.0.1`, `[::1]:9002`.
fn is_loopback(authority: &str) -> bool {
    let host = authority.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(host, _)| host);
    let host = host.unwrap_or_else(|| with_port(authority).0);
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Whether two names may be the same Service; either may omit trailing parts.
fn same_host(one: &str, other: &str) -> bool {
    one.split('.').zip(other.split('.')).all(|(a, b)| a.eq_ignore_ascii_case(b))
}

fn with_port(name: &str) -> (&str, Option<&str>) {
    name.split_once(':').map_or((name, None), |(host, port)| (host, Some(port)))
}

#[cfg(test)]
mod tests;
