//! Images, sounds and videos in a prompt, which an encode server turns into embeddings. Documents are not among them,
//! as in llm-d.

use crate::PickContext;
use crate::digest::Digest;
use attache_protocol::{MediaKind, Piece, Prompt};
use xxhash_rust::xxh3::xxh3_64;

/// At most 64 different items of one request are counted, more than there are encode servers for it. Keeps the linear
/// search for duplicates cheap.
const MOST: usize = 64;

/// Number of different items, at most 64; each is encoded once. 0 if the prompt could not be read.
#[must_use]
pub fn items(cx: &PickContext<'_>) -> usize {
    let digest = cx.request.digest(|| "media".to_owned(), |prompt| [different(prompt)].into_iter().collect());
    let count = digest.and_then(|digest| digest.first().copied()).unwrap_or(0);
    usize::try_from(count).unwrap_or(MOST)
}

/// Whether the request has an item; stops at the first one.
#[must_use]
pub fn any(cx: &PickContext<'_>) -> bool {
    let digest = cx.request.digest(
        || "has media".to_owned(),
        |prompt| [u64::from(encoded(prompt).next().is_some())].into_iter().collect(),
    );
    digest.is_some_and(|digest| digest.first() == Some(&1))
}

/// References of the media that an encode server encodes.
fn encoded<'p>(prompt: &'p Prompt<'_>) -> impl Iterator<Item = &'p str> {
    prompt.system.iter().chain(&prompt.pieces).filter_map(|piece| match piece {
        Piece::Media { kind, reference } if *kind != MediaKind::Document => Some(&**reference),
        _ => None,
    })
}

/// Hashes of the request's different items, at most 64; `None` if its prompt could not be read.
#[must_use]
pub fn hashes(cx: &PickContext<'_>) -> Option<Digest> {
    cx.request.digest(|| "media hashes".to_owned(), distinct)
}

fn different(prompt: &Prompt<'_>) -> u64 {
    distinct(prompt).len() as u64
}

fn distinct(prompt: &Prompt<'_>) -> Digest {
    let mut seen = Digest::new();
    for reference in encoded(prompt) {
        if seen.len() == MOST {
            break;
        }
        let hash = xxh3_64(reference.as_bytes());
        if !seen.contains(&hash) {
            seen.push(hash);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    #[test]
    fn items_are_counted_once_and_documents_are_not() {
        let media = |kind, reference: &'static str| Piece::Media { kind, reference: Cow::Borrowed(reference) };
        let (image, sound) = (media(MediaKind::Image, "a"), media(MediaKind::Audio, "b"));
        let of = |pieces: Vec<Piece<'static>>| different(&Prompt { pieces, ..Prompt::default() });
        assert_eq!(of(vec![]), 0);
        assert_eq!(of(vec![image.clone(), media(MediaKind::Document, "c")]), 1);
        assert_eq!(of(vec![image.clone(), sound.clone(), image.clone()]), 2);
        assert_eq!(different(&Prompt { system: vec![sound], pieces: vec![image], ..Prompt::default() }), 2);
        let many = (0..100).map(|n| Piece::Media { kind: MediaKind::Image, reference: Cow::Owned(n.to_string()) });
        assert_eq!(of(many.collect()), MOST as u64);
    }
}
