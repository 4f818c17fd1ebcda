//! Queued requests: dequeue order, rejections and preemption. No reservation may remain after any disconnect.

use super::*;
use attache_flow::registry::{ADMITTERS, CEILINGS, DETECTORS, find};
use attache_flow::settings::DEFAULT_FLOW_IDLE;
use attache_flow::{EvictRunning, Queueing, Settings};
use attache_picker::event::StreamOutcome;
use attache_picker::queues::QueueSignal;
use attache_pool::health::{DEFAULT_CONSECUTIVE_CONNECT_FAILURES, HealthOutcome};
use futures_util::FutureExt;
use proptest::prelude::*;
use serde_json::json;

const TTL: Duration = Duration::from_secs(10);

pub(super) fn flow(settings: Settings) -> PoolFlow {
    let detector = find(DETECTORS, "concurrency-detector").unwrap();
    PoolFlow {
        settings: Settings { ttl: Some(TTL), ..settings },
        // The only endpoint takes one request at a time.
        queueing: Some(Queueing::Saturated((detector.build)(&json!({"maxConcurrency": 1})).unwrap().into())),
        shedding: None,
        ceiling: (find(CEILINGS, "static").unwrap(), serde_json::Value::Null),
        admitters: Vec::new(),
        said: serde_json::Value::Null,
    }
}

/// The same pool without a queue: its detector sheds.
pub(super) fn without_queue(flow: PoolFlow) -> PoolFlow {
    let Some(Queueing::Saturated(detector)) = flow.queueing else { panic!("it has a queue") };
    PoolFlow { queueing: None, shedding: Some(detector), ..flow }
}

pub(super) fn setup(flow: PoolFlow) -> Setup {
    let objectives = [("batch".to_owned(), -1), ("urgent".to_owned(), 5)].into();
    let exchange = ExchangeSettings { trust_client_headers: true, objectives, ..ExchangeSettings::default() };
    Setup { flow: Some(flow), exchange, ..Setup::default() }
}

pub(super) fn world(flow: PoolFlow) -> World {
    setup(flow).build()
}

/// One request and its stream.
pub(super) struct One {
    pub(super) exchange: Exchange,
    pub(super) waiting: Option<QueueSignal>,
    eviction: Option<QueueSignal<Refusal>>,
    pub(super) told: Answered,
}

impl One {
    pub(super) fn of(world: &World, extra: &[(&str, &str)], mode: BodySendMode) -> Self {
        Self::with_prompt(world, extra, mode, "p", None)
    }

    fn with_prompt(
        world: &World,
        extra: &[(&str, &str)],
        mode: BodySendMode,
        prompt: &str,
        metadata_context: Option<Metadata>,
    ) -> Self {
        Self::sends(world, extra, mode, completion("m", prompt).as_bytes(), metadata_context)
    }

