//! A check, what it found, and the report of all findings.

use serde::Serialize;
use serde_json::{Value, json};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It could not be checked.
    Unknown,
    /// It works, but it costs something or can fail.
    Warning,
    /// Requests fail, or go where the picker did not send them.
    Error,
}

/// One thing that is checked.
#[derive(Debug)]
pub struct Check {
    /// Stable name, such as `envoy-request-body`. It begins with the subject.
    pub id: &'static str,
    /// What is checked, in a few words, for the reference.
    pub about: &'static str,
    /// Why it matters, in a sentence.
    pub why: &'static str,
}

impl Check {
    /// It is as it should be: `found` is the value seen.
    pub(crate) fn ok(&'static self, subject: impl Into<String>, found: impl Into<String>) -> Finding {
        self.finding(Severity::Ok, subject.into(), found.into(), String::new())
    }

    /// It works, but `found` costs something or can fail. `fix` names the key or flag to change.
    pub(crate) fn warning(
        &'static self,
        subject: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        self.finding(Severity::Warning, subject.into(), found.into(), fix.into())
    }

    /// Requests fail, or go where the picker did not send them. `fix` names the key or flag to change.
    pub(crate) fn error(
        &'static self,
        subject: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        self.finding(Severity::Error, subject.into(), found.into(), fix.into())
    }

    /// It could not be checked: `found` says why, and `fix` what makes it possible.
    pub(crate) fn unknown(
        &'static self,
        subject: impl Into<String>,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        self.finding(Severity::Unknown, subject.into(), found.into(), fix.into())
    }

    fn finding(&'static self, severity: Severity, subject: String, found: String, fix: String) -> Finding {
        Finding { check: self, subject, severity, found, fix }
    }
}

/// What a check found in one place.
#[derive(Debug)]
pub struct Finding {
    /// The check.
    pub check: &'static Check,
    /// Where, such as `Envoy http://127.0.0.1:9901, listener inference`. Findings are grouped by it.
    pub subject: String,
    /// How bad it is.
    pub severity: Severity,
    /// What is right or wrong, with the value seen.
    pub found: String,
    /// What to change, with the exact key or flag; empty if nothing.
    pub fix: String,
}

impl Finding {
    /// Why it matters; empty if nothing is known to be wrong.
    #[must_use]
    pub fn why(&self) -> &'static str {
        if matches!(self.severity, Severity::Ok | Severity::Unknown) { "" } else { self.check.why }
    }
}

/// All findings.
#[derive(Debug, Default)]
pub struct Report {
    findings: Vec<Finding>,
    reached: bool,
}

impl Report {
    /// Adds a finding.
    pub(crate) fn push(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Records that a target answered.
    pub(crate) fn mark_reached(&mut self) {
        self.reached = true;
    }

    /// Adds all findings of `other`.
    pub(crate) fn extend(&mut self, other: Self) {
        self.findings.extend(other.findings);
        self.reached |= other.reached;
    }

    /// The findings, by subject in the order in which subjects were checked.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The number of findings of this severity.
    #[must_use]
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Whether any target answered.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.reached
    }

    /// The findings for programs: `findings`, with `id`, `subject`, `severity`, `found`, `why` and `fix`, and the
    /// number of each severity. Keys are stable.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let finding = |f: &Finding| {
            json!({
                "id": f.check.id,
                "subject": f.subject,
                "severity": f.severity,
                "found": f.found,
                "why": f.why(),
                "fix": f.fix,
            })
        };
        json!({
            "ok": self.count(Severity::Ok),
            "warnings": self.count(Severity::Warning),
            "errors": self.count(Severity::Error),
            "unknown": self.count(Severity::Unknown),
            "reached": self.reached,
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
        })
    }
}

/// The severities of the findings that `judge` adds, in their order.
#[cfg(test)]
pub(crate) fn severities(judge: impl FnOnce(&mut Report)) -> Vec<Severity> {
    let mut report = Report::default();
    judge(&mut report);
    report.findings().iter().map(|finding| finding.severity).collect()
}
