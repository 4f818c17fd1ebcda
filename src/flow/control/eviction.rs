//! Capacity of the queue itself: the limits of a band, of the pool and of all pools, and the queued requests that
//! are evicted for a newcomer.

use super::FlowControl;
use crate::band::Band;
use crate::item::{Cause, Left};
use attache_types::clock::Timestamp;
use smallvec::SmallVec;

impl<T> FlowControl<T> {
    /// Evicts queued requests so that one more of `flow` fits in the band at `at`. No request is evicted unless the
    /// newcomer then fits, except when another pool takes shared capacity meanwhile.
    pub(super) fn evict_for(
        &mut self,
        at: usize,
        flow: u32,
        bytes: u64,
        now: Timestamp,
        left: &mut Vec<Left<T>>,
    ) -> Result<(), Cause> {
        let Some(band) = self.bands.get(at) else { return Err(Cause::Full) };
        let in_band = |requests, held| band.fits_without(requests, held, bytes);
        let Some(mut own) = self.own_evictions(band, flow, in_band) else { return Err(Cause::BandFull) };
        let (priority, gone) = (band.priority, (own.len() as u64, own.iter().map(|(_, held)| held).sum::<u64>()));
        let (requests, held) = self.sheddable(priority).fold(gone, |(r, h), b| (r + b.requests, h + b.bytes));
        if !self.fits(requests, held, bytes) {
            // Evicting all sheddable requests would not free enough.
            let everywhere = |requests, held| in_band(requests, held) && self.fits(requests, held, bytes);
            own = self.own_evictions(band, flow, everywhere).ok_or_else(|| self.lacking(bytes))?;
        }
        for (slot, _) in own {
            self.refuse(slot, Cause::Evicted, now, left);
        }
        while !self.fits(0, 0, bytes) {
            let lowest = self.sheddable(priority).map(|b| b.priority).last();
            let lowest = lowest.and_then(|priority| self.existing(priority));
            let Some(slot) = lowest.and_then(|at| self.bands.get_mut(at)).and_then(Band::last) else {
                return Err(self.lacking(bytes));
            };
            self.refuse(slot, Cause::Evicted, now, left);
        }
        Ok(())
    }

    /// Requests of `band` to evict for one more of `flow`, with their bytes: as few as satisfy `suffices`, which gets
    /// their number and bytes. `None` if no number of evictions satisfies it.
    fn own_evictions(
        &self,
        band: &Band,
        flow: u32,
        suffices: impl Fn(u64, u64) -> bool,
    ) -> Option<SmallVec<[(u32, u64); 4]>> {
        let (mut own, mut held, mut next) = (SmallVec::new(), 0, band.eviction_order(flow));
        while !suffices(own.len() as u64, held) {
            let slot = next.next()?;
            let bytes = self.items.get(slot)?.bytes;
            own.push((slot, bytes));
            held += bytes;
        }
        Some(own)
    }

    /// Whether one more of `bytes` fits after `requests` with `held` bytes have left.
    fn fits(&self, requests: u64, held: u64, bytes: u64) -> bool {
        let count = self.items.len() as u64 - requests;
        count < self.settings.max_requests && self.held.fits(held, bytes)
    }

    /// Why one more of `bytes` does not fit.
    pub(super) fn lacking(&self, bytes: u64) -> Cause {
        // Also true when other pools hold some of the shared capacity: if this pool's own requests left, it would fit.
        let own_would_do = self.held.fits(self.held.bytes(), bytes);
        let is_own =
            self.items.len() as u64 >= self.settings.max_requests || !self.held.fits_alone(bytes) || own_would_do;
        if is_own { Cause::Full } else { Cause::SharedFull }
    }

    /// The bands with queued requests that are sheddable for a request of this priority.
    fn sheddable(&self, priority: i32) -> impl Iterator<Item = &Band> {
        let evicts = self.settings.evict_sheddable;
        self.bands.iter().filter(move |b| evicts && b.requests > 0 && b.priority < priority.min(0))
    }
}
