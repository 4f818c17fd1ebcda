//! `attache version`: prints version and features.

use super::output::print;
use clap::Args;
use std::process::ExitCode;

/// The features of Cargo.toml, and whether this build has them.
const FEATURES: &[(&str, bool)] = &[("full", cfg!(feature = "full"))];

/// Print the version.
#[derive(Args, Debug)]
pub(super) struct VersionArgs {
    /// Print JSON, with the features of this build
    #[arg(long)]
    json: bool,
}

pub(super) fn version(args: &VersionArgs) -> ExitCode {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        let features: Vec<&str> = FEATURES.iter().filter_map(|(name, is_built)| is_built.then_some(*name)).collect();
        print(serde_json::json!({
            "version": version,
            "features": features,
            "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            // `release/build.sh` sets both.
            "commit": option_env!("ATTACHE_COMMIT"),
            "profile": option_env!("ATTACHE_PROFILE").unwrap_or(if cfg!(debug_assertions) { "dev" } else { "release" }),
        }));
    } else {
        print(format_args!("attache {version}"));
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    #[test]
    fn version_knows_every_feature_of_the_manifest() {
        let manifest = include_str!("../../Cargo.toml");
        let section = manifest.split("\n[features]\n").nth(1).and_then(|rest| rest.split("\n[").next()).unwrap();
        let names = section.lines().filter_map(|line| line.split_once(" = ").map(|(name, _)| name));
        let mut names: Vec<&str> = names.filter(|name| !name.starts_with([' ', '#']) && *name != "default").collect();
        names.sort_unstable();
        let known: Vec<&str> = super::FEATURES.iter().map(|(name, _)| *name).collect();
        assert_eq!(known, names);
    }
}
