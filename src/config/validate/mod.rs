//! Merges flags, file and defaults, and checks combinations.

mod aibrix;
mod destination;
mod disaggregation;
mod flow;
pub use flow::{recommended as recommended_flow, usual as usual_flow};
mod kubernetes;
mod matches;
mod objective;
mod policies;
mod pools;
mod prefix;
mod queued;
mod slo;
mod sources;
mod strategies;
mod sync;
mod templates;
mod tenants;
mod tls;

use super::aibrix_env::AibrixDefaults;
use super::decode::{Bytes, Sink};
use super::diagnostic::{At, Code, Diagnostic, Span};
use super::schema::{self, File, LogFormat, Opt};
use super::settings::{ExchangeSettings, ReportUsage, ServerSettings, Settings, TelemetrySettings, TenantRule};
use super::units::show_duration;
use super::{Overrides, Sources, Surroundings, localai_env};
use attache_types::limits::{Limits, client_share};
use attache_types::log_filter;
use std::sync::Arc;

/// Settings from a file and the sources that outrank it. Valid only if `sink` has no error.
pub(super) fn settings(file: File, sources: &Sources, sink: &mut Sink) -> Settings {
    let Sources { registry, overrides: flags, surroundings, .. } = sources;
    let surroundings = *surroundings;
    let File { server, telemetry, exchange, mut limits, redis, sync, model_policies, pools, .. } = file;
    let election = server.leader_election.filter(|at| at.value);
    let status = server.model_status.filter(|at| at.value);
    let mut exchange = self::exchange(exchange, sink);
    let mut env = flags.aibrix.read(registry, sink);
    flags.localai.read(&mut env, sink);
    flags.own.tell(sink);
    env.imply_strategy();
    let of_env = slo::redis(&env);
    let file_redis_at = redis.as_ref().map(|at| at.span);
    let redis_at = file_redis_at.or(of_env.as_ref().map(|_| Span::default()));
    env.reads_profiles = of_env.is_some() || file_redis_at.is_some() && env.strategy.is_some() && !env.is_others;
    let redis = match redis {
        Some(file) => tenants::redis(file, sink),
        None => of_env,
    };
    if exchange.tenant.is_none() {
        exchange.tenant = default_tenants(&pools, flags, &env, sink);
    }
    let rule = exchange.tenant.as_ref();
    let tenants = limits.tenants.take().map(|file| tenants::limits(file, rule, redis_at.is_some(), sink));
    let models = limits.models.take().map(|file| tenants::models(file.value, redis_at.is_some(), sink));
    let strategies = places_of_strategies(&pools);
    let limits = self::limits(&limits, sink);
    let policies_at = model_policies.as_ref().filter(|at| !at.value.is_empty()).map(|at| at.span);
    let mut model_policies = policies::policies(model_policies, sink);
    flags.localai.policies(&mut model_policies, sink);
    let (pools, templates) = pools::pools(pools, limits.max_buffered_bytes, registry, flags, &env, sink);
    let mut settings = Settings {
        server: self::server(server, flags, surroundings, sink),
        telemetry: self::telemetry(telemetry, flags, surroundings, sink),
        exchange,
        tenants,
        models,
        redis,
        sync: sync::settings(sync, sink),
        model_policies,
        pools,
        templates,
        limits,
    };
    check_localai(&settings, flags, sink);
    if !policies::are_used(&settings) {
        policies::tell_unused(policies_at, sink);
        flags.localai.tell_unused(sink);
    }
    let of_cluster = settings.pools.iter().any(|pool| pool.kubernetes.is_some()) || !settings.templates.is_empty();
    check_leases(election, status, of_cluster, sink);
    check_redis(&mut settings, &strategies, redis_at, file_redis_at, &env, sink);
    if !flags.one_pool {
        aibrix::tell_unused(&settings, &env, sink);
    }
    settings
}

/// Checks the settings that need Redis, and warns of a Redis server that nothing reads. `redis_at` is the position of
/// its settings, and `file_redis_at` the same if they are in the file.
fn check_redis(
    settings: &mut Settings,
    strategies: &[(usize, Span)],
    redis_at: Option<Span>,
    file_redis_at: Option<Span>,
    env: &AibrixDefaults,
    sink: &mut Sink,
) {
    let all_pools = || settings.pools.iter().chain(settings.templates.iter().map(|template| &template.pool));
    slo::tell(all_pools(), strategies, redis_at.is_some(), sink);
    let limits = [settings.tenants.as_ref(), settings.models.as_ref()];
    let is_read = tenants::who_reads(redis_at, limits, all_pools(), strategies, sink);
    if !is_read {
        match file_redis_at {
            Some(span) => tenants::tell_unread(span, sink),
            None => {
                settings.redis = None;
                env.tell_unread_redis("no strategy reads profiles in Redis, and no limit is counted there", sink);
            }
        }
    }
    if file_redis_at.is_some() {
        env.tell_unread_redis("the file has `redis`", sink);
    }
}

