//! Checks of Attaché itself, from the pages of its admin port: readiness, configuration, counters, peers, endpoints.

mod configuration;
mod counters;
mod degraded;
mod endpoints;
mod pages;
mod status;
mod warnings;

use crate::Targets;
use crate::clock::{self, ClockOffset};
use crate::finding::{Check, Report};
use crate::http::{Http, Reply};
use attache_config::{ConfigText, Settings, Sources};
use attache_http_client::FetchError;
pub(crate) use pages::{EndpointsPage, PoolPage};
use pages::{PeersPage, PickerMetrics, StatusPage};
use serde::de::DeserializeOwned;
use serde_json::Value;

static REACHABLE: Check = Check {
    id: "picker-reachable",
    about: "the admin port answers",
    why: "Without the picker, Envoy rejects requests or sends them to any server.",
};
static PAGES: Check = Check {
    id: "picker-pages",
    about: "the pages of the admin port can be read",
    why: "Only what these pages show can be checked.",
};
static READY: Check = Check {
    id: "picker-ready",
    about: "the picker is ready; what is missing otherwise",
    why: "A picker that is not ready gets no requests from a Service, and rejects the others.",
};
static VERSION: Check = Check {
    id: "picker-version",
    about: "version of the picker and of this program",
    why: "Another version may have other keys, pages and metrics.",
};
static CONFIGURATION: Check = Check {
    id: "picker-configuration",
    about: "configuration in effect against the file, flags included",
    why: "The picker runs with other values than the file says.",
};
static PEERS: Check = Check {
    id: "picker-peers",
    about: "other pickers that share state send messages",
    why: "Requests of a silent picker are not counted, so both choose the same server.",
};

/// All checks of this file and its modules.
pub(crate) const CHECKS: &[&[&Check]] = &[
    &[&REACHABLE, &PAGES, &READY, &VERSION, &CONFIGURATION, &PEERS],
    status::CHECKS,
    counters::CHECKS,
    warnings::CHECKS,
    endpoints::CHECKS,
];

/// Silence of another picker from which on it is reported, seconds: its requests are dropped then.
const SILENT_SECONDS: f64 = 3.0;

/// What the picker shows, for the checks of what it uses.
#[derive(Debug, Default)]
pub(crate) struct PickerView {
    /// `/endpoints`, if it could be read.
    pub(crate) endpoints: Option<EndpointsPage>,
    /// The configuration in effect, without passwords.
    pub(crate) settings: Option<Settings>,
    /// The clock of the picker.
    pub(crate) clock: Option<ClockOffset>,
}

/// How findings name an endpoint of a pool.
pub(crate) fn endpoint_subject(address: &str, pool: &str) -> String {
    format!("model server {address}, pool {pool}")
}

/// How findings name the picker.
fn subject_of(targets: &Targets) -> String {
    format!("picker {}", targets.picker)
}

/// Checks the picker.
pub(crate) async fn check(http: &Http, targets: &Targets) -> (Report, PickerView) {
    let subject = subject_of(targets);
    let mut report = Report::default();
    let get = |path: &str| {
        let url = format!("{}{path}", targets.picker);
        let token = targets.token.clone();
        async move { http.reply(&url, token, false).await }
    };
    let ready = match get("/ready").await {
        Ok(ready) => ready,
        Err(error) => {
            report.push(unreachable(targets, &subject, &error));
            return (report, PickerView::default());
        }
    };
    report.mark_reached();
    report.push(REACHABLE.ok(&subject, "the admin port answers"));
    report.push(readiness(&subject, &ready));
    let (endpoints, dump, metrics, peers, status) =
        tokio::join!(get("/endpoints"), get("/config_dump"), get("/metrics"), get("/api/peers"), get("/api/status"));
    let endpoints: Option<EndpointsPage> = page(targets, "/endpoints", endpoints, &mut report);
    let dump: Option<Value> = page(targets, "/config_dump", dump, &mut report);
    let peers: Option<PeersPage> = page(targets, "/api/peers", peers, &mut report);
    let status: Option<StatusPage> = page(targets, "/api/status", status, &mut report);
    let settings = dump.as_ref().and_then(|dump| settings_of(targets, dump));
    match metrics {
        Ok(reply) if reply.status == 200 => {
            counters::judge(&subject, &PickerMetrics::read(&reply.body), &mut report);
        }
        other => not_read(targets, "/metrics", &other, &mut report),
    }
    if let Some(page) = &status {
        status::judge(&subject, page, &mut report);
    }
    if let Some(page) = &endpoints {
        version(&subject, &page.version, &mut report);
        warnings::judge(&subject, page, &mut report);
        endpoints::judge(page, targets.settings.as_ref().or(settings.as_ref()), &mut report);
    }
    if let (Some(dump), Some(file)) = (&dump, &targets.settings) {
        configuration(&subject, targets, (file, settings.as_ref()), dump, &mut report);
    }
    if let Some(peers) = &peers {
        judge_peers(&subject, peers, &mut report);
    }
    let clock = clock::offset(&subject, &ready);
    (report, PickerView { endpoints, settings, clock })
}

