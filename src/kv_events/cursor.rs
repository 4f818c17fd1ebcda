//! The sequence of one publisher's frames: what is next, what is missing, what must be asked for again.
//!
//! A publisher numbers its frames from 0, per process. Frames may be lost (it drops when we are slow), the publisher may be another
//! process at the same address, and what was missed can be replayed if it keeps a ring. The cursor is sans-IO: [`super::lane`] tells it
//! what comes, and does what it asks for. Frames that come while a replay runs wait in a bounded backlog.
//!
//! Whether the process is the same after a reconnection is found out by asking for the last frame that we have: the same process gives
//! it back with the same timestamp, another one gives another frame or none.

use super::apply::Outcome;
use super::stats::{Count, KvEventStats};
use attache_prefix::trust::{Doubt, Trust};
use attache_prefix::wire;
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

/// Replays in a row that may bring nothing before we give up for a while.
const FRUITLESS_REPLAYS: u32 = 3;

/// Seconds by which what a process says of its start may be off. None publishes so soon after it.
const CLOCK_SLACK: f64 = 1.0;

/// What the cursor does with frames.
pub(super) trait Apply {
    /// The next batch.
    fn apply(&mut self, payload: &[u8]) -> Outcome;
    /// Frames were lost: what is known may be wrong.
    fn clear(&mut self);
    /// The publisher is another process.
    fn restart(&mut self);
    /// As much is known again as an engine of this size holds, though events were lost. That is no proof that it is the same.
    fn relearned(&self) -> bool;
}

/// Frames that may wait while a replay runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backlog {
    pub(super) frames: usize,
    pub(super) bytes: usize,
}

/// Ask for a replay from this number on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask(pub(super) u64);

/// How a replay has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With its end marker.
    Complete,
    /// Without.
    Failed,
}

/// What is known of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knowledge {
    Nothing,
    Whole,
    /// All since some frame: the oldest of the publisher's ring, or one behind a gap that was long ago. Only what begins anew (a cleared
    /// cache, another process) or a replay of everything makes it whole.
    Recent,
    Partial(Doubt),
}

/// Why a replay runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To fetch what is missing.
    Fill,
    /// To see whether anything is missing.
    Check,
    /// To learn everything anew.
    Anew,
}

#[derive(Clone, Copy, Debug)]
struct Replay {
    purpose: Purpose,
    /// The last frame that we have came back as we know it.
    proven: bool,
    /// It brought a frame that we did not have.
    fruitful: bool,
}

/// A publisher's sequence.
#[derive(Debug)]
pub(super) struct Cursor {
    replayable: bool,
    bounds: Backlog,
    stats: Arc<KvEventStats>,
    /// The number that comes next; `None` when the publisher's process is not known yet.
    next: Option<u64>,
    /// When the first frame of this process that came was made, and the one before `next`.
    first_timestamp: Option<f64>,
    last_timestamp: Option<f64>,
    knowledge: Knowledge,
    connected: bool,
    /// The connection was broken and nothing has shown yet what was missed.
    unproven: bool,
    replay: Option<Replay>,
    fruitless: u32,
    /// Replays don't answer: gaps are taken as final until [`Cursor::retry`].
    given_up: bool,
    /// The replay that has just ended brought nothing: it need not be asked about the same gap again.
    barren: bool,
    backlog: VecDeque<(u64, Bytes)>,
    backlog_bytes: usize,
    overflowed: bool,
    /// A check has brought what the connection has not. It may be on its way still: nobody orders what comes by two connections.
    owed: bool,
    /// The connection does not bring what it should.
    deaf: bool,
}

impl Cursor {
    /// A cursor that knows nothing. `replayable`: the publisher keeps a ring that can be asked.
    pub(super) fn new(replayable: bool, bounds: Backlog, stats: Arc<KvEventStats>) -> Self {
        Self {
            replayable,
            bounds,
            stats,
            next: None,
            first_timestamp: None,
            last_timestamp: None,
            knowledge: Knowledge::Nothing,
            connected: false,
            unproven: false,
            replay: None,
            fruitless: 0,
            given_up: false,
            barren: false,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            overflowed: false,
            owed: false,
            deaf: false,
        }
    }

