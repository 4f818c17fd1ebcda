//! `round-robin`: the candidates in rotation, by id.
//!
//! The cursor is an endpoint id, not a position. So an endpoint that joins or leaves does not make another one be
//! skipped or served twice.
//! When not: requests differ in size, which is almost always. It is a baseline for other strategies. Source: Neutree
//! `round-robin`, LocalAI's default.

use attache_scheduling::plugin::{NoParams, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::rng::PickRng;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "round-robin",
    summary: "Picks the ready endpoints in rotation.",
    source: "Neutree `round-robin`, LocalAI's default",
    parameters: section::<NoParams>,
    build: |value, _| params::<NoParams>(value).map(|NoParams {}| Box::new(RoundRobin::default()) as Box<dyn Strategy>),
};

/// `next` is the smallest id that may be picked next.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    next: AtomicU64,
}

impl Strategy for RoundRobin {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("next in rotation");
        // Distance of an id from the cursor; ids before the cursor wrap around and come last.
        let ahead = |c: &Candidate<'_>, next: u64| u64::from(c.state.endpoint.id.0).wrapping_sub(next);
        let advance = |next: u64| {
            let turn = candidates.iter().min_by_key(|c| ahead(c, next))?;
            Some(u64::from(turn.state.endpoint.id.0) + 1)
        };
        // A dry run does not advance the cursor.
        let advance = |next: u64| if cx.dry_run { None } else { advance(next) };
        let next = self.next.fetch_update(Relaxed, Relaxed, advance).unwrap_or_else(|unchanged| unchanged);
        ranking.push_lowest(candidates.iter().map(|c| (ahead(c, next), &c.state.endpoint)));
    }
}
