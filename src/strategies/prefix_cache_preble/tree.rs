//! AIBrix's own bookkeeping: a radix tree of prompts. Each node has the endpoints that computed it and the requests
//! in the window.
//!
//! ```text
//! prefill cost of a node = (1 - hit tokens / prompt tokens) x requests x prefill(own tokens, tokens up to its end)
//! cost of an endpoint    = sum of (prefill cost + response tokens x 0.15 s)
//!                          over its nodes that had requests in the window
//! load of an endpoint    = requests in the window on all nodes that it computed
//! ```
//!
//! A node is a run of blocks, each of [`BLOCK_TOKENS`] tokens. Sums are kept per endpoint, so a decision does not
//! visit every node. Here models never share a node, so AIBrix's division by the number of models is by 1.
//!
//! Nodes name a [`HolderId`], which represents an endpoint until that is lost. The ids of a lost endpoint stop counting
//! at once, however many nodes have one; a node drops its own when it next changes.

use super::SECONDS_PER_TOKEN;
use super::cost::Gpu;
use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// 64 bytes of text in a block.
pub(super) const BLOCK_BYTES: usize = 64;
/// 16 tokens in a block, of 4 bytes each.
const BLOCK_TOKENS: u32 = 16;
/// At most 4,096 blocks of a prompt count: 65,536 tokens.
pub(super) const MAX_DEPTH: usize = 4_096;
/// 500,000 blocks. Beyond it the least recently used nodes are dropped.
const MAX_BLOCKS: usize = 500_000;
/// 100,000 nodes, each about 400 bytes with its entries in tables.
const MAX_NODES: usize = 100_000;
/// 500,000 requests in the window, 40 bytes each: 2,700 requests per second over 3 minutes. Beyond it the oldest stop
/// counting.
const MAX_EVENTS: usize = 500_000;
/// AIBrix drops nodes after 5 idle minutes.
const IDLE: Duration = Duration::from_secs(300);

/// Parameters of the cost of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    pub(super) gpu: Gpu,
    /// Tokens of a response.
    pub(super) decoding_length: u32,
    /// How long a request counts.
    pub(super) window: Duration,
}

/// Sums over the requests in the window that ended at one node.
#[derive(Clone, Copy, Debug, Default)]
struct RecentTotals {
    requests: u32,
    hit_tokens: u64,
    prompt_tokens: u64,
}

/// Identifies an endpoint from its first request until it is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct HolderId(u64);

#[derive(Debug)]
struct PrefixNode {
    parent: Option<u64>,
    children: SmallVec<[u64; 2]>,
    /// Number of blocks before this node.
    start: u32,
    blocks: Vec<u64>,
    holders: SmallVec<[HolderId; 4]>,
    used: Timestamp,
    recent: RecentTotals,
    /// Cost that the node adds to each of its holders, in nanoseconds.
    cost: u64,
}

/// An endpoint that served requests, and the sums over its nodes.
#[derive(Clone, Copy, Debug)]
struct Holder {
    endpoint: EndpointId,
    cost: u64,
    requests: u64,
}

/// One request, which counts until it leaves the window.
#[derive(Clone, Copy, Debug)]
struct RecentRequest {
    at: Timestamp,
    node: u64,
    hit_tokens: u64,
    prompt_tokens: u64,
}

/// The cached part of a prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixMatch {
    /// Length of the prefix in the tree, in blocks.
    pub(super) blocks: usize,
    /// The endpoints that computed the longest part of it, among those that the caller accepts.
    pub(super) endpoints: SmallVec<[EndpointId; 4]>,
}

/// The radix tree and the sums of each endpoint.
#[derive(Debug)]
pub(super) struct Tree {
    costs: Costs,
    nodes: AHashMap<u64, PrefixNode>,
    /// PrefixNode of each block.
    owner: AHashMap<u64, u64>,
    by_use: BTreeSet<(Timestamp, u64)>,
    events: VecDeque<RecentRequest>,
    holders: AHashMap<HolderId, Holder>,
    holder_ids: AHashMap<EndpointId, HolderId>,
    next: u64,
}

