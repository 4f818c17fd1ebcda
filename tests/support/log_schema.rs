//! The JSON Schema of log lines, `docs/reference/log-schema.json`, and the check of a line against it.
//!
//! The schema uses few keywords, and the check knows exactly those.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The schema.
pub(crate) struct LogSchema {
    /// The types of the fields by name.
    pub(crate) types: BTreeMap<String, String>,
    required: Vec<String>,
    levels: Vec<Value>,
}

impl LogSchema {
    /// Reads the schema of this version.
    pub(crate) fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/log-schema.json");
        let schema: Value = serde_json::from_slice(&std::fs::read(path).expect("the schema")).expect("JSON");
        let keywords: Vec<&String> = schema.as_object().expect("an object").keys().collect();
        assert_eq!(keywords, ["$schema", "description", "properties", "required", "title", "type"]);
        let mut types = BTreeMap::new();
        for (name, property) in schema["properties"].as_object().expect("properties") {
            assert!(property["description"].as_str().is_some_and(|text| text.len() > 5), "{name} has no description");
            let known = |keyword: &String| ["type", "description", "enum", "format"].contains(&keyword.as_str());
            assert!(property.as_object().expect("an object").keys().all(known), "{name}: {property}");
            types.insert(name.clone(), property["type"].as_str().expect("a type").to_owned());
        }
        let required = schema["required"].as_array().expect("a list").iter();
        let required = required.map(|name| name.as_str().expect("a name").to_owned()).collect();
        let levels = schema["properties"]["level"]["enum"].as_array().expect("levels").clone();
        Self { types, required, levels }
    }

    /// What is wrong with a line; `None` if it fits the schema.
    pub(crate) fn error(&self, line: &str) -> Option<String> {
        let Ok(Value::Object(line)) = serde_json::from_str(line) else { return Some("no JSON object".to_owned()) };
        if let Some(missing) = self.required.iter().find(|name| !line.contains_key(*name)) {
            return Some(format!("`{missing}` is missing"));
        }
        if !self.levels.contains(&line["level"]) {
            return Some(format!("the level is {}", line["level"]));
        }
        let is_ours = line["target"].as_str().is_some_and(|target| target.starts_with("attache"));
        line.iter().find_map(|(name, value)| {
            let Some(wanted) = self.types.get(name) else {
                return is_ours.then(|| format!("`{name}` is no field of the schema"));
            };
            let fits = match wanted.as_str() {
                "string" => value.is_string(),
                "integer" => value.is_u64() || value.is_i64(),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                other => panic!("unknown type {other}"),
            };
            (!fits).then(|| format!("`{name}` is {value}, and the schema says {wanted}"))
        })
    }
}
