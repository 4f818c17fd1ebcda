//! The flags of `attache replay`, and which of them can't be combined.

use super::live;
use attache_config::units::parse_duration;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Default seed, so that a replay gives the same result each time.
const DEFAULT_SEED: u64 = 1;
/// Default policies to compare with the configuration's: a lower bound, the usual default, and random choice.
const DEFAULT_COMPARE: &str = "least-request,pipeline,prefix-cache,random";
/// 4 adapters in a batch, as in usual deployments; with vLLM's own default of 1, every other adapter waits.
const DEFAULT_MAX_LORAS: u32 = 4;

/// The file of a chart. Endings other than `.png` are free, so that a chart can go to `/dev/stdout`.
///
/// # Errors
/// When the file ends in `.png`: Attaché draws no bitmaps.
fn chart_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("png")) {
        return Err(
            "PNG is not supported; use --svg with a file that ends in .svg, or --html with one that ends in .html"
                .to_owned(),
        );
    }
    Ok(path)
}

/// Flags with effect only in virtual time.
macro_rules! of_the_world {
    ($($more:literal),*) => {
        &[
            "disaggregation", "compare", "baseline", "pickers", "sync", "sync_loss", "data_parallel_size", "max_loras", "change", "metrics_every",
            "metrics_delay", "discovery_delay", "kv_events", "jobs" $(, $more)*
        ]
    };
}
/// Flags with effect only on workloads.
macro_rules! of_players {
    ($($more:literal),*) => {
        of_the_world!(
            "trace", "trace_block_tokens", "sessions", "session_interval", "max_pause", "max_context", "open_loop",
            "workload", "speed", "requests", "until", "poisson", "bursty", "clients", "think", "model", "seed",
            "target", "ttft_target",
            "tpot_target", "assert", "json", "html", "svg", "markdown" $(, $more)*
        )
    };
}
/// Flags without effect on a real gateway.
pub(super) const NOT_LIVE: &[&str] = of_the_world!("config_file", "pool", "profile", "from_record", "fit_profile");
/// Flags without effect on a recording that is decided again.
const NOT_DECIDED_AGAIN: &[&str] = of_players!("endpoints", "pool", "profile", "fit_profile");
/// Flags without effect on a recording that is fitted.
const NOT_FITTED: &[&str] = of_players!("endpoints", "config_file");

const EXAMPLES: &str = "\
Examples:
  The trace of Mooncake's conversations on eight servers, four policies beside the default:
    attache replay --trace conversation.jsonl

  The configuration of production, compared with others at three speeds, as an HTML page:
    attache replay --config-file prod.yaml --trace t.jsonl --endpoints 16 --speed 1,1.5,2 \\
      --compare least-request,llm-d=epp.yaml --html report.html

  60 recorded sessions of coding agents, of which one begins every 20 seconds, in the mean:
    attache replay --trace agents.jsonl.gz --sessions 60 --poisson 0.05 --max-context 131072

  A synthetic workload, and a server that fails during it:
    attache replay --workload multi-turn:clients=64 --change '30s lose 3' --change '1m join'

  A pool of unequal servers whose KV events come 50 ms late, and one in a hundred not at all:
    attache replay --trace t.jsonl --profile '8b-h100*6,8b-h100@0.5*2' --kv-events 50ms,0.01

  Two servers compute prompts for six others, or every server serves whole requests:
    attache replay --workload unique --profile '8b-h100:prefill*2,8b-h100:decode*6' --disaggregation \
                        predicted,always,never --compare ''
    attache replay --workload unique --profile '8b-h100*8'

  In CI: fails with exit code 2 when it does not hold:
    attache replay --trace t.jsonl --assert 'predicted-latency:ttft_mean<0.7*pipeline:ttft_mean'

  The effect of late binding, compared with the default:
    attache replay --trace t.jsonl --compare predicted-latency+late-binding --assert \
                        'predicted-latency+late-binding:wait_max<20s'

  The same workload to a real gateway, at real time:
    attache replay --workload multi-turn:clients=8 --target http://127.0.0.1:10000

  Decisions of a recording again, with its own configuration and with another one:
    attache replay --from-record run.jsonl
    attache replay --from-record run.jsonl --config-file other.yaml

  Constants of the servers of that recording, and strategies compared on such servers:
    attache replay --fit-profile run.jsonl --profile-out mine.yaml
    attache replay --trace run.jsonl --profile 'mine.yaml*8'

  All workloads, profiles and policies:
    attache replay --list

Exit codes: 0 good, 2 an --assert does not hold or a recorded decision differs without --config-file, 64 wrong usage \
                        or a trace or recording that can't be read, 70 internal error, 78 wrong configuration,\n130 \
                        stopped by Ctrl-C: the figures cover the part that was played, and no --assert is checked.";

