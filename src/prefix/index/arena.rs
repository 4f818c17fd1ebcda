//! One memory for the whole index: words in one stretch whose addresses never move, given out by a buddy allocator.
//!
//! Readers hold the [`Arena`] and may load any word at any time, also of memory that has been given to someone else since: what they
//! read counts only after the version of the run that led there has been checked. The writer alone holds the [`Space`], which takes
//! the stretch into use chunk by chunk. Everything that grows with the index lives here, so that memory freed by one part serves any
//! other and one number bounds it all.

use super::memory::Memory;
use crate::atomics::{AtomicU64, Ordering::Relaxed};
use prefetch_index::prefetch_index;
use zerocopy::{FromBytes, IntoBytes, KnownLayout};

/// Number of a word; 0 is no word.
pub(super) type Addr = u32;

/// Words of a cache line.
pub(super) const LINE: u32 = 8;
/// Words of a page.
pub(super) const PAGE: u32 = 256;
/// A page's lines.
type Lines = [Line; (PAGE / LINE) as usize];

/// The smallest and the largest chunk in words: 16 KiB and 4 MiB.
const CHUNK_WORDS: (usize, usize) = (1 << 11, 1 << 19);
/// A budget is cut into about so many chunks.
const CHUNKS: usize = 1024;

/// A cache line of words.
#[repr(C, align(64))]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout)]
pub(super) struct Line(pub(super) [AtomicU64; LINE as usize]);

/// What stands where there is no memory: always zeros.
static NOWHERE: Line = Line([const { AtomicU64::new(0) }; LINE as usize]);

/// The words, readable by all.
#[derive(Debug)]
pub(super) struct Arena {
    memory: Memory,
    /// How many there may be.
    chunks: usize,
    /// A chunk has 2^shift words.
    shift: u32,
    refused: usize,
}

impl Arena {
    /// Room for at most `bytes`, none of it taken yet; less where the system does not give so much.
    pub(super) fn new(bytes: usize) -> Self {
        let words = (bytes / 8 / CHUNKS).next_power_of_two().clamp(CHUNK_WORDS.0, CHUNK_WORDS.1);
        let shift = words.trailing_zeros();
        // A chunk's bits in `Space::starts` are part of its price; addresses end at 2^32 words.
        let chunks = (bytes / (words * 8 + words / 16)).min(1 << (32 - shift));
        let wanted = chunks * words / LINE as usize;
        let memory = Memory::reserve(wanted);
        let given = memory.lines().len();
        Self { memory, chunks: given * LINE as usize / words, shift, refused: (wanted - given) * size_of::<Line>() }
    }

    /// Bytes that the system did not give.
    pub(super) fn refused(&self) -> usize {
        self.refused
    }

    /// The line that `addr` lies in.
    #[inline]
    pub(super) fn line(&self, addr: Addr) -> &Line {
        self.memory.lines().get((addr / LINE) as usize).unwrap_or(&NOWHERE)
    }

    /// The lines from the one that `addr` lies in.
    #[inline]
    pub(super) fn lines(&self, addr: Addr) -> &[Line] {
        self.memory.lines().get((addr / LINE) as usize..).unwrap_or_default()
    }

    /// The lines of the page that `addr` lies in.
    #[inline]
    pub(super) fn page(&self, addr: Addr) -> Option<&Lines> {
        self.memory.lines().as_chunks().0.get((addr / PAGE) as usize)
    }

    /// Asks for the line that `addr` lies in, so that it is in the cache when it is read.
    #[inline]
    pub(super) fn prefetch(&self, addr: Addr) {
        prefetch_index(self.lines(addr), 0);
    }

    /// One word.
    #[inline]
    pub(super) fn word(&self, addr: Addr) -> &AtomicU64 {
        self.line(addr).word(addr)
    }

    /// Loads a word, with no order to others.
    #[inline]
    pub(super) fn load(&self, addr: Addr) -> u64 {
        self.word(addr).load(Relaxed)
    }

    /// Stores a word, with no order to others.
    #[inline]
    pub(super) fn store(&self, addr: Addr, value: u64) {
        self.word(addr).store(value, Relaxed);
    }