    pub(super) fn sends(
        world: &World,
        extra: &[(&str, &str)],
        mode: BodySendMode,
        bytes: &[u8],
        metadata_context: Option<Metadata>,
    ) -> Self {
        let mut exchange = world.exchange();
        let all: Vec<(&str, &str)> = [PATH, (":method", "POST")].iter().chain(extra).copied().collect();
        let protocol_config = Some(config(mode, BodySendMode::FullDuplexStreamed, false));
        let first = Message::RequestHeaders(headers(&all, false));
        send(&mut exchange, ProcessingRequest { protocol_config, metadata_context, ..request(first) });
        let told = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(bytes, true)))));
        Self { told, ..Self::sent(exchange) }
    }

    /// A request that was sent completely.
    pub(super) fn sent(mut exchange: Exchange) -> Self {
        let (waiting, eviction) = (exchange.waiting(), exchange.eviction());
        Self { exchange, waiting, eviction, told: Answered::default() }
    }

    pub(super) fn tenant(world: &World, name: &str) -> Self {
        Self::of(world, &[("x-llm-d-inference-fairness-id", name)], BodySendMode::FullDuplexStreamed)
    }

    pub(super) fn comes(world: &World, objective: &str) -> Self {
        Self::of(world, &[("x-gateway-inference-objective", objective)], BodySendMode::FullDuplexStreamed)
    }

    pub(super) fn goes(&self) -> bool {
        self.exchange.is_routed()
    }

    /// Handles its dequeue, if it left the queue.
    pub(super) fn wakes(&mut self, now: Timestamp) {
        let turn = self.waiting.as_mut().and_then(FutureExt::now_or_never);
        let Some(turn) = turn else { return };
        self.waiting = None;
        self.turn(turn, now);
    }

    fn turn(&mut self, turn: Option<DequeueResult>, now: Timestamp) {
        let mut out = Actions::new();
        self.exchange.on(Event::Dequeued(turn), now, &mut out).unwrap();
        self.eviction = self.exchange.eviction();
        // The queue sends no result to a request that expired by its own timer.
        if !out.is_empty() {
            self.told = Answered::of(&Vec::from(out));
        }
    }

    /// Handles its preemption; false if it was not preempted.
    pub(super) fn take_preemption(&mut self) -> bool {
        let Some(told) = self.eviction.as_mut().and_then(FutureExt::now_or_never) else { return false };
        self.eviction = None;
        let Some(refusal) = told else { return false };
        let mut out = Actions::new();
        self.exchange.on(Event::Evicted(refusal), NOW, &mut out).unwrap();
        self.told = Answered::of(&Vec::from(out));
        true
    }

    /// The response begins.
    pub(super) fn answers(&mut self) {
        let pairs = [(":status", "200"), ("content-type", "application/json")];
        send(&mut self.exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
    }

    /// Runs its background work.
    fn warms(&mut self, meanwhile: impl FnOnce()) {
        let warming = self.exchange.warming().expect("it is encoded elsewhere");
        meanwhile();
        compute(warming);
        let mut out = Actions::new();
        self.exchange.on(Event::Warmed, NOW, &mut out).unwrap();
        self.told = Answered::of(&Vec::from(out));
    }

    /// This many tokens of the response arrive, and the model server reports no usage.
    pub(super) fn streams(&mut self, tokens: usize) {
        let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
        send(&mut self.exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        let events = "data: {\"choices\": [{\"text\": \"a\"}]}\n\n".repeat(tokens);
        send(&mut self.exchange, request(Message::ResponseBody(body(events.as_bytes(), false))));
    }

    /// The stream ends.
    pub(super) fn closes(mut self) {
        send(&mut self.exchange, request(Message::ResponseBody(body(b"data: [DONE]\n\n", true))));
    }

    fn due(&mut self, after: Duration) {
        assert_eq!(self.exchange.deadline(), Some(NOW.after(TTL)));
        self.has_waited(after);
    }

    /// Its deadline event.
    pub(super) fn has_waited(&mut self, after: Duration) {
        let mut out = Actions::new();
        self.exchange.on(Event::Deadline, NOW.after(after), &mut out).unwrap();
        self.told = Answered::of(&Vec::from(out));
    }

    pub(super) fn refused(&self) -> (i32, &str) {
        let (status, _) = self.told.refused.as_ref().unwrap();
        (*status, &self.told.set["x-attache-reason"])
    }

    pub(super) fn ends(mut self) {
        if self.exchange.response == ResponseSide::Awaited {
            self.answers();
        }
        let answer = br#"{"usage":{"prompt_tokens":5,"completion_tokens":7}}"#;
        send(&mut self.exchange, request(Message::ResponseBody(body(answer, true))));
    }
}

#[test]
fn queued_request_is_decided_when_capacity_is_free() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    assert!(first.goes() && first.waiting.is_none() && first.exchange.deadline().is_none());
    let mut second = One::comes(&world, "");
    assert!(!second.goes() && second.told.kinds.is_empty(), "{:?}", second.told);
    second.wakes(NOW);
    assert!(!second.goes());
    // Envoy forwards the rest of the request.
    assert!(send(&mut second.exchange, request(Message::RequestTrailers(HttpTrailers::default()))).is_empty());
    first.ends();
    second.wakes(NOW);
    assert!(second.goes());
    assert_eq!((second.told.text(), second.told.ended), (&*completion("m", "p"), 1));
    assert!(second.told.set.contains_key(DESTINATION));
    second.ends();
    world.assert_books_closed(2);
}

