//! The sequence rules one by one, then a publisher that loses frames, restarts and forgets.

use super::*;
use proptest::prelude::*;

/// The frame `seq` that a process which started at `born` publishes: made one second after the one before it.
fn frame(born: f64, seq: u64) -> Bytes {
    let mut out = vec![0x92, 0xcb];
    out.extend_from_slice(&(born + seq as f64).to_be_bytes());
    out.push(0x90);
    out.into()
}

/// Remembers what was applied since the last clearing, by timestamp.
#[derive(Default)]
struct Log {
    applied: Vec<f64>,
    clears: u32,
    restarts: u32,
    relearned: bool,
    next_outcome: Outcome,
}

impl Apply for Log {
    fn apply(&mut self, payload: &[u8]) -> Outcome {
        self.applied.push(wire::timestamp(payload).unwrap());
        std::mem::take(&mut self.next_outcome)
    }

    fn clear(&mut self) {
        self.applied.clear();
        self.clears += 1;
    }

    fn restart(&mut self) {
        self.applied.clear();
        self.restarts += 1;
    }

    fn relearned(&self) -> bool {
        self.relearned
    }
}

struct Rig {
    cursor: Cursor,
    log: Log,
    stats: Arc<KvEventStats>,
}

const BORN: f64 = 1000.0;

impl Rig {
    fn new(replayable: bool) -> Self {
        Self::with_backlog(replayable, 100)
    }

    fn with_backlog(replayable: bool, frames: usize) -> Self {
        let stats: Arc<KvEventStats> = Arc::default();
        let cursor = Cursor::new(replayable, Backlog { frames, bytes: 1 << 20 }, stats.clone());
        Self { cursor, log: Log::default(), stats }
    }

    fn live(&mut self, seq: u64) -> Option<Ask> {
        self.live_from(BORN, seq)
    }

    fn live_from(&mut self, born: f64, seq: u64) -> Option<Ask> {
        self.cursor.live(seq, frame(born, seq), &mut self.log)
    }

    fn replayed(&mut self, seq: u64) -> Option<Ask> {
        self.cursor.replayed(seq, &frame(BORN, seq), &mut self.log)
    }

    fn end(&mut self, end: End) -> Option<Ask> {
        self.cursor.replay_ended(end, &mut self.log)
    }

    /// What is in the log, as sequence numbers of the process that started at `born`.
    fn applied(&self, born: f64) -> Vec<u64> {
        self.log.applied.iter().map(|t| (t - born) as u64).collect()
    }

    fn suspect(&self) -> Option<Doubt> {
        match self.cursor.trust() {
            Trust::Suspect(doubt) => Some(doubt),
            _ => None,
        }
    }
}

mod without_replay {
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
}

mod with_replay {
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
        assert!(rig.cursor.is_deaf(), "the connection has not brought them");
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
        assert!(!rig.cursor.is_deaf(), "it came both ways");
        assert_eq!(rig.cursor.check(), Some(Ask(5)));
        for left in (0..3).rev() {
            assert_eq!(rig.end(End::Failed), (left > 0).then_some(Ask(5)));
        }
        assert_eq!(rig.cursor.trust(), Trust::Exact, "a replay socket that is busy proves nothing");
        assert_eq!(rig.live(8), Some(Ask(5)), "and is asked when something is missing");
        rig.end(End::Complete);
        assert_eq!(rig.log.restarts, 1);
    }
}

/// A publisher with a ring, a connection that loses frames, and a replay socket that fails now and then.
#[derive(Debug, Clone)]
enum Happening {
    Publish {
        arrives: bool,
    },
    /// A process that dies takes its connections with it.
    Restart,
    Reconnect,
    /// The replay that runs brings so many frames.
    Answers(usize),
    ReplayFails,
    Overflow,
    Check,
    Retry,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => any::<bool>().prop_map(|arrives| Happening::Publish { arrives }),
        1 => Just(Happening::Restart),
        1 => Just(Happening::Reconnect),
        4 => (0usize..6).prop_map(Happening::Answers),
        1 => Just(Happening::ReplayFails),
        1 => Just(Happening::Overflow),
        1 => Just(Happening::Check),
        1 => Just(Happening::Retry),
    ]
}

