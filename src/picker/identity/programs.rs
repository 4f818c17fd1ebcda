//! What the picker remembers of programs until they end: which ids belong to one, its requests and its servers.
//!
//! Each id of a program leads to one [`Program`]. The end of a program is a flag of it, so ids that are still remembered
//! lead to nothing from then on.

use attache_pool::Endpoint;
use attache_request::agent::AgentIdentity;
use attache_types::rng;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// 100,000 ids of programs, chains and responses: at most 300 bytes a program, 30 MB.
pub(super) const MAX_IDS: usize = 100_000;
/// Most endpoints of which a program's requests are counted. A program has one or two, unless it moves.
const MAX_ENDPOINTS: usize = 16;

/// Requests by the address of their endpoint.
type EndpointCounts = SmallVec<[(Arc<str>, u64); 1]>;

/// A program, until it ends and all its ids are forgotten.
#[derive(Debug)]
pub(crate) struct Program {
    tenant: Option<Arc<str>>,
    pub(super) id: Arc<str>,
    ended: AtomicBool,
    requests: AtomicU64,
    in_flight: AtomicU32,
    endpoints: Mutex<EndpointCounts>,
}

impl Program {
    fn new(agent: &AgentIdentity) -> Arc<Self> {
        let (tenant, id) = (agent.tenant.clone(), agent.program.clone());
        let (ended, requests, in_flight) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU32::new(0));
        Arc::new(Self { tenant, id, ended, requests, in_flight, endpoints: Mutex::default() })
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdKind {
    Program,
    /// A chain or a stored response, whose requests may name nothing else.
    Part,
}

/// An id that is remembered: its program, and the id itself if it is that of a chain.
#[derive(Clone, Debug)]
struct Known {
    program: Arc<Program>,
    chain: Option<Arc<str>>,
}

/// The programs of each tenant. Least recently used ids are evicted. Keys are seeded hashes, so clients can't cause
/// collisions.
#[derive(Debug)]
pub(crate) struct Programs {
    seed: u64,
    ids: quick_cache::sync::Cache<u64, Known>,
}

impl Default for Programs {
    fn default() -> Self {
        Self::new(rng::system_seed())
    }
}

/// The key of an id whose session has this hash.
fn key(kind: IdKind, session: u64) -> u64 {
    match kind {
        IdKind::Program => session,
        IdKind::Part => !session,
    }
}

impl Programs {
    /// Remembers ids under this seed. Pickers that tell each other the ends of sessions have equal seeds.
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, ids: quick_cache::sync::Cache::new(MAX_IDS) }
    }

    /// The hash of a session's id.
    pub(crate) fn session(&self, tenant: Option<&str>, id: &str) -> u64 {
        let seed = tenant.map_or(self.seed, |tenant| xxh3_64_with_seed(tenant.as_bytes(), !self.seed));
        xxh3_64_with_seed(id.as_bytes(), seed)
    }

    /// The session with this hash, if it is known here: its tenant and its id, as a program or else as a chain.
    pub(crate) fn named(&self, session: u64) -> Option<(Option<Arc<str>>, Arc<str>)> {
        let program = || Some(self.ids.peek(&key(IdKind::Program, session))?.program);
        let chain = || {
            let known = self.ids.peek(&key(IdKind::Part, session))?;
            Some((known.program.tenant.clone(), known.chain?))
        };
        program().map(|program| (program.tenant.clone(), program.id.clone())).or_else(chain)
    }

    /// The program of a chain or of a stored response; `None` if it is unknown or has ended.
    pub(super) fn of(&self, tenant: Option<&str>, id: &str) -> Option<Arc<Program>> {
        let known = self.ids.get(&key(IdKind::Part, self.session(tenant, id)))?;
        Some(known.program).filter(|program| program.is_open())
    }

    /// The agent's program, which is remembered from now on.
    fn program(&self, agent: &AgentIdentity) -> Arc<Program> {
        let key = key(IdKind::Program, self.session(agent.tenant.as_deref(), &agent.program));
        let known = self.ids.get(&key).map(|known| known.program);
        known.filter(|program| program.is_open()).unwrap_or_else(|| {
            let program = Program::new(agent);
            self.ids.insert(key, Known { program: program.clone(), chain: None });
            program
        })
    }

    /// Remembers that the agent's chain belongs to its program.
    pub(super) fn learn_chain(&self, agent: &AgentIdentity) {
        self.learn(agent, &agent.chain, Some(agent.chain.clone()));
    }

    /// Remembers that this stored response belongs to the agent's program.
    pub(super) fn learn_response(&self, agent: &AgentIdentity, id: &str) {
        self.learn(agent, id, None);
    }

    fn learn(&self, agent: &AgentIdentity, id: &str, chain: Option<Arc<str>>) {
        let key = key(IdKind::Part, self.session(agent.tenant.as_deref(), id));
        self.ids.insert(key, Known { program: self.program(agent), chain });
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
        self.ids.len()
    }

    /// Ends the program of this id: all its ids are forgotten. `None` if it is unknown.
    pub(crate) fn end_program(&self, tenant: Option<&str>, id: &str) -> Option<KnownSession> {
        let (_, Known { program, .. }) = self.ids.remove(&key(IdKind::Program, self.session(tenant, id)))?;
        program.ended.store(true, Relaxed);
        Some(KnownSession::of(&program, true))
    }

    /// Forgets a chain. Its program goes on. `None` if no program of the chain is known.
    pub(crate) fn end_chain(&self, tenant: Option<&str>, id: &str) -> Option<KnownSession> {
        let (_, Known { program, .. }) = self.ids.remove(&key(IdKind::Part, self.session(tenant, id)))?;
        program.is_open().then(|| KnownSession::of(&program, false))
    }
}
