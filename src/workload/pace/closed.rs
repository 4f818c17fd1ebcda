//! Clients that wait: each sends a request, gets its answer, thinks, and sends the next one.

use crate::{Request, TraceError, Workload};
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Requests that are read ahead while their conversations wait for an answer; so many fit into 100 MB. When a trace has
/// one conversation longer than that, what follows is sent without waiting for its turn.
pub const MAX_WAITING: usize = 100_000;

/// The requests of an open-loop workload, sent by clients in a closed loop. Their own times are not looked at.
///
/// Requests of one session are sent one after the other, in their order, by the client that has the session.
/// What would follow from the answers of the inner workload is not asked for: a workload that is a closed loop
/// already must not be wrapped.
///
/// Answers come when the workload may fail to be read; the error is then kept for [`Workload::next`], so a driver asks
/// that once more at the end.
pub struct ClosedLoop {
    inner: Box<dyn Workload>,
    think: Duration,
    /// Clients that have not sent anything yet.
    fresh: u32,
    given: u64,
    /// Own numbers and sessions of the requests that are on their way, by the number that they were given.
    open: HashMap<u64, (u64, Option<u64>)>,
    /// Requests that wait for the answer to another one of their session.
    waiting: HashMap<u64, VecDeque<Request>>,
    waiting_total: usize,
    failed: Option<TraceError>,
}

impl ClosedLoop {
    /// This many clients, each of which thinks for `think` after an answer.
    ///
    /// # Errors
    /// When `clients` is 0.
    pub fn new(inner: Box<dyn Workload>, clients: u32, think: Duration) -> Result<Self, ParamError> {
        if clients == 0 {
            return Err(ParamError::value("clients", clients, "a whole number from 1 is allowed"));
        }
        Ok(Self {
            inner,
            think,
            fresh: clients,
            given: 0,
            open: HashMap::new(),
            waiting: HashMap::new(),
            waiting_total: 0,
            failed: None,
        })
    }

    fn give(&mut self, request: Request, at: Timestamp) -> Request {
        let number = self.given;
        self.given += 1;
        if let Some(session) = request.session {
            self.waiting.entry(session).or_default();
        }
        self.open.insert(number, (request.number, request.session));
        Request { number, at, ..request }
    }

    /// The next request whose session has nothing on its way.
    fn pull(&mut self) -> Result<Option<Request>, TraceError> {
        while let Some(request) = self.inner.next()? {
            match request.session.and_then(|session| self.waiting.get_mut(&session)) {
                Some(queue) if self.waiting_total < MAX_WAITING => {
                    queue.push_back(request);
                    self.waiting_total += 1;
                }
                _ => return Ok(Some(request)),
            }
        }
        Ok(None)
    }

    /// The next request of a session that has had its answer.
    fn next_of(&mut self, session: u64) -> Option<Request> {
        let queue = self.waiting.get_mut(&session)?;
        match queue.pop_front() {
            Some(request) => {
                self.waiting_total -= 1;
                Some(request)
            }
            None => {
                self.waiting.remove(&session);
                None
            }
        }
    }
}

impl Workload for ClosedLoop {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        if let Some(error) = self.failed.take() {
            self.fresh = 0;
            return Err(error);
        }
        let Some(fresh) = self.fresh.checked_sub(1) else { return Ok(None) };
        self.fresh = fresh;
        let request = self.pull()?;
        Ok(request.map(|request| self.give(request, Timestamp(0))))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        let Some((_, session)) = self.open.remove(&number) else { return Vec::new() };
        let next = match session.and_then(|session| self.next_of(session)) {
            Some(request) => Some(request),
            None => self.pull().unwrap_or_else(|error| {
                self.failed = Some(error);
                None
            }),
        };
        next.map(|request| self.give(request, now.after(self.think))).into_iter().collect()
    }

    fn pair(&self, number: u64) -> u64 {
        self.open.get(&number).map_or(number, |(own, _)| *own)
    }

    fn total(&self) -> Option<u64> {
        self.inner.total()
    }
}
