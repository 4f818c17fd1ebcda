//! Each step of a decision by itself: no gateway, no runtime, no clock.

use super::*;
use crate::event::Unobserved;
use crate::head::Head;
use crate::known::{KnownBlocks, KnownKeys, KnownRequest, RecordedFacts};
use crate::settings::ExchangeSettings;
use attache_disagg::Mode;
use attache_prefix::key::BlockKey;
use attache_protocol::{Api, Model, Prompt, Usage};
use attache_quota::Limits as QuotaLimits;
use attache_record::Kept;
use attache_scheduling::Subset;
use attache_scheduling::router::{ModelRewrites, PoolMatch, RewriteTarget};
use attache_types::error::Reason;
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use attache_types::throttle::Throttle;
use std::task::Waker;

use fixture::*;

pub(crate) mod fixture;
mod long_prompts;

fn first(plan: &Plan) -> u32 {
    plan.decision.picks[0].id.0
}

#[test]
fn route_to_no_pool_without_the_model() {
    let fixture =
        Parts { matches: PoolMatch { models: vec!["m".into()], ..PoolMatch::default() }, ..Parts::default() }.build();
    assert_eq!(&*fixture.chat("hello").unwrap().runtime.pool.name, "pool");
    let other = fixture.plan(&view(&head(&[]), Seen::Whole(&chat("other", "hello"))));
    assert_eq!(other.unwrap_err().reason, Reason::ModelNotFound);
    assert_eq!(fixture.in_flight(), [0, 0, 0], "the plan that was dropped has released its server");
}

#[test]
fn rewrite_replaces_the_model_and_draws_only_where_a_rule_applies() {
    let target = |model: &str| RewriteTarget { model: model.into(), weight: 1 };
    let exact = [("m".to_owned(), vec![target("one"), target("two")])].into();
    let rewrites = ModelRewrites { exact, any: Vec::new() };
    let fixture = Parts { rewrites, ..Parts::default() }.build();
    let mut targets: Vec<Arc<str>> = (0..20).map(|_| fixture.chat("hello").unwrap().target).collect();
    targets.sort();
    targets.dedup();
    assert_eq!(targets.iter().map(|target| &**target).collect::<Vec<_>>(), ["one", "two"]);
    let plan = fixture.chat("hello").unwrap();
    let sent: serde_json::Value = serde_json::from_slice(plan.new_body.as_ref().unwrap()).unwrap();
    assert_eq!((sent["model"].as_str(), plan.renamed_from.as_deref()), (Some(&*plan.target), Some("m")));
    let config = fixture.picker.config();
    let drawn = |model: &str| {
        let mut rng = fixture.picker.peek_rng();
        let (head, body) = (head(&[]), chat(model, "hello"));
        let q = view(&head, Seen::Whole(&body));
        let request = understand(&Unobserved, &Throttle::default(), &config, &q).unwrap();
        rewrite(&config, &config.pools()[0], &q, request.as_ref(), &mut rng).unwrap();
        rng != fixture.picker.peek_rng()
    };
    assert!(drawn("m") && !drawn("other"));
}

#[test]
fn model_header_is_obeyed_only_if_client_headers_are_trusted() {
    let body = chat("m", "hello");
    let head = head(&[("x-gateway-model-name-rewrite", "other")]);
    for (trust_client_headers, target) in [(false, "m"), (true, "other")] {
        let exchange = ExchangeSettings { trust_client_headers, ..ExchangeSettings::default() };
        let fixture = Parts { exchange, ..Parts::default() }.build();
        assert_eq!(&*fixture.plan(&view(&head, Seen::Whole(&body))).unwrap().target, target);
    }
}

#[test]
fn prompt_size_of_unread_bodies_is_assumed() {
    let (head, garbage, body) = (head(&[]), b"\x1f\x8b\0".to_vec(), chat("m", &"word ".repeat(400)));
    let size = |body: Seen<'_>, request: Option<&Request<'_>>| PromptSize::of(&view(&head, body), request).load;
    let limits = Limits::default();
    let request = attache_protocol::parse_unnamed(Api::ChatCompletions, None, &body, &limits).unwrap();
    let read = size(Seen::Whole(&body), Some(&request));
    assert!((400..=600).contains(&read), "{read} tokens of 2,000 bytes");
    assert_eq!(size(Seen::Whole(&garbage), None), crate::UNREAD_PROMPT_TOKENS);
    assert_eq!(size(Seen::Nothing, None), 0);
}

