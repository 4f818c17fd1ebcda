//! What the picker costs, as ratios in one run: against a no-op ext-proc server, and with Envoy in front.
//!
//! ```console
//! $ cargo bench --bench extproc -- --rows direct,decide,prefix,chunk,split,replicas,envoy,inside,idle --seconds 1 --rounds 5
//! ```
//!
//! It prints a Markdown table. Each server is a process, so that its CPU time is measured alone. Rounds alternate between
//! the servers, and medians are compared. The command shows the defaults. Valgrind counts the
//! row `instructions`; it and `sizing` are slow and not among the defaults.

#[path = "support/decide.rs"]
mod decide;
#[path = "support/http.rs"]
mod http_load;
#[path = "support/instructions.rs"]
mod instructions;
#[path = "support/load.rs"]
mod load;
#[path = "support/measure.rs"]
mod measure;
#[path = "support/replicas.rs"]
mod replicas;
#[path = "support/sizing.rs"]
mod sizing;
#[path = "support/split.rs"]
mod split;
#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
#[path = "../tests/support/mod.rs"]
mod support;

use load::Exchange;
use measure::{cpu, median, resident_mib};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use support::attache::AttacheProcess;
use support::body::{Random, chat, events};
use support::envoy::{EnvoyProcess, shipped};
use support::inside::{Inside, inside_bootstrap};
use support::process::{Process, scratch};
use support::sim::SimProcess;
use support::{Error, noop};
use tokio::net::TcpListener;

/// Streams at once in the rows without Envoy: enough to keep the server busy, few enough to keep it out of its own way.
const STREAMS: usize = 16;
const CONNECTIONS: usize = 2;
/// HTTP clients in the rows with Envoy.
const CLIENTS: usize = 32;
/// Events of a streamed answer in the row per response chunk.
const CHUNKS: usize = 200;
/// Number of conversations in the rows with a prefix cache. They repeat, and each request has a new last message.
const CONVERSATIONS: u64 = 4;
/// Bytes of a message of these conversations; a document is one message.
const MESSAGE_BYTES: usize = 1_500;
const DOCUMENT_BYTES: usize = 1 << 20;
/// Where the last message goes.
const PLACEHOLDER: &[u8] = &[b'#'; 200];

struct Options {
    rows: Vec<String>,
    time: Duration,
    rounds: usize,
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve-noop", destination] => runtime.block_on(serve_noop(destination)),
        ["serve-upstream", count] => runtime.block_on(serve_upstream(count.parse()?, http_load::ANSWER)),
        ["serve-prefill"] => runtime.block_on(serve_upstream(1, split::PREFILLED)),
        _ => runtime.block_on(compare(&options(&arguments)?)),
    }
}

fn options(arguments: &[String]) -> Result<Options, Error> {
    let mut options = Options {
        rows: ["direct", "decide", "prefix", "chunk", "split", "replicas", "envoy", "inside", "idle"]
            .map(str::to_owned)
            .to_vec(),
        time: Duration::from_secs(1),
        rounds: 5,
    };
    for pair in arguments.chunks(2) {
        match pair {
            [name, value] if name == "--rows" => options.rows = value.split(',').map(str::to_owned).collect(),
            [name, value] if name == "--seconds" => options.time = Duration::from_secs_f64(value.parse()?),
            [name, value] if name == "--rounds" => options.rounds = value.parse()?,
            other => return Err(format!("unknown argument {other:?}: --rows a,b, --seconds n, --rounds n").into()),
        }
    }
    Ok(options)
}

async fn serve_noop(destination: &str) -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", serde_json::json!({ "listening": [listener.local_addr()?.to_string()] }));
    noop::serve(listener, destination.parse()?).await;
    Ok(())
}

async fn serve_upstream(count: usize, answer: &'static [u8]) -> Result<(), Error> {
    let (mut servers, mut addresses) = (tokio::task::JoinSet::new(), Vec::new());
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?.to_string());
        servers.spawn(http_load::upstream(listener, answer));
    }
    println!("{}", serde_json::json!({ "listening": addresses }));
    servers.join_all().await;
    Ok(())
}

