use super::*;
use crate::ids::Tokens;
use crate::protocol::{Api, MediaKind, Piece, parse, replace_model};
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

/// The pieces as short text, for comparing.
fn shown(pieces: &[Piece<'_>]) -> Vec<String> {
    pieces
        .iter()
        .map(|piece| match piece {
            Piece::Role(role) => format!("<{role}>"),
            Piece::Label(label) => format!("label {label}"),
            Piece::Text(text) => text.clone().into_owned(),
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
    fn what_is_no_json_text() {
        let utf16: Vec<u8> =
            chat(r#"[{"role":"user","content":"hi"}]"#).encode_utf16().flat_map(u16::to_le_bytes).collect();
        let cases: &[(&[u8], Reason, &str)] = &[
            (b"", Reason::EmptyBody, "empty"),
            (b"  \n", Reason::InvalidJson, "line 2 column 0"),
            (b"{\"model\":\"m\",\n\"messages\":[{", Reason::InvalidJson, "line 2"),
            (b"{\"model\":\"m\",\"messages\":[{\"role\":\"user\"}]} x", Reason::InvalidJson, "trailing"),
            (b"\xEF\xBB\xBF{}", Reason::InvalidJson, "expected UTF-8 without BOM"),
            (b"\xFF\xFE{\0}\0", Reason::InvalidJson, "expected UTF-8 without BOM"),
            (&utf16, Reason::InvalidJson, "expected UTF-8 without BOM"),
            (b"{\"model\":\"m\",\"messages\":[{\"content\":\"a\xFFb\"}]}", Reason::InvalidUtf8, "offset 38"),
            (b"{\"model\":\"m\",\"messages\":[{\"content\":\"\\ud800\"}]}", Reason::InvalidJson, "hex escape"),
            (b"{\"model\":\"m\",\"unknown\":[\"\\udc00\"]}", Reason::InvalidJson, "lone leading surrogate"),
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
            assert!(error.message.contains(says), "{error} does not say {says}");
        }
    }

    #[test]
    fn too_deep_wherever_it_is() {
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
    fn no_limit_lets_a_body_use_up_the_stack() {
        let limits = Limits { max_json_depth: u32::MAX, ..Limits::default() };
        for open in [r#"{"content":["#, r#"{"output":["#, r#"{"unknown":["#, r#"{"image_url":{"url":["#] {
            let body = chat(&format!("[{}", open.repeat(10_000)));
            let error = parse(Api::ChatCompletions, None, body.as_bytes(), &limits).unwrap_err();
            assert_eq!(error.reason, Reason::JsonTooDeep, "{open}");
        }
    }

    #[test]
    fn too_many_values() {
        let keys: Vec<String> = (0..1_000_000).map(|i| format!("\"{i}\":0")).collect();
        let elements = vec!["0"; 1_000_000].join(",");
        for body in [
            format!(r#"{{"model":"m",{}}}"#, keys.join(",")),
            format!(r#"{{"model":"m","unknown":[{elements}]}}"#),
            format!(r#"{{"model":"m","prompt":[{elements}]}}"#),
            format!(r#"{{"model":"m","tools":[{elements}]}}"#),
        ] {
            let api = if body.contains("prompt") { Api::Completions } else { Api::ChatCompletions };
            assert_eq!(refused(api, body).reason, Reason::JsonTooComplex);
        }
    }

    #[test]
    fn fields_that_come_twice() {
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
    fn models() {
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
    fn messages() {
        let many = format!("[{}]", vec![r#"{"role":"user","content":"x"}"#; 100_000].join(","));
        for messages in
            ["[]", "{}", "null", "\"invalid\"", "7", "[\"x\"]", "[7]", "[[]]", r#"[{"content":123}]"#, &many]
        {
            let error = refused(Api::ChatCompletions, chat(messages));
            assert_eq!((error.reason, error.param), (Reason::InvalidMessages, Some("messages")), "{error}");
        }
        assert_eq!(refused(Api::ChatCompletions, r#"{"model":"m"}"#).reason, Reason::InvalidMessages);
        // The server decides on these.
        for messages in
            [r#"[{"content":"x"}]"#, r#"[{"role":"wizard","content":"x"}]"#, r#"[{"role":123,"content":"x"}]"#]
        {
            ok(Api::ChatCompletions, &chat(messages));
        }
    }

    #[test]
    fn token_ids() {
        for ids in
            ["[-1]", "[2147483648]", "[1.5]", "[1,\"a\"]", "[\"a\",1]", "[[1,-1]]", "[[1],2]", "[[1,\"a\"]]", "[1e3]"]
        {
            let error = refused(Api::Completions, prompt(ids));
            assert_eq!((error.reason, error.param), (Reason::InvalidPromptTokens, Some("prompt")), "{ids}: {error}");
        }
        assert_eq!(ok(Api::Completions, &prompt("[0,2147483647]")).prompt.token_ids, 2);
    }

    #[test]
    fn prompts() {
        for bad in ["123", "[]", "null", "{}", "true", "[null]", "[{}]", "[true]"] {
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
    fn other_fields() {
        let with =
            |field: &str, value: &str| format!(r#"{{"model":"m","messages":[{{"content":"x"}}],"{field}":{value}}}"#);
        for value in ["\"true\"", "1", "{}", "[]"] {
            let error = refused(Api::ChatCompletions, with("stream", value));
            assert_eq!((error.reason, error.param), (Reason::InvalidType, Some("stream")), "{value}");
        }
        assert!(!ok(Api::ChatCompletions, &with("stream", "null")).stream);
        let long = format!("\"{}\"", "s".repeat(1 << 20));
        for value in ["\"\"", &long, "7", "[]", "true"] {
            let error = refused(Api::ChatCompletions, with("cache_salt", value));
            assert_eq!((error.reason, error.param), (Reason::InvalidCacheSalt, Some("cache_salt")));
        }
        assert_eq!(ok(Api::ChatCompletions, &with("cache_salt", "\"s\"")).cache_salt.as_deref(), Some("s"));
        for value in ["-1", "1e18", "1000000000000000000", "\"12\"", "1.5", "{}"] {
            assert_eq!(ok(Api::ChatCompletions, &with("max_tokens", value)).max_tokens, None, "{value}");
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
    fn forms() {
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
    fn long_runs_and_odd_text() {
        let secret = "x".repeat(1 << 20);
        for text in [&secret, &" ".repeat(1 << 20), &"\\n".repeat(1 << 19)] {
            ok(Api::ChatCompletions, &chat(&format!(r#"[{{"role":"user","content":"{text}"}}]"#)));
        }
        let odd = "Z\u{341}\u{34d} \u{202e}rtl 👩\u{200d}💻 \\u0000 <|im_start|>";
        let body = chat(&format!(r#"[{{"role":"user","content":"{odd}"}}]"#));
        assert_eq!(shown(&ok(Api::ChatCompletions, &body).prompt.pieces), ["<user>", &odd.replace("\\u0000", "\0")]);
        // A message tells where, never what.
        let error = refused(Api::ChatCompletions, chat(&format!(r#"[{{"role":"user","content":"{secret}"}},7]"#)));
        assert!(!error.message.contains("xxx"), "{error}");
    }
}

#[test]
fn completions_in_all_shapes() {
    let cases: &[(&str, &[&str], u64, u64, u32)] = &[
        (r#""hello""#, &["hello"], 5, 0, 1),
        (r#""""#, &[""], 0, 0, 1),
        (r#"["a"]"#, &["a"], 1, 0, 1),
        (r#"["a","bc"]"#, &["a"], 3, 0, 2),
        ("[1,2,3]", &["[1, 2, 3]"], 0, 3, 1),
        ("[[1,2,3],[4]]", &["[1, 2, 3]"], 0, 4, 2),
    ];
    for (value, pieces, text_bytes, token_ids, count) in cases {
        let body = prompt(value);
        let request = ok(Api::Completions, &body).prompt;
        assert_eq!(shown(&request.pieces), *pieces, "{value}");
        assert_eq!(
            (request.text_bytes, request.token_ids, request.count),
            (*text_bytes, *token_ids, *count),
            "{value}"
        );
    }
    ok(Api::Completions, r#"{"model":"m","prompt":null,"prompt_embeds":"AAAA"}"#);
}

#[test]
fn chat_in_all_shapes() {
    let body = chat(
        r#"[
        {"role":"system","content":"be\nbrief","name":"boss"},
        {"content":[{"type":"text","text":"look"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}},
            {"type":"image_url","image_url":"https://x/y.png"},
            {"type":"input_audio","input_audio":{"data":"BB","format":"wav"}},
            {"type":"video_url","video_url":{"url":"https://x/z.mp4"}},
            {"type":"file","file":{"filename":"f","file_id":"file-1"}},"bare"],"role":"user"},
        {"role":"assistant","content":null,"tool_calls":[{"id":"c1","function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","tool_call_id":"c1","content":"42"},
        {"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"reasoning_content":"hm"}]"#,
    );
    let request = ok(Api::ChatCompletions, &body);
    assert_eq!(
        shown(&request.prompt.pieces),
        [
            "<system>",
            "be\nbrief",
            "label boss",
            "<user>",
            "look",
            "Image data:image/png;base64,AA",
            "Image https://x/y.png",
            "Audio BB",
            "Video https://x/z.mp4",
            "Document file-1",
            "bare",
            "<assistant>",
            r#"call [{"id":"c1","function":{"name":"f","arguments":"{}"}}]"#,
            "<tool>",
            "label c1",
            "42",
            "<assistant>",
            "no",
            "hm",
        ]
    );
    let media: u64 = [MediaKind::Image, MediaKind::Image, MediaKind::Audio, MediaKind::Video, MediaKind::Document]
        .iter()
        .map(|kind| kind.estimated_tokens())
        .sum();
    assert_eq!(request.prompt.media_tokens, media);
    assert_eq!(u64::from(request.prompt.estimated_tokens().0), media + request.prompt.text_bytes.div_ceil(4));
}

#[test]
fn chat_options() {
    let request = ok(
        Api::ChatCompletions,
        r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"max_completion_tokens":7,"max_tokens":9,"n":3,
        "tools":[{"type":"function"}],"documents":[{"text":"d"}],"prompt_cache_key":"k","chat_template":"t",
        "chat_template_kwargs":{"enable_thinking":false},"add_generation_prompt":true,"model":"m"}"#,
    );
    assert_eq!((request.stream, request.max_tokens, request.choices), (true, Some(7), 3));
    assert_eq!(request.prompt.tools, Some(r#"[{"type":"function"}]"#));
    assert_eq!(request.prompt.documents, Some(r#"[{"text":"d"}]"#));
    assert_eq!(request.prompt_cache_key.as_deref(), Some("k"));
    let request =
        ok(Api::ChatCompletions, r#"{"model":"m","messages":[{}],"max_tokens":9,"max_completion_tokens":null}"#);
    assert_eq!((request.max_tokens, request.choices), (Some(9), 1));
}

#[test]
fn a_data_uri_is_not_copied() {
    let uri = format!("data:image/png;base64,{}", "A".repeat(10 << 20));
    let body =
        chat(&format!(r#"[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{uri}"}}}}]}}]"#));
    let request = ok(Api::ChatCompletions, &body);
    match request.prompt.pieces.as_slice() {
        [_, Piece::Media { kind: MediaKind::Image, reference: std::borrow::Cow::Borrowed(reference) }] => {
            assert_eq!(*reference, uri);
        }
        other => panic!("{} pieces", other.len()),
    }
    assert_eq!(request.prompt.estimated_tokens(), Tokens(1_000));
}

#[test]
fn a_batch_keeps_its_first_conversation_and_counts_all() {
    let body = chat(r#"[[{"role":"user","content":"one"}],[{"role":"user","content":"three"}]]"#);
    let request = ok(Api::ChatBatch, &body);
    assert_eq!(shown(&request.prompt.pieces), ["<user>", "one"]);
    assert_eq!((request.prompt.text_bytes, request.prompt.count), (8, 2));
    for bad in ["[]", "{}", "[[]]", "[7]", "[{}]"] {
        assert_eq!(refused(Api::ChatBatch, chat(bad)).reason, Reason::InvalidMessages, "{bad}");
    }
}

#[test]
fn responses_in_all_shapes() {
    let request = ok(
        Api::Responses,
        r#"{"model":"m","input":"hi","instructions":"be brief","previous_response_id":"resp_1","max_output_tokens":5,
        "conversation":{"id":"conv_1"},"prompt_cache_key":"k","prompt":{"id":"pmpt_1"},"text":{"format":{}}}"#,
    );
    assert_eq!(shown(&request.prompt.pieces), ["hi"]);
    assert_eq!(shown(&request.prompt.system), ["be brief"]);
    assert_eq!(request.previous_response_id.as_deref(), Some("resp_1"));
    assert_eq!(request.conversation.as_deref(), Some("conv_1"));
    assert_eq!((request.max_tokens, request.prompt_cache_key.as_deref()), (Some(5), Some("k")));

    let request = ok(
        Api::Responses,
        r#"{"model":"m","conversation":"conv_2","instructions":null,"input":[
        {"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"u"},
            {"type":"input_file","file_data":"f"}]},
        {"type":"function_call","call_id":"c","name":"f","arguments":"{}"},
        {"type":"function_call_output","call_id":"c","output":"42"},
        {"type":"reasoning","summary":[{"type":"summary_text","text":"s"}]},
        {"type":"item_reference","id":"msg_1"},
        {"role":"assistant","content":[{"type":"output_text","text":"b"}]}]}"#,
    );
    assert_eq!(request.conversation.as_deref(), Some("conv_2"));
    assert_eq!(
        shown(&request.prompt.pieces),
        [
            "<user>",
            "a",
            "Image u",
            "Document f",
            "<>",
            "label c",
            "label f",
            "{}",
            "<>",
            "label c",
            "42",
            "<>",
            "s",
            "<>",
            "<assistant>",
            "b"
        ]
    );
    for bad in [r#"{"model":"m"}"#, r#"{"model":"m","input":null}"#, r#"{"model":"m","input":7}"#] {
        assert_eq!(refused(Api::Responses, bad).reason, Reason::InvalidPrompt, "{bad}");
    }
    let request = ok(Api::Conversations, r#"{"items":[{"type":"message","role":"user","content":"x"}],"metadata":{}}"#);
    assert_eq!(shown(&request.prompt.pieces), ["<user>", "x"]);
    ok(Api::Conversations, r#"{"metadata":{"a":"b"}}"#);
}

#[test]
fn anthropic_messages_in_all_shapes() {
    let request = ok(
        Api::Messages,
        r#"{"max_tokens":9,"messages":[
        {"role":"user","content":"hi"},
        {"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"redacted_thinking","data":"x"},
            {"type":"tool_use","id":"u","name":"f","input":{"a":[1]}}]},
        {"role":"user","content":[{"type":"tool_result","tool_use_id":"u","content":[{"type":"text","text":"r"},
            {"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA"}}]},
            {"type":"tool_result","tool_use_id":"v","content":"plain"},
            {"type":"document","source":{"type":"url","url":"https://x/d.pdf"},"cache_control":{"type":"ephemeral"}}]},
        {"role":"system","content":"left"}],
        "system":[{"type":"text","text":"one","cache_control":{"type":"ephemeral"}},{"type":"text","text":"two"}],
        "tools":[{"name":"f","input_schema":{"type":"object"}}],"model":"claude"}"#,
    );
    assert_eq!(shown(&request.prompt.system), ["one", "two"]);
    assert_eq!(
        shown(&request.prompt.pieces),
        [
            "<user>",
            "hi",
            "<assistant>",
            "t",
            "label f",
            r#"call {"a":[1]}"#,
            "<user>",
            "label u",
            "r",
            "Image AA",
            "label v",
            "plain",
            "Document https://x/d.pdf",
            "<system>",
            "left"
        ]
    );
    assert_eq!(request.prompt.tools, Some(r#"[{"name":"f","input_schema":{"type":"object"}}]"#));
    let request = ok(Api::CountTokens, r#"{"model":"m","system":"s","messages":[{"role":"user","content":"abcd"}]}"#);
    assert_eq!(shown(&request.prompt.system), ["s"]);
    assert_eq!(request.prompt.text_bytes, 5);
    assert_eq!(refused(Api::Messages, r#"{"model":"m","system":"s"}"#).reason, Reason::InvalidMessages);
}

#[test]
fn embeddings_rerank_score_and_tokenize() {
    for input in [r#""x""#, r#"["x","y"]"#, "[1,2]", "[[1],[2]]"] {
        ok(Api::Embeddings, &format!(r#"{{"model":"m","input":{input}}}"#));
    }
    ok(Api::Embeddings, r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#);
    ok(Api::Embeddings, r#"{"model":"m","texts":["x"],"input_type":"search_query"}"#);
    for bad in [r#"{"model":"m"}"#, r#"{"model":"m","input":null}"#, r#"{"model":"m","input":[]}"#] {
        assert_eq!(refused(Api::Embeddings, bad).reason, Reason::InvalidPrompt, "{bad}");
    }
    ok(Api::Pooling, r#"{"model":"m","data":{"x":1}}"#);
    ok(Api::Classify, r#"{"model":"m","input":["x"]}"#);

    let request = ok(Api::Rerank, r#"{"model":"m","documents":["abc",{"text":"de"}],"query":"qq","top_n":1}"#);
    assert_eq!(shown(&request.prompt.pieces), ["abc", "qq"]);
    // The query is read with each of the documents.
    assert_eq!((request.prompt.text_bytes, request.prompt.count), (9, 2));
    for body in [
        r#"{"model":"m","text_1":"aa","text_2":["b","c"]}"#,
        r#"{"model":"m","queries":"aa","documents":["b","c"]}"#,
        r#"{"model":"m","queries":"aa","items":["b","c"]}"#,
        r#"{"model":"m","data_1":"aa","data_2":["b","c"]}"#,
    ] {
        let request = ok(Api::Score, body);
        assert_eq!((request.prompt.text_bytes, request.prompt.count), (6, 2), "{body}");
    }
    let request = ok(Api::Score, r#"{"model":"m","text_1":["a","b"],"text_2":["c","d"]}"#);
    assert_eq!((request.prompt.text_bytes, request.prompt.count), (4, 2));
    let body = r#"{"model":"m","data_1":{"content":[{"type":"text","text":"t"}]},"data_2":{"content":[{"type":"image_url","image_url":{"url":"u"}}]}}"#;
    let request = ok(Api::Score, body);
    assert_eq!(shown(&request.prompt.pieces), ["t", "Image u"]);
    for (api, bad, param) in [
        (Api::Rerank, r#"{"model":"m","query":"q"}"#, "documents"),
        (Api::Rerank, r#"{"model":"m","documents":["d"]}"#, "query"),
        (Api::Rerank, r#"{"model":"m","query":"q","documents":[]}"#, "documents"),
        (Api::Rerank, r#"{"model":"m","query":7,"documents":["d"]}"#, "query"),
        (Api::Score, r#"{"model":"m","text_1":"a"}"#, "text_2"),
        (Api::Score, r#"{"model":"m"}"#, "text_1"),
    ] {
        let error = refused(api, bad);
        assert_eq!((error.reason, error.param), (Reason::InvalidPrompt, Some(param)), "{bad}");
    }
    ok(Api::Tokenize, r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#);
    assert_eq!(refused(Api::Tokenize, r#"{"model":"m"}"#).param, Some("prompt"));
    assert_eq!(ok(Api::Detokenize, r#"{"model":"m","tokens":[1,2]}"#).prompt.token_ids, 2);
}

#[test]
fn bodies_of_unknown_apis_are_never_refused() {
    let parse = |body: &'static [u8]| parse(Api::Other, None, body, &Limits::default()).unwrap();
    let found = parse(br#"{"x":[1],"model":"m","stream":true}"#);
    assert_eq!((found.model.map(|m| m.name).as_deref(), found.stream), (Some("m"), true));
    for body in [
        &b""[..],
        b"no json",
        b"\xFF\xFE",
        b"[]",
        br#"{"model":7}"#,
        br#"{"model":"a","model":"b"}"#,
        br#"{"model":"a""#,
    ] {
        assert_eq!(parse(body), Request::default());
    }
}

#[test]
fn real_requests_are_read() {
    let directory = format!("{}/tests/data/protocol", env!("CARGO_MANIFEST_DIR"));
    let mut read = 0;
    for file in std::fs::read_dir(directory).unwrap() {
        let capture: serde_json::Value = serde_json::from_slice(&std::fs::read(file.unwrap().path()).unwrap()).unwrap();
        let Some(path) = capture["request"]["path"].as_str() else { continue };
        let (api, _) = Api::from_path(path);
        let body = match &capture["request"]["body"] {
            serde_json::Value::String(text) => text.clone(),
            body => body.to_string(),
        };
        let name = capture["name"].as_str().unwrap();
        match (name, parse(api, None, body.as_bytes(), &Limits::default())) {
            // vLLM takes a chat without a model; we don't.
            ("chat_nomodel", Err(error)) => assert_eq!(error.reason, Reason::InvalidModel),
            ("err_badjson", Err(error)) => assert_eq!(error.reason, Reason::InvalidJson),
            ("err_empty_messages" | "err_missing_messages", Err(error)) => {
                assert_eq!(error.reason, Reason::InvalidMessages)
            }
            (_, Ok(request)) => {
                assert!(request.prompt.count > 0, "{name}");
                assert_eq!(request.model.is_none(), name == "tokenize_completion_nomodel", "{name}");
                read += 1;
            }
            (_, Err(error)) => panic!("{name}: {error}"),
        }
    }
    assert!(read >= 25, "only {read} captures were read");
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
    fn json_is_what_serde_calls_json(body in r#"[\[\]{}",:0-9eE.\-+ntrufalsx \\]{0,24}"#) {
        // Any object is read for an unknown API, so a refusal is a refusal of the JSON itself.
        let object = format!(r#"{{"x":{body}}}"#);
        let ours = read(Api::Detokenize, None, object.as_bytes(), &Limits::default());
        let theirs = serde_json::from_str::<serde_json::Value>(&object);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{}", object);
    }

    #[test]
    fn a_rewrite_changes_the_model_and_nothing_else(
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
        let request = read(Api::ChatCompletions, None, body.as_bytes(), &limits).unwrap();
        let found = request.model.clone().unwrap();
        prop_assert_eq!(&found.name, &name);
        prop_assert_eq!(&body[found.span.clone()], model);
        let rewritten = String::from_utf8(replace_model(body.as_bytes(), found.span.clone(), &new_name)).unwrap();
        prop_assert_eq!(&rewritten[..found.span.start], &body[..found.span.start]);
        prop_assert!(rewritten.ends_with(&body[found.span.end..]));
        let again = read(Api::ChatCompletions, None, rewritten.as_bytes(), &limits).unwrap();
        prop_assert_eq!(again.model.map(|m| m.name.into_owned()), Some(new_name));
        prop_assert_eq!(again.prompt, request.prompt);
    }
}
