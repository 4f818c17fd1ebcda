//! Memory for an index: reserved as a whole and given by the system page by page, when it is first written to.
//!
//! One stretch, so that an address leads to its line without a table between them, and in huge pages where the system has them: a look-up goes
//! to places that nothing tells beforehand, and with pages of 4 KiB most of them are in none of the processor's tables of pages.

use super::arena::Line;
use memmap2::{MmapMut, MmapOptions};
use self_cell::{MutBorrow, self_cell};
use std::{fmt, io};
use zerocopy::FromBytes;

/// 2 MiB: a huge page. The first so many bytes are in small pages, so that an index with little in it takes little.
const SMALL: usize = 2 << 20;

type Lines<'a> = &'a [Line];

self_cell!(
    struct Mapping {
        owner: MutBorrow<MmapMut>,
        #[covariant]
        dependent: Lines,
    }
);

/// Lines, all zeros at first.
pub(super) struct Memory(Option<Mapping>);

impl Memory {
    /// So many lines, or half as many as often as the system refuses.
    pub(super) fn reserve(lines: usize) -> Self {
        Self::reserve_with(lines, |bytes| MmapOptions::new().len(bytes).no_reserve_swap().map_anon())
    }

    /// The same from `map`, which is asked for bytes.
    fn reserve_with(lines: usize, map: impl FnMut(usize) -> io::Result<MmapMut>) -> Self {
        let halves = std::iter::successors(Some(lines), |lines| Some(lines / 2)).take_while(|lines| *lines > 0);
        let sizes = halves.filter_map(|lines| lines.checked_mul(size_of::<Line>()));
        let mapping = sizes.map(map).find_map(Result::ok);
        Self(mapping.map(|mapping| {
            advise(&mapping);
            Mapping::new(MutBorrow::new(mapping), |mapping| {
                // A mapping begins where a page does, and has whole lines.
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

/// Asks for huge pages. Without them all is as it was, only slower. Where a system has larger pages than 4 KiB its huge ones are larger too:
/// on ARM with pages of 64 KiB they have 512 MiB, and an index takes up to so much more than is in it, which nothing here can tell beforehand.
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
    fn memory_is_zeros_and_keeps_what_is_written() {
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
    fn where_the_system_refuses_there_is_less() {
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
