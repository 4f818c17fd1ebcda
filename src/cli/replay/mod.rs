//! `attache replay`: compares policies on traces and synthetic workloads, in virtual time.

mod args;
mod fit;
mod list;
mod live;
mod plan;
mod record;
mod sources;
mod variants;

use super::output::{colour, may_colour, message, print};
use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE};
use anyhow::{Context, ensure};
pub(super) use args::ReplayArgs;
use attache_config::defaults::DEFAULT_BLOCK_SIZE;
use attache_config::pool::PoolStores;
use attache_config::settings::{ExchangeSettings, PoolSettings, TenantSettings};
use attache_config::units::{parse_duration, show_duration};
use attache_config::{Overrides, Settings};
use attache_picker::prefix::PoolPrefix;
use attache_pool::Roles;
use attache_prefix::cache::{BlockUnit, CacheConfig};
use attache_quota::Subject;
use attache_replay::front::{FrontConfig, simulated_prefix};
use attache_replay::world::{
    FleetChange, KvEventSettings, SignalSettings, TOO_LONG, TimedChange, World, WorldConfig, spec,
};
use attache_report::Observer;
use attache_report::assertion::Assertion;
use attache_report::served::{Queued, Sample, Served};
use attache_report::table::TableStyle;
use attache_report::tally::{Tally, Targets};
use attache_report::{Report, RunResult, ServerFacts, html, markdown, svg, table};
use attache_scheduling::choice::ModelRule;
use attache_scheduling::policy::PolicyMap;
use attache_scrape::slo_profiles;
use attache_sim::engine::EngineConfig;
use attache_types::clock::{Clock, Timestamp};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use plan::SimulatedServer;
use sources::{WorkloadSource, sources, workload};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use variants::Variant;

/// Exit code if an assertion does not hold.
const EXIT_ASSERTION: u8 = 2;
/// Exit code after SIGINT, as shells report it.
const EXIT_STOPPED: u8 = 130;
/// 8 servers, as in most published comparisons.
const DEFAULT_SERVERS: usize = 8;
/// Requests between two steps of the progress bar.
const PROGRESS_STEP: u64 = 256;

/// A failure, with the exit code.
struct ReplayFailure(u8, anyhow::Error);

impl ReplayFailure {
    fn usage(error: anyhow::Error) -> Self {
        Self(EXIT_USAGE, error)
    }
}

pub(super) fn run(args: &ReplayArgs) -> ExitCode {
    if args.list {
        print(list::all());
        return ExitCode::SUCCESS;
    }
    let result = match (&args.from_record, &args.fit_profile, &args.live.target) {
        (Some(file), ..) => record::run(file, args.config_file.as_deref()),
        (None, Some(file), _) => fit::run(args, file),
        (None, None, Some(target)) => live::run(args, target),
        (None, None, None) => replay(args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(EXIT_ASSERTION),
        Err(ReplayFailure(code, error)) => {
            message(format_args!("error: {error:#}"));
            ExitCode::from(code)
        }
    }
}

/// One run of the plan: a workload with a policy and a fleet.
struct ReplayJob<'p> {
    source: &'p WorkloadSource,
    speed: f64,
    servers: &'p [SimulatedServer],
    changes: &'p [TimedChange],
    variant: &'p Variant<'p>,
    process: &'p ProcessConfig,
    /// Engines behind the port of each server.
    ranks: u16,
}

