//! Mistakes in a configuration, and their output for people and programs.
//!
//! A [`Diagnostic`] names the setting, the value, the allowed values and the position. The renderers show it like a
//! compiler (`file:line:column`, the line, a caret) or as JSON.

pub use attache_types::spelling::closest;
use std::fmt::Write as _;

/// A position in the text: line and column count from 1, in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Line number in the file, from 1.
    pub line: u32,
    /// Column number, from 1, in characters.
    pub column: u32,
    /// Number of marked characters, at least one.
    pub length: u32,
}

/// A value and the position that it was read from; the default position if it came from a flag or the environment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct At<T> {
    /// The value as it was read.
    pub value: T,
    /// Position of the value in the file.
    pub span: Span,
}

/// How severe a diagnostic is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Valid, but probably not intended.
    Warning,
    /// The configuration is rejected because of it.
    Error,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal),* $(,)?) => {
        /// Every kind of diagnostic: E1xx about the text, E2xx about the meaning, W3xx valid
        /// but suspicious. Codes are stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code { $($(#[$doc])* $name),* }

        impl Code {
            /// All codes, in the order of their declaration.
            pub const ALL: &'static [Code] = &[$(Code::$name),*];

            /// The code as it is printed.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$name => $code),* }
            }
        }
    };
}

codes! {
    /// NUL bytes or invalid UTF-8.
    NotText = "E101",
    /// The text exceeds the size limit.
    TooLarge = "E102",
    /// The text is not valid YAML.
    Syntax = "E103",
    /// A mapping has the same key twice.
    DuplicateKey = "E104",
    /// Aliases or nesting exceed what real configurations need.
    Bomb = "E105",
    /// A tab where YAML requires spaces.
    Tab = "E106",
    /// The file has no content.
    Empty = "E107",
    /// The file has more than one YAML document.
    SeveralDocuments = "E108",
    /// `apiVersion` or `kind` missing or unknown.
    Version = "E109",
    /// The key does not exist.
    UnknownKey = "E111",
    /// The value has the wrong type.
    WrongType = "E112",
    /// A required key is missing.
    MissingKey = "E113",
    /// The value is outside its range or set.
    OutOfRange = "E114",
    /// The file can't be read.
    Unreadable = "E115",
    /// The strategy does not exist.
    UnknownStrategy = "E201",
    /// The strategy or policy does not take these parameters.
    BadParameters = "E202",
    /// A name is used twice.
    DuplicateName = "E203",
    /// Two pools match the same requests.
    AmbiguousMatch = "E204",
    /// The value is not an address.
    BadAddress = "E205",
    /// A pool lists an endpoint twice.
    DuplicateEndpoint = "E206",
    /// Two values contradict each other.
    Contradiction = "E207",
    /// The value is not a valid URL.
    BadUrl = "E208",
    /// A certificate or key is missing or invalid.
    BadCertificate = "E209",
    /// There is no pool or endpoint to route to.
    NothingToServe = "E210",
    /// A list is empty that must not be.
    EmptyList = "E211",
    /// The value is not a log filter.
    BadLogFilter = "E212",
    /// The plugin type does not exist.
    UnknownPlugin = "E213",
    /// A reference names an undeclared plugin.
    UndefinedReference = "E214",
    /// A plugin is used where its type is not allowed.
    WrongPlugin = "E215",
    /// Metrics would be stale most of the time.
    StaleTooSoon = "W301",
    /// The pool has no endpoints.
    EmptyPool = "W302",
    /// A flag overrides the value in the file.
    Overridden = "W303",
    /// Clients can choose their endpoints.
    TrustsClients = "W304",
    /// The port usually belongs to another protocol.
    OddPort = "W305",
    /// All weights of a rewrite are zero.
    ZeroWeights = "W306",
    /// The value has no effect.
    NoEffect = "W307",
    /// A file does not exist on this machine.
    MissingFile = "W308",
}

impl Code {
    /// Severity, from the first letter of the code.
    #[must_use]
    pub fn severity(self) -> Severity {
        if self.as_str().starts_with('W') { Severity::Warning } else { Severity::Error }
    }
}

/// A second position that explains a diagnostic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Related {
    /// Position in the file.
    pub span: Span,
    /// Description of that position, such as "the first one".
    pub note: String,
}

/// One mistake in a configuration, or a warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Code of the kind of mistake.
    pub code: Code,
    /// The setting, its value and the allowed values: lower case, no full stop.
    pub message: String,
    /// Position in the file; `None` if a flag or the file as a whole is at fault.
    pub span: Option<Span>,
    /// Path in the configuration (`pools[0].strategy.name`) or name of the flag (`--strategy`).
    pub path: String,
    /// The second position, if there is one.
    pub related: Option<Box<Related>>,
    /// How to correct the mistake.
    pub help: Option<String>,
}

impl Diagnostic {
    /// A diagnostic without a position.
    pub fn new(code: Code, path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), span: None, path: path.into(), related: None, help: None }
    }

    /// Adds the position. A default span means none.
    #[must_use]
    pub fn at(mut self, span: Span) -> Self {
        self.span = (span.line > 0).then_some(span);
        self
    }

    /// Adds a second position. A default span means none.
    #[must_use]
    pub fn related(mut self, span: Span, note: impl Into<String>) -> Self {
        if span.line > 0 {
            self.related = Some(Box::new(Related { span, note: note.into() }));
        }
        self
    }

    /// Adds how to correct the mistake.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Whether it is about the text of a configuration, not about a flag (`--strategy`) or an environment variable
    /// (`REDIS_HOST`).
    #[must_use]
    pub fn is_of_text(&self) -> bool {
        let is_of_variable = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        let is_of_variable = !self.path.is_empty() && self.path.chars().all(is_of_variable);
        self.span.is_some() || !(self.path.starts_with('-') || is_of_variable)
    }

    /// Whether the configuration is rejected because of it.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.code.severity() == Severity::Error
    }
}

