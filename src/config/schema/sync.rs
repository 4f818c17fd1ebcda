//! State that is shared with other pickers.

use super::declare;
use crate::settings::sync::DEFAULT_SUBJECT_PREFIX;
use attache_config_schema::diagnostic::At;
use std::time::Duration;

sections! {
    /// What this picker shares with others over NATS.
    Sync {
        /// Unique name of this picker, at most 253 bytes.
        "name" => name: String { absent: "the name of the host"; flag: "sync-name" as "NAME"; },
        /// File with a key of at least 16 bytes, the same on all pickers.
        "keyFile" => key_file: String { absent: "derived from `subjectPrefix`"; },
        /// Longest time in which the picker is not ready because it imports the prefix index of another one. Kubernetes gives
        /// up on a rollout that makes no progress for ten minutes.
        "waitForSnapshot" => wait_for_snapshot: Duration {
            default: Duration::ZERO; range: Duration::ZERO..=Duration::from_secs(600);
        },
        /// The NATS servers that carry the messages.
        "nats" => nats: Nats { absent: "required"; },
    }
    /// The NATS servers that carry the messages.
    Nats {
        /// The servers of one NATS cluster, by which this picker shares its requests in flight and prompts with others. As in
        /// `nats://host:port`, or `tls://host:port`; with `user:password@` where needed.
        "servers" => servers: Vec<At<String>> { absent: "required"; flag: "sync-nats-url" as "URL"; },
        /// Start of all subjects. Pickers with different prefixes share nothing.
        "subjectPrefix" => subject_prefix: String { default: DEFAULT_SUBJECT_PREFIX.to_owned(); },
        /// A NATS credentials file.
        "credentials" => credentials: String { absent: "none"; },
        /// Certificates of the connection.
        "tls" => tls: NatsTls,
    }
    /// Certificates of the connection to NATS.
    NatsTls {
        /// PEM file with the authorities of the servers' certificates.
        "caFile" => ca_file: String { absent: "those of the system"; },
        /// This picker's certificate. Needs `keyFile`.
        "certFile" => cert_file: String { absent: "none"; },
        /// The key of this picker's certificate. Needs `certFile`.
        "keyFile" => key_file: String { absent: "none"; },
    }
}
