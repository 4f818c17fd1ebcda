//! The checks of pools: names, conditions, endpoints, strategies, rewrites, intervals.

use super::matches::{check_matches, matches};
use super::sources::{dns, endpoints_file};
use super::templates::{Entry, apart, check_template, no_endpoints_of_searched, pods_or_pools};
use super::{destination, disaggregation, flow, kubernetes, objective, prefix, queued, slo, strategies};
use crate::Overrides;
use crate::aibrix_env::AibrixDefaults;
use crate::defaults::{DEFAULT_POOL, MIN_INTERVAL};
use crate::schema::{self, Opt, check};
use crate::settings::{
    DnsSource, FileSource, KubernetesSource, PoolSearch, PoolSettings, PoolTemplate, ScrapeSettings,
};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_pool::health::HealthPolicy;
use attache_pool::{EndpointSpec, MetricsSource};
use attache_scheduling::Registry;
use attache_scheduling::choice::{ModelRule, RequestSpec, StrategySpec};
use attache_scheduling::router::{Destination, ModelRewrites, PoolMatch, PoolSwitches, RewriteTarget};
use attache_types::units::show_duration;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

/// The pools from file and flags, and the templates of pools for cluster objects.
pub(super) fn pools(
    file: Opt<Vec<At<schema::Pool>>>,
    max_buffered_bytes: u64,
    registry: &Registry,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> (Vec<PoolSettings>, Vec<PoolTemplate>) {
    let section = file.as_ref().map(|at| at.span).unwrap_or_default();
    let mut pools = file.map(|at| at.value).unwrap_or_default();
    for (i, at) in pools.iter_mut().enumerate() {
        let name = queued::strategy_of(&at.value, flags, env).to_owned();
        let is_of_env = strategies::is_of_env(at.value.strategy.is_some(), flags, env);
        let file = at.value.flow_control.take().or_else(|| slo::queue(&name, is_of_env));
        at.value.flow_control = queued::complete(&name, file, &format!("pools[{i}]"), sink);
    }
    let has_file = pools.iter().any(|at| at.value.from_flags.is_some() && at.value.endpoints_file.is_some());
    kubernetes::tell_void(flags, has_file, sink);
    let room = if flags.one_pool { flow::Room::unknown() } else { flow::Room::shared(max_buffered_bytes, &pools) };
    if pools.is_empty() {
        return apart([pool_of_flags(section, registry, flags, env, sink)], room.queued);
    }
    check_names(&pools, sink);
    check_matches(&pools, sink);
    let by_flags = [
        ("--endpoint", !flags.endpoints.is_empty(), "name the endpoints in the file"),
        ("--pool-name", flags.kubernetes.pool_name.is_some(), "give each pool of the file its `kubernetes.pool`"),
        ("--pool-selector", flags.kubernetes.pool_selector.is_some(), "give one of them its `kubernetes.poolSelector`"),
        (
            "--endpoint-selector",
            flags.kubernetes.endpoint_selector.is_some(),
            "give each pool of the file its `kubernetes.selector`",
        ),
    ];
    for (flag, _, help) in by_flags.into_iter().filter(|(_, given, _)| *given && pools.len() > 1) {
        let message = format!("`{flag}` can't tell which of the {} pools of the file it means", pools.len());
        sink.push(Diagnostic::new(Code::Contradiction, flag, message).help(help));
    }
    apart(pools.into_iter().enumerate().map(|(i, at)| pool(i, at, room, registry, flags, env, sink)), room.queued)
}

fn pool_of_flags(
    section: Span,
    registry: &Registry,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Entry {
    if flags.endpoints.is_empty() && !flags.kubernetes.any() {
        sink.push(
            Diagnostic::new(Code::NothingToServe, "pools", "there is nothing to route to: no pool and no endpoint")
                .at(section)
                .help("name a pool under `pools`, or give `--endpoint 127.0.0.1:8000`"),
        );
    }
    let endpoints = flag_endpoints(flags, None, sink);
    let strategy = strategies::of_pool(None, "pools[0]", registry, flags, env, sink);
    let (kubernetes, search) = pods_or_pools(kubernetes::of_flags(flags, None, sink));
    if search.is_some() && !flags.endpoints.is_empty() {
        no_endpoints_of_searched("--endpoint", Span::default(), sink);
    }
    let of_env = strategies::is_of_env(false, flags, env);
    let mut by_request = of_env.then(|| strategies::by_aibrix_request(&strategy, registry, env, sink));
    queued::check_others(&strategy, &[], by_request.as_mut(), true, "pools[0]", sink);
    let found = (&*endpoints, kubernetes.is_some() || search.is_some());
    let pairs = strategies::pairs(&strategy, &[], by_request.as_ref(), found);
    let split = disaggregation::of_pool(None, &pairs, "pools[0]", env, sink);
    let queue = queued::complete(&strategy.name, slo::queue(&strategy.name, of_env), "pools[0]", sink);
    let flow = match queue {
        Some(file) => flow::flow(&file.value, flow::Room::unknown(), "pools[0].flowControl", sink),
        None => flow::implied(&strategy.name, flags.kubernetes.any(), flow::Room::unknown(), sink),
    };
    let flow = queued::of_users(flow, &strategy.name, flags);
    let form = strategies::aibrix_form(of_env, &strategy, env);
    let pool = PoolSettings {
        name: flags.kubernetes.pool_name.as_deref().unwrap_or(DEFAULT_POOL).into(),
        matches: PoolMatch::default(),
        switches: PoolSwitches::default(),
        default_model: None,
        rewrites: ModelRewrites::default(),
        strategy: strategy.name,
        strategy_parameters: strategy.parameters,
        rules: Vec::new(),
        by_request,
        destination: Destination::default(),
        destination_names: destination::names(&mut schema::DestinationSection::default(), "pools[0]", flags, env, sink),
        registry: registry.clone(),
        max_destinations: destination::DEFAULT_MAX,
        endpoints,
        dns: Vec::new(),
        file: None,
        kubernetes,
        scrape: scrape(schema::Scrape::default(), "pools[0].scrape", flags, sink),
        health: HealthPolicy::default(),
        prefix: prefix::prefix(schema::PrefixCache::default(), "pools[0].prefixCache", form, env, sink),
        disaggregation: split,
        objective: None,
        flow,
    };
    (pool, search)
}

fn flag_endpoints(flags: &Overrides, like: Option<&schema::FromFlags>, sink: &mut Sink) -> Vec<EndpointSpec> {
    let of_file = like.and_then(|like| like.engine).map(|at| at.value);
    let engine = flags.kubernetes.engine.or(of_file).unwrap_or_default();
    let metrics = kubernetes::metrics_of_flags(&flags.kubernetes, like, sink);
    let mut seen: HashMap<SocketAddr, Span> = HashMap::new();
    let read = flags.endpoints.iter().filter_map(|text| {
        let at = At { value: text.clone(), span: Span::default() };
        let address = address(&at, "--endpoint", sink)?;
        let new = check_twice(address, Span::default(), "--endpoint", &mut seen, sink);
        new.then(|| EndpointSpec { engine, metrics: metrics.clone(), ..EndpointSpec::at(address) })
    });
    read.collect()
}

/// Where the endpoints of a pool come from.
struct Sources {
    endpoints: Vec<EndpointSpec>,
    dns: Vec<DnsSource>,
    file: Option<FileSource>,
    kubernetes: Option<KubernetesSource>,
    search: Option<PoolSearch>,
}

/// The sources of endpoints in the file and in flags, which replace those of the file.
fn sources(pool: &schema::Pool, path: &str, flags: &Overrides, sink: &mut Sink) -> Sources {
    let mut endpoints = endpoints(&pool.endpoints, path, sink);
    let named = endpoints.len();
    let dns: Vec<_> =
        pool.dns.iter().enumerate().filter_map(|(i, d)| dns(d, &format!("{path}.dns[{i}]"), sink)).collect();
    let file = endpoints_file(pool, path, flags, sink);
    if !flags.endpoints.is_empty() {
        endpoints = flag_endpoints(flags, pool.from_flags.as_ref(), sink);
        if named > 0 {
            let message = format!("`--endpoint` replaces the {named} endpoints of pool `{}`", pool.name.value);
            sink.push(Diagnostic::new(Code::Overridden, "--endpoint", message).at(pool.name.span));
        }
    }
    let of_file = kubernetes::of_file(&pool.kubernetes, path, sink);
    let of_flags = kubernetes::of_flags(flags, pool.from_flags.as_ref(), sink);
    if of_flags.is_some() || !flags.endpoints.is_empty() {
        kubernetes::tell_replaced(&flags.kubernetes, pool.from_flags.as_ref(), sink);
    }
    if let (Some(_), Some(at)) = (&of_flags, &pool.kubernetes) {
        let message = format!("flags replace the pods of pool `{}`", pool.name.value);
        sink.push(Diagnostic::new(Code::Overridden, "--pool-name", message).at(at.span));
    }
    let (kubernetes, search) = pods_or_pools(of_flags.or(of_file));
    if search.is_some() {
        check_template(pool, path, flags, sink);
    } else if endpoints.is_empty() && dns.is_empty() && file.is_none() && kubernetes.is_none() {
        check_empty(pool, path, flags, sink);
    }
    Sources { endpoints, dns, file, kubernetes, search }
}

fn pool(
    index: usize,
    at: At<schema::Pool>,
    room: flow::Room,
    registry: &Registry,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Entry {
    let path = format!("pools[{index}]");
    let mut pool = at.value;
    let strategy = strategies::of_pool(pool.strategy.as_ref(), &path, registry, flags, env, sink);
    let rules = strategies::rules(&pool.strategies, &path, registry, env, sink);
    let Sources { endpoints, dns, file, kubernetes, search } = sources(&pool, &path, flags, sink);
    let mut switches = PoolSwitches::default();
    pool.fill(&mut switches);
    flow::check_deadline_admission(&pool, &path, sink);
    let of_env = strategies::is_of_env(pool.strategy.is_some(), flags, env);
    let by_request =
        by_request(pool.request_strategy.take(), (&strategy, of_env), &rules, &path, (registry, env), sink);
    let aim = objective::objective(pool.objective.as_ref(), &path, sink);
    objective::check_read(pool.objective.as_ref(), &strategy, &rules, by_request.as_ref(), &path, registry, sink);
    let rewrites = rewrites(&pool.rewrites, &path, sink);
    let matches = matches(pool.matches.as_ref(), &path, sink);
    // A pool of a search with a configuration of its own gets its pods from the search.
    let of_cluster = kubernetes.is_some() || search.is_some() || flags.one_pool;
    if switches.reject_unknown_models && !of_cluster {
        check_models(pool.reject_unknown_models, &matches, &rewrites, &path, sink);
    }
    let are_found = file.is_some() || of_cluster;
    let mut pairs = strategies::pairs(&strategy, &rules, by_request.as_ref(), (&endpoints, are_found));
    // The latency of split requests is not predicted.
    pairs.by_others &= !switches.deadline_admission;
    let split = disaggregation::of_pool(pool.disaggregation.take(), &pairs, &path, env, sink);
    let flow = match pool.flow_control {
        Some(at) => flow::flow(&at.value, room, &format!("{path}.flowControl"), sink),
        None => flow::implied(&strategy.name, of_cluster, room, sink),
    };
    let flow = queued::of_users(flow, &strategy.name, flags);
    let form = strategies::aibrix_form(of_env, &strategy, env);
    let prefix = prefix::of_pool(pool.prefix_cache, &pool.endpoints, &path, form, env, sink);
    let settings = PoolSettings {
        name: pool.name.value.as_str().into(),
        matches,
        switches,
        default_model: default_model(pool.default_model, &path, sink),
        rewrites,
        strategy: strategy.name,
        strategy_parameters: strategy.parameters,
        rules,
        by_request,
        destination: pool.destination.mode(),
        max_destinations: destination::most(&pool.destination, &path, sink),
        destination_names: destination::names(&mut pool.destination, &path, flags, env, sink),
        registry: registry.clone(),
        endpoints,
        dns,
        file,
        kubernetes,
        scrape: scrape(pool.scrape, &format!("{path}.scrape"), flags, sink),
        health: health(&pool.health, &path, sink),
        prefix,
        disaggregation: split,
        objective: aim,
        flow,
    };
    (settings, search)
}

/// The strategies that requests may select: those in the file, or all if AIBrix's environment names the pool's
/// (`of_env`).
fn by_request(
    file: Opt<schema::RequestStrategy>,
    (strategy, of_env): (&StrategySpec, bool),
    rules: &[ModelRule],
    path: &str,
    (registry, env): (&Registry, &AibrixDefaults),
    sink: &mut Sink,
) -> Option<RequestSpec> {
    let allows_any = file.as_ref().is_none_or(strategies::allows_any);
    let mut by_request = match file {
        Some(file) => Some(strategies::by_request(file.value, path, strategy, registry, env, sink)),
        None => of_env.then(|| strategies::by_aibrix_request(strategy, registry, env, sink)),
    };
    queued::check_others(strategy, rules, by_request.as_mut(), allows_any, path, sink);
    by_request
}

/// Reports that no model is known, so that every request would be rejected. Pools of a cluster are not checked, since
/// cluster objects name models too.
fn check_models(at: Opt<bool>, matches: &PoolMatch, rewrites: &ModelRewrites, path: &str, sink: &mut Sink) {
    if !matches.models.is_empty() || !rewrites.exact.is_empty() {
        return;
    }
    let message = "every model is unknown: neither `match.models` nor `modelRewrites` names one";
    let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.rejectUnknownModels"), message);
    sink.push(diagnostic.at(at.map(|at| at.span).unwrap_or_default()));
}

fn default_model(at: Opt<String>, path: &str, sink: &mut Sink) -> Option<String> {
    let at = at?;
    if at.value.is_empty() {
        sink.out_of_range(at.span, &format!("{path}.defaultModel"), "``", "the name of a model");
    }
    Some(at.value)
}

fn check_empty(pool: &schema::Pool, path: &str, flags: &Overrides, sink: &mut Sink) {
    let broken = sink.diagnostics.iter().any(|d| d.is_error() && d.path.starts_with(path));
    if pool.from_flags.is_some() {
        if flags.endpoints.is_empty() && !flags.endpoints_follow {
            let message =
                "there is nothing to route to: a file of this kind names no endpoints, and neither does a flag";
            let diagnostic = Diagnostic::new(Code::NothingToServe, "--endpoint", message);
            let help =
                "give `--endpoint 127.0.0.1:8000`, once for each server, or in Kubernetes `--pool-name vllm-pool`";
            sink.push(diagnostic.help(help));
        }
    } else if pool.endpoints.is_empty() && pool.dns.is_empty() && pool.kubernetes.is_none() && !broken {
        let message = format!(
            "pool `{}` has none of `endpoints`, `endpointsFile`, `dns` and `kubernetes`: its requests are answered \
             with 503",
            pool.name.value
        );
        sink.push(Diagnostic::new(Code::EmptyPool, path, message).at(pool.name.span));
    }
}

fn check_names(pools: &[At<schema::Pool>], sink: &mut Sink) {
    let mut first: HashMap<&str, Span> = HashMap::new();
    for (i, pool) in pools.iter().enumerate() {
        let name = &pool.value.name;
        if let Some(span) = first.insert(&name.value, name.span) {
            sink.push(
                Diagnostic::new(
                    Code::DuplicateName,
                    format!("pools[{i}].name"),
                    format!("two pools are called `{}`", name.value),
                )
                .at(name.span)
                .related(span, "the first one"),
            );
        }
    }
}

fn endpoints(file: &[At<schema::Endpoint>], path: &str, sink: &mut Sink) -> Vec<EndpointSpec> {
    let mut seen: HashMap<SocketAddr, Span> = HashMap::new();
    let mut read = Vec::with_capacity(file.len());
    for (i, At { value: e, .. }) in file.iter().enumerate() {
        let path = format!("{path}.endpoints[{i}]");
        let Some(address) = address(&e.address, &path, sink) else { continue };
        if !check_twice(address, e.address.span, &path, &mut seen, sink) {
            continue;
        }
        let plain = EndpointSpec::at(address);
        read.push(EndpointSpec {
            name: e.name.as_ref().map_or(plain.name.clone(), |at| at.value.as_str().into()),
            labels: disaggregation::labels(&e.labels, e.role.as_ref(), &path, sink),
            engine: e.engine(),
            metrics: metrics(e.metrics.as_ref().map(|at| &at.value), &path, sink),
            draining: e.draining(),
            ..plain
        });
    }
    read
}

fn check_twice(
    address: SocketAddr,
    span: Span,
    path: &str,
    seen: &mut HashMap<SocketAddr, Span>,
    sink: &mut Sink,
) -> bool {
    let Some(first) = seen.get(&address) else {
        seen.insert(address, span);
        return true;
    };
    let message = format!("endpoint {address} is named twice");
    sink.push(Diagnostic::new(Code::DuplicateEndpoint, path, message).at(span).related(*first, "the first one"));
    false
}

fn address(at: &At<String>, path: &str, sink: &mut Sink) -> Option<SocketAddr> {
    let text = at.value.trim();
    let shown: String = text.chars().take(60).collect();
    let wrong =
        |message: String, help: &str| Some(Diagnostic::new(Code::BadAddress, path, message).at(at.span).help(help));
    let parsed = text.parse::<SocketAddr>();
    let problem = match &parsed {
        Ok(a) if a.port() == 0 => wrong(format!("`{shown}` has port 0"), "ports are 1 to 65535"),
        Ok(a) if a.ip().is_unspecified() => {
            wrong(format!("`{shown}` is no address that can be reached"), "as in `10.0.0.7:8000`")
        }
        Ok(_) => None,
        Err(_) if text.parse::<std::net::IpAddr>().is_ok() => {
            let help = if text.contains(':') { "as in `[2001:db8::7]:8000`" } else { "as in `10.0.0.7:8000`" };
            wrong(format!("`{shown}` has no port"), help)
        }
        Err(_) if text.contains("://") => {
            wrong(format!("`{shown}` is a URL, not an address"), "leave the scheme and the path out: `10.0.0.7:8000`")
        }
        Err(_) => match text.rsplit_once(':') {
            Some((host, port)) if host.parse::<std::net::Ipv4Addr>().is_ok() || host.starts_with('[') => {
                wrong(format!("`{shown}` has the port `{port}`"), "ports are 1 to 65535")
            }
            _ => wrong(
                format!("`{shown}` is not an `ip:port` address"),
                "host names belong under `dns`, which resolves them again and again",
            ),
        },
    };
    if let Some(problem) = problem {
        sink.push(problem);
        return None;
    }
    parsed.ok()
}

pub(super) fn metrics(file: Option<&schema::MetricsSection>, path: &str, sink: &mut Sink) -> MetricsSource {
    let mut source = MetricsSource::default();
    let Some(m) = file else { return source };
    source.scheme = schema::word_of(m.scheme()).into();
    source.port = m.port.map(|at| at.value);
    if let Some(at) = &m.path {
        if format!("http://h{}", at.value).parse::<http::Uri>().is_err() || !at.value.starts_with('/') {
            let shown: String = at.value.chars().take(60).collect();
            sink.out_of_range(
                at.span,
                &format!("{path}.metrics.path"),
                format!("`{shown}`"),
                "a path that begins with `/`",
            );
        }
        source.path = Some(at.value.as_str().into());
    }
    source
}

fn rewrites(file: &[At<schema::Rewrite>], path: &str, sink: &mut Sink) -> ModelRewrites {
    let mut exact: BTreeMap<String, Vec<RewriteTarget>> = BTreeMap::new();
    let mut any: Option<Vec<RewriteTarget>> = None;
    let mut seen: HashMap<String, Span> = HashMap::new();
    for (i, At { value: rule, span }) in file.iter().enumerate() {
        let path = format!("{path}.modelRewrites[{i}]");
        let targets = targets(rule, &path, sink);
        let model = rule.model.as_ref().map_or("*", |at| at.value.as_str());
        let place = rule.model.as_ref().map_or(*span, |at| at.span);
        if let Some(first) = seen.insert(model.to_owned(), place) {
            let message = format!("two rewrites speak of the model `{model}`");
            sink.push(Diagnostic::new(Code::DuplicateName, path, message).at(place).related(first, "the first one"));
        }
        if model == "*" {
            any = Some(targets);
        } else {
            exact.insert(model.to_owned(), targets);
        }
    }
    ModelRewrites { exact, any: any.unwrap_or_default() }
}

fn targets(rule: &schema::Rewrite, path: &str, sink: &mut Sink) -> Vec<RewriteTarget> {
    let list = &rule.targets;
    if list.value.is_empty() {
        let message = "`targets` is empty: the model would have no name on the servers";
        sink.push(Diagnostic::new(Code::EmptyList, format!("{path}.targets"), message).at(list.span));
    }
    let mut read = Vec::with_capacity(list.value.len());
    for (i, At { value: target, span }) in list.value.iter().enumerate() {
        let path = format!("{path}.targets[{i}]");
        match &target.model {
            Some(model) => {
                read.push(RewriteTarget { model: model.value.as_str().into(), weight: target.weight() });
            }
            None => {
                sink.push(Diagnostic::new(Code::MissingKey, format!("{path}.model"), "`model` is missing").at(*span))
            }
        }
    }
    if !read.is_empty() && read.iter().all(|t| t.weight == 0) {
        let message = "all weights are 0: the targets share the traffic evenly";
        sink.push(Diagnostic::new(Code::ZeroWeights, format!("{path}.targets"), message).at(list.span));
    }
    read
}

fn scrape(mut file: schema::Scrape, path: &str, flags: &Overrides, sink: &mut Sink) -> ScrapeSettings {
    let mut time = |flag: Option<Duration>, key: &str| {
        let at = flag.map(|value| At { value, span: Span::default() });
        check(at.as_ref(), &(MIN_INTERVAL..), || format!("{path}.{key}"), sink);
        at
    };
    file.interval = time(flags.refresh_metrics_interval, "interval").or(file.interval);
    file.stale_after = time(flags.metrics_staleness_threshold, "staleAfter").or(file.stale_after);
    let (interval, stale_after) = (file.interval(), file.stale_after());
    // If the busy interval is longer than the default idle one, the idle interval is equal to it.
    let idle_interval = file.idle_interval.map_or_else(|| file.idle_interval().max(interval), |at| at.value);
    if let Some(at) = file.idle_interval.filter(|at| at.value < interval) {
        let message = format!(
            "idle endpoints would be scraped more often ({}) than busy ones ({})",
            show_duration(at.value),
            show_duration(interval)
        );
        sink.push(
            Diagnostic::new(Code::Contradiction, path, message)
                .at(at.span)
                .related(file.interval.map(|at| at.span).unwrap_or_default(), "for busy ones"),
        );
    }
    let slowest = interval.max(idle_interval);
    if stale_after < slowest * 2 {
        let (stale_span, slow_span) = (
            file.stale_after.map(|at| at.span).unwrap_or_default(),
            file.idle_interval.or(file.interval).map(|at| at.span).unwrap_or_default(),
        );
        let message = format!(
            "metrics go stale after {}, less than twice the interval ({}): one late page and they say nothing",
            show_duration(stale_after),
            show_duration(slowest)
        );
        let (first, second) = if stale_span.line > 0 { (stale_span, slow_span) } else { (slow_span, Span::default()) };
        sink.push(Diagnostic::new(Code::StaleTooSoon, path, message).at(first).related(second, "the interval"));
    }
    let unchecked = flags.kubernetes.metrics_insecure_skip_verify;
    ScrapeSettings {
        interval,
        idle_interval,
        timeout: file.timeout(),
        max_bytes: file.max_bytes().0,
        stale_after,
        insecure_skip_verify: unchecked.unwrap_or_else(|| file.insecure_skip_verify()),
        bearer_token_file: file.bearer_token_file.as_ref().map(|at| at.value.as_str().into()),
    }
}

fn health(file: &schema::Health, path: &str, sink: &mut Sink) -> HealthPolicy {
    let ejection = file.ejection();
    let max_ejection = file.max_ejection.map_or_else(|| file.max_ejection().max(ejection), |at| at.value);
    if max_ejection < ejection {
        let message = format!(
            "the longest ejection ({}) is shorter than the first ({})",
            show_duration(max_ejection),
            show_duration(ejection)
        );
        sink.push(
            Diagnostic::new(Code::Contradiction, format!("{path}.health"), message)
                .at(file.max_ejection.map(|at| at.span).unwrap_or_default())
                .related(file.ejection.map(|at| at.span).unwrap_or_default(), "the first"),
        );
    }
    let mut settings = HealthPolicy::default();
    file.fill(&mut settings);
    HealthPolicy { max_ejection, ..settings }
}