/// This binary in another role, and where it listens.
async fn own(name: &'static str, arguments: &[&str]) -> Result<(Process, Vec<SocketAddr>), Error> {
    own_by(Command::new(std::env::current_exe()?), name, arguments).await
}

/// The same, started by `command`, which runs this binary.
async fn own_by(
    mut command: Command,
    name: &'static str,
    arguments: &[&str],
) -> Result<(Process, Vec<SocketAddr>), Error> {
    let mut process = Process::spawn(name, command.args(arguments), scratch(name));
    let addresses = process
        .wait_for("line with its addresses", |process| {
            let line: serde_json::Value = serde_json::from_str(process.stdout().lines().next()?).ok()?;
            line["listening"].as_array()?.iter().map(|address| address.as_str()?.parse().ok()).collect()
        })
        .await;
    Ok((process, addresses))
}

/// The servers that are compared.
struct Bench {
    noop: (u32, SocketAddr),
    attache: (u32, SocketAddr),
    picker: AttacheProcess,
    upstreams: Vec<SocketAddr>,
    table: Vec<[String; 4]>,
    _children: [Process; 2],
}

async fn compare(options: &Options) -> Result<(), Error> {
    let (upstream, addresses) = own("upstream", &["serve-upstream", "4"]).await?;
    let (noop, noop_addresses) = own("noop", &["serve-noop", &addresses[0].to_string()]).await?;
    // One thread each, so that CPU time is compared and not scheduling.
    let picker = AttacheProcess::start(&addresses, &["--strategy", "least-request", "--workers", "1"]).await;
    let mut bench = Bench {
        noop: (noop.id(), noop_addresses[0]),
        attache: (picker.process.id(), picker.grpc),
        upstreams: addresses,
        picker,
        table: Vec::new(),
        _children: [upstream, noop],
    };
    for row in &options.rows {
        match row.as_str() {
            "direct" => direct(&mut bench, options).await?,
            "instructions" => bench.table.extend(instructions::rows(&bench.upstreams).await?),
            "sizing" => {
                bench.table.extend(sizing::rows(&bench.upstreams, options.time, options.rounds).await?);
            }
            "decide" => decide(&mut bench, options).await?,
            "prefix" => prefix(&mut bench, options).await?,
            "chunk" => chunk(&mut bench, options).await?,
            "split" => {
                let (_prefill, addresses) = own("prefill", &["serve-prefill"]).await?;
                let rows = split::rows(addresses[0], bench.upstreams[0], options.time, options.rounds.min(5)).await?;
                bench.table.extend(rows);
            }
            "replicas" => {
                let exchanges: Vec<_> =
                    (1..=CONVERSATIONS).map(|seed| Arc::new(turn_of(16_000, MESSAGE_BYTES, seed))).collect();
                let rows = replicas::rows(&bench.upstreams, &exchanges, options.time, options.rounds).await?;
                bench.table.extend(rows);
            }
            "envoy" => through_envoy(&mut bench, options).await?,
            "inside" => inside(&mut bench, options).await?,
            "idle" => idle(&mut bench).await?,
            other => {
                return Err(format!(
                    "unknown row {other:?}: direct, instructions, sizing, decide, prefix, chunk, split, replicas, envoy, inside, idle"
                )
                .into());
            }
        }
    }
    bench.picker.assert_settled().await;
    println!("| what | measured | ratio or figure | target |\n|---|---|---|---|");
    for row in &bench.table {
        println!("| {} |", row.join(" | "));
    }
    Ok(())
}

/// CPU microseconds an exchange and the median and 99th percentile of the request phase, for each server in turn.
struct Sample {
    cpu_us: f64,
    p50_us: f64,
    p99_us: f64,
}

