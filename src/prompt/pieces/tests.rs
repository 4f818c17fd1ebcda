use super::*;
use attache_protocol::Api;
use attache_types::limits::Limits;
use proptest::prelude::*;
use serde_json::json;

/// A field as a decoder of the stream sees it.
type DecodedField = (u8, String);

/// Splits a stream at its marks, which occur nowhere else.
fn decode(stream: &[u8]) -> Vec<DecodedField> {
    let mut out: Vec<(u8, Vec<u8>)> = Vec::new();
    for byte in stream {
        if *byte >= 0xF5 {
            out.push((*byte, Vec::new()));
        } else {
            out.last_mut().expect("begins with a mark").1.push(*byte);
        }
    }
    out.into_iter().map(|(mark, text)| (mark, String::from_utf8(text).expect("UTF-8"))).collect()
}

fn field(mark: Mark, text: &str) -> DecodedField {
    (mark.byte(), text.to_owned())
}

/// The canonical form of text, independent of the tested code: as serde writes it, except for
/// control characters without a letter.
fn canonical(text: &str) -> String {
    let escape = |c: char| match c {
        '\0'..' ' if !"\u{8}\u{c}\n\r\t".contains(c) => c.to_string(),
        c => serde_json::to_string(&c.to_string())
            .expect("a string")
            .split_at(1)
            .1
            .strip_suffix('"')
            .expect("quotes")
            .to_owned(),
    };
    text.chars().map(escape).collect()
}

/// The expected fields of a prompt, independent of the tested code.
fn expected(prompt: &Prompt<'_>) -> Vec<DecodedField> {
    let squeeze = |json: &str| serde_json::from_str::<serde_json::Value>(json).expect("JSON").to_string();
    let piece = |piece: &Piece<'_>| match piece {
        Piece::Role(t) => field(Mark::Role, t),
        Piece::Label(t) => field(Mark::Label, t),
        Piece::Text(t) => field(Mark::Text, &canonical(&t.get())),
        Piece::ToolCall(t) => field(Mark::ToolCall, &squeeze(t)),
        Piece::Media { kind, reference } => {
            let kind = match kind {
                MediaKind::Image => "i",
                MediaKind::Audio => "a",
                MediaKind::Video => "v",
                MediaKind::Document => "d",
            };
            field(Mark::Media, &format!("{kind}{:032x}", xxh3_128(reference.as_bytes())))
        }
        Piece::Tokens(ids) => {
            let digits = |id: &u32| (0..5).map(|i| ((id / 128u32.pow(i)) % 128) as u8 as char).collect::<Vec<_>>();
            field(Mark::Tokens, &ids.iter().flat_map(digits).collect::<String>())
        }
    };
    let mut out = Vec::new();
    let variables = prompt.settings.variables.map(|json| format!("chat_template_kwargs{}", squeeze(json)));
    out.extend(variables.map(|setting| field(Mark::Setting, &setting)));
    out.extend(prompt.tools.map(|t| field(Mark::Tools, &squeeze(t))));
    out.extend(prompt.documents.map(|t| field(Mark::Documents, &squeeze(t))));
    out.push(field(Mark::Prompt, ""));
    if !prompt.system.is_empty() {
        out.push(field(Mark::Role, "system"));
        out.extend(prompt.system.iter().map(piece));
    }
    out.extend(prompt.pieces.iter().map(piece));
    out
}

const JSON: [&str; 5] =
    ["[]", r#"[{"a": "b \" ] c", "d":[1, 2.5 ,null]}]"#, "[ ]", r#"{"x" : "\\", "y":" "}"#, "\"a b\""];

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["\\PC{0,12}", Just("\u{F5}\u{FE}".to_owned()), Just(String::new()), "[a-c\u{0}\n]{0,4}"]
}

