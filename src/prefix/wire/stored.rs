//! Decoding of the two events that carry blocks, field by field, into reused buffers.

use super::extra::{self, ExtraContext};
use super::msgpack::{Reader, Value};
use super::{Copied, EventFields, Fault, Refusal, Removed, Stored};
use crate::index::{Origin, StoredBlock, Tier};
use crate::key::{BlockKey, EngineHash, KeySpace, Root};

/// A field of the two events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventField {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    Kind,
    Origin,
    CopyCounts,
    /// A position for which no engine has defined a field yet, or one that Attaché does not use. `Origin` and
    /// `CopyCounts` are recognised there by their values.
    Trailing,
    /// A field that Attaché does not use.
    Other,
}

/// Positions of `BlockStored` as an array: the order in which vLLM added the fields.
const STORED: &[EventField] = &[
    EventField::Hashes,
    EventField::Parent,
    EventField::Tokens,
    EventField::BlockSize,
    EventField::LoraId,
    EventField::Medium,
    EventField::LoraName,
    EventField::ExtraKeys,
    EventField::Group,
    EventField::Kind,
    // The window, the locality and the owner of the blocks.
    EventField::Trailing,
    EventField::Trailing,
    EventField::Trailing,
    // The session, whose name the client chooses.
    EventField::Other,
];
/// Positions of `BlockRemoved` as an array.
const REMOVED: &[EventField] = &[EventField::Hashes, EventField::Medium, EventField::Group];

impl EventField {
    /// Returns the field with this name in a map.
    pub(super) fn named(name: &[u8]) -> Self {
        match name {
            b"block_hashes" => EventField::Hashes,
            b"parent_block_hash" => EventField::Parent,
            b"token_ids" => EventField::Tokens,
            b"block_size" => EventField::BlockSize,
            b"lora_id" => EventField::LoraId,
            b"medium" => EventField::Medium,
            b"lora_name" => EventField::LoraName,
            b"extra_keys" => EventField::ExtraKeys,
            b"group_idx" => EventField::Group,
            b"kv_cache_spec_kind" => EventField::Kind,
            b"origin" => EventField::Origin,
            b"remaining_copy_counts" => EventField::CopyCounts,
            _ => EventField::Other,
        }
    }
}

/// Content of a `BlockStored` event.
pub(super) enum StoredEvent<'a> {
    /// Blocks with their token ids.
    Blocks(Stored<'a>),
    /// Blocks by their engine names alone.
    Names(Copied<'a>),
    /// Blocks of a group without prefix caching; the group's number.
    Apart(Option<u32>),
    /// An event without blocks.
    Nothing,
}

/// Bytes of a block of 16 token ids, vLLM's default.
const USUAL_BLOCK: usize = 64;

/// Buffers that one event is decoded into and the next one reuses.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    hashes: Vec<EngineHash>,
    blocks: Vec<StoredBlock>,
    /// Copies that remain of each removed block.
    remaining: Vec<u32>,
    /// Token ids of the current block.
    tokens: Vec<u32>,
    scratch: Vec<u8>,
}

/// State of decoding a `BlockStored`.
#[derive(Default)]
struct Decoding<'a> {
    parent: Option<EngineHash>,
    hashes: bool,
    /// Where `token_ids` is. Decoding it waits for `block_hashes` if that comes later, and the first block's key waits
    /// for the fields that name the root.
    ids: Option<Reader<'a>>,
    /// Number of ids in `token_ids`, once decoded.
    tokens: Option<u64>,
    block_size: Option<u64>,
    lora_id: Option<u64>,
    lora: Option<&'a [u8]>,
    tier: Option<Tier>,
    extra: Option<Reader<'a>>,
    group: Option<u32>,
    kind: Option<&'a [u8]>,
    origin: Option<Origin>,
}

