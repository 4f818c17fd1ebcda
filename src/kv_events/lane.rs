//! The event stream of one engine: reads it, tracks its sequence, requests replays, and sets the trust in its holder.

use super::apply::{Applier, BatchEffect};
use super::cursor::{Apply, Ask, Cursor};
use super::replay::{self, Replay, ReplayMessage};
use super::stats::{Count, KvEventStats};
use super::subscription::{MemoryLimits, Timing};
use super::zmtp::{Connection, Message, Role, ZmtpError};
use attache_pool::{PoolEvent, SnapshotStore};
use attache_prefix::adapters::{MAX_NAMES, MAX_PER_SERVER};
use attache_prefix::index::HolderId;
use attache_prefix::trust::{Doubt, Trust, TrustCell};
use attache_prefix::wire;
use attache_record::{KvChange, KvTape};
use attache_serving::connections::ConnectionMemory;
use attache_types::clock::{Clock, Timestamp};
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use attache_types::throttle::Throttle;
use bytes::Bytes;
use futures_util::FutureExt;
use rand::RngExt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, UNIX_EPOCH};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::coop::unconstrained;
use tokio_util::sync::CancellationToken;

/// How often the pause before a complete replay may double.
const MAX_RETRY_DOUBLINGS: u32 = 4;

/// The engine of a lane.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) endpoint: EndpointId,
    pub(super) name: Arc<str>,
    pub(super) rank: u16,
    /// Its cache in the prefix index.
    pub(super) holder: HolderId,
    /// Number of ranks of the endpoint, which share its capacity.
    pub(super) ranks: u16,
}

/// State that a lane shares with the other lanes of its pool.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) store: Arc<SnapshotStore>,
    pub(super) stats: Arc<KvEventStats>,
    pub(super) replays: Arc<Semaphore>,
    pub(super) bounds: MemoryLimits,
    pub(super) timing: Timing,
    pub(super) clock: Clock,
    /// The recording of the pool's KV events.
    pub(super) tape: KvTape,
    /// Channel to the pool's writer, for caches that engines have cleared.
    pub(super) events: Option<mpsc::Sender<PoolEvent>>,
    /// How often a holder fell short of memory, for all lanes.
    pub(super) shortages: Arc<watch::Sender<u64>>,
    /// Limits the log lines about blocks that were reported again, for all lanes.
    pub(super) repeated_reports: Arc<Throttle>,
}

/// Information about the engine besides its stream.
#[derive(Debug)]
pub(super) struct EngineUpdates {
    /// Start time of its process according to its metrics: Unix time, seconds.
    pub(super) started: watch::Receiver<Option<f64>>,
    /// Number of tokens in the pool's blocks.
    pub(super) size: watch::Receiver<u32>,
    /// As [`Shared::shortages`].
    pub(super) shortages: watch::Receiver<u64>,
}

/// The source of the live stream.
#[derive(Debug)]
pub(super) enum Live {
    /// A connection of its own to this address, for topics with this prefix.
    Own { address: SocketAddr, topic: Arc<str> },
    /// Frames from the central socket.
    Fed(Fed),
}

/// The receiving end of a lane's queue.
#[derive(Debug)]
pub(super) struct Fed {
    pub(super) inbox: mpsc::Receiver<FromCentral>,
    /// Whether frames were dropped because the queue was full.
    pub(super) overflowed: Arc<AtomicBool>,
}

/// A message from the central socket.
#[derive(Debug)]
pub(super) enum FromCentral {
    /// The engine has connected.
    Connected,
    /// A frame, and the accounting of its memory until it is processed.
    Frame(u64, Bytes, ConnectionMemory),
    /// The engine's connection has ended.
    Disconnected,
}

/// The stream of one engine.
#[derive(Debug)]
pub(super) struct Lane {
    identity: Identity,
    shared: Shared,
    replay_address: Option<SocketAddr>,
    trust: Arc<TrustCell>,
    cursor: Cursor,
    target: Target,
    replay: Option<Replay>,
    updates: EngineUpdates,
    /// When a frame last arrived or a check was made.
    heard: Timestamp,
    /// Since when it is suspect, or the time of the last attempt to recover.
    doubted: Timestamp,
    retries: u32,
    /// Whether the difference to the pool's block size was logged.
    is_size_logged: bool,
    rng: PickRng,
}

/// Applies batches on behalf of the cursor.
#[derive(Debug)]
struct Target {
    applier: Applier,
    shared: Shared,
    endpoint: EndpointId,
    ranks: u16,
    /// Largest number of blocks held before events were lost.
    held_before: u64,
}

