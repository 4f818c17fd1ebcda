//! The flags of `attache replay`, and which of them mean nothing beside which.

use super::live;
use crate::config::units::parse_duration;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Seed of a replay that was given none: it shows the same each time.
const DEFAULT_SEED: u64 = 1;
/// The policies beside the configuration's when nobody names any: the field's floor, its usual default, and chance.
const DEFAULT_COMPARE: &str = "least-request,pipeline,prefix-cache,random";
/// 4 adapters in a batch: what servers of adapters are started with, where vLLM's own default of 1 has every other adapter wait.
const DEFAULT_MAX_LORAS: u32 = 4;

/// What only a virtual world reads.
macro_rules! of_the_world {
    ($($more:literal),*) => {
        &[
            "disaggregation", "compare", "baseline", "max_loras", "change", "metrics_every", "metrics_delay", "discovery_delay",
            "kv_events", "jobs" $(, $more)*
        ]
    };
}
/// What only those read that play something.
macro_rules! of_players {
    ($($more:literal),*) => {
        of_the_world!(
            "trace", "workload", "speed", "requests", "until", "poisson", "bursty", "clients", "think", "model", "seed", "target", "ttft_target",
            "tpot_target", "assert", "json", "html", "png", "markdown" $(, $more)*
        )
    };
}
/// What says nothing to a real gateway.
pub(super) const NOT_LIVE: &[&str] = of_the_world!("config_file", "pool", "profile", "from_record", "fit_profile");
/// What says nothing of a recording that is decided again.
const NOT_DECIDED_AGAIN: &[&str] = of_players!("endpoints", "pool", "profile", "fit_profile");
/// What says nothing of one that is fitted.
const NOT_FITTED: &[&str] = of_players!("endpoints", "config_file");

const EXAMPLES: &str = "\
Examples:
  The trace of Mooncake's conversations on eight servers, four policies beside the default:
    attache replay --trace conversation.jsonl

  The configuration that production runs, against others, at three speeds, as a page to look at:
    attache replay --config-file prod.yaml --trace t.jsonl --endpoints 16 --speed 1,1.5,2 \\
      --compare least-request,llm-d=epp.yaml --html report.html

  A made-up workload, and a server that dies in the middle of it:
    attache replay --workload multi-turn:clients=64 --change '30s lose 3' --change '1m join'

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

  What steps and tokens cost on the servers of that run, and what another policy buys on such servers:
    attache replay --fit-profile run.jsonl --profile-out mine.yaml
    attache replay --trace run.jsonl --profile 'mine.yaml*8'

  All workloads, profiles and policies:
    attache replay --list

Exit codes: 0 good, 2 an --assert does not hold or a recorded decision came out otherwise without --config-file, 64 wrong usage or a trace or recording that can't be read, 70 internal error, 78 wrong configuration,\n130 stopped: the figures are of what was played, and no --assert is judged.";

