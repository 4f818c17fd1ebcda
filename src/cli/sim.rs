//! `attache sim`: converts flags to a fleet of simulated servers, and waits for its end.

use anyhow::Context;
use attache_sim::config::{self, MetricsStyle, Quirks, ServerConfig, SimConfig};
use attache_sim::engine::{self, EngineConfig};
use attache_sim::faults::Faults;
use attache_sim::kv_events::{self, EventEncoding, HashForm, KvEventsConfig, Outlet, ReplayFormat};
use attache_sim::latency::{self, LatencyModel};
use attache_sim::pd::{self, Connector, ExpiryClock, LoadFailure, PdConfig, ServerRole};
use attache_sim::vllm_hash::{self, HashAlgorithm};
use attache_sim::{answer, serve};
use serde_json::json;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// 2 s for requests in flight at shutdown: the fleet is a tool for tests, which don't wait.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
About:
  Each server has its own simulated engine (waiting queue, continuous batching, paged KV cache with prefix
  reuse, preemption) and serves the OpenAI and Anthropic APIs over HTTP/1.1 and h2c. Equal requests get
  equal responses. The response header x-sim-server names the server. The scheduler is modelled on
  vLLM's, with every --quirks: AstrAI's loop of four phases (cleanup, refill, prefill by groups, decode of the
  largest group) is not simulated.

Examples:
  Four servers on ports 8001 to 8004, then a chat and its second turn (look at cached_tokens):
    attache sim
    curl -s localhost:8001/v1/chat/completions -H 'content-type: application/json' \\
      -d '{\"model\":\"sim-8b\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"max_tokens\":16}'

  Ten servers on free ports, a hundred times faster than the model, small caches:
    attache sim --endpoints 10 --port 0 --speed 100 --blocks 512

  Thousands of long, slow streams (one token every half second):
    attache sim --max-num-seqs 8192 --step-base 500ms --per-decode-seq 0ms

  A server that hangs its metrics page; and another fault while it runs:
    attache sim --endpoints 1 --faults '{\"metrics\":\"hang\"}'
    curl -s localhost:8001/sim/faults -d '{\"fail_next\":{\"count\":3,\"status\":500}}'

  Two servers that publish KV events as vLLM does, on ports 5557 and 5558; where, and what the first one holds:
    attache sim --endpoints 2 --kv-events-port 5557 --kv-events-replay-port 5657
    curl -s localhost:8001/kv_event_sources
    curl -s localhost:8001/sim/kv_blocks

  A server with four data-parallel ranks behind its port, each with a cache and KV events of its own (ports 5557 to \
                        5560):
    attache sim --endpoints 1 --data-parallel-size 4 --kv-events-port 5557
    curl -si localhost:8001/v1/completions -H 'x-data-parallel-rank: 2' -H 'content-type: application/json' \\
      -d '{\"prompt\":\"Hello\",\"max_tokens\":1}'

  Two prefill and three decode servers with vLLM's NIXL exchange; a prefill leg, whose reply has the
  kv_transfer_params that the decode leg must bring to a decode server; what the prefill server keeps meanwhile:
    attache sim --role prefill=2,decode=3
    curl -s localhost:8001/v1/completions -H 'content-type: application/json' \\
      -d '{\"prompt\":\"Hello\",\"max_tokens\":1,\"kv_transfer_params\":{\"do_remote_decode\":true}}'
    curl -s localhost:8001/sim/pd

