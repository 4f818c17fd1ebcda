mod shapes;

use super::*;
use crate::prompt::{DEFAULT_BYTES_PER_PIECE, DEFAULT_PIECES_HEAD_ROOM};
use crate::{Api, MediaKind, Piece, parse, replace_model};
use attache_types::ids::Tokens;
use proptest::prelude::*;

fn ok<'a>(api: Api, body: &'a str) -> Request<'a> {
    match parse(api, Some("application/json"), body.as_bytes(), &Limits::default()) {
        Ok(request) => request,
        Err(error) => panic!("{api:?} {body}: {error}"),
    }
}

fn refused(api: Api, body: impl AsRef<[u8]>) -> RequestError {
    let body = body.as_ref();
    match parse(api, Some("application/json"), body, &Limits::default()) {
        Ok(request) => panic!("{api:?} {}: {request:?}", String::from_utf8_lossy(body)),
        Err(error) => error,
    }
}

fn chat(messages: &str) -> String {
    format!(r#"{{"model":"m","messages":{messages}}}"#)
}

fn prompt(prompt: &str) -> String {
    format!(r#"{{"model":"m","prompt":{prompt}}}"#)
}

/// The pieces as short text, for comparison.
fn shown(pieces: &[Piece<'_>]) -> Vec<String> {
    pieces
        .iter()
        .map(|piece| match piece {
            Piece::Role(role) => format!("<{role}>"),
            Piece::Label(label) => format!("label {label}"),
            Piece::Text(text) => text.get().into_owned(),
            Piece::Media { kind, reference } => format!("{kind:?} {reference}"),
            Piece::ToolCall(json) => format!("call {json}"),
            Piece::Tokens(ids) => format!("{ids:?}"),
        })
        .collect()
}

mod bad_inputs {
    use super::*;

    fn deep(levels: usize) -> String {
        "[".repeat(levels) + &"]".repeat(levels)
    }

    #[test]
    fn invalid_json_text_is_rejected() {
        let utf16: Vec<u8> =
            chat(r#"[{"role":"user","content":"hi"}]"#).encode_utf16().flat_map(u16::to_le_bytes).collect();
        let cases: &[(&[u8], Reason, &str)] = &[
            (b"", Reason::EmptyBody, "empty"),
            (b"  \n", Reason::InvalidJson, "line 2 column 1"),
            (b"{\"model\":\"m\",\n\"messages\":[{", Reason::InvalidJson, "line 2"),
            (b"{\"model\":\"m\",\"messages\":[{\"role\":\"user\"}]} x", Reason::InvalidJson, "trailing"),
            (b"\xEF\xBB\xBF", Reason::EmptyBody, "empty"),
            (b"\xEF\xBB\xBF\xEF\xBB\xBF{}", Reason::InvalidJson, "expected a value"),
            (b"\xFF\xFE{\0}\0", Reason::InvalidJson, "got UTF-16 or UTF-32, expected UTF-8"),
            (&utf16, Reason::InvalidJson, "got UTF-16 or UTF-32, expected UTF-8"),
            (b"{\"model\":\"m\",\"messages\":[{\"content\":\"a\xFFb\"}]}", Reason::InvalidUtf8, "offset 38"),
            (b"{\"model\":\"m\",\"messages\":[{\"content\":\"\\ud800\"}]}", Reason::InvalidJson, "hex escape"),
            (b"{\"model\":\"m\",\"unknown\":[\"\\udc00\"]}", Reason::InvalidJson, "lone surrogate in a hex escape"),
            (b"{\"model\":\"m\",\"tools\":[\"\\ud800\"]}", Reason::InvalidJson, "`tools`"),
            (b"{\"model\":\"m\",\"temperature\":NaN}", Reason::InvalidJson, "line 1"),
            (b"{\"model\":\"m\",\"temperature\":-Infinity}", Reason::InvalidJson, "line 1"),
            (b"[]", Reason::InvalidJson, "must be a JSON object, got an array"),
            (b"\"model\"", Reason::InvalidJson, "must be a JSON object, got a string"),
            (b"no healthy upstream", Reason::InvalidJson, "line 1"),
        ];
        for (body, reason, says) in cases {
            let error = refused(Api::ChatCompletions, body);
            assert_eq!(error.reason, *reason, "{error}");
            assert!(error.message.contains(says), "{error} does not contain {says}");
        }
    }

    #[test]
    fn too_deep_nesting_is_rejected_anywhere() {
        for levels in [129, 1_000, 200_000] {
            let (arrays, objects) = (deep(levels), format!("{}1{}", r#"{"a":"#.repeat(levels), "}".repeat(levels)));
            for body in [
                format!(r#"{{"model":"m","unknown":{arrays}}}"#),
                format!(r#"{{"model":"m","unknown":{objects}}}"#),
                format!(r#"{{"model":"m","tools":{arrays}}}"#),
                format!(r#"{{"model":"m","chat_template_kwargs":{objects}}}"#),
                chat(&format!(r#"[{{"unknown":{objects}}}]"#)),
                chat(&format!(r#"[{{"tool_calls":{arrays}}}]"#)),
                chat(&format!("[{}]", r#"{"content":["#.repeat(levels))),
            ] {
                let error = refused(Api::ChatCompletions, &body);
                assert_eq!(error.reason, Reason::JsonTooDeep, "{levels}: {error}");
            }
        }
        // The body itself is the first of the 128 levels.
        let body = |levels| format!(r#"{{"model":"m","messages":[{{"content":"x"}}],"unknown":{}}}"#, deep(levels));
        ok(Api::ChatCompletions, &body(127));
        assert_eq!(refused(Api::ChatCompletions, body(128)).reason, Reason::JsonTooDeep);
    }

    #[test]
    fn any_depth_limit_leaves_enough_stack() {
        let limits = Limits { max_json_depth: u32::MAX, ..Limits::default() };
        for open in [r#"{"content":["#, r#"{"output":["#, r#"{"unknown":["#, r#"{"image_url":{"url":["#] {
            let body = chat(&format!("[{}", open.repeat(10_000)));
            let error = parse(Api::ChatCompletions, None, body.as_bytes(), &limits).unwrap_err();
            assert_eq!(error.reason, Reason::JsonTooDeep, "{open}");
        }
    }

    #[test]
    fn too_many_values_are_rejected() {
        let keys: Vec<String> = (0..1_000_000).map(|i| format!("\"{i}\":0")).collect();
        let elements = vec!["0"; 1_000_000].join(",");
        for body in [
            format!(r#"{{"model":"m",{}}}"#, keys.join(",")),
            format!(r#"{{"model":"m","unknown":[{elements}]}}"#),
            format!(r#"{{"model":"m","tools":[{elements}]}}"#),
        ] {
            assert_eq!(refused(Api::ChatCompletions, body).reason, Reason::JsonTooComplex);
        }
        let strings = vec!["\"0\""; 1_000_000].join(",");
        let body = format!(r#"{{"model":"m","token_ids":[{strings}]}}"#);
        assert_eq!(refused(Api::Generate, body).reason, Reason::JsonTooComplex, "only numbers are free");
        let body = format!(r#"{{"model":"m","input":[[{}]]}}"#, vec!["[]"; 600_000].join(","));
        assert_eq!(refused(Api::Embeddings, body).reason, Reason::JsonTooComplex);
    }

    #[test]
    fn numbers_in_lists_of_token_ids_and_vectors_are_no_values() {
        let list = |count: usize| format!("[{}]", vec!["7"; count].join(","));
        let batch = format!("[{}]", vec![list(499); 1_000].join(","));
        for (api, field, value, ids) in [
            (Api::Completions, "prompt", list(1_000_000), 1_000_000),
            (Api::Completions, "prompt", batch.clone(), 499_000),
            (Api::Embeddings, "input", batch.clone(), 499_000),
            (Api::Embeddings, "input", format!("[{}]", vec![list(600); 1_000].join(",")), 600_000),
            (Api::SglangGenerate, "input_ids", list(1_000_000), 1_000_000),
            (Api::Generate, "token_ids", list(1_000_000), 1_000_000),
            (Api::Detokenize, "tokens", list(1_000_000), 1_000_000),
            (Api::Detokenize, "tokens", batch.clone(), 499_000),
            (Api::Classify, "input", list(1_000_000), 1_000_000),
            // Vectors are no tokens.
            (Api::SglangGenerate, "input_embeds", format!("[{}]", vec![list(4_096); 200].join(",")), 0),
        ] {
            let body = format!(r#"{{"model":"m","{field}":{value}}}"#);
            assert_eq!(ok(api, &body).prompt.token_ids, ids, "{api:?} {field}");
        }
        let body = format!(r#"{{"model":"m","query":{},"items":{batch}}}"#, list(600_000));
        assert_eq!(ok(Api::Score, &body).prompt.count, 1_000);
    }

    #[test]
    fn only_ids_of_the_first_prompt_are_stored() {
        let batch = prompt(&format!("[[1,2],{}]", vec!["[7,7,7]"; 1_000].join(",")));
        let request = ok(Api::Completions, &batch);
        assert_eq!(request.prompt.pieces, [Piece::Tokens(vec![1, 2])]);
        assert_eq!(request.prompt.token_ids, 3_002);
    }

    #[test]
    fn duplicate_members_are_rejected() {
        let message = r#"[{"role":"user","content":"x"}]"#;
        let cases = [
            (format!(r#"{{"model":"a","messages":{message},"model":"b"}}"#), "model"),
            (format!(r#"{{"model":"a","messages":{message},"mod\u0065l":"a"}}"#), "model"),
            (format!(r#"{{"model":"a","messages":{message},"messages":{message}}}"#), "messages"),
            (format!(r#"{{"model":"a","stream":true,"messages":{message},"stream":false}}"#), "stream"),
            (chat(r#"[{"role":"user","role":"system","content":"x"}]"#), "role"),
            (chat(r#"[{"role":"user","content":"x","content":"y"}]"#), "content"),
            (chat(r#"[{"content":[{"type":"image_url","image_url":{"url":"a","url":"b"}}]}]"#), "url"),
        ];
        for (body, field) in cases {
            let error = refused(Api::ChatCompletions, body);
            assert_eq!((error.reason, error.param), (Reason::DuplicateField, Some(field)));
        }
        ok(Api::ChatCompletions, r#"{"model":"a","x":1,"messages":[{"role":"user","content":"x"}],"x":2}"#);
    }

    #[test]
    fn model_names_are_checked() {
        let long = format!("\"{}\"", "m".repeat(10 << 10));
        for model in ["null", "7", "\"\"", &long, r#""a\u0000b""#, r#""a\nb""#, "[]", "{\"a\":1}", "true"] {
            let body = format!(r#"{{"messages":[{{"content":"x"}}],"model":{model}}}"#);
            let error = refused(Api::ChatCompletions, body);
            assert_eq!((error.reason, error.param), (Reason::InvalidModel, Some("model")), "{model}");
            assert!(error.message.len() < 200, "{error}");
        }
        let error = refused(Api::Completions, r#"{"prompt":"hello world"}"#);
        assert_eq!(error.reason, Reason::InvalidModel);
        assert_eq!(ok(Api::Tokenize, r#"{"prompt":"x","model":null}"#).model, None);
        assert_eq!(ok(Api::Tokenize, r#"{"prompt":"x"}"#).model, None);
        assert_eq!(refused(Api::Tokenize, r#"{"prompt":"x","model":""}"#).reason, Reason::InvalidModel);
    }

    #[test]
    fn messages_are_checked() {
        let many = format!("[{}]", vec![r#"{"role":"user","content":"x"}"#; 100_000].join(","));
        for messages in
            ["[]", "{}", "null", "\"invalid\"", "7", "[\"x\"]", "[7]", "[[]]", r#"[{"content":123}]"#, &many]
        {
            let error = refused(Api::ChatCompletions, chat(messages));
            assert_eq!((error.reason, error.param), (Reason::InvalidMessages, Some("messages")), "{error}");
        }
        assert_eq!(refused(Api::ChatCompletions, r#"{"model":"m"}"#).reason, Reason::InvalidMessages);
        // The server decides about these.
        for messages in
            [r#"[{"content":"x"}]"#, r#"[{"role":"wizard","content":"x"}]"#, r#"[{"role":123,"content":"x"}]"#]
        {
            ok(Api::ChatCompletions, &chat(messages));
        }
    }

    #[test]
    fn token_ids_are_checked() {
        for ids in [
            "[-1]",
            "[2147483648]",
            "[1.5]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1,-1]]",
            "[[1],2]",
            "[[1,\"a\"]]",
            "[1e30]",
            "[[null]]",
        ] {
            let error = refused(Api::Completions, prompt(ids));
            assert_eq!((error.reason, error.param), (Reason::InvalidPromptTokens, Some("prompt")), "{ids}: {error}");
        }
        assert_eq!(ok(Api::Completions, &prompt("[0,2147483647]")).prompt.token_ids, 2);
        // Converted as pydantic does.
        for (ids, expected) in [("[1e3,2.0,true]", vec![1_000, 2, 1]), (r#"[["7"," 8.0 "]]"#, vec![7, 8])] {
            assert_eq!(ok(Api::Completions, &prompt(ids)).prompt.pieces, [Piece::Tokens(expected)], "{ids}");
        }
    }

    #[test]
    fn prompts_are_checked() {
        for bad in ["123", "[]", "null", "{}", "true", "[null]", "[{}]"] {
            let error = refused(Api::Completions, prompt(bad));
            assert_eq!((error.reason, error.param), (Reason::InvalidPrompt, Some("prompt")), "{bad}: {error}");
        }
        assert_eq!(refused(Api::Completions, r#"{"model":"m"}"#).reason, Reason::InvalidPrompt);
        let many = format!("[{}]", vec!["\"x\""; 10_000].join(","));
        assert_eq!(refused(Api::Completions, prompt(&many)).reason, Reason::TooManyPrompts);
        let many = format!("[{}]", vec!["[1]"; 10_000].join(","));
        assert_eq!(refused(Api::Completions, prompt(&many)).reason, Reason::TooManyPrompts);
        let many = format!(r#"{{"model":"m","query":"q","documents":[{}]}}"#, vec!["\"x\""; 10_000].join(","));
        assert_eq!(refused(Api::Rerank, many).reason, Reason::TooManyPrompts);
        let many = chat(&format!("[{}]", vec![r#"[{"content":"x"}]"#; 10_000].join(",")));
        assert_eq!(refused(Api::ChatBatch, many).reason, Reason::TooManyPrompts);
    }

    #[test]
    fn other_members_are_checked() {
        let with =
            |field: &str, value: &str| format!(r#"{{"model":"m","messages":[{{"content":"x"}}],"{field}":{value}}}"#);
        // What pydantic 2 accepts as a boolean, and what it rejects.
        let texts = |words: &[&str]| words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>();
        let true_texts = texts(&["true", "True", "tRue", "ON", "yes", "y", "t", "1"]);
        for value in true_texts.iter().map(String::as_str).chain(["true", "1", "1.0", "1e0"]) {
            assert!(ok(Api::ChatCompletions, &with("stream", value)).stream, "{value}");
        }
        let false_texts = texts(&["false", "False", "0", "no", "n", "f", "OFF"]);
        for value in false_texts.iter().map(String::as_str).chain(["null", "false", "0", "-0", "0.0"]) {
            assert!(!ok(Api::ChatCompletions, &with("stream", value)).stream, "{value}");
        }
        let invalid_texts = texts(&["", " true ", "2", "1.0", "null"]);
        for value in invalid_texts.iter().map(String::as_str).chain(["2", "-1", "1.5", "{}", "[]"]) {
            let error = refused(Api::ChatCompletions, with("stream", value));
            assert_eq!((error.reason, error.param), (Reason::InvalidType, Some("stream")), "{value}");
        }
        let long = format!("\"{}\"", "s".repeat(1 << 20));
        for field in ["cache_salt", "extra_key"] {
            let body = |value: &str| format!(r#"{{"model":"m","text":"x","{field}":{value}}}"#);
            for value in ["\"\"", &long, "7", "[]", "true", "[7]", r#"["s",""]"#, "{}"] {
                let error = refused(Api::SglangGenerate, body(value));
                assert_eq!((error.reason, error.param), (Reason::InvalidCacheSalt, Some(field)), "{value}");
            }
            assert_eq!(ok(Api::SglangGenerate, &body(r#"["s","t"]"#)).cache_salt.as_deref(), Some("s"));
        }
        assert_eq!(ok(Api::ChatCompletions, &with("cache_salt", "\"s\"")).cache_salt.as_deref(), Some("s"));
        for field in ["max_tokens", "max_completion_tokens", "n"] {
            for value in ["\"twelve\"", "\"\"", "\"0x10\"", "[]", "{}"] {
                let error = refused(Api::ChatCompletions, with(field, value));
                assert_eq!((error.reason, error.param), (Reason::InvalidType, Some(field)), "{value}");
            }
        }
        for (field, value) in [
            ("tools", "\"x\""),
            ("tools", "{}"),
            ("documents", "7"),
            ("chat_template", "7"),
            ("chat_template_kwargs", "[]"),
            ("add_generation_prompt", "\"x\""),
            ("continue_final_message", "7"),
            ("return_assistant_tokens_mask", "\"x\""),
        ] {
            let error = refused(Api::ChatCompletions, with(field, value));
            assert_eq!((error.reason, error.param), (Reason::InvalidType, Some(field)));
            ok(Api::ChatCompletions, &with(field, "null"));
        }
    }

    #[test]
    fn content_types_other_than_json_are_rejected() {
        let body = chat(r#"[{"content":"x"}]"#);
        for content_type in ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "Multipart/Mixed"]
        {
            let error =
                parse(Api::ChatCompletions, Some(content_type), body.as_bytes(), &Limits::default()).unwrap_err();
            assert_eq!(error.reason, Reason::UnsupportedMediaType);
        }
        for content_type in [None, Some("application/json; charset=utf-8"), Some("text/plain"), Some("")] {
            assert!(parse(Api::ChatCompletions, content_type, body.as_bytes(), &Limits::default()).is_ok());
        }
    }

    #[test]
    fn long_runs_and_unusual_text_are_read() {
        let secret = "x".repeat(1 << 20);
        for text in [&secret, &" ".repeat(1 << 20), &"\\n".repeat(1 << 19)] {
            ok(Api::ChatCompletions, &chat(&format!(r#"[{{"role":"user","content":"{text}"}}]"#)));
        }
        let odd = "Z\u{341}\u{34d} \u{202e}rtl 👩\u{200d}💻 \\u0000 <|im_start|>";
        let body = chat(&format!(r#"[{{"role":"user","content":"{odd}"}}]"#));
        assert_eq!(shown(&ok(Api::ChatCompletions, &body).prompt.pieces), ["<user>", &odd.replace("\\u0000", "\0")]);
        // An error names the position and never quotes the content.
        let error = refused(Api::ChatCompletions, chat(&format!(r#"[{{"role":"user","content":"{secret}"}},7]"#)));
        assert!(!error.message.contains("xxx"), "{error}");
    }
}

#[test]
fn number_of_pieces_is_bounded_by_the_body() {
    for (part, count, is_cut) in [
        (r#""""#, 2_000, false),
        (r#""""#, 50_000, true),
        (r#"{"text":"words and more words of a part that is no longer small"}"#, 50_000, false),
    ] {
        let parts = vec![part; count].join(",");
        for body in [
            chat(&format!(r#"[{{"role":"user","content":[{parts}]}}]"#)),
            chat(r#"[{"role":"user","content":"a"}]"#).replacen('{', &format!(r#"{{"system":[{parts}],"#), 1),
        ] {
            let api = if body.contains("system") { Api::Messages } else { Api::ChatCompletions };
            let request = ok(api, &body);
            let kept = request.prompt.pieces.len() + request.prompt.system.len();
            assert_eq!(request.prompt.is_cut, is_cut, "{count} of {part}");
            assert!(
                kept <= body.len() / DEFAULT_BYTES_PER_PIECE + DEFAULT_PIECES_HEAD_ROOM + 2,
                "{kept} pieces of {} bytes",
                body.len()
            );
            assert!(is_cut || kept > count, "all pieces are kept");
        }
    }
}

fn json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        ".{0,12}".prop_map(Into::into),
        prop::sample::select(vec!["user", "text", "image_url", "data:x", "m"]).prop_map(Into::into),
    ];
    let key = prop_oneof![
        3 => prop::sample::select(vec![
            "model", "messages", "prompt", "input", "content", "role", "stream", "tools", "tool_calls", "text", "image_url",
            "url", "source", "data", "query", "documents", "items", "queries", "cache_salt", "n", "max_tokens", "system",
        ]).prop_map(str::to_owned),
        1 => ".{0,6}",
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
            prop::collection::vec((key.clone(), inner), 0..6)
                .prop_map(|fields| serde_json::Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn any_api() -> impl Strategy<Value = Api> {
    prop::sample::select(Api::ALL.to_vec())
}

#[test]
fn requests_that_bypass_the_cache_are_recognised() {
    let facts = |api, fields: &str| {
        let body = format!(r#"{{"model":"m","prompt":"x","messages":[{{"content":"x"}}]{fields}}}"#);
        let request = ok(api, &body);
        (request.truncated, request.skips_cache)
    };
    for api in [Api::Completions, Api::ChatCompletions] {
        assert_eq!(facts(api, ""), (false, false));
        assert_eq!(facts(api, r#","truncate_prompt_tokens":null,"prompt_logprobs":null"#), (false, false));
        assert_eq!(facts(api, r#","truncate_prompt_tokens":-1"#), (true, false));
        assert_eq!(facts(api, r#","prompt_logprobs":0"#), (false, true));
    }
    assert_eq!(facts(Api::Completions, r#","echo":true,"logprobs":1"#), (false, true));
    for fields in
        [r#","echo":true"#, r#","logprobs":1"#, r#","echo":false,"logprobs":1"#, r#","echo":"x","logprobs":1"#]
    {
        assert_eq!(facts(Api::Completions, fields), (false, false), "{fields}");
    }
    assert_eq!(facts(Api::ChatCompletions, r#","echo":true,"logprobs":true"#), (false, false), "other probabilities");
}

proptest! {
    #[test]
    fn arbitrary_json_never_panics(api in any_api(), body in json()) {
        let body = serde_json::to_vec(&body).unwrap();
        let request = parse(api, None, &body, &Limits::default());
        if let Some(model) = request.ok().and_then(|r| r.model).filter(|m| !m.span.is_empty()) {
            let name: String = serde_json::from_slice(&body[model.span]).unwrap();
            prop_assert_eq!(name, model.name);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(api in any_api(), body in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(api, None, &body, &Limits::default());
    }

    #[test]
    fn json_validity_agrees_with_serde(body in r#"[\[\]{}",:0-9eE.\-+ntrufalsx \\]{0,24}"#) {
        // Any object is accepted for an unknown API, so an error can only concern the JSON itself.
        let object = format!(r#"{{"x":{body}}}"#);
        let ours = read(Api::Detokenize, None, object.as_bytes(), &Limits::default(), true);
        let theirs = serde_json::from_str::<serde_json::Value>(&object);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{}", object);
    }

    #[test]
    fn damaged_body_is_rejected_if_serde_rejects_it(value in json(), at in any::<prop::sample::Index>(), byte in any::<prop::sample::Index>()) {
        let mut body = serde_json::json!({"x": value}).to_string().into_bytes();
        let alphabet = br#"{}[]",:\/u08dD9.eE+- truefalsn"#;
        let at = at.index(body.len());
        body[at] = alphabet[byte.index(alphabet.len())];
        let ours = read(Api::Detokenize, None, &body, &Limits::default(), true).map_err(|e| e.reason);
        let theirs = serde_json::from_slice::<serde_json::Value>(&body);
        let ours = !matches!(ours, Err(Reason::InvalidJson | Reason::InvalidUtf8));
        prop_assert_eq!(ours, theirs.is_ok(), "{}", String::from_utf8_lossy(&body));
    }

    #[test]
    fn texts_equal_those_of_serde(text in ".{0,40}", escaped in prop::collection::vec(any::<bool>(), 40)) {
        let mut json = String::from("\"");
        for (c, escaped) in text.chars().zip(&escaped) {
            if *escaped || c < ' ' || c == '"' || c == '\\' {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| json += &format!("\\u{unit:04x}"));
            } else {
                json.push(c);
            }
        }
        json.push('"');
        let theirs: String = serde_json::from_str(&json).unwrap();
        let body = chat(&format!(r#"[{{"role":{json},"name":{json},"content":{json}}}]"#));
        let request = ok(Api::ChatCompletions, &body);
        prop_assert_eq!(request.prompt.text_bytes, 2 * theirs.len() as u64);
        prop_assert_eq!(shown(&request.prompt.pieces), [format!("<{theirs}>"), format!("label {theirs}"), theirs]);
    }

    #[test]
    fn rewrite_changes_only_the_model(
        name in "[^\\p{C}]{1,20}", new_name in "[^\\p{C}]{1,20}", text in ".*", rest in json(), first in any::<bool>(), escaped in any::<bool>(),
    ) {
        let mut model = serde_json::to_string(&name).unwrap();
        if escaped {
            model = format!("\"{}\"", name.encode_utf16().map(|u| format!("\\u{u:04x}")).collect::<String>());
        }
        let messages = serde_json::json!([{ "role": "user", "content": text, "extra": rest }]);
        let body = if first {
            format!("{{ \"model\" :\n {model} , \"messages\":{messages}}}")
        } else {
            format!("{{\"messages\": {messages},\"model\":{model}}}")
        };
        let limits = Limits::default();
        let request = read(Api::ChatCompletions, None, body.as_bytes(), &limits, true).unwrap();
        let found = request.model.clone().unwrap();
        prop_assert_eq!(&found.name, &name);
        prop_assert_eq!(&body[found.span.clone()], model);
        let rewritten = String::from_utf8(replace_model(body.as_bytes(), found.span.clone(), &new_name)).unwrap();
        prop_assert_eq!(&rewritten[..found.span.start], &body[..found.span.start]);
        prop_assert!(rewritten.ends_with(&body[found.span.end..]));
        let again = read(Api::ChatCompletions, None, rewritten.as_bytes(), &limits, true).unwrap();
        prop_assert_eq!(again.model.map(|m| m.name.into_owned()), Some(new_name));
        prop_assert_eq!(again.prompt, request.prompt);
    }
}

#[test]
fn body_may_omit_its_model_but_not_set_it_to_null() {
    let read = |body: &str| {
        crate::parse_unnamed(Api::Completions, None, body.as_bytes(), &Limits::default()).map(|r| r.model.is_some())
    };
    assert_eq!(read(r#"{"prompt":"x"}"#), Ok(false));
    assert_eq!(read(r#"{"prompt":"x","model":"m"}"#), Ok(true));
    assert_eq!(read(r#"{"prompt":"x","model":null}"#).map_err(|e| e.reason), Err(Reason::InvalidModel));
    assert_eq!(
        parse(Api::Completions, None, br#"{"prompt":"x"}"#, &Limits::default()).map_err(|e| e.reason),
        Err(Reason::InvalidModel)
    );
}

#[test]
fn report_mode_is_found_wherever_vllm_reads_it() {
    let sets = |api, body: &str| ok(api, body).sets_report_mode;
    let all = [
        (Api::Completions, r#"{"model":"m","prompt":"p",ARGS}"#),
        (Api::ChatCompletions, r#"{"model":"m","messages":[{"role":"user","content":"c"}],ARGS}"#),
        (Api::Responses, r#"{"model":"m","input":"i",ARGS}"#),
        (Api::Messages, r#"{"model":"m","messages":[{"role":"user","content":"c"}],ARGS}"#),
        (Api::Generate, r#"{"model":"m","token_ids":[1],"sampling_params":{ARGS}}"#),
        (Api::Other, r#"{"anything":1,ARGS}"#),
    ];
    for (api, body) in all {
        let with = |args: &str| sets(api, &body.replace("ARGS", args));
        assert!(with(r#""vllm_xargs":{"a":[1],"kv_cache_report_mode":"full"}"#), "{api:?}");
        assert!(with(r#""vllm_xargs":{"kv_cache_report\u005fmode":null}"#), "{api:?}");
        for other in [r#""vllm_xargs":{"a":{"kv_cache_report_mode":1}}"#, r#""vllm_xargs":null"#, r#""vllm_xargs":"x""#]
        {
            assert!(!with(other), "{api:?} {other}");
        }
    }
    let sampling = r#"{"model":"m","token_ids":[1],"sampling_params":{"extra_args":{"kv_cache_report_mode":"full"}}}"#;
    assert!(sets(Api::Generate, sampling));
}

/// Editors of Windows and some HTTP clients write one.
#[test]
fn byte_order_mark_is_ignored_and_kept() {
    let unmarked = chat(r#"[{"role":"user","content":"x"}]"#);
    let marked = format!("\u{feff}{unmarked}");
    let request = ok(Api::ChatCompletions, &marked);
    let span = request.model.clone().map(|m| m.span).unwrap();
    assert_eq!(&marked[span.clone()], "\"m\"");
    assert_eq!(request.prompt, ok(Api::ChatCompletions, &unmarked).prompt);
    let rewritten = replace_model(marked.as_bytes(), span, "other");
    assert!(rewritten.starts_with(b"\xEF\xBB\xBF{\"model\":\"other\","));
    let inserted = crate::insert_model("\u{feff} {\"prompt\":\"x\"}".as_bytes(), "m");
    assert_eq!(inserted, "\u{feff} {\"model\":\"m\",\"prompt\":\"x\"}".as_bytes());
    let edited = crate::edit::Edits::new().set("n", b"2".as_slice()).apply(marked.as_bytes()).unwrap().into_owned();
    assert!(edited.starts_with(b"\xEF\xBB\xBF{"));
    assert_eq!(ok(Api::ChatCompletions, std::str::from_utf8(&edited).unwrap()).choices, 2);
}

/// Words that Codex and OpenAI's SDK write below `/v1/responses`.
#[test]
fn words_below_responses_are_read_like_responses() {
    let body = r#"{"model":"m","input":[{"role":"user","content":"x"}],"instructions":"brief"}"#;
    let (api, id) = Api::from_path("/v1/responses/compact");
    assert_eq!((ok(api, body), id), (ok(Api::Responses, body), None));
    assert_eq!(shown(&ok(Api::InputTokens, body).prompt.system), ["brief"]);
    ok(Api::InputTokens, r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#);
    ok(Api::InputTokens, r#"{"model":"m","previous_response_id":"resp_1"}"#);
    assert_eq!(refused(Api::InputTokens, r#"{"input":"x"}"#).reason, Reason::InvalidModel);
    // A word that Attaché does not know is taken for an id, and still names its model.
    let named = ok(Api::ResponseById, body).model.map(|m| m.name.into_owned());
    assert_eq!(named.as_deref(), Some("m"));
    assert_eq!(ok(Api::ResponseById, "").model, None);
}
