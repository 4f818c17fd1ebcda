//! `attache replay`: what each policy buys, on traces and made-up workloads, in virtual time.

mod list;
mod live;
mod plan;
mod record;

use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE, colour};
use crate::clock::{Clock, Timestamp};
use crate::config::defaults::DEFAULT_BLOCK_SIZE;
use crate::config::settings::PoolSettings;
use crate::config::units::parse_duration;
use crate::config::{Overrides, Settings};
use crate::pool::Roles;
use crate::replay::front::FrontConfig;
use crate::replay::pace::{Closed, Limited, Resampled, Scaled};
use crate::replay::report::assertion::Assertion;
use crate::replay::report::table::TableStyle;
use crate::replay::report::{Report, Run, html, markdown, png, table};
use crate::replay::served::{Queued, Sample, Served};
use crate::replay::tally::{Tally, Targets};
use crate::replay::turns::Turns;
use crate::replay::workload::Workload;
use crate::replay::world::{Hearing, KvHearing, Observer, TimedChange, World, WorldConfig, spec};
use crate::replay::{synthetic, trace};
use crate::scrape::slo_profiles;
use crate::sim::engine::EngineConfig;
use anyhow::{Context, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use plan::{Policy, Server};
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// An assertion does not hold.
const EXIT_ASSERTION: u8 = 2;
/// Seed of a replay that was given none: it shows the same each time.
const DEFAULT_SEED: u64 = 1;
/// The policies beside the configuration's when nobody names any: the field's floor, its usual default, and chance.
const DEFAULT_COMPARE: &str = "least-request,pipeline,prefix-cache,random";
/// 8 servers: what most published comparisons use.
const DEFAULT_SERVERS: usize = 8;
/// 4 adapters in a batch: what servers of adapters are started with, where vLLM's own default of 1 has every other adapter wait.
const DEFAULT_MAX_LORAS: u32 = 4;
/// The bar moves once for so many requests.
const PROGRESS_STEP: u64 = 256;

const EXAMPLES: &str = "\
Examples:
  The trace of Mooncake's conversations on eight servers, four policies beside the default:
    attache replay --trace conversation.jsonl

  The configuration that production runs, against others, at three speeds, as a page to look at:
    attache replay --config-file prod.yaml --trace t.jsonl --endpoints 16 --speed 1,1.5,2 \\
      --compare least-request,llm-d=epp.yaml --html report.html

  A made-up workload, and a server that dies in the middle of it:
    attache replay --workload multi-turn:clients=64 --change '5m lose 3' --change '8m join'

  A pool of unequal servers whose KV events come 50 ms late, and one in a hundred not at all:
    attache replay --trace t.jsonl --profile '8b-h100*6,8b-h100@0.5*2' --kv-events 50ms,0.01

  Two servers compute prompts for six others, or every server serves whole requests:
    attache replay --workload unique --profile '8b-h100:prefill*2,8b-h100:decode*6' --disaggregation predicted,always,never --compare ''
    attache replay --workload unique --profile '8b-h100*8'

  In CI: fails with exit code 2 when it does not hold:
    attache replay --trace t.jsonl --assert 'predicted-latency:ttft_mean<0.7*pipeline:ttft_mean'

  What it buys that requests wait here while the servers are full, short ones first:
    attache replay --trace t.jsonl --compare predicted-latency+late-binding --assert 'predicted-latency+late-binding:wait_max<20s'

  The same workload to a real gateway, at real time:
    attache replay --workload multi-turn:clients=8 --target http://127.0.0.1:10000

  What `attache run --record run.jsonl` has seen, decided again; and by another configuration:
    attache replay --from-record run.jsonl
    attache replay --from-record run.jsonl --config-file other.yaml

  All workloads, profiles and policies:
    attache replay --list

Exit codes: 0 good, 2 an --assert does not hold or a recorded decision came out otherwise, 64 wrong usage, 70 internal error, 78 wrong configuration.";

/// Play a workload to simulated servers in virtual time, once with each policy, and compare.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReplayArgs {
    /// A recorded workload: Mooncake JSONL, Azure or BurstGPT CSV, attache.trace.v1; `-` reads standard input
    #[arg(long, value_name = "FILE", help_heading = "What is asked")]
    trace: Vec<PathBuf>,
    /// A made-up workload with its parameters, `name:key=value,…`; see --list
    #[arg(long, value_name = "NAME", help_heading = "What is asked")]
    workload: Vec<String>,
    /// How many times as fast as it was recorded; several give a table each
    #[arg(long, value_name = "FACTOR", value_delimiter = ',', default_value = "1", help_heading = "What is asked")]
    speed: Vec<f64>,
    /// Only so many requests
    #[arg(long, value_name = "N", help_heading = "What is asked")]
    requests: Option<u64>,
    /// Only the requests that come before this moment
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is asked")]
    until: Option<Duration>,
    /// Forget the trace's times: so many requests a second, at random
    #[arg(long, value_name = "RATE", conflicts_with_all = ["bursty", "clients"], help_heading = "What is asked")]
    poisson: Option<f64>,
    /// The same in bursts: rate, and coefficient of variation of the gaps
    #[arg(long, value_name = "RATE,CV", conflicts_with = "clients", help_heading = "What is asked")]
    bursty: Option<String>,
    /// Forget the trace's times: so many clients, each asks again after its answer
    #[arg(long, value_name = "N", help_heading = "What is asked")]
    clients: Option<u32>,
    /// And waits so long in between
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", requires = "clients", help_heading = "What is asked")]
    think: Duration,

    /// The configuration whose pool is played, Attaché's own or an EndpointPickerConfig
    #[arg(long, alias = "config", value_name = "FILE", help_heading = "Who decides")]
    config_file: Option<PathBuf>,
    /// Which of its pools [default: the first]
    #[arg(long, value_name = "NAME", help_heading = "Who decides")]
    pool: Option<String>,
    /// Whether requests are split between prefill and decode servers: `predicted`, `always`, `never`, `prefix-based:TOKENS`; several make
    /// as many of each policy [default: the configuration's]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Who decides")]
    disaggregation: Vec<String>,
    /// Policies beside the configuration's: `name`, `name={…}` with parameters, `label=file.yaml`; `+late-binding` behind one has requests wait
    /// while the pool is full (the configuration's `flowControl`, else the recommended one), `+at-once` has none wait
    #[arg(long, value_name = "LIST", default_value = DEFAULT_COMPARE, help_heading = "Who decides")]
    compare: Vec<String>,
    /// The policy that others are compared with [default: the configuration's]
    #[arg(long, value_name = "NAME", help_heading = "Who decides")]
    baseline: Option<String>,
    /// Of all chance
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SEED, help_heading = "Who decides")]
    seed: u64,

    /// How many servers; several give a table each [default: as many as the configuration names, or 8]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Who serves")]
    endpoints: Vec<usize>,
    /// What they are: `profile[@speed][:role][*number],…`; see --list
    #[arg(long, value_name = "LIST", default_value = "8b-h100", help_heading = "Who serves")]
    profile: String,
    /// Adapters that each holds at once
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_LORAS, help_heading = "Who serves")]
    max_loras: u32,
    /// What happens to them: `10m lose 3`, `5m restart 0`, `1h join`
    #[arg(long, value_name = "CHANGE", help_heading = "Who serves")]
    change: Vec<String>,
    /// How often metrics are read [default: the configuration's]; what is older than its `staleAfter` says nothing
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Who serves")]
    metrics_every: Option<Duration>,
    /// How long they are on their way
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", help_heading = "Who serves")]
    metrics_delay: Duration,
    /// How long until discovery tells of a change
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s", help_heading = "Who serves")]
    discovery_delay: Duration,
    /// Engines publish KV events: how long they are on their way, and the part that is lost and replayed
    #[arg(long, value_name = "TIME[,PART]", num_args = 0..=1, default_missing_value = "10ms", help_heading = "Who serves")]
    kv_events: Option<String>,

    #[command(flatten)]
    live: live::LiveArgs,
    /// Decide again what `attache run --record` has written
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace", "workload"], help_heading = "A recorded run")]
    from_record: Option<PathBuf>,

    /// The longest time to the first token that is good
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is shown")]
    ttft_target: Option<Duration>,
    /// The longest time between tokens that is good
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is shown")]
    tpot_target: Option<Duration>,
    /// What must hold, `ttft_p90<1.2s`; exit code 2 when it does not
    #[arg(long, value_name = "EXPRESSION", help_heading = "What is shown")]
    assert: Vec<String>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    json: Option<PathBuf>,
    /// Write a page with plots that needs nothing else
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    html: Option<PathBuf>,
    /// Write the main plots as a picture
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    png: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    markdown: Option<PathBuf>,
    /// Runs at the same time [default: one a core]
    #[arg(long, value_name = "N", help_heading = "What is shown")]
    jobs: Option<usize>,
    /// Show all workloads, engine profiles and policies
    #[arg(long, help_heading = "What is shown")]
    list: bool,
}