    /// How far the holder may be believed.
    pub(super) fn trust(&self) -> Trust {
        let interrupted = !self.connected || self.unproven;
        match (self.knowledge, self.replay) {
            _ if self.next.is_none() && self.replay.is_none() && !self.connected => Trust::Unknown,
            (_, None) if interrupted && self.next.is_some() => Trust::Suspect(Doubt::Interrupted),
            (Knowledge::Whole, Some(Replay { purpose: Purpose::Check, .. })) if !interrupted => Trust::Exact,
            (Knowledge::Recent, Some(Replay { purpose: Purpose::Check, .. })) if !interrupted => Trust::Incomplete,
            (_, Some(_)) => Trust::Syncing,
            (Knowledge::Nothing, None) => Trust::Unknown,
            (Knowledge::Whole, None) => Trust::Exact,
            (Knowledge::Recent, None) => Trust::Incomplete,
            (Knowledge::Partial(doubt), None) => Trust::Suspect(doubt),
        }
    }

    /// Whether nothing is missing that a replay could bring now.
    pub(super) fn is_idle(&self) -> bool {
        self.connected && self.replay.is_none()
    }

    /// Whether another replay, later, is the way back.
    pub(super) fn wants_retry(&self) -> bool {
        self.is_idle() && self.replayable && (self.unproven || matches!(self.knowledge, Knowledge::Partial(_)))
    }

    /// Whether the connection has still to bring what a check has brought.
    pub(super) fn is_owed(&self) -> bool {
        self.owed
    }

    /// The connection has had its time to bring what a check has brought.
    pub(super) fn overdue(&mut self) {
        self.deaf |= std::mem::take(&mut self.owed);
    }

    /// Whether the connection has been found to bring nothing: it is to be replaced.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// The publisher's process has started at `moment` (Unix time, seconds), as its page of metrics tells. Where there is a replay, that
    /// has mostly shown it already; else the numbers of the new process may have gone on where those of the old one ended.
    pub(super) fn process_started<A: Apply>(&mut self, moment: f64, to: &mut A) -> Option<Ask> {
        if self.replay.is_some() || self.first_timestamp.is_none_or(|first| first + CLOCK_SLACK >= moment) {
            return None;
        }
        self.restarted(to);
        if self.connected { self.ask(Purpose::Fill) } else { None }
    }

    /// The pool's blocks are of another size than before; `fits`: of that of the publisher's. What it has told while they were not is
    /// missing: where there is a replay it is learned anew at once, else as after any gap, by what comes.
    pub(super) fn resized<A: Apply>(&mut self, fits: bool, to: &mut A) -> Option<Ask> {
        match (fits, self.knowledge) {
            (true, Knowledge::Partial(Doubt::BlockSize)) => {
                self.knowledge = Knowledge::Partial(Doubt::Gap);
                self.retry()
            }
            (true, _) | (false, Knowledge::Partial(Doubt::BlockSize)) => None,
            (false, _) => {
                to.clear();
                self.knowledge = Knowledge::Partial(Doubt::BlockSize);
                None
            }
        }
    }

    /// There is a connection, the first or a new one.
    pub(super) fn connected(&mut self) -> Option<Ask> {
        self.connected = true;
        (self.owed, self.deaf) = (false, false);
        self.given_up = false;
        self.fruitless = 0;
        self.unproven = self.next.is_some();
        self.ask(Purpose::Fill)
    }

    /// The connection is gone; a replay that runs goes with it.
    pub(super) fn disconnected(&mut self) {
        self.connected = false;
        self.replay = None;
        self.drop_backlog();
    }

    /// Frames were dropped on their way here, nobody knows how many.
    pub(super) fn overflowed(&mut self) -> Option<Ask> {
        if self.replay.is_some() {
            self.overflowed = true;
            return None;
        }
        self.unproven = self.next.is_some();
        self.ask(Purpose::Fill)
    }

    /// Looks whether the last frame that we have is the last that there is.
    pub(super) fn check(&mut self) -> Option<Ask> {
        if self.is_idle() && self.next.is_some() { self.ask(Purpose::Check) } else { None }
    }

    /// Asks again, after replays that failed or a doubt that only learning everything anew can clear.
    pub(super) fn retry(&mut self) -> Option<Ask> {
        if !self.wants_retry() {
            return None;
        }
        self.given_up = false;
        self.fruitless = 0;
        let partial = matches!(self.knowledge, Knowledge::Partial(_));
        self.ask(if partial { Purpose::Anew } else { Purpose::Fill })
    }

