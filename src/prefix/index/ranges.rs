//! Which blocks of a run a column has: ranges in order, with holes between them.

/// From block to block, the second excluded.
pub(super) type Range = (u32, u32);

/// Blocks from the run's start.
pub(super) fn cutoff_of(ranges: &[Range]) -> u32 {
    match ranges {
        [(0, to), ..] => *to,
        _ => 0,
    }
}

/// Blocks in all.
pub(super) fn total(ranges: &[Range]) -> u32 {
    ranges.iter().map(|(a, b)| b - a).sum()
}

/// Puts a range in; what touches becomes one.
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

/// Takes a range out.
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