/// Longest part of a source line that is shown, since minified or hostile files have very long ones.
const SHOWN_COLUMNS: usize = 160;

/// Renders diagnostics for people. `source` is the file's name and text; `colour` adds ANSI colours.
#[must_use]
pub fn render_text(diagnostics: &[Diagnostic], source: Option<(&str, &str)>, colour: bool) -> String {
    let mut out = String::new();
    for diagnostic in diagnostics {
        render_one(&mut out, diagnostic, source, &Palette::new(colour));
        out.push('\n');
    }
    let errors = diagnostics.iter().filter(|d| d.is_error()).count();
    let warnings = diagnostics.len() - errors;
    if errors + warnings > 0 {
        let _ = writeln!(out, "{}, {}", count(errors, "error"), count(warnings, "warning"));
    }
    out
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

struct Palette {
    error: &'static str,
    warning: &'static str,
    frame: &'static str,
    bold: &'static str,
    reset: &'static str,
}

impl Palette {
    fn new(colour: bool) -> Self {
        if colour {
            Self { error: "\x1b[1;31m", warning: "\x1b[1;33m", frame: "\x1b[34m", bold: "\x1b[1m", reset: "\x1b[0m" }
        } else {
            Self { error: "", warning: "", frame: "", bold: "", reset: "" }
        }
    }
}

fn render_one(out: &mut String, d: &Diagnostic, source: Option<(&str, &str)>, p: &Palette) {
    let (tint, word) = if d.is_error() { (p.error, "error") } else { (p.warning, "warning") };
    let _ = writeln!(out, "{tint}{word}[{}]{}{}: {}{}", d.code.as_str(), p.reset, p.bold, clean(&d.message), p.reset);
    let width = [d.span, d.related.as_ref().map(|r| r.span)].into_iter().flatten().map(|s| s.line).max();
    let width = width.map_or(1, |line| line.to_string().len());
    let (f, r) = (p.frame, p.reset);
    match (source, d.span) {
        (Some((name, text)), Some(span)) => {
            let _ = writeln!(out, "{:width$}{f}-->{r} {name}:{}:{}", "", span.line, span.column);
            let _ = writeln!(out, "{:width$} {f}|{r}", "");
            excerpt(out, text, span, width, '^', tint, "", p);
            if let Some(related) = &d.related {
                if span.line.abs_diff(related.span.line) > 1 {
                    let _ = writeln!(out, "{f}...{r}");
                }
                excerpt(out, text, related.span, width, '-', f, &related.note, p);
            }
        }
        (Some((name, _)), None) if d.is_of_text() => {
            let _ = writeln!(out, "{:width$}{f}-->{r} {name}", "");
        }
        _ => {}
    }
    if !d.path.is_empty() {
        let _ = writeln!(out, "{:width$} {f}={r} at: {}", "", clean(&d.path));
    }
    if let Some(help) = &d.help {
        let _ = writeln!(out, "{:width$} {f}={r} help: {}", "", clean(help));
    }
}

#[expect(clippy::too_many_arguments, reason = "one line of output and how it looks; a struct would say no more")]
fn excerpt(out: &mut String, text: &str, span: Span, width: usize, mark: char, tint: &str, note: &str, p: &Palette) {
    let line = text.lines().nth(span.line as usize - 1).unwrap_or("");
    let column = span.column.max(1) as usize - 1;
    // A long line is shown from shortly before the mark.
    let from = if column >= SHOWN_COLUMNS { column - 20 } else { 0 };
    let shown: String =
        line.chars().skip(from).take(SHOWN_COLUMNS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    let left = shown.chars().count().saturating_sub(column - from).max(1);
    let marks = mark.to_string().repeat((span.length.max(1) as usize).min(left));
    let (f, r) = (p.frame, p.reset);
    let _ = writeln!(out, "{f}{:>width$} |{r} {}", span.line, shown.trim_end());
    let note = if note.is_empty() { String::new() } else { format!(" {}", clean(note)) };
    let _ = writeln!(out, "{:width$} {f}|{r} {:indent$}{tint}{marks}{note}{r}", "", "", indent = column - from);
}

/// Removes control characters from text of the file, for display in a terminal.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Renders diagnostics for programs: one JSON object with `file`, `errors`, `warnings` and the list.
#[must_use]
pub fn render_json(diagnostics: &[Diagnostic], file: Option<&str>) -> serde_json::Value {
    let place = |s: Span| serde_json::json!({"line": s.line, "column": s.column, "length": s.length.max(1)});
    let list: Vec<_> = diagnostics
        .iter()
        .map(|d| {
            serde_json::json!({
                "code": d.code.as_str(),
                "severity": d.code.severity(),
                "message": d.message,
                "path": d.path,
                "span": d.span.map(place),
                "related": d.related.as_ref().map(|r| serde_json::json!({"span": place(r.span), "note": r.note})),
                "help": d.help,
            })
        })
        .collect();
    let errors = diagnostics.iter().filter(|d| d.is_error()).count();
    serde_json::json!({
        "file": file,
        "errors": errors,
        "warnings": diagnostics.len() - errors,
        "diagnostics": list,
    })
}
