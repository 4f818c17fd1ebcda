//! What comes from the declarations of the keys in [`schema`](crate::schema) and of the parameters of plugins: the
//! reference pages, the JSON Schema for editors, a file with all defaults, and the keys that need a restart.

use crate::schema::{API_VERSION, Catalogue, File, KIND, Key, Kind, Range, Section, below, plain};
use crate::settings::Settings;
use attache_flow::registry::{self as flow, PolicyDescriptor};
use attache_scheduling::Registry;
use serde_json::{Map, Value as Json, json};
use std::fmt::Write as _;

/// A key of the file, for the reference page.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its path, such as `pools.scrape.interval`; that of an item of a list or of a mapping has no position or name.
    pub path: String,
    /// Other spellings of its name.
    pub aliases: &'static [&'static str],
    /// What its value may be: type, range, unit.
    pub value: String,
    /// Its value if it is absent.
    pub default: String,
    /// What it means.
    pub note: &'static str,
    /// The flag that outranks it, without dashes.
    pub flag: Option<&'static str>,
    /// Whether a change takes effect only after a restart.
    pub restart: bool,
}

/// Every key, sections before their keys.
#[must_use]
pub fn rows() -> Vec<Row> {
    rows_of(&File::keys())
}

/// Every key of a section, or every parameter of a plugin.
#[must_use]
pub fn rows_of(section: &Section) -> Vec<Row> {
    let mut rows = Vec::new();
    add_rows(section, "", false, &mut rows);
    rows
}

fn add_rows(section: &Section, path: &str, restart: bool, rows: &mut Vec<Row>) {
    for key in &section.keys {
        let path = below(path.to_owned(), key.name);
        let restart = key.restart.unwrap_or(restart);
        let (path_of_row, aliases, note) = (path.clone(), key.aliases, key.note);
        let flag = key.flag.map(|flag| flag.name);
        rows.push(Row { path: path_of_row, aliases, value: value(key), default: default(key), note, flag, restart });
        if let Some(section) = inner(&key.kind) {
            add_rows(section, &path, restart, rows);
        }
    }
}

/// The section in the values of a key, in the items of its list, or in the values of its mapping.
fn inner(kind: &Kind) -> Option<&Section> {
    match kind {
        // Strategies and policies are everywhere the same, and have a page of their own.
        Kind::Section(section) if section.keys.iter().any(|key| matches!(key.kind, Kind::Parameters(_))) => None,
        Kind::Section(section) => Some(section),
        Kind::List(items) | Kind::Map(items) => inner(items),
        _ => None,
    }
}

fn value(key: &Key) -> String {
    let mut said = kind_in_words(&key.kind);
    if let Some(range) = &key.range {
        let _ = write!(said, ", {}", range.text);
    }
    // The type says these.
    if !matches!(key.unit, "" | "bytes" | "port") {
        let _ = write!(said, " ({})", key.unit);
    }
    said
}

fn kind_in_words(kind: &Kind) -> String {
    match kind {
        Kind::Switch => "`true` or `false`".to_owned(),
        Kind::Whole(_, max) if *max == u16::MAX.into() => "port".to_owned(),
        Kind::Whole(..) => "whole number".to_owned(),
        Kind::Number => "number".to_owned(),
        Kind::Text(_) => "text".to_owned(),
        Kind::Duration => "duration".to_owned(),
        Kind::Size => "size".to_owned(),
        Kind::Address => "IP address".to_owned(),
        Kind::Word(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
        Kind::List(items) => format!("list of {}", plural(items)),
        Kind::Map(values) => format!("{} by name", plural(values)),
        Kind::Either(kinds) => kinds.iter().map(kind_in_words).collect::<Vec<_>>().join(" or "),
        Kind::Section(section) => section.alone.map_or_else(|| "mapping".to_owned(), |_| "text or mapping".to_owned()),
        Kind::Parameters(_) => "mapping".to_owned(),
        Kind::Any => "any".to_owned(),
    }
}

fn plural(kind: &Kind) -> String {
    match kind {
        Kind::Text(_) => "texts".to_owned(),
        Kind::Section(Section { alone: Some(_), .. }) => "texts or mappings".to_owned(),
        kind => format!("{}s", kind_in_words(kind)),
    }
}

pub(crate) fn default(key: &Key) -> String {
    match &key.default {
        Some(value) if key.absent.is_empty() => format!("`{}`", plain(value)),
        None if key.required => "required".to_owned(),
        _ if key.absent.is_empty() => "–".to_owned(),
        _ => key.absent.to_owned(),
    }
}

/// A JSON Schema (draft 2020-12) of the file, with the parameters of the plugins in `registry`.
#[must_use]
pub fn json_schema(registry: &Registry) -> Json {
    let mut schema = section_schema(&File::keys());
    if let Some(schema) = schema.as_object_mut() {
        let rules = Catalogue::ALL.map(|catalogue| (format!("{catalogue:?}"), parameter_rules(catalogue, registry)));
        schema.insert("$defs".to_owned(), Map::from_iter(rules).into());
        schema.insert("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema"));
        schema.insert("title".to_owned(), json!(format!("Configuration of Attaché, {API_VERSION}")));
        schema.insert("required".to_owned(), json!(["apiVersion", "kind"]));
        if let Some(properties) = schema.get_mut("properties").and_then(Json::as_object_mut) {
            properties.insert("apiVersion".to_owned(), json!({"const": API_VERSION}));
            properties.insert("kind".to_owned(), json!({"const": KIND}));
        }
    }
    schema
}

