//! An engine's batches in vLLM's bytes: names of blocks, sequence numbers, msgpack. Pure.
//!
//! A payload is `[seconds since the epoch, [events], data-parallel rank]`. Events are written in full, as vLLM 0.32.0
//! (maps) and 0.22.1 (arrays) do, which `tests.rs` compares byte for byte with what such servers have sent.

use super::{EventEncoding, HashForm, KvEventsConfig};
use crate::engine::KvBatch;
use crate::kv::{BlockHash, KvBlock, KvEvent};
use crate::vllm_hash::{Digest, ExtraForm, ExtraKeys, Hasher, Lora};
use ahash::RandomState;
use attache_types::clock::Timestamp;
use bytes::Bytes;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

#[cfg(test)]
mod tests;

const GPU: &str = "GPU";
const CPU: &str = "CPU";
const SPEC_KIND: &str = "full_attention";
/// A simulated engine has one cache group.
const GROUP: u64 = 0;

/// One message to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvFrame {
    /// Which life of the server it comes from, counted from 0.
    pub process: u32,
    /// Its number in that life, from 0.
    pub sequence: u64,
    /// The message, encoded in msgpack.
    pub payload: Bytes,
    /// When the batch was made.
    pub at: Timestamp,
}

/// An adapter, as vLLM numbers them: from 1, in the order of their first loading.
#[derive(Debug)]
struct Adapter {
    name: Arc<str>,
    path: String,
}

/// A block that is stored according to the published events.
#[derive(Debug)]
struct NamedBlock {
    digest: Digest,
    copies: usize,
}

/// Names the blocks of one engine and writes its batches.
#[derive(Debug)]
pub struct KvEncoder {
    rank: u16,
    encoding: EventEncoding,
    hash: HashForm,
    block_size: u32,
    hasher: Hasher,
    adapters: Vec<Adapter>,
    names: HashMap<BlockHash, NamedBlock, RandomState>,
    host: Host,
    process: u32,
    sequence: u64,
    digests: Vec<Digest>,
}

/// Blocks that are reported to lie in host memory, oldest first.
#[derive(Debug)]
struct Host {
    most: usize,
    blocks: VecDeque<Digest>,
    there: HashSet<Digest, RandomState>,
}

impl Host {
    fn clear(&mut self) {
        self.blocks.clear();
        self.there.clear();
    }

    /// Takes in blocks: those that are new to it, and those that made room.
    fn offload(&mut self, stored: &[Digest]) -> [Vec<Digest>; 2] {
        let newest = stored.get(stored.len().saturating_sub(self.most)..).unwrap_or_default();
        let new: Vec<Digest> = newest.iter().copied().filter(|block| self.there.insert(*block)).collect();
        self.blocks.extend(&new);
        let gone: Vec<Digest> = self.blocks.drain(..self.blocks.len().saturating_sub(self.most)).collect();
        for block in &gone {
            self.there.remove(block);
        }
        [new, gone]
    }
}

impl KvEncoder {
    /// For an engine with blocks of `block_size` tokens, at least 1, which is data-parallel rank `rank` of its server.
    #[must_use]
    pub fn new(config: &KvEventsConfig, block_size: u32, rank: u16) -> Self {
        let form = match config.encoding {
            EventEncoding::Map => ExtraForm::Tagged,
            EventEncoding::Array => ExtraForm::Bare,
        };
        Self {
            rank,
            encoding: config.encoding,
            hash: config.hash,
            block_size: block_size.max(1),
            hasher: Hasher::new(config.algorithm, form, &config.seed),
            adapters: Vec::new(),
            names: HashMap::default(),
            host: Host { most: config.offload_blocks, blocks: VecDeque::new(), there: HashSet::default() },
            process: 0,
            sequence: 0,
            digests: Vec::new(),
        }
    }

    /// Takes note of an adapter and of where it was loaded from; the path of its first loading stays
    /// part of its blocks' names.
    pub fn adapter(&mut self, name: &Arc<str>, path: &str) {
        if !self.adapters.iter().any(|adapter| adapter.name == *name) {
            self.adapters.push(Adapter { name: name.clone(), path: path.to_owned() });
        }
    }

    /// Forgets all blocks and counts from 0 again; the number of the new life.
    pub fn restart(&mut self) -> u32 {
        self.names.clear();
        self.host.clear();
        self.sequence = 0;
        self.process += 1;
        self.process
    }

