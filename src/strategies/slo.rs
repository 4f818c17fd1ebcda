//! `slo`, `slo-least-load-pulling`, `slo-pack-load`, `slo-least-load`: servers by their measured capacity within
//! objectives.
//!
//! ```text
//! rank        = waited + expected - target, seconds, per deployment; above 0 the request misses the objective
//! consumption = 1 / (rate · time), the share of a server that the request takes
//! utilization = sum of the consumption of the requests that run on a server
//! deployment  = that of the least rank; another only if the request is on time there, and the former is full
//! server      = slo-pack-load            utilization + consumption <= 1, the fullest
//!               slo-least-load           the least utilization, full or not
//!               slo-least-load-pulling   utilization + consumption <= 1, the emptiest; `slo` is the same
//! ```
//!
//! A profile of the deployment ([`attache_pool::slo_profile`]) has expected time, target, rate and time by prompt and
//! response length. The pool's learned response length for such prompts is used. An endpoint's labels name its
//! deployment (see `deployment` below).
//! Without a profile, or without a measured objective in it, the fewest requests decide and the degradation is
//! counted (`no_profile`). If no rate of the profile meets the objective, the request is rejected with status 503.
//!
//! AIBrix's queue is the pool's own flow control. With `flowControl`, the detector `slo-load-detector` reports
//! saturation when every server is full. The order `slo-urgency` dequeues the most urgent request first, which is the
//! order of the ranks.
//! Without `flowControl` no request waits: when all servers are full, the one with the least utilization is picked.
//!
//! Differences from AIBrix:
//! - The expected response length is one number per request, at most what the client allows. AIBrix draws it anew for
//!   rank, queue and consumption.
//! - A request without a profile does not switch the queue to first come, first served for all others.
//! - Several gateways do not add up what they have sent.
//!
//! When not: the servers were not measured. Then use `predicted-latency`, with `deadlineAdmission` for requests that
//! state objectives.
//! Source: AIBrix v0.4 `slo`, `slo-pack-load`, `slo-least-load`, `slo-least-load-pulling`.

mod load;

use attache_pool::slo_profile::{Profile, Profiles, SloProfiles};
use attache_pool::{Endpoint, EndpointSpec, Roles};
use attache_scheduling::least_request::LeastRequest;
use attache_scheduling::plugin::{ParamError, params, section};
use attache_scheduling::registry::Descriptor;
use attache_scheduling::{Candidate, PickContext, Ranking, Signal, Strategy};
use attache_types::parameters;
use attache_types::rng::PickRng;
use load::{Fullness, Placement, Unplaced};
use serde_json::Value;
use smallvec::SmallVec;
use std::sync::Arc;

const SOURCE: &str = "AIBrix's SLO family";

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "slo",
    summary: "As `slo-least-load-pulling`.",
    source: SOURCE,
    parameters: section::<Params>,
    build: |value, _| build(value, Placement::Pull),
};

/// Registry entry.
pub const LEAST_LOAD: Descriptor = Descriptor {
    name: "slo-least-load",
    summary: "Picks the endpoint with the least utilization, by a measured profile of its deployment.",
    source: SOURCE,
    parameters: section::<Params>,
    build: |value, _| build(value, Placement::Push),
};

/// Registry entry.
pub const LEAST_LOAD_PULLING: Descriptor = Descriptor {
    name: "slo-least-load-pulling",
    summary: "As `slo-least-load`, among the endpoints with capacity for the request.",
    source: SOURCE,
    parameters: section::<Params>,
    build: |value, _| build(value, Placement::Pull),
};

/// Registry entry.
pub const PACK_LOAD: Descriptor = Descriptor {
    name: "slo-pack-load",
    summary: "Packs requests on the fullest endpoint with capacity, by a measured profile of its deployment.",
    source: SOURCE,
    parameters: section::<Params>,
    build: |value, _| build(value, Placement::Pack),
};

/// Label with the fleet of a pod of AIBrix's `RayClusterFleet`; the fleet counts as its deployment.
const FLEET_LABEL: &str = "orchestration.aibrix.ai/raycluster-fleet-name";
/// Label with the deployment of any other pod, AIBrix's default (`AIBRIX_POD_DEPLOYMENT_LABEL`).
const DEFAULT_DEPLOYMENT_LABEL: &str = "app.kubernetes.io/name";
/// Marks pods of Ray's operator. They all have the same `app.kubernetes.io/name`, so that label does not identify a
/// deployment.
const RAY_NODE: (&str, &str) = ("ray.io/is-ray-node", "yes");
/// Label with the hash that follows the Deployment's name in the names of its pods.
const TEMPLATE_LABEL: &str = "pod-template-hash";

