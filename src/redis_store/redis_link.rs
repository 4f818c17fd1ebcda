//! The connection to Redis that all who keep or read something there share: made again and again until it holds, and given up when it is of no use.
//! What waits for an answer is the caller's concern, and how long. Called by `quota_store` and `redis_profiles`.

use arc_swap::ArcSwapOption;
use futures_util::FutureExt;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue, RedisError, ScriptInvocation};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

/// 1 s for Redis to answer before the connection is thought to be dead. Requests do not wait for that.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// 500 ms between two tries to connect.
const RECONNECT: Duration = Duration::from_millis(500);
/// 1 s between two signs of life, so that a Redis that has gone is known before a request asks it.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Questions under way at once: more are a sign that Redis can't keep up, and would only pile up.
const MAX_QUESTIONS: usize = 1_024;
/// What Redis calls an error about a key that holds something else than was asked for.
const WRONG_TYPE: &str = "WRONGTYPE";
/// What Redis calls errors that may end a script in its middle; before Redis 7 all that do are the first.
const IN_THE_MIDDLE: [&str; 2] = ["ERR", WRONG_TYPE];

/// Why Redis gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// There is no connection.
    #[error("no connection to redis")]
    Away,
    /// Too many questions are under way.
    #[error("{MAX_QUESTIONS} questions to redis are under way")]
    Busy,
    /// It did not understand, or the connection broke.
    #[error("redis: {0}")]
    Failed(#[from] RedisError),
}

impl LinkError {
    /// Nobody knows whether Redis has done what it was asked for, or a part of it. Else it has not: there was no asking it, or it has refused as a whole,
    /// because it is a replica (`READONLY`), say, or can't save (`MISCONF`).
    #[must_use]
    pub fn may_have_run(&self) -> bool {
        matches!(self, Self::Failed(error) if error.code().is_none_or(|code| IN_THE_MIDDLE.contains(&code)))
    }

    /// The key holds something else than what was asked for: a list, say, and no text.
    #[must_use]
    pub fn is_of_the_wrong_type(&self) -> bool {
        matches!(self, Self::Failed(error) if error.code() == Some(WRONG_TYPE))
    }
}

/// The connection, and word that it is of no use any more.
struct Link {
    connection: ArcSwapOption<MultiplexedConnection>,
    connected: watch::Sender<bool>,
    broken: Notify,
}

/// A Redis.
pub struct RedisLink {
    url: String,
    link: Arc<Link>,
    places: Semaphore,
    runtime: Handle,
    _stop: DropGuard,
}

impl fmt::Debug for RedisLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("RedisLink").field("connected", &*self.link.connected.borrow()).finish_non_exhaustive()
    }
}

impl RedisLink {
    /// Connects to `url` from now on, on the runtime of the caller, until it is dropped; `told` is called with true when there is a connection, and
    /// with false when it is gone.
    ///
    /// # Errors
    /// When the URL is none of Redis.
    pub fn start(url: &str, told: impl Fn(bool) + Send + Sync + 'static) -> Result<Arc<Self>, RedisError> {
        let client = Client::open(url)?;
        let link = Arc::new(Link {
            connection: ArcSwapOption::empty(),
            connected: watch::Sender::new(false),
            broken: Notify::new(),
        });
        let stop = CancellationToken::new();
        let started = Arc::new(Self {
            url: url.to_owned(),
            link: link.clone(),
            places: Semaphore::new(MAX_QUESTIONS),
            runtime: Handle::current(),
            _stop: stop.clone().drop_guard(),
        });
        tokio::spawn(async move { stop.run_until_cancelled(keep(client, &link, told)).await });
        Ok(started)
    }

    /// Whether this is the one at `url`.
    #[must_use]
    pub fn is_at(&self, url: &str) -> bool {
        self.url == url
    }

    /// Where its questions run: the threads that serve requests may end before an answer comes.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Whether there is a connection, from now on.
    #[must_use]
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.link.connected.subscribe()
    }

    /// Asks a question.
    ///
    /// # Errors
    /// When Redis gives no answer.
    pub async fn ask<T: FromRedisValue>(&self, question: &Cmd) -> Result<T, LinkError> {
        let Ok(_place) = self.places.try_acquire() else { return Err(LinkError::Busy) };
        let connection = self.link.connection.load_full().ok_or(LinkError::Away)?;
        let answer = question.query_async(&mut MultiplexedConnection::clone(&connection)).await;
        self.judged(&connection, answer)
    }

    /// Runs a script.
    ///
    /// # Errors
    /// When Redis gives no answer.
    pub async fn run<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T, LinkError> {
        let Ok(_place) = self.places.try_acquire() else { return Err(LinkError::Busy) };
        let connection = self.link.connection.load_full().ok_or(LinkError::Away)?;
        let answer = script.invoke_async(&mut MultiplexedConnection::clone(&connection)).await;
        self.judged(&connection, answer)
    }

    /// The answer; a connection that gives none is given up.
    fn judged<T>(
        &self,
        connection: &Arc<MultiplexedConnection>,
        answer: Result<T, RedisError>,
    ) -> Result<T, LinkError> {
        answer.map_err(|error| {
            let current = || self.link.connection.load().as_ref().is_some_and(|c| Arc::ptr_eq(c, connection));
            if (error.is_io_error() || error.is_connection_dropped() || error.is_timeout()) && current() {
                self.link.broken.notify_one();
            }
            LinkError::Failed(error)
        })
    }
}

/// Returns when the connection is of no use any more: a question came to nothing, or a sign of life that is asked for now and then.
async fn until_broken(link: &Link, mut connection: MultiplexedConnection) {
    while tokio::time::timeout(HEARTBEAT, link.broken.notified()).await.is_err() {
        if redis::cmd("PING").query_async::<String>(&mut connection).await.is_err() {
            return;
        }
    }
}

/// A connection that somebody is told of, until it is gone.
struct Connected<'a, T: Fn(bool)>(&'a T);

impl<'a, T: Fn(bool)> Connected<'a, T> {
    fn new(told: &'a T) -> Self {
        told(true);
        Self(told)
    }
}

impl<T: Fn(bool)> Drop for Connected<'_, T> {
    fn drop(&mut self) {
        (self.0)(false);
    }
}

/// Connects again and again. An outage is told once.
async fn keep(client: Client, link: &Link, told: impl Fn(bool)) {
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(DEAD_AFTER)).set_response_timeout(Some(DEAD_AFTER));
    let mut is_told = false;
    loop {
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(connection) => {
                tracing::info!("connected to Redis");
                is_told = true;
                // Word of the connection before this one.
                let _ = link.broken.notified().now_or_never();
                link.connection.store(Some(Arc::new(connection.clone())));
                link.connected.send_replace(true);
                let connected = Connected::new(&told);
                until_broken(link, connection).await;
                link.connection.store(None);
                link.connected.send_replace(false);
                drop(connected);
                tracing::warn!("connection to Redis lost; reconnecting");
            }
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                tracing::warn!(%error, "connection to Redis failed; retrying");
            }
            Err(error) => tracing::debug!(%error, "connection to Redis failed again; retrying"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}
