//! Workflows of GitHub: they are valid, call the scripts of this repository, and name each action by a commit.

use crate::tools;
use std::path::{Path, PathBuf};
use std::process::Command;

fn workflows() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(".github/workflows");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).expect("workflows").map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    assert!(files.len() >= 2, "{files:?}");
    files
}

#[test]
fn workflows_are_valid() {
    let output =
        Command::new(tools::installed("actionlint")).arg("-no-color").args(workflows()).output().expect("actionlint");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn each_action_is_named_by_a_commit() {
    let mut actions = 0;
    for file in workflows() {
        let text = std::fs::read_to_string(&file).expect("a workflow");
        for action in text.lines().filter_map(|line| line.split_once("uses: ").map(|(_, action)| action)) {
            let commit = action.split_once('@').map(|(_, rest)| rest.split_whitespace().next().unwrap_or_default());
            let is_commit = commit.is_some_and(|c| c.len() == 40 && c.bytes().all(|byte| byte.is_ascii_hexdigit()));
            assert!(is_commit, "{}: {action}", file.display());
            actions += 1;
        }
    }
    assert!(actions >= 3, "{actions}");
}

#[test]
fn workflows_call_scripts_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut scripts = 0;
    for file in workflows() {
        let text = std::fs::read_to_string(&file).expect("a workflow");
        let words = text.split(|c: char| c.is_whitespace() || "\"$()".contains(c));
        for word in words.filter(|word| word.ends_with(".sh") || *word == ".ci/run") {
            assert!(root.join(word).exists(), "{}: {word}", file.display());
            scripts += 1;
        }
    }
    assert!(scripts >= 4, "{scripts}");
}