Prefill and decode (connectors; GET /sim/pd counts legs, transfers, kept blocks, expired leases and failed loads by \
                        cause):
  nixl            vLLM: the decode leg names engine, address, request and blocks of the prefill, and fails with a 500
                  if one is wrong, the lease is over, or the blocks hold another prompt than its own; blocks are
                  free when they were read or the decode's client has gone. Any server takes either leg.
  sglang          both legs at once with the same bootstrap_room, told apart by the servers' roles; the decode leg
                  waits for the prefill leg; POST /abort_request {\"rid\":…} ends the wait.
  trtllm          disaggregated_params: context_only, then generation_only with what the first leg answered.
  shared-storage  vLLM's ExampleConnector: what one server has computed the others load; nothing to ask for.
  A transfer takes --transfer-setup and --per-received-token; servers of another process are unknown.

Faults (JSON, all keys optional; POST /sim/faults replaces the set, {} clears it):
  refuse: true                          503 on everything; an AstrAI's /health is 200 with model_loaded false
  fail_next: {count, status}            the next requests fail
  metrics: hang|garbage|huge|error      what is wrong with /metrics
  first_byte_delay_ms: 500              every response starts later
  cut_after_tokens: 3                   a stream's connection breaks
  error_after_tokens: 3                 a stream ends with an error event in a 200
  prefill: {no_params: true}            prefill legs answer without parameters; their blocks stay for the lease
  prefill: {hang: true}                 prefill legs wait until this is cleared
  prefill: {die_after_reply: true}      after the next prefill leg the server is gone, and its blocks
  kv_events: {drop_next: 5}             KV event messages are lost; a replay still has them
  kv_events: {pause: true}              messages wait until this is cleared
  kv_events: {delay_ms: 200}            messages are delayed
  kv_events: {no_replay: true}          replay requests are not answered

POST /sim/restart acts like a new process: requests end, the cache is empty, KV events count from 0.
POST /reset_prefix_cache empties the cache of a server without requests.";

/// Run a fleet of simulated model servers.
#[derive(Clone, Debug, clap::Args)]
#[command(
    long_about = "Run a fleet of simulated model servers in one process, on consecutive ports, over real \
                  HTTP.\n\nPrints one JSON line {\"listening\":[\"127.0.0.1:8001\",…]} when ready, and ends on \
                  SIGTERM or SIGINT.",
    after_long_help = EXAMPLES
)]
pub struct Args {
    /// Servers.
    #[arg(
        long, value_name = "N", default_value_t = config::DEFAULT_ENDPOINTS,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    endpoints: u16,
    /// Port of the first server, the others follow; 0 lets the system choose.
    #[arg(long, default_value_t = config::DEFAULT_PORT)]
    port: u16,
    /// Address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    bind: IpAddr,
    /// Threads [default: one per CPU].
    #[arg(long, value_name = "N")]
    workers: Option<std::num::NonZeroUsize>,
    /// Names of the model, comma-separated: responses carry the first, requests may use any.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = config::DEFAULT_MODEL)]
    model: Vec<String>,
    /// Engines (data-parallel ranks) behind the port of each server. The request header x-data-parallel-rank selects
    /// one; without it, the least loaded engine responds. The response header x-sim-rank names the engine.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256),
    conflicts_with = "role")]
    data_parallel_size: u16,
    /// LoRA adapters to load, comma-separated; more by POST /v1/load_lora_adapter.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    lora: Vec<String>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    latency: LatencyArgs,
    #[command(flatten)]
    pd: PdArgs,
    #[command(flatten)]
    kv_events: KvEventsArgs,
    /// Tokens after which a response ends by itself (unless ignore_eos).
    #[arg(long, value_name = "TOKENS", default_value_t = answer::DEFAULT_OUTPUT_TOKENS)]
    output_tokens: u32,
    /// Engine whose metric names /metrics has.
    #[arg(long, value_enum, default_value_t)]
    metrics_style: MetricsStyle,
    /// Engine whose deviations from the API the responses have; the scheduler stays modelled on vLLM's.
    #[arg(long, value_enum, default_value_t)]
    quirks: Quirks,
    /// Add the response header x-sim-body-sha256: the SHA-256 of the received body.
    #[arg(long)]
    echo_body_sha256: bool,
    /// Largest request body, bytes.
    #[arg(long, value_name = "BYTES", default_value_t = config::DEFAULT_MAX_BODY_BYTES)]
    max_body_bytes: usize,
    /// Time without a request after which a server closes an HTTP/1.1 connection, as uvicorn does; 0s keeps it open.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(config::DEFAULT_KEEP_ALIVE))]
    keep_alive_timeout: Time,
    #[cfg(feature = "full")]
    #[command(flatten)]
    traces: spans::TraceArgs,
    /// Faults from the start, as JSON (see below).
    #[arg(long, value_name = "JSON", value_parser = parse_faults, default_value = "{}")]
    faults: Faults,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Engine (vLLM's names where it has them)")]
struct EngineArgs {
    /// Tokens in a KV block.
    #[arg(
        long, value_name = "TOKENS", default_value_t = engine::DEFAULT_BLOCK_SIZE,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    block_size: u32,
    /// KV blocks of each server.
    #[arg(
        long, value_name = "N", default_value_t = engine::DEFAULT_NUM_BLOCKS,
        value_parser = clap::value_parser!(u32).range(1..=16_777_216)
    )]
    blocks: u32,
    /// Sequences in a batch.
    #[arg(
        long, value_name = "N", default_value_t = engine::DEFAULT_MAX_NUM_SEQS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    max_num_seqs: u32,
    /// Tokens computed in a step.
    #[arg(
        long, value_name = "TOKENS", default_value_t = engine::DEFAULT_MAX_NUM_BATCHED_TOKENS,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    max_num_batched_tokens: u32,
    /// Tokens of prompt and answer together.
    #[arg(
        long, value_name = "TOKENS", default_value_t = engine::DEFAULT_MAX_MODEL_LEN,
        value_parser = clap::value_parser!(u32).range(2..)
    )]
    max_model_len: u32,
    /// Queue capacity of an engine; further requests get 503 (a stream: 200 with an error event) [default: unlimited].
    #[arg(long, value_name = "N")]
    max_num_queued_reqs: Option<u32>,
    /// LoRA adapters in one batch.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    max_loras: u32,
    /// Disable prefix caching: never reuse blocks.
    #[arg(long)]
    no_prefix_caching: bool,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Latency (defaults: an 8B model in bf16 on one H100)")]
