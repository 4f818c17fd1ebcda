//! One request to a gateway: its body, its answer, and what a client sees of both. Called by
//! [`super`], one task a request.

use super::events::EventWatch;
use super::gateway::{self, Gateway, read};
use super::{LiveApi, text};
use attache_http_client::cause;
use attache_protocol::answer::DEFAULT_MAX_ANSWER_BYTES;
use attache_protocol::usage::{StreamError, Watch};
use attache_protocol::{AnswerFormat, AnswerText, Api, UsageScanner};
use attache_report::served::{Ending, Served};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// 16 KiB of an error's body are read for its reason.
const MAX_ERROR_BYTES: usize = 16 << 10;
/// Reasons are words: what is longer is cut.
const MAX_REASON_CHARACTERS: usize = 48;
/// With which our picker says why it refuses.
const REASON_HEADER: &str = "x-attache-reason";

/// A request that has ended.
#[derive(Debug)]
pub(super) struct Done {
    /// All but the server's position and the number by which it is compared.
    pub(super) served: Served,
    /// How the answer names the server.
    pub(super) place: Option<String>,
    /// What the answer gives back to its session.
    pub(super) echo: Vec<(HeaderName, HeaderValue)>,
    /// Why it was not answered.
    pub(super) failure: Option<String>,
    /// From the moment when it was due until it was sent.
    pub(super) late: Duration,
    pub(super) request: Request,
    /// The text of the answer, when it is whole.
    pub(super) said: Option<String>,
}

/// Why a request was not answered.
#[derive(Debug)]
struct RequestFailure {
    ending: Ending,
    reason: String,
}

impl RequestFailure {
    fn refused(reason: impl Into<String>) -> Self {
        Self { ending: Ending::Refused, reason: reason.into() }
    }

    fn lost(reason: impl Into<String>) -> Self {
        Self { ending: Ending::Lost, reason: reason.into() }
    }
}

/// What is read of an answer beside its token counts.
const WATCH: Watch = Watch { errors: true, response_id: false };

/// What has been seen of an answer so far.
#[derive(Debug)]
struct AnswerState {
    place: Option<String>,
    echo: Vec<(HeaderName, HeaderValue)>,
    first_token: Option<Timestamp>,
    events: EventWatch,
    usage: UsageScanner,
    text: Option<AnswerText>,
}

/// Sends `request` with `headers` and reads its answer to the end, or until its time is up.
pub(super) async fn exchange(
    gateway: Arc<Gateway>,
    request: Request,
    headers: HeaderMap,
    quotes: Vec<Option<Arc<str>>>,
) -> Done {
    let mut seen = AnswerState {
        place: None,
        echo: Vec::new(),
        first_token: None,
        events: EventWatch::default(),
        usage: UsageScanner::new(Api::default(), AnswerFormat::Json, WATCH),
        text: None,
    };
    let body = text::body(&request, &quotes, gateway.writing());
    let sent = gateway.now();
    let outcome = match body {
        Ok(body) => match tokio::time::timeout(gateway.timeout, converse(&gateway, body, headers, &mut seen)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(RequestFailure::lost(format!("no end within {:?}", gateway.timeout))),
        },
        Err(error) => Err(RequestFailure::refused(format!("no body: {error}"))),
    };
    let ended = gateway.now();
    let usage = seen.usage.usage().unwrap_or_default();
    let told = |count: Option<u64>| count.map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    let served = Served {
        number: request.number,
        pair: request.number,
        at: request.at,
        endpoint: None,
        prompt_tokens: told(usage.prompt_tokens).unwrap_or_else(|| request.prompt_tokens()),
        expected_cached_tokens: 0,
        cached_tokens: told(usage.cached_tokens).unwrap_or(0),
        generated_tokens: told(usage.completion_tokens).unwrap_or(seen.events.pace.spoken),
        first_token: seen.first_token.map(|first| first.since(request.at)),
        total: ended.since(request.at),
        preemptions: 0,
        ending: outcome.as_ref().map_or_else(|failure| failure.ending, |()| Ending::Answered),
        handover: None,
        fell_back: false,
        turn: request.turn,
        alone: None,
    };
    let said = seen.text.as_ref().filter(|_| outcome.is_ok()).and_then(AnswerText::finish).map(str::to_owned);
    let failure = outcome.err().map(|failure| failure.reason);
    Done { served, place: seen.place, echo: seen.echo, failure, late: sent.since(request.at), request, said }
}

async fn converse(
    gateway: &Gateway,
    body: Vec<u8>,
    headers: HeaderMap,
    seen: &mut AnswerState,
) -> Result<(), RequestFailure> {
    let mut answer = gateway.post(body, headers).await.map_err(|e| {
        let why = cause(&e);
        if e.is_connect() {
            RequestFailure::refused(format!("can't connect: {why}"))
        } else {
            RequestFailure::lost(broke_off(&why))
        }
    })?;
    seen.place = gateway.place(answer.headers());
    seen.echo = gateway::echo(answer.headers());
    if answer.status() != StatusCode::OK {
        return Err(refusal(&mut answer).await);
    }
    if answer.headers().get(CONTENT_ENCODING).is_some_and(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(RequestFailure::lost("the answer is compressed though identity was asked for"));
    }
    let content_type = answer.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let streams = content_type.trim_start().to_ascii_lowercase().starts_with("text/event-stream");
    let api = match gateway.api {
        LiveApi::Chat => Api::ChatCompletions,
        LiveApi::Completions => Api::Completions,
    };
    let format = if streams { AnswerFormat::Events } else { AnswerFormat::Json };
    seen.usage = UsageScanner::new(api, format, WATCH);
    seen.text = AnswerText::new(api, format, DEFAULT_MAX_ANSWER_BYTES);
    while let Some(chunk) = answer.chunk().await.map_err(|e| RequestFailure::lost(broke_off(&cause(&e))))? {
        if streams {
            seen.events.push(&chunk);
            if seen.events.pace.spoken > 0 && seen.first_token.is_none() {
                seen.first_token = Some(gateway.now());
            }
        }
        seen.usage.push(&chunk);
        if let Some(text) = &mut seen.text {
            text.push(&chunk);
        }
    }
    seen.events.finish();
    verdict(seen, streams)
}