fn unreachable(targets: &Targets, subject: &str, error: &FetchError) -> crate::finding::Finding {
    let fix = "start the picker, or name its admin port with `--admin URL` (flag `--metrics-port` of `attache run`)";
    let found = format!("the admin port does not answer: {error}");
    match targets.is_picker_named {
        true => REACHABLE.error(subject, found, fix),
        false => REACHABLE.unknown(subject, found, fix),
    }
}

fn readiness(subject: &str, ready: &Reply) -> crate::finding::Finding {
    match ready.status {
        200 => READY.ok(subject, "ready"),
        status => {
            let missing = String::from_utf8_lossy(&ready.body);
            let missing: Vec<&str> = missing.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let found = format!("not ready (status {status}): {}", missing.join("; "));
            let fix = "do what the missing condition names; the log of the picker has the cause";
            READY.error(subject, found, fix)
        }
    }
}

/// A JSON page. One that can't be read is a finding.
fn page<T: DeserializeOwned>(
    targets: &Targets,
    path: &str,
    reply: Result<Reply, FetchError>,
    report: &mut Report,
) -> Option<T> {
    let read = match &reply {
        Ok(reply) if reply.status == 200 => serde_json::from_slice(&reply.body).ok(),
        _ => None,
    };
    if read.is_none() {
        not_read(targets, path, &reply, report);
    }
    read
}

fn not_read(targets: &Targets, path: &str, reply: &Result<Reply, FetchError>, report: &mut Report) {
    let subject = subject_of(targets);
    let finding = match reply {
        // Without `--metrics-endpoint-auth`, the refusal says that the pages are for loopback only.
        Ok(reply) if reply.status == 403 && memchr::memmem::find(&reply.body, b"loopback").is_some() => PAGES.unknown(
            subject,
            format!("`{path}` is refused with status 403: the picker shows it only to loopback addresses"),
            "run the check on the machine or in the pod of the picker; or forward its port with `kubectl port-forward \
             deployment/llm-epp 9090`, and check with `--admin 127.0.0.1:9090`; or start the picker with \
             `--metrics-endpoint-auth`, and name a bearer token with `--token-file FILE`",
        ),
        Ok(reply) if matches!(reply.status, 401 | 403) => {
            let fix = match (reply.status, targets.token.is_some()) {
                (_, false) => {
                    "name a file with a bearer token of a user with `get` on this page: `--token-file FILE`".to_owned()
                }
                (401, true) => "name another file: the token in `--token-file` is not valid".to_owned(),
                (_, true) => format!("give the user of the token the right `get` on `{path}` (`nonResourceURLs`)"),
            };
            PAGES.unknown(subject, format!("`{path}` is refused with status {}", reply.status), fix)
        }
        Ok(reply) => PAGES.unknown(
            subject,
            format!("`{path}` can't be read: status {}, {} bytes", reply.status, reply.body.len()),
            "check that `--admin` names the admin port of Attaché",
        ),
        Err(error) => PAGES.unknown(
            subject,
            format!("`{path}` can't be read: {error}"),
            "check the connection to the picker, and its log",
        ),
    };
    report.push(finding);
}

/// The dump is a configuration without passwords.
fn settings_of(targets: &Targets, dump: &Value) -> Option<Settings> {
    let text = ConfigText { name: "/config_dump".to_owned(), bytes: dump.to_string().into_bytes() };
    let sources = Sources { registry: targets.registry.clone(), text: Some(text), ..Sources::default() };
    attache_config::load(&sources).ok().map(|(settings, _)| settings)
}