/// The names of each plugin, and the declaration of its parameters.
fn plugins(catalogue: Catalogue, registry: &Registry) -> Vec<(Vec<&'static str>, Section)> {
    fn policies<P: ?Sized>(list: &[&PolicyDescriptor<P>]) -> Vec<(Vec<&'static str>, Section)> {
        list.iter().map(|d| (names(d.name, d.aliases), (d.parameters)())).collect()
    }
    fn names(name: &'static str, aliases: &[&'static str]) -> Vec<&'static str> {
        aliases.iter().copied().chain([name]).collect()
    }
    match catalogue {
        Catalogue::Strategies => registry.strategies().iter().map(|d| (vec![d.name], (d.parameters)())).collect(),
        Catalogue::Parts => registry.plugins().iter().map(|d| (names(d.name, d.aliases), (d.parameters)())).collect(),
        Catalogue::Fairness => policies(flow::FAIRNESS),
        Catalogue::Orderings => policies(flow::ORDERINGS),
        Catalogue::Ceilings => policies(flow::CEILINGS),
        Catalogue::Detectors => policies(flow::DETECTORS),
        Catalogue::Admitters => policies(flow::ADMITTERS),
    }
}

/// What the name of a plugin says about the parameters beside it. Other names, such as sums of strategies, say nothing.
fn parameter_rules(catalogue: Catalogue, registry: &Registry) -> Json {
    let rule = |(names, parameters): (Vec<&str>, Section)| {
        let key = catalogue.key();
        json!({
            "if": {"properties": {key: {"enum": names}}, "required": [key]},
            "then": {"properties": {"parameters": {"anyOf": [section_schema(&parameters), {"type": "null"}]}}},
        })
    };
    json!({"allOf": plugins(catalogue, registry).into_iter().map(rule).collect::<Vec<_>>()})
}

fn section_schema(section: &Section) -> Json {
    let names = |key: &Key| key.aliases.iter().copied().chain([key.name]).map(str::to_owned).collect::<Vec<_>>();
    let schemas = |key| names(key).into_iter().map(move |name| (name, key_schema(key)));
    let properties: Map<String, Json> = section.keys.iter().flat_map(schemas).collect();
    let required: Vec<&str> = section.keys.iter().filter(|key| key.required).map(|key| key.name).collect();
    let mut mapping = json!({
        "type": "object",
        "description": section.note,
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    });
    let catalogue = |key: &Key| if let Kind::Parameters(catalogue) = key.kind { Some(catalogue) } else { None };
    if let (Some(catalogue), Some(mapping)) = (section.keys.iter().find_map(catalogue), mapping.as_object_mut()) {
        mapping.insert("$ref".to_owned(), json!(format!("#/$defs/{catalogue:?}")));
    }
    match section.keys.iter().find(|key| section.alone == Some(key.name)) {
        Some(key) => json!({"anyOf": [kind_schema(&key.kind, None), mapping]}),
        None => mapping,
    }
}

/// An absent key and an explicit `null` are the same, unless the key is required.
fn key_schema(key: &Key) -> Json {
    let schema = kind_schema(&key.kind, key.range.as_ref());
    let mut schema = if key.required { schema } else { json!({"anyOf": [schema, {"type": "null"}]}) };
    if let Some(schema) = schema.as_object_mut() {
        let absent = if key.absent.is_empty() { String::new() } else { format!(" If absent: {}.", key.absent) };
        schema.insert("description".to_owned(), json!(format!("{}{absent}", key.note)));
        let default = key.default.clone().filter(|_| key.absent.is_empty());
        schema.extend(default.map(|value| ("default".to_owned(), value)));
    }
    schema
}

