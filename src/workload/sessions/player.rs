//! The player of sessions: a turn is sent when the turns that it waits for have ended, or at its recorded time.

use super::{Session, SessionTrace, Turn};
use crate::pace::{MAX_CV, MAX_RATE, checked, seconds};
use crate::{Request, Speaker, TraceError, Workload, draw};
use attache_sim::content::mix;
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use attache_types::program::ProgramTurn;
use attache_types::rng::for_request;
use rand::RngExt;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// 30 s between the beginnings of two sessions, where the trace does not say when they began: about 50 recorded coding
/// sessions at a time.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(30);
/// 5 min. A prefix that was not used for longer is hardly cached anywhere, so longer pauses only lengthen the run.
pub const DEFAULT_MAX_PAUSE: Duration = Duration::from_secs(300);

/// When sessions begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// At equal distances, the first one at once.
    Every(Duration),
    /// With gamma gaps: mean number of sessions a second, and deviation of the gaps by their mean (1 is Poisson).
    Gaps {
        /// Sessions a second, above 0.
        rate: f64,
        /// Coefficient of variation, above 0.
        cv: f64,
    },
}

impl Arrival {
    /// On the mean `rate` sessions a second; the deviation of the gaps is `cv` times their mean.
    ///
    /// # Errors
    /// When `rate` or `cv` is not above 0 and at most [`MAX_RATE`] or [`MAX_CV`].
    pub fn gaps(rate: f64, cv: f64) -> Result<Self, ParamError> {
        Ok(Self::Gaps { rate: checked("rate", rate, MAX_RATE)?, cv: checked("cv", cv, MAX_CV)? })
    }
}

/// How sessions are played.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SessionOptions {
    /// Number of sessions, drawn by `seed` without replacement. If the trace has fewer, all begin again with texts of
    /// their own. `None`: all sessions in their order.
    pub count: Option<u64>,
    /// When sessions begin; `None`: as recorded, else every [`DEFAULT_INTERVAL`].
    pub arrival: Option<Arrival>,
    /// Longer pauses are cut to this.
    pub max_pause: Duration,
    /// Requests are sent at recorded times, whether or not the response before has ended.
    pub open_loop: bool,
    /// Seed of the choice among sessions and of the gaps between them.
    pub seed: u64,
}

impl Default for SessionOptions {
    /// All sessions as recorded, in a closed loop.
    fn default() -> Self {
        Self { count: None, arrival: None, max_pause: DEFAULT_MAX_PAUSE, open_loop: false, seed: 0 }
    }
}

/// A session that is played.
#[derive(Clone, Copy, Debug)]
struct Play {
    /// Position of the session in the trace.
    session: usize,
    /// How many times the session was chosen before.
    copy: u64,
    at: Timestamp,
    /// Number of turns in the plays before this one.
    before: u64,
}

/// A play that has begun and not ended, in a closed loop.
#[derive(Debug)]
struct OpenPlay {
    /// By the position of a turn, the responses that it still waits for.
    waits: Vec<usize>,
    /// Turns that have not ended.
    turns: usize,
}

/// Plays sessions.
#[derive(Debug)]
pub struct SessionPlayer {
    trace: Arc<SessionTrace>,
    options: SessionOptions,
    /// In the order in which they begin.
    plays: Vec<Play>,
    /// Number of plays that have begun.
    begun: usize,
    /// Turns whose time is known, as `(time, play, turn)`.
    due: BinaryHeap<Reverse<(Timestamp, usize, usize)>>,
    /// Play and turn of each request in flight, by its number.
    in_flight: HashMap<u64, (usize, usize)>,
    open: HashMap<usize, OpenPlay>,
    /// Number of the next request.
    number: u64,
    total: u64,
}

impl SessionPlayer {
    /// The sessions of `trace`, before the first request.
    #[must_use]
    pub fn new(trace: Arc<SessionTrace>, options: SessionOptions) -> Self {
        let mut plays = plays(&trace, &options);
        plays.sort_by_key(|play| play.at);
        let mut total = 0;
        for play in &mut plays {
            play.before = total;
            total += trace.sessions.get(play.session).map_or(0, |session| session.turns.len() as u64);
        }
        Self {
            trace,
            options,
            plays,
            begun: 0,
            due: BinaryHeap::new(),
            in_flight: HashMap::new(),
            open: HashMap::new(),
            number: 0,
            total,
        }
    }

    fn session(&self, play: usize) -> Option<(&Session, Play)> {
        let play = self.plays.get(play)?;
        Some((self.trace.sessions.get(play.session)?, *play))
    }

    /// Begins the next session: its turns of known time become due.
    fn begin(&mut self) {
        let number = self.begun;
        self.begun += 1;
        let Some((session, play)) = self.session(number) else { return };
        let max = self.options.max_pause;
        let mut due = Vec::new();
        if self.options.open_loop {
            due.extend(recorded_times(session, max).into_iter().enumerate().map(|(i, at)| (play.at.after(at), i)));
        } else {
            let first = session.turns.iter().enumerate().filter(|(_, turn)| turn.after.is_empty());
            due.extend(first.map(|(i, turn)| (play.at.after(turn.pause.min(max)), i)));
            let waits = session.turns.iter().map(|turn| turn.after.len()).collect();
            let turns = session.turns.len();
            self.open.insert(number, OpenPlay { waits, turns });
        }
        self.due.extend(due.into_iter().map(|(at, turn)| Reverse((at, number, turn))));
    }

