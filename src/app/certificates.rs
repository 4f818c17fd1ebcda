//! The certificates of the ext-proc port, which are reloaded when their files change.

use attache_admin::Source;
use attache_admin::status::CertificateStatus;
use attache_config::settings::{ServerSettings, TlsSettings};
use attache_discovery::watch;
use attache_serving::tls::{self, ClientAuth, Handshaker, ServingCert};
use attache_telemetry::metrics::Metrics;
use attache_telemetry::process::TlsStats;
use attache_types::clock::Clock;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// The certificate of the port, and the required client certificates.
pub(super) struct Certificates {
    cert: Arc<ServingCert>,
    clients: Option<Arc<ClientAuth>>,
    handshaker: Handshaker,
}

impl Certificates {
    /// Loads the certificates in the settings, and reloads them on changes until `stop`. `None` without TLS.
    pub(super) fn load(
        server: &ServerSettings,
        clock: Clock,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<Self>> {
        let now = clock.wall(clock.now());
        let cert = match &server.tls {
            TlsSettings::Off => return Ok(None),
            TlsSettings::SelfSigned => ServingCert::self_signed(tls::hostname().as_deref(), now)?,
            TlsSettings::Files { directory, .. } => ServingCert::from_directory(directory, now)?,
        };
        let clients = server.client_auth.as_ref().map(ClientAuth::from_settings).transpose()?;
        // Errors of a new file were logged and counted; the old certificate stays in use.
        if let TlsSettings::Files { directory, reload: true } = &server.tls {
            let (directory, cert, stop) = (directory.clone(), cert.clone(), stop.clone());
            tokio::spawn(async move {
                let mut files = watch::watch([directory.join(tls::CERT_FILE), directory.join(tls::KEY_FILE)]);
                while stop.run_until_cancelled(files.changed()).await.is_some() {
                    let _ = cert.reload(&directory, clock.wall(clock.now()));
                }
            });
        }
        if let Some(clients) = clients.clone() {
            let stop = stop.clone();
            tokio::spawn(async move {
                let mut file = watch::watch([clients.file().to_owned()]);
                while stop.run_until_cancelled(file.changed()).await.is_some() {
                    let _ = clients.reload();
                }
            });
        }
        let handshaker = Handshaker::new(cert.server_config(clients.clone())?);
        Ok(Some(Self { cert, clients, handshaker }))
    }

    /// Configuration of handshakes for the acceptor.
    pub(super) fn handshaker(&self) -> &Handshaker {
        &self.handshaker
    }

    /// Counters for metrics.
    pub(super) fn stats(&self) -> TlsStats {
        let failures = self.handshaker.failures().clone();
        TlsStats { cert: self.cert.clone(), clients: self.clients.clone(), failures }
    }

    /// Shows failed handshakes to the status page.
    pub(super) fn share_failures(&self, metrics: &Metrics) {
        // Certificates are loaded once.
        let _ = metrics.handshakes.set(self.handshaker.failures().clone());
    }

    /// Reads when each certificate expires, for the status page.
    pub(super) fn status(&self) -> Source<Vec<CertificateStatus>> {
        let (cert, clients) = (self.cert.clone(), self.clients.clone());
        Arc::new(move || {
            let own = CertificateStatus {
                name: "server certificate",
                expires_at: cert.info().expires_at,
                refused: cert.reload_failures(),
            };
            let authorities = clients.as_ref().map(|clients| CertificateStatus {
                name: "client CA",
                expires_at: clients.expires_at(),
                refused: clients.reload_failures(),
            });
            std::iter::once(own).chain(authorities).collect()
        })
    }

    /// Accepts the clients that reloaded settings name.
    pub(super) fn follow(&self, server: &ServerSettings) {
        if let (Some(clients), Some(settings)) = (&self.clients, &server.client_auth) {
            clients.allow(&settings.names);
        }
    }
}
