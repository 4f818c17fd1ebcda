//! The simulated model's tokenizer, chat template and answers. Deterministic and reversible, not linguistic. Pure.
//!
//! - A token is up to four bytes of UTF-8 text, and its id is those bytes, little-endian. About what a real tokenizer
//!   makes of English, and ids can be turned back into text without a table. (NUL bytes at the end of a text get lost
//!   that way.)
//! - Text is cut in fours from the start of each *segment*; the template begins a new segment with every role and every
//!   content. So a conversation that goes on keeps all tokens of its past, and an answer that comes back as history has
//!   the tokens with which it was generated.
//! - Ids from `0xFFFF_FF00` are the template's marks; no UTF-8 text holds a byte `0xFF`.

use xxhash_rust::xxh3::xxh3_64_with_seed;

#[cfg(test)]
mod tests;

/// Bytes of text in a full token.
pub const BYTES_PER_TOKEN: usize = 4;
/// Opens a message: `<|im_start|>`.
pub const MESSAGE_START: u32 = 0xFFFF_FF01;
/// Closes a message: `<|im_end|>`.
pub const MESSAGE_END: u32 = 0xFFFF_FF02;
/// Stands before the tokens of an image, a sound or a file.
pub const MEDIA: u32 = 0xFFFF_FF03;
/// 256 tokens for an image, a sound or a file: what common vision models make of a 448 x 448 picture.
pub const DEFAULT_MEDIA_TOKENS: u32 = 256;

/// Everything a simulated model says is made of these, each four bytes and so one token.
const VOCABULARY: [&str; 32] = [
    " the", " sea", " and", " for", " its", " was", " all", " are", " far", " new", " one", " out", " sun", " way",
    " who", " day", "ward", "ness", "ing ", "ment", "able", "less", "tion", "ally", " to ", " of ", " in ", " as ",
    " on ", " by ", " at ", " it ",
];

/// Appends the tokens of one segment of text.
pub fn encode(text: &str, tokens: &mut Vec<u32>) {
    tokens.extend(text.as_bytes().chunks(BYTES_PER_TOKEN).map(|chunk| {
        let mut bytes = [0; BYTES_PER_TOKEN];
        for (slot, byte) in bytes.iter_mut().zip(chunk) {
            *slot = *byte;
        }
        u32::from_le_bytes(bytes)
    }));
}

/// The text of tokens. Ids that are no text become U+FFFD.
#[must_use]
pub fn decode(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len() * BYTES_PER_TOKEN);
    for token in tokens {
        match *token {
            MESSAGE_START => bytes.extend_from_slice(b"<|im_start|>"),
            MESSAGE_END => bytes.extend_from_slice(b"<|im_end|>"),
            MEDIA => bytes.extend_from_slice(b"<|media|>"),
            token => {
                let raw = token.to_le_bytes();
                let length = raw.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                bytes.extend(raw.iter().take(length));
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A part of a message's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Text that is part of the prompt.
    Text(String),
    /// Something else, known by what it says (a URL, base64 data).
    Media(String),
}

/// One message as the template sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTurn {
    /// `system`, `user`, `assistant`, `tool`, …
    pub role: String,
    /// Contents of the message, in order.
    pub content: Vec<Content>,
}

impl ChatTurn {
    /// A message of plain text.
    #[must_use]
    pub fn text(role: &str, text: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: vec![Content::Text(text.into())] }
    }
}

/// Renders a conversation: for each message a start mark, `role\n`, the content, an end mark and `\n`; then, to be
/// answered, a start mark and `assistant\n`.
#[must_use]
pub fn render_chat(turns: &[ChatTurn], add_generation_prompt: bool) -> Vec<u32> {
    let mut tokens = Vec::new();
    for turn in turns {
        tokens.push(MESSAGE_START);
        encode(&format!("{}\n", turn.role), &mut tokens);
        for part in &turn.content {
            match part {
                Content::Text(text) => encode(text, &mut tokens),
                Content::Media(identity) => encode_media(identity, &mut tokens),
            }
        }
        tokens.push(MESSAGE_END);
        encode("\n", &mut tokens);
    }
    if add_generation_prompt {
        tokens.push(MESSAGE_START);
        encode("assistant\n", &mut tokens);
    }
    tokens
}

/// Media have a fixed length and tokens that follow from what they are, so that two pictures share no blocks.
fn encode_media(identity: &str, tokens: &mut Vec<u32>) {
    tokens.push(MEDIA);
    for i in 0..DEFAULT_MEDIA_TOKENS {
        tokens.push(low_half(xxh3_64_with_seed(identity.as_bytes(), u64::from(i))));
    }
}

/// Token number `index` of the answer that `seed` stands for.
#[must_use]
pub fn answer_token(seed: u64, index: u32) -> u32 {
    let mut bytes = [0; BYTES_PER_TOKEN];
    for (slot, byte) in bytes.iter_mut().zip(answer_text(seed, index).bytes()) {
        *slot = byte;
    }
    u32::from_le_bytes(bytes)
}

/// The text of that token: always four bytes of ASCII without anything that JSON escapes.
#[must_use]
pub fn answer_text(seed: u64, index: u32) -> &'static str {
    let word = xxh3_64_with_seed(&index.to_le_bytes(), seed) % VOCABULARY.len() as u64;
    usize::try_from(word).ok().and_then(|word| VOCABULARY.get(word)).copied().unwrap_or(" the")
}

#[expect(clippy::cast_possible_truncation, reason = "half of the hash is wanted")]
fn low_half(hash: u64) -> u32 {
    hash as u32
}
