//! The endpoint that an explanation names after the picks.

use super::Round;
use crate::candidates::Candidate;
use crate::decision::{Decision, Ranking};
use crate::plugin::PickContext;
use attache_pool::Endpoint;
use attache_types::rng::PickRng;
use std::sync::Arc;

impl Round<'_> {
    /// The best of `candidates` that is not among the picks of `decision` and could serve the request. The strategy ranks
    /// all of them, with the random numbers `drawn` of the decision. `None` if the strategy has no figures: the order of
    /// a random choice or a rotation says nothing.
    pub(super) fn runner_up(
        &self,
        candidates: &[Candidate<'_>],
        decision: &Decision,
        mut drawn: PickRng,
    ) -> Option<Arc<Endpoint>> {
        let has_figures = decision.parts.as_ref().is_some_and(|parts| !parts.is_empty());
        if !has_figures && self.strategy.scores(self.cx, &[], &mut []).is_none() {
            return None;
        }
        let cx = &PickContext { dry_run: true, ..*self.cx };
        let mut ranking = Ranking::new(candidates.len()).explained();
        self.strategy.rank(cx, candidates, &mut drawn, &mut ranking);
        let serves = |endpoint: &Endpoint| {
            let alone = decision.split.is_none() && cx.generates;
            self.scheduler.split.as_ref().filter(|_| alone).is_none_or(|policy| policy.serves_whole(endpoint))
        };
        let is_next =
            |endpoint: &Arc<Endpoint>| serves(endpoint) && !decision.picks.iter().any(|pick| pick.id == endpoint.id);
        ranking.decide()?.picks.into_iter().find(is_next)
    }
}
