//! `context-length-aware`: endpoints that say by label for which prompt lengths they are meant; a scorer, and a filter when asked.
//!
//! ```text
//! label `llm-d.ai/context-length-range: "min-max"`, tokens, both ends included
//! in range      0.3 + 0.7 * (0.7 / (1 + width / 10,000) + 0.3 * (max − length) / width)      a range of one length: 1
//! out of range  0.3 / (1 + distance / 1,000)
//! no label      0.5, and always kept; a label that is no range: 0, and never kept
//! ```
//!
//! Narrow ranges and room above the prompt score higher, and what is in range is above all that is not. With `enableFiltering` what is out
//! of range is also dropped. When not: the servers are alike. Source: llm-d `context-length-aware`.

use attache_pool::Endpoint;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use serde::Deserialize;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "context-length-aware",
    aliases: &[],
    kind: "filter, scorer",
    summary: "Prefers, or keeps, endpoints that are labelled for the prompt's length.",
    source: "llm-d `context-length-aware`",
    build: |value| {
        let made = Arc::new(params::<Params>(value)?.build()?);
        Ok(Plugin::FilterAndScorer(made.clone(), made))
    },
};

/// llm-d's label for a range of prompt lengths.
pub const DEFAULT_RANGE_LABEL: &str = "llm-d.ai/context-length-range";
/// Everything in range is above it, everything out of range at most it.
const IN_RANGE: f64 = 0.3;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    label: String,
    enable_filtering: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self { label: DEFAULT_RANGE_LABEL.to_owned(), enable_filtering: false }
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

/// What an endpoint says it is meant for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Meant {
    Anything,
    For(Lengths),
    /// Its label can't be read.
    Unreadable,
}

/// Prompt lengths, tokens, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Lengths {
    min: u32,
    max: u32,
}

impl Lengths {
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
    fn meant(&self, endpoint: &Endpoint) -> Meant {
        match endpoint.spec.labels.get(self.label.as_str()) {
            None => Meant::Anything,
            Some(text) => Lengths::parse(text).map_or(Meant::Unreadable, Meant::For),
        }
    }
}

impl Filter for ContextLengthAware {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        if !self.filters {
            return;
        }
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            *keep = match self.meant(&candidate.state.endpoint) {
                Meant::Anything => true,
                Meant::For(lengths) => lengths.holds(cx.request.prompt_tokens),
                Meant::Unreadable => false,
            };
        }
    }
}

impl Scorer for ContextLengthAware {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = match self.meant(&candidate.state.endpoint) {
                Meant::Anything => 0.5,
                Meant::For(lengths) => lengths.score(cx.request.prompt_tokens) as f32,
                Meant::Unreadable => 0.0,
            };
        }
    }
}
