//! Sessions of agents: requests that follow from each other. [`SessionPlayer`] sends them.
//!
//! A [`Session`] is a list of turns. Each [`Turn`] has the turns whose responses it waits for, and the pause after the
//! last of these. The main agent and its sub-agents differ only in that. [`link`] finds what a recorded request waited
//! for.
//!
//! Called by `trace` (loaders), `cli::replay` and tests. Pure.

mod player;

pub use player::{Arrival, DEFAULT_INTERVAL, DEFAULT_MAX_PAUSE, SessionOptions, SessionPlayer};

use crate::{PromptPart, Request};
use attache_types::clock::Timestamp;
use attache_types::program::TurnCause;
use smallvec::{SmallVec, smallvec};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// One request of a session, as recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The request; `at` is its time since the start of the session. The player sets number and place.
    pub request: Request,
    /// Number of the agent in its session; 0 is the main agent.
    pub agent: u32,
    /// What the agent waited for.
    pub cause: TurnCause,
    /// Positions of the turns whose responses it waits for, each less than its own. A turn without any is sent when the
    /// session begins, or `pause` later.
    pub after: SmallVec<[u32; 1]>,
    /// From the end of the last of these responses to this request.
    pub pause: Duration,
}

/// A session: the requests of one agent and of its sub-agents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Session {
    /// Its beginning, from the start of the trace; `None` if the trace does not say.
    pub at: Option<Timestamp>,
    /// Its requests. A turn stands behind those that it waits for.
    pub turns: Vec<Turn>,
    /// By the position of a turn, the turns that wait for it.
    next: Vec<SmallVec<[u32; 1]>>,
    /// By the position of a turn, the tokens at the start of its prompt that an earlier prompt had too.
    known: Vec<u32>,
}

impl Session {
    /// A session with these turns.
    #[must_use]
    pub fn new(at: Option<Timestamp>, turns: Vec<Turn>) -> Self {
        let mut next = vec![SmallVec::new(); turns.len()];
        let mut known = Vec::with_capacity(turns.len());
        for (i, turn) in turns.iter().enumerate() {
            for before in &turn.after {
                if let Some(next) = next.get_mut(*before as usize) {
                    next.push(u32::try_from(i).unwrap_or(u32::MAX));
                }
            }
            let prompt = &turn.request.prompt;
            let earlier = turns.iter().take(i).map(|turn| common_tokens(&turn.request.prompt, prompt));
            known.push(earlier.max().unwrap_or(0));
        }
        Self { at, turns, next, known }
    }

    /// The session without the requests of more than `most` tokens, prompt and response together. What waited for such
    /// a request waits for that which the request had waited for.
    fn within(&self, most: u32) -> Self {
        let mut kept: Vec<Turn> = Vec::new();
        // The cause of the first request of each agent, and the agents of which a request is kept.
        let (mut causes, mut agents) = (HashMap::new(), HashSet::new());
        // By old positions: the new position of a turn, or of those that it waited for.
        let mut stands_for: Vec<SmallVec<[u32; 1]>> = Vec::with_capacity(self.turns.len());
        for turn in &self.turns {
            let first_cause = *causes.entry(turn.agent).or_insert(turn.cause);
            let old = turn.after.iter().filter_map(|before| stands_for.get(*before as usize));
            let mut after: SmallVec<[u32; 1]> = old.flatten().copied().collect();
            after.sort_unstable();
            after.dedup();
            let Request { prompt, answer, .. } = &turn.request;
            let tokens = prompt.iter().fold(answer.tokens, |sum, part| sum.saturating_add(part.piece.tokens));
            if tokens > most {
                stands_for.push(after);
                continue;
            }
            stands_for.push(smallvec![u32::try_from(kept.len()).unwrap_or(u32::MAX)]);
            let cause = if agents.insert(turn.agent) { first_cause } else { turn.cause };
            kept.push(Turn { after, cause, ..turn.clone() });
        }
        Self::new(self.at, kept)
    }
}

/// Number of equal tokens at the start of two prompts.
fn common_tokens(a: &[PromptPart], b: &[PromptPart]) -> u32 {
    let (mut a, mut b) = (a.iter().map(|part| part.piece), b.iter().map(|part| part.piece));
    let (mut left, mut right) = (a.next(), b.next());
    let mut common = 0;
    while let (Some(one), Some(other)) = (&mut left, &mut right) {
        if (one.name, one.from) != (other.name, other.from) {
            break;
        }
        let tokens = one.tokens.min(other.tokens);
        common += tokens;
        for (piece, rest) in [(&mut left, &mut a as &mut dyn Iterator<Item = _>), (&mut right, &mut b)] {
            *piece = piece.take().and_then(|mut piece| {
                piece.from += tokens;
                piece.tokens -= tokens;
                if piece.tokens > 0 { Some(piece) } else { rest.next() }
            });
        }
    }
    common
}

/// Recorded sessions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionTrace {
    /// The sessions in the order of the trace.
    pub sessions: Vec<Session>,
    /// Header in which clients send the id of the session; `None` if the trace has no such clients.
    pub id_header: Option<&'static str>,
}

