//! Limits on the open connections of each listener, so that no pod can use up the process's file descriptors or
//! memory.
//!
//! A peer is an IP address. When a listener is full, the peer with the most connections loses one: first one that has
//! sent nothing useful yet, then the one that was idle for longest, last one with requests in flight. A peer never
//! loses a connection with requests in flight to a new connection of its own; the new one is refused instead. Buffered
//! bytes and HTTP/2 streams without a message are shared in the same way (`streams`). So an attacker that opens
//! connections or streams evicts its own.
//!
//! Used by `tls`, `server`, `health`, `admin` and `kv_events`.

mod descriptors;
mod streams;
#[cfg(test)]
mod tests;

pub use descriptors::{Listeners, descriptor_limit};
pub use streams::OpenStream;

use crate::log_counter::LogCounter;
use ahash::AHashMap;
use attache_types::labels::Counts;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A new connection waits this long for an evicted one to close, and is refused then.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Time from accept until a connection has opened: the TLS handshake, and the first bytes of HTTP.
pub const OPENING_TIMEOUT: Duration = Duration::from_secs(15);
/// HTTP/2 streams of one listener that have sent no message yet. A gateway sends the first message with the headers, so
/// it has such streams for moments only.
const MAX_SILENT_STREAMS: usize = 4_096;

/// Limits of the connections, streams and bytes of one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Open connections, at least 1.
    pub connections: usize,
    /// Time from accept until [`Slot::opened`].
    pub opening: Duration,
    /// Bytes that all connections may hold together ([`Slot::hold`]).
    pub held_bytes: usize,
    /// HTTP/2 streams that all connections may have open together ([`Client::open`]).
    pub streams: usize,
    /// Those of them that have sent no message yet.
    pub silent_streams: usize,
}

impl ConnectionLimits {
    /// Limits with this number of connections, [`OPENING_TIMEOUT`], and no limit on bytes and streams with a message.
    #[must_use]
    pub fn of(connections: usize) -> Self {
        Self {
            connections: connections.max(1),
            opening: OPENING_TIMEOUT,
            held_bytes: usize::MAX,
            streams: usize::MAX,
            silent_streams: MAX_SILENT_STREAMS,
        }
    }
}

attache_types::labels! {
    /// The reason for which Attaché closed a connection.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Closed {
        /// The listener was full, and no connection could be evicted for the new one.
        Refused => "refused",
        /// The listener was full, and a new connection took its place.
        Evicted => "evicted",
        /// It did not open, or did not finish a frame, in time.
        Timeout => "timeout",
        /// The listener's connections held too many bytes.
        Memory => "memory",
        /// Too many HTTP/2 streams without a message, or too much memory of streams that have ended.
        Streams => "streams",
    }
}

/// The open connections of one listener.
#[derive(Debug)]
pub struct Connections {
    limits: ConnectionLimits,
    table: Mutex<ConnectionTable>,
    /// Number of connections accepted so far, by which the age of connections is compared.
    sequence: AtomicU64,
    /// Bytes held by all connections.
    held: AtomicUsize,
    /// Open HTTP/2 streams of all connections, and those of them that have sent no message yet.
    streams: AtomicUsize,
    silent: AtomicUsize,
    /// The sum of the most streams that each open connection had at once.
    peaks: AtomicUsize,
    /// Streams that were refused because too many were open.
    refused: LogCounter,
    /// Notified when a connection has closed.
    freed: Notify,
    closed: Counts<Closed>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    peers: AHashMap<IpAddr, Vec<Arc<ConnectionEntry>>>,
    open: usize,
    /// Number of connections that must close and have not closed yet.
    closing: usize,
}

