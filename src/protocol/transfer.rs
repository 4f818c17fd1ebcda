//! What a decode server tells at the end of its answer for the next turn's prefill: vLLM's `kv_transfer_params`, why the answer ended, and
//! its tokens where the client asked for them (`return_token_ids`), read in passing.
//!
//! ```text
//! chat completions, completions   kv_transfer_params   choices[].finish_reason   choices[].token_ids
//! messages                        kv_transfer_params   stop_reason               -                    in events: delta.stop_reason
//! responses                       kv_transfer_params   status                    -                    in events: all under response
//! ```
//!
//! Recorded from vLLM 0.32 are the answers that come whole (`tests/data/pd/14` and `15`; they have no tokens). In a stream vLLM tells nothing for
//! messages: the converter from chat drops it (`vllm/entrypoints/anthropic/serving.py`). For responses the last event repeats the whole object.
//!
//! Follows the structure: only what stands where the server writes it counts, not what a client or a model has put somewhere inside. Called
//! by `ext_proc`; imports nothing but APIs and the format of their answers.

use super::answer::AnswerFormat;
use super::api::Api;
use memchr::memchr2;
use smallvec::SmallVec;

/// 1 MiB of JSON: the ids of 100,000 tokens, or the blocks of a million.
const MAX_VALUE: usize = 1 << 20;
/// Deepest nesting that is followed: what serde_json allows by default.
const MAX_DEPTH: usize = 128;
/// Longest key or word that matters.
const MAX_WORD: usize = 20;

/// Reads one answer.
#[derive(Debug)]
pub struct TransferScanner {
    /// Of an event stream: where in a line we are.
    line: Option<Line>,
    walk: Walk,
    told: Told,
}

/// What an answer has told.
#[derive(Debug, Default)]
struct Told {
    params: Vec<u8>,
    ids: Vec<u32>,
    finish: Option<Finish>,
    /// Something was too long to be kept.
    cut: bool,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// At its limit: its last token is part of the text.
    Length,
    /// Otherwise: its last token is one that ends answers, or is not known.
    Stop,
}

const DATA: &[u8] = b"data:";

/// Where in a line of an event stream we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// So many bytes agree with `data:`.
    Start(usize),
    Value,
    Skip,
}

/// A key that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Key {
    #[default]
    Other,
    Params,
    Choices,
    TokenIds,
    /// Why the answer ended.
    Finish,
    /// An object of an event that says what the root of a whole answer does.
    Root,
}

/// How an API's answers are built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Shape {
    #[default]
    Choices,
    Message,
    Response,
}

impl Shape {
    /// What a key means; `word` ends with the quote.
    fn key(self, word: &[u8]) -> Key {
        match (self, word) {
            (_, b"kv_transfer_params\"") => Key::Params,
            (Self::Choices, b"choices\"") => Key::Choices,
            (Self::Choices, b"token_ids\"") => Key::TokenIds,
            (Self::Choices, b"finish_reason\"") | (Self::Message, b"stop_reason\"") | (Self::Response, b"status\"") => {
                Key::Finish
            }
            (Self::Message, b"delta\"") | (Self::Response, b"response\"") => Key::Root,
            _ => Key::Other,
        }
    }

    /// What the word under [`Key::Finish`] says; `None`: the answer goes on, or has failed.
    fn finish(self, word: &[u8]) -> Option<Finish> {
        match (self, word) {
            (Self::Choices, b"length\"") | (Self::Message, b"max_tokens\"") | (Self::Response, b"incomplete\"") => {
                Some(Finish::Length)
            }
            (Self::Response, b"completed\"") | (Self::Choices | Self::Message, _) => Some(Finish::Stop),
            (Self::Response, _) => None,
        }
    }
}

/// What a value is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Params,
    Ids,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Key,
    Finish,
    Skip,
}

