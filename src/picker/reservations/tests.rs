//! Reservations from their decision to the request that takes them over.

use super::*;
use crate::decide::tests::fixture::{Fixture, NOW, Parts, chat, head, view};
use crate::decide::{RequestView, Seen, Step};
use crate::explain::{ExplainQuery, explain};
use crate::reserving::{Reserved, reserve};
use crate::settings::{ExchangeSettings, TenantRule, TenantSource};
use crate::warming::{Job, Warming};
use attache_pool::PoolSnapshot;
use attache_quota::Limits;
use attache_scheduling::{Candidate, PickContext, Ranking, Strategy};
use attache_types::error::{Reason, RequestError};
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

/// Chooses the next endpoint for each request.
#[derive(Debug, Default)]
struct Rotating(AtomicUsize);

impl Strategy for Rotating {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, ranking: &mut Ranking) {
        let mut all: Vec<_> = candidates.iter().map(|candidate| &candidate.state.endpoint).collect();
        all.sort_by_key(|endpoint| endpoint.id.0);
        let turn = if cx.dry_run { self.0.load(Relaxed) } else { self.0.fetch_add(1, Relaxed) };
        all.rotate_left(turn % candidates.len());
        all.into_iter().for_each(|endpoint| ranking.push(endpoint));
    }
}

fn rotating() -> Parts {
    Parts { strategy: Some(Box::new(Rotating::default())), ..Parts::default() }
}

fn run(warming: Warming) -> Ready<()> {
    if let Job::Cpu(computation) = warming.job {
        computation.compute();
    }
    ready(())
}

fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Reserves for a request with these headers and this body. `id` is the number of the reservation.
fn try_reserve(fixture: &Fixture, id: u128, headers: &[(&str, &str)], body: &[u8]) -> Result<Reserved, RequestError> {
    let headers: Vec<_> = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let query = ExplainQuery { pool: None, path: "/v1/chat/completions", headers: &headers, body, now: NOW };
    let config = fixture.picker.config();
    let reserving = reserve(&fixture.picker, &config, query, (ReservationId(id), DEFAULT_TIMEOUT), || NOW, run);
    match poll(reserving) {
        Poll::Ready(reserved) => reserved,
        Poll::Pending => panic!("it waits"),
    }
}

fn reserved(fixture: &Fixture, id: u128) -> Reserved {
    try_reserve(fixture, id, &[], &chat("m", "hello")).unwrap()
}

/// The plan of a request that names the reservation `id`.
fn sent(fixture: &Fixture, id: u128, body: &[u8]) -> Box<Plan> {
    let id = ReservationId(id).to_string();
    fixture.plan(&view(&head(&[(RESERVATION_HEADER, &id)]), Seen::Whole(body))).unwrap()
}

fn endpoint(plan: &Plan) -> &str {
    &plan.decision.picks[0].authority
}

/// The outcomes of reservations since the last call.
fn outcomes(fixture: &Fixture) -> Vec<String> {
    let outcome = |event: String| event.strip_prefix("Reservation(").map(|rest| rest.trim_end_matches(')').to_owned());
    fixture.events.take().into_iter().filter_map(outcome).collect()
}

#[test]
fn reserved_request_goes_to_its_endpoint_and_is_booked_once() {
    let fixture = rotating().build();
    let (first, second) = (reserved(&fixture, 1), reserved(&fixture, 2));
    assert_eq!((&*first.endpoint, &*second.endpoint), ("10.0.0.1:8000", "10.0.0.2:8000"));
    assert_eq!((&*first.reservation, first.header), ("00000000000000000000000000000001", RESERVATION_HEADER));
    assert_eq!((&*first.pool, &*first.model, first.expires_in_seconds), ("pool", "m", 30.0));
    assert_eq!(fixture.in_flight(), [1, 1, 0]);
    let open = serde_json::to_value(fixture.picker.reservations(NOW)).unwrap();
    assert_eq!((open.as_array().unwrap().len(), &open[0]["expires_in_seconds"]), (2, &30.0.into()), "{open}");
    assert!(!open.to_string().contains(&first.reservation), "ids are secret");
    let plan = sent(&fixture, 1, &chat("m", "hello"));
    assert_eq!((endpoint(&plan), plan.decision.reason), ("10.0.0.1:8000", "reserved for this request before"));
    assert_eq!(fixture.in_flight(), [1, 1, 0], "it is counted once");
    let again = sent(&fixture, 1, &chat("m", "hello"));
    assert_eq!(endpoint(&again), "10.0.0.3:8000", "the strategy decides: the id was used");
    assert_eq!(outcomes(&fixture), ["Made", "Made", "Used", "Unknown"]);
    drop((plan, again));
    assert!(fixture.picker.release_reservation(ReservationId(2), NOW));
    assert!(!fixture.picker.release_reservation(ReservationId(2), NOW));
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
}

