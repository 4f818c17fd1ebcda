mod clients;
mod hello;

use super::*;
use crate::connections::{ConnectionLimits, Connections};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use std::sync::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;

/// Accepts every certificate and stores the last one's pin.
#[derive(Debug, Default)]
struct Recorder(Mutex<Option<String>>);

impl ServerCertVerifier for Recorder {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        *self.0.lock().unwrap() = Some(info(end_entity).unwrap().pin);
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &plain().signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &plain().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        plain().signature_verification_algorithms.supported_schemes()
    }
}

/// The provider of clients: rustls's own, unchanged algorithms.
fn plain() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn now() -> SystemTime {
    let clock = attache_types::clock::Clock::start();
    clock.wall(clock.now())
}

/// Does a handshake; returns the pin of the presented certificate and the negotiated protocol.
async fn handshake(address: std::net::SocketAddr) -> (String, Option<Vec<u8>>) {
    let recorder = Arc::new(Recorder::default());
    let mut config = ClientConfig::builder_with_provider(plain())
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(recorder.clone())
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tcp = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap();
    let pin = recorder.0.lock().unwrap().clone().unwrap();
    (pin, stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec))
}

fn connections() -> Arc<Connections> {
    Connections::new(ConnectionLimits::of(16))
}

async fn serve(cert: &Arc<ServingCert>) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut connections = incoming(listener, connections(), Some(Handshaker::new(cert.server_config(None).unwrap())));
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Some(connection) = connections.next().await {
            held.push(connection);
        }
    });
    address
}

fn write_pair(directory: &Path, cert: &rcgen::Certificate, key: &rcgen::KeyPair) {
    std::fs::write(directory.join(CERT_FILE), cert.pem()).unwrap();
    std::fs::write(directory.join(KEY_FILE), key.serialize_pem()).unwrap();
}

fn pair(until: SystemTime) -> (rcgen::Certificate, rcgen::KeyPair) {
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.not_after = until.into();
    let key = rcgen::KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap(), key)
}

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test]
async fn self_signed_certificate_serves_http2_and_can_be_pinned() {
    let cert = ServingCert::self_signed(Some("picker-0"), now()).unwrap();
    let address = serve(&cert).await;
    let (pin, alpn) = handshake(address).await;
    assert_eq!(pin, cert.info().pin);
    assert_eq!(pin.len(), 64);
    assert_eq!(alpn.as_deref(), Some(&b"h2"[..]));
    assert!(cert.info().expires_at > unix(now() + DAY * 3_000));
}

#[test]
fn invalid_host_name_does_not_prevent_the_start() {
    for name in ["my_host", "", "a b", "x.y.", &"long".repeat(100)] {
        ServingCert::self_signed(Some(name), now()).unwrap();
    }
}

#[tokio::test]
async fn valid_new_pair_is_used_and_an_invalid_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (first, first_key) = pair(now() + DAY);
    write_pair(dir.path(), &first, &first_key);
    let cert = ServingCert::from_directory(dir.path(), now()).unwrap();
    let address = serve(&cert).await;
    let (old, _) = handshake(address).await;
    assert!(!cert.reload(dir.path(), now()).unwrap(), "nothing has changed");

    // Half-written: the new certificate with the old key.
    let (second, second_key) = pair(now() + DAY);
    std::fs::write(dir.path().join(CERT_FILE), second.pem()).unwrap();
    assert!(matches!(cert.reload(dir.path(), now()), Err(TlsError::Pair(_))));
    // A truncated file.
    std::fs::write(dir.path().join(CERT_FILE), &second.pem()[..60]).unwrap();
    assert!(matches!(cert.reload(dir.path(), now()), Err(TlsError::Pem { .. })));
    // A missing file.
    std::fs::remove_file(dir.path().join(CERT_FILE)).unwrap();
    assert!(matches!(cert.reload(dir.path(), now()), Err(TlsError::Read { .. })));
    // An expired certificate.
    let (late, late_key) = pair(now() - DAY);
    write_pair(dir.path(), &late, &late_key);
    let error = cert.reload(dir.path(), now()).unwrap_err();
    let (said, at) = (error.to_string(), rfc3339(unix(now() - DAY)));
    assert!(matches!(error, TlsError::Expired(_)) && said.contains(at.split_at(16).0), "{said}, but {at}");
    assert_eq!((cert.reload_failures(), cert.reloads()), (4, 0));
    assert_eq!(handshake(address).await.0, old);

    write_pair(dir.path(), &second, &second_key);
    assert!(cert.reload(dir.path(), now()).unwrap());
    let (new, _) = handshake(address).await;
    assert_ne!(new, old);
    assert_eq!(new, cert.info().pin);
}