#[test]
fn higher_priority_goes_first_and_sheddable_is_evicted() {
    let world = world(flow(Settings { max_requests: 2, ..Settings::default() }));
    let first = One::comes(&world, "");
    let mut batch = One::comes(&world, "batch");
    let mut usual = One::comes(&world, "");
    let mut urgent = One::comes(&world, "urgent");
    batch.wakes(NOW);
    assert_eq!(batch.refused(), (429, "evicted"));
    assert!(batch.told.set["retry-after"].parse::<u64>().unwrap() >= 1);
    let more = One::comes(&world, "");
    assert_eq!(more.refused(), (429, "queue_full"));
    assert!(more.told.set["retry-after"].parse::<u64>().unwrap() >= 1);
    first.ends();
    usual.wakes(NOW);
    urgent.wakes(NOW);
    assert!(urgent.goes() && !usual.goes());
    urgent.ends();
    usual.wakes(NOW);
    assert!(usual.goes());
    usual.ends();
    drop((batch, more));
    world.assert_books_closed(5);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Shed), 2);
}

#[test]
fn queued_request_expires_after_its_time_to_live() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    second.due(TTL);
    assert_eq!(second.refused(), (503, "queue_timeout"));
    assert!(second.exchange.deadline().is_none());
    first.ends();
    assert!(One::comes(&world, "").goes(), "the queue is empty");
    drop(second);
    world.assert_books_closed(3);
}

#[test]
fn dequeue_at_the_deadline_is_served() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    first.ends();
    second.due(TTL);
    assert!(second.told.kinds.is_empty(), "its turn is on its way");
    second.wakes(NOW.after(TTL));
    assert!(second.goes());
    second.ends();
    world.assert_books_closed(2);
}

#[test]
fn requests_are_not_queued_in_modes_with_envoys_message_timeout() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    for (objective, status) in [("", None), ("urgent", None), ("batch", Some((429, "shed")))] {
        let one = One::of(&world, &[("x-gateway-inference-objective", objective)], BodySendMode::Buffered);
        match status {
            Some(expected) => assert_eq!(one.refused(), expected),
            None => assert!(one.goes(), "{objective}"),
        }
    }
    first.ends();
    world.assert_books_closed(4);
}

#[test]
fn sheddable_request_in_flight_is_preempted_without_leaks() {
    let world = world(flow(Settings { evict_running: EvictRunning::Unanswered, ..Settings::default() }));
    let mut batch = One::comes(&world, "batch");
    assert!(batch.goes() && !batch.take_preemption(), "the queue is empty");
    let mut more = One::comes(&world, "batch");
    assert!(!batch.take_preemption(), "the queued request is not more important");
    let mut urgent = One::comes(&world, "urgent");
    assert!(batch.take_preemption() && !batch.goes());
    assert_eq!(batch.refused(), (429, "evicted"));
    let records = world.processor.decisions.snapshot();
    let ends: Vec<_> = records.iter().map(|record| (record.end, record.status)).collect();
    assert_eq!(ends, [("evicted", 429)], "one record of each request");
    assert!(batch.told.set["retry-after"].parse::<u64>().unwrap() >= 1);
    // Envoy drops the rest of the response.
    assert!(
        send(&mut batch.exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false)))).is_empty()
    );
    urgent.wakes(NOW);
    assert!(urgent.goes() && urgent.eviction.is_none(), "what is not sheddable is served whatever comes");
    let mut usual = One::comes(&world, "");
    assert!(!urgent.take_preemption());
    urgent.ends();
    usual.wakes(NOW);
    more.wakes(NOW);
    assert!(usual.goes() && !more.goes());
    drop((batch, usual, more));
    world.assert_books_closed(4);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Routed), 3, "one never had its turn");
}

