//! The configuration in a file that contains it among other things: a ConfigMap, a manifest with several objects, or
//! the values of a Helm chart. It is a mapping or a text below any key.
//!
//! Positions are those of the file: a text in block style is parsed where it stands, with its indentation. Any other
//! text has the position of its value.

use super::decode::Sink;
use super::diagnostic::{At, Code, Diagnostic, Span};
use super::document::{self, Node, Value};
use super::{endpoint_picker, schema};

/// Texts in texts deeper than this are not read: a chart's list of manifests with a ConfigMap has two.
const MAX_DEPTH: usize = 3;
/// Most lines from the start of a value to the first line of its text.
const MAX_LEAD: usize = 16;
/// Most configurations that an error lists.
const MAX_LISTED: usize = 16;
/// Helm's key with the name of the file that the picker reads, which selects one of several.
const SELECTS: &str = "pluginsConfigFile";

/// The root of the configuration in `bytes`.
///
/// # Errors
/// The text is no YAML, the configuration in it is not, or there are several.
pub(super) fn root(bytes: &[u8], sink: &mut Sink) -> Result<Node, Diagnostic> {
    let text = document::text_of(bytes)?;
    let mut documents = match document::parse(bytes, &mut sink.diagnostics) {
        Ok(root) => vec![Found { path: String::new(), node: root, mistakes: Vec::new() }],
        Err(error) if error.code == Code::SeveralDocuments => manifests(text).ok_or(error)?,
        Err(error) => return Err(error),
    };
    if let [one] = &documents[..]
        && is_configuration(&one.node)
        && let Some(one) = documents.pop()
    {
        sink.diagnostics.extend(one.mistakes);
        return Ok(one.node);
    }
    let mut search = Search { file: text, found: Vec::new(), selected: None, error: None };
    for Found { node, mistakes, .. } in &documents {
        search.visit(node, String::new(), mistakes, 0);
    }
    let Search { mut found, selected, error, .. } = search;
    if let Some(name) = selected.map(|name| format!(".{name}"))
        && found.iter().any(|one| one.path.ends_with(&name))
    {
        found.retain(|one| one.path.ends_with(&name));
    }
    match (found.pop(), error) {
        (Some(last), _) if !found.is_empty() => {
            found.push(last);
            Err(several(&found))
        }
        (Some(Found { path, node, mistakes }), _) => {
            tell_of_rest(&documents, &path, node.span, sink);
            sink.diagnostics.extend(mistakes);
            Ok(node)
        }
        (None, Some(error)) => Err(error),
        // The file is read as it is, and the mistake is that of its own kind.
        (None, None) => documents.pop().map(|one| one.node).ok_or_else(|| several(&[])),
    }
}

/// A configuration in the file.
#[derive(Debug)]
struct Found {
    /// Keys and positions that lead to it.
    path: String,
    node: Node,
    /// Duplicate keys in it.
    mistakes: Vec<Diagnostic>,
}

/// A search through all values of a file.
struct Search<'t> {
    file: &'t str,
    found: Vec<Found>,
    /// The name in [`SELECTS`].
    selected: Option<String>,
    /// The first text that should be a configuration and can't be read.
    error: Option<Diagnostic>,
}

impl Search<'_> {
    /// Looks at a value. `mistakes` are those of the text that it is from.
    fn visit(&mut self, node: &Node, path: String, mistakes: &[Diagnostic], depth: usize) {
        if self.found.len() > MAX_LISTED {
            return;
        }
        if is_configuration(node) {
            return self.found.push(Found { path, node: node.clone(), mistakes: mistakes.to_vec() });
        }
        match &node.value {
            Value::Map(entries) => {
                for (key, value) in entries {
                    if let (SELECTS, Value::Text(name)) = (key.value.as_str(), &value.value) {
                        self.selected = Some(name.clone());
                    }
                    let below = if path.is_empty() { key.value.clone() } else { format!("{path}.{}", key.value) };
                    self.visit(value, below, mistakes, depth);
                }
            }
            Value::List(items) => {
                for (index, value) in items.iter().enumerate() {
                    self.visit(value, format!("{path}[{index}]"), mistakes, depth);
                }
            }
            Value::Text(text) if depth < MAX_DEPTH && names_a_kind(text) => self.read(text, node.span, path, depth),
            _ => {}
        }
    }

    /// Reads a text that contains the name of a kind.
    fn read(&mut self, text: &str, span: Span, path: String, depth: usize) {
        if text.lines().any(separates)
            && let Some(objects) = manifests(text)
        {
            for mut object in objects {
                place_at(&mut object.node, span);
                self.visit(&object.node, path.clone(), &object.mistakes, depth + 1);
            }
            return;
        }
        let here = block(self.file, text, span);
        let mut sink = Sink::default();
        let parsed = document::parse(here.as_deref().unwrap_or(text).as_bytes(), &mut sink.diagnostics);
        match parsed {
            Ok(mut root) => {
                if here.is_none() {
                    place_at(&mut root, span);
                }
                self.visit(&root, path, &sink.diagnostics, depth + 1);
            }
            Err(error) => {
                let place = if here.is_some() { error.span.unwrap_or(span) } else { span };
                let message = format!("the configuration at `{path}` can't be read: {}", error.message);
                self.error.get_or_insert(Diagnostic { message, ..error }.at(place));
            }
        }
    }
}

