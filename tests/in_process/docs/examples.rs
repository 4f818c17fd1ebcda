//! Examples on pages work: configurations load, commands parse, flags exist.

use super::markdown::{Block, blocks, commands, page, pages, words};
use attache::cli::Cli;
use attache_config::{ConfigText, Overrides, Sources, Surroundings, load};
use clap::Parser;
use std::collections::BTreeSet;
use std::process::Command;

/// Completes a fragment with a few keys to a whole file.
fn whole(block: &str) -> Option<String> {
    const SECTIONS: [&str; 6] = ["server:", "telemetry:", "exchange:", "limits:", "redis:", "pools:"];
    let ours = block.contains("kind: Attache") || block.contains("kind: EndpointPickerConfig");
    let of_kubernetes = block.lines().any(|line| line.starts_with("apiVersion:")) && !ours;
    if of_kubernetes || block.contains("\nspec:") || block.starts_with("spec:") {
        return None;
    }
    if block.lines().any(|line| line.starts_with("apiVersion: ")) {
        return Some(block.to_owned());
    }
    let begins = |line: &str| SECTIONS.iter().any(|section| line.starts_with(section));
    if !block.lines().any(begins) {
        return None;
    }
    let mut text = format!("apiVersion: attache.dev/v1\nkind: Attache\n{block}");
    if !block.lines().any(|line| line.starts_with("pools:")) {
        text.push_str("pools: [{name: default, endpoints: [\"127.0.0.1:8001\"]}]\n");
    }
    if text.contains("store: redis") && !block.lines().any(|line| line.starts_with("redis:")) {
        text.push_str("redis: {url: \"redis://127.0.0.1:6379/0\"}\n");
    }
    Some(text)
}

#[test]
fn every_configuration_on_a_page_loads() {
    let mut loaded = 0;
    for page in pages() {
        for Block { language, text } in blocks(&page.text) {
            let Some(text) = (language == "yaml").then(|| whole(&text)).flatten() else { continue };
            let picker = text.contains("kind: EndpointPickerConfig");
            let sources = Sources {
                registry: attache::plugins::registry(),
                text: Some(ConfigText { name: page.path.clone(), bytes: text.as_bytes().to_vec() }),
                overrides: Overrides::default(),
                surroundings: Surroundings { cores: 4, terminal: false },
            };
            match load(&sources) {
                Ok((_, warnings)) => assert!(picker || warnings.is_empty(), "{}: {warnings:?}\n{text}", page.path),
                // Such a file has no endpoints, which flags give.
                Err(errors) => assert!(
                    picker && format!("{errors:?}").contains("NothingToServe"),
                    "{}: {errors:?}\n{text}",
                    page.path
                ),
            }
            loaded += 1;
        }
    }
    assert!(loaded >= 15, "{loaded}");
}

#[test]
fn every_attache_command_on_a_page_parses() {
    let mut parsed = 0;
    for page in pages() {
        for command in commands(&page.text) {
            let words = words(&command);
            let ends = |word: &String| ["|", ">", "&&", "&", ";", "2>&1"].contains(&word.as_str());
            for part in words.split(ends).filter(|part| part.first().is_some_and(|word| word == "attache")) {
                if let Err(error) = Cli::try_parse_from(part) {
                    let shown = matches!(
                        error.kind(),
                        clap::error::ErrorKind::DisplayHelp | clap::error::ErrorKind::DisplayVersion
                    );
                    assert!(shown, "{}: {command}\n{error}", page.path);
                }
                parsed += 1;
            }
        }
    }
    assert!(parsed > 30, "{parsed}");
}

fn flags(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
    words.filter(|word| word.starts_with("--") && word.len() > 3 && !word.starts_with("---"))
}

#[test]
fn every_flag_in_the_docs_exists() {
    let mut known = String::new();
    let verbs = [
        "run",
        "check",
        "envoy-config",
        "envoy-module",
        "explain",
        "top",
        "version",
        "completions",
        "man",
        "quickstart",
        "sim",
        "replay",
    ];
    for verb in verbs {
        let output = Command::new(env!("CARGO_BIN_EXE_attache")).args([verb, "--help"]).output().expect("attache");
        known.push_str(&String::from_utf8(output.stdout).expect("UTF-8"));
    }
    let known: BTreeSet<&str> = flags(&known).collect();
    let others: BTreeSet<&str> = [
        // cargo, docker, helm and kubectl
        "--path",
        "--locked",
        "--test",
        "--bench",
        "--release",
        "--bin",
        "--set",
        "--values",
        "--namespace",
        "--for",
        "--check",
        "--create-namespace",
        "--for-condition",
        "--all-targets",
        "--tag",
        "--rows",
        "--from-literal",
        "--from-file",
        "--branch",
        "--package",
        // Envoy
        "--mode",
        // pip, gpg, sha256sum, podman, systemctl and the scripts in release
        "--verify",
        "--read-only",
        "--network",
        "--now",
        "--help",
        // vLLM
        "--kv-events-config",
        "--prefix-caching-hash-algo",
        "--kv-transfer-config",
        "--enable-prefix-caching",
        "--block-size",
        "--enable-scale-out",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--api-key",
    ]
    .into();
    let mut said = 0;
    for page in pages().iter().filter(|page| {
        page.path == "README.md" || page.path.starts_with("docs/") && !page.path.starts_with("docs/coming-from/")
    }) {
        let unknown: Vec<_> =
            flags(&page.text).filter(|flag| !known.contains(flag) && !others.contains(flag)).collect();
        assert!(unknown.is_empty(), "{}: {unknown:?}", page.path);
        said += flags(&page.text).count();
    }
    assert!(said > 60, "{said}");
    assert!(page("README.md").contains("attache run"), "the README shows the command");
}
