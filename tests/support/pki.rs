//! Certificate authorities, certificates, and directories with the layout of a Kubernetes secret mount.

use attache_types::clock::wall_now;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

const DAY: Duration = Duration::from_secs(86_400);

/// A certificate authority.
pub(crate) struct Authority {
    /// Its certificate, PEM.
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, PEM.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// A certificate for one IP address, DNS name or URI, for servers and for clients.
    pub(crate) fn identity(&self, name: &str) -> Identity {
        self.sign(name, wall_now() + 90 * DAY)
    }

    /// The same, for five more days.
    pub(crate) fn ending(&self, name: &str) -> Identity {
        self.sign(name, wall_now() + 5 * DAY)
    }

    /// The same, expired.
    pub(crate) fn expired(&self, name: &str) -> Identity {
        self.sign(name, wall_now() - DAY)
    }

    fn sign(&self, name: &str, until: SystemTime) -> Identity {
        let mut params = CertificateParams::default();
        let text = name.try_into().expect("ASCII");
        params.subject_alt_names = vec![match name.parse() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) if name.contains("://") => SanType::URI(text),
            Err(_) => SanType::DnsName(text),
        }];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = (wall_now() - 9 * DAY).into();
        params.not_after = until.into();
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Identity { certificate, key: key.serialize_pem() }
    }
}

/// A directory whose files are replaced at once, by the swap of a symbolic link, as the kubelet does it.
pub(crate) struct Secret {
    directory: PathBuf,
    versions: AtomicUsize,
}

impl Secret {
    /// In a directory that does not exist yet.
    pub(crate) fn new(directory: PathBuf, identity: &Identity, authorities: &[&Authority]) -> Self {
        std::fs::create_dir(&directory).expect("a directory");
        for file in ["tls.crt", "tls.key", "ca.crt"] {
            symlink(Path::new("..data").join(file), directory.join(file)).expect("a link");
        }
        let secret = Self { directory, versions: AtomicUsize::new(0) };
        secret.replace(identity, authorities);
        secret
    }

    pub(crate) fn path(&self) -> &Path {
        &self.directory
    }

    /// The authorities' file.
    pub(crate) fn ca(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Replaces all files.
    pub(crate) fn replace(&self, identity: &Identity, authorities: &[&Authority]) {
        let bundle: String = authorities.iter().map(|authority| authority.pem.as_str()).collect();
        self.replace_with(&identity.certificate, &identity.key, &bundle);
    }

    /// The same with any text.
    pub(crate) fn replace_with(&self, certificate: &str, key: &str, authorities: &str) {
        let version = format!("..version-{}", self.versions.fetch_add(1, Relaxed));
        let new = self.directory.join(&version);
        std::fs::create_dir(&new).expect("a directory");
        for (file, text) in [("tls.crt", certificate), ("tls.key", key), ("ca.crt", authorities)] {
            std::fs::write(new.join(file), text).expect("writing");
        }
        let link = self.directory.join("..data_tmp");
        symlink(&version, &link).expect("a link");
        std::fs::rename(&link, self.directory.join("..data")).expect("the swap");
    }
}
