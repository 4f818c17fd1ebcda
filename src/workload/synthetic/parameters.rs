//! Parameters of workloads: `key=value`, several with commas between them.

use super::Descriptor;
use crate::draw::{SPREAD_SPELLING, Spread};
use attache_types::params::ParamError;
use attache_types::spelling::closest;
use std::ops::RangeInclusive;

/// Prompts and answers of more tokens are misprints.
pub(super) const MAX_TOKENS: f64 = 10_000_000.0;

/// Something that can be set.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The key: snake_case, unique in its workload.
    pub name: &'static str,
    /// The value when it is not given, spelled as it would be; empty for none.
    pub default: &'static str,
    /// What it means, and why its default is what it is.
    pub meaning: &'static str,
}

/// The values of a workload's parameters.
#[derive(Clone, Debug)]
pub struct Values<'a> {
    workload: &'static Descriptor,
    given: Vec<(&'a str, &'a str)>,
}

impl<'a> Values<'a> {
    /// Reads `key=value,key=value`; nothing when it is empty.
    ///
    /// # Errors
    /// When a key is unknown or comes twice, or has no value.
    pub fn read(workload: &'static Descriptor, text: &'a str) -> Result<Self, ParamError> {
        let mut given: Vec<(&str, &str)> = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(ParamError::value("parameter", format!("`{pair}`"), "`key=value` is allowed"));
            };
            let (key, value) = (key.trim(), value.trim());
            let keys = || workload.parameters.iter().map(|p| p.name);
            if !keys().any(|known| known == key) {
                let meant = closest(key, keys()).map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
                let known = keys().collect::<Vec<_>>().join(", ");
                return Err(ParamError::new(format!("`{}` does not take `{key}`{meant} ({known})", workload.name)));
            }
            if given.iter().any(|(earlier, _)| *earlier == key) {
                return Err(ParamError::new(format!("`{key}` is given twice; once is allowed")));
            }
            given.push((key, value));
        }
        Ok(Self { workload, given })
    }

    /// Whether the user set this parameter.
    #[must_use]
    pub fn is_given(&self, name: &str) -> bool {
        self.given.iter().any(|(key, _)| *key == name)
    }

    /// The value as text, as the user or the default spells it.
    #[must_use]
    pub fn text(&self, name: &str) -> &str {
        let given = self.given.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        let default = || self.workload.parameters.iter().find(|p| p.name == name).map_or("", |p| p.default);
        given.unwrap_or_else(default)
    }

    /// The value as an integer within `range`.
    ///
    /// # Errors
    /// When it is none, or out of range.
    pub fn whole(&self, name: &str, range: RangeInclusive<u32>) -> Result<u32, ParamError> {
        let got = self.text(name);
        got.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| {
            let allowed = format!("a whole number from {} to {} is allowed", range.start(), range.end());
            ParamError::value(name, got, &allowed)
        })
    }

    /// The value as a finite number within `range`.
    ///
    /// # Errors
    /// When it is none, or out of range.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<f64, ParamError> {
        let got = self.text(name);
        got.parse().ok().filter(|value| range.contains(value)).ok_or_else(|| {
            let allowed = format!("a number from {} to {} is allowed", range.start(), range.end());
            ParamError::value(name, got, &allowed)
        })
    }

    /// The value as `true` or `false`.
    ///
    /// # Errors
    /// When the value is neither `true` nor `false`.
    pub fn flag(&self, name: &str) -> Result<bool, ParamError> {
        let got = self.text(name);
        got.parse().map_err(|_| ParamError::value(name, got, "true or false is allowed"))
    }

    /// A number of tokens, at least `least`.
    ///
    /// # Errors
    /// When it is none, or out of range.
    pub fn tokens(&self, name: &str, least: u32) -> Result<u32, ParamError> {
        self.whole(name, least..=MAX_TOKENS as u32)
    }

    /// How something is spread, with its least and greatest value in `range`.
    ///
    /// # Errors
    /// When it is no spelling of that, or an end is out of range.
    pub fn spread(&self, name: &str, range: RangeInclusive<f64>) -> Result<Spread, ParamError> {
        let got = self.text(name);
        let is_inside = |spread: &Spread| range.contains(&spread.ends().0) && range.contains(&spread.ends().1);
        Spread::parse(got).filter(is_inside).ok_or_else(|| {
            let allowed = format!("{SPREAD_SPELLING}, with values from {} to {}", range.start(), range.end());
            ParamError::value(name, got, &allowed)
        })
    }
}
