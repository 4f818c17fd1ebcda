//! State that is shared with other pickers.

use super::{At, Duration, Fields, Node, Opt, Read, Sink};

sections! {
    /// What this picker shares with others, and how.
    Sync {
        "name" => name: String,
        "keyFile" => key_file: String,
        "waitForSnapshot" => wait_for_snapshot: Duration,
        "nats" => nats: Nats,
    }
    /// The NATS servers that carry the messages.
    Nats {
        "servers" => servers: Vec<At<String>>,
        "subjectPrefix" => subject_prefix: String,
        "credentials" => credentials: String,
        "tls" => tls: NatsTls,
    }
    /// Certificates of the connection to NATS.
    NatsTls {
        "caFile" => ca_file: String,
        "certFile" => cert_file: String,
        "keyFile" => key_file: String,
    }
}