/// A failure, and the code that the process ends with.
struct Failure(u8, anyhow::Error);

impl Failure {
    fn usage(error: anyhow::Error) -> Self {
        Self(EXIT_USAGE, error)
    }
}

pub(super) fn run(args: &ReplayArgs) -> ExitCode {
    if args.list {
        print!("{}", list::all());
        return ExitCode::SUCCESS;
    }
    let result = match (&args.from_record, &args.live.target) {
        (Some(file), _) => record::run(file, args.config_file.as_deref()),
        (None, Some(target)) => live::run(args, target),
        (None, None) => replay(args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(EXIT_ASSERTION),
        Err(Failure(code, error)) => {
            eprintln!("error: {error:#}");
            ExitCode::from(code)
        }
    }
}

/// What is asked: a trace or a made-up workload.
#[derive(Clone, Debug)]
enum Source {
    Trace(PathBuf),
    MadeUp(String),
}

impl Source {
    fn name(&self) -> String {
        match self {
            Source::Trace(path) => path.file_name().map_or_else(|| "-".into(), |n| n.to_string_lossy().into_owned()),
            Source::MadeUp(spelling) => spelling.clone(),
        }
    }
}

/// One run of the plan.
struct Job<'p> {
    source: &'p Source,
    speed: f64,
    servers: &'p [Server],
    changes: &'p [TimedChange],
    policy: &'p Policy,
}

