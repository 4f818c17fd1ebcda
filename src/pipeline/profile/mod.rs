//! The profile handlers of the pipeline, one file each. A handler chooses the profile for a request, and the profiles
//! of its other stages. The deciders in [`decider`] say whether such a stage runs.

pub mod data_parallel;
pub mod decider;
pub mod disagg;
pub mod header;
pub mod single;

use attache_scheduling::plugin::ParamError;

/// Position of the profile with this name.
fn position(profiles: &[&str], name: &str) -> Result<usize, ParamError> {
    let found = profiles.iter().position(|profile| *profile == name);
    found.ok_or_else(|| ParamError::new(format!("no profile is called `{name}`; there are: {}", profiles.join(", "))))
}

/// Position of the only profile; an error if there are several.
fn only(profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
    match profiles {
        [_] => Ok(vec![0]),
        _ => Err(ParamError::new(format!("it works with one profile; there are: {}", profiles.join(", ")))),
    }
}
