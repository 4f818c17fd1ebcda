//! Doubly linked lists of nodes in the arena. One word of each node holds the previous and the next node,
//! 0 where there is none.

use super::ReaderView;
use super::arena::{Addr, high, low, pair};

/// The first and the last node of a list.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ListEnds {
    pub(super) newest: Addr,
    pub(super) oldest: Addr,
}

/// Selects the word of a node that links it to its neighbours.
#[derive(Clone, Copy)]
pub(super) struct List(pub(super) u32);

/// Inserts a node at the front.
pub(super) fn push(sh: &ReaderView, list: List, ends: &mut ListEnds, node: Addr) {
    insert(sh, list, ends, node, ends.newest);
}

/// Inserts a node before `next`; 0 appends it at the end.
pub(super) fn insert(sh: &ReaderView, list: List, ends: &mut ListEnds, node: Addr, next: Addr) {
    let previous = if next == 0 { ends.oldest } else { sh.arena.low(next + list.0) };
    sh.arena.store(node + list.0, pair(previous, next));
    if previous == 0 {
        ends.newest = node;
    } else {
        sh.arena.set_high(previous + list.0, node);
    }
    if next == 0 {
        ends.oldest = node;
    } else {
        sh.arena.set_low(next + list.0, node);
    }
}

/// Removes a node from the list.
pub(super) fn unlink(sh: &ReaderView, list: List, ends: &mut ListEnds, node: Addr) {
    let links = sh.arena.load(node + list.0);
    let (previous, next) = (low(links), high(links));
    if previous == 0 {
        ends.newest = next;
    } else {
        sh.arena.set_high(previous + list.0, next);
    }
    if next == 0 {
        ends.oldest = previous;
    } else {
        sh.arena.set_low(next + list.0, previous);
    }
}
