//! `pipeline`: filters narrow the candidates, weighted scorers are added up, and a picker chooses. With several such
//! profiles, a handler chooses which one decides.
//!
//! ```yaml
//! strategy:
//!   name: pipeline
//!   parameters:                       # one profile in short
//!     filters: [{type: decode-filter}]
//!     scorers: [{type: queue-scorer, weight: 2}, {type: prefix-cache-scorer, weight: 3}]
//!     picker: {type: max-score-picker}
//! # or plugins with names, as in an EndpointPickerConfig
//!     plugins: [{type: queue-scorer}, {name: mine, type: prefix-cache-scorer, parameters: {matchLengthWeight: 0.5}}]
//!     profiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: mine, weight: 3}]}]
//! ```
//!
//! ```text
//! filters in the order of the file, each among the candidates that the one before kept; none left: no endpoint
//! sum = weight * clamp(score, 0, 1), added in the order of the file, so a replay gives the same bits; NaN counts as 0
//! defaults: queue-scorer 2, kv-cache-utilization-scorer 2, prefix-cache-scorer 3; weight 1; max-score-picker;
//!           without profiles: one with all plugins; one profile: single-profile-handler
//! ```
//!
//! With a handler that has stages (`disagg-profile-handler`), separate profiles choose the servers for prefill and
//! media encoding, and the handler decides whether a request is split. With any other handler, the pool's decider
//! decides that, and the one profile ranks both sides.
//! If the caller names the profile, or the only profile filters by the role of prefill or encode, it receives servers
//! of every role.
//!
//! When not: one metric is enough to decide; then that metric's strategy is cheaper. Source: the schedulers of GIE
//! v1.5 and llm-d v0.10.

mod params;
mod stages;

use attache_pool::{Endpoint, Roles};
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::{
    Better, Filter, Picker, Plugin, ProfileHandler, ResponseHeaders, Scorer, params as read, section,
};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::split::{self, Media, Pair, PairCandidates};
use attache_scheduling::{Candidate, Decision, PickContext, Ranking, Reads, Strategy};
use attache_types::ids::EndpointId;
use attache_types::rng::{PickRng, for_request};
use params::Params;
use smallvec::{SmallVec, smallvec};
use stages::Division;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "pipeline",
    summary: "Filters, weighted scorers and a picker, in profiles.",
    source: "the GIE and llm-d schedulers",
    parameters: section::<Params>,
    build: |value, registry| read::<Params>(value)?.build(registry).map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// Candidates that fit on the stack without an allocation.
const INLINE: usize = 32;

#[derive(Debug)]
struct Pipeline {
    handler: NamedPart<dyn ProfileHandler>,
    /// The profiles that the handler may choose.
    profiles: Vec<Arc<PipelineProfile>>,
    /// How requests are split over servers.
    division: Division,
    /// Roles of which a server must have one to be passed to the profiles.
    roles: Roles,
}

/// A part of a pipeline and the name of its type, for explanations.
#[derive(Debug)]
struct NamedPart<T: ?Sized> {
    name: &'static str,
    part: Arc<T>,
}

#[derive(Debug)]
struct PipelineProfile {
    name: String,
    filters: Vec<NamedPart<dyn Filter>>,
    scorers: Vec<(NamedPart<dyn Scorer>, f32)>,
    picker: Arc<dyn Picker>,
    /// Each plugin of this profile once, for recording picks and adding response headers.
    plugins: Vec<Plugin>,
}

/// The candidates that the filters kept.
type KeptCandidates<'a> = SmallVec<[Candidate<'a>; INLINE]>;

impl Pipeline {
    /// The profile for the request; `None` if the handler chooses none.
    fn profile(&self, cx: &PickContext<'_>) -> Option<&PipelineProfile> {
        let names: SmallVec<[&str; 4]> = self.profiles.iter().map(|p| p.name.as_str()).collect();
        self.profiles.get(self.handler.part.choose(cx, &names)?).map(|profile| &**profile)
    }

    fn plugins(&self) -> impl Iterator<Item = &Plugin> {
        self.profiles.iter().flat_map(|p| &p.plugins)
    }
}

