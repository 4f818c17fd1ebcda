//! The body of a request: prompts as text, made from the names of their pieces.
//!
//! Every piece is exactly four bytes a token, so a text is cut in the same places wherever it stands: the
//! simulated tokenizer makes of a piece as many tokens as the workload says, and equal pieces are equal tokens. A
//! real tokenizer makes about one token of each word or ending, so real servers count about as many tokens, and
//! equal pieces still begin equally.
//!
//! Called by [`mod@super::exchange`]. Pure.

use super::LiveApi;
use attache_sim::content::{Piece, mix};
use attache_sim::tokenizer::{BYTES_PER_TOKEN, answer_text};
use attache_workload::{PromptPart, Request, Speaker};
use serde::Serialize;
use std::sync::Arc;

/// Appends the text of `piece` under `seed`: four bytes of ASCII a token, nothing that JSON escapes.
pub(super) fn write(seed: u64, piece: Piece, out: &mut String) {
    let text = mix(piece.name ^ mix(seed));
    out.reserve(piece.tokens as usize * BYTES_PER_TOKEN);
    for i in 0..piece.tokens {
        out.push_str(answer_text(text, piece.from.wrapping_add(i)));
    }
}

/// How a body is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyWriter<'w> {
    pub(super) api: LiveApi,
    /// Of requests without an adapter.
    pub(super) model: &'w str,
    pub(super) stream: bool,
    pub(super) seed: u64,
}

#[derive(Serialize)]
struct RequestBody<'b> {
    model: &'b str,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<ChatMessage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    max_tokens: u32,
    /// vLLM's and SGLang's: the answer is as long as the workload says.
    ignore_eos: bool,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct ChatMessage {
    role: &'static str,
    content: String,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The JSON of `request`. `quotes` holds what servers really said, for each part of the prompt of which that is known.
pub(super) fn body(
    request: &Request,
    quotes: &[Option<Arc<str>>],
    writing: BodyWriter<'_>,
) -> serde_json::Result<Vec<u8>> {
    let BodyWriter { api, model, stream, seed } = writing;
    let mut quotes = quotes.iter();
    let mut say = |parts: &[PromptPart]| {
        let mut out = String::new();
        for part in parts {
            match quotes.next() {
                Some(Some(said)) => out.push_str(said),
                _ => write(seed, part.piece, &mut out),
            }
        }
        out
    };
    let (messages, prompt) = match api {
        LiveApi::Completions => (None, Some(say(&request.prompt))),
        LiveApi::Chat => {
            let runs = request.prompt.chunk_by(|a, b| a.role == b.role);
            let message =
                |parts: &[PromptPart]| ChatMessage { role: parts.first().map_or("user", role), content: say(parts) };
            (Some(runs.map(message).collect()), None)
        }
    };
    serde_json::to_vec(&RequestBody {
        model: request.adapter.as_deref().unwrap_or(model),
        messages,
        prompt,
        max_tokens: request.answer.tokens,
        ignore_eos: true,
        stream,
        stream_options: stream.then_some(StreamOptions { include_usage: true }),
    })
}

fn role(part: &PromptPart) -> &'static str {
    match part.role {
        Speaker::System => "system",
        Speaker::User => "user",
        Speaker::Assistant => "assistant",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_sim::tokenizer::encode;
    use attache_types::clock::Timestamp;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn text(seed: u64, pieces: &[Piece]) -> String {
        let mut out = String::new();
        pieces.iter().for_each(|piece| write(seed, *piece, &mut out));
        out
    }

    fn tokens(text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        encode(text, &mut tokens);
        tokens
    }

    fn request(prompt: &[(Speaker, Piece)]) -> Request {
        Request {
            number: 0,
            at: Timestamp(0),
            prompt: prompt.iter().map(|(role, piece)| PromptPart::text(*role, *piece)).collect(),
            answer: Piece::new(99, 7),
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        }
    }

    fn json_of(request: &Request, quotes: &[Option<Arc<str>>], api: LiveApi, stream: bool) -> Value {
        let body = body(request, quotes, BodyWriter { api, model: "base", stream, seed: 1 }).unwrap();
        serde_json::from_slice(&body).unwrap()
    }

    #[test]
    fn neighbours_with_one_role_are_one_message_and_answers_are_what_was_said() {
        use Speaker::{Assistant, System, User};
        let parts = [
            (System, Piece::new(1, 3)),
            (System, Piece::new(2, 2)),
            (User, Piece::new(3, 1)),
            (Assistant, Piece::new(4, 2)),
            (User, Piece::new(5, 4)),
        ];
        let quotes = [None, None, None, Some(Arc::from("so \"he\" said\n")), None];
        let body = json_of(&request(&parts), &quotes, LiveApi::Chat, true);
        assert_eq!(body["messages"].as_array().unwrap().len(), 4, "{body}");
        let head = text(1, &[Piece::new(1, 3), Piece::new(2, 2)]);
        assert_eq!(body["messages"][0], json!({"role": "system", "content": head}));
        assert_eq!(body["messages"][2], json!({"role": "assistant", "content": "so \"he\" said\n"}));
        assert_eq!(
            (&body["max_tokens"], &body["ignore_eos"], &body["model"]),
            (&json!(7), &json!(true), &json!("base"))
        );
        assert_eq!((&body["stream"], &body["stream_options"]), (&json!(true), &json!({"include_usage": true})));
        assert!(body.get("prompt").is_none());
    }

    #[test]
    fn a_completion_is_one_text_and_an_adapter_is_its_model() {
        let mut request = request(&[(Speaker::System, Piece::new(1, 30)), (Speaker::User, Piece::new(2, 5))]);
        request.adapter = Some(Arc::from("french"));
        let body = json_of(&request, &[], LiveApi::Completions, false);
        let prompt = body["prompt"].as_str().unwrap();
        assert_eq!(tokens(prompt).len(), 35, "as many tokens as the workload says");
        assert_eq!(prompt, text(1, &[Piece::new(1, 30), Piece::new(2, 5)]));
        assert_eq!((&body["model"], &body["stream"]), (&json!("french"), &json!(false)));
        assert!(body.get("messages").is_none() && body.get("stream_options").is_none());
    }

    #[test]
    fn names_and_seeds_tell_texts_apart() {
        let of = |seed, name| text(seed, &[Piece::new(name, 16)]);
        assert_eq!(of(1, 2), of(1, 2));
        assert_ne!(of(1, 2), of(1, 3));
        assert_ne!(of(1, 2), of(2, 2));
    }

    proptest! {
        #[test]
        fn a_piece_has_its_tokens_and_its_place_in_the_text(
            name in any::<u64>(), cuts in prop::collection::vec(0u32..40, 1..8), before in 0u32..9
        ) {
            let whole = Piece::new(name, cuts.iter().sum());
            let mut pieces = vec![Piece::new(!name, before)];
            let mut from = 0;
            for cut in &cuts {
                pieces.push(Piece { name, from, tokens: *cut });
                from += cut;
            }
            let (all, alone) = (tokens(&text(5, &pieces)), tokens(&text(5, &[whole])));
            prop_assert_eq!(alone.len() as u32, whole.tokens);
            prop_assert_eq!(&all[before as usize..], &alone[..], "wherever it stands and however it is cut");
            let json = serde_json::to_string(&text(5, &pieces)).unwrap();
            prop_assert_eq!(json.len(), all.len() * 4 + 2, "nothing is escaped");
        }
    }
}
