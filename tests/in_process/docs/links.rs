//! Links have existing files and headings as targets, and tests that pages name exist.

use super::markdown::{blocks, page, pages, prose, root, rows};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// The targets of all links of a text, without code.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    targets.map(str::to_owned).collect()
}

/// The anchors of a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let outside = prose(text);
    outside.lines().filter(|line| line.starts_with('#')).map(|line| slug(line.trim_start_matches('#').trim())).collect()
}

fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// A path without `..`.
fn normal(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut out, component| {
        match component {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
        out
    })
}

#[test]
fn every_link_and_anchor_has_a_target() {
    let (mut broken, mut seen) = (Vec::new(), 0);
    for page in pages() {
        for link in links(&page.text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            seen += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let directory = Path::new(&page.path).parent().expect("a directory");
            let target = if path.is_empty() { PathBuf::from(&page.path) } else { normal(&directory.join(path)) };
            let exists = root().join(&target).exists();
            // The site contains only files, no folders.
            let is_page = !page.path.starts_with("docs/") || root().join(&target).is_file();
            let found = anchor.is_empty()
                || std::fs::read_to_string(root().join(&target)).is_ok_and(|text| anchors(&text).contains(anchor));
            if !exists || !is_page || !found {
                broken.push(format!("{}: {link}", page.path));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(seen > 100, "{seen}");
}

#[test]
fn every_test_linked_from_a_guarantee_exists() {
    let mut tables = 0;
    for page in pages() {
        for head in ["| guarantee | tests |", "| a client can't |", "| a pod can't |"] {
            for row in rows(&page.text, head) {
                let mut named = 0;
                for reference in row[1].split(", ") {
                    let (name, path) = reference.trim_matches(['[', ')']).split_once("](").expect("a link");
                    let directory = Path::new(&page.path).parent().expect("a directory");
                    let file = std::fs::read_to_string(root().join(normal(&directory.join(path)))).expect(path);
                    assert!(file.contains(&format!("fn {}(", name.trim_matches('`'))), "{name} is not in {path}");
                    named += 1;
                }
                assert!(named > 0, "{row:?}");
                tables += 1;
            }
        }
    }
    assert!(tables > 70, "{tables}");
}

#[test]
fn every_page_of_the_site_is_in_its_navigation() {
    let navigation = page("mkdocs.yml");
    for page in pages().iter().filter_map(|page| page.path.strip_prefix("docs/")) {
        assert!(navigation.contains(page), "{page} is not in mkdocs.yml");
    }
}

#[test]
fn fences_have_a_language_and_an_end() {
    for page in pages() {
        let fences = page.text.lines().filter(|line| line.trim_start().starts_with("```")).count();
        assert_eq!(fences % 2, 0, "{} has a fence without an end", page.path);
        // `attache replay --markdown` writes this page.
        for block in blocks(&page.text).into_iter().filter(|_| page.path != "benches/policies.md") {
            assert!(!block.language.is_empty(), "{} has a block without a language:\n{}", page.path, block.text);
        }
    }
}
