//! A child process that can't outlive its test, with its output in files.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::time::Instant;

/// Timeout of waits. Generous, because test machines are busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Killed on drop; the end of its log is shown if the test fails.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    directory: tempfile::TempDir,
}

impl Process {
    /// Starts `command` with stdout and stderr in files of a directory of its own.
    pub(crate) fn spawn(name: &'static str, command: &mut Command, directory: tempfile::TempDir) -> Self {
        let file = |name: &str| std::fs::File::create(directory.path().join(name)).expect("creating a log file");
        let child = command
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap_or_else(|error| panic!("starting {name} ({command:?}): {error}"));
        Self { name, child, directory }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdout(&self) -> String {
        self.read("stdout")
    }

    pub(crate) fn stderr(&self) -> String {
        self.read("stderr")
    }

    fn read(&self, file: &str) -> String {
        let bytes = std::fs::read(self.directory.path().join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends a signal by its name, `TERM` or `STOP`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.id())]).status();
        assert!(status.is_ok_and(|s| s.success()), "sending SIG{name} to {} ({})", self.name, self.id());
    }

    /// Kills it without a chance to shut down.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its exit status, `None` while it runs.
    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("asking for an exit status")
    }

    /// Waits for a value in the process's state or output; panics if the process ends first.
    pub(crate) async fn wait_for<T>(&mut self, what: &str, mut look: impl FnMut(&Self) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            if let Some(status) = self.exited() {
                panic!("{} ended ({status}) before {what}\n{}", self.name, self.log_tail());
            }
            assert!(Instant::now() < deadline, "{}: no {what} after {PATIENCE:?}\n{}", self.name, self.log_tail());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for its end.
    pub(crate) async fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.exited() {
                return status;
            }
            assert!(Instant::now() < deadline, "{} still runs after {PATIENCE:?}\n{}", self.name, self.log_tail());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn log_tail(&self) -> String {
        let log = self.stderr();
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(40);
        format!("--- {} (pid {}), end of stderr\n{}\n---", self.name, self.id(), lines[from..].join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("{}", self.log_tail());
        }
    }
}

/// A directory under the target directory that is removed with the process.
pub(crate) fn scratch(name: &str) -> tempfile::TempDir {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(root).expect("creating the scratch directory");
    tempfile::Builder::new().prefix(name).tempdir_in(root).expect("creating a scratch directory")
}

/// A memory value of `/proc/PID/status`, such as `VmRSS`, bytes.
#[allow(dead_code, reason = "only the end-to-end tests measure it")]
pub(crate) fn memory(id: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("a running process");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a figure");
    let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
    kib.parse::<u64>().expect("a number") << 10
}

/// Waits until `look` finds something; panics with `what` otherwise.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The repository, where shipped files are.
pub(crate) fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Panics unless this process may open `wanted` files: thousands of connections in one test need them.
pub(crate) fn require_open_files(wanted: u64) {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("reading /proc/self/limits");
    let line = limits.lines().find(|l| l.starts_with("Max open files")).expect("a limit of open files");
    let soft = line.split_whitespace().nth(3).and_then(|n| n.parse::<u64>().ok()).unwrap_or(u64::MAX);
    assert!(
        soft >= wanted,
        "may open {soft} files, this test needs {wanted}: run `ulimit -n {wanted}` or tests/run.sh"
    );
}