    /// The turn as a request at `at`.
    fn send(&mut self, play: usize, turn: usize, at: Timestamp) -> Option<Request> {
        let (session, Play { copy, .. }) = self.session(play)?;
        let Turn { request, agent, cause, pause, .. } = session.turns.get(turn)?;
        let place = ProgramTurn {
            program: play as u64,
            turns: u32::try_from(session.turns.len()).unwrap_or(u32::MAX),
            agent: *agent,
            cause: *cause,
            pause: (*pause).min(self.options.max_pause),
            known_tokens: session.known.get(turn).copied().unwrap_or(0),
        };
        let mut request = Request { number: self.number, at, turn: Some(place), ..request.clone() };
        if copy > 0 {
            distinguish(&mut request, copy);
        }
        if let Some((name, session)) = self.trace.id_header.zip(request.session) {
            request.headers.push((name.into(), uuid(session).into()));
        }
        self.in_flight.insert(self.number, (play, turn));
        self.number += 1;
        Some(request)
    }
}

impl Workload for SessionPlayer {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        while let Some(play) = self.plays.get(self.begun)
            && self.due.peek().is_none_or(|Reverse((at, ..))| play.at <= *at)
        {
            self.begin();
        }
        let Some(Reverse((at, play, turn))) = self.due.pop() else { return Ok(None) };
        Ok(self.send(play, turn, at))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        let Some((number, turn)) = self.in_flight.remove(&number) else { return Vec::new() };
        let (trace, max) = (self.trace.clone(), self.options.max_pause);
        let play = self.plays.get(number).and_then(|play| trace.sessions.get(play.session));
        let (Some(session), Some(open)) = (play, self.open.get_mut(&number)) else { return Vec::new() };
        let mut ready: Vec<(Timestamp, usize)> = Vec::new();
        for next in session.next.get(turn).into_iter().flatten().map(|next| *next as usize) {
            let (Some(waits), Some(turn)) = (open.waits.get_mut(next), session.turns.get(next)) else { continue };
            *waits -= 1;
            if *waits == 0 {
                ready.push((now.after(turn.pause.min(max)), next));
            }
        }
        open.turns -= 1;
        if open.turns == 0 {
            self.open.remove(&number);
        }
        ready.into_iter().filter_map(|(at, turn)| self.send(number, turn, at)).collect()
    }

    /// The position of the turn among all turns that are played.
    fn pair(&self, number: u64) -> u64 {
        let turn = self.in_flight.get(&number).and_then(|(play, turn)| Some((self.plays.get(*play)?, *turn)));
        turn.map_or(number, |(play, turn)| play.before + turn as u64)
    }

    fn total(&self) -> Option<u64> {
        Some(self.total)
    }
}

/// The sessions to play and when they begin, in no order.
fn plays(trace: &SessionTrace, options: &SessionOptions) -> Vec<Play> {
    let count = if trace.sessions.is_empty() { 0 } else { options.count.unwrap_or(trace.sessions.len() as u64) };
    let mut rng = for_request(options.seed, 0);
    let mut order: Vec<usize> = Vec::new();
    let mut clock = 0.0;
    let mut plays = Vec::new();
    for i in 0..count {
        if order.is_empty() {
            // Sessions are taken from the end.
            order = (0..trace.sessions.len()).rev().collect();
            if options.count.is_some() {
                (1..order.len()).rev().for_each(|last| order.swap(last, rng.random_range(0..=last)));
            }
        }
        let Some(session) = order.pop() else { break };
        let recorded = trace.sessions.get(session).and_then(|session| session.at);
        let at = match (options.arrival, recorded) {
            (Some(Arrival::Gaps { rate, cv }), _) => {
                clock += draw::gap(&mut rng, cv) / rate;
                seconds(clock)
            }
            (Some(Arrival::Every(interval)), _) => seconds(interval.as_secs_f64() * i as f64),
            (None, Some(at)) => at,
            (None, None) => seconds(DEFAULT_INTERVAL.as_secs_f64() * i as f64),
        };
        plays.push(Play { session, copy: i / trace.sessions.len() as u64, at, before: 0 });
    }
    plays
}

/// The recorded times of all turns since the start of their session, with pauses of at most `max`.
fn recorded_times(session: &Session, max: Duration) -> Vec<Duration> {
    // By how much a turn comes earlier than recorded.
    let mut cuts: Vec<Duration> = Vec::with_capacity(session.turns.len());
    for turn in &session.turns {
        let before = turn.after.iter().filter_map(|before| cuts.get(*before as usize).copied()).max();
        cuts.push(before.unwrap_or_default() + turn.pause.saturating_sub(max));
    }
    let time = |(turn, cut): (&Turn, Duration)| turn.request.at.since(Timestamp(0)).saturating_sub(cut);
    session.turns.iter().zip(cuts).map(time).collect()
}

/// Gives a request texts and a session of its own. Tools and system prompts stay shared.
fn distinguish(request: &mut Request, copy: u64) {
    let own = |name: u64| mix(name ^ mix(copy));
    for part in request.prompt.iter_mut().filter(|part| part.role != Speaker::System) {
        part.piece.name = own(part.piece.name);
    }
    request.answer.name = own(request.answer.name);
    request.session = request.session.map(own);
}

/// A session as the UUID that a client would send.
fn uuid(session: u64) -> String {
    let (high, low) = (mix(session), mix(!session));
    let (a, b, c) = (high >> 32, high >> 16 & 0xffff, high & 0xfff);
    format!("{a:08x}-{b:04x}-4{c:03x}-{:04x}-{:012x}", low >> 48 & 0x3fff | 0x8000, low & 0xffff_ffff_ffff)
}
