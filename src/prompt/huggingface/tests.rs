use super::*;
use crate::memo::{Memo, SegmentCache};
use proptest::prelude::*;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::UNIX_EPOCH;

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_vectors").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

static TINY: LazyLock<Arc<HuggingFace>> = LazyLock::new(|| {
    let (tokenizer, template) = (data("tokenizer.json"), data("chat_template.jinja"));
    Arc::new(HuggingFace::from_parts(tokenizer.as_bytes(), None, Some(&template)).unwrap())
});

fn ids(model: &dyn Encoder, text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    model.encode(text, &mut out).unwrap();
    out
}

/// Cuts at the first mark found: marks promise that this suffices.
fn ids_in_pieces(model: &HuggingFace, marks: &[String], text: &str) -> Vec<u32> {
    let (mut out, mut rest) = (Vec::new(), text);
    while let Some((at, mark)) = marks.iter().filter_map(|m| rest.find(m.as_str()).map(|at| (at, m))).min() {
        model.encode(&rest[..at], &mut out).unwrap();
        model.encode(mark, &mut out).unwrap();
        rest = &rest[at + mark.len()..];
    }
    model.encode(rest, &mut out).unwrap();
    out
}

/// Text with everything that has ever caused tokenizer errors.
fn hostile_text() -> impl Strategy<Value = String> {
    let mark = prop::sample::select(TINY.cut_marks().unwrap().to_vec());
    let broken = mark.clone().prop_flat_map(|m| (0..m.len()).prop_map(move |i| m[..i].to_owned()));
    let piece = prop_oneof![
        3 => mark,
        1 => broken,
        2 => "[a-zA-Z ]{0,12}",
        1 => "\\PC{0,6}",
        1 => "[ \t\r\n\u{a0}\u{3000}]{1,40}",
        1 => "[\u{300}-\u{36f}]{1,8}",
        1 => "[\0\u{7f}\u{200d}\u{feff}\u{fffd}]{1,3}",
        1 => prop::sample::select(vec!["👩‍👩‍👧", "e\u{301}", "ﬁ", "가", "\u{212b}", "'ll", "0x1F", "عربى"]).prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn cut_at_marks_changes_no_ids(text in hostile_text()) {
        let marks = TINY.cut_marks().unwrap();
        prop_assert_eq!(ids_in_pieces(&TINY, marks, &text), ids(&**TINY, &text));
    }

    #[test]
    fn memo_gives_the_ids_of_the_model(parts in prop::collection::vec(hostile_text(), 1..16), times in 1usize..5) {
        let text = parts.concat().repeat(times);
        let memo = Memo::new(TINY.clone(), b"tiny", TINY.cuts(), Arc::new(SegmentCache::new(1 << 20, 7)));
        let plain = ids(&**TINY, &text);
        prop_assert_eq!(&ids(&memo, &text), &plain, "cold");
        prop_assert_eq!(&ids(&memo, &text), &plain, "warm");
    }

    #[test]
    fn marks_are_safe_for_any_set_of_added_tokens(
        tokens in prop::collection::btree_set("[ab<>]{1,4}", 1..6),
        text in "[ab<>]{0,40}",
    ) {
        let model = words(&tokens.iter().map(|t| added(t)).collect::<Vec<_>>(), serde_json::json!({}));
        if let Some(marks) = model.cut_marks() {
            prop_assert_eq!(ids_in_pieces(&model, marks, &text), ids(&model, &text), "{:?}", marks);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 24 } else { 256 }))]

    /// It has no marks and is longer than a segment, so it is only cut between words.
    #[test]
    fn long_texts_cut_between_words_give_the_ids_of_the_whole(
        parts in prop::collection::vec("[a-zé漢]{1,9}|[ ]{1,3}|\n{1,3}|[ \r\n\t/]{1,4}|[.,!/'’)]{1,3}|[0-9]{1,4}|'(s|ll)|[\u{300}\u{a0}\u{200d}]", 400..1_200),
    ) {
        let text = parts.concat().repeat(4);
        let memo = Memo::new(TINY.clone(), b"tiny", TINY.cuts(), Arc::new(SegmentCache::new(1 << 20, 7)));
        prop_assert!(TINY.cuts().first(&text) < text.len());
        prop_assert_eq!(ids(&memo, &text), ids(&**TINY, &text));
    }
}

