//! Chooses the strategy of a request, and the endpoints that the request allows.
//!
//! The order of precedence is AIBrix's:
//! 1. the model's locked strategy
//! 2. the strategy that the request's header names
//! 3. the strategy of the model's profile: named by the request, selected by its lengths, or the model's default
//! 4. the model's strategy
//! 5. the pool's strategy
//!
//! Headers count only if the operator configures them or sets AIBrix's environment variables. Called by the decision;
//! rebuilt with every configuration.

use super::plugin::{RequestFacts, Strategy};
use super::registry::{BuildError, Registry, canonical};
use super::selector::LabelSelector;
use super::weighted::{self, Weighted, WeightedPart};
use attache_pool::slo_profile::SloProfiles;
use attache_types::error::{Reason, RequestError};
use attache_types::ids::EndpointId;
use serde_json::Value;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Default header with a strategy.
pub const DEFAULT_STRATEGY_HEADER: &str = "routing-strategy";
/// Default header with a profile.
pub const DEFAULT_PROFILE_HEADER: &str = "config-profile";
/// Value of the profile header that selects the profile by the lengths of the request.
const AUTO: &str = "auto";
/// Name of a model's default profile, if it does not set one.
const DEFAULT_PROFILE: &str = "default";
/// Number of cached sums of strategies that requests named. Sums have no state of their own, so an evicted one can be
/// rebuilt.
const SUMS_KEPT: usize = 64;

/// A strategy in a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategySpec {
    /// Name in the registry, or several names with weights.
    pub name: String,
    /// Parameters; `null` for none.
    pub parameters: Value,
}

/// Routing rule for some models.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRule {
    /// Server names of the models; empty for all models without a rule of their own.
    pub models: Vec<String>,
    /// Overrides the pool's strategy.
    pub strategy: Option<StrategySpec>,
    /// Whether headers and profiles cannot override `strategy`.
    pub locked: bool,
    /// RoutingProfile of requests that name none; by default the one called `default`, if it exists.
    pub default_profile: Option<String>,
    /// Strategies by kind of request.
    pub profiles: Vec<ProfileSpec>,
}

/// A strategy for one kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileSpec {
    /// Name of the profile in requests.
    pub name: String,
    /// The strategy.
    pub strategy: StrategySpec,
    /// Conditions under which the profile `auto` selects this one.
    pub when: Conditions,
}

/// Bounds on the lengths of a request. An unknown length meets no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Lower bound of the estimated prompt tokens, inclusive.
    pub prompt_tokens_gte: Option<u32>,
    /// Upper bound of the estimated prompt tokens, exclusive.
    pub prompt_tokens_lt: Option<u32>,
    /// Lower bound of the request's maximum response tokens, inclusive.
    pub max_tokens_gte: Option<u32>,
    /// Upper bound of the request's maximum response tokens, exclusive.
    pub max_tokens_lt: Option<u32>,
}

/// What requests may choose by headers. Header names are in lower case.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSpec {
    /// Header with a strategy. Ignored if `allowed` is empty.
    pub header: String,
    /// Header with a profile.
    pub profile_header: String,
    /// Header with a label selector.
    pub filter_header: Option<String>,
    /// Strategies that requests may name, alone or in a weighted sum.
    pub allowed: Vec<StrategySpec>,
}

impl Default for RequestSpec {
    fn default() -> Self {
        Self {
            header: DEFAULT_STRATEGY_HEADER.to_owned(),
            profile_header: DEFAULT_PROFILE_HEADER.to_owned(),
            filter_header: None,
            allowed: Vec::new(),
        }
    }
}

/// A strategy with its configured name.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Name as configurations and headers spell it.
    pub name: Arc<str>,
    /// The strategy.
    pub strategy: Arc<dyn Strategy>,
}

/// Strategy and restrictions of one request.
#[derive(Clone, Debug)]
pub struct Chosen<'a> {
    /// The strategy.
    pub choice: Choice,
    /// Name of the profile that the strategy comes from.
    pub profile: Option<Arc<str>>,
    /// Label selector of the request.
    pub filter: Option<LabelSelector<'a>>,
}

/// All strategies of a pool and the rules to choose one.
#[derive(Debug)]
pub struct Choices {
    /// Strategy of requests without a rule.
    pub default: Choice,
    by_model: BTreeMap<String, Arc<BuiltRule>>,
    other_models: Option<Arc<BuiltRule>>,
    by_request: Option<RequestChoices>,
    built: StrategyCache,
    /// Whether to report the first ignored strategy header. True if no request may name a strategy and none was
    /// reported yet.
    may_report: AtomicBool,
}

