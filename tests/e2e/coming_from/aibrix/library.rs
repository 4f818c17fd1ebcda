//! Settings from AIBrix's environment variables, and decisions of a strategy, without starting a picker.

use attache::plugins::registry;
use attache_config::aibrix_env::AibrixEnv;
use attache_config::settings::Settings;
use attache_config::{ConfigText, Overrides, Sources, Surroundings, load};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_protocol::Prompt;
use attache_scheduling::{Candidate, PickContext, Ranking, RequestFacts};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const NOW: Timestamp = Timestamp(5_000_000_000);
const STALE_AFTER: Duration = Duration::from_secs(2);

/// The settings of a pool with these lines and variables and the warnings, or the errors.
pub(super) fn settings(more: &str, variables: &[(&str, &str)]) -> Result<(Settings, Vec<String>), Vec<String>> {
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n{more}  endpoints: [{{address: \"127.0.0.1:1\"}}]\n"
    );
    let set = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let overrides = Overrides { aibrix: AibrixEnv::of(set), ..Overrides::default() };
    let text = Some(ConfigText { name: "attache.yaml".into(), bytes: text.into_bytes() });
    let said = |d: attache_config::diagnostic::Diagnostic| format!("{} {}: {}", d.code.as_str(), d.path, d.message);
    match load(&Sources { registry: registry(), text, overrides, surroundings: Surroundings::default() }) {
        Ok((settings, warnings)) => Ok((settings, warnings.into_iter().map(said).collect())),
        Err(errors) => Err(errors.into_iter().map(said).collect()),
    }
}

/// The strategy and parameters of a pool that only the environment configures.
pub(super) fn strategy(variables: &[(&str, &str)]) -> (String, Value) {
    let (settings, _) = settings("", variables).unwrap_or_else(|errors| panic!("{variables:?}: {errors:?}"));
    let pool = settings.pools.into_iter().next().expect("the pool");
    (pool.strategy, pool.strategy_parameters)
}

/// Checks that a variable sets this parameter of `algorithm` to this value.
pub(super) fn sets(algorithm: &str, variable: (&str, &str), parameter: &str, value: impl Into<Value>) {
    let (name, parameters) = strategy(&[("ROUTING_ALGORITHM", algorithm), variable]);
    assert_eq!((name.as_str(), parameters.get(parameter)), (algorithm, Some(&value.into())), "{variable:?}");
}

/// The endpoints (from 1) that are picked over 100 draws with these metrics. `None` is an endpoint without metrics.
pub(super) fn winners(algorithm: &str, parameters: &Value, pages: &[Option<EndpointMetrics>]) -> BTreeSet<u32> {
    let state = |(id, page): (u32, &Option<EndpointMetrics>)| {
        let address = ([127, 0, 0, 1], 8_000 + id as u16).into();
        let endpoint = Arc::new(Endpoint::new(EndpointId(id), EndpointSpec::at(address)));
        let page = page.clone().map(|page| Arc::new(EndpointMetrics { scraped_at: NOW, ..page }));
        EndpointState::new(endpoint, page)
    };
    let pool = PoolSnapshot::new(1, true, (1..).zip(pages).map(state).collect());
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let strategy = registry().build(algorithm, parameters).expect("a strategy");
    let draw = |seed| {
        let mut ranking = Ranking::new(1);
        let cx = PickContext::new(&pool, NOW, STALE_AFTER);
        strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
        ranking.decide().expect("a decision").picks[0].id.0
    };
    (0..100).map(draw).collect()
}

/// The score of an endpoint after it was sent one request with this prompt.
pub(super) fn work(algorithm: &str, parameters: &Value, prompt: &Prompt<'_>) -> f64 {
    let endpoint = Arc::new(Endpoint::new(EndpointId(1), EndpointSpec::at(([127, 0, 0, 1], 8_001).into())));
    let pool = PoolSnapshot::new(1, true, vec![EndpointState::new(endpoint.clone(), None)]);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let strategy = registry().build(algorithm, parameters).expect("a strategy");
    let request = RequestFacts { model: "m", prompt: Some(prompt), ..RequestFacts::default() };
    let cx = PickContext { request, ..PickContext::new(&pool, NOW, STALE_AFTER) };
    strategy.picked(&cx, &endpoint);
    let mut out = [f64::NAN];
    strategy.scores(&cx, &candidates, &mut out);
    out[0]
}
