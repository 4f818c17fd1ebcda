//! The stages of a request besides decoding: which profiles choose their servers, and when they run.
//!
//! `params` builds them; `Pipeline::pair` and `Pipeline::encoders` run them. The handlers in [`crate::profile`] have
//! the rules.

use super::PipelineProfile;
use attache_pool::Endpoint;
use attache_scheduling::plugin::{Headers, PeerHeaders, Plugin, StageDecider};
use attache_scheduling::split::{MAX_TRIES, Media, Pair, PairCandidates};
use attache_scheduling::{Candidate, Decision, PickContext, Ranking, Reads};
use attache_types::rng::PickRng;
use smallvec::SmallVec;
use std::sync::Arc;

/// What decides how a request is split over servers.
#[derive(Debug)]
pub(super) enum Division {
    ByPool,
    ByCaller,
    Stages(Stages),
}

/// The stages besides decoding that can run.
#[derive(Debug)]
pub(super) struct Stages {
    pub(super) prefill: Option<ProfileStage>,
    pub(super) encode: Option<ProfileStage>,
    pub(super) prefill_first: bool,
}

/// One stage besides decoding.
#[derive(Debug)]
pub(super) struct ProfileStage {
    pub(super) profile: Arc<PipelineProfile>,
    /// Decides per request whether the stage runs; `None`: it always runs.
    pub(super) decider: Option<Arc<dyn StageDecider>>,
}

impl ProfileStage {
    fn runs(&self, cx: &PickContext<'_>, decoder: Option<&Candidate<'_>>) -> bool {
        self.decider.as_ref().is_none_or(|decider| decider.runs(cx, decoder))
    }

