//! Rules that the crates' manifests can't express: pure crates use no I/O, crates do not depend on plugins, and modules
//! of the root package import downwards. Crates document their purpose, and files and crates stay small. Crates of the
//! request path have the lints against panics. The quickstart compiles a small program. The allowed dependencies of a crate are in its Cargo.toml.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Layer of each module of the root package: it may import the same layer or a lower one.
const LAYERS: &[(&str, u8)] = &[("plugins", 0), ("app", 1), ("cli", 2), ("main", 2), ("lib", 2)];

/// Crates without I/O and without a runtime. Times and random numbers are arguments.
const PURE: &[&str] = &[
    "config",
    "config_schema",
    "disagg",
    "flow",
    "picker",
    "pipeline",
    "pool",
    "prefix",
    "prompt",
    "protocol",
    "quota",
    "request",
    "scheduling",
    "strategies",
    "sync",
];

/// Packages that no pure crate may use.
const RUNTIMES: &[&str] = &["axum", "hyper", "reqwest", "tokio", "tonic"];

/// Parts of the standard library that no pure crate may name.
const IMPURE: &[&str] = &["std::net::TcpStream", "std::fs", "std::thread"];

/// Crates with plugins. Only the root package depends on them, so a change to a plugin recompiles few crates.
const PLUGINS: &[&str] = &["pipeline", "strategies"];

/// Crates that run for requests. So do the crates that they depend on, and those with plugins.
const REQUEST_PATH: &[&str] = &["ext_proc", "tokenize"];

/// The lints of the request path, where a panic fails a request. Tests may panic.
const NO_PANICS: &str = "#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, \
                         clippy::indexing_slicing))]";

/// Maximum number of lines of a file before its tests.
const MAX_LINES: usize = 600;

