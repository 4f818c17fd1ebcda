//! Weighted sums of strategies, such as `prefix-cache:2,least-latency`, wherever a strategy's name is allowed.
//!
//! ```text
//! norm  = each part's figures scaled to 0..=1, the best 1; equal figures are all 1; a missing or infinite figure is 0
//! total = sum of weight / all weights x norm; the greatest wins, ties (within 1e-9) at random
//! ```
//!
//! Weights are integers from 0 to 1,000,000, 1 by default; a part of weight 0 is dropped. Strategies that own the
//! whole decision (`pd`, `slo` and its variants) cannot be combined: the first of them decides alone. Parameters are
//! a mapping from a part's name to its own.
//! Every part records every decision and adds its headers to the response. When not: scaling makes small differences
//! as decisive as large ones; `pipeline` adds up unscaled scores.
//! Source: AIBrix, weighted multi-strategy routing (development head, August 2026). There, `vtc-basic` records
//! nothing as a part of a sum.

use crate::digest::Digest;
use crate::plugin::{Better, ParamError, ResponseHeaders, UserCharge};
use crate::registry::{BuildError, Registry, canonical};
use crate::{Candidate, PickContext, Ranking, Reads, Signal, Strategy};
use attache_pool::{Endpoint, PoolSnapshot};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::PickRng;
use rand::RngExt;
use serde_json::Value;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::time::Duration;

/// The greatest weight of a part.
pub const MAX_WEIGHT: u32 = 1_000_000;
/// 16 parts, more than a useful sum has.
pub const MAX_PARTS: usize = 16;
/// Strategies that own the whole decision.
const EXCLUSIVE: &[&str] = &["pd", "slo", "slo-least-load", "slo-least-load-pulling", "slo-pack-load"];
/// Totals that differ by less are equal.
const TIE: f64 = 1e-9;

/// Whether `name` is a list of weighted parts rather than one strategy.
#[must_use]
pub fn is_weighted(name: &str) -> bool {
    name.contains([',', ':'])
}

/// The parts in `text`, with their weights.
///
/// # Errors
/// A part is invalid; the error names it and what is allowed.
pub fn parse(text: &str) -> Result<SmallVec<[(&str, u32); 4]>, ParamError> {
    let wrong = |message: String| Err(ParamError::new(message));
    let mut parts: SmallVec<[(&str, u32); 4]> = SmallVec::new();
    for item in text.split(',') {
        let item = item.trim();
        let (name, weight) = item.split_once(':').unwrap_or((item, "1"));
        let (name, weight) = (canonical(name.trim()), weight.trim());
        let shown: String = item.chars().filter(|c| !c.is_control()).take(64).collect();
        if name.is_empty() {
            return wrong(format!("`{shown}` names no strategy; as in `prefix-cache:2,least-latency`"));
        }
        let digits = !weight.is_empty() && weight.bytes().all(|b| b.is_ascii_digit());
        let Some(weight) = weight.parse().ok().filter(|w| digits && *w <= MAX_WEIGHT) else {
            return wrong(format!("`{shown}` has no weight that can be used; allowed: 0 to {MAX_WEIGHT}, whole"));
        };
        if parts.len() >= MAX_PARTS {
            return wrong(format!("more than {MAX_PARTS} strategies"));
        }
        match parts.iter_mut().find(|(n, _)| *n == name) {
            Some((_, twice)) => *twice += weight,
            None => parts.push((name, weight)),
        }
    }
    if let Some(alone) = parts.iter().find(|(name, _)| EXCLUSIVE.contains(name)) {
        return Ok(smallvec![(alone.0, 1)]);
    }
    parts.retain(|(_, weight)| *weight > 0);
    if parts.is_empty() { wrong("all weights are 0; one must be greater".to_owned()) } else { Ok(parts) }
}

/// One part of a sum.
#[derive(Clone, Debug)]
pub struct WeightedPart {
    /// Name of the strategy in the registry.
    pub name: &'static str,
    /// Above 0.
    pub weight: u32,
    /// The strategy; other sums may share it.
    pub strategy: Arc<dyn Strategy>,
}

/// A weighted sum of strategies.
#[derive(Debug)]
pub struct Weighted {
    parts: Vec<WeightedPart>,
}

impl Weighted {
    /// A sum of `parts`.
    ///
    /// # Errors
    /// A part has no score per endpoint.
    pub fn of(parts: Vec<WeightedPart>) -> Result<Self, ParamError> {
        let nobody = PoolSnapshot::default();
        let cx = PickContext::new(&nobody, Timestamp(0), Duration::ZERO);
        match parts.iter().find(|p| p.strategy.scores(&cx, &[], &mut []).is_none()) {
            Some(p) => Err(ParamError::new(format!(
                "`{}` has no figure an endpoint, so that it can't be added to others",
                p.name
            ))),
            None => Ok(Self { parts }),
        }
    }