/// Plays everything and shows the report; returns whether all assertions hold.
fn replay(args: &ReplayArgs) -> Result<bool, ReplayFailure> {
    let PlayedConfig { pool: base, process, text: config_text } = configuration(args)?;
    let fleets = fleets(args, &base).map_err(ReplayFailure::usage)?;
    let policies = plan::policies(&base, &args.compare, |file| played_config(file, None).map(|config| config.pool))
        .and_then(|policies| plan::split_by(policies, &args.disaggregation, plan::may_split(&fleets)))
        .map_err(ReplayFailure::usage)?;
    for policy in &policies {
        let playable = policy.pool.scheduler(None).map_err(Into::into).and_then(|_| playable(&policy.pool));
        playable.with_context(|| format!("policy `{}`", policy.name)).map_err(ReplayFailure::usage)?;
    }
    let variants = variants::variants(args, &policies).map_err(ReplayFailure::usage)?;
    let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
    let assertions = args.assert.iter().map(|text| Assertion::parse(text, &names)).collect::<Result<Vec<_>, _>>();
    let assertions = assertions.map_err(|e| ReplayFailure::usage(e.into()))?;
    let baseline = baseline(args, &names).map_err(ReplayFailure::usage)?;
    let sources = sources(args).map_err(ReplayFailure::usage)?;
    let changes = changes(args, &fleets).map_err(ReplayFailure::usage)?;
    let signals = signals(args, &base).map_err(ReplayFailure::usage)?;
    if signals.kv_events.is_some() {
        fleets.iter().try_for_each(|fleet| plan::block_size(fleet).map(drop)).map_err(ReplayFailure::usage)?;
    }

    let configured = base.prefix.kv_events.as_ref().map_or(1, |events| events.ranks);
    let ranks = args.data_parallel_size.unwrap_or(configured);
    let mut jobs = Vec::new();
    for source in &sources {
        for fleet in &fleets {
            for speed in &args.speed {
                for variant in &variants {
                    let (servers, changes, process) = (fleet.as_slice(), changes.as_slice(), &process);
                    jobs.push(ReplayJob { source, speed: *speed, servers, changes, variant, process, ranks });
                }
            }
        }
    }
    // Files that can't be opened are reported before anything runs.
    for (source, speed) in sources.iter().flat_map(|source| args.speed.iter().map(move |speed| (source, *speed))) {
        workload(args, source, speed).map_err(ReplayFailure::usage)?;
    }
    let runs = play_all(args, &jobs, &signals)?;
    let report = Report {
        runs,
        baseline,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        seed: args.seed,
        config: config_text,
    };
    show(args, &report, &assertions).map_err(|e| ReplayFailure(EXIT_INTERNAL, e))
}

/// The part of a configuration that is played.
struct PlayedConfig {
    pool: PoolSettings,
    process: ProcessConfig,
    /// The text of the file.
    text: String,
}

/// The played settings that belong to no single pool.
#[derive(Default)]
struct ProcessConfig {
    quotas: Vec<(Subject, TenantSettings)>,
    exchange: ExchangeSettings,
    policies: PolicyMap,
}

fn configuration(args: &ReplayArgs) -> Result<PlayedConfig, ReplayFailure> {
    match &args.config_file {
        Some(file) => played_config(file, args.pool.as_deref()).map_err(|e| ReplayFailure(EXIT_CONFIG, e)),
        None => {
            // The defaults of a pool that is not configured.
            let overrides = Overrides { endpoints: vec!["127.0.0.1:8000".to_owned()], ..Overrides::default() };
            let settings = ReloadSource::new(None, None, overrides).read().settings;
            let pool = settings.and_then(|s| s.pools.into_iter().next());
            let pool = pool.map(|pool| PoolSettings { endpoints: Vec::new(), ..pool });
            let pool = pool.context("the default configuration has no pool");
            let pool = pool.map_err(|e| ReplayFailure(EXIT_INTERNAL, e))?;
            Ok(PlayedConfig { pool, process: ProcessConfig::default(), text: String::new() })
        }
    }
}

fn played_config(file: &Path, name: Option<&str>) -> anyhow::Result<PlayedConfig> {
    let reading = ReloadSource::of_file_alone(file.to_owned()).read();
    message(reading.render(colour()));
    let text = reading.text.as_ref().map(|t| t.text().to_owned()).unwrap_or_default();
    let settings: Settings = reading.settings.with_context(|| format!("{} can't be used", file.display()))?;
    let quotas = quotas(&settings);
    let process = ProcessConfig { quotas, exchange: settings.exchange, policies: settings.model_policies };
    let known: Vec<String> = settings.pools.iter().map(|p| p.name.to_string()).collect();
    let pool = settings.pools.into_iter().find(|p| name.is_none_or(|name| *p.name == *name));
    let pool = pool.with_context(|| format!("no such pool in {}; its pools: {}", file.display(), known.join(", ")))?;
    Ok(PlayedConfig { pool, process, text })
}