impl Buffers {
    /// Memory of the buffers in bytes.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        8 * self.hashes.capacity()
            + 16 * self.blocks.capacity()
            + 4 * (self.tokens.capacity() + self.remaining.capacity())
            + self.scratch.capacity()
    }

    /// Decodes a `BlockStored` whose fields come next.
    pub(super) fn stored<'a, 'p: 'a>(
        &'a mut self,
        keys: KeySpace,
        reader: &mut Reader<'p>,
        fields: EventFields,
    ) -> Result<StoredEvent<'a>, Fault> {
        let start = *reader;
        match self.prefixes(keys, reader, fields) {
            Err(Fault::Refused(reason)) => {
                // These checks are for prefix blocks. An event of a group without prefix caching may have any shape.
                *reader = start;
                apart(reader, fields)?.ok_or(Fault::Refused(reason))
            }
            read => read,
        }
    }

    fn prefixes<'a, 'p: 'a>(
        &'a mut self,
        keys: KeySpace,
        reader: &mut Reader<'p>,
        mut fields: EventFields,
    ) -> Result<StoredEvent<'a>, Fault> {
        let mut read = Decoding::default();
        self.blocks.clear();
        while let Some(field) = fields.next(reader, STORED)? {
            match field {
                EventField::Hashes => {
                    read_hashes(reader, &mut self.hashes)?;
                    read.hashes = true;
                }
                EventField::Parent => read.parent = hash(reader, "parent_block_hash")?,
                EventField::Tokens => {
                    read.ids = Some(*reader);
                    if read.hashes {
                        read.tokens = Some(self.read_tokens(keys, reader)?);
                    } else {
                        reader.skip()?;
                    }
                }
                EventField::BlockSize => read.block_size = unsigned(reader.value()?, "block_size")?,
                EventField::LoraId => read.lora_id = unsigned(reader.value()?, "lora_id")?,
                EventField::LoraName => read.lora = string(reader.value()?, "lora_name")?,
                EventField::Medium => read.tier = Some(tier(reader.value()?)?),
                EventField::ExtraKeys => {
                    read.extra = Some(*reader);
                    reader.skip()?;
                }
                EventField::Group => read.group = group(reader.value()?)?,
                EventField::Kind => read.kind = string(reader.value()?, "kv_cache_spec_kind")?,
                EventField::Origin => read.origin = string(reader.value()?, "origin")?.and_then(origin),
                EventField::Trailing => {
                    let before = *reader;
                    reader.skip()?;
                    read.origin = read.origin.or(origin_at(before));
                }
                EventField::CopyCounts | EventField::Other => reader.skip()?,
            }
        }
        if !read.hashes {
            return Err(Refusal::Missing("block_hashes").into());
        }
        if let (None, Some(mut ids)) = (read.tokens, read.ids) {
            read.tokens = Some(self.read_tokens(keys, &mut ids)?);
        }
        self.finish(keys, &read)
    }

    /// Hashes the token ids into as many blocks as there are hashes. Returns the number of ids.
    fn read_tokens(&mut self, keys: KeySpace, reader: &mut Reader<'_>) -> Result<u64, Fault> {
        let Value::Array(tokens) = reader.value()? else { return Err(Refusal::Type("token_ids").into()) };
        self.blocks.clear();
        let blocks = self.hashes.len();
        // The array's header was checked against the remaining bytes, so these lengths are real.
        let tokens = tokens as usize;
        if tokens == 0 {
            return Ok(0);
        }
        if blocks == 0 || !tokens.is_multiple_of(blocks) {
            return Err(Refusal::Shape { blocks: blocks as u64, tokens: tokens as u64, block_size: 0 }.into());
        }
        self.tokens.resize(tokens / blocks, 0);
        for hash in &self.hashes {
            if !reader.tokens(&mut self.tokens)? {
                return Err(Refusal::Type("token_ids").into());
            }
            let bytes: &[u8] = bytemuck::cast_slice(&self.tokens);
            let key = match <&[u8; USUAL_BLOCK]>::try_from(bytes) {
                // A constant length lets the compiler remove the branches of xxh3.
                Ok(usual) => keys.next(usual),
                Err(_) => unusual_key(keys, bytes),
            };
            self.blocks.push(StoredBlock { hash: *hash, key });
        }
        Ok(tokens as u64)
    }

    fn finish<'a>(&'a mut self, keys: KeySpace, read: &Decoding<'a>) -> Result<StoredEvent<'a>, Fault> {
        if !keeps_prefixes(read.kind) {
            return Ok(StoredEvent::Apart(read.group));
        }
        let blocks = self.hashes.len() as u64;
        let tokens = read.tokens.ok_or(Refusal::Missing("token_ids"))?;
        let tier = read.tier.unwrap_or(Tier::Gpu);
        if blocks == 0 {
            return Ok(StoredEvent::Nothing);
        }
        if tokens == 0 {
            let block_size = read.block_size.unwrap_or(0);
            let Decoding { group, origin, .. } = *read;
            return Ok(StoredEvent::Names(Copied { hashes: &self.hashes, tier, block_size, group, origin }));
        }
        let block_size = read.block_size.ok_or(Refusal::Missing("block_size"))?;
        let shape = Refusal::Shape { blocks, tokens, block_size };
        let lora = read.lora.map(std::str::from_utf8).transpose().map_err(|_| Refusal::Type("lora_name"))?;
        if blocks.checked_mul(block_size) != Some(tokens) {
            return Err(shape.into());
        }
        let extra = self.extra_entries(read)?;
        if read.parent.is_none() {
            self.root(keys, read, lora, extra)?;
        }
        if let Some(mut entries) = extra {
            for (i, block) in self.blocks.iter_mut().enumerate() {
                let place = ExtraContext { lora: read.lora, is_root: i == 0 && read.parent.is_none() };
                extra::mix(&mut entries, place, keys, &mut block.key, &mut self.scratch)?;
            }
        }
        Ok(StoredEvent::Blocks(Stored {
            parent: read.parent,
            blocks: &self.blocks,
            tier,
            block_size: u32::try_from(block_size).map_err(|_| shape)?,
            lora,
            group: read.group,
            origin: read.origin,
        }))
    }

    /// Returns the entries of `extra_keys`, one for each block.
    fn extra_entries<'a>(&self, read: &Decoding<'a>) -> Result<Option<Reader<'a>>, Fault> {
        let Some(mut reader) = read.extra else { return Ok(None) };
        let blocks = self.blocks.len() as u64;
        match reader.value()? {
            Value::Nil => Ok(None),
            Value::Array(n) if u64::from(n) == blocks => Ok(Some(reader)),
            Value::Array(n) => Err(Refusal::ExtraKeys { entries: u64::from(n), blocks }.into()),
            _ => Err(Refusal::Type("extra_keys").into()),
        }
    }

    /// Computes the first block's key again, under the root that the other fields name.
    fn root(
        &mut self,
        keys: KeySpace,
        read: &Decoding<'_>,
        lora: Option<&str>,
        extra: Option<Reader<'_>>,
    ) -> Result<(), Fault> {
        let (Some(block), Some(mut ids)) = (self.blocks.first_mut(), read.ids) else { return Ok(()) };
        let salt = match extra {
            // The key that this mixes into is discarded: the root must be known before the key.
            Some(mut entry) => {
                let place = ExtraContext { lora: read.lora, is_root: true };
                extra::mix(&mut entry, place, keys, &mut block.key, &mut self.scratch)?
            }
            None => None,
        };
        let cache_salt = salt.map(std::str::from_utf8).transpose().map_err(|_| Refusal::Type("extra_keys"))?;
        let numbered;
        let name = match (lora, read.lora_id) {
            (Some(name), _) => name,
            (None, None) => "",
            // Some engines only number their adapters. Such blocks are kept apart from the base model's, though
            // no request can name them.
            (None, Some(id)) => {
                numbered = format!("lora_id {id}");
                &numbered
            }
        };
        let root = keys.root(&Root { name, cache_salt, tenant: None });
        // The ids were decoded once before, so the buffer is large enough.
        ids.value()?;
        ids.tokens(&mut self.tokens)?;
        block.key = keys.first(root, bytemuck::cast_slice(&self.tokens));
        Ok(())
    }

    /// Decodes a `BlockRemoved` whose fields come next.
    pub(super) fn removed<'a>(
        &'a mut self,
        reader: &mut Reader<'_>,
        fields: &mut EventFields,
    ) -> Result<Removed<'a>, Fault> {
        let (mut tier_read, mut group_read, mut hashes) = (None, None, false);
        let mut counts = None;
        while let Some(field) = fields.next(reader, REMOVED)? {
            match field {
                EventField::Hashes => {
                    read_hashes(reader, &mut self.hashes)?;
                    hashes = true;
                }
                EventField::Medium => tier_read = Some(tier(reader.value()?)?),
                EventField::Group => group_read = group(reader.value()?)?,
                EventField::CopyCounts => {
                    counts = Some(*reader);
                    reader.skip()?;
                }
                EventField::Trailing => {
                    let before = *reader;
                    reader.skip()?;
                    counts = counts.or(is_array(before).then_some(before));
                }
                _ => reader.skip()?,
            }
        }
        if !hashes {
            return Err(Refusal::Missing("block_hashes").into());
        }
        let remaining = match counts {
            Some(mut counts) => copy_counts(&mut counts, self.hashes.len(), &mut self.remaining)?,
            None => false,
        };
        Ok(Removed {
            hashes: &self.hashes,
            tier: tier_read.unwrap_or(Tier::Gpu),
            group: group_read,
            remaining: remaining.then_some(&*self.remaining),
        })
    }
}

