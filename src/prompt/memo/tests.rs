use super::*;
use crate::tiktoken::{Encoding, Tables, Tiktoken};
use proptest::prelude::*;
use std::sync::OnceLock;

/// Ids depend on the whole text since the last mark: only cuts at marks are valid for it.
#[derive(Debug)]
struct Toy(&'static [&'static str]);

impl Encoder for Toy {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let mut rest = text;
        let mut before = 0u32;
        while let Some(c) = rest.chars().next() {
            let longest = self.0.iter().filter(|m| rest.starts_with(**m)).max_by_key(|m| m.len());
            if let Some(mark) = longest {
                out.push(1 << 24 | u32::try_from(mark.len()).unwrap());
                before = 0;
                rest = &rest[mark.len()..];
                continue;
            }
            if c == '☠' {
                return Err(EncodeError::Failed("poison".to_owned()));
            }
            before = before.wrapping_mul(31).wrapping_add(u32::from(c)) & 0xFF_FFFF;
            out.push(before);
            rest = &rest[c.len_utf8()..];
        }
        Ok(())
    }
}

const MARKS: &[&str] = &["<|a|>", "<|a|><", "<|ab|>", "<s>", "[INST]"];

fn toy(cache: &Arc<SegmentCache>) -> Memo {
    let cuts = Cuts::new(MARKS.iter().map(|m| (*m).to_owned()), false);
    Memo::new(Arc::new(Toy(MARKS)), b"toy", cuts, cache.clone())
}

fn cache() -> Arc<SegmentCache> {
    Arc::new(SegmentCache::new(1 << 20, 11))
}

fn encoded(encoder: &dyn Encoder, text: &str) -> Vec<u32> {
    let mut out = vec![42];
    encoder.encode(text, &mut out).expect("encodes");
    out
}

/// The bytes between the quotes when `text` is written as JSON.
fn in_json(text: &str, ascii: bool, slashes: bool) -> String {
    let json = serde_json::to_string(text).expect("a string");
    let raw = json.strip_prefix('"').and_then(|raw| raw.strip_suffix('"')).expect("quotes");
    let mut out = String::new();
    for c in raw.chars() {
        match c {
            '/' if slashes => out += "\\/",
            // As Python and Go write what is not ASCII or might be HTML.
            c if ascii && (!c.is_ascii() || c == '<') => {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04x}"));
            }
            c => out.push(c),
        }
    }
    out
}

/// As [`encoded`], for text with JSON escapes.
fn escaped(memo: &Memo, raw: &str) -> Vec<u32> {
    let mut out = vec![42];
    let mut rest = raw;
    while !rest.is_empty() {
        let (part, behind) = rest.split_at(memo.cuts().first_escaped(rest));
        memo.encode_escaped(part, &mut AMPLE.clone(), &mut out).expect("encodes");
        rest = behind;
    }
    out
}

/// More than any text here: a text that is rejected as a whole may fit in parts.
const AMPLE: usize = 1 << 20;

fn tiktoken(encoding: Encoding) -> Tiktoken {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(Tables::default).encoder(encoding).with_budget(AMPLE, AMPLE)
}

fn remembering(encoding: Encoding, cache: &Arc<SegmentCache>) -> Memo {
    let encoder = tiktoken(encoding);
    let cuts = encoder.cuts().expect("loads");
    Memo::new(Arc::new(encoder), encoding.name().as_bytes(), cuts, cache.clone())
}