/// The source of tenants that the strategies of the pools imply, where the file names none.
fn default_tenants(
    pools: &Opt<Vec<At<schema::Pool>>>,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> Option<TenantRule> {
    let files = pools.iter().flat_map(|at| &at.value);
    let mut names: Vec<&str> = files.map(|at| queued::strategy_of(&at.value, flags, env)).collect();
    if names.is_empty() {
        names.push(strategies::name_of(None, flags, env));
    }
    queued::tenants(names, sink)
}

/// Warns of LocalAI's variables and flags that the parameters in the file outrank.
fn check_localai(settings: &Settings, flags: &Overrides, sink: &mut Sink) {
    for pool in settings.pools.iter().chain(settings.templates.iter().map(|template| &template.pool)) {
        let affine = pool.strategies().filter(|(name, _)| *name == localai_env::STRATEGY);
        affine.for_each(|(_, parameters)| flags.localai.tell_overridden(&pool.name, parameters, sink));
    }
}

/// Warns of settings that need leases while no pool is in a cluster.
fn check_leases(election: Opt<bool>, status: Opt<bool>, of_cluster: bool, sink: &mut Sink) {
    for (what, key, at) in [("leader election", "leaderElection", election), ("`modelStatus`", "modelStatus", status)] {
        if let Some(at) = at.filter(|_| !of_cluster) {
            let message = format!("{what} has no effect: no pool has `kubernetes`, which is where leases are");
            sink.push(Diagnostic::new(Code::NoEffect, format!("server.{key}"), message).at(at.span));
        }
    }
}

/// For each pool, where its strategy is configured, or where the pool begins. Named pools
/// come before those of searches.
fn places_of_strategies(pools: &Opt<Vec<At<schema::Pool>>>) -> Vec<(usize, Span)> {
    let pools = pools.iter().flat_map(|at| &at.value).enumerate();
    let (searched, named): (Vec<_>, Vec<_>) = pools.partition(|(_, pool)| templates::searches(&pool.value));
    let place = |(position, pool): (usize, &At<schema::Pool>)| {
        (position, pool.value.strategy.as_ref().map_or(pool.span, |strategy| strategy.span))
    };
    named.into_iter().chain(searched).map(place).collect()
}

/// Whether a flag or an environment variable has given the value of a key.
fn is_of_flag<T>(at: &At<T>) -> bool {
    at.span == Span::default()
}

fn given<T>(file: Opt<T>, default: T) -> T {
    file.map_or(default, |at| at.value)
}

fn server(mut file: schema::Server, flags: &Overrides, surroundings: Surroundings, sink: &mut Sink) -> ServerSettings {
    let none = schema::Drain::default();
    let drain = file.drain.as_ref().map_or(&none, |at| &at.value);
    let (delay_value, deadline_value) = (drain.min_delay(), drain.deadline());
    if deadline_value < delay_value {
        let (delay, end) = (show_duration(delay_value), show_duration(deadline_value));
        let spans = [drain.deadline, drain.min_delay].map(|at| at.map(|at| at.span).unwrap_or_default());
        let [first, second] = if spans[0].line > 0 { spans } else { [spans[1], spans[0]] };
        sink.push(
            Diagnostic::new(
                Code::Contradiction,
                "server.drain",
                format!("the drain deadline ({end}) lies before the end of the minimum delay ({delay})"),
            )
            .at(first)
            .related(second, "against this")
            .help("both count from SIGTERM; make the deadline the longer one"),
        );
    }
    check_ports(&file, sink);
    let (tls, client_auth) = tls::settings(file.tls.take().map(|at| at.value).unwrap_or_default(), flags, sink);
    ServerSettings {
        bind: file.bind(),
        grpc_port: file.grpc_port(),
        grpc_health_port: file.grpc_health_port(),
        metrics_port: file.metrics_port(),
        health_checking: file.health_checking(),
        workers: file.workers.map_or(surroundings.cores.max(1), |at| at.value),
        tls,
        client_auth,
        drain_min_delay: delay_value,
        drain_deadline: deadline_value,
        leader_election: file.leader_election(),
        model_status: file.model_status.map(|at| at.value),
        metrics_auth: metrics_auth(file.metrics_auth, sink),
        seed: file.seed.map(|at| at.value),
        admin_hosts: admin_hosts(file.admin_hosts, sink),
    }
}

fn metrics_auth(at: Opt<bool>, sink: &mut Sink) -> bool {
    let wanted = at.filter(|at| at.value);
    if let Some(at) = wanted.filter(|_| cfg!(not(feature = "full"))) {
        let message = "this build can't ask Kubernetes who may see the metrics (it lacks the feature `full`)";
        sink.push(Diagnostic::new(Code::Contradiction, "server.metricsAuth", message).at(at.span));
    }
    wanted.is_some()
}

/// The names in normal form: lower case, without a trailing dot.
fn admin_hosts(file: Opt<Vec<At<String>>>, sink: &mut Sink) -> Arc<[String]> {
    let name = |At { value, span }: At<String>| {
        let is_name = value.parse::<http::uri::Authority>().is_ok_and(|authority| authority.host() == value);
        if !is_name {
            let shown: String = value.chars().take(60).collect();
            sink.out_of_range(span, "server.adminHosts", format!("`{shown}`"), "the name of a host, without a port");
        }
        value.trim_end_matches('.').to_ascii_lowercase()
    };
    file.into_iter().flat_map(|at| at.value).map(name).collect()
}

fn check_ports(file: &schema::Server, sink: &mut Sink) {
    let resolved = [
        ("grpcPort", file.grpc_port, file.grpc_port()),
        ("grpcHealthPort", file.grpc_health_port, file.grpc_health_port()),
        ("metricsPort", file.metrics_port, file.metrics_port()),
    ]
    .map(|(name, at, port)| (name, at.map(|at| at.span).unwrap_or_default(), port));
    for (i, (name, span, port)) in resolved.iter().enumerate() {
        let twin = resolved.iter().take(i).find(|(_, _, other)| other == port && *port != 0);
        if let Some((other_name, other_span, _)) = twin {
            sink.push(
                Diagnostic::new(
                    Code::Contradiction,
                    format!("server.{}", if span.line > 0 { name } else { other_name }),
                    format!("`{name}` and `{other_name}` are both {port}"),
                )
                .at(if span.line > 0 { *span } else { *other_span })
                .related(if span.line > 0 { *other_span } else { Span::default() }, "the other one")
                .help("every listener needs its own port"),
            );
        }
    }
}

fn telemetry(
    file: schema::Telemetry,
    flags: &Overrides,
    surroundings: Surroundings,
    sink: &mut Sink,
) -> TelemetrySettings {
    if let Some(at) = &file.log_level
        && let Err(e) = log_filter::check(&at.value).and_then(|()| {
            tracing_subscriber::EnvFilter::builder().parse(&at.value).map(drop).map_err(|e| e.to_string())
        })
    {
        sink.push(
            Diagnostic::new(
                Code::BadLogFilter,
                "telemetry.logLevel",
                format!("`{}` is not a log filter: {e}", at.value),
            )
            .at(at.span)
            .help("as in `info`, `debug` or `attache=debug,info`"),
        );
    }
    flags.reference.tell(sink);
    let ratio_of_flag = file.trace_ratio.filter(is_of_flag).map(|at| at.value);
    let ratio = ratio_of_flag.or_else(|| sampled(flags, sink));
    if let Some(at) = &file.otlp_endpoint {
        check_otlp(at, sink);
    } else if let (Some(ratio), None) = (ratio_of_flag, flags.tracing) {
        let message = format!("`--trace-ratio` of {ratio} has no effect: there is no collector to send traces to");
        sink.push(Diagnostic::new(Code::NoEffect, "--trace-ratio", message).help("name it by `--otlp-endpoint`"));
    }
    TelemetrySettings {
        log_filter: file.log_level(),
        log_json: file.log_format.map_or(!surroundings.terminal, |at| at.value == LogFormat::Json),
        trace_ratio: ratio.unwrap_or_else(|| file.trace_ratio()),
        decisions_kept: file.decisions_kept(),
        otlp_endpoint: file.otlp_endpoint.map(|at| at.value).filter(|_| flags.tracing != Some(false)),
        labels: tenants::labels(file.labels.map(|at| at.value).unwrap_or_default()),
    }
}

/// OpenTelemetry's sampling ratio, by its rules: empty is unset, and an invalid value is reported and ignored.
fn sampled(flags: &Overrides, sink: &mut Sink) -> Option<f64> {
    let text = flags.sampler_arg.as_deref().map(str::trim).filter(|text| !text.is_empty())?;
    let ratio = text.parse::<f64>().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    if ratio.is_none() {
        let shown: String = text.chars().take(60).collect();
        let message = format!("`OTEL_TRACES_SAMPLER_ARG` has no effect: it is `{shown}`, allowed: 0 to 1");
        sink.push(Diagnostic::new(Code::NoEffect, "OTEL_TRACES_SAMPLER_ARG", message));
    }
    ratio
}

fn check_otlp(at: &At<String>, sink: &mut Sink) {
    let path = "telemetry.otlpEndpoint";
    let uri = at.value.parse::<http::Uri>().ok();
    let good = uri
        .as_ref()
        .is_some_and(|u| matches!(u.scheme_str(), Some("http" | "https")) && u.host().is_some_and(|h| !h.is_empty()));
    if !good {
        let message = format!("`{}` is not a collector's URL", at.value.chars().take(80).collect::<String>());
        sink.push(Diagnostic::new(Code::BadUrl, path, message).at(at.span).help("as in `http://collector:4318`"));
    } else if uri.is_some_and(|u| u.port_u16() == Some(4317)) {
        sink.push(
            Diagnostic::new(
                Code::OddPort,
                path,
                "port 4317 usually speaks OTLP over gRPC, and traces are sent over HTTP",
            )
            .at(at.span)
            .help("the collector's HTTP port is usually 4318"),
        );
    }
    if cfg!(not(feature = "full")) {
        sink.push(
            Diagnostic::new(Code::Contradiction, path, "this build can't send traces (it lacks the feature `full`)")
                .at(at.span),
        );
    }
}

/// Warns of settings that have no effect because the headers of clients are not trusted.
fn check_untrusted(file: &schema::Exchange, sink: &mut Sink) {
    if let Some(at) = file.objectives.as_ref().filter(|at| at.value.iter().any(|(_, priority)| priority.value > 0)) {
        let message = "`objectives` above 0 have no effect: the header by which requests name theirs is not believed";
        sink.push(Diagnostic::new(Code::NoEffect, "exchange.objectives", message).at(at.span).help(
            "`trustClientHeaders: true` or `--trust-client-headers`, where the gateway keeps strangers from \
                     setting the header",
        ));
    }
    if let Some(at) = file.session_headers.as_ref().filter(|at| !at.value.is_empty()) {
        let message = "`sessionHeaders` have no effect: what requests say of their flow is not believed";
        sink.push(
            Diagnostic::new(Code::NoEffect, "exchange.sessionHeaders", message)
                .at(at.span)
                .help("`trustClientHeaders: true` or `--trust-client-headers`, where clients may name their own flows"),
        );
    }
}

fn exchange(file: schema::Exchange, sink: &mut Sink) -> ExchangeSettings {
    if let Some(at) = file.conformance_headers.filter(|at| at.value) {
        sink.push(
            Diagnostic::new(
                Code::TrustsClients,
                "exchange.conformanceHeaders",
                "every client may choose its endpoint by a header",
            )
            .at(at.span)
            .help("meant for the conformance suite; leave it off in production"),
        );
    }
    if !file.trust_client_headers() {
        check_untrusted(&file, sink);
    }
    let session_headers = file.session_headers.as_ref().map(|at| at.value.as_slice()).unwrap_or_default();
    let session_headers = session_headers.iter().map(|at| tenants::header(at, "exchange.sessionHeaders", sink).into());
    let session_headers = session_headers.collect();
    let objectives = file.objectives.iter().flat_map(|at| &at.value);
    let objectives = objectives.map(|(name, priority)| (name.value.clone(), priority.value)).collect();
    let mut settings = ExchangeSettings { session_headers, objectives, ..Default::default() };
    file.fill(&mut settings);
    file.explain.map(|at| at.value).unwrap_or_default().fill(&mut settings.explain);
    let usage = file.report_usage.as_ref().map(|at| &at.value);
    settings.report_usage = usage.map(|u| ReportUsage { namespace: u.namespace(), key: u.key(), count: u.count() });
    settings.tenant = file.tenant.and_then(|file| tenants::rule(file, sink));
    settings
}

fn limits(file: &schema::LimitsSection, sink: &mut Sink) -> Limits {
    let mut limits = Limits::default();
    file.fill(&mut limits);
    let of_client = file.max_upload_bytes_per_client.map(|at| at.value.0);
    limits.max_upload_bytes_per_client =
        of_client.unwrap_or_else(|| client_share(limits.max_buffered_bytes, limits.max_body_bytes));
    check_buffered(&limits, file, sink);
    limits
}

/// Reports a limit of all bodies together that is below the limit of one.
fn check_buffered(limits: &Limits, file: &schema::LimitsSection, sink: &mut Sink) {
    if limits.max_buffered_bytes < limits.max_body_bytes {
        let span = |a: Opt<Bytes>| a.map(|a| a.span).unwrap_or_default();
        let (all, one) = (span(file.max_buffered_bytes), span(file.max_body_bytes));
        sink.push(
            Diagnostic::new(
                Code::Contradiction,
                "limits",
                format!(
                    "all bodies together ({} bytes) get less room than a single one ({} bytes)",
                    limits.max_buffered_bytes, limits.max_body_bytes
                ),
            )
            .at(if all.line > 0 { all } else { one })
            .related(if all.line > 0 { one } else { Span::default() }, "a single one"),
        );
    }
}
