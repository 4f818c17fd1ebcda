//! Any bytes as a KV-event batch: no panic, and the events of a batch can be stored in an index, looked up and removed
//! again.
#![no_main]

use attache_prefix::wire::{Copied, Decoder, Refusal, Removed, Sink, Stored};
use attache_prefix::{HolderId, IndexConfig, KeySpace, Matches, PrefixIndex, StoredBlock};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

struct Apply {
    index: PrefixIndex,
    holder: HolderId,
    matched: Matches,
}

impl Sink for Apply {
    fn stored(&mut self, event: Stored<'_>) {
        assert!(!event.blocks.is_empty());
        let origin = event.origin.unwrap_or_default();
        let known = self.index.report(self.holder, event.tier, event.parent, event.blocks, origin).is_ok();
        assert!(known || event.parent.is_some(), "a block without a parent is never an orphan");
        if event.parent.is_none() {
            let keys: Vec<_> = event.blocks.iter().map(|b: &StoredBlock| b.key).collect();
            self.index.lookup(&mut keys.as_slice(), &mut self.matched);
            assert_eq!(self.matched.depth(self.holder).any as usize, keys.len());
        }
    }

    fn copied(&mut self, event: Copied<'_>) {
        assert!(!event.hashes.is_empty());
        let known =
            self.index.copy(self.holder, event.tier, event.hashes.iter().copied(), event.origin.unwrap_or_default());
        assert!(known <= event.hashes.len());
    }

    fn stored_apart(&mut self, _: Option<u32>) {}

    fn removed(&mut self, event: Removed<'_>) {
        self.index.remove_to(self.holder, event.tier, event.hashes, event.remaining);
    }

    fn cleared(&mut self) {
        self.index.clear(self.holder);
    }

    fn refused(&mut self, reason: Refusal) {
        assert!(!reason.to_string().is_empty());
    }
}

fuzz_target!(|data: &[u8]| {
    let config = IndexConfig { budget_bytes: 8 << 20, tenant_share: 1.0, half_life: Duration::from_secs(60), seed: 7 };
    let index = PrefixIndex::new(config);
    let holder = index.add_holder();
    let mut apply = Apply { index, holder, matched: Matches::default() };
    let mut decoder = Decoder::new(KeySpace::new(7));
    let _ = decoder.decode(data, &mut apply);
    assert!(apply.index.stats().bytes <= 8 << 20);
});
