//! Runs against simulated servers over real HTTP, without a gateway between.

use super::*;
use attache_report::served::{Sample, Served};
use attache_sim::content::Piece;
use attache_sim::engine::DEFAULT_BLOCK_SIZE;
use attache_sim::faults::{FailNext, Faults};
use attache_sim::latency::LatencyModel;
use attache_sim::{ServerConfig, SimConfig, SimHandle, serve};
use attache_workload::pace::{ClosedLoop, Limited};
use attache_workload::synthetic;
use attache_workload::{PromptPart, Speaker};
use std::collections::VecDeque;
use std::time::Duration;

#[derive(Default)]
struct Seen(Vec<Served>);

impl Observer for Seen {
    fn served(&mut self, served: &Served) {
        self.0.push(*served);
    }

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {
        unreachable!("servers are not looked at");
    }
}

/// Requests that come by themselves, each with a system prompt of 64 tokens that all share and a question
/// of 16 of its own.
struct List {
    requests: VecDeque<Request>,
    /// What is wrong behind them.
    broken: bool,
}

impl Workload for List {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        match self.requests.pop_front() {
            None if self.broken => Err(TraceError::Row { row: 9, message: "it is torn off".to_owned() }),
            next => Ok(next),
        }
    }
}

fn request(number: u64, at: Duration) -> Request {
    let part = |role, name, tokens| PromptPart::text(role, Piece::new(name, tokens));
    Request {
        number,
        at: Timestamp(0).after(at),
        prompt: vec![part(Speaker::System, 1, 64), part(Speaker::User, 100 + number, 16)],
        answer: Piece::new(10_000 + number, 5),
        adapter: None,
        session: None,
        tenant: None,
        priority: 0,
        headers: Vec::new(),
        turn: None,
    }
}

fn list(count: u64, gap: Duration) -> List {
    let requests = (0..count).map(|i| request(i, gap * u32::try_from(i).unwrap()));
    List { requests: requests.collect(), broken: false }
}

/// `endpoints` servers, a hundred times faster than the model.
fn fleet(endpoints: u16, change: impl FnOnce(&mut ServerConfig)) -> SimHandle {
    let mut server = ServerConfig::default();
    server.engine.latency.speed = 100.0;
    change(&mut server);
    serve(&SimConfig { endpoints, port: 0, server, ..SimConfig::default() }).unwrap()
}

/// So slow that nothing ends while a test looks at it.
fn hanging(server: &mut ServerConfig) {
    server.engine.latency = LatencyModel { step_base: Duration::from_secs(600), ..LatencyModel::default() };
}

fn to(fleet: &SimHandle) -> LiveConfig {
    LiveConfig { timeout: Duration::from_secs(60), ..LiveConfig::new(format!("http://{}", fleet.addresses()[0])) }
}

async fn played(config: &LiveConfig, workload: &mut dyn Workload) -> (LiveOutcome, Vec<Served>) {
    let mut seen = Seen::default();
    let outcome = play(config, workload, &mut seen, &CancellationToken::new()).await.unwrap();
    (outcome, seen.0)
}

