//! Reads the list of token ids from a tokenizer's response. The rest, which may be longer, is skipped.

use super::settings::RemoteApi;
use serde::Deserialize;
use serde_json::value::RawValue;

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

/// The lists of a response.
#[derive(Deserialize)]
struct Lists<'a> {
    #[serde(borrow)]
    tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

/// Returns the ids in `answer`, an object with a list of tokens, or an array of such objects, of which the first counts.
pub(super) fn token_list(api: RemoteApi, answer: &[u8]) -> Result<Vec<u32>, TokenListError> {
    let is_array = answer.trim_ascii_start().starts_with(b"[");
    let first = if is_array {
        serde_json::from_slice::<Vec<Lists<'_>>>(answer).map(|all| all.into_iter().next())
    } else {
        serde_json::from_slice(answer).map(Some)
    };
    let lists = first.map_err(|_| TokenListError::Malformed)?;
    let list = lists.and_then(|lists| match api {
        RemoteApi::Tokenize => lists.tokens,
        RemoteApi::Render => lists.token_ids,
    });
    let list = list.map(RawValue::get);
    let list = list.filter(|list| list.starts_with('[')).ok_or(TokenListError::Missing)?;
    serde_json::from_str(list).map_err(|_| TokenListError::NotTokens)
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
            assert_eq!(token_list(RemoteApi::Tokenize, &serde_json::to_vec(&body).unwrap()), Ok(expected), "{name}");
        }
        // The form of /v1/completions/render: a list with one element for each prompt.
        let render = br#"[{"request_id":"cmpl-a3fc","token_ids":[784, 587],"token_offsets":null,"features":null}]"#;
        assert_eq!(token_list(RemoteApi::Render, render), Ok(vec![784, 587]));
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
            (r#"{"tokens":[1 2]}"#, Malformed),
            (r#"{"tokens":[[1]]}"#, NotTokens),
            (r#"{"tokens":[4294967296]}"#, NotTokens),
            (r#"{"tokens":[18446744073709551617]}"#, NotTokens),
        ];
        for (answer, error) in cases {
            assert_eq!(token_list(RemoteApi::Tokenize, answer.as_bytes()), Err(*error), "{answer}");
        }
        assert_eq!(token_list(RemoteApi::Tokenize, b" { \"tokens\" : [ ] } "), Ok(vec![]));
        assert_eq!(token_list(RemoteApi::Tokenize, b"{\"tokens\":[4294967295 ,\n0]}"), Ok(vec![u32::MAX, 0]));
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
            prop_assert_eq!(token_list(RemoteApi::Tokenize, &text).ok(), expected.ok());
            // A truncated response gives the complete list or an error.
            let cut = text.get(..cut).unwrap_or(&text);
            if let Ok(found) = token_list(RemoteApi::Tokenize, cut) {
                prop_assert_eq!(Some(found), serde_json::from_value::<Vec<u32>>(answer["tokens"].clone()).ok());
            }
        }
    }
}
