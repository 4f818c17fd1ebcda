//! The Markdown files of the repository and their parts.

use std::path::{Path, PathBuf};

/// The repository's directory.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A Markdown file.
pub(crate) struct Page {
    /// Path in the repository.
    pub(crate) path: String,
    /// Its text.
    pub(crate) text: String,
}

/// All Markdown files, by path, without output of other tools.
pub(crate) fn pages() -> Vec<Page> {
    let mut found = Vec::new();
    let directories = ["docs", "examples", "benches", "tests", ".github"].map(|name| root().join(name));
    directories.iter().filter(|directory| directory.is_dir()).for_each(|directory| collect(directory, &mut found));
    let top = std::fs::read_dir(root()).expect("the repository").map(|entry| entry.expect("an entry").path());
    found.extend(top.filter(|path| is_markdown(path)));
    found.sort();
    let read = |path: PathBuf| Page {
        text: std::fs::read_to_string(&path).expect("a page"),
        path: path.strip_prefix(root()).expect("a path inside").to_str().expect("UTF-8").to_owned(),
    };
    found.into_iter().map(read).collect()
}

fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, found);
        } else if is_markdown(&path) {
            found.push(path);
        }
    }
}

/// The text of one page.
pub(crate) fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A fenced block of code.
pub(crate) struct Block {
    /// Its language, empty without one.
    pub(crate) language: String,
    /// Its lines, without the indentation of the fence.
    pub(crate) text: String,
}

/// The fenced blocks of a page. Blocks within list items are indented.
pub(crate) fn blocks(text: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for line in text.lines() {
        let fence = line.trim_start().strip_prefix("```");
        open = match (open.take(), fence) {
            (None, None) => None,
            (None, Some(language)) => {
                let indent = line.len() - line.trim_start().len();
                Some((indent, Block { language: language.trim().to_owned(), text: String::new() }))
            }
            (Some((_, block)), Some(_)) => {
                found.push(block);
                None
            }
            (Some((indent, mut block)), None) => {
                block.text.push_str(line.get(indent..).unwrap_or_default());
                block.text.push('\n');
                Some((indent, block))
            }
        };
    }
    found
}

/// Commands of `console` blocks. Lines that end in a backslash are joined.
pub(crate) fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for block in blocks(text).into_iter().filter(|block| block.language == "console") {
        let joined = block.text.replace("\\\n", " ");
        found.extend(joined.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned));
    }
    found
}

/// Words as a shell splits them: quotes are removed, and a comment ends the command.
pub(crate) fn words(command: &str) -> Vec<String> {
    let (mut out, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    for c in command.chars() {
        match (quote, c) {
            (Some(open), c) if open == c => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => out.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    out.extend(word);
    out
}

/// The text outside of fenced blocks and HTML comments.
pub(crate) fn prose(text: &str) -> String {
    let mut inside = false;
    let outside = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !inside && !fence && !line.starts_with("<!--")
    });
    outside.map(|line| format!("{line}\n")).collect()
}

/// The rows of all tables whose header starts with `head`, cell by cell.
pub(crate) fn rows(text: &str, head: &str) -> Vec<Vec<String>> {
    let tables = text.match_indices(head).map(|(start, _)| text[start..].lines().skip(2));
    tables.flat_map(|lines| lines.take_while(|line| line.starts_with('|'))).map(cells).collect()
}

fn cells(line: &str) -> Vec<String> {
    let inner = line.strip_prefix('|').unwrap_or(line);
    let inner = inner.strip_suffix('|').unwrap_or(inner);
    inner.replace("\\|", "\u{1}").split('|').map(|cell| cell.trim().replace('\u{1}', "\\|")).collect()
}
