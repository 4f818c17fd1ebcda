//! Profiles in the format that AIBrix writes.

use super::testing::{profile, simulated};
use super::*;
use serde_json::{Value, json};

#[test]
fn lengths_match_by_their_logarithms() {
    let profile = profile(&simulated("a100"));
    assert_eq!(profile.lengths[0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    assert_eq!(profile.lengths[1], [7.0, 8.0, 9.0, 10.0, 11.0]);
    for (answer, prompt, row, column) in [
        // AIBrix: values beyond an end count as the end.
        (0, 2_049, 0, 4),
        (4, 128, 0, 0),
        (512, 2_048, 7, 4),
        (100_000, 1, 7, 0),
        // 2^2.5 is halfway between two lengths.
        (5, 180, 0, 0),
        (6, 182, 1, 1),
    ] {
        assert_eq!(profile.cell(answer, prompt), Cell { row, column }, "{answer} {prompt}");
    }
}

#[test]
fn most_urgent_objective_counts() {
    let with = |slos: Value| {
        let mut value = simulated("a100");
        value["ttft"] = json!(vec![vec![0.1; 5]; 8]);
        value["slos"] = slos;
        profile(&value).spare(64, 1_024).map(|spare| (spare * 1e6).round() / 1e6)
    };
    let e2e = 0.64 + 0.256;
    let near = |seconds: f64| Some((seconds * 1e6).round() / 1e6);
    assert_eq!(with(json!({"e2e": 5.0})), near(5.0 - e2e));
    assert_eq!(with(json!({"e2e": 5.0, "tpat": 0.001})), near(0.001 * 1_088.0 - e2e));
    assert_eq!(with(json!({"e2e": 5.0, "tpat": 0.001, "ttft": 0.5})), near(0.5 - 0.1));
    assert_eq!(with(json!({"tpat": 0.001, "ttft": 0.5, "tpot": 0.02})), near(0.02 * 64.0 + 0.5 - e2e));
    assert_eq!(with(json!({"tpot": 0.02})), near(0.02 * 64.0 - e2e));
    assert_eq!(with(json!({"tput": 3.0, "percentile": 99})), None, "no objective of time");
    let mut value = simulated("a100");
    value["slos"] = json!({"ttft": 0.5});
    assert_eq!(profile(&value).spare(64, 1_024), None, "AIBrix: an objective that was not measured");
    value["slos"] = Value::Null;
    assert_eq!(profile(&value).spare(64, 1_024), None);
}

#[test]
fn request_uses_its_part_of_the_concurrent_requests() {
    let profile = profile(&simulated("a100"));
    // 4 at once wherever a rate meets the objective.
    assert!((profile.consumption(64, 1_024).unwrap() - 0.25).abs() < 1e-12);
    assert_eq!(profile.consumption(512, 2_048), None);
}

#[test]
fn invalid_field_is_named() {
    let broken = |change: fn(&mut Value)| {
        let mut value = simulated("a100");
        change(&mut value);
        Profile::parse(value.to_string().as_bytes()).unwrap_err().to_string()
    };
    for (error, word) in [
        (broken(|v| v["indexes"] = json!([[4, 8]])), "length"),
        (broken(|v| v["indexes"][0] = json!([8, 4])), "indexes"),
        (broken(|v| v["indexes"][1] = json!([])), "indexes"),
        (broken(|v| v["indexes"][1][0] = json!(-128)), "indexes"),
        (broken(|v| v["tputs"] = json!([[1.0]])), "tputs"),
        (broken(|v| v["e2e"][2][1] = json!(-1.0)), "e2e"),
        (broken(|v| v["ttft"] = json!([[1.0]])), "ttft"),
        (broken(|v| v["gpu"] = Value::Null), "expected a string"),
        (Profile::parse(b"[").unwrap_err().to_string(), "not a valid profile"),
    ] {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn profiles_are_found_by_model_and_deployment() {
    let keyed = |key: &str| Profile::parse_keyed(key, simulated("named").to_string().as_bytes()).unwrap();
    let all = SloProfiles::new(Vec::new(), true);
    all.publish(vec![profile(&simulated("a100"))]);
    let redis =
        Arc::new(RedisProfiles::from_pointee(vec![keyed("llama_7b_a100"), keyed("llama_a100"), keyed("llama_l40s")]));
    all.read_there(redis.clone());
    let found = |model: &str, deployment: Option<&str>| {
        all.load().find(model, deployment).map(|p| p.key().unwrap_or("file").to_owned())
    };
    for (model, deployment, expected) in [
        ("llama", Some("a100"), Some("llama_a100")),
        ("llama_7b", Some("a100"), Some("llama_7b_a100")),
        // Both parts may contain underscores, and both must match.
        ("llama", Some("7b_a100"), Some("llama_7b_a100")),
        ("llama", Some("l40s"), Some("llama_l40s")),
        ("llama_7b", Some("l40s"), None),
        ("qwen", Some("a100"), Some("file")),
        ("qwen", Some("named"), None),
        // Without a known deployment, the profile must be the only candidate.
        ("llama", None, Some("file")),
        ("llama_7b", None, Some("llama_7b_a100")),
        ("qwen", None, Some("file")),
    ] {
        assert_eq!(found(model, deployment).as_deref(), expected, "{model} {deployment:?}");
    }
    redis.store(Arc::default());
    assert_eq!(found("llama", Some("l40s")), None);
}
