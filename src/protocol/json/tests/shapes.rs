//! Every form of every API's bodies is accepted.

use super::*;

#[test]
fn completions_in_all_forms() {
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
fn chat_in_all_forms() {
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
fn chat_options_are_read() {
    let request = ok(
        Api::ChatCompletions,
        r#"{"messages":[{"role":"user","content":"x"}],"stream":true,"max_completion_tokens":7,"max_tokens":9,"n":3,
        "tools":[{"type":"function"}],"documents":[{"text":"d"}],"prompt_cache_key":"k","chat_template":"t",
        "chat_template_kwargs":{"enable_thinking":false},"add_generation_prompt":true,"model":"m"}"#,
    );
    assert_eq!((request.stream, request.max_tokens, request.choices), (true, Some(9), 3));
    assert_eq!(request.prompt.tools, Some(r#"[{"type":"function"}]"#));
    assert_eq!(request.prompt.documents, Some(r#"[{"text":"d"}]"#));
    assert_eq!(request.prompt_cache_key.as_deref(), Some("k"));
    let request =
        ok(Api::ChatCompletions, r#"{"model":"m","messages":[{}],"max_tokens":9,"max_completion_tokens":null}"#);
    assert_eq!((request.max_tokens, request.choices), (Some(9), 1));
}

#[test]
fn data_uri_is_not_copied() {
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
fn batch_keeps_its_first_conversation_and_counts_all() {
    let body = chat(r#"[[{"role":"user","content":"one"}],[{"role":"user","content":"three"}]]"#);
    let request = ok(Api::ChatBatch, &body);
    assert_eq!(shown(&request.prompt.pieces), ["<user>", "one"]);
    assert_eq!((request.prompt.text_bytes, request.prompt.count), (8, 2));
    for bad in ["[]", "{}", "[[]]", "[7]", "[{}]"] {
        assert_eq!(refused(Api::ChatBatch, chat(bad)).reason, Reason::InvalidMessages, "{bad}");
    }
}

#[test]
fn responses_in_all_forms() {
    let request = ok(
        Api::Responses,
        r#"{"model":"m","input":"hi","instructions":"be brief","previous_response_id":"resp_1","max_output_tokens":5,
        "conversation":{"id":"conv_1"},"prompt_cache_key":"k","prompt":{"id":"pmpt_1"},"text":{"format":{}}}"#,
    );
    assert_eq!(shown(&request.prompt.pieces), ["<user>", "hi"], "a string is a message of the user");
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
    // The rest of the prompt is on the server.
    for rest in [
        r#""input":[]"#,
        r#""input":[],"previous_response_id":"resp_1""#,
        r#""previous_response_id":"resp_1""#,
        r#""input":null,"conversation":{"id":"conv_1"}"#,
        r#""prompt":{"id":"pmpt_1","variables":{"a":"b"}}"#,
    ] {
        let body = format!(r#"{{"model":"m","instructions":"brief",{rest}}}"#);
        let request = ok(Api::Responses, &body);
        assert_eq!(shown(&request.prompt.system), ["brief"], "{rest}");
        assert_eq!(request.prompt.count, 0, "{rest}");
    }
    let request = ok(Api::Conversations, r#"{"items":[{"type":"message","role":"user","content":"x"}],"metadata":{}}"#);
    assert_eq!(shown(&request.prompt.pieces), ["<user>", "x"]);
    ok(Api::Conversations, r#"{"metadata":{"a":"b"}}"#);
    ok(Api::Conversations, r#"{"items":[]}"#);
}

#[test]
fn anthropic_messages_in_all_forms() {
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
fn embeddings_rerank_score_and_tokenize_in_all_forms() {
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

    // Objects, typed parts and pairs, as SGLang and vLLM take them. None has a prefix key.
    for (input, count, media) in [
        (r#"{"text":"ab"}"#, 1, 0),
        (r#"{"text":"ab","image":"data:image/png;base64,AA"}"#, 1, 1),
        (r#"[{"text":"ab"},{"image":"https://x/y.png"}]"#, 2, 1),
        (r#"[{"type":"text","text":"ab"},{"type":"image_url","image_url":{"url":"u"}}]"#, 2, 1),
        (r#"[{"content":[{"type":"text","text":"ab"}]}]"#, 1, 0),
        (r#"[["a","b"],["c","d"]]"#, 2, 0),
        (r#"["a",{"text":"b"}]"#, 2, 0),
        (r#"[[{"type":"text","text":"ab"},{"type":"image_url","image_url":"u"}],["c",[1],null]]"#, 2, 1),
    ] {
        for api in [Api::Embeddings, Api::Pooling, Api::Classify] {
            let body = format!(r#"{{"model":"m","input":{input}}}"#);
            let request = ok(api, &body);
            assert_eq!((request.prompt.count, request.opaque_prompt), (count, true), "{input}");
            assert!(request.prompt.text_bytes >= 2, "{input}");
            assert_eq!(request.prompt.media_tokens, media * MediaKind::Image.estimated_tokens(), "{input}");
        }
    }
    for bad in ["7", "true", "[null]", "[1,\"a\"]", "[-1]"] {
        let body = format!(r#"{{"model":"m","input":{bad}}}"#);
        assert!(refused(Api::Embeddings, body).param == Some("input"), "{bad}");
    }
    ok(Api::Embeddings, r#"{"model":"m","images":["data:x"],"input_type":"image"}"#);
    assert_eq!(ok(Api::Classify, r#"{"model":"m","text":["ab","c"]}"#).prompt.text_bytes, 3);

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
    // SGLang scores items after a query; both may be token ids.
    for (body, text_bytes, token_ids, count) in [
        (r#"{"model":"m","query":"aa","items":["b","c"],"label_token_ids":[1,2],"apply_softmax":true}"#, 6, 0, 2),
        (r#"{"model":"m","query":"aa","items":"b"}"#, 3, 0, 1),
        (r#"{"model":"m","query":[1,2,3],"items":[[4],[5,6]],"item_first":false}"#, 0, 9, 2),
        (r#"{"model":"m","query":[1,2,3],"items":[[4,5]]}"#, 0, 5, 1),
    ] {
        let request = ok(Api::Score, body).prompt;
        assert_eq!((request.text_bytes, request.token_ids, request.count), (text_bytes, token_ids, count), "{body}");
    }
    let body = r#"{"model":"m","query":[{"type":"text","text":"q"}],
        "documents":[[{"type":"text","text":"d"},{"type":"image_url","image_url":{"url":"u"}}],"e"]}"#;
    let request = ok(Api::Rerank, body).prompt;
    assert_eq!((request.count, request.media_tokens), (2, MediaKind::Image.estimated_tokens()));
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
fn generate_takes_token_ids_and_sampling_parameters() {
    let body = r#"{"token_ids":[5,6,7],"sampling_params":{"max_tokens":9,"n":2,"prompt_logprobs":1,"stop":["x"]},
        "model":"m","stream":true,"cache_salt":"s"}"#;
    let request = ok(Api::Generate, body);
    assert_eq!(request.prompt.pieces, [Piece::Tokens(vec![5, 6, 7])]);
    assert_eq!((request.max_tokens, request.choices, request.skips_cache), (Some(9), 2, true));
    assert_eq!((request.stream, request.cache_salt.as_deref(), request.prompt.count), (true, Some("s"), 1));
    // The server has its own model and its own limits.
    let request = ok(Api::Generate, r#"{"token_ids":[5],"sampling_params":null}"#);
    assert_eq!((request.model, request.max_tokens), (None, None));
    for (bad, param) in [
        (r#"{"sampling_params":{}}"#, "token_ids"),
        (r#"{"token_ids":"x"}"#, "token_ids"),
        (r#"{"token_ids":[-1]}"#, "token_ids"),
        (r#"{"token_ids":[1],"sampling_params":[]}"#, "sampling_params"),
    ] {
        assert_eq!(refused(Api::Generate, bad).param, Some(param), "{bad}");
    }
}

#[test]
fn bodies_of_unknown_apis_are_never_rejected() {
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

/// Counts are converted as pydantic does, and never to less than a server may generate.
#[test]
fn counts_are_converted_as_servers_do() {
    for (value, tokens) in [
        ("4000", Some(4000)),
        ("4000.0", Some(4000)),
        ("4e3", Some(4000)),
        ("\"4000\"", Some(4000)),
        ("\" +4_000.0 \"", Some(4000)),
        ("\"\\u0034000\"", Some(4000)),
        ("1.5", Some(2)),
        ("true", Some(1)),
        ("0", Some(0)),
        ("5000000000", Some(u32::MAX)),
        ("1e18", Some(u32::MAX)),
        ("\"99999999999999999999\"", Some(u32::MAX)),
        ("null", None),
        ("-1", None),
        ("-1.5", None),
        ("\"-1\"", None),
    ] {
        let completion = |field: &str| format!(r#"{{"model":"m","prompt":"x","{field}":{value}}}"#);
        assert_eq!(ok(Api::Completions, &completion("max_tokens")).max_tokens, tokens, "{value}");
        let chat = |field: &str| format!(r#"{{"model":"m","messages":[{{"content":"x"}}],"{field}":{value}}}"#);
        assert_eq!(ok(Api::ChatCompletions, &chat("max_completion_tokens")).max_tokens, tokens, "{value}");
        assert_eq!(ok(Api::Messages, &chat("max_tokens")).max_tokens, tokens, "{value}");
        let responses = format!(r#"{{"model":"m","input":"x","max_output_tokens":{value}}}"#);
        assert_eq!(ok(Api::Responses, &responses).max_tokens, tokens, "{value}");
        let choices = tokens.unwrap_or(1).max(1);
        for field in ["n", "best_of"] {
            assert_eq!(ok(Api::Completions, &completion(field)).choices, choices, "{field} {value}");
        }
        let generate = format!(r#"{{"text":"x","sampling_params":{{"max_new_tokens":{value},"n":{value}}}}}"#);
        let generate = ok(Api::SglangGenerate, &generate);
        assert_eq!((generate.max_tokens, generate.choices), (tokens, choices), "{value}");
    }
    let both = ok(Api::Completions, r#"{"model":"m","prompt":"x","n":2,"best_of":"5"}"#);
    assert_eq!(both.choices, 5, "a server generates all of them");
}

#[test]
fn sglang_requests_in_all_forms() {
    let one = ok(
        Api::SglangGenerate,
        r#"{"text":"once upon","sampling_params":{"max_new_tokens":7,"n":2,"temperature":0},"stream":true,"extra_key":"k","image_data":null}"#,
    );
    assert_eq!((one.model.is_none(), one.stream, one.max_tokens, one.choices), (true, true, Some(7), 2));
    assert_eq!((one.prompt.count, one.prompt.text_bytes, one.opaque_prompt), (1, 9, false));
    assert_eq!(one.cache_salt.as_deref(), Some("k"));
    assert!(one.prompt.is_bare());
    let batch = ok(
        Api::SglangGenerate,
        r#"{"text":["a","bc"],"sampling_params":[{"max_new_tokens":7},{"max_new_tokens":9,"n":1}],"extra_key":["k","l"]}"#,
    );
    assert_eq!((batch.prompt.count, batch.max_tokens, batch.answers()), (2, Some(9), 2));
    assert_eq!(batch.cache_salt.as_deref(), Some("k"), "the salt of the first prompt");
    let ids = ok(Api::SglangGenerate, r#"{"input_ids":[[1,2],[3]],"text":null,"model":"m","image_data":["x"]}"#);
    assert_eq!((ids.prompt.count, ids.prompt.token_ids, ids.opaque_prompt), (2, 3, true));
    for without in [r#"{"max_new_tokens":null}"#, "{}"] {
        for entries in [format!(r#"{{"max_new_tokens":1}},{without}"#), format!(r#"{without},{{"max_new_tokens":1}}"#)]
        {
            let body = format!(r#"{{"text":["a","b"],"sampling_params":[{entries}]}}"#);
            assert_eq!(ok(Api::SglangGenerate, &body).max_tokens, None, "{body}");
        }
    }
    let nothing = ok(Api::SglangGenerate, r#"{"inputs":"of another server","sampling_params":null}"#);
    assert_eq!((nothing.prompt.count, nothing.max_tokens), (0, None));
    for body in [r#"{"text":7}"#, r#"{"text":"x","sampling_params":"y"}"#, r#"{"text":"x","sampling_params":[7]}"#] {
        assert!(parse(Api::SglangGenerate, None, body.as_bytes(), &Limits::default()).is_err(), "{body}");
    }
}

#[test]
fn recorded_requests_are_accepted() {
    let directory = format!("{}/../../tests/data/protocol", env!("CARGO_MANIFEST_DIR"));
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
            // vLLM accepts a chat without a model; Attaché does not.
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

#[test]
fn embeddings_are_charged_by_their_bytes_and_count_as_prompts() {
    let tensor = "A".repeat(1_365 * 3_000);
    let cases = [
        (Api::Completions, r#"{"model":"m","prompt_embeds":"AAAA"}"#.to_owned(), 1, 1_024),
        (Api::Completions, format!(r#"{{"model":"m","prompt_embeds":"{tensor}"}}"#), 1, 3_000),
        (Api::Completions, format!(r#"{{"model":"m","prompt_embeds":["{tensor}","AAAA"]}}"#), 2, 4_024),
        (Api::Completions, r#"{"model":"m","prompt":"abcd","prompt_embeds":["A","B"]}"#.to_owned(), 3, 2_049),
        (Api::Completions, r#"{"model":"m","prompt":["a","b"],"prompt_embeds":null}"#.to_owned(), 2, 1),
        (Api::SglangGenerate, r#"{"input_embeds":[[0.5,1],[2,3],[4,5]]}"#.to_owned(), 1, 3),
        (Api::SglangGenerate, r#"{"input_embeds":[[[0.5],[2]], [[1],[2],[3]]]}"#.to_owned(), 2, 5),
        (Api::SglangGenerate, r#"{"text":"abcd","image_data":["x",{"url":"y"},["z"]]}"#.to_owned(), 1, 3_001),
        (Api::SglangGenerate, r#"{"text":"abcd","video_data":"x","audio_data":["y"]}"#.to_owned(), 1, 4_751),
    ];
    for (api, body, prompts, tokens) in cases {
        let request = ok(api, &body);
        let shown = &body[..body.len().min(80)];
        assert_eq!((request.prompt.count, request.prompt.estimated_tokens().0), (prompts, tokens), "{shown}");
        assert_eq!(request.answers(), prompts, "{shown}");
    }
    let fifty = format!(r#"{{"model":"m","prompt_embeds":[{}],"max_tokens":100}}"#, ["\"AAAA\""; 50].join(","));
    assert_eq!((ok(Api::Completions, &fifty).answers(), ok(Api::Completions, &fifty).opaque_prompt), (50, true));
}

#[test]
fn embeddings_in_messages_are_charged_by_their_bytes() {
    let tensor = "A".repeat(1_365 * 3_000);
    for (part, tokens) in [
        (r#"{"type":"image_embeds","image_embeds":"AAAA"}"#.to_owned(), 1_000),
        (r#"{"type":"image_embeds","image_embeds":["AAAA","BBBB"]}"#.to_owned(), 2_000),
        (r#"{"type":"audio_embeds","audio_embeds":"AAAA"}"#.to_owned(), 750),
        (
            format!(r#"{{"type":"image_embeds","image_embeds":{{"image_embeds":"{tensor}","image_grid_thw":"A"}}}}"#),
            3_001,
        ),
        (format!(r#"{{"type":"prompt_embeds","prompt_embeds":"{tensor}"}}"#), 3_001),
        (r#"{"type":"image_embeds","image_embeds":null}"#.to_owned(), 0),
    ] {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{part}]}}]}}"#);
        let request = ok(Api::ChatCompletions, &body);
        assert_eq!(request.prompt.media_tokens, tokens, "{}", &part[..part.len().min(80)]);
        assert_eq!(request.prompt.has_media(), tokens > 0);
    }
}
