//! `--assert 'ttft_p90<1.2s'`: what a report must show, for CI. Called by `cli::replay`. Pure.
//!
//! ```text
//! assertion = [policy ":"] metric ("<" | "<=" | ">" | ">=") right
//! right     = number [unit]                      ttft_p90 < 1.2s
//!           | [number "*"] [policy ":"] metric   predicted-latency:ttft_mean < 0.7*random:ttft_mean
//! unit      = "us" | "ms" | "s" | "%"
//! ```
//!
//! Times need a unit, parts may have `%`, all else has none. Without a policy the left side is each policy in turn,
//! and the right side the same policy as the left. An assertion holds when it holds in every cell; a figure that
//! does not exist holds nothing.

use super::json::{Cell, Document, RunFigures};
use super::metric::{METRICS, Metric, find};
use super::number::{Unit, write};
use attache_types::spelling::closest;
use std::fmt;

/// Why an assertion can't be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssertionError {
    /// There is nothing to compare by.
    #[error("assertion `{0}`: no operator, one of < <= > >= is needed, as in `ttft_p90<1.2s`")]
    Operator(String),
    /// There is no such metric.
    #[error("assertion `{text}`: unknown metric `{got}`{}, allowed: {}", meant(.hint), names())]
    Metric {
        /// The whole assertion, as it was given.
        text: String,
        /// What stands for the metric.
        got: String,
        /// The metric with the closest spelling, or nothing.
        hint: Option<String>,
    },
    /// No such policy is in the report.
    #[error("assertion `{text}`: unknown policy `{got}`{}, in this run: {allowed}", meant(.hint))]
    Policy {
        /// The whole assertion, as it was given.
        text: String,
        /// What stands for the policy.
        got: String,
        /// The policy with the closest spelling, or nothing.
        hint: Option<String>,
        /// The policies of the report.
        allowed: String,
    },
    /// A number is none, or not finite.
    #[error(
        "assertion `{text}`: `{got}` is not a number, nor a metric with an optional factor as in `0.7*random:ttft_mean`"
    )]
    Number {
        /// The whole assertion, as it was given.
        text: String,
        /// What stands for the number.
        got: String,
    },
    /// The number has a unit that does not fit the metric, or none where one is needed.
    #[error("assertion `{text}`: {metric} is compared with a number {allowed}, got `{got}`")]
    Unit {
        /// The whole assertion, as it was given.
        text: String,
        /// Name of the metric on the left side.
        metric: &'static str,
        /// The number and its unit.
        got: String,
        /// Units that the metric accepts, such as "ms or s".
        allowed: &'static str,
    },
    /// Both sides are metrics that can't be compared.
    #[error("assertion `{text}`: {left} and {right} have different units")]
    Sides {
        /// The whole assertion, as it was given.
        text: String,
        /// The metric on the left.
        left: &'static str,
        /// The metric on the right.
        right: &'static str,
    },
}

fn meant(hint: &Option<String>) -> String {
    hint.as_ref().map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
}

fn names() -> String {
    METRICS.iter().map(|metric| metric.name).collect::<Vec<_>>().join(", ")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparisonOperator {
    Less,
    AtMost,
    More,
    AtLeast,
}

impl ComparisonOperator {
    fn holds(self, left: f64, right: f64) -> bool {
        match self {
            ComparisonOperator::Less => left < right,
            ComparisonOperator::AtMost => left <= right,
            ComparisonOperator::More => left > right,
            ComparisonOperator::AtLeast => left >= right,
        }
    }
}

impl fmt::Display for ComparisonOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ComparisonOperator::Less => "<",
            ComparisonOperator::AtMost => "<=",
            ComparisonOperator::More => ">",
            ComparisonOperator::AtLeast => ">=",
        })
    }
}

#[derive(Debug)]
struct CheckedFigure {
    policy: Option<String>,
    metric: &'static Metric,
}

#[derive(Debug)]
enum Right {
    Number(f64),
    Figure { factor: f64, figure: CheckedFigure },
}

/// What a report must show.
#[derive(Debug)]
pub struct Assertion {
    text: String,
    left: CheckedFigure,
    operator: ComparisonOperator,
    right: Right,
}

/// What became of an assertion for one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssertionResult {
    /// True when every run that the assertion names satisfies it.
    pub passed: bool,
    /// The assertion, the figures, and where they are from, on one line.
    pub line: String,
}

impl Assertion {
    /// Reads an assertion about some of `policies`. Meant to be called before the run, which may be long.
    ///
    /// # Errors
    /// What can't be understood, and what is allowed there.
    pub fn parse(text: &str, policies: &[&str]) -> Result<Self, AssertionError> {
        let text = text.trim();
        let (left, operator, right) = sides(text).ok_or_else(|| AssertionError::Operator(text.to_owned()))?;
        let left = figure(text, left, policies)?;
        let right = self::right(text, right, left.metric, policies)?;
        Ok(Self { text: text.to_owned(), left, operator, right })
    }

