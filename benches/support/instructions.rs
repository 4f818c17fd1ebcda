//! Instructions of a request, counted by valgrind. Unlike times, those of small requests hardly depend on the load of the
//! machine; large bodies are read in other pieces in each run.

use crate::http_load;
use crate::load::{self, Exchange};
use crate::own_by;
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::body::chat;
use crate::support::process::{Process, scratch};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Requests of the two runs of a server. The difference of the runs excludes its start, its end, and what only the first
/// requests do.
const REQUESTS: [u64; 2] = [100, 900];

/// Instructions that `attache` and the no-op server need for a request, for bodies of three sizes.
pub(crate) async fn rows(endpoints: &[SocketAddr]) -> Result<Vec<[String; 4]>, Error> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return Err("the row `instructions` needs valgrind, which is not installed".into());
    }
    let mut rows = Vec::new();
    for (name, size) in [("2 KB", 2_000), ("16 KB", 16_000), ("220 KB", 220_000)] {
        let exchange = Exchange::new(chat(size, false, 1), &[http_load::ANSWER.into()], "application/json");
        let mut totals = [[0; 2]; 2];
        for (at, count) in REQUESTS.into_iter().enumerate() {
            totals[0][at] = noop(endpoints, &exchange, count).await?;
            totals[1][at] = attache(endpoints, &exchange, count, &[]).await?;
        }
        let [noop, attache] = totals.map(|[few, many]| (many - few) / (REQUESTS[1] - REQUESTS[0]));
        rows.push([
            format!("instructions a request, {name} chat"),
            format!("{attache}, no-op {noop}"),
            format!("{:.2} × no-op", attache as f64 / noop as f64),
            "–".to_owned(),
        ]);
    }
    rows.extend(traced(endpoints).await?);
    rows.push(explained(endpoints).await?);
    Ok(rows)
}

/// What traces of 1 % of the requests cost, where Envoy has decided which, and where the picker decides.
///
/// An untraced request counts in full, and a hundredth of what a trace adds. Traces of 1 % alone would measure the calls
/// to the collector, one a second, since valgrind makes seconds of milliseconds. The collector is the model server, which
/// accepts every POST.
async fn traced(endpoints: &[SocketAddr]) -> Result<[[String; 4]; 2], Error> {
    const RATIO: f64 = 0.01;
    const CONTEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";
    let collector = format!("http://{}", endpoints[0]);
    let exchange = |more: &[(&str, &str)]| {
        Exchange::with_headers(more, chat(2_000, false, 1), &[http_load::ANSWER.into()], "application/json")
    };
    let [plain, untraced, sampled] = [None, Some(0), Some(1)].map(|flag| match flag {
        None => exchange(&[]),
        Some(flag) => exchange(&[("traceparent", &format!("{CONTEXT}{flag}"))]),
    });
    let off: &[&str] = &[];
    let traces = ["--otlp-endpoint", &collector, "--trace-ratio"];
    let [none, all] = ["0", "1"].map(|ratio| [&traces[..], &[ratio]].concat());
    let mut figures = Vec::new();
    for (exchange, more) in
        [(&plain, off), (&plain, &none), (&plain, &all), (&untraced, off), (&untraced, &none), (&sampled, &none)]
    {
        let mut totals = [0; 2];
        for (total, count) in totals.iter_mut().zip(REQUESTS) {
            *total = attache(endpoints, exchange, count, more).await?;
        }
        figures.push((totals[1] - totals[0]) as f64 / (REQUESTS[1] - REQUESTS[0]) as f64);
    }
    let row = |who: &str, figures: &[f64]| {
        let [without, untraced, all] = figures[..] else { unreachable!("three figures a row") };
        let with = untraced + RATIO * (all - untraced);
        [
            format!("instructions a request, 2 KB chat, traces of 1 %, chosen by {who}"),
            format!("{with:.0}, without {without:.0}; with a trace {all:.0}, untraced {untraced:.0}"),
            format!("{:+.2} %", (with / without - 1.0) * 100.0),
            "≤ +1 %".to_owned(),
        ]
    };
    Ok([row("the picker", &figures[..3]), row("Envoy", &figures[3..])])
}

