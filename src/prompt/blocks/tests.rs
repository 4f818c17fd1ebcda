use super::*;
use crate::memo::DEFAULT_SEGMENT_BYTES;
use crate::pieces::tests::prompt;
use attache_prefix::key::Root;
use attache_protocol::prompt::Piece;
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One id per byte, but a space and the word after it are one id, so cuts at words are valid. Counts its input.
#[derive(Debug, Default)]
struct Toy {
    bytes: AtomicUsize,
    poison: Option<char>,
}

impl Encoder for Toy {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.bytes.fetch_add(text.len(), Ordering::Relaxed);
        if self.poison.is_some_and(|p| text.contains(p)) {
            return Err(EncodeError::Failed("poison".to_owned()));
        }
        out.extend(text.bytes().map(u32::from));
        Ok(())
    }
}

fn blocks(size: usize, encoder: Toy) -> TokenBlocks {
    let cuts = Cuts::new([], true);
    let block_size = Arc::new(BlockSize::given(u32::try_from(size).unwrap()));
    TokenBlocks { block_size, ..TokenBlocks::new(KeySpace::new(9), Arc::new(encoder), cuts) }
}

fn hash(blocks: &TokenBlocks, ids: &[u32], root: u64) -> Vec<BlockKey> {
    let key = |(i, block): (usize, &[u32])| {
        let bytes: Vec<u8> = block.iter().flat_map(|id| id.to_le_bytes()).collect();
        if i == 0 { blocks.space.first(root, &bytes) } else { blocks.space.next(&bytes) }
    };
    ids.chunks_exact(blocks.block_size.get() as usize).enumerate().map(key).collect()
}

/// The ids that a prompt should become.
fn ids(prompt: &Prompt<'_>) -> Vec<u32> {
    let pieces = Pieces::new(prompt, &Volatile::default());
    let text = |t: &str| t.bytes().map(u32::from).collect::<Vec<_>>();
    match pieces.shape() {
        PromptForm::Ids(ids) => return ids.to_vec(),
        PromptForm::Bare(t) => return text(&t.get()),
        PromptForm::Framed => {}
    }
    let mut out = Vec::new();
    for field in &pieces.fields {
        out.push(field.mark.id());
        match field.body {
            FieldContent::Nothing => {}
            FieldContent::Name(t) => out.extend(text(t)),
            FieldContent::Text(t) => out.extend(text(&t.get())),
            FieldContent::Json(t) => out.extend(text(&crate::pieces::compact(t))),
            FieldContent::Setting(name, t) => out.extend(text(&[name, &*crate::pieces::compact(t)].concat())),
            FieldContent::Media(kind, reference) => out.extend(media_ids(kind, reference)),
            FieldContent::Tokens(ids) => out.extend(ids),
        }
    }
    out
}

proptest! {
    #[test]
    fn keys_requested_in_steps_equal_those_of_the_whole(
        prompt in prompt(), size in 1usize..20, root in any::<u64>(), steps in prop::collection::vec(0usize..6, 0..40),
    ) {
        let blocks = blocks(size, Toy::default());
        let all = hash(&blocks, &ids(&prompt), root);
        let mut keys = blocks.keys(&prompt, root);
        let mut asked = 0;
        for step in steps {
            asked += step;
            prop_assert_eq!(keys.upto(asked), &all[..asked.min(all.len())]);
        }
        keys.upto(usize::MAX);
        prop_assert_eq!(keys.tokens(), ids(&prompt).len() as u64);
        prop_assert_eq!(keys.finish().0, all);
    }

    #[test]
    fn next_turn_begins_with_this_one_and_its_response(prompt in prompt(), answer in "\\PC{0,100}", size in 1usize..20) {
        let blocks = blocks(size, Toy::default());
        let shape = Pieces::new(&prompt, &Volatile::default()).shape();
        prop_assume!(shape == PromptForm::Framed);
        let (mut keys, tail) = blocks.keys(&prompt, 3).finish();
    let mut tail = tail.unwrap();
        tail.extend(&*blocks.encoder, Some("assistant"), &answer, &mut keys).unwrap();
        prop_assert_eq!(tail.blocks(), keys.len());
        let mut next = prompt.clone();
        next.pieces.extend([Piece::Role("assistant".into()), Piece::Text(answer.into())]);
        prop_assert_eq!(&hash(&blocks, &ids(&next), 3), &keys);
        next.pieces.push(Piece::Role("user".into()));
        prop_assert!(hash(&blocks, &ids(&next), 3).starts_with(&keys));
    }
}

