//! State that is shared with other pickers.

use std::path::PathBuf;
use std::time::Duration;

/// `attache`: first part of the subjects of all messages.
pub(crate) const DEFAULT_SUBJECT_PREFIX: &str = "attache";

/// What this picker shares with others, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncSettings {
    /// Name of the picker on status pages; the host's name when `None`.
    pub name: Option<String>,
    /// File with the cluster's key; derived from the subject prefix when `None`.
    pub key_file: Option<PathBuf>,
    /// A picker that starts is not ready until it has imported the prefix index of a peer, at most for this time. 0: it
    /// is ready at once, and imports the index beside requests.
    pub wait_for_snapshot: Duration,
    /// The NATS servers.
    pub nats: NatsSettings,
}

/// The NATS servers that carry the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsSettings {
    /// URLs: `nats://host:port` or `tls://host:port`, with `user:password@` where needed. At least one.
    pub servers: Vec<String>,
    /// First part of all subjects. Pickers with different prefixes share nothing.
    pub subject_prefix: String,
    /// A NATS credentials file (JWT and nkey seed).
    pub credentials: Option<PathBuf>,
    /// Certificates of the authorities that NATS is checked against, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// This picker's certificate and key.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
}