/// Long enough to be cut, with everything near the cuts that could make a difference.
fn long_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        6 => "[ ]?[A-Za-z]{1,9}",
        1 => "[ ]?[0-9]{1,9}",
        2 => "[!-/:-@]{1,5}",
        3 => "[ \t\n\r/]{1,6}",
        1 => "\\PC{0,8}",
        1 => "[一-三。，\n]{1,6}",
        1 => Just("it's we'LL I'd".to_owned()),
        1 => Just("a\u{301}\u{20DD}Ⓐ\u{200D}😀".to_owned()),
        2 => prop::sample::select(vec!["<|endoftext|>", "<|endofprompt|>", "<|start|>", "<|end", "<|", "|>"]).prop_map(str::to_owned),
        1 => Just("\u{A0}\u{2003}\u{3000}\u{85} \n".to_owned()),
        1 => "( {1,5000}|a{1,5000}|\n{1,300})",
    ];
    (prop::collection::vec(part, 1..200), 1usize..20).prop_map(|(parts, times)| parts.concat().repeat(times))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 32 } else { 512 }))]

    #[test]
    fn memo_gives_the_ids_of_tiktoken(text in long_text(), encoding in prop::sample::select(Encoding::ALL.to_vec())) {
        prop_assume!(text.len() < 200_000);
        let memo = remembering(encoding, &cache());
        let plain = encoded(&tiktoken(encoding), &text);
        prop_assert_eq!(&encoded(&memo, &text), &plain, "cold");
        prop_assert_eq!(&encoded(&memo, &text), &plain, "warm");
    }

    #[test]
    fn marks_are_valid_cuts(parts in prop::collection::vec(prop_oneof![
        prop::sample::select(MARKS.to_vec()).prop_map(str::to_owned), "[a<|>\\[]{0,300}", "\\PC{0,60}",
    ], 0..30)) {
        let text = parts.concat();
        prop_assume!(!text.contains('☠'));
        let memo = toy(&cache());
        let plain = encoded(&Toy(MARKS), &text);
        prop_assert_eq!(&encoded(&memo, &text), &plain, "cold");
        prop_assert_eq!(&encoded(&memo, &text), &plain, "warm");
    }

    #[test]
    fn escaped_text_has_the_ids_of_its_plain_text(text in long_text(), ascii in any::<bool>(), slashes in any::<bool>()) {
        prop_assume!(text.len() < 100_000);
        let raw = in_json(&text, ascii, slashes);
        let memo = remembering(Encoding::O200kBase, &cache());
        let plain = encoded(&tiktoken(Encoding::O200kBase), &text);
        prop_assert_eq!(&escaped(&memo, &raw), &plain, "cold");
        prop_assert_eq!(&escaped(&memo, &raw), &plain, "warm");
        prop_assert_eq!(&encoded(&memo, &text), &plain, "and the text itself");
    }

    #[test]
    fn cuts_in_escaped_text_are_valid_cuts(parts in prop::collection::vec(prop_oneof![
        prop::sample::select(MARKS.to_vec()).prop_map(str::to_owned), "[a<|>\\[]{0,300}", "\\PC{0,60}", "[\"\\\\\n/ ]{0,9}",
    ], 0..30), ascii in any::<bool>()) {
        let text = parts.concat();
        prop_assume!(!text.contains('☠'));
        let memo = toy(&cache());
        let plain = encoded(&Toy(MARKS), &text);
        let raw = in_json(&text, ascii, true);
        prop_assert_eq!(&escaped(&memo, &raw), &plain, "cold");
        prop_assert_eq!(&escaped(&memo, &raw), &plain, "warm");
    }

    #[test]
    fn segments_are_the_text_and_are_not_cut_further(text in long_text(), words in any::<bool>()) {
        let cuts = Cuts::new(["<|endoftext|>".to_owned(), "<|start|>".to_owned()], words);
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let length = cuts.first(rest);
            prop_assert!(length > 0);
            let (segment, behind) = rest.split_at(length);
            prop_assert_eq!(cuts.first(segment), length);
            prop_assert!(behind.is_empty() || length >= MIN_SEGMENT_BYTES);
            rest = behind;
        }
    }
}

#[test]
fn each_turn_encodes_only_its_new_text() {
    let cache = cache();
    let memo = toy(&cache);
    let turn = |n: usize| (0..n).map(|i| format!("<s>{}", format!("turn {i} ").repeat(100))).collect::<String>();
    encoded(&memo, &turn(4));
    let before = cache.stats();
    assert_eq!((before.hits, before.misses), (0, 4));
    encoded(&memo, &turn(5));
    let after = cache.stats();
    assert_eq!((after.hits, after.misses), (4, 5));
    assert_eq!(after.hit_bytes, turn(4).len() as u64);
    assert_eq!(after.missed_bytes, turn(5).len() as u64);
    assert_eq!(after.entries, 5);
    assert!(after.held_bytes >= 4 * turn(5).len() as u64, "one id per byte");
}

#[test]
fn response_is_cached_when_it_returns_in_json() {
    let cache = cache();
    let memo = remembering(Encoding::O200kBase, &cache);
    let answer = "a line of an answer\n".repeat(40);
    let ids = encoded(&memo, &answer);
    let raw = in_json(&answer, false, false);
    for hits in [1, 2] {
        assert_eq!(escaped(&memo, &raw), ids);
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses), (hits, 1), "no text is encoded again");
    }
    // A response of several segments, which JSON cuts at other positions than the plain text.
    let answer = "a line of a \"longer\" answer\n".repeat(1_000);
    let mut ids = vec![42];
    memo.encode_coming(&answer, &mut ids).expect("encodes");
    assert_eq!(ids, encoded(&tiktoken(Encoding::O200kBase), &answer));
    let before = cache.stats();
    assert_eq!(escaped(&memo, &in_json(&answer, false, false)), ids);
    assert_eq!(cache.stats().misses, before.misses);
    assert!(cache.stats().hits > before.hits + 4);
}

