//! Reference results of real servers: text and token ids of vLLM 0.32 (`chat_vectors/vectors.json`), and six templates
//! of known model families rendered by `transformers` (`chat_vectors/template_vectors.json`).

use attache_prompt::Encoder;
use attache_prompt::huggingface::{HuggingFace, Rendered};
use attache_prompt::template::{ChatTemplate, TemplateError};
use attache_prompt::work::WorkLimit;
use attache_protocol::Api;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

#[derive(Deserialize)]
struct ChatVector {
    name: String,
    request: Box<RawValue>,
    rendered_text: String,
    token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct TemplateVectors {
    templates: BTreeMap<String, String>,
    vectors: Vec<TemplateVector>,
}

#[derive(Deserialize)]
struct TemplateVector {
    template: String,
    case: String,
    inputs: BTreeMap<String, attache_prompt::template::Value>,
    rendered: Option<String>,
    error: Option<String>,
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/chat_vectors").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn tiny() -> HuggingFace {
    let (tokenizer, config) = (data("tokenizer.json"), data("tokenizer_config.json"));
    HuggingFace::from_parts(tokenizer.as_bytes(), Some(config.as_bytes()), Some(&data("chat_template.jinja"))).unwrap()
}

fn render(model: &HuggingFace, api: Api, body: &str) -> (Rendered, Vec<u32>) {
    let rendered = model.render(api, body.as_bytes(), UNIX_EPOCH).unwrap_or_else(|e| panic!("{e}: {body}"));
    let mut ids = Vec::new();
    model.encode_rendered(&rendered, &mut ids).unwrap();
    (rendered, ids)
}

#[test]
fn chat_prompts_render_and_tokenize_as_in_vllm() {
    let model = tiny();
    let vectors: Vec<ChatVector> = serde_json::from_str(&data("vectors.json")).unwrap();
    assert_eq!(vectors.len(), 29);
    for vector in vectors {
        let (rendered, ids) = render(&model, Api::ChatCompletions, vector.request.get());
        let want = Rendered::Text { text: vector.rendered_text, add_special_tokens: false };
        assert_eq!(rendered, want, "{}", vector.name);
        assert_eq!(ids, vector.token_ids, "{}", vector.name);
    }
}

#[test]
fn parts_between_cut_marks_encode_like_the_whole_text() {
    let model = tiny();
    let marks = model.cut_marks().unwrap();
    assert_eq!(marks.len(), 9);
    let vectors: Vec<ChatVector> = serde_json::from_str(&data("vectors.json")).unwrap();
    for vector in vectors {
        let mut ids = Vec::new();
        let mut rest = vector.rendered_text.as_str();
        while let Some((at, mark)) = marks.iter().filter_map(|m| rest.find(m.as_str()).map(|at| (at, m))).min() {
            model.encode(&rest[..at], &mut ids).unwrap();
            model.encode(mark, &mut ids).unwrap();
            rest = &rest[at + mark.len()..];
        }
        model.encode(rest, &mut ids).unwrap();
        assert_eq!(ids, vector.token_ids, "{}", vector.name);
    }
}

/// Token ids from vLLM's render and tokenize endpoints for the same model.
#[test]
fn other_apis_tokenize_as_in_vllm() {
    let model = tiny();
    for (api, body, want) in [
        (Api::Completions, r#"{"prompt": "import os", "max_tokens": 5}"#, &[784, 587][..]),
        (Api::Completions, r#"{"prompt": ["import os", "import sys"]}"#, &[784, 587]),
        (
            Api::Completions,
            r#"{"prompt": "import os\nprint(os.getcwd())"}"#,
            &[784, 587, 198, 2019, 1669, 6957, 2024, 4605],
        ),
        (Api::Completions, r#"{"prompt": [300, 301, 302]}"#, &[300, 301, 302]),
        (Api::Completions, r#"{"prompt": [[300, 301], [302]]}"#, &[300, 301]),
        (
            Api::Messages,
            r#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}"#,
            &[8184, 1681, 198, 1833, 8185, 198, 8184, 3067, 621, 869, 198],
        ),
        (
            Api::Responses,
            r#"{"input": "hi there", "max_output_tokens": 5}"#,
            &[8184, 1681, 198, 1833, 1484, 8185, 198, 8184, 3067, 621, 869, 198],
        ),
    ] {
        assert_eq!(render(&model, api, body).1, want, "{body}");
    }
}

#[test]
fn chat_templates_render_as_in_transformers() {
    let file: TemplateVectors = serde_json::from_str(&data("template_vectors.json")).unwrap();
    let (mut rendered, mut refused) = (0, 0);
    for vector in file.vectors {
        let name = format!("{} {}", vector.template, vector.case);
        let template = ChatTemplate::compile(&file.templates[&vector.template]).unwrap();
        let special = [("bos_token", "<s>"), ("eos_token", "</s>")]
            .map(|(k, v)| (k.to_owned(), attache_prompt::template::Value::from(v)));
        let got =
            template.render(special.into_iter().chain(vector.inputs), 0, UNIX_EPOCH, &WorkLimit::within(usize::MAX));
        match (vector.rendered, vector.error) {
            (Some(want), None) => {
                assert_eq!(got.unwrap_or_else(|e| panic!("{name}: {e}")), want, "{name}");
                rendered += 1;
            }
            (None, Some(error)) => {
                let Err(TemplateError::Failed(reason)) = got else { panic!("{name}: got {got:?}, want {error}") };
                // Messages of raise_exception must be kept. Python's own errors have other words.
                if let Some(message) = error.strip_prefix("TemplateError: ") {
                    assert!(reason.contains(message), "{name}: {reason}");
                }
                refused += 1;
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    assert_eq!((rendered, refused), (52, 8));
}
