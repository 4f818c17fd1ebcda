//! Decoder of the KV event batches that engines publish: one pass over the MessagePack bytes.
//!
//! It decodes events as positional arrays of any version (vLLM to 0.23, SGLang) and as maps tagged with
//! `type` (vLLM from 0.24); the batch as an array or a map; hashes as unsigned or signed integers or as
//! bytes. Token ids on the wire are hashed directly to a [`BlockKey`](crate::BlockKey) in reused buffers, without an
//! object per block, and claimed lengths allocate nothing.
//!
//! Called by `kv_events` and by the tests of `sim`. No I/O. May import `prefix::key` and `prefix::index`.

mod extra;
mod msgpack;
mod stored;

pub use msgpack::Malformed;

use crate::index::{Origin, StoredBlock, Tier};
use crate::key::{EngineHash, KeySpace};
use msgpack::{Reader, Value};
use stored::{Buffers, EventField, StoredEvent};

/// Blocks that an engine has stored, each behind the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The block before the first one; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// The blocks, at least one.
    pub blocks: &'a [StoredBlock],
    /// The memory where the blocks were stored.
    pub tier: Tier,
    /// Number of tokens in each block.
    pub block_size: u32,
    /// The LoRA adapter with which the blocks were computed.
    pub lora: Option<&'a str>,
    /// The cache group, in models with several kinds of attention.
    pub group: Option<u32>,
    /// Whether the blocks are new; `None` if the engine does not say.
    pub origin: Option<Origin>,
}

/// Blocks that are now on another tier as well, identified by their names alone, as vLLM's `OffloadingConnector`
/// reports them.
#[derive(Clone, Copy, Debug)]
pub struct Copied<'a> {
    /// The engine's hashes of the blocks, at least one.
    pub hashes: &'a [EngineHash],
    /// The additional tier of the blocks.
    pub tier: Tier,
    /// Number of tokens in each block; 0 if unknown.
    pub block_size: u64,
    /// The cache group of the blocks.
    pub group: Option<u32>,
    /// Whether the blocks are new on this tier; `None` if the engine does not say.
    pub origin: Option<Origin>,
}

/// Blocks that an engine has dropped.
#[derive(Clone, Copy, Debug)]
pub struct Removed<'a> {
    /// The engine's hashes of the blocks.
    pub hashes: &'a [EngineHash],
    /// The memory from which the blocks were dropped.
    pub tier: Tier,
    /// The cache group of the blocks.
    pub group: Option<u32>,
    /// The number of copies that the engine still has of each block; `None` if it does not say.
    pub remaining: Option<&'a [u32]>,
}

