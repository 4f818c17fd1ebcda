use super::*;
use crate::pieces::tests::prompt;
use attache_prefix::index::HolderId;
use attache_prefix::key::Root;
use attache_protocol::prompt::Piece;
use attache_types::ids::EndpointId;
use proptest::prelude::*;

fn characters(block: usize) -> Characters {
    let block_size = Arc::new(BlockSize::given(u32::try_from(block).unwrap()));
    Characters { block_size, token_bytes: NonZeroUsize::MIN, ..Characters::new(KeySpace::new(7)) }
}

/// The keys, computed from the whole stream at once.
fn eager(characters: &Characters, prompt: &Prompt<'_>, root: u64) -> Vec<BlockKey> {
    let (bytes, block) = match prompt {
        Prompt { settings, tools: None, documents: None, system, pieces, .. }
            if settings.variables.is_none() && system.is_empty() =>
        {
            match pieces.as_slice() {
                [Piece::Tokens(ids)] => {
                    let block = characters.block_size.at_least_one().get() * 4;
                    (ids.iter().flat_map(|id| id.to_le_bytes()).collect(), block)
                }
                _ => (Pieces::new(prompt, &characters.volatile).to_bytes(), characters.block_bytes().get()),
            }
        }
        _ => (Pieces::new(prompt, &characters.volatile).to_bytes(), characters.block_bytes().get()),
    };
    let key = |(i, block): (usize, &[u8])| match i {
        0 => characters.space.first(root, block),
        _ => characters.space.next(block),
    };
    bytes.chunks_exact(block).enumerate().map(key).collect()
}

proptest! {
    #[test]
    fn keys_requested_in_steps_equal_those_of_the_whole(
        prompt in prompt(), block in 1usize..80, root in any::<u64>(), steps in prop::collection::vec(0usize..6, 0..40),
    ) {
        let characters = characters(block);
        let all = eager(&characters, &prompt, root);
        let mut keys = characters.keys(&prompt, root);
        let mut asked = 0;
        for step in steps {
            asked += step;
            let made = keys.upto(asked);
            prop_assert_eq!(made, &all[..asked.min(all.len())], "exactly the requested keys");
        }
        prop_assert_eq!(keys.finish().0, all);
    }

    #[test]
    fn next_turn_begins_with_this_one_and_its_response(
        prompt in prompt(), answer in "\\PC{0,200}", cut in 0usize..200, question in "\\PC{0,40}", block in 1usize..40,
    ) {
        let characters = characters(block);
        let (mut keys, tail) = characters.keys(&prompt, 3).finish();
        let Some(mut tail) = tail else { return Ok(()) };
        prop_assert_eq!(tail.blocks(), keys.len());
        tail.role("assistant", &mut keys);
        let cut = answer.char_indices().map(|(at, _)| at).take_while(|at| *at <= cut).last().unwrap_or(0);
        let (one, two) = answer.split_at(cut);
        tail.text(one, &mut keys);
        tail.text(two, &mut keys);
        let mut next = prompt.clone();
        next.pieces.extend([Piece::Role("assistant".into()), Piece::Text(answer.into())]);
        prop_assert_eq!(&eager(&characters, &next, 3), &keys, "exactly the prompt and the response");
        next.pieces.extend([Piece::Role("user".into()), Piece::Text(question.into())]);
        prop_assert!(eager(&characters, &next, 3).starts_with(&keys));
    }

    #[test]
    fn bare_prompt_continues_in_its_response(text in "\\PC{0,200}", answer in "\\PC{0,200}") {
        let bare = |text: String| Prompt { pieces: vec![Piece::Text(text.into())], ..Prompt::default() };
        let characters = characters(8);
        let (mut keys, tail) = characters.keys(&bare(text.clone()), 0).finish();
        tail.unwrap().text(&answer, &mut keys);
        prop_assert_eq!(keys, eager(&characters, &bare(text + &answer), 0));
    }
}

fn user(text: &str) -> Prompt<'_> {
    Prompt { pieces: vec![Piece::Role("user".into()), Piece::Text(text.into())], ..Prompt::default() }
}

