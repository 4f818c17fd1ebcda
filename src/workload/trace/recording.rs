//! The recording of a live run (`attache.record.v1`, see [`attache_record::line`]) as a workload for other policies.
//!
//! A prompt consists of its blocks, named by their keys, and of the text behind the last block. Where keys were not
//! recorded (the strategy did not need them), only its length is known, and it shares nothing with other prompts.
//! Blocks of text count the tokens that the block size implies, not those that servers reported. A response has the
//! length that the server reported, else one token. A recording does not say which prompts quote it. Unreadable and
//! rejected requests are left out.
//!
//! If a request names its agent, the recording has sessions: each program is one, and so is each request without an
//! agent. A recording does not say what an agent waited for. A pause of at most [`LONGEST_TOOL`] counts as that of a
//! tool. It begins when the last response ended that the request waited for, also that of a sub-agent.

use super::MAX_TOKENS;
use super::agents::{AGENT_HEADER, PARENT_HEADER, SESSION_HEADER};
use super::rows::Rows;
use crate::names::{TextKind, name, name_of_block};
use crate::sessions::{Entry, OpenSession, Session, SessionTrace};
use crate::{Headers, PromptPart, Request, Speaker, TraceError, Workload};
use attache_prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN};
use attache_record::headers::CREDENTIALS;
use attache_record::{Decided, FORMAT, Line, RecordedAgent, RequestLeg};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::program::TurnCause;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// 30 s: 82 % of the pauses for tools and 19 % of those for persons are not longer, in 49,334 requests of recorded
/// sessions of Claude Code (kv-cache-tester).
const LONGEST_TOOL: Duration = Duration::from_secs(30);

/// Whether this is the value of `format` in a first row.
pub(super) fn is_header(value: &str) -> bool {
    serde_json::from_str::<String>(value).is_ok_and(|format| format == FORMAT)
}

/// A recording that is read as a workload.
pub(super) struct Recording {
    rows: Rows,
    /// Tokens in a block, by pool.
    blocks: HashMap<Arc<str>, u32>,
    /// Requests in the order of their decisions, until the answer of the first is known.
    waiting: BTreeMap<u64, PendingRequest>,
    first: Option<Timestamp>,
    last: Timestamp,
    number: u64,
}

struct PendingRequest {
    request: Request,
    agent: Option<RecordedAgent>,
    decided: Timestamp,
    /// How long it waited in the queue before that.
    waited: Duration,
    /// From the decision to the end of the response; zero until it has ended.
    took: Duration,
    ended: bool,
}

impl Recording {
    /// The rest of `rows`, whose first was the header.
    pub(super) fn new(rows: Rows) -> Self {
        Self { rows, blocks: HashMap::new(), waiting: BTreeMap::new(), first: None, last: Timestamp(0), number: 0 }
    }

    /// Reads one row; false when there are no more.
    fn read(&mut self) -> Result<bool, TraceError> {
        let Some((row, text)) = self.rows.next()? else { return Ok(false) };
        match serde_json::from_str(text) {
            Ok(line) => self.take_in(line),
            // The last row may be cut off.
            Err(_) if self.rows.next()?.is_none() => return Ok(false),
            Err(error) => return Err(TraceError::Row { row, message: error.to_string() }),
        }
        Ok(true)
    }

    fn take_in(&mut self, line: Line) {
        match line {
            Line::Pool { name, cache, .. } => {
                let tokens = match cache.unit {
                    BlockUnit::Tokens(n) => n,
                    BlockUnit::Bytes(n) => n / CHARACTERS_PER_TOKEN,
                };
                self.blocks.insert(name, tokens.max(1));
            }
            Line::Decide(decided) if decided.readable && !decided.picks.is_empty() => {
                let request = self.request(&decided);
                let Decided { r, at, agent, waited, .. } = *decided;
                let (took, ended) = (Duration::ZERO, false);
                self.waiting.insert(r, PendingRequest { request, agent, decided: at, waited, took, ended });
            }
            Line::End(ended) if ended.leg == RequestLeg::Response => {
                if let Some(waiting) = self.waiting.get_mut(&ended.r) {
                    (waiting.ended, waiting.took) = (true, ended.at.since(waiting.decided));
                    let tokens = ended.completion_tokens.unwrap_or(1).clamp(1, MAX_TOKENS);
                    waiting.request.answer.tokens = u32::try_from(tokens).unwrap_or(1);
                }
            }
            Line::Drop { r, leg: RequestLeg::Response } => {
                if let Some(waiting) = self.waiting.get_mut(&r) {
                    waiting.ended = true;
                }
            }
            _ => {}
        }
    }

