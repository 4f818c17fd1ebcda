//! `fallback`: one strategy, and another one for requests whose signal the first one lacks.
//!
//! ```yaml
//! strategy:
//!   name: fallback
//!   parameters: {primary: prefix-cache, fallback: {name: vtc-basic, parameters: {windowSize: 1}}}
//! ```
//!
//! Every strategy falls back to the fewest requests by itself; use this one to fall back to another strategy. The
//! primary ranks first.
//! If it reports a missing signal (metrics, prefix, prompt, user), its ranking is dropped and that of the fallback is
//! used. Both record where requests are sent. The missing signal is counted in the same way as without this strategy.
//! When not: the fewest requests are a good enough fallback. Source: AIBrix's fallback router, whose default is a
//! random endpoint: `fallback: random`.

use attache_pool::Endpoint;
use attache_pool::slo_profile::SloProfiles;
use attache_scheduling::digest::Digest;
use attache_scheduling::plugin::{Better, ParamError, ResponseHeaders, UserCharge, params, section};
use attache_scheduling::registry::{BuildError, Descriptor, Registry};
use attache_scheduling::{Candidate, PickContext, Ranking, Reads, Strategy};
use attache_types::clock::Timestamp;
use attache_types::declare::{Catalogue, Kind};
use attache_types::ids::EndpointId;
use attache_types::parameters;
use attache_types::rng::PickRng;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "fallback",
    summary: "Ranks by one strategy, and by another for requests whose signal the first one lacks.",
    source: "AIBrix's fallback router",
    parameters: section::<Params>,
    build: |value, registry| params::<Params>(value)?.build(registry).map(|s| Box::new(s) as Box<dyn Strategy>),
};

/// The strategy that most often lacks its signal.
const DEFAULT_PRIMARY: &str = "prefix-cache";
/// The fallback of every strategy.
const DEFAULT_FALLBACK: &str = "least-request";

parameters! {
    struct Params {
        /// Strategy that ranks first: its name, or a mapping with `name` and `parameters`.
        "primary" => primary: Option<NamedStrategy> { absent: "`prefix-cache`"; },
        /// Strategy for requests whose signal the primary one lacks: its name, or a mapping with `name` and
        /// `parameters`.
        "fallback" => fallback: Option<NamedStrategy> { absent: "`least-request`"; },
    }
    /// A strategy with parameters, as configured.
    struct NamedStrategy = "name" {
        /// Name of the strategy.
        "name" => name: String,
        /// Its parameters.
        "parameters" => parameters: Value { absent: "its defaults"; kind: Kind::Parameters(Catalogue::Strategies); },
    }
}

impl Params {
    fn build(self, registry: &Registry) -> Result<FallbackStrategy, ParamError> {
        let primary = part("primary", self.primary, DEFAULT_PRIMARY, registry)?;
        Ok(FallbackStrategy { primary, fallback: part("fallback", self.fallback, DEFAULT_FALLBACK, registry)? })
    }
}

fn part(
    key: &str,
    given: Option<NamedStrategy>,
    default: &str,
    registry: &Registry,
) -> Result<Box<dyn Strategy>, ParamError> {
    let named = given.unwrap_or_else(|| NamedStrategy { name: default.to_owned(), parameters: Value::Null });
    registry.build(&named.name, &named.parameters).map_err(|error| {
        let error = match error {
            BuildError::Unknown(_) => ParamError::new(error.to_string()),
            BuildError::Parameters(error) => error.under("parameters"),
        };
        error.named(key).under(key)
    })
}

#[derive(Debug)]
struct FallbackStrategy {
    primary: Box<dyn Strategy>,
    fallback: Box<dyn Strategy>,
}