    /// The number that the next message will have.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.sequence
    }

    /// What events call a block that the engine holds.
    #[must_use]
    pub fn name(&self, block: BlockHash) -> Option<Digest> {
        self.names.get(&block).map(|named| named.digest)
    }

    /// Writes one batch; `seconds` is its time since the epoch.
    ///
    /// Blocks whose tokens are not known (see [`KvEvent::Stored`]) have no names, and are left out.
    pub fn frame(&mut self, batch: &KvBatch, seconds: f64) -> KvFrame {
        let mut events = Vec::with_capacity(256);
        let mut count = batch.events.len();
        let mut stored = Vec::new();
        for event in &batch.events {
            self.event(&mut events, event);
            match event {
                KvEvent::Stored { .. } => stored.extend_from_slice(&self.digests),
                KvEvent::Removed { .. } => {}
                KvEvent::Cleared => stored.clear(),
            }
        }
        let [new, gone] = self.host.offload(&stored);
        if !gone.is_empty() {
            self.removed(&mut events, &gone, CPU);
            count += 1;
        }
        if !new.is_empty() {
            self.stored(&mut events, &new, None);
            count += 1;
        }
        let mut out = Vec::with_capacity(events.len() + 24);
        msgpack::array(&mut out, 3);
        msgpack::float(&mut out, seconds);
        msgpack::array(&mut out, count);
        out.extend_from_slice(&events);
        msgpack::uint(&mut out, u64::from(self.rank));
        let sequence = self.sequence;
        self.sequence += 1;
        KvFrame { process: self.process, sequence, payload: out.into(), at: batch.at }
    }

    fn event(&mut self, out: &mut Vec<u8>, event: &KvEvent) {
        match event {
            KvEvent::Stored { parent, blocks, tokens, lora, cache_salt } => {
                let parent = parent.and_then(|parent| self.name(parent));
                let adapter = lora.as_ref().and_then(|name| self.adapters.iter().position(|a| a.name == *name));
                self.name_blocks(parent, blocks, tokens, adapter, cache_salt.as_deref());
                let stored = Stored { parent, tokens, adapter, cache_salt: cache_salt.as_deref() };
                self.stored(out, &self.digests, Some(&stored));
            }
            KvEvent::Removed { hash } => {
                let name = self.forget(*hash);
                self.removed(out, name.as_slice(), GPU);
            }
            KvEvent::Cleared => {
                self.names.clear();
                self.host.clear();
                self.kind(out, "AllBlocksCleared", 1);
            }
        }
    }

    /// Computes the names of blocks that were stored, into `digests`.
    fn name_blocks(
        &mut self,
        mut parent: Option<Digest>,
        blocks: &[KvBlock],
        tokens: &[u32],
        adapter: Option<usize>,
        cache_salt: Option<&str>,
    ) {
        let lora = adapter.and_then(|index| self.adapters.get(index));
        let extra = ExtraKeys { lora: lora.map(|a| Lora { name: &a.name, path: &a.path }), cache_salt };
        self.digests.clear();
        for (block, tokens) in blocks.iter().zip(tokens.chunks_exact(self.block_size as usize)) {
            let digest = self.hasher.block(parent.as_ref(), tokens, &extra);
            self.names.entry(block.hash).or_insert(NamedBlock { digest, copies: 0 }).copies += 1;
            self.digests.push(digest);
            parent = Some(digest);
        }
    }

    /// Blocks that were stored; without their content when they were copied to host memory.
    fn stored(&self, out: &mut Vec<u8>, blocks: &[Digest], stored: Option<&Stored<'_>>) {
        let parent = stored.and_then(|stored| stored.parent);
        let tokens = stored.map_or(&[][..], |stored| stored.tokens);
        let adapter = stored.and_then(|stored| stored.adapter);
        let name = adapter.and_then(|index| self.adapters.get(index)).map(|adapter| &*adapter.name);
        self.kind(out, "BlockStored", if self.encoding == EventEncoding::Map { 11 } else { 12 });
        self.digests(out, blocks);
        self.key(out, "parent_block_hash");
        match &parent {
            Some(parent) => self.digest(out, parent),
            None => msgpack::nil(out),
        }
        self.key(out, "token_ids");
        msgpack::array(out, tokens.len());
        for token in tokens {
            msgpack::uint(out, u64::from(*token));
        }
        self.key(out, "block_size");
        msgpack::uint(out, stored.map_or(0, |_| u64::from(self.block_size)));
        self.key(out, "lora_id");
        match adapter {
            Some(index) => msgpack::uint(out, index as u64 + 1),
            None => msgpack::nil(out),
        }
        self.key(out, "medium");
        msgpack::text(out, if stored.is_some() { GPU } else { CPU });
        self.key(out, "lora_name");
        match name {
            Some(name) => msgpack::text(out, name),
            None => msgpack::nil(out),
        }
        self.key(out, "extra_keys");
        match stored {
            Some(stored) => {
                msgpack::array(out, blocks.len());
                for index in 0..blocks.len() {
                    let salt = stored.cache_salt.filter(|_| index == 0 && parent.is_none());
                    extra_keys(out, name, salt);
                }
            }
            None => msgpack::nil(out),
        }
        self.key(out, "group_idx");
        msgpack::uint(out, GROUP);
        self.key(out, "kv_cache_spec_kind");
        match stored {
            Some(_) => msgpack::text(out, SPEC_KIND),
            None => msgpack::nil(out),
        }
        if self.encoding == EventEncoding::Array {
            // The sliding window, which there is none of.
            msgpack::nil(out);
        }
    }

    /// One copy of a block is gone: what it was called.
    fn forget(&mut self, block: BlockHash) -> Option<Digest> {
        let digest = self.name(block);
        if let Some(named) = self.names.get_mut(&block) {
            named.copies -= 1;
            if named.copies == 0 {
                self.names.remove(&block);
            }
        }
        digest
    }

    fn removed(&self, out: &mut Vec<u8>, blocks: &[Digest], medium: &str) {
        self.kind(out, "BlockRemoved", 4);
        self.digests(out, blocks);
        self.key(out, "medium");
        msgpack::text(out, medium);
        self.key(out, "group_idx");
        msgpack::uint(out, GROUP);
    }

    fn digests(&self, out: &mut Vec<u8>, blocks: &[Digest]) {
        self.key(out, "block_hashes");
        msgpack::array(out, blocks.len());
        for digest in blocks {
            self.digest(out, digest);
        }
    }

    /// Opens an event of so many fields, its kind included.
    fn kind(&self, out: &mut Vec<u8>, kind: &str, fields: usize) {
        match self.encoding {
            EventEncoding::Map => {
                msgpack::map(out, fields);
                msgpack::text(out, "type");
            }
            EventEncoding::Array => msgpack::array(out, fields),
        }
        msgpack::text(out, kind);
    }

    fn key(&self, out: &mut Vec<u8>, key: &str) {
        if self.encoding == EventEncoding::Map {
            msgpack::text(out, key);
        }
    }

    fn digest(&self, out: &mut Vec<u8>, digest: &Digest) {
        match self.hash {
            HashForm::Int => msgpack::uint(out, digest.event_hash()),
            HashForm::Bytes => msgpack::bin(out, digest.as_bytes()),
        }
    }
}

