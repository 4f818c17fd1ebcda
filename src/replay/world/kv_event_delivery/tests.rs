#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use super::*;
use crate::world::tests::{Ended, Fleet, rows, seconds};
use crate::world::{FleetChange, KvEventSettings, TimedChange};
use attache_sim::engine::{Handoff, Job, JobId, JobPrompt};
use attache_workload::Workload;

const DELAY: Duration = Duration::from_millis(10);

/// A simulation of one server, whose process restarts after 1 s.
fn world<'w>(workload: &'w mut dyn Workload, observer: &'w mut Ended) -> World<'w> {
    let fleet = Fleet {
        strategy: "predicted-latency",
        kv_events: Some(KvEventSettings { delay: DELAY, loss: 0.0 }),
        changes: vec![TimedChange { at: seconds(1.0), change: FleetChange::Restart(0) }],
        ..Fleet::default()
    };
    fleet.world(workload, observer)
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
    world.servers[0].submit(at, job, None).unwrap();
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
    let link = &world.servers[0].events[0];
    (link.trust.get(), world.pickers.first().cache.index().held(link.holder, Tier::Gpu).len())
}

#[test]
fn events_after_a_lost_batch_are_not_trusted_until_the_replay() {
    let (mut workload, mut observer) = (rows(&[]), Ended::default());
    let world = &mut world(&mut *workload, &mut observer);
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
fn events_of_the_old_process_are_dropped_after_a_restart() {
    let (mut workload, mut observer) = (rows(&[]), Ended::default());
    let world = &mut world(&mut *workload, &mut observer);
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