impl Apply for Target {
    fn apply(&mut self, payload: &[u8]) -> BatchEffect {
        let outcome = self.applier.apply(payload);
        if outcome.cleared {
            self.held_before = 0;
            // If the writer's queue is full, it publishes nothing anyway; strategies then rely on
            // the age of their entries.
            let sent = self.shared.events.as_ref().map(|to| to.try_send(PoolEvent::CacheCleared { id: self.endpoint }));
            if let Some(Err(error)) = sent {
                tracing::debug!(%error, "cleared cache not passed to strategies");
            }
        }
        if let Some(made) = wire::timestamp(payload) {
            let clock = self.shared.clock;
            let now = clock.wall(clock.now()).duration_since(UNIX_EPOCH).unwrap_or_default();
            // If the engine's clock is ahead of ours, the lag counts as zero.
            self.shared.stats.set_lag(Duration::try_from_secs_f64(now.as_secs_f64() - made).unwrap_or_default());
        }
        outcome
    }

    fn clear(&mut self) {
        self.held_before = self.held_before.max(self.applier.held());
        self.applier.clear();
    }

    fn restart(&mut self) {
        self.held_before = 0;
        self.applier.restart();
    }

    /// Whether as many blocks are known as before, or the whole cache has been replaced. Blocks that wait for a parent
    /// show that older, unreported blocks exist.
    fn relearned(&self) -> bool {
        if self.applier.has_orphans() {
            return false;
        }
        if self.held_before > 0 && self.applier.held() >= self.held_before {
            return true;
        }
        let capacity = {
            let snapshot = self.shared.store.load();
            let at = snapshot.endpoints.binary_search_by_key(&self.endpoint, |e| e.endpoint.id).ok();
            let metrics = at.and_then(|i| snapshot.endpoints.get(i)).and_then(|e| e.metrics());
            metrics.and_then(|m| m.num_blocks)
        };
        capacity.is_some_and(|blocks| {
            let own = u64::from(blocks) / u64::from(self.ranks.max(1));
            own > 0 && self.applier.stored() >= own
        })
    }
}

impl Lane {
    /// Creates a lane that applies events with `applier` and writes the trust to `trust`.
    pub(super) fn new(
        identity: Identity,
        shared: Shared,
        replay_address: Option<SocketAddr>,
        applier: Applier,
        trust: Arc<TrustCell>,
        updates: EngineUpdates,
        rng: PickRng,
    ) -> Self {
        let backlog =
            super::cursor::Backlog { frames: shared.bounds.backlog_frames, bytes: shared.bounds.backlog_bytes };
        let target = Target {
            applier,
            shared: shared.clone(),
            endpoint: identity.endpoint,
            ranks: identity.ranks,
            held_before: 0,
        };
        Self {
            cursor: Cursor::new(replay_address.is_some(), backlog, shared.stats.clone()),
            heard: shared.clock.now(),
            doubted: shared.clock.now(),
            identity,
            shared,
            replay_address,
            trust,
            target,
            replay: None,
            updates,
            retries: 0,
            is_size_logged: false,
            rng,
        }
    }

    /// Reads until `shutdown`, and then removes the holder from the index.
    pub(super) async fn run(mut self, live: Live, shutdown: CancellationToken) {
        match live {
            Live::Own { address, topic } => {
                let _ = shutdown.run_until_cancelled(self.follow(address, &topic)).await;
            }
            Live::Fed(fed) => {
                let _ = shutdown.run_until_cancelled(self.listen(fed)).await;
            }
        }
    }

    /// Maintains a connection of its own; never returns.
    async fn follow(&mut self, address: SocketAddr, topic: &str) {
        let mut failures = 0u32;
        let mut is_logged = false;
        loop {
            let attempt = self.connect(address, topic).await;
            let error = match attempt {
                Ok(connection) => {
                    self.shared.stats.add(Count::Connections, 1);
                    is_logged = false;
                    let since = self.shared.clock.now();
                    let error = self.read(connection).await;
                    self.disconnected();
                    // Limits the rate of connections to a peer that accepts and then fails at once.
                    let lasted = self.shared.clock.now().since(since);
                    failures = if lasted >= self.shared.timing.reconnect_max { 0 } else { failures };
                    error
                }
                Err(error) => error,
            };
            self.shared.stats.add(Count::ConnectionErrors, 1);
            if !std::mem::replace(&mut is_logged, true) {
                let Identity { name, rank, .. } = &self.identity;
                tracing::warn!(endpoint = %name, rank, %address, %error, "KV event connection failed");
            }
            let longest = self.shared.timing.reconnect_min.saturating_mul(1 << failures.min(16));
            let pause = longest.min(self.shared.timing.reconnect_max).mul_f64(self.rng.random_range(0.5..1.0));
            failures += 1;
            tokio::time::sleep(pause).await;
        }
    }