#[test]
fn quota_is_reserved_until_the_permit_is_dropped() {
    let limits = QuotaLimits { concurrency: Some(1), ..QuotaLimits::default() };
    let fixture = Parts { limits: Some(limits), ..Parts::default() }.build();
    let (head, body, config) = (head(&[]), chat("m", "hello"), fixture.picker.config());
    let ask = |allowance: &mut Allowance| {
        decide(&fixture.picker, &config, &view(&head, Seen::Whole(&body)), allowance, &mut fixture.picker.next_rng())
    };
    let mut first = Allowance::default();
    assert!(ask(&mut first).is_ok() && ask(&mut first).is_ok(), "a second attempt takes no second reservation");
    assert_eq!(ask(&mut Allowance::default()).unwrap_err().reason, Reason::Concurrency);
    drop(first);
    assert!(ask(&mut Allowance::default()).is_ok());
}

#[test]
fn lookup_finds_what_an_earlier_request_has_left() {
    let fixture = Parts::default().build();
    let text = "a long text that fills some blocks ".repeat(20);
    let mut plan = fixture.chat(&text).unwrap();
    assert_eq!((first(&plan), plan.matched_tokens), (0, 0));
    // Until its response begins, the prompt counts as a speculative entry of its server.
    let second = fixture.chat(&text).unwrap();
    assert!(first(&second) == 0 && second.matched_tokens > 100, "{}", second.matched_tokens);
    drop(second);
    let mut booked = plan.booked.take().unwrap();
    booked.first_byte(true, true, NOW);
    booked.end(true, &Usage::default(), |_| false, NOW);
    let third = fixture.chat(&format!("{text} and more")).unwrap();
    assert!(third.matched_tokens > 100 && third.matched_tokens < third.prompt_tokens);
    assert_eq!(fixture.chat("something else").unwrap().matched_tokens, 0);
}

#[test]
fn full_pool_queues_and_dequeues_when_a_request_ends() {
    let fixture = Parts { full_at: Some(1), queues: true, ..Parts::default() }.build();
    // Three endpoints with one place each.
    let landed = || {
        let mut plan = fixture.chat("hello").unwrap();
        plan.admitted.as_mut().unwrap().landed();
        plan
    };
    let mut plans: Vec<Box<Plan>> = (0..3).map(|_| landed()).collect();
    assert_eq!(fixture.events.take(), ["Passed", "Passed", "Passed"]);
    let (head, body) = (head(&[]), chat("m", "hello"));
    let q = view(&head, Seen::Whole(&body));
    let Step::Queue(mut queued) = fixture.step(&q).unwrap() else { panic!("the pool has room") };
    let mut signal = queued.waiting().unwrap();
    let mut poll = || std::pin::Pin::new(&mut signal).poll(&mut std::task::Context::from_waker(Waker::noop()));
    assert!(poll().is_pending());
    plans.pop();
    let std::task::Poll::Ready(Some(Ok(admitted))) = poll() else { panic!("it waits") };
    queued.settle();
    let Step::Decided(plan) = fixture.step(&RequestView { has_turn: true, ..q }).unwrap() else { panic!("it waits") };
    assert!(plan.admitted.is_none(), "the queue is not asked again");
    drop(admitted);
    // A gateway that can't wait gets a decision at once.
    let q = RequestView { may_wait: false, ..q };
    assert!(matches!(fixture.step(&q), Ok(Step::Decided(_))));
}

#[test]
fn full_pool_without_queues_sheds_only_sheddable_requests() {
    let objectives = [("batch".to_owned(), -1)].into();
    let exchange = ExchangeSettings { objectives, ..ExchangeSettings::default() };
    let fixture = Parts { full_at: Some(1), exchange, ..Parts::default() }.build();
    let (usual, batch, body) = (head(&[]), head(&[("x-gateway-inference-objective", "batch")]), chat("m", "hello"));
    let ask = |head: &Head| fixture.plan(&view(head, Seen::Whole(&body)));
    let plans: Vec<Box<Plan>> = (0..3).map(|_| ask(&batch).unwrap()).collect();
    assert_eq!(ask(&batch).unwrap_err().reason, Reason::Shed);
    assert!(ask(&usual).is_ok());
    drop(plans);
    assert!(ask(&batch).is_ok());
}

#[test]
fn deadline_that_no_endpoint_meets_is_rejected_once_speeds_are_known() {
    let fixture = Parts { deadline_admission: true, ..Parts::default() }.build();
    let (head, body) = (head(&[("x-slo-ttft-ms", "100")]), chat("m", &"word ".repeat(100)));
    let at = |seconds: u64| RequestView {
        now: NOW.after(Duration::from_secs(seconds)),
        opened: NOW.after(Duration::from_secs(seconds)),
        ..view(&head, Seen::Whole(&body))
    };
    for i in 0..20 {
        let Ok(mut plan) = fixture.plan(&at(i)) else { break };
        let mut booked = plan.booked.take().unwrap();
        booked.first_byte(true, true, NOW.after(Duration::from_secs(i + 3)));
    }
    let error = fixture.plan(&at(25)).unwrap_err();
    assert_eq!(error.reason, Reason::DeadlineUnmet);
    assert!(error.retry_after.is_some());
    assert!(fixture.events.take().iter().any(|event| event == "Deadline(Late)"));
}

