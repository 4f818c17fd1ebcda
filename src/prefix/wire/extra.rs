//! The attributes of a block besides its tokens, from an event's `extra_keys`: adapter, cache salt, images.
//!
//! Two forms are decoded. Untagged: `[lora name?, image…, salt?]`, an image being its hash or `[hash, offset]`. Tagged
//! tuples: `["lora", name, path]`, `["mm", hash, offset]`, `["cache_salt", salt]`, `["prompt_embeds", digest]`.

use super::msgpack::{Malformed, Reader, Value};
use crate::key::{BlockKey, KeySpace};

/// Writes what an image, or other content besides tokens, adds to the key of an engine's block: its hash,
/// then its offset from the block's start if the engine reports one. [`KeySpace::with_extra`] mixes it in,
/// image by image in prompt order.
///
/// This keeps blocks with equal token ids and different images apart. Requests never match such blocks, because Attaché
/// cannot know how an engine hashes an image and where it puts its ids. Prompts with media have keys of their own
/// ([`Found::has_own_keys`](crate::cache::Found::has_own_keys)), and their blocks are estimated from routed requests.
pub(crate) fn multimodal_content(hash: &[u8], offset: Option<i64>, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(hash);
    if let Some(offset) = offset {
        out.extend_from_slice(&offset.to_le_bytes());
    }
}

/// One entry of a block's extra keys.
enum Extra<'a> {
    /// The adapter, which is part of the root.
    Lora,
    Salt(&'a [u8]),
    Content(&'a [u8], Option<i64>),
    /// An unknown entry; its bytes separate the block from others.
    Unknown(&'a [u8]),
}

/// Context of one block's extra keys.
#[derive(Clone, Copy)]
pub(super) struct ExtraContext<'a> {
    /// The adapter named by the event.
    pub(super) lora: Option<&'a [u8]>,
    /// Whether this is the first block of a prompt, the only one with a salt.
    pub(super) is_root: bool,
}

/// Mixes one block's extra keys into its key. Returns the cache salt, if there is one.
pub(super) fn mix<'a>(
    reader: &mut Reader<'a>,
    place: ExtraContext<'_>,
    keys: KeySpace,
    key: &mut BlockKey,
    buffer: &mut Vec<u8>,
) -> Result<Option<&'a [u8]>, Malformed> {
    let n = match reader.value()? {
        Value::Array(n) => n,
        Value::Map(n) => {
            // No engine sends a map here, so its content separates nothing.
            for _ in 0..2 * u64::from(n) {
                reader.skip()?;
            }
            return Ok(None);
        }
        _ => return Ok(None),
    };
    let mut salt = None;
    for i in 0..n {
        match entry(reader, place, i == 0, i + 1 == n)? {
            Extra::Lora => {}
            Extra::Salt(s) => salt = Some(s),
            Extra::Content(hash, offset) => {
                multimodal_content(hash, offset, buffer);
                *key = keys.with_extra(*key, buffer);
            }
            Extra::Unknown(bytes) => *key = keys.with_extra(*key, bytes),
        }
    }
    Ok(salt)
}

fn entry<'a>(
    reader: &mut Reader<'a>,
    place: ExtraContext<'_>,
    is_first: bool,
    is_last: bool,
) -> Result<Extra<'a>, Malformed> {
    let start = *reader;
    Ok(match reader.value()? {
        Value::Str(s) if is_first && place.lora == Some(s) => Extra::Lora,
        Value::Str(s) if place.is_root && is_last => Extra::Salt(s),
        Value::Str(s) | Value::Bin(s) => Extra::Content(s, None),
        Value::Array(n) => {
            let mut after = start;
            after.skip()?;
            let tuple = tuple(reader, n)?;
            *reader = after;
            tuple.unwrap_or(Extra::Unknown(start.until(&after)))
        }
        _ => {
            *reader = start;
            reader.skip()?;
            Extra::Unknown(start.until(reader))
        }
    })
}

/// Decodes the tuple whose `n` members come next, if its tag is known.
fn tuple<'a>(reader: &mut Reader<'a>, n: u32) -> Result<Option<Extra<'a>>, Malformed> {
    if n < 2 {
        return Ok(None);
    }
    let Value::Str(first) = reader.value()? else { return Ok(None) };
    let second = reader.value()?;
    Ok(match (first, second) {
        (hash, Value::Uint(_) | Value::Int(_)) => Some(Extra::Content(hash, integer(second))),
        (b"lora", _) => Some(Extra::Lora),
        (b"cache_salt", Value::Str(salt)) => Some(Extra::Salt(salt)),
        (b"mm", Value::Str(hash)) => {
            let offset = if n > 2 { integer(reader.value()?) } else { None };
            Some(Extra::Content(hash, offset))
        }
        (b"prompt_embeds", Value::Str(digest) | Value::Bin(digest)) => Some(Extra::Content(digest, None)),
        _ => None,
    })
}

fn integer(value: Value<'_>) -> Option<i64> {
    match value {
        Value::Uint(v) => i64::try_from(v).ok(),
        Value::Int(v) => Some(v),
        _ => None,
    }
}
