//! `attache replay --from-record`: decides a recorded run again.

use super::{EXIT_CONFIG, ReplayFailure, playable};
use crate::cli::output::{colour, message, print};
use crate::cli::source::ReloadSource;
use crate::plugins::registry;
use anyhow::Context;
use attache_replay::record::{Summary, replay_file};
use std::path::Path;

/// Decides again the requests in `file`, with its own configuration or with `config`; returns
/// whether all decisions are equal.
pub(super) fn run(file: &Path, config: Option<&Path>) -> Result<bool, ReplayFailure> {
    let other = match config {
        None => None,
        Some(path) => {
            let reading = ReloadSource::of_file_alone(path.to_owned()).read();
            message(reading.render(colour()));
            let unusable = || format!("{} can't be used", path.display());
            let settings = reading.settings.with_context(unusable).map_err(|e| ReplayFailure(EXIT_CONFIG, e))?;
            let playable = settings.pools.iter().try_for_each(playable).with_context(unusable);
            playable.map_err(|e| ReplayFailure(EXIT_CONFIG, e))?;
            Some(settings)
        }
    };
    let summary = replay_file(file, other.as_ref(), &registry()).with_context(|| format!("{}", file.display()));
    let summary: Summary = summary.map_err(ReplayFailure::usage)?;
    print(&summary);
    // With another configuration, decisions may differ.
    Ok(config.is_some() || summary.is_exact())
}
