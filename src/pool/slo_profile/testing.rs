//! Profiles for tests, in this crate and in crates that decide by them.

use super::Profile;
use serde_json::{Value, json};

/// A profile in AIBrix's format: responses of 4 to 512 tokens, prompts of 128 to 2,048, an end-to-end objective of 5 s.
/// Responses of 512 tokens meet it at no rate.
#[must_use]
pub fn simulated(deployment: &str) -> Value {
    let (answers, prompts) = ([4, 8, 16, 32, 64, 128, 256, 512], [128, 256, 512, 1024, 2048]);
    let seconds = |answer: i32, prompt: i32| f64::from(answer) * 0.01 + f64::from(prompt) * 0.000_25;
    let rows = |cell: &dyn Fn(i32, i32) -> f64| -> Vec<Vec<f64>> {
        answers.iter().map(|a| prompts.iter().map(|p| cell(*a, *p)).collect()).collect()
    };
    json!({
        "gpu": deployment,
        "cost": 1.0,
        "indexes": [answers, prompts],
        "tputs": rows(&|a, p| if a == 512 { 0.0 } else { 4.0 / seconds(a, p) }),
        "e2e": rows(&seconds),
        "created": 1_725_000_000.0,
        "slos": {"percentile": 99, "e2e": 5.0},
    })
}

/// Parses a profile that [`simulated`] made.
///
/// # Panics
/// When it is not a profile.
#[must_use]
#[expect(clippy::expect_used, reason = "a test that can't go on fails")]
pub fn profile(value: &Value) -> Profile {
    Profile::parse(value.to_string().as_bytes()).expect("a profile")
}