/// Receives the events of a batch in order.
pub trait Sink {
    /// Blocks were stored.
    fn stored(&mut self, event: Stored<'_>);
    /// Blocks were copied to another tier.
    fn copied(&mut self, event: Copied<'_>);
    /// Blocks that are not prefixes were stored: their group has a sliding window, a recurrent state or an encoder.
    fn stored_apart(&mut self, group: Option<u32>);
    /// Blocks were dropped from a tier.
    fn removed(&mut self, event: Removed<'_>);
    /// The engine dropped all blocks.
    fn cleared(&mut self);
    /// An event of a known type is invalid; decoding continues with the next one.
    fn refused(&mut self, reason: Refusal);
}

/// The reason for which an event was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The event is neither an array nor a map that names its type.
    #[error("an event is neither an array that begins with its type nor a map with the key `type`")]
    NotAnEvent,
    /// A required field is missing.
    #[error("the event has no `{0}`")]
    Missing(&'static str),
    /// A field has an unexpected type.
    #[error("`{0}` is of a type that it can't be")]
    Type(&'static str),
    /// The numbers of tokens and blocks contradict each other.
    #[error("{tokens} tokens are not {blocks} blocks of {block_size} tokens")]
    Shape {
        /// Number of hashes in `block_hashes`.
        blocks: u64,
        /// Number of ids in `token_ids`.
        tokens: u64,
        /// The field `block_size`, or 0 when it is absent.
        block_size: u64,
    },
    /// The length of `extra_keys` differs from the number of blocks.
    #[error("{entries} entries in `extra_keys` for {blocks} blocks")]
    ExtraKeys {
        /// Number of entries in `extra_keys`.
        entries: u64,
        /// Number of blocks in the event.
        blocks: u64,
    },
    /// The length of `remaining_copy_counts` differs from the number of blocks.
    #[error("{entries} entries in `remaining_copy_counts` for {blocks} blocks")]
    CopyCounts {
        /// Number of entries in `remaining_copy_counts`.
        entries: u64,
        /// Number of blocks in the event.
        blocks: u64,
    },
}

/// A batch that could not be decoded to its end. Events before the error were delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The bytes are not valid MessagePack.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The bytes are MessagePack, but not a batch of events.
    #[error("a batch is neither `[timestamp, [event, …], rank]` nor a map with `ts` and `events`")]
    NotABatch,
}

/// The metadata of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Unix time at which the engine made the batch, in seconds.
    pub timestamp: f64,
    /// The data-parallel rank that published the batch.
    pub rank: Option<u32>,
    /// Number of events of any type.
    pub events: u32,
    /// Number of skipped events, whose types are unknown.
    pub unknown: u32,
}

/// An error that ends one event, or the whole batch.
enum Fault {
    Malformed(Malformed),
    Refused(Refusal),
}

impl From<Malformed> for Fault {
    fn from(e: Malformed) -> Self {
        Fault::Malformed(e)
    }
}

impl From<Refusal> for Fault {
    fn from(e: Refusal) -> Self {
        Fault::Refused(e)
    }
}

/// Decodes batches; reuse it to keep its buffers.
#[derive(Debug)]
pub struct Decoder {
    keys: KeySpace,
    buffers: Buffers,
}

impl Decoder {
    /// A decoder that makes block keys in the space `keys`.
    #[must_use]
    pub fn new(keys: KeySpace) -> Self {
        Self { keys, buffers: Buffers::default() }
    }

    /// Decodes one batch and delivers its events to `sink`.
    ///
    /// # Errors
    /// [`BatchError`] when the bytes are not a batch. Events before the error were delivered.
    pub fn decode<S: Sink + ?Sized>(&mut self, payload: &[u8], sink: &mut S) -> Result<Batch, BatchError> {
        let mut reader = Reader::new(payload);
        let mut batch = Batch::default();
        let mut found = false;
        match reader.value()? {
            Value::Array(n) if n >= 2 => {
                batch.timestamp = seconds(reader.value()?);
                found = self.events(&mut reader, &mut batch, sink)?;
                if n > 2 {
                    batch.rank = rank(reader.value()?);
                }
            }
            Value::Map(n) => {
                for _ in 0..n {
                    match reader.value()? {
                        Value::Str(b"ts") => batch.timestamp = seconds(reader.value()?),
                        Value::Str(b"events") => found = self.events(&mut reader, &mut batch, sink)?,
                        Value::Str(b"data_parallel_rank") => batch.rank = rank(reader.value()?),
                        Value::Str(_) => reader.skip()?,
                        _ => return Err(BatchError::NotABatch),
                    }
                }
            }
            _ => {}
        }
        if found { Ok(batch) } else { Err(BatchError::NotABatch) }
    }

    fn events<S: Sink + ?Sized>(
        &mut self,
        reader: &mut Reader<'_>,
        batch: &mut Batch,
        sink: &mut S,
    ) -> Result<bool, Malformed> {
        let Value::Array(n) = reader.value()? else { return Ok(false) };
        for _ in 0..n {
            batch.events += 1;
            let start = *reader;
            match self.event(reader, batch, sink) {
                Ok(()) => {}
                Err(Fault::Malformed(e)) => return Err(e),
                Err(Fault::Refused(reason)) => {
                    sink.refused(reason);
                    *reader = start;
                    reader.skip()?;
                }
            }
        }
        Ok(true)
    }

    fn event<S: Sink + ?Sized>(
        &mut self,
        reader: &mut Reader<'_>,
        batch: &mut Batch,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let start = *reader;
        let (name, mut fields) = match reader.value()? {
            Value::Array(n) if n >= 1 => match reader.value()? {
                Value::Str(name) => (name, EventFields::positional(n - 1)),
                _ => return Err(Refusal::NotAnEvent.into()),
            },
            Value::Map(n) => {
                let name = name_in_map(*reader, n)?.ok_or(Refusal::NotAnEvent)?;
                (name, EventFields::named(n))
            }
            _ => return Err(Refusal::NotAnEvent.into()),
        };
        match name {
            b"BlockStored" => match self.buffers.stored(self.keys, reader, fields)? {
                StoredEvent::Blocks(event) => sink.stored(event),
                StoredEvent::Names(event) => sink.copied(event),
                StoredEvent::Apart(group) => sink.stored_apart(group),
                StoredEvent::Nothing => {}
            },
            b"BlockRemoved" => sink.removed(self.buffers.removed(reader, &mut fields)?),
            b"AllBlocksCleared" => {
                sink.cleared();
                *reader = start;
                reader.skip()?;
            }
            _ => {
                batch.unknown += 1;
                *reader = start;
                reader.skip()?;
            }
        }
        Ok(())
    }
}

/// Returns the event's type from any position in the map; engines put it first.
fn name_in_map<'a>(mut reader: Reader<'a>, pairs: u32) -> Result<Option<&'a [u8]>, Malformed> {
    for _ in 0..pairs {
        if reader.value()? == Value::Str(b"type") {
            let Value::Str(name) = reader.value()? else { return Ok(None) };
            return Ok(Some(name));
        }
        reader.skip()?;
    }
    Ok(None)
}

