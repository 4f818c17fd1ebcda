//! One engine's stream: reads it, keeps its sequence, has what is missing replayed, and says how far it may be believed.

use super::apply::{Applier, Outcome};
use super::cursor::{Apply, Ask, Cursor};
use super::replay::{self, Answer, Replay};
use super::stats::{Count, KvEventStats};
use super::subscription::{Bounds, Timing};
use super::zmtp::{Connection, Message, Role, ZmtpError};
use attache_pool::{PoolEvent, SnapshotStore};
use attache_prefix::trust::{Doubt, Trust, TrustCell};
use attache_prefix::wire;
use attache_serving::connections::Held;
use attache_types::clock::{Clock, Timestamp};
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
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

/// How often the pause before learning anew may double.
const MAX_RETRY_DOUBLINGS: u32 = 4;

/// Whose stream it is.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) endpoint: EndpointId,
    pub(super) name: Arc<str>,
    pub(super) rank: u16,
    /// Ranks of the endpoint, which share its blocks.
    pub(super) ranks: u16,
}

/// What a lane shares with the other lanes of its pool.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) store: Arc<SnapshotStore>,
    pub(super) stats: Arc<KvEventStats>,
    pub(super) replays: Arc<Semaphore>,
    pub(super) bounds: Bounds,
    pub(super) timing: Timing,
    pub(super) clock: Clock,
    /// The pool's writer, which hears of caches that engines have cleared.
    pub(super) events: Option<mpsc::Sender<PoolEvent>>,
}

/// What a lane is told of its engine beside the stream.
#[derive(Debug)]
pub(super) struct News {
    /// When its process has started, as its page of metrics tells: Unix time, seconds.
    pub(super) started: watch::Receiver<Option<f64>>,
    /// Tokens in the pool's blocks.
    pub(super) size: watch::Receiver<u32>,
}

/// Where the live stream comes from.
#[derive(Debug)]
pub(super) enum Live {
    /// A connection of its own, to this address, for topics that begin so.
    Own { address: SocketAddr, topic: Arc<str> },
    /// The central socket.
    Fed(Fed),
}

/// The receiving end of what the central socket hands on.
#[derive(Debug)]
pub(super) struct Fed {
    pub(super) inbox: mpsc::Receiver<FromCentral>,
    /// Frames were dropped because the inbox was full.
    pub(super) overflowed: Arc<AtomicBool>,
}

/// What the central socket hands on.
#[derive(Debug)]
pub(super) enum FromCentral {
    /// The engine has connected.
    Connected,
    /// A frame, and what accounts for its memory until it is taken.
    Frame(u64, Bytes, Held),
    /// The engine's connection has ended.
    Disconnected,
}

/// One engine's stream.
#[derive(Debug)]
pub(super) struct Lane {
    identity: Identity,
    shared: Shared,
    replay_address: Option<SocketAddr>,
    trust: Arc<TrustCell>,
    cursor: Cursor,
    target: Target,
    replay: Option<Replay>,
    news: News,
    /// When something came last, or was asked for.
    heard: Timestamp,
    /// Since when it is suspect, or when that was last tried to be mended.
    doubted: Timestamp,
    retries: u32,
    /// It has been said that its blocks are of another size than the pool's.
    size_told: bool,
    rng: PickRng,
}

/// Where batches go, with what the cursor asks about it.
#[derive(Debug)]
struct Target {
    applier: Applier,
    shared: Shared,
    endpoint: EndpointId,
    ranks: u16,
    /// The most that was held before something was lost.
    held_before: u64,
}

