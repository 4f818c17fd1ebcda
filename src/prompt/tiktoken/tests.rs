use super::runs::{MAX_RUN_BYTES, Window, Windows};
use super::*;
use proptest::prelude::*;

/// One set for all tests: loading a table takes a while in a debug build.
fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(Tables::default)
}

fn encode(encoding: Encoding, text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    tables().encoder(encoding).encode(text, &mut out).expect("encodes");
    out
}

/// The ids of tiktoken-rs alone, special tokens included.
fn plain(encoding: Encoding, text: &str) -> Vec<u32> {
    let encoder = tables().encoder(encoding);
    encoder.table().expect("loads").bpe.encode_with_special_tokens(text)
}

#[test]
fn encodings_are_found_by_name_and_by_model() {
    for encoding in Encoding::ALL {
        assert_eq!(Encoding::by_name(encoding.name()), Some(encoding));
    }
    assert_eq!(Encoding::by_name("gpt2"), Some(Encoding::R50kBase));
    assert_eq!(Encoding::by_name("o300k"), None);
    for (model, encoding) in [
        ("openai/gpt-oss-120b", Encoding::O200kHarmony),
        ("gpt-4o-mini", Encoding::O200kBase),
        ("gpt-4-turbo", Encoding::Cl100kBase),
        ("text-davinci-003", Encoding::P50kBase),
        ("text-davinci-edit-001", Encoding::P50kEdit),
        ("davinci", Encoding::R50kBase),
        ("meta-llama/Llama-3.3-70B-Instruct", DEFAULT_ENCODING),
        ("", DEFAULT_ENCODING),
    ] {
        assert_eq!(Encoding::of_model(model), encoding, "{model}");
    }
}

#[test]
fn ids_equal_those_of_openai() {
    // From OpenAI's own tiktoken.
    assert_eq!(encode(Encoding::O200kBase, "hello world"), [24_912, 2_375]);
    assert_eq!(encode(Encoding::Cl100kBase, "hello world"), [15_339, 1_917]);
    assert_eq!(encode(Encoding::R50kBase, "hello world"), [31_373, 995]);
    assert_eq!(encode(Encoding::O200kHarmony, "<|start|>hello<|end|>"), [200_006, 24_912, 200_007]);
    assert_eq!(encode(Encoding::O200kBase, "a<|endoftext|>"), [64, 199_999]);
    assert_ne!(encode(Encoding::O200kBase, "<|start|>")[0], 200_006, "a special token of another encoding is text");
}

#[test]
fn tables_are_loaded_once_when_used() {
    let tables = Tables::default();
    let one = tables.encoder(Encoding::R50kBase);
    assert_eq!(format!("{tables:?}"), "[]");
    one.encode("x", &mut Vec::new()).unwrap();
    assert_eq!(format!("{tables:?}"), "[R50kBase]");
    assert!(Arc::ptr_eq(&one.table, &tables.encoder(Encoding::R50kBase).table));
}

/// Ordinary text, and text that causes problems in tokenizers.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[ ]?[A-Za-z]{1,9}",
        1 => "[ ]?[0-9]{1,9}",
        1 => "[!-/:-@]{1,5}",
        1 => "[ \t\n\r]{1,6}",
        1 => "[ ]{1,90}|[-=_]{1,90}|[\u{A0}\u{2028}\n\r ]{1,6}",
        1 => "[a-zé]{20,200}",
        1 => "[A-ZÀ-Ý][a-zß]{1,5}['’](?i:s|ſ|t|ll|x)",
        1 => "[/\n]{1,6}",
        1 => "\\PC{0,8}",
        1 => "[一-三。，]{1,6}",
        1 => Just("it's we'LL I'd".to_owned()),
        1 => Just("a\u{301}\u{20DD}Ⓐ\u{200D}😀".to_owned()),
        1 => Just("<|endoftext|>".to_owned()),
        1 => Just("<|end".to_owned()),
        1 => Just("\u{A0}\u{2003}\u{3000}\u{85}".to_owned()),
    ];
    prop::collection::vec(part, 0..60).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 48 } else { 512 }))]

    #[test]
    fn ordinary_text_has_the_ids_of_tiktoken(text in text(), encoding in prop::sample::select(vec![
        Encoding::O200kBase, Encoding::O200kHarmony, Encoding::Cl100kBase, Encoding::P50kBase, Encoding::R50kBase,
    ])) {
        prop_assert_eq!(encode(encoding, &text), plain(encoding, &text));
    }

    #[test]
    fn windows_are_the_text_and_limited(parts in prop::collection::vec(("\\PC{1,3}", 1usize..3_000), 0..6)) {
        let text: String = parts.iter().map(|(c, n)| c.repeat(*n)).collect();
        let windows: Vec<Window<'_>> = Windows::new(&text).collect();
        prop_assert_eq!(windows.iter().map(|w| w.text).collect::<String>(), &*text);
        prop_assert!(windows.iter().all(|w| w.long_bytes <= w.text.len()));
        prop_assert!(windows.iter().rev().skip(1).all(|w| w.long_bytes > MAX_RUN_BYTES - 4), "only a long run is cut");
    }
}