/// The limits that a replay checks. It counts in memory and reads no records of single tenants from Redis.
fn quotas(settings: &Settings) -> Vec<(Subject, TenantSettings)> {
    let limits = [(Subject::Tenant, &settings.tenants), (Subject::Model, &settings.models)];
    limits.into_iter().filter_map(|(subject, limits)| Some((subject, limits.clone()?))).collect()
}

/// Warns of strategies that read Redis, which is not available in a replay.
fn playable(pool: &PoolSettings) -> anyhow::Result<()> {
    anyhow::ensure!(
        !pool.reads_redis(),
        "a strategy has `profilesFromRedis`, and replays do not read Redis; name files in `profiles`"
    );
    Ok(())
}

fn baseline(args: &ReplayArgs, names: &[&str]) -> anyhow::Result<usize> {
    let Some(wanted) = &args.baseline else { return Ok(0) };
    let found = names.iter().position(|name| name == wanted);
    found.with_context(|| format!("--baseline `{wanted}` is none of the policies: {}", names.join(", ")))
}

fn fleets(args: &ReplayArgs, base: &PoolSettings) -> anyhow::Result<Vec<Vec<SimulatedServer>>> {
    if !args.endpoints.is_empty() {
        return args.endpoints.iter().map(|n| plan::servers(&args.profile, Some(*n))).collect();
    }
    let listed = plan::servers(&args.profile, None)?;
    // Numbers in a list of servers already give their count.
    let count = match (base.endpoints.len(), listed.len()) {
        (0, 1) => Some(DEFAULT_SERVERS),
        (0, _) => None,
        (n, _) => Some(n),
    };
    Ok(vec![plan::servers(&args.profile, count)?])
}

fn changes(args: &ReplayArgs, fleets: &[Vec<SimulatedServer>]) -> anyhow::Result<Vec<TimedChange>> {
    let first = fleets.first().map(Vec::as_slice).unwrap_or_default();
    let mut changes = args.change.iter().map(|c| plan::change(c, first)).collect::<anyhow::Result<Vec<_>>>()?;
    changes.sort_by_key(|c| c.at);
    fleets.iter().try_for_each(|fleet| plan::possible(&changes, fleet.len()))?;
    Ok(changes)
}

fn signals(args: &ReplayArgs, base: &PoolSettings) -> anyhow::Result<SignalSettings> {
    let kv_events = match &args.kv_events {
        None => base.prefix.kv_events.as_ref().map(|_| KvEventSettings { delay: Duration::from_millis(10), loss: 0.0 }),
        Some(spelling) => {
            let (delay, loss) = spelling.split_once(',').unwrap_or((spelling, "0"));
            let delay = parse_duration(delay).map_err(|e| anyhow::anyhow!("--kv-events: {e}"))?;
            let loss: f64 = loss.trim().parse().ok().filter(|l| (0.0..1.0).contains(l)).with_context(|| {
                format!("--kv-events: the part that is lost is `{loss}`; 0 to less than 1 is allowed")
            })?;
            Some(KvEventSettings { delay, loss })
        }
    };
    let metrics_every = args.metrics_every.unwrap_or(base.scrape.interval);
    ensure!(!metrics_every.is_zero(), "--metrics-every is 0; a time is needed");
    Ok(SignalSettings {
        metrics_every,
        metrics_delay: args.metrics_delay,
        reported_blocks: None,
        discovery_delay: args.discovery_delay,
        kv_events,
    })
}

/// A run, and remarks on it: warnings about settings that had no effect, notes about messages between pickers.
type Played = (RunResult, BTreeSet<String>);

