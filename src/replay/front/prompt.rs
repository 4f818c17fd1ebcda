//! A simulated request as the picker takes it: sizes, block keys, and text for strategies that read it.

use attache_picker::known::{KnownBlocks, KnownKeys, KnownRequest};
use attache_prefix::key::BlockKey;
use attache_protocol::{self as protocol, MediaKind, Model, Piece, Prompt};
use attache_sim::content::{Contents, mix};
use attache_sim::tokenizer::answer_text;
use attache_workload::{PromptPart, Request, Speaker};
use std::sync::OnceLock;

/// 4 bytes of a body stand for a token of a prompt.
const BYTES_PER_TOKEN: u64 = 4;

/// The request as the picker takes it, for `pool` and `model`.
pub(super) fn known<'r>(
    request: &'r Request,
    pool: &'r str,
    model: Option<&'r str>,
    text: Option<&'r Prompt<'r>>,
    keys: &'r PromptBlocks<'r>,
) -> KnownRequest<'r> {
    let prompt_tokens = request.prompt_tokens();
    let images = || request.prompt.iter().filter(|part| part.is_image).map(|part| part.piece);
    let media_tokens = images().map(|image| u64::from(image.tokens)).sum();
    KnownRequest {
        pool,
        request: Some(protocol::Request {
            model: model.map(|name| Model { name: name.into(), span: 0..0 }),
            prompt: Prompt {
                pieces: images().map(image).collect(),
                token_ids: u64::from(prompt_tokens).saturating_sub(media_tokens),
                media_tokens,
                count: 1,
                ..Prompt::default()
            },
            stream: true,
            max_tokens: Some(request.answer.tokens),
            ..Default::default()
        }),
        text,
        bytes: u64::from(prompt_tokens) * BYTES_PER_TOKEN,
        prompt_tokens,
        priority: request.priority,
        answer_tokens: request.answer.tokens,
        keys,
        recorded: None,
    }
}

/// Computes the block keys of a prompt, once.
#[derive(Debug)]
pub(super) struct PromptBlocks<'r> {
    request: &'r Request,
    /// The model of requests without an adapter.
    base: &'r str,
    block_size: u32,
    /// The tenant whose blocks the servers keep apart.
    tenant: Option<&'r str>,
    /// The keys, and the contents so far, which the response extends.
    made: OnceLock<(Vec<BlockKey>, Contents)>,
}

impl<'r> PromptBlocks<'r> {
    /// The prompt of `request`, in blocks of `block_size` tokens that belong to `tenant`.
    pub(super) fn new(request: &'r Request, base: &'r str, block_size: u32, tenant: Option<&'r str>) -> Self {
        Self { request, base, block_size, tenant, made: OnceLock::new() }
    }

    /// The contents of the prompt, which the response extends; empty if nothing has needed its keys.
    pub(super) fn into_contents(self) -> Contents {
        self.made.into_inner().map_or_else(|| Contents::new(self.block_size), |(_, contents)| contents)
    }
}

impl KnownKeys for PromptBlocks<'_> {
    fn blocks(&self, model: &str) -> Option<KnownBlocks<'_>> {
        let make = || {
            let mut contents = Contents::new(self.block_size);
            let adapter = Some(model).filter(|model| *model != self.base);
            (keys(self.request, (adapter, self.tenant), &mut contents), contents)
        };
        // As live: KV events of prompts with images have other keys.
        let own_keys = self.request.prompt.iter().any(|part| part.is_image);
        Some(KnownBlocks { keys: &self.made.get_or_init(make).0, own_keys, cold: false, cut: false, tokens: None })
    }
}

/// The value that the first key of a prompt is combined with, since adapters do not share cached blocks; 0 without an
/// adapter.
pub(crate) fn root(adapter: Option<&str>) -> u64 {
    adapter.map_or(0, |name| name.bytes().fold(1, |hash, byte| mix(hash ^ u64::from(byte))))
}

/// The keys of the prompt's full blocks.
fn keys(request: &Request, (adapter, tenant): (Option<&str>, Option<&str>), contents: &mut Contents) -> Vec<BlockKey> {
    let mut keys = Vec::new();
    for part in &request.prompt {
        contents.push(part.piece, |content| keys.push(BlockKey(content)));
    }
    if let Some(first) = keys.first_mut() {
        // Mixed, so that an adapter and a tenant with one name differ.
        first.0 ^= root(adapter) ^ tenant.map_or(0, |tenant| mix(root(Some(tenant))));
    }
    keys
}

/// An image of a prompt.
fn image(image: attache_sim::content::Piece) -> Piece<'static> {
    Piece::Media { kind: MediaKind::Image, reference: format!("{:016x}", image.name).into() }
}

/// The prompt as text, for strategies that read it: four letters for each token, equal for equal tokens. Images stay
/// references.
pub(super) fn text(request: &Request) -> Prompt<'static> {
    let mut prompt = Prompt { count: 1, ..Prompt::default() };
    for parts in request.prompt.chunk_by(|a, b| a.role == b.role) {
        prompt.pieces.extend(parts.first().map(|part| Piece::Role(role(part.role).into())));
        for parts in parts.chunk_by(|a, b| !a.is_image && !b.is_image) {
            let mut text = String::new();
            for PromptPart { piece, is_image, .. } in parts {
                if *is_image {
                    prompt.media_tokens += u64::from(piece.tokens);
                    prompt.pieces.push(image(*piece));
                    continue;
                }
                for i in piece.from..piece.from.saturating_add(piece.tokens) {
                    text.push_str(answer_text(piece.name, i));
                }
            }
            prompt.text_bytes += text.len() as u64;
            prompt.pieces.extend(Some(text).filter(|text| !text.is_empty()).map(|text| Piece::Text(text.into())));
        }
    }
    prompt
}

fn role(speaker: Speaker) -> &'static str {
    match speaker {
        Speaker::System => "system",
        Speaker::User => "user",
        Speaker::Assistant => "assistant",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_sim::content::Piece as Named;
    use attache_types::clock::Timestamp;

    #[test]
    fn image_in_a_prompt_is_media_between_texts() {
        let user = |name, tokens| PromptPart::text(Speaker::User, Named::new(name, tokens));
        let request = Request {
            number: 0,
            at: Timestamp(0),
            prompt: vec![user(1, 2), PromptPart::image(2, 30), user(3, 1)],
            answer: Named::new(4, 1),
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        };
        let text = text(&request);
        let kinds = ["role", "text", "media", "text"];
        let kind = |piece: &Piece<'_>| match piece {
            Piece::Role(_) => "role",
            Piece::Text(_) => "text",
            Piece::Media { .. } => "media",
            _ => "other",
        };
        assert_eq!(text.pieces.iter().map(kind).collect::<Vec<_>>(), kinds);
        assert_eq!((text.text_bytes, text.media_tokens), (3 * BYTES_PER_TOKEN, 30));
        let keys = PromptBlocks::new(&request, "m", 16, None);
        let prompt =
            known(&request, "p", Some("m"), None, &keys).request.map(|request| request.prompt).unwrap_or_default();
        assert_eq!((prompt.token_ids, prompt.media_tokens, prompt.has_media()), (3, 30, true));
        let blocks = keys.blocks("m").unwrap_or_default();
        assert_eq!((blocks.keys.len(), blocks.own_keys), (2, true), "no KV events match prompts with images");
    }
}
