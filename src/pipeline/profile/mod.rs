//! The profile handlers of the pipeline, one file each: they say which profile decides about a request, and which others choose the servers
//! of its other stages. The deciders, which say whether there is such a stage, are in [`decider`].

pub mod data_parallel;
pub mod decider;
pub mod disagg;
pub mod header;
pub mod single;

use attache_scheduling::plugin::ParamError;

/// The position of the profile called `name`.
fn position(profiles: &[&str], name: &str) -> Result<usize, ParamError> {
    let found = profiles.iter().position(|profile| *profile == name);
    found.ok_or_else(|| ParamError::new(format!("no profile is called `{name}`; there are: {}", profiles.join(", "))))
}

/// The only profile.
fn only(profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
    match profiles {
        [_] => Ok(vec![0]),
        _ => Err(ParamError::new(format!("it works with one profile; there are: {}", profiles.join(", ")))),
    }
}