fn tokens(blocks: usize) -> u64 {
    blocks as u64 * u64::from(BLOCK_TOKENS)
}

impl Tree {
    pub(super) fn new(costs: Costs) -> Self {
        Self {
            costs,
            nodes: AHashMap::new(),
            owner: AHashMap::new(),
            by_use: BTreeSet::new(),
            events: VecDeque::new(),
            holders: AHashMap::new(),
            holder_ids: AHashMap::new(),
            next: 0,
        }
    }

    /// Looks up the prompt with these blocks: the length of its known prefix, and the accepted endpoints that
    /// computed most of it.
    pub(super) fn known(&self, chain: &[u64], is_ready: impl Fn(EndpointId) -> bool) -> PrefixMatch {
        let blocks = chain.iter().take_while(|block| self.owner.contains_key(block)).count();
        let last = blocks.checked_sub(1).and_then(|last| chain.get(last)).and_then(|block| self.owner.get(block));
        let mut at = last.copied();
        while let Some(node) = at.and_then(|id| self.nodes.get(&id)) {
            let endpoint = |holder_id| self.holders.get(holder_id).map(|holder| holder.endpoint);
            let ready: SmallVec<[EndpointId; 4]> =
                node.holders.iter().filter_map(endpoint).filter(|id| is_ready(*id)).collect();
            if !ready.is_empty() {
                return PrefixMatch { blocks, endpoints: ready };
            }
            at = node.parent;
        }
        PrefixMatch { blocks, endpoints: SmallVec::new() }
    }

    /// Seconds of work and number of requests within the window.
    pub(super) fn load(&self, endpoint: EndpointId) -> (f64, u64) {
        let holder = self.holder_ids.get(&endpoint).and_then(|holder_id| self.holders.get(holder_id));
        holder.map_or((0.0, 0), |holder| (holder.cost as f64 / 1e9, holder.requests))
    }

    /// Records that a request with this prompt is sent to `endpoint`.
    pub(super) fn record(&mut self, chain: &[u64], endpoint: EndpointId, now: Timestamp) {
        let Some(leaf) = self.insert(chain, now) else { return };
        let holder_id = self.holder_id(endpoint);
        let mut at = Some(leaf);
        while let Some(id) = at {
            self.change(id, |node| {
                if !node.holders.contains(&holder_id) {
                    node.holders.push(holder_id);
                }
            });
            self.touch(id, now);
            at = self.nodes.get(&id).and_then(|node| node.parent);
        }
        let Some(node) = self.nodes.get(&leaf) else { return };
        let (hit_tokens, own) = (tokens(node.start as usize), tokens(node.blocks.len()));
        let event = RecentRequest { at: now, node: leaf, hit_tokens, prompt_tokens: hit_tokens + own };
        self.change(leaf, |node| {
            node.recent.requests += 1;
            node.recent.hit_tokens += event.hit_tokens;
            node.recent.prompt_tokens += event.prompt_tokens;
        });
        self.events.push_back(event);
    }

    /// Drops all that the endpoints in `lost` hold, in time that does not depend on how much that is.
    pub(super) fn forget(&mut self, lost: &[EndpointId]) {
        for endpoint in lost {
            if let Some(holder_id) = self.holder_ids.remove(endpoint) {
                self.holders.remove(&holder_id);
            }
        }
    }

    /// Id of the endpoint; creates a new one for its first request.
    fn holder_id(&mut self, endpoint: EndpointId) -> HolderId {
        if let Some(holder_id) = self.holder_ids.get(&endpoint) {
            return *holder_id;
        }
        let holder_id = HolderId(self.next);
        self.next += 1;
        self.holder_ids.insert(endpoint, holder_id);
        self.holders.insert(holder_id, Holder { endpoint, cost: 0, requests: 0 });
        holder_id
    }

