//! Client certificates: signed by an authority of the client CA file, and with an allowed name.

use super::hello::{as_sent, provider};
use super::{TlsError, certificates, info};
use crate::tls::{ClientAuthSettings, ClientName};
use arc_swap::ArcSwap;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use x509_parser::extensions::GeneralName;

/// Most names of a rejected certificate that are logged.
const MAX_NAMES_LOGGED: usize = 8;
/// Most bytes of such a name that are logged.
const MAX_NAME_BYTES_LOGGED: usize = 200;

/// The accepted authorities and names of clients. Both can change while Attaché serves; existing
/// connections are not checked again.
pub struct ClientAuth {
    file: PathBuf,
    authorities: ArcSwap<Authorities>,
    names: ArcSwap<Vec<ClientName>>,
    reloads: AtomicU64,
    failures: AtomicU64,
}

struct Authorities {
    verifier: Arc<dyn ClientCertVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl ClientAuth {
    /// Reads the file with the authorities.
    ///
    /// # Errors
    /// When the file cannot be read, has no certificate, or an invalid one.
    pub fn from_settings(settings: &ClientAuthSettings) -> Result<Arc<Self>, TlsError> {
        let authorities = load(&settings.ca_file)?;
        tracing::info!(
            file = %settings.ca_file.display(),
            authorities = authorities.certificates.len(),
            names = %Listed(&settings.names),
            "client certificates are required"
        );
        Ok(Arc::new(Self {
            file: settings.ca_file.clone(),
            authorities: ArcSwap::from_pointee(authorities),
            names: ArcSwap::from_pointee(settings.names.clone()),
            reloads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }))
    }

    /// Returns the path of the file with the authorities.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads the file again. If it is invalid, the previous authorities stay in use. Returns whether they have changed.
    ///
    /// # Errors
    /// The reason for which the file is invalid.
    pub fn reload(&self) -> Result<bool, TlsError> {
        match load(&self.file) {
            Ok(new) if new.certificates == self.authorities.load().certificates => Ok(false),
            Ok(new) => {
                tracing::info!(authorities = new.certificates.len(), "client CA file reloaded");
                self.authorities.store(Arc::new(new));
                self.reloads.fetch_add(1, Relaxed);
                Ok(true)
            }
            Err(error) => {
                tracing::warn!(%error, "client CA file reload failed; keeping the previous authorities");
                self.failures.fetch_add(1, Relaxed);
                Err(error)
            }
        }
    }

    /// Replaces the accepted names.
    pub fn allow(&self, names: &[ClientName]) {
        if **self.names.load() != names {
            tracing::info!(names = %Listed(names), "client names reloaded");
            self.names.store(Arc::new(names.to_vec()));
        }
    }

    /// Returns how many new client CA files were loaded after the first.
    #[must_use]
    pub fn reloads(&self) -> u64 {
        self.reloads.load(Relaxed)
    }

    /// Returns how many client CA files were rejected.
    #[must_use]
    pub fn reload_failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Returns when the last of the authorities expires, Unix seconds.
    #[must_use]
    pub fn expires_at(&self) -> u64 {
        let authorities = self.authorities.load();
        let ends = authorities.certificates.iter().filter_map(|certificate| info(certificate).ok());
        ends.map(|info| info.expires_at).max().unwrap_or(0)
    }

    /// Checks whether a verified certificate has an allowed name.
    fn check_names(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let allowed = self.names.load();
        if allowed.is_empty() {
            return Ok(());
        }
        let malformed = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(malformed)?;
        let names = parsed.subject_alternative_name().map_err(|_| CertificateError::BadEncoding)?;
        let names = names.map_or(&[][..], |names| &names.value.general_names);
        let is_allowed = |name: &GeneralName<'_>| match name {
            GeneralName::DNSName(name) => allowed.iter().any(|wanted| wanted.matches_dns(name)),
            GeneralName::URI(uri) => allowed.iter().any(|wanted| wanted.matches_uri(uri)),
            _ => false,
        };
        if names.iter().any(is_allowed) {
            return Ok(());
        }
        let shown = names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some(*name),
            _ => None,
        });
        let shown =
            shown.take(MAX_NAMES_LOGGED).map(|name| name.chars().take(MAX_NAME_BYTES_LOGGED).collect()).collect();
        Err(CertificateError::Other(OtherError(Arc::new(NameNotAllowed(shown)))).into())
    }
}

impl fmt::Debug for ClientAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientAuth")
            .field("file", &self.file)
            .field("names", &self.names.load())
            .finish_non_exhaustive()
    }
}

/// A client's certificate has none of the allowed names, but these.
#[derive(Debug, thiserror::Error)]
#[error("the certificate has none of the allowed names; its DNS names and URIs are {0:?}")]
pub(super) struct NameNotAllowed(Vec<String>);

/// Formats names for a log.
struct Listed<'a>(&'a [ClientName]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("any"),
            names => names.iter().enumerate().try_for_each(|(i, name)| {
                let comma = if i > 0 { ", " } else { "" };
                write!(f, "{comma}{name}")
            }),
        }
    }
}

impl ClientCertVerifier for ClientAuth {
    /// None, since the authorities may change, and clients have only one certificate.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.authorities.load().verifier.verify_client_cert(end_entity, intermediates, now)?;
        self.check_names(end_entity)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // TLS 1.2 signs the handshake's messages themselves.
        self.authorities.load().verifier.verify_tls12_signature(&as_sent(message), cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.load().verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.load().verifier.supported_verify_schemes()
    }
}

/// Checks whether a client CA file can be used.
///
/// # Errors
/// The reason for which it cannot.
pub fn check_client_ca(file: &Path) -> Result<(), TlsError> {
    load(file).map(drop)
}

fn load(file: &Path) -> Result<Authorities, TlsError> {
    let unusable = |why: String| TlsError::Pem { path: file.to_owned(), what: "client CA", why };
    let certificates = certificates(file)?;
    let mut roots = RootCertStore::empty();
    for certificate in &certificates {
        roots.add(certificate.clone()).map_err(|error| unusable(error.to_string()))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let verifier = verifier.build().map_err(|error| unusable(error.to_string()))?;
    Ok(Authorities { verifier, certificates })
}
