//! Ranges of a run's blocks that a column has, in order, with gaps between them.

/// First block and the one after the last.
pub(super) type Range = (u32, u32);

/// Number of blocks from the run's start without a gap.
pub(super) fn cutoff_of(ranges: &[Range]) -> u32 {
    match ranges {
        [(0, to), ..] => *to,
        _ => 0,
    }
}

/// Total number of blocks in the ranges.
pub(super) fn total(ranges: &[Range]) -> u32 {
    ranges.iter().map(|(a, b)| b - a).sum()
}

/// Adds a range and merges it with those that touch it.
pub(super) fn join(ranges: &mut Vec<Range>, (mut from, mut to): Range) {
    ranges.retain(|(a, b)| {
        let apart = *b < from || to < *a;
        if !apart {
            (from, to) = (from.min(*a), to.max(*b));
        }
        apart
    });
    let at = ranges.partition_point(|(a, _)| *a < from);
    ranges.insert(at, (from, to));
}

/// Removes a range of blocks.
pub(super) fn cut(ranges: &mut Vec<Range>, (from, to): Range) {
    if let Some(at) = ranges.iter().position(|(a, b)| *a < from && to < *b)
        && let Some((_, b)) = ranges.get_mut(at)
    {
        let behind = (to, std::mem::replace(b, from));
        ranges.insert(at + 1, behind);
        return;
    }
    ranges.retain_mut(|(a, b)| {
        if *b <= from || to <= *a {
            return true;
        }
        if *a < from {
            *b = from;
        } else {
            *a = to;
        }
        *a < *b
    });
}