    /// Drops requests that left the window or exceed [`MAX_EVENTS`], and nodes that are idle or too many.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while let Some(event) = self.events.front().copied() {
            if now.since(event.at) <= self.costs.window && self.events.len() <= MAX_EVENTS {
                break;
            }
            self.events.pop_front();
            self.change(event.node, |node| {
                node.recent.requests = node.recent.requests.saturating_sub(1);
                node.recent.hit_tokens = node.recent.hit_tokens.saturating_sub(event.hit_tokens);
                node.recent.prompt_tokens = node.recent.prompt_tokens.saturating_sub(event.prompt_tokens);
            });
        }
        while let Some((used, id)) = self.by_use.first().copied() {
            if now.since(used) <= IDLE && self.owner.len() <= MAX_BLOCKS && self.nodes.len() <= MAX_NODES {
                break;
            }
            self.remove(id);
        }
    }

    /// The node at whose end the prompt ends, created if needed; `None` for an empty prompt.
    fn insert(&mut self, chain: &[u64], now: Timestamp) -> Option<u64> {
        let known = chain.iter().take_while(|block| self.owner.contains_key(block)).count();
        let parent = known.checked_sub(1).and_then(|last| self.split_after(*chain.get(last)?));
        let rest = chain.get(known..)?;
        if rest.is_empty() {
            return parent;
        }
        let id = self.add(PrefixNode {
            parent,
            children: SmallVec::new(),
            start: known as u32,
            blocks: rest.to_vec(),
            holders: SmallVec::new(),
            used: now,
            recent: RecentTotals::default(),
            cost: 0,
        });
        Some(id)
    }

    /// Returns the node that ends with `block`, which must be in the tree. Splits a longer node: its remainder
    /// becomes a child and keeps the requests.
    fn split_after(&mut self, block: u64) -> Option<u64> {
        let lower = *self.owner.get(&block)?;
        let node = self.nodes.get_mut(&lower)?;
        let at = node.blocks.iter().position(|own| *own == block)? + 1;
        if at == node.blocks.len() {
            return Some(lower);
        }
        let rest = node.blocks.split_off(at);
        let (parent, start) = (node.parent, node.start);
        let blocks = std::mem::replace(&mut node.blocks, rest);
        let (holders, used) = (node.holders.clone(), node.used);
        node.start += at as u32;
        let children = SmallVec::from_slice(&[lower]);
        let upper = self.add(PrefixNode {
            parent,
            children,
            start,
            blocks,
            holders,
            used,
            recent: RecentTotals::default(),
            cost: 0,
        });
        if let Some(above) = parent.and_then(|id| self.nodes.get_mut(&id)) {
            above.children.retain(|child| *child != lower);
        }
        // The remainder has fewer tokens of its own, so its cost changes.
        self.change(lower, |node| node.parent = Some(upper));
        Some(upper)
    }

    fn add(&mut self, node: PrefixNode) -> u64 {
        let id = self.next;
        self.next += 1;
        self.owner.extend(node.blocks.iter().map(|block| (*block, id)));
        self.by_use.insert((node.used, id));
        if let Some(parent) = node.parent.and_then(|id| self.nodes.get_mut(&id)) {
            parent.children.push(id);
        }
        self.nodes.insert(id, node);
        id
    }

    fn touch(&mut self, id: u64, now: Timestamp) {
        if let Some(node) = self.nodes.get_mut(&id) {
            self.by_use.remove(&(node.used, id));
            node.used = now;
            self.by_use.insert((now, id));
        }
    }

    /// Applies `change` to a node and updates the sums of its holders. Also drops the node's ids of lost endpoints.
    fn change(&mut self, id: u64, change: impl FnOnce(&mut PrefixNode)) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.holders.retain(|holder_id| self.holders.contains_key(holder_id));
        add(&mut self.holders, node, false);
        change(node);
        node.cost = self.costs.of(node);
        add(&mut self.holders, node, true);
    }

    /// Drops a node and its descendants.
    fn remove(&mut self, id: u64) {
        let parent = self.nodes.get(&id).and_then(|node| node.parent);
        if let Some(above) = parent.and_then(|id| self.nodes.get_mut(&id)) {
            above.children.retain(|child| *child != id);
        }
        let mut all: Vec<u64> = vec![id];
        while let Some(id) = all.pop() {
            let Some(node) = self.nodes.remove(&id) else { continue };
            add(&mut self.holders, &node, false);
            self.by_use.remove(&(node.used, id));
            node.blocks.iter().for_each(|block| {
                self.owner.remove(block);
            });
            all.extend(node.children);
        }
    }
}