/// Plays all jobs, several at a time; returns the runs in the order of the jobs.
fn play_all(
    args: &ReplayArgs,
    jobs: &[ReplayJob<'_>],
    signals: &SignalSettings,
) -> Result<Vec<RunResult>, ReplayFailure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.jobs.unwrap_or(cores).clamp(1, jobs.len().max(1));
    let bar = progress(args, jobs).map_err(ReplayFailure::usage)?;
    let waiting = Mutex::new(jobs.iter().enumerate());
    let done: Mutex<BTreeMap<usize, Result<Played, ReplayFailure>>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((i, job)) = waiting.lock().next() else { break };
                    let run = play(args, job, signals, &bar);
                    let named = |ReplayFailure(code, e)| {
                        ReplayFailure(code, e.context(format!("{}, {}", job.source.name(), job.variant.name)))
                    };
                    done.lock().insert(i, run.map_err(named));
                }
            });
        }
    });
    bar.finish_and_clear();
    let (runs, remarks): (Vec<RunResult>, Vec<_>) =
        done.into_inner().into_values().collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    for remark in remarks.into_iter().flatten().collect::<BTreeSet<_>>() {
        message(remark);
    }
    Ok(runs)
}

fn progress(args: &ReplayArgs, jobs: &[ReplayJob<'_>]) -> anyhow::Result<ProgressBar> {
    let mut total = Some(0);
    for job in jobs {
        let one = match job.source {
            // Counting the requests of a file would read it to its end.
            WorkloadSource::Trace(_) | WorkloadSource::Piped(_) => args.requests,
            WorkloadSource::Sessions(..) | WorkloadSource::MadeUp(_) => workload(args, job.source, job.speed)?.total(),
        };
        total = total.zip(one).map(|(all, one)| all + one);
    }
    Ok(progress_of(total))
}

/// A progress bar for this number of requests, or for an unknown number.
fn progress_of(total: Option<u64>) -> ProgressBar {
    let style = |template| ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = match total {
        Some(total) => ProgressBar::new(total)
            .with_style(style("{bar:30} {human_pos}/{human_len} requests, {per_sec}, {eta} left")),
        None => ProgressBar::new_spinner().with_style(style("{spinner} {human_pos} requests, {per_sec}")),
    };
    bar.set_draw_target(if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    });
    bar
}

/// Counts requests for the progress bar.
struct Counting<'b> {
    tally: Tally,
    /// Rejected and lost requests by reason. The simulator has few different reasons.
    failures: BTreeMap<String, u64>,
    bar: &'b ProgressBar,
    unshown: u64,
}

impl Observer for Counting<'_> {
    fn served(&mut self, served: &Served) {
        self.tally.add(served);
        self.unshown += 1;
        if self.unshown == PROGRESS_STEP {
            self.bar.inc(std::mem::take(&mut self.unshown));
        }
    }

    fn queued(&mut self, queued: &Queued<'_>) {
        self.tally.queued(queued);
    }

    fn failed(&mut self, _: u64, reason: &str) {
        match self.failures.get_mut(reason) {
            Some(count) => *count += 1,
            None => _ = self.failures.insert(reason.to_owned(), 1),
        }
    }

    fn sampled(&mut self, at: Timestamp, servers: &[Sample]) {
        self.tally.sample(at, servers);
    }
}

