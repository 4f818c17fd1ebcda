//! Checks of the NATS servers that carry the messages between pickers.

use crate::Targets;
use crate::finding::{Check, Report};
use crate::picker::PickerView;
use attache_config::settings::SyncSettings;
use attache_nats::NatsConfig;
use attache_nats::probe::{NatsReport, ProbeError, probe};
use std::time::Duration;

static REACHABLE: Check = Check {
    id: "nats-reachable",
    about: "each NATS server accepts the connection",
    why: "Without NATS, each picker knows only its own requests.",
};
static LOGIN: Check = Check {
    id: "nats-login",
    about: "NATS accepts the user, the credentials or the certificate",
    why: "A picker that NATS refuses knows only its own requests.",
};
static RIGHTS: Check = Check {
    id: "nats-permissions",
    about: "the user may publish and subscribe to the subjects of pickers",
    why: "Messages are dropped by NATS, and other pickers count no requests of this one.",
};
static OPEN: Check = Check {
    id: "nats-open",
    about: "NATS requires a login, if it is not on this machine",
    why: "Every client of an open NATS can send false load and false cache contents.",
};
static PAYLOAD: Check = Check {
    id: "nats-max-payload",
    about: "`max_payload` of NATS against the largest message of a picker",
    why: "NATS ends the connection on a larger message, and the prefix index is not imported.",
};
static LATENCY: Check = Check {
    id: "nats-latency",
    about: "time of a message through NATS",
    why: "Bookings arrive that much later, and pickers choose the same server meanwhile.",
};

pub(crate) const CHECKS: &[&Check] = &[&REACHABLE, &LOGIN, &RIGHTS, &OPEN, &PAYLOAD, &LATENCY];

/// Limit of each step.
const ANSWER: Duration = Duration::from_secs(3);
/// Largest message of a picker, 1 MiB. It is also the default of NATS.
const LARGEST_MESSAGE: usize = 1 << 20;
/// Time of a message from which on it is reported.
const SLOW: Duration = Duration::from_millis(50);

/// Checks NATS, if the configuration uses it.
pub(crate) async fn check(targets: &Targets, view: &PickerView) -> Report {
    let mut report = Report::default();
    let from_file = targets.settings.as_ref();
    let Some(sync) = from_file.or(view.settings.as_ref()).and_then(|settings| settings.sync.as_ref()) else {
        return report;
    };
    let probes = sync.nats.servers.iter().map(|server| async move { (server, ask(sync, server).await) });
    for (server, outcome) in futures_util::future::join_all(probes).await {
        let subject = format!("NATS {}", shown(server));
        match outcome {
            Ok(found) => {
                report.mark_reached();
                judge(&subject, server, &found, &mut report);
            }
            Err(error) => failed(&subject, &error, from_file.is_some(), &mut report),
        }
    }
    report
}

async fn ask(sync: &SyncSettings, server: &str) -> Result<NatsReport, ProbeError> {
    let nats = &sync.nats;
    // The login is in the first URL that has one, and counts for all servers.
    let login = nats.servers.iter().find(|url| url.contains('@')).filter(|_| !server.contains('@'));
    let server = login.map_or_else(|| server.to_owned(), |url| with_login_of(server, url));
    let config = NatsConfig {
        servers: vec![server],
        subject_prefix: nats.subject_prefix.clone(),
        credentials: nats.credentials.clone(),
        ca_file: nats.ca_file.clone(),
        client_certificate: nats.client_certificate.clone(),
    };
    let host = || std::env::var("HOSTNAME").ok().filter(|name| !name.is_empty());
    let name = sync.name.clone().or_else(host).unwrap_or_else(|| "attache-check".to_owned());
    probe(&config, &name, ANSWER).await
}

