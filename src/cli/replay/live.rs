//! `attache replay --target`: plays a workload to a real gateway in real time.

use super::args::NOT_LIVE;
use super::plan::MAX_SERVERS;
use super::sources::{WorkloadSource, sources, workload};
use super::{Counting, EXIT_INTERNAL, EXIT_STOPPED, ReplayArgs, ReplayFailure, progress_of, show};
use crate::cli::output::message;
use anyhow::Context;
use attache_loadgen::{LiveApi, LiveConfig, LiveError, LiveOutcome};
use attache_report::Observer;
use attache_report::assertion::Assertion;
use attache_report::served::{Ending, Sample, Served};
use attache_report::tally::{Tally, Targets};
use attache_report::{Report, RunResult, ServerFacts};
use attache_types::clock::{Clock, Timestamp};
use attache_workload::Workload;
use clap::Args;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Name of the only policy, that of the gateway.
const GATEWAY: &str = "gateway";

/// Flags of the live mode.
// Clap drops `requires = "target"` if a given flag conflicts with `--target`. So each flag here conflicts with those flags
// itself.
#[derive(Args, Debug)]
#[group(multiple = true, conflicts_with_all = NOT_LIVE)]
pub(super) struct GatewayArgs {
    /// Send the workload to this gateway in real time, `http://HOST:PORT`
    #[arg(long, value_name = "URL", help_heading = "Real gateway")]
    pub(super) target: Option<String>,
    /// API of the requests
    #[arg(long, value_enum, default_value = "chat", requires = "target", help_heading = "Real gateway")]
    api: LiveApi,
    /// Requests in flight at most; further requests are sent late
    #[arg(long, value_name = "N", default_value_t = attache_loadgen::DEFAULT_MAX_IN_FLIGHT, requires = "target",
    help_heading = "Real gateway")]
    max_in_flight: usize,
    /// Timeout of one request
    #[arg(
        long, value_name = "TIME", value_parser = attache_config::units::parse_duration, default_value = "5m",
        requires = "target", help_heading = "Real gateway"
    )]
    timeout: Duration,
    /// Header of every request, `name: value`
    #[arg(
        long = "header", value_name = "HEADER", value_parser = crate::cli::header, requires = "target",
        help_heading = "Real gateway"
    )]
    headers: Vec<(String, String)>,
    /// Response header that names the server [default: those of known gateways]
    #[arg(long, value_name = "NAME", requires = "target", help_heading = "Real gateway")]
    served_header: Option<String>,
    /// Request header that names the tenant, if the workload has tenants
    #[arg(long, value_name = "NAME", requires = "target", help_heading = "Real gateway")]
    tenant_header: Option<String>,
    /// Objective of requests with this priority, `PRIORITY=NAME`; others are sent without one
    #[arg(
        long, value_name = "OBJECTIVE", value_parser = objective, allow_hyphen_values = true,
        requires = "target", help_heading = "Real gateway"
    )]
    objective: Vec<(i32, String)>,
    /// Write the outcome of each request to this file, one JSON object per line
    #[arg(long, value_name = "FILE", requires = "target", help_heading = "Real gateway")]
    requests_out: Option<PathBuf>,
}

fn objective(text: &str) -> Result<(i32, String), String> {
    let split =
        text.split_once('=').and_then(|(priority, name)| Some((priority.trim().parse().ok()?, name.trim().to_owned())));
    split
        .filter(|(_, name)| !name.is_empty())
        .ok_or_else(|| "a priority and a name are needed, as in `-1=batch`".to_owned())
}

