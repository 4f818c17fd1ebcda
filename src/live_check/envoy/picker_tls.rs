//! Checks of TLS between Envoy and the picker: whether both use it, which certificates Envoy accepts, and the name that it
//! sends in the handshake.

use super::field::{at, flag, has, list, message_name, text};
use super::model_cluster::http_options;
use super::probe::{self, San, Spoken};
use super::source::EnvoySource;
use crate::finding::{Check, Finding, Report};
use serde_json::Value;

pub(super) const CHECKS: &[&Check] = &[&TLS, &IDENTITY, &SNI];

static TLS: Check = Check {
    id: "envoy-picker-tls",
    about: "Envoy and the picker both use TLS, or both don't",
    why: "If only one of both uses TLS, each request fails with 500.",
};

static IDENTITY: Check = Check {
    id: "envoy-picker-identity",
    about: "Envoy verifies the certificate of the picker, and the name in it",
    why: "A pod that takes over the picker's address reads all prompts, and chooses the servers.",
};

static SNI: Check = Check {
    id: "envoy-picker-sni",
    about: "Envoy names the picker in the TLS handshake (SNI), by a name of the picker's certificate",
    why: "A mesh or proxy in between chooses route and certificate by this name, and Envoy can verify the certificate by it.",
};

/// Fields of `common_tls_context` by which Envoy verifies certificates.
const SOURCES: [&str; 4] = [
    "validation_context",
    "validation_context_sds_secret_config",
    "combined_validation_context",
    "validation_context_certificate_provider_instance",
];
/// Fields of a validation context with trusted authorities.
const AUTHORITIES: [&str; 3] = ["trusted_ca", "system_root_certs", "ca_certificate_provider_instance"];
/// Fields of a validation context with certificates or keys.
const PINS: [&str; 2] = ["verify_certificate_hash", "verify_certificate_spki"];
/// Most names that a finding lists.
const MAX_SHOWN: usize = 4;

pub(super) async fn check(
    source: &EnvoySource,
    subject: &str,
    cluster: &Value,
    addresses: &[String],
    out: &mut Report,
) {
    let tls = TlsContext::of(source, cluster);
    let mut names = None;
    for address in addresses {
        let shown = match &tls {
            Some(tls) => probe::certificate_names(address, tls.sni).await,
            None => None,
        };
        // A port that shows a certificate needs no other probe: the picker counts failed handshakes.
        let spoken = if shown.is_some() { Spoken::Tls } else { probe::speaks(address).await };
        names = names.or(shown);
        out.push(both_or_none(subject, tls.is_some(), address, spoken));
    }
    if let Some(tls) = tls {
        out.push(identity(subject, &tls, names.as_deref()));
        out.push(sni(subject, &tls, names.as_deref()));
    }
}

fn both_or_none(subject: &str, uses_tls: bool, address: &str, spoken: Spoken) -> Finding {
    let plain_fix = "give the cluster a `transport_socket` with an `UpstreamTlsContext`, or start Attaché with `--secure-serving=false`";
    let tls_fix = "remove `transport_socket` from the cluster, or start Attaché with `--secure-serving=true`";
    match (spoken, uses_tls) {
        (Spoken::Tls, true) => TLS.ok(subject, format!("TLS to {address}, as the picker expects")),
        (Spoken::Http2, false) => TLS.ok(subject, format!("no TLS to {address}, as the picker expects")),
        (Spoken::Tls, false) => {
            TLS.error(subject, format!("the picker at {address} expects TLS, and Envoy uses none"), plain_fix)
        }
        (Spoken::Http2, true) => {
            TLS.error(subject, format!("Envoy uses TLS, and the picker at {address} expects none"), tls_fix)
        }
        (Spoken::Nothing(error), _) => TLS.unknown(
            subject,
            format!("{address} can't be reached from here: {error}"),
            "run the check where the picker's port can be reached",
        ),
    }
}

/// How Envoy verifies the picker's certificate.
#[derive(Debug, PartialEq)]
enum Verification<'a> {
    /// It accepts any certificate.
    Nothing,
    /// It accepts each certificate of the trusted authorities.
    Authority,
    /// As `Authority`, with a name that one of these messages `SubjectAltNameMatcher` allows.
    Names(Vec<&'a Value>),
    /// It accepts the certificates with these hashes or keys, or those with the name of the handshake.
    Exactly,
    /// What a secret or a plugin says, which is not in view.
    Unknown,
}

