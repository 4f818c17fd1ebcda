//! Which strategy routes a request, and which endpoints it lets itself be sent to.
//!
//! The order is AIBrix's: a model's locked strategy, else the one that the request's header names, else that of the model's profile (named by the
//! request, found by its lengths, or the model's default), else the model's, else the pool's. Headers count only where the operator
//! configures them, or sets AIBrix's environment variables. Called by the decision; made anew with every configuration.

use super::plugin::{RequestFacts, Strategy};
use super::registry::{BuildError, Registry, canonical};
use super::selector::LabelSelector;
use super::weighted::{self, Part, Weighted};
use attache_pool::slo_profile::SloProfiles;
use attache_types::error::{Reason, RequestError};
use attache_types::ids::EndpointId;
use serde_json::Value;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The header that names a strategy.
pub const DEFAULT_STRATEGY_HEADER: &str = "routing-strategy";
/// The header that names a profile.
pub const DEFAULT_PROFILE_HEADER: &str = "config-profile";
/// The value of the profile's header that leaves the choice to the lengths of the request.
const AUTO: &str = "auto";
/// The default profile of a model that does not say which it is.
const DEFAULT_PROFILE: &str = "default";
/// 64 sums of strategies, as requests spell them, are kept. They hold no memory of their own, so that one that was forgotten is the same again.
const SUMS_KEPT: usize = 64;

/// A strategy as configurations name it.
#[derive(Clone, Debug, PartialEq)]
pub struct StrategySpec {
    /// A name of the registry, or several with weights.
    pub name: String,
    /// Its parameters; `null` for none.
    pub parameters: Value,
}

/// How requests for some models are routed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRule {
    /// The server's names for the models; none means all that no other rule names.
    pub models: Vec<String>,
    /// In place of the pool's.
    pub strategy: Option<StrategySpec>,
    /// Neither a header nor a profile outranks `strategy`.
    pub locked: bool,
    /// The profile of requests that name none; `default` when there is one of that name.
    pub default_profile: Option<String>,
    /// By what kind of request it is.
    pub profiles: Vec<ProfileSpec>,
}

/// A strategy for one kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileSpec {
    /// What requests call it.
    pub name: String,
    /// The strategy.
    pub strategy: StrategySpec,
    /// What makes a request be of the kind, when it asks for the profile `auto`.
    pub when: Conditions,
}

/// Bounds on the lengths of a request. A length that is not known meets no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// At least so many (estimated) tokens of prompt.
    pub prompt_tokens_gte: Option<u32>,
    /// Fewer than so many.
    pub prompt_tokens_lt: Option<u32>,
    /// The request allows an answer of at least so many tokens.
    pub max_tokens_gte: Option<u32>,
    /// Fewer than so many.
    pub max_tokens_lt: Option<u32>,
}

/// What requests may choose, by headers in lower case.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSpec {
    /// The header that names a strategy. It is not read when none is `allowed`.
    pub header: String,
    /// The header that names a profile.
    pub profile_header: String,
    /// The header that holds a label selector.
    pub filter_header: Option<String>,
    /// The strategies that requests may name, alone or with weights.
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

/// A strategy under the name by which it was chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    /// As configurations and headers spell it.
    pub name: Arc<str>,
    /// The strategy.
    pub strategy: Arc<dyn Strategy>,
}

/// What was chosen for a request.
#[derive(Clone, Debug)]
pub struct Chosen<'a> {
    /// The strategy.
    pub choice: Choice,
    /// The profile that named it.
    pub profile: Option<Arc<str>>,
    /// The endpoints that the request allows.
    pub filter: Option<LabelSelector<'a>>,
}

/// The strategies of a pool.
#[derive(Debug)]
pub struct Choices {
    /// For everything that no rule speaks of.
    pub default: Choice,
    by_model: BTreeMap<String, Arc<Rule>>,
    other_models: Option<Arc<Rule>>,
    by_request: Option<ByRequest>,
    built: Shelf,
    /// No request may name a strategy, and that one tried to is not reported so far.
    may_report: AtomicBool,
}

#[derive(Debug)]
struct Rule {
    strategy: Option<Choice>,
    locked: bool,
    /// The most specific first.
    profiles: Vec<Profile>,
    default_profile: Option<usize>,
}

#[derive(Debug)]
struct Profile {
    name: Arc<str>,
    choice: Choice,
    when: Conditions,
}

#[derive(Debug)]
struct ByRequest {
    header: String,
    profile_header: String,
    filter_header: Option<String>,
    allowed: BTreeMap<String, Choice>,
    registry: Registry,
    sums: quick_cache::sync::Cache<String, Choice>,
}

impl Choices {
    /// One strategy for everything.
    #[must_use]
    pub fn only(name: impl Into<Arc<str>>, strategy: Box<dyn Strategy>) -> Self {
        let default = Choice { name: name.into(), strategy: strategy.into() };
        let built = Shelf::default();
        let may_report = AtomicBool::new(true);
        Self { default, by_model: BTreeMap::new(), other_models: None, by_request: None, built, may_report }
    }

