//! The load: conversations that grow, and single requests in the other APIs; the same one each time.

use crate::QuickstartError;
use crate::stack::{MODEL, Why};
use attache_http_client::cause;
use attache_protocol::answer::DEFAULT_MAX_ANSWER_BYTES;
use attache_protocol::usage::{Usage, Watch};
use attache_protocol::{AnswerFormat, AnswerText, Api, UsageScanner};
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::{Instant, sleep};

const CONVERSATIONS: usize = 12;
const QUESTIONS: [&str; 4] =
    ["Who may enter without an appointment?", "And on a Sunday?", "What must they bring?", "Who decides in the end?"];
/// Rounds of single requests.
const ROUNDS: usize = 3;
/// Single requests of a round.
const SINGLES: usize = 4;
/// Requests of the whole load.
pub(crate) const TOTAL: usize = CONVERSATIONS * QUESTIONS.len() + ROUNDS * SINGLES;

const DESKS: [&str; 3] = ["visas", "protocol", "archive"];
const RULES: [&str; 5] = [
    "Answer briefly and politely, in the order in which you were asked.",
    "Name the paragraph that your answer rests on.",
    "What concerns another desk is passed on to that desk, with a note.",
    "Nobody is promised a date that the calendar does not hold.",
    "A letter that came in two languages is answered in both.",
];

/// Between the starts of two conversations.
const CONVERSATION_INTERVAL: Duration = Duration::from_millis(250);
/// Between two rounds of single requests.
const ROUND_INTERVAL: Duration = Duration::from_secs(2);
/// A simulated server answers within a second; this one hangs.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Response header of a simulated server with its port.
const SERVER_HEADER: &str = "x-sim-server";
/// Characters of an error's body that are shown.
const SHOWN_ERROR: usize = 200;

/// One request, and what a client sees of its response.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exchange {
    /// The `x-request-id`.
    pub(crate) id: String,
    /// What the table calls it.
    pub(crate) label: String,
    /// Address of the model server; empty without a response.
    pub(crate) server: String,
    /// Time to the first token; only streams show it.
    pub(crate) first_token: Option<Duration>,
    /// Time to the last byte.
    pub(crate) total: Duration,
    pub(crate) usage: Usage,
    /// Why there is no complete response.
    pub(crate) failure: Option<String>,
    /// Why it went to this server.
    pub(crate) why: Option<Why>,
    /// The text of the response.
    pub(crate) text: String,
}

impl Exchange {
    /// Whether it is a turn of a conversation.
    pub(crate) fn is_chat(&self) -> bool {
        self.label.starts_with("chat")
    }
}

/// A request before it is sent.
struct Request {
    label: String,
    api: Api,
    path: &'static str,
    body: Value,
}

/// Plays the load to `gateway`; each exchange comes when it ends.
pub(crate) fn start(gateway: SocketAddr) -> Result<Receiver<Exchange>, QuickstartError> {
    let http = attache_http_client::client(false, CONVERSATIONS + ROUNDS).timeout(TIMEOUT).build();
    let http = http.map_err(|e| QuickstartError::Process(cause(&e)))?;
    let (done, exchanges) = mpsc::channel(TOTAL);
    let client = |number| Client { http: http.clone(), gateway, number, done: done.clone() };
    for number in 0..CONVERSATIONS {
        tokio::spawn(client(number).converse());
    }
    for number in 0..ROUNDS {
        tokio::spawn(client(number).ask_in_every_api());
    }
    Ok(exchanges)
}

/// One user of the gateway.
struct Client {
    http: reqwest::Client,
    gateway: SocketAddr,
    number: usize,
    done: Sender<Exchange>,
}

impl Client {
    /// Turns that each hold all turns before them: what a prefix cache is for.
    async fn converse(self) {
        let number = self.number;
        let mut messages = vec![json!({"role": "system", "content": instructions(DESKS[number % DESKS.len()])})];
        sleep(CONVERSATION_INTERVAL * u32::try_from(number).unwrap_or_default()).await;
        for (turn, question) in (1..).zip(QUESTIONS) {
            messages.push(json!({"role": "user", "content": format!("Case {number}. {question}")}));
            let body = json!({"messages": messages, "max_tokens": 16, "stream": true,
                              "stream_options": {"include_usage": true}});
            let label = format!("chat {number}.{turn}");
            let request = Request { label, api: Api::ChatCompletions, path: "/v1/chat/completions", body };
            let text = self.send(request).await;
            messages.push(json!({"role": "assistant", "content": text}));
            // 200 to 800 ms to read the answer, different for each turn and equal in each run.
            sleep(Duration::from_millis(200 + (number as u64 * 7 + turn * 5) % 7 * 100)).await;
        }
    }

