//! Variables that begin with `ATTACHE_` and that nothing reads, such as misspelt ones.
//!
//! Read with the flags (`cli`), which knows all names; used by `validate`.

use super::aibrix_env::COMPAT;
use super::decode::Sink;
use super::variables::{is_of_service, unread};
use std::collections::BTreeSet;

/// Prefix of Attaché's own variables.
const PREFIX: &str = "ATTACHE_";
/// Variables of the scripts that build and test Attaché, which its processes inherit.
const OF_SCRIPTS: [&str; 7] = [
    "ATTACHE_BLESS",
    "ATTACHE_ENVOY",
    "ATTACHE_NATS",
    "ATTACHE_REDIS",
    "ATTACHE_TOOLS",
    "ATTACHE_UPDATE_DOCS",
    "ATTACHE_UPDATE_PROTO",
];

/// The variables that are set and unknown, and the known names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnEnv {
    unknown: BTreeSet<String>,
    known: BTreeSet<String>,
}

impl OwnEnv {
    /// Selects unknown variables among `variables`, where flags read those in `of_flags`. Blank ones count as not set.
    #[must_use]
    pub fn of(
        variables: impl IntoIterator<Item = (String, String)>,
        of_flags: impl IntoIterator<Item = String>,
    ) -> Self {
        let known: BTreeSet<String> = of_flags.into_iter().chain([COMPAT.to_owned()]).collect();
        let is_unknown = |name: &str, value: &str| {
            let is_known = known.contains(name) || OF_SCRIPTS.contains(&name);
            name.starts_with(PREFIX) && !is_known && !value.trim().is_empty() && !is_of_service(name, value)
        };
        let unknown = variables.into_iter().filter(|(name, value)| is_unknown(name, value)).map(|(name, _)| name);
        Self { unknown: unknown.collect(), known }
    }

    /// Warns of each unknown variable.
    pub(super) fn tell(&self, sink: &mut Sink) {
        for name in &self.unknown {
            sink.push(unread(name, "no flag has this variable", self.known.iter().map(String::as_str)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, value: &str) -> Vec<(String, Option<String>)> {
        let flags = ["ATTACHE_GRPC_PORT", "ATTACHE_STRATEGY", "ATTACHE_ENDPOINTS"].map(str::to_owned);
        let mut sink = Sink::default();
        OwnEnv::of([(name.to_owned(), value.to_owned())], flags).tell(&mut sink);
        sink.diagnostics.into_iter().map(|d| (d.message, d.help)).collect()
    }

    #[test]
    fn misspelt_variables_are_named_with_the_nearest() {
        for (name, meant) in [
            ("ATTACHE_STRATEGIE", "ATTACHE_STRATEGY"),
            ("ATTACHE_GPRC_PORT", "ATTACHE_GRPC_PORT"),
            ("ATTACHE_ENDPOINT", "ATTACHE_ENDPOINTS"),
            ("ATTACHE_AIBRIX_COMPATT", "ATTACHE_AIBRIX_COMPAT"),
        ] {
            let [(message, help)] = &told(name, "9002")[..] else { panic!("{name}") };
            assert!(message.contains(&format!("`{name}` has no effect")), "{message}");
            assert_eq!(help.as_deref(), Some(&*format!("did you mean `{meant}`?")));
        }
        assert_eq!(told("ATTACHE_SOMETHING_ELSE_ENTIRELY", "1")[0].1, None);
    }

    #[test]
    fn known_variables_and_those_of_kubernetes_are_not_named() {
        for (name, value) in [
            ("ATTACHE_STRATEGY", "random"),
            ("ATTACHE_AIBRIX_COMPAT", "true"),
            ("ATTACHE_TOOLS", "/tools"),
            ("ATTACHE_OTHER", " "),
            ("STRATEGY", "random"),
            ("ATTACHE_SERVICE_HOST", "10.0.0.1"),
            ("ATTACHE_EPP_SERVICE_PORT_GRPC", "9002"),
            ("ATTACHE_PORT", "tcp://10.0.0.1:9002"),
            ("ATTACHE_PORT_9002_TCP", "tcp://10.0.0.1:9002"),
            ("ATTACHE_PORT_9002_TCP_ADDR", "10.0.0.1"),
            ("ATTACHE_EPP_PORT_53_UDP_PROTO", "udp"),
        ] {
            assert_eq!(told(name, value), [], "{name}");
        }
    }
}
