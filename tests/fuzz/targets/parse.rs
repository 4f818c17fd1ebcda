//! Request bodies: the first byte selects the API, the rest is the body. Nothing panics, and an accepted body is JSON.
//! The model is at its span and can be replaced there. A rejection does not repeat the client's text.
#![no_main]

use attache_types::limits::Limits;
use attache_protocol::{Api, BodyFormat, parse, replace_form_model, replace_model};
use libfuzzer_sys::fuzz_target;

/// No sequence of this many bytes of the body may appear in a message.
const LEAK: usize = 32;

fuzz_target!(|data: &[u8]| {
    let Some((choice, body)) = data.split_first() else { return };
    let api = Api::ALL[usize::from(*choice) % Api::ALL.len()];
    let content_type = match api.body_format() {
        BodyFormat::Multipart => Some("multipart/form-data; boundary=X"),
        _ => None,
    };
    let limits = Limits { max_messages: 50, max_prompts: 20, max_json_values: 2_000, ..Limits::default() };
    match parse(api, content_type, body, &limits) {
        Ok(request) => {
            if api.body_format() == BodyFormat::Json {
                assert!(serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok(), "accepted what is no JSON");
            }
            let _ = request.prompt.estimated_tokens();
            let Some(model) = request.model.filter(|m| !m.span.is_empty()) else { return };
            let rewritten = if api.body_format() == BodyFormat::Multipart {
                assert_eq!(&body[model.span.clone()], model.name.as_bytes(), "the span is not the part's text");
                replace_form_model(body, model.span, "re\"written")
            } else {
                let name: String =
                    serde_json::from_slice(&body[model.span.clone()]).expect("the span is no JSON string");
                assert_eq!(name, model.name);
                replace_model(body, model.span, "re\"written")
            };
            let again = parse(api, content_type, &rewritten, &limits).expect("a rewrite broke the body");
            assert_eq!(again.model.expect("a rewrite lost the model").name, "re\"written");
        }
        Err(error) => {
            for run in error.message.as_bytes().windows(LEAK) {
                assert!(memchr::memmem::find(body, run).is_none(), "a message repeats the body: {error}");
            }
        }
    }
});