/// Decodes a `BlockStored` to its end; returns its group if that has no prefix caching.
fn apart(reader: &mut Reader<'_>, mut fields: EventFields) -> Result<Option<StoredEvent<'static>>, Fault> {
    let (mut group_read, mut kind) = (None, None);
    while let Some(field) = fields.next(reader, STORED)? {
        match field {
            EventField::Group => group_read = group(reader.value()?)?,
            EventField::Kind => kind = string(reader.value()?, "kv_cache_spec_kind")?,
            _ => reader.skip()?,
        }
    }
    Ok((!keeps_prefixes(kind)).then_some(StoredEvent::Apart(group_read)))
}

fn read_hashes(reader: &mut Reader<'_>, out: &mut Vec<EngineHash>) -> Result<(), Fault> {
    out.clear();
    let Value::Array(n) = reader.value()? else { return Err(Refusal::Type("block_hashes").into()) };
    for _ in 0..n {
        out.push(hash(reader, "block_hashes")?.ok_or(Refusal::Type("block_hashes"))?);
    }
    Ok(())
}

/// A separate function, so that blocks of the usual size skip xxh3's general set-up.
#[inline(never)]
fn unusual_key(keys: KeySpace, block: &[u8]) -> BlockKey {
    keys.next(block)
}

/// Decodes an engine's hash: a signed or unsigned integer, or the last 8 bytes of a digest; `None` for nil.
#[inline]
fn hash(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<EngineHash>, Fault> {
    if let Some(whole) = reader.wide() {
        return Ok(Some(EngineHash(whole)));
    }
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Uint(h) => Ok(Some(EngineHash(h))),
        Value::Int(h) => Ok(Some(EngineHash(h.cast_unsigned()))),
        Value::Bin(digest) | Value::Str(digest) => {
            let tail = digest.last_chunk::<8>().ok_or(Refusal::Type(field))?;
            Ok(Some(EngineHash(u64::from_be_bytes(*tail))))
        }
        _ => Err(Refusal::Type(field).into()),
    }
}

fn unsigned(value: Value<'_>, field: &'static str) -> Result<Option<u64>, Refusal> {
    match value {
        Value::Nil => Ok(None),
        Value::Uint(v) => Ok(Some(v)),
        _ => Err(Refusal::Type(field)),
    }
}

fn group(value: Value<'_>) -> Result<Option<u32>, Refusal> {
    let group = unsigned(value, "group_idx")?;
    group.map(|g| u32::try_from(g).map_err(|_| Refusal::Type("group_idx"))).transpose()
}

fn string<'a>(value: Value<'a>, field: &'static str) -> Result<Option<&'a [u8]>, Refusal> {
    match value {
        Value::Nil => Ok(None),
        Value::Str(s) => Ok(Some(s)),
        _ => Err(Refusal::Type(field)),
    }
}

/// The origin that an engine names; `None` for a name that Attaché does not know.
fn origin(name: &[u8]) -> Option<Origin> {
    match name {
        b"NEW" => Some(Origin::New),
        b"REUSED" => Some(Origin::Reused),
        _ => None,
    }
}

/// The origin, if the next value names one.
fn origin_at(mut reader: Reader<'_>) -> Option<Origin> {
    match reader.value() {
        Ok(Value::Str(name)) => origin(name),
        _ => None,
    }
}

fn is_array(mut reader: Reader<'_>) -> bool {
    matches!(reader.value(), Ok(Value::Array(_)))
}

/// Decodes `remaining_copy_counts` of `blocks` blocks; returns false for nil.
fn copy_counts(reader: &mut Reader<'_>, blocks: usize, out: &mut Vec<u32>) -> Result<bool, Fault> {
    out.clear();
    let n = match reader.value()? {
        Value::Nil => return Ok(false),
        Value::Array(n) => n,
        _ => return Err(Refusal::Type("remaining_copy_counts").into()),
    };
    if n as usize != blocks {
        return Err(Refusal::CopyCounts { entries: n.into(), blocks: blocks as u64 }.into());
    }
    for _ in 0..n {
        let count = unsigned(reader.value()?, "remaining_copy_counts")?;
        let count = count.ok_or(Refusal::Type("remaining_copy_counts"))?;
        out.push(u32::try_from(count).unwrap_or(u32::MAX));
    }
    Ok(true)
}

/// The names of tiers in vLLM, SGLang (`StorageMedium`, before it `CPU_TIER1` and `CPU_TIER2`), and Dynamo's KV block
/// manager.
const TIERS: &[(&[u8], Tier)] = &[
    (b"GPU", Tier::Gpu),
    (b"DEVICE", Tier::Gpu),
    (b"HBM", Tier::Gpu),
    (b"CPU", Tier::Cpu),
    (b"CPU_PINNED", Tier::Cpu),
    (b"CPU_TIER1", Tier::Cpu),
    (b"HOST", Tier::Cpu),
    (b"HOST_PINNED", Tier::Cpu),
    (b"DRAM", Tier::Cpu),
];

/// The tier that `medium` names; other media (`STORAGE`, `DISK`, `EXTERNAL`, `CPU_TIER2`) are slower than host memory.
fn tier(value: Value<'_>) -> Result<Tier, Refusal> {
    let Some(name) = string(value, "medium")? else { return Ok(Tier::Gpu) };
    let known = TIERS.iter().find(|(known, _)| name.eq_ignore_ascii_case(known));
    Ok(known.map_or(Tier::Disk, |(_, tier)| *tier))
}

/// Whether a block of this cache group can be reused behind all blocks before it: full attention of any
/// variant, or an unknown kind.
fn keeps_prefixes(kind: Option<&[u8]>) -> bool {
    !matches!(
        kind,
        Some(
            b"sliding_window"
                | b"sliding_window_mla"
                | b"mamba"
                | b"chunked_local_attention"
                | b"encoder_only_attention"
                | b"cross_attention",
        )
    )
}
