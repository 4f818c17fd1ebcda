//! Conversion of a client's request to a tokenizer request: the members that affect the prompt,
//! as the client wrote them.

use super::settings::RemoteApi;
use attache_prompt::remote::TokenCall;
use attache_protocol::Api;
use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Members of a chat that `/tokenize` supports.
const TOKENIZE_CHAT: &[&str] = &[
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
];
/// Members of a text completion that `/tokenize` supports.
const TOKENIZE_COMPLETION: &[&str] = &["prompt", "add_special_tokens"];
/// Members that are not passed to `render`: those about sampling, delivery and accounting of the response. All
/// others may affect the prompt.
const NOT_RENDERED: &[&str] = &[
    "best_of",
    "cache_salt",
    "echo",
    "frequency_penalty",
    "ignore_eos",
    "kv_transfer_params",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "metadata",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "prompt_logprobs",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
];

/// Members of the Responses API that continue state of one server.
const CONTINUES: &[&str] = &["previous_response_id", "conversation"];

/// A tokenizer request.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) path: &'static str,
    pub(super) body: Bytes,
}

impl Call {
    /// Returns the call for a client's request, or the reason for which the tokenizer does not support it.
    pub(super) fn new(api: RemoteApi, ask: &TokenCall<'_>) -> Result<Self, &'static str> {
        let ObjectMembers(fields) = serde_json::from_slice(ask.body).map_err(|_| "the body is no JSON object")?;
        let path = place(api, ask.api).ok_or("the tokenizer doesn't know this API")?;
        let mut body = CallBody::new(ask.model);
        for (key, value) in &fields {
            let key = key.as_ref();
            match (api, ask.api) {
                // The text of the other response is on the server that created it.
                (_, Api::Responses) if CONTINUES.contains(&key) && value.get() != "null" => {
                    return Err("the request continues a stored response");
                }
                (_, Api::Completions) if key == "prompt" => body.field(key, first_prompt(value)?),
                // The server truncates the prompt after tokenizing it; `/tokenize` does not.
                (RemoteApi::Tokenize, _) if key == "truncate_prompt_tokens" && value.get() != "null" => {
                    return Err("/tokenize doesn't truncate prompts");
                }
                (RemoteApi::Tokenize, Api::ChatCompletions) if key == "documents" && value.get() != "null" => {
                    return Err("/tokenize doesn't know documents");
                }
                (RemoteApi::Tokenize, Api::ChatCompletions) if TOKENIZE_CHAT.contains(&key) => {
                    body.field(key, value.get());
                }
                (RemoteApi::Tokenize, Api::Completions) if TOKENIZE_COMPLETION.contains(&key) => {
                    body.field(key, value.get());
                }
                (RemoteApi::Render, _) if key != "model" && !NOT_RENDERED.contains(&key) => {
                    body.field(key, value.get())
                }
                _ => {}
            }
        }
        if api == RemoteApi::Render && ask.api != Api::Responses {
            // Messages require a limit of the response; the smallest one never makes a prompt too long.
            body.field("max_tokens", "1");
        }
        Ok(Self { path, body: body.finish() })
    }

    /// Returns a call that any server of `model` can answer.
    pub(super) fn probe(api: RemoteApi, model: &str) -> Self {
        let path = match api {
            RemoteApi::Tokenize => "/tokenize",
            RemoteApi::Render => "/v1/completions/render",
        };
        let mut body = CallBody::new(model);
        body.field("prompt", "\"a\"");
        if api == RemoteApi::Render {
            body.field("max_tokens", "1");
        }
        Self { path, body: body.finish() }
    }

    /// Returns a hash that identifies the call.
    pub(super) fn key(&self, seed: u64) -> u128 {
        // All paths have different lengths.
        xxh3_128_with_seed(&self.body, seed ^ self.path.len() as u64)
    }
}

fn place(api: RemoteApi, of: Api) -> Option<&'static str> {
    match (api, of) {
        (RemoteApi::Tokenize, Api::ChatCompletions | Api::Completions) => Some("/tokenize"),
        (RemoteApi::Render, Api::ChatCompletions) => Some("/v1/chat/completions/render"),
        (RemoteApi::Render, Api::Completions) => Some("/v1/completions/render"),
        (RemoteApi::Render, Api::Messages) => Some("/v1/messages/render"),
        (RemoteApi::Render, Api::Responses) => Some("/v1/responses/render"),
        _ => None,
    }
}

/// Of a batch, returns the first prompt, which routing uses.
fn first_prompt(value: &RawValue) -> Result<&str, &'static str> {
    let text = value.get();
    if text.starts_with('"') {
        return Ok(text);
    }
    let prompts: Vec<&RawValue> = serde_json::from_str(text).map_err(|_| "the prompt is neither text nor a list")?;
    let first = prompts.first().ok_or("the list of prompts is empty")?.get();
    if first.starts_with('"') { Ok(first) } else { Err("the prompt is token ids already") }
}

/// The members of an object, in order.
struct ObjectMembers<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

#[derive(Deserialize)]
struct MemberKey<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de> Deserialize<'de> for ObjectMembers<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = ObjectMembers<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ObjectMembers<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some((MemberKey(key), value)) = map.next_entry()? {
                    fields.push((key, value));
                }
                Ok(ObjectMembers(fields))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// A JSON object that is written member by member.
struct CallBody(Vec<u8>);

impl CallBody {
    fn new(model: &str) -> Self {
        let mut body = Self(b"{\"model\":".to_vec());
        body.text(model);
        body
    }

    fn text(&mut self, text: &str) {
        self.0.extend_from_slice(serde_json::Value::from(text).to_string().as_bytes());
    }

