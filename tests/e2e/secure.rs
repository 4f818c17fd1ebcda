//! TLS between Envoy and the picker.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use crate::support::process::{eventually, scratch};
use crate::traffic::Traffic;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

/// Envoy trusts any certificate, as gateways with a picker in the same pod do.
const TLS: &str = r#"    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: {alpn_protocols: [h2]}
"#;

fn over_tls(picker: SocketAddr) -> String {
    let cluster = "  - name: picker\n    type: STATIC\n";
    let text = bootstrap(&[Mode::FullDuplex], picker);
    assert!(text.contains(cluster));
    text.replace(cluster, &format!("{cluster}{TLS}"))
}

/// Writes a new pair and returns the certificate. The two files are replaced one after the other, so for a moment they
/// do not match.
fn write_pair(directory: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    for (file, text) in [("tls.crt", made.cert.pem()), ("tls.key", made.signing_key.serialize_pem())] {
        let new = directory.join("new");
        std::fs::write(&new, text).expect("writing it");
        std::fs::rename(&new, directory.join(file)).expect("renaming it over the old one");
    }
    made.cert.der().clone()
}

/// The certificate that the picker presents to a new connection.
async fn served_certificate(picker: SocketAddr) -> Option<CertificateDer<'static>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("the defaults")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Trusting(provider)))
        .with_no_client_auth();
    let socket = TcpStream::connect(picker).await.ok()?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector.connect(ServerName::try_from("localhost").ok()?, socket).await.ok()?;
    stream.get_ref().1.peer_certificates()?.first().cloned().map(CertificateDer::into_owned)
}

#[derive(Debug)]
pub(crate) struct Trusting(pub(crate) Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_while_streams_run() {
    let directory = scratch("tls");
    let first = write_pair(directory.path());
    let echo = Echo::start().await;
    let path = directory.path().display().to_string();
    let flags = ["--secure-serving=true", "--cert-path", &path, "--enable-cert-reload=true"];
    let picker = AttacheProcess::start(&[echo.address], &flags).await;
    assert_eq!(served_certificate(picker.grpc).await, Some(first));
    let envoy = EnvoyProcess::start(&over_tls(picker.grpc)).await;
    let to = envoy.listener(&Mode::FullDuplex.name());
    let mut streams = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let target = "/v1/chat/completions?kind=sse&size=20000&events=100&pace_ms=20";
        let request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, true, 1)));
        streams.spawn(client::send(to, Http::H1, request));
    }
    let traffic = Traffic::start(to, CHAT);
    traffic.more(2).await;
    let second = write_pair(directory.path());
    eventually("the new certificate", || async {
        (served_certificate(picker.grpc).await.as_ref() == Some(&second)).then_some(())
    })
    .await;
    // An incomplete certificate leaves the working one in use.
    std::fs::write(directory.path().join("tls.crt"), "-----BEGIN CERTIFICATE-----\nMIIB").expect("writing half");
    eventually("the refusal", || async { picker.process.stderr().contains("certificate reload failed").then_some(()) })
        .await;
    assert_eq!(served_certificate(picker.grpc).await, Some(second));
    traffic.more(2).await;
    traffic.stop().await;
    for end in streams.join_all().await {
        assert_eq!(end.expect("a stream that is not cut").body.len(), 20_000);
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// The default, as of the reference picker.
#[tokio::test(flavor = "multi_thread")]
async fn self_signed_certificate_serves_envoy_and_rejects_plaintext() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::start(&[echo.address], &["--secure-serving=true"]).await;
    let envoy = EnvoyProcess::start(&over_tls(picker.grpc)).await;
    let plain = envoy.beside(&by_header("original-dst.yaml", &picker)).await;
    let mut nonsense = TcpStream::connect(picker.grpc).await.expect("a connection");
    nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("sending plain text");
    for size in [300, 1 << 20] {
        let to = envoy.listener(&Mode::FullDuplex.name());
        let reply = client::post(to, CHAT, chat(size, false, 1)).await.expect("an answer");
        assert_eq!(reply.status, 200, "{size}");
    }
    let reply = client::post(plain.listener("inference"), CHAT, chat(300, false, 1)).await.expect("an answer");
    assert!(reply.status.is_server_error(), "{}", reply.status);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}