/// Maximum number of lines of a crate without tests.
const MAX_CRATE_LINES: usize = 15_000;

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The Rust files of a folder and its subfolders.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The first folder or file of a path below `src`, without its extension.
fn module(path: &Path) -> String {
    let relative = path.strip_prefix(src()).unwrap();
    relative.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

/// The folders of `src` that are crates.
fn crates() -> Vec<String> {
    let entries = fs::read_dir(src()).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> = entries.filter(|path| path.join("Cargo.toml").exists()).map(|p| module(&p)).collect();
    assert!(names.len() > 15, "the crates were found");
    names.sort();
    names
}

fn is_test(path: &Path) -> bool {
    path.ends_with("tests.rs") || path.components().any(|c| c.as_os_str() == "tests")
}

/// The part of a file before its inline tests.
fn before_tests(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("\n#[cfg(test)]\nmod tests").next().unwrap().to_owned()
}

/// The code of a file before its tests, without comments.
fn code(path: &Path) -> String {
    before_tests(path).lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that `code` names after `crate::`.
fn named(code: &str) -> Vec<String> {
    let parts = code.split("crate::").skip(1);
    parts.map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
}

#[test]
fn modules_of_the_root_package_import_downwards() {
    let layers: BTreeMap<&str, u8> = LAYERS.iter().copied().collect();
    let crates = crates();
    let mut wrong = Vec::new();
    for path in sources(&src()).iter().filter(|p| !is_test(p) && !crates.contains(&module(p))) {
        let from = module(path);
        let own = layers.get(from.as_str()).unwrap_or_else(|| panic!("`{from}` has no layer; give it one"));
        for to in named(&code(path)) {
            if layers.get(to.as_str()).is_some_and(|layer| layer > own) {
                wrong.push(format!("{} names crate::{to}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that point up:\n{}", wrong.join("\n"));
}

/// The packages that a crate uses outside of its tests.
fn dependencies(name: &str) -> Vec<String> {
    let manifest = fs::read_to_string(src().join(name).join("Cargo.toml")).unwrap();
    let dependencies = manifest.split("\n[dependencies]\n").nth(1).unwrap().split("\n[").next().unwrap();
    dependencies.lines().filter_map(|line| line.split(['.', ' ']).next()).map(str::to_owned).collect()
}

#[test]
fn no_crate_depends_on_a_crate_with_plugins() {
    let mut wrong = Vec::new();
    for name in crates() {
        let of_plugins = |package: &String| PLUGINS.iter().any(|plugins| *package == format!("attache-{plugins}"));
        let packages = dependencies(&name).into_iter().filter(of_plugins);
        wrong.extend(packages.map(|package| format!("{name} depends on {package}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What the quickstart compiles has no clients of Kubernetes and no tokenizers. Without `--package`, cargo would add the
/// features that other crates of the workspace need.
#[test]
fn quickstart_compiles_a_small_program() {
    let script = include_str!("../../examples/quickstart/run.sh");
    let command = script.lines().find_map(|line| line.trim().strip_prefix("cargo build ")).expect("a build");
    let flags = ["--package attache", "--no-default-features"];
    assert!(flags.iter().all(|flag| command.contains(flag)), "{command}");
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none"]);
    let output = tree.args(flags.iter().flat_map(|flag| flag.split(' '))).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).expect("UTF-8");
    let packages: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(packages.contains("attache-sim") && packages.len() > 100, "{packages:?}");
    for absent in ["kube-client", "k8s-openapi", "tokenizers", "attache-live-check", "redis"] {
        assert!(!packages.contains(absent), "{absent}");
    }
}

#[test]
fn pure_crates_use_no_runtime_and_no_io() {
    let mut wrong = Vec::new();
    for name in PURE {
        let folder = src().join(name);
        let packages = dependencies(name).into_iter().filter(|package| RUNTIMES.contains(&package.as_str()));
        wrong.extend(packages.map(|package| format!("{name} depends on {package}")));
        for path in sources(&folder).iter().filter(|p| !is_test(p)) {
            let code = code(path);
            let impure = IMPURE.iter().filter(|impure| code.contains(&format!("{impure}::")));
            wrong.extend(impure.map(|impure| format!("{} names {impure}", path.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn crates_of_the_request_path_deny_panics() {
    let mut open: Vec<String> = [REQUEST_PATH, PLUGINS].concat().into_iter().map(str::to_owned).collect();
    let mut crates = BTreeSet::new();
    while let Some(name) = open.pop() {
        let packages = dependencies(&name);
        crates.insert(name);
        open.extend(packages.iter().filter_map(|p| p.strip_prefix("attache-")).map(|p| p.replace('-', "_")));
        open.retain(|name| !crates.contains(name));
    }
    assert!(crates.len() > 15, "the crates were found: {crates:?}");
    // Its hooks run for requests. It also starts the picker, so not all that it depends on does.
    crates.insert("envoy_module".to_owned());
    // They read what servers, the API server and files send, in tasks that must go on.
    crates.extend(["config_schema", "discovery", "kv_events", "scrape"].map(str::to_owned));
    let lacking = crates.iter().filter(|name| {
        let root = fs::read_to_string(src().join(name).join("lib.rs")).unwrap();
        !root.lines().any(|line| line == NO_PANICS)
    });
    assert_eq!(lacking.collect::<Vec<_>>(), Vec::<&String>::new(), "these lack `{NO_PANICS}`");
}

#[test]
fn every_crate_documents_its_callers_and_its_limits() {
    for name in crates() {
        let root = fs::read_to_string(src().join(&name).join("lib.rs")).unwrap();
        let words: Vec<&str> =
            root.lines().take_while(|line| line.starts_with("//!")).flat_map(str::split_whitespace).collect();
        let text = words.join(" ").replace(" //!", "");
        for part in ["**Called by**", "**Must not**"] {
            assert!(text.contains(part), "src/{name}/lib.rs lacks `{part}`");
        }
    }
}

#[test]
fn files_and_crates_stay_small() {
    let mut wrong = Vec::new();
    let mut of_crates: BTreeMap<String, usize> = BTreeMap::new();
    let crates = crates();
    for path in sources(&src()).iter().filter(|p| !is_test(p)) {
        let lines = before_tests(path).lines().count();
        if lines > MAX_LINES {
            wrong.push(format!("{}: {lines} lines before its tests, {MAX_LINES} are allowed", path.display()));
        }
        if let Some(name) = Some(module(path)).filter(|name| crates.contains(name)) {
            *of_crates.entry(name).or_default() += lines;
        }
    }
    let large = of_crates.iter().filter(|(_, lines)| **lines > MAX_CRATE_LINES);
    wrong.extend(large.map(|(name, lines)| format!("{name}: {lines} lines, {MAX_CRATE_LINES} are allowed")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