/// The message `UpstreamTlsContext` of a cluster.
#[derive(Debug)]
struct TlsContext<'a> {
    /// The name in the handshake; empty if there is none, or if it is that of the host or of the request.
    sni: &'a str,
    /// Whether the name is that of the host or of the request.
    is_automatic: bool,
    /// Whether the certificate must have the name of the handshake.
    is_sni_verified: bool,
    verification: Verification<'a>,
}

impl<'a> TlsContext<'a> {
    /// That of the socket for traffic; other matches are for health checks.
    fn of(source: &'a EnvoySource, cluster: &'a Value) -> Option<Self> {
        let matches = list(cluster, "transport_socket_matches").iter().map(|entry| at(entry, "transport_socket"));
        let mut sockets = matches.chain([at(cluster, "transport_socket")]).map(|socket| at(socket, "typed_config"));
        let message = sockets.find(|config| message_name(config) == "UpstreamTlsContext")?;
        let http = at(http_options(cluster), "upstream_http_protocol_options");
        let is_sni_verified = flag(message, "auto_sni_san_validation") || flag(http, "auto_san_validation");
        Some(Self {
            sni: text(message, "sni"),
            is_automatic: flag(message, "auto_host_sni") || flag(http, "auto_sni"),
            is_sni_verified,
            verification: verification(source, at(message, "common_tls_context"), is_sni_verified),
        })
    }
}

fn verification<'a>(source: &'a EnvoySource, common: &'a Value, is_sni_verified: bool) -> Verification<'a> {
    let secret = |config: &'a Value| {
        let name = text(config, "name");
        source.config.secret(name).map(|secret| at(secret, "validation_context"))
    };
    let combined = at(common, "combined_validation_context");
    let secrets =
        [at(common, "validation_context_sds_secret_config"), at(combined, "validation_context_sds_secret_config")];
    let secrets: Vec<_> = secrets.into_iter().filter(|config| !config.is_null()).map(secret).collect();
    let direct = [at(common, "validation_context"), at(combined, "default_validation_context")];
    let contexts: Vec<&Value> = direct.into_iter().chain(secrets.iter().copied().flatten()).collect();
    let has_any = |fields: &[&str]| contexts.iter().any(|context| fields.iter().any(|field| has(context, field)));
    let accepts_all = contexts.iter().any(|context| text(context, "trust_chain_verification") == "ACCEPT_UNTRUSTED");
    let names = ["match_typed_subject_alt_names", "match_subject_alt_names"];
    let names: Vec<&Value> = contexts.iter().flat_map(|c| names.iter().flat_map(|field| list(c, field))).collect();
    match () {
        () if has_any(&PINS) => Verification::Exactly,
        () if accepts_all || !SOURCES.iter().any(|field| has(common, field)) => Verification::Nothing,
        () if has_any(&AUTHORITIES) && !names.is_empty() => Verification::Names(names),
        () if has_any(&AUTHORITIES) && is_sni_verified => Verification::Exactly,
        () if has_any(&AUTHORITIES) => Verification::Authority,
        () if secrets.contains(&None) || has(common, "validation_context_certificate_provider_instance") => {
            Verification::Unknown
        }
        () => Verification::Nothing,
    }
}

/// Whether a message `SubjectAltNameMatcher`, or a `StringMatcher` of older versions, allows a name.
fn allows(matcher: &Value, san: &San) -> bool {
    let kind = text(matcher, "san_type");
    let pattern = if has(matcher, "matcher") { at(matcher, "matcher") } else { matcher };
    if !kind.is_empty() && kind != san.kind {
        return false;
    }
    let is_dns = san.kind == "DNS";
    let ignores_case = is_dns || flag(pattern, "ignore_case");
    let cased = |text: &str| if ignores_case { text.to_ascii_lowercase() } else { text.to_owned() };
    let (exact, name) = (cased(text(pattern, "exact")), cased(&san.name));
    let has_part =
        |field: &str, test: fn(&str, &str) -> bool| has(pattern, field) && test(&name, &cased(text(pattern, field)));
    match () {
        // A regular expression is taken to match.
        () if has(pattern, "safe_regex") => true,
        () if !exact.is_empty() => name == exact || (is_dns && san.names_host(&exact)),
        () => {
            has_part("prefix", |name, part| name.starts_with(part))
                || has_part("suffix", |name, part| name.ends_with(part))
                || has_part("contains", |name, part| name.contains(part))
        }
    }
}

