//! The pool's block size according to its engines, with notification of all lanes when it changes.

use attache_prefix::block_size::BlockSize;
use attache_prefix::index::HolderId;
use attache_record::{KvChange, KvTape};
use attache_types::ids::EndpointId;
use std::sync::Arc;
use tokio::sync::watch;

/// The pool's block size, with its subscribers.
#[derive(Debug)]
pub(super) struct PoolSize {
    size: Arc<BlockSize>,
    tape: KvTape,
    changes: watch::Sender<u32>,
}

impl PoolSize {
    pub(super) fn new(size: Arc<BlockSize>, tape: KvTape) -> Self {
        let changes = watch::Sender::new(size.get());
        Self { size, tape, changes }
    }

    /// Returns the number of tokens in a block.
    pub(super) fn get(&self) -> u32 {
        self.size.get()
    }

    /// Whether the configuration sets the size.
    pub(super) fn is_given(&self) -> bool {
        self.size.is_given()
    }

    /// Returns a receiver that is notified when the size changes.
    pub(super) fn subscribe(&self) -> watch::Receiver<u32> {
        self.changes.subscribe()
    }

    /// As [`BlockSize::pages`], with notification of the lanes.
    pub(super) fn pages(&self, endpoints: impl Iterator<Item = (EndpointId, Option<u32>)> + Clone) {
        self.change(|size| size.pages(endpoints));
    }

    /// Changes what is known of the sizes, and notifies the lanes.
    fn change(&self, change: impl FnOnce(&BlockSize)) {
        let changed = || {
            let before = self.size.get();
            change(&self.size);
            Some(self.size.get()).filter(|now| *now != before)
        };
        self.tape.change(changed, |now| now.map(KvChange::BlockSize));
        self.changes.send_if_modified(|reported| {
            let tokens = self.size.get();
            let before = std::mem::replace(reported, tokens);
            if before != tokens {
                tracing::info!(before, tokens, "block size changed to that of the model servers");
            }
            before != tokens
        });
    }
}

/// The block size of one cache, which counts towards the pool's size until Drop.
#[derive(Debug)]
pub(super) struct OwnSize {
    pool: Arc<PoolSize>,
    endpoint: EndpointId,
    cache: HolderId,
    /// Block size of the first event with blocks.
    reported: Option<u32>,
}

impl OwnSize {
    /// The endpoint of the cache.
    pub(super) fn endpoint(&self) -> EndpointId {
        self.endpoint
    }

    pub(super) fn new(pool: Arc<PoolSize>, endpoint: EndpointId, cache: HolderId) -> Self {
        Self { pool, endpoint, cache, reported: None }
    }

    /// The cache in the prefix index.
    pub(super) fn cache(&self) -> HolderId {
        self.cache
    }

    /// The block size of the pool.
    pub(super) fn pool(&self) -> &PoolSize {
        &self.pool
    }

    /// Returns the block size of the first event with blocks, in tokens.
    pub(super) fn reported(&self) -> Option<u32> {
        self.reported
    }

    /// Records an event with blocks of `tokens` tokens. Returns whether this is both the pool's size
    /// and the engine's previous size.
    pub(super) fn report(&mut self, tokens: u32) -> bool {
        if self.reported.is_none() {
            self.reported = Some(tokens);
            self.pool.change(|size| size.report(self.endpoint, self.cache, tokens));
        }
        self.reported == Some(tokens) && self.fits() == Some(true)
    }

    /// Whether the engine's blocks have the pool's size now; `None` when it has not reported any.
    pub(super) fn fits(&self) -> Option<bool> {
        self.reported.map(|tokens| tokens == self.pool.get())
    }

    /// Forgets the size after a restart of the engine, which may have another one now.
    pub(super) fn forget(&mut self) {
        if self.reported.take().is_some() {
            self.pool.change(|size| size.forget(self.endpoint, self.cache));
        }
    }
}

impl Drop for OwnSize {
    fn drop(&mut self) {
        self.forget();
    }
}