fn piece() -> impl Strategy<Value = Piece<'static>> {
    let kind = prop::sample::select(vec![MediaKind::Image, MediaKind::Audio, MediaKind::Video, MediaKind::Document]);
    prop_oneof![
        1 => text().prop_map(|t| Piece::Role(t.into())),
        1 => text().prop_map(|t| Piece::Label(t.into())),
        4 => text().prop_map(|t| Piece::Text(t.into())),
        1 => prop::sample::select(JSON.to_vec()).prop_map(Piece::ToolCall),
        1 => (kind, text()).prop_map(|(kind, t)| Piece::Media { kind, reference: t.into() }),
        1 => prop::collection::vec(any::<u32>(), 0..4).prop_map(Piece::Tokens),
    ]
}

pub(crate) fn prompt() -> impl Strategy<Value = Prompt<'static>> {
    let json = || prop::option::of(prop::sample::select(JSON.to_vec()));
    let settings = json().prop_map(|variables| TemplateSettings { variables, ..TemplateSettings::default() });
    (settings, json(), json(), prop::collection::vec(piece(), 0..3), prop::collection::vec(piece(), 0..8)).prop_map(
        |(settings, tools, documents, system, pieces)| Prompt {
            settings,
            tools,
            documents,
            system,
            pieces,
            ..Prompt::default()
        },
    )
}

proptest! {
    #[test]
    fn stream_decodes_to_its_prompt(prompt in prompt()) {
        let stream = Pieces::new(&prompt, &Volatile::none()).to_bytes();
        prop_assert_eq!(decode(&stream), expected(&prompt));
    }

    #[test]
    fn stream_of_a_longer_prompt_begins_with_the_shorter_one(prompt in prompt(), more in prop::collection::vec(piece(), 0..4)) {
        let mut longer = prompt.clone();
        longer.pieces.extend(more);
        let none = Volatile::none();
        prop_assert!(Pieces::new(&longer, &none).to_bytes().starts_with(&Pieces::new(&prompt, &none).to_bytes()));
    }

    #[test]
    fn compact_json_equals_that_of_serde(json in prop::sample::select(JSON.to_vec()), pad in "[ \n\t\r]{0,3}") {
        let padded = format!("{pad}{json}{pad}");
        let value: serde_json::Value = serde_json::from_str(&padded).unwrap();
        let out = compact(&padded);
        prop_assert!(!out.starts_with([' ', '\n', '\t', '\r']) && !out.ends_with([' ', '\n', '\t', '\r']));
        prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&out).unwrap(), value);
        prop_assert_eq!(compact(&out), Cow::Borrowed(&*out));
    }
}

fn chat(messages: &[(&'static str, &'static str)]) -> Prompt<'static> {
    let pieces = messages.iter().flat_map(|(role, text)| [Piece::Role((*role).into()), Piece::Text((*text).into())]);
    Prompt { pieces: pieces.collect(), ..Prompt::default() }
}

fn stream(prompt: &Prompt<'_>) -> Vec<u8> {
    Pieces::new(prompt, &Volatile::default()).to_bytes()
}

