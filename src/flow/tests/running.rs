//! Preemption: requests in flight that end so that more important ones are dispatched.

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

/// Index of the request in flight that is preempted.
fn evicted(trial: &mut Trial, ms: u64) -> Option<usize> {
    let gauge = trial.gauge();
    let (seat, refusal) = trial.flow.evict_running(&gauge, at(ms))?;
    assert_eq!(refusal.cause, Cause::Preempted);
    Some(trial.running.iter().position(|passage| passage.seat() == Some(seat)).unwrap())
}

/// Ends the request at `i` early; returns the requests that are dispatched then.
fn goes(trial: &mut Trial, i: usize, ms: u64) -> Vec<String> {
    let passage = trial.running.remove(i);
    trial.flow.ended(passage, None, at(ms));
    let gauge = trial.gauge();
    trial.flow.freed(&gauge, at(ms), &mut trial.rng, &mut trial.left);
    trial.told()
}

#[test]
fn preemption_lowest_priority_newest_first_one_at_a_time() {
    let mut trial = full(EvictRunning::Any, &[0, -1, -5, -5, -1]);
    assert_eq!(evicted(&mut trial, 10), None, "nobody waits");
    trial.comes("urgent", important(0), 11);
    trial.comes("urgent too", important(3), 11);
    assert_eq!(evicted(&mut trial, 12), Some(3));
    assert_eq!(evicted(&mut trial, 12), None, "the preempted request has not ended yet");
    assert_eq!(goes(&mut trial, 3, 13), ["urgent too"]);
    assert_eq!(evicted(&mut trial, 13), Some(2));
    assert_eq!(goes(&mut trial, 2, 14), ["urgent"]);
    assert_eq!(evicted(&mut trial, 14), None, "the queue is empty");
}

#[test]
fn preemption_not_for_equal_priority_or_closed_band() {
    let mut trial = full(EvictRunning::Any, &[0, -1]);
    trial.comes("batch", important(-1), 5);
    assert_eq!(evicted(&mut trial, 6), None);
    trial.comes("usual", important(0), 7);
    assert_eq!(evicted(&mut trial, 8), Some(1));

    let mut trial = full(EvictRunning::Any, &[-5, -2]);
    trial.comes("batch", important(-1), 5);
    assert_eq!(evicted(&mut trial, 6), Some(0), "a sheddable request may preempt a less important one");

    let build = find(CEILINGS, "priority-holdback-policy").unwrap().build;
    for (ceiling, ends) in [(0.0, None), (0.5, Some(0))] {
        let ceiling = build(&json!({"domain": "explicit", "ceilings": {"0": ceiling, "-1": 0.0}})).unwrap();
        let settings = Settings { evict_running: EvictRunning::Any, ..Settings::default() };
        let mut trial = Trial { flow: FlowControl::new(settings, ceiling), ..Trial::new(Settings::default()) };
        // It was dispatched before its band was closed.
        let passage = trial.flow.passage(-1, 0, Meter::default(), Duration::ZERO);
        trial.running.push(passage);
        assert_eq!(trial.comes("usual", important(0), 0), "waits");
        assert_eq!(evicted(&mut trial, 1), ends);
    }
}

#[test]
fn preemption_spares_started_responses_unless_any() {
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
    // Its response begins after the preemption: it continues, and another request ends instead.
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
fn preemption_pauses_when_no_capacity_was_freed() {
    let mut trial = full(EvictRunning::Any, &[-1, -1, -1]);
    trial.comes("urgent", important(0), 5);
    assert_eq!(evicted(&mut trial, 6), Some(2));
    // The KV cache of the model server is still full.
    trial.capacity = 2;
    assert_eq!(goes(&mut trial, 2, 10), Vec::<String>::new());
    assert_eq!((evicted(&mut trial, 10), evicted(&mut trial, 509)), (None, None));
    assert_eq!(evicted(&mut trial, 510), Some(1));
    assert_eq!(goes(&mut trial, 1, 511), ["urgent"]);
    trial.comes("urgent too", important(0), 512);
    assert_eq!(evicted(&mut trial, 512), Some(0), "a request was dispatched, so the pause ends");
}

#[test]
fn preemption_pause_not_ended_by_other_capacity() {
    let mut trial = full(EvictRunning::Any, &[-1, -1, -1]);
    for name in ["urgent", "urgent too", "urgent as well"] {
        trial.comes(name, important(0), 5);
    }
    assert_eq!(evicted(&mut trial, 6), Some(2));
    trial.capacity = 2;
    assert_eq!(goes(&mut trial, 2, 10), Vec::<String>::new());
    // Prefills end, one after the other.
    for (ms, name) in [(12, "urgent"), (17, "urgent too")] {
        trial.capacity += 1;
        let gauge = trial.gauge();
        trial.flow.freed(&gauge, at(ms), &mut trial.rng, &mut trial.left);
        assert_eq!(trial.told(), [name]);
        assert_eq!(evicted(&mut trial, ms), None);
    }
    assert_eq!(evicted(&mut trial, 510), Some(1));
}
