//! Transport security of the ext-proc port.
//!
//! A [`ServingCert`] answers every handshake with the current certificate and can be given a new one while it serves;
//! a pair that can't be used leaves the old one in place and is counted. tonic's own TLS can't do that, so
//! [`handshake`] makes the connections that tonic serves. With [`ClientAuth`], clients need a certificate too. Used by
//! `app`, `server`, `health`, `admin` and `cli::check`.

mod client;
mod failures;
mod hello;
mod io;
mod settings;
#[cfg(test)]
mod tests;

pub use client::{ClientAuth, check_client_ca};
pub use failures::{FailureCause, HandshakeFailures};
pub use io::{Acceptor, Handshaker, ServerIo, Tcp, handshake, incoming};
pub use settings::{ClientAuthSettings, ClientName};

use arc_swap::ArcSwap;
use hello::provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, ServerConfig, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the certificate chain in the directory, as Kubernetes secrets of type `kubernetes.io/tls` have it.
pub const CERT_FILE: &str = "tls.crt";
/// Name of the private key in the directory.
pub const KEY_FILE: &str = "tls.key";
/// Lifetime of a self-signed certificate: nobody checks it but by its pin, and a pin changes with every start anyway.
const SELF_SIGNED_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Largest file that is read as a certificate or key, bytes.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// Why a certificate can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file can't be read.
    #[error("can't read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file holds no PEM of the wanted kind.
    #[error("{path} holds no usable {what}: {why}", path = path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// `certificate`, `private key` or `client CA`.
        what: &'static str,
        /// What the parser says.
        why: String,
    },
    /// Key and certificate don't belong together, or the key's kind is unknown.
    #[error("certificate and key can't be used together: {0}")]
    Pair(rustls::Error),
    /// The certificate can't be read.
    #[error("the certificate is malformed: {0}")]
    Certificate(String),
    /// Its time is over.
    #[error("the certificate expired at unix time {0}")]
    Expired(u64),
    /// A certificate can't be made.
    #[error("can't make a self-signed certificate: {0}")]
    SelfSigned(#[from] rcgen::Error),
    /// rustls refuses the configuration.
    #[error("can't set up TLS: {0}")]
    Config(rustls::Error),
}

/// What is known of the certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertInfo {
    /// End of its validity, Unix seconds.
    pub expires_at: u64,
    /// SHA-256 of the certificate in hex: Envoy's `verify_certificate_hash`.
    pub pin: String,
}

#[derive(Debug)]
struct Loaded {
    key: Arc<CertifiedKey>,
    info: CertInfo,
}

/// The certificate that handshakes are answered with.
pub struct ServingCert {
    current: ArcSwap<Loaded>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl fmt::Debug for ServingCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the key.
        f.debug_struct("ServingCert").field("info", &self.info()).finish_non_exhaustive()
    }
}