/// The fields of one event, by position or by name.
#[derive(Clone, Copy, Debug)]
struct EventFields {
    left: u32,
    next: Option<usize>,
}

impl EventFields {
    fn positional(left: u32) -> Self {
        Self { left, next: Some(0) }
    }

    fn named(left: u32) -> Self {
        Self { left, next: None }
    }

    /// Returns the field whose value comes next, `None` after the last. `order` names the positions.
    #[inline(always)]
    fn next(&mut self, reader: &mut Reader<'_>, order: &[EventField]) -> Result<Option<EventField>, Fault> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        let Some(at) = &mut self.next else { return named_field(reader).map(Some) };
        let field = order.get(*at).copied().unwrap_or(EventField::Trailing);
        *at += 1;
        Ok(Some(field))
    }
}

fn named_field(reader: &mut Reader<'_>) -> Result<EventField, Fault> {
    match reader.value()? {
        Value::Str(name) => Ok(EventField::named(name)),
        _ => Err(Refusal::NotAnEvent.into()),
    }
}

fn seconds(value: Value<'_>) -> f64 {
    match value {
        Value::Float(t) => t,
        Value::Uint(t) => t as f64,
        _ => 0.0,
    }
}

fn rank(value: Value<'_>) -> Option<u32> {
    match value {
        Value::Uint(r) => u32::try_from(r).ok(),
        _ => None,
    }
}

/// Decodes a batch's time (Unix, seconds) and rank without its events.
///
/// # Errors
/// [`BatchError`] when the bytes are not a batch.
pub fn envelope(payload: &[u8]) -> Result<Batch, BatchError> {
    let mut reader = Reader::new(payload);
    let mut batch = Batch::default();
    match reader.value()? {
        Value::Array(n) if n >= 2 => {
            batch.timestamp = seconds(reader.value()?);
            reader.skip()?;
            if n > 2 {
                batch.rank = rank(reader.value()?);
            }
        }
        Value::Map(n) => {
            for _ in 0..n {
                match reader.value()? {
                    Value::Str(b"ts") => batch.timestamp = seconds(reader.value()?),
                    Value::Str(b"data_parallel_rank") => batch.rank = rank(reader.value()?),
                    Value::Str(_) => reader.skip()?,
                    _ => return Err(BatchError::NotABatch),
                }
            }
        }
        _ => return Err(BatchError::NotABatch),
    }
    Ok(batch)
}

/// Returns the Unix time of a batch in seconds and reads no further; `None` when the bytes are not a batch.
#[must_use]
pub fn timestamp(payload: &[u8]) -> Option<f64> {
    let mut reader = Reader::new(payload);
    match reader.value().ok()? {
        Value::Array(n) if n >= 2 => reader.value().ok().map(seconds),
        _ => envelope(payload).ok().map(|b| b.timestamp),
    }
}

#[cfg(test)]
mod tests;