/// Plays everything and shows it; whether all assertions hold.
fn replay(args: &ReplayArgs) -> Result<bool, Failure> {
    let (base, config_text) = configuration(args)?;
    let fleets = fleets(args, &base).map_err(Failure::usage)?;
    let policies = plan::policies(&base, &args.compare, |file| pool_of(file, None).map(|(pool, _)| pool))
        .and_then(|policies| plan::split_by(policies, &args.disaggregation, plan::may_split(&fleets)))
        .map_err(Failure::usage)?;
    for policy in &policies {
        let playable = policy.pool.scheduler(None).map_err(Into::into).and_then(|_| playable(&policy.pool));
        playable.with_context(|| format!("policy `{}`", policy.name)).map_err(Failure::usage)?;
    }
    let names: Vec<&str> = policies.iter().map(|p| p.name.as_str()).collect();
    let assertions = args.assert.iter().map(|text| Assertion::parse(text, &names)).collect::<Result<Vec<_>, _>>();
    let assertions = assertions.map_err(|e| Failure::usage(e.into()))?;
    let baseline = baseline(args, &names).map_err(Failure::usage)?;
    let sources = sources(args).map_err(Failure::usage)?;
    let changes = changes(args, &fleets).map_err(Failure::usage)?;
    let hearing = hearing(args, &base).map_err(Failure::usage)?;

    let mut jobs = Vec::new();
    for source in &sources {
        for fleet in &fleets {
            for speed in &args.speed {
                for policy in &policies {
                    jobs.push(Job { source, speed: *speed, servers: fleet, changes: &changes, policy });
                }
            }
        }
    }
    // What can't be opened is said before anything runs.
    for source in &sources {
        workload(args, source, 1.0).map_err(Failure::usage)?;
    }
    let runs = play_all(args, &jobs, &hearing).map_err(|e| Failure(EXIT_INTERNAL, e))?;
    let report = Report {
        runs,
        baseline,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        seed: args.seed,
        config: config_text,
    };
    show(args, &report, &assertions).map_err(|e| Failure(EXIT_INTERNAL, e))
}

