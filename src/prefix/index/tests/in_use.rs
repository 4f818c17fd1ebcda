//! Blocks of prompts that a server works on.

use super::{depth, index, key};
use crate::index::{HolderId, InUse, PrefixIndex, TenantId};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;
use proptest::prelude::*;
use std::sync::Arc;

/// A prompt of `blocks` blocks of its own behind `shared` ones that all prompts have.
fn prompt(number: u64, shared: u64, blocks: u64) -> Arc<Vec<BlockKey>> {
    let own = (0..blocks).map(|i| key(number << 32 | i));
    Arc::new((0..shared).map(|i| key(u64::MAX - i)).chain(own).collect())
}

fn second(n: u64) -> Timestamp {
    Timestamp(n * 1_000_000_000)
}

struct Server {
    index: Arc<PrefixIndex>,
    holder: HolderId,
}

impl Server {
    fn new(capacity: u32) -> Self {
        let index = Arc::new(index(16 << 20));
        let holder = index.add_holder();
        index.set_capacity(holder, capacity);
        Self { index, holder }
    }

    fn record(&self, prompt: &[BlockKey], at: u64) {
        self.index.record(self.holder, prompt, TenantId(0), second(at));
    }

    fn begin(&self, prompt: &Arc<Vec<BlockKey>>, at: u64) -> InUse {
        self.index.record_in_use(self.holder, prompt, TenantId(0), second(at))
    }

    fn held(&self, prompt: &[BlockKey]) -> u32 {
        depth(&self.index, self.holder, prompt).any
    }
}

#[test]
fn blocks_of_a_running_request_outlive_those_of_later_idle_prompts() {
    let server = Server::new(100);
    let [running, first, second, third, last] =
        [(1, 40), (2, 30), (3, 30), (4, 30), (5, 60)].map(|(n, blocks)| prompt(n, 0, blocks));
    let in_use = server.begin(&running, 0);
    server.record(&first, 1);
    server.record(&second, 2);
    server.record(&third, 3);
    let held = [&running, &first, &second, &third].map(|prompt| server.held(prompt));
    assert_eq!(held, [40, 0, 30, 30], "the oldest idle prompt is evicted");
    drop(in_use);
    server.record(&last, 4);
    let held = [&running, &second, &third, &last].map(|prompt| server.held(prompt));
    assert_eq!(held, [40, 0, 0, 60], "its blocks were used until now");
    server.record(&first, 5);
    assert_eq!(server.held(&running), 10, "it is idle now, and its tail goes first");
    server.index.check_recency();
}

#[test]
fn prompts_in_use_beyond_the_capacity_lose_blocks() {
    let server = Server::new(10);
    let prompts = [1, 2, 3].map(|n| prompt(n, 0, 8));
    let in_use = prompts.each_ref().map(|prompt| server.begin(prompt, 1));
    assert_eq!(server.index.blocks(server.holder).guessed, 10);
    server.index.set_capacity(server.holder, 1);
    assert_eq!(server.index.blocks(server.holder).guessed, 1);
    drop(in_use);
    server.index.check_recency();
}

#[test]
fn restarted_or_removed_server_has_no_prompt_in_use() {
    let server = Server::new(10);
    let long = prompt(1, 0, 10);
    let in_use = server.begin(&long, 0);
    server.index.clear(server.holder);
    assert_eq!(server.held(&long), 0);
    server.record(&prompt(2, 0, 8), 1);
    server.record(&prompt(3, 0, 8), 2);
    let again = server.begin(&long, 3);
    drop(in_use);
    server.index.remove_holder(server.holder);
    drop(again);
    let other = server.index.add_holder();
    assert_eq!(depth(&server.index, other, &long).any, 0);
}

proptest! {
    /// While all prompts in use fit, none of them loses a block, and nothing is evicted without need.
    #[test]
    fn prompts_in_use_keep_their_blocks(
        steps in prop::collection::vec((0u64..12, any::<bool>(), 1u64..20), 1..120),
        shared in 0u64..5,
        capacity in 60u32..200,
    ) {
        let server = Server::new(capacity);
        let mut in_use: Vec<(Arc<Vec<BlockKey>>, InUse)> = Vec::new();
        for (at, (number, begins, blocks)) in (1u64..).zip(&steps) {
            let prompt = prompt(*number, shared, *blocks);
            if *begins {
                let guard = server.begin(&prompt, at);
                in_use.push((prompt, guard));
            } else {
                server.record(&prompt, at);
            }
            let blocks_in_use = |in_use: &[(Arc<Vec<BlockKey>>, InUse)]| -> usize {
                in_use.iter().map(|(prompt, _)| prompt.len()).sum()
            };
            while blocks_in_use(&in_use) + 25 > capacity as usize {
                in_use.remove(at as usize % in_use.len());
            }
            for (prompt, _) in &in_use {
                prop_assert_eq!(server.held(prompt) as usize, prompt.len(), "step {}", at);
            }
            prop_assert!(server.index.blocks(server.holder).guessed <= capacity);
            server.index.check_recency();
            server.index.check_bills();
        }
    }
}