/// The configuration of picker number `number`.
fn front(
    args: &ReplayArgs,
    job: &ReplayJob<'_>,
    signals: &SignalSettings,
    number: u16,
    clock: Clock,
) -> Result<FrontConfig, ReplayFailure> {
    let settings = &job.variant.policy.pool;
    let unusable = |e: anyhow::Error| ReplayFailure(EXIT_CONFIG, e);
    let scheduler = settings.scheduler(None).map_err(|e| unusable(e.into()))?;
    slo_profiles::fill(&scheduler.choices).map_err(|e| unusable(e.into()))?;
    let block_size = match signals.kv_events {
        // Events name blocks of the engines' size, whatever size the policy uses.
        Some(_) => plan::block_size(job.servers).map_err(ReplayFailure::usage)?,
        None => settings.prefix.block_size.unwrap_or(DEFAULT_BLOCK_SIZE),
    };
    let cache = settings.prefix.cache_config(BlockUnit::Tokens(block_size), args.seed);
    let cache = CacheConfig { claim_every_block: false, ..cache };
    let prefix = PoolPrefix {
        choose_rank: settings.prefix.choose_rank,
        // As live: engines that report their blocks know no tenants.
        isolate_tenants: settings.prefix.isolate_tenants && signals.kv_events.is_none(),
        ..simulated_prefix(&cache, settings.prefix.tenant_header.clone(), clock)
    };
    // Pickers choose at random independently of each other.
    let seed = args.seed.wrapping_add(u64::from(number) << 32);
    Ok(FrontConfig {
        patience: plan::patience(settings),
        flow: settings.flow.clone(),
        quotas: job.process.quotas.clone(),
        exchange: job.process.exchange.clone(),
        policies: job.process.policies.clone(),
        ..FrontConfig::of(settings.pool(scheduler, PoolStores::default()), prefix, seed)
    })
}

fn play(
    args: &ReplayArgs,
    job: &ReplayJob<'_>,
    signals: &SignalSettings,
    bar: &ProgressBar,
) -> Result<Played, ReplayFailure> {
    let clock = Clock::start();
    let began = clock.now();
    let pool = &job.variant.policy.pool;
    let named = |i: usize| pool.endpoints.get(i).cloned().unwrap_or_else(|| spec(i));
    let config = WorldConfig {
        pickers: (0..job.variant.pickers).map(|i| front(args, job, signals, i, clock)).collect::<Result<_, _>>()?,
        bus: job.variant.bus,
        servers: job
            .servers
            .iter()
            .enumerate()
            .map(|(i, s)| (s.spec(named(i)), engine(args, pool, &s.engine)))
            .collect(),
        ranks: job.ranks,
        signals: signals.clone(),
        changes: job.changes.to_vec(),
        seed: args.seed,
    };
    let joining = job
        .changes
        .iter()
        .filter_map(|c| if let FleetChange::Join(engine, _) = &c.change { Some(&**engine) } else { None });
    let fleet = config.servers.iter().map(|(spec, engine)| (spec.name.clone(), engine));
    let joining = (job.servers.len()..).map(|i| spec(i).name).zip(joining);
    let servers = fleet.chain(joining).map(|(name, engine)| facts(&name, engine)).collect();
    let targets = Targets { first_token: args.ttft_target, per_token: args.tpot_target };
    let roles = config.servers.iter().map(|(spec, _)| Roles::of_labels(&spec.labels)).collect();
    let tally = Tally::new(job.servers.len()).with_targets(targets).with_roles(roles).with_objective(pool.objective);
    let mut observer = Counting { tally, failures: BTreeMap::new(), bar, unshown: 0 };
    let mut workload = workload(args, job.source, job.speed).map_err(ReplayFailure::usage)?;
    let mut world = World::new(config, &mut *workload, &mut observer)
        .map_err(|e| ReplayFailure(EXIT_CONFIG, anyhow::anyhow!("`flowControl.ceiling`: {e}")))?;
    let outcome = world.run().map_err(|e| ReplayFailure::usage(e.into()))?;
    let late = late_changes(job, outcome.ended.since(Timestamp(0)));
    let models = world.models();
    let warnings = idle_rules(pool, &models).chain(late).map(|text| format!("warning: {text}"));
    let notes = job.variant.note(&job.source.name(), world.bus(), outcome.requests);
    let too_long = too_long(job, observer.failures.get(TOO_LONG).copied());
    let remarks = warnings.chain(notes).chain(too_long).collect();
    bar.inc(observer.unshown);
    let mut cell = BTreeMap::from([("endpoints".to_owned(), job.servers.len().to_string())]);
    if args.speed.len() > 1 || job.speed != 1.0 {
        cell.insert("speed".to_owned(), job.speed.to_string());
    }
    let run = RunResult {
        policy: job.variant.name.clone(),
        workload: job.source.name(),
        cell,
        tally: observer.tally,
        decisions: outcome.decisions,
        servers,
        failures: observer.failures,
        simulated: outcome.ended.since(Timestamp(0)),
        took: clock.now().since(began),
    };
    Ok((run, remarks))
}