    /// Copies the beginning of an extent to another one, which is larger.
    pub(super) fn copy(&self, from: Addr, to: Addr, words: u32) {
        if words < LINE {
            // An extent that is smaller than a line may begin within one.
            return (0..words).for_each(|word| self.store(to + word, self.load(from + word)));
        }
        let lines = self.lines(to).iter().zip(self.lines(from)).take(words.div_ceil(LINE) as usize);
        for (new, old) in lines {
            for (new, old) in new.0.iter().zip(&old.0) {
                new.store(old.load(Relaxed), Relaxed);
            }
        }
    }

    /// The low half of a word.
    #[inline]
    pub(super) fn low(&self, addr: Addr) -> u32 {
        low(self.load(addr))
    }

    /// The high half of a word.
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
    /// The word of this line that `addr` names.
    #[inline]
    pub(super) fn word(&self, addr: Addr) -> &AtomicU64 {
        &self.0[(addr % LINE) as usize]
    }
}

/// The low half.
#[inline]
pub(super) fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

/// The high half.
#[inline]
pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Two halves in a word.
#[inline]
pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// How many words an extent has: two, doubled so many times.
pub(super) type Order = u32;

/// The order of an extent that `words` words fit in.
pub(super) fn order_for(words: u32) -> Order {
    words.max(2).next_power_of_two().trailing_zeros() - 1
}

/// Words of an extent.
pub(super) fn words_of(order: Order) -> u32 {
    2 << order
}

const ORDERS: usize = 20;

/// The writer's ledger of the arena: who may use which words. Buddies: an extent lies at a multiple of its size.
///
/// A free extent holds its neighbours in the list of its order in its first word, and its order in the second.
#[derive(Debug)]
pub(super) struct Space {
    heads: [Addr; ORDERS],
    /// One bit for every two words: a free extent begins here.
    starts: Vec<Box<[u64]>>,
    free: usize,
    shift: u32,
    max_chunks: usize,
}

impl Space {
    /// The ledger of an empty arena.
    pub(super) fn new(arena: &Arena) -> Self {
        Self {
            heads: [0; ORDERS],
            starts: Vec::with_capacity(arena.chunks),
            free: 0,
            shift: arena.shift,
            max_chunks: arena.chunks,
        }
    }

    /// Bytes that the ledger takes before any chunk.
    pub(super) fn fixed_bytes(arena: &Arena) -> usize {
        arena.chunks * size_of::<Box<[u64]>>()
    }

    /// Bytes of the chunks that have been taken, ledger included.
    pub(super) fn bytes(&self) -> usize {
        let words = 1 << self.shift;
        self.starts.len() * (words * 8 + words / 16)
    }

    /// Bytes of the arena's chunks that have been taken.
    pub(super) fn mapped(&self) -> usize {
        (self.starts.len() << self.shift) * 8
    }

    /// Words that could still be given out, in pieces of any size.
    pub(super) fn room(&self) -> usize {
        self.free + ((self.max_chunks - self.starts.len()) << self.shift)
    }

    /// An extent with anything in it; `None` when there is no room.
    pub(super) fn alloc(&mut self, arena: &Arena, order: Order) -> Option<Addr> {
        let wanted = order as usize;
        if wanted >= self.shift as usize {
            return None;
        }
        let fits = |heads: &[Addr; ORDERS]| (wanted..ORDERS).find(|&o| heads[o] != 0);
        let mut at = match fits(&self.heads) {
            Some(order) => order,
            None if self.take_chunk(arena) => fits(&self.heads)?,
            None => return None,
        };
        let addr = self.heads[at];
        self.unlink(arena, addr, at);
        while at > wanted {
            at -= 1;
            self.link(arena, addr + (2u32 << at), at);
        }
        Some(addr)
    }

    /// Gives an extent back.
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

    /// Makes an extent smaller where it lies.
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
        // The first line stays empty, so that no extent lies at address 0.
        for order in 2..self.shift - 1 {
            self.link(arena, words_of(order), order as usize);
        }
        true
    }

    fn link(&mut self, arena: &Arena, addr: Addr, order: usize) {
        let next = std::mem::replace(&mut self.heads[order], addr);
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
        if previous == 0 {
            self.heads[order] = next;
        } else {
            arena.set_low(previous, next);
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