#[test]
fn begun_response_is_preempted_only_if_configured() {
    for (which, cut) in [(EvictRunning::Unanswered, false), (EvictRunning::Any, true)] {
        let world = world(flow(Settings { evict_running: which, ..Settings::default() }));
        let mut batch = One::comes(&world, "batch");
        batch.answers();
        let mut urgent = One::comes(&world, "urgent");
        assert_eq!(batch.take_preemption(), cut);
        assert_eq!(batch.goes(), !cut);
        urgent.wakes(NOW);
        assert_eq!(urgent.goes(), cut);
        if cut {
            drop(batch);
        } else {
            batch.ends();
            urgent.wakes(NOW);
        }
        urgent.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn response_before_the_preemption_signal_is_served() {
    let world = world(flow(Settings { evict_running: EvictRunning::Unanswered, ..Settings::default() }));
    let mut batch = One::comes(&world, "batch");
    let mut urgent = One::comes(&world, "urgent");
    batch.answers();
    assert!(batch.take_preemption() && batch.goes() && batch.told.kinds.is_empty(), "the signal is ignored");
    batch.ends();
    urgent.wakes(NOW);
    assert!(urgent.goes());
    urgent.ends();
    world.assert_books_closed(2);
}

#[test]
fn admission_is_kept_during_background_tokenizing() {
    let world = prefix::encoding_elsewhere(setup(flow(Settings::default()))).build();
    let prompt = prefix::text("long", 5_000);
    let mut first = One::with_prompt(&world, &[], BodySendMode::FullDuplexStreamed, &prompt, None);
    let mut second = None;
    first.warms(|| second = Some(One::comes(&world, "")));
    let mut second = second.unwrap();
    assert!(first.goes() && !second.goes(), "the one seat is taken");
    first.ends();
    second.wakes(NOW);
    assert!(second.goes());
    // In modes without queueing, admission is checked only once: the request was admitted when there was capacity.
    let batch = [("x-gateway-inference-objective", "batch")];
    second.ends();
    let prompt = prefix::text("longer", 5_000);
    let mut batch = One::with_prompt(&world, &batch, BodySendMode::Buffered, &prompt, None);
    let mut other = None;
    batch.warms(|| other = Some(One::comes(&world, "")));
    assert!(batch.goes() && other.as_ref().is_some_and(One::goes));
    drop((batch, other));
    world.assert_books_closed(4);
}

#[test]
fn rejected_dequeued_request_frees_capacity_at_once() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let nowhere = Some(subset(&["10.9.9.9:1"]));
    let mut second = One::with_prompt(&world, &[], BodySendMode::FullDuplexStreamed, "p", nowhere);
    let mut third = One::comes(&world, "");
    first.ends();
    second.wakes(NOW);
    assert_eq!(second.refused(), (503, "subset_empty"));
    third.wakes(NOW);
    assert!(third.goes(), "although the stream of the second is open");
    third.ends();
    drop(second);
    world.assert_books_closed(3);
}

#[test]
fn request_lost_by_the_queue_is_rejected() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut lost = One::comes(&world, "");
    lost.turn(None, NOW);
    assert_eq!(lost.refused(), (500, "internal_error"));
    assert_eq!(lost.exchange.deadline(), None);
    first.ends();
    assert!(One::comes(&world, "").goes(), "it has left the queue");
    drop(lost);
    world.assert_books_closed(3);
}

#[test]
fn empty_pool_rejects_with_no_ready_endpoint() {
    let flow = flow(Settings { max_requests: 1, empty_ttl: TTL, ..Settings::default() });
    let world = Setup { servers: Vec::new(), ..setup(flow) }.build();
    let mut waits = One::comes(&world, "");
    assert!(waits.waiting.is_some(), "one may come up");
    assert_eq!(One::comes(&world, "").refused(), (503, "no_ready_endpoint"));
    let batch = [("x-gateway-inference-objective", "batch")];
    assert_eq!(One::of(&world, &batch, BodySendMode::Buffered).refused(), (503, "no_ready_endpoint"));
    waits.due(TTL);
    assert_eq!(waits.refused(), (503, "no_ready_endpoint"));
    assert!(waits.told.set["retry-after"].parse::<u64>().unwrap() >= 1);
    drop(waits);
    world.assert_books_closed(3);
}