#[test]
fn statistics_of_the_prefix_cache_count_a_reserved_request_once() {
    let fixture = Parts::default().build();
    let count = || fixture.cache.stats().prompt_tokens.load(Relaxed);
    let body = chat("m", &"some words ".repeat(100));
    try_reserve(&fixture, 1, &[], &body).unwrap();
    let once = count();
    assert!(once > 0);
    let plan = sent(&fixture, 1, &body);
    assert_eq!(count(), once);
    assert!(plan.prompt_tokens > 0);
}

#[test]
fn reservation_ends_at_its_time_out() {
    let fixture = rotating().build();
    reserved(&fixture, 1);
    fixture.events.take();
    let end = NOW.after(DEFAULT_TIMEOUT);
    fixture.picker.expire_reservations(Timestamp(end.0 - 1));
    assert_eq!(fixture.in_flight(), [1, 0, 0]);
    fixture.picker.expire_reservations(end);
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
    let events = fixture.events.take();
    assert!(events[0].contains("end: \"unsent\"") && events[0].contains("10.0.0.1:8000"), "{}", events[0]);
    assert_eq!(events[1], "Reservation(Expired)");
    sent(&fixture, 1, &chat("m", "hello"));
    assert_eq!(outcomes(&fixture), ["Unknown"]);
    // One that is not expired yet by a timer.
    reserved(&fixture, 2);
    let (body, id) = (chat("m", "hello"), ReservationId(2).to_string());
    let late = head(&[(RESERVATION_HEADER, &id)]);
    fixture.plan(&RequestView { now: end, ..view(&late, Seen::Whole(&body)) }).unwrap();
    assert_eq!(outcomes(&fixture), ["Made", "Unknown"]);
    assert!(fixture.picker.reservations(end).is_empty());
}

#[test]
fn reservation_is_that_of_its_tenant_alone() {
    let rule = TenantRule { source: TenantSource::Header("x-tenant".to_owned()), strip: None };
    let exchange = ExchangeSettings { tenant: Some(rule), ..ExchangeSettings::default() };
    let limits = Limits { concurrency: Some(1), ..Limits::default() };
    let fixture = Parts { exchange, limits: Some(limits), ..rotating() }.build();
    let body = chat("m", "hello");
    try_reserve(&fixture, 1, &[("x-tenant", "a")], &body).unwrap();
    let refused = try_reserve(&fixture, 2, &[("x-tenant", "a")], &body).unwrap_err();
    assert_eq!(refused.reason, Reason::Concurrency, "limits apply to reservations");
    assert_eq!(&*fixture.picker.reservations(NOW)[0].tenant.clone().unwrap(), "a");
    let ask = |tenant: Tenant| {
        let mut head = head(&[(RESERVATION_HEADER, &ReservationId(1).to_string())]);
        head.belongs_to(tenant);
        let plan = fixture.plan(&view(&head, Seen::Whole(&body))).unwrap();
        plan.decision.reason == "reserved for this request before"
    };
    assert!(!ask(Tenant::Named("b".into())) && !ask(Tenant::Missing), "the reservation stays");
    assert_eq!(fixture.picker.reservations(NOW).len(), 1);
    assert!(ask(Tenant::Named("a".into())), "it has its place in the limit");
    try_reserve(&fixture, 2, &[("x-tenant", "a")], &body).unwrap();
}

#[test]
fn reservation_whose_endpoint_is_gone_is_decided_again() {
    let fixture = rotating().build();
    assert_eq!(&*reserved(&fixture, 1).endpoint, "10.0.0.1:8000");
    let others = fixture.snapshot.load().endpoints[1..].to_vec();
    fixture.snapshot.publish(PoolSnapshot::new(2, true, others));
    let plan = sent(&fixture, 1, &chat("m", "hello"));
    assert!(["10.0.0.2:8000", "10.0.0.3:8000"].contains(&endpoint(&plan)), "{}", endpoint(&plan));
    assert_eq!(outcomes(&fixture), ["Made", "EndpointGone"]);
    assert!(fixture.picker.reservations(NOW).is_empty());
}

