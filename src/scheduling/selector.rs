//! Label selectors: the endpoints that a request may be sent to, by their labels.
//!
//! The syntax is that of `kubectl get -l`: comma-separated requirements, all of which must hold. They are `a=b`,
//! `a==b`, `a!=b`, `a in (x,y)`, `a notin (x,y)`, `a` (the label exists) and `!a` (it does not). As in Kubernetes,
//! `!=` and `notin` hold for an endpoint without the label.
//! [`super::choice`] parses them from a request header; the scheduler applies them.

use std::collections::BTreeMap;
use std::sync::Arc;

/// 32 requirements, ten times that of real selectors; each costs a lookup per endpoint.
pub const MAX_REQUIREMENTS: usize = 32;
/// 64 values in one list.
pub const MAX_VALUES: usize = 64;

/// Requirements on the labels of an endpoint; borrows from the parsed text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector<'a>(Vec<Requirement<'a>>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement<'a> {
    key: &'a str,
    test: Test<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test<'a> {
    Exists,
    Missing,
    In(Vec<&'a str>),
    NotIn(Vec<&'a str>),
}

impl<'a> LabelSelector<'a> {
    /// Parses a selector. An empty one matches every endpoint.
    ///
    /// # Errors
    /// The selector is invalid; the message names the part, for the client.
    pub fn parse(text: &'a str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for part in split(text)? {
            if requirements.len() >= MAX_REQUIREMENTS {
                return Err(format!("more than {MAX_REQUIREMENTS} requirements"));
            }
            requirements.push(requirement(part.trim())?);
        }
        Ok(Self(requirements))
    }

    /// Whether an endpoint with these labels meets all requirements.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        self.0.iter().all(|r| {
            let value = labels.get(r.key).map(|v| &**v);
            match &r.test {
                Test::Exists => value.is_some(),
                Test::Missing => value.is_none(),
                Test::In(values) => value.is_some_and(|v| values.contains(&v)),
                Test::NotIn(values) => value.is_none_or(|v| !values.contains(&v)),
            }
        })
    }
}

/// Splits at the commas outside of parentheses.
fn split(text: &str) -> Result<impl Iterator<Item = &str>, String> {
    let mut inside = false;
    for c in text.chars() {
        inside = match (c, inside) {
            ('(', false) => true,
            (')', true) => false,
            ('(' | ')', _) => return Err("parentheses that do not pair".to_owned()),
            _ => inside,
        };
    }
    if inside {
        return Err("a list without its closing parenthesis".to_owned());
    }
    let mut open = false;
    let parts = text.split(move |c| {
        open = (open || c == '(') && c != ')';
        c == ',' && !open
    });
    Ok(parts.filter(move |_| !text.trim().is_empty()))
}

fn requirement(text: &str) -> Result<Requirement<'_>, String> {
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Requirement { key: checked_key(key.trim())?, test: Test::Missing });
    }
    if let Some((head, list)) = text.split_once('(') {
        let (key, word) = head.trim_end().rsplit_once(char::is_whitespace).unwrap_or((head, ""));
        let list = list.strip_suffix(')').ok_or_else(|| format!("`{}` goes on behind its list", shown(text)))?;
        let values = values(list)?;
        let test = match word {
            "in" => Test::In(values),
            "notin" => Test::NotIn(values),
            _ => return Err(format!("`{}` is none of `key in (…)` and `key notin (…)`", shown(text))),
        };
        return Ok(Requirement { key: checked_key(key.trim())?, test });
    }
    let one = |value: &'_ str| checked_value(value.trim()).map(|_| ());
    if let Some((key, value)) = text.split_once("!=") {
        one(value)?;
        return Ok(Requirement { key: checked_key(key.trim())?, test: Test::NotIn(vec![value.trim()]) });
    }
    if let Some((key, value)) = text.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        one(value)?;
        return Ok(Requirement { key: checked_key(key.trim())?, test: Test::In(vec![value.trim()]) });
    }
    Ok(Requirement { key: checked_key(text)?, test: Test::Exists })
}

fn values(list: &str) -> Result<Vec<&str>, String> {
    let mut values = Vec::new();
    for value in list.split(',') {
        if values.len() >= MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values in a list"));
        }
        values.push(checked_value(value.trim())?);
    }
    Ok(values)
}

/// Characters that Kubernetes allows in label names and values.
fn is_label_character(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

fn checked_key(key: &str) -> Result<&str, String> {
    let good = !key.is_empty() && key.chars().all(|c| is_label_character(c) || c == '/');
    if good { Ok(key) } else { Err(format!("`{}` is not the name of a label", shown(key))) }
}

fn checked_value(value: &str) -> Result<&str, String> {
    let good = value.chars().all(is_label_character);
    if good { Ok(value) } else { Err(format!("`{}` is not the value of a label", shown(value))) }
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<Arc<str>, Arc<str>> {
        pairs.iter().map(|(k, v)| (Arc::from(*k), Arc::from(*v))).collect()
    }

    #[test]
    fn requirements_hold_as_kubernetes_has_it() {
        let endpoint = labels(&[("a", "b"), ("e", "x"), ("model.aibrix.ai/port", "8000"), ("empty", "")]);
        for (selector, holds) in [
            ("", true),
            (" ", true),
            ("a=b", true),
            ("a==b", true),
            (" a = b ", true),
            ("a=c", false),
            ("a!=b", false),
            ("a!=c", true),
            ("absent!=c", true),
            ("absent=c", false),
            ("a=b,c!=d,e in (x,y),!f", true),
            ("a=b,c!=d,e in (x,y),!a", false),
            ("e in (y , z)", false),
            ("e in (x)", true),
            ("e notin (x,y)", false),
            ("e notin (y)", true),
            ("absent notin (y)", true),
            ("absent in (y)", false),
            ("a", true),
            ("absent", false),
            ("!absent", true),
            ("model.aibrix.ai/port=8000", true),
            ("empty=", true),
            ("a=", false),
            ("empty in ()", true),
        ] {
            let parsed = LabelSelector::parse(selector).unwrap_or_else(|e| panic!("{selector}: {e}"));
            assert_eq!(parsed.matches(&endpoint), holds, "{selector}");
        }
    }

    #[test]
    fn invalid_selector_is_rejected_and_names_the_part() {
        for (selector, part) in [
            ("a,,b", "``"),
            (",", "``"),
            ("=b", "``"),
            ("a=b=c", "b=c"),
            ("a b", "a b"),
            ("a in x", "a in x"),
            ("a in (x", "closing"),
            ("a in (x))", "pair"),
            ("a in ((x))", "pair"),
            ("a of (x)", "a of (x)"),
            ("a in (x) y", "goes on"),
            ("in (x)", "in (x)"),
            ("!", "``"),
            ("a=ü", "ü"),
            ("a>1", "a>1"),
        ] {
            let error = LabelSelector::parse(selector).expect_err(selector);
            assert!(error.contains(part), "{selector}: {error}");
        }
        let long = vec!["a=b"; MAX_REQUIREMENTS + 1].join(",");
        assert!(LabelSelector::parse(&long).is_err());
        let wide = format!("a in ({})", vec!["b"; MAX_VALUES + 1].join(","));
        assert!(LabelSelector::parse(&wide).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_rejected(text in "[ab=!,() in]{0,24}") {
            if let Ok(selector) = LabelSelector::parse(&text) {
                let _ = selector.matches(&labels(&[("a", "b")]));
            }
        }
    }
}