#[test]
fn idle_flows_are_forgotten_without_new_requests() {
    let world = world(flow(Settings::default()));
    One::tenant(&world, "somebody").ends();
    let queues = world.processor.picker.config().pools()[0].queue.as_ref().unwrap().clone();
    let knows = || format!("{queues:?}").contains("somebody");
    queues.freed(NOW.after(DEFAULT_FLOW_IDLE - Duration::from_secs(1)));
    assert!(knows());
    queues.freed(NOW.after(DEFAULT_FLOW_IDLE));
    assert!(!knows());
}

#[tokio::test]
async fn stale_metrics_do_not_block_the_queue() {
    let detector = (find(DETECTORS, "utilization-detector").unwrap().build)(&serde_json::Value::Null).unwrap().into();
    let flow = PoolFlow { queueing: Some(Queueing::Saturated(detector)), ..flow(Settings::default()) };
    let world = Setup { servers: vec![(0, 1.0, &[])], stale_after: Duration::from_secs(1), ..setup(flow) }.build();
    let (clock, _follower) = room::follow(&world).await;
    let old = state(0, (0, 1.0, &[]), None, &Arc::default());
    let metrics = EndpointMetrics { scraped_at: clock.now(), ..old.metrics().unwrap().clone() };
    world.snapshot.publish(PoolSnapshot::new(2, true, vec![EndpointState::new(old.endpoint, Some(Arc::new(metrics)))]));
    let mut exchange = room::at(&world, 1, clock.now());
    let waiting = exchange.waiting().expect("its cache is full");
    let turn = tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it is told").unwrap();
    assert!(turn.is_ok());
}

#[test]
fn admitter_rejects_at_once() {
    let admitter = (find(ADMITTERS, "probabilistic-admitter").unwrap().build)(&json!({"k": 1e9})).unwrap();
    let flow = PoolFlow { admitters: vec![admitter.into()], ..flow(Settings::default()) };
    let world = world(flow);
    let batch = One::comes(&world, "batch");
    assert_eq!(batch.refused(), (429, "shed"), "a tenth of its cache is in use");
    let urgent = One::comes(&world, "urgent");
    assert!(urgent.goes());
    urgent.ends();
    drop(batch);
    world.assert_books_closed(2);
}

#[test]
fn end_of_unqueued_request_dequeues_others() {
    for leaves in [false, true] {
        let world = world(flow(Settings::default()));
        let first = One::of(&world, &[], BodySendMode::Buffered);
        let mut second = One::comes(&world, "");
        assert!(first.goes() && !second.goes());
        if leaves {
            drop(first);
        } else {
            first.ends();
        }
        second.wakes(NOW);
        assert!(second.goes(), "leaves: {leaves}");
        second.ends();
        world.assert_books_closed(2);
    }
}

#[test]
fn panic_removes_request_from_queue() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    let third = One::comes(&world, "");
    let mut out = Actions::new();
    second.exchange.fail(NOW, &mut out).unwrap();
    second.told = Answered::of(&Vec::from(out));
    assert_eq!(second.refused(), (500, "internal_error"));
    let one_body = (completion("m", "p").len() + size_of::<Vec<u8>>()) as u64;
    assert_eq!((second.exchange.deadline(), world.processor.picker.buffered.bytes()), (None, one_body));
    drop(third);
    first.ends();
    second.wakes(NOW);
    assert!(One::comes(&world, "").goes(), "the queue is empty, though the stream of the second is open");
    drop(second);
    world.assert_books_closed(4);
}

