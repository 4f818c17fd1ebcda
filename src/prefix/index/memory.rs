//! Memory of an index: reserved as a whole, and allocated by the system page by page on the first write.
//!
//! It is one range, so that an address leads to its cache line without a table, in huge pages where the system has
//! them. Lookups access unpredictable addresses; with pages of 4 KiB, most of them would miss the TLB.

use super::arena::Line;
use memmap2::{MmapMut, MmapOptions};
use self_cell::{MutBorrow, self_cell};
use std::{fmt, io};
use zerocopy::FromBytes;

/// A huge page: 2 MiB. This many bytes at the start stay in small pages, so that a small index takes little memory.
const SMALL: usize = 2 << 20;

type Lines<'a> = &'a [Line];

self_cell!(
    struct Mapping {
        owner: MutBorrow<MmapMut>,
        #[covariant]
        dependent: Lines,
    }
);

/// Cache lines, initially all zero.
pub(super) struct Memory(Option<Mapping>);

impl Memory {
    /// Reserves `lines` cache lines; halves the number each time the system refuses.
    pub(super) fn reserve(lines: usize) -> Self {
        Self::reserve_with(lines, |bytes| MmapOptions::new().len(bytes).no_reserve_swap().map_anon())
    }

    /// Reserves with `map`, which receives a number of bytes.
    fn reserve_with(lines: usize, map: impl FnMut(usize) -> io::Result<MmapMut>) -> Self {
        let halves = std::iter::successors(Some(lines), |lines| Some(lines / 2)).take_while(|lines| *lines > 0);
        let sizes = halves.filter_map(|lines| lines.checked_mul(size_of::<Line>()));
        let mapping = sizes.map(map).find_map(Result::ok);
        Self(mapping.map(|mapping| {
            advise(&mapping);
            Mapping::new(MutBorrow::new(mapping), |mapping| {
                // A mapping begins at a page boundary and has whole lines.
                <[Line]>::mut_from_bytes(mapping.borrow_mut()).map_or(&[], |lines| &*lines)
            })
        }))
    }

    #[inline]
    pub(super) fn lines(&self) -> &[Line] {
        match &self.0 {
            Some(mapping) => mapping.borrow_dependent(),
            None => &[],
        }
    }
}

/// Requests huge pages; without them the index is only slower. Systems with larger pages have larger huge pages
/// too: 512 MiB on ARM with pages of 64 KiB. An index can then take up to that much more than its content, which
/// cannot be known in advance.
fn advise(mapping: &MmapMut) {
    #[cfg(target_os = "linux")]
    if let Some(rest) = mapping.len().checked_sub(SMALL).filter(|rest| *rest > 0) {
        let _ = mapping.advise_range(memmap2::Advice::HugePage, SMALL, rest);
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lines", self.lines().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomics::Ordering::Relaxed;

    #[test]
    fn memory_is_zero_and_keeps_writes() {
        let memory = Memory::reserve(1 << 17);
        assert_eq!(memory.lines().len(), 1 << 17);
        for at in [0, 70_000, (1 << 17) - 1] {
            let line = &memory.lines()[at];
            assert_eq!(std::ptr::from_ref(line).addr() % 64, 0, "a line is a cache line");
            line.0[3].store(at as u64 + 1, Relaxed);
        }
        let words = memory
            .lines()
            .iter()
            .enumerate()
            .flat_map(|(at, line)| line.0.iter().map(move |word| (at, word.load(Relaxed))));
        let written: Vec<(usize, u64)> = words.filter(|(_, word)| *word > 0).collect();
        assert_eq!(written, [(0, 1), (70_000, 70_001), ((1 << 17) - 1, 1 << 17)]);
    }

    #[test]
    fn refused_memory_makes_the_index_smaller() {
        let mut asked = Vec::new();
        let memory = Memory::reserve_with(1 << 12, |bytes| {
            asked.push(bytes);
            if bytes > 100_000 { Err(io::ErrorKind::OutOfMemory.into()) } else { MmapMut::map_anon(bytes) }
        });
        assert_eq!((memory.lines().len(), asked), (1 << 10, vec![1 << 18, 1 << 17, 1 << 16]));
        let none = Memory::reserve_with(1 << 12, |_| Err(io::ErrorKind::OutOfMemory.into()));
        assert!(none.lines().is_empty() && Memory::reserve(0).lines().is_empty());
    }
}
