//! Any body of any API: its keys do not depend on how many are requested at a time, and the response's keys continue
//! them.
#![no_main]

use attache_types::limits::Limits;
use attache_prefix::block_size::BlockSize;
use attache_prefix::{BlockKeys, KeySpace};
use attache_prompt::characters::Characters;
use attache_protocol::{Api};
use libfuzzer_sys::fuzz_target;
use std::num::NonZeroUsize;
use std::sync::Arc;

fuzz_target!(|data: &[u8]| {
    let [kind, step, body @ ..] = data else { return };
    let api = [Api::Completions, Api::ChatCompletions, Api::Messages, Api::Responses][usize::from(*kind) % 4];
    let Ok(request) = attache_protocol::parse(api, None, body, &Limits::default()) else { return };
    let block_size = Arc::new(BlockSize::given(u32::from(*kind >> 2) + 1));
    let characters = Characters { block_size, token_bytes: NonZeroUsize::MIN, ..Characters::new(KeySpace::new(7)) };
    let (mut eager, mut lazy) = (characters.keys(&request.prompt, 1), characters.keys(&request.prompt, 1));
    let all = eager.upto(usize::MAX).to_vec();
    let mut asked = 0;
    while asked < all.len() {
        asked += usize::from(*step).max(1);
        assert!(lazy.upto(asked).len() >= asked.min(all.len()));
    }
    assert_eq!(lazy.upto(asked), all);
    let (mut keys, tail) = characters.keys(&request.prompt, 1).finish();
    if let Some(mut tail) = tail {
        tail.role("assistant", &mut keys);
        tail.text("and so on", &mut keys);
    }
    assert_eq!(keys[..all.len()], all);
});
