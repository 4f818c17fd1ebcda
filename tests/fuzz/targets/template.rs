//! Any template with any JSON for its variables: it renders within its limits or fails, and twice alike.
#![no_main]

use attache_jinja::{Limits, Template, Unmetered, Value};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;

const LIMITS: Limits = Limits { fuel: 100_000, depth: 100, output: 64 << 10 };

fuzz_target!(|data: &[u8]| {
    // The variables are in the first line.
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (variables, source) = text.split_once('\n').unwrap_or(("", text));
    let Ok(template) = Template::compile(source) else { return };
    let variables: BTreeMap<String, Value> = serde_json::from_str(variables).unwrap_or_default();
    let render = || template.render(variables.clone(), 1_735_787_045, LIMITS, &Unmetered);
    let first = render();
    assert_eq!(first, render());
    if let Ok(text) = first {
        assert!(text.len() <= LIMITS.output);
    }
});