/// One open connection and its state.
struct ConnectionEntry {
    id: u64,
    peer: SocketAddr,
    /// The listener. Its table has the entry only while the connection is open, so both are freed.
    of: Arc<Connections>,
    accepted: Instant,
    opened: AtomicBool,
    /// Open streams of all connections of this peer.
    of_peer: Arc<AtomicUsize>,
    /// Open streams where the listener counts them, the most at once so far, and those of the open ones that have sent
    /// no message yet.
    open: AtomicUsize,
    peak: AtomicUsize,
    silent: AtomicUsize,
    /// Value of the listener's `sequence` when bytes were last received.
    active: AtomicU64,
    held: AtomicUsize,
    closing: AtomicBool,
    waker: AtomicWaker,
}

impl fmt::Debug for ConnectionEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionEntry").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl ConnectionEntry {
    /// Sort key of evictions: the smallest connection is evicted first.
    fn worth(&self) -> (bool, bool, u64) {
        (self.has_requests(), self.opened.load(Relaxed), self.active.load(Relaxed))
    }

    /// Whether requests are in flight.
    fn has_requests(&self) -> bool {
        self.open.load(Relaxed) > self.silent.load(Relaxed)
    }

    fn ip(&self) -> IpAddr {
        self.peer.ip().to_canonical()
    }

    fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.closing.load(Relaxed) {
            self.waker.register(cx.waker());
            // It may have been closed before the waker was registered.
            if !self.closing.load(Relaxed) {
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }
}

/// The next step of [`Connections::admit`].
enum Admission {
    Admitted(Arc<ConnectionEntry>),
    /// A connection is closing, and its place becomes free.
    Closing,
    Refused,
}

impl ConnectionTable {
    fn close(&mut self, entry: &ConnectionEntry) {
        if !entry.closing.swap(true, Relaxed) {
            self.closing += 1;
            entry.waker.wake();
        }
    }

    /// Returns the connection that a new one from `ip` may replace.
    fn victim(&self, ip: IpAddr) -> Option<Arc<ConnectionEntry>> {
        let own = self.peers.get(&ip).map_or(0, Vec::len) + 1;
        let size = |peer: &IpAddr, entries: &[Arc<ConnectionEntry>]| if *peer == ip { own } else { entries.len() };
        let largest = self.peers.iter().map(|(peer, entries)| size(peer, entries)).max()?.max(own);
        let of_largest = self.peers.iter().filter(|(peer, entries)| size(peer, entries) == largest);
        let entries = of_largest.flat_map(|(_, entries)| entries);
        entries.filter(|e| largest > own || !e.has_requests()).min_by_key(|e| e.worth()).cloned()
    }

    /// Closes connections until at most `excess` of what `held` counts remains to be freed: each time the peer that
    /// holds most loses the connection that holds most. Returns `false` if that is `own`.
    fn close_largest(
        &mut self,
        excess: usize,
        own: Option<u64>,
        held: impl Fn(&ConnectionEntry) -> usize,
        mut closed: impl FnMut(),
    ) -> bool {
        let (mut peers, mut closing) = (AHashMap::<IpAddr, usize>::new(), 0);
        for (ip, entry) in self.peers.iter().flat_map(|(ip, entries)| entries.iter().map(move |entry| (ip, entry))) {
            match entry.closing.load(Relaxed) {
                true => closing += held(entry),
                false => *peers.entry(*ip).or_default() += held(entry),
            }
        }
        while excess > closing {
            closed();
            let largest = peers.iter().max_by_key(|(_, held)| **held).and_then(|(ip, _)| {
                let entries = self.peers.get(ip)?.iter().filter(|e| !e.closing.load(Relaxed));
                entries.max_by_key(|e| held(e)).cloned()
            });
            let Some(victim) = largest.filter(|e| Some(e.id) != own && held(e) > 0) else { return false };
            self.close(&victim);
            let freed = held(&victim);
            closing += freed;
            peers.entry(victim.ip()).and_modify(|held| *held = held.saturating_sub(freed));
        }
        true
    }
}

