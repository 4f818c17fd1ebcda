//! Pods that are not gateways and send the picker ext-proc streams that report failures of servers.

use super::honest::Honest;
use crate::secure::Trusting;
use crate::shipped::{by_header, by_list, list_pool};
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::echo::Echo;
use crate::support::envoy::{EnvoyProcess, with_mtls};
use crate::support::grpc::{Connection, PROCESS, message, request_body, request_headers};
use crate::support::pki::{Authority, Identity, Secret};
use crate::support::process::{eventually, scratch};
use crate::traffic::Traffic;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::HttpHeaders;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, SupportedProtocolVersion};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpStream;

/// Number of streams in an attack.
const STREAMS: usize = 60;
/// Names in the certificates of the picker and of Envoy.
const PICKER: &str = "attache";
const GATEWAY: &str = "spiffe://cluster.local/ns/gateways/sa/envoy";
const ALLOWED: &str = "spiffe://cluster.local/ns/gateways/*";

/// How an attacker connects.
enum Attacker<'a> {
    Plaintext,
    Tls(Option<&'a Identity>, &'static SupportedProtocolVersion),
}

impl Attacker<'_> {
    async fn connect(&self, to: SocketAddr) -> Result<Connection, Error> {
        let Self::Tls(identity, version) = self else { return Connection::open(to).await };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[version])?;
        let config = config.dangerous().with_custom_certificate_verifier(Arc::new(Trusting(provider)));
        let mut config = match identity {
            None => config.with_no_client_auth(),
            Some(identity) => {
                let chain = vec![CertificateDer::from_pem_slice(identity.certificate.as_bytes())?];
                config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(identity.key.as_bytes())?)?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = connector.connect(ServerName::try_from(PICKER)?, TcpStream::connect(to).await?).await?;
        Connection::over(stream, &h2::client::Builder::new()).await
    }

    /// Sends streams that report a server error, and returns how many the picker processed.
    async fn attack(&self, to: SocketAddr) -> usize {
        let mut answered = 0;
        for _ in 0..STREAMS {
            answered += usize::from(self.report_failure(to).await.is_ok());
        }
        answered
    }

    async fn report_failure(&self, to: SocketAddr) -> Result<(), Error> {
        let connection = self.connect(to).await?;
        let mut stream = connection.stream(PROCESS, &[]).await?;
        stream.send(&request_headers(&[(":path", b"/v1/chat/completions"), (":method", b"POST")], false))?;
        stream.send(&request_body(br#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#, true))?;
        stream.answer().await?.ok_or("the stream ended")?;
        let status = HeaderValue { key: ":status".into(), raw_value: b"500".to_vec(), ..HeaderValue::default() };
        let headers = Some(HeaderMap { headers: vec![status] });
        stream.send(&message(Event::ResponseHeaders(HttpHeaders {
            headers,
            end_of_stream: true,
            ..HttpHeaders::default()
        })))?;
        stream.answer().await?;
        Ok(())
    }
}

/// Mounted certificates of a picker and of its gateway.
struct Mounted {
    directory: tempfile::TempDir,
    picker: Secret,
    gateway: Secret,
}

impl Mounted {
    fn new(authority: &Authority) -> Self {
        let directory = scratch("certificates");
        let secret =
            |name: &str, of: &str| Secret::new(directory.path().join(name), &authority.identity(of), &[authority]);
        let (picker, gateway) = (secret("picker", PICKER), secret("gateway", GATEWAY));
        Self { directory, picker, gateway }
    }

    fn flags(&self) -> Vec<String> {
        let (directory, ca) = (self.picker.path().display().to_string(), self.picker.ca().display().to_string());
        let flags = ["--secure-serving=true", "--enable-cert-reload=true", "--cert-path", &directory];
        let flags = flags.into_iter().chain(["--client-ca-file", &ca, "--client-name", ALLOWED]);
        flags.map(str::to_owned).collect()
    }

    /// The bootstrap with mTLS and the gateway's certificates.
    fn activated(&self, bootstrap: &str) -> String {
        with_mtls(bootstrap, self.gateway.path(), self.directory.path())
    }
}

async fn servers() -> [Echo; 4] {
    [Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await]
}

async fn start(servers: &[Echo; 4], flags: &[String]) -> AttacheProcess {
    let addresses = servers.each_ref().map(|server| server.address);
    AttacheProcess::start(&addresses, &flags.iter().map(String::as_str).collect::<Vec<_>>()).await
}

/// The attack succeeds on a picker that requires no client certificate.
#[tokio::test(flavor = "multi_thread")]
async fn picker_without_client_ca_accepts_streams_of_any_pod() {
    let servers = servers().await;
    let picker = start(&servers, &["--secure-serving=true".to_owned()]).await;
    assert_eq!(Attacker::Tls(None, &TLS13).attack(picker.grpc).await, STREAMS);
    assert_eq!(picker.assert_settled().await.opened, STREAMS as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn pod_without_gateway_certificate_cannot_report_failures() {
    let (authority, stranger) = (Authority::new("ours"), Authority::new("theirs"));
    let (mounted, servers) = (Mounted::new(&authority), servers().await);
    let picker = start(&servers, &mounted.flags()).await;
    let envoy = EnvoyProcess::alone(&mounted.activated(&by_header("original-dst.yaml", &picker))).await;
    let honest = Honest::new(envoy.listener("inference"));
    let quiet = honest.quiet().await;
    let identities = [
        ("another authority", Some(stranger.identity(GATEWAY))),
        ("another namespace", Some(authority.identity("spiffe://cluster.local/ns/default/sa/envoy"))),
        ("a name that begins alike", Some(authority.identity("spiffe://cluster.local/ns/gateways-2/sa/envoy"))),
        ("a DNS name", Some(authority.identity("gateways"))),
        ("the picker's own certificate", Some(authority.identity(PICKER))),
        ("expired", Some(authority.expired(GATEWAY))),
        ("no certificate", None),
    ];
    let (report, answered) = honest
        .during(async {
            let mut answered = vec![("plaintext", Attacker::Plaintext.attack(picker.grpc).await)];
            for (name, identity) in &identities {
                for version in [&TLS12, &TLS13] {
                    answered.push((name, Attacker::Tls(identity.as_ref(), version).attack(picker.grpc).await));
                }
            }
            answered
        })
        .await;
    assert!(answered.iter().all(|(_, count)| *count == 0), "streams that the picker answered: {answered:?}");
    report.assert_unharmed(&quiet);
    assert_eq!(picker.metric("attache_ejections_total").await, 0.0);
    let honest_requests = (quiet.latencies.len() + report.latencies.len()) as u64;
    assert_eq!(picker.assert_settled().await.opened, honest_requests, "streams of others were opened");
    let failures = picker.metric("attache_tls_handshake_failures_total").await;
    assert_eq!(failures, (STREAMS * (1 + 2 * identities.len())) as f64, "each failed handshake is counted");
    let log = picker.process.stderr();
    for cause in ["not_tls", "unknown_ca", "name_not_allowed", "expired", "no_certificate"] {
        let lines = log.lines().filter(|line| line.contains(&format!("\"cause\":\"{cause}\""))).count();
        assert!((1..10).contains(&lines), "{lines} lines for {cause} in the log");
    }
    // The attack succeeds with the gateway's certificate, so the certificate is what stops it.
    let gateway = authority.identity(GATEWAY);
    assert_eq!(Attacker::Tls(Some(&gateway), &TLS12).attack(picker.grpc).await, STREAMS);
    envoy.assert_picker_was_correct().await;
}

/// The other bootstraps: buffered bodies, a server list, and requests that fail open without the picker.
#[tokio::test(flavor = "multi_thread")]
async fn every_bootstrap_with_mtls_serves_and_rejects_other_pods() {
    let authority = Authority::new("ours");
    for file in ["buffered.yaml", "override-host.yaml", "fail-open.yaml"] {
        let (mounted, servers) = (Mounted::new(&authority), servers().await);
        let addresses = servers.each_ref().map(|server| server.address);
        let listed = file != "buffered.yaml";
        let mut arguments = mounted.flags();
        if listed {
            arguments.extend(["--config-text".to_owned(), list_pool(&addresses, "round-robin")]);
        } else {
            arguments.extend(addresses.iter().flat_map(|address| ["--endpoint".to_owned(), address.to_string()]));
        }
        let picker = AttacheProcess::with_arguments(&arguments).await;
        let shipped = if listed { by_list(file, &picker, addresses) } else { by_header(file, &picker) };
        let envoy = EnvoyProcess::alone(&mounted.activated(&shipped)).await;
        let honest = Honest::new(envoy.listener("inference"));
        let quiet = honest.quiet().await;
        let (report, answered) = honest.during(Attacker::Tls(None, &TLS13).attack(picker.grpc)).await;
        assert_eq!(answered, 0, "{file}");
        report.assert_unharmed(&quiet);
        assert_eq!(picker.metric("attache_ejections_total").await, 0.0, "{file}");
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

/// Envoy opens a new connection every 200 ms here, so each step is used under load.
#[tokio::test(flavor = "multi_thread")]
async fn certificate_and_ca_rotation_under_load_fails_no_request() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let (mounted, servers) = (Mounted::new(&old), servers().await);
    let picker = start(&servers, &mounted.flags()).await;
    let bootstrap = mounted.activated(&by_header("original-dst.yaml", &picker));
    let options = "        explicit_http_config:\n";
    assert_eq!(bootstrap.matches(options).count(), 1);
    let short = "        common_http_protocol_options: {max_connection_duration: 0.2s}\n";
    let envoy = EnvoyProcess::alone(&bootstrap.replace(options, &format!("{short}{options}"))).await;
    let traffic = Traffic::start(envoy.listener("inference"), "/v1/chat/completions");
    let until = |metric: &'static str, value: f64| picker.until_metric(metric, value);
    let reload = "attache_tls_client_ca_reloads_total";
    let connections = || async { envoy.stat("cluster.picker.upstream_cx_total").await };
    let renewed = || async {
        let before = connections().await;
        eventually("new connections", || async { (connections().await > before + 4).then_some(()) }).await;
        traffic.more(2).await;
    };
    renewed().await;

    // Both sides trust both authorities, then change their certificates, then drop the old authority.
    let (picker_old, gateway_old) = (old.identity(PICKER), old.identity(GATEWAY));
    mounted.picker.replace(&picker_old, &[&old, &new]);
    mounted.gateway.replace(&gateway_old, &[&old, &new]);
    until(reload, 1.0).await;
    renewed().await;
    // An unreadable file leaves the authorities in use.
    mounted.picker.replace_with(&picker_old.certificate, &picker_old.key, "-----BEGIN CERTIFICATE-----\nMIIB");
    until("attache_tls_client_ca_reload_failures_total", 1.0).await;
    renewed().await;
    let (picker_new, gateway_new) = (new.identity(PICKER), new.identity(GATEWAY));
    mounted.picker.replace(&picker_new, &[&old, &new]);
    let rotated = envoy.stat("ssl_context_update_by_sds").await;
    mounted.gateway.replace(&gateway_new, &[&old, &new]);
    eventually("Envoy's new certificate", || async {
        (envoy.stat("ssl_context_update_by_sds").await > rotated).then_some(())
    })
    .await;
    renewed().await;
    mounted.picker.replace(&picker_new, &[&new]);
    mounted.gateway.replace(&gateway_new, &[&new]);
    until(reload, 2.0).await;
    renewed().await;
    traffic.stop().await;

    let attack = |identity| async move { Attacker::Tls(Some(identity), &TLS13).attack(picker.grpc).await };
    assert_eq!(attack(&gateway_old).await, 0, "the old authority counts no longer");
    envoy.assert_picker_was_correct().await;
}

/// Client names are reloaded with the configuration file.
#[tokio::test(flavor = "multi_thread")]
async fn client_name_removed_by_a_reload_is_rejected() {
    let authority = Authority::new("ours");
    let (mounted, echo) = (Mounted::new(&authority), Echo::start().await);
    let file: PathBuf = mounted.directory.path().join("attache.yaml");
    let configure = |names: &str| {
        let (tls, ca) = (mounted.picker.path().display(), mounted.picker.ca().display().to_string());
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nserver:\n  \
             tls: {{mode: files, directory: {tls}, clientCaFile: {ca}, clientNames: [{names}]}}\n\
             pools: [{{name: default, endpoints: ['{}']}}]\n",
            echo.address
        );
        std::fs::write(&file, text).expect("writing");
    };
    configure("a.example.com, '*.gateways.svc'");
    let picker = AttacheProcess::with_file(&file, &["--secure-serving=true"]).await;
    let (first, second) = (authority.identity("a.example.com"), authority.identity("x.gateways.svc"));
    let answered =
        |identity| async move { Attacker::Tls(Some(identity), &TLS13).report_failure(picker.grpc).await.is_ok() };
    assert!(answered(&first).await && answered(&second).await);
    configure("'*.gateways.svc'");
    eventually("the new names", || async { (!answered(&first).await).then_some(()) }).await;
    assert!(answered(&second).await);
    let restarts = picker.process.stderr().lines().filter(|line| line.contains("some changes need a restart")).count();
    assert_eq!(restarts, 0, "no restart is needed");
}
