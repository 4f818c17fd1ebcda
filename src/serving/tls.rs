//! Transport security of the ext-proc port.
//!
//! A [`ServingCert`] answers every handshake with the current certificate and can be given a new one while it serves;
//! a pair that can't be used leaves the old one in place and is counted. tonic's own TLS can't do that, so
//! [`handshake`] makes the connections that tonic serves. With [`ClientAuth`], clients need a certificate too. Used by
//! `app`, `server`, `health`, `admin` and `cli::check`.

mod certificate_file;
mod client;
mod failures;
mod hello;
mod io;
mod settings;
#[cfg(test)]
mod tests;

pub use certificate_file::CertificateFile;
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
use x509_parser::time::ASN1Time;

/// Name of the certificate chain in the directory, as Kubernetes secrets of type `kubernetes.io/tls` have it.
pub const CERT_FILE: &str = "tls.crt";
/// Name of the private key in the directory.
pub const KEY_FILE: &str = "tls.key";
/// Lifetime of a self-signed certificate: clients verify only its pin, which changes with every start.
const SELF_SIGNED_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Largest file that is read as a certificate or key, bytes.
const MAX_PEM_BYTES: u64 = 1 << 20;

/// The reason for which a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("can't read {path}: {source}", path = path.display())]
    Read {
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file has no valid PEM of the required type.
    #[error("{path} holds no usable {what}: {why}", path = path.display())]
    Pem {
        /// Path of the file with the invalid PEM.
        path: PathBuf,
        /// `certificate`, `private key` or `client CA`.
        what: &'static str,
        /// Error of the parser.
        why: String,
    },
    /// Key and certificate do not match, or the key's type is unknown.
    #[error("certificate and key can't be used together: {0}")]
    Pair(rustls::Error),
    /// The certificate cannot be parsed.
    #[error("the certificate is malformed: {0}")]
    Certificate(String),
    /// The certificate has expired; the value is the end of its validity in Unix seconds.
    #[error("the certificate expired at {}", rfc3339(*.0))]
    Expired(u64),
    /// A self-signed certificate cannot be created.
    #[error("can't make a self-signed certificate: {0}")]
    SelfSigned(#[from] rcgen::Error),
    /// rustls rejects the configuration.
    #[error("can't set up TLS: {0}")]
    Config(rustls::Error),
}

/// Properties of the certificate in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertInfo {
    /// End of its validity in Unix seconds.
    pub expires_at: u64,
    /// SHA-256 of the certificate in hex: Envoy's `verify_certificate_hash`.
    pub pin: String,
}

#[derive(Debug)]
struct Loaded {
    key: Arc<CertifiedKey>,
    info: CertInfo,
}

/// The certificate that is presented in handshakes.
pub struct ServingCert {
    current: ArcSwap<Loaded>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

impl fmt::Debug for ServingCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key must not be printed.
        f.debug_struct("ServingCert").field("info", &self.info()).finish_non_exhaustive()
    }
}

impl ServingCert {
    /// Creates a certificate for localhost and `hostname`, and logs its pin.
    ///
    /// # Errors
    /// When random numbers or the system's clock prevent it.
    pub fn self_signed(hostname: Option<&str>, now: SystemTime) -> Result<Arc<Self>, TlsError> {
        let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(String::from).into();
        // A host name that is not a DNS name, for example with an underscore, must not prevent the start.
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
            expires_at = rfc3339(info.expires_at),
            "serving with a self-signed certificate; clients can pin it by this hash"
        );
        Ok(cert)
    }

    /// Reads `tls.crt` and `tls.key` in `directory`. An expired certificate is used with a warning,
    /// since there is no other.
    ///
    /// # Errors
    /// When a file is missing or invalid, or the two do not match.
    pub fn from_directory(directory: &Path, now: SystemTime) -> Result<Arc<Self>, TlsError> {
        let loaded = load_directory(directory)?;
        let info = &loaded.info;
        if info.expires_at <= unix(now) {
            tracing::warn!(
                expires_at = rfc3339(info.expires_at),
                "certificate has expired; clients that verify it will not connect"
            );
        }
        tracing::info!(
            pin_sha256 = info.pin,
            expires_at = rfc3339(info.expires_at),
            "serving with a certificate from files"
        );
        Ok(Self::with(loaded))
    }

    fn with(loaded: Loaded) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwap::from_pointee(loaded),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// Reads the directory again. New handshakes use the new pair; if it is invalid or expired, the old one stays in
    /// use. Returns whether the certificate has changed.
    ///
    /// # Errors
    /// The reason for which the old pair stays in use.
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
                    expires_at = rfc3339(loaded.info.expires_at),
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

    /// Returns the properties of the certificate in use.
    #[must_use]
    pub fn info(&self) -> CertInfo {
        self.current.load().info.clone()
    }

    /// Returns how many new certificates were loaded after the first.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Relaxed)
    }

    /// Returns how many certificates were rejected.
    #[must_use]
    pub fn reload_failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Returns the rustls configuration with this certificate: HTTP/2 only, TLS 1.2 or 1.3. With `clients`,
    /// each client needs a certificate.
    ///
    /// # Errors
    /// When rustls rejects its own defaults.
    pub fn server_config(self: &Arc<Self>, clients: Option<Arc<ClientAuth>>) -> Result<Arc<ServerConfig>, TlsError> {
        let clients = clients.map(|clients| clients as Arc<dyn ClientCertVerifier>);
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Config)?
            .with_client_cert_verifier(clients.unwrap_or_else(WebPkiClientVerifier::no_client_auth))
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        // Otherwise, a resumed session would be valid for a client whose authority or name is no longer accepted.
        // Gateways keep their connections open anyway.
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

/// Checks whether `tls.crt` and `tls.key` in `directory` can be used.
///
/// # Errors
/// The reason for which they cannot.
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

/// Returns the certificates in a PEM file, at least one.
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

/// A time in Unix seconds as RFC 3339 has it.
fn rfc3339(seconds: u64) -> String {
    let at = i64::try_from(seconds).ok().and_then(|seconds| ASN1Time::from_timestamp(seconds).ok());
    let Some(at) = at.map(|at| at.to_datetime()) else { return format!("{seconds} s after 1970") };
    let (year, month, day) = (at.year(), u8::from(at.month()), at.day());
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", at.hour(), at.minute(), at.second())
}

fn is_dns_name(name: &str) -> bool {
    rustls::pki_types::DnsName::try_from(name).is_ok()
}

/// Returns the machine's name for the certificate: `HOSTNAME`, which Kubernetes sets to the
/// pod's name, otherwise the kernel's.
#[must_use]
pub fn hostname() -> Option<String> {
    std::env::var("HOSTNAME")
        .ok()
        .or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
}