/// Whether the node is a configuration of a kind that is read.
fn is_configuration(node: &Node) -> bool {
    let Value::Map(entries) = &node.value else { return false };
    let is = |(key, value): &(At<String>, Node)| {
        key.value == "kind" && matches!(&value.value, Value::Text(kind) if kind == schema::KIND)
    };
    endpoint_picker::is(node) || entries.iter().any(is)
}

/// Whether a line of the text names a kind that is read, so that the text is parsed.
fn names_a_kind(text: &str) -> bool {
    let names = |line: &str| line.contains(endpoint_picker::KIND) || line.contains(schema::KIND);
    text.lines().any(|line| line.contains("kind") && names(line))
}

/// Whether a line separates documents.
fn separates(line: &str) -> bool {
    line.trim_end() == "---" || line.starts_with("--- #")
}

/// The objects of a manifest, parsed where they stand. `None` if one is no object of Kubernetes and no configuration.
fn manifests(text: &str) -> Option<Vec<Found>> {
    let lines: Vec<&str> = text.lines().collect();
    let mut objects = Vec::new();
    let mut start = 0;
    for part in lines.split(|line| separates(line)) {
        let begin = start;
        start += part.len() + 1;
        if part.iter().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
            continue;
        }
        let mut mistakes = Vec::new();
        let node =
            document::parse(format!("{}{}", "\n".repeat(begin), part.join("\n")).as_bytes(), &mut mistakes).ok()?;
        let Value::Map(entries) = &node.value else { return None };
        let has = |name: &str| entries.iter().any(|(key, _)| key.value == name);
        if !(has("apiVersion") && has("kind")) {
            return None;
        }
        objects.push(Found { path: String::new(), node, mistakes });
    }
    (!objects.is_empty()).then_some(objects)
}

/// The part of the file in which `text` stands as a block, with empty lines before it. `None` if it is in another style.
fn block(file: &str, text: &str, span: Span) -> Option<String> {
    let wanted: Vec<&str> = text.lines().skip_while(|line| line.trim().is_empty()).collect();
    let first = wanted.first()?;
    let lines: Vec<&str> = file.lines().collect();
    // The indicator (`|`) is on the line of the value, and empty lines may follow it.
    let begin = (span.line as usize - 1..lines.len())
        .take(MAX_LEAD)
        .find(|at| lines.get(*at).is_some_and(|line| line.trim() == first.trim()))?;
    let width = |line: &str| line.len() - line.trim_start().len();
    let indent = width(lines.get(begin)?).checked_sub(width(first))?;
    let part = lines.get(begin..begin + wanted.len())?;
    let same = |(line, wanted): (&&str, &&str)| line.get(indent..).unwrap_or_default().trim_end() == wanted.trim_end();
    let is_block = indent > 0 && part.iter().zip(&wanted).all(same);
    is_block.then(|| format!("{}{}\n", "\n".repeat(begin), part.join("\n")))
}

/// Gives every value the position `span`.
fn place_at(node: &mut Node, span: Span) {
    node.span = span;
    match &mut node.value {
        Value::Map(entries) => {
            for (key, value) in entries {
                key.span = span;
                place_at(value, span);
            }
        }
        Value::List(items) => items.iter_mut().for_each(|item| place_at(item, span)),
        _ => {}
    }
}

/// Warns that the other values of a chart have no effect. Objects of Kubernetes are others' business.
fn tell_of_rest(documents: &[Found], path: &str, span: Span, sink: &mut Sink) {
    let is_object = |one: &Found| match &one.node.value {
        Value::Map(entries) => entries.iter().any(|(key, _)| key.value == "kind"),
        _ => false,
    };
    if !documents.iter().any(is_object) {
        let message =
            format!("only the configuration at `{path}` is read: the other values of the file have no effect");
        sink.push(Diagnostic::new(Code::NoEffect, path, message).at(span));
    }
}

fn several(found: &[Found]) -> Diagnostic {
    let place = |one: &Found| {
        let name = if one.path.is_empty() { "a document".to_owned() } else { format!("`{}`", one.path) };
        format!("{name} (line {})", one.node.span.line)
    };
    let listed: Vec<String> = found.iter().take(MAX_LISTED).map(place).collect();
    let message = format!("the file contains {} configurations: {}", found.len(), listed.join(", "));
    let diagnostic = Diagnostic::new(Code::SeveralDocuments, "", message)
        .help(format!("keep one of them in the file; in the values of a Helm chart, `{SELECTS}` names it"));
    match found.get(1) {
        Some(second) => diagnostic.at(second.node.span),
        None => diagnostic,
    }
}

#[cfg(test)]
mod tests;