#[test]
fn ejected_endpoint_adds_no_capacity() {
    let world = Setup { servers: vec![(0, 0.1, &[]), (0, 0.1, &[])], ..setup(flow(Settings::default())) }.build();
    let dead = world.snapshot.load().endpoints[1].endpoint.clone();
    for _ in 0..DEFAULT_CONSECUTIVE_CONNECT_FAILURES {
        dead.health.record(HealthOutcome::ConnectFailure, NOW, &HealthPolicy::default());
    }
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    assert!(first.goes() && !second.goes(), "one server is left, with one seat");
    first.ends();
    second.wakes(NOW);
    assert!(second.goes());
    second.ends();
    world.assert_books_closed(2);
}

#[derive(Clone, Debug)]
enum Op {
    Comes(&'static str),
    Wakes(usize),
    Leaves(usize),
    Answers(usize),
    Ends(usize),
    Due(usize),
}

fn op() -> impl proptest::strategy::Strategy<Value = Op> {
    prop_oneof![
        4 => prop_oneof![Just(""), Just("batch"), Just("urgent")].prop_map(Op::Comes),
        4 => any::<usize>().prop_map(Op::Wakes),
        1 => any::<usize>().prop_map(Op::Leaves),
        2 => any::<usize>().prop_map(Op::Answers),
        3 => any::<usize>().prop_map(Op::Ends),
        1 => any::<usize>().prop_map(Op::Due),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Never two requests in flight, no queued request while none is in flight, and no reservation in the end.
    #[test]
    fn any_history_leaves_no_reservation(
        ops in prop::collection::vec(op(), 1..60),
        evict_running in prop_oneof![
            Just(EvictRunning::Never),
            Just(EvictRunning::Unanswered),
            Just(EvictRunning::Any),
        ],
    ) {
        let world = world(flow(Settings { max_requests: 4, evict_running, ..Settings::default() }));
        let (mut streams, mut opened) = (Vec::new(), 0);
        for op in ops {
            let count = streams.len().max(1);
            match op {
                Op::Comes(objective) => {
                    opened += 1;
                    streams.push(One::comes(&world, objective));
                }
                Op::Wakes(i) => streams.iter_mut().skip(i % count).take(1).for_each(|s: &mut One| {
                    s.wakes(NOW);
                    s.take_preemption();
                }),
                Op::Answers(i) => {
                    let begins = |s: &&mut One| s.goes() && s.exchange.response == ResponseSide::Awaited;
                    streams.iter_mut().skip(i % count).find(begins).into_iter().for_each(One::answers);
                }
                Op::Leaves(i) if !streams.is_empty() => drop(streams.swap_remove(i % count)),
                Op::Ends(i) => {
                    if let Some(at) = (0..streams.len()).map(|at| (at + i) % count).find(|at| streams[*at].goes()) {
                        streams.swap_remove(at).ends();
                    }
                }
                Op::Due(i) => {
                    if let Some(one) = streams.iter_mut().skip(i % count).find(|s| s.waiting.is_some()) {
                        one.due(TTL);
                        // It may have been dequeued already.
                        one.wakes(NOW);
                        one.waiting = None;
                    }
                }
                Op::Leaves(_) => {}
            }
            let under_way: u32 = world.snapshot.load().endpoints.iter().map(|e| e.endpoint.ledger.in_flight()).sum();
            prop_assert!(under_way <= 1);
        }
        // Each queued request is dequeued once all before it have ended.
        loop {
            let mut moved = false;
            for one in &mut streams {
                let waited = one.waiting.is_some();
                // It frees the endpoint for a request that may have been looked at already.
                moved |= one.take_preemption();
                one.wakes(NOW);
                moved |= waited && one.waiting.is_none();
            }
            match streams.iter().position(One::goes) {
                Some(at) => streams.swap_remove(at).ends(),
                None if moved => {}
                None => break,
            }
        }
        prop_assert!(streams.iter().all(|s| s.waiting.is_none()));
        drop(streams);
        world.assert_books_closed(opened);
    }
}