/// What the explanations cost that are kept by default.
async fn explained(endpoints: &[SocketAddr]) -> Result<[String; 4], Error> {
    let exchange = Exchange::new(chat(2_000, false, 1), &[http_load::ANSWER.into()], "application/json");
    let mut totals = [[0; 2]; 2];
    for (at, count) in REQUESTS.into_iter().enumerate() {
        for (totals, kept) in totals.iter_mut().zip([0, 4_096]) {
            totals[at] = attache_keeping(kept, endpoints, &exchange, count, &[]).await?;
        }
    }
    let [without, with] = totals.map(|[few, many]| (many - few) as f64 / (REQUESTS[1] - REQUESTS[0]) as f64);
    Ok([
        "instructions a request, 2 KB chat, with explanations".to_owned(),
        format!("{with:.0}, without {without:.0}"),
        format!("{:+.2} %", (with / without - 1.0) * 100.0),
        "≤ +1 %".to_owned(),
    ])
}

/// `valgrind`, which writes its counts to this file when the program ends.
fn valgrind(counts: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", &format!("--callgrind-out-file={}", counts.display())]);
    command
}

async fn noop(endpoints: &[SocketAddr], exchange: &Exchange, count: u64) -> Result<u64, Error> {
    let counts = scratch("instructions");
    let mut command = valgrind(&counts.path().join("counts"));
    command.arg(std::env::current_exe()?);
    let (mut process, addresses) = own_by(command, "noop", &["serve-noop", &endpoints[0].to_string()]).await?;
    load::play_count(addresses[0], exchange, count).await?;
    end(&mut process, counts.path().join("counts")).await
}

async fn attache(endpoints: &[SocketAddr], exchange: &Exchange, count: u64, more: &[&str]) -> Result<u64, Error> {
    attache_keeping(4_096, endpoints, exchange, count, more).await
}

/// The same, with this many explanations of decisions.
async fn attache_keeping(
    explanations: u32,
    endpoints: &[SocketAddr],
    exchange: &Exchange,
    count: u64,
    more: &[&str],
) -> Result<u64, Error> {
    let counts = scratch("instructions");
    let mut command = valgrind(&counts.path().join("counts"));
    command.arg(env!("CARGO_BIN_EXE_attache"));
    // Scrapes depend on the time that a run takes.
    let endpoints: Vec<_> = endpoints.iter().map(|at| serde_json::json!({ "address": at.to_string() })).collect();
    let scrape = serde_json::json!({ "interval": "60s", "idleInterval": "60s", "timeout": "5s", "staleAfter": "600s" });
    let config = serde_json::json!({
        "apiVersion": "attache.dev/v1",
        "kind": "Attache",
        "server": { "workers": 1, "drain": { "minDelay": "0s", "deadline": "5s" } },
        "pools": [{ "name": "default", "strategy": "least-request", "scrape": scrape, "endpoints": endpoints }],
        "exchange": { "explain": { "kept": explanations } },
    });
    let config = ["--config-text".to_owned(), config.to_string()];
    let arguments: Vec<String> = config.into_iter().chain(more.iter().map(|&word| word.to_owned())).collect();
    let mut picker = AttacheProcess::with_command(command, &arguments).await;
    load::play_count(picker.grpc, exchange, count).await?;
    end(&mut picker.process, counts.path().join("counts")).await
}

/// Ends a process, and reads its number of instructions.
async fn end(process: &mut Process, counts: PathBuf) -> Result<u64, Error> {
    process.signal("TERM");
    process.wait().await;
    let text = std::fs::read_to_string(&counts)?;
    let total = text.lines().rev().find_map(|line| line.strip_prefix("totals: "));
    Ok(total.ok_or("no totals in valgrind's output")?.trim().parse()?)
}
