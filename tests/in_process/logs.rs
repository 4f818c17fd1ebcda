//! Log lines: their fields and messages in the source are those of the schema and of the reference pages.

#[path = "../support/log_schema.rs"]
mod log_schema;

use crate::docs::markdown::{page, rows};
use crate::docs::reference::{code, compare};
use log_schema::LogSchema;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Folders of `src` with commands that are no picker: their logs are for people.
const OTHER_COMMANDS: &[&str] = &["loadgen", "quickstart", "replay", "sim"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() && name != "tests" && !OTHER_COMMANDS.contains(&name.as_str()) {
            sources(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// The arguments of a macro whose text begins after its parenthesis, up to the closing one.
fn arguments(text: &str) -> Vec<String> {
    let (mut arguments, mut current, mut depth, mut quoted) = (Vec::new(), String::new(), 0, false);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' if quoted => {
                current.push(character);
                current.extend(characters.next());
                continue;
            }
            '"' => quoted = !quoted,
            '(' | '[' | '{' if !quoted => depth += 1,
            ')' if !quoted && depth == 0 => break,
            ')' | ']' | '}' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                arguments.push(std::mem::take(&mut current));
                continue;
            }
            _ => {}
        }
        current.push(character);
    }
    arguments.push(current);
    arguments.into_iter().map(|argument| argument.trim().to_owned()).filter(|a| !a.is_empty()).collect()
}

/// The name of a field, from an argument of an event: `name = value`, `%name`, `?name` or `name`.
fn field(argument: &str) -> String {
    let shown = argument.trim_start_matches(['%', '?']);
    shown.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// An event in the source.
struct LogEvent {
    level: &'static str,
    arguments: Vec<String>,
    place: String,
}

impl LogEvent {
    /// The message, with `…` for each value in it. Every event has one.
    fn message(&self) -> String {
        let literal = self.arguments.iter().find(|argument| argument.starts_with('"'));
        let literal = literal.unwrap_or_else(|| panic!("an event without a message: {}", self.place));
        let text = literal.trim_matches('"').replace("\\\"", "\"").replace("{{", "\u{1}").replace("}}", "\u{2}");
        // A backslash at the end of a line joins it with the next one.
        let text: String =
            text.split("\\\n").enumerate().map(|(i, part)| if i == 0 { part } else { part.trim_start() }).collect();
        let mut parts = text.split('{');
        let first = parts.next().unwrap_or_default().to_owned();
        let shown = parts.fold(first, |shown, part| shown + "…" + part.split_once('}').map_or("", |(_, rest)| rest));
        shown.replace('\u{1}', "{").replace('\u{2}', "}")
    }
}

/// All events in the source.
fn events() -> Vec<LogEvent> {
    const MACROS: [(&str, &str); 5] =
        [("trace!(", "TRACE"), ("debug!(", "DEBUG"), ("info!(", "INFO"), ("warn!(", "WARN"), ("error!(", "ERROR")];
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
        for (event, level) in MACROS {
            let begin = format!("tracing::{event}");
            found.extend(text.match_indices(&begin).map(|(at, _)| LogEvent {
                level,
                arguments: arguments(&text[at + begin.len()..]),
                place: file.display().to_string(),
            }));
        }
    }
    found
}

/// The fields of all events, with a place of each.
fn fields() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for LogEvent { arguments, place, .. } in events() {
        let before_message = arguments.into_iter().take_while(|argument| !argument.starts_with('"'));
        for argument in before_message.filter(|argument| !argument.starts_with("target:")) {
            found.insert(field(&argument), format!("{place}: {argument}"));
        }
    }
    found
}

/// The message and level of each row of a page.
fn rows_of(path: &str, head: &str) -> Vec<(String, String)> {
    // A message with backquotes stands between double ones.
    let shown = |cell: &str| cell.trim_matches('`').trim().to_owned();
    let unquoted = |cell: &str| match cell.strip_prefix("`` ").and_then(|rest| rest.strip_suffix(" ``")) {
        Some(message) => message.to_owned(),
        None => shown(cell),
    };
    rows(&page(path), head).iter().map(|row| (unquoted(&row[0]), shown(&row[1]))).collect()
}

