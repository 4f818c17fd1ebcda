//! The checks of strategies, for the pool, a model, a profile or a request.

use super::disaggregation::Pairs;
use super::prefix::AibrixForm;
use crate::Overrides;
use crate::aibrix_env::AibrixDefaults;
use crate::defaults::DEFAULT_STRATEGY;
use crate::schema::{self, Opt};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span, closest};
use attache_pool::EndpointSpec;
use attache_scheduling::choice::{
    Conditions, DEFAULT_STRATEGY_HEADER, ModelRule, ProfileSpec, RequestSpec, StrategySpec,
};
use attache_scheduling::registry::{BuildError, Registry, STATIC_HASH, canonical, is_spelling};
use attache_scheduling::weighted;
use serde_json::Value;
use std::collections::HashMap;

/// The entry of `allow` by which requests may select every strategy.
const ANY: &str = "*";
/// AIBrix's header for a label selector.
const AIBRIX_FILTER_HEADER: &str = "external-filter";

/// Whether AIBrix's environment names the strategy of a pool, given the name in the file.
pub(super) fn is_of_env(is_in_file: bool, flags: &Overrides, env: &AibrixDefaults) -> bool {
    !is_in_file && flags.strategy.is_none() && env.strategy.is_some() && !env.is_others
}

/// How far the pool of `strategy` routes as in AIBrix; `of_env`: its environment names the strategy.
pub(super) fn aibrix_form(of_env: bool, strategy: &StrategySpec, env: &AibrixDefaults) -> AibrixForm {
    let is_compat = strategy.parameters.get("compat").is_some_and(|value| value == true);
    let is_exact = env.is_exact || strategy.name == "prefix-cache" && is_compat;
    AibrixForm { is_aibrix: of_env || is_exact, is_exact }
}

/// The name of a pool's strategy: from the flag, the file, the environment, or the default.
pub(super) fn name_of<'a>(
    file: Option<&'a schema::Strategy>,
    flags: &'a Overrides,
    env: &'a AibrixDefaults,
) -> &'a str {
    let flag = flags.strategy.as_deref();
    let name = flag.or(file.map(|s| s.name.value.as_str())).or(env.strategy.as_deref());
    canonical(name.unwrap_or(DEFAULT_STRATEGY))
}