/// Play a workload to simulated servers in virtual time, once with each policy, and compare.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// A recorded workload: Mooncake JSONL, Azure or BurstGPT CSV, attache.trace.v1, a recording; `-` is standard input, read whole before it is played
    #[arg(long, value_name = "FILE", help_heading = "What is asked")]
    pub(super) trace: Vec<PathBuf>,
    /// A made-up workload with its parameters, `name:key=value,…`; see --list
    #[arg(long, value_name = "NAME", help_heading = "What is asked")]
    pub(super) workload: Vec<String>,
    /// How many times as fast as it was recorded; several give a table each
    #[arg(long, value_name = "FACTOR", value_delimiter = ',', default_value = "1", help_heading = "What is asked")]
    pub(super) speed: Vec<f64>,
    /// Only so many requests
    #[arg(long, value_name = "N", help_heading = "What is asked")]
    pub(super) requests: Option<u64>,
    /// Only the requests that come before this moment
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is asked")]
    pub(super) until: Option<Duration>,
    /// Forget the trace's times: so many requests a second, at random
    #[arg(long, value_name = "RATE", conflicts_with_all = ["bursty", "clients"], help_heading = "What is asked")]
    pub(super) poisson: Option<f64>,
    /// The same in bursts: rate, and coefficient of variation of the gaps
    #[arg(long, value_name = "RATE,CV", conflicts_with = "clients", help_heading = "What is asked")]
    pub(super) bursty: Option<String>,
    /// Forget the trace's times: so many clients, each asks again after its answer
    #[arg(long, value_name = "N", help_heading = "What is asked")]
    pub(super) clients: Option<u32>,
    /// And waits so long in between
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", requires = "clients", help_heading = "What is asked")]
    pub(super) think: Duration,
    /// The model that requests without an adapter ask for [default: `sim`; with --target the first of the gateway's /v1/models]
    #[arg(long, value_name = "NAME", help_heading = "What is asked")]
    pub(super) model: Option<String>,

    /// The configuration whose pool is played, Attaché's own or an EndpointPickerConfig
    #[arg(long, alias = "config", value_name = "FILE", help_heading = "Who decides")]
    pub(super) config_file: Option<PathBuf>,
    /// Which of its pools [default: the first]
    #[arg(long, value_name = "NAME", help_heading = "Who decides")]
    pub(super) pool: Option<String>,
    /// Whether requests are split between prefill and decode servers: `predicted`, `always`, `never`, `prefix-based:TOKENS`; several make
    /// as many of each policy [default: the configuration's]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Who decides")]
    pub(super) disaggregation: Vec<String>,
    /// Policies beside the configuration's: `name`, `name={…}` with parameters, `label=file.yaml`; `+late-binding` behind one has requests wait
    /// while the pool is full (the configuration's `flowControl`, else the recommended one), `+at-once` has none wait
    #[arg(long, value_name = "LIST", default_value = DEFAULT_COMPARE, help_heading = "Who decides")]
    pub(super) compare: Vec<String>,
    /// The policy that others are compared with [default: the configuration's]
    #[arg(long, value_name = "NAME", help_heading = "Who decides")]
    pub(super) baseline: Option<String>,
    /// Of all chance
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SEED, help_heading = "Who decides")]
    pub(super) seed: u64,

    /// How many servers; several give a table each, but one number alone with --target [default: as many as the configuration names, or 8]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Who serves")]
    pub(super) endpoints: Vec<usize>,
    /// What they are: `profile[@speed][:role][*number],…`, where a profile is one of --list or a `FILE.yaml` with an engine's constants
    #[arg(long, value_name = "LIST", default_value = "8b-h100", help_heading = "Who serves")]
    pub(super) profile: String,
    /// Adapters that each holds at once
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_LORAS, help_heading = "Who serves")]
    pub(super) max_loras: u32,
    /// What happens to them: `10m lose 3`, `5m restart 0`, `1h join`
    #[arg(long, value_name = "CHANGE", help_heading = "Who serves")]
    pub(super) change: Vec<String>,
    /// How often metrics are read [default: the configuration's]; what is older than its `staleAfter` says nothing
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Who serves")]
    pub(super) metrics_every: Option<Duration>,
    /// How long they are on their way
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", help_heading = "Who serves")]
    pub(super) metrics_delay: Duration,
    /// How long until discovery tells of a change
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s", help_heading = "Who serves")]
    pub(super) discovery_delay: Duration,
    /// Engines publish KV events: how long they are on their way, and the part that is lost and replayed
    #[arg(long, value_name = "TIME[,PART]", num_args = 0..=1, default_missing_value = "10ms", help_heading = "Who serves")]
    pub(super) kv_events: Option<String>,

    #[command(flatten)]
    pub(super) live: live::LiveArgs,
    /// Decide again what `attache run --record` has written
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_DECIDED_AGAIN, help_heading = "A recorded run")]
    pub(super) from_record: Option<PathBuf>,
    /// Fit an engine's constants to it: what steps and tokens cost on its servers; those that can't be told are --profile's
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_FITTED, requires = "profile_out", help_heading = "A recorded run")]
    pub(super) fit_profile: Option<PathBuf>,
    /// Where they are written, to be played as --profile FILE
    #[arg(long, value_name = "FILE", requires = "fit_profile", help_heading = "A recorded run")]
    pub(super) profile_out: Option<PathBuf>,

    /// The longest time to the first token that is good
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is shown")]
    pub(super) ttft_target: Option<Duration>,
    /// The longest time between tokens that is good
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "What is shown")]
    pub(super) tpot_target: Option<Duration>,
    /// What must hold, `ttft_p90<1.2s`; exit code 2 when it does not
    #[arg(long, value_name = "EXPRESSION", help_heading = "What is shown")]
    pub(super) assert: Vec<String>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    pub(super) json: Option<PathBuf>,
    /// Write a page with plots that needs nothing else
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    pub(super) html: Option<PathBuf>,
    /// Write the main plots as a picture
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    pub(super) png: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE", help_heading = "What is shown")]
    pub(super) markdown: Option<PathBuf>,
    /// Runs at the same time [default: one a core]
    #[arg(long, value_name = "N", help_heading = "What is shown")]
    pub(super) jobs: Option<usize>,
    /// Show all workloads, engine profiles and policies
    #[arg(long, help_heading = "What is shown")]
    pub(super) list: bool,
}