async fn sample(server: (u32, SocketAddr), exchanges: &[Arc<Exchange>], time: Duration) -> Result<Sample, Error> {
    let before = cpu(server.0);
    let run = load::run(server.1, exchanges, CONNECTIONS, STREAMS, time).await?;
    let used = cpu(server.0).saturating_sub(before);
    Ok(Sample {
        cpu_us: used.as_secs_f64() * 1e6 / run.exchanges as f64,
        p50_us: run.pick.value_at_quantile(0.5) as f64,
        p99_us: run.pick.value_at_quantile(0.99) as f64,
    })
}

/// The no-op server and the picker in turn.
async fn alternate(bench: &Bench, exchange: Exchange, options: &Options) -> Result<[Sample; 2], Error> {
    in_turn([bench.noop, bench.attache], &[Arc::new(exchange)], options.time, options.rounds).await
}

/// All servers in turn, `rounds` times: A B A B …; the medians of each.
async fn in_turn<const N: usize>(
    servers: [(u32, SocketAddr); N],
    exchanges: &[Arc<Exchange>],
    time: Duration,
    rounds: usize,
) -> Result<[Sample; N], Error> {
    let mut samples = [const { Vec::<Sample>::new() }; N];
    for round in 0..=rounds {
        for (server, samples) in servers.into_iter().zip(&mut samples) {
            let one = sample(server, exchanges, time).await?;
            // The first round warms up.
            if round > 0 {
                samples.push(one);
            }
        }
    }
    Ok(samples.map(|samples| Sample {
        cpu_us: median(samples.iter().map(|s| s.cpu_us).collect()),
        p50_us: median(samples.iter().map(|s| s.p50_us).collect()),
        p99_us: median(samples.iter().map(|s| s.p99_us).collect()),
    }))
}

async fn direct(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    for (name, size, target) in [("2 KB", 2_000, "1.3"), ("16 KB", 16_000, "1.5"), ("220 KB", 220_000, "2.0")] {
        let answer = [http_load::ANSWER.into()];
        let exchange = Exchange::new(chat(size, false, 1), &answer, "application/json");
        let [noop, attache] = alternate(bench, exchange, options).await?;
        bench.table.push([
            format!("CPU a request, {name} chat"),
            format!(
                "{:.1} µs, no-op {:.1} µs; pick p50/p99 {:.0}/{:.0} µs, no-op {:.0}/{:.0} µs",
                attache.cpu_us, noop.cpu_us, attache.p50_us, attache.p99_us, noop.p50_us, noop.p99_us
            ),
            format!("{:.2} × no-op", attache.cpu_us / noop.cpu_us),
            format!("≤ {target}"),
        ]);
    }
    Ok(())
}

/// One decision, as a part of what the no-op server needs for a request of 4 KiB.
async fn decide(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    let exchange = Exchange::new(chat(4_096, false, 1), &[http_load::ANSWER.into()], "application/json");
    let [noop] = in_turn([bench.noop], &[Arc::new(exchange)], options.time, options.rounds).await?;
    let scorers = [
        "prefix-cache-scorer",
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "lora-affinity-scorer",
        "running-requests-size-scorer",
    ];
    let scorers: Vec<_> = scorers.iter().map(|name| serde_json::json!({ "type": name })).collect();
    let pipeline = serde_json::json!({ "scorers": scorers });
    for (endpoints, target) in [(100, "≤ 10 %"), (1_000, "≤ 40 %")] {
        let idle =
            decide::Pool::idle(endpoints).decide("predicted-latency", &serde_json::Value::Null).as_secs_f64() * 1e6;
        bench.table.push([
            format!("one decision, {endpoints} endpoints, idle, `predicted-latency`"),
            format!("{idle:.2} µs, no-op {:.1} µs a request of 4 KiB", noop.cpu_us),
            format!("{:.1} % of no-op", idle / noop.cpu_us * 100.0),
            "–".to_owned(),
        ]);
        let mut pool = decide::Pool::new(endpoints);
        for claims in ["", ", each with a claim on the prompt's head"] {
            if !claims.is_empty() {
                pool.claim();
            }
            bench.table.push([
                format!("one look-up (`PrefixCache::lookup`), {endpoints} endpoints{claims}"),
                format!("{:.2} µs", pool.look_up().as_secs_f64() * 1e6),
                "–".to_owned(),
                "–".to_owned(),
            ]);
            for (name, strategy, parameters) in [
                ("five scorers", "pipeline", &pipeline),
                ("`predicted-latency`", "predicted-latency", &serde_json::Value::Null),
                ("`least-request`", "least-request", &serde_json::Value::Null),
            ] {
                let took = pool.decide(strategy, parameters).as_secs_f64() * 1e6;
                bench.table.push([
                    format!("one decision, {endpoints} endpoints{claims}, {name}"),
                    format!("{took:.2} µs, no-op {:.1} µs a request of 4 KiB", noop.cpu_us),
                    format!("{:.1} % of no-op", took / noop.cpu_us * 100.0),
                    if strategy == "pipeline" && claims.is_empty() { target } else { "–" }.to_owned(),
                ]);
            }
        }
    }
    Ok(())
}