struct World {
    rig: Rig,
    born: f64,
    published: u64,
    ring: usize,
    /// What the replay that runs has still to bring.
    answers: Option<VecDeque<u64>>,
    replayable: bool,
}

impl World {
    fn act(&mut self, ask: Option<Ask>) {
        if let Some(Ask(from)) = ask {
            let oldest = self.published.saturating_sub(self.ring as u64);
            self.answers = Some((from.max(oldest)..self.published).collect());
        }
    }

    /// Brings up to `n` frames of the replay that runs, and its end when nothing is left.
    fn answer(&mut self, n: usize) {
        for _ in 0..n {
            let Some(answers) = &mut self.answers else { return };
            let ask = match answers.pop_front() {
                Some(seq) => self.rig.cursor.replayed(seq, &frame(self.born, seq), &mut self.rig.log),
                None => {
                    self.answers = None;
                    self.rig.end(End::Complete)
                }
            };
            self.act(ask);
        }
    }

    fn happen(&mut self, what: Happening) {
        let ask = match what {
            Happening::Publish { arrives } => {
                let seq = self.published;
                self.published += 1;
                if arrives { self.rig.live_from(self.born, seq) } else { None }
            }
            Happening::Restart => {
                self.born += 100_000.0;
                self.published = 0;
                self.reconnect();
                None
            }
            Happening::Reconnect => {
                self.reconnect();
                None
            }
            Happening::Answers(n) => {
                self.answer(n);
                None
            }
            Happening::ReplayFails if self.answers.take().is_some() => self.rig.end(End::Failed),
            Happening::ReplayFails => None,
            Happening::Overflow => self.rig.cursor.overflowed(),
            Happening::Check => self.rig.cursor.check(),
            Happening::Retry => self.rig.cursor.retry(),
        };
        self.act(ask);
    }

    fn reconnect(&mut self) {
        self.rig.cursor.disconnected();
        self.answers = None;
        let ask = self.rig.cursor.connected();
        self.act(ask);
    }

    /// What is known is one unbroken stretch of one process.
    fn unbroken(&self) -> bool {
        self.rig.log.applied.windows(2).all(|w| w[1] - w[0] == 1.0)
    }
}

proptest! {
    #[test]
    fn whatever_happens_nothing_false_is_known_and_in_the_end_everything_is(
        replayable in any::<bool>(),
        ring in 1usize..20,
        backlog in 1usize..8,
        history in proptest::collection::vec(happening(), 0..120),
    ) {
        let rig = Rig::with_backlog(replayable, backlog);
        let mut world = World { rig, born: BORN, published: 0, ring, answers: None, replayable };
        world.reconnect();
        // Without replay, a new process that happens to go on with the old one's numbers can't be told from it.
        let detectable = replayable || !history.iter().any(|h| matches!(h, Happening::Restart));
        for what in history {
            world.happen(what);
            prop_assert!(world.unbroken() || !detectable, "{:?}", world.rig.log.applied);
            prop_assert_eq!(world.answers.is_some(), world.rig.cursor.replay.is_some());
        }
        if !world.replayable {
            return Ok(());
        }
        // The world calms down: replays answer, frames arrive, silence is looked into.
        for _ in 0..4 {
            while world.answers.is_some() {
                world.answer(8);
            }
            world.happen(Happening::Publish { arrives: true });
            world.happen(Happening::Retry);
            world.happen(Happening::Check);
        }
        prop_assert!(world.unbroken());
        // Nothing was said before frame 0.
        let whole = world.rig.log.applied.first() == Some(&world.born);
        prop_assert_eq!(world.rig.cursor.trust(), if whole { Trust::Exact } else { Trust::Incomplete });
        let last = world.born + (world.published - 1) as f64;
        prop_assert_eq!(world.rig.log.applied.last(), Some(&last));
        let held = world.rig.log.applied.len() as u64;
        prop_assert!(held >= world.published.min(world.ring as u64), "{} of {}", held, world.published);
    }
}