struct LatencyArgs {
    /// Factor by which all times are shorter than those of the model.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_speed)]
    speed: f64,
    /// Cost of any step. To it comes what the step computes or what it reads, whichever takes longer.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(latency::DEFAULT_STEP_BASE))]
    step_base: Time,
    /// Reading the weights, once a step.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(latency::DEFAULT_WEIGHT_READ))]
    weight_read: Time,
    /// Computing a prompt token that is not cached.
    #[arg(
        long, value_name = "TIME", value_parser = parse_time,
        default_value = Time(latency::DEFAULT_PER_PREFILL_TOKEN)
    )]
    per_prefill_token: Time,
    /// Computing a pair of tokens in a prefill's attention.
    #[arg(
        long, value_name = "TIME", value_parser = parse_time,
        default_value = Time(latency::DEFAULT_PER_PREFILL_PAIR)
    )]
    per_prefill_pair: Time,
    /// Computing the token of a sequence that decodes.
    #[arg(
        long, value_name = "TIME", value_parser = parse_time,
        default_value = Time(latency::DEFAULT_PER_DECODE_SEQUENCE)
    )]
    per_decode_seq: Time,
    /// Reading a cached token of a sequence that decodes.
    #[arg(
        long, value_name = "TIME", value_parser = parse_time,
        default_value = Time(latency::DEFAULT_PER_CONTEXT_TOKEN)
    )]
    per_context_token: Time,
    /// Latency of a KV transfer between servers before its first byte.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(latency::DEFAULT_TRANSFER_SETUP))]
    transfer_setup: Time,
    /// Transfer time of the KV of one token.
    #[arg(
        long, value_name = "TIME", value_parser = parse_time,
        default_value = Time(latency::DEFAULT_PER_RECEIVED_TOKEN)
    )]
    per_received_token: Time,
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "KV events (published on ZMQ when a port or an address is given)")]
#[group(skip)]
struct KvEventsArgs {
    /// Publish KV events on this port, the other ranks and servers on those that follow; 0 lets the system choose.
    #[arg(long, value_name = "PORT", group = "outlet")]
    kv_events_port: Option<u16>,
    /// Publish KV events to a subscriber that listens at tcp://host:port.
    #[arg(long, value_name = "ADDRESS", group = "outlet")]
    kv_events_connect: Option<String>,
    /// Port of the first server's replay socket, the others follow; 0 lets the system choose.
    #[arg(long, value_name = "PORT", requires = "outlet")]
    kv_events_replay_port: Option<u16>,
    /// Framing of replayed messages.
    #[arg(long, value_enum, default_value_t, requires = "outlet")]
    kv_events_replay_format: ReplayFormat,
    /// Topic of the messages; `kv@ADDRESS:PORT@MODEL` of each server unless said.
    #[arg(long, value_name = "TOPIC", requires = "outlet")]
    kv_events_topic: Option<String>,
    /// Messages that can be replayed.
    #[arg(long, value_name = "N", default_value_t = kv_events::DEFAULT_BUFFER_STEPS, requires = "outlet")]
    kv_events_buffer_steps: usize,
    /// Encoding of events.
    #[arg(long, value_enum, default_value_t, requires = "outlet")]
    kv_events_encoding: EventEncoding,
    /// Form of block hashes in events.
    #[arg(long, value_enum, default_value_t, requires = "outlet")]
    kv_events_hash: HashForm,
    /// Also publish the latest N blocks as offloaded to host memory; they do not make prompts faster.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "outlet")]
    kv_events_offload_blocks: usize,
    /// Hash algorithm of blocks: sha256, sha256_cbor, xxhash or xxhash_cbor.
    #[arg(long, value_name = "ALGORITHM", default_value_t, requires = "outlet")]
    prefix_caching_hash_algo: HashAlgorithm,
    /// PYTHONHASHSEED of a real server.
    #[arg(long, value_name = "SEED", default_value = vllm_hash::DEFAULT_SEED, requires = "outlet")]
    hash_seed: String,
}

