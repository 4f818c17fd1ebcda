//! The memory of the index: one range of words whose addresses never change, managed by a buddy allocator.
//!
//! Readers hold the [`Arena`] and may load any word at any time, including memory that was reused since. What they read
//! is valid only after they have checked the version of the run that led to it. Only the writer holds the [`Space`],
//! which allocates chunk by chunk. All parts of the index that grow live here, so memory that one part frees serves any
//! other, and one limit covers everything.

use super::memory::Memory;
use crate::atomics::{AtomicU64, Ordering::Relaxed};
use prefetch_index::prefetch_index;
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

/// Index of a word in the arena; 0 means none.
pub(super) type Addr = u32;

/// Words in a cache line.
pub(super) const LINE: u32 = 8;
/// Words in a page.
pub(super) const PAGE: u32 = 256;
/// The cache lines of a page.
type Lines = [Line; (PAGE / LINE) as usize];

/// Smallest and largest chunk in words: 16 KiB and 4 MiB.
const CHUNK_WORDS: (usize, usize) = (1 << 11, 1 << 19);
/// Approximate number of chunks that the memory limit is divided into.
const CHUNKS: usize = 1024;

/// The words of one cache line.
#[repr(C, align(64))]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
pub(super) struct Line(pub(super) [AtomicU64; LINE as usize]);

/// Read in place of addresses outside the memory; always zero.
static NOWHERE: Line = Line([const { AtomicU64::new(0) }; LINE as usize]);

/// The words of the arena, readable by all threads.
#[derive(Debug)]
pub(super) struct Arena {
    memory: Memory,
    /// Limit of the number of chunks.
    chunks: usize,
    /// Logarithm to base 2 of the words in a chunk.
    shift: u32,
    refused: usize,
}

impl Arena {
    /// Reserves address space for at most `bytes` without allocating it; less where the system refuses.
    pub(super) fn new(bytes: usize) -> Self {
        let words = (bytes / 8 / CHUNKS).next_power_of_two().clamp(CHUNK_WORDS.0, CHUNK_WORDS.1);
        let shift = words.trailing_zeros();
        // A chunk's bits in `Space::starts` count towards its size. Addresses end at 2^32 words.
        let chunks = (bytes / (words * 8 + words / 16)).min(1 << (32 - shift));
        let wanted = chunks * words / LINE as usize;
        let memory = Memory::reserve(wanted);
        let given = memory.lines().len();
        Self { memory, chunks: given * LINE as usize / words, shift, refused: (wanted - given) * size_of::<Line>() }
    }

    /// Returns the bytes that the system refused.
    pub(super) fn refused(&self) -> usize {
        self.refused
    }

    /// The cache line that contains `addr`.
    #[inline]
    pub(super) fn line(&self, addr: Addr) -> &Line {
        self.memory.lines().get((addr / LINE) as usize).unwrap_or(&NOWHERE)
    }

    /// All cache lines from the one that contains `addr`.
    #[inline]
    pub(super) fn lines(&self, addr: Addr) -> &[Line] {
        self.memory.lines().get((addr / LINE) as usize..).unwrap_or_default()
    }

    /// The cache lines of the page that contains `addr`.
    #[inline]
    pub(super) fn page(&self, addr: Addr) -> Option<&Lines> {
        self.memory.lines().as_chunks().0.get((addr / PAGE) as usize)
    }

    /// Prefetches the cache line that contains `addr`.
    #[inline]
    pub(super) fn prefetch(&self, addr: Addr) {
        prefetch_index(self.lines(addr), 0);
    }

    /// The word at `addr`.
    #[inline]
    pub(super) fn word(&self, addr: Addr) -> &AtomicU64 {
        self.line(addr).word(addr)
    }

    /// Loads a word with relaxed ordering.
    #[inline]
    pub(super) fn load(&self, addr: Addr) -> u64 {
        self.word(addr).load(Relaxed)
    }

    /// Stores a word with relaxed ordering.
    #[inline]
    pub(super) fn store(&self, addr: Addr, value: u64) {
        self.word(addr).store(value, Relaxed);
    }

    /// Copies the first `words` words of an extent to a larger one.
    pub(super) fn copy(&self, from: Addr, to: Addr, words: u32) {
        if words < LINE {
            // An extent smaller than a cache line may begin inside one.
            return (0..words).for_each(|word| self.store(to + word, self.load(from + word)));
        }
        let lines = self.lines(to).iter().zip(self.lines(from)).take(words.div_ceil(LINE) as usize);
        for (new, old) in lines {
            for (new, old) in new.0.iter().zip(&old.0) {
                new.store(old.load(Relaxed), Relaxed);
            }
        }
    }

    /// Loads the low half of a word.
    #[inline]
    pub(super) fn low(&self, addr: Addr) -> u32 {
        low(self.load(addr))
    }

    /// Loads the high half of a word.
    #[inline]
    pub(super) fn high(&self, addr: Addr) -> u32 {
        high(self.load(addr))
    }

    /// Stores the low half of a word.
    pub(super) fn set_low(&self, addr: Addr, value: u32) {
        self.store(addr, pair(value, self.high(addr)));
    }

    /// Stores the high half of a word.
    pub(super) fn set_high(&self, addr: Addr, value: u32) {
        self.store(addr, pair(self.low(addr), value));
    }
}

impl Line {
    /// The word of this line that `addr` selects.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    pub(super) fn word(&self, addr: Addr) -> &AtomicU64 {
        &self.0[(addr % LINE) as usize]
    }
}

/// The low 32 bits.
#[inline]
pub(super) fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

/// The high 32 bits.
#[inline]
pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// A word from its low and its high half.
#[inline]
pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Size class of an extent: it has 2 · 2^order words.
pub(super) type Order = u32;

