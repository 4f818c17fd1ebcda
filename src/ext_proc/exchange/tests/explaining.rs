//! An explanation is the decision that the next live request would get, and changes no state.

use super::splitting::{direct, setup as splitting_setup};
use super::*;
use attache_disagg::Mode;
use attache_picker::explain::{self, ExplainQuery, Explanation};
use attache_picker::settings::ExplainSettings;
use attache_pool::health::Availability;
use attache_prefix::key::BlockKey;
use attache_scheduling::Decider;
use proptest::prelude::*;

pub(super) const PATH: &str = "/v1/chat/completions";

/// Explains a request at the world's time.
pub(super) fn explained(
    world: &World,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Explanation, RequestError> {
    let picker = &world.processor.picker;
    let headers: Vec<_> = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let query = ExplainQuery { pool: None, path, headers: &headers, body, now: NOW };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(explain::explain(picker, &picker.config(), query, async |warming| compute(warming)))
}

/// Decides and books the same request live.
pub(super) fn decided(
    world: &World,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Box<Plan>, RequestError> {
    let header = |(name, value): &(&str, &str)| attache_picker::head::Header {
        name: (*name).to_owned(),
        value: value.as_bytes().to_vec(),
    };
    let head = Head::read([(":path", path)].iter().chain(headers).map(header).collect());
    let (api, id) = Api::from_path(head.path());
    let picker = &world.processor.picker;
    let (config, mut rng) = (picker.config(), picker.next_rng());
    let mut q = RequestView {
        head: &head,
        pool: None,
        called: "",
        api,
        response_id: id.as_deref(),
        subset: None,
        body: if body.is_empty() { Seen::Nothing } else { Seen::Whole(body) },
        now: NOW,
        opened: NOW,
        last: false,
        made: None,
        may_wait: true,
        opens: false,
        has_turn: false,
        prefill_time: PrefillTime::Unbounded,
        trace: None,
    };
    let mut allowance = Allowance::default();
    let made;
    let mut step = decide::decide(picker, &config, &q, &mut allowance, &mut rng)?;
    if let Step::Warm(warming, _) = step {
        made = warming.made();
        compute(warming);
        q = RequestView { last: true, made: made.as_deref(), ..q };
        step = decide::decide(picker, &config, &q, &mut allowance, &mut rng)?;
    }
    match step {
        Step::Decided(plan) => Ok(plan),
        other => panic!("it waits: {other:?}"),
    }
}

/// What a dry run could change: bookings, probes, ejections, speculative entries, the random sequence.
fn state_of(world: &World) -> String {
    let policy = HealthPolicy::default();
    let picker = &world.processor.picker;
    let endpoint = |state: &EndpointState| {
        let (ledger, health) = (&state.endpoint.ledger, &state.endpoint.health);
        let booked = (ledger.in_flight(), ledger.prefill_tokens(), ledger.routed(), state.endpoint.speed.pending());
        (booked, health.availability(NOW, &policy))
    };
    let config = picker.config();
    let claims = config.pools()[0].prefix.as_ref().map(|prefix| prefix.cache.claims().is_empty());
    let endpoints: Vec<_> = world.snapshot.load().endpoints.iter().map(endpoint).collect();
    format!("{:?}", (endpoints, claims, picker.peek_rng(), world.book.busy(), picker.buffered.bytes()))
}

pub(super) fn authorities(endpoints: &[Arc<Endpoint>]) -> Vec<String> {
    endpoints.iter().map(|endpoint| endpoint.authority.to_string()).collect()
}

/// Asserts that an explanation equals the live decision, twice, and that it changes nothing.
fn assert_dry_run_is_the_decision(world: &World, path: &str, headers: &[(&str, &str)], body: &[u8]) {
    let before = state_of(world);
    let explanation = explained(world, path, headers, body);
    assert_eq!(state_of(world), before, "an explanation changed the state");
    let again = explained(world, path, headers, body);
    let live = decided(world, path, headers, body);
    match (&explanation, live) {
        (Ok(explanation), Ok(plan)) => {
            let split = plan.decision.split.as_deref();
            assert_eq!(explanation.picks, authorities(&plan.decision.picks), "{explanation:?}");
            assert_eq!(explanation.prefill, split.map(|split| authorities(&split.prefill)).unwrap_or_default());
            assert_eq!(explanation.encode, authorities(&plan.decision.encode));
            assert_eq!(explanation.reason, split.map_or(plan.decision.reason, |split| split.reason));
            assert_eq!((&*explanation.pool, &*explanation.model), (&*plan.runtime.pool.name, &*plan.target));
            let again = again.unwrap();
            let runner_up = explanation.runner_up.iter();
            assert!(runner_up.clone().all(|next| !explanation.picks.contains(next)), "{explanation:?}");
            let has_more = explanation.endpoints.len() > explanation.picks.len();
            assert!(has_more || runner_up.count() == 0, "{explanation:?}");
            assert_eq!((&again.picks, again.parts.to_string()), (&explanation.picks, explanation.parts.to_string()));
        }
        (Ok(explanation), Err(error)) => {
            assert!(explanation.picks.is_empty(), "{explanation:?}, but live {error:?}");
            assert!(explanation.reason.starts_with(error.reason.code()), "{}, but live {error:?}", explanation.reason);
        }
        (Err(error), Err(live)) => assert_eq!(error.reason, live.reason),
        (Err(error), Ok(plan)) => panic!("explained as rejected by {error:?}, but live {:?}", plan.decision),
    }
}

pub(super) fn chat(text: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string().into_bytes()
}

/// With the least or the greatest score as the best one, the runner-up follows the fallbacks.
#[test]
fn runner_up_is_the_best_endpoint_after_all_fallbacks() {
    let queue_scorer = serde_json::json!({"scorers": [{"type": "queue-scorer"}]});
    for (strategy, parameters) in [("least-request", serde_json::Value::Null), ("pipeline", queue_scorer)] {
        let servers = vec![(0, 0.1, &[][..]), (1, 0.1, &[]), (2, 0.1, &[]), (3, 0.1, &[]), (4, 0.1, &[])];
        let world = Setup { servers, strategy, parameters, ..Setup::default() }.build();
        let explanation = explained(&world, PATH, &[], &chat("hello")).unwrap();
        let address = |server: u32| format!("192.168.1.{server}:8000");
        assert_eq!(explanation.picks, [1, 2, 3].map(address), "{strategy}");
        assert_eq!(explanation.runner_up, Some(address(4)), "{strategy}");
    }
    let random = Setup { servers: vec![(0, 0.1, &[]); 3], strategy: "random", ..Setup::default() };
    let world = Setup { parameters: serde_json::Value::Null, ..random }.build();
    assert_eq!(explained(&world, PATH, &[], &chat("hello")).unwrap().runner_up, None, "no order without scores");
}

#[test]
fn pair_is_explained_beside_the_whole_request_with_the_costs_that_decided() {
    let roles = &["prefill", "prefill", "decode", "decode"];
    for (strategy, decider, unit) in [
        ("predicted-latency", Decider::Predicted, Some("s")),
        ("predicted-latency", Decider::Always, Some("s")),
        ("least-request", Decider::Predicted, Some("s")),
        ("least-request", Decider::Always, None),
        ("pd", Decider::Strategy, Some("score")),
    ] {
        let setup = splitting_setup(roles, Mode::Direct(direct("nixl")), decider);
        let world = Setup { strategy, ..setup }.build();
        let explanation = explained(&world, PATH, &[], &chat(&"a long prompt ".repeat(2_000))).unwrap();
        let pair = explanation.pair.unwrap_or_else(|| panic!("{strategy}, {decider:?}: no pair"));
        let costs = &pair["costs"];
        assert_eq!(costs["unit"].as_str(), unit, "{strategy}, {decider:?}: {pair}");
        let is_split = pair["is_split"] == true;
        assert_eq!(is_split, !explanation.prefill.is_empty(), "{pair}");
        if is_split {
            let (prefill, decode) = (&explanation.prefill[0], &explanation.picks[0]);
            assert!(pair["prefill"] == **prefill && pair["decode"] == **decode, "{strategy}, {decider:?}: {pair}");
        }
        let cost = |of: &str| costs[of].as_f64().unwrap_or_default();
        let sum = cost("prefill") + cost("transfer") + cost("decode");
        assert!((sum - cost("pair")).abs() < 1e-9, "{pair}");
        if decider == Decider::Predicted {
            assert_eq!(is_split, cost("pair") < cost("whole"), "{strategy}: {pair}");
        }
    }
}

#[test]
fn explanation_uses_the_tenants_own_blocks() {
    let tenants = Setup { isolate_tenants: true, servers: vec![(0, 0.1, &[]); 3], ..Setup::default() };
    let world = Setup { strategy: "prefix-cache", parameters: serde_json::Value::Null, ..tenants }.build();
    let prompt = chat(&"a long text that fills some blocks ".repeat(20));
    let acme = [("x-tenant", "acme"), ("content-type", "application/json")];
    let plan = decided(&world, PATH, &acme, &prompt).unwrap();
    let served = plan.decision.picks[0].authority.to_string();
    let Some(mut booked) = plan.booked else { panic!("it is booked") };
    booked.first_byte(true, true, NOW);
    booked.end(true, &attache_protocol::Usage::default(), |_: &mut Vec<BlockKey>| false, NOW);
    let blocks = |headers: &[(&str, &str)]| -> u32 {
        let explanation = explained(&world, PATH, headers, &prompt).unwrap();
        explanation.endpoints.iter().filter(|holding| holding.address == served).map(|holding| holding.blocks).sum()
    };
    assert!(blocks(&acme) > 0);
    assert_eq!(blocks(&[("x-tenant", "other")]), 0);
}

#[test]
fn api_without_prefill_is_explained() {
    let world = Setup { servers: vec![(3, 0.1, &[]), (0, 0.1, &[])], ..Setup::default() }.build();
    let form = b"--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n";
    let headers = [("content-type", "multipart/form-data; boundary=b")];
    assert_dry_run_is_the_decision(&world, "/v1/audio/transcriptions", &headers, form);
    let explanation = explained(&world, "/v1/audio/transcriptions", &headers, form).unwrap();
    assert_eq!((explanation.picks[0].as_str(), explanation.blocks.len()), ("192.168.1.2:8000", 0));
    assert!(explanation.warning.is_some());
}

#[test]
fn rejected_request_is_explained_with_the_reason() {
    let world = Setup { servers: Vec::new(), ..Setup::default() }.build();
    assert_dry_run_is_the_decision(&world, PATH, &[], &chat("hello"));
    let explanation = explained(&world, PATH, &[], &chat("hello")).unwrap();
    assert!(explanation.picks.is_empty() && explanation.reason.starts_with("no_ready_endpoint"), "{explanation:?}");
    assert_eq!(explained(&world, PATH, &[], b"{").unwrap_err().reason, Reason::InvalidJson);
}

/// A pool of `count` servers, of which the first has failed at `at` until it was ejected, and the pool's policy.
fn with_failed_server(count: usize, at: Timestamp) -> (World, Arc<Endpoint>, HealthPolicy) {
    let world = Setup { servers: vec![(0, 0.1, &[]); count], ..Setup::default() }.build();
    let failed = world.snapshot.load().endpoints[0].endpoint.clone();
    let policy = world.processor.picker.config().pools()[0].pool.scheduler.health().clone();
    while failed.health.availability(at, &policy) == Availability::Open {
        failed.health.record(attache_pool::health::HealthOutcome::Failure, at, &policy);
    }
    (world, failed, policy)
}

#[test]
fn explanation_takes_no_probe() {
    let (world, failed, policy) = with_failed_server(1, Timestamp(0));
    assert_eq!(failed.health.availability(NOW, &policy), Availability::HalfOpen, "its ejection is over");
    let explanation = explained(&world, PATH, &[], &chat("hello")).unwrap();
    assert_eq!((explanation.picks.len(), explanation.endpoints[0].excluded), (1, None));
    assert_eq!(failed.health.availability(NOW, &policy), Availability::HalfOpen, "the probe is still to be sent");
    assert!(decided(&world, PATH, &[], &chat("hello")).unwrap().decision.probe, "the live request is the probe");
}

#[test]
fn ejected_endpoint_is_excluded() {
    let (world, failed, policy) = with_failed_server(2, NOW);
    assert_eq!(failed.health.availability(NOW, &policy), Availability::Ejected);
    assert_dry_run_is_the_decision(&world, PATH, &[], &chat("hello"));
    let explanation = explained(&world, PATH, &[], &chat("hello")).unwrap();
    let excluded: Vec<_> = explanation.endpoints.iter().map(|holding| holding.excluded).collect();
    assert_eq!((excluded, &*explanation.picks[0]), (vec![Some("ejected"), None], "192.168.1.2:8000"));
}

/// The names of all strategies but `pipeline`, which needs parameters.
pub(super) fn strategies() -> Vec<&'static str> {
    let registry = Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]);
    let names = registry.strategies().iter().map(|descriptor| descriptor.name);
    names.filter(|name| registry.build(name, &serde_json::Value::Null).is_ok()).collect()
}

