//! vLLM's own names of blocks, bit for bit: what its KV events call a block, computed from the tokens.
//!
//! A full block is named by `digest(serialize((parent, (t_0, …, t_n), extra)))`. The first block's parent is
//! `NONE_HASH`, the digest of a serialized seed string; `extra` is what else separates caches: the LoRA adapter of
//! every block and the cache salt of the first. Partial blocks have no name. Digest and serialization are vLLM's
//! `--prefix-caching-hash-algo`.
//!
//! Compared with hashes that vLLM 0.22.1 and 0.32.0 published (`tests/in_process/vllm_hash.rs`). Multimodal content and
//! prompt embeddings are not covered. Pure; called by the simulated engines' KV events.

mod serialize;

use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;
use xxhash_rust::xxh3::xxh3_128;

#[cfg(test)]
mod tests;

/// `vllm-none-hash`: what vLLM 0.29 and later take for the SHA-256 pair where `PYTHONHASHSEED` is not set, so that all
/// servers agree. Earlier ones, and the xxHash pair, then take random bytes, and their hashes can't be computed.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// How blocks are serialized and digested: vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HashAlgorithm {
    /// SHA-256 of Python's pickle, protocol 5: vLLM's default.
    #[default]
    Sha256,
    /// SHA-256 of the canonical CBOR encoding.
    Sha256Cbor,
    /// XXH3, 128 bits, of the pickle; from vLLM 0.13 on.
    Xxhash,
    /// XXH3, 128 bits, of canonical CBOR; from vLLM 0.13 on.
    XxhashCbor,
}

impl HashAlgorithm {
    /// All algorithms, in the order of their flags.
    pub const ALL: [HashAlgorithm; 4] =
        [HashAlgorithm::Sha256, HashAlgorithm::Sha256Cbor, HashAlgorithm::Xxhash, HashAlgorithm::XxhashCbor];

    /// Spelling of the algorithm in vLLM's flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HashAlgorithm::Sha256 => "sha256",
            HashAlgorithm::Sha256Cbor => "sha256_cbor",
            HashAlgorithm::Xxhash => "xxhash",
            HashAlgorithm::XxhashCbor => "xxhash_cbor",
        }
    }

    fn digest(self, bytes: &[u8]) -> Digest {
        match self {
            HashAlgorithm::Sha256 | HashAlgorithm::Sha256Cbor => Digest::new(Sha256::digest(bytes).as_slice()),
            HashAlgorithm::Xxhash | HashAlgorithm::XxhashCbor => Digest::new(&xxh3_128(bytes).to_be_bytes()),
        }
    }

    fn is_cbor(self) -> bool {
        matches!(self, HashAlgorithm::Sha256Cbor | HashAlgorithm::XxhashCbor)
    }
}

impl fmt::Display for HashAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of vLLM's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("hash algorithm is {got:?}, allowed are sha256, sha256_cbor, xxhash and xxhash_cbor")]
pub struct UnknownAlgorithm {
    /// The name that was given.
    pub got: String,
}

impl FromStr for HashAlgorithm {
    type Err = UnknownAlgorithm;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = HashAlgorithm::ALL.into_iter().find(|algorithm| algorithm.name() == text);
        known.ok_or_else(|| UnknownAlgorithm { got: text.to_owned() })
    }
}

/// The name of a block: 32 bytes of SHA-256 or 16 of XXH3.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    /// Zeros after the first `length`.
    bytes: [u8; 32],
    length: u8,
}

impl Digest {
    /// `bytes` are at most 32.
    fn new(bytes: &[u8]) -> Self {
        let mut digest = Self { bytes: [0; 32], length: 0 };
        for (slot, byte) in digest.bytes.iter_mut().zip(bytes) {
            *slot = *byte;
            digest.length += 1;
        }
        digest
    }

    /// All bytes: the form of events under `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or_default()
    }

    /// The last 8 bytes, big-endian: the form of events by default.
    #[must_use]
    pub fn event_hash(&self) -> u64 {
        self.as_bytes().iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// How extra keys enter a block's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExtraForm {
    /// vLLM 0.31 and later: `("lora", name, path)`, `("cache_salt", salt)`.
    #[default]
    Tagged,
    /// vLLM 0.11 to 0.30: `name`, `salt`.
    Bare,
}

/// A LoRA adapter as vLLM knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lora<'a> {
    /// Name of the adapter, as requests give it.
    pub name: &'a str,
    /// Where it was loaded from: `root` in `/v1/models`. No part of the bare form.
    pub path: &'a str,
}

/// What else than tokens separates the blocks of a request from those of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtraKeys<'a> {
    /// LoRA adapter of the request.
    pub lora: Option<Lora<'a>>,
    /// The request's `cache_salt`; the first block holds it, the others follow from that one.
    pub cache_salt: Option<&'a str>,
}

/// Names blocks as one kind of vLLM server does. Keeps a buffer, so that naming a block allocates nothing.
#[derive(Clone, Debug)]
pub struct Hasher {
    algorithm: HashAlgorithm,
    form: ExtraForm,
    none: Digest,
    buffer: Vec<u8>,
}

impl Hasher {
    /// `seed`: the server's `PYTHONHASHSEED`, or [`DEFAULT_SEED`].
    #[must_use]
    pub fn new(algorithm: HashAlgorithm, form: ExtraForm, seed: &str) -> Self {
        let mut buffer = Vec::new();
        if algorithm.is_cbor() {
            serialize::cbor_seed(&mut buffer, seed);
        } else {
            serialize::pickle_seed(&mut buffer, seed);
        }
        Self { algorithm, form, none: algorithm.digest(&buffer), buffer }
    }

    /// The parent of every first block.
    #[must_use]
    pub fn none_hash(&self) -> Digest {
        self.none
    }

    /// The name of the full block that holds `tokens` after `parent`, or at the start when there is none.
    pub fn block(&mut self, parent: Option<&Digest>, tokens: &[u32], extra: &ExtraKeys<'_>) -> Digest {
        self.serialize(parent, tokens, extra);
        self.algorithm.digest(&self.buffer)
    }

    /// The bytes of which [`Hasher::block`] is the digest.
    pub fn serialize(&mut self, parent: Option<&Digest>, tokens: &[u32], extra: &ExtraKeys<'_>) -> &[u8] {
        let extra = ExtraKeys { cache_salt: extra.cache_salt.filter(|_| parent.is_none()), ..*extra };
        let parent = parent.unwrap_or(&self.none);
        self.buffer.clear();
        if self.algorithm.is_cbor() {
            serialize::cbor_block(&mut self.buffer, parent.as_bytes(), tokens, &extra, self.form);
        } else {
            serialize::pickle_block(&mut self.buffer, parent.as_bytes(), tokens, &extra, self.form);
        }
        &self.buffer
    }
}