#[derive(Debug)]
struct BuiltRule {
    strategy: Option<Choice>,
    locked: bool,
    /// Most specific first.
    profiles: Vec<RoutingProfile>,
    default_profile: Option<usize>,
}

#[derive(Debug)]
struct RoutingProfile {
    name: Arc<str>,
    choice: Choice,
    when: Conditions,
}

#[derive(Debug)]
struct RequestChoices {
    header: String,
    profile_header: String,
    filter_header: Option<String>,
    allowed: BTreeMap<String, Choice>,
    registry: Registry,
    sums: quick_cache::sync::Cache<String, Choice>,
}

impl Choices {
    /// Choices with a single strategy.
    #[must_use]
    pub fn only(name: impl Into<Arc<str>>, strategy: Box<dyn Strategy>) -> Self {
        let default = Choice { name: name.into(), strategy: strategy.into() };
        let built = StrategyCache::default();
        let may_report = AtomicBool::new(true);
        Self { default, by_model: BTreeMap::new(), other_models: None, by_request: None, built, may_report }
    }

    /// Builds the strategies of a configuration from `registry`. Equal names with equal parameters share one strategy
    /// and its state. It is taken over from `previous` if that has it, so a reload keeps the state.
    ///
    /// # Errors
    /// The first strategy that cannot be built.
    pub fn build(
        registry: &Registry,
        default: &StrategySpec,
        rules: &[ModelRule],
        by_request: Option<&RequestSpec>,
        previous: Option<&Self>,
    ) -> Result<Self, BuildError> {
        let kept = previous.map(|p| p.built.all.clone()).unwrap_or_default();
        let mut cache = StrategyCache { registry: registry.clone(), all: Vec::new(), kept };
        let default = cache.choice(default)?;
        let (mut by_model, mut other_models) = (BTreeMap::new(), None);
        for spec in rules {
            let rule = Arc::new(BuiltRule::build(spec, &mut cache)?);
            if spec.models.is_empty() {
                other_models = Some(rule.clone());
            }
            by_model.extend(spec.models.iter().map(|model| (model.clone(), rule.clone())));
        }
        let by_request = by_request.map(|spec| RequestChoices::build(spec, &mut cache)).transpose()?;
        cache.kept.clear();
        let may_report = AtomicBool::new(by_request.as_ref().is_none_or(|r| r.allowed.is_empty()));
        Ok(Self { default, by_model, other_models, by_request, built: cache, may_report })
    }

    /// All strategies that requests can use.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Strategy>> {
        let chosen = self.built.all.iter().map(|(_, choice)| &choice.strategy);
        // `only` adds none to `built`.
        std::iter::once(&self.default.strategy).chain(chosen)
    }

    /// The strategies with this configured name. They differ in their parameters.
    pub fn named<'c>(&'c self, name: &'c str) -> impl Iterator<Item = &'c Arc<dyn Strategy>> {
        let is_default = *self.default.name == *name && self.built.all.is_empty();
        let chosen = self.built.all.iter().map(|(_, choice)| choice).filter(move |choice| *choice.name == *name);
        is_default.then_some(&self.default).into_iter().chain(chosen).map(|choice| &choice.strategy)
    }

    /// Drops all strategies' records of the caches of the endpoints in `lost`.
    pub fn forget(&self, lost: &[EndpointId]) {
        if !lost.is_empty() {
            self.all().for_each(|strategy| strategy.forget(lost));
        }
    }

    /// Has all strategies drop what they recorded of the session `id` of `tenant`.
    pub fn end_session(&self, tenant: Option<&str>, id: &str) {
        self.all().for_each(|strategy| strategy.end_session(tenant, id));
    }

    /// SLO profile stores of the strategies; the caller fills them.
    #[must_use]
    pub fn slo_profiles(&self) -> Vec<&Arc<SloProfiles>> {
        let mut read = Vec::new();
        self.all().for_each(|strategy| strategy.profiles(&mut |profiles| read.push(profiles)));
        read
    }

    /// The header with a label selector of the request, if requests may have one.
    #[must_use]
    pub fn filter_header(&self) -> Option<&str> {
        self.by_request.as_ref()?.filter_header.as_deref()
    }

    /// Chooses the strategy of a request.
    ///
    /// # Errors
    /// 400 `invalid_routing_strategy` if a header names a strategy that is not allowed; 400 `invalid_endpoint_filter`
    /// if a header has an invalid label selector.
    pub fn choose<'a>(&self, facts: &RequestFacts<'a>) -> Result<Chosen<'a>, RequestError> {
        let rule = self.by_model.get(facts.model).or(self.other_models.as_ref());
        let filter = self.by_request.as_ref().map(|r| r.filter(facts)).transpose()?.flatten();
        let chosen = |choice: &Choice, profile| Ok(Chosen { choice: choice.clone(), profile, filter });
        let of_rule = rule.and_then(|r| r.strategy.as_ref());
        if let Some(locked) = of_rule.filter(|_| rule.is_some_and(|r| r.locked)) {
            return chosen(locked, None);
        }
        if let Some(by_request) = &self.by_request
            && !by_request.allowed.is_empty()
            && let Some(named) = facts.headers.get(&by_request.header).map(str::trim)
        {
            let choice = by_request.named(named).map_err(|refusal| refusal.rejecting(named))?;
            return chosen(&choice, None);
        }
        let wanted = self.by_request.as_ref().and_then(|r| header(facts, &r.profile_header));
        match rule.and_then(|r| r.profile(wanted, facts)) {
            Some(profile) => chosen(&profile.choice, Some(profile.name.clone())),
            None => chosen(of_rule.unwrap_or(&self.default), None),
        }
    }

    /// Whether to report that a request has [`DEFAULT_STRATEGY_HEADER`] although no request may name a strategy. True
    /// once.
    #[must_use]
    pub fn report_ignored(&self) -> bool {
        self.may_report.load(Relaxed) && self.may_report.swap(false, Relaxed)
    }
}

