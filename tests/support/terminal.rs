//! A program in a terminal of its own, made by `script` of util-linux: keys in, screen out.

use super::process::PATIENCE;
use std::num::NonZeroU16;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// A running program and what its terminal shows. Killed on drop.
pub(crate) struct Terminal {
    /// `script`, whose only child is the shell.
    child: Child,
    keyboard: ChildStdin,
    parser: Arc<Mutex<vt100::Parser>>,
    reader: JoinHandle<()>,
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.reader.abort();
        if std::thread::panicking() {
            eprintln!("--- the terminal\n{}\n---", self.screen());
        }
    }
}

/// Columns and rows as the emulator wants them.
fn cells(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("a terminal has cells")
}

fn only_child(parent: u32) -> u32 {
    let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.trim().parse().unwrap_or_else(|_| panic!("one child of {parent}, not {list:?}"))
}

impl Terminal {
    /// Starts these commands of a shell in a terminal of this size.
    pub(crate) fn start(commands: &str, (columns, rows): (u16, u16)) -> Self {
        let commands = format!("stty columns {columns} rows {rows}; {commands}");
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command", &commands, "/dev/null"])
            .env("SHELL", "/bin/sh")
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("starting `script`");
        let keyboard = child.stdin.take().expect("a pipe");
        let mut output = child.stdout.take().expect("a pipe");
        let parser = Arc::new(Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)));
        let written = parser.clone();
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes).await {
                written.lock().unwrap_or_else(PoisonError::into_inner).process(&bytes[..read]);
            }
        });
        Self { child, keyboard, parser, reader }
    }

    /// The shell in the terminal.
    fn shell(&self) -> u32 {
        only_child(self.child.id().expect("it runs"))
    }

    /// The id of the program that the shell runs.
    pub(crate) fn program(&self) -> u32 {
        only_child(self.shell())
    }

    /// Presses keys: characters, or the sequences that a terminal sends.
    pub(crate) async fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).await.expect("the terminal takes keys");
    }

    pub(crate) fn resize(&mut self, columns: u16, rows: u16) {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).screen_mut().set_size(cells(rows), cells(columns));
        let terminal = format!("/proc/{}/fd/0", self.shell());
        let size = ["columns", &columns.to_string(), "rows", &rows.to_string()];
        let resized = std::process::Command::new("stty").args(["-F", &terminal]).args(size).status();
        assert!(resized.is_ok_and(|status| status.success()), "a new size of {terminal}");
    }

    /// The text of the screen.
    pub(crate) fn screen(&self) -> String {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).screen().contents()
    }

    /// Whether the program uses the second screen, or hides the cursor.
    pub(crate) fn is_taken(&self) -> bool {
        let parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        parser.screen().alternate_screen() || parser.screen().hide_cursor()
    }

    /// Waits until the screen is as wanted, and returns its text.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            assert!(Instant::now() < deadline, "not on the screen within {PATIENCE:?}: {what}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the screen has all of these texts.
    pub(crate) async fn until_shown(&self, texts: &[&str]) -> String {
        self.until(&format!("{texts:?}"), |screen| texts.iter().all(|text| screen.contains(text))).await
    }

    /// Waits for the end of the program and of its output.
    pub(crate) async fn wait(&mut self) -> ExitStatus {
        let status = timeout(PATIENCE, self.child.wait()).await.expect("the program ends").expect("its status");
        timeout(PATIENCE, &mut self.reader).await.expect("its output ends").expect("its output was read");
        status
    }
}