/// The pool's strategy: from the flag, the file, the environment, or the default.
pub(super) fn of_pool(
    file: Option<&At<schema::Strategy>>,
    path: &str,
    registry: &Registry,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> StrategySpec {
    let place = format!("{path}.strategy");
    if let Some(hidden) = env.strategy.as_ref().filter(|_| !env.is_implied && !is_of_env(file.is_some(), flags, env)) {
        let (variable, shown) = (env.strategy_variable, hidden.chars().take(60).collect::<String>());
        let other = name_of(file.map(|at| &at.value), flags, env);
        if other != canonical(hidden) {
            let what = if flags.strategy.is_some() { "`--strategy`" } else { "the file" };
            let message = format!("`{variable}` has no effect on `{path}`: {what} says `{other}`, not `{shown}`");
            sink.push(Diagnostic::new(Code::Overridden, variable, message));
        }
    }
    let (name, span, parameters, place) = match (&flags.strategy, file.map(|at| &at.value)) {
        // Parameters belong to the strategy in the file; if a flag names another, they are dropped.
        (Some(flag), Some(s)) if *flag == s.name.value => (flag.as_str(), s.name.span, s.parameters.as_ref(), place),
        (Some(flag), _) => (flag.as_str(), Span::default(), None, "--strategy".to_owned()),
        (None, Some(s)) => (s.name.value.as_str(), s.name.span, s.parameters.as_ref(), place),
        (None, None) => {
            let name = env.strategy.as_deref();
            (name.unwrap_or(DEFAULT_STRATEGY), Span::default(), None, env.strategy_variable.to_owned())
        }
    };
    checked(name, span, parameters, &place, registry, env, sink)
}

/// A strategy that can be built; errors are reported to `sink`.
fn checked(
    name: &str,
    span: Span,
    parameters: Option<&schema::Parameters>,
    path: &str,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> StrategySpec {
    let given = parameters.map_or(Value::Null, |given| given.value.clone());
    if is_spelling(name, STATIC_HASH) {
        let message = "`static_hash` is `consistent-hash` here: requests with one body stay together until their \
                       endpoint is full";
        let help = "write `consistent-hash`, or `chwbl` for the bound that keeps more of the prompts at home";
        sink.push(Diagnostic::new(Code::NoEffect, path, message).at(span).help(help));
    }
    let name = canonical(name);
    let spec = StrategySpec { name: name.to_owned(), parameters: env.parameters(name, given) };
    match registry.build(name, &spec.parameters) {
        Ok(_) => {
            if let Some(given) = parameters.filter(|given| given.is_written()) {
                for error in registry.inert(name, &given.value, &spec.parameters) {
                    sink.push(given.without_effect(name, &error, path));
                }
            }
        }
        Err(BuildError::Unknown(unknown)) => {
            let names = || registry.strategies().iter().map(|d| d.name);
            let shown: String = unknown.chars().take(60).collect();
            let known = names().collect::<Vec<_>>().join(", ");
            let message = format!("no strategy is called `{shown}`; there are: {known}");
            let mut diagnostic = Diagnostic::new(Code::UnknownStrategy, path, message).at(span);
            if let Some(meant) = closest(&unknown, names()) {
                diagnostic = diagnostic.help(format!("did you mean `{meant}`?"));
            }
            sink.push(diagnostic);
        }
        Err(BuildError::Parameters(e)) if parameters.is_none() && weighted::is_weighted(name) => {
            let message = format!("`{}` is no sum of strategies: {e}", name.chars().take(60).collect::<String>());
            sink.push(Diagnostic::new(Code::BadParameters, path, message).at(span));
        }
        Err(BuildError::Parameters(e)) => {
            let message = format!("strategy `{name}` does not take these parameters: {e}");
            let (below, place) = parameters.map_or((String::new(), span), |given| given.culprit(&e));
            sink.push(Diagnostic::new(Code::BadParameters, format!("{path}.parameters{below}"), message).at(place));
        }
    }
    spec
}

fn named(
    file: &schema::Strategy,
    path: &str,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> StrategySpec {
    checked(&file.name.value, file.name.span, file.parameters.as_ref(), path, registry, env, sink)
}

/// Reads the rules for single models.
pub(super) fn rules(
    file: &[At<schema::StrategyRule>],
    path: &str,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Vec<ModelRule> {
    let mut seen: HashMap<String, Span> = HashMap::new();
    let mut rules = Vec::with_capacity(file.len());
    for (i, At { value: rule, span }) in file.iter().enumerate() {
        let path = format!("{path}.strategies[{i}]");
        check_models(rule, *span, &path, &mut seen, sink);
        rules.push(self::rule(rule, *span, &path, registry, env, sink));
    }
    rules
}

/// Checks that each model has one rule, and that at most one rule is for all others.
fn check_models(
    rule: &schema::StrategyRule,
    span: Span,
    path: &str,
    seen: &mut HashMap<String, Span>,
    sink: &mut Sink,
) {
    let models = rule.models.as_ref().map(|at| at.value.as_slice()).unwrap_or_default();
    let all = At { value: String::new(), span };
    for model in if models.is_empty() { std::slice::from_ref(&all) } else { models } {
        if let Some(first) = seen.insert(model.value.clone(), model.span) {
            let message = if model.value.is_empty() {
                "two rules speak of all other models: neither has `models`".to_owned()
            } else {
                format!("two rules speak of the model `{}`", model.value)
            };
            let diagnostic = Diagnostic::new(Code::DuplicateName, format!("{path}.models"), message);
            sink.push(diagnostic.at(model.span).related(first, "the first one"));
        }
    }
}

fn rule(
    file: &schema::StrategyRule,
    span: Span,
    path: &str,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> ModelRule {
    let strategy = file.strategy.as_ref().map(|at| named(&at.value, &format!("{path}.strategy"), registry, env, sink));
    let files = file.profiles.as_ref().map(|at| at.value.as_slice()).unwrap_or_default();
    let mut profiles = Vec::with_capacity(files.len());
    for (name, at) in files {
        profiles.extend(profile(name, at, &format!("{path}.profiles.{}", name.value), registry, env, sink));
    }
    let locked = file.locked.filter(|at| at.value);
    if strategy.is_none() && (files.is_empty() || locked.is_some()) {
        let what = if locked.is_some() { "there is nothing to lock" } else { "without profiles the rule says nothing" };
        let message = format!("`strategy` is missing: {what}");
        sink.push(Diagnostic::new(Code::MissingKey, format!("{path}.strategy"), message).at(span));
    }
    if let Some(at) = locked.filter(|_| !files.is_empty()) {
        let message = "the profiles have no effect: a locked strategy outranks them";
        sink.push(Diagnostic::new(Code::NoEffect, format!("{path}.profiles"), message).at(at.span));
    }
    if let Some(at) = &file.default_profile
        && !files.iter().any(|(name, _)| name.value == at.value)
    {
        let known: Vec<&str> = files.iter().map(|(name, _)| name.value.as_str()).collect();
        let shown: String = at.value.chars().take(60).collect();
        let known = if known.is_empty() { "no profile, since there is none".to_owned() } else { known.join(", ") };
        sink.out_of_range(at.span, &format!("{path}.defaultProfile"), format!("`{shown}`"), &known);
    }
    ModelRule {
        models: file.models.iter().flat_map(|at| &at.value).map(|m| m.value.clone()).collect(),
        strategy,
        locked: locked.is_some(),
        default_profile: file.default_profile.as_ref().map(|at| at.value.clone()),
        profiles,
    }
}

fn profile(
    name: &At<String>,
    file: &At<schema::Profile>,
    path: &str,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Option<ProfileSpec> {
    let p = &file.value;
    for (what, gte, lt) in
        [("promptTokens", p.prompt_tokens_gte, p.prompt_tokens_lt), ("maxTokens", p.max_tokens_gte, p.max_tokens_lt)]
    {
        if let (Some(gte), Some(lt)) = (gte, lt)
            && gte.value >= lt.value
        {
            let message = format!("no request has {what} of at least {} and fewer than {}", gte.value, lt.value);
            let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.{what}Lt"), message);
            sink.push(diagnostic.at(lt.span).related(gte.span, "at least"));
        }
    }
    let Some(strategy) = &p.strategy else {
        let message = format!("`strategy` is missing in the profile `{}`", name.value);
        sink.push(Diagnostic::new(Code::MissingKey, format!("{path}.strategy"), message).at(name.span));
        return None;
    };
    let value = |at: Opt<u32>| at.map(|at| at.value);
    Some(ProfileSpec {
        name: name.value.clone(),
        strategy: named(&strategy.value, &format!("{path}.strategy"), registry, env, sink),
        when: Conditions {
            prompt_tokens_gte: value(p.prompt_tokens_gte),
            prompt_tokens_lt: value(p.prompt_tokens_lt),
            max_tokens_gte: value(p.max_tokens_gte),
            max_tokens_lt: value(p.max_tokens_lt),
        },
    })
}

/// Which strategies of a pool are `pd`, and how its own decides.
pub(super) fn pairs<'p>(
    of_pool: &StrategySpec,
    rules: &[ModelRule],
    by_request: Option<&RequestSpec>,
    (endpoints, are_found): (&'p [EndpointSpec], bool),
) -> Pairs<'p> {
    const PD: &str = "pd";
    let is =
        |spec: &StrategySpec| weighted::parse(&spec.name).is_ok_and(|parts| parts.iter().any(|(name, _)| *name == PD));
    let of_rules = rules.iter().flat_map(|rule| rule.strategy.iter().chain(rule.profiles.iter().map(|p| &p.strategy)));
    Pairs {
        by_pool: is(of_pool),
        by_others: of_rules.chain(by_request.iter().flat_map(|spec| &spec.allowed)).any(is),
        exact: of_pool.parameters.get("compat").is_some_and(|value| value == true),
        endpoints,
        are_found,
    }
}

/// The strategies that requests may select. An allowed name without parameters that is the pool's
/// own strategy includes its parameters.
pub(super) fn by_request(
    file: schema::RequestStrategy,
    path: &str,
    of_pool: &StrategySpec,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> RequestSpec {
    let path = format!("{path}.requestStrategy");
    let d = RequestSpec::default();
    let mut header = |key: &str, at: Opt<String>| {
        let at = at?;
        if at.value.parse::<http::HeaderName>().is_err() {
            let shown: String = at.value.chars().take(60).collect();
            sink.out_of_range(at.span, &format!("{path}.{key}"), format!("`{shown}`"), "the name of a header");
        }
        Some(at.value.to_ascii_lowercase())
    };
    let strategy_header = header("header", file.header).unwrap_or(d.header);
    let profile_header = header("profileHeader", file.profile_header).unwrap_or(d.profile_header);
    let filter_header = header("filterHeader", file.filter_header);
    let named = file.allow.map(|at| at.value).unwrap_or_default();
    let allowed = allowed(&named, &path, of_pool, registry, env, sink);
    RequestSpec { header: strategy_header, profile_header, filter_header, allowed }
}

/// The strategies that requests may select by default if AIBrix's environment names the pool's strategy: all, as in
/// AIBrix.
pub(super) fn by_aibrix_request(
    of_pool: &StrategySpec,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> RequestSpec {
    let variable = env.strategy_variable;
    if !sink.diagnostics.iter().any(|d| d.code == Code::TrustsClients && d.path == variable) {
        let why = if env.is_implied {
            format!("`{variable}` is set; those that name none go to any endpoint, because nothing names a strategy")
        } else {
            format!("`{variable}` names the pool's")
        };
        let message = format!(
            "as in AIBrix, requests may name their strategy by `{DEFAULT_STRATEGY_HEADER}` and their endpoints by \
             `{AIBRIX_FILTER_HEADER}`, because {why}"
        );
        let help = "`requestStrategy: {allow: []}` of the pool switches this off, `requestStrategy` limits it";
        sink.push(Diagnostic::new(Code::TrustsClients, variable, message).help(help));
    }
    RequestSpec {
        filter_header: Some(AIBRIX_FILTER_HEADER.to_owned()),
        allowed: all(Vec::new(), of_pool, registry, env),
        ..RequestSpec::default()
    }
}

/// Whether requests may select every strategy.
pub(super) fn allows_any(file: &At<schema::RequestStrategy>) -> bool {
    file.value.allow.iter().flat_map(|at| &at.value).any(|at| is_any(&at.value))
}

fn is_any(strategy: &schema::Strategy) -> bool {
    strategy.name.value == ANY && strategy.parameters.is_none()
}

/// Every strategy that is listed by name, with its parameters; then, with `*`, all others.
fn allowed(
    file: &[At<schema::Strategy>],
    path: &str,
    of_pool: &StrategySpec,
    registry: &Registry,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Vec<StrategySpec> {
    let mut allowed: Vec<StrategySpec> = Vec::new();
    for (i, At { value, .. }) in file.iter().enumerate().filter(|(_, at)| !is_any(&at.value)) {
        let path = format!("{path}.allow[{i}]");
        let name = canonical(&value.name.value);
        if allowed.iter().any(|known| known.name == name) {
            let message = format!("the strategy `{}` is allowed twice", value.name.value);
            sink.push(Diagnostic::new(Code::DuplicateName, path, message).at(value.name.span));
        } else if value.parameters.is_none() && name == of_pool.name {
            allowed.push(of_pool.clone());
        } else {
            allowed.push(named(value, &path, registry, env, sink));
        }
    }
    if file.iter().any(|at| is_any(&at.value)) { all(allowed, of_pool, registry, env) } else { allowed }
}

/// Every strategy: those in `allowed` with their parameters, the pool's own with its own, others with the
/// environment's.
fn all(
    mut allowed: Vec<StrategySpec>,
    of_pool: &StrategySpec,
    registry: &Registry,
    env: &AibrixDefaults,
) -> Vec<StrategySpec> {
    for name in registry.strategies().iter().map(|d| d.name) {
        if !allowed.iter().any(|known| known.name == name) {
            let plain = || StrategySpec { name: name.to_owned(), parameters: env.parameters(name, Value::Null) };
            allowed.push(Some(of_pool).filter(|own| own.name == name).cloned().unwrap_or_else(plain));
        }
    }
    allowed
}