/// A note about `count` requests of sessions that exceed the context of a server.
fn too_long(job: &ReplayJob<'_>, count: Option<u64>) -> Option<String> {
    let WorkloadSource::Sessions(name, _) = job.source else { return None };
    let limit = job.servers.iter().map(|server| server.engine.max_request_tokens()).min()?;
    let count = count?;
    Some(format!(
        "note: servers rejected {count} requests of {name} as too long; --max-context {limit} leaves them out"
    ))
}

/// The engine of a server, with the flags that apply to all servers. Without `--model`, it has the default model of the
/// pool.
fn engine(args: &ReplayArgs, pool: &PoolSettings, engine: &EngineConfig) -> EngineConfig {
    let named = args.model.as_deref().or(pool.default_model.as_deref());
    let model = named.map_or_else(|| engine.model.clone(), Into::into);
    EngineConfig { model, max_loras: args.max_loras, ..engine.clone() }
}

/// Warnings of rules whose models no request named.
fn idle_rules(pool: &PoolSettings, asked: &BTreeSet<Arc<str>>) -> impl Iterator<Item = String> {
    let is_idle = |rule: &&ModelRule| rule.models.iter().all(|model| !asked.contains(model.as_str()));
    let idle = pool.rules.iter().filter(|rule| !rule.models.is_empty()).filter(is_idle);
    idle.map(|rule| {
        let models = rule.models.join(", ");
        format!("the rule for {models} matched no request; --model names the base model")
    })
}

/// Warnings of changes that the run did not reach.
fn late_changes(job: &ReplayJob<'_>, ended: Duration) -> impl Iterator<Item = String> {
    let late = job.changes.iter().filter(move |change| change.at.since(Timestamp(0)) > ended);
    late.map(move |change| {
        let (at, ended) = (show_duration(change.at.since(Timestamp(0))), ended.as_secs_f64());
        let (workload, policy) = (job.source.name(), &job.variant.name);
        format!("--change after {at} has no effect: {workload} with {policy} ended after {ended:.1}s")
    })
}

/// Description of a simulated server in the report.
fn facts(name: &str, engine: &EngineConfig) -> ServerFacts {
    let token = engine.latency.per_prefill_token.as_secs_f64() / engine.latency.speed;
    ServerFacts { name: name.to_owned(), gpu_seconds_per_token: f64::from(engine.gpus) * token }
}

/// Writes the report in every requested form; returns whether all assertions hold.
fn show(args: &ReplayArgs, report: &Report, assertions: &[Assertion]) -> anyhow::Result<bool> {
    let document = report.document();
    let terminal = std::io::stdout().is_terminal();
    let width = terminal.then(|| usize::from(console::Term::stdout().size().1)).filter(|w| *w > 0);
    print(table::render(&document, TableStyle { width, colour: terminal && may_colour() }));
    let write = |path: &PathBuf, bytes: &[u8]| {
        std::fs::write(path, bytes).with_context(|| format!("can't write {}", path.display()))
    };
    if let Some(path) = &args.json {
        write(path, document.to_json()?.as_bytes())?;
    }
    if let Some(path) = &args.html {
        write(path, html::render(&document).as_bytes())?;
    }
    if let Some(path) = &args.svg {
        write(path, svg::picture(&document).as_bytes())?;
    }
    if let Some(path) = &args.markdown {
        write(path, markdown::render(&document).as_bytes())?;
    }
    let mut all_hold = true;
    for outcome in assertions.iter().flat_map(|assertion| assertion.check(&document)) {
        print(outcome.line);
        all_hold &= outcome.passed;
    }
    Ok(all_hold)
}
