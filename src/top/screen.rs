//! The terminal while the view owns it. It is restored when the view ends, also by an error or a panic.

use crate::state::State;
use crate::view::{self, Theme};
use crate::watch::Moment;
use crossterm::cursor::Show;
use crossterm::execute;
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode,
};
use ratatui_core::layout::Rect;
use ratatui_core::terminal::Terminal;
use ratatui_crossterm::CrosstermBackend;
use std::io::{Stdout, stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// The terminal in raw mode, on its alternate screen.
#[derive(Debug)]
pub(crate) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// The terminal can't be read or written.
    pub(crate) fn open() -> std::io::Result<Self> {
        restore_before_panics();
        enable_raw_mode()?;
        IS_TAKEN.store(true, SeqCst);
        // From here on, the terminal is restored if anything fails.
        let restored = Restored;
        // `Terminal::clear` would ask the terminal for the place of the cursor, which not every terminal answers.
        execute!(stdout(), EnterAlternateScreen, DisableLineWrap, Clear(ClearType::All))?;
        let terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        std::mem::forget(restored);
        Ok(Self { terminal })
    }

    /// Takes a new size, and draws all of the next frame: the terminal may have cut off what it showed, also when it is
    /// as large as before.
    ///
    /// # Errors
    /// The terminal can't be written.
    pub(crate) fn resize(&mut self, columns: u16, rows: u16) -> std::io::Result<()> {
        self.terminal.resize(Rect::new(0, 0, columns, rows))
    }

    /// Draws a frame in the current size of the terminal.
    ///
    /// # Errors
    /// The terminal can't be written.
    pub(crate) fn draw(&mut self, state: &mut State, now: Moment, theme: Theme) -> std::io::Result<()> {
        let draw = |frame: &mut ratatui_core::terminal::Frame<'_>| {
            let area = frame.area();
            view::draw(frame.buffer_mut(), area, state, now, theme);
        };
        self.terminal.draw(draw).map(|_| ())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal on drop.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        restore();
    }
}

/// Whether the terminal is to be restored.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// Gives the terminal back as it was, once: a second time would move the cursor over a message of a panic. Errors are of
/// no use, because the terminal has gone.
fn restore() {
    if !IS_TAKEN.swap(false, SeqCst) {
        return;
    }
    let _ = execute!(stdout(), EnableLineWrap, LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// A panic writes its message after the terminal is restored, so that the message is seen.
fn restore_before_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            usual(panic);
        }));
    });
}