/// The first names, for people.
fn shown<'s>(names: impl Iterator<Item = &'s str>) -> String {
    let names: Vec<&str> = names.collect();
    let more = names.len().saturating_sub(MAX_SHOWN);
    let listed = names.iter().take(MAX_SHOWN).copied().collect::<Vec<_>>().join(", ");
    match (names.len(), more) {
        (0, _) => "no name".to_owned(),
        (_, 0) => listed,
        _ => format!("{listed} and {more} more"),
    }
}

/// A name of the picker's certificate for examples, or a place for one.
fn example(names: Option<&[San]>) -> &str {
    let mut hosts = names.unwrap_or_default().iter().filter(|san| san.kind == "DNS");
    hosts.next().map_or("NAME", |san| san.name.as_str())
}

fn identity(subject: &str, tls: &TlsContext<'_>, names: Option<&[San]>) -> Finding {
    match &tls.verification {
        Verification::Nothing => IDENTITY.warning(
            subject,
            "Envoy accepts any certificate from the picker",
            "set `validation_context_sds_secret_config` in `common_tls_context`, as the lines `#mtls` of \
             `envoy/original-dst.yaml` do",
        ),
        Verification::Authority => IDENTITY.warning(
            subject,
            "Envoy accepts any certificate of its trusted authorities from the picker",
            format!(
                "set `match_typed_subject_alt_names: [{{san_type: DNS, matcher: {{exact: {}}}}}]` beside `trusted_ca`, as \
                 `envoy/sds/authority.yaml` does",
                example(names)
            ),
        ),
        Verification::Names(matchers) => {
            let Some(names) = names else {
                return IDENTITY.ok(subject, "Envoy verifies the picker's certificate and the name in it");
            };
            let is_allowed = names.iter().any(|san| matchers.iter().any(|matcher| allows(matcher, san)));
            if is_allowed {
                return IDENTITY.ok(subject, "the picker's certificate has a name that Envoy allows");
            }
            let own = shown(names.iter().map(|san| san.name.as_str()));
            IDENTITY.error(
                subject,
                format!("Envoy allows none of the names of the picker's certificate ({own}), so each connection fails"),
                format!(
                    "set `match_typed_subject_alt_names: [{{san_type: DNS, matcher: {{exact: {}}}}}]`, or issue a \
                     certificate with a name that Envoy allows",
                    example(Some(names))
                ),
            )
        }
        Verification::Exactly => IDENTITY.ok(subject, "Envoy verifies the picker's certificate and the name in it"),
        Verification::Unknown => {
            IDENTITY.ok(subject, "Envoy verifies the picker's certificate by a secret that is not in view")
        }
    }
}

