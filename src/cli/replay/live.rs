//! `attache replay --target`: a workload played to a real gateway at real time.

use super::{Counting, EXIT_INTERNAL, Failure, ReplayArgs, Source, progress_of, show, sources, workload};
use crate::clock::Clock;
use crate::replay::live::{self, LiveApi, LiveConfig, LiveError, LiveOutcome};
use crate::replay::report::assertion::Assertion;
use crate::replay::report::{Report, Run};
use crate::replay::tally::{Tally, Targets};
use crate::replay::workload::Workload;
use clap::Args;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The name of the one policy: whatever the gateway does.
const GATEWAY: &str = "gateway";

/// Flags of the live mode.
#[derive(Args, Debug)]
pub(super) struct LiveArgs {
    /// Play to this gateway at real time instead, `http://HOST:PORT`
    #[arg(long, value_name = "URL", conflicts_with_all = ["change", "kv_events", "from_record"], help_heading = "A real gateway")]
    pub(super) target: Option<String>,
    /// Which API is asked
    #[arg(long, value_enum, default_value = "chat", requires = "target", help_heading = "A real gateway")]
    api: LiveApi,
    /// The model that is asked for [default: the first of the gateway's /v1/models]
    #[arg(long, value_name = "NAME", requires = "target", help_heading = "A real gateway")]
    model: Option<String>,
    /// At most so many requests at once; the others are sent late
    #[arg(long, value_name = "N", default_value_t = live::DEFAULT_MAX_IN_FLIGHT, requires = "target", help_heading = "A real gateway")]
    max_in_flight: usize,
    /// Longest time for one request
    #[arg(long, value_name = "TIME", value_parser = crate::config::units::parse_duration, default_value = "5m", requires = "target", help_heading = "A real gateway")]
    timeout: Duration,
    /// Sent with every request, `name: value`
    #[arg(long = "header", value_name = "HEADER", value_parser = header, requires = "target", help_heading = "A real gateway")]
    headers: Vec<(String, String)>,
    /// The header of answers that names the server [default: those of known gateways]
    #[arg(long, value_name = "NAME", requires = "target", help_heading = "A real gateway")]
    served_header: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let split = text.split_once(':').map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    split.filter(|(name, _)| !name.is_empty()).ok_or_else(|| "a name, a colon and a value are needed".to_owned())
}

/// Plays every source to `target`, one after the other; whether all assertions hold.
pub(super) fn run(args: &ReplayArgs, target: &str) -> Result<bool, Failure> {
    let assertions = args.assert.iter().map(|text| Assertion::parse(text, &[GATEWAY])).collect::<Result<Vec<_>, _>>();
    let assertions = assertions.map_err(|e| Failure::usage(e.into()))?;
    let internal = |e: anyhow::Error| Failure(EXIT_INTERNAL, e);
    // reqwest takes the process's provider; a second call, in tests, finds it installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| internal(e.into()))?;
    let mut runs = Vec::new();
    for source in sources(args).map_err(Failure::usage)? {
        for speed in &args.speed {
            let mut workload = workload(args, &source, *speed).map_err(Failure::usage)?;
            let run = runtime.block_on(play(args, target, &source, *speed, &mut *workload));
            let (run, stopped) = run.map_err(|e| match e {
                LiveError::Setting(_) => Failure::usage(e.into()),
                _ => internal(e.into()),
            })?;
            runs.push(run);
            if stopped {
                break;
            }
        }
    }
    let report = Report {
        runs,
        baseline: 0,
        command: std::env::args().collect::<Vec<_>>().join(" "),
        seed: args.seed,
        config: String::new(),
    };
    show(args, &report, &assertions).map_err(internal)
}

async fn play(
    args: &ReplayArgs,
    target: &str,
    source: &Source,
    speed: f64,
    workload: &mut dyn Workload,
) -> Result<(Run, bool), LiveError> {
    let flags = &args.live;
    let config = LiveConfig {
        api: flags.api,
        model: flags.model.clone(),
        max_in_flight: flags.max_in_flight,
        timeout: flags.timeout,
        headers: flags.headers.clone(),
        seed: args.seed,
        served_header: flags.served_header.clone(),
        ..LiveConfig::new(target)
    };
    let bar = progress_of(workload.total());
    let targets = Targets { first_token: args.ttft_target, per_token: args.tpot_target };
    let mut observer = Counting { tally: Tally::new(0).with_targets(targets), bar: &bar, unshown: 0 };
    let (clock, stop) = (Clock::start(), CancellationToken::new());
    let began = clock.now();
    let on_signal = stop.clone();
    let signal = tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            eprintln!("stopping: nothing more is sent; what is under way may end");
            on_signal.cancel();
        }
    });
    let played = live::play(&config, workload, &mut observer, &stop).await;
    signal.abort();
    bar.finish_and_clear();
    let outcome = played?;
    tell(&outcome);
    let mut cell = BTreeMap::from([("target".to_owned(), target.to_owned())]);
    if speed != 1.0 {
        cell.insert("speed".to_owned(), speed.to_string());
    }
    let run = Run {
        policy: GATEWAY.to_owned(),
        workload: source.name(),
        cell,
        tally: observer.tally,
        decisions: 0,
        // What a real server's token costs is not known.
        gpu_seconds_per_token: 0.0,
        simulated: outcome.elapsed,
        took: clock.now().since(began),
    };
    Ok((run, outcome.stopped))
}

/// What the tables don't say.
fn tell(outcome: &LiveOutcome) {
    let LiveOutcome { model, sent, late, latest, held, most_in_flight, cut, endpoints, failures, .. } = outcome;
    eprintln!(
        "{sent} requests sent for `{model}`, at most {most_in_flight} at once; {} servers answered",
        endpoints.len()
    );
    if *late > 0 {
        eprintln!(
            "{late} were sent late, the latest by {latest:.1?}: {held} waited for --max-in-flight, the others for this machine"
        );
    }
    if *cut > 0 {
        eprintln!("{cut} were cut off at the end");
    }
    for (reason, count) in failures {
        eprintln!("{count} failed: {reason}");
    }
}