    fn request(&mut self, decided: &Decided) -> Request {
        let number = self.number;
        self.number += 1;
        let first = *self.first.get_or_insert(decided.at);
        // Threads decide in another order than they look at the clock, by microseconds.
        self.last = self.last.max(Timestamp(0).after(decided.at.since(first)));
        let block = self.blocks.get(&decided.pool).copied().unwrap_or(1);
        let user = |piece| PromptPart::text(Speaker::User, piece);
        let keys = decided.prompt.iter().flat_map(|looked| &looked.keys);
        let mut prompt: Vec<PromptPart> = keys.map(|key| user(Piece::new(name_of_block(key.0), block))).collect();
        let blocks = u32::try_from(prompt.len()).unwrap_or(u32::MAX).saturating_mul(block);
        let rest = decided.estimated.saturating_sub(blocks);
        if rest > 0 || prompt.is_empty() {
            prompt.push(user(Piece::new(name(0, TextKind::Prompt, number), rest.max(1))));
        }
        Request {
            number,
            at: self.last,
            prompt,
            answer: Piece::new(name(0, TextKind::Answer, number), 1),
            adapter: None,
            session: None,
            tenant: decided.prompt.as_ref().and_then(|looked| looked.tenant.as_deref()).map(Into::into),
            priority: decided.priority,
            headers: headers(decided),
            turn: None,
        }
    }

    /// The next request in the order of decisions.
    fn next_request(&mut self) -> Result<Option<PendingRequest>, TraceError> {
        while !self.waiting.first_key_value().is_some_and(|(_, first)| first.ended) {
            if !self.read()? {
                // What had not ended when the recording did is asked for all the same.
                break;
            }
        }
        match self.waiting.pop_first() {
            Some((_, first)) => Ok(Some(first)),
            None if self.number == 0 => Err(TraceError::Format("the recording has no requests".to_owned())),
            None => Ok(None),
        }
    }
}

/// The headers that the recorded decision read, without credentials: of those, the recording has only hashes.
fn headers(decided: &Decided) -> Headers {
    let read = decided.headers.iter().filter(|(name, _)| !CREDENTIALS.contains(&name.as_str()));
    read.filter_map(|(name, value)| Some((name.as_str().into(), value.as_deref()?.into()))).collect()
}

impl Workload for Recording {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        Ok(self.next_request()?.map(|next| next.request))
    }
}

