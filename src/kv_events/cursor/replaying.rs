//! Frames of a replay, its end, and the backlog of live frames, which is processed after it.

use super::super::stats::Count;
use super::{Apply, Ask, Cursor, Knowledge, MAX_FAILED_REPLAYS, Purpose, Replay, ReplayEnd};
use attache_prefix::trust::Doubt;
use attache_prefix::wire;
use bytes::Bytes;

impl Cursor {
    /// Processes a frame from a replay.
    pub(crate) fn replayed<A: Apply>(&mut self, seq: u64, payload: &[u8], to: &mut A) -> Option<Ask> {
        let replay = self.replay.as_mut()?;
        self.stats.add(Count::ReplayedFrames, 1);
        if replay.purpose == Purpose::Anew && !replay.proven {
            // The replay works: the old state is discarded now, and not earlier.
            to.clear();
            self.next = None;
            self.knowledge = Knowledge::Nothing;
        }
        let Some(next) = self.next else {
            replay.proven = true;
            replay.found_frames = true;
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
        replay.found_frames = true;
        if seq > next || !proven {
            // The ring has lost the missing frames, or the frame that would prove the process unchanged. The old state
            // may be wrong; later events are certain.
            self.stats.add(Count::ReplaysTruncated, 1);
            to.clear();
            self.knowledge = Knowledge::Recent;
        }
        self.apply(seq, payload, to);
        None
    }

    /// Processes the end of a replay.
    pub(crate) fn replay_ended<A: Apply>(&mut self, end: ReplayEnd, to: &mut A) -> Option<Ask> {
        let replay = self.replay.take()?;
        if end == ReplayEnd::Failed {
            return self.replay_failed(replay, to);
        }
        self.failed_replays = 0;
        match self.next {
            Some(next) if replay.purpose == Purpose::Anew && !replay.proven => {
                // The ring is empty although frames have arrived: replays cannot help.
                self.given_up = next > 0;
            }
            Some(next) if next > 0 && !replay.proven => {
                // The replay did not return the last known frame: another process runs, which has published fewer.
                self.deaf |= replay.purpose == Purpose::Check;
                self.restarted(to);
                return self.ask(Purpose::Fill);
            }
            None => {
                // The publisher has not published anything yet.
                self.next = Some(0);
                self.knowledge = Knowledge::Whole;
            }
            Some(_) => {}
        }
        self.unproven = false;
        self.owed |= replay.purpose == Purpose::Check && replay.found_frames && self.backlog.is_empty();
        self.last_replay_empty = !replay.found_frames;
        let ask = self.resume(to);
        self.last_replay_empty = false;
        ask
    }

    fn replay_failed<A: Apply>(&mut self, replay: Replay, to: &mut A) -> Option<Ask> {
        self.stats.add(Count::ReplaysFailed, 1);
        self.failed_replays = if replay.found_frames { 0 } else { self.failed_replays + 1 };
        let purpose = match replay.purpose {
            // Its first frames were applied, so only later ones are missing.
            Purpose::Anew if replay.proven => Purpose::Fill,
            purpose => purpose,
        };
        if self.failed_replays < MAX_FAILED_REPLAYS {
            return self.ask(purpose);
        }
        self.failed_replays = 0;
        if self.knowledge == Knowledge::Nothing {
            self.knowledge = Knowledge::Partial(Doubt::ReplayFailed);
        }
        if purpose == Purpose::Check && !self.overflowed {
            // Nothing indicates missing frames; the next check follows at its time.
            return self.resume(to);
        }
        self.given_up = true;
        self.unproven = self.next.is_some();
        self.resume(to)
    }

    /// Processes the frames of the backlog.
    fn resume<A: Apply>(&mut self, to: &mut A) -> Option<Ask> {
        self.backlog_bytes = 0;
        let mut ask = None;
        for (seq, payload) in std::mem::take(&mut self.backlog) {
            // When one of them requests a replay, the others wait again.
            ask = ask.or(self.live(seq, payload, to));
        }
        if ask.is_none() && std::mem::take(&mut self.overflowed) {
            self.unproven = true;
            ask = self.ask(Purpose::Fill);
        }
        ask
    }

    pub(super) fn wait(&mut self, seq: u64, payload: Bytes) {
        let bytes = self.backlog_bytes + payload.len();
        if self.overflowed || self.backlog.len() >= self.bounds.frames || bytes > self.bounds.bytes {
            // Later frames must not overtake the backlog; they are fetched when this replay has ended.
            self.overflowed = true;
            self.stats.add(Count::OverflowFrames, 1);
            return;
        }
        self.backlog_bytes = bytes;
        self.backlog.push_back((seq, payload));
    }
}
