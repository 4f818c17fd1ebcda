//! The walls of the house: `use crate::` may only point down, the pure core names no runtime, and rooms stay small.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Layer of each module: an arrow may point to the same layer or a lower one. `sim` stands beside the core; only its HTTP side may serve.
const LAYERS: &[(&str, u8)] = &[
    ("error", 0),
    ("ids", 0),
    ("limits", 0),
    ("clock", 0),
    ("rng", 0),
    ("spelling", 0),
    ("config", 1),
    ("protocol", 1),
    ("pool", 1),
    ("prefix", 1),
    ("prompt", 1),
    ("scheduling", 1),
    ("disagg", 1),
    ("flow", 1),
    ("quota", 1),
    ("connections", 2),
    ("record", 2),
    ("scrape", 2),
    ("discovery", 2),
    ("kv_events", 2),
    ("tokenize", 2),
    ("quota_store", 2),
    ("redis_link", 2),
    ("sim", 3),
    ("replay", 3),
    ("ext_proc", 3),
    ("server", 3),
    ("health", 3),
    ("tls", 3),
    ("admin", 3),
    ("telemetry", 3),
    ("shutdown", 3),
    ("app", 4),
    ("cli", 4),
    ("main", 4),
    ("lib", 4),
];

/// What the pure core (layers 0 and 1) may not name. The clock is the one shell in layer 0, and may name tokio's instants.
const IMPURE: &[&str] =
    &["tokio", "tonic", "reqwest", "axum", "hyper", "std::net::TcpStream", "std::fs", "std::thread"];

/// Lines a file may have before its tests.
const MAX_LINES: usize = 600;

fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
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
    assert!(found.len() > 30, "the sources were found");
    found.sort();
    found
}

fn module(path: &Path) -> String {
    let relative = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    relative.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned()
}

fn is_test(path: &Path) -> bool {
    path.ends_with("tests.rs") || path.components().any(|c| c.as_os_str() == "tests")
}

/// The file without comments and without its `#[cfg(test)]` tail.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("\n#[cfg(test)]\nmod tests").next().unwrap();
    text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that `code` names after `crate::`, groups (`crate::{a, b::c}`) included.
fn named(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let word = |s: &str| s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        match rest.strip_prefix('{') {
            Some(group) => {
                let mut depth = 0;
                let mut item = String::new();
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => names.push(word(&std::mem::take(&mut item))),
                        _ => {}
                    }
                    if depth == 0 && c != ',' {
                        item.push(c);
                    }
                }
                names.push(word(&item));
            }
            None => names.push(word(rest)),
        }
    }
    names.retain(|n| !n.is_empty());
    names
}

#[test]
fn arrows_point_down() {
    let layers: BTreeMap<&str, u8> = LAYERS.iter().copied().collect();
    let mut wrong = Vec::new();
    for path in sources().iter().filter(|p| !is_test(p)) {
        let from = module(path);
        let own = layers.get(from.as_str()).unwrap_or_else(|| panic!("`{from}` has no layer; give it one"));
        for to in named(&code(path)) {
            let Some(layer) = layers.get(to.as_str()) else { continue };
            if layer > own {
                wrong.push(format!("{} (layer {own}) names crate::{to} (layer {layer})", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that point up:\n{}", wrong.join("\n"));
}

#[test]
fn the_core_is_pure() {
    let mut wrong = Vec::new();
    for path in sources().iter().filter(|p| !is_test(p)) {
        let name = module(path);
        let pure = LAYERS.iter().any(|(m, layer)| *m == name && *layer <= 1) && name != "clock";
        if !pure {
            continue;
        }
        let code = code(path);
        for impure in IMPURE {
            if code.contains(&format!("{impure}::")) {
                wrong.push(format!("{} names {impure}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "the core has no I/O and no runtime:\n{}", wrong.join("\n"));
}

#[test]
fn rooms_stay_small() {
    let mut wrong = Vec::new();
    for path in sources().iter().filter(|p| !is_test(p)) {
        let text = fs::read_to_string(path).unwrap();
        let lines = text.split("\n#[cfg(test)]\nmod tests").next().unwrap().lines().count();
        if lines > MAX_LINES {
            wrong.push(format!("{}: {lines} lines before its tests, {MAX_LINES} are allowed", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn groups_of_imports_are_read() {
    let code = "use crate::{error::{A, B}, ids};\nuse crate::pool::ledger;\nlet x = crate::rng::f();";
    assert_eq!(named(code), ["error", "ids", "pool", "rng"]);
}
