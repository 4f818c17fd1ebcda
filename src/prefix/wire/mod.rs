//! KV-event batches as engines publish them, decoded in one pass over the MessagePack bytes.
//!
//! Both encodings are read: events as positional arrays (vLLM to 0.23, SGLang) of any age, and as maps tagged with `type` (vLLM from
//! 0.24); the batch as an array or a map; hashes as unsigned or signed integers or as bytes. A stored block becomes its [`BlockKey`]
//! straight from the token ids on the wire, in buffers that are reused: no object a block, and no allocation by a claimed length.
//!
//! Called by the feed of KV events and by `sim`'s checks. Pure. May import `prefix::key` and `prefix::index`.

mod extra;
mod msgpack;
mod stored;

pub use extra::multimodal_content;
pub use msgpack::Malformed;

use crate::index::{StoredBlock, Tier};
use crate::key::{EngineHash, KeySpace};
use msgpack::{Reader, Value};
use stored::{Buffers, Field, Told};

/// Blocks that an engine has stored, each behind the one before it.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The block before the first; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// The blocks, never none.
    pub blocks: &'a [StoredBlock],
    /// Where they lie.
    pub tier: Tier,
    /// Tokens in each.
    pub block_size: u32,
    /// The adapter they were computed with.
    pub lora: Option<&'a str>,
    /// The cache group of a model with several kinds of attention.
    pub group: Option<u32>,
}

/// Blocks that lie on a tier as well, told by their names alone, as vLLM's `OffloadingConnector` does.
#[derive(Clone, Copy, Debug)]
pub struct Copied<'a> {
    /// The blocks, never none.
    pub hashes: &'a [EngineHash],
    /// Where they lie now too.
    pub tier: Tier,
    /// Tokens that each name stands for; 0 when that is not told.
    pub block_size: u64,
    /// The cache group that they belong to.
    pub group: Option<u32>,
}

/// Blocks that an engine has dropped.
#[derive(Clone, Copy, Debug)]
pub struct Removed<'a> {
    /// The blocks.
    pub hashes: &'a [EngineHash],
    /// Where they lay.
    pub tier: Tier,
    /// The cache group that they belonged to.
    pub group: Option<u32>,
}

/// Takes what a batch says, in its order.
pub trait Sink {
    /// Blocks were stored.
    fn stored(&mut self, event: Stored<'_>);
    /// Blocks were copied to another tier.
    fn copied(&mut self, event: Copied<'_>);
    /// Blocks were stored that are no prefixes: the group is one of a sliding window, a recurrent state or an encoder.
    fn stored_apart(&mut self, group: Option<u32>);
    /// Blocks were dropped.
    fn removed(&mut self, event: Removed<'_>);
    /// Everything was dropped.
    fn cleared(&mut self);
    /// An event of a known type can't be used; the batch goes on.
    fn refused(&mut self, reason: Refusal);
}

/// Why an event was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is neither an array nor a map that begins with a name.
    #[error("an event is neither an array that begins with its type nor a map with the key `type`")]
    NotAnEvent,
    /// A field that it must have is not there.
    #[error("the event has no `{0}`")]
    Missing(&'static str),
    /// A field is of another type.
    #[error("`{0}` is of a type that it can't be")]
    Type(&'static str),
    /// The fields contradict each other.
    #[error("{tokens} tokens are not {blocks} blocks of {block_size} tokens")]
    Shape {
        /// Hashes in `block_hashes`.
        blocks: u64,
        /// Ids in `token_ids`.
        tokens: u64,
        /// `block_size`, or 0 when it was not told.
        block_size: u64,
    },
    /// There is not one entry of `extra_keys` for each block.
    #[error("{entries} entries in `extra_keys` for {blocks} blocks")]
    ExtraKeys {
        /// Entries.
        entries: u64,
        /// Blocks.
        blocks: u64,
    },
}

/// A batch that can't be read to its end. What came before was handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// No MessagePack.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// MessagePack, but no batch.
    #[error("a batch is neither `[timestamp, [event, …], rank]` nor a map with `ts` and `events`")]
    NotABatch,
}

/// What stands around the events of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Unix time of its making, seconds.
    pub timestamp: f64,
    /// The data-parallel rank that speaks.
    pub rank: Option<u32>,
    /// Events in it, of whatever type.
    pub events: u32,
    /// Events of a type that we don't know, passed over.
    pub unknown: u32,
}

/// An event went wrong: alone, or with everything after it.
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

/// Decodes batches; its buffers stay.
#[derive(Debug)]
pub struct Decoder {
    keys: KeySpace,
    buffers: Buffers,
}

impl Decoder {
    /// A decoder that makes keys of `keys`.
    #[must_use]
    pub fn new(keys: KeySpace) -> Self {
        Self { keys, buffers: Buffers::default() }
    }

    /// Decodes one batch and hands its events to `sink`.
    ///
    /// # Errors
    /// When the bytes are no batch; events before the fault were handed on.
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
                Value::Str(name) => (name, Fields::positional(n - 1)),
                _ => return Err(Refusal::NotAnEvent.into()),
            },
            Value::Map(n) => {
                let name = name_in_map(*reader, n)?.ok_or(Refusal::NotAnEvent)?;
                (name, Fields::named(n))
            }
            _ => return Err(Refusal::NotAnEvent.into()),
        };
        match name {
            b"BlockStored" => match self.buffers.stored(self.keys, reader, fields)? {
                Told::Blocks(event) => sink.stored(event),
                Told::Names(event) => sink.copied(event),
                Told::Apart(group) => sink.stored_apart(group),
                Told::Nothing => {}
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

/// The event's type, wherever in the map it stands; engines put it first.
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
struct Fields {
    left: u32,
    next: Option<usize>,
}

impl Fields {
    fn positional(left: u32) -> Self {
        Self { left, next: Some(0) }
    }

    fn named(left: u32) -> Self {
        Self { left, next: None }
    }

    /// The field whose value comes next, `None` after the last. `order` names the positions.
    #[inline(always)]
    fn next(&mut self, reader: &mut Reader<'_>, order: &[Field]) -> Result<Option<Field>, Fault> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        let Some(at) = &mut self.next else { return named_field(reader).map(Some) };
        let field = order.get(*at).copied().unwrap_or(Field::Other);
        *at += 1;
        Ok(Some(field))
    }
}

fn named_field(reader: &mut Reader<'_>) -> Result<Field, Fault> {
    match reader.value()? {
        Value::Str(name) => Ok(Field::named(name)),
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

/// When a batch was made (Unix time, seconds) and by which rank, without decoding its events.
///
/// # Errors
/// When the bytes are no batch.
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

/// When a batch was made, Unix time in seconds, without reading further than that; `None` when the bytes are no batch.
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
