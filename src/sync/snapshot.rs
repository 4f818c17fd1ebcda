//! Chunks of a prefix index as messages: endpoints by their incarnation, keys packed. Pure.

use crate::generated::v1;
use crate::pools::EndpointKey;
use ahash::AHashMap;
use attache_prefix::cache::BlockUnit;
use attache_prefix::{ExportChunk, ExportCursor, ExportHolder, ExportRun};
use attache_types::ids::EndpointId;
use prost::Message as _;

/// Size of a chunk at which its sender ends it, as the prefix index counts: the message has up to a third more.
pub(crate) const CHUNK_BYTES: usize = 160 << 10;
/// Largest size of the runs in a message. Runs beyond are left out: one prompt may be longer than a chunk.
pub(crate) const MAX_CHUNK: usize = 240 << 10;
/// Bytes of a run in its message beside the run itself: tag and length.
const RUN_FRAME: usize = 4;

/// Size of a block in a message: tokens and bytes, one of which is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireUnit {
    pub(crate) tokens: u32,
    pub(crate) bytes: u32,
}

impl WireUnit {
    pub(crate) fn of(unit: BlockUnit) -> Self {
        match unit {
            BlockUnit::Tokens(tokens) => Self { tokens, bytes: 0 },
            BlockUnit::Bytes(bytes) => Self { tokens: 0, bytes },
        }
    }
}

/// A chunk that does not follow the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidChunk;

/// The message of an exported chunk, whose endpoints have the incarnations `keys`. `header` is the message without
/// endpoints and runs.
pub(crate) fn encode(
    chunk: ExportChunk,
    keys: &AHashMap<EndpointId, EndpointKey>,
    header: v1::SnapshotChunk,
) -> v1::SnapshotChunk {
    let mut message = v1::SnapshotChunk { next: chunk.next.map(|next| next.0), ..header };
    let mut indexes: AHashMap<EndpointId, u32> = AHashMap::new();
    let mut bytes = 0;
    for run in chunk.runs {
        let run = encode_run(run, &mut |endpoint| {
            let key = keys.get(&endpoint)?;
            Some(*indexes.entry(endpoint).or_insert_with(|| {
                message.endpoints.push(key.0);
                message.endpoints.len() as u32 - 1
            }))
        });
        bytes += RUN_FRAME + run.encoded_len();
        if bytes + size_of::<u64>() * message.endpoints.len() > MAX_CHUNK {
            break;
        }
        message.runs.push(run);
    }
    message
}

fn encode_run(run: ExportRun, index: &mut impl FnMut(EndpointId) -> Option<u32>) -> v1::SnapshotRun {
    let mut encoded = v1::SnapshotRun {
        parent: run.parent,
        offset: run.offset,
        first_key_high: run.first_key_high,
        keys: run.keys,
        tenant: run.tenant,
        ..v1::SnapshotRun::default()
    };
    for holder in run.holders {
        let Some(index) = index(holder.endpoint) else { continue };
        encoded.holders.push(index);
        encoded.holder_blocks.push(holder.blocks);
        encoded.holder_ages_ms.push(holder.age_ms);
    }
    encoded
}

/// The chunk of a message, for the endpoints `ids` of its table. Holders that this picker does not know, `None`, are
/// left out.
pub(crate) fn decode(message: v1::SnapshotChunk, ids: &[Option<EndpointId>]) -> Result<ExportChunk, InvalidChunk> {
    if message.next.is_some_and(|next| next <= message.cursor) {
        return Err(InvalidChunk);
    }
    let runs: Result<Vec<ExportRun>, _> = message.runs.into_iter().map(|run| decode_run(run, ids)).collect();
    Ok(ExportChunk { runs: runs?, next: message.next.map(ExportCursor) })
}

fn decode_run(run: v1::SnapshotRun, ids: &[Option<EndpointId>]) -> Result<ExportRun, InvalidChunk> {
    if run.holders.len() != run.holder_blocks.len() || run.holders.len() != run.holder_ages_ms.len() {
        return Err(InvalidChunk);
    }
    let mut holders = Vec::with_capacity(run.holders.len());
    for ((index, blocks), age_ms) in run.holders.into_iter().zip(run.holder_blocks).zip(run.holder_ages_ms) {
        if let Some(endpoint) = *ids.get(index as usize).ok_or(InvalidChunk)? {
            holders.push(ExportHolder { endpoint, blocks, age_ms });
        }
    }
    let v1::SnapshotRun { parent, offset, first_key_high, keys, tenant, .. } = run;
    Ok(ExportRun { parent, offset, first_key_high, keys, tenant, holders })
}
