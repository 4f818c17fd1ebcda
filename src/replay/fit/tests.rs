#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::answers::{MeasuredResponse, UnmeasuredRequest, read_responses};
use super::*;
use crate::record::RecordError;
use attache_record::{Decided, Ended, FORMAT, Header, Line, RequestLeg};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;

fn recording(lines: &[Line]) -> String {
    let header = Header { format: FORMAT.into(), version: "0".into(), seed: 1, settings: serde_json::Value::Null };
    let lines = lines.iter().map(|line| serde_json::to_string(line).unwrap());
    let all: Vec<String> = std::iter::once(serde_json::to_string(&header).unwrap()).chain(lines).collect();
    all.join("\n") + "\n"
}

fn decide(r: u64, pool: &str, at: u64, streams: bool) -> Line {
    Line::Decide(Box::new(Decided {
        r,
        at: Timestamp(at),
        pool: pool.into(),
        estimated: 100,
        matched: 32,
        streams,
        picks: vec![EndpointId(7)],
        ..Decided::default()
    }))
}

fn first(r: u64, at: u64) -> Line {
    Line::First { r, at: Timestamp(at), good: true, tells: true, leg: RequestLeg::Response }
}

fn end(r: u64, at: u64, completion_tokens: Option<u64>) -> Line {
    Line::End(Ended { r, at: Timestamp(at), complete: true, completion_tokens, ..Ended::default() })
}

#[test]
fn answers_that_tell_enough_are_told_from_those_that_only_kept_a_server_busy() {
    let lines = [
        decide(0, "p", 10, true),
        decide(1, "p", 11, false),
        decide(2, "q", 12, true),
        first(0, 20),
        first(1, 21),
        end(1, 30, Some(5)),
        end(0, 31, Some(9)),
        decide(3, "p", 40, true),
        Line::Drop { r: 3, leg: RequestLeg::Response },
        decide(4, "p", 50, true),
        Line::Moved { r: 4, at: Timestamp(55), to: EndpointId(8), leg: RequestLeg::Response },
        first(4, 60),
        end(4, 70, Some(3)),
        decide(5, "p", 80, true),
    ];
    let load = read_responses(recording(&lines).as_bytes(), Some("p")).unwrap();
    let answer = |server, [decided, first, end]: [u64; 3], cached_tokens, generated_tokens| MeasuredResponse {
        server,
        decided: Timestamp(decided),
        first: Timestamp(first),
        end: Timestamp(end),
        prompt_tokens: 100,
        cached_tokens,
        generated_tokens,
    };
    assert_eq!(load.answers, [answer(0, [10, 20, 31], 32, 9), answer(1, [55, 60, 70], 0, 3)]);
    let unmeasured = |decided, end| UnmeasuredRequest { server: 0, decided: Timestamp(decided), end: Timestamp(end) };
    assert_eq!(load.unmeasured, [unmeasured(11, 30), unmeasured(40, 40), unmeasured(50, 55), unmeasured(80, u64::MAX)]);
    assert_eq!(read_responses(recording(&lines).as_bytes(), None).unwrap().unmeasured.len(), 5);
    let error = read_responses("{\"format\":\"x\"}\n".as_bytes(), None).unwrap_err();
    assert!(matches!(error, RecordError::Line { line: 1, .. }), "{error}");
}

#[test]
fn too_few_answers_and_answers_that_tell_nothing_are_refused() {
    let answer = |i: u64| MeasuredResponse {
        server: 0,
        decided: Timestamp(i * 1_000_000_000),
        first: Timestamp(i * 1_000_000_000),
        end: Timestamp(i * 1_000_000_000 + 1_000),
        prompt_tokens: 10,
        cached_tokens: 0,
        generated_tokens: 1,
    };
    let base = EngineConfig::default();
    let load = |n: u64| RecordedLoad { answers: (0..n).map(answer).collect(), ..RecordedLoad::default() };
    assert_eq!(fit(&load(49), &base, "b").unwrap_err(), FitError::Few { answers: 49, unmeasured: 0 });
    assert_eq!(fit(&load(50), &base, "b").unwrap_err(), FitError::Nothing { answers: 50 });
}
