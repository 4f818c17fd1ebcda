//! The validity of a certificate that a client library reads by itself, such as the one for NATS.

use super::{TlsError, certificates, info};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A PEM file with a certificate. Its user reads the file at each connection.
#[derive(Debug)]
pub struct CertificateFile {
    path: PathBuf,
    /// End of its validity, Unix seconds; 0 before the file could be read.
    expires_at: AtomicU64,
    refused: AtomicU64,
}

impl CertificateFile {
    /// Reads the file at `path`. One that can't be read is logged.
    #[must_use]
    pub fn read(path: PathBuf) -> Arc<Self> {
        let file = Self { path, expires_at: AtomicU64::new(0), refused: AtomicU64::new(0) };
        file.reload();
        Arc::new(file)
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again. An invalid one is logged and counted, and the end of the previous certificate stays.
    pub fn reload(&self) {
        match expiry(&self.path) {
            Ok(end) => self.expires_at.store(end, Relaxed),
            Err(error) => {
                tracing::warn!(%error, "client certificate can't be used; the next connection with it fails");
                self.refused.fetch_add(u64::from(self.expires_at().is_some()), Relaxed);
            }
        }
    }

    /// End of the certificate's validity, Unix seconds; `None` before the file could be read.
    #[must_use]
    pub fn expires_at(&self) -> Option<u64> {
        Some(self.expires_at.load(Relaxed)).filter(|end| *end > 0)
    }

    /// Returns how many times a valid file was replaced with an invalid one.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }
}

/// The end of validity of the first certificate of a file, the one of its owner.
fn expiry(path: &Path) -> Result<u64, TlsError> {
    let chain = certificates(path)?;
    let first = chain.first().ok_or_else(|| TlsError::Certificate("the chain is empty".into()))?;
    Ok(info(first)?.expires_at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn end_of_validity_is_that_of_the_last_valid_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nats.crt");
        let write = |seconds: u64| {
            let mut params = rcgen::CertificateParams::new(["picker".to_owned()]).unwrap();
            params.not_after = (SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).into();
            let certificate = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
            std::fs::write(&path, certificate.pem()).unwrap();
        };
        let file = CertificateFile::read(path.clone());
        assert_eq!((file.expires_at(), file.refused()), (None, 0), "there is no file yet");
        write(2_000_000_000);
        file.reload();
        assert_eq!((file.expires_at(), file.refused()), (Some(2_000_000_000), 0));
        std::fs::write(&path, "no PEM").unwrap();
        file.reload();
        assert_eq!((file.expires_at(), file.refused()), (Some(2_000_000_000), 1));
        write(2_100_000_000);
        file.reload();
        assert_eq!((file.expires_at(), file.refused()), (Some(2_100_000_000), 1));
    }
}