    /// Requests without a past.
    async fn ask_in_every_api(self) {
        let number = self.number;
        let prompt = format!("Note {number}: {}", "the visitor waits in the hall. ".repeat(5 + 20 * number));
        let messages = json!([{"role": "user", "content": prompt}]);
        sleep(ROUND_INTERVAL * u32::try_from(number).unwrap_or_default()).await;
        let singles: [(_, _, _, Value); SINGLES] = [
            ("completion", Api::Completions, "/v1/completions", json!({"prompt": prompt, "max_tokens": 16})),
            ("messages", Api::Messages, "/v1/messages", json!({"messages": messages, "max_tokens": 16})),
            (
                "messages stream",
                Api::Messages,
                "/v1/messages",
                json!({"messages": messages, "max_tokens": 16, "stream": true}),
            ),
            ("embedding", Api::Embeddings, "/v1/embeddings", json!({"input": prompt})),
        ];
        for (label, api, path, body) in singles {
            self.send(Request { label: label.to_owned(), api, path, body }).await;
        }
    }

    /// Sends a request and hands out what came of it; the text of the response.
    async fn send(&self, request: Request) -> String {
        let Request { label, api, path, mut body } = request;
        body["model"] = MODEL.into();
        let id = format!("quickstart-{}", label.replace(' ', "-")) + &format!("-{}", self.number);
        let mut exchange = Exchange { id, label, ..Exchange::default() };
        let began = Instant::now();
        let request = self.http.post(format!("http://{}{path}", self.gateway));
        let request = request.header("x-request-id", &exchange.id).header(CONTENT_TYPE, "application/json");
        let outcome = exchange.read(api, request.body(body.to_string()), began).await;
        exchange.failure = outcome.err();
        exchange.total = began.elapsed();
        let text = exchange.text.clone();
        // Nobody listens when the demonstration was stopped.
        let _ = self.done.send(exchange).await;
        text
    }
}

impl Exchange {
    async fn read(&mut self, api: Api, request: reqwest::RequestBuilder, began: Instant) -> Result<(), String> {
        let mut response = request.send().await.map_err(|e| cause(&e))?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        self.server = header(SERVER_HEADER).map_or_else(|| "?".to_owned(), |port| format!("127.0.0.1:{port}"));
        let streams = header(CONTENT_TYPE.as_str()).is_some_and(|value| value.starts_with("text/event-stream"));
        if !response.status().is_success() {
            let status = response.status();
            // Errors are short: the first chunk has the reason.
            let body = response.chunk().await.map_err(|e| cause(&e))?.unwrap_or_default();
            let body: String = String::from_utf8_lossy(&body).chars().take(SHOWN_ERROR).collect();
            return Err(format!("status {status}: {body}"));
        }
        let format = if streams { AnswerFormat::Events } else { AnswerFormat::Json };
        let mut usage = UsageScanner::new(api, format, Watch::default());
        let mut text = AnswerText::new(api, format, DEFAULT_MAX_ANSWER_BYTES);
        while let Some(chunk) = response.chunk().await.map_err(|e| cause(&e))? {
            if streams {
                self.first_token.get_or_insert_with(|| began.elapsed());
            }
            usage.push(&chunk);
            text.iter_mut().for_each(|text| text.push(&chunk));
        }
        self.usage = usage.usage().ok_or("the response has no usage")?;
        if let Some(text) = text {
            self.text = text.finish().ok_or("the response has no end")?.to_owned();
        }
        Ok(())
    }
}

/// Some 1,500 tokens, which all conversations of a desk begin with.
fn instructions(desk: &str) -> String {
    let rules = (1..=90).map(|number| format!("Rule {number}: {}", RULES[number % RULES.len()]));
    format!("You are the attaché at the desk for {desk}. {}", rules.collect::<Vec<_>>().join(" "))
}
