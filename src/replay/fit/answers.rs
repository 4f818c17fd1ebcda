//! Reads from a recording the endpoint, the times and the length of each response.
//!
//! A response is measured when it was streamed with success, so that its first byte is its first token, and when the
//! server reported its token count. All other requests are only known to have loaded their server. Called by
//! `cli::replay`; reads a file.

use crate::record::{Lines, RecordError};
use attache_record::{Decided, Ended, Line, RequestLeg};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;
use std::sync::Arc;

/// One response of known length and times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredResponse {
    /// Number of the endpoint that served it.
    pub server: u32,
    /// When the request was sent there.
    pub decided: Timestamp,
    /// Time of the first token.
    pub first: Timestamp,
    /// Time of the last token.
    pub end: Timestamp,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Tokens of it that the server held: as it said, else as the picker thought.
    pub cached_tokens: u32,
    /// Tokens of the answer, at least 1.
    pub generated_tokens: u32,
}

/// A request of which it is not known what it cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmeasuredRequest {
    /// Number of the endpoint that served it.
    pub server: u32,
    /// When it was sent there.
    pub decided: Timestamp,
    /// When its response ended, or its connection broke.
    pub end: Timestamp,
}

/// All of a recording, or of one pool in it.
#[derive(Clone, Debug, Default)]
pub struct RecordedLoad {
    /// Responses of known length and times.
    pub answers: Vec<MeasuredResponse>,
    /// Requests whose length or times are unknown.
    pub unmeasured: Vec<UnmeasuredRequest>,
    /// Tokens in a block, as the servers said last.
    pub block_size: Option<u32>,
    /// Blocks of a server, as one said last.
    pub num_blocks: Option<u32>,
}

/// A request that has not ended.
struct OpenRequest {
    server: u32,
    decided: Timestamp,
    first: Option<Timestamp>,
    streams: bool,
    prompt_tokens: u32,
    matched: u32,
}

struct Listener<'a> {
    pool: Option<&'a str>,
    load: RecordedLoad,
    open: HashMap<u64, OpenRequest>,
    servers: BTreeMap<(Arc<str>, u32), u32>,
    pools: HashMap<u32, Arc<str>>,
    now: Timestamp,
}

/// Reads the recording; of the pool with this name alone, if there is one.
///
/// # Errors
/// When it can't be read or a line is wrong.
pub fn read_responses(source: impl BufRead, pool: Option<&str>) -> Result<RecordedLoad, RecordError> {
    let mut listener = Listener {
        pool,
        load: RecordedLoad::default(),
        open: HashMap::new(),
        servers: BTreeMap::new(),
        pools: HashMap::new(),
        now: Timestamp(0),
    };
    let mut lines = Lines::open(source)?;
    while let Some((line, _)) = lines.line()? {
        listener.take_in(line);
    }
    let Listener { mut load, open, .. } = listener;
    load.unmeasured.extend(open.into_values().map(|open| open.unmeasured(Timestamp(u64::MAX))));
    Ok(load)
}

impl Listener<'_> {
    fn take_in(&mut self, line: Line) {
        match line {
            Line::Pool { pool, name, .. } => {
                self.pools.insert(pool, name);
            }
            Line::Page { pool, metrics, .. } => {
                let is_meant = |name: &Arc<str>| self.pool.is_none_or(|wanted| **name == *wanted);
                if self.pools.get(&pool).is_some_and(is_meant) {
                    self.load.block_size = metrics.block_size.or(self.load.block_size);
                    self.load.num_blocks = metrics.num_blocks.or(self.load.num_blocks);
                }
            }
            Line::Decide(decided) => self.decided(&decided),
            Line::Moved { r, at, to, leg: RequestLeg::Response } => self.moved(r, at, to),
            Line::First { r, at, good, leg: RequestLeg::Response, .. } => {
                self.now = at;
                if let Some(open) = self.open.get_mut(&r) {
                    open.first = Some(at).filter(|_| good && open.streams);
                }
            }
            Line::End(ended) if ended.leg == RequestLeg::Response => self.ended(&ended),
            Line::Drop { r, leg: RequestLeg::Response } => {
                if let Some(open) = self.open.remove(&r) {
                    self.load.unmeasured.push(open.unmeasured(self.now));
                }
            }
            _ => {}
        }
    }

    /// Envoy served a request at another endpoint. The first endpoint had it as load of unknown cost.
    fn moved(&mut self, r: u64, at: Timestamp, to: EndpointId) {
        self.now = at;
        let Some(mut open) = self.open.remove(&r) else { return };
        self.load.unmeasured.push(open.unmeasured(at));
        if let Some((pool, _)) = self.servers.iter().find(|(_, server)| **server == open.server) {
            let pool = pool.0.clone();
            (open.server, open.decided, open.matched) = (self.server(&pool, to.0), at, 0);
            self.open.insert(r, open);
        }
    }

    fn ended(&mut self, ended: &Ended) {
        self.now = ended.at;
        let Some(open) = self.open.remove(&ended.r) else { return };
        let count = |tokens: u64| u32::try_from(tokens).ok();
        let generated = ended.completion_tokens.and_then(count).filter(|n| *n > 0 && ended.complete);
        let Some((first, generated_tokens)) = open.first.zip(generated) else {
            self.load.unmeasured.push(open.unmeasured(ended.at));
            return;
        };
        let prompt_tokens = ended.prompt_tokens.and_then(count).unwrap_or(open.prompt_tokens);
        let cached = ended.cached_tokens.and_then(count).unwrap_or(open.matched);
        self.load.answers.push(MeasuredResponse {
            server: open.server,
            decided: open.decided,
            first,
            end: ended.at,
            prompt_tokens,
            // The last token of a prompt is always computed.
            cached_tokens: cached.min(prompt_tokens.saturating_sub(1)),
            generated_tokens,
        });
    }

    fn decided(&mut self, d: &Decided) {
        self.now = d.at;
        let Some(pick) = d.picks.first().filter(|_| self.pool.is_none_or(|pool| *d.pool == *pool)) else { return };
        let server = self.server(&d.pool, pick.0);
        // The first token of a split request also says how long another server took.
        let (streams, prompt_tokens, matched) = (d.streams && d.prefill.is_empty(), d.estimated, d.matched);
        self.open.insert(d.r, OpenRequest { server, decided: d.at, first: None, streams, prompt_tokens, matched });
    }

    /// A number for a pool's endpoint.
    fn server(&mut self, pool: &Arc<str>, id: u32) -> u32 {
        let next = u32::try_from(self.servers.len()).unwrap_or(u32::MAX);
        *self.servers.entry((pool.clone(), id)).or_insert(next)
    }
}

impl OpenRequest {
    fn unmeasured(&self, end: Timestamp) -> UnmeasuredRequest {
        UnmeasuredRequest { server: self.server, decided: self.decided, end }
    }
}