#[test]
fn prompts_share_the_blocks_before_their_first_difference() {
    let characters = characters(64);
    let head = "word ".repeat(1_000);
    let (a, b) = (format!("{head}red"), format!("{head}green {head}"));
    let (a, b) = (user(&a), user(&b));
    let (mut a, mut b) = (characters.keys(&a, 1), characters.keys(&b, 1));
    let (a, b) = (a.upto(usize::MAX), b.upto(usize::MAX));
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    // Mark of the prompt, mark and name of the role, mark of the text, the common text.
    assert_eq!(same, (1 + 5 + 1 + head.len()) / 64);
    assert!(same + 1 >= a.len());
}

#[test]
fn text_behind_the_requested_keys_is_not_read() {
    let text = "x".repeat(1 << 20);
    let prompt = user(&text);
    let mut keys = characters(64).keys(&prompt, 1);
    assert_eq!(keys.upto(3).len(), 3);
    assert!(keys.at < 4 * 64);
    assert!(keys.chain.partial().len() < 64, "the text is not copied");
}

#[test]
fn root_changes_only_the_first_block() {
    let characters = characters(16);
    let text = "abcdefgh".repeat(20);
    let prompt = user(&text);
    let root = |salt| characters.space.root(&Root { cache_salt: salt, ..Root::default() });
    let keys = |salt| characters.keys(&prompt, root(salt)).finish().0;
    let (plain, salted) = (keys(None), keys(Some("pepper")));
    assert_ne!(plain[0], salted[0]);
    assert_eq!(plain[1..], salted[1..]);
}

#[test]
fn token_ids_are_divided_into_blocks_of_ids() {
    let characters = Characters::new(KeySpace::new(7));
    let ids = |n: u32| Prompt { pieces: vec![Piece::Tokens((0..n).collect())], ..Prompt::default() };
    let (keys, tail) = characters.keys(&ids(40), 5).finish();
    assert_eq!(keys.len(), 2, "only complete blocks of 16");
    assert!(tail.is_none());
    assert_eq!(characters.keys(&ids(100), 5).finish().0[..2], keys[..]);
    assert_eq!(keys, eager(&characters, &ids(40), 5));
}

#[test]
fn empty_prompt_has_no_keys() {
    let prompt = Prompt::default();
    assert!(characters(64).keys(&prompt, 1).finish().0.is_empty());
}

#[test]
fn equivalent_bodies_have_the_same_keys() {
    use attache_protocol::{Api, parse};
    use attache_types::limits::Limits;
    let keys = |api, body: &str| {
        let request = parse(api, None, body.as_bytes(), &Limits::default()).expect("parses");
        characters(8).keys(&request.prompt, 1).finish().0
    };
    let chat = |body: &str| keys(Api::ChatCompletions, body);
    let plain = chat(
        r#"{"model":"m","tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"role":"user","content":"Ask away"}]}"#,
    );
    let other = chat(
        r#"{"messages": [{"content": [{"type": "text", "text": "\u0041sk away"}], "role": "user"}], "temperature": 1, "model": "m",
            "tools": [ {"type": "function", "function": {"name": "f"}} ]}"#,
    );
    assert_eq!(plain, other);
    let next = chat(
        r#"{"model":"m","tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"role":"user","content":"Ask away"},
            {"role":"assistant","content":"Well, here is a question."},{"role":"user","content":"Yes?"}]}"#,
    );
    assert!(next.starts_with(&plain) && next.len() > plain.len());

    let claude = |cch: &str, left: u32| {
        keys(
            Api::Messages,
            &format!(
                r#"{{"model":"m","max_tokens":9,"system":[{{"type":"text","text":"x-anthropic-billing-header: cch={cch};"}},
                {{"type":"text","text":"You write code."}}],"messages":[{{"role":"user","content":"Fix it"}},
                {{"role":"system","content":"<total_tokens>{left} tokens left</total_tokens>"}}]}}"#
            ),
        )
    };
    assert_eq!(claude("12ab", 5_000), claude("99ff", 4_000));
}

#[test]
fn block_size_follows_the_engines() {
    let block_size = Arc::new(BlockSize::of_engines(16));
    let characters = Characters { block_size: block_size.clone(), ..Characters::new(KeySpace::new(7)) };
    let text = "a".repeat(1_000);
    let prompt = Prompt { pieces: vec![Piece::Text(text.as_str().into())], ..Prompt::default() };
    let blocks = || characters.keys(&prompt, 1).finish().0.len();
    assert_eq!(blocks(), 1_000 / 64);
    block_size.report(EndpointId(1), HolderId(1), 50);
    assert_eq!(blocks(), 1_000 / 200);
}
