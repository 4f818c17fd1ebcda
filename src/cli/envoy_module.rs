//! `attache envoy-module`: where the library for Envoy is.

use super::output::{message, print};
use super::{EXIT_INTERNAL, EXIT_USAGE};
use anyhow::Context;
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const LIBRARY: &str = "libattache_envoy.so";

/// Where packages put the library, from the folder of the program: beside it, as in an archive, or as in `/usr`.
const FOLDERS: [&str; 2] = ["", "../lib/attache"];

const EXAMPLES: &str = "\
Examples:
  ENVOY_DYNAMIC_MODULES_SEARCH_PATH=$(dirname \"$(attache envoy-module)\") envoy -c inside.yaml
  attache envoy-module --copy-to /modules     # an init container of Envoy's pod has no shell and no `cp`";

/// Print the path of the library that Envoy loads, or copy it.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct EnvoyModuleArgs {
    /// Copy the library into this existing directory, and print the path of the copy. An Envoy that has loaded an older
    /// copy keeps that one until it restarts
    #[arg(long, value_name = "DIRECTORY")]
    copy_to: Option<PathBuf>,
}

pub(super) fn envoy_module(args: &EnvoyModuleArgs) -> ExitCode {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            message(format_args!("error: where is this program: {error}"));
            return ExitCode::from(EXIT_INTERNAL);
        }
    };
    let Some(library) = find(&program) else {
        message(format_args!(
            "error: no `{LIBRARY}` beside `{}` or in `../lib/attache`; the archive, the Debian package and the image \
             have it, and with pip it is the package `attache-envoy`",
            program.display()
        ));
        return ExitCode::from(EXIT_USAGE);
    };
    let copied = args.copy_to.as_deref().map_or(Ok(library.clone()), |directory| copy(&library, directory));
    match copied {
        Ok(path) => {
            print(path.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            message(format_args!("error: `--copy-to`: {error:#}"));
            ExitCode::from(EXIT_INTERNAL)
        }
    }
}

/// The library that belongs to `program`.
fn find(program: &Path) -> Option<PathBuf> {
    let folder = program.parent()?;
    FOLDERS.iter().find_map(|beside| folder.join(beside).join(LIBRARY).canonicalize().ok())
}

/// Copies the library into `directory`. The copy replaces an older one by its name only: a running Envoy would crash if
/// the file that it has mapped was written.
fn copy(library: &Path, directory: &Path) -> anyhow::Result<PathBuf> {
    let target = directory.join(LIBRARY);
    let new = directory.join(format!(".{LIBRARY}.{}", std::process::id()));
    let copied = fs::copy(library, &new).and_then(|_| fs::rename(&new, &target));
    if copied.is_err() {
        let _ = fs::remove_file(&new);
    }
    copied.with_context(|| format!("can't write to {}", directory.display()))?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_found_beside_the_program_and_in_its_lib_folder() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let program = path.join("bin/attache");
        fs::create_dir_all(path.join("bin")).unwrap();
        fs::create_dir_all(path.join("lib/attache")).unwrap();
        assert_eq!(find(&program), None);
        let installed = path.join("lib/attache").join(LIBRARY);
        fs::write(&installed, "installed").unwrap();
        assert_eq!(find(&program), Some(installed));
        let beside = path.join("bin").join(LIBRARY);
        fs::write(&beside, "beside").unwrap();
        assert_eq!(find(&program), Some(beside));
    }

    #[test]
    fn copy_replaces_the_name_and_leaves_the_old_file_to_its_readers() {
        let root = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| root.path().join(name));
        fs::create_dir(&to).unwrap();
        fs::write(&from, "new").unwrap();
        let old = to.join(LIBRARY);
        fs::write(&old, "old").unwrap();
        let kept = to.join("kept");
        fs::hard_link(&old, &kept).unwrap();
        assert_eq!(copy(&from, &to).unwrap(), old);
        assert_eq!(fs::read_to_string(&old).unwrap(), "new");
        assert_eq!(fs::read_to_string(&kept).unwrap(), "old");
        assert_eq!(fs::read_dir(&to).unwrap().count(), 2, "nothing else is left");
        let error = copy(&from, &root.path().join("absent")).unwrap_err();
        assert!(format!("{error:#}").contains("absent"), "{error:#}");
    }
}
