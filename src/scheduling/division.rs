//! What a profile handler says of splitting requests between servers; read by the pipeline when it is made.

use crate::plugin::StageDecider;
use std::sync::Arc;

/// Who splits the requests of a pipeline.
#[derive(Clone, Debug)]
pub enum Division {
    /// One profile orders both sides, and the pool's decider has the word.
    ByPool,
    /// Who calls: each stage comes as a request of its own, and its profile sorts out roles.
    ByCaller,
    /// Profiles of their own choose the servers of the other stages.
    Stages(Stages),
}

/// The stages beside the one that makes the answer.
#[derive(Clone, Debug)]
pub struct Stages {
    /// The prompt.
    pub prefill: Option<StageProfile>,
    /// Images and sounds.
    pub encode: Option<StageProfile>,
    /// The prompt's server is chosen before the answer's, so that the latter can stand near it.
    pub prefill_first: bool,
}

/// One of them, by names of the file.
#[derive(Clone, Debug)]
pub struct StageProfile {
    /// The profile that chooses its server. Where there is none, the stage is dropped.
    pub profile: String,
    /// Who says whether it runs; `None`: it always does.
    pub decider: Option<DeciderName>,
}

/// A decider, by its name.
#[derive(Clone, Debug)]
pub struct DeciderName {
    /// The plugin's name.
    pub name: String,
    /// What decides when no plugin is called so; `None`: the file is wrong then.
    pub otherwise: Option<Arc<dyn StageDecider>>,
}

impl Stages {
    /// Both, for what is common to them.
    pub fn iter(&self) -> impl Iterator<Item = &StageProfile> {
        self.prefill.iter().chain(&self.encode)
    }
}