/// Trimmed value of a header; `None` if it is blank.
fn header<'a>(facts: &RequestFacts<'a>, name: &str) -> Option<&'a str> {
    facts.headers.get(name).map(str::trim).filter(|value| !value.is_empty())
}

/// Strategies that were built, so that each is built once.
#[derive(Debug, Default)]
struct StrategyCache {
    registry: Registry,
    all: Vec<(StrategySpec, Choice)>,
    /// Strategies of the previous configuration, while a new one is built.
    kept: Vec<(StrategySpec, Choice)>,
}

impl StrategyCache {
    fn choice(&mut self, spec: &StrategySpec) -> Result<Choice, BuildError> {
        if let Some((_, choice)) = self.all.iter().find(|(known, _)| known == spec) {
            return Ok(choice.clone());
        }
        let choice = match self.kept.iter().find(|(known, _)| known == spec) {
            Some((_, kept)) => kept.clone(),
            None => {
                let strategy = self.registry.build(&spec.name, &spec.parameters)?.into();
                Choice { name: spec.name.as_str().into(), strategy }
            }
        };
        self.all.push((spec.clone(), choice.clone()));
        Ok(choice)
    }
}

impl BuiltRule {
    fn build(spec: &ModelRule, cache: &mut StrategyCache) -> Result<Self, BuildError> {
        let strategy = spec.strategy.as_ref().map(|s| cache.choice(s)).transpose()?;
        let mut specs: Vec<&ProfileSpec> = spec.profiles.iter().collect();
        specs.sort_by_key(|p| p.when.specificity());
        let mut profiles = Vec::with_capacity(specs.len());
        for p in specs {
            profiles.push(RoutingProfile {
                name: p.name.as_str().into(),
                choice: cache.choice(&p.strategy)?,
                when: p.when,
            });
        }
        let default = spec.default_profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        let default_profile = profiles.iter().position(|p| *p.name == *default);
        Ok(Self { strategy, locked: spec.locked, profiles, default_profile })
    }

    /// The profile for a request with the profile header `wanted`: a name, `auto`, or none.
    fn profile(&self, wanted: Option<&str>, facts: &RequestFacts<'_>) -> Option<&RoutingProfile> {
        let named = wanted.and_then(|wanted| {
            if wanted.eq_ignore_ascii_case(AUTO) {
                self.profiles.iter().find(|p| p.when.hold(facts))
            } else {
                self.profiles.iter().find(|p| &*p.name == wanted)
            }
        });
        named.or_else(|| self.profiles.get(self.default_profile?))
    }
}

impl Conditions {
    fn all(self) -> [Option<u32>; 4] {
        [self.prompt_tokens_gte, self.prompt_tokens_lt, self.max_tokens_gte, self.max_tokens_lt]
    }