impl Connections {
    /// Creates an empty set of connections with these limits.
    #[must_use]
    pub fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            table: Mutex::default(),
            sequence: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            streams: AtomicUsize::new(0),
            silent: AtomicUsize::new(0),
            peaks: AtomicUsize::new(0),
            refused: LogCounter::default(),
            freed: Notify::new(),
            closed: Default::default(),
        })
    }

    /// Returns the configured limits.
    #[must_use]
    pub fn limits(&self) -> ConnectionLimits {
        self.limits
    }

    /// Returns the number of open connections, including those that are closing.
    #[must_use]
    pub fn open(&self) -> usize {
        self.table.lock().open
    }

    /// Returns the bytes held by all connections, including queued frames.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Returns how many connections Attaché has closed for this reason; for [`Closed::Memory`], also
    /// how often bytes were refused.
    #[must_use]
    pub fn closed(&self, why: Closed) -> u64 {
        self.closed.get(why)
    }

    /// Returns the number of open HTTP/2 streams.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.streams.load(Relaxed)
    }

    fn count(&self, why: Closed) {
        self.closed.count(why);
    }

    /// Admits a new connection of `peer`, evicting another one if necessary. On `None`, the caller must close it.
    pub async fn admit(self: &Arc<Self>, peer: SocketAddr) -> Option<Slot> {
        let deadline = Instant::now() + EVICTION_TIMEOUT;
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            let in_time = match self.try_admit(peer) {
                Admission::Admitted(entry) => return Some(Slot { entry, of: self.clone() }),
                Admission::Closing => tokio::time::timeout_at(deadline, freed).await.is_ok(),
                Admission::Refused => false,
            };
            if !in_time {
                self.count(Closed::Refused);
                return None;
            }
        }
    }

    fn try_admit(self: &Arc<Self>, peer: SocketAddr) -> Admission {
        let mut table = self.table.lock();
        if table.open >= self.limits.connections {
            if table.closing == 0 {
                let Some(victim) = table.victim(peer.ip().to_canonical()) else { return Admission::Refused };
                table.close(&victim);
                self.count(Closed::Evicted);
            }
            return Admission::Closing;
        }
        let id = self.sequence.fetch_add(1, Relaxed) + 1;
        let others = table.peers.get(&peer.ip().to_canonical()).and_then(|entries| entries.first());
        let of_peer = others.map_or_else(Arc::default, |other| other.of_peer.clone());
        let entry = Arc::new(ConnectionEntry {
            id,
            peer,
            of: self.clone(),
            of_peer,
            open: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            silent: AtomicUsize::new(0),
            accepted: Instant::now(),
            opened: AtomicBool::new(false),
            active: AtomicU64::new(id),
            held: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        table.open += 1;
        table.peers.entry(entry.ip()).or_default().push(entry.clone());
        Admission::Admitted(entry)
    }

    /// Closes connections that have not opened in time. Call it about once per second.
    pub fn sweep(&self) {
        let mut table = self.table.lock();
        let late = |entry: &&Arc<ConnectionEntry>| {
            !entry.opened.load(Relaxed)
                && !entry.closing.load(Relaxed)
                && entry.accepted.elapsed() >= self.limits.opening
        };
        let late: Vec<_> = table.peers.values().flatten().filter(late).cloned().collect();
        for entry in late {
            table.close(&entry);
            self.count(Closed::Timeout);
        }
    }

    /// Accounts `more` bytes to `entry`. When all connections together hold too many, the peer that holds most loses
    /// its largest connection. Returns `false` if that is the entry's own connection; then nothing was accounted.
    fn charge(&self, entry: &ConnectionEntry, more: usize) -> bool {
        let total = self.held.fetch_add(more, Relaxed).saturating_add(more);
        entry.held.fetch_add(more, Relaxed);
        if total <= self.limits.held_bytes {
            return true;
        }
        let mut table = self.table.lock();
        let excess = self.held.load(Relaxed).saturating_sub(self.limits.held_bytes);
        let held = |entry: &ConnectionEntry| entry.held.load(Relaxed);
        // Frames queued by closed connections may be all that is held.
        let enough = table.close_largest(excess, Some(entry.id), held, || self.count(Closed::Memory));
        if !enough {
            self.discharge(entry, more);
        }
        enough
    }

    fn discharge(&self, entry: &ConnectionEntry, less: usize) {
        self.held.fetch_sub(less, Relaxed);
        entry.held.fetch_sub(less, Relaxed);
    }
}

/// The place of one open connection; drop it after its socket.
#[derive(Debug)]
pub struct Slot {
    entry: Arc<ConnectionEntry>,
    of: Arc<Connections>,
}

impl Slot {
    /// Returns the peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.entry.peer
    }

    /// Records that bytes were received.
    pub fn touch(&self) {
        self.entry.active.store(self.of.sequence.load(Relaxed), Relaxed);
    }

    /// Records that the connection is in use: the opening timeout no longer applies, and connections that have not
    /// opened are evicted before it.
    pub fn opened(&self) {
        self.entry.opened.store(true, Relaxed);
    }

    /// Records that the connection's owner closes it because something took too long.
    pub fn timed_out(&self) {
        self.of.count(Closed::Timeout);
    }

    /// Polls whether the connection must be closed.
    pub fn poll_closed(&self, cx: &Context<'_>) -> Poll<()> {
        self.entry.poll_closed(cx)
    }

    /// Whether the connection must be closed.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.entry.closing.load(Relaxed)
    }

    /// Waits until the connection must be closed.
    pub async fn closed(&self) {
        std::future::poll_fn(|cx| self.poll_closed(cx)).await;
    }

    /// Returns a handle to the connection for its requests.
    #[must_use]
    pub fn client(&self) -> Client {
        Client(self.entry.clone())
    }

    /// Accounts memory to the connection. Returns `None` when the listener's connections hold too many bytes, and
    /// this peer most of them.
    #[must_use]
    pub fn hold(&self, bytes: usize) -> Option<ConnectionMemory> {
        let mut held = ConnectionMemory { bytes: 0, entry: self.entry.clone(), of: self.of.clone() };
        held.resize(bytes).then_some(held)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.of.table.lock();
        table.open -= 1;
        if self.is_closing() {
            table.closing -= 1;
        }
        let ip = self.entry.ip();
        if let Some(entries) = table.peers.get_mut(&ip) {
            entries.retain(|entry| entry.id != self.entry.id);
            if entries.is_empty() {
                table.peers.remove(&ip);
            }
        }
        drop(table);
        self.of.peaks.fetch_sub(self.entry.peak.load(Relaxed), Relaxed);
        self.of.freed.notify_waiters();
    }
}