fn reasons(outcome: &LiveOutcome) -> Vec<(&str, u64)> {
    outcome.failures.iter().map(|(reason, count)| (reason.as_str(), *count)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_answered_measured_and_placed() {
    let fleet = fleet(1, |_| {});
    for (api, overhead) in [(LiveApi::Completions, 0), (LiveApi::Chat, 14)] {
        let config = LiveConfig { api, ..to(&fleet) };
        let (outcome, seen) = played(&config, &mut list(20, Duration::from_millis(2))).await;
        assert_eq!((outcome.sent, outcome.answered, seen.len()), (20, 20, 20), "{outcome:?}");
        assert_eq!(outcome.model, "sim-8b", "the name that the server tells");
        assert_eq!(outcome.endpoints, [fleet.addresses()[0].port().to_string()]);
        for served in &seen {
            assert_eq!((served.ending, served.endpoint), (Ending::Answered, Some(0)));
            assert_eq!(served.at, request(served.number, Duration::from_millis(2 * served.number)).at);
            assert!(served.first_token.is_some_and(|first| !first.is_zero() && first <= served.total), "{served:?}");
            assert_eq!(served.generated_tokens, 5, "as long as the workload says");
            assert_eq!(served.prompt_tokens, 80 + overhead, "{api:?}");
        }
        let last = seen.iter().max_by_key(|served| served.number).unwrap();
        assert!(last.cached_tokens >= 48, "the system prompt was there: {last:?}");
        assert!(outcome.failures.is_empty() && !outcome.stopped && outcome.cut == 0);
        assert!(outcome.elapsed >= Duration::from_millis(38), "{:?}", outcome.elapsed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_quotes_what_the_server_said() {
    let fleet = fleet(1, |_| {});
    let spelling = "multi-turn:clients=1,requests=6,turns=6,input=40..80,output=30..60";
    for api in [LiveApi::Chat, LiveApi::Completions] {
        // Texts of their own, or the second run would find those of the first.
        let config = LiveConfig { api, seed: api as u64, ..to(&fleet) };
        let (outcome, seen) = played(&config, &mut *synthetic::build(spelling, 7).unwrap()).await;
        assert_eq!((outcome.answered, outcome.forgotten, outcome.most_in_flight), (6, 0, 1), "{outcome:?}");
        for pair in seen.windows(2) {
            // All but the last token of an answer is computed; what is not a whole block is not kept.
            let known = pair[0].prompt_tokens + pair[0].generated_tokens - 1;
            let whole = known - known % DEFAULT_BLOCK_SIZE;
            assert!(pair[1].cached_tokens >= whole, "{api:?}: {pair:?}");
        }
        let forgetful = LiveConfig { max_remembered_bytes: 0, seed: 10 + api as u64, ..config };
        let (outcome, seen) = played(&forgetful, &mut *synthetic::build(spelling, 7).unwrap()).await;
        assert_eq!((outcome.answered, outcome.forgotten), (6, 6));
        let computed = seen[4].prompt_tokens + seen[4].generated_tokens;
        assert!(
            seen[5].cached_tokens + DEFAULT_BLOCK_SIZE < computed,
            "made-up answers are not in the cache: {seen:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_streaming_nothing_is_known_of_the_first_token() {
    let fleet = fleet(1, |_| {});
    let config = LiveConfig { stream: false, ..to(&fleet) };
    let (outcome, seen) = played(&config, &mut list(5, Duration::ZERO)).await;
    assert_eq!(outcome.answered, 5, "{outcome:?}");
    assert!(seen.iter().all(|served| served.first_token.is_none() && served.generated_tokens == 5), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_finds_no_place_waits_and_the_wait_counts() {
    let fleet = fleet(1, |server| server.faults.first_byte_delay_ms = 30);
    let config = LiveConfig { max_in_flight: 2, ..to(&fleet) };
    let (outcome, seen) = played(&config, &mut list(8, Duration::ZERO)).await;
    assert_eq!((outcome.answered, outcome.most_in_flight, outcome.held), (8, 2, 6), "{outcome:?}");
    assert!(outcome.late >= 6, "{outcome:?}");
    // Two at a time, 30 ms each: the last ones are due at 0 and can't begin before 90 ms.
    let slowest = seen.iter().filter_map(|served| served.first_token).max().unwrap();
    assert!(slowest >= Duration::from_millis(120) && outcome.latest >= Duration::from_millis(90), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_and_losses_are_told_apart_and_counted_by_reason() {
    let faulty = |faults: Faults| fleet(1, move |server| server.faults = faults);
    let named = |fleet: &SimHandle| LiveConfig { model: Some("sim-8b".to_owned()), ..to(fleet) };

    let refusing = faulty(Faults { refuse: true, ..Faults::default() });
    let (outcome, seen) = played(&named(&refusing), &mut list(3, Duration::ZERO)).await;
    assert_eq!((outcome.refused, reasons(&outcome)), (3, vec![("status 503 (Service Unavailable)", 3)]));
    assert!(seen.iter().all(|served| served.ending == Ending::Refused && served.prompt_tokens == 80), "{seen:?}");

    let cutting = faulty(Faults { cut_after_tokens: Some(2), ..Faults::default() });
    let (outcome, seen) = played(&named(&cutting), &mut list(3, Duration::ZERO)).await;
    assert_eq!(outcome.lost, 3, "{outcome:?}");
    assert!(reasons(&outcome).iter().all(|(reason, _)| reason.starts_with("the connection broke: ")), "{outcome:?}");
    assert!(seen.iter().all(|served| served.ending == Ending::Lost && served.generated_tokens == 2), "{seen:?}");

    let dying = faulty(Faults { error_after_tokens: Some(2), ..Faults::default() });
    let (outcome, _) = played(&named(&dying), &mut list(3, Duration::ZERO)).await;
    assert_eq!((outcome.lost, reasons(&outcome)), (3, vec![("error 500 inside a 200 (InternalServerError)", 3)]));

    let failing = faulty(Faults { fail_next: Some(FailNext { count: 2, status: 429 }), ..Faults::default() });
    let (outcome, _) = played(&named(&failing), &mut list(3, Duration::ZERO)).await;
    assert_eq!((outcome.answered, outcome.refused), (1, 2));
    assert_eq!(reasons(&outcome), [("status 429 (rate_limit_exceeded)", 2)]);

    let full = fleet(1, |server| {
        hanging(server);
        server.engine.max_num_seqs = 1;
        server.engine.max_num_queued = Some(1);
    });
    let config = LiveConfig { timeout: Duration::from_secs(1), ..named(&full) };
    let (outcome, _) = played(&config, &mut list(3, Duration::ZERO)).await;
    // One runs and one waits, if the first runs already when the second comes.
    assert!(outcome.refused >= 1 && outcome.refused + outcome.lost == 3, "{outcome:?}");
    let [(busy, refused), (time, lost)] = reasons(&outcome)[..] else { panic!("{outcome:?}") };
    assert_eq!((busy, refused), ("error 503 inside a 200 (Service Unavailable)", outcome.refused));
    assert_eq!((time, lost), ("no end within 1s", outcome.lost));

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = LiveConfig { target: format!("http://{nobody}"), ..named(&full) };
    let (outcome, _) = played(&config, &mut list(2, Duration::ZERO)).await;
    assert_eq!(outcome.refused, 2, "{outcome:?}");
    assert!(reasons(&outcome).iter().all(|(reason, _)| reason.starts_with("can't connect: ")), "{outcome:?}");
}

/// One request at once and one in an hour; it is stopped when it is asked for the second, which is when
/// the first has been sent.
struct StoppedAfterOne {
    inner: List,
    stop: CancellationToken,
}

impl Workload for StoppedAfterOne {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        if self.inner.requests.len() == 1 {
            self.stop.cancel();
        }
        self.inner.next()
    }
}

async fn stopped_after_one(config: &LiveConfig) -> (LiveOutcome, Vec<Served>) {
    let stop = CancellationToken::new();
    let mut workload = StoppedAfterOne { inner: list(2, Duration::from_secs(3_600)), stop: stop.clone() };
    let mut seen = Seen::default();
    let outcome = play(config, &mut workload, &mut seen, &stop).await.unwrap();
    (outcome, seen.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_cuts_what_does_not_end_in_time() {
    let fleet = fleet(1, hanging);
    let config = LiveConfig { grace: Duration::from_millis(50), ..to(&fleet) };
    let (outcome, seen) = stopped_after_one(&config).await;
    assert!(outcome.stopped && seen.is_empty(), "{outcome:?}");
    assert_eq!((outcome.sent, outcome.cut, outcome.answered), (1, 1, 0), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_at_a_stop_may_end() {
    let fleet = fleet(1, |server| server.faults.first_byte_delay_ms = 100);
    let (outcome, seen) = stopped_after_one(&to(&fleet)).await;
    assert_eq!((outcome.stopped, outcome.sent, outcome.answered, outcome.cut), (true, 1, 1, 0), "{outcome:?}");
    assert_eq!(seen.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_stopped_before_it_begins_sends_nothing() {
    let fleet = fleet(1, |_| {});
    let stop = CancellationToken::new();
    stop.cancel();
    let outcome = play(&to(&fleet), &mut list(2, Duration::ZERO), &mut Seen::default(), &stop).await.unwrap();
    assert_eq!((outcome.stopped, outcome.sent), (true, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_from_the_end_on() {
    let fleet = fleet(1, |_| {});
    let all = Box::new(list(10, Duration::from_millis(250)));
    let (outcome, seen) = played(&to(&fleet), &mut Limited::new(all, None, Some(Duration::from_secs(1)))).await;
    assert_eq!((outcome.sent, outcome.answered, outcome.stopped), (4, 4, false), "{outcome:?}");
    assert!(seen.iter().all(|served| served.at < Timestamp(1_000_000_000)), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_torn_trace_is_told_after_what_was_sent_has_ended() {
    let fleet = fleet(1, |_| {});
    let mut workload = List { broken: true, ..list(3, Duration::ZERO) };
    let mut seen = Seen::default();
    let error = play(&to(&fleet), &mut workload, &mut seen, &CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.to_string(), "row 9: it is torn off");
    assert_eq!(seen.0.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_that_tears_while_clients_wait_is_told_too() {
    let fleet = fleet(1, |_| {});
    let torn = List { broken: true, ..list(5, Duration::ZERO) };
    let mut workload = ClosedLoop::new(Box::new(torn), 2, Duration::from_millis(1)).unwrap();
    let mut seen = Seen::default();
    let error = play(&to(&fleet), &mut workload, &mut seen, &CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.to_string(), "row 9: it is torn off");
    let mut numbers: Vec<u64> = seen.0.iter().map(|served| served.number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_played_is_said_before_it_begins() {
    let refusing = fleet(1, |server| server.faults.refuse = true);
    let error = async |config: LiveConfig| {
        let mut seen = Seen::default();
        let workload = &mut list(1, Duration::ZERO);
        play(&config, workload, &mut seen, &CancellationToken::new()).await.unwrap_err().to_string()
    };
    let unnamed = error(to(&refusing)).await;
    assert!(
        unnamed.starts_with("no model is set, and http://") && unnamed.contains("got status 503, want 200"),
        "{unnamed}"
    );
    let idle = error(LiveConfig { max_in_flight: 0, ..to(&refusing) }).await;
    assert!(idle.contains("max_in_flight is 0"), "{idle}");
    let header = error(LiveConfig { served_header: Some("a b".to_owned()), ..to(&refusing) }).await;
    assert!(header.contains("`a b`"), "{header}");
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_are_told_apart_by_the_header_that_is_named() {
    let fleet = fleet(1, |server| server.echo_body_sha256 = true);
    let config = LiveConfig { served_header: Some("x-sim-body-sha256".to_owned()), ..to(&fleet) };
    let (outcome, seen) = played(&config, &mut list(3, Duration::from_millis(1))).await;
    assert_eq!(outcome.endpoints.len(), 3, "each body is another: {outcome:?}");
    let positions: Vec<_> = seen.iter().map(|served| served.endpoint).collect();
    assert_eq!(positions, [Some(0), Some(1), Some(2)], "in the order of first sight");
    let none = LiveConfig { served_header: Some("x-nobody".to_owned()), ..config };
    let (outcome, seen) = played(&none, &mut list(1, Duration::ZERO)).await;
    assert_eq!((outcome.endpoints.len(), seen[0].endpoint), (0, None));
}

#[tokio::test]
async fn a_request_is_sent_with_its_session_its_tenant_and_what_the_last_answer_told_it() {
    let given = [("x-team", "blue"), ("user", "operator")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let config = LiveConfig {
        model: Some("m".to_owned()),
        headers: given.to_vec(),
        tenant_header: Some("x-tenant".to_owned()),
        objectives: [(-1, "batch".to_owned())].into(),
        ..LiveConfig::new("http://127.0.0.1:9")
    };
    let gateway = Gateway::open(&config, Clock::start()).await.unwrap();
    let mut asked = request(0, Duration::ZERO);
    asked.priority = -1;
    assert_eq!(gateway.headers_of(&asked, &[])["x-gateway-inference-objective"], "batch");
    asked.priority = 0;
    (asked.session, asked.tenant) = (Some(7), Some("acme".into()));
    let shown = |echo: &[_]| {
        let headers = gateway.headers_of(&asked, echo);
        let mut shown: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        shown.sort();
        shown.join(", ")
    };
    assert_eq!(shown(&[]), "user: operator, x-session-id: 7, x-team: blue, x-tenant: acme");
    let answer = [("x-session-id", "MTA="), ("x-session-token", "cG9k"), ("server", "envoy")];
    let answer = answer.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let echo = gateway::echo(&answer.into_iter().collect());
    assert_eq!(shown(&echo), "user: operator, x-session-id: MTA=, x-session-token: cG9k, x-team: blue, x-tenant: acme");
    let wrong = LiveConfig { tenant_header: Some("a b".to_owned()), ..config };
    assert!(matches!(Gateway::open(&wrong, Clock::start()).await, Err(LiveError::Setting(e)) if e.contains("`a b`")));
}
