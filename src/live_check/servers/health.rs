//! Whether a model server answers, and what it is.

use super::probe::Probe;
use crate::finding::{Check, Finding, Report};
use attache_http_client::FetchError;

static REACHABLE: Check = Check {
    id: "server-reachable",
    about: "the model server accepts connections",
    why: "Envoy fails every request that goes there.",
};
static CERTIFICATE: Check = Check {
    id: "server-certificate",
    about: "the certificate of a server with HTTPS is verified, unless `scrape.insecureSkipVerify` is set",
    why: "The picker verifies it as well, and has no metrics of a server without a valid certificate.",
};
static HEALTH: Check = Check {
    id: "server-health",
    about: "the health check of the model server succeeds",
    why: "The engine does not serve requests, though its process may run.",
};
static VERSION: Check = Check {
    id: "server-version",
    about: "version of the engine",
    why: "Other versions have other metrics, events and prompts.",
};
static MODELS: Check = Check {
    id: "server-models",
    about: "the list of models can be read",
    why: "Without it, models and adapters of the server are unknown.",
};

pub(super) const CHECKS: &[&Check] = &[&REACHABLE, &CERTIFICATE, &HEALTH, &VERSION, &MODELS];

/// The finding about a certificate that was not verified.
pub(super) fn unverified(subject: &str, error: &FetchError) -> Finding {
    let fix = "let the certificate name the address of the server, and the system's store trust its issuer \
               (`SSL_CERT_FILE` names another one); or set `scrape.insecureSkipVerify: true`; if only the picker's \
               machine trusts the issuer, run the check there";
    CERTIFICATE.error(subject, format!("{error}; nothing was sent"), fix)
}

pub(super) fn judge(probe: &Probe, report: &mut Report) {
    let subject = &probe.member.subject;
    let reply = match &probe.health {
        Ok(reply) => reply,
        Err(error @ FetchError::Certificate(_)) => {
            report.push(unverified(subject, error));
            return;
        }
        Err(error) => {
            let fix =
                "start the model server, or correct its address in `endpoints`; check firewalls and NetworkPolicies";
            report.push(REACHABLE.error(subject, error.to_string(), fix));
            return;
        }
    };
    report.push(REACHABLE.ok(subject, "accepts connections"));
    report.push(match reply.status {
        200..300 => HEALTH.ok(subject, "healthy"),
        // Some servers have no such page.
        404 | 405 => HEALTH.ok(subject, "answers, without a health check"),
        401 | 403 => HEALTH.unknown(
            subject,
            format!("the health check wants a token: status {}", reply.status),
            "set `scrape.bearerTokenFile` to a file with the key of the server",
        ),
        status => HEALTH.error(
            subject,
            format!("the health check fails with status {status}"),
            "look at the log of the model server: its engine has failed or still loads the model",
        ),
    });
    if let Some(version) = &probe.version {
        report.push(VERSION.ok(subject, format!("version {version}")));
    }
    match &probe.models {
        Some(Ok(list)) => {
            let shown: Vec<&str> = list.ids().take(MAX_SHOWN).collect();
            let more = list.len().saturating_sub(MAX_SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            report.push(MODELS.ok(subject, format!("serves {}{more}", shown.join(", "))));
        }
        Some(Err(error)) if error.contains("401") || error.contains("403") => report.push(MODELS.warning(
            subject,
            format!("`/v1/models` is refused: {error}"),
            "set `scrape.bearerTokenFile` to a file with the key of the server (`--api-key`)",
        )),
        // Triton has no such page.
        Some(Err(error)) => report.push(MODELS.unknown(
            subject,
            format!("`/v1/models` can't be read: {error}"),
            "nothing if the engine has no such page; else look at the log of the model server",
        )),
        None => {}
    }
}

/// Most models that are listed.
const MAX_SHOWN: usize = 6;
