//! One look at each NATS server, for `attache check --live`: connection, login, rights and limits. No picker receives
//! a message of it.

use super::{NatsConfig, NatsError, Subjects, with_login};
use async_nats::{ConnectErrorKind, ConnectOptions, Event};
use attache_sync::{sender_of, token_of};
use futures_util::StreamExt as _;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

/// Number of the process that the probe claims to be. Pickers draw theirs at random.
const PROCESS: u64 = 0;
/// Time in which errors of the server arrive that it sent before a message that has arrived: another task reads them.
const GRACE: Duration = Duration::from_millis(100);

/// What a NATS server said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsReport {
    /// Version of the server.
    pub version: String,
    /// Largest message that it takes, bytes.
    pub max_payload: usize,
    /// Whether clients must log in.
    pub auth_required: bool,
    /// Time in which a message to this client itself arrived.
    pub round_trip: Duration,
    /// Rights that are missing, in the words of the server.
    pub denied: Vec<String>,
}

/// Why a server could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The configuration can't be used.
    #[error(transparent)]
    Config(#[from] NatsError),
    /// The server refuses the user, the password or the credentials.
    #[error("the server refuses the login: {0}")]
    Login(String),
    /// There is no connection.
    #[error("{0}")]
    Away(String),
}

/// Connects to the only server of `config` as the picker `name`, and asks for the rights that a picker needs. Takes at
/// most `limit` for each step.
///
/// # Errors
/// [`ProbeError`] if the server can't be asked.
pub async fn probe(config: &NatsConfig, name: &str, limit: Duration) -> Result<NatsReport, ProbeError> {
    let (errors, mut told) = mpsc::unbounded_channel();
    let options = ConnectOptions::new().name("attache check").connection_timeout(limit).event_callback(move |event| {
        if let Event::ServerError(error) = event {
            // The receiver is there until the probe ends.
            let _ = errors.send(error.to_string());
        }
        async {}
    });
    let (options, servers) = with_login(options, config).await?;
    let connected = timeout(limit, options.connect(servers)).await;
    let client = connected.map_err(|_| ProbeError::Away(format!("no connection within {limit:?}")))?.map_err(
        |error| match error.kind() {
            ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                ProbeError::Login(error.to_string())
            }
            _ => ProbeError::Away(error.to_string()),
        },
    )?;
    let token = token_of(name);
    let subjects = Subjects { prefix: config.subject_prefix.clone(), sender: sender_of(&token, PROCESS), name: token };
    let away = |error: &dyn std::error::Error| ProbeError::Away(error.to_string());
    // Pickers subscribe to both.
    let _all = client.subscribe(subjects.all("*.*")).await.map_err(|e| away(&e))?;
    let mut own = client.subscribe(subjects.to(subjects.sender, "*.*")).await.map_err(|e| away(&e))?;
    let sender = format!("{}.{:016x}", subjects.name, subjects.sender);
    let asked = Instant::now();
    client.publish(subjects.to(subjects.sender, &sender), Vec::new().into()).await.map_err(|e| away(&e))?;
    let arrived = timeout(limit, own.next()).await;
    let round_trip = asked.elapsed();
    let mut denied = Vec::new();
    while let Ok(Some(error)) = timeout(GRACE, told.recv()).await {
        denied.push(error);
    }
    if arrived.is_err() && denied.is_empty() {
        return Err(ProbeError::Away(format!("a message to this client did not arrive within {limit:?}")));
    }
    let info = client.server_info();
    Ok(NatsReport {
        version: info.version,
        max_payload: info.max_payload,
        auth_required: info.auth_required,
        round_trip,
        denied,
    })
}