fn version(subject: &str, theirs: &str, report: &mut Report) {
    let own = env!("CARGO_PKG_VERSION");
    report.push(match theirs == own {
        true => VERSION.ok(subject, format!("version {own}, as this program")),
        false => VERSION.warning(
            subject,
            format!("the picker has version {theirs}, this program has {own}"),
            format!("run `attache check --live` with version {theirs}"),
        ),
    });
}

fn configuration(
    subject: &str,
    targets: &Targets,
    (file, effect): (&Settings, Option<&Settings>),
    dump: &Value,
    report: &mut Report,
) {
    let minimal = serde_json::json!({
        "apiVersion": dump["apiVersion"], "kind": dump["kind"],
        "pools": [{"name": "default", "endpoints": ["127.0.0.1:1"]}],
    });
    let defaults = settings_of(targets, &minimal).map(|settings| settings.to_json()).unwrap_or_default();
    let differences = configuration::differences(&file.to_json(), dump);
    let (said, flags): (Vec<_>, Vec<_>) = differences.iter().partition(|difference| difference.is_said(&defaults));
    let listed = |list: &[&configuration::Difference]| {
        let shown = list.iter().take(configuration::MAX_SHOWN);
        let mut shown: Vec<String> =
            shown.map(|d| format!("`{}` is {} in the file and {} in effect", d.key, d.in_file, d.in_effect)).collect();
        if list.len() > configuration::MAX_SHOWN {
            shown.push(format!("{} more", list.len() - configuration::MAX_SHOWN));
        }
        shown.join("; ")
    };
    if said.is_empty() {
        let by_flags: Vec<&str> = flags.iter().map(|difference| difference.key.as_str()).collect();
        let found = match by_flags.is_empty() {
            true => "the configuration in effect is that of the file".to_owned(),
            false => format!("the configuration in effect is that of the file; flags set {}", by_flags.join(", ")),
        };
        report.push(CONFIGURATION.ok(subject, found));
        return;
    }
    let restart = effect.map(|effect| effect.restart_needed(file)).unwrap_or_default();
    let is_said = |key: &String| said.iter().any(|difference| difference.key.starts_with(key));
    let restart: Vec<String> = restart.into_iter().filter(is_said).collect();
    let fix = match restart.is_empty() {
        true => "compare the file with the one that the picker reads, and with its flags, which outrank the file; \
                 the log says whether a reload was refused"
            .to_owned(),
        false => format!("restart the picker: {} take effect at start only; or remove the flag", restart.join(", ")),
    };
    report.push(CONFIGURATION.warning(subject, listed(&said), fix));
}

fn judge_peers(subject: &str, page: &PeersPage, report: &mut Report) {
    if !page.shares_state {
        return;
    }
    if page.peers.is_empty() {
        report.push(PEERS.ok(subject, "shares state; no other picker has sent a message yet"));
    }
    for peer in &page.peers {
        let silent = peer.seconds_since_last_message;
        report.push(match () {
            () if silent > SILENT_SECONDS => PEERS.warning(
                subject,
                format!("picker {} has been silent for {silent:.0} s", peer.name),
                "look at that picker and at its `attache_sync_connected`; give all pickers the same `sync.nats.servers`",
            ),
            () if peer.behind => PEERS.warning(
                subject,
                format!("changes of picker {} are missing", peer.name),
                "look at `attache_sync_dropped_messages_total` of both pickers, and at the load of NATS",
            ),
            () => PEERS.ok(subject, format!("picker {} sent its last message {silent:.1} s ago", peer.name)),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_for_loopback_only_says_how_to_reach_it() {
        let fix = |body: &str| {
            let reply = Reply {
                status: 403,
                date: None,
                sent: attache_types::clock::wall_now(),
                received: attache_types::clock::wall_now(),
                body: body.as_bytes().to_vec(),
            };
            let mut report = Report::default();
            not_read(&Targets::default(), "/endpoints", &Ok(reply), &mut report);
            report.findings()[0].fix.clone()
        };
        assert!(fix("only from loopback; try `kubectl port-forward`\n").contains("`kubectl port-forward"));
        assert!(!fix("Authorization denied for user a\n").contains("port-forward"));
    }
}