/// One JSON document on its way.
#[derive(Debug, Default)]
struct Walk {
    shape: Shape,
    /// Whether each open bracket is an object's, the innermost lowest.
    objects: u128,
    depth: usize,
    /// The keys under which the outer brackets stand.
    under: [Key; 4],
    key: Key,
    key_next: bool,
    text: Option<Text>,
    escaped: bool,
    word: SmallVec<[u8; 24]>,
    /// The value that is being kept, and the depth at which it ends.
    kept: Option<(Wanted, usize)>,
    raw: Vec<u8>,
    broken: bool,
}

impl TransferScanner {
    /// Of an answer of `api` in this format; `None` for APIs that tell nothing.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat) -> Option<Self> {
        let shape = match api {
            Api::ChatCompletions | Api::Completions => Shape::Choices,
            Api::Messages => Shape::Message,
            Api::Responses => Shape::Response,
            _ => return None,
        };
        let line = (format == AnswerFormat::Events).then_some(Line::Start(0));
        Some(Self { line, walk: Walk { shape, ..Walk::default() }, told: Told::default() })
    }

    /// Takes the next bytes of the answer, cut anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        while let Some((byte, after)) = rest.split_first() {
            let Some(line) = &mut self.line else {
                self.walk.push(rest, &mut self.told);
                return;
            };
            match line {
                Line::Start(agreed) if DATA.get(*agreed) == Some(byte) => {
                    *agreed += 1;
                    if *agreed == DATA.len() {
                        (*line, self.walk) = (Line::Value, Walk { shape: self.walk.shape, ..Walk::default() });
                    }
                    rest = after;
                }
                Line::Start(_) => *line = Line::Skip,
                Line::Value | Line::Skip => {
                    let end = memchr::memchr(b'\n', rest);
                    let (value, after) = rest.split_at(end.unwrap_or(rest.len()));
                    if *line == Line::Value {
                        self.walk.push(value, &mut self.told);
                    }
                    if end.is_some() {
                        *line = Line::Start(0);
                    }
                    rest = after.get(1..).unwrap_or_default();
                }
            }
        }
    }

    /// `kv_transfer_params`, the last that were told: one JSON object, as it was written.
    #[must_use]
    pub fn params(&self) -> Option<&[u8]> {
        Some(&*self.told.params).filter(|params| !params.is_empty() && !self.told.cut)
    }

    /// The answer's tokens; empty when they were not told.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.told.ids
    }

    /// Why the answer ended; `None` as long as it has not.
    #[must_use]
    pub fn finish(&self) -> Option<Finish> {
        self.told.finish
    }
}

impl Walk {
    fn push(&mut self, chunk: &[u8], told: &mut Told) {
        let mut rest = chunk;
        while !rest.is_empty() && !self.broken {
            let length = match self.text {
                Some(text) => self.text(text, rest, told),
                None => self.between(rest, told),
            };
            rest = rest.get(length..).unwrap_or_default();
        }
    }

    /// Takes bytes of a string; how many.
    fn text(&mut self, text: Text, rest: &[u8], told: &mut Told) -> usize {
        let end = if self.escaped { Some(0) } else { memchr2(b'"', b'\\', rest) };
        let length = end.map_or(rest.len(), |at| at + 1);
        let part = rest.get(..length).unwrap_or_default();
        self.keep(part);
        if text != Text::Skip {
            let room = MAX_WORD.saturating_sub(self.word.len());
            self.word.extend_from_slice(part.get(..room).unwrap_or(part));
        }
        match end.and_then(|at| rest.get(at)) {
            Some(b'"') if !self.escaped => self.end_text(text, told),
            Some(b'\\') if !self.escaped => self.escaped = true,
            _ => self.escaped = false,
        }
        length
    }

    fn end_text(&mut self, text: Text, told: &mut Told) {
        self.text = None;
        match (text, &*self.word) {
            (Text::Key, word) => self.key = self.shape.key(word),
            (Text::Finish, word) => told.finish = self.shape.finish(word).or(told.finish),
            (Text::Skip, _) => {}
        }
        self.word.clear();
    }