/// Adds the cost and requests of `node` to the sums of its holders, or subtracts them.
fn add(holders: &mut AHashMap<HolderId, Holder>, node: &PrefixNode, adds: bool) {
    if node.recent.requests == 0 {
        return;
    }
    for holder_id in &node.holders {
        let Some(sum) = holders.get_mut(holder_id) else { continue };
        let (cost, requests) = (node.cost, u64::from(node.recent.requests));
        if adds {
            (sum.cost, sum.requests) = (sum.cost.saturating_add(cost), sum.requests + requests);
        } else {
            (sum.cost, sum.requests) = (sum.cost.saturating_sub(cost), sum.requests.saturating_sub(requests));
        }
    }
}

impl Costs {
    /// Cost that a node adds to each endpoint that computed it, in nanoseconds.
    fn of(&self, node: &PrefixNode) -> u64 {
        let recent = node.recent;
        if recent.requests == 0 {
            return 0;
        }
        let missed = 1.0 - recent.hit_tokens as f64 / recent.prompt_tokens.max(1) as f64;
        let own = node.blocks.len() as u32 * BLOCK_TOKENS;
        let seconds = self.gpu.prefill(own, own + node.start * BLOCK_TOKENS, true);
        let answer = f64::from(self.decoding_length) * SECONDS_PER_TOKEN;
        ((missed * f64::from(recent.requests) * seconds + answer) * 1e9) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: Costs = Costs { gpu: Gpu::V100, decoding_length: 45, window: Duration::from_secs(180) };
    const ANSWER: f64 = 45.0 * 0.15;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    /// Blocks of a prompt: `shared` blocks that other prompts have too, and `own` blocks that only this one has.
    fn prompt(shared: u64, own: u64, number: u64) -> Vec<u64> {
        (0..shared).chain((0..own).map(|i| (number + 1) * 1_000_000 + i)).collect()
    }

    fn close(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-6, "{got}, not {expected}");
    }

    #[test]
    fn requests_cost_prefill_and_response() {
        let mut tree = Tree::new(COSTS);
        let (a, b) = (EndpointId(1), EndpointId(2));
        tree.record(&prompt(0, 25, 0), a, at(0));
        close(tree.load(a).0, Gpu::V100.prefill(400, 400, true) + ANSWER);
        // The same prompt again counts two prefills and, as in AIBrix, one response.
        tree.record(&prompt(0, 25, 0), a, at(1));
        close(tree.load(a).0, 2.0 * Gpu::V100.prefill(400, 400, true) + ANSWER);
        assert_eq!((tree.load(a).1, tree.load(b)), (2, (0.0, 0)));
    }

    #[test]
    fn shared_prefixes_split_nodes_and_lower_the_miss_rate() {
        let mut tree = Tree::new(COSTS);
        let (a, b) = (EndpointId(1), EndpointId(2));
        tree.record(&prompt(50, 50, 0), a, at(0));
        tree.record(&prompt(50, 50, 1), b, at(0));
        assert_eq!(tree.nodes.len(), 3, "the shared part, and two rests");
        // The first prompt was inserted whole, so all of it missed. Of the second, half hit.
        let half = Gpu::V100.prefill(800, 1_600, true);
        close(tree.load(a).0, half + ANSWER);
        close(tree.load(b).0, half / 2.0 + ANSWER);
        let known = tree.known(&prompt(50, 50, 2), |_| true);
        assert_eq!((known.blocks, known.endpoints.to_vec()), (50, vec![a, b]), "both computed the shared part");
        let known = tree.known(&prompt(50, 50, 1), |_| true);
        assert_eq!((known.blocks, known.endpoints.to_vec()), (100, vec![b]));
        let known = tree.known(&prompt(50, 50, 1), |id| id == a);
        assert_eq!((known.blocks, known.endpoints.to_vec()), (100, vec![a]), "the nearest node of a ready endpoint");
        assert_eq!(tree.known(&prompt(0, 9, 7), |_| true).blocks, 0);
    }

