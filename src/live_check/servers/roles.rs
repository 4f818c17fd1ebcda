//! Judges prefill and decode servers: both are there, and run the connector and the role that the pool expects.

use super::probe::Probe;
use crate::finding::{Check, Report};
use attache_config::settings::{Disaggregation, PoolSettings};
use attache_disagg::Mode;
use attache_pool::role::ROLE_LABEL;
use attache_pool::{Engine, Roles};
use serde_json::Value;

static ROLES: Check = Check {
    id: "pool-roles",
    about: "a pool with `disaggregation` has servers of each role that it needs",
    why: "Without prefill servers no request is split; without decode servers none is served.",
};
static CONNECTOR: Check = Check {
    id: "server-connector",
    about: "the server runs the KV connector of the pool",
    why: "vLLM ignores the parameters of a transfer without a connector, so every prompt is computed twice.",
};
static ROLE: Check = Check {
    id: "server-role",
    about: "the role that the server runs in is the configured one",
    why: "A prefill server that decodes, or the reverse, fails split requests.",
};

pub(super) const CHECKS: &[&Check] = &[&ROLES, &CONNECTOR, &ROLE];

/// The name of the connector that the pool uses for this engine; `None` with a sidecar or by label.
fn connector(disaggregation: &Disaggregation) -> Option<&'static str> {
    match &disaggregation.mode {
        Mode::Direct(direct) if !direct.by_label => Some(direct.connector.name()),
        _ => None,
    }
}

/// What the server says about its own flags.
#[derive(Debug, Default, PartialEq, Eq)]
struct OwnRole<'v> {
    connector: Option<&'v str>,
    /// vLLM's `kv_role`, or SGLang's `disaggregation_mode`.
    role: Option<&'v str>,
}

fn own_role(engine: Engine, info: &Value) -> OwnRole<'_> {
    match engine {
        Engine::Sglang => OwnRole { connector: None, role: info.get("disaggregation_mode").and_then(Value::as_str) },
        Engine::Vllm => {
            let transfer = info.get("vllm_config").and_then(|config| config.get("kv_transfer_config"));
            let member = |key| transfer.and_then(|transfer| transfer.get(key)).and_then(Value::as_str);
            OwnRole { connector: member("kv_connector"), role: member("kv_role") }
        }
        _ => OwnRole::default(),
    }
}

/// Whether a server in this role can do what its configured roles say.
fn fits(role: &str, roles: Roles) -> bool {
    let (prefill, decode) = (roles.has(Roles::PREFILL), roles.has(Roles::DECODE));
    match role {
        "kv_producer" | "prefill" => prefill && !decode,
        "kv_consumer" | "decode" => decode && !prefill,
        // SGLang without disaggregation.
        "null" => prefill && decode,
        _ => true,
    }
}

