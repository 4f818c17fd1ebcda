//! Publishers with replay.

use super::*;

/// Connected, after a replay of `frames` frames.
fn joined(frames: u64) -> Rig {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    (0..frames).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    rig
}

#[test]
fn late_connection_fetches_all_frames() {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.live(3), None);
    (0..4).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.live(4), None);
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3]);
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), (vec![0, 1, 2, 3, 4], Trust::Exact));
    assert_eq!(rig.stats.get(Count::ReplayedFrames), 4);
}

#[test]
fn publisher_without_frames_holds_nothing() {
    let mut rig = joined(0);
    rig.live(0);
    assert_eq!(rig.applied(BORN), [0]);
}

#[test]
fn gap_is_filled_by_replay() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    assert_eq!(rig.live(6), None);
    (1..6).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.log.clears), ((0..7).collect(), 0));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn truncated_ring_gives_its_remaining_frames() {
    let mut rig = joined(2);
    assert_eq!(rig.live(50), Some(Ask(1)));
    (40..51).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.log.clears), ((40..51).collect(), 1));
    assert_eq!((rig.cursor.trust(), rig.stats.get(Count::ReplaysTruncated)), (Trust::Incomplete, 1));
    assert!(!rig.cursor.wants_retry(), "another replay would return less");

    let mut late = Rig::new(true);
    late.cursor.connected();
    (40..43).for_each(|seq| assert_eq!(late.replayed(seq), None));
    assert_eq!(late.end(ReplayEnd::Complete), None);
    assert_eq!((late.applied(BORN), late.cursor.trust()), (vec![40, 41, 42], Trust::Incomplete));
    assert_eq!(late.cursor.check(), Some(Ask(42)));
    assert_eq!(late.cursor.trust(), Trust::Incomplete, "during the check for missed frames");
}

#[test]
fn gap_that_the_ring_cannot_fill_is_not_requested_forever() {
    let mut rig = joined(0);
    assert_eq!(rig.live(5), Some(Ask(0)));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::Gap), vec![5]));
    assert!(rig.cursor.wants_retry());
}

#[test]
fn same_process_continues_after_a_reconnection() {
    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    (2..5).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..5).collect(), Trust::Exact));
    assert_eq!(rig.log.restarts, 0);
}

#[test]
fn other_process_is_detected_by_its_frames_or_by_having_none() {
    let born = BORN + 500.0;
    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    // It also has a frame 2, which differs.
    assert_eq!(rig.cursor.replayed(2, &frame(born, 2), &mut rig.log), Some(Ask(0)));
    (0..3).for_each(|seq| assert_eq!(rig.cursor.replayed(seq, &frame(born, seq), &mut rig.log), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(born), rig.log.restarts), (vec![0, 1, 2], 1));

    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Complete), Some(Ask(0)), "it has fewer frames");
    assert_eq!(rig.cursor.replayed(0, &frame(born, 0), &mut rig.log), None);
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0], Trust::Exact));
}

#[test]
fn restart_seen_live_is_replayed_from_its_beginning() {
    let born = BORN + 500.0;
    let mut rig = joined(3);
    assert_eq!(rig.live_from(born, 1), Some(Ask(0)));
    (0..2).for_each(|seq| assert_eq!(rig.cursor.replayed(seq, &frame(born, seq), &mut rig.log), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0, 1], Trust::Exact));
}

#[test]
fn failed_replay_is_requested_three_times_and_later_again() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(1)));
    assert_eq!(rig.replayed(1), None);
    assert_eq!(rig.replayed(2), None);
    // It has returned frames, so the count starts again.
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::ReplayFailed), vec![5]));
    assert_eq!(rig.live(6), None);
    assert_eq!(rig.live(8), None, "no replay is requested for now");
    assert_eq!(rig.applied(BORN), [8]);

    assert!(rig.cursor.wants_retry());
    assert_eq!(rig.cursor.retry(), Some(Ask(0)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    assert_eq!(rig.live(9), None);
    assert_eq!(rig.applied(BORN), [8], "the state stays until the replay returns a frame");
    (0..10).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..10).collect(), Trust::Exact));
    assert!(!rig.cursor.wants_retry());
}

