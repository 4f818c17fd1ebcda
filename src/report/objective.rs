//! Whether a pool's objective was met, as figures and as columns. Called by [`super::json`] and [`super::table`]; pure.

use crate::tally::objective_counts::ObjectiveCounts;
use serde::{Deserialize, Serialize};

/// A pool's objective, and how its requests fared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveFigures {
    /// Weight of the time to the first token.
    pub ttft_weight: f64,
    /// Weight of the time of further tokens.
    pub tpot_weight: f64,
    /// Mean of both times by their weights, of requests that were answered.
    pub weighted_mean_seconds: Option<f64>,
    /// Targets, and the share of the requests that met them; absent where the objective has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slo: Option<SloFigures>,
}

/// Targets, and the share of the requests that met them. Requests that were refused or lost missed them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SloFigures {
    /// The longest time to the first token that meets it.
    pub ttft_seconds: Option<f64>,
    /// The longest time between tokens that meets it.
    pub tpot_seconds: Option<f64>,
    /// Part of the requests that should meet both.
    pub share: f64,
    /// Part of the requests that met the first.
    pub ttft_met: Option<f64>,
    /// Part of the requests that met the second.
    pub tpot_met: Option<f64>,
    /// Part of the requests that met both.
    pub share_met: Option<f64>,
    /// Whether these are as many as should.
    pub met: Option<bool>,
}

impl ObjectiveFigures {
    /// The figures of one run.
    #[must_use]
    pub fn of(counts: &ObjectiveCounts) -> Self {
        let objective = counts.objective();
        let slo = objective.slo.map(|slo| SloFigures {
            ttft_seconds: slo.ttft.map(|time| time.as_secs_f64()),
            tpot_seconds: slo.tpot.map(|time| time.as_secs_f64()),
            share: slo.share,
            ttft_met: counts.first_met(),
            tpot_met: counts.further_met(),
            share_met: counts.share_met(),
            met: counts.is_met(),
        });
        Self {
            ttft_weight: objective.ttft,
            tpot_weight: objective.tpot,
            weighted_mean_seconds: counts.weighted_mean(),
            slo,
        }
    }
}

impl SloFigures {
    /// Whether it was met, in a word.
    #[must_use]
    pub fn verdict(&self) -> Option<&'static str> {
        self.met.map(|met| if met { "met" } else { "missed" })
    }
}
