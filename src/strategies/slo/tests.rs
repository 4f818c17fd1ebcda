//! The SLO strategies over small pools: the cases of the reference's tests, and our own.

use super::*;
use attache_pool::ledger::Ticket;
use attache_pool::slo_profile::testing::{profile, simulated};
use attache_pool::speed::{PoolSpeed, Reservation, Work};
use attache_pool::{EndpointSpec, EndpointState, PoolSnapshot};
use attache_scheduling::testing::{NOW, STALE_AFTER};
use attache_scheduling::{Decision, Registry, RequestFacts};
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use serde_json::json;
use std::time::Duration;

const LABEL: &str = "app.kubernetes.io/name";

/// A pool of servers by deployment.
struct World {
    snapshot: PoolSnapshot,
    strategy: Box<dyn Strategy>,
    running: Vec<(u32, Ticket)>,
}

impl World {
    fn new(name: &str, deployments: &[&str], profiles: &[Value]) -> Self {
        let speed = Arc::<PoolSpeed>::default();
        let state = |(id, deployment): (u32, &&str)| {
            let mut spec = EndpointSpec::at(([127, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into());
            spec.labels.insert(LABEL.into(), (**deployment).into());
            EndpointState::new(Arc::new(Endpoint::in_pool(EndpointId(id), spec, &speed)), None)
        };
        let states = (0u32..).zip(deployments).map(state).collect();
        let strategy = crate::tests::registry().build(name, &Value::Null).unwrap();
        strategy.profiles(&mut |store| store.publish(profiles.iter().map(profile).collect()));
        Self { snapshot: PoolSnapshot::new(1, true, states), strategy, running: Vec::new() }
    }

    /// Records responses of `answer` tokens to prompts of `prompt` tokens.
    fn answered(&self, prompt: u32, answer: u64) {
        let endpoint = &self.snapshot.endpoints[0].endpoint;
        let work = Work { prompt_tokens: prompt, uncached_tokens: prompt, adapter_cold: false };
        for _ in 0..20 {
            Reservation::begin(endpoint.clone(), None, work, true, NOW).ended(Some(answer), NOW);
        }
    }

    fn decide(&self, prompt: u32, waited: f64) -> Result<Decision, RequestError> {
        let request =
            RequestFacts { prompt_tokens: prompt, waited: Duration::from_secs_f64(waited), ..RequestFacts::default() };
        let cx = PickContext { request, ..PickContext::new(&self.snapshot, NOW, STALE_AFTER) };
        let candidates: Vec<_> =
            self.snapshot.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
        let mut ranking = Ranking::new(1);
        self.strategy.rank(&cx, &candidates, &mut for_request(1, 1), &mut ranking);
        let why = ranking.emptied_by().unwrap_or_default();
        ranking.decide().ok_or_else(|| RequestError::new(attache_types::error::Reason::NoReadyEndpoint, why))
    }

    /// Sends a request and returns the server that runs it.
    fn send(&mut self, prompt: u32) -> u32 {
        let picked = self.decide(prompt, 0.0).unwrap().picks[0].clone();
        let request = RequestFacts { prompt_tokens: prompt, ..RequestFacts::default() };
        let cx = PickContext { request, ..PickContext::new(&self.snapshot, NOW, STALE_AFTER) };
        let share = self.strategy.share(&cx, &picked);
        self.running.push((picked.id.0, Ticket::book(picked.clone(), 0).sharing(share)));
        picked.id.0
    }

    /// Whether no server has capacity for one more request of the usual share, as the `slo-load-detector` of flow
    /// control computes it.
    fn is_full(&self) -> bool {
        let ledgers = || self.snapshot.endpoints.iter().map(|state| &state.live().ledger);
        let running: f64 = ledgers().map(|ledger| f64::from(ledger.in_flight())).sum();
        let used: f64 = ledgers().map(|ledger| ledger.utilization()).sum();
        let least = ledgers().map(|ledger| ledger.utilization()).fold(f64::INFINITY, f64::min);
        running > 0.0 && used > 0.0 && least + used / running - 1e-6 >= 1.0
    }
}

#[test]
fn without_a_usable_profile_the_fewest_requests_decide() {
    let (no_objective, not_measured) = (
        {
            let mut p = simulated("a");
            p["slos"] = Value::Null;
            p
        },
        {
            let mut p = simulated("a");
            p["slos"] = json!({"ttft": 1.0});
            p
        },
    );
    for name in ["slo", "slo-pack-load", "slo-least-load", "slo-least-load-pulling"] {
        for profiles in [vec![], vec![no_objective.clone()], vec![not_measured.clone()], vec![simulated("other")]] {
            let mut world = World::new(name, &["a", "a"], &profiles);
            let first = world.send(512);
            let decision = world.decide(512, 0.0).unwrap();
            assert_eq!(
                (decision.picks[0].id.0, decision.lacking),
                (1 - first, Some(Signal::Profile)),
                "{name} {profiles:?}"
            );
            assert!(!world.is_full());
        }
    }
}

#[test]
fn request_that_no_rate_serves_within_its_objective_is_rejected() {
    for (name, refused) in
        [("slo", true), ("slo-pack-load", true), ("slo-least-load-pulling", true), ("slo-least-load", false)]
    {
        let world = World::new(name, &["a", "a"], &[simulated("a")]);
        assert!(world.decide(2_048, 0.0).is_ok(), "{name}: no response length is learned yet");
        world.answered(2_048, 512);
        let decided = world.decide(2_048, 0.0);
        assert_eq!(decided.is_err(), refused, "{name}");
        if let Err(error) = decided {
            assert!(error.message.contains("no rate"), "{error}");
        }
        // A client that allows at most 64 tokens never gets 512.
        let request = RequestFacts { prompt_tokens: 2_048, max_tokens: Some(64), ..RequestFacts::default() };
        let cx = PickContext { request, ..PickContext::new(&world.snapshot, NOW, STALE_AFTER) };
        assert!(world.strategy.share(&cx, &world.snapshot.endpoints[0].endpoint) > 0.0);
    }
}

#[test]
fn packing_fills_one_server_and_pulling_keeps_them_even() {
    // 4 requests at once on each server.
    let mut packed = World::new("slo-pack-load", &["a", "a"], &[simulated("a")]);
    let first = packed.send(512);
    assert_eq!([packed.send(512), packed.send(512), packed.send(512)], [first; 3]);
    assert_eq!(packed.send(512), 1 - first);
    for name in ["slo", "slo-least-load-pulling", "slo-least-load"] {
        let mut even = World::new(name, &["a", "a"], &[simulated("a")]);
        let first = even.send(512);
        let next = [even.send(512), even.send(512), even.send(512)];
        assert_eq!(next, [1 - first, first, 1 - first], "{name}");
    }
}

#[test]
fn full_pool_next_request_goes_to_the_first_server_that_finishes() {
    for name in ["slo", "slo-pack-load"] {
        let mut world = World::new(name, &["a", "a"], &[simulated("a")]);
        for sent in 0..8 {
            assert!(!world.is_full(), "{name} after {sent}");
            world.send(512);
        }
        assert!(world.is_full(), "{name}");
        assert_eq!(
            world.decide(512, 0.0).unwrap().reason,
            "no endpoint has capacity by its profile; least utilization"
        );
        let (freed, ticket) = world.running.remove(0);
        drop(ticket);
        assert!(!world.is_full(), "{name}");
        assert_eq!(world.send(512), freed, "{name}");
        assert!(world.is_full());
    }
}

#[test]
fn second_deployment_is_used_while_the_request_is_on_time_there() {
    let slower = |by: f64| {
        let mut profile = simulated("slow");
        let rows = profile["e2e"].as_array().unwrap().clone();
        let row =
            |row: &Value| -> Vec<f64> { row.as_array().unwrap().iter().map(|s| s.as_f64().unwrap() * by).collect() };
        profile["e2e"] = rows.iter().map(row).collect();
        profile
    };
    let mut world = World::new("slo", &["slow", "fast"], &[slower(2.0), simulated("fast")]);
    assert_eq!([world.send(2_048), world.send(2_048), world.send(2_048), world.send(2_048)], [1; 4]);
    assert_eq!(world.send(2_048), 0, "the fast one is full, and the slow one is in time");
    // After a wait of 4.2 s the request misses its 5 s there (0.5 and 1 s): full is better than late.
    assert_eq!(world.decide(2_048, 4.2).unwrap().reason, "no endpoint has capacity by its profile; least utilization");
}

#[test]
fn full_deployment_outweighs_one_that_can_never_serve() {
    // The second deployment meets the objective but has no rate in its measurements.
    let mut idle = simulated("never");
    let rows = idle["tputs"].as_array().unwrap().len();
    idle["tputs"] = (0..rows).map(|_| vec![0.0; 5]).collect();
    for deployments in [["fast", "never"], ["never", "fast"]] {
        let mut world = World::new("slo", &deployments, &[simulated("fast"), idle.clone()]);
        assert_eq!(world.send(512), world.send(512), "there is one that serves it");
        assert_eq!(world.send(512), world.send(512));
        let decided = world.decide(512, 0.0).unwrap();
        assert_eq!(decided.reason, "no endpoint has capacity by its profile; least utilization", "{deployments:?}");
        let fast = deployments.iter().position(|name| *name == "fast").unwrap();
        assert_eq!(decided.picks[0].id.0 as usize, fast, "the other is idle because nothing can be sent there");
    }
}

#[test]
fn request_may_wait_as_long_as_its_objective_allows() {
    let world = World::new("slo", &["a", "a"], &[simulated("a")]);
    let spare = |waited: f64| {
        let request =
            RequestFacts { prompt_tokens: 1_024, waited: Duration::from_secs_f64(waited), ..RequestFacts::default() };
        world.strategy.spare(&PickContext { request, ..PickContext::new(&world.snapshot, NOW, STALE_AFTER) })
    };
    // 5 s minus 10 ms for each of the shortest response's 4 tokens and 0.25 ms for each of the prompt's.
    assert!((spare(0.0).unwrap() - (5.0 - 0.04 - 0.256)).abs() < 1e-9);
    assert!((spare(6.0).unwrap() - (-1.0 - 0.04 - 0.256)).abs() < 1e-9);
    assert_eq!(
        World::new("slo", &["a"], &[]).strategy.spare(&PickContext::new(&world.snapshot, NOW, STALE_AFTER)),
        None
    );
}

#[test]
fn deployment_is_found_by_aibrixs_rules() {
    let spec = |name: &str, labels: &[(&str, &str)]| {
        let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        EndpointSpec { name: name.into(), labels, ..EndpointSpec::at(([127, 0, 0, 1], 8000).into()) }
    };
    let fleet = (FLEET_LABEL, "fleet");
    let (named, ray, hash) = ((LABEL, "named"), RAY_NODE, (TEMPLATE_LABEL, "77d9bbd669"));
    for (name, labels, deployment_is) in [
        ("p", vec![fleet, named, hash], Some("fleet")),
        ("p", vec![named, hash], Some("named")),
        ("llama-a100-77d9bbd669-s68dw", vec![hash], Some("llama-a100")),
        ("llama-a100-77d9bbd669-s68dw-rank-1", vec![hash], Some("llama-a100")),
        // All pods of Ray's operator have the same name.
        ("qwen-7b-77d9bbd669-s68dw-head-hzmsf", vec![(LABEL, "kuberay"), ray, hash], Some("qwen-7b")),
        ("llama-s68dw", vec![hash], None),
        ("77d9bbd669-s68dw", vec![hash], None),
        ("llama-77d9bbd669-s68dw", vec![], None),
        ("a-b-c", vec![(TEMPLATE_LABEL, "")], None),
    ] {
        assert_eq!(deployment(&spec(name, &labels), LABEL), deployment_is, "{name} {labels:?}");
    }
    let spec = spec("p", &[named, ("gpu", "l40s")]);
    assert_eq!(deployment(&spec, "gpu"), Some("l40s"));
}

#[test]
fn profile_of_the_model_takes_precedence_over_one_of_the_deployment() {
    use attache_pool::slo_profile::RedisProfiles;
    let mut slow = simulated("a");
    slow["slos"]["e2e"] = json!(0.001);
    let world = World::new("slo", &["a"], &[slow]);
    let spare = |model: &str| {
        let request = RequestFacts { prompt_tokens: 128, model, ..RequestFacts::default() };
        let cx = PickContext { request, ..PickContext::new(&world.snapshot, NOW, STALE_AFTER) };
        world.strategy.spare(&cx).unwrap()
    };
    assert!(spare("m") < 0.0);
    let of_model = Profile::parse_keyed("m_a", simulated("b").to_string().as_bytes()).unwrap();
    let published = Arc::new(RedisProfiles::from_pointee(vec![of_model]));
    world.strategy.profiles(&mut |profiles| profiles.read_there(published.clone()));
    assert!(spare("m") > 0.0, "its key says whose it is");
    assert!(spare("other") < 0.0);
    published.store(Arc::default());
    assert!(spare("m") < 0.0);
}

#[test]
fn parameters_are_checked() {
    for plugin in [PLUGIN, LEAST_LOAD, LEAST_LOAD_PULLING, PACK_LOAD] {
        assert!(
            (plugin.build)(
                &json!({"profiles": ["/a.json"], "profilesFromRedis": true, "deploymentLabel": "gpu"}),
                &Registry::default()
            )
            .is_ok()
        );
        for (bad, word) in [
            (json!({"profiles": [""]}), "profiles"),
            (json!({"deploymentLabel": ""}), "deploymentLabel"),
            (json!({"profile": "a"}), "profile"),
        ] {
            assert!((plugin.build)(&bad, &Registry::default()).unwrap_err().to_string().contains(word), "{bad}");
        }
    }
}
