//! A replay of a recording makes the decisions of the live picker, and explains them by the same figures.

use super::explaining::{PATH, authorities, chat, decided, explained, servers, strategies};
use super::splitting::{direct, setup as splitting_setup};
use super::*;
use attache_disagg::Mode;
use attache_picker::event::SessionEnd;
use attache_picker::explain::ExplainQuery;
use attache_picker::reservations::{DEFAULT_TIMEOUT, ReservationId};
use attache_picker::reserving::reserve;
use attache_pool::PoolEvent;
use attache_pool::writer::SourceId;
use attache_protocol::Usage;
use attache_record::tape::PoolChange;
use attache_record::{DEFAULT_MAX_BYTES, PoolTape, RecordSettings};
use attache_replay::record::explain::explain;
use attache_replay::record::replay_file;
use attache_scheduling::Decider;
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// A world whose decisions are recorded.
struct RecordedWorld {
    world: World,
    recorder: Arc<Recorder>,
    folder: TempDir,
}

/// The settings of the fixture's pool, for the recording. `more` are those of the test.
fn settings(setup: &Setup, more: &[(&str, Json)]) -> Json {
    let mut pool = json!({
        "name": "pool",
        "strategy": {"name": setup.strategy, "parameters": setup.parameters},
        "destination": {"mode": "list", "max": 3},
        "health": {"errorPeriod": "0s", "maxEjectionPercent": 100},
        "endpoints": [{"address": "192.168.1.1:8000"}],
    });
    more.iter().for_each(|(key, value)| pool[key] = value.clone());
    json!({"apiVersion": "attache.dev/v1", "kind": "Attache", "pools": [pool]})
}

impl RecordedWorld {
    fn begin(setup: Setup, more: &[(&str, Json)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let record = RecordSettings { path, max_bytes: DEFAULT_MAX_BYTES };
        let recorder = Recorder::start(record, 7, settings(&setup, more)).unwrap();
        let tape = PoolTape::begin(Some(&recorder), &"pool".into(), &cache_config());
        let world = Setup { recorder: Some(recorder.clone()), ..setup }.build();
        let snapshot = world.snapshot.load_full();
        tape.change(|report| {
            let endpoints = snapshot.endpoints.iter().map(|state| state.endpoint.spec.clone()).collect();
            report(PoolChange::Event(&PoolEvent::Endpoints { source: SourceId(0), endpoints }));
            report(PoolChange::Publish);
            for state in &snapshot.endpoints {
                let (id, metrics) = (state.endpoint.id, Arc::new(state.metrics().unwrap().clone()));
                report(PoolChange::Event(&PoolEvent::Scraped { id, metrics }));
            }
            report(PoolChange::Publish);
        });
        Self { world, recorder, folder }
    }

    /// Decides these requests and ends some of them. The recording then replays exactly, and the last decision is
    /// explained as it was live.
    fn assert_recording_agrees(self, prompts: &[(String, u8)]) {
        let mut open = Vec::new();
        let (mut explanation, mut last) = (None, Vec::new());
        for (text, fate) in prompts {
            let body = chat(text);
            explanation = Some(explained(&self.world, PATH, &[("x-session-id", "s")], &body).unwrap());
            let mut plan = decided(&self.world, PATH, &[("x-session-id", "s")], &body).unwrap();
            last = authorities(&plan.decision.picks);
            let booked = plan.booked.as_mut().unwrap();
            if fate % 4 > 0 {
                booked.first_byte(true, true, Timestamp(NOW.0 + 1));
            }
            if fate % 4 == 2 {
                let usage = Usage { prompt_tokens: Some(40), completion_tokens: Some(9), cached_tokens: Some(16) };
                plan.prefill.iter_mut().for_each(|prefill| prefill.end(true, &usage, |_| false, NOW));
                booked.end(true, &usage, |_| false, NOW);
            }
            if fate % 4 < 3 {
                open.push(plan);
            }
        }
        drop(open);
        self.recorder.finish();
        let path = self.folder.path().join("run.jsonl");
        let registry = Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]);
        let summary = replay_file(&path, None, &registry).unwrap();
        assert_eq!(summary.decisions, prompts.len() as u64);
        assert!(summary.is_exact(), "{summary}");
        let recorded = explain(&path, None, None, &registry).unwrap().unwrap();
        let live = explanation.unwrap();
        assert_eq!((&recorded.decision.choice.picks, &recorded.recorded), (&last, &last));
        assert_eq!(recorded.decision.choice.prefill, live.prefill);
        assert_eq!(
            (recorded.decision.pool, recorded.decision.model, recorded.decision.choice.picks),
            (live.pool, live.model, live.picks)
        );
        assert_eq!(recorded.decision.choice.parts.to_string(), live.parts.to_string());
    }
}

