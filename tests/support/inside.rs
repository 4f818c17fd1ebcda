//! Envoy with Attaché inside, by the shipped bootstrap.

use super::attache::AdminPages;
use super::envoy::{EnvoyProcess, shipped};
use super::process::{eventually, scratch};
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// Envoy, and the admin pages of its picker.
pub(crate) struct Inside {
    pub(crate) envoy: EnvoyProcess,
    pages: AdminPages,
    _files: tempfile::TempDir,
}

impl Deref for Inside {
    type Target = AdminPages;

    fn deref(&self) -> &AdminPages {
        &self.pages
    }
}

/// The shipped bootstrap for these servers, with this configuration file of Attaché.
pub(crate) fn inside_bootstrap(file: &Path, servers: [SocketAddr; 4]) -> String {
    rendered("inside.yaml", file, servers)
}

/// The shipped bootstrap whose servers come from Attaché, with this configuration file.
#[allow(dead_code, reason = "only the end-to-end tests use it")]
pub(crate) fn cluster_bootstrap(file: &Path) -> String {
    with_file(shipped("inside-cluster.yaml", &[(8080, 0), (9901, 0)]), file)
}

fn rendered(bootstrap: &str, file: &Path, servers: [SocketAddr; 4]) -> String {
    let [a, b, c, d] = servers.map(|server| server.port());
    let text = shipped(bootstrap, &[(8080, 0), (9901, 0), (8001, a), (8002, b), (8003, c), (8004, d)]);
    with_file(text, file)
}

/// The bootstrap with this configuration file, and with any free port for Attaché's admin pages.
fn with_file(bootstrap: String, file: &Path) -> String {
    bootstrap.replace("/etc/attache/config.yaml", &file.display().to_string()).replace("127.0.0.1:9090", "127.0.0.1:0")
}

/// A file with this configuration, in a directory of its own.
fn written(configuration: &str) -> (tempfile::TempDir, PathBuf) {
    let files = scratch("inside");
    let file = files.path().join("attache.yaml");
    std::fs::write(&file, configuration).expect("writing the configuration");
    (files, file)
}

impl Inside {
    /// Starts Envoy with these servers and this configuration of Attaché.
    pub(crate) async fn start(configuration: &str, servers: [SocketAddr; 4]) -> Self {
        Self::edited(configuration, servers, |bootstrap| bootstrap).await
    }

    /// The same, with changes of the bootstrap.
    pub(crate) async fn edited(
        configuration: &str,
        servers: [SocketAddr; 4],
        edit: impl FnOnce(String) -> String,
    ) -> Self {
        let (files, file) = written(configuration);
        Self::by(&edit(inside_bootstrap(&file, servers)), files).await
    }

    /// Starts Envoy with the machine for this test alone.
    pub(crate) async fn alone(configuration: &str, servers: [SocketAddr; 4]) -> Self {
        let (files, file) = written(configuration);
        let envoy = EnvoyProcess::alone(&inside_bootstrap(&file, servers)).await;
        Self::of(envoy, files).await
    }

    /// Starts Envoy by this bootstrap, whose admin port of Attaché is 0. The files of the configuration are kept.
    pub(crate) async fn by(bootstrap: &str, files: tempfile::TempDir) -> Self {
        Self::of(EnvoyProcess::start(bootstrap).await, files).await
    }

    /// The same by an installed bootstrap, with the library in this folder.
    pub(crate) async fn installed(
        bootstrap: &Path,
        library: &Path,
        configuration: &str,
        servers: [SocketAddr; 4],
    ) -> Self {
        let (files, file) = written(configuration);
        let bootstrap = rendered(bootstrap.to_str().expect("UTF-8"), &file, servers);
        Self::of(EnvoyProcess::with_library(&bootstrap, library).await, files).await
    }

    /// The same as a further Envoy of a test that has one already.
    pub(crate) async fn beside(other: &EnvoyProcess, configuration: &str, servers: [SocketAddr; 4]) -> Self {
        Self::beside_edited(other, configuration, servers, |bootstrap| bootstrap).await
    }

    /// The same, with changes of the bootstrap.
    pub(crate) async fn beside_edited(
        other: &EnvoyProcess,
        configuration: &str,
        servers: [SocketAddr; 4],
        edit: impl FnOnce(String) -> String,
    ) -> Self {
        let (files, file) = written(configuration);
        Self::of(other.beside(&edit(inside_bootstrap(&file, servers))).await, files).await
    }

    /// Takes over a running Envoy, and the files of its configuration.
    pub(crate) async fn of(envoy: EnvoyProcess, files: tempfile::TempDir) -> Self {
        let metrics = eventually("an admin port of the picker", || async {
            let log = envoy.log();
            let address = log.split("metrics=").nth(1)?.split([' ', '\n']).next()?.to_owned();
            address.parse().ok()
        })
        .await;
        Self { envoy, pages: AdminPages { metrics }, _files: files }
    }

    /// Calls of Envoy that kept its worker for more than a millisecond, and all calls.
    pub(crate) async fn late_hooks(&self) -> (f64, f64) {
        let calls = self.metric("attache_hook_seconds_count").await;
        (calls - self.metric("attache_hook_seconds_bucket{le=\"0.001\"}").await, calls)
    }

    /// Where clients connect.
    pub(crate) fn clients(&self) -> SocketAddr {
        self.envoy.listener("inference")
    }
}
