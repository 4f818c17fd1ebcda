//! Parameters of plugins: their errors, their reader, and those without effect.

pub use crate::param_error::{ParamError, Step};
pub use crate::parameter::{Parameter, params, section};
use serde_json::Value;

/// Parameters that change nothing while others of their plugin have certain values.
#[derive(Clone, Copy, Debug)]
pub struct Inert {
    /// Names of the plugins.
    pub plugins: &'static [&'static str],
    /// Paths of the parameters, with `.` between the keys.
    pub keys: &'static [&'static str],
    /// Whether they change nothing; the argument is all parameters of the plugin, which are valid.
    pub when: fn(&Value) -> bool,
    /// The reason, for the message.
    pub why: &'static str,
}

impl Inert {
    /// The parameters among `given` that change nothing for the plugin called `name`, each as an error at its key.
    /// `all` are the parameters with those from other sources.
    pub fn find<'r>(
        rules: impl IntoIterator<Item = &'r Self>,
        name: &str,
        given: &Value,
        all: &Value,
    ) -> Vec<ParamError> {
        let mut found = Vec::new();
        for rule in rules.into_iter().filter(|rule| rule.plugins.contains(&name) && (rule.when)(all)) {
            for path in rule.keys {
                let steps: Vec<Step> = path.split('.').map(|key| Step::Key(key.to_owned())).collect();
                if at(given, &steps).is_some_and(|value| !value.is_null()) {
                    let message = format!("`{path}` has no effect: {}", rule.why);
                    found.push(ParamError::of_key(message, steps));
                }
            }
        }
        found
    }
}

/// Returns the value at `steps`.
fn at<'v>(root: &'v Value, steps: &[Step]) -> Option<&'v Value> {
    steps.iter().try_fold(root, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Item(index) => value.get(index),
    })
}