    fn field(&mut self, key: &str, value: &str) {
        self.0.push(b',');
        self.text(key);
        self.0.push(b':');
        self.0.extend_from_slice(value.as_bytes());
    }

    fn finish(mut self) -> Bytes {
        self.0.push(b'}');
        self.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn call(remote: RemoteApi, api: Api, body: &Value) -> Result<(&'static str, Value), &'static str> {
        let body = body.to_string();
        let call = Call::new(remote, &TokenCall { model: "served\"name", api, body: body.as_bytes() })?;
        Ok((call.path, serde_json::from_slice(&call.body).unwrap()))
    }

    #[test]
    fn tokenize_receives_what_affects_the_prompt() {
        let chat = json!({
            "model": "mine", "messages": [{"role": "user", "content": "a\"é\n"}], "tools": [{"type": "function"}], "temperature": 0.5,
            "stream": true, "add_generation_prompt": false, "chat_template_kwargs": {"enable_thinking": false},
            "documents": null,
        });
        let expected = json!({
            "model": "served\"name", "messages": chat["messages"], "tools": chat["tools"],
            "add_generation_prompt": false,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        assert_eq!(call(RemoteApi::Tokenize, Api::ChatCompletions, &chat), Ok(("/tokenize", expected)));
        let text = json!({"prompt": "a", "max_tokens": 4, "add_special_tokens": false, "messages": []});
        let expected = json!({"model": "served\"name", "prompt": "a", "add_special_tokens": false});
        assert_eq!(call(RemoteApi::Tokenize, Api::Completions, &text), Ok(("/tokenize", expected)));
        let batch = call(RemoteApi::Tokenize, Api::Completions, &json!({"prompt": ["a", "b"]})).unwrap();
        assert_eq!(batch.1["prompt"], "a");
    }

    #[test]
    fn render_receives_all_but_response_settings() {
        let body = json!({"model": "mine", "input": "hi", "instructions": "be brief",
            "max_output_tokens": 5, "stream": true, "x": [1.50]});
        let expected = json!({"model": "served\"name", "input": "hi", "instructions": "be brief", "x": [1.50]});
        assert_eq!(call(RemoteApi::Render, Api::Responses, &body), Ok(("/v1/responses/render", expected)));
        for (api, path) in [
            (Api::Messages, "/v1/messages/render"),
            (Api::ChatCompletions, "/v1/chat/completions/render"),
            (Api::Completions, "/v1/completions/render"),
        ] {
            let body = json!({"messages": [], "prompt": "a", "documents": [1], "reasoning_effort": "low",
            "max_tokens": 9, "top_p": 1});
            let expected = json!({
                "model": "served\"name", "messages": [], "prompt": "a", "documents": [1], "reasoning_effort": "low",
                "max_tokens": 1,
            });
            assert_eq!(call(RemoteApi::Render, api, &body), Ok((path, expected)));
        }
    }

    #[test]
    fn unsupported_requests_are_not_sent() {
        let refused = |remote, api, body: Value| call(remote, api, &body).unwrap_err();
        for remote in [RemoteApi::Tokenize, RemoteApi::Render] {
            assert!(refused(remote, Api::Embeddings, json!({})).contains("API"));
            assert!(refused(remote, Api::Completions, json!({"prompt": [1, 2]})).contains("ids"));
            assert!(refused(remote, Api::Completions, json!({"prompt": [[1, 2]]})).contains("ids"));
            assert!(refused(remote, Api::Completions, json!({"prompt": []})).contains("empty"));
            assert!(refused(remote, Api::Completions, json!({"prompt": 1})).contains("neither"));
            assert!(refused(remote, Api::Completions, json!([])).contains("object"));
        }
        assert!(refused(RemoteApi::Tokenize, Api::Messages, json!({})).contains("API"));
        assert!(refused(RemoteApi::Tokenize, Api::ChatCompletions, json!({"documents": [{}]})).contains("documents"));
        for api in [Api::ChatCompletions, Api::Completions] {
            let cut = |n: Value| json!({"messages": [], "prompt": "a", "truncate_prompt_tokens": n});
            assert!(refused(RemoteApi::Tokenize, api, cut(json!(5))).contains("truncate"));
            assert!(call(RemoteApi::Tokenize, api, &cut(json!(null))).is_ok());
            assert_eq!(call(RemoteApi::Render, api, &cut(json!(5))).unwrap().1["truncate_prompt_tokens"], 5);
        }
        assert!(
            refused(RemoteApi::Render, Api::Responses, json!({"previous_response_id": "resp_1"})).contains("stored")
        );
    }

    #[test]
    fn keys_distinguish_prompts_and_nothing_else() {
        let key = |api, body: Value, seed| {
            let body = body.to_string();
            Call::new(RemoteApi::Render, &TokenCall { model: "m", api, body: body.as_bytes() }).unwrap().key(seed)
        };
        let base = key(Api::ChatCompletions, json!({"messages": ["a"]}), 1);
        assert_eq!(
            base,
            key(Api::ChatCompletions, json!({"messages": ["a"], "temperature": 1, "user": "x", "max_tokens": 7}), 1)
        );
        assert_ne!(base, key(Api::ChatCompletions, json!({"messages": ["b"]}), 1));
        assert_ne!(base, key(Api::Messages, json!({"messages": ["a"]}), 1));
        assert_ne!(base, key(Api::ChatCompletions, json!({"messages": ["a"]}), 2));
        let paths = [Api::ChatCompletions, Api::Completions, Api::Messages, Api::Responses];
        let lengths: std::collections::BTreeSet<_> =
            paths.iter().filter_map(|api| place(RemoteApi::Render, *api)).map(str::len).collect();
        assert_eq!(lengths.len(), paths.len());
    }
}