impl KvEventsArgs {
    fn config(self) -> Option<KvEventsConfig> {
        let outlet = match (self.kv_events_port, self.kv_events_connect) {
            (Some(port), _) => Outlet::Bind { port },
            (None, Some(address)) => Outlet::Connect { address },
            (None, None) => return None,
        };
        Some(KvEventsConfig {
            outlet,
            replay_port: self.kv_events_replay_port,
            topic: self.kv_events_topic,
            buffer_steps: self.kv_events_buffer_steps,
            encoding: self.kv_events_encoding,
            hash: self.kv_events_hash,
            replay_format: self.kv_events_replay_format,
            algorithm: self.prefix_caching_hash_algo,
            seed: self.hash_seed,
            offload_blocks: self.kv_events_offload_blocks,
        })
    }
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Prefill and decode on different servers")]
struct PdArgs {
    /// Servers by role, in this order, comma-separated: prefill=2,decode=3,both=1; instead of --endpoints.
    #[arg(long, value_name = "ROLE=N", value_delimiter = ',', value_parser = parse_role, conflicts_with = "endpoints")]
    role: Vec<(ServerRole, u16)>,
    /// How servers exchange KV blocks.
    #[arg(long, value_enum, default_value_t)]
    kv_connector: Connector,
    /// Lease: how long a server keeps the blocks of a prefill without a heartbeat of their reader.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(engine::DEFAULT_LEASE))]
    kv_lease: Time,
    /// The last response chunk of a decode names its blocks, for the prefill of the next turn.
    #[arg(long)]
    bidirectional_kv: bool,
    /// How long a decode server keeps these blocks.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(pd::DEFAULT_DECODER_TTL))]
    decoder_kv_ttl: Time,
    /// Clock of the time until which they are kept.
    #[arg(long, value_enum, default_value_t)]
    decoder_kv_clock: ExpiryClock,
    /// Outcome of a request whose KV blocks can't be fetched.
    #[arg(long, value_enum, default_value_t)]
    kv_load_failure_policy: LoadFailure,
    /// Time until the failure is noticed (a real server: 5 to 30 s).
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(Duration::ZERO))]
    kv_load_failure_delay: Time,
    /// How long one leg of an SGLang request waits for the other.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = Time(pd::DEFAULT_BOOTSTRAP_TIMEOUT))]
    bootstrap_timeout: Time,
}

impl PdArgs {
    /// Checks that several engines behind one port have no KV transfer.
    fn config(&self, ranks: u16) -> PdConfig {
        PdConfig {
            connector: if ranks > 1 { Connector::None } else { self.kv_connector },
            lease: self.kv_lease.0,
            bidirectional: self.bidirectional_kv,
            decoder_ttl: self.decoder_kv_ttl.0,
            expiry_clock: self.decoder_kv_clock,
            load_failure: self.kv_load_failure_policy,
            load_failure_delay: self.kv_load_failure_delay.0,
            bootstrap_timeout: self.bootstrap_timeout.0,
        }
    }

    fn roles(&self) -> Vec<ServerRole> {
        self.role.iter().flat_map(|(role, count)| std::iter::repeat_n(*role, usize::from(*count))).collect()
    }

    /// The roles of the servers; `None` without `--roles`.
    fn endpoints(&self) -> Option<u16> {
        self.role.iter().map(|(_, count)| *count).reduce(u16::saturating_add)
    }
}

/// Parses `prefill=2`.
fn parse_role(text: &str) -> Result<(ServerRole, u16), String> {
    let wrong = || format!("got {text:?}, allowed are prefill=N, decode=N and both=N with N from 1 to 65535");
    let (role, count) = text.split_once('=').ok_or_else(wrong)?;
    let role =
        [ServerRole::Prefill, ServerRole::Decode, ServerRole::Both].into_iter().find(|known| known.name() == role);
    let count: u16 = count.parse().map_err(|_| wrong())?;
    role.filter(|_| count > 0).map(|role| (role, count)).ok_or_else(wrong)
}

/// A duration in the syntax of flags: `6ms`, `40us`, `49ns`, `1.5s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Time(Duration);

const UNITS: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];