    async fn connect(&mut self, address: SocketAddr, topic: &str) -> Result<Connection, ZmtpError> {
        let (timing, bounds) = (self.shared.timing, self.shared.bounds);
        let mut connection = Connection::connect(address, Role::Sub, bounds.message_bytes, timing).await?;
        connection.subscribe(topic).await?;
        Ok(connection)
    }

    /// Reads a connection to its end.
    async fn read(&mut self, mut connection: Connection) -> ZmtpError {
        self.connected();
        loop {
            let wake = self.wake();
            tokio::select! {
                message = connection.recv() => match message {
                    Ok(message) => self.message(&message),
                    Err(error) => return error,
                },
                answer = next(&mut self.replay) => {
                    self.answer(answer);
                    if self.cursor.is_deaf() {
                        return ZmtpError::Deaf;
                    }
                }
                () = changed(&mut self.updates.started) => self.process_started(),
                () = changed(&mut self.updates.size) => self.resized(),
                () = changed(&mut self.updates.shortages) => self.publish_trust(),
                () = tokio::time::sleep_until(self.shared.clock.instant(wake)) => {
                    // Frames that have arrived by now count as delivered in time.
                    let is_owed = self.cursor.is_owed();
                    let owed = is_owed.then(|| unconstrained(connection.recv()).now_or_never()).flatten();
                    match owed {
                        Some(Ok(message)) => self.message(&message),
                        Some(Err(error)) => return error,
                        None => self.look(),
                    }
                    if self.cursor.is_deaf() {
                        return ZmtpError::Deaf;
                    }
                }
            }
        }
    }

    /// Processes messages of the central socket; returns when its channel is closed.
    async fn listen(&mut self, mut fed: Fed) {
        loop {
            let wake = self.wake();
            tokio::select! {
                handed = fed.inbox.recv() => {
                    match handed {
                        Some(FromCentral::Connected) => self.connected(),
                        Some(FromCentral::Frame(seq, payload, _held)) => self.frame(seq, payload),
                        Some(FromCentral::Disconnected) => self.disconnected(),
                        None => return,
                    }
                    if fed.overflowed.swap(false, Relaxed) {
                        let ask = self.cursor.overflowed();
                        self.act(ask);
                    }
                }
                answer = next(&mut self.replay) => self.answer(answer),
                () = changed(&mut self.updates.started) => self.process_started(),
                () = changed(&mut self.updates.size) => self.resized(),
                () = changed(&mut self.updates.shortages) => self.publish_trust(),
                () = tokio::time::sleep_until(self.shared.clock.instant(wake)) => self.look(),
            }
        }
    }

    fn process_started(&mut self) {
        let started = *self.updates.started.borrow_and_update();
        let ask = started.and_then(|moment| self.cursor.process_started(moment, &mut self.target));
        self.act(ask);
    }

    /// Handles a change of the pool's block size.
    fn resized(&mut self) {
        let fits = self.target.applier.fits();
        let ask = fits.and_then(|fits| self.cursor.resized(fits, &mut self.target));
        self.act(ask);
    }

    fn connected(&mut self) {
        // First, so that no frame of a new process is taken for one of the old.
        self.process_started();
        self.heard = self.shared.clock.now();
        let ask = self.cursor.connected();
        self.act(ask);
    }

    fn disconnected(&mut self) {
        self.cursor.disconnected();
        self.replay = None;
        self.publish_trust();
    }

    fn message(&mut self, message: &Message) {
        match replay::frame(message) {
            Some((seq, payload)) => self.frame(seq, payload),
            None => self.shared.stats.add(Count::DecodeErrors, 1),
        }
    }

    fn frame(&mut self, seq: u64, payload: Bytes) {
        self.heard = self.shared.clock.now();
        self.trust.heard();
        self.shared.stats.add(Count::Frames, 1);
        self.shared.stats.add(Count::Bytes, payload.len() as u64);
        let ask = self.cursor.live(seq, payload, &mut self.target);
        self.act(ask);
    }

    fn answer(&mut self, answer: ReplayMessage) {
        let ask = match answer {
            ReplayMessage::Frame(seq, payload) => self.cursor.replayed(seq, &payload, &mut self.target),
            ReplayMessage::End(end) => {
                self.heard = self.shared.clock.now();
                self.replay = None;
                self.cursor.replay_ended(end, &mut self.target)
            }
        };
        self.act(ask);
    }