#[test]
fn same_number_of_blocks_does_not_prevent_another_replay() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    (0..3).for_each(|_| {
        rig.end(ReplayEnd::Failed);
    });
    rig.log.relearned = true;
    rig.live(6);
    assert_eq!(rig.suspect(), Some(Doubt::ReplayFailed));
    assert_eq!(rig.cursor.retry(), Some(Ask(0)));
}

#[test]
fn interrupted_replay_leaves_a_doubt() {
    let mut rig = Rig::new(true);
    rig.cursor.connected();
    (0..3).for_each(|seq| {
        rig.replayed(seq);
    });
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(2)));
    assert_eq!(rig.end(ReplayEnd::Failed), None);
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted), "the next frame is unknown");
    assert_eq!(rig.cursor.retry(), Some(Ask(2)));
    (2..4).for_each(|seq| {
        rig.replayed(seq);
    });
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..4).collect(), Trust::Exact));
}

#[test]
fn replay_that_never_succeeds_is_its_own_doubt() {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.live(4), None);
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(0)));
    assert_eq!(rig.end(ReplayEnd::Failed), Some(Ask(0)));
    assert_eq!(rig.end(ReplayEnd::Failed), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::ReplayFailed), vec![4]));

    let mut idle = Rig::new(true);
    idle.cursor.connected();
    (0..3).for_each(|_| {
        idle.end(ReplayEnd::Failed);
    });
    assert_eq!(idle.suspect(), Some(Doubt::ReplayFailed));
    assert_eq!(idle.cursor.retry(), Some(Ask(0)));
    assert_eq!(idle.end(ReplayEnd::Complete), None);
    assert_eq!(idle.cursor.trust(), Trust::Exact);
}

#[test]
fn frames_over_the_backlog_are_fetched_again() {
    let mut rig = Rig::with_backlog(true, 2);
    rig.cursor.connected();
    (0..6).for_each(|seq| {
        rig.live(seq);
    });
    assert_eq!(rig.stats.get(Count::OverflowFrames), 4);
    assert_eq!(rig.replayed(0), None);
    assert_eq!(rig.end(ReplayEnd::Complete), Some(Ask(1)), "0 by replay, 1 from the backlog, the rest must come again");
    (1..6).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..6).collect(), Trust::Exact));
}

#[test]
fn check_finds_lost_frames_and_restarts_without_side_effects() {
    let mut rig = joined(3);
    assert_eq!(rig.cursor.check(), Some(Ask(2)));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    (2..5).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3, 4]);
    assert!(rig.cursor.is_owed() && !rig.cursor.is_deaf(), "the connection has not delivered them yet");
    rig.cursor.overdue();
    assert!(rig.cursor.is_deaf() && !rig.cursor.is_owed(), "and fails to deliver them");
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(4)));
    rig.replayed(4);
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert!(!rig.cursor.is_deaf());
    assert_eq!(rig.cursor.check(), Some(Ask(4)));
    rig.live(5);
    rig.replayed(4);
    rig.replayed(5);
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert!(!rig.cursor.is_owed(), "both connections delivered it");
    assert_eq!(rig.cursor.check(), Some(Ask(5)));
    rig.replayed(5);
    rig.replayed(6);
    assert_eq!(rig.end(ReplayEnd::Complete), None);
    assert!(rig.cursor.is_owed());
    rig.live(6);
    rig.cursor.overdue();
    assert!(!rig.cursor.is_owed() && !rig.cursor.is_deaf(), "delivered by the connection a little later");
    assert_eq!(rig.cursor.check(), Some(Ask(6)));
    for left in (0..3).rev() {
        assert_eq!(rig.end(ReplayEnd::Failed), (left > 0).then_some(Ask(6)));
    }
    assert_eq!(rig.cursor.trust(), Trust::Exact, "a failed check proves nothing");
    assert_eq!(rig.live(8), Some(Ask(6)), "and a gap still requests a replay");
    rig.end(ReplayEnd::Complete);
    assert_eq!(rig.log.restarts, 1);
}
