//! `attache replay --fit-profile`: derives an engine's constants from a recording.

use super::{EXIT_INTERNAL, ReplayArgs, ReplayFailure, plan};
use crate::cli::output::print;
use anyhow::Context;
use attache_replay::fit::{answers, fit};
use attache_replay::record;
use attache_sim::profiles::file;
use std::path::Path;

/// Fits `recording` and writes the profile; always true.
pub(super) fn run(args: &ReplayArgs, recording: &Path) -> Result<bool, ReplayFailure> {
    let base = args.profile.trim();
    let engine =
        plan::engine(base).context("--profile is the base of what is fitted, one kind of server without a number");
    let engine = engine.map_err(ReplayFailure::usage)?;
    let load = record::open(recording).and_then(|source| answers::read_responses(source, args.pool.as_deref()));
    let load = load.with_context(|| recording.display().to_string()).map_err(ReplayFailure::usage)?;
    let fitted =
        fit(&load, &engine, base).with_context(|| recording.display().to_string()).map_err(ReplayFailure::usage)?;
    print(&fitted);
    if let Some(out) = &args.profile_out {
        let text = file::write(&fitted.engine, &format!("{}:\n{fitted}", recording.display()));
        std::fs::write(out, text)
            .with_context(|| format!("can't write {}", out.display()))
            .map_err(|e| ReplayFailure(EXIT_INTERNAL, e))?;
    }
    Ok(true)
}
