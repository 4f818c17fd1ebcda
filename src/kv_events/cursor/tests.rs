//! The sequence rules one by one, then a publisher that loses frames, restarts and discards old ones.

mod with_replay;
mod without_replay;

use super::*;
use proptest::prelude::*;

/// Frame `seq` of a process that started at `born`; each frame is made one second after the one before it.
fn frame(born: f64, seq: u64) -> Bytes {
    let mut out = vec![0x92, 0xcb];
    out.extend_from_slice(&(born + seq as f64).to_be_bytes());
    out.push(0x90);
    out.into()
}

/// The frames that were applied since the last clearing, by timestamp.
#[derive(Default)]
struct Log {
    applied: Vec<f64>,
    clears: u32,
    restarts: u32,
    relearned: bool,
    next_outcome: BatchEffect,
}

impl Apply for Log {
    fn apply(&mut self, payload: &[u8]) -> BatchEffect {
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

    fn end(&mut self, end: ReplayEnd) -> Option<Ask> {
        self.cursor.replay_ended(end, &mut self.log)
    }

    /// The log as sequence numbers of the process that started at `born`.
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

/// A publisher with a ring, a connection that loses frames, and a replay socket that sometimes fails.
#[derive(Debug, Clone)]
enum Happening {
    Publish {
        arrives: bool,
    },
    /// A process that ends closes its connections.
    Restart,
    Reconnect,
    /// The running replay returns this many frames.
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
    /// The remaining frames of the running replay.
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

    /// Returns up to `n` frames of the running replay, and its end when none is left.
    fn answer(&mut self, n: usize) {
        for _ in 0..n {
            let Some(answers) = &mut self.answers else { return };
            let ask = match answers.pop_front() {
                Some(seq) => self.rig.cursor.replayed(seq, &frame(self.born, seq), &mut self.rig.log),
                None => {
                    self.answers = None;
                    self.rig.end(ReplayEnd::Complete)
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
            Happening::ReplayFails if self.answers.take().is_some() => self.rig.end(ReplayEnd::Failed),
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

    /// Whether the known frames are one sequence of one process without gaps.
    fn unbroken(&self) -> bool {
        self.rig.log.applied.windows(2).all(|w| w[1] - w[0] == 1.0)
    }
}

proptest! {
    #[test]
    fn any_history_leads_to_no_false_and_finally_complete_knowledge(
        replayable in any::<bool>(),
        ring in 1usize..20,
        backlog in 1usize..8,
        history in proptest::collection::vec(happening(), 0..120),
    ) {
        let rig = Rig::with_backlog(replayable, backlog);
        let mut world = World { rig, born: BORN, published: 0, ring, answers: None, replayable };
        world.reconnect();
        // Without replay, a new process that continues the old one's numbers cannot be detected.
        let detectable = replayable || !history.iter().any(|h| matches!(h, Happening::Restart));
        for what in history {
            world.happen(what);
            prop_assert!(world.unbroken() || !detectable, "{:?}", world.rig.log.applied);
            prop_assert_eq!(world.answers.is_some(), world.rig.cursor.replay.is_some());
        }
        if !world.replayable {
            return Ok(());
        }
        // Failures end: replays succeed, frames arrive, silence is checked.
        for _ in 0..4 {
            while world.answers.is_some() {
                world.answer(8);
            }
            world.happen(Happening::Publish { arrives: true });
            world.happen(Happening::Retry);
            world.happen(Happening::Check);
        }
        prop_assert!(world.unbroken());
        // Frame 0 is the first one of the process.
        let whole = world.rig.log.applied.first() == Some(&world.born);
        prop_assert_eq!(world.rig.cursor.trust(), if whole { Trust::Exact } else { Trust::Incomplete });
        let last = world.born + (world.published - 1) as f64;
        prop_assert_eq!(world.rig.log.applied.last(), Some(&last));
        let held = world.rig.log.applied.len() as u64;
        prop_assert!(held >= world.published.min(world.ring as u64), "{} of {}", held, world.published);
    }
}
