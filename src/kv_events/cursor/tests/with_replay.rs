//! Publishers that repeat what they have told.

use super::*;

/// Connected, and the replay of `frames` frames is through.
fn joined(frames: u64) -> Rig {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    (0..frames).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    rig
}

#[test]
fn who_comes_late_hears_it_all_again() {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.live(3), None);
    (0..4).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.live(4), None);
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3]);
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), (vec![0, 1, 2, 3, 4], Trust::Exact));
    assert_eq!(rig.stats.get(Count::ReplayedFrames), 4);
}

#[test]
fn a_publisher_that_has_said_nothing_holds_nothing() {
    let mut rig = joined(0);
    rig.live(0);
    assert_eq!(rig.applied(BORN), [0]);
}

#[test]
fn a_gap_is_filled() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    assert_eq!(rig.live(6), None);
    (1..6).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.log.clears), ((0..7).collect(), 0));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn a_ring_that_has_forgotten_gives_what_it_has() {
    let mut rig = joined(2);
    assert_eq!(rig.live(50), Some(Ask(1)));
    (40..51).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.log.clears), ((40..51).collect(), 1));
    assert_eq!((rig.cursor.trust(), rig.stats.get(Count::ReplaysTruncated)), (Trust::Incomplete, 1));
    assert!(!rig.cursor.wants_retry(), "the ring would give less, not more");

    let mut late = Rig::new(true);
    late.cursor.connected();
    (40..43).for_each(|seq| assert_eq!(late.replayed(seq), None));
    assert_eq!(late.end(End::Complete), None);
    assert_eq!((late.applied(BORN), late.cursor.trust()), (vec![40, 41, 42], Trust::Incomplete));
    assert_eq!(late.cursor.check(), Some(Ask(42)));
    assert_eq!(late.cursor.trust(), Trust::Incomplete, "while it is looked whether anything was missed");
}

#[test]
fn a_gap_that_the_ring_does_not_fill_is_not_asked_about_for_ever() {
    let mut rig = joined(0);
    assert_eq!(rig.live(5), Some(Ask(0)));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::Gap), vec![5]));
    assert!(rig.cursor.wants_retry());
}

#[test]
fn the_same_process_goes_on_after_a_reconnection() {
    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    (2..5).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..5).collect(), Trust::Exact));
    assert_eq!(rig.log.restarts, 0);
}

#[test]
fn another_process_is_found_out_by_its_frames_or_by_having_none() {
    let born = BORN + 500.0;
    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    // It has frame 2 too, but another one.
    assert_eq!(rig.cursor.replayed(2, &frame(born, 2), &mut rig.log), Some(Ask(0)));
    (0..3).for_each(|seq| assert_eq!(rig.cursor.replayed(seq, &frame(born, seq), &mut rig.log), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(born), rig.log.restarts), (vec![0, 1, 2], 1));

    let mut rig = joined(3);
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(2)));
    assert_eq!(rig.end(End::Complete), Some(Ask(0)), "it has not got so far");
    assert_eq!(rig.cursor.replayed(0, &frame(born, 0), &mut rig.log), None);
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0], Trust::Exact));
}

#[test]
fn a_restart_that_comes_live_is_replayed_from_its_beginning() {
    let born = BORN + 500.0;
    let mut rig = joined(3);
    assert_eq!(rig.live_from(born, 1), Some(Ask(0)));
    (0..2).for_each(|seq| assert_eq!(rig.cursor.replayed(seq, &frame(born, seq), &mut rig.log), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0, 1], Trust::Exact));
}

#[test]
fn a_replay_that_fails_is_asked_thrice_and_later_again() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    assert_eq!(rig.end(End::Failed), Some(Ask(1)));
    assert_eq!(rig.replayed(1), None);
    assert_eq!(rig.replayed(2), None);
    // It has brought something, so that the count begins again.
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::ReplayFailed), vec![5]));
    assert_eq!(rig.live(6), None);
    assert_eq!(rig.live(8), None, "nobody is asked for the time being");
    assert_eq!(rig.applied(BORN), [8]);

    assert!(rig.cursor.wants_retry());
    assert_eq!(rig.cursor.retry(), Some(Ask(0)));
    assert_eq!(rig.cursor.trust(), Trust::Syncing);
    assert_eq!(rig.live(9), None);
    assert_eq!(rig.applied(BORN), [8], "what is known stays until the replay answers");
    (0..10).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..10).collect(), Trust::Exact));
    assert!(!rig.cursor.wants_retry());
}