#[test]
fn request_that_is_larger_than_reserved_is_decided_as_usual() {
    let fixture = rotating().build();
    let longer = chat("m", "a longer text than that of the reservation");
    let fewer = chat("m", "a");
    let other = chat("another", "a");
    for (body, outcome) in [(&longer, "Mismatched"), (&other, "Mismatched"), (&fewer, "Used")] {
        reserved(&fixture, 1);
        let plan = sent(&fixture, 1, body);
        assert_eq!(plan.decision.reason == "reserved for this request before", outcome == "Used");
        assert_eq!(outcomes(&fixture), ["Made", outcome]);
        assert_eq!(fixture.in_flight().iter().sum::<u32>(), 1, "the booking of the reservation is released");
    }
    reserved(&fixture, 1);
    let id = ReservationId(1).to_string();
    fixture.plan(&view(&head(&[(RESERVATION_HEADER, &id)]), Seen::Nothing)).unwrap();
    assert_eq!(outcomes(&fixture), ["Made", "Mismatched"], "the gateway does not show the body");
}

#[test]
fn number_of_reservations_is_bounded() {
    let fixture = rotating().build();
    for id in 0..MAX_RESERVATIONS {
        reserved(&fixture, id as u128);
    }
    let error = try_reserve(&fixture, u128::MAX, &[], &chat("m", "hello")).unwrap_err();
    assert_eq!((error.reason, error.retry_after), (Reason::Overloaded, Some(Duration::from_secs(1))));
    assert!(error.message.starts_with("1024 reservations are open"), "{}", error.message);
    assert_eq!(fixture.in_flight().iter().sum::<u32>(), 1_024, "the last one has booked nothing");
    fixture.picker.expire_reservations(NOW.after(MAX_TIMEOUT));
    assert_eq!(fixture.in_flight(), [0, 0, 0]);
    reserved(&fixture, u128::MAX);
}

#[test]
fn reservation_waits_in_the_queue_and_its_request_does_not() {
    let fixture = Parts { full_at: Some(1), queues: true, ..rotating() }.build();
    let landed = || {
        let mut plan = fixture.chat("hello").unwrap();
        plan.admitted.as_mut().unwrap().landed();
        plan
    };
    let mut plans: Vec<Box<Plan>> = (0..3).map(|_| landed()).collect();
    let (config, body) = (fixture.picker.config(), chat("m", "hello"));
    let query = ExplainQuery { pool: None, path: "/v1/chat/completions", headers: &[], body: &body, now: NOW };
    let held = (ReservationId(1), DEFAULT_TIMEOUT);
    let mut reserving = pin!(reserve(&fixture.picker, &config, query, held, || NOW, run));
    let mut step = || reserving.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(step().is_pending(), "the pool is full");
    plans.pop();
    let Poll::Ready(Ok(_)) = step() else { panic!("a request has ended") };
    assert!(matches!(fixture.step(&view(&head(&[]), Seen::Whole(&body))), Ok(Step::Queue(_))), "the pool is full");
    let plan = sent(&fixture, 1, &body);
    assert!(plan.admitted.is_some() && fixture.in_flight().iter().sum::<u32>() == 3);
    drop((plan, plans));
    fixture.picker.config().pools()[0].queue.as_ref().unwrap().assert_books_closed();
}

#[test]
fn explanation_shows_the_reservation_and_leaves_it() {
    let fixture = rotating().build();
    reserved(&fixture, 1);
    let body = chat("m", "hello");
    let explained = |id: u128| {
        let headers = [(RESERVATION_HEADER.to_owned(), ReservationId(id).to_string())];
        let query = ExplainQuery { pool: None, path: "/v1/chat/completions", headers: &headers, body: &body, now: NOW };
        let config = fixture.picker.config();
        let Poll::Ready(explained) = poll(explain(&fixture.picker, &config, query, run)) else { panic!("it waits") };
        let explained = explained.unwrap();
        (explained.picks[0].clone(), explained.reason)
    };
    let reason = "reserved for this request before".to_owned();
    for _ in 0..2 {
        assert_eq!(explained(1), ("10.0.0.1:8000".to_owned(), reason.clone()));
    }
    assert_eq!(explained(2).0, "10.0.0.2:8000", "an unknown id");
    assert_eq!(endpoint(&sent(&fixture, 1, &body)), "10.0.0.1:8000");
}

#[test]
fn ids_have_one_form() {
    let id = ReservationId(0xab);
    assert_eq!(ReservationId::read(&format!(" {id} ")), Some(id));
    for wrong in ["", "ab", "+00000000000000000000000000000ab", "g0000000000000000000000000000000", "\u{e9}"] {
        assert_eq!(ReservationId::read(wrong), None, "{wrong}");
    }
    assert_eq!(format!("{id:?}"), "ReservationId");
}