#[test]
fn page_of_messages_lists_the_warnings_and_errors_of_the_source() {
    const PAGE: &str = "docs/reference/log-messages.md";
    let listed = rows_of(PAGE, "| message | level | what it means for requests | what to do |");
    let wanted: BTreeSet<(String, String)> = events()
        .iter()
        .filter(|event| ["WARN", "ERROR"].contains(&event.level))
        .map(|event| (event.message(), event.level.to_owned()))
        .collect();
    assert!(wanted.len() > 80, "the source was read: {wanted:?}");
    for (message, level) in &wanted {
        assert!(message.trim_matches(['…', ' ', ':']).len() > 5, "a search finds no page for `{message}` ({level})");
    }
    let rows: BTreeSet<(String, String)> = listed.iter().cloned().collect();
    assert_eq!(listed.len(), rows.len(), "{PAGE} has a message twice");
    let missing: Vec<_> = wanted.difference(&rows).collect();
    let gone: Vec<_> = rows.difference(&wanted).collect();
    assert!(missing.is_empty() && gone.is_empty(), "{PAGE} lacks {missing:#?}; the source has no {gone:#?}");
}

#[test]
fn lines_to_know_exist_in_the_source() {
    let events: Vec<(String, &str)> = events().iter().map(|event| (event.message(), event.level)).collect();
    let listed = rows_of("docs/reference/logs.md", "| message | level | what to do |");
    assert!(listed.len() > 5, "{listed:?}");
    for (message, level) in listed {
        // The end of a long message is left out.
        let fits = |text: &str| message.strip_suffix('…').map_or(text == message, |begin| text.starts_with(begin));
        assert!(events.iter().any(|(text, own)| *own == level && fits(text)), "{message} ({level})");
    }
}

#[test]
fn fields_of_log_lines_are_those_of_the_schema() {
    let (fields, schema) = (fields(), LogSchema::read());
    assert!(fields.len() > 80, "the source was read: {fields:?}");
    let common = ["timestamp", "level", "message", "target"];
    for (name, place) in &fields {
        assert!(!common.contains(&name.as_str()), "every line has another `{name}`: {place}");
        assert!(schema.types.contains_key(name), "`{name}` is not in log-schema.json: {place}");
    }
    let known: BTreeSet<&str> = fields.keys().map(String::as_str).chain(common).collect();
    let unused: Vec<_> = schema.types.keys().filter(|name| !known.contains(name.as_str())).collect();
    assert!(unused.is_empty(), "no event has these fields of log-schema.json: {unused:?}");
}

#[test]
fn page_lists_the_fields_of_the_schema() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/log-schema.json");
    let schema: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let row = |(name, property): (&String, &serde_json::Value)| {
        let [kind, about] = ["type", "description"].map(|key| property[key].as_str().unwrap());
        format!("| {} | {kind} | {about} |\n", code(name))
    };
    let rows: String = schema["properties"].as_object().unwrap().iter().map(row).collect();
    compare("docs/reference/logs.md", "log-fields", &format!("| field | type | meaning |\n|---|---|---|\n{rows}"));
}

#[test]
fn lines_that_do_not_fit_the_schema_are_found() {
    let schema = LogSchema::read();
    let line = |target: &str, more: &str| {
        format!(
            "{{\"timestamp\": \"2026-01-01T00:00:00Z\", \"level\": \"WARN\", \"message\": \"m\", \"target\": \"{target}\"{more}}}"
        )
    };
    assert_eq!(schema.error(&line("attache::app", ", \"pool\": \"chat\", \"skipped\": 3")), None);
    assert_eq!(schema.error(&line("hyper::proto", ", \"of_a_library\": true")), None);
    for (target, more, wrong) in [
        ("attache::app", ", \"no_such_field\": 1", "`no_such_field` is no field"),
        ("attache::app", ", \"skipped\": \"3\"", "`skipped` is \"3\", and the schema says integer"),
        ("attache::app", ", \"pool\": null", "`pool` is null"),
    ] {
        let error = schema.error(&line(target, more)).unwrap();
        assert!(error.contains(wrong), "{error}");
    }
    assert!(schema.error("panicked at src/main.rs").is_some());
    assert_eq!(schema.error("{\"level\": \"INFO\"}").as_deref(), Some("`timestamp` is missing"));
}