#[test]
fn schedule_stays_within_the_gateways_subset() {
    let fixture = Parts::default().build();
    let (head, body) = (head(&[]), chat("m", "hello"));
    let mut subset = Subset::default();
    subset.add("10.0.0.3:8000");
    let plan = fixture.plan(&RequestView { subset: Some(&subset), ..view(&head, Seen::Whole(&body)) }).unwrap();
    assert_eq!(plan.decision.picks.iter().map(|pick| pick.id.0).collect::<Vec<_>>(), [2]);
    subset = Subset::default();
    subset.add("10.9.9.9:8000");
    let none = fixture.plan(&RequestView { subset: Some(&subset), ..view(&head, Seen::Whole(&body)) });
    assert_eq!(none.unwrap_err().reason, Reason::SubsetEmpty);
}

#[test]
fn strategy_that_panics_is_replaced_by_the_fewest_requests() {
    let fixture = Parts { strategy: Some(Box::new(Broken)), ..Parts::default() }.build();
    let plans: Vec<Box<Plan>> = (0..3).map(|_| fixture.chat("hello").unwrap()).collect();
    let mut firsts: Vec<u32> = plans.iter().map(|plan| first(plan)).collect();
    firsts.sort_unstable();
    assert_eq!(firsts, [0, 1, 2]);
    assert!(fixture.events.take().contains(&"Degraded(StrategyPanic)".to_owned()));
}

#[test]
fn split_request_is_booked_on_both_servers() {
    let disagg = Some(Mode::Header { source_tokens: None });
    let fixture = Parts { disagg, roles: &["prefill", "decode", "decode"], ..Parts::default() }.build();
    let plan = fixture.chat("hello").unwrap();
    assert!(plan.is_split() && plan.prefill.is_some());
    assert_eq!(fixture.in_flight(), [1, 1, 0]);
    drop(plan);
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
}

#[test]
fn dry_run_equals_the_decision_and_books_nothing() {
    let fixture = Parts::default().build();
    let text = "a long text that fills some blocks ".repeat(20);
    let running = fixture.chat(&text).unwrap();
    let (head, body, config) = (head(&[]), chat("m", &text), fixture.picker.config());
    let q = view(&head, Seen::Whole(&body));
    let before = (fixture.in_flight(), fixture.picker.peek_rng());
    let scope = Scope { picker: &fixture.picker, config: &config, observer: &Unobserved, dry_run: true };
    let rng = &mut fixture.picker.peek_rng();
    let parsed = scope.parse(&q).unwrap();
    let routed = scope.route(&q, parsed.as_ref(), rng).unwrap();
    let state = RequestState::new(scope, &q, None, &routed).unwrap();
    let Ok(prepared) = state.read_tokens() else { panic!("it waits") };
    let Ok(proposal) = state.dry_run(prepared.as_ref(), &fixture.snapshot.load(), rng) else {
        panic!("it is rejected")
    };
    let proposed: Vec<EndpointId> = proposal.decision.picks.iter().map(|pick| pick.id).collect();
    assert_eq!((fixture.in_flight(), fixture.picker.peek_rng()), before);
    let live = fixture.plan(&q).unwrap();
    let picks: Vec<EndpointId> = live.decision.picks.iter().map(|pick| pick.id).collect();
    assert_eq!(proposed, picks);
    drop(running);
}

#[test]
fn explanations_of_decisions_and_rejections_are_kept_if_the_request_has_an_id() {
    let explain = crate::settings::ExplainSettings { kept: 10, ..Default::default() };
    let fixture =
        Parts { exchange: ExchangeSettings { explain, ..ExchangeSettings::default() }, ..Parts::default() }.build();
    let (named, unnamed, body) = (head(&[("x-request-id", "r1")]), head(&[]), chat("m", "hello"));
    let mut elsewhere = Subset::default();
    elsewhere.add("10.9.9.9:8000");
    let q = view(&named, Seen::Whole(&body));
    let plan = fixture.plan(&q).unwrap();
    assert!(fixture.plan(&RequestView { subset: Some(&elsewhere), ..q }).is_err());
    drop(fixture.plan(&view(&unnamed, Seen::Whole(&body))).unwrap());
    let kept: Vec<serde_json::Value> = fixture
        .events
        .take()
        .iter()
        .filter_map(|event| event.strip_prefix("explained 10 ").map(|json| serde_json::from_str(json).unwrap()))
        .collect();
    assert_eq!(kept.len(), 2, "{kept:?}");
    let picks: Vec<&str> = plan.decision.picks.iter().map(|pick| &*pick.authority).collect();
    assert_eq!((&kept[0]["request_id"], &kept[0]["choice"]["picks"]), (&"r1".into(), &serde_json::json!(picks)));
    assert_eq!(kept[0]["endpoints"].as_array().map(Vec::len), Some(3));
    assert!(kept[1]["choice"]["reason"].as_str().unwrap().starts_with("subset_empty"), "{}", kept[1]);
    assert!(kept[1]["endpoints"][0]["excluded"].is_string(), "{}", kept[1]);
}

