//! Publishers that tell everything once.

use super::*;

fn joined() -> Rig {
    let mut rig = Rig::new(false);
    assert_eq!(rig.cursor.trust(), Trust::Unknown);
    assert_eq!(rig.cursor.connected(), None);
    assert_eq!(rig.cursor.trust(), Trust::Unknown);
    rig
}

#[test]
fn who_hears_everything_is_exact() {
    let mut rig = joined();
    for seq in 0..5 {
        assert_eq!(rig.live(seq), None);
        assert_eq!(rig.cursor.trust(), Trust::Exact);
    }
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3, 4]);
    assert_eq!(rig.cursor.check(), None, "there is nobody to ask");
}

#[test]
fn who_comes_late_is_suspect_until_much_is_known_and_never_exact() {
    let mut rig = joined();
    rig.live(7);
    assert_eq!(rig.suspect(), Some(Doubt::JoinedLate));
    rig.live(8);
    assert_eq!(rig.suspect(), Some(Doubt::JoinedLate));
    rig.log.relearned = true;
    rig.live(9);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete, "as much is not the same");
    assert_eq!(rig.applied(BORN), [7, 8, 9]);
    rig.live(10);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete);
    rig.log.next_outcome = Outcome { cleared: true, doubt: None };
    rig.live(11);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn a_gap_voids_what_was_known() {
    let mut rig = joined();
    rig.live(0);
    rig.live(1);
    rig.live(4);
    assert_eq!((rig.suspect(), rig.applied(BORN)), (Some(Doubt::Gap), vec![4]));
    assert_eq!(rig.stats.get(Count::Gaps), 1);
    // The engine says that it holds nothing: from here on all is known.
    rig.log.next_outcome = Outcome { cleared: true, doubt: None };
    rig.live(5);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn what_cannot_be_read_is_as_good_as_lost() {
    let mut rig = joined();
    rig.live(0);
    rig.log.next_outcome = Outcome { cleared: false, doubt: Some(Doubt::Undecodable) };
    rig.live(1);
    assert_eq!((rig.suspect(), rig.log.clears), (Some(Doubt::Undecodable), 1));
    rig.log.relearned = true;
    rig.live(2);
    assert_eq!(rig.cursor.trust(), Trust::Incomplete);
}

#[test]
fn a_process_whose_numbers_go_on_where_the_last_one_ended_is_told_by_its_start() {
    let born = BORN + 500.0;
    let mut rig = joined();
    rig.live(0);
    rig.live(1);
    rig.cursor.disconnected();
    rig.cursor.connected();
    rig.live_from(born, 2);
    assert_eq!(rig.cursor.trust(), Trust::Exact, "it looks like the same");
    assert_eq!(rig.cursor.process_started(BORN - 60.0, &mut rig.log), None);
    assert_eq!(rig.log.restarts, 0, "it is the start of the one that is known");
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    assert_eq!((rig.log.restarts, rig.cursor.trust()), (1, Trust::Unknown));
    rig.live_from(born, 3);
    assert_eq!((rig.applied(born), rig.suspect()), (vec![3], Some(Doubt::JoinedLate)));
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    assert_eq!(rig.log.restarts, 1);

    // Told before it speaks, its first frame is taken for what it is.
    rig.cursor.disconnected();
    let born = born + 500.0;
    assert_eq!(rig.cursor.process_started(born - 60.0, &mut rig.log), None);
    rig.cursor.connected();
    rig.live_from(born, 0);
    assert_eq!((rig.applied(born), rig.cursor.trust()), (vec![0], Trust::Exact));
    assert_eq!(rig.log.restarts, 2);
}

#[test]
fn frames_seen_before_are_ignored() {
    let mut rig = joined();
    for seq in [0, 1, 2, 1, 2, 0, 3] {
        rig.live(seq);
    }
    assert_eq!(rig.applied(BORN), [0, 1, 2, 3]);
    assert_eq!(rig.stats.get(Count::Duplicates), 3);
    assert_eq!(rig.cursor.trust(), Trust::Exact);
}

#[test]
fn numbers_that_begin_again_are_a_restart() {
    let mut rig = joined();
    (0..5).for_each(|seq| {
        rig.live(seq);
    });
    let born = BORN + 500.0;
    rig.live_from(born, 0);
    assert_eq!((rig.log.restarts, rig.applied(born)), (1, vec![0]));
    assert_eq!(rig.cursor.trust(), Trust::Exact);
    rig.live_from(born, 1);
    // Of the next process the first frames are lost.
    rig.live_from(born + 500.0, 1);
    assert_eq!((rig.log.restarts, rig.suspect()), (2, Some(Doubt::JoinedLate)));
}

#[test]
fn a_new_connection_must_show_that_nothing_was_missed() {
    let mut rig = joined();
    rig.live(0);
    rig.cursor.disconnected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.cursor.connected();
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.live(1);
    assert_eq!((rig.cursor.trust(), rig.applied(BORN)), (Trust::Exact, vec![0, 1]));
    // A new process whose clock is behind: numbers that go backwards on a new connection are enough.
    rig.cursor.disconnected();
    rig.cursor.connected();
    rig.live_from(BORN - 500.0, 0);
    assert_eq!((rig.log.restarts, rig.cursor.trust()), (1, Trust::Exact));
}

#[test]
fn dropped_frames_show_as_a_gap_or_keep_it_suspect() {
    let mut rig = joined();
    rig.live(0);
    assert_eq!(rig.cursor.overflowed(), None);
    assert_eq!(rig.suspect(), Some(Doubt::Interrupted));
    rig.live(3);
    assert_eq!(rig.suspect(), Some(Doubt::Gap));
}
