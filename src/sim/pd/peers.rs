//! The servers of a fleet as they know each other: by engine id, with the blocks that each keeps and whose they are.

use super::LoadFailure;
use super::counts::{LoadError, PeerCounts};
use super::params::Remote;
use crate::content::mix;
use crate::engine::JobId;
use crate::host::{EngineHost, RemoteBlocks};
use crate::kv::BlockHash;
use ahash::RandomState;
use attache_types::rng;
use parking_lot::{Mutex, RwLock};
use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

/// 4,096 requests before those are looked through whose leases are over.
const KEPT_BEFORE_TIDYING: usize = 4_096;
/// A lease is six heartbeats long, as in vLLM.
const HEARTBEATS_A_LEASE: u32 = 6;
/// 1 ms, however short a test's lease is.
const SHORTEST_HEARTBEAT: Duration = Duration::from_millis(1);

/// The register of one fleet.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_engine: RwLock<HashMap<String, Arc<Peer>>>,
    /// SGLang's rooms: the prefill that is ready in each.
    rooms: Mutex<HashMap<u64, (Arc<Peer>, KeptBlocks)>>,
    /// Something happened in a room.
    rooms_changed: Notify,
    /// Finished context requests of TensorRT-LLM.
    contexts: Mutex<HashMap<u64, (Arc<Peer>, KeptBlocks)>>,
    /// Blocks in the shared storage.
    pub(crate) stored: RwLock<HashSet<BlockHash, RandomState>>,
}

/// One server, as the others see it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) host: Arc<EngineHost>,
    address: String,
    port: u16,
    engine_id: RwLock<String>,
    kept: Mutex<HashMap<String, KeptBlocks>>,
    /// Something that was kept has been given back.
    given_back: Notify,
}

/// What a server keeps of one request.
#[derive(Clone, Debug)]
pub(crate) struct KeptBlocks {
    pub(crate) job: JobId,
    /// What is in the blocks, and whose adapter made it.
    pub(crate) tokens: Arc<[u32]>,
    pub(crate) lora: Option<Arc<str>>,
}

impl Peers {
    /// Takes in a server, with a side channel at `address` and `port`.
    pub(crate) fn join(&self, host: Arc<EngineHost>, address: String, port: u16) -> Arc<Peer> {
        let peer = Arc::new(Peer {
            host,
            address,
            port,
            engine_id: RwLock::new(new_engine_id()),
            kept: Mutex::new(HashMap::new()),
            given_back: Notify::new(),
        });
        self.by_engine.write().insert(peer.engine_id(), peer.clone());
        peer
    }

    /// A server restarted: its old id is unknown from now on, and its blocks are gone.
    pub(crate) fn restarted(&self, peer: &Arc<Peer>) {
        let mut by_engine = self.by_engine.write();
        by_engine.remove(&peer.engine_id());
        peer.kept.lock().clear();
        let id = new_engine_id();
        peer.engine_id.write().clone_from(&id);
        by_engine.insert(id, peer.clone());
    }

    /// Leaves what a server keeps in an SGLang room.
    pub(crate) fn put_into_room(&self, room: u64, peer: Arc<Peer>, kept: KeptBlocks) {
        put(&mut self.rooms.lock(), room, peer, kept);
        self.rooms_changed.notify_waiters();
    }

    /// Waits for what is left in a room.
    pub(crate) async fn enter_room(&self, room: u64) -> (Arc<Peer>, KeptBlocks) {
        loop {
            let mut changed = pin!(self.rooms_changed.notified());
            // Before the look, so that no change falls between.
            changed.as_mut().enable();
            let found = self.rooms.lock().remove(&room);
            if let Some(found) = found {
                return found;
            }
            changed.await;
        }
    }

    /// Enters a TensorRT-LLM context request.
    pub(crate) fn put_context(&self, id: u64, peer: Arc<Peer>, kept: KeptBlocks) {
        put(&mut self.contexts.lock(), id, peer, kept);
    }

    /// Removes the context request of this id.
    pub(crate) fn take_context(&self, id: u64) -> Option<(Arc<Peer>, KeptBlocks)> {
        self.contexts.lock().remove(&id)
    }

    /// The right to read what a server keeps. `prompt` must begin with the tokens that are in there; `all`: with every
    /// one of them. `counts` and `on_loss` are the reader's.
    pub(crate) fn claim(
        &self,
        counts: &Arc<PeerCounts>,
        on_loss: LoadFailure,
        remote: &Remote,
        prompt: &[u32],
        lora: Option<&str>,
        all: bool,
    ) -> Result<BlockClaim, LoadError> {
        let peer = self.by_engine.read().get(&remote.engine_id).cloned().ok_or(LoadError::UnknownEngine)?;
        if peer.address != remote.host || peer.port != remote.port {
            return Err(LoadError::WrongAddress);
        }
        let kept = peer.kept.lock().get(&remote.request_id).cloned().ok_or(LoadError::UnknownRequest)?;
        let blocks = peer.host.pinned(kept.job).ok_or(LoadError::LeaseExpired)?.blocks;
        if blocks != remote.blocks {
            return Err(LoadError::UnknownBlocks);
        }
        let there = remote.num_tokens.map_or(kept.tokens.len(), |tokens| kept.tokens.len().min(tokens as usize));
        // Blocks are released from here on if the leg is rejected: no other leg will request them.
        BlockClaim::new(peer, kept, remote.request_id.clone(), counts.clone(), on_loss)
            .checked(prompt, lora, there, all)
    }
}

