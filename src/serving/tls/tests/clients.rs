use super::*;
use crate::tls::{ClientAuthSettings, ClientName};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose as Usage, IsCa, Issuer, KeyPair, SanType};
use rustls::version::{TLS12, TLS13};
use std::path::PathBuf;
use tokio::io::AsyncReadExt;

/// An authority that signs certificates of clients.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    fn sign(&self, name: SanType, until: SystemTime, usage: Usage) -> Identity {
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![name];
        params.extended_key_usages = vec![usage];
        params.not_before = (now() - DAY * 9).into();
        params.not_after = until.into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.der().clone(), key.serialize_der())
    }

    fn client(&self, name: SanType) -> Identity {
        self.sign(name, now() + DAY, Usage::ClientAuth)
    }
}

/// A certificate with its private key.
type Identity = (CertificateDer<'static>, Vec<u8>);

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

fn uri(name: &str) -> SanType {
    SanType::URI(name.try_into().unwrap())
}

fn names(names: &[&str]) -> Vec<ClientName> {
    names.iter().map(|name| ClientName::parse(name).unwrap()).collect()
}

fn settings(directory: &Path, pem: &str, allowed: &[&str]) -> ClientAuthSettings {
    let ca_file: PathBuf = directory.join("ca.crt");
    std::fs::write(&ca_file, pem).unwrap();
    ClientAuthSettings { ca_file, names: names(allowed) }
}

/// A listener that accepts one byte from each client that it admits.
struct Server {
    address: std::net::SocketAddr,
    handshaker: Handshaker,
}

impl Server {
    async fn start(clients: &Arc<ClientAuth>) -> Self {
        let cert = ServingCert::self_signed(None, now()).unwrap();
        let handshaker = Handshaker::new(cert.server_config(Some(clients.clone())).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = incoming(listener, super::connections(), Some(handshaker.clone()));
        tokio::spawn(async move {
            while let Some(Ok(mut connection)) = connections.next().await {
                tokio::spawn(async move { connection.write_all(b"!").await });
            }
        });
        Self { address, handshaker }
    }

    /// Whether a client is admitted.
    async fn accepts(&self, identity: Option<&Identity>, version: &'static rustls::SupportedProtocolVersion) -> bool {
        let config = ClientConfig::builder_with_provider(plain()).with_protocol_versions(&[version]).unwrap();
        let config = config.dangerous().with_custom_certificate_verifier(Arc::<Recorder>::default());
        let config = match identity {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let key = PrivateKeyDer::try_from(key.clone()).unwrap();
                config.with_client_auth_cert(vec![certificate.clone()], key).unwrap()
            }
        };
        let tcp = TcpStream::connect(self.address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        // In TLS 1.3, the client has finished before the server has received its certificate.
        match connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await {
            Ok(mut stream) => stream.read_u8().await.is_ok(),
            Err(_) => false,
        }
    }

    fn failed(&self) -> Vec<(&'static str, u64)> {
        let counts = self.handshaker.failures().counts().filter(|(_, count)| *count > 0);
        counts.map(|(cause, count)| (cause.label(), count)).collect()
    }
}

#[tokio::test]
async fn client_without_right_authority_name_time_and_usage_is_refused_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new("ours"), Authority::new("theirs"));
    let allowed = ["gateway.example.com", "spiffe://td/ns/gateways/*"];
    let clients = ClientAuth::from_settings(&settings(directory.path(), &authority.pem, &allowed)).unwrap();
    let server = Server::start(&clients).await;
    for version in [&TLS13, &TLS12] {
        for name in [dns("gateway.example.com"), uri("spiffe://td/ns/gateways/sa/a")] {
            assert!(server.accepts(Some(&authority.client(name)), version).await);
        }
        let good = || dns("gateway.example.com");
        for (cause, identity) in [
            ("no_certificate", None),
            ("unknown_ca", Some(stranger.client(good()))),
            ("expired", Some(authority.sign(good(), now() - DAY, Usage::ClientAuth))),
            ("name_not_allowed", Some(authority.client(dns("other.example.com")))),
            ("name_not_allowed", Some(authority.client(uri("spiffe://td/ns/gateways2/sa/a")))),
            ("bad_certificate", Some(authority.sign(good(), now() + DAY, Usage::ServerAuth))),
        ] {
            let before: u64 = server.failed().iter().filter(|(label, _)| *label == cause).map(|(_, count)| count).sum();
            assert!(!server.accepts(identity.as_ref(), version).await, "{cause}");
            let after: u64 = server.failed().iter().filter(|(label, _)| *label == cause).map(|(_, count)| count).sum();
            assert_eq!(after, before + 1, "{cause} is not counted: {:?}", server.failed());
        }
    }
}

#[tokio::test]
async fn client_of_the_authority_is_accepted_by_any_name_when_none_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new("ours");
    let clients = ClientAuth::from_settings(&settings(directory.path(), &authority.pem, &[])).unwrap();
    let server = Server::start(&clients).await;
    assert!(server.accepts(Some(&authority.client(dns("any"))), &TLS13).await);
    assert!(!server.accepts(None, &TLS13).await);
}

#[tokio::test]
async fn new_authorities_and_names_count_for_the_next_connection() {
    let directory = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let clients = ClientAuth::from_settings(&settings(directory.path(), &old.pem, &["a"])).unwrap();
    let server = Server::start(&clients).await;
    let (of_old, of_new) = (old.client(dns("a")), new.client(dns("a")));
    assert!(server.accepts(Some(&of_old), &TLS13).await && !server.accepts(Some(&of_new), &TLS13).await);
    assert!(!clients.reload().unwrap(), "nothing has changed");

    for bad in [&old.pem[..60], "", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        settings(directory.path(), bad, &[]);
        assert!(clients.reload().is_err(), "{bad}");
    }
    std::fs::remove_file(clients.file()).unwrap();
    assert!(matches!(clients.reload(), Err(TlsError::Read { .. })));
    assert_eq!((clients.reloads(), clients.reload_failures()), (0, 4));
    assert!(server.accepts(Some(&of_old), &TLS13).await, "the previous authorities stay");

    // Both authorities, while clients are being changed over.
    settings(directory.path(), &(old.pem.clone() + &new.pem), &[]);
    assert!(clients.reload().unwrap());
    assert!(server.accepts(Some(&of_old), &TLS13).await && server.accepts(Some(&of_new), &TLS13).await);
    settings(directory.path(), &new.pem, &[]);
    assert!(clients.reload().unwrap());
    assert!(!server.accepts(Some(&of_old), &TLS13).await && server.accepts(Some(&of_new), &TLS13).await);
    assert_eq!(clients.reloads(), 2);

    clients.allow(&names(&["b"]));
    assert!(!server.accepts(Some(&of_new), &TLS13).await);
    assert!(server.accepts(Some(&new.client(dns("b"))), &TLS13).await);
}

#[test]
fn client_ca_file_without_certificate_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.crt");
    let error = check_client_ca(&missing).unwrap_err().to_string();
    assert!(error.contains("missing.crt"), "{error}");
    let empty = settings(directory.path(), "", &[]).ca_file;
    let error = check_client_ca(&empty).unwrap_err().to_string();
    assert!(error.contains("ca.crt") && error.contains("there is none in it"), "{error}");
    settings(directory.path(), &Authority::new("a").pem, &[]);
    check_client_ca(&empty).unwrap();
}