#[test]
fn prompt_without_a_match_costs_its_first_part() {
    let blocks = blocks(16, Toy::default());
    let text = "all these words ".repeat(10_000);
    let mut keys = blocks.text(&text, 0);
    assert!(!keys.upto(1).is_empty());
    assert!(keys.tokens() < DEFAULT_SEGMENT_BYTES as u64 + 20, "one segment of 160,000 bytes, got {}", keys.tokens());
    assert_eq!(keys.upto(usize::MAX).len(), text.len() / 16);
}

#[test]
fn text_and_its_ids_have_the_same_keys() {
    let blocks = blocks(16, Toy::default());
    let text = "words of a bare prompt ".repeat(40);
    let bare = Prompt { pieces: vec![Piece::Text(text.as_str().into())], ..Prompt::default() };
    let given = Prompt { pieces: vec![Piece::Tokens(text.bytes().map(u32::from).collect())], ..Prompt::default() };
    let root = blocks.space.root(&Root { name: "lora", ..Root::default() });
    let keys = blocks.keys(&bare, root).finish().0;
    assert_eq!(keys, blocks.keys(&given, root).finish().0);
    assert_eq!(keys, blocks.text(&text, root).finish().0);
}

#[test]
fn bare_prompt_continues_in_its_response() {
    let blocks = blocks(4, Toy::default());
    let ids: Vec<u32> = "Once upon".bytes().map(u32::from).collect();
    for prompt in [blocks.text("Once upon", 0), blocks.ids(ids.into(), 0)] {
        let (mut keys, tail) = prompt.finish();
        tail.unwrap().extend(&*blocks.encoder, None, " a time", &mut keys).unwrap();
        assert_eq!(keys, blocks.text("Once upon a time", 0).finish().0);
    }
}

#[test]
fn first_failure_ends_the_keys_and_is_reported() {
    let blocks = blocks(4, Toy { poison: Some('☠'), ..Toy::default() });
    let prompt = Prompt {
        pieces: vec![Piece::Role("user".into()), Piece::Text("good text".into()), Piece::Text("☠".into())],
        ..Prompt::default()
    };
    let mut keys = blocks.keys(&prompt, 0);
    let made = keys.upto(usize::MAX).len();
    assert_eq!(made, (1 + 5 + 10) / 4);
    assert_eq!(keys.error(), Some(&EncodeError::Failed("poison".to_owned())));
    assert_eq!(keys.upto(usize::MAX).len(), made);
    assert!(keys.finish().1.is_err());

    let (mut keys, tail) = blocks.text("good text", 0).finish();
    let mut tail = tail.unwrap();
    let before = tail.clone();
    assert!(tail.extend(&*blocks.encoder, Some("assistant"), "☠", &mut keys).is_err());
    assert_eq!((tail.blocks(), tail.chain.partial()), (before.blocks(), before.chain.partial()));
}

#[test]
fn prompt_over_its_budget_keeps_the_keys_of_its_start() {
    let mut blocks = blocks(4, Toy::default());
    blocks.max_bytes = 5_000;
    let text = "words ".repeat(2_000);
    let mut keys = blocks.text(&text, 0);
    let made = keys.upto(usize::MAX).len();
    assert!((500..=1_250).contains(&made), "{made}");
    assert!(
        matches!(keys.error(), Some(EncodeError::Budget { done: 1..=5_000, bytes: 5_001.. })),
        "{:?}",
        keys.error()
    );
}

#[test]
fn keys_end_where_uncached_text_begins() {
    use crate::memo::{Memo, SegmentCache};
    use crate::tiktoken::{Encoding, Tables};
    let encoder = Tables::default().encoder(Encoding::R50kBase);
    let cuts = encoder.cuts().expect("loads");
    let cache = Arc::new(SegmentCache::new(1 << 20, 3));
    let memo = Arc::new(Memo::new(Arc::new(encoder), b"r50k", cuts.clone(), cache));
    let blocks = TokenBlocks::new(KeySpace::new(5), memo, cuts);
    let text: String = (0..4_000).map(|i| format!("word {i} ")).collect();
    let mut cold = blocks.text(&text, 7).with_cold_bytes(10_000);
    let known = cold.upto(usize::MAX).to_vec();
    assert!(cold.is_cold() && !known.is_empty());
    let (all, tail) = blocks.text(&text, 7).finish();
    assert!(tail.is_ok(), "all text may be encoded");
    assert!(all.starts_with(&known) && all.len() > known.len());
    let mut warm = blocks.text(&text, 7).with_cold_bytes(200);
    assert_eq!(warm.upto(usize::MAX), all, "except a last part that may be too short for the cache");
    assert!(!warm.is_cold());
}