impl From<Time> for clap::builder::OsStr {
    fn from(Time(time): Time) -> Self {
        let nanos = time.as_nanos();
        let text = match nanos {
            _ if nanos > 0 && nanos % 1_000_000_000 == 0 => format!("{}s", nanos / 1_000_000_000),
            _ if nanos % 1_000_000 == 0 => format!("{}ms", nanos / 1_000_000),
            _ if nanos % 1_000 == 0 => format!("{}us", nanos / 1_000),
            _ => format!("{nanos}ns"),
        };
        text.into()
    }
}

fn parse_time(text: &str) -> Result<Time, String> {
    let wrong = || format!("got {text:?}, allowed is a number with a unit: 49ns, 40us, 6ms, 1.5s");
    let (number, unit) =
        UNITS.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds))).ok_or_else(wrong)?;
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * unit).map(Time).map_err(|_| wrong())
}

fn parse_speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| format!("got {text:?}, allowed is a number"))?;
    if (1e-6..=1e9).contains(&speed) { Ok(speed) } else { Err(format!("got {speed}, allowed are 0.000001 to 1e9")) }
}

fn parse_faults(json: &str) -> Result<Faults, String> {
    Faults::parse(json.as_bytes())
}

impl Args {
    /// The configuration of the fleet from the flags.
    fn config(self) -> SimConfig {
        let Args { engine, latency, .. } = &self;
        let model = self.model.first().map_or(config::DEFAULT_MODEL, String::as_str);
        let engine = EngineConfig {
            model: Arc::from(model),
            block_size: engine.block_size,
            num_blocks: engine.blocks,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_model_len: engine.max_model_len,
            max_num_queued: engine.max_num_queued_reqs,
            max_loras: engine.max_loras,
            prefix_caching: !engine.no_prefix_caching,
            latency: LatencyModel {
                step_base: latency.step_base.0,
                weight_read: latency.weight_read.0,
                per_prefill_token: latency.per_prefill_token.0,
                per_prefill_pair: latency.per_prefill_pair.0,
                per_decode_sequence: latency.per_decode_seq.0,
                per_context_token: latency.per_context_token.0,
                transfer_setup: latency.transfer_setup.0,
                per_received_token: latency.per_received_token.0,
                speed: latency.speed,
            },
            // The host enables events if there are subscribers.
            kv_events: false,
            every_token: true,
            gpus: 1,
        };
        SimConfig {
            endpoints: self.pd.endpoints().unwrap_or(self.endpoints),
            bind: self.bind,
            port: self.port,
            roles: self.pd.roles(),
            keep_alive: self.keep_alive_timeout.0,
            server: ServerConfig {
                engine,
                models: self.model,
                ranks: self.data_parallel_size,
                loras: self.lora,
                output_tokens: self.output_tokens,
                metrics_style: self.metrics_style,
                quirks: self.quirks,
                echo_body_sha256: self.echo_body_sha256,
                max_body_bytes: self.max_body_bytes,
                kv_events: self.kv_events.config(),
                pd: self.pd.config(self.data_parallel_size),
                faults: self.faults,
                spans: None,
            },
        }
    }
}

/// Runs the fleet until SIGTERM or SIGINT.
///
/// # Errors
/// If a port can't be bound or the runtime can't start.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Some(workers) = args.workers {
        builder.worker_threads(workers.get());
    }
    let runtime = builder.enable_all().build().context("start the runtime")?;
    runtime.block_on(async {
        let serving = async |config: SimConfig| serve_until_told(&config).await;
        #[cfg(feature = "full")]
        let serving = {
            let traces = args.traces.clone();
            async move |config: SimConfig| traces.exporting(config, serving).await
        };
        serving(args.config()).await?;
        Ok(ExitCode::SUCCESS)
    })
}

async fn serve_until_told(config: &SimConfig) -> anyhow::Result<()> {
    // Signal handlers come before the ready line, since its reader may send a signal at once.
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let fleet = serve(config)?;
    let listening: Vec<String> = fleet.addresses().iter().map(ToString::to_string).collect();
    let mut line = json!({"listening": listening});
    if !config.roles.is_empty() {
        line["roles"] = config.roles.iter().map(|role| role.name()).collect();
    }
    if !fleet.kv_event_sources().is_empty() {
        line["kv_events"] = fleet.kv_event_sources().iter().map(|source| source.endpoint.as_str()).collect();
    }
    let mut stdout = std::io::stdout().lock();
    // The parent process may have closed the pipe; the servers continue.
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
    drop(stdout);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    fleet.shutdown(SHUTDOWN_GRACE).await;
    Ok(())
}

#[cfg(feature = "full")]
mod spans;
#[cfg(test)]
mod tests;