/// Plays every source to `target`, one after the other; returns whether all assertions hold.
pub(super) fn run(args: &ReplayArgs, target: &str) -> Result<bool, ReplayFailure> {
    let assertions = args.assert.iter().map(|text| Assertion::parse(text, &[GATEWAY])).collect::<Result<Vec<_>, _>>();
    let assertions = assertions.map_err(|e| ReplayFailure::usage(e.into()))?;
    if !matches!(args.endpoints.as_slice(), [] | [1..=MAX_SERVERS]) {
        let got = &args.endpoints;
        return Err(ReplayFailure::usage(anyhow::anyhow!(
            "--endpoints is {got:?}; one number from 1 to {MAX_SERVERS} is allowed with --target"
        )));
    }
    let internal = |e: anyhow::Error| ReplayFailure(EXIT_INTERNAL, e);
    // reqwest uses the process-wide provider; a second call, in tests, finds it installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| internal(e.into()))?;
    let cannot_write = |path: &PathBuf| format!("can't write {}", path.display());
    let out = args.live.requests_out.as_ref();
    let out = out.map(|path| File::create(path).with_context(|| cannot_write(path))).transpose().map_err(internal)?;
    let mut out = out.map(BufWriter::new);
    let sources = sources(args).map_err(ReplayFailure::usage)?;
    let (mut runs, mut stopped) = (Vec::new(), false);
    for (source, speed) in sources.iter().flat_map(|source| args.speed.iter().map(move |speed| (source, *speed))) {
        let mut workload = workload(args, source, speed).map_err(ReplayFailure::usage)?;
        let run = runtime.block_on(play(args, target, source, speed, &mut *workload, out.as_mut()));
        let run = run.map_err(|e| match e {
            LiveError::Setting(_) | LiveError::Workload(_) => ReplayFailure::usage(e.into()),
            _ => internal(e.into()),
        })?;
        runs.push(run.0);
        stopped = run.1;
        if stopped {
            break;
        }
    }
    if let (Some(path), Some(mut out)) = (&args.live.requests_out, out) {
        out.flush().with_context(|| cannot_write(path)).map_err(internal)?;
    }
    let report = Report {
        runs,
        baseline: 0,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        seed: args.seed,
        config: String::new(),
    };
    // Assertions need the complete workload.
    let hold = show(args, &report, if stopped { &[] } else { &assertions }).map_err(internal)?;
    if stopped {
        return Err(ReplayFailure(
            EXIT_STOPPED,
            anyhow::anyhow!("stopped; the figures are of what was played until then"),
        ));
    }
    Ok(hold)
}

/// Counts outcomes, and writes them down.
struct Writing<'w> {
    counting: Counting<'w>,
    /// Fields that each line has in addition.
    run: (String, f64),
    names: Vec<String>,
    reasons: HashMap<u64, String>,
    out: Option<&'w mut BufWriter<File>>,
    failed: Option<std::io::Error>,
}

/// A line of `--requests-out`; times are seconds.
#[derive(Serialize)]
struct Ended<'s> {
    workload: &'s str,
    speed: f64,
    number: u64,
    at: f64,
    endpoint: Option<&'s str>,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    ttft: Option<f64>,
    total: f64,
    prompt_tokens: u32,
    cached_tokens: u32,
    output_tokens: u32,
}

impl Observer for Writing<'_> {
    fn served(&mut self, served: &Served) {
        self.counting.served(served);
        let reason = self.reasons.remove(&served.number);
        let Some(out) = self.out.as_mut().filter(|_| self.failed.is_none()) else { return };
        let line = Ended {
            workload: &self.run.0,
            speed: self.run.1,
            number: served.number,
            at: served.at.0 as f64 / 1e9,
            endpoint: served.endpoint.and_then(|at| self.names.get(at as usize)).map(String::as_str),
            status: match served.ending {
                Ending::Answered => "answered",
                Ending::Refused => "refused",
                Ending::Lost => "lost",
            },
            reason,
            ttft: served.first_token.map(|time| time.as_secs_f64()),
            total: served.total.as_secs_f64(),
            prompt_tokens: served.prompt_tokens,
            cached_tokens: served.cached_tokens,
            output_tokens: served.generated_tokens,
        };
        let written = serde_json::to_writer(&mut **out, &line).map_err(Into::into).and_then(|()| out.write_all(b"\n"));
        self.failed = written.err();
    }

    fn named(&mut self, _: u32, name: &str) {
        self.names.push(name.to_owned());
    }

    fn failed(&mut self, number: u64, reason: &str) {
        self.reasons.insert(number, reason.to_owned());
    }

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {}
}