impl SessionTrace {
    /// Number of requests in all sessions.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.sessions.iter().map(|session| session.turns.len()).sum()
    }

    /// The trace without the requests of more than `most` tokens, prompt and response together. A session without any
    /// other request is left out.
    #[must_use]
    pub fn within(&self, most: u32) -> Self {
        let sessions = self.sessions.iter().map(|session| session.within(most));
        Self { sessions: sessions.filter(|session| !session.turns.is_empty()).collect(), id_header: self.id_header }
    }
}

/// A recorded request, before it is known what it waited for.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The request; `at` is its time since the start of the session.
    pub(crate) request: Request,
    /// Number of its agent; 0 is the main agent.
    pub(crate) agent: u32,
    /// Number of the agent that started this one.
    pub(crate) parent: u32,
    /// What the agent waited for, if this is not its first request.
    pub(crate) cause: TurnCause,
    /// From the request to the end of its response; zero if not recorded.
    pub(crate) took: Duration,
    /// The pause before the request, if the trace has it.
    pub(crate) pause: Option<Duration>,
}

/// A session while its requests are read.
#[derive(Debug, Default)]
pub(crate) struct OpenSession {
    /// Its first request, from the start of the trace.
    at: Timestamp,
    entries: Vec<Entry>,
    /// Numbers of the sub-agents, by their ids.
    agents: HashMap<u64, u32>,
}

impl OpenSession {
    /// Whether it has no request yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of a sub-agent of an earlier request.
    pub(crate) fn known(&self, id: u64) -> Option<u32> {
        self.agents.get(&id).copied()
    }

    /// The number of an agent. The main agent has no id.
    pub(crate) fn number(&mut self, id: Option<u64>) -> u32 {
        let next = u32::try_from(self.agents.len()).unwrap_or(u32::MAX).saturating_add(1);
        id.map_or(0, |id| *self.agents.entry(id).or_insert(next))
    }

    /// Adds a request, whose `at` still counts from the start of the trace.
    pub(crate) fn push(&mut self, mut entry: Entry) {
        if self.is_empty() {
            self.at = entry.request.at;
        }
        entry.request.at = Timestamp(0).after(entry.request.at.since(self.at));
        self.entries.push(entry);
    }

    /// The session, without further requests.
    pub(crate) fn close(self) -> Session {
        Session::new(Some(self.at), link(self.entries))
    }
}

/// Finds what each request of a session waited for.
///
/// A request waits for the one before it of the same agent. It also waits for sub-agents that the agent has started
/// since, if the last response to the sub-agent ended before the request. The first request of a sub-agent waits for
/// the last one of the agent that started it.
pub(crate) fn link(entries: Vec<Entry>) -> Vec<Turn> {
    let agents = entries.iter().map(|entry| entry.agent as usize + 1).max().unwrap_or(0);
    // First and last request of each agent, and the agent that started it.
    let mut spans: Vec<Option<(usize, usize, u32)>> = vec![None; agents];
    for (i, entry) in entries.iter().enumerate() {
        if let Some(span) = spans.get_mut(entry.agent as usize) {
            let (first, _, parent) = span.unwrap_or((i, i, entry.parent));
            *span = Some((first, i, parent));
        }
    }
    let end = |i: usize| entries.get(i).map_or(Timestamp(0), |entry| entry.request.at.after(entry.took));
    let mut latest: Vec<Option<usize>> = vec![None; agents];
    let mut waits: Vec<(SmallVec<[u32; 1]>, Duration)> = Vec::with_capacity(entries.len());
    for (i, entry) in entries.iter().enumerate() {
        let (own, at) = (latest.get(entry.agent as usize).copied().flatten(), entry.request.at);
        let before = own.or_else(|| latest.get(entry.parent as usize).copied().flatten());
        let joined = spans.iter().flatten().filter(|(first, last, parent)| {
            *parent == entry.agent && own.is_some_and(|own| own < *first) && *last < i && end(*last) <= at
        });
        let mut after: SmallVec<[usize; 1]> = before.into_iter().chain(joined.map(|(_, last, _)| *last)).collect();
        after.sort_unstable();
        after.dedup();
        let last = after.iter().map(|i| end(*i)).max().unwrap_or(Timestamp(0));
        let after = after.into_iter().filter_map(|i| u32::try_from(i).ok()).collect();
        waits.push((after, entry.pause.unwrap_or_else(|| at.since(last))));
        if let Some(latest) = latest.get_mut(entry.agent as usize) {
            *latest = Some(i);
        }
    }
    let is_first = |agent: u32, i| spans.get(agent as usize).is_some_and(|span| span.is_some_and(|s| s.0 == i));
    let causes: Vec<_> = (entries.iter().enumerate())
        .map(|(i, entry)| if is_first(entry.agent, i) { TurnCause::Start } else { entry.cause })
        .collect();
    let turns = entries.into_iter().zip(waits).zip(causes);
    turns
        .map(|((Entry { request, agent, .. }, (after, pause)), cause)| Turn { request, agent, cause, after, pause })
        .collect()
}

#[cfg(test)]
mod tests;
