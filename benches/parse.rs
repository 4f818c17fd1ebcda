//! What understanding a request and watching an answer cost, beside what can't be avoided (copying the bytes once) and beside
//! serde_json reading the same bytes without knowing what they mean. Best of five rounds each, one table.
//!
//! `cargo bench --bench parse`

use attache_protocol::usage::Watch;
use attache_protocol::{AnswerFormat, Api, ModelRenamer, UsageScanner, parse};
use attache_types::limits::Limits;
use std::hint::black_box;
use std::time::{Duration, Instant};

const SENTENCE: &str = "The picker reads the body once, borrows what it needs, and lets the rest go by untouched. ";

fn text(bytes: usize) -> String {
    // A line end every few sentences, as in real prompts: escapes are what slows a JSON reader down.
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(SENTENCE);
        if text.len().is_multiple_of(7) {
            text.push('\n');
        }
    }
    text.truncate(bytes);
    text
}

fn chat(bytes: usize, messages: usize) -> Vec<u8> {
    let content = text(bytes / messages);
    let messages: Vec<_> = (0..messages)
        .map(|i| serde_json::json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": content}))
        .collect();
    let body = serde_json::json!({
        "max_tokens": 256, "messages": messages, "model": "tiny", "stream": true, "temperature": 0.7,
        "stream_options": {"include_usage": true},
    });
    body.to_string().into_bytes()
}

#[expect(clippy::disallowed_methods, reason = "a benchmark is a shell: it may ask for the time")]
fn now() -> Instant {
    Instant::now()
}

/// Microseconds for one call, the best of five rounds of at least 40 ms.
fn cost<T>(mut call: impl FnMut() -> T) -> f64 {
    let mut calls = 1u32;
    loop {
        let start = now();
        (0..calls).for_each(|_| drop(black_box(call())));
        if start.elapsed() > Duration::from_millis(40) {
            break;
        }
        calls *= 2;
    }
    let round = |_| {
        let start = now();
        (0..calls).for_each(|_| drop(black_box(call())));
        start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
    };
    (0..5).map(round).fold(f64::INFINITY, f64::min)
}

fn requests() {
    let limits = Limits::default();
    println!("| request body | bytes | copy | IgnoredAny | Value | parse | parse ÷ IgnoredAny |");
    println!("|---|---|---|---|---|---|---|");
    let bodies = [
        ("2 KB, one message", chat(2 << 10, 1)),
        ("16 KB, one message", chat(16 << 10, 1)),
        ("16 KB, 20 messages", chat(16 << 10, 20)),
        ("220 KB, one message", chat(220 << 10, 1)),
        ("220 KB, 400 messages", chat(220 << 10, 400)),
    ];
    for (name, body) in bodies {
        let copy = cost(|| black_box(&body).to_vec());
        let ignored = cost(|| serde_json::from_slice::<serde::de::IgnoredAny>(black_box(&body)).is_ok());
        let value = cost(|| serde_json::from_slice::<serde_json::Value>(black_box(&body)).is_ok());
        let ours = cost(|| {
            let request = parse(Api::ChatCompletions, None, black_box(&body), &limits);
            request.map(|r| r.prompt.estimated_tokens()).ok()
        });
        println!(
            "| {name} | {} | {copy:.2} µs | {ignored:.2} µs | {value:.2} µs | {ours:.2} µs | {:.2} |",
            body.len(),
            ours / ignored
        );
    }
}

fn hostile() {
    let limits = Limits::default();
    println!("\n| hostile body | bytes | parse |\n|---|---|---|");
    let deep =
        |field: &str, levels: usize| format!("{{\"model\":\"m\",\"{field}\":{}", "[".repeat(levels)).into_bytes();
    let bodies = [
        ("1,000,000 levels, unknown field", deep("unknown", 1_000_000)),
        ("1,000,000 levels, `tools`", deep("tools", 1_000_000)),
        ("1,000,000 elements", format!("{{\"x\":[{}0]}}", "0,".repeat(1_000_000)).into_bytes()),
    ];
    for (name, body) in bodies {
        let ours = cost(|| parse(Api::ChatCompletions, None, black_box(&body), &limits).is_ok());
        println!("| {name} | {} | {ours:.2} µs |", body.len());
    }
}

fn answers() {
    println!(
        "\n| answer chunk | bytes | copy | usage | usage, errors, id, events | rename |\n|---|---|---|---|---|---|"
    );
    let delta = br#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"other","choices":[{"index":0,"delta":{"content":" could"},"logprobs":null,"finish_reason":null}]}

"#;
    let last = br#"data: {"id":"chatcmpl-1","model":"tiny","choices":[],"usage":{"prompt_tokens":34,"total_tokens":38,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":32}}}

"#;
    let events = delta.repeat(64);
    let chunks: [(&str, &[u8]); 3] = [("one token", delta), ("usage", last), ("64 tokens", &events)];
    for (name, chunk) in chunks {
        let copy = cost(|| black_box(chunk).to_vec());
        let mut scanner = UsageScanner::new(Api::ChatCompletions, AnswerFormat::Events, Watch::default());
        let usage = cost(|| scanner.push(black_box(chunk)));
        let mut scanner =
            UsageScanner::new(Api::Responses, AnswerFormat::Events, Watch { errors: true, response_id: true });
        let all = cost(|| scanner.push(black_box(chunk)));
        let mut renamer = ModelRenamer::new("tiny", "customer-name");
        let mut out = Vec::new();
        let rename = cost(|| {
            out.clear();
            renamer.as_mut().map(|r| r.push(black_box(chunk), false, &mut out))
        });
        println!("| {name} | {} | {copy:.3} µs | {usage:.3} µs | {all:.3} µs | {rename:.3} µs |", chunk.len());
    }
}

fn main() {
    requests();
    hostile();
    answers();
}
