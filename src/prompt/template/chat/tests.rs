use super::*;
use std::time::UNIX_EPOCH;

/// A template that prints the whole conversation.
const SHOW: &str = "{{ messages | tojson }}";
/// A template that prints parts and knows `developer`.
const SHOW_PARTS: &str =
    "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}{{ 'developer' and messages | tojson }}";

fn render(api: Api, source: &str, body: &str) -> Result<String, RenderError> {
    let template = ChatTemplate::compile(source).unwrap();
    Chat::read(api, body.as_bytes(), &WorkLimit::for_body(body.len()))?.render(
        &template,
        &BTreeMap::new(),
        body.len(),
        UNIX_EPOCH,
    )
}

fn chat(source: &str, body: &str) -> Result<String, RenderError> {
    render(Api::ChatCompletions, source, body)
}

#[test]
fn messages_are_normalised() {
    let message = |json: &str| chat(SHOW, &format!("{{\"messages\": [{json}]}}")).unwrap();
    for (got, want) in [
        (r#"{"role": "user", "name": "bob", "content": "a"}"#, r#"[{"role": "user", "content": "a", "name": "bob"}]"#),
        (
            r#"{"role": "user", "content": ["a", {"type": "text", "text": ""}, {"type": "input_text", "text": "b"}]}"#,
            r#"[{"role": "user", "content": "a\nb"}]"#,
        ),
        (r#"{"role": "assistant", "content": null}"#, r#"[{"role": "assistant", "content": ""}]"#),
        (r#"{"role": "developer", "content": "d"}"#, r#"[{"role": "system", "content": "d"}]"#),
        (r#"{"role": "user", "reasoning": "r", "content": "a"}"#, r#"[{"role": "user", "content": "a"}]"#),
        (
            r#"{"role": "assistant", "reasoning_content": "r", "content": "a"}"#,
            r#"[{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}]"#,
        ),
        (r#"{"role": "assistant", "content": "a", "tool_calls": []}"#, r#"[{"role": "assistant", "content": "a"}]"#),
        (
            r#"{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]", "name": "f"}, "id": "c"}]}"#,
            r#"[{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}, "name": "f"}, "id": "c"}]}]"#,
        ),
        (
            r#"{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}"#,
            r#"[{"role": "tool", "content": "x", "tool_call_id": "c"}]"#,
        ),
    ] {
        assert_eq!(message(got), want);
    }
}

#[test]
fn template_that_loops_over_parts_gets_parts() {
    let body = r#"{"messages": [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]},
        {"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]}"#;
    let want = [
        r#"{"role": "developer", "content": [{"type": "text", "text": "d"}], "tools": null}"#,
        r#"{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]}"#,
        r#"{"role": "tool", "content": "x\ny"}"#,
    ];
    assert_eq!(chat(SHOW_PARTS, body).unwrap(), format!("[{}]", want.join(", ")));
}

#[test]
fn variables_follow_vllm() {
    let source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ enable_thinking }} {{ reasoning_effort }} {{ x }}";
    let show = |fields: &str| {
        chat(source, &format!(r#"{{"messages": [{{"role": "user", "content": "q"}}]{fields}}}"#)).unwrap()
    };
    assert_eq!(show(""), "True True True   ");
    assert_eq!(show(r#", "reasoning_effort": "low""#), "True True True True low ");
    assert_eq!(show(r#", "reasoning_effort": "none""#), "True True True False none ");
    let kwargs = r#", "chat_template_kwargs": {"enable_thinking": false, "x": 1.0, "messages": 5, "add_generation_prompt": false}"#;
    assert_eq!(show(&format!("{kwargs}, \"reasoning_effort\": \"low\"")), "True True True False low 1.0");
    assert_eq!(
        show(r#", "documents": [{}], "add_generation_prompt": false, "chat_template": "evil""#),
        "True False False   "
    );
    assert_eq!(show(r#", "chat_template_kwargs": {"x": null, "enable_thinking": "auto"}"#), "True True True   ");
    // `tool_choice` is for the decoder; the tools stay in the prompt.
    assert_eq!(show(r#", "tools": [{"function": {"name": "f"}}], "tool_choice": "none""#), "False True True   ");
}

#[test]
fn tools_are_written_in_the_order_of_vllms_types() {
    let dumped = |tool: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "q"}}], "tools": [{tool}]}}"#);
        chat("{{ tools | tojson }}", &body).unwrap()
    };
    let deferred = r#"{"function": {"strict": true, "parameters": {"z": 1, "a": 2}, "name": "f"}, "type": "function", "defer_loading": true, "other": 1}"#;
    let want = r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"z": 1, "a": 2}, "strict": true, "defer_loading": true}, "defer_loading": true}]"#;
    assert_eq!(dumped(deferred), want);
    let plain = r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]"#;
    assert_eq!(
        dumped(r#"{"type": "function", "function": {"name": "f", "strict": null, "defer_loading": null, "mine": 1}}"#),
        plain
    );
    let inner = r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": false, "defer_loading": true}}]"#;
    assert_eq!(
        dumped(r#"{"type": "function", "function": {"defer_loading": true, "strict": false, "name": "f"}}"#),
        inner
    );
}

#[test]
fn tools_of_other_apis_are_written_in_the_same_way() {
    let responses = |tool: &str| {
        let body = format!(r#"{{"input": "q", "tools": [{tool}]}}"#);
        render(Api::Responses, "{{ tools | tojson }}", &body).unwrap()
    };
    let want = |rest: &str| {
        format!(
            r#"[{{"type": "function", "function": {{"name": "f", "description": null, "parameters": {{"type": "object"}}{rest}}}}}]"#
        )
    };
    let tool = |rest: &str| format!(r#"{{"type": "function", "name": "f", "parameters": {{"type": "object"}}{rest}}}"#);
    assert_eq!(responses(&tool("")), want(""));
    assert_eq!(responses(&tool(r#", "strict": null, "other": 1"#)), want(""));
    let both = r#", "strict": true, "defer_loading": true"#;
    assert_eq!(responses(&tool(r#", "defer_loading": true, "strict": true"#)), want(both));
    let body = r#"{"messages": [{"role": "user", "content": "q"}], "tools": [
        {"name": "f", "input_schema": {"type": "object"}, "defer_loading": true, "strict": true, "cache_control": {"type": "ephemeral"}}]}"#;
    assert_eq!(render(Api::Messages, "{{ tools | tojson }}", body).unwrap(), want(both));
}

#[test]
fn last_message_can_be_continued() {
    let continued = |source: &str, text: &str| {
        let messages = format!(r#"[{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": {text}}}]"#);
        chat(
            source,
            &format!(r#"{{"messages": {messages}, "add_generation_prompt": false, "continue_final_message": true}}"#),
        )
    };
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}";
    let trimmed = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}";
    let parts = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}</s>{% endfor %}";
    assert_eq!(continued(plain, r#""Roses are ""#).unwrap(), "<user>q</s><assistant>Roses are ");
    assert_eq!(continued(trimmed, r#""Roses are ""#).unwrap(), "<user>q</s><assistant>Roses are");
    assert_eq!(continued(parts, r#"[{"type": "text", "text": "q"}]"#).unwrap(), "<user>q</s><assistant>q");
    assert!(matches!(continued("{{ messages[0].content }}", r#""x""#), Err(RenderError::Template(_))));
    assert!(matches!(
        chat(plain, r#"{"messages": [{"role": "user", "content": "q"}], "continue_final_message": true}"#),
        Err(RenderError::Body { .. })
    ));
}

#[test]
fn unsupported_request_reports_the_reason() {
    let part = |part: &str| chat(SHOW, &format!(r#"{{"messages": [{{"role": "user", "content": [{part}]}}]}}"#));
    assert_eq!(
        part(r#"{"type": "image_url", "image_url": {"url": "x"}}"#),
        Err(RenderError::NotText(MediaKind::Image))
    );
    assert_eq!(part(r#"{"type": "input_audio"}"#), Err(RenderError::NotText(MediaKind::Audio)));
    assert!(matches!(part(r#"{"type": "hologram"}"#), Err(RenderError::Unsupported(_))));
    assert!(matches!(part(r#"{"type": "text", "text": 5}"#), Err(RenderError::Body { .. })));
    assert!(matches!(chat(SHOW, r#"{"messages": [], "truncate_prompt_tokens": 5}"#), Err(RenderError::Unsupported(_))));
    let error =
        chat(SHOW, r#"{"messages": [{"role": "user", "content": "q"}, "secret words"]}"#).unwrap_err().to_string();
    assert!(error.contains("line 1 column") && !error.contains("secret"), "{error}");
    assert!(matches!(render(Api::Embeddings, SHOW, "{}"), Err(RenderError::Unsupported(_))));
}

#[test]
fn anthropic_conversations_become_openai_messages() {
    let body = r#"{"system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 2.0}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "c"}]}]}"#;
    let want = [
        r#"{"role": "system", "content": "be brief"}"#,
        r#"{"role": "user", "content": "hi"}"#,
        r#"{"role": "assistant", "content": "let me see", "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": 2.0}}}], "reasoning": "hm", "reasoning_content": "hm"}"#,
        r#"{"role": "tool", "content": "a\nb", "tool_call_id": "t1"}"#,
        r#"{"role": "user", "content": "and"}"#,
        r#"{"role": "tool", "content": "c", "tool_call_id": "t2"}"#,
    ];
    assert_eq!(render(Api::Messages, SHOW, body).unwrap(), format!("[{}]", want.join(", ")));
    let body = r#"{"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f", "input_schema": {"properties": {}}}]}"#;
    let want = r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"properties": {}, "type": "object"}}}]"#;
    assert_eq!(render(Api::Messages, "{{ tools | tojson }}", body).unwrap(), want);
    for refused in [
        r#"{"messages": [{"role": "system", "content": "q"}]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}"#,
        r#"{"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "web_search_20250305", "name": "w"}]}"#,
    ] {
        assert!(render(Api::Messages, SHOW, refused).is_err(), "{refused}");
    }
}

#[test]
fn responses_become_conversations() {
    let body = r#"{"instructions": "be brief", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\":1}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        {"type": "message", "role": "assistant", "content": "again"}]}"#;
    let want = [
        r#"{"role": "system", "content": "be brief"}"#,
        r#"{"role": "user", "content": "a\nb"}"#,
        r#"{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}, "type": "function"}, {"id": "c2", "function": {"name": "g", "arguments": {}}, "type": "function"}], "reasoning": "hm", "reasoning_content": "hm"}"#,
        r#"{"role": "tool", "content": "one", "tool_call_id": "c1"}"#,
        r#"{"role": "assistant", "content": "done"}"#,
        r#"{"role": "assistant", "content": "again"}"#,
    ];
    assert_eq!(render(Api::Responses, SHOW, body).unwrap(), format!("[{}]", want.join(", ")));
    let unfinished = r#"{"input": [{"role": "user", "content": "q"},
        {"type": "message", "role": "assistant", "status": "incomplete", "content": [{"type": "output_text", "text": "Roses"}]}]}"#;
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(render(Api::Responses, source, unfinished).unwrap(), "<user>q</s><assistant>Roses");
    for refused in [
        r#"{"input": "q", "previous_response_id": "r"}"#,
        r#"{"input": [{"type": "item_reference", "id": "i"}]}"#,
        r#"{"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}"#,
        r#"{"input": 5}"#,
    ] {
        assert!(render(Api::Responses, SHOW, refused).is_err(), "{refused}");
    }
}

#[test]
fn completions_are_text_or_tokens() {
    let text = |text: &str, add_special_tokens| Ok(Completion::Text { text: text.to_owned(), add_special_tokens });
    for (body, want) in [
        (r#"{"prompt": "a\u00e9"}"#, text("aé", true)),
        (r#"{"prompt": [ "a", "b"], "add_special_tokens": false}"#, text("a", false)),
        (r#"{"prompt": ""}"#, text("", true)),
        (r#"{"prompt": [1, 2]}"#, Ok(Completion::Tokens(vec![1, 2]))),
        (r#"{"prompt": [[1, 2], [3]]}"#, Ok(Completion::Tokens(vec![1, 2]))),
    ] {
        assert_eq!(completions(body.as_bytes()), want, "{body}");
    }
    for body in [
        r#"{"prompt": null}"#,
        r#"{"prompt": []}"#,
        r#"{"prompt": [-1]}"#,
        r#"{"prompt": [1, "a"]}"#,
        r#"{"prompt": {"a": 1}}"#,
        r#"{"prompt": "a", "prompt_embeds": "x"}"#,
        "{}",
        "",
    ] {
        assert!(completions(body.as_bytes()).is_err(), "{body}");
    }
}

proptest::proptest! {
    /// Any JSON at any position is rendered or rejected.
    #[test]
    fn no_body_causes_a_panic(
        key in "role|content|tool_calls|reasoning|name|type|text|function|arguments|input|system|tools|instructions|output|summary",
        value in "null|1|\"a\"|\\[\\]|\\{\\}|\\[1\\]|\\[null\\]|\\[\\[\\]\\]|\\[\\{\\}\\]|\\{\"type\": \"text\"\\}|\\[\\{\"type\": \"tool_use\"\\}\\]|\\[\\{\"type\": \"function_call\"\\}\\]",
        role in "user|assistant|tool|system|developer",
    ) {
        let message = format!("{{\"role\": \"{role}\", \"x\": 1, \"{key}\": {value}}}");
        let bodies = [
            format!("{{\"messages\": [{message}], \"input\": [{message}]}}"),
            format!("{{\"messages\": [{{\"role\": \"{role}\", \"content\": [{message}]}}], \"input\": [{message}]}}"),
            format!("{{\"{key}\": {value}}}"),
        ];
        for body in &bodies {
            for api in [Api::ChatCompletions, Api::Messages, Api::Responses] {
                for source in [SHOW, SHOW_PARTS] {
                    let _ = render(api, source, body);
                }
            }
            let _ = completions(body.as_bytes());
        }
    }
}