    /// Returns when to act even if no frame arrives.
    fn wake(&self) -> Timestamp {
        let timing = self.shared.timing;
        if self.cursor.is_owed() {
            self.heard.after(timing.replay_idle)
        } else if self.cursor.wants_retry() {
            self.doubted.after(timing.retry_after.saturating_mul(1 << self.retries.min(MAX_RETRY_DOUBLINGS)))
        } else {
            self.heard.after(timing.check_after)
        }
    }

    fn look(&mut self) {
        let now = self.shared.clock.now();
        self.heard = now;
        let ask = if self.cursor.is_owed() {
            self.cursor.overdue();
            None
        } else if self.cursor.wants_retry() {
            self.retries += 1;
            self.doubted = now;
            self.cursor.retry()
        } else {
            self.cursor.check()
        };
        self.act(ask);
    }

    /// Executes the cursor's request, and publishes and logs the holder's trust.
    fn act(&mut self, ask: Option<Ask>) {
        if self.target.applier.adapters().is_first_drop() {
            let (most, most_of_all) = (MAX_PER_SERVER, MAX_NAMES);
            let Identity { name, rank, .. } = &self.identity;
            tracing::warn!(
                endpoint = %name, rank, most, most_of_all,
                "more names of LoRA adapters than Attaché keeps; the prefixes of the others are not matched"
            );
        }
        if let (Some(Ask(from)), Some(address)) = (ask, self.replay_address) {
            let Shared { timing, bounds, .. } = self.shared;
            let replays = self.shared.replays.clone();
            self.replay = Some(Replay::start(address, from, timing, bounds.message_bytes, replays));
        }
        let shortages = self.target.applier.shortages();
        self.shared.shortages.send_if_modified(|known| std::mem::replace(known, shortages) != shortages);
        self.publish_trust();
    }

    fn publish_trust(&mut self) {
        let is_short = self.target.applier.is_short();
        let now = match self.cursor.trust() {
            Trust::Exact if is_short => Trust::Incomplete,
            Trust::Exact if self.target.applier.has_uncounted() => Trust::Uncounted,
            trust => trust,
        };
        if now.is_certain() {
            self.retries = 0;
        }
        let cache = self.identity.holder.0;
        let before = self
            .shared
            .tape
            .change(|| self.trust.set(now), |before| (*before != now).then_some(KvChange::Trust { cache, trust: now }));
        if before == now {
            return;
        }
        let Identity { name, rank, .. } = &self.identity;
        let (from, to) = (before.label(), now.label());
        match now {
            Trust::Suspect(_) => {
                self.doubted = self.shared.clock.now();
                self.shared.stats.add(Count::TrustLost, u64::from(before.is_certain()));
                tracing::warn!(endpoint = %name, rank, from, to, "KV events are no longer exact");
                let sizes = self.target.applier.sizes().filter(|_| now == Trust::Suspect(Doubt::BlockSize));
                if let Some((engine, pool)) = sizes
                    && !std::mem::replace(&mut self.is_size_logged, true)
                {
                    let what_to_do = if pool.is_given() {
                        "set `prefixCache.blockSize` to the engines' size, or leave it out"
                    } else {
                        "engines of one pool must have blocks of one size: give this one a pool of its own"
                    };
                    let pool = pool.get();
                    tracing::error!(
                        endpoint = %name, rank, block_size_of_server = engine, block_size = pool,
                        "block size of the server differs from the pool's; {what_to_do}"
                    );
                }
            }
            Trust::Incomplete if is_short => tracing::warn!(
                endpoint = %name, rank, from, to,
                "the prefix index is full and lacks blocks of the server; raise `prefixCache.maxBytes`"
            ),
            Trust::Uncounted => {
                let Some(skipped) = self.shared.repeated_reports.admit(self.shared.clock.now()) else { return };
                tracing::info!(
                    endpoint = %name, rank, from, to, skipped,
                    "KV blocks were reported again without an origin: they are further copies, or a request with \
                     `kv_cache_report_mode: full` reached the server without Attaché; their events stay in use"
                );
            }
            // The line about the repeated reports was enough.
            Trust::Exact if before == Trust::Uncounted => {}
            _ => tracing::info!(endpoint = %name, rank, from, to, "trust in KV events changed"),
        }
    }
}

/// Waits for a new value; forever when none can come.
async fn changed<T>(of: &mut watch::Receiver<T>) {
    if of.changed().await.is_err() {
        std::future::pending().await
    }
}

/// Waits for the next message of the running replay; forever without one.
async fn next(replay: &mut Option<Replay>) -> ReplayMessage {
    match replay {
        Some(replay) => replay.next().await,
        None => std::future::pending().await,
    }
}