fn kind_schema(kind: &Kind, range: Option<&Range>) -> Json {
    match kind {
        Kind::Switch => json!({"type": "boolean"}),
        Kind::Whole(min, max) => {
            // JSON's integers end at the greatest of 64 bits, which the file allows.
            let mut schema = json!({"type": "integer", "minimum": *min as i64});
            if let (Some(schema), true) = (schema.as_object_mut(), *max < i64::MAX.into()) {
                schema.insert("maximum".to_owned(), json!(*max as i64));
            }
            bounded(schema, range)
        }
        Kind::Number => bounded(json!({"type": "number"}), range),
        Kind::Text(least) => json!({"type": "string", "minLength": least}),
        Kind::Address => json!({"type": "string", "minLength": 1}),
        Kind::Duration => json!({
            "anyOf": [
                {"type": "string", "pattern": r"^\s*(0|([0-9.]+ *(ns|us|µs|ms|s|m|min|h|d) *)+)\s*$"},
                {"const": 0},
            ],
        }),
        Kind::Size => json!({
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9._]+\s*([kKmMgG]?[bB]?|[kKmMgG][iI][bB]?)\s*$"},
                {"type": "integer", "minimum": 0},
            ],
        }),
        Kind::Word(words) => json!({"enum": words}),
        Kind::List(items) => json!({"type": "array", "items": kind_schema(items, range)}),
        Kind::Map(values) => json!({"type": "object", "additionalProperties": kind_schema(values, range)}),
        Kind::Either(kinds) => {
            json!({"anyOf": kinds.iter().map(|kind| kind_schema(kind, range)).collect::<Vec<_>>()})
        }
        Kind::Section(section) => section_schema(section),
        Kind::Parameters(_) => json!({"type": "object"}),
        Kind::Any => json!(true),
    }
}

/// The schema of numbers with those bounds that are numbers.
fn bounded(mut schema: Json, range: Option<&Range>) -> Json {
    let (Some(schema_map), Some(range)) = (schema.as_object_mut(), range) else { return schema };
    if let Some((low, excluded)) = range.low.as_ref().filter(|(low, _)| low.is_number()) {
        schema_map.insert(if *excluded { "exclusiveMinimum" } else { "minimum" }.to_owned(), low.clone());
    }
    if let Some((high, excluded)) = range.high.as_ref().filter(|(high, _)| high.is_number()) {
        schema_map.insert(if *excluded { "exclusiveMaximum" } else { "maximum" }.to_owned(), high.clone());
    }
    schema
}

/// A file with every key. Keys with a default have it; all others are disabled by `#`.
#[must_use]
pub fn defaults() -> String {
    let mut out = String::from(
        "# Every key of Attaché's configuration, with its default. A key without a default is disabled by `#`.\n\
         # Notes begin with `# `, disabled keys with `#` alone.\n",
    );
    let _ = write!(out, "apiVersion: {API_VERSION}\nkind: {KIND}\n");
    let keys = File::keys();
    for key in keys.keys.iter().filter(|key| !matches!(key.name, "apiVersion" | "kind")) {
        out.push('\n');
        // A configuration without a pool is none.
        let is_on = key.name == "pools" || key.absent.is_empty();
        write_key(&mut out, key, 0, !is_on);
    }
    out
}

/// Longest line of a note.
const NOTE_COLUMNS: usize = 110;

fn write_key(out: &mut String, key: &Key, indent: usize, is_off: bool) {
    let margin = " ".repeat(indent);
    let mut said = key.note.to_owned();
    if let Kind::Word(_) = key.kind {
        let _ = write!(said, " One of {}.", kind_in_words(&key.kind));
    }
    if let Some(range) = &key.range {
        let _ = write!(said, " Allowed: {}.", range.text);
    }
    match key.absent {
        "" => {}
        "required" => said.push_str(" Required."),
        absent => drop(write!(said, " Default: {absent}.")),
    }
    for line in wrapped(&said, NOTE_COLUMNS - indent) {
        let _ = writeln!(out, "{margin}# {line}");
    }
    let off = if is_off { "#" } else { "" };
    match (&key.default, inner(&key.kind)) {
        (Some(value), _) => drop(writeln!(out, "{off}{margin}{}: {}", key.name, yaml(value))),
        (None, Some(section)) => {
            let _ = writeln!(out, "{off}{margin}{}:", key.name);
            write_section(out, section, &key.kind, indent + 2, is_off);
        }
        (None, None) => {
            // Only the name of the pool is required and not disabled.
            let (off, value) = if key.required && !is_off { ("", " default") } else { ("#", "") };
            let _ = writeln!(out, "{off}{margin}{}:{value}", key.name);
        }
    }
}

