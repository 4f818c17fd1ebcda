//! Images, sounds and videos in a prompt: what an encode server turns into embeddings. Documents are not among them, as in llm-d.

use crate::PickContext;
use crate::digest::Digest;
use attache_protocol::{MediaKind, Piece, Prompt};
use xxhash_rust::xxh3::xxh3_64;

/// 64 items of one request are told apart: nobody has more encode servers for it, and a comparison is as cheap as it looks.
const MOST: usize = 64;

/// How many different ones the request has, as far as they are told apart: each is encoded once. 0 as well when its prompt could not be read.
#[must_use]
pub fn items(cx: &PickContext<'_>) -> usize {
    let digest = cx.request.digest(|| "media".to_owned(), |prompt| [different(prompt)].into_iter().collect());
    let count = digest.and_then(|digest| digest.first().copied()).unwrap_or(0);
    usize::try_from(count).unwrap_or(MOST)
}

/// Whether it has any: a look at the first of them.
#[must_use]
pub fn any(cx: &PickContext<'_>) -> bool {
    let digest = cx.request.digest(
        || "has media".to_owned(),
        |prompt| [u64::from(encoded(prompt).next().is_some())].into_iter().collect(),
    );
    digest.is_some_and(|digest| digest.first() == Some(&1))
}

/// What an encode server would be asked for.
fn encoded<'p>(prompt: &'p Prompt<'_>) -> impl Iterator<Item = &'p str> {
    prompt.system.iter().chain(&prompt.pieces).filter_map(|piece| match piece {
        Piece::Media { kind, reference } if *kind != MediaKind::Document => Some(&**reference),
        _ => None,
    })
}

/// The hashes of the request's items, each once, as far as they are told apart; `None` when its prompt could not be read.
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
    fn each_is_counted_once_and_documents_are_not() {
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