fn added(content: &str) -> serde_json::Value {
    serde_json::json!({
        "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    })
}

/// A tokenizer that knows a few characters, with these added tokens and changes to its JSON.
fn words_json(tokens: &[serde_json::Value], changes: serde_json::Value) -> String {
    let added: Vec<_> = tokens
        .iter()
        .enumerate()
        .map(|(i, token)| {
            let mut token = token.clone();
            token["id"] = (6 + i).into();
            token
        })
        .collect();
    let mut json = serde_json::json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "b": 2, "<": 3, ">": 4, "ab": 5}, "unk_token": "?"},
    });
    for (key, value) in changes.as_object().unwrap() {
        json[key] = value.clone();
    }
    json.to_string()
}

fn words(tokens: &[serde_json::Value], changes: serde_json::Value) -> HuggingFace {
    HuggingFace::from_parts(words_json(tokens, changes).as_bytes(), None, None).unwrap()
}

#[test]
fn marks_are_given_only_where_they_are_safe() {
    let with = |key: &str, value: serde_json::Value| {
        let mut token = added("<s>");
        token[key] = value;
        words(&[token, added("</s>")], serde_json::json!({})).cut_marks().map(<[String]>::to_vec)
    };
    let both = Some(vec!["<s>".to_owned(), "</s>".to_owned()]);
    assert_eq!(with("special", false.into()), both);
    assert_eq!(with("normalized", true.into()), both, "without a normaliser nothing is normalised");
    assert_eq!(with("lstrip", true.into()), None);
    assert_eq!(with("rstrip", true.into()), None);
    assert_eq!(with("single_word", true.into()), None);
    let steps = |changes: serde_json::Value| words(&[added("<s>")], changes).cut_marks().is_some();
    assert!(steps(
        serde_json::json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}})
    ));
    assert!(!steps(serde_json::json!({"normalizer": {"type": "Prepend", "prepend": "▁"}})));
    assert!(!steps(
        serde_json::json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}})
    ));
    let metaspace = |scheme: &str| serde_json::json!({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true}});
    assert!(steps(metaspace("always")));
    assert!(!steps(metaspace("first")));
    assert!(words(&[], serde_json::json!({})).cut_marks().is_none(), "no added tokens, no marks");
    // Tokens that can overlap: one inside another, one that ends as another begins, one with itself.
    let marks = |tokens: &[&str]| {
        let tokens: Vec<_> = tokens.iter().map(|t| added(t)).collect();
        words(&tokens, serde_json::json!({})).cut_marks().unwrap_or_default().to_vec()
    };
    assert_eq!(marks(&["<a>", "c<a>d"]), ["c<a>d"]);
    assert!(marks(&["ab", "b<"]).is_empty());
    assert!(marks(&["aa"]).is_empty());
    assert_eq!(marks(&["<|s|>", "<|s|"]), ["<|s|>"]);
}