/// The pool whose configuration is played, and the file's text.
fn configuration(args: &ReplayArgs) -> Result<(PoolSettings, String), Failure> {
    match &args.config_file {
        Some(file) => pool_of(file, args.pool.as_deref()).map_err(|e| Failure(EXIT_CONFIG, e)),
        None => {
            // The defaults of a pool that nobody has configured.
            let overrides = Overrides { endpoints: vec!["127.0.0.1:8000".to_owned()], ..Overrides::default() };
            let settings = ReloadSource::new(None, None, overrides).read().settings;
            let pool = settings.and_then(|s| s.pools.into_iter().next());
            let pool = pool.map(|pool| PoolSettings { endpoints: Vec::new(), ..pool });
            Ok((
                pool.context("the default configuration has no pool").map_err(|e| Failure(EXIT_INTERNAL, e))?,
                String::new(),
            ))
        }
    }
}

fn pool_of(file: &Path, name: Option<&str>) -> anyhow::Result<(PoolSettings, String)> {
    let reading = ReloadSource::of_file_alone(file.to_owned()).read();
    eprint!("{}", reading.render(colour()));
    let text = reading.text.as_ref().map(|t| t.text().to_owned()).unwrap_or_default();
    let settings: Settings = reading.settings.with_context(|| format!("{} can't be used", file.display()))?;
    let known: Vec<String> = settings.pools.iter().map(|p| p.name.to_string()).collect();
    let pool = settings.pools.into_iter().find(|p| name.is_none_or(|name| *p.name == *name));
    let pool = pool.with_context(|| format!("no such pool in {}; its pools: {}", file.display(), known.join(", ")))?;
    Ok((pool, text))
}

/// What a strategy reads in Redis of production is not there when it is played.
fn playable(pool: &PoolSettings) -> anyhow::Result<()> {
    anyhow::ensure!(
        !pool.reads_redis(),
        "a strategy has `profilesFromRedis`, and what stands in Redis is not played; `profiles` may name files"
    );
    Ok(())
}

fn baseline(args: &ReplayArgs, names: &[&str]) -> anyhow::Result<usize> {
    let Some(wanted) = &args.baseline else { return Ok(0) };
    let found = names.iter().position(|name| name == wanted);
    found.with_context(|| format!("--baseline `{wanted}` is none of the policies: {}", names.join(", ")))
}

fn sources(args: &ReplayArgs) -> anyhow::Result<Vec<Source>> {
    let traces = args.trace.iter().cloned().map(Source::Trace);
    let sources: Vec<Source> = traces.chain(args.workload.iter().cloned().map(Source::MadeUp)).collect();
    ensure!(!sources.is_empty(), "nothing to play; give --trace FILE or --workload NAME (--list shows all)");
    let again = args.speed.len() * args.endpoints.len().max(1) > 1 || !args.compare.is_empty();
    let once = sources.iter().filter(|s| matches!(s, Source::Trace(path) if path.as_os_str() == "-")).count();
    ensure!(once == 0 || !again, "a trace is read once for each policy, which standard input can't be; give a file");
    Ok(sources)
}

fn fleets(args: &ReplayArgs, base: &PoolSettings) -> anyhow::Result<Vec<Vec<Server>>> {
    if !args.endpoints.is_empty() {
        return args.endpoints.iter().map(|n| plan::servers(&args.profile, Some(*n))).collect();
    }
    let listed = plan::servers(&args.profile, None)?;
    // A list with numbers says how many there are.
    let count = match (base.endpoints.len(), listed.len()) {
        (0, 1) => Some(DEFAULT_SERVERS),
        (0, _) => None,
        (n, _) => Some(n),
    };
    Ok(vec![plan::servers(&args.profile, count)?])
}

fn changes(args: &ReplayArgs, fleets: &[Vec<Server>]) -> anyhow::Result<Vec<TimedChange>> {
    let first = fleets.first().map(Vec::as_slice).unwrap_or_default();
    let mut changes = args.change.iter().map(|c| plan::change(c, first)).collect::<anyhow::Result<Vec<_>>>()?;
    changes.sort_by_key(|c| c.at);
    Ok(changes)
}

