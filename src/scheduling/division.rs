//! How a profile handler splits requests over servers; the pipeline reads it when it is built.

use crate::plugin::StageDecider;
use std::sync::Arc;

/// What decides how a pipeline's requests are split.
#[derive(Clone, Debug)]
pub enum Division {
    /// The pool's decider. One profile ranks both sides.
    ByPool,
    /// The caller: each stage arrives as a request of its own, and its profile filters by role.
    ByCaller,
    /// The handler: other profiles choose the servers of the other stages.
    Stages(Stages),
}

/// The stages besides decoding.
#[derive(Clone, Debug)]
pub struct Stages {
    /// Prefill of the prompt.
    pub prefill: Option<StageProfile>,
    /// Encoding of images, sounds and videos.
    pub encode: Option<StageProfile>,
    /// Whether the prefill server is chosen before the decode server, which can then be near it.
    pub prefill_first: bool,
}

/// One stage, by the names in the configuration.
#[derive(Clone, Debug)]
pub struct StageProfile {
    /// Profile that chooses the stage's server. Without such a profile, the stage is dropped.
    pub profile: String,
    /// Decider of whether the stage runs; `None`: it always runs.
    pub decider: Option<DeciderName>,
}

/// A decider, by its name.
#[derive(Clone, Debug)]
pub struct DeciderName {
    /// The plugin's name.
    pub name: String,
    /// Decider to use if no plugin has this name; `None` makes a missing plugin an error.
    pub otherwise: Option<Arc<dyn StageDecider>>,
}

impl Stages {
    /// The configured stages.
    pub fn iter(&self) -> impl Iterator<Item = &StageProfile> {
        self.prefill.iter().chain(&self.encode)
    }
}