    #[test]
    fn requests_leave_the_window_and_nodes_the_tree() {
        let mut tree = Tree::new(COSTS);
        tree.record(&prompt(10, 10, 0), EndpointId(1), at(0));
        tree.record(&prompt(10, 10, 1), EndpointId(1), at(100));
        tree.expire(at(181));
        assert_eq!((tree.load(EndpointId(1)).1, tree.nodes.len()), (1, 3));
        tree.expire(at(301));
        assert_eq!((tree.load(EndpointId(1)), tree.nodes.len()), ((0.0, 0), 2), "the idle rest is gone");
        tree.expire(at(401));
        assert!(tree.nodes.is_empty() && tree.owner.is_empty() && tree.by_use.is_empty() && tree.events.is_empty());
        assert_eq!(tree.load(EndpointId(1)), (0.0, 0));
    }

    #[test]
    fn memory_is_bounded() {
        let mut tree = Tree::new(COSTS);
        for i in 0..300 {
            tree.record(&prompt(0, MAX_DEPTH as u64, i), EndpointId(1), at(0));
        }
        tree.expire(at(0));
        assert!(tree.owner.len() <= MAX_BLOCKS, "{}", tree.owner.len());
        assert_eq!(tree.load(EndpointId(1)).1, tree.nodes.len() as u64, "dropped nodes no longer count");
    }

    #[test]
    fn lost_endpoint_holds_nothing() {
        let mut tree = Tree::new(COSTS);
        let (a, b) = (EndpointId(1), EndpointId(2));
        tree.record(&prompt(10, 10, 0), a, at(0));
        tree.record(&prompt(10, 10, 1), b, at(0));
        tree.forget(&[a]);
        assert_eq!(tree.load(a), (0.0, 0));
        assert_eq!(tree.known(&prompt(10, 10, 0), |_| true).endpoints.as_slice(), [b], "the part that both computed");
        assert_eq!(tree.known(&prompt(10, 10, 1), |_| true).endpoints.as_slice(), [b]);
        // The endpoint may come back with an empty cache: nodes name it by its old id, which no longer counts.
        tree.record(&prompt(0, 5, 7), a, at(1));
        assert_eq!(tree.known(&prompt(10, 10, 0), |id| id == a).endpoints.as_slice(), []);
        assert_eq!((tree.load(a).1, tree.load(b).1), (1, 1));
        tree.record(&prompt(10, 10, 0), b, at(2));
        assert!(tree.nodes.values().all(|node| node.holders.len() == 1), "a node that changes drops the lost one");
    }

    #[test]
    fn loss_of_an_endpoint_visits_no_node() {
        let mut tree = Tree::new(COSTS);
        (0..1_000).for_each(|i| tree.record(&prompt(0, 2, i), EndpointId(1), at(0)));
        tree.forget(&[EndpointId(1)]);
        assert_eq!(tree.load(EndpointId(1)), (0.0, 0));
        assert!(tree.nodes.values().all(|node| node.holders.len() == 1), "nodes were changed");
        tree.expire(at(400));
        assert!(tree.nodes.is_empty() && tree.holders.is_empty());
    }

    #[test]
    fn requests_in_the_window_are_bounded() {
        let mut tree = Tree::new(COSTS);
        for i in 0..MAX_EVENTS as u64 + 500 {
            tree.record(&prompt(0, 1, i % 7), EndpointId(i as u32 % 3), at(0));
            tree.expire(at(0));
        }
        assert_eq!(tree.events.len(), MAX_EVENTS);
        let counted: u32 = tree.nodes.values().map(|node| node.recent.requests).sum();
        assert_eq!(counted as usize, MAX_EVENTS, "the oldest stopped counting");
    }
}