/// The connection that a request arrived on.
#[derive(Clone, Debug)]
pub struct Client(Arc<ConnectionEntry>);

impl Client {
    /// Returns the peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    /// Waits until the connection must be closed. Must be called by the task that serves it.
    pub async fn closed(&self) {
        std::future::poll_fn(|cx| self.0.poll_closed(cx)).await;
    }

    /// Counts an open stream with a request in flight, until the value is dropped. Returns `None` if the listener's
    /// connections, or those of this peer, have too many streams open.
    #[must_use]
    pub fn open(self) -> Option<OpenStream> {
        OpenStream::of(self.0)
    }
}

/// Memory that is accounted to a connection, until it is dropped. It may outlive the connection.
#[derive(Debug)]
pub struct ConnectionMemory {
    bytes: usize,
    entry: Arc<ConnectionEntry>,
    of: Arc<Connections>,
}

impl ConnectionMemory {
    /// Changes the accounted bytes. Returns `false` if that would exceed the limit; then nothing has changed.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) if !self.of.charge(&self.entry, more) => return false,
            Some(_) => {}
            None => self.of.discharge(&self.entry, self.bytes - bytes),
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for ConnectionMemory {
    fn drop(&mut self) {
        self.of.discharge(&self.entry, self.bytes);
    }
}