pub(super) fn judge(probe: &Probe, pool: &PoolSettings, report: &mut Report) {
    let Some(disaggregation) = &pool.disaggregation else { return };
    let (subject, engine) = (&probe.member.subject, probe.member.spec.engine);
    let roles = probe.member.roles;
    let wanted = connector(disaggregation);
    let own = probe.info.as_ref().map(|info| own_role(engine, info)).unwrap_or_default();
    if let Some(role) = own.role {
        report.push(match fits(role, roles) {
            true => ROLE.ok(subject, format!("runs as `{role}`, configured as {roles}")),
            false => ROLE.error(
                subject,
                format!("runs as `{role}`, configured as {roles}"),
                "correct `role` of the endpoint or the label `llm-d.ai/role`; or `kv_role` in `--kv-transfer-config`, \
                 `--disaggregation-mode` of SGLang",
            ),
        });
    }
    let names = |connector: &str| connector.to_ascii_lowercase();
    match (wanted, own.connector) {
        (Some("nixl"), Some(theirs)) if !names(theirs).contains("nixl") && !names(theirs).contains("multi") => {
            report.push(CONNECTOR.error(
                subject,
                format!("`disaggregation.connector` is nixl, the server runs {theirs}"),
                "start vLLM with `--kv-transfer-config '{\"kv_connector\": \"NixlConnector\", …}'`, or correct `connector`",
            ));
        }
        (Some("nixl"), None) if engine == Engine::Vllm && is_split(roles) => {
            if let Some(page) = probe.metrics.as_ref().filter(|page| matches!(page.read, Some(Ok(_)))) {
                report.push(match page.has_nixl {
                    true => CONNECTOR.ok(subject, "has metrics of the NIXL connector"),
                    false => CONNECTOR.warning(
                        subject,
                        "`disaggregation.connector` is nixl, and the metrics have no `vllm:nixl_…`",
                        "start vLLM with `--kv-transfer-config '{\"kv_connector\": \"NixlConnector\", …}'`; versions \
                         before 0.12 have no such metrics",
                    ),
                });
            }
        }
        (Some(wanted), Some(theirs)) => report.push(CONNECTOR.ok(subject, format!("{theirs} for `{wanted}`"))),
        _ => {}
    }
}

/// Whether a server has one of both roles. One with both can serve whole requests without a connector.
fn is_split(roles: Roles) -> bool {
    roles.has(Roles::PREFILL) != roles.has(Roles::DECODE)
}

/// Whether the pool has the servers that its disaggregation needs.
pub(super) fn judge_pool(probes: &[Probe], pool: &PoolSettings, report: &mut Report) {
    let subject = format!("pool {}", pool.name);
    let count = |role: Roles| probes.iter().filter(|probe| probe.member.roles.has(role)).count();
    let (prefill, decode) = (count(Roles::PREFILL), count(Roles::DECODE));
    for probe in probes {
        let label = probe.member.spec.labels.get(ROLE_LABEL);
        let Some(unknown) = label.filter(|word| Roles::of_word(word).is_none()) else { continue };
        report.push(ROLES.error(
            &probe.member.subject,
            format!("the role `{unknown}` is unknown, so the server gets no requests"),
            format!("correct the label `llm-d.ai/role`: allowed are {}", Roles::words().join(", ")),
        ));
    }
    if probes.is_empty() || pool.disaggregation.is_none() {
        return;
    }
    let found = format!("{prefill} servers prefill, {decode} decode");
    report.push(match (prefill, decode) {
        (0, _) => ROLES.error(&subject, found, "add endpoints with `role: prefill`, or remove `disaggregation`"),
        (_, 0) => ROLES.error(&subject, found, "add endpoints with `role: decode` or `role: both`"),
        _ => ROLES.ok(&subject, found),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn roles_of_servers_are_read_from_their_own_description() {
        let vllm =
            json!({"vllm_config": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}});
        let expected = OwnRole { connector: Some("NixlConnector"), role: Some("kv_producer") };
        assert_eq!(own_role(Engine::Vllm, &vllm), expected);
        let sglang = json!({"disaggregation_mode": "decode", "page_size": 64});
        assert_eq!(own_role(Engine::Sglang, &sglang), OwnRole { connector: None, role: Some("decode") });
        for odd in [json!(null), json!({"vllm_config": "text"}), json!([])] {
            assert_eq!(own_role(Engine::Vllm, &odd), OwnRole::default());
        }
    }

    #[test]
    fn producers_prefill_and_consumers_decode() {
        let both = Roles::PREFILL.and(Roles::DECODE);
        for (role, roles, expected) in [
            ("kv_producer", Roles::PREFILL, true),
            ("kv_producer", Roles::DECODE, false),
            ("decode", Roles::DECODE, true),
            ("decode", both, false),
            ("kv_both", Roles::DECODE, true),
            ("null", Roles::DECODE, false),
        ] {
            assert_eq!(fits(role, roles), expected, "{role} {roles}");
        }
    }
}