#[test]
fn special_tokens_are_added_where_the_tokenizer_adds_them() {
    let bos = serde_json::json!({"post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}},
    }});
    let tokens = [added("<s>"), added("</s>")];
    let json = words_json(&tokens, bos);
    let load =
        |config: Option<&str>| HuggingFace::from_parts(json.as_bytes(), config.map(str::as_bytes), None).unwrap();
    let model = load(None);
    assert_eq!((model.prefix(), model.suffix()), (&[6][..], &[][..]));
    let render = |body: &str| {
        let rendered = model.render(Api::Completions, body.as_bytes(), UNIX_EPOCH).unwrap();
        let mut out = Vec::new();
        model.encode_rendered(&rendered, &mut out).unwrap();
        out
    };
    assert_eq!(render(r#"{"prompt": "ab"}"#), [6, 1, 2]);
    assert_eq!(render(r#"{"prompt": "ab", "add_special_tokens": false}"#), [1, 2]);
    assert_eq!(render(r#"{"prompt": [1, 2]}"#), [1, 2]);
    let configured = load(Some(
        r#"{"add_bos_token": false, "add_eos_token": true, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}"#,
    ));
    assert_eq!((configured.prefix(), configured.suffix()), (&[][..], &[7][..]));
    let none = words(&tokens, serde_json::json!({}));
    assert_eq!((none.prefix(), none.suffix()), (&[][..], &[][..]));
    // Settings of the saved file that engines ignore.
    let cut = serde_json::json!({"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}});
    assert_eq!(ids(&words(&tokens, cut), "ab"), [1, 2]);
}

#[test]
fn templates_come_from_the_file_or_the_config() {
    let json = words_json(&[added("<s>")], serde_json::json!({}));
    let text = |config: &str, file: Option<&str>, body: &str| {
        let model = HuggingFace::from_parts(json.as_bytes(), Some(config.as_bytes()), file).unwrap();
        model.render(Api::ChatCompletions, body.as_bytes(), UNIX_EPOCH).map(|r| match r {
            Rendered::Text { text, add_special_tokens: false } => text,
            other => panic!("{other:?}"),
        })
    };
    let plain = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
    let tools = r#"{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f"}}]}"#;
    let one = r#"{"chat_template": "{{ bos_token }}{{ eos_token }}one", "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": null}"#;
    assert_eq!(text(one, None, plain).unwrap(), "<s>one");
    assert_eq!(text(one, Some("file{{ bos_token }}"), plain).unwrap(), "file<s>");
    let named = r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
    assert_eq!(text(named, None, plain).unwrap(), "d");
    assert_eq!(text(named, None, tools).unwrap(), "t");
    assert_eq!(text("{}", None, plain), Err(RenderError::NoTemplate));
}

#[test]
fn broken_files_are_errors() {
    let good = words_json(&[], serde_json::json!({}));
    let load = |tokenizer: &str, config: Option<&str>, template: Option<&str>| {
        HuggingFace::from_parts(tokenizer.as_bytes(), config.map(str::as_bytes), template).map(|_| ())
    };
    assert!(load(&good, None, None).is_ok());
    assert!(matches!(load("", None, None), Err(LoadError::Tokenizer(_))));
    assert!(matches!(load("{\"model\": 5}", None, None), Err(LoadError::Tokenizer(_))));
    assert!(matches!(load(&good, Some("{"), None), Err(LoadError::Config(_))));
    assert!(matches!(load(&good, Some("{\"bos_token\": 5}"), None), Err(LoadError::Config(_))));
    assert!(matches!(load(&good, None, Some("{% if %}")), Err(LoadError::Template(_))));
    assert!(matches!(load(&good, Some("{\"chat_template\": \"{{\"}"), None), Err(LoadError::Template(_))));
    assert!(matches!(
        load(&good, Some("{\"add_bos_token\": true, \"bos_token\": \"<gone>\"}"), None),
        Err(LoadError::Tokenizer(_))
    ));
}

#[test]
fn budget_limits_text_and_runs() {
    let long = |text: &str| {
        let mut out = vec![7];
        let result = TINY.encode(text, &mut out);
        assert!(result.is_ok() || out == [7], "a failure appends nothing");
        result
    };
    for c in [" ", "a", "\n", "7", "!", "\0", "é", "\u{301}"] {
        let text = c.repeat(DEFAULT_MAX_WORD_BYTES / c.len());
        let error = long(&text).unwrap_err();
        let EncodeError::Budget { done, bytes } = error else { panic!("{error}") };
        assert!(
            done > DEFAULT_MAX_RUN_BYTES && done <= DEFAULT_MAX_RUN_BYTES + 4 && bytes == text.len(),
            "{c:?}: {error}"
        );
        assert!(long(&c.repeat(DEFAULT_MAX_RUN_BYTES / c.len())).is_ok(), "{c:?}");
    }
    // Many short runs are ordinary text.
    assert!(long(&"word 12\n".repeat(DEFAULT_MAX_WORD_BYTES / 8)).is_ok());
    assert!(matches!(long(&"a b ".repeat(DEFAULT_MAX_WORD_BYTES / 4 + 1)), Err(EncodeError::Budget { done: 0, .. })));
    let whole = words(&[], serde_json::json!({}));
    assert!(whole.encode(&"a b ".repeat(DEFAULT_MAX_TEXT_BYTES / 4), &mut Vec::new()).is_ok());
    assert!(whole.encode(&"a b ".repeat(DEFAULT_MAX_TEXT_BYTES / 4 + 1), &mut Vec::new()).is_err());
    let tight = words(&[], serde_json::json!({})).with_budget(EncodeBudget { text_bytes: 3, run_bytes: 3 });
    assert!(tight.encode("abab", &mut Vec::new()).is_err());
    assert!(tight.encode("aba", &mut Vec::new()).is_ok());
}
