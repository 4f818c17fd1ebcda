//! The report as text for people: a heading for each subject, a line for each finding, the worst first.

use crate::finding::{Finding, Report, Severity};
use std::fmt::Write;

/// How text is shown.
#[derive(Clone, Copy, Debug)]
pub struct TextStyle {
    /// Whether the terminal shows colours.
    pub colour: bool,
    /// Columns of a line.
    pub width: usize,
    /// Whether findings without a fault are shown too.
    pub show_ok: bool,
}

/// Where the text of a finding begins.
const INDENT: &str = "    ";

impl Severity {
    /// Its sign and its ANSI colour.
    fn sign(self) -> (&'static str, &'static str) {
        match self {
            Self::Ok => ("✔", "32"),
            Self::Unknown => ("?", "36"),
            Self::Warning => ("!", "33"),
            Self::Error => ("✘", "31"),
        }
    }
}

impl Report {
    /// The report as text.
    #[must_use]
    pub fn to_text(&self, style: TextStyle) -> String {
        let mut out = String::new();
        for subject in self.subjects() {
            let shown = |finding: &&Finding| style.show_ok || finding.severity != Severity::Ok;
            let of_subject = self.findings().iter().filter(|finding| finding.subject == subject);
            let mut lines: Vec<&Finding> = of_subject.filter(shown).collect();
            lines.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
            if !lines.is_empty() {
                let _ = writeln!(out, "{}", style.paint("1", subject));
                lines.iter().for_each(|finding| style.write(finding, &mut out));
                out.push('\n');
            }
        }
        let _ = writeln!(out, "{}", self.totals(style));
        out
    }

    /// Subjects in the order of their first finding.
    fn subjects(&self) -> Vec<&str> {
        let mut seen: Vec<&str> = Vec::new();
        for finding in self.findings() {
            if !seen.contains(&finding.subject.as_str()) {
                seen.push(&finding.subject);
            }
        }
        seen
    }

    fn totals(&self, style: TextStyle) -> String {
        let counted = |severity: Severity, what: &str| {
            let number = self.count(severity);
            let plural = if number == 1 || what == "ok" { "" } else { "s" };
            let text = format!("{number} {what}{plural}");
            if number == 0 { text } else { style.paint(severity.sign().1, &text) }
        };
        let mut parts =
            vec![counted(Severity::Error, "error"), counted(Severity::Warning, "warning"), counted(Severity::Ok, "ok")];
        if let number @ 1.. = self.count(Severity::Unknown) {
            parts.push(style.paint(Severity::Unknown.sign().1, &format!("{number} not checked")));
        }
        parts.join(", ")
    }
}

impl TextStyle {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn write(self, finding: &Finding, out: &mut String) {
        let (sign, colour) = finding.severity.sign();
        let mut lines = self.wrap(&format!("{} [{}]", finding.found, finding.check.id)).into_iter();
        let _ = writeln!(out, "  {} {}", self.paint(colour, sign), lines.next().unwrap_or_default());
        let mut rest: Vec<String> = lines.collect();
        for (name, text) in [("why: ", finding.why()), ("fix: ", finding.fix.as_str())] {
            if !text.is_empty() {
                rest.extend(self.wrap(&format!("{name}{text}")));
            }
        }
        for line in rest {
            let _ = writeln!(out, "{INDENT}{line}");
        }
    }

    /// Lines of at most the width, without the indent. A word that is longer has a line of its own.
    fn wrap(self, text: &str) -> Vec<String> {
        let width = self.width.saturating_sub(INDENT.len()).max(20);
        let mut lines = vec![String::new()];
        for word in text.split_whitespace() {
            let line = lines.last_mut().expect("the list begins with a line");
            if line.is_empty() {
                line.push_str(word);
            } else if line.chars().count() + 1 + word.chars().count() <= width {
                line.push(' ');
                line.push_str(word);
            } else {
                lines.push(word.to_owned());
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Check;

    static BODY: Check = Check {
        id: "envoy-request-body",
        about: "the mode of request bodies",
        why: "Without bodies, the picker sees no prompt.",
    };

    fn report() -> Report {
        let mut report = Report::default();
        report.push(BODY.ok("Envoy a", "request bodies: BUFFERED"));
        report.push(BODY.error("Envoy b", "request bodies are not sent", "set `request_body_mode: BUFFERED`"));
        report.push(BODY.warning("Envoy a", "request bodies: STREAMED", "set `request_body_mode: BUFFERED`"));
        report
    }

    #[test]
    fn findings_are_grouped_by_subject_and_wrapped() {
        let text = report().to_text(TextStyle { colour: false, width: 44, show_ok: true });
        let wanted = "\
Envoy a
  ! request bodies: STREAMED
    [envoy-request-body]
    why: Without bodies, the picker sees no
    prompt.
    fix: set `request_body_mode: BUFFERED`
  ✔ request bodies: BUFFERED
    [envoy-request-body]

Envoy b
  ✘ request bodies are not sent
    [envoy-request-body]
    why: Without bodies, the picker sees no
    prompt.
    fix: set `request_body_mode: BUFFERED`

1 error, 1 warning, 1 ok
";
        assert_eq!(text, wanted);
    }

    #[test]
    fn terminals_get_colours_and_faults_alone_on_request() {
        let text = report().to_text(TextStyle { colour: true, width: 80, show_ok: false });
        assert!(text.contains("  \x1b[31m✘\x1b[0m request bodies are not sent"), "{text}");
        assert!(!text.contains('✔'), "{text}");
    }
}