parameters! {
    struct Params {
        /// Paths of profile files, each with one profile.
        "profiles" => profiles: Vec<String> { absent: "none"; },
        /// Whether to read profiles in Redis too, under AIBrix's keys. A profile in Redis precedes one in a file.
        "profilesFromRedis" => profiles_from_redis: bool { default: false; },
        /// Label that names an endpoint's deployment. AIBrix's fleet label precedes it; without both, the pod's name
        /// counts.
        "deploymentLabel" => label: String { default: DEFAULT_DEPLOYMENT_LABEL.to_owned(); },
    }
}

fn build(value: &Value, placement: Placement) -> Result<Box<dyn Strategy>, ParamError> {
    let Params { profiles, profiles_from_redis, label } = params(value)?;
    if profiles.iter().any(String::is_empty) {
        return Err(ParamError::value("profiles", "\"\"", "the paths of files are allowed"));
    }
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

/// The deployment of an endpoint, by AIBrix's rules: its fleet, else the value of `label`, else the prefix of the
/// pod's name.
fn deployment<'e>(spec: &'e EndpointSpec, label: &str) -> Option<&'e str> {
    let said = |name: &str| spec.labels.get(name).map(|value| &**value);
    let is_ray = said(RAY_NODE.0) == Some(RAY_NODE.1);
    let by_label = || said(label).filter(|_| !is_ray);
    // A pod's name is `deployment-hash-…`, after its ReplicaSet or RayCluster.
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

/// A deployment that could serve the request.
struct DeploymentChoice<'p> {
    profile: &'p Profile,
    /// Seconds by which the request misses the objective there; below 0 it meets it.
    rank: f64,
}

/// Prompt length and expected response length of the request, in tokens.
#[derive(Clone, Copy)]
struct RequestLengths {
    answer: u32,
    prompt: u32,
}

impl RequestLengths {
    fn of(cx: &PickContext<'_>, endpoint: &Endpoint) -> Self {
        let prompt = cx.request.prompt_tokens;
        let answer = endpoint.speed.pool().expected_answer(prompt);
        Self { answer: cx.request.max_tokens.map_or(answer, |most| answer.min(most)), prompt }
    }
}

impl Slo {
    /// The profile of an endpoint's deployment. If the deployment is unknown and there is only one profile, that one
    /// applies.
    fn profile<'p>(&self, cx: &PickContext<'_>, profiles: &'p Profiles, endpoint: &Endpoint) -> Option<&'p Profile> {
        profiles.find(cx.request.model, deployment(&endpoint.spec, &self.label))
    }

    /// The deployments of `endpoints`, the lowest rank first. `None` if there is none, or if a profile has no
    /// measured objective.
    fn choices<'p, 'e>(
        &self,
        cx: &PickContext<'_>,
        profiles: &'p Profiles,
        endpoints: impl Iterator<Item = &'e Endpoint>,
    ) -> Option<SmallVec<[DeploymentChoice<'p>; 4]>> {
        let mut choices: SmallVec<[DeploymentChoice<'p>; 4]> = SmallVec::new();
        for endpoint in endpoints {
            let Some(profile) = self.profile(cx, profiles, endpoint) else { continue };
            if choices.iter().any(|known| std::ptr::eq(known.profile, profile)) {
                continue;
            }
            let RequestLengths { answer, prompt } = RequestLengths::of(cx, endpoint);
            let rank = cx.request.waited.as_secs_f64() - profile.spare(answer, prompt)?;
            choices.push(DeploymentChoice { profile, rank });
        }
        choices.sort_by(|a, b| a.rank.total_cmp(&b.rank));
        (!choices.is_empty()).then_some(choices)
    }

    /// Position of the candidate that is to serve the request.
    fn place(
        &self,
        cx: &PickContext<'_>,
        profiles: &Profiles,
        choices: &[DeploymentChoice<'_>],
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
                // `Full` may pass soon, so it outweighs that a later deployment has no rate.
                Err(why) if i == 0 || why == Unplaced::Full => last = why,
                Err(_) => {}
            }
        }
        Err(last)
    }
}

fn fullness(cx: &PickContext<'_>, profile: &Profile, candidate: &Candidate<'_>) -> Fullness {
    let RequestLengths { answer, prompt } = RequestLengths::of(cx, &candidate.state.endpoint);
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
        // The remaining ranks, for retries: the lowest utilization first, with every algorithm.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, far below 2^64 billionths"
        )]
        let key = |c: &Candidate<'_>| (utilization(c) * 1e9) as u64;
        // A server without a rate for this request is idle for that reason, so it comes last.
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
        let RequestLengths { answer, prompt } = RequestLengths::of(cx, endpoint);
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
