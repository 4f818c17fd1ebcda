//! Requests under way that end for the sake of more important ones.

use super::*;
use crate::fairness::Meter;

fn full(which: EvictRunning, priorities: &[i32]) -> Trial {
    let settings = Settings { evict_running: which, ..Settings::default() };
    let mut trial = Trial { capacity: u32::try_from(priorities.len()).unwrap(), ..Trial::new(settings) };
    for (i, priority) in priorities.iter().enumerate() {
        assert_eq!(trial.comes("running", important(*priority), i as u64), "goes");
    }
    trial
}

/// Which of those under way is told to end.
fn evicted(trial: &mut Trial, ms: u64) -> Option<usize> {
    let room = trial.room();
    let (seat, refusal) = trial.flow.evict_running(&room, at(ms))?;
    assert_eq!(refusal.cause, Cause::Outranked);
    Some(trial.running.iter().position(|passage| passage.seat() == Some(seat)).unwrap())
}

/// The one at `i` ends before its time; who goes on then.
fn goes(trial: &mut Trial, i: usize, ms: u64) -> Vec<String> {
    let passage = trial.running.remove(i);
    trial.flow.ended(passage, None, at(ms));
    let room = trial.room();
    trial.flow.freed(&room, at(ms), &mut trial.rng, &mut trial.left);
    trial.told()
}

#[test]
fn the_newest_of_the_least_important_ends_and_one_at_a_time() {
    let mut trial = full(EvictRunning::Any, &[0, -1, -5, -5, -1]);
    assert_eq!(evicted(&mut trial, 10), None, "nobody waits");
    trial.comes("urgent", important(0), 11);
    trial.comes("urgent too", important(3), 11);
    assert_eq!(evicted(&mut trial, 12), Some(3));
    assert_eq!(evicted(&mut trial, 12), None, "it has not gone yet");
    assert_eq!(goes(&mut trial, 3, 13), ["urgent too"]);
    assert_eq!(evicted(&mut trial, 13), Some(2));
    assert_eq!(goes(&mut trial, 2, 14), ["urgent"]);
    assert_eq!(evicted(&mut trial, 14), None, "nobody waits any longer");
}

#[test]
fn nobody_ends_for_the_sake_of_an_equal_or_of_a_band_that_is_closed() {
    let mut trial = full(EvictRunning::Any, &[0, -1]);
    trial.comes("batch", important(-1), 5);
    assert_eq!(evicted(&mut trial, 6), None);
    trial.comes("usual", important(0), 7);
    assert_eq!(evicted(&mut trial, 8), Some(1));

    let mut trial = full(EvictRunning::Any, &[-5, -2]);
    trial.comes("batch", important(-1), 5);
    assert_eq!(evicted(&mut trial, 6), Some(0), "what is less important gives way to what is sheddable itself");

    let build = find(CEILINGS, "priority-holdback-policy").unwrap().build;
    for (ceiling, ends) in [(0.0, None), (0.5, Some(0))] {
        let ceiling = build(&json!({"domain": "explicit", "ceilings": {"0": ceiling, "-1": 0.0}})).unwrap();
        let settings = Settings { evict_running: EvictRunning::Any, ..Settings::default() };
        let mut trial = Trial { flow: FlowControl::new(settings, ceiling), ..Trial::new(Settings::default()) };
        // It came in while no band was closed to it.
        let passage = trial.flow.passage(-1, 0, Meter::default(), Duration::ZERO);
        trial.running.push(passage);
        assert_eq!(trial.comes("usual", important(0), 0), "waits");
        assert_eq!(evicted(&mut trial, 1), ends);
    }
}

#[test]
fn whose_answer_has_begun_stays_unless_all_may_end() {
    for (which, ends) in
        [(EvictRunning::Unanswered, Some(0)), (EvictRunning::Any, Some(1)), (EvictRunning::Never, None)]
    {
        let mut trial = full(which, &[-1, -1]);
        let mut newest = trial.running.pop().unwrap();
        trial.flow.answers(&mut newest);
        trial.running.push(newest);
        trial.comes("urgent", important(0), 5);
        assert_eq!(evicted(&mut trial, 6), ends, "{which:?}");
    }
    // It begins to answer after it was told: it stays, and another one ends in its place.
    let mut trial = full(EvictRunning::Unanswered, &[-1, -1]);
    trial.comes("urgent", important(0), 5);
    assert_eq!(evicted(&mut trial, 6), Some(1));
    let mut told = trial.running.pop().unwrap();
    trial.flow.answers(&mut told);
    assert_eq!(told.seat(), None);
    trial.running.push(told);
    assert_eq!(evicted(&mut trial, 6), Some(0));
}

#[test]
fn where_an_end_makes_no_room_the_next_has_to_wait() {
    let mut trial = full(EvictRunning::Any, &[-1, -1, -1]);
    trial.comes("urgent", important(0), 5);
    assert_eq!(evicted(&mut trial, 6), Some(2));
    // The cache of the server is still full.
    trial.capacity = 2;
    assert_eq!(goes(&mut trial, 2, 10), Vec::<String>::new());
    assert_eq!((evicted(&mut trial, 10), evicted(&mut trial, 509)), (None, None));
    assert_eq!(evicted(&mut trial, 510), Some(1));
    assert_eq!(goes(&mut trial, 1, 511), ["urgent"]);
    trial.comes("urgent too", important(0), 512);
    assert_eq!(evicted(&mut trial, 512), Some(0), "somebody was let through: there is nothing to wait for");
}

#[test]
fn room_that_comes_from_elsewhere_does_not_make_up_for_an_end_that_made_none() {
    let mut trial = full(EvictRunning::Any, &[-1, -1, -1]);
    for name in ["urgent", "urgent too", "urgent as well"] {
        trial.comes(name, important(0), 5);
    }
    assert_eq!(evicted(&mut trial, 6), Some(2));
    trial.capacity = 2;
    assert_eq!(goes(&mut trial, 2, 10), Vec::<String>::new());
    // Prompts are computed, one after the other.
    for (ms, name) in [(12, "urgent"), (17, "urgent too")] {
        trial.capacity += 1;
        let room = trial.room();
        trial.flow.freed(&room, at(ms), &mut trial.rng, &mut trial.left);
        assert_eq!(trial.told(), [name]);
        assert_eq!(evicted(&mut trial, ms), None);
    }
    assert_eq!(evicted(&mut trial, 510), Some(1));
}
