//! Configurations that are loaded with AIBrix's environment variables.

use crate::support::process::scratch;
use attache_config::aibrix_env::AibrixEnv;
use attache_config::reference_env::ReferenceEnv;
use attache_config::{ConfigText, Diagnostic, Overrides, Settings, Sources, load};
use serde_json::Value;
use std::process::Command;

/// The variables of an environment.
pub(super) type Variables<'a> = &'a [(&'a str, &'a str)];

/// A pool of two servers without a strategy.
pub(super) const PLAIN: &str =
    "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {name: a, endpoints: ['127.0.0.1:8000', '127.0.0.1:8001']}\n";
/// A pool of a prefill and a decode server by AIBrix's labels.
pub(super) const PAIR: &str = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: a\n  endpoints:\n  \
                               - {address: '127.0.0.1:8000', labels: {role-name: prefill}}\n  \
                               - {address: '127.0.0.1:8001', labels: {role-name: decode}}\n";

/// Loads a configuration with these variables: settings and warnings, or errors.
pub(super) fn read(text: &str, variables: Variables<'_>) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
    let set = || variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let overrides =
        Overrides { aibrix: AibrixEnv::of(set()), reference: ReferenceEnv::of(set()), ..Overrides::default() };
    let text = Some(ConfigText { name: "test".to_owned(), bytes: text.into() });
    load(&Sources { registry: attache::plugins::registry(), text, overrides, ..Sources::default() })
}

/// The first pool of `/config_dump` with these variables. Each of them must be accepted and have an effect.
pub(super) fn pool(text: &str, variables: Variables<'_>) -> Value {
    let (settings, warnings) = read(text, variables).unwrap_or_else(|errors| panic!("{variables:?}: {errors:?}"));
    let void: Vec<_> = warnings.iter().filter(|d| variables.iter().any(|(name, _)| d.path == *name)).collect();
    let void: Vec<_> = void.into_iter().filter(|d| !matches!(d.code.as_str(), "W303" | "W304")).collect();
    assert!(void.is_empty(), "{void:?}");
    settings.to_json()["pools"][0].clone()
}

/// The value at `pointer` of the first pool with these variables.
pub(super) fn value(text: &str, variables: Variables<'_>, pointer: &str) -> Value {
    let pool = pool(text, variables);
    pool.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {pool}")).clone()
}

/// Runs `attache check` with these variables: whether the file is valid, and standard error.
pub(super) fn check(text: &str, variables: Variables<'_>) -> (bool, String) {
    let directory = scratch("check");
    let file = directory.path().join("attache.yaml");
    std::fs::write(&file, text).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    let output = command.arg("check").arg(&file).envs(variables.iter().copied()).output().expect("attache check");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Checks that `attache check` warns that the variable has no effect, with these words.
pub(super) fn assert_void(variable: &str, words: &str) {
    let (good, said) = check(PLAIN, &[(variable, "1")]);
    assert!(good, "{said}");
    let is_void = said.contains(variable) && said.contains("has no effect") && said.contains(words);
    assert!(is_void, "{variable}: `{words}` is not in: {said}");
}
