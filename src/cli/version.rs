//! `attache version`: prints version and features.

use clap::Args;
use std::process::ExitCode;

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
        let known = [("otlp", cfg!(feature = "otlp")), ("simulator", cfg!(feature = "simulator"))];
        let features: Vec<&str> = known.into_iter().filter_map(|(name, is_built)| is_built.then_some(name)).collect();
        println!(
            "{}",
            serde_json::json!({
                "version": version,
                "features": features,
                "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
                "debug": cfg!(debug_assertions),
            })
        );
    } else {
        println!("attache {version}");
    }
    ExitCode::SUCCESS
}
