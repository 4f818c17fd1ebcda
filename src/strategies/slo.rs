//! `slo`, `slo-least-load-pulling`, `slo-pack-load`, `slo-least-load`: servers by what they were measured to do within their objectives.
//!
//! ```text
//! rank        = waited + expected - target, seconds, of the request on each deployment; above 0 it misses the objective
//! consumption = 1 / (rate · time), the part of a server that the request takes      utilization = Σ of what runs there
//! deployment  = that of the least rank; another only if the request is on time there, and the former is full
//! server      = slo-pack-load            utilization + consumption <= 1, the fullest
//!               slo-least-load           the least utilization, full or not
//!               slo-least-load-pulling   utilization + consumption <= 1, the emptiest; `slo` is the same
//! ```
//!
//! Expected, target, rate and time stand in a profile of the deployment ([`attache_pool::slo_profile`]), at the lengths of the prompt and of the answer
//! that the pool gives to such prompts. Which deployment an endpoint is of, its labels say (below, `deployment`). Where a profile is missing or has no
//! objective that was measured, the fewest requests decide, and that is counted (`no_profile`). A request that a profile says no rate of it meets the
//! objective is refused with 503.
//!
//! The queue of AIBrix's is the pool's own: with `flowControl`, the detector `slo-load-detector` says when every server is full and the order
//! `slo-urgency` puts the most urgent request first, which is the order of the ranks. Without it nobody waits, and when all servers are full the one
//! with the least utilization is named. Not as there: an answer's expected length is one number a request (there it is drawn anew for rank, queue
//! and consumption) and no longer than the client allows; a request without a profile does not put the queue back to first come, first served for
//! all others; several gateways do not add up what they have sent.
//!
//! When not: nobody has measured the servers; then `predicted-latency`, with `deadlineAdmission` for requests that say what they want.
//! Source: AIBrix v0.4 `slo`, `slo-pack-load`, `slo-least-load`, `slo-least-load-pulling`.

mod load;

use attache_pool::slo_profile::{Profile, Profiles, SloProfiles};
use attache_pool::{Endpoint, EndpointSpec, Roles};
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{ParamError, params};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Signal, Strategy};
use attache_types::rng::PickRng;
use load::{Fullness, Placement, Unplaced};
use serde::Deserialize;
use serde_json::Value;
use smallvec::SmallVec;
use std::sync::Arc;

const SOURCE: &str = "AIBrix's SLO family";

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "slo",
    summary: "As `slo-least-load-pulling`.",
    source: SOURCE,
    build: |value, _| build(value, Placement::Pull),
};

/// Registry entry.
pub const LEAST_LOAD: Descriptor = Descriptor {
    name: "slo-least-load",
    summary: "Picks the endpoint of which running requests take least, by a measured profile of its deployment.",
    source: SOURCE,
    build: |value, _| build(value, Placement::Push),
};

/// Registry entry.
pub const LEAST_LOAD_PULLING: Descriptor = Descriptor {
    name: "slo-least-load-pulling",
    summary: "As `slo-least-load`, among the endpoints that have room for the request.",
    source: SOURCE,
    build: |value, _| build(value, Placement::Pull),
};

/// Registry entry.
pub const PACK_LOAD: Descriptor = Descriptor {
    name: "slo-pack-load",
    summary: "Packs requests on the fullest endpoint that has room, by a measured profile of its deployment.",
    source: SOURCE,
    build: |value, _| build(value, Placement::Pack),
};

/// The label of a pod of AIBrix's `RayClusterFleet`: its fleet is its deployment.
const FLEET_LABEL: &str = "orchestration.aibrix.ai/raycluster-fleet-name";
/// The label that names the deployment of any other pod, as AIBrix has it (`AIBRIX_POD_DEPLOYMENT_LABEL`).
const DEFAULT_DEPLOYMENT_LABEL: &str = "app.kubernetes.io/name";
/// Ray's operator gives all its pods the same `app.kubernetes.io/name`; so marked, that says nothing.
const RAY_NODE: (&str, &str) = ("ray.io/is-ray-node", "yes");
/// The label whose value stands in the names of a Deployment's pods, behind the Deployment's.
const TEMPLATE_LABEL: &str = "pod-template-hash";

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    /// Files with one profile each.
    profiles: Vec<String>,
    /// Profiles in Redis too, under AIBrix's keys; a profile there comes before a file's.
    profiles_from_redis: bool,
    /// The label that names an endpoint's deployment, in place of `app.kubernetes.io/name`.
    deployment_label: Option<String>,
}