    /// Whether there is a condition and the request meets all of them.
    fn hold(self, facts: &RequestFacts<'_>) -> bool {
        let met = |gte: Option<u32>, lt: Option<u32>, got: Option<u32>| {
            let inside = |got| gte.is_none_or(|least| got >= least) && lt.is_none_or(|bound| got < bound);
            (gte.is_none() && lt.is_none()) || got.is_some_and(inside)
        };
        let prompt = Some(facts.prompt_tokens).filter(|tokens| *tokens > 0);
        self.all().iter().any(Option::is_some)
            && met(self.prompt_tokens_gte, self.prompt_tokens_lt, prompt)
            && met(self.max_tokens_gte, self.max_tokens_lt, facts.max_tokens)
    }

    /// Sort key, most specific first: more bounds, then narrower ranges.
    fn specificity(self) -> (Reverse<usize>, u32, u32) {
        let width = |gte: Option<u32>, lt: Option<u32>| lt.unwrap_or(u32::MAX).saturating_sub(gte.unwrap_or(0));
        let bounds = self.all().iter().flatten().count();
        let prompt = width(self.prompt_tokens_gte, self.prompt_tokens_lt);
        (Reverse(bounds), prompt, width(self.max_tokens_gte, self.max_tokens_lt))
    }
}

impl RequestChoices {
    fn build(spec: &RequestSpec, cache: &mut StrategyCache) -> Result<Self, BuildError> {
        let mut allowed = BTreeMap::new();
        for strategy in &spec.allowed {
            allowed.insert(strategy.name.clone(), cache.choice(strategy)?);
        }
        Ok(Self {
            header: spec.header.clone(),
            profile_header: spec.profile_header.clone(),
            filter_header: spec.filter_header.clone(),
            allowed,
            registry: cache.registry.clone(),
            sums: quick_cache::sync::Cache::new(SUMS_KEPT),
        })
    }

    fn filter<'a>(&self, facts: &RequestFacts<'a>) -> Result<Option<LabelSelector<'a>>, RequestError> {
        let Some(name) = &self.filter_header else { return Ok(None) };
        let Some(text) = header(facts, name) else { return Ok(None) };
        let selector = LabelSelector::parse(text);
        let wrong = |e| RequestError::new(Reason::InvalidEndpointFilter, format!("`{name}` is no label selector: {e}"));
        selector.map(Some).map_err(wrong)
    }

    /// The allowed strategy with this name, or a weighted sum of allowed ones.
    fn named(&self, named: &str) -> Result<Cow<'_, Choice>, RequestError> {
        if let Some(choice) = self.allowed.get(canonical(named)) {
            return Ok(Cow::Borrowed(choice));
        }
        if !weighted::is_weighted(named) {
            return Err(self.refusal(named, ""));
        }
        if let Some(choice) = self.sums.get(named) {
            return Ok(Cow::Owned(choice));
        }
        let choice = self.sum(named)?;
        self.sums.insert(named.to_owned(), choice.clone());
        Ok(Cow::Owned(choice))
    }

    fn sum(&self, named: &str) -> Result<Choice, RequestError> {
        let parts = weighted::parse(named).map_err(|e| self.refusal(named, &e.to_string()))?;
        let mut found = Vec::with_capacity(parts.len());
        for (name, weight) in &parts {
            let part = self.allowed.get(*name).zip(self.registry.strategy(name));
            let (choice, descriptor) = part.ok_or_else(|| self.refusal(name, ""))?;
            if parts.len() == 1 {
                return Ok(choice.clone());
            }
            found.push(WeightedPart { name: descriptor.name, weight: *weight, strategy: choice.strategy.clone() });
        }
        let sum = Weighted::of(found).map_err(|e| self.refusal(named, &e.to_string()))?;
        Ok(Choice { name: named.into(), strategy: Arc::new(sum) })
    }

    fn refusal(&self, named: &str, why: &str) -> RequestError {
        let shown: String = named.chars().filter(|c| !c.is_control()).take(64).collect();
        let allowed: Vec<&str> = self.allowed.keys().map(String::as_str).collect();
        let colon = if why.is_empty() { "" } else { ": " };
        let message = format!(
            "`{}` asks for the strategy `{shown}`, which can't be had{colon}{why}; allowed here: {}",
            self.header,
            allowed.join(", ")
        );
        RequestError::new(Reason::InvalidRoutingStrategy, message)
    }
}

#[cfg(test)]
mod tests;