/// Play a workload to simulated servers in virtual time, once with each strategy, and compare.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// A recorded workload: sessions of agents, Mooncake or Qwen-Bailian JSONL, Azure or BurstGPT CSV, attache.trace.v1,
    /// a recording; also compressed with gzip; `-` is standard input, read whole before it is played
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub(super) trace: Vec<PathBuf>,
    /// Tokens that one of a trace's `hash_ids` stands for [default: 512, in Qwen-Bailian traces 16]
    #[arg(long, value_name = "N", requires = "trace", help_heading = "Workload")]
    pub(super) trace_block_tokens: Option<u32>,
    /// A synthetic workload with its parameters, `name:key=value,…`; see --list
    #[arg(long, value_name = "NAME", help_heading = "Workload")]
    pub(super) workload: Vec<String>,
    /// Factor by which requests arrive faster than recorded; several values give a table each
    #[arg(long, value_name = "FACTOR", value_delimiter = ',', default_value = "1", help_heading = "Workload")]
    pub(super) speed: Vec<f64>,
    /// Play at most this number of requests
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(super) requests: Option<u64>,
    /// Play only requests that arrive before this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Workload")]
    pub(super) until: Option<Duration>,
    /// Replace the arrival times by a Poisson process with this rate, requests per second; sessions per second in traces
    /// of sessions
    #[arg(long, value_name = "RATE", conflicts_with_all = ["bursty", "clients"], help_heading = "Workload")]
    pub(super) poisson: Option<f64>,
    /// Replace the arrival times by bursts: rate as above, and coefficient of variation of the gaps
    #[arg(long, value_name = "RATE,CV", conflicts_with = "clients", help_heading = "Workload")]
    pub(super) bursty: Option<String>,
    /// Replace the arrival times by this number of clients; each sends its next request after the response
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(super) clients: Option<u32>,
    /// Pause of a client between response and next request
    #[arg(
        long, value_name = "TIME", value_parser = parse_duration, default_value = "0", requires = "clients",
        conflicts_with_all = ["poisson", "bursty"], help_heading = "Workload"
    )]
    pub(super) think: Duration,
    /// Play this number of the trace's sessions, chosen by --seed; if the trace has fewer, they are played again with
    /// other texts [default: all in their order]
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Sessions")]
    pub(super) sessions: Option<u64>,
    /// Time between the beginnings of two sessions; --poisson and --bursty take rates [default: as recorded, else 30s]
    #[arg(
        long, value_name = "TIME", value_parser = parse_duration, requires = "trace",
        conflicts_with_all = ["poisson", "bursty"], help_heading = "Sessions"
    )]
    pub(super) session_interval: Option<Duration>,
    /// Longest pause before a request of a session; longer ones are cut [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "trace", help_heading = "Sessions")]
    pub(super) max_pause: Option<Duration>,
    /// Leave out requests of sessions with more tokens, prompt and response together, which servers would reject
    #[arg(long, value_name = "TOKENS", requires = "trace", help_heading = "Sessions")]
    pub(super) max_context: Option<u32>,
    /// Send the requests of sessions at their recorded times; otherwise each is sent its pause after the response before
    #[arg(long, requires = "trace", help_heading = "Sessions")]
    pub(super) open_loop: bool,

    /// Model of requests without an adapter [default: `defaultModel` of the pool, or `sim`; with --target the first of the gateway's /v1/models]
    #[arg(long, value_name = "NAME", help_heading = "Workload")]
    pub(super) model: Option<String>,

    /// Configuration file whose pool is played, Attaché's own or an EndpointPickerConfig
    #[arg(long, alias = "config", value_name = "FILE", help_heading = "Strategies")]
    pub(super) config_file: Option<PathBuf>,
    /// Pool of that file [default: the first]
    #[arg(long, value_name = "NAME", help_heading = "Strategies")]
    pub(super) pool: Option<String>,
    /// Whether requests are split between prefill and decode servers: `predicted`, `always`, `never`,
    /// `prefix-based:TOKENS`; several values play each policy several times [default: the configuration's]
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Strategies")]
    pub(super) disaggregation: Vec<String>,
    /// Policies beside the configuration's: `name`, `name={key: value}` with parameters, `label=name`,
    /// `label=file.yaml`; `+late-binding` after a name lets requests wait in a queue while the pool is full (the configuration's `flowControl`, else the
    /// recommended one), `+at-once` disables the queue
    #[arg(long, value_name = "LIST", default_value = DEFAULT_COMPARE, help_heading = "Strategies")]
    pub(super) compare: Vec<String>,
    /// Policy that the others are compared with [default: the configuration's]
    #[arg(long, value_name = "NAME", help_heading = "Strategies")]
    pub(super) baseline: Option<String>,
    /// Seed of all random choices
    #[arg(long, value_name = "N", default_value_t = DEFAULT_SEED, help_heading = "Strategies")]
    pub(super) seed: u64,

    /// Number of pickers, which get the requests in turn; several values play each policy several times
    #[arg(
        long, value_name = "LIST", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u16).range(1..=64), help_heading = "Replicas"
    )]
    pub(super) pickers: Vec<u16>,
    /// Delay of the bus on which several pickers share state, or `off`; several values play each policy several times
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "off", help_heading = "Replicas")]
    pub(super) sync: Vec<String>,
    /// Fraction of the messages between pickers that are lost, as in `1%` or `0.01`
    #[arg(long, value_name = "PART", default_value = "0", help_heading = "Replicas")]
    pub(super) sync_loss: String,

    /// Number of servers; several values give a table each, with --target only one is allowed [default: as many as
    /// the configuration names, or 8]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "Servers")]
    pub(super) endpoints: Vec<usize>,
    /// Profiles of the servers: `profile[@speed][:role][*number],…`, where a profile is one of --list or a
    /// `FILE.yaml` with an engine's constants
    #[arg(long, value_name = "LIST", default_value = "8b-h100", help_heading = "Servers")]
    pub(super) profile: String,
    /// Engines (data-parallel ranks) behind the port of each server, each with a cache of its own [default: `ranks` of
    /// the configuration's `kvEvents`, or 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256), help_heading = "Servers")]
    pub(super) data_parallel_size: Option<u16>,
    /// LoRA adapters that an engine holds at once
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_LORAS, help_heading = "Servers")]
    pub(super) max_loras: u32,
    /// Failure or change of a server during the run: `10m lose 3`, `5m restart 0`, `1h join`
    #[arg(long, value_name = "CHANGE", help_heading = "Servers")]
    pub(super) change: Vec<String>,
    /// Interval of scrapes [default: the configuration's]; metrics older than its `staleAfter` are ignored
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Servers")]
    pub(super) metrics_every: Option<Duration>,
    /// Delay of scraped metrics
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0", help_heading = "Servers")]
    pub(super) metrics_delay: Duration,
    /// Delay of discovery after a change
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1s", help_heading = "Servers")]
    pub(super) discovery_delay: Duration,
    /// Servers publish KV events, with this delay and this fraction of lost messages (which are replayed)
    #[arg(long, value_name = "TIME[,PART]", num_args = 0..=1, default_missing_value = "10ms", help_heading = "Servers")]
    pub(super) kv_events: Option<String>,

    #[command(flatten)]
    pub(super) live: live::GatewayArgs,
    /// Decide the requests of a recording of `attache run --record` again
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_DECIDED_AGAIN, help_heading = "Recordings")]
    pub(super) from_record: Option<PathBuf>,
    /// Derive the constants of the engine from a recording; constants that it can't derive come from --profile
    #[arg(
        long, value_name = "FILE", conflicts_with_all = NOT_FITTED, requires = "profile_out",
        help_heading = "Recordings"
    )]
    pub(super) fit_profile: Option<PathBuf>,
    /// Write these constants to this file, for --profile FILE
    #[arg(
        long, value_name = "FILE", conflicts_with_all = NOT_FITTED, requires = "fit_profile",
        help_heading = "Recordings"
    )]
    pub(super) profile_out: Option<PathBuf>,

    /// Target for the time to the first token; slower responses do not count as goodput
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Output")]
    pub(super) ttft_target: Option<Duration>,
    /// Target for the time between tokens; slower responses do not count as goodput
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Output")]
    pub(super) tpot_target: Option<Duration>,
    /// Condition that must hold, `ttft_p90<1.2s`; the exit code is 2 if it does not
    #[arg(long, value_name = "EXPRESSION", help_heading = "Output")]
    pub(super) assert: Vec<String>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) json: Option<PathBuf>,
    /// Write a self-contained page with plots
    #[arg(long, value_name = "FILE", value_parser = chart_file, help_heading = "Output")]
    pub(super) html: Option<PathBuf>,
    /// Write the main plots as an SVG image
    #[arg(long, value_name = "FILE", value_parser = chart_file, help_heading = "Output")]
    pub(super) svg: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) markdown: Option<PathBuf>,
    /// Runs in parallel [default: one per core]
    #[arg(long, value_name = "N", help_heading = "Output")]
    pub(super) jobs: Option<usize>,
    /// Show all workloads, engine profiles and policies
    #[arg(long, help_heading = "Output")]
    pub(super) list: bool,
}