fn sni(subject: &str, tls: &TlsContext<'_>, names: Option<&[San]>) -> Finding {
    let name = tls.sni;
    if name.is_empty() {
        let fix = format!(
            "set `sni: {}` in the `UpstreamTlsContext`, with a name of the picker's certificate",
            example(names)
        );
        return match tls.is_automatic {
            true => SNI.ok(subject, "the TLS handshake has the name of the host or of the request"),
            false => SNI.warning(subject, "the TLS handshake with the picker has no name (`sni` is not set)", fix),
        };
    }
    let Some(names) = names else {
        return SNI.unknown(
            subject,
            format!("`sni` is {name}, and the picker's certificate can't be read from here"),
            "run the check where the picker's port can be reached",
        );
    };
    if names.iter().any(|san| san.kind == "DNS" && san.names_host(name)) {
        return SNI.ok(subject, format!("`sni` is {name}, a name of the picker's certificate"));
    }
    let own = shown(names.iter().map(|san| san.name.as_str()));
    let found = format!("`sni` is {name}, and the picker's certificate has {own}");
    let fix =
        format!("set `sni: {}`, or issue a certificate with the name {name} for the picker", example(Some(names)));
    match tls.is_sni_verified {
        true => SNI.error(subject, format!("{found}, so each connection fails"), fix),
        false => SNI.warning(subject, found, fix),
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::EnvoyConfig;
    use super::*;
    use crate::finding::Severity;
    use serde_json::json;

    fn san(kind: &'static str, name: &str) -> San {
        San { kind, name: name.to_owned() }
    }

    /// The severities of identity and name, of a picker whose certificate has the DNS name `attache`.
    fn severities(message: Value) -> [Severity; 2] {
        let mut message = message;
        message["@type"] = json!("x.UpstreamTlsContext");
        let secret = |name: &str, context: Value| json!({"name": name, "secret": {"validation_context": context}});
        let dump = json!({"configs": [{"@type": "x.SecretsConfigDump", "dynamic_active_secrets": [
            secret("authority", json!({"trusted_ca": {"filename": "a"}})),
            secret("named", json!({"trusted_ca": {"filename": "a"}, "match_typed_subject_alt_names": [matcher("attache")]})),
            secret("other", json!({"trusted_ca": {"filename": "a"}, "match_typed_subject_alt_names": [matcher("other")]})),
        ]}]});
        let source = EnvoySource { name: "Envoy".into(), config: EnvoyConfig::from_dump(&dump), live: None };
        let cluster = json!({"transport_socket": {"typed_config": message}});
        let tls = TlsContext::of(&source, &cluster).unwrap();
        let names = [san("DNS", "attache"), san("IP_ADDRESS", "10.0.0.1")];
        [identity("p", &tls, Some(&names)), sni("p", &tls, Some(&names))].map(|finding| finding.severity)
    }

    fn matcher(name: &str) -> Value {
        json!({"san_type": "DNS", "matcher": {"exact": name}})
    }

    #[test]
    fn trust_of_any_certificate_or_authority_is_a_warning() {
        let of = |common: Value| severities(json!({"sni": "attache", "common_tls_context": common}))[0];
        let secret = |name: &str| of(json!({"validation_context_sds_secret_config": {"name": name}}));
        assert_eq!(of(json!({})), Severity::Warning);
        assert_eq!(of(json!({"validation_context": {}})), Severity::Warning);
        let trusting = json!({"trusted_ca": {"filename": "a"}, "trust_chain_verification": "ACCEPT_UNTRUSTED"});
        assert_eq!(of(json!({"validation_context": trusting})), Severity::Warning);
        assert_eq!(of(json!({"validation_context": {"trusted_ca": {"filename": "a"}}})), Severity::Warning);
        assert_eq!(secret("authority"), Severity::Warning);
        assert_eq!(secret("named"), Severity::Ok);
        assert_eq!(secret("other"), Severity::Error, "no connection succeeds");
        assert_eq!(secret("not in view"), Severity::Ok);
        assert_eq!(of(json!({"validation_context": {"verify_certificate_spki": ["x"]}})), Severity::Ok);
        let combined = json!({
            "default_validation_context": {"match_typed_subject_alt_names": [matcher("attache")]},
            "validation_context_sds_secret_config": {"name": "authority"},
        });
        assert_eq!(of(json!({"combined_validation_context": combined})), Severity::Ok);
    }

    #[test]
    fn missing_and_unknown_names_of_the_handshake_are_warnings() {
        let trusted = json!({"validation_context": {"trusted_ca": {"filename": "a"}}});
        let of = |mut message: Value| {
            message["common_tls_context"] = trusted.clone();
            severities(message)
        };
        assert_eq!(of(json!({})), [Severity::Warning, Severity::Warning]);
        assert_eq!(of(json!({"auto_host_sni": true}))[1], Severity::Ok);
        assert_eq!(of(json!({"sni": "Attache"}))[1], Severity::Ok);
        assert_eq!(of(json!({"sni": "other"}))[1], Severity::Warning);
        let verified = of(json!({"sni": "other", "auto_sni_san_validation": true}));
        assert_eq!(verified, [Severity::Ok, Severity::Error]);
    }

    #[test]
    fn names_are_allowed_by_kind_and_pattern() {
        let uri = san("URI", "spiffe://cluster.local/ns/llm/sa/picker");
        let of = |kind: &str, pattern: Value| json!({"san_type": kind, "matcher": pattern});
        assert!(allows(&of("URI", json!({"prefix": "spiffe://cluster.local/ns/llm/"})), &uri));
        assert!(!allows(&of("URI", json!({"prefix": "spiffe://cluster.local/ns/other/"})), &uri));
        assert!(!allows(&of("DNS", json!({"prefix": "spiffe://"})), &uri));
        let wildcard = san("DNS", "*.llm.example.com");
        assert!(allows(&matcher("picker.llm.example.com"), &wildcard));
        assert!(!allows(&matcher("a.picker.llm.example.com"), &wildcard));
    }
}