fn hearing(args: &ReplayArgs, base: &PoolSettings) -> anyhow::Result<Hearing> {
    let kv_events = match &args.kv_events {
        None => base.prefix.kv_events.as_ref().map(|_| KvHearing { delay: Duration::from_millis(10), loss: 0.0 }),
        Some(spelling) => {
            let (delay, loss) = spelling.split_once(',').unwrap_or((spelling, "0"));
            let delay = parse_duration(delay).map_err(|e| anyhow::anyhow!("--kv-events: {e}"))?;
            let loss: f64 = loss.trim().parse().ok().filter(|l| (0.0..1.0).contains(l)).with_context(|| {
                format!("--kv-events: the part that is lost is `{loss}`; 0 to less than 1 is allowed")
            })?;
            Some(KvHearing { delay, loss })
        }
    };
    let metrics_every = args.metrics_every.unwrap_or(base.scrape.interval);
    ensure!(!metrics_every.is_zero(), "--metrics-every is 0; a time is needed");
    Ok(Hearing {
        metrics_every,
        metrics_delay: args.metrics_delay,
        blocks_told: None,
        discovery_delay: args.discovery_delay,
        kv_events,
    })
}

/// One workload, from its beginning.
fn workload(args: &ReplayArgs, source: &Source, speed: f64) -> anyhow::Result<Box<dyn Workload>> {
    let named = |error: anyhow::Error| error.context(source.name());
    let mut workload = match source {
        Source::Trace(path) => trace::open(path, &trace::Options::default()).map_err(|e| named(e.into()))?,
        Source::MadeUp(spelling) => {
            synthetic::build(spelling, args.seed).map_err(|e| anyhow::anyhow!("--workload: {e}"))?
        }
    };
    if let Some(clients) = args.clients {
        workload = Box::new(Closed::new(workload, clients, args.think)?);
    } else if let Some(rate) = args.poisson {
        workload = Box::new(Resampled::poisson(workload, rate, args.seed)?);
    } else if let Some(bursty) = &args.bursty {
        let form = || format!("--bursty is `{bursty}`; a rate and a coefficient of variation are needed, as in `20,3`");
        let (rate, cv) = bursty.split_once(',').with_context(form)?;
        let number = |text: &str| text.trim().parse::<f64>().ok().with_context(form);
        workload = Box::new(Resampled::bursty(workload, number(rate)?, number(cv)?, args.seed)?);
    }
    if speed != 1.0 {
        workload = Box::new(Scaled::new(workload, speed)?);
    }
    if args.requests.is_some() || args.until.is_some() {
        workload = Box::new(Limited::new(workload, args.requests, args.until));
    }
    Ok(workload)
}

/// Plays all jobs, several at a time; runs in the order of the jobs.
fn play_all(args: &ReplayArgs, jobs: &[Job<'_>], hearing: &Hearing) -> anyhow::Result<Vec<Run>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.jobs.unwrap_or(cores).clamp(1, jobs.len().max(1));
    let bar = progress(args, jobs)?;
    let waiting = Mutex::new(jobs.iter().enumerate());
    let done: Mutex<BTreeMap<usize, anyhow::Result<Run>>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((i, job)) = waiting.lock().next() else { break };
                    let run = play(args, job, hearing, &bar);
                    done.lock().insert(i, run.with_context(|| format!("{}, {}", job.source.name(), job.policy.name)));
                }
            });
        }
    });
    bar.finish_and_clear();
    done.into_inner().into_values().collect()
}

fn progress(args: &ReplayArgs, jobs: &[Job<'_>]) -> anyhow::Result<ProgressBar> {
    let mut total = Some(0);
    for job in jobs {
        let one = match job.source {
            // A file is not read to its end to be counted.
            Source::Trace(_) => args.requests,
            Source::MadeUp(_) => workload(args, job.source, job.speed)?.total(),
        };
        total = total.zip(one).map(|(all, one)| all + one);
    }
    Ok(progress_of(total))
}

/// A bar of so many requests, or of a number that is not known.
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

/// Counts what happens.
struct Counting<'b> {
    tally: Tally,
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

    fn sampled(&mut self, at: Timestamp, servers: &[Sample]) {
        self.tally.sample(at, servers);
    }
}

