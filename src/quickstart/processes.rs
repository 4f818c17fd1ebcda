//! Child processes: their logs in files, and their end in reverse order of their start.

use crate::QuickstartError;
use rustix::process::{Pid, Signal, kill_process};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// 30 s for a process to serve: a loaded laptop is slow, a broken start is not.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// 5 s for a process to end after SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// 20 ms between two looks at what a process has written or serves.
const POLL: Duration = Duration::from_millis(20);
/// Lines of a log that an error shows.
const SHOWN_LINES: usize = 15;

/// The processes that run, in the order of their start.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    logs: PathBuf,
    children: Vec<(&'static str, Child)>,
}

impl Processes {
    /// Processes that are started from now on write their logs to `directory`.
    pub(crate) fn log_to(&mut self, directory: PathBuf) {
        self.logs = directory;
    }

    /// Starts `program` as `name`.
    pub(crate) fn start(
        &mut self,
        name: &'static str,
        program: &Path,
        arguments: &[&str],
    ) -> Result<(), QuickstartError> {
        let file = |kind| {
            let file = std::fs::File::create(self.log(name, kind));
            file.map(Stdio::from).map_err(|e| QuickstartError::System("can't write a log", e))
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(file("out")?).stderr(file("err")?);
        // Its own process group: Ctrl-C on the terminal is for this process, which ends the others in order.
        command.process_group(0).kill_on_drop(true);
        let child = command.spawn();
        let child = child.map_err(|e| QuickstartError::Process(format!("can't start {}: {e}", program.display())))?;
        self.children.push((name, child));
        Ok(())
    }

    /// Waits until `look` finds something, which is `what` of the process `name`.
    pub(crate) async fn wait_for<T, F: Future<Output = Option<T>>>(
        &mut self,
        name: &'static str,
        what: &str,
        mut look: impl FnMut(PathBuf) -> F,
    ) -> Result<T, QuickstartError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(Some(found)) = timeout_at(deadline, look(self.logs.clone())).await {
                return Ok(found);
            }
            let ended = self.child(name).and_then(|child| child.try_wait().ok().flatten());
            let failure = match ended {
                Some(status) => format!("{name} ended ({status}) before it had {what}"),
                None if Instant::now() >= deadline => format!("{name} has no {what} after {START_TIMEOUT:?}"),
                None => {
                    sleep(POLL).await;
                    continue;
                }
            };
            return Err(QuickstartError::Process(format!("{failure}\n{}", self.end_of_log(name))));
        }
    }

    /// The name of the process that ends first, by itself.
    pub(crate) async fn first_end(&mut self) -> &'static str {
        loop {
            let ended = self.children.iter_mut().find_map(|(name, child)| {
                let has_ended = child.try_wait().is_ok_and(|status| status.is_some());
                has_ended.then_some(*name)
            });
            match ended {
                Some(name) => return name,
                None => sleep(POLL).await,
            }
        }
    }

    /// Ends all processes, the latest first.
    pub(crate) async fn stop(&mut self) {
        for (_, child) in self.children.iter().rev() {
            // A process that has ended has no id.
            if let Some(pid) = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        for (_, mut child) in std::mem::take(&mut self.children).into_iter().rev() {
            if timeout(END_TIMEOUT, child.wait()).await.is_err() {
                let _ = child.kill().await;
            }
        }
    }

    fn child(&mut self, name: &str) -> Option<&mut Child> {
        self.children.iter_mut().find(|(known, _)| *known == name).map(|(_, child)| child)
    }

    /// A path for a file beside the logs.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.logs.join(name)
    }

    fn log(&self, name: &str, kind: &str) -> PathBuf {
        self.logs.join(format!("{name}.{kind}"))
    }

    fn end_of_log(&self, name: &str) -> String {
        let text = std::fs::read(self.log(name, "err")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
    }
}