    fn ask(&mut self, purpose: Purpose) -> Option<Ask> {
        if !self.replayable || self.given_up {
            return None;
        }
        self.stats.add(Count::Replays, 1);
        self.replay = Some(Replay { purpose, proven: false, fruitful: false });
        let from = if purpose == Purpose::Anew { 0 } else { self.next.unwrap_or(0).saturating_sub(1) };
        Some(Ask(from))
    }

    /// A frame came live.
    pub(super) fn live<A: Apply>(&mut self, seq: u64, payload: Bytes, to: &mut A) -> Option<Ask> {
        self.owed = false;
        if self.replay.is_some() {
            self.wait(seq, payload);
            return None;
        }
        let unproven = std::mem::take(&mut self.unproven);
        if let Some(next) = self.next {
            // The next number proves nothing on a new connection; where there is a replay, it is asked, and must have failed here.
            if seq == next && !(unproven && self.replayable) {
                self.apply(seq, &payload, to);
                return None;
            }
            if seq >= next {
                return self.gap(seq, payload, to);
            }
            // Replays overlap with what comes live; only a new process begins again with later frames.
            let newer = wire::timestamp(&payload) > self.last_timestamp;
            let fresh = unproven && !self.replayable;
            if !fresh && !newer {
                self.stats.add(Count::Duplicates, 1);
                return None;
            }
            self.restarted(to);
        }
        if seq == 0 {
            self.knowledge = Knowledge::Whole;
            self.apply(seq, &payload, to);
            return None;
        }
        if let Some(ask) = self.ask(Purpose::Fill) {
            self.wait(seq, payload);
            return Some(ask);
        }
        self.knowledge = Knowledge::Partial(if self.given_up { Doubt::ReplayFailed } else { Doubt::JoinedLate });
        self.apply(seq, &payload, to);
        None
    }

    /// Frames are missing between what we have and `seq`.
    fn gap<A: Apply>(&mut self, seq: u64, payload: Bytes, to: &mut A) -> Option<Ask> {
        self.stats.add(Count::Gaps, 1);
        if !std::mem::take(&mut self.barren)
            && let Some(ask) = self.ask(Purpose::Fill)
        {
            self.wait(seq, payload);
            return Some(ask);
        }
        // Removals may be among what is lost: only what comes from now on is certain.
        to.clear();
        self.knowledge = Knowledge::Partial(if self.given_up { Doubt::ReplayFailed } else { Doubt::Gap });
        self.apply(seq, &payload, to);
        None
    }

    /// A frame came by replay.
    pub(super) fn replayed<A: Apply>(&mut self, seq: u64, payload: &[u8], to: &mut A) -> Option<Ask> {
        let replay = self.replay.as_mut()?;
        self.stats.add(Count::ReplayedFrames, 1);
        if replay.purpose == Purpose::Anew && !replay.proven {
            // It answers: now, and not before, the old knowledge goes.
            to.clear();
            self.next = None;
            self.knowledge = Knowledge::Nothing;
        }
        let Some(next) = self.next else {
            replay.proven = true;
            replay.fruitful = true;
            self.knowledge = Knowledge::Whole;
            if seq > 0 {
                self.stats.add(Count::ReplaysTruncated, 1);
                self.knowledge = Knowledge::Recent;
            }
            self.apply(seq, payload, to);
            return None;
        };
        if seq.checked_add(1) == Some(next) && !replay.proven {
            if wire::timestamp(payload) == self.last_timestamp {
                replay.proven = true;
                return None;
            }
            self.deaf |= replay.purpose == Purpose::Check;
            self.restarted(to);
            return self.ask(Purpose::Fill);
        }
        if seq < next {
            return None;
        }
        let proven = std::mem::replace(&mut replay.proven, true) || next == 0;
        replay.fruitful = true;
        if seq > next || !proven {
            // The ring no longer has what was missing, or not even the frame that would show that the process is the same: what is known
            // may be wrong, what comes is certain.
            self.stats.add(Count::ReplaysTruncated, 1);
            to.clear();
            self.knowledge = Knowledge::Recent;
        }
        self.apply(seq, payload, to);
        None
    }

