//! BurstGPT: CSV with the headings `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, in newer
//! files also `Session ID` and `Elapsed time`.
//!
//! Timestamps are seconds. What prompts share is known within a session only: the prompt begins with all that was
//! asked and answered in it before. A prompt that is not longer than that can't hold it, so the session has begun anew
//! and shares nothing. Rows with 0 response tokens are requests that failed at the source; they are asked all the
//! same, for one token. Source: HPMLL/BurstGPT.

use super::RowParser;
use super::fields::{columns, position, time, tokens};
use crate::names::{TextKind, name};
use crate::{PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use std::collections::{HashMap, VecDeque};
use xxhash_rust::xxh3::xxh3_64;

/// The columns that must be there.
pub const HEADINGS: [&str; 3] = ["Timestamp", "Request tokens", "Response tokens"];
/// The column that may be there.
pub(super) const SESSION: &str = "Session ID";
/// Sessions whose history is remembered; the one that began first is forgotten for a new one. Far more than
/// are ever open at once.
pub const MAX_SESSIONS: usize = 100_000;

/// The rule of the format.
#[derive(Debug)]
pub(super) struct BurstGpt {
    /// Where [`HEADINGS`] stand.
    at: [usize; 3],
    session: Option<usize>,
    histories: HashMap<u64, Vec<PastTurn>>,
    /// The keys of `histories`, the oldest first.
    order: VecDeque<u64>,
}

/// One exchange of a conversation: prompt and response.
#[derive(Clone, Copy, Debug)]
struct PastTurn {
    /// The number of the request, which names both texts.
    number: u64,
    asked: u32,
    answered: u32,
}

impl PastTurn {
    fn parts(self) -> [PromptPart; 2] {
        let asked = Piece::new(name(0, TextKind::Prompt, self.number), self.asked);
        [PromptPart::text(Speaker::User, asked), PromptPart::text(Speaker::Assistant, self.answer())]
    }

    fn answer(self) -> Piece {
        Piece::new(name(0, TextKind::Answer, self.number), self.answered)
    }
}

/// Whether these are the headings of such a trace.
pub(super) fn is_header(columns: &[&str]) -> bool {
    HEADINGS.iter().all(|heading| position(columns, heading).is_some())
}

impl BurstGpt {
    pub(super) fn new(heading: &str) -> Result<Self, TraceError> {
        let columns = columns(heading);
        let find = |name: &str| {
            position(&columns, name).ok_or_else(|| TraceError::Format(format!("there is no column `{name}`")))
        };
        let [time, request, response] = HEADINGS;
        let at = [find(time)?, find(request)?, find(response)?];
        let session = position(&columns, SESSION);
        Ok(Self { at, session, histories: HashMap::new(), order: VecDeque::new() })
    }

    /// The parts of a prompt of this length in a session, which goes on with them.
    fn goes_on(&mut self, session: u64, prompt: u32, mut turn: PastTurn) -> Vec<PromptPart> {
        if !self.histories.contains_key(&session) {
            if self.order.len() >= MAX_SESSIONS
                && let Some(oldest) = self.order.pop_front()
            {
                self.histories.remove(&oldest);
            }
            self.order.push_back(session);
        }
        let history = self.histories.entry(session).or_default();
        let said: u64 = history.iter().map(|turn| u64::from(turn.asked) + u64::from(turn.answered)).sum();
        match u32::try_from(said).ok().and_then(|said| prompt.checked_sub(said)) {
            Some(asked) if asked > 0 => turn.asked = asked,
            _ => history.clear(),
        }
        let mut parts: Vec<PromptPart> = history.iter().flat_map(|turn| turn.parts()).collect();
        parts.extend(turn.parts().into_iter().take(1));
        history.push(turn);
        parts
    }
}

impl RowParser for BurstGpt {
    const FROM_FIRST: bool = true;

    fn request(&mut self, row: &str, number: u64) -> Result<Request, String> {
        let columns = columns(row);
        let [at, prompt, answer] = self.at.map(|at| columns.get(at).copied());
        let at = time("Timestamp", at, "seconds", 0)?;
        let prompt = tokens("Request tokens", prompt, 1)?;
        let answered = tokens("Response tokens", answer, 0)?.max(1);
        let session = self.session.and_then(|at| columns.get(at)).filter(|id| !id.is_empty());
        let session = session.map(|id| id.parse().unwrap_or_else(|_| xxh3_64(id.as_bytes())));
        let turn = PastTurn { number, asked: prompt, answered };
        let prompt = match session {
            Some(session) => self.goes_on(session, prompt, turn),
            None => turn.parts().into_iter().take(1).collect(),
        };
        Ok(Request {
            number,
            at,
            prompt,
            answer: turn.answer(),
            adapter: None,
            session,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        })
    }
}