/// Whether a request in the rest of `rows` names its agent. Other lines are not parsed.
pub(super) fn names_agents(mut rows: Rows) -> Result<bool, TraceError> {
    while let Some((_, text)) = rows.next()? {
        let is_named = |line| matches!(line, Line::Decide(decided) if decided.agent.is_some());
        if text.contains("\"agent\":") && serde_json::from_str(text).is_ok_and(is_named) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Adds a request to its session.
fn add(session: &mut OpenSession, next: PendingRequest) {
    let PendingRequest { mut request, agent, waited, took, .. } = next;
    // The client did not wait for the queue before it sent the request.
    request.at = Timestamp(0).after(request.at.since(Timestamp(0).after(waited)));
    let took = waited + took;
    let (mut number, mut parent) = (0, 0);
    if let Some(agent) = &agent {
        let of = |id: &Option<Arc<str>>| id.as_deref().map(id_of);
        (parent, number) = (session.number(of(&agent.parent)), session.number(of(&agent.chain)));
        request.session = Some(id_of(&agent.program));
        request.headers.retain(|(name, _)| ![SESSION_HEADER, AGENT_HEADER, PARENT_HEADER].contains(&&**name));
        let ids = [(AGENT_HEADER, &agent.chain), (PARENT_HEADER, &agent.parent)].into_iter();
        request.headers.extend(ids.filter_map(|(name, id)| Some((name.into(), id.clone()?))));
    }
    // The pause decides later.
    session.push(Entry { request, agent: number, parent, cause: TurnCause::Tool, took, pause: None });
}

/// The session, whose requests after a long pause waited for a person.
fn close(session: OpenSession) -> Session {
    let mut session = session.close();
    let later = session.turns.iter_mut().filter(|turn| turn.cause != TurnCause::Start);
    later.filter(|turn| turn.pause > LONGEST_TOOL).for_each(|turn| turn.cause = TurnCause::Person);
    session
}

/// The number that a recorded id stands for.
fn id_of(id: &str) -> u64 {
    xxh3_64(id.as_bytes())
}

/// The sessions in the rest of `rows`, whose first was the header.
///
/// # Errors
/// When a row can't be read, or there are no requests.
pub(super) fn sessions(rows: Rows) -> Result<SessionTrace, TraceError> {
    let mut recording = Recording::new(rows);
    let mut sessions: Vec<OpenSession> = Vec::new();
    let mut places: HashMap<u64, usize> = HashMap::new();
    while let Some(next) = recording.next_request()? {
        let end = sessions.len();
        let place = next.agent.as_ref().map_or(end, |agent| *places.entry(id_of(&agent.program)).or_insert(end));
        if place == end {
            sessions.push(OpenSession::default());
        }
        if let Some(session) = sessions.get_mut(place) {
            add(session, next);
        }
    }
    let sessions = sessions.into_iter().map(close).collect();
    Ok(SessionTrace { sessions, id_header: Some(SESSION_HEADER) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Options, read, sessions};
    use std::io::Cursor;

    const HEADER: &str = r#"{"format":"attache.record.v1","version":"0","seed":1,"settings":{}}"#;
    const POOL: &str = r#"{"pool":{"pool":0,"name":"p","cache":{"unit":{"tokens":16},"max_bytes":1,"tenant_share":1.0,"claim_life":{"secs":1,"nanos":0},"seed":1}}}"#;

    fn decide(r: u64, at: u64, keys: &str) -> String {
        format!(
            r#"{{"decide":{{"r":{r},"at":{at},"live":0,"pool":"p","rng":1,"model":"m","readable":true,"estimated":40,"prompt":{{"keys":"{keys}","text_bytes":160,"count":1}},"streams":true,"strategy":"random","picks":[0],"reason":"","matched":0}}}}"#
        )
    }

    fn end(r: u64, tokens: u64) -> String {
        format!(r#"{{"end":{{"r":{r},"at":9,"complete":true,"completion_tokens":{tokens}}}}}"#)
    }

    fn open(lines: &[String]) -> Box<dyn Workload> {
        let text = [&[HEADER.to_owned(), POOL.to_owned()], lines].concat().join("\n");
        read(Cursor::new(text.into_bytes()), &Options::default()).unwrap()
    }

    #[test]
    fn requests_come_in_order_with_their_blocks_and_the_length_of_their_answers() {
        // The keys 1 and 2.
        let keys = "AQAAAAAAAAACAAAAAAAAAA";
        let lines = [decide(0, 5_000, keys), decide(3, 4_000, keys), end(3, 7), end(0, 9), decide(4, 6_000, "")];
        let mut workload = open(&lines);
        let mut next = || workload.next().unwrap();
        let (first, second) = (next().unwrap(), next().unwrap());
        assert_eq!((first.at.0, second.at.0), (0, 0), "never back in time");
        assert_eq!((first.answer.tokens, second.answer.tokens), (9, 7));
        assert_ne!(first.answer.name, second.answer.name);
        let pieces: Vec<_> = first.prompt.iter().map(|p| (p.piece.name, p.piece.tokens)).collect();
        assert_eq!(pieces[..2], [(name_of_block(1), 16), (name_of_block(2), 16)]);
        assert_eq!((pieces.len(), pieces[2].1, first.prompt_tokens()), (3, 8, 40));
        assert_ne!(first.prompt[2], second.prompt[2], "text behind the last block is unique");
        let third = next().unwrap();
        assert_eq!((third.at.0, third.answer.tokens, third.prompt_tokens()), (1_000, 1, 40), "it had not ended");
        assert_eq!(next(), None);
    }

    /// A decision about a request of this agent.
    fn decide_of(r: u64, at: u64, agent: &str) -> String {
        decide(r, at, "").replace("\"readable\"", &format!("\"agent\":{agent},\"readable\""))
    }

    fn end_at(r: u64, at: u64) -> String {
        end(r, 5).replace("\"at\":9", &format!("\"at\":{at}"))
    }

    /// In nanoseconds.
    const SECOND: u64 = 1_000_000_000;
    /// A main agent and its sub-agent.
    const MAIN: &str = r#"{"program":"p"}"#;
    const SUB: &str = r#"{"program":"p","chain":"c"}"#;

    fn sessions_of(lines: &[String]) -> Option<SessionTrace> {
        let text = [&[HEADER.to_owned(), POOL.to_owned()], lines].concat().join("\n");
        sessions(&|| Ok(Box::new(Cursor::new(text.clone()))), &Options::default()).unwrap()
    }

    #[test]
    fn requests_of_agents_are_sessions_with_pauses_and_sub_agents() {
        let lines = [
            decide_of(0, SECOND, MAIN),
            decide(1, 2 * SECOND, ""),
            end_at(0, 3 * SECOND),
            // It arrived a second before, and was queued.
            decide_of(2, 5 * SECOND, SUB).replace("\"readable\"", r#""waited":{"secs":1,"nanos":0},"readable""#),
            end_at(2, 6 * SECOND),
            decide_of(3, 7 * SECOND, MAIN),
            end_at(3, 8 * SECOND),
            decide_of(4, 50 * SECOND, MAIN),
            decide_of(5, 51 * SECOND, r#"{"program":"q"}"#),
        ];
        let trace = sessions_of(&lines).expect("requests name agents");
        let seconds = |pause: Duration| pause.as_secs();
        let shown: Vec<Vec<_>> = trace
            .sessions
            .iter()
            .map(|session| {
                session.turns.iter().map(|t| (t.agent, t.cause, t.after.to_vec(), seconds(t.pause))).collect()
            })
            .collect();
        let (start, tool, person) = (TurnCause::Start, TurnCause::Tool, TurnCause::Person);
        let program =
            vec![(0, start, vec![], 0), (1, start, vec![0], 1), (0, tool, vec![0, 1], 1), (0, person, vec![2], 42)];
        assert_eq!(shown, [program, vec![(0, start, vec![], 0)], vec![(0, start, vec![], 0)]]);
        let begins: Vec<u64> = trace.sessions.iter().map(|session| session.at.unwrap().0 / SECOND).collect();
        assert_eq!(begins, [0, 1, 50]);
        let turn = &trace.sessions[0].turns[1].request;
        assert_eq!(turn.headers, [(AGENT_HEADER.into(), "c".into())]);
        assert_eq!(turn.session, trace.sessions[0].turns[0].request.session);
        assert_ne!(turn.session, trace.sessions[2].turns[0].request.session);
        assert_eq!(trace.sessions[1].turns[0].request.session, None, "it names no agent");
    }

    #[test]
    fn turn_soon_after_a_slow_sub_agent_did_not_wait_for_a_person() {
        let lines = [
            decide_of(0, SECOND, MAIN),
            end_at(0, 2 * SECOND),
            decide_of(1, 3 * SECOND, SUB),
            end_at(1, 60 * SECOND),
            decide_of(2, 63 * SECOND, MAIN),
            end_at(2, 64 * SECOND),
            decide_of(3, 95 * SECOND, MAIN),
        ];
        let trace = sessions_of(&lines).expect("requests name agents");
        let turns: Vec<_> = trace.sessions[0].turns.iter().map(|t| (t.agent, t.cause, t.pause.as_secs())).collect();
        let (start, tool, person) = (TurnCause::Start, TurnCause::Tool, TurnCause::Person);
        assert_eq!(turns, [(0, start, 0), (1, start, 1), (0, tool, 3), (0, person, 31)]);
    }

    #[test]
    fn recording_without_agents_has_no_sessions() {
        let header = decide(0, 1, "").replace("\"readable\"", r#""headers":{"agent":"a"},"readable""#);
        assert_eq!(sessions_of(&[header, end(0, 1)]), None);
    }

    #[test]
    fn a_cut_last_row_is_the_end_and_any_other_is_named() {
        let cut = end(0, 3).split_at(20).0.to_owned();
        let mut workload = open(&[decide(0, 5, ""), cut.clone()]);
        assert!(workload.next().unwrap().is_some());
        assert_eq!(workload.next().unwrap(), None);
        let mut workload = open(&[decide(0, 5, ""), cut, end(0, 3)]);
        let error = workload.next().unwrap_err().to_string();
        assert!(error.starts_with("row 4: "), "{error}");
    }
}
