//! Statements about what Attaché lacks, or has instead of something else, agree with what exists.

use super::markdown::{page, pages, root, rows};
use std::path::{Path, PathBuf};

/// Who shares state with others.
const SUBJECTS: [&str; 3] = ["picker", "replica", "frontend"];
/// Words that deny it.
const DENIALS: [&str; 7] =
    ["share nothing", "shares nothing", "share no ", "not share", "n't share", "not shared", "in this version"];
/// What pickers share state by. A sentence that names it says under which condition its denial holds.
const NAMES: [&str; 3] = ["sync", "different prefixes", "keys or prefixes"];
/// Denials that are true.
const TRUE: [&str; 1] = [
    // Crates, and not pickers.
    "use the picker's crates, so that both can't share a mistake",
];

fn files(directory: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        let is_test = path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs");
        if path.is_dir() && !is_test {
            files(&path, extension, found);
        } else if !is_test && path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
}

/// The sentences of a source file or a page in lower case, with comments and literals joined over their lines.
fn sentences(text: &str) -> Vec<String> {
    let mut joined = String::new();
    for line in text.lines() {
        let line = line.trim().trim_start_matches(['/', '!', '#', '*', '-', '|']).trim().trim_end_matches('\\').trim();
        joined.push_str(if line.is_empty() { ". " } else { line });
        joined.push(' ');
    }
    let ends = |c: char| matches!(c, '"' | '|' | ';');
    let parts = joined.split(". ").flat_map(|part| part.split(ends));
    parts.map(|part| part.trim().to_lowercase()).collect()
}

fn denies_sharing(sentence: &str) -> bool {
    SUBJECTS.iter().any(|subject| sentence.contains(subject)) && DENIALS.iter().any(|denial| sentence.contains(denial))
}

#[test]
fn statements_that_pickers_share_nothing_name_sync() {
    let mut texts: Vec<(String, String)> = pages().into_iter().map(|page| (page.path, page.text)).collect();
    let mut found = Vec::new();
    files(&root().join("src"), "rs", &mut found);
    for directory in ["examples", "envoy"] {
        files(&root().join(directory), "yaml", &mut found);
    }
    let read = |path: PathBuf| (path.display().to_string(), std::fs::read_to_string(&path).expect("a file"));
    texts.extend(found.into_iter().map(read));
    let (mut wrong, mut used) = (Vec::new(), 0);
    for (path, text) in &texts {
        for sentence in sentences(text).into_iter().filter(|sentence| denies_sharing(sentence)) {
            let is_true = TRUE.iter().any(|known| sentence.contains(known));
            used += usize::from(is_true);
            if !is_true && !NAMES.iter().any(|name| sentence.contains(name)) {
                wrong.push(format!("{path}: {sentence}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(used, TRUE.len(), "a statement of the list is gone");
    // The statement that stood in three places before pickers shared state.
    assert!(denies_sharing("replicas do not share what they know in this version"));
}

/// The names between backquotes in string literals of the modules that translate other products' settings.
fn named_instead() -> Vec<String> {
    const MODULES: [&str; 5] =
        ["aibrix_env.rs", "localai_env.rs", "reference_env.rs", "defaults.rs", "endpoint_picker/catalogue.rs"];
    let mut names = Vec::new();
    for module in MODULES {
        let text = page(&format!("src/config/{module}"));
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        names.extend(code.split('`').skip(1).step_by(2).map(str::to_owned));
    }
    names
}

#[test]
fn settings_that_messages_name_instead_exist() {
    let (keys, flags) = (page("docs/reference/configuration.md"), page("docs/reference/command-line.md"));
    let metrics = page("docs/reference/metrics.md");
    let mut checked = 0;
    for name in named_instead() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || !name.chars().all(is_word) {
            continue;
        }
        let exists = if name.starts_with("--") {
            flags.contains(&name)
        } else if name.starts_with("attache_") {
            metrics.contains(&format!("`{name}`"))
        } else if name.contains('.') && name.starts_with(|c: char| c.is_ascii_lowercase()) {
            ["", "pools.", "pools.flowControl."].iter().any(|prefix| keys.contains(&format!("`{prefix}{name}`")))
        } else {
            continue;
        };
        checked += 1;
        assert!(exists, "`{name}` does not exist");
    }
    assert!(checked >= 15, "{checked}");
}

/// The parts of a quoted text between its values, which are `…`, numbers and units. Shorter parts than three words prove
/// nothing.
fn fixed_parts(quoted: &str) -> Vec<String> {
    let is_value =
        |word: &&str| word.contains('…') || word.contains('%') || word.contains(|c: char| c.is_ascii_digit());
    let words: Vec<&str> = quoted.split_whitespace().collect();
    let parts = words.split(|word| is_value(word)).filter(|part| part.len() >= 3);
    parts.map(|part| part.join(" ").trim_end_matches([',', ':']).to_owned()).collect()
}

#[test]
fn incidents_quote_texts_of_the_program() {
    let mut found = Vec::new();
    for extension in ["rs", "js"] {
        files(&root().join("src"), extension, &mut found);
    }
    let mut source = String::new();
    for path in found {
        let text = std::fs::read_to_string(&path).expect("a file");
        // A backslash at the end of a line joins a literal with the next one.
        let mut lines = text.split("\\\n");
        source.push_str(lines.next().unwrap_or_default());
        lines.for_each(|line| source.push_str(line.trim_start()));
    }
    let (mut checked, mut wrong) = (0, Vec::new());
    for row in rows(&page("docs/how-to/troubleshooting.md"), "| incident |") {
        for part in row[3].split('`').skip(1).step_by(2).flat_map(fixed_parts) {
            checked += 1;
            if !source.contains(&part) {
                wrong.push(part);
            }
        }
    }
    assert!(wrong.is_empty(), "the program does not say {wrong:#?}");
    assert!(checked >= 8, "{checked}");
}
