//! A program in a terminal of its own: keys in, screen out.

use super::process::PATIENCE;
use pty_process::{Command, OwnedWritePty, Size};
use std::num::NonZeroU16;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Child;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// A running program and what its terminal shows. Killed on drop.
pub(crate) struct Terminal {
    child: Child,
    keyboard: OwnedWritePty,
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

impl Terminal {
    /// Starts `command` in a terminal of this size.
    pub(crate) fn start(command: Command, (columns, rows): (u16, u16)) -> Self {
        let (pty, pts) = pty_process::open().expect("a pseudo-terminal");
        pty.resize(Size::new(rows, columns)).expect("its size");
        let child = command.kill_on_drop(true).spawn(pts).expect("starting the program");
        let (mut output, keyboard) = pty.into_split();
        let parser = Arc::new(Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)));
        let written = parser.clone();
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 4096];
            // The end of the program is an error here.
            while let Ok(read @ 1..) = output.read(&mut bytes).await {
                written.lock().unwrap_or_else(PoisonError::into_inner).process(&bytes[..read]);
            }
        });
        Self { child, keyboard, parser, reader }
    }

    /// The id of the program.
    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("it runs")
    }

    /// Presses keys: characters, or the sequences that a terminal sends.
    pub(crate) async fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).await.expect("the terminal takes keys");
    }

    pub(crate) fn resize(&mut self, columns: u16, rows: u16) {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner).screen_mut().set_size(cells(rows), cells(columns));
        self.keyboard.resize(Size::new(rows, columns)).expect("a new size");
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
