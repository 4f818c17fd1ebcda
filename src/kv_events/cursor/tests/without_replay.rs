//! Publishers without replay.

use super::*;

fn joined() -> Rig {
    let mut rig = Rig::new(false);
    assert_eq!(rig.cursor.trust(), Trust::Unknown);
    assert_eq!(rig.cursor.connected(), None);
    assert_eq!(rig.cursor.trust(), Trust::Unknown);
    rig
}

#[test]
fn publisher_received_from_the_start_is_exact() {
    let mut rig = joined();
    for seq in 0..5 {
        assert_eq!(rig.live(seq), None);
        assert_eq!(rig.cursor.trust(), Trust::Exact);
    }
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3, 4]);
    assert_eq!(rig.cursor.check(), None, "there is no replay");
}

#[test]
fn late_connection_is_suspect_until_much_is_known_and_never_exact() {
    let mut rig = joined();
    rig.live(7);
    assert_eq!(rig.suspect(), Some(Doubt::JoinedLate));
    rig.live(8);
    assert_eq!(rig.suspect(), Some(Doubt::JoinedLate));
    rig.log.relearned = true;
    rig.live(9);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete, "the same number does not mean the same blocks");
    assert_eq!(rig.applied(BORN), [7, 8, 9]);
    rig.live(10);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete);
    rig.log.next_outcome = BatchEffect { cleared: true, doubt: None };
    rig.live(11);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn gap_discards_the_state() {
    let mut rig = joined();
    rig.live(0);
    rig.live(1);
    rig.live(4);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::Gap), vec![4]));
    assert_eq!(rig.stats.get(Count::Gaps), 1);
    // The engine has cleared its cache: from here on everything is known.
    rig.log.next_outcome = BatchEffect { cleared: true, doubt: None };
    rig.live(5);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn undecodable_frame_counts_as_lost() {
    let mut rig = joined();
    rig.live(0);
    rig.log.next_outcome = BatchEffect { cleared: false, doubt: Some(Doubt::Undecodable) };
    rig.live(1);
    assert_eq!((rig.suspect(), rig.log.clears), (Some(Doubt::Undecodable), 1));
    rig.log.relearned = true;
    rig.live(2);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete);
}

#[test]
fn process_that_continues_the_old_numbers_is_detected_by_its_start_time() {
    let born = BORN + 500.0;
    let mut rig = joined();
    rig.live(0);
    rig.live(1);
    rig.cursor.disconnected();
    rig.cursor.connected();
    rig.live_from(born, 2);
    assert_eq!(rig.cursor.trust(), Trust::Exact, "it looks like the same process");
    assert_eq!(rig.cursor.process_started(BORN - 60.0, &mut rig.log), None);
    assert_eq!(rig.log.restarts, 0, "this is the start of the known process");
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    assert_eq!((rig.log.restarts, rig.cursor.trust()), (1, Trust::Unknown));
    rig.live_from(born, 3);
    assert_eq!((rig.applied(born), rig.suspect()), (vec![3], Some(Doubt::JoinedLate)));
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    assert_eq!(rig.log.restarts, 1);

    // If the start time is known before its first frame, that frame is recognised.
    rig.cursor.disconnected();
    let born = born + 500.0;
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    rig.cursor.connected();
    rig.live_from(born, 0);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0], Trust::Exact));
    assert_eq!(rig.log.restarts, 2);
}

#[test]
fn duplicate_frames_are_ignored() {
    let mut rig = joined();
    for seq in [0, 1, 2, 1, 2, 0, 3] {
        rig.live(seq);
    }
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3]);
    assert_eq!(rig.stats.get(Count::Duplicates), 3);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn restarted_numbers_mean_a_restart() {
    let mut rig = joined();
    (0..5).for_each(|seq| {
        rig.live(seq);
    });
    let born = BORN + 500.0;
    rig.live_from(born, 0);
    assert_eq!((rig.log.restarts, rig.applied(born)), (1, vec![0]));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    rig.live_from(born, 1);
    // The first frames of the next process are lost.
    rig.live_from(born + 500.0, 1);
    assert_eq!((rig.log.restarts, rig.suspect()), (2, Some(Doubt::JoinedLate)));
}

#[test]
fn new_connection_must_show_that_nothing_was_missed() {
    let mut rig = joined();
    rig.live(0);
    rig.cursor.disconnected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.cursor.connected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.live(1);
    assert_eq!((rig.cursor.trust(), rig.applied(BORN)), (Trust::Exact, vec![0, 1]));
    // A new process whose clock is behind: decreasing numbers on a new connection suffice.
    rig.cursor.disconnected();
    rig.cursor.connected();
    rig.live_from(BORN - 500.0, 0);
    assert_eq!((rig.log.restarts, rig.cursor.trust()), (1, Trust::Exact));
}

#[test]
fn dropped_frames_show_as_a_gap_or_stay_suspect() {
    let mut rig = joined();
    rig.live(0);
    assert_eq!(rig.cursor.overflowed(), None);
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.live(3);
    assert_eq!(rig.suspect(), Some(Doubt::Gap));
}