/// Lengths that are merged here and lengths that tiktoken-rs merges, with and without white space given back.
#[test]
fn runs_of_every_length_have_the_ids_of_tiktoken() {
    for encoding in Encoding::ALL {
        for unit in [" ", "\n", " \n", "\u{A0}", "-", "é"] {
            for times in [1, 2, 3, 99, 100, 127, 128, 129, 130, 300] {
                for end in ["", "x", "\nx"] {
                    let text = unit.repeat(times) + end;
                    assert_eq!(encode(encoding, &text), plain(encoding, &text), "{unit:?} {times} times, then {end:?}");
                }
            }
        }
    }
}

#[test]
fn long_runs_are_cut_and_counted() {
    let hostile = [
        " ".repeat(20_000),
        "\n".repeat(20_000),
        "a".repeat(20_000),
        "!".repeat(20_000),
        "7".repeat(20_000),
        "/\n".repeat(10_000),
        "a\u{301}".repeat(10_000),
        "!😀".repeat(5_000),
        "Ⓐ!".repeat(5_000),
        "ก".repeat(7_000),
    ];
    for text in &hostile {
        let windows: Vec<Window<'_>> = Windows::new(text).collect();
        assert!(windows.iter().all(|w| w.text.len() <= MAX_RUN_BYTES), "{:?}", text.get(..4));
        let long: usize = windows.iter().map(|w| w.long_bytes).sum();
        assert!(long > text.len() - MAX_RUN_BYTES, "{:?}", text.get(..4));
    }
    // The same between two words; text before the run is not cut off from it.
    let padded = format!("left{}right", " ".repeat(1_000));
    let windows: Vec<Window<'_>> = Windows::new(&padded).collect();
    assert_eq!(windows, [Window { text: &padded, long_bytes: 1_000 }]);
    let code = "fn main() { println!(\"{}\", one::two(3)); }\n".repeat(2_000);
    assert_eq!(Windows::new(&code).collect::<Vec<_>>(), [Window { text: &code, long_bytes: 0 }]);
    let chinese = "这是一个很长的句子，里面没有空格，但是有标点。".repeat(1_000);
    assert_eq!(Windows::new(&chinese).map(|w| w.long_bytes).sum::<usize>(), 0);
}

#[test]
fn no_text_causes_a_panic_or_exceeds_its_budget() {
    // 1 MiB of spaces overflows the stack of tiktoken-rs's regex engine.
    let encoder = tables().encoder(Encoding::R50kBase).with_budget(2 << 20, 2 << 20);
    let spaces = " ".repeat(1 << 20);
    let mut out = vec![1];
    encoder.encode(&spaces, &mut out).expect("windows are small");
    assert!(out.len() > 1);

    let bounded = tables().encoder(Encoding::R50kBase).with_budget(2 << 20, 64 << 10);
    let mut out = vec![1];
    let error = bounded.encode(&spaces, &mut out).expect_err("too many in runs");
    assert!(matches!(error, EncodeError::Budget { done: 0, bytes: 1_048_576 }), "{error:?}");
    assert_eq!(out, [1], "a failure appends nothing");
    let small = tables().encoder(Encoding::R50kBase).with_budget(10, 10);
    assert_eq!(small.encode("eleven char", &mut out), Err(EncodeError::Budget { done: 0, bytes: 11 }));
}

#[test]
fn special_tokens_of_harmony_are_found_among_others() {
    let text = "<|reserved_200013|><|reserved_20001|><|<|call|>|><<|channel|>final<|message|><|reserved_201087|>";
    assert_eq!(encode(Encoding::O200kHarmony, text), plain(Encoding::O200kHarmony, text));
    assert_eq!(tables().encoder(Encoding::O200kHarmony).table().unwrap().marks.len(), 1_090);
}
