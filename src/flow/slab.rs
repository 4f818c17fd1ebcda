//! A vector with holes: slot numbers are reused, generations are not.

/// Slots whose memory is kept when the slab becomes empty.
const KEPT: usize = 1024;

/// Values by slot number.
#[derive(Debug)]
pub(super) struct Slab<V> {
    entries: Vec<Option<(u32, V)>>,
    free: Vec<u32>,
    generation: u32,
}

impl<V> Default for Slab<V> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), generation: 0 }
    }
}

impl<V> Slab<V> {
    /// Number of values.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Slot and generation of the next value; `None` when 2³² values exist.
    pub(super) fn next(&self) -> Option<(u32, u32)> {
        let slot = self.free.last().copied().or_else(|| u32::try_from(self.entries.len()).ok())?;
        Some((slot, self.generation))
    }

    /// Stores a value at the slot that [`Slab::next`] announced.
    pub(super) fn insert(&mut self, value: V) {
        let entry = Some((self.generation, value));
        self.generation = self.generation.wrapping_add(1);
        match self.free.pop().and_then(|slot| self.entries.get_mut(slot as usize)) {
            Some(hole) => *hole = entry,
            None => self.entries.push(entry),
        }
    }

    pub(super) fn get(&self, slot: u32) -> Option<&V> {
        self.entries.get(slot as usize)?.as_ref().map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut V> {
        self.entries.get_mut(slot as usize)?.as_mut().map(|(_, value)| value)
    }

    /// The generation of the value in this slot.
    pub(super) fn generation(&self, slot: u32) -> Option<u32> {
        self.entries.get(slot as usize)?.as_ref().map(|(generation, _)| *generation)
    }

    /// Removes a value and returns its generation with it. Frees most memory when the slab becomes empty.
    pub(super) fn remove(&mut self, slot: u32) -> Option<(u32, V)> {
        let taken = self.entries.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        if self.len() == 0 && self.entries.len() > KEPT {
            (self.entries, self.free) = (Vec::new(), Vec::new());
        }
        Some(taken)
    }

    /// All values with their slots.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut V)> {
        let entries = (0..).zip(&mut self.entries);
        entries.filter_map(|(slot, entry)| entry.as_mut().map(|(_, value)| (slot, value)))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn iter(&self) -> impl Iterator<Item = &V> {
        self.entries.iter().flatten().map(|(_, value)| value)
    }

    /// Allocated capacity, values.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.entries.capacity().max(self.free.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Slab};

    #[test]
    fn numbers_come_again_and_generations_do_not() {
        let mut slab = Slab::default();
        let first = slab.next().unwrap();
        slab.insert("a");
        assert_eq!((slab.get(first.0), slab.generation(first.0)), (Some(&"a"), Some(first.1)));
        assert_eq!(slab.remove(first.0), Some((first.1, "a")));
        assert_eq!((slab.remove(first.0), slab.generation(first.0), slab.len()), (None, None, 0));
        let second = slab.next().unwrap();
        assert_eq!(second, (first.0, first.1 + 1));
        slab.insert("b");
        assert_eq!((slab.generation(second.0), slab.len()), (Some(second.1), 1));
    }

    #[test]
    fn a_flood_leaves_no_memory_behind() {
        let mut slab = Slab::default();
        (0..100_000).for_each(|i| slab.insert(i));
        (0..100_000).for_each(|i| assert!(slab.remove(i).is_some()));
        assert!(slab.len() == 0 && slab.capacity() <= KEPT, "{}", slab.capacity());
    }
}