/// `server` with the user and password of `url`.
fn with_login_of(server: &str, url: &str) -> String {
    let login = url.split_once("://").map_or(url, |(_, rest)| rest).rsplit_once('@').map(|(login, _)| login);
    match (server.split_once("://"), login) {
        (Some((scheme, host)), Some(login)) => format!("{scheme}://{login}@{host}"),
        (None, Some(login)) => format!("{login}@{server}"),
        (_, None) => server.to_owned(),
    }
}

/// A URL without its user and password.
fn shown(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => format!("{scheme}://{}", rest.rsplit_once('@').map_or(rest, |(_, host)| host)),
        None => url.rsplit_once('@').map_or(url, |(_, host)| host).to_owned(),
    }
}

fn failed(subject: &str, error: &ProbeError, is_from_file: bool, report: &mut Report) {
    report.push(match error {
        ProbeError::Login(_) | ProbeError::Config(_) if !is_from_file => LOGIN.unknown(
            subject,
            format!("{error}; the configuration of the picker is shown without passwords"),
            "name the configuration: `attache check FILE --live`",
        ),
        ProbeError::Login(_) => LOGIN.error(
            subject,
            error.to_string(),
            "correct the user and password in `sync.nats.servers`, or `sync.nats.credentials`",
        ),
        ProbeError::Config(_) => LOGIN.error(
            subject,
            error.to_string(),
            "correct the file that `sync.nats` names, or run `attache check --live` where the picker runs",
        ),
        ProbeError::Away(_) => REACHABLE.error(
            subject,
            error.to_string(),
            "start NATS, or correct `sync.nats.servers`; check firewalls, NetworkPolicies and `tls://`",
        ),
    });
}

/// Whether a URL names this machine.
fn is_local(url: &str) -> bool {
    let url = shown(url);
    let host = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
    ["localhost", "127.", "[::1]"].iter().any(|own| host.starts_with(own))
}

fn judge(subject: &str, server: &str, found: &NatsReport, report: &mut Report) {
    report.push(REACHABLE.ok(subject, format!("version {}; JetStream is not needed", found.version)));
    report.push(match (found.auth_required, is_local(server)) {
        (false, false) => OPEN.warning(
            subject,
            "requires no login",
            "give NATS users, and set `user:password@` in `sync.nats.servers` or `sync.nats.credentials`",
        ),
        (false, true) => OPEN.ok(subject, "requires no login, on this machine"),
        (true, _) => LOGIN.ok(subject, "the login is accepted"),
    });
    report.push(match found.denied.is_empty() {
        true => RIGHTS.ok(subject, "may publish and subscribe to the subjects of pickers"),
        false => RIGHTS.error(
            subject,
            found.denied.join("; "),
            "allow publishing to `PREFIX.sync.v2.all.NAME.*` and `PREFIX.sync.v2.to.*.NAME.*`, and subscribing to \
             `PREFIX.sync.v2.all.*.*` and `PREFIX.sync.v2.to.*.*.*`; PREFIX is `sync.nats.subjectPrefix`",
        ),
    });
    let largest = format!("`max_payload` is {} bytes", found.max_payload);
    report.push(match found.max_payload < LARGEST_MESSAGE {
        true => PAYLOAD.warning(subject, largest, format!("set `max_payload: {LARGEST_MESSAGE}` in the NATS server")),
        false => PAYLOAD.ok(subject, largest),
    });
    let time = format!("a message takes {:.1} ms", found.round_trip.as_secs_f64() * 1e3);
    report.push(match found.round_trip > SLOW && found.denied.is_empty() {
        true => LATENCY.warning(subject, time, "run NATS near the pickers, and look at its load"),
        false => LATENCY.ok(subject, time),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown_and_count_for_all_servers() {
        assert_eq!(shown("nats://user:secret@host:4222"), "nats://host:4222");
        assert_eq!(shown("host:4222"), "host:4222");
        assert_eq!(with_login_of("nats://b:4222", "nats://user:secret@a:4222"), "nats://user:secret@b:4222");
        assert!(is_local("nats://u:p@127.0.0.1:4222") && is_local("localhost:4222") && !is_local("nats://nats:4222"));
    }
}