fn play(args: &ReplayArgs, job: &Job<'_>, hearing: &Hearing, bar: &ProgressBar) -> anyhow::Result<Run> {
    let clock = Clock::start();
    let began = clock.now();
    let pool = &job.policy.pool;
    let scheduler = pool.scheduler(None)?;
    slo_profiles::fill(&scheduler.choices)?;
    let front = FrontConfig {
        scheduler,
        patience: plan::patience(pool),
        stale_after: pool.scrape.stale_after,
        block_size: match hearing.kv_events {
            // Events name blocks as the engines cut them, whatever the policy would cut for itself.
            Some(_) => plan::block_size(job.servers)?,
            None => pool.prefix.block_size.unwrap_or(DEFAULT_BLOCK_SIZE),
        },
        max_index_bytes: pool.prefix.max_bytes,
        tenant_share: pool.prefix.tenant_share,
        tenant_header: pool.prefix.tenant_header.clone(),
        claim_life: pool.prefix.claim_life,
        turns: pool.flow.clone().map(|flow| Turns::new(flow, args.seed)).transpose()?,
        seed: args.seed,
    };
    let named = |i: usize| pool.endpoints.get(i).cloned().unwrap_or_else(|| spec(i));
    let config = WorldConfig {
        front,
        servers: job
            .servers
            .iter()
            .enumerate()
            .map(|(i, s)| (s.spec(named(i)), EngineConfig { max_loras: args.max_loras, ..s.engine.clone() }))
            .collect(),
        hearing: hearing.clone(),
        changes: job.changes.to_vec(),
        seed: args.seed,
    };
    let targets = Targets { first_token: args.ttft_target, per_token: args.tpot_target };
    let roles = config.servers.iter().map(|(spec, _)| Roles::of_labels(&spec.labels)).collect();
    let tally = Tally::new(job.servers.len()).with_targets(targets).with_roles(roles);
    let mut observer = Counting { tally, bar, unshown: 0 };
    let mut workload = workload(args, job.source, job.speed)?;
    let outcome = World::new(config, &mut *workload, &mut observer).run()?;
    bar.inc(observer.unshown);
    let mut cell = BTreeMap::from([("endpoints".to_owned(), job.servers.len().to_string())]);
    if args.speed.len() > 1 || job.speed != 1.0 {
        cell.insert("speed".to_owned(), job.speed.to_string());
    }
    let per_token = job.servers.first().map(|s| &s.engine.latency);
    let per_token = per_token.map_or(0.0, |l| l.per_prefill_token.as_secs_f64() / l.speed);
    Ok(Run {
        policy: job.policy.name.clone(),
        workload: job.source.name(),
        cell,
        tally: observer.tally,
        decisions: outcome.decisions,
        gpu_seconds_per_token: per_token,
        simulated: outcome.ended.since(Timestamp(0)),
        took: clock.now().since(began),
    })
}

/// Shows the report in every form that was asked for; whether all assertions hold.
fn show(args: &ReplayArgs, report: &Report, assertions: &[Assertion]) -> anyhow::Result<bool> {
    let document = report.document();
    let terminal = std::io::stdout().is_terminal();
    let width = terminal.then(|| usize::from(console::Term::stdout().size().1)).filter(|w| *w > 0);
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    print!("{}", table::render(&document, TableStyle { width, colour: terminal && !no_colour }));
    let write = |path: &PathBuf, bytes: &[u8]| {
        std::fs::write(path, bytes).with_context(|| format!("can't write {}", path.display()))
    };
    if let Some(path) = &args.json {
        write(path, document.to_json()?.as_bytes())?;
    }
    if let Some(path) = &args.html {
        write(path, html::render(&document).as_bytes())?;
    }
    if let Some(path) = &args.png {
        write(path, &png::render(&document)?)?;
    }
    if let Some(path) = &args.markdown {
        write(path, markdown::render(&document).as_bytes())?;
    }
    let mut all_hold = true;
    for outcome in assertions.iter().flat_map(|assertion| assertion.check(&document)) {
        println!("{}", outcome.line);
        all_hold &= outcome.passed;
    }
    Ok(all_hold)
}
