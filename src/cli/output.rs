//! Standard output and standard error of every verb.
//!
//! Neither ends the process when its reader has gone, as in `attache check --output json attache.yaml | head -1`.

use super::EXIT_INTERNAL;
use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};

/// Prints a result for programs or people on standard output, and ends its last line.
///
/// Ends the process with [`EXIT_INTERNAL`] if the output can't be written, for example to a full disk.
pub(super) fn print(text: impl Display) {
    if let Err(error) = write(&mut std::io::stdout().lock(), text)
        && error.kind() != ErrorKind::BrokenPipe
    {
        message(format_args!("error: can't write to standard output: {error}"));
        std::process::exit(EXIT_INTERNAL.into());
    }
}

/// Shows a message for people on standard error, and ends its last line. Without a reader, the message is lost.
pub(super) fn message(text: impl Display) {
    let _ = write(&mut std::io::stderr().lock(), text);
}

/// Whether standard error shows colours: on a terminal, unless `NO_COLOR` is set to something.
pub(super) fn colour() -> bool {
    std::io::stderr().is_terminal() && may_colour()
}

/// Whether the environment allows colours: <https://no-color.org>.
pub(super) fn may_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn write(to: &mut impl Write, text: impl Display) -> std::io::Result<()> {
    let mut text = text.to_string();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    to.write_all(text.as_bytes())?;
    to.flush()
}