    /// The servers that the profile picks for this stage, near `peer`, the server of another stage. `None` if it
    /// picks none.
    fn choose(
        &self,
        cx: &PickContext<'_>,
        peer: Option<&Endpoint>,
        candidates: &[Candidate<'_>],
        rng: &mut PickRng,
        ranking: &Ranking,
    ) -> Option<Decision> {
        choose(&self.profile, cx, peer, candidates, rng, ranking, ranking.wanted().max(MAX_TRIES))
    }

    fn reads(&self) -> Reads {
        let own = self.decider.as_ref().map_or(Reads::NOTHING, |decider| decider.reads());
        self.profile.plugins.iter().fold(own, |all, plugin| all.and(plugin.reads()))
    }
}

fn choose(
    profile: &PipelineProfile,
    cx: &PickContext<'_>,
    peer: Option<&Endpoint>,
    candidates: &[Candidate<'_>],
    rng: &mut PickRng,
    like: &Ranking,
    wanted: usize,
) -> Option<Decision> {
    if candidates.is_empty() {
        return None;
    }
    let mut ranking = Ranking::new(wanted);
    if like.is_explained() {
        ranking = ranking.explained();
    }
    match peer {
        None => profile.rank(cx, candidates, rng, &mut ranking),
        Some(peer) => {
            let peer_headers = PeerHeaders { headers: cx.request.headers, peer };
            let mut cx = PickContext { ..*cx };
            cx.request.headers = Headers::of(&peer_headers);
            profile.rank(&cx, candidates, rng, &mut ranking);
        }
    }
    let mut decision = ranking.decide()?;
    // Sums of different stages are not comparable.
    decision.parts.iter_mut().flatten().for_each(|part| part.weight = 0.0);
    Some(decision)
}

impl Stages {
    pub(super) fn reads(&self) -> Reads {
        self.prefill.iter().chain(&self.encode).fold(Reads::NOTHING, |all, stage| all.and(stage.reads()))
    }

    /// The plugins that record the server of each prompt.
    pub(super) fn prefill_plugins(&self) -> impl Iterator<Item = &Plugin> {
        self.prefill.iter().flat_map(|stage| &stage.profile.plugins)
    }

    /// The plugins that record which servers encoded media.
    pub(super) fn encode_plugins(&self) -> impl Iterator<Item = &Plugin> {
        self.encode.iter().flat_map(|stage| &stage.profile.plugins)
    }

    /// The servers of all stages; `None` if one server serves the whole request. `decode` is the profile of the
    /// decode server.
    pub(super) fn pair(
        &self,
        decode: &PipelineProfile,
        cx: &PickContext<'_>,
        field: &PairCandidates<'_, '_>,
        rng: &mut PickRng,
        ranking: &Ranking,
    ) -> Option<Pair> {
        let prefill = self.prefill.as_ref()?;
        let mut pair = if self.prefill_first {
            prefill_first(prefill, decode, cx, field, rng, ranking)?
        } else {
            decode_first(prefill, cx, field, rng, ranking)?
        };
        pair.split = Some(true);
        Some(pair)
    }

    /// Whether the stages split the request, if there are servers for them.
    pub(super) fn wants_pair(&self, cx: &PickContext<'_>, decoder: &Candidate<'_>) -> bool {
        // With prefill first, the decode server is not chosen yet.
        let decoder = Some(decoder).filter(|_| !self.prefill_first);
        self.prefill.as_ref().is_some_and(|stage| stage.runs(cx, decoder))
    }

    /// The servers that the encode profile picks for the request's media.
    pub(super) fn encoders(
        &self,
        cx: &PickContext<'_>,
        media: &Media<'_, '_>,
        rng: &mut PickRng,
        ranking: &Ranking,
    ) -> Option<Decision> {
        // With prefill first, the decode server is not chosen yet.
        let decoder = media.decoder().filter(|_| !self.prefill_first);
        let stage = self.encode.as_ref().filter(|stage| stage.runs(cx, decoder))?;
        let own = media.sent.picks.first()?.id;
        let mut chosen = choose(&stage.profile, cx, None, media.encode, rng, ranking, ranking.wanted() + 1)?;
        // The decode server encodes by itself if the encode profile ranks it first.
        if chosen.picks.first().is_some_and(|first| first.id == own) {
            chosen.picks.clear();
        }
        chosen.picks.retain(|e| e.id != own);
        chosen.picks.truncate(ranking.wanted());
        Some(chosen)
    }
}

/// Chooses the prefill server for the decode server, which is the one that would serve the whole request.
fn decode_first(
    prefill: &ProfileStage,
    cx: &PickContext<'_>,
    field: &PairCandidates<'_, '_>,
    rng: &mut PickRng,
    ranking: &Ranking,
) -> Option<Pair> {
    let decoder = field.whole.picks.first().and_then(|e| field.decoder(e))?;
    if !prefill.runs(cx, Some(decoder)) {
        return None;
    }
    let own = &decoder.state.endpoint;
    let fits = |p: &&Candidate<'_>| p.state.endpoint.id == own.id || field.go_together(&p.state.endpoint, own);
    let candidates: SmallVec<[Candidate<'_>; 16]> = field.prefill.iter().filter(fits).copied().collect();
    let mut chosen = prefill.choose(cx, Some(own), &candidates, rng, ranking)?;
    let first = chosen.picks.first()?.clone();
    if first.id == own.id {
        return None;
    }
    chosen.picks.retain(|e| e.id != own.id);
    let parts = chosen.parts.unwrap_or_default();
    Some(Pair { parts, ..Pair::proposed(chosen.picks, field.whole.picks.clone(), "the prefill profile's choice") })
}

/// Chooses the decode server for the prefill server.
fn prefill_first(
    prefill: &ProfileStage,
    decode: &PipelineProfile,
    cx: &PickContext<'_>,
    field: &PairCandidates<'_, '_>,
    rng: &mut PickRng,
    ranking: &Ranking,
) -> Option<Pair> {
    if !prefill.runs(cx, None) {
        return None;
    }
    let mut prompt = prefill.choose(cx, None, field.prefill, rng, ranking)?;
    let first = prompt.picks.first()?.clone();
    let fits = |d: &&Candidate<'_>| d.state.endpoint.id == first.id || field.go_together(&first, &d.state.endpoint);
    let candidates: SmallVec<[Candidate<'_>; 16]> = field.decode.iter().filter(fits).copied().collect();
    let answer = choose(decode, cx, Some(&first), &candidates, rng, ranking, ranking.wanted())?;
    let own = answer.picks.first()?.clone();
    if own.id == first.id {
        return None;
    }
    prompt.picks.retain(|e| field.go_together(e, &own));
    let parts = prompt.parts.into_iter().chain(answer.parts).flatten().collect();
    Some(Pair { parts, ..Pair::proposed(prompt.picks, answer.picks, "the profiles' choice, prefill first") })
}
