//! Carries the messages between pickers over NATS core: no stream, no acknowledgement.
//!
//! Each picker publishes to `PREFIX.sync.v2.all.NAME.SENDER`, or to `PREFIX.sync.v2.to.RECEIVER.NAME.SENDER` for one
//! other picker. NAME is the name of the picker ([`attache_sync::token_of`]); SENDER and RECEIVER are the identities of
//! processes in hexadecimal. NATS permissions can bind a user to a name. A receiver takes the sender from the subject,
//! and drops messages whose sender is no process of the name.
//!
//! A request never waits for NATS: messages pass a bounded queue, and those that can't be sent are dropped and counted.
//! The other pickers find the gap by the next heartbeat.
//!
//! **Owns** the connection, its queue and its subscriptions.
//! **Called by** `app` in the root package, and by `live_check`, which only looks ([`probe`]).
//! **Must not** read the content of messages: [`attache_sync::Replica`] does.
//!
//! Read first: `lib.rs`.

mod login;
pub mod probe;
mod reports;

use async_nats::connection::State;
use async_nats::{Client, ConnectOptions, Message, ServerAddr, Subscriber};
use attache_sync::{Outbox, Replica, is_sender_of};
use attache_types::clock::Clock;
use futures_util::{FutureExt as _, StreamExt as _};
use rand::RngExt as _;
use reports::Reports;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// Most messages that wait for the connection.
const QUEUE: usize = 16_384;
/// Most received messages that wait until they are applied. Each has at most 1 MiB.
const RECEIVED: usize = 2_048;
/// Longest time between two attempts to connect.
const MAX_RECONNECT: Duration = Duration::from_secs(2);
/// Shortest time between two attempts to connect.
const MIN_RECONNECT: Duration = Duration::from_millis(100);
/// Time after which a connection without a reply to a ping is closed is twice this.
const PING_EVERY: Duration = Duration::from_secs(5);

/// The NATS servers, and how to connect to them.
#[derive(Clone, Debug)]
pub struct NatsConfig {
    /// URLs of the servers of one cluster. The user and password of the first URL that has them count for all.
    pub servers: Vec<String>,
    /// First part of all subjects.
    pub subject_prefix: String,
    /// A credentials file.
    pub credentials: Option<PathBuf>,
    /// Certificates of the authorities that servers are checked against, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Certificate and key of this picker.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
}

/// The configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    /// The credentials file can't be read.
    #[error("`sync.nats.credentials`: {path} can't be read: {error}")]
    Credentials {
        /// Path of the file.
        path: PathBuf,
        /// Why it can't be read.
        error: std::io::Error,
    },
    /// A server's URL can't be used.
    #[error("`sync.nats.servers`: {0}")]
    Server(std::io::Error),
    /// A certificate can't be used.
    #[error("`sync.nats` can't be used: {0}")]
    Options(async_nats::ConnectError),
}

/// State and counters of the connection.
#[derive(Debug, Default)]
pub struct NatsStats {
    /// Whether the connection is established.
    pub connected: AtomicBool,
    /// Messages that were not sent: the queue was full, or there was no connection.
    pub dropped: AtomicU64,
}

/// The queue of messages to send.
#[derive(Debug)]
pub struct NatsOutbox {
    queue: mpsc::Sender<(Option<u64>, Vec<u8>)>,
    wake: Arc<Notify>,
    stats: Arc<NatsStats>,
}

impl Outbox for NatsOutbox {
    fn publish(&self, to: Option<u64>, message: Vec<u8>) {
        if self.queue.try_send((to, message)).is_err() {
            self.stats.dropped.fetch_add(1, Relaxed);
        }
    }

    fn wake(&self) {
        self.wake.notify_one();
    }
}

/// The other end of an outbox.
#[derive(Debug)]
pub struct NatsQueue {
    queue: mpsc::Receiver<(Option<u64>, Vec<u8>)>,
    wake: Arc<Notify>,
    stats: Arc<NatsStats>,
}

/// An outbox, and what [`run`] sends from it.
#[must_use]
pub fn outbox() -> (NatsOutbox, NatsQueue, Arc<NatsStats>) {
    let (sender, queue) = mpsc::channel(QUEUE);
    let (wake, stats) = (Arc::new(Notify::new()), Arc::new(NatsStats::default()));
    let outbox = NatsOutbox { queue: sender, wake: wake.clone(), stats: stats.clone() };
    (outbox, NatsQueue { queue, wake, stats: stats.clone() }, stats)
}

/// Connects in the background; NATS may be away.
///
/// # Errors
/// If the configuration can't be used. That no server answers is no error.
pub async fn connect(config: &NatsConfig, queue: &NatsQueue, clock: Clock) -> Result<Client, NatsError> {
    let reports = Reports::new(queue.stats.clone(), clock);
    let options = ConnectOptions::new()
        .name("attache")
        .no_echo()
        .retry_on_initial_connect()
        .ping_interval(PING_EVERY)
        .client_capacity(QUEUE)
        .subscription_capacity(RECEIVED)
        .reconnect_delay_callback(|attempts| {
            let most = MIN_RECONNECT.saturating_mul(1 << attempts.min(6)).min(MAX_RECONNECT);
            // Not all pickers at once.
            rand::rng().random_range(MIN_RECONNECT..=most.max(MIN_RECONNECT))
        })
        .event_callback(move |event| {
            reports.event(&event);
            async {}
        });
    let (options, servers) = with_login(options, config).await?;
    options.connect(servers).await.map_err(NatsError::Options)
}