    /// Takes bytes between strings; how many.
    fn between(&mut self, rest: &[u8], told: &mut Told) -> usize {
        let Some(byte) = rest.first() else { return 0 };
        match byte {
            b'"' => {
                let is_finish = self.key == Key::Finish && self.may_finish();
                self.text = Some(match (self.key_next, is_finish) {
                    (true, _) => Text::Key,
                    (false, true) => Text::Finish,
                    (false, false) => Text::Skip,
                });
                self.key_next = false;
            }
            b'{' | b'[' => self.open(*byte),
            b'}' | b']' => {
                self.keep(&[*byte]);
                return self.close(told);
            }
            b',' => {
                self.key_next = self.objects & 1 == 1;
                self.key = Key::Other;
            }
            _ => {}
        }
        self.keep(&[*byte]);
        1
    }

    /// Directly in an element of `choices`.
    fn is_in_choice(&self) -> bool {
        self.depth == 3 && self.objects & 0b111 == 0b101 && self.under.get(1) == Some(&Key::Choices)
    }

    /// Directly in what says what the whole answer says: the document, or what an event has in its place.
    fn is_in_root(&self) -> bool {
        self.depth == 1 || (self.depth == 2 && self.objects & 0b11 == 0b11 && self.under.get(1) == Some(&Key::Root))
    }

    /// Whether the end of the answer is told here.
    fn may_finish(&self) -> bool {
        if self.shape == Shape::Choices { self.is_in_choice() } else { self.is_in_root() }
    }

    fn open(&mut self, bracket: u8) {
        let wanted = match (self.key, bracket) {
            (Key::Params, b'{') if self.is_in_root() => Some(Wanted::Params),
            (Key::TokenIds, b'[') if self.is_in_choice() => Some(Wanted::Ids),
            _ => None,
        };
        if let Some(wanted) = wanted {
            self.raw.clear();
            self.kept = Some((wanted, self.depth));
        }
        if let Some(slot) = self.under.get_mut(self.depth) {
            *slot = self.key;
        }
        self.objects = self.objects << 1 | u128::from(bracket == b'{');
        self.depth += 1;
        self.key = Key::Other;
        self.key_next = bracket == b'{';
        self.broken |= self.depth > MAX_DEPTH;
    }

