//! What the picker remembers of programs until they end: which ids belong to one, its requests and its servers.
//!
//! Each id of a program leads to one [`Program`]. The end of a program is a flag of it, so ids that are still remembered
//! lead to nothing from then on.

use attache_pool::Endpoint;
use attache_request::agent::AgentIdentity;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// 100,000 ids of programs, chains and responses: at most 300 bytes a program, 30 MB.
pub(super) const MAX_IDS: usize = 100_000;
/// Most endpoints of which a program's requests are counted. A program has one or two, unless it moves.
const MAX_ENDPOINTS: usize = 16;

/// Requests by the address of their endpoint.
type EndpointCounts = SmallVec<[(Arc<str>, u64); 1]>;

/// A program, until it ends and all its ids are forgotten.
#[derive(Debug)]
pub(crate) struct Program {
    pub(super) id: Arc<str>,
    ended: AtomicBool,
    requests: AtomicU64,
    in_flight: AtomicU32,
    endpoints: Mutex<EndpointCounts>,
}

impl Program {
    fn new(id: &Arc<str>) -> Arc<Self> {
        let (ended, requests, in_flight) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU32::new(0));
        Arc::new(Self { id: id.clone(), ended, requests, in_flight, endpoints: Mutex::default() })
    }

    fn is_open(&self) -> bool {
        !self.ended.load(Relaxed)
    }

    fn count(&self, endpoint: &Endpoint) {
        self.requests.fetch_add(1, Relaxed);
        self.in_flight.fetch_add(1, Relaxed);
        let mut endpoints = self.endpoints.lock();
        if let Some((_, requests)) = endpoints.iter_mut().find(|(address, _)| *address == endpoint.authority) {
            *requests += 1;
        } else if endpoints.len() < MAX_ENDPOINTS {
            endpoints.push((endpoint.authority.clone(), 1));
        }
    }
}

/// A request in flight of a program. Dropping it means that the request has ended.
#[derive(Debug)]
pub(crate) struct Turn(Arc<Program>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// What was known of a session when it ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KnownSession {
    /// The program to which the session belonged; missing if the session is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<Arc<str>>,
    /// Whether the id is that of the whole program. If not, it is that of a chain, and the program goes on.
    pub is_program: bool,
    /// Routed requests of the program.
    pub requests: u64,
    /// Those of them whose response has not ended.
    pub in_flight: u32,
    /// Requests by the address of the endpoint that they were routed to, of at most 16 endpoints.
    pub endpoints: BTreeMap<Arc<str>, u64>,
}

impl KnownSession {
    fn of(program: &Program, is_program: bool) -> Self {
        Self {
            program: Some(program.id.clone()),
            is_program,
            requests: program.requests.load(Relaxed),
            in_flight: program.in_flight.load(Relaxed),
            endpoints: program.endpoints.lock().iter().cloned().collect(),
        }
    }
}

/// What an id stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Named {
    Program,
    /// A chain or a stored response, whose requests may name nothing else.
    Part,
}

/// The programs of each tenant. Least recently used ids are evicted.
#[derive(Debug)]
pub(crate) struct Programs {
    hasher: ahash::RandomState,
    programs: quick_cache::sync::Cache<u64, Arc<Program>>,
}

impl Default for Programs {
    fn default() -> Self {
        Self { hasher: ahash::RandomState::new(), programs: quick_cache::sync::Cache::new(MAX_IDS) }
    }
}

impl Programs {
    fn key(&self, tenant: Option<&str>, named: Named, id: &str) -> u64 {
        self.hasher.hash_one((tenant, named, id))
    }

    /// The program of a chain or of a stored response; `None` if it is unknown or has ended.
    pub(super) fn of(&self, tenant: Option<&str>, id: &str) -> Option<Arc<Program>> {
        self.programs.get(&self.key(tenant, Named::Part, id)).filter(|program| program.is_open())
    }

    /// The agent's program, which is remembered from now on.
    fn program(&self, agent: &AgentIdentity) -> Arc<Program> {
        let key = self.key(agent.tenant.as_deref(), Named::Program, &agent.program);
        self.programs.get(&key).filter(|program| program.is_open()).unwrap_or_else(|| {
            let program = Program::new(&agent.program);
            self.programs.insert(key, program.clone());
            program
        })
    }

    /// Remembers that this chain or response belongs to the agent's program.
    pub(super) fn learn(&self, agent: &AgentIdentity, id: &str) {
        self.programs.insert(self.key(agent.tenant.as_deref(), Named::Part, id), self.program(agent));
    }

    /// Counts a request of the agent, which is routed to `endpoint`, until the result is dropped.
    pub(crate) fn begin(&self, agent: &AgentIdentity, endpoint: &Endpoint) -> Turn {
        let program = self.program(agent);
        program.count(endpoint);
        Turn(program)
    }

    /// Ids that are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.programs.len()
    }

    /// Ends the program of this id: all its ids are forgotten. `None` if it is unknown.
    pub(crate) fn end_program(&self, tenant: Option<&str>, id: &str) -> Option<KnownSession> {
        let (_, program) = self.programs.remove(&self.key(tenant, Named::Program, id))?;
        program.ended.store(true, Relaxed);
        Some(KnownSession::of(&program, true))
    }

    /// Forgets a chain. Its program goes on. `None` if no program of the chain is known.
    pub(crate) fn end_chain(&self, tenant: Option<&str>, id: &str) -> Option<KnownSession> {
        let (_, program) = self.programs.remove(&self.key(tenant, Named::Part, id))?;
        program.is_open().then(|| KnownSession::of(&program, false))
    }
}
