//! Requests that wait for their turn: who goes when, what the others are told, and that nothing stays, whoever leaves and when.

use super::*;
use crate::ext_proc::queues::Waiting;
use crate::flow::registry::{ADMITTERS, CEILINGS, DETECTORS, FAIRNESS, find};
use crate::flow::{BandSettings, Settings};
use crate::telemetry::metrics::Outcome;
use futures_util::FutureExt;
use proptest::prelude::*;
use serde_json::json;

const TTL: Duration = Duration::from_secs(10);

fn flow(settings: Settings) -> PoolFlow {
    let detector = find(DETECTORS, "concurrency-detector").unwrap();
    PoolFlow {
        settings: Settings { ttl: TTL, ..settings },
        // One request at a time on the one server.
        detector: (detector.build)(&json!({"maxConcurrency": 1})).unwrap().into(),
        ceiling: (find(CEILINGS, "static").unwrap(), serde_json::Value::Null),
        admitters: Vec::new(),
        said: serde_json::Value::Null,
    }
}

fn world(flow: PoolFlow) -> World {
    let objectives = [("batch".to_owned(), -1), ("urgent".to_owned(), 5)].into();
    let exchange = ExchangeSettings { trust_client_headers: true, objectives, ..ExchangeSettings::default() };
    Setup { flow: Some(flow), exchange, ..Setup::default() }.build()
}

/// One request with what its stream holds.
struct One {
    exchange: Exchange,
    waiting: Option<Waiting>,
    told: Answered,
}

impl One {
    fn of(world: &World, extra: &[(&str, &str)], mode: BodySendMode) -> Self {
        let mut exchange = world.exchange();
        let all: Vec<(&str, &str)> = [PATH, (":method", "POST")].iter().chain(extra).copied().collect();
        let config = Some(config(mode, BodySendMode::FullDuplexStreamed, false));
        let first = Message::RequestHeaders(headers(&all, false));
        send(&mut exchange, ProcessingRequest { protocol_config: config, ..request(first) });
        let sent = request(Message::RequestBody(body(completion("m", "p").as_bytes(), true)));
        let told = Answered::of(&send(&mut exchange, sent));
        let waiting = exchange.waiting();
        Self { exchange, waiting, told }
    }

    fn comes(world: &World, objective: &str) -> Self {
        Self::of(world, &[("x-gateway-inference-objective", objective)], BodySendMode::FullDuplexStreamed)
    }

    fn goes(&self) -> bool {
        self.exchange.is_routed()
    }

    /// Takes in its turn, if it has come.
    fn wakes(&mut self, now: Timestamp) {
        let turn = self.waiting.as_mut().and_then(FutureExt::now_or_never);
        let Some(turn) = turn else { return };
        self.waiting = None;
        // Nobody will tell those who have waited too long.
        let Some(turn) = turn else { return };
        let mut out = Actions::new();
        self.exchange.on(Event::Turn(turn), now, &mut out).unwrap();
        self.told = Answered::of(&Vec::from(out));
    }

    fn due(&mut self, after: Duration) {
        let mut out = Actions::new();
        assert_eq!(self.exchange.deadline(), Some(NOW.after(TTL)));
        self.exchange.on(Event::Deadline, NOW.after(after), &mut out).unwrap();
        self.told = Answered::of(&Vec::from(out));
    }

    fn refused(&self) -> (i32, &str) {
        let (status, _) = self.told.refused.as_ref().unwrap();
        (*status, &self.told.set["x-attache-reason"])
    }