/// Conversations that come back with a new last message, in pools that look for the server that holds them.
async fn prefix(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    let mut pickers = Vec::new();
    for tokenizer in ["characters", "tiktoken"] {
        let endpoints: String = bench.upstreams.iter().map(|a| format!("  - {{address: \"{a}\"}}\n")).collect();
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {{name: pipeline, parameters: \
             {{scorers: [{{type: prefix-cache-scorer}}, {{type: queue-scorer}}]}}}}\n  prefixCache: {{tokenizer: {tokenizer}}}\n  \
             endpoints:\n{endpoints}"
        );
        pickers
            .push(AttacheProcess::with_arguments(&["--config-text", &text, "--workers", "1"].map(str::to_owned)).await);
    }
    let servers = [(pickers[0].process.id(), pickers[0].grpc), (pickers[1].process.id(), pickers[1].grpc)];
    let targets = ["≤ 2.2", "≤ 3.0"];
    for (name, size, message, targets) in [
        ("2 KB conversation", 2_000, MESSAGE_BYTES, ["–"; 2]),
        ("16 KB conversation", 16_000, MESSAGE_BYTES, ["–"; 2]),
        ("220 KB conversation", 220_000, MESSAGE_BYTES, targets),
        ("220 KB document", 220_000, DOCUMENT_BYTES, targets),
    ] {
        let exchanges: Vec<_> = (1..=CONVERSATIONS).map(|seed| Arc::new(turn_of(size, message, seed))).collect();
        let [noop, plain, characters, tiktoken] =
            in_turn([bench.noop, bench.attache, servers[0], servers[1]], &exchanges, options.time, options.rounds)
                .await?;
        let rows = [
            ("no prefix", &plain, "–"),
            ("`characters`", &characters, targets[0]),
            ("`tiktoken`, warm", &tiktoken, targets[1]),
        ];
        for (tokenizer, sample, target) in rows {
            bench.table.push([
                format!("CPU a request, {name}, {tokenizer}"),
                format!(
                    "{:.1} µs, no-op {:.1} µs; pick p50/p99 {:.0}/{:.0} µs, no-op {:.0}/{:.0} µs",
                    sample.cpu_us, noop.cpu_us, sample.p50_us, sample.p99_us, noop.p50_us, noop.p99_us
                ),
                format!("{:.2} × no-op", sample.cpu_us / noop.cpu_us),
                target.to_owned(),
            ]);
        }
    }
    for picker in &pickers {
        picker.assert_settled().await;
    }
    Ok(())
}

/// A request of a conversation with a new last message, and its response.
fn turn_of(size: usize, message: usize, seed: u64) -> Exchange {
    let answer = [http_load::ANSWER.into()];
    Exchange::new(conversation(size, message, seed), &answer, "application/json").with_fresh(PLACEHOLDER)
}

