use super::*;
use proptest::prelude::*;

fn encoded(text: &str) -> Vec<u32> {
    let mut tokens = vec![];
    encode(text, &mut tokens);
    tokens
}

#[test]
fn a_token_is_four_bytes() {
    assert_eq!(encoded("import os").len(), 3);
    assert_eq!(encoded("").len(), 0);
    assert_eq!(encoded("impo"), vec![u32::from_le_bytes(*b"impo")]);
}

#[test]
fn every_word_of_an_answer_is_one_token_and_needs_no_escaping() {
    for word in VOCABULARY {
        assert_eq!(word.len(), BYTES_PER_TOKEN, "{word:?}");
        assert_eq!(serde_json::to_string(word).unwrap(), format!("\"{word}\""));
    }
}

#[test]
fn a_continued_conversation_keeps_the_tokens_of_its_past() {
    let mut turns = vec![ChatTurn::text("system", "You are helpful."), ChatTurn::text("user", "Hi!")];
    let asked = render_chat(&turns, true);
    let answer: Vec<u32> = (0..20).map(|i| answer_token(7, i)).collect();
    let text: String = (0..20).map(|i| answer_text(7, i)).collect();
    assert_eq!(decode(&answer), text);
    turns.push(ChatTurn::text("assistant", text));
    turns.push(ChatTurn::text("user", "And then?"));
    let continued = render_chat(&turns, true);
    let past: Vec<u32> = asked.into_iter().chain(answer).collect();
    assert_eq!(continued[..past.len()], past[..]);
}

#[test]
fn media_differ_by_identity_only() {
    let turn = |url: &str| ChatTurn { role: "user".to_owned(), content: vec![Content::Media(url.to_owned())] };
    assert_eq!(render_chat(&[turn("a")], false), render_chat(&[turn("a")], false));
    assert_ne!(render_chat(&[turn("a")], false), render_chat(&[turn("b")], false));
}

#[test]
fn marks_are_no_text_and_text_makes_no_marks() {
    assert_eq!(decode(&[MESSAGE_START]), "<|im_start|>");
    assert!(!encoded("<|im_start|>").contains(&MESSAGE_START));
}

proptest! {
    #[test]
    fn text_comes_back(text in "[^\\x00]{0,40}") {
        prop_assert_eq!(decode(&encoded(&text)), text);
    }
}
