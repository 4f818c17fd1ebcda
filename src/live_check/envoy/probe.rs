//! Which protocol a port speaks, HTTP/2 as it is or TLS, and the names of its certificate.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use x509_parser::extensions::GeneralName;

/// Limit of a probe, 3 s.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The client's preface of HTTP/2, with an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// Bytes of the header of a frame.
const FRAME_HEADER: usize = 9;
/// The type of SETTINGS frames.
const SETTINGS: u8 = 4;

/// What a port answers to the preface of HTTP/2.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Spoken {
    Http2,
    /// It refuses the preface, as TLS does: with an alert, or by closing the connection.
    Tls,
    /// Nothing, for this reason.
    Nothing(String),
}

/// Connects to `address`, `host:port`, and sends the preface of HTTP/2.
pub(super) async fn speaks(address: &str) -> Spoken {
    match timeout(TIMEOUT, exchange(address)).await {
        Ok(Ok(spoken)) => spoken,
        Ok(Err(error)) => Spoken::Nothing(error.to_string()),
        Err(_) => Spoken::Nothing(format!("no answer within {TIMEOUT:?}")),
    }
}

async fn exchange(address: &str) -> std::io::Result<Spoken> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(PREFACE).await?;
    let mut header = [0; FRAME_HEADER];
    let mut read = 0;
    while read < FRAME_HEADER {
        match stream.read(&mut header[read..]).await {
            Ok(0) => break,
            Ok(bytes) => read += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => return Err(error),
        }
    }
    Ok(if read == FRAME_HEADER && header[3] == SETTINGS { Spoken::Http2 } else { Spoken::Tls })
}

/// A name in a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct San {
    /// Its kind, as Envoy's `san_type` has it: `DNS`, `URI` or `IP_ADDRESS`.
    pub(super) kind: &'static str,
    pub(super) name: String,
}

impl San {
    /// Whether this DNS name stands for `host`. The first label may be `*`.
    pub(super) fn names_host(&self, host: &str) -> bool {
        let suffix = self.name.strip_prefix('*').filter(|suffix| suffix.starts_with('.'));
        let of_host = host.split_once('.').map(|(label, _)| &host[label.len()..]);
        suffix.zip(of_host).map_or_else(
            || self.name.eq_ignore_ascii_case(host),
            |(suffix, of_host)| suffix.eq_ignore_ascii_case(of_host),
        )
    }
}

/// The names of the certificate that `address`, `host:port`, shows in a handshake with the name `sni`, or without one if
/// it is empty; `None` if it shows none.
pub(super) async fn certificate_names(address: &str, sni: &str) -> Option<Vec<San>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let recorder = Arc::new(Recorder { provider: provider.clone(), certificate: OnceLock::new() });
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    let mut config = config.dangerous().with_custom_certificate_verifier(recorder.clone()).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let host = address.parse::<SocketAddr>().map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip());
    // Without a name, that of an address: rustls does not send it.
    let name = ServerName::try_from(sni.to_owned()).unwrap_or(ServerName::IpAddress(host.into()));
    let handshake = async {
        let stream = TcpStream::connect(address).await?;
        // A picker that wants a client's certificate refuses after it has shown its own.
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map(drop)
    };
    let _ = timeout(TIMEOUT, handshake).await;
    names_of(recorder.certificate.get()?)
}

/// The names in a certificate, DER; `None` if it can't be read.
fn names_of(certificate: &[u8]) -> Option<Vec<San>> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()?.map(|names| &names.value.general_names);
    let named = |name: &GeneralName<'_>| {
        let (kind, name) = match name {
            GeneralName::DNSName(name) => ("DNS", (*name).to_owned()),
            GeneralName::URI(name) => ("URI", (*name).to_owned()),
            GeneralName::IPAddress(bytes) => {
                let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                let address = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from)).ok()?;
                ("IP_ADDRESS", address.to_string())
            }
            _ => return None,
        };
        Some(San { kind, name })
    };
    Some(names.into_iter().flatten().filter_map(named).collect())
}

/// Keeps the server's certificate and accepts it: nothing is sent to the server.
#[derive(Debug)]
struct Recorder {
    provider: Arc<CryptoProvider>,
    certificate: OnceLock<Vec<u8>>,
}

impl ServerCertVerifier for Recorder {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.certificate.get_or_init(|| end_entity.to_vec());
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