/// What a `BlockStored` says beside the names of its blocks.
struct Stored<'a> {
    parent: Option<Digest>,
    tokens: &'a [u32],
    adapter: Option<usize>,
    cache_salt: Option<&'a str>,
}

/// A block's extra keys as events have them: untagged.
fn extra_keys(out: &mut Vec<u8>, lora: Option<&str>, salt: Option<&str>) {
    let keys = [lora, salt];
    match keys.iter().flatten().count() {
        0 => msgpack::nil(out),
        count => {
            msgpack::array(out, count);
            keys.iter().flatten().for_each(|key| msgpack::text(out, key));
        }
    }
}

/// The few forms of msgpack that occur, each in its shortest spelling. Nothing here has 2^32 items or bytes.
mod msgpack {
    pub(super) fn nil(out: &mut Vec<u8>) {
        out.push(0xc0);
    }

    pub(super) fn float(out: &mut Vec<u8>, value: f64) {
        out.push(0xcb);
        out.extend_from_slice(&value.to_be_bytes());
    }

    pub(super) fn uint(out: &mut Vec<u8>, value: u64) {
        let [.., a, b, c, d] = value.to_be_bytes();
        match value {
            0..=0x7F => out.push(d),
            0x80..=0xFF => out.extend_from_slice(&[0xcc, d]),
            0x100..=0xFFFF => out.extend_from_slice(&[0xcd, c, d]),
            0x1_0000..=0xFFFF_FFFF => out.extend_from_slice(&[0xce, a, b, c, d]),
            0x1_0000_0000.. => {
                out.push(0xcf);
                out.extend_from_slice(&value.to_be_bytes());
            }
        }
    }

    pub(super) fn array(out: &mut Vec<u8>, items: usize) {
        head(out, items, Some((0x90, 15)), [None, Some(0xdc), Some(0xdd)]);
    }

    pub(super) fn map(out: &mut Vec<u8>, pairs: usize) {
        head(out, pairs, Some((0x80, 15)), [None, Some(0xde), Some(0xdf)]);
    }

    pub(super) fn text(out: &mut Vec<u8>, text: &str) {
        head(out, text.len(), Some((0xa0, 31)), [Some(0xd9), Some(0xda), Some(0xdb)]);
        out.extend_from_slice(text.as_bytes());
    }

    pub(super) fn bin(out: &mut Vec<u8>, bytes: &[u8]) {
        head(out, bytes.len(), None, [Some(0xc4), Some(0xc5), Some(0xc6)]);
        out.extend_from_slice(bytes);
    }

    /// A length: inside the byte where `fixed` (the byte, the greatest length) allows it, or after the code for
    /// 1, 2 or 4 bytes.
    fn head(out: &mut Vec<u8>, length: usize, fixed: Option<(u8, usize)>, codes: [Option<u8>; 3]) {
        let [a, b, c, d] = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
        let [one, two, four] = codes;
        match (fixed, one, two, four) {
            (Some((byte, most)), ..) if length <= most => out.push(byte | d),
            (_, Some(code), ..) if length <= 0xFF => out.extend_from_slice(&[code, d]),
            (_, _, Some(code), _) if length <= 0xFFFF => out.extend_from_slice(&[code, c, d]),
            (.., code) => out.extend_from_slice(&[code.unwrap_or(0xc1), a, b, c, d]),
        }
    }
}