impl ServingCert {
    /// Makes a certificate for localhost and `hostname`, and logs its pin.
    ///
    /// # Errors
    /// When the random numbers or the system's clock don't allow one.
    pub fn self_signed(hostname: Option<&str>, now: SystemTime) -> Result<Arc<Self>, TlsError> {
        let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(String::from).into();
        // A host name that isn't a DNS name (an underscore will do) must not keep the picker from starting.
        names.extend(hostname.filter(|h| is_dns_name(h)).map(str::to_owned));
        let mut params = rcgen::CertificateParams::new(names)?;
        params.distinguished_name.push(rcgen::DnType::CommonName, "attache");
        params.not_before = (now - Duration::from_secs(86_400)).into();
        params.not_after = (now + SELF_SIGNED_LIFETIME).into();
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)?;
        let cert = params.self_signed(&key)?;
        let der = PrivateKeyDer::try_from(key.serialize_der()).map_err(|e| TlsError::Certificate(e.to_string()))?;
        let cert = Self::with(load(vec![cert.der().clone()], der)?);
        let info = cert.info();
        tracing::info!(
            pin_sha256 = info.pin,
            expires_at = info.expires_at,
            "serving with a self-signed certificate; clients can pin it by this hash"
        );
        Ok(cert)
    }

    /// Reads `tls.crt` and `tls.key` in `directory`. An expired certificate is taken, with a warning: it is what there is.
    ///
    /// # Errors
    /// When a file is missing or can't be used, or the two don't belong together.
    pub fn from_directory(directory: &Path, now: SystemTime) -> Result<Arc<Self>, TlsError> {
        let loaded = load_directory(directory)?;
        let info = &loaded.info;
        if info.expires_at <= unix(now) {
            tracing::warn!(
                expires_at = info.expires_at,
                "certificate has expired; clients that verify it will not connect"
            );
        }
        tracing::info!(pin_sha256 = info.pin, expires_at = info.expires_at, "serving with a certificate from files");
        Ok(Self::with(loaded))
    }

    fn with(loaded: Loaded) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwap::from_pointee(loaded),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// Reads the directory again. New handshakes get the new pair; a pair that is bad or expired leaves the old one in place.
    /// Returns whether the certificate has changed.
    ///
    /// # Errors
    /// Why the old pair was kept.
    pub fn reload(&self, directory: &Path, now: SystemTime) -> Result<bool, TlsError> {
        let loaded = load_directory(directory).and_then(|loaded| match loaded.info.expires_at {
            end if end <= unix(now) => Err(TlsError::Expired(end)),
            _ => Ok(loaded),
        });
        match loaded {
            Ok(loaded) if loaded.info == self.info() => Ok(false),
            Ok(loaded) => {
                tracing::info!(
                    pin_sha256 = loaded.info.pin,
                    expires_at = loaded.info.expires_at,
                    "certificate reloaded"
                );
                self.current.store(Arc::new(loaded));
                self.reloads.fetch_add(1, Relaxed);
                Ok(true)
            }
            Err(error) => {
                tracing::warn!(%error, "certificate reload failed; keeping the previous certificate");
                self.failures.fetch_add(1, Relaxed);
                Err(error)
            }
        }
    }

    /// The certificate in use.
    #[must_use]
    pub fn info(&self) -> CertInfo {
        self.current.load().info.clone()
    }

    /// Certificates that were taken after the first.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Relaxed)
    }

    /// Certificates that were refused.
    #[must_use]
    pub fn reload_failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// The rustls configuration that serves with this certificate: HTTP/2 only, TLS 1.2 or 1.3. With `clients`, each client needs a certificate.
    ///
    /// # Errors
    /// When rustls refuses its own defaults.
    pub fn server_config(self: &Arc<Self>, clients: Option<Arc<ClientAuth>>) -> Result<Arc<ServerConfig>, TlsError> {
        let clients = clients.map(|clients| clients as Arc<dyn ClientCertVerifier>);
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Config)?
            .with_client_cert_verifier(clients.unwrap_or_else(WebPkiClientVerifier::no_client_auth))
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        // A resumed session would count for a client whose authority or name is no longer accepted. Gateways keep their connections.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for ServingCert {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load().key.clone())
    }
}

/// Whether `tls.crt` and `tls.key` in `directory` can be used.
///
/// # Errors
/// Why they can't.
pub fn check_directory(directory: &Path) -> Result<CertInfo, TlsError> {
    load_directory(directory).map(|loaded| loaded.info)
}

fn load_directory(directory: &Path) -> Result<Loaded, TlsError> {
    let key_path = directory.join(KEY_FILE);
    let chain = certificates(&directory.join(CERT_FILE))?;
    let key = PrivateKeyDer::from_pem_slice(&read(&key_path)?);
    let key = key.map_err(|e| TlsError::Pem { path: key_path, what: "private key", why: e.to_string() })?;
    load(chain, key)
}

/// The certificates in a PEM file: one at least.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unusable = |why| TlsError::Pem { path: path.to_owned(), what: "certificate", why };
    let chain = CertificateDer::pem_slice_iter(&read(path)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|e| unusable(e.to_string()))?;
    if chain.is_empty() { Err(unusable("there is none in it".into())) } else { Ok(chain) }
}

fn load(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Loaded, TlsError> {
    let first = chain.first().ok_or_else(|| TlsError::Certificate("the chain is empty".into()))?;
    let info = info(first)?;
    let key = CertifiedKey::from_der(chain, key, &provider()).map_err(TlsError::Pair)?;
    Ok(Loaded { key: Arc::new(key), info })
}

fn info(certificate: &CertificateDer<'_>) -> Result<CertInfo, TlsError> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(|e| TlsError::Certificate(e.to_string()))?;
    let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
    let pin = digest.as_ref().iter().map(|b| format!("{b:02x}")).collect();
    let expires_at = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
    Ok(CertInfo { expires_at, pin })
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(MAX_PEM_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn unix(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn is_dns_name(name: &str) -> bool {
    rustls::pki_types::DnsName::try_from(name).is_ok()
}

/// The machine's name, for the certificate: `HOSTNAME`, which Kubernetes sets to the pod's name, else what the kernel says.
#[must_use]
pub fn hostname() -> Option<String> {
    std::env::var("HOSTNAME")
        .ok()
        .or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
}