/// Whether what came with status 200 is a whole answer.
fn verdict(seen: &AnswerState, streams: bool) -> Result<(), RequestFailure> {
    if let Some(StreamError { status, kind }) = seen.usage.error() {
        let reason = format!("error {status} inside a 200{}", reason(kind.as_deref()));
        // vLLM promises the 200 before it asks its engine, and so refuses in this way too.
        let refused = seen.events.pace.spoken == 0 && matches!(status, 429 | 503);
        return Err(if refused { RequestFailure::refused(reason) } else { RequestFailure::lost(reason) });
    }
    let whole = if streams {
        seen.events.pace.ended
    } else {
        seen.usage.usage().is_some() || seen.text.as_ref().is_some_and(|text| text.finish().is_some())
    };
    if whole { Ok(()) } else { Err(RequestFailure::lost("the answer ended without its end")) }
}

/// Why a status other than 200 came.
async fn refusal(answer: &mut Response) -> RequestFailure {
    let status = answer.status().as_u16();
    let header = answer.headers().get(REASON_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let word = match header {
        Some(word) => Some(word),
        // A body that breaks off has no reason; the status alone is reported.
        None => read(answer, MAX_ERROR_BYTES).await.ok().and_then(|body| reason_in(&body)),
    };
    RequestFailure::refused(format!("status {status}{}", reason(word.as_deref())))
}

#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorObject,
}

#[derive(Deserialize)]
struct ErrorObject {
    code: Option<Value>,
    r#type: Option<String>,
}

fn reason_in(body: &[u8]) -> Option<String> {
    let ErrorObject { code, r#type } = serde_json::from_slice::<ErrorBody>(body).ok()?.error;
    // A code that is a number repeats the status.
    code.and_then(|code| code.as_str().map(str::to_owned)).or(r#type)
}

/// A reason as it stands behind a status; nothing when it says nothing.
fn reason(word: Option<&str>) -> String {
    let word: String =
        word.unwrap_or_default().chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARACTERS).collect();
    if word.trim().is_empty() { String::new() } else { format!(" ({})", word.trim()) }
}

fn broke_off(why: &str) -> String {
    format!("the connection broke: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_codes_or_types_and_short() {
        let of = |body: &str| reason(reason_in(body.as_bytes()).as_deref());
        assert_eq!(of(r#"{"error":{"code":"no_ready_endpoint","type":"x"}}"#), " (no_ready_endpoint)");
        assert_eq!(of(r#"{"error":{"code":503,"type":"Service Unavailable"}}"#), " (Service Unavailable)");
        assert_eq!(of(r#"{"error":{"message":"no"}}"#), "");
        assert_eq!(of("upstream connect error"), "");
        assert_eq!(reason(Some("a\nb")), " (ab)");
        assert_eq!(reason(Some(&"x".repeat(500))).len(), MAX_REASON_CHARACTERS + 3);
    }

    fn seen(api: Api, format: AnswerFormat, body: &str) -> AnswerState {
        let mut seen = AnswerState {
            place: None,
            echo: Vec::new(),
            first_token: None,
            events: EventWatch::default(),
            usage: UsageScanner::new(api, format, WATCH),
            text: AnswerText::new(api, format, 1_000),
        };
        seen.usage.push(body.as_bytes());
        seen.text.as_mut().unwrap().push(body.as_bytes());
        if format == AnswerFormat::Events {
            seen.events.push(body.as_bytes());
            seen.events.finish();
        }
        seen
    }

    #[test]
    fn an_answer_is_whole_when_it_says_so() {
        let streamed = |body: &str| {
            let seen = seen(Api::Completions, AnswerFormat::Events, body);
            verdict(&seen, true).map_err(|failure| (failure.ending, failure.reason))
        };
        let token = "data: {\"choices\":[{\"text\":\" sea\"}]}\n\n";
        assert_eq!(streamed(&format!("{token}data: [DONE]\n\n")), Ok(()));
        let (ending, reason) = streamed(token).unwrap_err();
        assert_eq!((ending, reason.as_str()), (Ending::Lost, "the answer ended without its end"));
        let error = "data: {\"error\":{\"message\":\"m\",\"type\":\"Busy\",\"code\":503}}\n\ndata: [DONE]\n\n";
        assert_eq!(streamed(error).unwrap_err(), (Ending::Refused, "error 503 inside a 200 (Busy)".to_owned()));
        assert_eq!(streamed(&format!("{token}{error}")).unwrap_err().0, Ending::Lost);
        let whole = |body: &str| verdict(&seen(Api::Completions, AnswerFormat::Json, body), false).is_ok();
        assert!(whole("{\"choices\":[{\"text\":\" sea\"}]}") && !whole("{}"));
        assert!(whole("{\"choices\":[],\"usage\":{\"completion_tokens\":3}}"));
    }
}