    /// The replay has ended.
    pub(super) fn replay_ended<A: Apply>(&mut self, end: End, to: &mut A) -> Option<Ask> {
        let replay = self.replay.take()?;
        if end == End::Failed {
            return self.replay_failed(replay, to);
        }
        self.fruitless = 0;
        match self.next {
            Some(next) if replay.purpose == Purpose::Anew && !replay.proven => {
                // An empty ring, though frames have come: it is no ring that could teach us anything.
                self.given_up = next > 0;
            }
            Some(next) if next > 0 && !replay.proven => {
                // Not even the last frame that we have: this process has not got that far.
                self.deaf |= replay.purpose == Purpose::Check;
                self.restarted(to);
                return self.ask(Purpose::Fill);
            }
            None => {
                // Nothing was ever published.
                self.next = Some(0);
                self.knowledge = Knowledge::Whole;
            }
            Some(_) => {}
        }
        self.unproven = false;
        self.owed |= replay.purpose == Purpose::Check && replay.fruitful && self.backlog.is_empty();
        self.barren = !replay.fruitful;
        let ask = self.resume(to);
        self.barren = false;
        ask
    }

    fn replay_failed<A: Apply>(&mut self, replay: Replay, to: &mut A) -> Option<Ask> {
        self.stats.add(Count::ReplaysFailed, 1);
        self.fruitless = if replay.fruitful { 0 } else { self.fruitless + 1 };
        let purpose = match replay.purpose {
            // Once it has begun to bring frames, what is missing is behind them.
            Purpose::Anew if replay.proven => Purpose::Fill,
            purpose => purpose,
        };
        if self.fruitless < FRUITLESS_REPLAYS {
            return self.ask(purpose);
        }
        self.fruitless = 0;
        if self.knowledge == Knowledge::Nothing {
            self.knowledge = Knowledge::Partial(Doubt::ReplayFailed);
        }
        if purpose == Purpose::Check && !self.overflowed {
            // Nothing says that anything is missing; it is looked at again at its time.
            return self.resume(to);
        }
        self.given_up = true;
        self.unproven = self.next.is_some();
        self.resume(to)
    }

    /// Takes up what waited.
    fn resume<A: Apply>(&mut self, to: &mut A) -> Option<Ask> {
        self.backlog_bytes = 0;
        let mut ask = None;
        for (seq, payload) in std::mem::take(&mut self.backlog) {
            // Once one of them asks, the others wait again.
            ask = ask.or(self.live(seq, payload, to));
        }
        if ask.is_none() && std::mem::take(&mut self.overflowed) {
            self.unproven = true;
            ask = self.ask(Purpose::Fill);
        }
        ask
    }

    fn wait(&mut self, seq: u64, payload: Bytes) {
        let bytes = self.backlog_bytes + payload.len();
        if self.overflowed || self.backlog.len() >= self.bounds.frames || bytes > self.bounds.bytes {
            // What follows must not jump the queue; it is fetched when this replay has ended.
            self.overflowed = true;
            self.stats.add(Count::OverflowFrames, 1);
            return;
        }
        self.backlog_bytes = bytes;
        self.backlog.push_back((seq, payload));
    }

    fn drop_backlog(&mut self) {
        self.backlog.clear();
        self.backlog_bytes = 0;
        self.overflowed = false;
    }

    fn restarted<A: Apply>(&mut self, to: &mut A) {
        self.stats.add(Count::Restarts, 1);
        to.restart();
        self.next = None;
        self.first_timestamp = None;
        self.last_timestamp = None;
        self.knowledge = Knowledge::Nothing;
    }

    fn apply<A: Apply>(&mut self, seq: u64, payload: &[u8], to: &mut A) {
        self.next = Some(seq.saturating_add(1));
        self.last_timestamp = wire::timestamp(payload);
        self.first_timestamp = self.first_timestamp.or(self.last_timestamp);
        let Outcome { cleared, doubt } = to.apply(payload);
        if cleared {
            self.knowledge = Knowledge::Whole;
        }
        if let Some(doubt) = doubt {
            to.clear();
            self.knowledge = Knowledge::Partial(doubt);
        } else if !self.replayable && matches!(self.knowledge, Knowledge::Partial(_)) && to.relearned() {
            self.knowledge = Knowledge::Recent;
        }
    }
}

#[cfg(test)]
mod tests;