/// Block keys that do not depend on the model.
#[derive(Debug)]
struct Keys(Vec<BlockKey>);

impl KnownKeys for Keys {
    fn blocks(&self, _: &str) -> Option<KnownBlocks<'_>> {
        Some(KnownBlocks { keys: &self.0, ..KnownBlocks::default() }).filter(|blocks| !blocks.keys.is_empty())
    }
}

/// A request of 165 prompt tokens with these keys.
fn known(keys: &Keys) -> KnownRequest<'_> {
    KnownRequest {
        pool: "pool",
        request: Some(Request {
            model: Some(Model { name: "m".into(), span: 0..0 }),
            prompt: Prompt { token_ids: 165, count: 1, ..Prompt::default() },
            stream: true,
            max_tokens: Some(1_000),
            ..Request::default()
        }),
        text: None,
        bytes: 660,
        prompt_tokens: 165,
        priority: 0,
        answer_tokens: 1_000,
        keys,
        recorded: None,
    }
}

#[test]
fn request_without_a_body_passes_the_same_steps() {
    let limits = QuotaLimits { tokens_per_minute: Some(5_000), ..QuotaLimits::default() };
    let fixture = Parts { limits: Some(limits), ..Parts::default() }.build();
    let keys = Keys((1..=10).map(BlockKey).collect());
    fixture.cache.record(EndpointId(2), &keys.0[..8], attache_prefix::TenantId(0), NOW);
    let known = known(&keys);
    let head = head(&[]);
    let (q, mut allowance) = (view(&head, Seen::Known(&known)), Allowance::default());
    let config = fixture.picker.config();
    let step = decide(&fixture.picker, &config, &q, &mut allowance, &mut fixture.picker.next_rng());
    let Ok(Step::Decided(plan)) = step else { panic!("{step:?}") };
    assert_eq!((first(&plan), &*plan.target, plan.prompt_tokens), (2, "m", 165));
    // A block of 64 bytes stands for 16 tokens.
    assert_eq!((plan.matched_tokens, fixture.in_flight()), (128, vec![0, 0, 1]));
    assert!(plan.new_body.is_none() && plan.understood);
    let permits: Vec<_> = allowance.take().into_iter().collect();
    let again = (0..5).map(|_| {
        let mut allowance = Allowance::default();
        let step = decide(&fixture.picker, &config, &q, &mut allowance, &mut fixture.picker.next_rng());
        step.map(|_| std::mem::forget(allowance.take())).map_err(|error| error.reason)
    });
    let refused = again.filter(|step| *step == Err(Reason::TokensPerMinute)).count();
    assert_eq!((permits.len(), refused), (1, 2), "four requests of 1,165 tokens fit into 5,000");
}

#[test]
fn recorded_request_is_decided_by_its_recorded_facts() {
    let fixture = Parts::default().build();
    let (keys, head) = (Keys((1..=10).map(BlockKey).collect()), head(&[]));
    fixture.cache.record(EndpointId(2), &keys.0[..8], attache_prefix::TenantId(0), NOW);
    let call = CallFacts { splittable: true, generates: true, encodable: false, streams: false };
    let decided = |known: KnownRequest<'_>| {
        let kept = Kept { tokens: 32, keeper: EndpointId(1), by: vec![EndpointId(0)] };
        let recorded = Some(RecordedFacts { call, looked_up: true, carried: Some(&kept) });
        let known = KnownRequest { recorded, ..known };
        let (q, rng) = (view(&head, Seen::Known(&known)), &mut fixture.picker.next_rng());
        let step = decide(&fixture.picker, &fixture.picker.config(), &q, &mut Allowance::default(), rng);
        let Ok(Step::Decided(plan)) = step else { panic!("{step:?}") };
        plan
    };
    let plan = decided(known(&keys));
    assert_eq!((first(&plan), plan.pick_matched_tokens, plan.splittable), (2, 128, true), "no path permits a split");
    let plan = decided(KnownRequest { prompt_tokens: 7, ..known(&Keys(Vec::new())) });
    assert_eq!((plan.pick_matched_tokens, plan.prompt_tokens), (0, 7), "keys that were not recorded");
    let plan = decided(KnownRequest { request: None, ..known(&keys) });
    assert_eq!((plan.understood, plan.prompt_tokens), (false, 165), "a body that could not be parsed");
}
