//! Styles that suit light and dark terminals: colours of the terminal's own palette, and none that name a background.

use crate::rows::Severity;
use ratatui_core::style::{Color, Modifier, Style};

/// The styles of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Theme {
    colour: bool,
}

impl Theme {
    pub(crate) fn new(colour: bool) -> Self {
        Self { colour }
    }

    /// Without colours, for printed frames.
    pub(crate) fn plain() -> Self {
        Self { colour: false }
    }

    fn coloured(self, colour: Color, otherwise: Modifier) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new().add_modifier(otherwise) }
    }

    pub(crate) fn good(self) -> Style {
        self.coloured(Color::Green, Modifier::empty())
    }

    pub(crate) fn warning(self) -> Style {
        self.coloured(Color::Yellow, Modifier::BOLD)
    }

    pub(crate) fn bad(self) -> Style {
        self.coloured(Color::Red, Modifier::BOLD).add_modifier(Modifier::BOLD)
    }

    pub(crate) fn of(self, severity: Severity) -> Style {
        match severity {
            Severity::Fine => self.plain_text(),
            Severity::Warning => self.warning(),
            Severity::Bad => self.bad(),
        }
    }

    pub(crate) fn plain_text(self) -> Style {
        Style::new()
    }

    pub(crate) fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(crate) fn soft(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(crate) fn accent(self) -> Style {
        self.coloured(Color::Cyan, Modifier::empty())
    }

    /// The title of the pane that is shown.
    pub(crate) fn tab(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED)
    }

    /// The row of the cursor.
    pub(crate) fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}
