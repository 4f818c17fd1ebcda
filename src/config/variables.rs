//! What environment variables of all products have in common.

use super::diagnostic::{Code, Diagnostic, closest};

/// Whether Kubernetes sets the variable for a Service, as `AIBRIX_REDIS_MASTER_SERVICE_HOST` for `aibrix-redis-master`.
pub(super) fn is_of_service(name: &str, value: &str) -> bool {
    const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];
    let is_link = PROTOCOLS.iter().any(|protocol| {
        value.trim().strip_prefix(protocol).is_some_and(|rest| rest.starts_with("://"))
            || name.contains("_PORT_") && name.contains(&format!("_{}", protocol.to_ascii_uppercase()))
    });
    name.contains("_SERVICE_HOST") || name.contains("_SERVICE_PORT") || name.contains("_PORT") && is_link
}

/// The warning about a variable that nothing reads, with the nearest of the `known` names.
pub(super) fn unread<'a>(name: &str, why: &str, known: impl Iterator<Item = &'a str>) -> Diagnostic {
    let told = Diagnostic::new(Code::NoEffect, name, format!("`{name}` has no effect: {why}"));
    match closest(name, known) {
        Some(meant) => told.help(format!("did you mean `{meant}`?")),
        None => told,
    }
}
