//! Requests in the shapes that published clients send, in `tests/data/client_requests.json`.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use super::*;
use serde_json::{Value, json};

const FORM: &str = "multipart/form-data; boundary=7f3a-b";

/// The body of an entry, and its content type.
fn body(entry: &Value) -> (Vec<u8>, &'static str) {
    let Some(parts) = entry["form"].as_array() else {
        let text = entry["text"].as_str().map(str::to_owned);
        return (text.unwrap_or_else(|| entry["body"].to_string()).into_bytes(), "application/json");
    };
    let mut form = String::new();
    for part in parts {
        let file = part[1].as_str().map(|name| format!("; filename=\"{name}\"\r\nContent-Type: a/b"));
        let (name, value) = (part[0].as_str().unwrap(), part[2].as_str().unwrap());
        let file = file.unwrap_or_default();
        form += &format!("--7f3a-b\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{value}\r\n");
    }
    (format!("{form}--7f3a-b--\r\n").into_bytes(), FORM)
}

#[test]
fn requests_of_published_clients_are_read() {
    let path = format!("{}/../../tests/data/client_requests.json", env!("CARGO_MANIFEST_DIR"));
    let entries: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(entries.len() >= 40, "{} requests", entries.len());
    for entry in &entries {
        let client = entry["client"].as_str().unwrap();
        let (api, id) = Api::from_path(entry["path"].as_str().unwrap());
        assert_eq!(id, None, "{client}");
        let (body, content_type) = body(entry);
        let request = parse(api, Some(content_type), &body, &Limits::default());
        let request = request.unwrap_or_else(|error| panic!("{client}: {error}"));
        assert_eq!((request.unread_model, request.is_form), (None, content_type == FORM), "{client}");
        let model = request.model.as_ref();
        let spelled =
            model.map(|model| String::from_utf8_lossy(&body[model.span.clone()]).trim_matches('"').to_owned());
        assert_eq!(spelled.as_deref(), model.map(|model| &*model.name), "{client}: the span of the model");
        let got = json!({
            "model": model.map(|model| &*model.name),
            "stream": request.stream,
            "max_tokens": request.max_tokens,
            "choices": request.choices,
            "prompts": request.prompt.count,
            "media": request.prompt.has_media(),
            "opaque": request.opaque_prompt,
        });
        for (field, wanted) in entry["want"].as_object().unwrap() {
            assert_eq!(got.get(field), Some(wanted), "{client}: {field}");
        }
    }
}