/// Forgets what is no longer kept when there is much.
fn put(book: &mut HashMap<u64, (Arc<Peer>, KeptBlocks)>, key: u64, peer: Arc<Peer>, kept: KeptBlocks) {
    if book.len() >= KEPT_BEFORE_TIDYING {
        book.retain(|_, (peer, kept)| peer.host.pinned(kept.job).is_some());
    }
    book.insert(key, (peer, kept));
}

impl Peer {
    pub(crate) fn engine_id(&self) -> String {
        self.engine_id.read().clone()
    }

    /// Enters a request whose job has ended and whose blocks stay; what to tell others of them, and when the lease
    /// ends. `None` when nothing is kept.
    pub(crate) fn keep(&self, request_id: &str, kept: KeptBlocks) -> Option<(Remote, Duration)> {
        let pinned = self.host.pinned(kept.job)?;
        let mut book = self.kept.lock();
        if book.len() >= KEPT_BEFORE_TIDYING {
            book.retain(|_, kept| self.host.pinned(kept.job).is_some());
        }
        book.insert(request_id.to_owned(), kept);
        let remote = Remote {
            engine_id: self.engine_id(),
            request_id: request_id.to_owned(),
            host: self.address.clone(),
            port: self.port,
            blocks: pinned.blocks,
            num_tokens: Some(pinned.tokens),
        };
        Some((remote, pinned.left))
    }

    /// Waits until something that was kept is given back.
    pub(crate) async fn released(&self) {
        self.given_back.notified().await;
    }

    fn let_go(&self, request_id: &str, job: JobId) -> bool {
        self.kept.lock().remove(request_id);
        let released = self.host.release(job);
        self.given_back.notify_waiters();
        released
    }
}

/// The right to read blocks that another server keeps: its heartbeats hold the lease, and when it
/// goes the blocks are free.
#[derive(Debug)]
pub(crate) struct BlockClaim {
    peer: Arc<Peer>,
    kept: KeptBlocks,
    request_id: String,
    counts: Arc<PeerCounts>,
    on_loss: LoadFailure,
    heartbeats: AbortHandle,
    open: bool,
}

impl BlockClaim {
    /// Must be called in a tokio runtime.
    pub(crate) fn new(
        peer: Arc<Peer>,
        kept: KeptBlocks,
        request_id: String,
        counts: Arc<PeerCounts>,
        on_loss: LoadFailure,
    ) -> Self {
        let (host, job) = (peer.host.clone(), kept.job);
        host.heartbeat(job);
        let heartbeats = tokio::spawn(async move {
            while let Some(pinned) = host.pinned(job) {
                tokio::time::sleep((pinned.left / HEARTBEATS_A_LEASE).max(SHORTEST_HEARTBEAT)).await;
                host.heartbeat(job);
            }
        });
        Self { peer, kept, request_id, counts, on_loss, heartbeats: heartbeats.abort_handle(), open: true }
    }

    /// Tokens that can be read.
    pub(crate) fn tokens(&self) -> u32 {
        u32::try_from(self.kept.tokens.len()).unwrap_or(u32::MAX)
    }

    /// The claim, if the first `there` tokens in the blocks are those of the prompt, as far as it goes; `all`:
    /// and it goes that far.
    pub(crate) fn checked(
        mut self,
        prompt: &[u32],
        lora: Option<&str>,
        there: usize,
        all: bool,
    ) -> Result<Self, LoadError> {
        let most = there.min(prompt.len());
        let same = self.kept.tokens.get(..most) == prompt.get(..most);
        let far = !all || prompt.len() >= there;
        if same && far && self.kept.lora.as_deref() == lora {
            return Ok(self);
        }
        self.close();
        Err(LoadError::OtherTokens)
    }

    fn close(&mut self) -> bool {
        self.open = false;
        self.peer.let_go(&self.request_id, self.kept.job)
    }
}

impl RemoteBlocks for BlockClaim {
    /// With the policy `recompute`, lost blocks don't fail the request. Computing them again costs no simulated time.
    fn finish_read(mut self: Box<Self>) -> bool {
        if self.close() {
            PeerCounts::add(&self.counts.transfers);
            return true;
        }
        self.counts.fail(LoadError::Lost);
        if self.on_loss == LoadFailure::Recompute {
            PeerCounts::add(&self.counts.local_recomputes);
        }
        self.on_loss == LoadFailure::Recompute
    }
}

impl Drop for BlockClaim {
    fn drop(&mut self) {
        self.heartbeats.abort();
        if self.open {
            PeerCounts::add(&self.counts.abandoned);
            self.close();
        }
    }
}

/// A random UUID, as vLLM's engines have.
fn new_engine_id() -> String {
    let seed = rng::system_seed();
    let (high, low) = (mix(seed), mix(!seed));
    let variant = 0x8000 | (low >> 48 & 0x3FFF);
    format!(
        "{:08x}-{:04x}-4{:03x}-{variant:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xFFFF,
        high & 0xFFF,
        low & 0xFFFF_FFFF_FFFF
    )
}