impl Apply for Target {
    fn apply(&mut self, payload: &[u8]) -> Outcome {
        let outcome = self.applier.apply(payload);
        if outcome.cleared {
            self.held_before = 0;
            // A writer that is this far behind publishes nothing: strategies then go by the age of their entries.
            let told = self.shared.events.as_ref().map(|to| to.try_send(PoolEvent::CacheCleared { id: self.endpoint }));
            if let Some(Err(error)) = told {
                tracing::debug!(%error, "cleared cache not passed to strategies");
            }
        }
        if let Some(made) = wire::timestamp(payload) {
            let clock = self.shared.clock;
            let now = clock.wall(clock.now()).duration_since(UNIX_EPOCH).unwrap_or_default();
            // A clock that is ahead of ours shows no lag.
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

    /// As much is held as was known before, or the whole cache has turned over. Stores that wait for a parent show that older blocks are
    /// there which were never told of.
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
    /// A lane that puts what it hears into `applier` and what that is worth into `trust`.
    pub(super) fn new(
        identity: Identity,
        shared: Shared,
        replay_address: Option<SocketAddr>,
        applier: Applier,
        trust: Arc<TrustCell>,
        news: News,
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
            news,
            retries: 0,
            size_told: false,
            rng,
        }
    }

    /// Reads until `shutdown`; then the holder is gone from the index.
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

    /// Keeps a connection of its own; never returns.
    async fn follow(&mut self, address: SocketAddr, topic: &str) {
        let mut failures = 0u32;
        let mut told = false;
        loop {
            let attempt = self.connect(address, topic).await;
            let error = match attempt {
                Ok(connection) => {
                    self.shared.stats.add(Count::Connections, 1);
                    told = false;
                    let since = self.shared.clock.now();
                    let error = self.read(connection).await;
                    self.disconnected();
                    // A peer that accepts and then fails at once is not to be hammered.
                    let lasted = self.shared.clock.now().since(since);
                    failures = if lasted >= self.shared.timing.reconnect_max { 0 } else { failures };
                    error
                }
                Err(error) => error,
            };
            self.shared.stats.add(Count::ConnectionErrors, 1);
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(endpoint = %self.identity.name, rank = self.identity.rank, %address, %error, "KV event connection failed");
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
                () = changed(&mut self.news.started) => self.process_started(),
                () = changed(&mut self.news.size) => self.resized(),
                () = tokio::time::sleep_until(self.shared.clock.instant(wake)) => {
                    // What is owed and has come by now has come in time.
                    let owed = if self.cursor.is_owed() { unconstrained(connection.recv()).now_or_never() } else { None };
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

    /// Takes what the central socket hands on; returns when that is gone.
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
                () = changed(&mut self.news.started) => self.process_started(),
                () = changed(&mut self.news.size) => self.resized(),
                () = tokio::time::sleep_until(self.shared.clock.instant(wake)) => self.look(),
            }
        }
    }

    fn process_started(&mut self) {
        let started = *self.news.started.borrow_and_update();
        let ask = started.and_then(|moment| self.cursor.process_started(moment, &mut self.target));
        self.act(ask);
    }

    /// The pool's blocks are of another size than before.
    fn resized(&mut self) {
        let fits = self.target.applier.fits();
        let ask = fits.and_then(|fits| self.cursor.resized(fits, &mut self.target));
        self.act(ask);
    }

    fn connected(&mut self) {
        // Before a frame of the new process can be taken for one of the old.
        self.process_started();
        self.heard = self.shared.clock.now();
        let ask = self.cursor.connected();
        self.act(ask);
    }

    fn disconnected(&mut self) {
        self.cursor.disconnected();
        self.replay = None;
        self.tell();
    }

    fn message(&mut self, message: &Message) {
        match replay::frame(message) {
            Some((seq, payload)) => self.frame(seq, payload),
            None => self.shared.stats.add(Count::DecodeErrors, 1),
        }
    }

    fn frame(&mut self, seq: u64, payload: Bytes) {
        self.heard = self.shared.clock.now();
        self.shared.stats.add(Count::Frames, 1);
        self.shared.stats.add(Count::Bytes, payload.len() as u64);
        let ask = self.cursor.live(seq, payload, &mut self.target);
        self.act(ask);
    }

    fn answer(&mut self, answer: Answer) {
        let ask = match answer {
            Answer::Frame(seq, payload) => self.cursor.replayed(seq, &payload, &mut self.target),
            Answer::End(end) => {
                self.heard = self.shared.clock.now();
                self.replay = None;
                self.cursor.replay_ended(end, &mut self.target)
            }
        };
        self.act(ask);
    }

    /// When there is something to look after although nothing comes.
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

    /// Does what the cursor asks for, and says what has become of the holder.
    fn act(&mut self, ask: Option<Ask>) {
        if let (Some(Ask(from)), Some(address)) = (ask, self.replay_address) {
            let Shared { timing, bounds, .. } = self.shared;
            let replays = self.shared.replays.clone();
            self.replay = Some(Replay::start(address, from, timing, bounds.message_bytes, replays));
        }
        self.tell();
    }

    fn tell(&mut self) {
        let now = self.cursor.trust();
        if now.is_certain() {
            self.retries = 0;
        }
        let before = self.trust.set(now);
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
                    && !std::mem::replace(&mut self.size_told, true)
                {
                    let what_to_do = if pool.is_given() {
                        "set `prefixCache.blockSize` to the engines' size, or leave it out"
                    } else {
                        "engines of one pool must have blocks of one size: give this one a pool of its own"
                    };
                    let pool = pool.get();
                    tracing::error!(endpoint = %name, rank, engine, pool, "block size of the server differs from the pool's; {what_to_do}");
                }
            }
            _ => tracing::info!(endpoint = %name, rank, from, to, "trust in KV events changed"),
        }
    }
}

/// Waits for a new value; for ever when none can come.
async fn changed<T>(of: &mut watch::Receiver<T>) {
    if of.changed().await.is_err() {
        std::future::pending().await
    }
}

/// The next answer of the replay that runs, if one does.
async fn next(replay: &mut Option<Replay>) -> Answer {
    match replay {
        Some(replay) => replay.next().await,
        None => std::future::pending().await,
    }
}