/// The order of the smallest extent with at least `words` words.
pub(super) fn order_for(words: u32) -> Order {
    words.max(2).next_power_of_two().trailing_zeros() - 1
}

/// Number of words in an extent of this order.
pub(super) fn words_of(order: Order) -> u32 {
    2 << order
}

const ORDERS: usize = 20;

/// The writer's allocator state. Extents are buddies: each lies at a multiple of its size.
///
/// A free extent stores its neighbours in its order's list in its first word, and its order in the second.
#[derive(Debug)]
pub(super) struct Space {
    heads: [Addr; ORDERS],
    /// One bit for every two words: set where a free extent begins.
    starts: Vec<Box<[u64]>>,
    free: usize,
    shift: u32,
    max_chunks: usize,
}

impl Space {
    /// The allocator of an empty arena.
    pub(super) fn new(arena: &Arena) -> Self {
        Self {
            heads: [0; ORDERS],
            starts: Vec::with_capacity(arena.chunks),
            free: 0,
            shift: arena.shift,
            max_chunks: arena.chunks,
        }
    }

    /// Bytes that the allocator takes before any chunk is allocated.
    pub(super) fn fixed_bytes(arena: &Arena) -> usize {
        arena.chunks * size_of::<Box<[u64]>>()
    }

    /// Bytes of the allocated chunks, including the allocator's bits.
    pub(super) fn bytes(&self) -> usize {
        let words = 1 << self.shift;
        self.starts.len() * (words * 8 + words / 16)
    }

    /// Bytes of the arena in allocated chunks.
    pub(super) fn mapped(&self) -> usize {
        (self.starts.len() << self.shift) * 8
    }

    /// Words that can still be allocated, in pieces of any size.
    pub(super) fn room(&self) -> usize {
        self.free + ((self.max_chunks - self.starts.len()) << self.shift)
    }

    /// Allocates an extent with undefined content; `None` when there is no memory.
    pub(super) fn alloc(&mut self, arena: &Arena, order: Order) -> Option<Addr> {
        let wanted = order as usize;
        if wanted >= self.shift as usize {
            return None;
        }
        let fits =
            |heads: &[Addr; ORDERS]| (wanted..).zip(heads.iter().copied().skip(wanted)).find(|(_, head)| *head != 0);
        let (mut at, addr) = match fits(&self.heads) {
            Some(extent) => extent,
            None if self.take_chunk(arena) => fits(&self.heads)?,
            None => return None,
        };
        self.unlink(arena, addr, at);
        while at > wanted {
            at -= 1;
            self.link(arena, addr + (2u32 << at), at);
        }
        Some(addr)
    }

    /// Frees an extent and merges it with free buddies.
    pub(super) fn free(&mut self, arena: &Arena, addr: Addr, order: Order) {
        let (mut addr, mut at) = (addr, order as usize);
        while at + 1 < self.shift as usize {
            let buddy = addr ^ (2u32 << at);
            if !self.starts_at(buddy) || arena.load(buddy + 1) != at as u64 {
                break;
            }
            self.unlink(arena, buddy, at);
            addr = addr.min(buddy);
            at += 1;
        }
        self.link(arena, addr, at);
    }

    /// Shrinks an extent in place.
    pub(super) fn shrink(&mut self, arena: &Arena, addr: Addr, from: Order, to: Order) {
        for order in to..from {
            self.free(arena, addr + words_of(order), order);
        }
    }

    fn take_chunk(&mut self, arena: &Arena) -> bool {
        let at = self.starts.len();
        if at == self.max_chunks {
            return false;
        }
        let words = 1usize << self.shift;
        self.starts.push(vec![0; words.div_ceil(128)].into_boxed_slice());
        if at > 0 {
            self.link(arena, (at << self.shift) as Addr, self.shift as usize - 1);
            return true;
        }
        // The first line stays unused, so that no extent has address 0.
        for order in 2..self.shift - 1 {
            self.link(arena, words_of(order), order as usize);
        }
        true
    }

    fn link(&mut self, arena: &Arena, addr: Addr, order: usize) {
        let next = self.heads.get_mut(order).map_or(0, |head| std::mem::replace(head, addr));
        arena.store(addr, pair(next, 0));
        arena.store(addr + 1, order as u64);
        if next != 0 {
            arena.set_high(next, addr);
        }
        self.mark(addr, true);
        self.free += 2 << order;
    }

    fn unlink(&mut self, arena: &Arena, addr: Addr, order: usize) {
        let (next, previous) = (arena.low(addr), arena.high(addr));
        if next != 0 {
            arena.set_high(next, previous);
        }
        if previous != 0 {
            arena.set_low(previous, next);
        } else if let Some(head) = self.heads.get_mut(order) {
            *head = next;
        }
        self.mark(addr, false);
        self.free -= 2 << order;
    }

    fn bit(&self, addr: Addr) -> (usize, usize, u64) {
        let within = (addr as usize & ((1 << self.shift) - 1)) / 2;
        ((addr >> self.shift) as usize, within / 64, 1 << (within % 64))
    }

    fn mark(&mut self, addr: Addr, free: bool) {
        let (chunk, word, bit) = self.bit(addr);
        if let Some(w) = self.starts.get_mut(chunk).and_then(|c| c.get_mut(word)) {
            *w = if free { *w | bit } else { *w & !bit };
        }
    }

    fn starts_at(&self, addr: Addr) -> bool {
        let (chunk, word, bit) = self.bit(addr);
        self.starts.get(chunk).and_then(|c| c.get(word)).is_some_and(|w| w & bit != 0)
    }
}