crate::parameters! {
    /// The parameters of a plugin that has none.
    pub struct NoParams {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    crate::parameters! {
        struct Outer {
            /// A number.
            "weight" => weight: f32 { default: 1.0; },
            /// A whole number.
            "most" | "limit" => most: u32 { default: 0; range: 0..=9; },
            /// A keyword.
            "mode" => mode: Mode { default: Mode::LeastRequest; },
            /// A text.
            "header" => header: String { default: String::new(); },
            /// A mapping.
            "inner" => inner: Option<Inner>,
            /// Mappings.
            "items" => items: Vec<Inner>,
            /// Numbers by name.
            "bounds" => bounds: BTreeMap<String, f64>,
            /// Whole numbers.
            "many" => many: Vec<u16>,
            ignored {
                /// Without effect.
                "old": u16,
            }
        }
        struct Inner {
            /// A switch.
            "on" => on: bool,
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Mode {
        LeastRequest,
        Random,
    }

    crate::keywords! {
        Mode: "least-request" => LeastRequest, "random" => Random;
    }

    #[test]
    fn wrong_parameter_error_names_value_path_and_allowed() {
        for (given, path, message) in [
            (json!({"weight": "much"}), ".weight", "`weight` must be a number, got the text `much`"),
            (json!({"most": -1}), ".most", "`most` must be a whole number of 0 to 4294967295, got the number -1"),
            (json!({"most": 1.5}), ".most", "`most` must be a whole number of 0 to 4294967295, got the number 1.5"),
            (json!({"mode": "randon"}), ".mode", "`mode` is `randon`; did you mean `random`?"),
            (json!({"mode": "x"}), ".mode", "`mode` is `x`, allowed: least-request, random"),
            (json!({"mode": 3}), ".mode", "`mode` must be text, got the number 3"),
            (json!({"header": [1]}), ".header", "`header` must be text, got a list"),
            (json!({"inner": 1}), ".inner", "`inner` must be a mapping, got the number 1"),
            (json!({"inner": {"on": "yes"}}), ".inner.on", "`on` must be `true` or `false`, got the text `yes`"),
            (json!({"inner": {}}), ".inner", "`on` is missing"),
            (json!({"most": 10}), ".most", "`most` is 10; 0 to 9 is allowed"),
            (json!({"limit": 10}), ".limit", "`limit` is 10; 0 to 9 is allowed"),
            (json!({"most": 1, "limit": 1}), ".limit", "`limit` is another name of `most`, and both are given"),
            (json!({"old": "a"}), ".old", "`old` must be a whole number of 0 to 65535, got the text `a`"),
            (
                json!({"items": [{"on": true}, {"on": 1}]}),
                ".items[1].on",
                "`on` must be `true` or `false`, got the number 1",
            ),
            (json!({"items": {}}), ".items", "`items` must be a list, got a mapping"),
            (
                json!({"many": [1, "a"]}),
                ".many[1]",
                "each item of `many` must be a whole number of 0 to 65535, got the text `a`",
            ),
            (json!({"bounds": {"a": null}}), ".bounds.a", "`a` must be a number, got nothing"),
            (json!({"wieght": 1}), ".wieght", "unknown parameter `wieght`; did you mean `weight`?"),
            (
                json!({"colour": 1}),
                ".colour",
                "unknown parameter `colour`, allowed: weight, most, limit, mode, header, inner, items, bounds, many, \
                 old",
            ),
            (json!({"inner": {"off": 1}}), ".inner.off", "unknown parameter `off`, allowed: on"),
            (json!([1]), "", "parameters must be a mapping, got a list"),
            (json!("text"), "", "parameters must be a mapping, got the text `text`"),
        ] {
            let Err(error) = params::<Outer>(&given) else { panic!("{given} was read") };
            let shown: String = error.steps().iter().map(ToString::to_string).collect();
            assert_eq!((shown.as_str(), error.to_string().as_str()), (path, message), "{given}");
            assert_eq!(error.is_of_key(), message.starts_with("unknown parameter"), "{given}");
        }
    }

    #[test]
    fn absent_parameters_have_their_defaults_and_null_counts_as_absent() {
        for given in [json!(null), json!({}), json!({"weight": null, "inner": null, "many": null, "old": null})] {
            let read = params::<Outer>(&given).unwrap();
            assert_eq!((read.weight, read.most, read.mode, &*read.header), (1.0, 0, Mode::LeastRequest, ""), "{given}");
            assert!(read.inner.is_none() && read.items.is_empty() && read.bounds.is_empty() && read.many.is_empty());
        }
        let read = params::<Outer>(&json!({"limit": 3, "items": [{"on": true}]})).unwrap();
        assert!(read.most == 3 && read.items[0].on, "{read:?}");
    }

    #[test]
    fn declaration_says_what_the_reader_accepts() {
        let section = section::<Outer>();
        let key = |name| section.keys.iter().find(|key| key.name == name).unwrap();
        assert_eq!(key("most").range.as_ref().map(|range| &*range.text), Some("0 to 9"));
        assert_eq!((key("weight").default.clone(), key("most").aliases), (Some(json!(1.0)), &["limit"][..]));
        assert_eq!((key("mode").note, key("mode").default.clone()), ("A keyword.", Some(json!("least-request"))));
        assert!(section.keys.iter().all(|key| !key.required) && section.keys.len() == 9);
        assert!(super::section::<Inner>().keys[0].required);
    }

    #[test]
    fn plugin_without_parameters_says_that_there_are_none() {
        let error = params::<NoParams>(&json!({"temperature": 3})).unwrap_err();
        assert_eq!(error.to_string(), "unknown parameter `temperature`; there are none");
    }

    #[test]
    fn error_of_a_part_keeps_the_whole_path() {
        let error =
            ParamError::value("windowSize", 0, "at least 1 is needed").under("parameters").in_item(2).under("plugins");
        let shown: String = error.steps().iter().map(ToString::to_string).collect();
        assert_eq!(shown, ".plugins[2].parameters.windowSize");
        assert_eq!(error.named("vtc-basic").to_string(), "`vtc-basic`: `windowSize` is 0; at least 1 is needed");
    }
}