    fn ends(mut self) {
        let pairs = [(":status", "200"), ("content-type", "application/json")];
        send(&mut self.exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        let answer = br#"{"usage":{"prompt_tokens":5,"completion_tokens":7}}"#;
        send(&mut self.exchange, request(Message::ResponseBody(body(answer, true))));
    }
}

#[test]
fn a_request_waits_until_another_has_ended_and_is_decided_then() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    assert!(first.goes() && first.waiting.is_none() && first.exchange.deadline().is_none());
    let mut second = One::comes(&world, "");
    assert!(!second.goes() && second.told.kinds.is_empty(), "{:?}", second.told);
    second.wakes(NOW);
    assert!(!second.goes());
    // What still comes of it is Envoy's to send on.
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
fn higher_objectives_go_first_and_what_is_sheddable_gives_way() {
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
    assert_eq!(world.picker.metrics.outcome_count(Outcome::Shed), 2);
}

#[test]
fn waiting_ends_with_the_time_to_live() {
    let world = world(flow(Settings::default()));
    let first = One::comes(&world, "");
    let mut second = One::comes(&world, "");
    second.due(TTL);
    assert_eq!(second.refused(), (503, "queue_timeout"));
    assert!(second.exchange.deadline().is_none());
    first.ends();
    assert!(One::comes(&world, "").goes(), "nobody is before it");
    drop(second);
    world.assert_books_closed(3);
}

#[test]
fn a_turn_that_comes_with_the_deadline_is_taken() {
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
fn in_modes_in_which_envoys_clock_runs_nobody_waits() {
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
fn tenants_take_turns_by_tokens() {
    let fairness = (find(FAIRNESS, "vtc-fair").unwrap().build)(&serde_json::Value::Null).unwrap().into();
    let default_band = BandSettings { fairness, ..BandSettings::default() };
    let world = world(flow(Settings { default_band, ..Settings::default() }));
    let tenant =
        |name: &str| One::of(&world, &[("x-llm-d-inference-fairness-id", name)], BodySendMode::FullDuplexStreamed);
    let mut running = tenant("flood");
    let mut waiting: Vec<(&str, One)> = (0..3).map(|_| ("flood", tenant("flood"))).collect();
    waiting.extend((0..2).map(|_| ("other", tenant("other"))));
    let mut order = Vec::new();
    while !waiting.is_empty() {
        running.ends();
        waiting.iter_mut().for_each(|(_, one)| one.wakes(NOW));
        let at = waiting.iter().position(|(_, one)| one.goes()).expect("one goes");
        let (name, one) = waiting.remove(at);
        order.push(name);
        running = one;
    }
    running.ends();
    assert_eq!(order, ["other", "flood", "other", "flood", "flood"]);
    world.assert_books_closed(6);
}

#[test]
fn admitters_turn_away_at_once() {
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

#[derive(Clone, Debug)]
enum Op {
    Comes(&'static str),
    Wakes(usize),
    Leaves(usize),
    Ends(usize),
    Due(usize),
}

fn op() -> impl proptest::strategy::Strategy<Value = Op> {
    prop_oneof![
        4 => prop_oneof![Just(""), Just("batch"), Just("urgent")].prop_map(Op::Comes),
        4 => any::<usize>().prop_map(Op::Wakes),
        1 => any::<usize>().prop_map(Op::Leaves),
        3 => any::<usize>().prop_map(Op::Ends),
        1 => any::<usize>().prop_map(Op::Due),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Never two at once, never somebody waiting while nobody is under way, and closed books in the end.
    #[test]
    fn nothing_stays_whatever_happens(ops in prop::collection::vec(op(), 1..60)) {
        let world = world(flow(Settings { max_requests: 4, ..Settings::default() }));
        let (mut streams, mut opened) = (Vec::new(), 0);
        for op in ops {
            let count = streams.len().max(1);
            match op {
                Op::Comes(objective) => {
                    opened += 1;
                    streams.push(One::comes(&world, objective));
                }
                Op::Wakes(i) => streams.iter_mut().skip(i % count).take(1).for_each(|s: &mut One| s.wakes(NOW)),
                Op::Leaves(i) if !streams.is_empty() => drop(streams.swap_remove(i % count)),
                Op::Ends(i) => {
                    if let Some(at) = (0..streams.len()).map(|at| (at + i) % count).find(|at| streams[*at].goes()) {
                        streams.swap_remove(at).ends();
                    }
                }
                Op::Due(i) => {
                    if let Some(one) = streams.iter_mut().skip(i % count).find(|s| s.waiting.is_some()) {
                        one.due(TTL);
                        // Its turn may be on its way.
                        one.wakes(NOW);
                        one.waiting = None;
                    }
                }
                Op::Leaves(_) => {}
            }
            let under_way: u32 = world.snapshot.load().endpoints.iter().map(|e| e.endpoint.ledger.in_flight()).sum();
            prop_assert!(under_way <= 1);
        }
        // Whoever waits gets a turn when all before it have gone.
        loop {
            streams.iter_mut().for_each(|s| s.wakes(NOW));
            let Some(at) = streams.iter().position(One::goes) else { break };
            streams.swap_remove(at).ends();
        }
        prop_assert!(streams.iter().all(|s| s.waiting.is_none()));
        drop(streams);
        world.assert_books_closed(opened);
    }
}