#[test]
fn recording_of_ended_sessions_and_reservations_agrees() {
    let filter = json!({"type": "session-affinity-filter", "parameters": {"strategy": "session_id"}});
    let parameters = json!({"filters": [filter], "scorers": [{"type": "active-request-scorer", "weight": 1}]});
    let servers = vec![(0, 0.1, &[][..]); 3];
    let recorded = RecordedWorld::begin(Setup { servers, parameters, ..Setup::default() }, &[]);
    let picker = &recorded.world.processor.picker;
    let body = chat("hello");
    let ask = |header: (&str, &str)| decided(&recorded.world, PATH, &[header], &body).unwrap();
    let first = |plan: &Plan| plan.decision.picks[0].id;
    let session = ("x-session-id", "s");
    let (one, two) = (ask(session), ask(session));
    assert_eq!(first(&one), first(&two), "the session has its endpoint, although others are idle");
    picker.end_session(None, Some("s"), SessionEnd::Admin, Timestamp(0)).unwrap();
    let three = ask(session);
    assert_ne!(first(&one), first(&three), "the session has ended");
    let query = ExplainQuery { pool: None, path: PATH, headers: &[], body: &body, now: NOW };
    let held = (ReservationId(1), DEFAULT_TIMEOUT);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let run = async |warming| compute(warming);
    let reserved = runtime.block_on(reserve(picker, &picker.config(), query, held, || NOW, run)).unwrap();
    let sent = ask((reserved.header, &reserved.reservation));
    assert_eq!(sent.decision.picks[0].authority, reserved.endpoint);
    drop((one, two, three, sent));
    recorded.recorder.finish();
    let registry = Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]);
    let summary = replay_file(&recorded.folder.path().join("run.jsonl"), None, &registry).unwrap();
    assert_eq!((summary.decisions, summary.preset), (4, 1));
    assert!(summary.is_exact(), "{summary}");
}

/// Prompts that share prefixes, and what becomes of each request.
fn prompts() -> impl Strategy<Value = Vec<(String, u8)>> {
    let prompt = (0..3usize, 1..400usize, any::<u8>());
    let text = |(word, times, fate): (usize, usize, u8)| (["alpha ", "beta ", "gamma "][word].repeat(times), fate);
    prop::collection::vec(prompt.prop_map(text), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For each strategy, load and prompt: live, dry run, replay and explanation of the recording agree.
    #[test]
    fn recording_of_every_strategy_agrees(
        servers in servers(),
        // `pd` needs a pool that splits requests.
        strategy in prop::sample::select(strategies()).prop_filter("pd", |name| *name != "pd"),
        prompts in prompts(),
    ) {
        let destination = Destination::List;
        let setup = Setup { servers, strategy, parameters: Json::Null, destination, ..Setup::default() };
        RecordedWorld::begin(setup, &[]).assert_recording_agrees(&prompts);
    }

    /// The same in pools that split requests.
    #[test]
    fn recording_of_split_requests_agrees(
        strategy in prop::sample::select(vec!["predicted-latency", "least-request", "pd"]),
        prompts in prompts(),
        decider in prop::sample::select(vec![
            (Decider::Always, "always"), (Decider::Predicted, "predicted"), (Decider::Strategy, "strategy"),
        ]),
    ) {
        const ROLES: &[&str] = &["prefill", "prefill", "decode", "decode"];
        let setup = splitting_setup(ROLES, Mode::Direct(direct("nixl")), decider.0);
        let setup = Setup { strategy, destination: Destination::List, ..setup };
        let endpoint = |(i, role): (u32, &&str)| json!({"address": format!("192.168.1.{i}:8000"), "role": role});
        let endpoints = json!((1..).zip(ROLES).map(endpoint).collect::<Vec<_>>());
        let more = [("disaggregation", json!({"decider": decider.1})), ("endpoints", endpoints)];
        RecordedWorld::begin(setup, &more).assert_recording_agrees(&prompts);
    }
}
