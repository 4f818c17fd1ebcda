//! Reads the list of token ids from a tokenizer's response without parsing the rest: a prompt of 100,000 tokens
//! has 600 KB of digits.

use memchr::memchr2;

/// A response without a valid list of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenListError {
    /// The response is not a JSON object, or it is incomplete.
    #[error("the response is not a JSON object, or is incomplete")]
    Malformed,
    /// The root object has no such member.
    #[error("the response has no list of tokens")]
    Missing,
    /// An element of the list is not a token id.
    #[error("the list of tokens has elements that are not numbers of 32 bits")]
    NotTokens,
}

/// Returns the ids under `key` in `answer`, an object or a list of objects, of which the first counts.
pub(super) fn token_list(answer: &[u8], key: &[u8]) -> Result<Vec<u32>, TokenListError> {
    let mut at = Cursor { rest: answer };
    at.white();
    if at.take(b'[') {
        at.white();
    }
    if !at.take(b'{') {
        return Err(TokenListError::Malformed);
    }
    loop {
        at.white();
        if at.take(b'}') {
            return Err(TokenListError::Missing);
        }
        let found = at.string().ok_or(TokenListError::Malformed)?;
        at.white();
        if !at.take(b':') {
            return Err(TokenListError::Malformed);
        }
        at.white();
        if found == key {
            return at.ids();
        }
        at.value().ok_or(TokenListError::Malformed)?;
        at.white();
        if !at.take(b',') && at.rest.first() != Some(&b'}') {
            return Err(TokenListError::Malformed);
        }
    }
}

struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn take(&mut self, byte: u8) -> bool {
        match self.rest.split_first() {
            Some((first, rest)) if *first == byte => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn white(&mut self) {
        while let Some((b' ' | b'\t' | b'\n' | b'\r', rest)) = self.rest.split_first() {
            self.rest = rest;
        }
    }

    /// Reads a string; returns the bytes between its quotes with escapes.
    fn string(&mut self) -> Option<&'a [u8]> {
        let inside = self.rest.strip_prefix(b"\"")?;
        let mut end = 0;
        loop {
            end += memchr2(b'"', b'\\', inside.get(end..)?)?;
            if inside.get(end) == Some(&b'"') {
                self.rest = inside.get(end + 1..)?;
                return inside.get(..end);
            }
            end += 2;
        }
    }

    /// Skips a value.
    fn value(&mut self) -> Option<()> {
        let mut depth = 0u32;
        loop {
            match self.rest.first()? {
                b'"' => {
                    self.string()?;
                }
                b'{' | b'[' => {
                    depth = depth.checked_add(1)?;
                    self.rest = self.rest.get(1..)?;
                    continue;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1)?;
                    self.rest = self.rest.get(1..)?;
                }
                _ => {
                    let ends = |b: &u8| matches!(b, b'"' | b',' | b'{' | b'}' | b'[' | b']');
                    let end = self.rest.iter().position(ends)?;
                    self.rest = self.rest.get(end..)?;
                }
            }
            if depth == 0 {
                return Some(());
            }
            // Separators between the values of a container.
            while let Some((b',' | b':' | b' ' | b'\t' | b'\n' | b'\r', rest)) = self.rest.split_first() {
                self.rest = rest;
            }
        }
    }

    fn ids(&mut self) -> Result<Vec<u32>, TokenListError> {
        if !self.take(b'[') {
            return Err(TokenListError::Missing);
        }
        // Digits, a comma, and often a blank: most ids have five digits.
        let mut ids = Vec::with_capacity(self.rest.len() / 6);
        self.white();
        if self.take(b']') {
            return Ok(ids);
        }
        loop {
            ids.push(self.id()?);
            self.white();
            if self.take(b']') {
                return Ok(ids);
            }
            if !self.take(b',') {
                return Err(if self.rest.is_empty() { TokenListError::Malformed } else { TokenListError::NotTokens });
            }
            self.white();
        }
    }

    fn id(&mut self) -> Result<u32, TokenListError> {
        let (mut id, mut digits) = (0u64, 0u32);
        while let Some((digit @ b'0'..=b'9', rest)) = self.rest.split_first() {
            id = id.wrapping_mul(10).wrapping_add(u64::from(*digit - b'0'));
            digits += 1;
            self.rest = rest;
        }
        match (u32::try_from(id), digits) {
            // Ten digits are enough for every id; more could overflow.
            (Ok(id), 1..=10) => Ok(id),
            (_, 0) if self.rest.is_empty() => Err(TokenListError::Malformed),
            _ => Err(TokenListError::NotTokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn capture(name: &str) -> Value {
        let path = format!("{}/../../tests/data/protocol/{name}.json", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()).unwrap()["body"].clone()
    }

    #[test]
    fn recorded_responses_give_their_tokens() {
        for name in ["tokenize_chat", "tokenize_completion", "tokenize_completion_nomodel"] {
            let body = capture(name);
            let expected: Vec<u32> = serde_json::from_value(body["tokens"].clone()).unwrap();
            assert_eq!(expected.len() as u64, body["count"].as_u64().unwrap());
            assert_eq!(token_list(&serde_json::to_vec(&body).unwrap(), b"tokens"), Ok(expected), "{name}");
        }
        // The form of /v1/completions/render: a list with one element for each prompt.
        let render = br#"[{"request_id":"cmpl-a3fc","token_ids":[784, 587],"token_offsets":null,"features":null}]"#;
        assert_eq!(token_list(render, b"token_ids"), Ok(vec![784, 587]));
    }

    #[test]
    fn responses_without_tokens_are_refused() {
        use TokenListError::*;
        let cases: &[(&str, TokenListError)] = &[
            ("", Malformed),
            ("tokens", Malformed),
            ("[1,2]", Malformed),
            (r#""tokens":[1]"#, Malformed),
            ("{", Malformed),
            (r#"{"tokens""#, Malformed),
            (r#"{"tokens":[1,"#, Malformed),
            (r#"{"tokens":[1"#, Malformed),
            (r#"{"a":{"tokens":[1]"#, Malformed),
            (r#"{"a" "tokens":[1]}"#, Malformed),
            ("{}", Missing),
            (r#"{"a":{"tokens":[1]}}"#, Missing),
            (r#"{"a":"\"tokens\":[1]"}"#, Missing),
            (r#"{"tokens":null}"#, Missing),
            (r#"{"tokens":"[1]"}"#, Missing),
            (r#"{"tokens":[1.5]}"#, NotTokens),
            (r#"{"tokens":[-1]}"#, NotTokens),
            (r#"{"tokens":["1"]}"#, NotTokens),
            (r#"{"tokens":[1,null]}"#, NotTokens),
            (r#"{"tokens":[1 2]}"#, NotTokens),
            (r#"{"tokens":[[1]]}"#, NotTokens),
            (r#"{"tokens":[4294967296]}"#, NotTokens),
            (r#"{"tokens":[18446744073709551617]}"#, NotTokens),
        ];
        for (answer, error) in cases {
            assert_eq!(token_list(answer.as_bytes(), b"tokens"), Err(*error), "{answer}");
        }
        assert_eq!(token_list(b" { \"tokens\" : [ ] } ", b"tokens"), Ok(vec![]));
        assert_eq!(token_list(b"{\"tokens\":[4294967295 ,\n0]}", b"tokens"), Ok(vec![u32::MAX, 0]));
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(json!(null)),
            any::<bool>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            prop::sample::select(vec!["\"tokens\":[1]", "\\", "]}", "\u{e9}\n"]).prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(inner, 0..3).prop_map(|v| Value::Object(
                    ["tokens", "a", "\\\""].map(str::to_owned).into_iter().zip(v).collect()
                )),
            ]
        })
    }

    proptest! {
        #[test]
        fn result_agrees_with_serde_json(
            tokens in prop_oneof![prop::collection::vec(any::<u32>(), 0..40).prop_map(Value::from), any_value()],
            before in any_value(),
            after in any_value(),
            first in any::<bool>(),
            pretty in any::<bool>(),
            cut in 0usize..400,
        ) {
            // Members before and after, in the order of the map.
            let answer = if first {
                json!({"tokens": tokens, "z": after})
            } else {
                json!({"a": before, "tokens": tokens, "z": after})
            };
            let text = if pretty { serde_json::to_vec_pretty(&answer) } else { serde_json::to_vec(&answer) }.unwrap();
            let expected = serde_json::from_value::<Vec<u32>>(answer["tokens"].clone());
            prop_assert_eq!(token_list(&text, b"tokens").ok(), expected.ok());
            // A truncated response gives the complete list or an error.
            let cut = text.get(..cut).unwrap_or(&text);
            if let Ok(found) = token_list(cut, b"tokens") {
                prop_assert_eq!(Some(found), serde_json::from_value::<Vec<u32>>(answer["tokens"].clone()).ok());
            }
        }
    }
}
