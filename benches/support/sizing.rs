//! What one picker needs, by the length of a prompt: CPU of a request, and memory. The rows of the sizing guide.

use crate::load::{self, Exchange};
use crate::measure::{cpu, resident_mib};
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::{CONNECTIONS, CONVERSATIONS, MESSAGE_BYTES, STREAMS, conversation, http_load, in_turn, turn_of};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Name and bytes of the prompts: about 1,000, 8,000, 32,000 and 100,000 tokens of English.
const PROMPTS: [(&str, usize); 4] =
    [("1,000 tokens", 4_700), ("8,000 tokens", 37_000), ("32,000 tokens", 148_000), ("100,000 tokens", 462_000)];
/// Bytes of the prompts that a row builds before it sends each of them once, and their greatest number.
const NEW_BYTES: usize = 96 << 20;
const NEW_PROMPTS: usize = 1_000;
/// Streams that are open at once, with a request that waits for its response.
const OPEN: usize = 1_000;

/// The rows: known conversations, new prompts and memory, with the default strategy and the tokenizer `tiktoken`.
pub(crate) async fn rows(endpoints: &[SocketAddr], time: Duration, rounds: usize) -> Result<Vec<[String; 4]>, Error> {
    let mut rows = Vec::new();
    for (name, bytes) in PROMPTS {
        let picker = start(endpoints).await;
        let server = (picker.process.id(), picker.grpc);
        let exchanges: Vec<_> = (1..=CONVERSATIONS).map(|seed| Arc::new(turn_of(bytes, MESSAGE_BYTES, seed))).collect();
        let [known] = in_turn([server], &exchanges, time, rounds).await?;
        rows.push(row(format!("known conversation, {name}"), known.cpu_us));
        rows.push(row(format!("new prompt, {name}"), new_prompts(server, bytes).await?));
        picker.assert_settled().await;
    }
    rows.extend(memory(endpoints).await?);
    Ok(rows)
}

fn row(what: String, cpu_us: f64) -> [String; 4] {
    [
        what,
        format!("{:.2} ms of CPU a request", cpu_us / 1e3),
        format!("{:.0} requests/s a core", 1e6 / cpu_us),
        "–".to_owned(),
    ]
}

async fn start(endpoints: &[SocketAddr]) -> AttacheProcess {
    let endpoints: Vec<_> = endpoints.iter().map(|at| serde_json::json!({ "address": at.to_string() })).collect();
    let config = serde_json::json!({
        "apiVersion": "attache.dev/v1",
        "kind": "Attache",
        "server": { "workers": 1 },
        "pools": [{ "name": "default", "prefixCache": { "tokenizer": "tiktoken" }, "endpoints": endpoints }],
    });
    AttacheProcess::with_arguments(&["--config-text".to_owned(), config.to_string()]).await
}

/// CPU microseconds of a request whose prompt was never seen, with what the picker does after its answer.
async fn new_prompts(server: (u32, SocketAddr), bytes: usize) -> Result<f64, Error> {
    let count = (NEW_BYTES / bytes).min(NEW_PROMPTS);
    let exchanges: Vec<_> = (0..count as u64)
        .map(|seed| {
            let body = conversation(bytes, MESSAGE_BYTES, 1_000_000 + seed * 7_919 + bytes as u64);
            Exchange::new(body, &[http_load::ANSWER.into()], "application/json")
        })
        .collect();
    let before = settled(server.0).await;
    load::run_once(server.1, exchanges, CONNECTIONS, STREAMS).await?;
    let used = settled(server.0).await.saturating_sub(before);
    Ok(used.as_secs_f64() * 1e6 / count as f64)
}

/// The CPU time of a process when it has become idle: prompts may be tokenized after the answer.
async fn settled(pid: u32) -> Duration {
    loop {
        let before = cpu(pid);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = cpu(pid);
        if now.saturating_sub(before) < Duration::from_millis(10) {
            return now;
        }
    }
}

/// Resident memory: idle, with open streams, and with the prefixes of many prompts.
async fn memory(endpoints: &[SocketAddr]) -> Result<Vec<[String; 4]>, Error> {
    let picker = start(endpoints).await;
    let pid = picker.process.id();
    settled(pid).await;
    let idle = resident_mib(pid);
    let mut rows = vec![memory_row("resident memory, idle".to_owned(), format!("{idle:.1} MiB"))];
    let small = turn_of(PROMPTS[0].1, MESSAGE_BYTES, 1);
    let open = load::open(picker.grpc, &small, CONNECTIONS, OPEN).await?;
    settled(pid).await;
    let each = (resident_mib(pid) - idle) * 1024.0 / OPEN as f64;
    drop(open);
    rows.push(memory_row(format!("each of {OPEN} open streams, {}", PROMPTS[0].0), format!("{each:.1} KiB")));
    drop(picker);
    let (name, bytes) = PROMPTS[3];
    let picker = start(endpoints).await;
    let pid = picker.process.id();
    new_prompts((pid, picker.grpc), bytes).await?;
    let count = NEW_BYTES / bytes;
    let figure = format!("{:.1} MiB", resident_mib(pid));
    rows.push(memory_row(format!("resident memory after {count} new prompts, {name}"), figure));
    Ok(rows)
}

fn memory_row(what: String, figure: String) -> [String; 4] {
    [what, "–".to_owned(), figure, "–".to_owned()]
}