/// A chat of about `size` bytes in messages of `message` bytes, with [`PLACEHOLDER`] for its last message. Messages are
/// words. Those of conversations have lines, whose ends are escaped.
fn conversation(size: usize, message: usize, seed: u64) -> bytes::Bytes {
    const WORDS: &str = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which \
        one you were all her she there would their we him been has when who will no more if out so said what up its about into than them \
        can only other new some could time these two may then do first any my now such like our over man me even most made after also did \
        many before must through back years where much your way well down should because each just those people how too little state good \
        very make world still own see men work long get here between both life being under never day same another know while last might us \
        great old year off come since against go came right used take three";
    let words: Vec<&str> = WORDS.split(' ').filter(|word| !word.is_empty()).collect();
    let mut random = Random::new(seed);
    let mut body =
        String::from(r#"{"model":"sim-8b","stream":false,"messages":[{"role":"system","content":"You are helpful."}"#);
    let last = format!(r#",{{"role":"user","content":"{}"}}]}}"#, String::from_utf8_lossy(PLACEHOLDER));
    let mut turn = 0;
    while body.len() + last.len() < size {
        let length = message.min(size - body.len() - last.len());
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        body += &format!(r#",{{"role":"{role}","content":""#);
        let end = body.len() + length;
        while body.len() < end {
            body += words[random.below(words.len())];
            body += if message == MESSAGE_BYTES && random.below(12) == 0 { ".\\n" } else { " " };
        }
        body += "\"}";
        turn += 1;
    }
    (body + &last).into()
}

/// The same exchange with one event and with many: the difference is the events'.
async fn chunk(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    let many = Vec::from(events(CHUNKS * 130, CHUNKS, 1));
    let few = many[many.len() - 1..].to_vec();
    let pieces = (many.len() - few.len()) as f64;
    let exchange = |pieces: &[bytes::Bytes]| Exchange::new(chat(2_000, true, 1), pieces, "text/event-stream");
    let [noop_few, attache_few] = alternate(bench, exchange(&few), options).await?;
    let [noop_many, attache_many] = alternate(bench, exchange(&many), options).await?;
    let noop = (noop_many.cpu_us - noop_few.cpu_us) / pieces;
    let attache = (attache_many.cpu_us - attache_few.cpu_us) / pieces;
    bench.table.push([
        "CPU a response chunk (SSE, 130 B)".to_owned(),
        format!("{attache:.2} µs, no-op {noop:.2} µs"),
        format!("{:+.2} µs", attache - noop),
        "≤ +2 µs".to_owned(),
    ]);
    Ok(())
}

/// A picker behind Envoy: process, ext-proc port, health port. `None`: Envoy alone.
type Behind = Option<(u32, u16, u16)>;

async fn through_envoy(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    let attache = (bench.attache.0, bench.attache.1.port(), bench.picker.health.port());
    let noop = (bench.noop.0, bench.noop.1.port(), bench.noop.1.port());
    let setups: [(&str, Behind); 3] = [("no ext_proc", None), ("no-op", Some(noop)), ("attache", Some(attache))];
    let mut envoys = Vec::new();
    for (name, behind) in setups {
        let bootstrap = match behind {
            None => without_ext_proc(bench.upstreams[0]),
            Some((_, grpc, health)) => {
                shipped("original-dst.yaml", &[(8080, 0), (9901, 0), (9002, grpc), (9003, health)])
            }
        };
        envoys.push((name, behind, EnvoyProcess::with_workers(&bootstrap, 1).await));
    }
    for (size_name, size) in [("2 KB", 2_000), ("220 KB", 220_000)] {
        let body = chat(size, false, 1);
        let mut results: [Vec<Through>; 3] = Default::default();
        for round in 0..=options.rounds.min(3) {
            for ((_, behind, envoy), results) in envoys.iter().zip(&mut results) {
                let one = Through::measure(envoy, *behind, &body, (CLIENTS, options.time * 2)).await?;
                if round > 0 {
                    results.push(one);
                }
            }
        }
        for ((name, behind, _), results) in envoys.iter().zip(&results) {
            bench.table.push(through_row(size_name, name, behind.is_some(), results));
        }
    }
    Ok(())
}

/// One round with Envoy in front.
struct Through {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    envoy_us: f64,
    picker_us: f64,
}

impl Through {
    async fn measure(
        envoy: &EnvoyProcess,
        behind: Behind,
        body: &[u8],
        (clients, time): (usize, Duration),
    ) -> Result<Self, Error> {
        let picker = behind.map(|(pid, ..)| pid);
        let before = (cpu(envoy.id()), picker.map_or(Duration::ZERO, cpu));
        let times = http_load::closed_loop(envoy.listener("inference"), body, clients, time, http_load::ANSWER).await?;
        let after = (cpu(envoy.id()), picker.map_or(Duration::ZERO, cpu));
        let count = times.len() as f64;
        Ok(Self {
            per_second: count / time.as_secs_f64(),
            p50_us: times.value_at_quantile(0.5) as f64,
            p99_us: times.value_at_quantile(0.99) as f64,
            envoy_us: after.0.saturating_sub(before.0).as_secs_f64() * 1e6 / count,
            picker_us: after.1.saturating_sub(before.1).as_secs_f64() * 1e6 / count,
        })
    }
}

fn through_row(size: &str, name: &str, has_picker: bool, results: &[Through]) -> [String; 4] {
    let of = |get: fn(&Through) -> f64| median(results.iter().map(get).collect());
    let picker_us = of(|r| r.picker_us);
    let figure = if has_picker { format!("{:.0} req/s a picker core", 1e6 / picker_us) } else { "–".to_owned() };
    [
        format!("through Envoy, {size}, {name}"),
        format!(
            "{:.0} req/s, p50/p99 {:.2}/{:.2} ms, CPU a request: Envoy {:.0} µs, picker {picker_us:.0} µs",
            of(|r| r.per_second),
            of(|r| r.p50_us) / 1e3,
            of(|r| r.p99_us) / 1e3,
            of(|r| r.envoy_us),
        ),
        figure,
        if size == "220 KB" && name == "attache" { "≥ 1,000 req/s (Go picker: 130)" } else { "–" }.to_owned(),
    ]
}

/// The same decisions of the default strategy by ext-proc and inside Envoy: the CPU time of Envoy and the picker together,
/// and what they add to the latency of one connection.
async fn inside(bench: &mut Bench, options: &Options) -> Result<(), Error> {
    let servers: [SocketAddr; 4] = bench.upstreams.clone().try_into().map_err(|_| "four servers")?;
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  destination: {{mode: list}}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    );
    let picker = AttacheProcess::with_arguments(&["--config-text", &text, "--workers", "1"].map(str::to_owned)).await;
    let [a, b, c, d] = servers.map(|server| server.port());
    let ports = [(8080, 0), (9901, 0), (8001, a), (8002, b), (8003, c), (8004, d)];
    let of_picker = [(9002, picker.grpc.port()), (9003, picker.health.port())];
    let by_ext_proc = shipped("override-host.yaml", &[&ports[..], &of_picker].concat());
    let files = scratch("inside");
    let file = files.path().join("attache.yaml");
    std::fs::write(&file, &text)?;
    let behind = Some((picker.process.id(), picker.grpc.port(), picker.health.port()));
    let without = EnvoyProcess::with_workers(&without_ext_proc(servers[0]), 1).await;
    let by_ext_proc = EnvoyProcess::with_workers(&by_ext_proc, 1).await;
    let inside = Inside::of(EnvoyProcess::with_workers(&inside_bootstrap(&file, servers), 1).await, files).await;
    let envoys = [("no picker", None, &without), ("ext-proc", behind, &by_ext_proc), ("inside", None, &inside.envoy)];
    for (size_name, size, target) in [("2 KB", 2_000, "0.45"), ("16 KB", 16_000, "0.45"), ("220 KB", 220_000, "0.40")] {
        let body = chat(size, false, 1);
        let mut results: [Vec<Through>; 3] = Default::default();
        for round in 0..=options.rounds {
            for ((_, behind, envoy), results) in envoys.iter().zip(&mut results) {
                let one = Through::measure(envoy, *behind, &body, (CLIENTS, options.time)).await?;
                if round > 0 {
                    results.push(one);
                }
            }
        }
        let all = |results: &Vec<Through>| median(results.iter().map(|r| r.envoy_us + r.picker_us).collect());
        let cpu_us = results.each_ref().map(all);
        for (((name, ..), results), of_all) in envoys.iter().zip(&results).zip(cpu_us) {
            let of = |get: fn(&Through) -> f64| median(results.iter().map(get).collect());
            bench.table.push([
                format!("Envoy and picker, {size_name}, {name}"),
                format!(
                    "{of_all:.0} µs CPU a request, {:.0} req/s, p50/p99 {:.2}/{:.2} ms",
                    of(|r| r.per_second),
                    of(|r| r.p50_us) / 1e3,
                    of(|r| r.p99_us) / 1e3,
                ),
                format!("{:.2} × ext-proc", of_all / cpu_us[1]),
                if *name == "inside" { format!("≤ {target}") } else { "–".to_owned() },
            ]);
        }
    }
    let mut latencies: [Vec<f64>; 3] = Default::default();
    let body = chat(2_000, false, 1);
    for _ in 0..options.rounds {
        for ((_, behind, envoy), latencies) in envoys.iter().zip(&mut latencies) {
            latencies.push(Through::measure(envoy, *behind, &body, (1, options.time)).await?.p50_us);
        }
    }
    let [without, by_ext_proc, inside_us] = latencies.map(median);
    for (name, latency, target) in [("ext-proc", by_ext_proc, "–"), ("inside", inside_us, "≤ 60 µs")] {
        bench.table.push([
            format!("one connection, 2 KB, {name}"),
            format!("p50 {latency:.0} µs, without a picker {without:.0} µs"),
            format!("{:.0} µs added", latency - without),
            target.to_owned(),
        ]);
    }
    let (late, calls) = inside.late_hooks().await;
    bench.table.push([
        "calls of Envoy into the library, all three sizes".to_owned(),
        format!("{calls:.0}, {late:.0} of them longer than 1 ms"),
        format!("{:.3} %", late / calls * 100.0),
        "≤ 0.1 %".to_owned(),
    ]);
    picker.assert_settled().await;
    Ok(())
}

fn without_ext_proc(upstream: SocketAddr) -> String {
    let (ip, port) = (upstream.ip(), upstream.port());
    format!(
        r#"
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
static_resources:
  listeners:
  - name: inference
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: inference
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: /}}, route: {{cluster: model-servers, timeout: 0s}}}}]
  clusters:
  - name: model-servers
    type: STATIC
    circuit_breakers:
      thresholds: [{{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000}}]
    load_assignment:
      cluster_name: model-servers
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: {ip}, port_value: {port}}}}}}}}}]}}]
"#
    )
}

async fn idle(bench: &mut Bench) -> Result<(), Error> {
    const ENDPOINTS: usize = 100;
    const WATCHED: Duration = Duration::from_secs(10);
    let fleet = SimProcess::start(ENDPOINTS, &[]).await;
    let picker = AttacheProcess::start(&fleet.servers, &[]).await;
    // Long enough for the first scrapes to be over and the idle interval to rule.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = cpu(picker.process.id());
    tokio::time::sleep(WATCHED).await;
    let cores = cpu(picker.process.id()).saturating_sub(before).as_secs_f64() / WATCHED.as_secs_f64();
    let resident = resident_mib(picker.process.id());
    bench.table.push([
        format!("idle, {ENDPOINTS} endpoints scraped"),
        format!("over {} s", WATCHED.as_secs()),
        format!("{cores:.3} cores"),
        "≤ 0.1 core".to_owned(),
    ]);
    bench.table.push([
        "resident memory, idle".to_owned(),
        "–".to_owned(),
        format!("{resident:.1} MiB"),
        "≤ 60 MiB".to_owned(),
    ]);
    Ok(())
}