/// Servers of the fixture with random load.
pub(super) fn servers() -> impl Strategy<Value = Vec<Server>> {
    let server = (0..6u32, 0.0..1.0f32, prop::bool::ANY);
    prop::collection::vec(
        server.prop_map(|(waiting, kv, lora)| (waiting, kv, if lora { &["m"][..] } else { &[] })),
        1..6,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For each strategy, load and prompt: the dry run is what the next live request gets, over several requests.
    #[test]
    fn dry_run_equals_the_decision(
        servers in servers(),
        strategy in prop::sample::select(strategies()),
        texts in prop::collection::vec((0..3usize, 1..400usize), 1..6),
        destination in prop::bool::ANY,
    ) {
        let destination = if destination { Destination::List } else { Destination::Single };
        let setup = Setup { servers, strategy, parameters: serde_json::Value::Null, destination, ..Setup::default() };
        let world = setup.build();
        for (word, times) in texts {
            let prompt = chat(&["alpha ", "beta ", "gamma "][word].repeat(times));
            assert_dry_run_is_the_decision(&world, PATH, &[("x-session-id", "s")], &prompt);
        }
    }

    /// Explanations change no decision: for each strategy and load, pickers with and without them decide the same.
    #[test]
    fn decisions_are_the_same_with_and_without_explanations(
        servers in servers(),
        strategy in prop::sample::select(strategies()),
        texts in prop::collection::vec((0..3usize, 1..400usize), 1..8),
        list in prop::bool::ANY,
    ) {
        let decisions = |explain: ExplainSettings| {
            let destination = if list { Destination::List } else { Destination::Single };
            let exchange = ExchangeSettings { explain, ..Setup::default().exchange };
            let (servers, parameters) = (servers.clone(), serde_json::Value::Null);
            let world = Setup { servers, strategy, parameters, destination, exchange, ..Setup::default() }.build();
            let mut decided = texts.iter().enumerate().map(|(number, (word, times))| {
                let prompt = chat(&["alpha ", "beta ", "gamma "][*word].repeat(*times));
                let id = number.to_string();
                let headers = [("x-session-id", "s"), ("x-request-id", id.as_str())];
                self::decided(&world, PATH, &headers, &prompt).unwrap()
            });
            let plans: Vec<_> = decided.by_ref().collect();
            let choices: Vec<_> = plans.iter().map(|plan| (authorities(&plan.decision.picks), plan.decision.reason)).collect();
            let kept: Vec<_> = (0..texts.len()).filter_map(|number| {
                let json = world.processor.decisions.explanation(explain.kept, &number.to_string())?;
                serde_json::from_str::<serde_json::Value>(&json).ok()
            }).collect();
            (choices, kept)
        };
        let (plain, none) = decisions(ExplainSettings::default());
        let (explained, kept) = decisions(ExplainSettings { kept: 100, time_ratio: 1.0, ..ExplainSettings::default() });
        prop_assert_eq!(&plain, &explained, "{}", strategy);
        prop_assert_eq!((none.len(), kept.len()), (0, texts.len()));
        for ((picks, _), explanation) in plain.iter().zip(&kept) {
            prop_assert_eq!(serde_json::json!(picks), explanation["choice"]["picks"].clone());
        }
    }

    /// The same in pools that split requests.
    #[test]
    fn dry_run_equals_the_split(texts in prop::collection::vec((0..3usize, 1..2_000usize), 1..5), always in prop::bool::ANY) {
        let decider = if always { Decider::Always } else { Decider::Predicted };
        let world = splitting_setup(&["prefill", "prefill", "decode", "decode"], Mode::Direct(direct("nixl")), decider).build();
        for (word, times) in texts {
            let prompt = chat(&["alpha ", "beta ", "gamma "][word].repeat(times));
            assert_dry_run_is_the_decision(&world, PATH, &[], &prompt);
        }
    }
}