fn write_section(out: &mut String, section: &Section, kind: &Kind, indent: usize, is_off: bool) {
    let (margin, off) = (" ".repeat(indent), if is_off { "#" } else { "" });
    let indent = match kind {
        // The first key of an item stands behind its dash.
        Kind::List(_) => {
            let _ = writeln!(out, "{off}{margin}-");
            indent + 2
        }
        Kind::Map(_) => {
            let _ = writeln!(out, "{off}{margin}NAME:");
            indent + 2
        }
        _ => indent,
    };
    for key in &section.keys {
        let is_off = is_off || !key.absent.is_empty() && !key.required;
        write_key(out, key, indent, is_off);
    }
}

fn yaml(value: &Json) -> String {
    match value {
        // `off` and numbers in quotes would be read as something else by parsers of YAML 1.1.
        Json::String(text) if text.is_empty() || text == "off" => format!("\"{text}\""),
        value => plain(value),
    }
}

fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() || line.chars().count() + 1 + word.chars().count() <= columns => {
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

impl Settings {
    /// Paths of the keys whose values in `new` need a restart.
    #[must_use]
    pub fn restart_needed(&self, new: &Self) -> Vec<String> {
        let mut changed = Vec::new();
        let values = (&self.json(str::to_owned), &new.json(str::to_owned));
        add_changed(&File::keys(), "", false, values, &mut changed);
        changed
    }
}

fn add_changed(section: &Section, path: &str, restart: bool, (old, new): (&Json, &Json), changed: &mut Vec<String>) {
    for key in &section.keys {
        let path = below(path.to_owned(), key.name);
        let restart = key.restart.unwrap_or(restart);
        let (old, new) = (&old[key.name], &new[key.name]);
        match inner(&key.kind) {
            Some(section) if old.is_object() && new.is_object() => {
                add_changed(section, &path, restart, (old, new), changed);
            }
            _ if restart && old != new => changed.push(path),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each plugin's name, and the declaration of its parameters.
    fn declared_parameters() -> Vec<(&'static str, Section)> {
        let registry = Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]);
        let all = Catalogue::ALL.into_iter().flat_map(|catalogue| plugins(catalogue, &registry));
        all.map(|(names, section)| (names[0], section)).collect()
    }

    #[test]
    fn every_key_has_a_note_a_default_and_a_unit() {
        fn check(section: &Section, path: &str) {
            for key in &section.keys {
                let path = format!("{path}.{}", key.name);
                assert!(!key.note.is_empty(), "{path} has no note");
                assert!(key.note.ends_with('.'), "{path}: the note is no sentence");
                let is_section = matches!(key.kind, Kind::Section(_));
                let has_default = key.default.is_some() || key.required || !key.absent.is_empty();
                assert!(is_section || has_default, "{path} does not say what happens if it is absent");
                let is_number = matches!(key.kind, Kind::Whole(..) | Kind::Number | Kind::Size);
                assert!(!is_number || !key.unit.is_empty(), "{path} has no unit");
                if let Some(section) = inner(&key.kind) {
                    check(section, &path);
                }
            }
        }
        check(&File::keys(), "");
        assert!(rows().len() > 200, "{}", rows().len());
        let declared = declared_parameters();
        declared.iter().for_each(|(name, section)| check(section, name));
        let parameters: usize = declared.iter().map(|(_, section)| rows_of(section).len()).sum();
        assert!(parameters > 150, "{parameters}");
    }

    #[test]
    fn defaults_are_in_their_ranges() {
        fn check(section: &Section, path: &str) {
            for key in &section.keys {
                let path = format!("{path}.{}", key.name);
                let low = key.range.as_ref().and_then(|range| range.low.as_ref()).and_then(|(low, _)| low.as_f64());
                let high = key.range.as_ref().and_then(|range| range.high.as_ref()).and_then(|(high, _)| high.as_f64());
                if let Some(default) = key.default.as_ref().and_then(Json::as_f64) {
                    assert!(low.is_none_or(|low| low <= default), "{path}");
                    assert!(high.is_none_or(|high| default <= high), "{path}");
                }
                if let Some(section) = inner(&key.kind) {
                    check(section, &path);
                }
            }
        }
        check(&File::keys(), "");
        declared_parameters().iter().for_each(|(name, section)| check(section, name));
    }
}