#[test]
fn growing_text_is_encoded_from_its_last_cut() {
    let cache = cache();
    let memo = remembering(Encoding::R50kBase, &cache);
    let document = "The picker reads the body once. ".repeat(1_000);
    encoded(&memo, &format!("{document}What does it read?"));
    let before = cache.stats().missed_bytes;
    encoded(&memo, &format!("{document}How often?"));
    assert!(cache.stats().missed_bytes - before < 2 * DEFAULT_SEGMENT_BYTES as u64);
}

#[test]
fn short_segments_are_not_cached() {
    let cache = cache();
    encoded(&toy(&cache), "short");
    assert_eq!(cache.stats(), MemoStats::default());
}

#[test]
fn encoders_share_ids_only_with_the_same_identity() {
    let cache = cache();
    let text = "The same text for everybody, long enough to be kept. ".repeat(4);
    let plain = encoded(&tiktoken(Encoding::R50kBase), &text);
    encoded(&toy(&cache), &text);
    assert_eq!(encoded(&remembering(Encoding::R50kBase, &cache), &text), plain);
    assert_eq!(cache.stats().hits, 0);
}

#[test]
fn failures_are_reported_and_not_cached() {
    let cache = cache();
    let memo = toy(&cache);
    let text = format!("<s>{}<s>{}☠", "good ".repeat(100), "bad ".repeat(100));
    for _ in 0..2 {
        let mut out = vec![7];
        assert_eq!(memo.encode(&text, &mut out), Err(EncodeError::Failed("poison".to_owned())));
        assert_eq!(out, [7]);
    }
    assert_eq!((cache.stats().hits, cache.stats().entries), (1, 1));
}

#[test]
fn memory_stays_within_the_budget_under_a_flood() {
    let cache = cache();
    let memo = toy(&cache);
    for i in 0..2_000 {
        encoded(&memo, &format!("{i} ").repeat(200));
        assert!(cache.stats().held_bytes <= 1 << 20);
    }
    assert!(cache.stats().held_bytes > 1 << 19, "and is used: {:?}", cache.stats());
}

#[test]
fn text_without_cuts_is_one_segment() {
    let text = "<s>words and more words ".repeat(1_000);
    assert_eq!(Cuts::none().first(&text), text.len());
    let spaced = Cuts::new(["a mark".to_owned()], true);
    assert_eq!(spaced.first(&text), text.len(), "words may not be cut where a mark could hold a space");
}

#[test]
fn longer_of_two_marks_counts() {
    let memo = toy(&cache());
    // The shorter one would leave `<s>` behind it, far enough away for a cut.
    let text = format!("{}<|a|><s>{}", "x".repeat(MIN_SEGMENT_BYTES - 4), "y".repeat(300));
    assert_eq!(memo.cuts().first(&text), text.len());
    assert_eq!(encoded(&memo, &text), encoded(&Toy(MARKS), &text));
    let apart = format!("{}<|a|> <s>{}", "x".repeat(MIN_SEGMENT_BYTES - 4), "y".repeat(300));
    assert_eq!(memo.cuts().first(&apart), MIN_SEGMENT_BYTES + 2);
}

#[test]
fn cut_is_found_at_any_distance() {
    let cuts = Cuts::new(["<s>".to_owned(), "<end>".to_owned()], true);
    for far in [8_191, 8_192, 8_193, 50_000, 65_534] {
        let solid = "x".repeat(far);
        for (behind, cut) in [("<s>y", far), (" y", far), ("\ny", far + 1), ("<end> y", far), ("", far)] {
            let text = format!("{solid}{behind}");
            assert_eq!(cuts.first(&text), cut.min(text.len()), "{behind:?} after {far}");
        }
        let early = format!("<s>{}<s>{solid}", &solid[..200]);
        assert_eq!(cuts.first(&early), early.len(), "marks too near the beginning");
    }
}

#[test]
fn uncached_text_is_encoded_up_to_the_limit() {
    let memo = toy(&cache());
    let (long, other) = ("a".repeat(300), "b".repeat(300));
    let segment = |text: &str, mut cold: usize| {
        let mut out = Vec::new();
        memo.encode_segment(text, &mut cold, &mut out).map(|()| (out, cold))
    };
    assert_eq!(segment(&long, 299), Err(EncodeError::Cold));
    let (ids, left) = segment(&long, 400).expect("allowed");
    assert_eq!((ids.len(), left), (300, 100));
    assert_eq!(segment(&long, 0), Ok((ids, 0)), "it is cached");
    assert_eq!(segment(&other, 100), Err(EncodeError::Cold));
    // Roles cost nothing, and their ids are the encoder's own.
    for _ in 0..2 {
        let mut plain = Vec::new();
        Toy(MARKS).encode("assistant", &mut plain).expect("encodes");
        assert_eq!(segment("assistant", 0), Ok((plain, 0)));
    }
    assert_eq!(segment("short", 4), Err(EncodeError::Cold), "too short for the cache");
}