fn build(value: &Value, placement: Placement) -> Result<Box<dyn Strategy>, ParamError> {
    let Params { profiles, profiles_from_redis, deployment_label } = params(value)?;
    if profiles.iter().any(String::is_empty) {
        return Err(ParamError::value("profiles", "\"\"", "the paths of files are allowed"));
    }
    let label = deployment_label.unwrap_or_else(|| DEFAULT_DEPLOYMENT_LABEL.to_owned());
    if label.is_empty() {
        return Err(ParamError::value("deploymentLabel", "\"\"", "the name of a label is allowed"));
    }
    Ok(Box::new(Slo { placement, label, profiles: Arc::new(SloProfiles::new(profiles, profiles_from_redis)) }))
}

#[derive(Debug)]
struct Slo {
    placement: Placement,
    label: String,
    profiles: Arc<SloProfiles>,
}

/// The deployment of an endpoint, by AIBrix's rules: its fleet, else what `label` says, else what the pod is called after.
fn deployment<'e>(spec: &'e EndpointSpec, label: &str) -> Option<&'e str> {
    let said = |name: &str| spec.labels.get(name).map(|value| &**value);
    let is_ray = said(RAY_NODE.0) == Some(RAY_NODE.1);
    let by_label = || said(label).filter(|_| !is_ray);
    // A pod is called `deployment-hash-…`, after the ReplicaSet or the RayCluster that it is of.
    let by_name = || {
        said(TEMPLATE_LABEL).filter(|hash| !hash.is_empty()).and_then(|hash| {
            spec.name.rmatch_indices(hash).find_map(|(at, hash)| {
                let before = spec.name.get(..at)?.strip_suffix('-')?;
                spec.name.get(at + hash.len()..)?.starts_with('-').then_some(before)
            })
        })
    };
    said(FLEET_LABEL).or_else(by_label).or_else(by_name)
}

/// A deployment that the request could go to.
struct Choice<'p> {
    profile: &'p Profile,
    /// Seconds by which the request misses the objective there; below 0 it meets it.
    rank: f64,
}

/// The lengths of the request, tokens.
#[derive(Clone, Copy)]
struct Lengths {
    answer: u32,
    prompt: u32,
}

impl Lengths {
    fn of(cx: &PickContext<'_>, endpoint: &Endpoint) -> Self {
        let prompt = cx.request.prompt_tokens;
        let answer = endpoint.speed.pool().expected_answer(prompt);
        Self { answer: cx.request.max_tokens.map_or(answer, |most| answer.min(most)), prompt }
    }
}

impl Slo {
    /// The profile of an endpoint's deployment. One of which it is not known is of the only deployment, where there is one profile.
    fn profile<'p>(&self, cx: &PickContext<'_>, profiles: &'p Profiles, endpoint: &Endpoint) -> Option<&'p Profile> {
        profiles.find(cx.request.model, deployment(&endpoint.spec, &self.label))
    }

