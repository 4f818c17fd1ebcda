//! TLS between Envoy and the picker: each row plants a mistake in the shipped bootstrap with mTLS, or in the SDS file with
//! the authorities, and a real Envoy runs it.

use super::check;
use super::rows::{Change, plant};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::envoy::{EnvoyProcess, with_mtls};
use crate::support::pki::{Authority, Secret};
use crate::support::process::scratch;
use crate::support::sim::SimProcess;
use Change::{Cut, Set};

/// The picker's certificate has the DNS name `attache`, which Envoy expects.
struct Row {
    name: &'static str,
    /// In the bootstrap. `CA` stands for the file with the authorities.
    bootstrap: &'static [Change],
    /// In `envoy/sds/authority.yaml`.
    authority: &'static [Change],
    faults: &'static [(&'static str, &'static str)],
    is_error: bool,
}

const SNI: &str = "          sni: attache\n";
/// The end of the settings for TLS.
const END: &str = "    health_checks:\n";
const BY_SDS: &str = "            validation_context_sds_secret_config:\n";
const BY_FILE: &str = "            validation_context: {trusted_ca: {filename: CA}}\n    health_checks:\n";
const TRUSTING: &str = "            validation_context: {trusted_ca: {filename: CA}, trust_chain_verification: ACCEPT_UNTRUSTED}\n    \
                        health_checks:\n";

const ROWS: &[Row] = &[
    Row {
        name: "no name in the handshake",
        bootstrap: &[Set(SNI, "")],
        authority: &[],
        faults: &[("envoy-picker-sni", "sni: attache")],
        is_error: false,
    },
    Row {
        name: "a name that the certificate does not have",
        bootstrap: &[Set("sni: attache", "sni: epp.llm.svc")],
        authority: &[],
        faults: &[("envoy-picker-sni", "certificate with the name epp.llm.svc")],
        is_error: false,
    },
    Row {
        name: "a name that the certificate does not have, and that Envoy verifies",
        bootstrap: &[
            Set("sni: attache", "sni: epp.llm.svc\n          auto_sni_san_validation: true"),
            Cut(BY_SDS, END),
            Set(END, BY_FILE),
        ],
        authority: &[],
        faults: &[("envoy-picker-sni", "sni: attache")],
        is_error: true,
    },
    Row {
        name: "no validation",
        bootstrap: &[Cut(BY_SDS, END)],
        authority: &[],
        faults: &[("envoy-picker-identity", "validation_context_sds_secret_config")],
        is_error: false,
    },
    Row {
        name: "validation that accepts all",
        bootstrap: &[Cut(BY_SDS, END), Set(END, TRUSTING)],
        authority: &[],
        faults: &[("envoy-picker-identity", "validation_context_sds_secret_config")],
        is_error: false,
    },
    Row {
        name: "any certificate of the authority",
        bootstrap: &[Cut(BY_SDS, END), Set(END, BY_FILE)],
        authority: &[],
        faults: &[("envoy-picker-identity", "{san_type: DNS, matcher: {exact: attache}}")],
        is_error: false,
    },
    Row {
        name: "any certificate of the authority, by SDS",
        bootstrap: &[],
        authority: &[Set("    match_typed_subject_alt_names:\n    - {san_type: DNS, matcher: {exact: attache}}\n", "")],
        faults: &[("envoy-picker-identity", "match_typed_subject_alt_names")],
        is_error: false,
    },
    Row {
        name: "another name than that of the certificate, by SDS",
        bootstrap: &[],
        authority: &[Set("exact: attache", "exact: epp.llm.svc")],
        faults: &[("envoy-picker-identity", "exact: attache")],
        is_error: true,
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn check_live_finds_each_mistake_in_tls_to_the_picker() {
    let (authority, scratch) = (Authority::new("a"), scratch("check-tls"));
    let secret = |name: &str| Secret::new(scratch.path().join(name), &authority.identity(name), &[&authority]);
    let (own, of_envoy) = (secret("attache"), secret("envoy"));
    let fleet = SimProcess::start(1, &[]).await;
    let (directory, ca) = (own.path().display().to_string(), own.ca().display().to_string());
    let arguments =
        ["--secure-serving=true", "--cert-path", &directory, "--client-ca-file", &ca, "--client-name", "envoy"];
    let picker = AttacheProcess::start(&fleet.servers, &arguments).await;
    let shipped = by_header("original-dst.yaml", &picker);
    let first = EnvoyProcess::start(&with_mtls(&shipped, of_envoy.path(), scratch.path())).await;
    check(first.admin, &picker).assert_faults("as shipped", "envoy-", &[]);
    let each = ROWS.iter().enumerate().map(|(number, row)| {
        let (shipped, of_envoy, scratch, ca) = (&shipped, &of_envoy, &scratch, &ca);
        let (first, picker) = (&first, &picker);
        async move {
            let sds = scratch.path().join(number.to_string());
            std::fs::create_dir(&sds).expect("a directory");
            let bootstrap = with_mtls(shipped, of_envoy.path(), &sds);
            let file = sds.join("authority.yaml");
            let authority = std::fs::read_to_string(&file).expect("the authorities");
            std::fs::write(&file, plant(row.name, row.authority, &authority)).expect("writing");
            let envoy =
                first.beside(&plant(row.name, row.bootstrap, &bootstrap).replace("CA}", &format!("{ca}}}"))).await;
            let checked = check(envoy.admin, picker);
            checked.assert_faults(row.name, "envoy-", row.faults);
            assert_eq!(checked.code == 1, row.is_error, "{}", row.name);
        }
    });
    futures_util::future::join_all(each).await;
}