    fn close(&mut self, told: &mut Told) -> usize {
        match self.depth.checked_sub(1) {
            Some(depth) => self.depth = depth,
            None => self.broken = true,
        }
        self.objects >>= 1;
        (self.key_next, self.key) = (false, Key::Other);
        if let Some((wanted, _)) = self.kept.filter(|(_, depth)| *depth == self.depth) {
            self.kept = None;
            if self.raw.len() > MAX_VALUE {
                told.cut = true;
            }
            match wanted {
                Wanted::Params => told.params = std::mem::take(&mut self.raw),
                Wanted::Ids => match serde_json::from_slice::<Vec<u32>>(&self.raw) {
                    Ok(ids) => told.ids.extend_from_slice(&ids),
                    Err(_) => told.cut = true,
                },
            }
        }
        1
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.kept.is_some() && self.raw.len() <= MAX_VALUE {
            self.raw.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    const PARAMS: &str =
        r#"{"do_remote_decode":true,"remote_block_ids":[[1,2],[3]],"remote_host":"h\"}{","newer":{"a":[1]}}"#;

    fn whole(params: &str) -> String {
        format!(
            r#"{{"id":"x","choices":[{{"index":0,"text":"a \"kv_transfer_params\":{{\"b\":1}}","finish_reason":"length","token_ids":[5, 6,7],"prompt_token_ids":[1,2]}}],"metadata":{{"kv_transfer_params":{{"forged":1}},"choices":[{{"token_ids":[9]}}]}},"kv_transfer_params":{params}}}"#
        )
    }

    fn events(params: &str) -> String {
        let first = r#"{"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null,"token_ids":[5]}]}"#;
        let last =
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop","token_ids":[6,7]}],"kv_transfer_params":"#;
        format!(
            "data: {first}\n\n: comment \"kv_transfer_params\":{{}}\nevent: x\ndata:{last}{params}}}\n\ndata: [DONE]\n\n"
        )
    }

    fn read(answer: &str, format: AnswerFormat, sizes: &[usize]) -> TransferScanner {
        read_as(Api::ChatCompletions, answer, format, sizes)
    }

    fn read_as(api: Api, answer: &str, format: AnswerFormat, sizes: &[usize]) -> TransferScanner {
        let mut scanner = TransferScanner::new(api, format).unwrap();
        let (mut rest, mut sizes) = (answer.as_bytes(), sizes.iter().cycle());
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            scanner.push(chunk);
            rest = after;
        }
        scanner
    }

    fn assert_told(scanner: &TransferScanner, finish: Finish) {
        assert_eq!(scanner.params().map(|p| std::str::from_utf8(p).unwrap()), Some(PARAMS));
        assert_eq!(scanner.token_ids(), [5, 6, 7]);
        assert_eq!(scanner.finish(), Some(finish));
    }

    #[test]
    fn an_answer_tells_where_its_blocks_are_whole_and_streamed() {
        assert_told(&read(&whole(PARAMS), AnswerFormat::Json, &[usize::MAX]), Finish::Length);
        assert_told(&read(&events(PARAMS), AnswerFormat::Events, &[usize::MAX]), Finish::Stop);
    }

    #[test]
    fn what_stands_elsewhere_or_is_none_is_not_told() {
        for params in ["null", "[1]", "\"text\"", "7"] {
            assert_eq!(read(&whole(params), AnswerFormat::Json, &[7]).params(), None, "{params}");
            assert_eq!(read(&events(params), AnswerFormat::Events, &[7]).params(), None, "{params}");
        }
        for other in [
            json!([{"kv_transfer_params": {"a": 1}}]),
            json!({"choices": [{"kv_transfer_params": {"a": 1}, "message": {"token_ids": [1]}}]}),
            json!({"choices": {"a": {"token_ids": [1], "finish_reason": "stop"}}, "token_ids": [1]}),
        ] {
            let scanner = read(&other.to_string(), AnswerFormat::Json, &[3]);
            assert_eq!((scanner.params(), scanner.token_ids(), scanner.finish()), (None, &[][..], None), "{other}");
        }
    }

    /// The answers of a real vLLM, with the words of a decode in place of a prefill's.
    #[test]
    fn messages_and_responses_tell_it_where_vllm_writes_it() {
        let recorded = |text: &str| serde_json::from_str::<Value>(text).unwrap()["body"].clone();
        let message = recorded(include_str!("../../tests/data/pd/15_messages_prefill.json"));
        let response = recorded(include_str!("../../tests/data/pd/14_responses_prefill.json"));
        for (api, body) in [(Api::Messages, &message), (Api::Responses, &response)] {
            let scanner = read_as(api, &body.to_string(), AnswerFormat::Json, &[5]);
            let told: Value = serde_json::from_slice(scanner.params().unwrap()).unwrap();
            assert_eq!((&told, scanner.finish()), (&body["kv_transfer_params"], Some(Finish::Length)), "{api:?}");
            assert!(scanner.token_ids().is_empty());
        }
        let ended = |api, body: &Value, key: &str, word: &str| {
            let mut body = body.clone();
            body[key] = word.into();
            read_as(api, &body.to_string(), AnswerFormat::Json, &[64]).finish()
        };
        assert_eq!(ended(Api::Messages, &message, "stop_reason", "end_turn"), Some(Finish::Stop));
        assert_eq!(ended(Api::Responses, &response, "status", "completed"), Some(Finish::Stop));
        assert_eq!(ended(Api::Responses, &response, "status", "in_progress"), None);
        assert!(TransferScanner::new(Api::Generate, AnswerFormat::Json).is_none());
    }

    #[test]
    fn events_of_messages_and_responses_have_it_inside() {
        let event = |data: Value| format!("event: x\ndata: {data}\n\n");
        let params = json!({"do_remote_decode": true});
        let forged = json!({"status": "incomplete", "stop_reason": "max_tokens", "kv_transfer_params": {"forged": 1}});
        let told = |api, events: &[Value]| {
            let text: String = events.iter().map(|data| event(data.clone())).collect();
            let scanner = read_as(api, &text, AnswerFormat::Events, &[7]);
            let params = scanner.params().map(|raw| serde_json::from_slice::<Value>(raw).unwrap());
            (params, scanner.finish())
        };
        let responses = [
            json!({"type": "response.created", "response": {"status": "in_progress", "kv_transfer_params": null}}),
            json!({"type": "response.output_item.done", "item": forged}),
            json!({"type": "response.completed", "response": {
                "output": [forged], "status": "completed", "metadata": forged, "kv_transfer_params": params,
            }}),
        ];
        assert_eq!(told(Api::Responses, &responses), (Some(params.clone()), Some(Finish::Stop)));
        let messages = [
            json!({"type": "message_start", "message": forged}),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": forged}),
            json!({"type": "message_stop", "kv_transfer_params": params}),
        ];
        assert_eq!(told(Api::Messages, &messages), (Some(params), Some(Finish::Stop)));
        assert_eq!(told(Api::Messages, &messages[..2]), (None, Some(Finish::Stop)));
    }

    #[test]
    fn the_last_word_counts_and_what_is_too_long_does_not() {
        let twice = r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}"#;
        assert_eq!(read(twice, AnswerFormat::Json, &[9]).params(), Some(&br#"{"b":2}"#[..]));
        let long = json!({"kv_transfer_params": {"a": "x".repeat(MAX_VALUE)}});
        assert_eq!(read(&long.to_string(), AnswerFormat::Json, &[4_096]).params(), None);
        let ids = json!({"choices": [{"token_ids": [1, -1]}], "kv_transfer_params": {"a": 1}});
        assert_eq!(read(&ids.to_string(), AnswerFormat::Json, &[64]).params(), None, "tokens that can't be read");
    }

    /// Some JSON with keys that matter here and there.
    fn document() -> impl Strategy<Value = Value> {
        let key = prop_oneof![
            Just("kv_transfer_params"),
            Just("choices"),
            Just("token_ids"),
            Just("finish_reason"),
            Just("a\"b\\"),
        ];
        let leaf = prop_oneof![Just(json!(null)), Just(json!("length")), Just(json!("q\\\"{[")), Just(json!(17))];
        leaf.prop_recursive(5, 40, 4, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(key.clone(), inner, 0..4)
                    .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Value>()),
            ]
        })
    }

    proptest! {
        /// However an answer is cut, what is told is what a parser finds.
        #[test]
        fn it_finds_what_a_parser_finds(
            document in document(),
            sizes in proptest::collection::vec(1usize..9, 1..4),
            pretty: bool,
        ) {
            let text = if pretty { format!("{document:#}") } else { document.to_string() };
            let scanner = read(&text, AnswerFormat::Json, &sizes);
            let params = document.get("kv_transfer_params").filter(|params| params.is_object());
            let unreadable = document["choices"].as_array().into_iter().flatten().any(|choice| {
                choice.get("token_ids").is_some_and(|ids| {
                    ids.is_array() && serde_json::from_value::<Vec<u32>>(ids.clone()).is_err()
                })
            });
            let told = scanner.params().map(|raw| serde_json::from_slice::<Value>(raw).unwrap());
            prop_assert_eq!(told.as_ref(), params.filter(|_| !unreadable));
            let finish = document["choices"].as_array().into_iter().flatten().rev().find_map(|choice| {
                choice.get("finish_reason").and_then(Value::as_str)
            });
            let finish = finish.map(|word| if word == "length" { Finish::Length } else { Finish::Stop });
            prop_assert_eq!(scanner.finish(), finish);
        }

        /// Whatever comes, nothing breaks.
        #[test]
        fn any_bytes_are_taken(bytes: Vec<u8>, stream: bool) {
            let format = if stream { AnswerFormat::Events } else { AnswerFormat::Json };
            let mut scanner = TransferScanner::new(Api::Completions, format).unwrap();
            scanner.push(b"data: {\"kv_transfer_params\":");
            scanner.push(&bytes);
        }
    }
}