    /// The deployments of `endpoints`, the one that suits the request best first; `None` when there is none, or one of which it can't be said.
    fn choices<'p, 'e>(
        &self,
        cx: &PickContext<'_>,
        profiles: &'p Profiles,
        endpoints: impl Iterator<Item = &'e Endpoint>,
    ) -> Option<SmallVec<[Choice<'p>; 4]>> {
        let mut choices: SmallVec<[Choice<'p>; 4]> = SmallVec::new();
        for endpoint in endpoints {
            let Some(profile) = self.profile(cx, profiles, endpoint) else { continue };
            if choices.iter().any(|known| std::ptr::eq(known.profile, profile)) {
                continue;
            }
            let Lengths { answer, prompt } = Lengths::of(cx, endpoint);
            let rank = cx.request.waited.as_secs_f64() - profile.spare(answer, prompt)?;
            choices.push(Choice { profile, rank });
        }
        choices.sort_by(|a, b| a.rank.total_cmp(&b.rank));
        (!choices.is_empty()).then_some(choices)
    }

    /// The candidate that the request goes to.
    fn place(
        &self,
        cx: &PickContext<'_>,
        profiles: &Profiles,
        choices: &[Choice<'_>],
        candidates: &[Candidate<'_>],
    ) -> Result<usize, Unplaced> {
        let mut last = Unplaced::Full;
        for (i, choice) in choices.iter().enumerate() {
            if i > 0 && choice.rank > 0.0 {
                break;
            }
            let is_of_it = |c: &Candidate<'_>| {
                self.profile(cx, profiles, &c.state.endpoint).is_some_and(|p| std::ptr::eq(p, choice.profile))
            };
            let members: SmallVec<[usize; 16]> =
                candidates.iter().enumerate().filter(|(_, c)| is_of_it(c)).map(|(at, _)| at).collect();
            let fullness: SmallVec<[Fullness; 16]> =
                members.iter().filter_map(|at| candidates.get(*at)).map(|c| fullness(cx, choice.profile, c)).collect();
            match self.placement.place(&fullness) {
                Ok(at) => return members.get(at).copied().ok_or(Unplaced::Full),
                // One that has no room now may have some soon, whatever those after it can't do.
                Err(why) if i == 0 || why == Unplaced::Full => last = why,
                Err(_) => {}
            }
        }
        Err(last)
    }
}

fn fullness(cx: &PickContext<'_>, profile: &Profile, candidate: &Candidate<'_>) -> Fullness {
    let Lengths { answer, prompt } = Lengths::of(cx, &candidate.state.endpoint);
    Fullness {
        utilization: candidate.state.live().ledger.utilization(),
        consumption: profile.consumption(answer, prompt),
    }
}

impl Strategy for Slo {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let profiles = self.profiles.load();
        let Some(choices) = self.choices(cx, &profiles, candidates.iter().map(|c| &*c.state.endpoint)) else {
            ranking.lacks(Signal::Profile);
            LeastRequest.rank(cx, candidates, rng, ranking);
            ranking.because("no profile with an objective; fewest requests");
            return;
        };
        let utilization = |c: &Candidate<'_>| c.state.live().ledger.utilization();
        ranking.note("utilization", 0.0, candidates, |i| candidates.get(i).map_or(f64::NAN, utilization));
        let placed = match self.place(cx, &profiles, &choices, candidates) {
            Ok(at) => {
                ranking.because(self.placement.reason());
                candidates.get(at)
            }
            Err(Unplaced::Full) => {
                ranking.because("no endpoint has capacity by its profile; least utilization");
                None
            }
            Err(Unplaced::NoRate) => {
                ranking.emptied("slo: no rate meets the objective");
                return;
            }
        };
        placed.into_iter().for_each(|c| ranking.push(&c.state.endpoint));
        // Should it fail there: the emptiest first, whatever the algorithm.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, far below 2^64 billionths"
        )]
        let key = |c: &Candidate<'_>| (utilization(c) * 1e9) as u64;
        // One that has no rate is idle for that very reason, and comes last.
        let known = candidates.iter().filter_map(|c| {
            let profile = self.profile(cx, &profiles, &c.state.endpoint)?;
            let never = fullness(cx, profile, c).consumption.is_none();
            Some(((never, key(c)), &c.state.endpoint))
        });
        let mut rest: SmallVec<[_; 16]> = known.collect();
        rest.sort_by_key(|(key, _)| *key);
        rest.into_iter().for_each(|(_, endpoint)| ranking.push(endpoint));
    }

    fn share(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> f64 {
        let profiles = self.profiles.load();
        let Lengths { answer, prompt } = Lengths::of(cx, endpoint);
        let consumption = self.profile(cx, &profiles, endpoint).and_then(|p| p.consumption(answer, prompt));
        consumption.unwrap_or(0.0)
    }

    fn spare(&self, cx: &PickContext<'_>) -> Option<f64> {
        let profiles = self.profiles.load();
        let serving = cx.snapshot.endpoints.iter().filter(|e| e.serves(Roles::DECODE));
        let choices = self.choices(cx, &profiles, serving.map(|e| &*e.endpoint))?;
        choices.first().map(|best| -best.rank)
    }

    fn profiles<'s>(&'s self, each: &mut dyn FnMut(&'s Arc<SloProfiles>)) {
        each(&self.profiles);
    }
}

#[cfg(test)]
mod tests;