    /// Builds the parts of `text` from `registry`; `parameters` maps their names to their parameters.
    ///
    /// # Errors
    /// As [`parse`], or a part's parameters are invalid.
    pub fn build(text: &str, parameters: &Value, registry: &Registry) -> Result<Box<dyn Strategy>, BuildError> {
        let named = parse(text)?;
        let none = serde_json::Map::new();
        let parameters = match parameters {
            Value::Null => &none,
            Value::Object(map) => map,
            _ => return Err(ParamError::new("parameters of several strategies are a mapping by their names").into()),
        };
        if let Some(key) = parameters.keys().find(|k| !named.iter().any(|(name, _)| name == k)) {
            return Err(ParamError::new(format!("parameters for `{key}`, which is not among the strategies"))
                .under(key)
                .into());
        }
        let alone = named.len() == 1;
        let mut parts = Vec::with_capacity(named.len());
        for (name, weight) in named {
            let descriptor = registry.strategy(name).ok_or_else(|| BuildError::Unknown(name.to_owned()))?;
            let built = (descriptor.build)(parameters.get(name).unwrap_or(&Value::Null), registry);
            let strategy = built.map_err(|e| e.named(name).under(name))?;
            if alone {
                return Ok(strategy);
            }
            parts.push(WeightedPart { name: descriptor.name, weight, strategy: strategy.into() });
        }
        Ok(Box::new(Self::of(parts)?))
    }

    /// Adds each candidate's total to `totals`, which must be zeros. Passes the scaled figures of every part to
    /// `each`.
    /// Returns the signal that a part without any figure lacks, and whether some part has figures.
    fn add_up(
        &self,
        cx: &PickContext<'_>,
        candidates: &[Candidate<'_>],
        totals: &mut [f64],
        mut each: impl FnMut(&WeightedPart, f64, &[f64]),
    ) -> (Option<Signal>, bool) {
        let all: f64 = self.parts.iter().map(|p| f64::from(p.weight)).sum();
        let (mut lacking, mut known) = (None, false);
        let mut figures: SmallVec<[f64; 16]> = smallvec![f64::NAN; candidates.len()];
        for part in &self.parts {
            figures.fill(f64::NAN);
            let better = part.strategy.scores(cx, candidates, &mut figures).unwrap_or(Better::Higher);
            if spread(&mut figures, better) {
                known = true;
            } else {
                let signal = if part.strategy.reads().prefix { Signal::Prefix } else { Signal::Metrics };
                lacking.get_or_insert(signal);
            }
            let weight = f64::from(part.weight) / all;
            each(part, weight, &figures);
            for (total, figure) in totals.iter_mut().zip(&figures) {
                *total += weight * figure;
            }
        }
        (lacking, known)
    }
}

/// Scales figures to 0..=1, the best at 1. Returns false if there is none.
fn spread(figures: &mut [f64], better: Better) -> bool {
    let finite = || figures.iter().copied().filter(|f| f.is_finite());
    let (least, greatest) = (finite().fold(f64::INFINITY, f64::min), finite().fold(f64::NEG_INFINITY, f64::max));
    // Halved, since the difference of two finite figures may be infinite.
    let width = greatest / 2.0 - least / 2.0;
    for figure in figures.iter_mut() {
        *figure = match better {
            _ if !figure.is_finite() => 0.0,
            _ if width <= 0.0 => 1.0,
            Better::Higher => (*figure / 2.0 - least / 2.0) / width,
            Better::Lower => (greatest / 2.0 - *figure / 2.0) / width,
        };
    }
    least <= greatest
}

impl Strategy for Weighted {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        let mut totals: SmallVec<[f64; 16]> = smallvec![0.0; candidates.len()];
        let (lacking, known) = self.add_up(cx, candidates, &mut totals, |part, weight, figures| {
            ranking.note(part.name, weight, candidates, |i| figures.get(i).copied().unwrap_or(f64::NAN));
        });
        if let Some(signal) = lacking {
            ranking.lacks(signal);
        }
        ranking.because(if known { "greatest weighted sum" } else { "no endpoint has a score; fewest requests" });
        let key = |(c, total): (&Candidate<'_>, &f64)| {
            if !known {
                return u64::from(c.requests);
            }
            // Totals are at most 1, up to rounding; the distance to 1 is small and not negative.
            ((1.0 - total).max(0.0) / TIE).round() as u64
        };
        // 1e9 steps and 32 random bits fit into 64 bits.
        let mut drawn = |key: u64| (key << 32) | u64::from(rng.random::<u32>());
        let keyed = candidates.iter().zip(&totals).map(|pair| (drawn(key(pair)), &pair.0.state.endpoint));
        let distance = |key: u64| (key >> 32) as f64 * TIE;
        ranking.push_lowest_scores(keyed, |first, second| known.then(|| distance(*second) - distance(*first)));
    }

    fn scores(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f64]) -> Option<Better> {
        out.fill(0.0);
        let (_, known) = self.add_up(cx, candidates, out, |_, _, _| {});
        if !known {
            out.fill(f64::NAN);
        }
        Some(Better::Higher)
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) -> Option<Digest> {
        for part in &self.parts {
            // Strategies with a score have no digest to move.
            part.strategy.picked(cx, endpoint);
        }
        None
    }

    fn charge(&self, cx: &PickContext<'_>) -> Option<UserCharge> {
        self.parts.iter().find_map(|part| part.strategy.charge(cx))
    }

    fn charged(&self, charge: UserCharge, now: Timestamp) {
        self.parts.iter().for_each(|part| part.strategy.charged(charge, now));
    }

    fn forget(&self, lost: &[EndpointId]) {
        self.parts.iter().for_each(|p| p.strategy.forget(lost));
    }

    fn end_session(&self, tenant: Option<&str>, id: &str) {
        self.parts.iter().for_each(|p| p.strategy.end_session(tenant, id));
    }

    fn response_headers(&self, served: &Endpoint, out: &mut ResponseHeaders) {
        self.parts.iter().for_each(|p| p.strategy.response_headers(served, out));
    }

    fn reads(&self) -> Reads {
        self.parts.iter().fold(Reads::NOTHING, |all, p| all.and(p.strategy.reads()))
    }
}

#[cfg(test)]
mod tests;