async fn play(
    args: &ReplayArgs,
    target: &str,
    source: &WorkloadSource,
    speed: f64,
    workload: &mut dyn Workload,
    out: Option<&mut BufWriter<File>>,
) -> Result<(RunResult, bool), LiveError> {
    let flags = &args.live;
    let config = LiveConfig {
        api: flags.api,
        model: args.model.clone(),
        max_in_flight: flags.max_in_flight,
        timeout: flags.timeout,
        headers: flags.headers.clone(),
        seed: args.seed,
        served_header: flags.served_header.clone(),
        tenant_header: flags.tenant_header.clone(),
        objectives: flags.objective.iter().cloned().collect(),
        ..LiveConfig::new(target)
    };
    let bar = progress_of(workload.total());
    let targets = Targets { first_token: args.ttft_target, per_token: args.tpot_target };
    // The number of servers is known only from `--servers` or from responses.
    let tally = Tally::new(args.endpoints.first().copied().unwrap_or_default()).with_targets(targets);
    let counting = Counting { tally, failures: BTreeMap::new(), bar: &bar, unshown: 0 };
    let (run, names, reasons) = ((source.name(), speed), Vec::new(), HashMap::new());
    let mut observer = Writing { counting, run, names, reasons, out, failed: None };
    let (clock, stop) = (Clock::start(), CancellationToken::new());
    let began = clock.now();
    let on_signal = stop.clone();
    let signal = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            message("stopping: nothing more is sent; what is under way may end");
            on_signal.cancel();
        }
    });
    let played = attache_loadgen::play(&config, workload, &mut observer, &stop).await;
    signal.abort();
    bar.finish_and_clear();
    let outcome = played?;
    tell(&outcome, args.endpoints.first().copied());
    if let Some(error) = observer.failed {
        message(format_args!("--requests-out ends early: {error}"));
    }
    let mut cell = BTreeMap::from([("target".to_owned(), target.to_owned())]);
    if speed != 1.0 {
        cell.insert("speed".to_owned(), speed.to_string());
    }
    let run = RunResult {
        policy: GATEWAY.to_owned(),
        workload: source.name(),
        cell,
        tally: observer.counting.tally,
        decisions: 0,
        // The cost of a token on a real server is unknown.
        servers: outcome
            .endpoints
            .iter()
            .map(|name| ServerFacts { name: name.clone(), gpu_seconds_per_token: 0.0 })
            .collect(),
        failures: outcome.failures.clone(),
        simulated: outcome.elapsed,
        took: clock.now().since(began),
    };
    Ok((run, outcome.stopped))
}

/// Notes below the tables; `servers` is the number of servers.
fn tell(outcome: &LiveOutcome, servers: Option<usize>) {
    let LiveOutcome { model, sent, late, latest, held, most_in_flight, cut, endpoints, failures, unranked, .. } =
        outcome;
    message(format_args!(
        "{sent} requests sent for `{model}`, at most {most_in_flight} at once; {} servers responded",
        endpoints.len()
    ));
    if servers.is_none() && endpoints.len() > 1 {
        message("the imbalance is that of those servers; --endpoints N says how many there are");
    }
    if *unranked > 0 {
        message(format_args!(
            "{unranked} have a priority that the gateway does not get; --objective PRIORITY=NAME sends an objective \
             for it"
        ));
    }
    if *late > 0 {
        message(format_args!(
            "{late} were sent late, the latest by {latest:.1?}: {held} waited for --max-in-flight, the others for \
             this machine"
        ));
    }
    if *cut > 0 {
        message(format_args!("{cut} were cancelled at the end"));
    }
    for (reason, count) in failures {
        message(format_args!("{count} failed: {reason}"));
    }
}
