//! Pages, sentences and lines are short.

use super::markdown::{pages, prose, root};
use std::path::Path;
use std::process::Command;

/// Maximum mean number of words in a sentence, over all pages.
const MEAN_WORDS: f64 = 18.0;
/// A sentence with more words counts as long.
const LONG_WORDS: usize = 25;
/// Maximum share of long sentences.
const LONG_SHARE: f64 = 0.03;
/// Maximum size of a page, bytes.
const PAGE_BYTES: usize = 12 * 1024;
/// Maximum size of the changes of one release, bytes. Those that wait in `release/changes` count.
const RELEASE_BYTES: usize = 16 * 1024;
/// Maximum columns of a line that is not part of a table and has no link.
const COLUMNS: usize = 120;

/// Pages that a program writes.
fn is_generated(path: &str) -> bool {
    path.starts_with("docs/reference/") || path == "benches/policies.md"
}

/// The sentences of a page, without tables, headings and code.
fn sentences(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for paragraph in paragraphs(&prose(text)) {
        let mut sentence: Vec<&str> = Vec::new();
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        for (at, word) in words.iter().enumerate() {
            sentence.push(word);
            let next = words.get(at + 1).and_then(|word| word.trim_start_matches(['*', '`', '[', '(']).chars().next());
            let ends = word.trim_end_matches(['*', ')', '"', '`']).ends_with(['.', '!', '?', ':']);
            if ends && next.is_none_or(|c| c.is_uppercase() || !c.is_alphabetic()) {
                out.push(sentence.join(" "));
                sentence.clear();
            }
        }
        if !sentence.is_empty() {
            out.push(sentence.join(" "));
        }
    }
    out.retain(|sentence| sentence.split(' ').count() > 2);
    out
}

/// Paragraphs and list items. Each ends a sentence.
fn paragraphs(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    for line in text.lines() {
        let trimmed = line.trim_start();
        let list = ["- ", "* ", "> "].iter().any(|start| trimmed.starts_with(start))
            || trimmed.split_once(". ").is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if trimmed.is_empty() || list || trimmed.starts_with(['|', '#']) {
            out.push(String::new());
        }
        if !trimmed.starts_with(['|', '#']) {
            let last = out.last_mut().expect("one");
            last.push_str(&plain(trimmed));
            last.push(' ');
        }
    }
    out
}

/// A line without link targets, and with one word instead of each code span.
fn plain(line: &str) -> String {
    let code: String = line.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "x" }).collect();
    let mut out = String::new();
    let mut rest = code.as_str();
    while let Some((before, after)) = rest.split_once("](") {
        out.push_str(before);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    out.push_str(rest);
    out
}

#[test]
fn sentences_are_short() {
    let mut all: Vec<(usize, String)> = Vec::new();
    for page in pages().iter().filter(|page| !is_generated(&page.path) || page.path.starts_with("docs/")) {
        for sentence in sentences(&page.text) {
            all.push((sentence.split(' ').count(), format!("{}: {sentence}", page.path)));
        }
    }
    all.sort_by_key(|(words, _)| std::cmp::Reverse(*words));
    let words: usize = all.iter().map(|(words, _)| words).sum();
    let long = all.iter().filter(|(words, _)| *words > LONG_WORDS).count();
    let mean = words as f64 / all.len() as f64;
    let longest: Vec<_> = all.iter().take(60).map(|(words, text)| format!("{words} {text}")).collect();
    assert!(mean <= MEAN_WORDS, "{mean:.1} words a sentence");
    let allowed = (all.len() as f64 * LONG_SHARE) as usize;
    assert!(long <= allowed, "{long} long sentences of {}, {allowed} may be: {longest:#?}", all.len());
}

#[test]
fn pages_and_lines_are_short() {
    let mut wrong = Vec::new();
    for page in pages() {
        let limit = match page.path.as_str() {
            "README.md" => 8 * 1024,
            // Each release has a limit, in a test below.
            "CHANGELOG.md" => usize::MAX,
            // It names each test and each limit.
            "SECURITY.md" => 24 * 1024,
            // It has a section for each alert.
            "docs/how-to/alerts.md" => 16 * 1024,
            path if is_generated(path) => usize::MAX,
            _ => PAGE_BYTES,
        };
        if page.text.len() > limit {
            wrong.push(format!("{} has {} bytes, {limit} are allowed", page.path, page.text.len()));
        }
        for (number, line) in page.text.lines().enumerate().filter(|_| !is_generated(&page.path)) {
            let excepted = line.trim_start().starts_with('|') || line.contains("](") || line.contains("://");
            if line.chars().count() > COLUMNS && !excepted {
                wrong.push(format!("{}:{} has {} columns", page.path, number + 1, line.chars().count()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Makes CHANGELOG.md in `copy` as `release/changelog.sh` would at this moment.
fn cut_changelog(copy: &Path) -> String {
    let changes = |of: &Path| of.join("release/changes");
    std::fs::create_dir_all(changes(copy)).expect("a directory");
    let fragments = std::fs::read_dir(changes(&root())).expect("the fragments");
    let fragments = fragments.map(|entry| changes(Path::new("")).join(entry.expect("an entry").file_name()));
    let others = ["Cargo.toml", "CHANGELOG.md", "release/version.sh", "release/changelog.sh"].map(Into::into);
    for path in fragments.chain(others) {
        std::fs::copy(root().join(&path), copy.join(&path))
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let output = Command::new(copy.join("release/changelog.sh")).output().expect("the script");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let left =
        std::fs::read_dir(changes(copy)).expect("the fragments").map(|entry| entry.expect("an entry").file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["README.md"]);
    std::fs::read_to_string(copy.join("CHANGELOG.md")).expect("the changelog")
}

#[test]
fn releases_with_their_pending_changes_are_short() {
    let copy = tempfile::tempdir().expect("a directory");
    let changelog = cut_changelog(copy.path());
    let releases: Vec<&str> = changelog.split("\n## ").skip(1).collect();
    assert!(!releases.is_empty());
    for release in releases {
        let name = release.lines().next().unwrap_or_default();
        let mut headings: Vec<&str> = release.lines().filter(|line| line.starts_with("### ")).collect();
        let all = headings.len();
        headings.sort_unstable();
        headings.dedup();
        assert_eq!(headings.len(), all, "{name} has a heading twice");
        let size = release.len();
        assert!(size <= RELEASE_BYTES, "{name} has {size} bytes with release/changes, {RELEASE_BYTES} are allowed");
    }
}
