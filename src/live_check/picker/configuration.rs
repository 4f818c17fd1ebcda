//! The configuration in effect against the one in the file.

use serde_json::Value;

/// Keys that depend on the machine, or on how the process was started.
const OF_THE_MACHINE: [&str; 3] = ["server.workers", "server.seed", "telemetry.logFormat"];
/// Most differences that are shown.
pub(super) const MAX_SHOWN: usize = 8;

/// A key with two values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Difference {
    /// Path of the key, as `pools.chat.scrape.interval`.
    pub(super) key: String,
    pub(super) in_file: Value,
    pub(super) in_effect: Value,
}

impl Difference {
    /// Whether the file itself can have set the key: its value is not that of `defaults`.
    pub(super) fn is_said(&self, defaults: &Value) -> bool {
        if self.key.starts_with("pools") {
            return true;
        }
        let default = self.key.split('.').try_fold(defaults, |value, key| value.get(key));
        default.unwrap_or(&Value::Null) != &self.in_file
    }
}

/// The keys whose values differ between two dumps, in alphabetical order.
pub(super) fn differences(file: &Value, effect: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    compare("", file, effect, &mut found);
    found.retain(|difference| !OF_THE_MACHINE.contains(&difference.key.as_str()));
    found
}

fn compare(path: &str, file: &Value, effect: &Value, found: &mut Vec<Difference>) {
    let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match (file, effect) {
        (Value::Object(a), Value::Object(b)) => {
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            for key in keys {
                let of = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                compare(&join(key), &of(a), &of(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if is_named(a) && is_named(b) => {
            let names = a.iter().chain(b).filter_map(name_of);
            let mut seen: Vec<&str> = Vec::new();
            for name in names {
                if !seen.contains(&name) {
                    seen.push(name);
                    let of = |list: &[Value]| list.iter().find(|v| name_of(v) == Some(name)).cloned();
                    compare(&join(name), &of(a).unwrap_or_default(), &of(b).unwrap_or_default(), found);
                }
            }
        }
        _ if file == effect => {}
        _ => found.push(Difference { key: path.to_owned(), in_file: file.clone(), in_effect: effect.clone() }),
    }
}

fn name_of(value: &Value) -> Option<&str> {
    value.get("name")?.as_str()
}

/// Whether all elements have a name, by which they are compared.
fn is_named(list: &[Value]) -> bool {
    !list.is_empty() && list.iter().all(|value| name_of(value).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn keys(file: &Value, effect: &Value) -> Vec<String> {
        differences(file, effect).into_iter().map(|difference| difference.key).collect()
    }

    #[test]
    fn differing_keys_are_named_with_their_pool() {
        let file = json!({
            "server": {"grpcPort": 9002, "workers": 4},
            "pools": [{"name": "a", "scrape": {"interval": "5s"}}, {"name": "b", "health": null}],
        });
        let effect = json!({
            "server": {"grpcPort": 9012, "workers": 8},
            "pools": [{"name": "b", "health": null}, {"name": "a", "scrape": {"interval": "2s"}}],
        });
        assert_eq!(keys(&file, &effect), ["pools.a.scrape.interval", "server.grpcPort"]);
        assert_eq!(keys(&file, &file), Vec::<String>::new());
    }

    #[test]
    fn pool_that_is_missing_is_one_difference() {
        let file = json!({"pools": [{"name": "a", "x": 1}, {"name": "c", "x": 1}]});
        let effect = json!({"pools": [{"name": "a", "x": 1}]});
        assert_eq!(keys(&file, &effect), ["pools.c"]);
    }

    #[test]
    fn key_that_only_a_flag_set_was_not_said_by_the_file() {
        let defaults = json!({"server": {"grpcPort": 9002}});
        let difference =
            |in_file: u16| Difference { key: "server.grpcPort".into(), in_file: in_file.into(), in_effect: 0.into() };
        assert!(!difference(9002).is_said(&defaults));
        assert!(difference(9100).is_said(&defaults));
    }
}