/// The options with the credentials, certificates and users of `config`, and its servers.
async fn with_login(
    mut options: ConnectOptions,
    config: &NatsConfig,
) -> Result<(ConnectOptions, Vec<ServerAddr>), NatsError> {
    if let Some(path) = &config.credentials {
        let read = options.credentials_file(path).await;
        options = read.map_err(|error| NatsError::Credentials { path: path.clone(), error })?;
    }
    if let Some(path) = &config.ca_file {
        options = options.add_root_certificates(path.clone());
    }
    if let Some((certificate, key)) = &config.client_certificate {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    login::take(options, &config.servers).map_err(NatsError::Server)
}

/// Carries messages between `client` and `replica` until `stop`.
pub async fn run(
    client: Client,
    mut queue: NatsQueue,
    replica: Arc<Replica>,
    prefix: String,
    clock: Clock,
    stop: CancellationToken,
) {
    let subjects = Subjects { prefix, name: replica.token(), sender: replica.sender() };
    let Some((mut all, mut own)) = subscribe(&client, &subjects, &stop).await else { return };
    let mut next = replica.tick(clock.now());
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some((to, message)) = queue.queue.recv() => send(&client, &subjects, to, message, &queue.stats),
            Some(message) = all.next() => receive(&replica, &message, clock),
            Some(message) = own.next() => receive(&replica, &message, clock),
            () = queue.wake.notified() => next = replica.tick(clock.now()),
            () = tokio::time::sleep_until(clock.instant(next)) => next = replica.tick(clock.now()),
        }
    }
    let _ = client.flush().await;
}

/// Subscribes to the messages of all other pickers, and to those to this one.
async fn subscribe(client: &Client, subjects: &Subjects, stop: &CancellationToken) -> Option<(Subscriber, Subscriber)> {
    let subscribe = async {
        let all = client.subscribe(subjects.all("*.*")).await;
        let own = client.subscribe(subjects.to(subjects.sender, "*.*")).await;
        all.and_then(|all| Ok((all, own?)))
    };
    let subscribed = stop.run_until_cancelled(subscribe).await?;
    subscribed.inspect_err(|error| tracing::error!(%error, "can't subscribe to the messages of other pickers")).ok()
}

/// Hands a message to the client, which never waits here.
fn send(client: &Client, subjects: &Subjects, to: Option<u64>, message: Vec<u8>, stats: &NatsStats) {
    let sender = format!("{}.{:016x}", subjects.name, subjects.sender);
    let subject = match to {
        None => subjects.all(&sender),
        Some(to) => subjects.to(to, &sender),
    };
    // Without a connection, the client would keep messages that are of no use later.
    let sent = client.connection_state() == State::Connected
        && tokio::task::unconstrained(client.publish(subject, message.into()))
            .now_or_never()
            .is_some_and(|r| r.is_ok());
    if !sent {
        stats.dropped.fetch_add(1, Relaxed);
    }
}

fn receive(replica: &Replica, message: &Message, clock: Clock) {
    // 0 is the identity of no picker: a subject without a valid sender makes the message invalid.
    replica.receive(Some(sender(&message.subject).unwrap_or(0)), &message.payload, clock.now());
}

/// The sender of a subject, if it is a process of the name before it.
fn sender(subject: &str) -> Option<u64> {
    let (before, sender) = subject.rsplit_once('.')?;
    let (_, name) = before.rsplit_once('.')?;
    u64::from_str_radix(sender, 16).ok().filter(|sender| is_sender_of(name, *sender))
}

struct Subjects {
    prefix: String,
    /// Token of the picker's name.
    name: String,
    sender: u64,
}

impl Subjects {
    fn all(&self, sender: &str) -> String {
        format!("{}.sync.v2.all.{sender}", self.prefix)
    }

    fn to(&self, receiver: u64, sender: &str) -> String {
        format!("{}.sync.v2.to.{receiver:016x}.{sender}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_sync::{sender_of, token_of};

    #[test]
    fn subject_has_a_sender_only_of_the_name_before_it() {
        let (a, b) = (token_of("epp.a"), token_of("epp.b"));
        let (own, other) = (sender_of(&a, 7), sender_of(&b, 7));
        assert_eq!(sender(&format!("p.sync.v2.all.{a}.{own:016x}")), Some(own));
        assert_eq!(sender(&format!("p.q.sync.v2.to.00000000000000aa.{a}.{own:016x}")), Some(own));
        for subject in [
            format!("p.sync.v2.all.{a}.{other:016x}"),
            format!("p.sync.v2.all.{b}.{own:016x}"),
            format!("p.sync.v2.all.{own:016x}"),
            format!("p.sync.v2.all.{a}.unknown"),
            "p".to_owned(),
        ] {
            assert_eq!(sender(&subject), None, "{subject}");
        }
    }
}