impl PipelineProfile {
    /// Applies all filters. `None` means that all candidates stay. If a filter removes all of them, `ranking` gets
    /// its name.
    fn narrow<'a>(
        &self,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'a>],
        rng: &mut PickRng,
        ranking: &mut Ranking,
    ) -> Option<KeptCandidates<'a>> {
        let mut narrowed: Option<KeptCandidates<'a>> = None;
        for filter in &self.filters {
            let field = narrowed.as_deref().unwrap_or(candidates);
            let mut keep: SmallVec<[bool; 64]> = smallvec![true; field.len()];
            filter.part.keep(cx, field, rng, &mut keep);
            ranking.note(filter.name, 0.0, field, |i| f64::from(u8::from(keep.get(i) == Some(&true))));
            if let Some(signal) = filter.part.lacks(cx, field) {
                ranking.lacks(signal);
            }
            if !keep.contains(&false) {
                continue;
            }
            let left: KeptCandidates<'a> =
                field.iter().zip(&keep).filter(|(_, keep)| **keep).map(|(c, _)| *c).collect();
            if left.is_empty() {
                ranking.emptied(filter.name);
                return Some(left);
            }
            narrowed = Some(left);
        }
        narrowed
    }

    /// The weighted sum of each candidate.
    fn sums(&self, cx: &PickContext<'_>, field: &[Candidate<'_>], ranking: &mut Ranking) -> SmallVec<[f32; INLINE]> {
        let mut sums: SmallVec<[f32; INLINE]> = smallvec![0.0; field.len()];
        let mut scores: SmallVec<[f32; INLINE]> = smallvec![0.0; field.len()];
        for (scorer, weight) in &self.scorers {
            scorer.part.score(cx, field, &mut scores);
            ranking
                .note(scorer.name, f64::from(*weight), field, |i| scores.get(i).copied().map_or(f64::NAN, f64::from));
            if let Some(signal) = scorer.part.lacks(cx, field) {
                ranking.lacks(signal);
            }
            for (sum, score) in sums.iter_mut().zip(&scores) {
                *sum += weight * if score.is_nan() { 0.0 } else { score.clamp(0.0, 1.0) };
            }
        }
        ranking.note("sum", 0.0, field, |i| sums.get(i).copied().map_or(f64::NAN, f64::from));
        sums
    }

    /// Filters, adds up the scores and picks.
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let narrowed = self.narrow(cx, candidates, rng, ranking);
        let field = narrowed.as_deref().unwrap_or(candidates);
        if !field.is_empty() {
            let sums = self.sums(cx, field, ranking);
            self.picker.pick(&sums, field, rng, ranking);
        }
    }
}

impl Strategy for Pipeline {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let Some(profile) = self.profile(cx) else {
            ranking.emptied(self.handler.name);
            return;
        };
        profile.rank(cx, candidates, rng, ranking);
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        out.fill(f64::NAN);
        // Not part of a decision: random filters get a generator seeded by the current time, and the ranking is
        // dropped.
        let (mut rng, mut dropped) = (for_request(cx.now.0, 0), Ranking::new(1));
        if let Some(profile) = self.profile(cx) {
            let narrowed = profile.narrow(cx, candidates, &mut rng, &mut dropped);
            let field = narrowed.as_deref().unwrap_or(candidates);
            let sums = profile.sums(cx, field, &mut dropped);
            let mut summed = field.iter().zip(&sums).peekable();
            // The filters keep the order.
            for (score, candidate) in out.iter_mut().zip(candidates) {
                if let Some((_, sum)) = summed.next_if(|(c, _)| c.state.endpoint.id == candidate.state.endpoint.id) {
                    *score = f64::from(*sum);
                }
            }
        }
        Some(Better::Higher)
    }

    fn pair(
        &self,
        cx: &PickContext<'_>,
        field: &PairCandidates<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Pair> {
        match &self.division {
            Division::ByPool => split::by_rank(self, cx, field, rng, ranking),
            Division::ByCaller => None,
            Division::Stages(stages) => stages.pair(self.profile(cx)?, cx, field, rng, &ranking),
        }
    }

    fn wants_pair(&self, cx: &PickContext<'_>, decoder: &Candidate<'_>) -> Option<bool> {
        match &self.division {
            Division::ByPool => None,
            Division::ByCaller => Some(false),
            Division::Stages(stages) => Some(stages.wants_pair(cx, decoder)),
        }
    }

    fn encoders(
        &self,
        cx: &PickContext<'_>,
        media: &Media<'_, '_>,
        rng: &mut PickRng,
        ranking: Ranking,
    ) -> Option<Decision> {
        match &self.division {
            Division::ByPool => split::encoders_by_load(media, rng, ranking),
            Division::ByCaller => None,
            Division::Stages(stages) => stages.encoders(cx, media, rng, &ranking),
        }
    }

    fn roles(&self, _: &PickContext<'_>) -> Roles {
        self.roles
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        for plugin in self.profile(cx).iter().flat_map(|p| &p.plugins) {
            plugin.picked(cx, endpoint);
        }
        None
    }

    fn picked_prefill(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        if let Division::Stages(stages) = &self.division {
            stages.prefill_plugins().for_each(|plugin| plugin.picked(cx, endpoint));
        }
    }

    fn picked_encode(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        if let Division::Stages(stages) = &self.division {
            stages.encode_plugins().for_each(|plugin| plugin.picked(cx, endpoint));
        }
    }

    fn forget(&self, lost: &[EndpointId]) {
        self.plugins().for_each(|plugin| plugin.forget(lost));
    }

    fn end_session(&self, tenant: Option<&str>, id: &str) {
        self.plugins().for_each(|plugin| plugin.end_session(tenant, id));
    }

    fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
        self.plugins().for_each(|plugin| plugin.response_headers(endpoint, headers));
    }

    fn reads(&self) -> Reads {
        let stages = match &self.division {
            Division::Stages(stages) => stages.reads(),
            Division::ByPool | Division::ByCaller => Reads::NOTHING,
        };
        self.plugins().fold(stages, |all, plugin| all.and(plugin.reads()))
    }
}

#[cfg(test)]
mod tests;
