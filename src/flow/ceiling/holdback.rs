//! `priority-holdback-policy`: the lower a band, the lower its ceiling, so that capacity is
//! left for more important requests.
//!
//! ```text
//! rank      c = maxCeiling − i · (maxCeiling − minCeiling) / (bands − 1), the highest band is i = 0
//! value     c = minCeiling + (priority − least) / (greatest − least) · (maxCeiling − minCeiling)
//! explicit  c = ceilings[priority]; 0, closed, for a priority that is not named
//! ```
//!
//! When not: no burst must be served at once; the capacity that is kept free idles. Source: llm-d.

use super::{Ceiling, Ceilings};
use crate::registry::PolicyDescriptor;
use attache_scheduling::plugin::{ParamError, params, section};
use attache_types::{keywords, parameters};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Ceiling> = PolicyDescriptor {
    name: "priority-holdback-policy",
    aliases: &["holdback"],
    summary: "Lower bands have lower ceilings, so that capacity is left for higher ones.",
    source: "llm-d `priority-holdback-policy`",
    parameters: section::<Params>,
    build: |value: &Value| Holdback::new(value).map(|p| Box::new(p) as Box<dyn Ceiling>),
};

/// 1, as llm-d has it: the highest band may use all of the pool.
pub(crate) const DEFAULT_MAX_CEILING: f64 = 1.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    Rank,
    Value,
    Explicit,
}

#[derive(Clone, Copy, Debug)]
enum HoldbackShape {
    Linear,
}

keywords! {
    Domain: "rank" => Rank, "value" => Value, "explicit" => Explicit;
    HoldbackShape: "linear" => Linear;
}

parameters! {
    struct Params {
        /// Shape of the ceilings between the highest and the lowest band. There is only one.
        "shape" => shape: Option<HoldbackShape> { absent: "`linear`"; },
        /// What determines a ceiling: the rank of its band, the value of its priority, or `ceilings`.
        "domain" => domain: Domain { default: Domain::Rank; },
        /// Ceiling of the lowest band, at most `maxCeiling`.
        "minCeiling" => min_ceiling: Option<f64> {
            absent: "required, unless `domain` is `explicit`"; range: 0.0..1.0; unit: "share";
        },
        /// Ceiling of the highest band. At 1 it may use all of the pool.
        "maxCeiling" => max_ceiling: Option<f64> {
            absent: "`1`"; range: (Excluded(0.0), Included(1.0)); unit: "share";
        },
        /// With `domain: explicit`: a ceiling of 0 to 1 for each priority; lower priorities get no more. Other
        /// priorities are closed.
        "ceilings" => ceilings: Option<BTreeMap<String, f64>> { absent: "none"; unit: "share"; },
    }
}

#[derive(Debug)]
enum Holdback {
    Between { by_value: bool, least: f64, greatest: f64 },
    Explicit(BTreeMap<i32, f64>),
}

impl Holdback {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { shape, domain, min_ceiling, max_ceiling, ceilings } = params(parameters)?;
        if domain == Domain::Explicit {
            if shape.is_some() || min_ceiling.is_some() || max_ceiling.is_some() {
                return Err(ParamError::new(
                    "`shape`, `minCeiling` and `maxCeiling` do not go with `domain: explicit`",
                ));
            }
            return explicit(ceilings);
        }
        if ceilings.is_some() {
            return Err(ParamError::new("`ceilings` goes with `domain: explicit` only").under("ceilings"));
        }
        let Some(least) = min_ceiling else {
            return Err(ParamError::new("`minCeiling` is missing; the ceiling of the lowest band is needed"));
        };
        let greatest = max_ceiling.unwrap_or(DEFAULT_MAX_CEILING);
        if greatest < least {
            return Err(ParamError::value("maxCeiling", greatest, "`minCeiling` to 1 is allowed"));
        }
        Ok(Self::Between { by_value: domain == Domain::Value, least, greatest })
    }
}

fn explicit(ceilings: Option<BTreeMap<String, f64>>) -> Result<Holdback, ParamError> {
    let Some(named) = ceilings.filter(|c| !c.is_empty()) else {
        return Err(ParamError::new(
            "`ceilings` is missing; with `domain: explicit` it names a ceiling for each priority",
        ));
    };
    let mut ceilings = BTreeMap::new();
    for (priority, ceiling) in named {
        let number = priority.parse::<i32>();
        let number = number.map_err(|_| {
            ParamError::new(format!("`ceilings` names `{priority}`; a priority is an integer")).under("ceilings")
        })?;
        if !(0.0..=1.0).contains(&ceiling) {
            let message = format!("`ceilings.{priority}` is {ceiling}; 0 to 1 is allowed");
            return Err(ParamError::new(message).under(priority).under("ceilings"));
        }
        ceilings.insert(number, ceiling);
    }
    if !ceilings.values().is_sorted() {
        return Err(ParamError::new("`ceilings` give a lower priority more than a higher one").under("ceilings"));
    }
    Ok(Holdback::Explicit(ceilings))
}

impl Ceiling for Holdback {
    fn ceilings(&self, _: f64, priorities: &[i32]) -> Ceilings {
        match self {
            Self::Explicit(named) => {
                // A closed band closes all below it, because bands are served in order.
                let mut lowest = f64::INFINITY;
                let each = priorities.iter().map(|p| named.get(p).copied().unwrap_or(0.0));
                each.map(|c| {
                    lowest = lowest.min(c);
                    lowest
                })
                .collect()
            }
            Self::Between { by_value, least, greatest } => {
                let (first, last) = (priorities.first().copied(), priorities.last().copied());
                let (first, last) = (f64::from(first.unwrap_or(0)), f64::from(last.unwrap_or(0)));
                let steps = priorities.len().saturating_sub(1).max(1) as f64;
                let part = |(i, priority): (usize, &i32)| match *by_value {
                    true if first > last => (f64::from(*priority) - last) / (first - last),
                    true => 1.0,
                    false => 1.0 - i as f64 / steps,
                };
                priorities.iter().enumerate().map(part).map(|part| *least + part * (*greatest - *least)).collect()
            }
        }
    }
}