#[test]
fn whitespace_in_tools_is_ignored_and_content_is_not() {
    let with = |tools| stream(&Prompt { tools: Some(tools), ..chat(&[("user", "hi")]) });
    let plain = with(r#"[{"name":"look up","n":1}]"#);
    assert_eq!(plain, with("[ {\n\t\"name\" : \"look up\",\r\n \"n\": 1 } ]"));
    assert_ne!(plain, with(r#"[{"name":"look  up","n":1}]"#));
    assert_ne!(plain, with(r#"[{"n":1,"name":"look up"}]"#), "servers render tools in the order of the request");
    assert_ne!(plain, stream(&chat(&[("user", "hi")])));
    assert_ne!(plain, stream(&Prompt { documents: Some(r#"[{"name":"look up","n":1}]"#), ..chat(&[("user", "hi")]) }));
}

/// The stream of a request.
fn stream_of(api: Api, body: &serde_json::Value) -> Vec<u8> {
    let body = body.to_string();
    let request = attache_protocol::parse_unnamed(api, None, body.as_bytes(), &Limits::default()).unwrap();
    stream(&request.prompt)
}

#[test]
fn equal_conversations_of_all_apis_have_one_stream() {
    let (system, user) = ("You are terse.", "hi");
    let part = |kind: &str| json!([{"type": kind, "text": user}]);
    let same = [
        (
            Api::ChatCompletions,
            json!({"messages": [
                {"role": "system", "content": system}, {"role": "user", "content": user},
            ]}),
        ),
        (
            Api::ChatCompletions,
            json!({"messages": [
                {"content": [{"type": "text", "text": system}], "role": "system"}, {"content": part("text"), "role": "user"},
            ]}),
        ),
        (Api::Responses, json!({"instructions": system, "input": user})),
        (Api::Responses, json!({"input": [{"role": "user", "content": user}], "instructions": system})),
        (
            Api::Responses,
            json!({"instructions": system, "input": [
                {"type": "message", "role": "user", "content": part("input_text")},
            ]}),
        ),
        (
            Api::Responses,
            json!({"input": [
                {"role": "system", "content": system}, {"type": "message", "role": "user", "content": part("input_text")},
            ]}),
        ),
        (Api::Messages, json!({"system": system, "messages": [{"role": "user", "content": user}]})),
        (
            Api::Messages,
            json!({"messages": [{"role": "user", "content": part("text")}], "system": [
                {"type": "text", "text": system},
            ]}),
        ),
    ];
    for (api, body) in &same {
        assert_eq!(stream_of(*api, body), stream_of(same[0].0, &same[0].1), "{api:?} {body}");
    }
    let bare = stream_of(Api::Completions, &json!({"prompt": user}));
    assert_ne!(stream_of(Api::Responses, &json!({"input": user})), bare, "a completion has no roles");
}

#[test]
fn settings_of_the_template_are_in_the_stream_and_others_are_not() {
    let with = |api: Api, more: serde_json::Value| {
        let mut body = match api {
            Api::Responses => json!({"input": "hi"}),
            _ => json!({"messages": [{"role": "user", "content": "hi"}]}),
        };
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        stream_of(api, &body)
    };
    let plain = with(Api::ChatCompletions, json!({}));
    let settings = [
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"reasoning_effort": "high"}),
        json!({"reasoning_effort": "low"}),
        json!({"chat_template": "{{ messages }}"}),
        json!({"documents": [{"title": "t", "text": "hi"}]}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ];
    let streams: Vec<_> = settings.iter().map(|setting| with(Api::ChatCompletions, setting.clone())).collect();
    for (at, stream) in streams.iter().enumerate() {
        assert_ne!(*stream, plain, "{}", settings[at]);
        assert!(!streams[..at].contains(stream), "{}", settings[at]);
    }
    for without_effect in [
        json!({"chat_template_kwargs": {}, "reasoning_effort": null, "chat_template": null}),
        json!({"temperature": 0.5, "user": "u", "metadata": {"a": 1}, "stream": true, "max_tokens": 9, "seed": 1}),
        json!({"add_generation_prompt": false, "continue_final_message": true, "tool_choice": "none"}),
        // Media settings of a prompt without media.
        json!({"mm_processor_kwargs": {"fps": 2}}),
    ] {
        assert_eq!(with(Api::ChatCompletions, without_effect.clone()), plain, "{without_effect}");
    }
    let high = with(Api::ChatCompletions, json!({"reasoning_effort": "high"}));
    assert_eq!(with(Api::Responses, json!({"reasoning": {"summary": "auto", "effort": "high"}})), high);
    assert_eq!(with(Api::Messages, json!({"output_config": {"effort": "high"}})), high);
    for api in [Api::Responses, Api::Messages] {
        assert_eq!(with(api, json!({"chat_template_kwargs": {"enable_thinking": true}})), streams[1], "{api:?}");
        assert_eq!(with(api, json!({"reasoning": null, "output_config": "none"})), plain, "{api:?}");
    }
    let image = |more: serde_json::Value| {
        let mut body = json!({"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]},
        ]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        stream_of(Api::ChatCompletions, &body)
    };
    assert_ne!(image(json!({"mm_processor_kwargs": {"fps": 2}})), image(json!({})));
}

#[test]
fn broken_json_is_used_unchanged() {
    for json in ["\"", "\"abc", "\"abc\\", " \"a b\\\" ", "\\", "  "] {
        assert_eq!(compact(json), json.trim_start(), "{json:?}");
    }
}

#[test]
fn roles_labels_and_media_change_the_stream() {
    let piece = |piece: Piece<'static>| {
        let mut prompt = chat(&[("user", "hi")]);
        prompt.pieces.push(piece);
        stream(&prompt)
    };
    let image = |kind, reference: &'static str| piece(Piece::Media { kind, reference: reference.into() });
    let all = [
        piece(Piece::Text("x".into())),
        piece(Piece::Label("x".into())),
        piece(Piece::Role("x".into())),
        piece(Piece::ToolCall("x")),
        image(MediaKind::Image, "x"),
        image(MediaKind::Audio, "x"),
        image(MediaKind::Image, "y"),
    ];
    for (i, one) in all.iter().enumerate() {
        for other in &all[..i] {
            assert_ne!(one, other);
        }
    }
    assert_ne!(stream(&chat(&[("user", "hi")])), stream(&chat(&[("system", "hi")])));
}

#[test]
fn billing_header_is_left_out_only_in_the_system_prompt() {
    let header = "x-anthropic-billing-header: cc_version=2.1; cch=4fd1;";
    let with = |blocks: &[&'static str]| {
        let system = blocks.iter().map(|t| Piece::Text((*t).into())).collect();
        Prompt { system, ..chat(&[("user", "hi")]) }
    };
    let both = with(&[header, "Be brief."]);
    let pieces = Pieces::new(&both, &Volatile::default());
    assert_eq!(pieces.left_out_bytes(), header.len() as u64);
    assert_eq!(pieces.to_bytes(), stream(&with(&["Be brief."])));
    assert_eq!(stream(&with(&[header])), stream(&chat(&[("user", "hi")])), "no empty system prompt remains");
    assert_ne!(stream(&both), Pieces::new(&both, &Volatile::none()).to_bytes());
    // A user message that quotes it is content.
    assert_ne!(stream(&chat(&[("user", header)])), stream(&chat(&[])));
}

#[test]
fn token_reminder_is_left_out_if_it_is_the_whole_message() {
    let plain = [("user", "hi"), ("assistant", "yes?")];
    let with = |reminder| [("user", "hi"), ("system", reminder), ("assistant", "yes?")];
    for reminder in ["<total_tokens>812 tokens left</total_tokens>", " <total_tokens>1</total_tokens>\n"] {
        let prompt = chat(&with(reminder));
        let pieces = Pieces::new(&prompt, &Volatile::default());
        assert_eq!(pieces.left_out_bytes(), reminder.len() as u64);
        assert_eq!(pieces.to_bytes(), stream(&chat(&plain)), "{reminder}");
    }
    let last = chat(&[("user", "hi"), ("user", "<total_tokens>1</total_tokens>")]);
    assert_eq!(stream(&last), stream(&chat(&[("user", "hi")])), "at the end, by any role");
    for more in
        ["<total_tokens>1</total_tokens> go on", "<total_tokens>1</total_tokens>and<total_tokens>2</total_tokens>"]
    {
        assert_ne!(stream(&chat(&with(more))), stream(&chat(&plain)), "{more}");
    }
    let mut two = chat(&with("<total_tokens>1</total_tokens>"));
    two.pieces.insert(4, Piece::Text("and this".into()));
    assert_eq!(Pieces::new(&two, &Volatile::default()).left_out_bytes(), 0, "a message with other text");
}

#[test]
fn marks_have_ids_outside_all_vocabularies() {
    assert_eq!(Mark::Setting.id(), 0xFFFF_FFF5);
    assert!(media_ids(MediaKind::Image, "x").iter().all(|id| *id >= 1 << 31 && *id < Mark::Setting.id()));
    assert_ne!(media_ids(MediaKind::Image, "x"), media_ids(MediaKind::Audio, "x"));
    assert_ne!(media_ids(MediaKind::Image, "x"), media_ids(MediaKind::Image, "y"));
}