/// Clients that verify the picker's certificate, as gateways should, end the handshake with an alert.
#[tokio::test]
async fn expired_certificate_and_unknown_authority_of_the_picker_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    for (until, trusted, cause) in
        [(now() - DAY, true, FailureCause::OwnExpired), (now() + DAY, false, FailureCause::RefusedByClient)]
    {
        let (certificate, key) = pair(until);
        write_pair(dir.path(), &certificate, &key);
        let cert = ServingCert::from_directory(dir.path(), now()).unwrap();
        let tls = Handshaker::new(cert.server_config(None).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut acceptor = Acceptor::new(listener, connections());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(if trusted { certificate.der().clone() } else { pair(until).0.der().clone() }).unwrap();
        let config = ClientConfig::builder_with_provider(plain()).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let client = tokio::spawn(async move {
            let tcp = TcpStream::connect(address).await.unwrap();
            assert!(connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.is_err());
        });
        let stream = acceptor.next().await;
        assert!(super::handshake(stream, Some(&tls), ()).await.is_err());
        client.await.unwrap();
        let failed: Vec<_> = tls.failures().counts().filter(|(_, count)| *count > 0).collect();
        assert_eq!(failed, [(cause, 1)]);
    }
}

#[tokio::test]
async fn silent_client_delays_no_other() {
    let cert = ServingCert::self_signed(None, now()).unwrap();
    let address = serve(&cert).await;
    let _silent = TcpStream::connect(address).await.unwrap();
    handshake(address).await;
}

/// The guard counts connections, so it must be dropped whether the handshake succeeds or not.
#[tokio::test]
async fn guard_is_dropped_with_its_connection_and_after_a_failed_handshake() {
    let cert = ServingCert::self_signed(None, now()).unwrap();
    let tls = Handshaker::new(cert.server_config(None).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut acceptor = Acceptor::new(listener, connections());
    let guard = Arc::new(());

    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let stream = acceptor.next().await;
    assert!(super::handshake(stream, Some(&tls), guard.clone()).await.is_err());
    assert_eq!(Arc::strong_count(&guard), 1, "after a handshake that failed");
    let failed: Vec<_> = tls.failures().counts().filter(|(_, count)| *count > 0).collect();
    assert_eq!(failed, [(FailureCause::NotTls, 1)]);

    let client = tokio::spawn(handshake(address));
    let stream = acceptor.next().await;
    let connection = super::handshake(stream, Some(&tls), guard.clone()).await.unwrap();
    client.await.unwrap();
    assert_eq!(Arc::strong_count(&guard), 2);
    drop(connection);
    assert_eq!(Arc::strong_count(&guard), 1, "after the connection");
}

#[tokio::test]
async fn without_tls_connections_are_plain() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut connections = incoming(listener, connections(), None);
    let client = TcpStream::connect(address).await.unwrap();
    let connection = connections.next().await.unwrap().unwrap();
    let client_info = tonic::transport::server::Connected::connect_info(&connection);
    assert_eq!(client_info.peer(), client.local_addr().unwrap());
    // The listener closes with the stream.
    drop(connections);
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
}
