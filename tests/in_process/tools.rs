//! The tools of these tests. Each test installs its own on first use, by a script of `tests`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory that the tools are installed into.
pub(crate) fn directory() -> PathBuf {
    std::env::var_os("ATTACHE_TOOLS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools"), PathBuf::from)
}

/// Runs `tests/install-{name}.sh`, which installs the tool unless it is there already. Returns the path that the script
/// prints: the directory or the program. Several tests may call it at once, since the scripts wait for each other.
pub(crate) fn installed(name: &str) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/install-{name}.sh"));
    let output = Command::new(&script).arg(directory()).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    assert!(output.status.success(), "{}: {}", script.display(), String::from_utf8_lossy(&output.stderr));
    let path = PathBuf::from(String::from_utf8(output.stdout).expect("UTF-8").trim_end());
    assert!(path.exists(), "{}: {}", script.display(), path.display());
    path
}
