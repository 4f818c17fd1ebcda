//! The shared connection to Redis: it reconnects until it succeeds, and replaces a connection that fails. Callers
//! decide how long they wait for a response. Called by `quota_store` and `redis_profiles`.

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

/// Time without a response after which a connection counts as dead. Requests do not wait for that.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// Pause between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(500);
/// Interval of pings, so that an unavailable Redis is detected before a request uses it.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Most concurrent commands: more would only queue up in a Redis that is too slow.
const MAX_QUESTIONS: usize = 1_024;
/// Redis's error code for a key with another type of value.
const WRONG_TYPE: &str = "WRONGTYPE";
/// Redis's error codes that may end a script midway; before Redis 7, all such errors have the first one.
const IN_THE_MIDDLE: [&str; 2] = ["ERR", WRONG_TYPE];

/// The reason for which Redis did not respond.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// There is no connection.
    #[error("no connection to redis")]
    Away,
    /// Too many commands are running.
    #[error("{MAX_QUESTIONS} commands to redis are in flight")]
    Busy,
    /// Redis returned an error, or the connection failed.
    #[error("redis: {0}")]
    Failed(#[from] RedisError),
}

impl LinkError {
    /// Whether Redis may have executed the command or a part of it. Otherwise it certainly has not: the command was not
    /// sent, or it was rejected as a whole, for example by a replica (`READONLY`) or because saving fails (`MISCONF`).
    #[must_use]
    pub(crate) fn may_have_run(&self) -> bool {
        matches!(self, Self::Failed(error) if error.code().is_none_or(|code| IN_THE_MIDDLE.contains(&code)))
    }

    /// Whether the key has another type of value, such as a list instead of text.
    #[must_use]
    pub(crate) fn is_of_the_wrong_type(&self) -> bool {
        matches!(self, Self::Failed(error) if error.code() == Some(WRONG_TYPE))
    }
}

/// The current connection, and a signal that it has failed.
struct Link {
    connection: ArcSwapOption<MultiplexedConnection>,
    connected: watch::Sender<bool>,
    broken: Notify,
}

/// A Redis with its connection.
pub struct RedisLink {
    url: String,
    link: Arc<Link>,
    places: Semaphore,
    runtime: Handle,
    _stop: DropGuard,
}

impl fmt::Debug for RedisLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_struct("RedisLink").field("connected", &*self.link.connected.borrow()).finish_non_exhaustive()
    }
}

impl RedisLink {
    /// Connects to `url` on the caller's runtime, and reconnects, until it is dropped. `on_change` is called with true
    /// after a connection, and with false after its loss.
    ///
    /// # Errors
    /// When the URL is not valid for Redis.
    pub fn start(url: &str, on_change: impl Fn(bool) + Send + Sync + 'static) -> Result<Arc<Self>, RedisError> {
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
        tokio::spawn(async move { stop.run_until_cancelled(keep(client, &link, on_change)).await });
        Ok(started)
    }

    /// Whether this is the Redis at `url`.
    #[must_use]
    pub fn is_at(&self, url: &str) -> bool {
        self.url == url
    }

    /// Returns the runtime of its commands: the threads that serve requests may end before a response arrives.
    #[must_use]
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Returns whether there is a connection, with updates.
    #[must_use]
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.link.connected.subscribe()
    }

    /// Executes a command.
    ///
    /// # Errors
    /// [`LinkError`] when Redis does not respond.
    pub async fn ask<T: FromRedisValue>(&self, question: &Cmd) -> Result<T, LinkError> {
        let Ok(_place) = self.places.try_acquire() else { return Err(LinkError::Busy) };
        let connection = self.link.connection.load_full().ok_or(LinkError::Away)?;
        let answer = question.query_async(&mut MultiplexedConnection::clone(&connection)).await;
        self.judged(&connection, answer)
    }

    /// Runs a script.
    ///
    /// # Errors
    /// [`LinkError`] when Redis does not respond.
    pub async fn run<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> Result<T, LinkError> {
        let Ok(_place) = self.places.try_acquire() else { return Err(LinkError::Busy) };
        let connection = self.link.connection.load_full().ok_or(LinkError::Away)?;
        let answer = script.invoke_async(&mut MultiplexedConnection::clone(&connection)).await;
        self.judged(&connection, answer)
    }

    /// Returns the response; a connection that failed is replaced.
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

/// Returns when the connection has failed, in a command or in a regular ping.
async fn until_broken(link: &Link, mut connection: MultiplexedConnection) {
    while tokio::time::timeout(HEARTBEAT, link.broken.notified()).await.is_err() {
        if redis::cmd("PING").query_async::<String>(&mut connection).await.is_err() {
            return;
        }
    }
}

/// Reports a connection, and its loss on Drop.
struct Connected<'a, T: Fn(bool)>(&'a T);

impl<'a, T: Fn(bool)> Connected<'a, T> {
    fn new(on_change: &'a T) -> Self {
        on_change(true);
        Self(on_change)
    }
}

impl<T: Fn(bool)> Drop for Connected<'_, T> {
    fn drop(&mut self) {
        (self.0)(false);
    }
}

/// Connects and reconnects. An outage is logged once.
async fn keep(client: Client, link: &Link, on_change: impl Fn(bool)) {
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(DEAD_AFTER)).set_response_timeout(Some(DEAD_AFTER));
    let mut is_logged = false;
    loop {
        match client.get_multiplexed_async_connection_with_config(&config).await {
            Ok(connection) => {
                tracing::info!("connected to Redis");
                is_logged = true;
                // Discards a signal about the previous connection.
                let _ = link.broken.notified().now_or_never();
                link.connection.store(Some(Arc::new(connection.clone())));
                link.connected.send_replace(true);
                let connected = Connected::new(&on_change);
                until_broken(link, connection).await;
                link.connection.store(None);
                link.connected.send_replace(false);
                drop(connected);
                tracing::warn!("connection to Redis lost; reconnecting");
            }
            Err(error) if !std::mem::replace(&mut is_logged, true) => {
                tracing::warn!(%error, "connection to Redis failed; retrying");
            }
            Err(error) => tracing::debug!(%error, "connection to Redis failed again; retrying"),
        }
        tokio::time::sleep(RECONNECT).await;
    }
}
