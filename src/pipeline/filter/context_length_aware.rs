//! `context-length-aware`: endpoints whose label gives the prompt lengths they are for; a scorer, and a filter on
//! request.
//!
//! ```text
//! label `llm-d.ai/context-length-range: "min-max"`, tokens, both inclusive
//! in range      0.3 + 0.7 * (0.7 / (1 + width / 10,000) + 0.3 * (max − length) / width)      a range of one length: 1
//! out of range  0.3 / (1 + distance / 1,000)
//! no label      0.5, and always kept; an invalid label: 0, and never kept
//! ```
//!
//! Narrow ranges and ranges that end well above the prompt score higher. Every range that contains the prompt scores
//! higher than those that do not; `enableFiltering` also drops the latter. When not: all servers are equal. Source:
//! llm-d `context-length-aware`.

use attache_pool::Endpoint;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "context-length-aware",
    aliases: &[],
    kind: "filter, scorer",
    summary: "Prefers, or keeps, endpoints that are labelled for the prompt's length.",
    source: "llm-d `context-length-aware`",
    parameters: section::<Params>,
    build: |value| {
        let made = Arc::new(params::<Params>(value)?.build()?);
        Ok(Plugin::FilterAndScorer(made.clone(), made))
    },
};

/// llm-d's label for a range of prompt lengths.
pub const DEFAULT_RANGE_LABEL: &str = "llm-d.ai/context-length-range";
/// Ranges that contain the prompt score above this, others at most this.
const IN_RANGE: f64 = 0.3;

parameters! {
    struct Params {
        /// Label with the range of prompt lengths of an endpoint: `min-max`, in tokens, both inclusive.
        "label" => label: String { default: DEFAULT_RANGE_LABEL.to_owned(); },
        /// Whether to drop endpoints whose range does not contain the prompt's length or is invalid. Endpoints without
        /// the label stay.
        "enableFiltering" => enable_filtering: bool { default: false; },
    }
}

impl Params {
    fn build(self) -> Result<ContextLengthAware, ParamError> {
        if self.label.is_empty() {
            return Err(ParamError::new("`label` is empty; the name of a label is needed").under("label"));
        }
        Ok(ContextLengthAware { label: self.label, filters: self.enable_filtering })
    }
}

#[derive(Debug)]
struct ContextLengthAware {
    label: String,
    filters: bool,
}

/// The prompt lengths that an endpoint is for, from its label.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LengthLabel {
    Absent,
    Range(LengthRange),
    /// The label is not a range.
    Invalid,
}

/// Prompt lengths in tokens, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LengthRange {
    min: u32,
    max: u32,
}

impl LengthRange {
    fn parse(text: &str) -> Option<Self> {
        let (min, max) = text.split_once('-')?;
        let (min, max) = (min.trim().parse().ok()?, max.trim().parse().ok()?);
        (min <= max).then_some(Self { min, max })
    }

    fn holds(self, length: u32) -> bool {
        (self.min..=self.max).contains(&length)
    }

    fn score(self, length: u32) -> f64 {
        if !self.holds(length) {
            let distance = length.saturating_sub(self.max).max(self.min.saturating_sub(length));
            return IN_RANGE / (1.0 + f64::from(distance) / 1_000.0);
        }
        let width = f64::from(self.max - self.min);
        if width == 0.0 {
            return 1.0;
        }
        let room = f64::from(self.max - length) / width;
        IN_RANGE + (1.0 - IN_RANGE) * (0.7 / (1.0 + width / 10_000.0) + 0.3 * room)
    }
}

impl ContextLengthAware {
    fn length_label(&self, endpoint: &Endpoint) -> LengthLabel {
        match endpoint.spec.labels.get(self.label.as_str()) {
            None => LengthLabel::Absent,
            Some(text) => LengthRange::parse(text).map_or(LengthLabel::Invalid, LengthLabel::Range),
        }
    }
}

impl Filter for ContextLengthAware {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        if !self.filters {
            return;
        }
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            *keep = match self.length_label(&candidate.state.endpoint) {
                LengthLabel::Absent => true,
                LengthLabel::Range(lengths) => lengths.holds(cx.request.prompt_tokens),
                LengthLabel::Invalid => false,
            };
        }
    }
}

impl Scorer for ContextLengthAware {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = match self.length_label(&candidate.state.endpoint) {
                LengthLabel::Absent => 0.5,
                LengthLabel::Range(lengths) => lengths.score(cx.request.prompt_tokens) as f32,
                LengthLabel::Invalid => 0.0,
            };
        }
    }
}