    /// Whether it holds, for each run that it speaks of; never empty.
    #[must_use]
    pub fn check(&self, document: &Document) -> Vec<AssertionResult> {
        let mut outcomes = Vec::new();
        for cell in document.cells() {
            let meant = |run: &&&RunFigures| self.left.policy.as_ref().is_none_or(|policy| *policy == run.policy);
            outcomes.extend(cell.runs.iter().filter(meant).map(|run| self.outcome(&cell, run)));
        }
        if outcomes.is_empty() {
            outcomes.push(AssertionResult { passed: false, line: format!("FAIL {}: there is no such run", self.text) });
        }
        outcomes
    }

    fn outcome(&self, cell: &Cell<'_>, run: &RunFigures) -> AssertionResult {
        let unit = self.left.metric.unit;
        let left = (self.left.metric.of)(run);
        let (right, of) = match &self.right {
            Right::Number(number) => (Some(*number), String::new()),
            Right::Figure { factor, figure } => {
                let policy = figure.policy.as_ref().unwrap_or(&run.policy);
                let other = cell.runs.iter().find(|other| other.policy == *policy);
                let value = other.and_then(|other| (figure.metric.of)(other));
                let shown = value.map_or_else(|| "none".to_owned(), |value| write(value, unit));
                (value.map(|value| value * factor), format!(" = {factor} * {shown} of {policy}"))
            }
        };
        let passed = left.zip(right).is_some_and(|(left, right)| self.operator.holds(left, right));
        let verdict = if passed { "pass" } else { "FAIL" };
        let shown = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| write(value, unit));
        let relation = if passed { self.operator.to_string() } else { format!("not {}", self.operator) };
        AssertionResult {
            passed,
            line: format!(
                "{verdict} {}: {} {} {relation} {}{of} ({})",
                self.text,
                run.policy,
                shown(left),
                shown(right),
                cell.name
            ),
        }
    }
}

fn sides(text: &str) -> Option<(&str, ComparisonOperator, &str)> {
    let (left, rest) = text.split_at(text.find(['<', '>'])?);
    let of = [
        ("<=", ComparisonOperator::AtMost),
        (">=", ComparisonOperator::AtLeast),
        ("<", ComparisonOperator::Less),
        (">", ComparisonOperator::More),
    ];
    let (operator, right) = of.into_iter().find_map(|(sign, operator)| Some((operator, rest.strip_prefix(sign)?)))?;
    Some((left.trim(), operator, right.trim()))
}

fn figure(text: &str, of: &str, policies: &[&str]) -> Result<CheckedFigure, AssertionError> {
    let (policy, name) = match of.rsplit_once(':') {
        Some((policy, name)) => (Some(policy.trim()), name.trim()),
        None => (None, of),
    };
    if let Some(policy) = policy.filter(|policy| !policies.contains(policy)) {
        return Err(AssertionError::Policy {
            text: text.to_owned(),
            got: policy.to_owned(),
            hint: closest(policy, policies.iter().copied()).map(str::to_owned),
            allowed: policies.join(", "),
        });
    }
    let metric = find(name).ok_or_else(|| AssertionError::Metric {
        text: text.to_owned(),
        got: name.to_owned(),
        hint: closest(name, METRICS.iter().map(|metric| metric.name)).map(str::to_owned),
    })?;
    Ok(CheckedFigure { policy: policy.map(str::to_owned), metric })
}

fn right(text: &str, of: &str, left: &'static Metric, policies: &[&str]) -> Result<Right, AssertionError> {
    let literal = of.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '.' | '-' | '+')) || of.is_empty();
    let (factor, of) = match of.split_once('*') {
        Some((factor, of)) => (number(text, factor.trim())?, of.trim()),
        None if literal && !of.contains(':') => return Ok(Right::Number(quantity(text, of, left)?)),
        None => (1.0, of),
    };
    let figure = figure(text, of, policies)?;
    if figure.metric.unit != left.unit {
        return Err(AssertionError::Sides { text: text.to_owned(), left: left.name, right: figure.metric.name });
    }
    Ok(Right::Figure { factor, figure })
}

fn number(text: &str, of: &str) -> Result<f64, AssertionError> {
    let finite = of.parse().ok().filter(|number: &f64| number.is_finite());
    finite.ok_or_else(|| AssertionError::Number { text: text.to_owned(), got: of.to_owned() })
}

fn quantity(text: &str, of: &str, metric: &'static Metric) -> Result<f64, AssertionError> {
    let digits = of.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%').trim_end();
    let unit = of.get(digits.len()..).unwrap_or_default().trim();
    let value = number(text, digits)?;
    let (factor, allowed) = match metric.unit {
        Unit::Seconds => {
            let factor = match unit {
                "us" => Some(1e-6),
                "ms" => Some(1e-3),
                "s" => Some(1.0),
                _ => None,
            };
            (factor, "in us, ms or s")
        }
        Unit::Share => {
            let factor = match unit {
                "%" => Some(0.01),
                "" => Some(1.0),
                _ => None,
            };
            (factor, "in % or from 0 to 1")
        }
        Unit::PerSecond | Unit::Plain => (unit.is_empty().then_some(1.0), "without a unit"),
    };
    let wrong = || AssertionError::Unit { text: text.to_owned(), metric: metric.name, got: of.to_owned(), allowed };
    factor.map(|factor| value * factor).ok_or_else(wrong)
}

#[cfg(test)]
mod tests;
