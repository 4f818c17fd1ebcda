use super::*;
use proptest::prelude::*;

/// The output of a renamer that receives `chunks`.
fn rename(target: &str, incoming: &str, chunks: &[&[u8]]) -> Vec<u8> {
    let mut renamer = ModelRenamer::new(target, incoming).unwrap();
    let mut sent = Vec::new();
    for (i, chunk) in chunks.iter().enumerate() {
        let mut out = Vec::new();
        if renamer.push(chunk, i + 1 == chunks.len(), &mut out) {
            sent.extend_from_slice(&out);
        } else {
            assert!(out.is_empty(), "bytes were appended although the chunk is unchanged");
            sent.extend_from_slice(chunk);
        }
        assert!(renamer.held.len() < KEY.len() + 2 * MAX_SPACE + 4 + 12 * target.len(), "held {}", renamer.held.len());
    }
    assert!(renamer.held.is_empty());
    sent
}

fn every_split(target: &str, incoming: &str, input: &str, expected: &str) {
    let bytes = input.as_bytes();
    for at in 0..=bytes.len() {
        let (a, b) = bytes.split_at(at);
        let got = rename(target, incoming, &[a, b]);
        assert_eq!(String::from_utf8_lossy(&got), expected, "split at {at}");
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    if !single.is_empty() {
        assert_eq!(String::from_utf8_lossy(&rename(target, incoming, &single)), expected, "byte by byte");
    }
}

#[test]
fn name_is_replaced_in_every_model_member() {
    let cases = [
        (r#"{"id":"x","model":"vllm-backend-01","choices":[]}"#, r#"{"id":"x","model":"gpt-4-proxy","choices":[]}"#),
        (r#"{"model": "vllm-backend-01"}"#, r#"{"model": "gpt-4-proxy"}"#),
        ("{\"model\" \t\r\n:\n  \"vllm-backend-01\"}", "{\"model\" \t\r\n:\n  \"gpt-4-proxy\"}"),
        (
            "data: {\"model\":\"vllm-backend-01\"}\n\ndata: {\"model\":\"vllm-backend-01\"}\n\ndata: [DONE]\n\n",
            "data: {\"model\":\"gpt-4-proxy\"}\n\ndata: {\"model\":\"gpt-4-proxy\"}\n\ndata: [DONE]\n\n",
        ),
        (r#"{"response":{"model":"vllm-backend-01"}}"#, r#"{"response":{"model":"gpt-4-proxy"}}"#),
        (r#"{"model":"vllm\u002Dbackend\u002d01"}"#, r#"{"model":"gpt-4-proxy"}"#),
        (r#"{"a":"\\","model":"vllm-backend-01"}"#, r#"{"a":"\\","model":"gpt-4-proxy"}"#),
    ];
    for (input, expected) in cases {
        every_split("vllm-backend-01", "gpt-4-proxy", input, expected);
    }
}

#[test]
fn all_other_bytes_stay() {
    for input in [
        "",
        "data: [DONE]\n\n",
        r#"{"id":"x"}"#,
        r#"{"model":"other"}"#,
        r#"{"model":"vllm-backend-012"}"#,
        r#"{"model":"vllm-backend-0"}"#,
        r#"{"model":null,"m":"vllm-backend-01"}"#,
        r#"{"model":["vllm-backend-01"]}"#,
        r#"["model","vllm-backend-01"]"#,
        r#"{"text":"{\"model\":\"vllm-backend-01\"}"}"#,
        r#"{"text":"\\\"model\":\"vllm-backend-01"}"#,
        r#"{"say \"model":"vllm-backend-01"}"#,
        r#"{"my_model":"vllm-backend-01"}"#,
        r#"{"model":"\xvllm-backend-01"}"#,
        r#"{"model":"#,
        r#"{"mod"#,
        r#"{"model":"vllm-back"#,
    ] {
        every_split("vllm-backend-01", "gpt-4-proxy", input, input);
    }
    let wide = format!("{{\"model\":{}\"vllm-backend-01\"}}", " ".repeat(MAX_SPACE + 1));
    every_split("vllm-backend-01", "gpt-4-proxy", &wide, &wide);
}

#[test]
fn names_with_escapes_are_found_in_every_spelling() {
    for spelled in [r#""a/é\"😀""#, r#""a\/\u00e9\"\ud83d\uDE00""#, r#""\u0061/é\u0022😀""#] {
        let input = format!("{{\"model\":{spelled}}}");
        every_split("a/é\"😀", "x\"y", &input, r#"{"model":"x\"y"}"#);
    }
}

#[test]
fn equal_or_empty_names_need_no_renamer() {
    assert!(ModelRenamer::new("a", "a").is_none());
    assert!(ModelRenamer::new("", "a").is_none());
    assert!(ModelRenamer::new("a", "").is_none());
}

#[test]
fn chunk_without_a_model_is_not_copied() {
    let mut renamer = ModelRenamer::new("a", "b").unwrap();
    let mut out = Vec::new();
    assert!(!renamer.push(b"data: {\"model\":\"c\"}\n\n", false, &mut out));
    assert!(out.is_empty() && out.capacity() == 0);
}

#[test]
fn model_in_a_body_is_replaced_and_the_rest_kept() {
    let body = br#"{ "model" : "a", "x": 1.0 }"#;
    assert_eq!(replace_model(body, 12..15, "b\"\u{1}"), br#"{ "model" : "b\"\u0001", "x": 1.0 }"#);
    assert_eq!(replace_model(body, 0..0, "b"), body);
    assert_eq!(replace_model(body, 20..99, "b"), body);
}

fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "\"model\"",
        "\"mod",
        "el\"",
        ":",
        " ",
        "\"target\"",
        "\"tar",
        "get\"",
        "\\",
        "\"",
        "{",
        "}",
        ",",
        "\n",
        "model",
        "target",
        "\\u0074arget\"",
        "data: ",
        "\"model\":\"target\"",
        "é",
    ]);
    prop::collection::vec(fragment, 0..30).prop_map(|f| f.concat())
}

proptest! {
    #[test]
    fn chunk_boundaries_change_nothing(input in fragments(), cuts in prop::collection::vec(1usize..9, 1..20)) {
        let whole = rename("target", "incoming", &[input.as_bytes()]);
        let mut rest = input.as_bytes();
        let mut chunks = Vec::new();
        for cut in cuts.iter().cycle() {
            let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
            chunks.push(chunk);
            rest = tail;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(rename("target", "incoming", &chunks), whole);
    }

    #[test]
    fn renamed_json_keeps_its_meaning(text in ".*", key in "[a-z]{0,6}") {
        // Exactly what a JSON parser finds as a model is renamed.
        let answer = serde_json::json!({
            key: text, "model": "target", "a": [{"model": "target", "text": "\"model\":\"target\""}, "model", "target"],
        });
        let bytes = serde_json::to_vec(&answer).unwrap();
        let renamed = rename("target", "incoming", &[&bytes]);
        let mut expected = answer;
        expected["model"] = "incoming".into();
        expected["a"][0]["model"] = "incoming".into();
        prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&renamed).unwrap(), expected);
    }
}

#[test]
fn model_is_inserted_as_the_first_member() {
    for (body, want) in [
        (r#"{"messages":[]}"#, r#"{"model":"m\"1","messages":[]}"#),
        (" { \"n\":1}", " {\"model\":\"m\\\"1\", \"n\":1}"),
        ("{ }", "{\"model\":\"m\\\"1\" }"),
        ("[]", "[]"),
    ] {
        assert_eq!(String::from_utf8_lossy(&insert_model(body.as_bytes(), "m\"1")), want, "{body}");
    }
}