    /// Builds what a configuration says by the strategies of `registry`. Equal names with equal parameters become one strategy with one memory, that of `previous` where it
    /// had such a strategy: a reload forgets nothing.
    ///
    /// # Errors
    /// The first strategy that can't be built.
    pub fn build(
        registry: &Registry,
        default: &StrategySpec,
        rules: &[ModelRule],
        by_request: Option<&RequestSpec>,
        previous: Option<&Self>,
    ) -> Result<Self, BuildError> {
        let kept = previous.map(|p| p.built.all.clone()).unwrap_or_default();
        let mut shelf = Shelf { registry: registry.clone(), all: Vec::new(), kept };
        let default = shelf.choice(default)?;
        let (mut by_model, mut other_models) = (BTreeMap::new(), None);
        for spec in rules {
            let rule = Arc::new(Rule::build(spec, &mut shelf)?);
            if spec.models.is_empty() {
                other_models = Some(rule.clone());
            }
            by_model.extend(spec.models.iter().map(|model| (model.clone(), rule.clone())));
        }
        let by_request = by_request.map(|spec| ByRequest::build(spec, &mut shelf)).transpose()?;
        shelf.kept.clear();
        let may_report = AtomicBool::new(by_request.as_ref().is_none_or(|r| r.allowed.is_empty()));
        Ok(Self { default, by_model, other_models, by_request, built: shelf, may_report })
    }

    /// All strategies that requests can come to.
    pub fn all(&self) -> impl Iterator<Item = &Arc<dyn Strategy>> {
        let chosen = self.built.all.iter().map(|(_, choice)| &choice.strategy);
        // `only` builds none.
        std::iter::once(&self.default.strategy).chain(chosen)
    }

    /// Lets all strategies forget what the caches of the endpoints in `lost` held.
    pub fn forget(&self, lost: &[EndpointId]) {
        if !lost.is_empty() {
            self.all().for_each(|strategy| strategy.forget(lost));
        }
    }

    /// The SLO profiles that they read, which somebody has to publish.
    #[must_use]
    pub fn slo_profiles(&self) -> Vec<&Arc<SloProfiles>> {
        let mut read = Vec::new();
        self.all().for_each(|strategy| strategy.profiles(&mut |profiles| read.push(profiles)));
        read
    }

    /// What routes a request.
    ///
    /// # Errors
    /// 400 `invalid_routing_strategy` when a header names a strategy that is not allowed here, `invalid_endpoint_filter` when one holds no label
    /// selector.
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

    /// Whether to report that a request has [`DEFAULT_STRATEGY_HEADER`]: no request may name a strategy, and it is the first that does.
    #[must_use]
    pub fn report_ignored(&self) -> bool {
        self.may_report.load(Relaxed) && self.may_report.swap(false, Relaxed)
    }
}

/// The value of a header, when there is more in it than blanks.
fn header<'a>(facts: &RequestFacts<'a>, name: &str) -> Option<&'a str> {
    facts.headers.get(name).map(str::trim).filter(|value| !value.is_empty())
}

/// Strategies that were built, so that each is built once.
#[derive(Debug, Default)]
struct Shelf {
    registry: Registry,
    all: Vec<(StrategySpec, Choice)>,
    /// Those of the configuration before, while a new one is built.
    kept: Vec<(StrategySpec, Choice)>,
}

impl Shelf {
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

impl Rule {
    fn build(spec: &ModelRule, shelf: &mut Shelf) -> Result<Self, BuildError> {
        let strategy = spec.strategy.as_ref().map(|s| shelf.choice(s)).transpose()?;
        let mut specs: Vec<&ProfileSpec> = spec.profiles.iter().collect();
        specs.sort_by_key(|p| p.when.specificity());
        let mut profiles = Vec::with_capacity(specs.len());
        for p in specs {
            profiles.push(Profile { name: p.name.as_str().into(), choice: shelf.choice(&p.strategy)?, when: p.when });
        }
        let default = spec.default_profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        let default_profile = profiles.iter().position(|p| *p.name == *default);
        Ok(Self { strategy, locked: spec.locked, profiles, default_profile })
    }

    /// The profile for a request that asks for `wanted`: a name, `auto`, or nothing.
    fn profile(&self, wanted: Option<&str>, facts: &RequestFacts<'_>) -> Option<&Profile> {
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

    /// Whether they say anything and the request meets them all.
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

    /// Sorts the more specific first: more bounds, then the narrower ranges.
    fn specificity(self) -> (Reverse<usize>, u32, u32) {
        let width = |gte: Option<u32>, lt: Option<u32>| lt.unwrap_or(u32::MAX).saturating_sub(gte.unwrap_or(0));
        let bounds = self.all().iter().flatten().count();
        let prompt = width(self.prompt_tokens_gte, self.prompt_tokens_lt);
        (Reverse(bounds), prompt, width(self.max_tokens_gte, self.max_tokens_lt))
    }
}

impl ByRequest {
    fn build(spec: &RequestSpec, shelf: &mut Shelf) -> Result<Self, BuildError> {
        let mut allowed = BTreeMap::new();
        for strategy in &spec.allowed {
            allowed.insert(strategy.name.clone(), shelf.choice(strategy)?);
        }
        Ok(Self {
            header: spec.header.clone(),
            profile_header: spec.profile_header.clone(),
            filter_header: spec.filter_header.clone(),
            allowed,
            registry: shelf.registry.clone(),
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

    /// The strategy that a request calls `named`: one that is allowed, or a sum of such.
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
            found.push(Part { name: descriptor.name, weight: *weight, strategy: choice.strategy.clone() });
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
