//! The pool's block size as its engines tell it, with word to all lanes when it changes.

use attache_prefix::block_size::BlockSize;
use attache_prefix::index::HolderId;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use tokio::sync::watch;

/// The pool's block size.
#[derive(Debug)]
pub(super) struct PoolSize {
    size: Arc<BlockSize>,
    changes: watch::Sender<u32>,
}

impl PoolSize {
    pub(super) fn new(size: Arc<BlockSize>) -> Self {
        let changes = watch::Sender::new(size.get());
        Self { size, changes }
    }

    /// Tokens in a block.
    pub(super) fn get(&self) -> u32 {
        self.size.get()
    }

    /// Whether the configuration names it.
    pub(super) fn is_given(&self) -> bool {
        self.size.is_given()
    }

    /// Changes when the size does.
    pub(super) fn subscribe(&self) -> watch::Receiver<u32> {
        self.changes.subscribe()
    }

    /// As [`BlockSize::pages`].
    pub(super) fn pages(&self, endpoints: impl Iterator<Item = (EndpointId, Option<u32>)> + Clone) {
        self.size.pages(endpoints);
        self.publish();
    }

    fn publish(&self) {
        self.changes.send_if_modified(|told| {
            let tokens = self.size.get();
            let before = std::mem::replace(told, tokens);
            if before != tokens {
                tracing::info!(before, tokens, "block size changed to that of the model servers");
            }
            before != tokens
        });
    }
}

/// The size of one cache's blocks, which counts among the pool's as long as this lives.
#[derive(Debug)]
pub(super) struct OwnSize {
    pool: Arc<PoolSize>,
    endpoint: EndpointId,
    cache: HolderId,
    /// Of the first event that had blocks.
    told: Option<u32>,
}

impl OwnSize {
    pub(super) fn new(pool: Arc<PoolSize>, endpoint: EndpointId, cache: HolderId) -> Self {
        Self { pool, endpoint, cache, told: None }
    }

    /// The pool's.
    pub(super) fn pool(&self) -> &PoolSize {
        &self.pool
    }

    /// Tokens in a block of the first event that had any.
    pub(super) fn told(&self) -> Option<u32> {
        self.told
    }

    /// An event has blocks of `tokens`: whether these are of the pool's size, and of the size of those before.
    pub(super) fn tell(&mut self, tokens: u32) -> bool {
        if self.told.is_none() {
            self.told = Some(tokens);
            self.pool.size.tell(self.endpoint, self.cache, tokens);
            self.pool.publish();
        }
        self.told == Some(tokens) && self.fits() == Some(true)
    }

    /// Whether its blocks are of the pool's size now; `None` when it has told of none.
    pub(super) fn fits(&self) -> Option<bool> {
        self.told.map(|tokens| tokens == self.pool.get())
    }

    /// The engine is another process now, whose blocks may be of another size.
    pub(super) fn forget(&mut self) {
        if self.told.take().is_some() {
            self.pool.size.forget(self.endpoint, self.cache);
            self.pool.publish();
        }
    }
}

impl Drop for OwnSize {
    fn drop(&mut self) {
        self.forget();
    }
}