impl Strategy for FallbackStrategy {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let mut first = ranking.another();
        self.primary.rank(cx, candidates, rng, &mut first);
        match first.decide() {
            Some(decision) if decision.lacking.is_none() => ranking.adopt(decision),
            lacking => {
                if let Some(signal) = lacking.and_then(|d| d.lacking) {
                    ranking.lacks(signal);
                }
                self.fallback.rank(cx, candidates, rng, ranking);
            }
        }
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        let better = self.primary.scores(cx, candidates, out);
        if better.is_some() && (out.is_empty() || out.iter().any(|s| !s.is_nan())) {
            return better;
        }
        out.fill(f64::NAN);
        self.fallback.scores(cx, candidates, out)
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        let trails = [&self.primary, &self.fallback].map(|strategy| strategy.picked(cx, endpoint));
        trails.into_iter().flatten().next()
    }

    fn observe(&self, model: &str, trail: &Digest, endpoint: EndpointId, now: Timestamp) {
        self.primary.observe(model, trail, endpoint, now);
        self.fallback.observe(model, trail, endpoint, now);
    }

    fn charge(&self, cx: &PickContext<'_>) -> Option<UserCharge> {
        self.primary.charge(cx).or_else(|| self.fallback.charge(cx))
    }

    fn charged(&self, charge: UserCharge, now: Timestamp) {
        self.primary.charged(charge, now);
        self.fallback.charged(charge, now);
    }

    fn moved(&self, model: &str, trail: &Digest, from: EndpointId, to: EndpointId, now: Timestamp) {
        self.primary.moved(model, trail, from, to, now);
        self.fallback.moved(model, trail, from, to, now);
    }

    fn forget(&self, lost: &[EndpointId]) {
        self.primary.forget(lost);
        self.fallback.forget(lost);
    }

    fn end_session(&self, tenant: Option<&str>, id: &str) {
        self.primary.end_session(tenant, id);
        self.fallback.end_session(tenant, id);
    }

    fn response_headers(&self, served: &Endpoint, out: &mut ResponseHeaders) {
        self.primary.response_headers(served, out);
        self.fallback.response_headers(served, out);
    }

    fn share(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> f64 {
        self.primary.share(cx, endpoint).max(self.fallback.share(cx, endpoint))
    }

    fn spare(&self, cx: &PickContext<'_>) -> Option<f64> {
        self.primary.spare(cx).or_else(|| self.fallback.spare(cx))
    }

    fn profiles<'s>(&'s self, each: &mut dyn FnMut(&'s Arc<SloProfiles>)) {
        self.primary.profiles(each);
        self.fallback.profiles(each);
    }

    fn reads(&self) -> Reads {
        self.primary.reads().and(self.fallback.reads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::registry;
    use attache_scheduling::plugin::Headers;
    use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
    use attache_scheduling::{Decision, Signal};
    use attache_types::rng::for_request;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn decide(value: &Value, user: Option<&str>) -> Decision {
        let strategy = (PLUGIN.build)(value, &registry()).unwrap();
        let pool = snapshot(&[(0, 3), (1, 1), (2, 2)]);
        let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
        let headers: BTreeMap<_, _> = user.map(|u| ("user".to_owned(), u.to_owned())).into_iter().collect();
        let mut cx = context(&pool);
        cx.request.headers = Headers::of(&headers);
        let mut ranking = Ranking::new(2).explained();
        strategy.rank(&cx, &candidates, &mut for_request(0, 0), &mut ranking);
        ranking.decide().unwrap()
    }

    #[test]
    fn fallback_decides_only_where_the_primary_lacks_a_signal() {
        let turns = json!({"primary": "vtc-basic", "fallback": "round-robin"});
        let known = decide(&turns, Some("a"));
        assert_eq!((known.lacking, known.picks[0].id.0, known.picks.len()), (None, 1, 2));
        assert_eq!(known.parts.unwrap().len(), 1, "the explanation is the first one's");
        let unknown = decide(&turns, None);
        assert_eq!((unknown.lacking, unknown.picks[0].id.0), (Some(Signal::User), 0));
        assert_eq!(unknown.reason, "next in rotation");
        let both = decide(&json!({"primary": "vtc-basic", "fallback": "prefix-cache"}), None);
        assert_eq!((both.lacking, both.picks[0].id.0), (Some(Signal::User), 1), "the first signal stands");
    }

    #[test]
    fn parts_are_names_or_names_with_parameters() {
        for good in [
            json!({}),
            json!({"primary": {"name": "vtc-basic", "parameters": {"windowSize": 1}}}),
            json!({"primary": "vtc-basic:2,least-request"}),
        ] {
            assert!((PLUGIN.build)(&good, &registry()).is_ok(), "{good}");
        }
        for (bad, word) in [
            (json!({"primary": "no-such"}), "no-such"),
            (json!({"fallback": {"name": "vtc-basic", "parameters": {"windowSize": 0}}}), "windowSize"),
            (json!({"fallback": 3}), "fallback"),
            (json!({"primary": {"nam": "random"}}), "nam"),
        ] {
            let error = (PLUGIN.build)(&bad, &registry()).unwrap_err();
            assert!(error.to_string().contains(word), "{bad}: {error}");
        }
    }
}
