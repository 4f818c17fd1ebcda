#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::*;
use crate::front::FrontConfig;
use crate::legs::Patience;
use crate::quotas::QuotaSettings;
use crate::registry;
use crate::world::{FleetChange, KvEventSettings, Observer, SignalSettings, TimedChange, WorldConfig, spec};
use attache_pool::health::HealthPolicy;
use attache_report::served::{Sample, Served};
use attache_scheduling::{Choices, Scheduler};
use attache_sim::engine::{EngineConfig, Handoff, Job, JobId, JobPrompt};
use attache_workload::{Request, TraceError, Workload};

const DELAY: Duration = Duration::from_millis(10);

struct Nothing;

impl Workload for Nothing {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        Ok(None)
    }
}

impl Observer for Nothing {
    fn served(&mut self, _: &Served) {}

    fn sampled(&mut self, _: Timestamp, _: &[Sample]) {}
}

/// A world of one server whose process is another one after a second, with something to ask and to tell.
fn world<'w>(workload: &'w mut Nothing, observer: &'w mut Nothing) -> World<'w> {
    let strategy = registry().build("predicted-latency", &serde_json::Value::Null).unwrap();
    let front = FrontConfig {
        scheduler: Scheduler::new(Choices::only("predicted-latency", strategy), HealthPolicy::default(), 1),
        patience: Patience::default(),
        stale_after: Duration::from_secs(3),
        block_size: 16,
        max_index_bytes: 1 << 20,
        tenant_share: 1.0,
        tenant_header: None,
        claim_life: Duration::from_secs(30),
        queues: None,
        quotas: QuotaSettings::default(),
        policies: Default::default(),
        seed: 1,
    };
    let signals = SignalSettings {
        metrics_every: Duration::from_secs(3_600),
        metrics_delay: Duration::ZERO,
        reported_blocks: None,
        discovery_delay: Duration::ZERO,
        kv_events: Some(KvEventSettings { delay: DELAY, loss: 0.0 }),
    };
    let changes = vec![TimedChange { at: seconds(1.0), change: FleetChange::Restart(0) }];
    let servers = vec![(spec(0), EngineConfig::default())];
    World::new(WorldConfig { front, servers, signals, changes, seed: 1 }, workload, observer)
}

fn seconds(seconds: f64) -> Timestamp {
    Timestamp((seconds * 1e9) as u64)
}

/// Has the engine compute a prompt of four blocks, which ends a little after `at`.
fn ask(world: &mut World<'_>, number: u64, at: Timestamp) {
    let job = Job {
        id: JobId(number),
        prompt: JobPrompt::Tokens(vec![u32::try_from(number).unwrap(); 64]),
        max_tokens: 1,
        stops_after: None,
        lora: None,
        cache_salt: None,
        answer_seed: number,
        handoff: Handoff::default(),
    };
    world.servers[0].engine.submit(at, job).unwrap();
    world.schedule(0);
}

/// Lets happen what happens until `end`.
fn play(world: &mut World<'_>, end: Timestamp) {
    while world.queue.next_at().is_some_and(|at| at <= end) {
        let (at, due) = world.queue.pop().unwrap();
        world.happen(at, due);
    }
}

/// How far the server is believed, and the blocks that it is thought to hold.
fn believed(world: &World<'_>) -> (Trust, usize) {
    let link = world.servers[0].events.as_ref().unwrap();
    (link.trust.get(), world.front.cache.index().held(link.holder, Tier::Gpu).len())
}

#[test]
fn who_has_lost_a_batch_is_not_believed_until_the_replay_is_there() {
    let (mut workload, mut observer) = (Nothing, Nothing);
    let world = &mut world(&mut workload, &mut observer);
    ask(world, 1, Timestamp(0));
    play(world, seconds(0.1));
    assert_eq!(believed(world), (Trust::Exact, 4));
    // All of the next is lost, and nobody knows.
    world.signals.kv_events = Some(KvEventSettings { delay: DELAY, loss: 0.999_999 });
    ask(world, 2, seconds(0.2));
    play(world, seconds(0.3));
    assert_eq!(believed(world), (Trust::Exact, 4));
    world.signals.kv_events = Some(KvEventSettings { delay: DELAY, loss: 0.0 });
    ask(world, 3, seconds(0.4));
    let step = |world: &World<'_>| world.queue.next_at().unwrap();
    while believed(world).0 == Trust::Exact {
        let at = step(world);
        play(world, at);
    }
    assert_eq!(believed(world), (Trust::Syncing, 4), "what shows the gap waits for the replay too");
    let at = step(world);
    play(world, at);
    assert_eq!(believed(world), (Trust::Exact, 12));
}

#[test]
fn what_an_old_process_has_told_is_not_held_by_the_new_one() {
    let (mut workload, mut observer) = (Nothing, Nothing);
    let world = &mut world(&mut workload, &mut observer);
    // Its blocks are told less than the delay before the process ends.
    ask(world, 1, seconds(0.988));
    play(world, seconds(1.0));
    assert_eq!(believed(world).1, 0, "still on its way");
    play(world, seconds(1.5));
    assert_eq!(believed(world), (Trust::Exact, 0));
    ask(world, 2, seconds(1.6));
    play(world, seconds(2.0));
    assert_eq!(believed(world), (Trust::Exact, 4));
}