#[test]
fn as_much_as_was_known_is_no_reason_not_to_ask_again() {
    let mut rig = joined(2);
    assert_eq!(rig.live(5), Some(Ask(1)));
    (0..3).for_each(|_| {
        rig.end(End::Failed);
    });
    rig.log.relearned = true;
    rig.live(6);
    assert_eq!(rig.suspect(), Some(Doubt::ReplayFailed));
    assert_eq!(rig.cursor.retry(), Some(Ask(0)));
}

#[test]
fn a_replay_that_breaks_off_midway_leaves_doubt() {
    let mut rig = Rig::new(true);
    rig.cursor.connected();
    (0..3).for_each(|seq| {
        rig.replayed(seq);
    });
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), Some(Ask(2)));
    assert_eq!(rig.end(End::Failed), None);
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted), "what comes next is not known");
    assert_eq!(rig.cursor.retry(), Some(Ask(2)));
    (2..4).for_each(|seq| {
        rig.replayed(seq);
    });
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..4).collect(), Trust::Exact));
}

#[test]
fn a_replay_that_never_answers_is_a_doubt_of_its_own() {
    let mut rig = Rig::new(true);
    assert_eq!(rig.cursor.connected(), Some(Ask(0)));
    assert_eq!(rig.live(4), None);
    assert_eq!(rig.end(End::Failed), Some(Ask(0)));
    assert_eq!(rig.end(End::Failed), Some(Ask(0)));
    assert_eq!(rig.end(End::Failed), None);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::ReplayFailed), vec![4]));

    let mut idle = Rig::new(true);
    idle.cursor.connected();
    (0..3).for_each(|_| {
        idle.end(End::Failed);
    });
    assert_eq!(idle.suspect(), Some(Doubt::ReplayFailed));
    assert_eq!(idle.cursor.retry(), Some(Ask(0)));
    assert_eq!(idle.end(End::Complete), None);
    assert_eq!(idle.cursor.trust(), Trust::Exact);
}

#[test]
fn what_does_not_fit_is_fetched_again() {
    let mut rig = Rig::with_backlog(true, 2);
    rig.cursor.connected();
    (0..6).for_each(|seq| {
        rig.live(seq);
    });
    assert_eq!(rig.stats.get(Count::OverflowFrames), 4);
    assert_eq!(rig.replayed(0), None);
    assert_eq!(rig.end(End::Complete), Some(Ask(1)), "0 by replay, 1 from the backlog, the rest must come again");
    (1..6).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!((rig.applied(BORN), rig.cursor.trust()), ((0..6).collect(), Trust::Exact));
}

#[test]
fn a_check_finds_lost_ends_and_restarts_and_disturbs_nothing() {
    let mut rig = joined(3);
    assert_eq!(rig.cursor.check(), Some(Ask(2)));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    (2..5).for_each(|seq| assert_eq!(rig.replayed(seq), None));
    assert_eq!(rig.end(End::Complete), None);
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3, 4]);
    assert!(rig.cursor.is_owed() && !rig.cursor.is_deaf(), "the connection has not brought them yet");
    rig.cursor.overdue();
    assert!(rig.cursor.is_deaf() && !rig.cursor.is_owed(), "and does not");
    rig.cursor.disconnected();
    assert_eq!(rig.cursor.connected(), Some(Ask(4)));
    rig.replayed(4);
    assert_eq!(rig.end(End::Complete), None);
    assert!(!rig.cursor.is_deaf());
    assert_eq!(rig.cursor.check(), Some(Ask(4)));
    rig.live(5);
    rig.replayed(4);
    rig.replayed(5);
    assert_eq!(rig.end(End::Complete), None);
    assert!(!rig.cursor.is_owed(), "it came both ways");
    assert_eq!(rig.cursor.check(), Some(Ask(5)));
    rig.replayed(5);
    rig.replayed(6);
    assert_eq!(rig.end(End::Complete), None);
    assert!(rig.cursor.is_owed());
    rig.live(6);
    rig.cursor.overdue();
    assert!(!rig.cursor.is_owed() && !rig.cursor.is_deaf(), "by the connection a little later");
    assert_eq!(rig.cursor.check(), Some(Ask(6)));
    for left in (0..3).rev() {
        assert_eq!(rig.end(End::Failed), (left > 0).then_some(Ask(6)));
    }
    assert_eq!(rig.cursor.trust(), Trust::Exact, "a replay socket that is busy proves nothing");
    assert_eq!(rig.live(8), Some(Ask(6)), "and is asked when something is missing");
    rig.end(End::Complete);
    assert_eq!(rig.log.restarts, 1);
}
