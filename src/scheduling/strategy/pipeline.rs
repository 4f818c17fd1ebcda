//! `pipeline`: weighted scorers, then the endpoint with the greatest sum; ties drawn at random.
//!
//! ```yaml
//! strategy:
//!   name: pipeline
//!   parameters: {scorers: [{type: queue-scorer, weight: 2}, {type: kv-cache-utilization-scorer, weight: 2}]}
//! ```
//!
//! Scores are clamped to 0..=1 (NaN counts as 0), multiplied by their weight and added in the order of the file, so that a decision can be
//! repeated bit for bit. When not: one figure decides; then the strategy of that figure is cheaper.
//! Source: the GIE scheduler with `max-score-picker`.

use crate::rng::PickRng;
use crate::scheduling::plugin::{Descriptor, ParamError, Plugin, Scorer, params};
use crate::scheduling::{Candidate, PickContext, Ranking, Reads, Strategy, registry};
use rand::RngExt;
use serde::Deserialize;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: Descriptor = Descriptor {
    name: "pipeline",
    summary: "Adds up weighted scorers and picks the greatest sum; ties at random.",
    source: "the GIE scheduler with `max-score-picker`",
    build: |value| params::<Params>(value)?.build().map(|p| Box::new(p) as Box<dyn Strategy>),
};

/// What the file may say.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Params {
    scorers: Vec<ScorerParams>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScorerParams {
    r#type: String,
    #[serde(default = "one")]
    weight: f32,
    #[serde(default)]
    parameters: serde_json::Value,
}

fn one() -> f32 {
    1.0
}

/// GIE's own default.
impl Default for Params {
    fn default() -> Self {
        let scorer =
            |name: &str, weight| ScorerParams { r#type: name.to_owned(), weight, parameters: serde_json::Value::Null };
        Self {
            scorers: vec![
                scorer("queue-scorer", 2.0),
                scorer("kv-cache-utilization-scorer", 2.0),
                scorer("prefix-cache-scorer", 3.0),
            ],
        }
    }
}

impl Params {
    fn build(self) -> Result<Pipeline, ParamError> {
        let mut scorers = Vec::with_capacity(self.scorers.len());
        for s in self.scorers {
            let Some(descriptor) = registry::plugin(&s.r#type) else {
                let known: Vec<&str> = registry::PLUGINS.iter().map(|d| d.name).collect();
                return Err(ParamError(format!("unknown scorer `{}`; known: {}", s.r#type, known.join(", "))));
            };
            if !s.weight.is_finite() || s.weight < 0.0 {
                return Err(ParamError(format!("weight of `{}` is {}; 0 or more is allowed", s.r#type, s.weight)));
            }
            match (descriptor.build)(&s.parameters)? {
                Plugin::Scorer(scorer) | Plugin::FilterAndScorer(_, scorer) => scorers.push((scorer, s.weight)),
                _ => return Err(ParamError(format!("`{}` is no scorer", s.r#type))),
            }
        }
        if scorers.is_empty() {
            return Err(ParamError("`scorers` is empty; at least one is needed".to_owned()));
        }
        Ok(Pipeline { scorers })
    }
}

#[derive(Debug)]
struct Pipeline {
    scorers: Vec<(Arc<dyn Scorer>, f32)>,
}

impl Strategy for Pipeline {
    fn reads(&self) -> Reads {
        self.scorers.iter().fold(Reads::NOTHING, |all, (scorer, _)| all.and(scorer.reads()))
    }

    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], rng: &mut PickRng, ranking: &mut Ranking) {
        ranking.because("greatest score");
        let mut sums: SmallVec<[f32; 16]> = smallvec![0.0; candidates.len()];
        let mut scores: SmallVec<[f32; 16]> = smallvec![0.0; candidates.len()];
        for (scorer, weight) in &self.scorers {
            scorer.score(cx, candidates, &mut scores);
            for (sum, score) in sums.iter_mut().zip(&scores) {
                *sum += weight * if score.is_nan() { 0.0 } else { score.clamp(0.0, 1.0) };
            }
        }
        let mut order: SmallVec<[(f32, u32, usize); 16]> =
            sums.iter().enumerate().map(|(i, sum)| (*sum, rng.random(), i)).collect();
        order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for (_, _, i) in order.into_iter().take(ranking.wanted()) {
            if let Some(candidate) = candidates.get(i) {
                ranking.push(&candidate.state.endpoint);
            }
        }
    }
}
