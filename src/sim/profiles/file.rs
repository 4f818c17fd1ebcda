//! An engine's constants as a YAML file: what `attache replay --profile FILE.yaml` reads and `--fit-profile` writes.
//!
//! The keys are the fields of [`EngineConfig`] and [`LatencyModel`](crate::latency::LatencyModel) in the spelling of
//! configurations; times have a unit (`6ms`, `40us`, `49ns`) and are kept to the nanosecond. `base` names the profile
//! whose values hold where the file has none; without it none may be missing.

use super::{ProfileError, by_name};
use crate::engine::EngineConfig;
use attache_config_schema::document::{self, Node, Value};
use attache_types::spelling::closest;
use attache_types::units::parse_duration;
use std::fmt::Write;
use std::ops::RangeInclusive;
use std::time::Duration;

/// One step, token or pair takes no longer than an hour on anything that serves.
const LONGEST: Duration = Duration::from_secs(3_600);
/// The key of the profile that fills what is missing.
const BASE: &str = "base";

/// A constant of the file.
struct ProfileField {
    name: &'static str,
    kind: ValueKind,
}

enum ValueKind {
    Count(RangeInclusive<u32>, fn(&mut EngineConfig) -> &mut u32),
    Time(fn(&mut EngineConfig) -> &mut Duration),
}

/// All of them, in the order in which they are written.
const FIELDS: &[ProfileField] = &[
    ProfileField { name: "gpus", kind: ValueKind::Count(1..=1_024, |e| &mut e.gpus) },
    ProfileField { name: "blockSize", kind: ValueKind::Count(1..=65_536, |e| &mut e.block_size) },
    ProfileField { name: "numBlocks", kind: ValueKind::Count(1..=16_777_216, |e| &mut e.num_blocks) },
    ProfileField { name: "maxNumSeqs", kind: ValueKind::Count(1..=1_048_576, |e| &mut e.max_num_seqs) },
    ProfileField {
        name: "maxNumBatchedTokens",
        kind: ValueKind::Count(1..=16_777_216, |e| &mut e.max_num_batched_tokens),
    },
    ProfileField { name: "maxModelLen", kind: ValueKind::Count(2..=u32::MAX, |e| &mut e.max_model_len) },
    ProfileField { name: "stepBase", kind: ValueKind::Time(|e| &mut e.latency.step_base) },
    ProfileField { name: "weightRead", kind: ValueKind::Time(|e| &mut e.latency.weight_read) },
    ProfileField { name: "perPrefillToken", kind: ValueKind::Time(|e| &mut e.latency.per_prefill_token) },
    ProfileField { name: "perPrefillPair", kind: ValueKind::Time(|e| &mut e.latency.per_prefill_pair) },
    ProfileField { name: "perDecodeSequence", kind: ValueKind::Time(|e| &mut e.latency.per_decode_sequence) },
    ProfileField { name: "perContextToken", kind: ValueKind::Time(|e| &mut e.latency.per_context_token) },
    ProfileField { name: "transferSetup", kind: ValueKind::Time(|e| &mut e.latency.transfer_setup) },
    ProfileField { name: "perReceivedToken", kind: ValueKind::Time(|e| &mut e.latency.per_received_token) },
];

/// The engine that a file describes, at speed 1.
///
/// # Errors
/// Everything that is wrong with it, with lines.
pub fn read(bytes: &[u8]) -> Result<EngineConfig, ProfileError> {
    let mut diagnostics = Vec::new();
    let parsed = document::parse(bytes, &mut diagnostics);
    let root = parsed.map_err(|error| ProfileError::File(format!("it is no YAML of a profile: {}", error.message)))?;
    let mut wrong: Vec<String> = diagnostics.into_iter().map(|diagnostic| diagnostic.message).collect();
    let Value::Map(entries) = root.value else {
        return Err(ProfileError::File(format!("it is {}; a mapping of constants is allowed", root.value.describe())));
    };
    let base = entries.iter().find(|(key, _)| key.value == BASE);
    let mut engine = match base.map(|(_, node)| named(node)).transpose() {
        Ok(engine) => engine.unwrap_or_default(),
        Err(message) => {
            wrong.push(message);
            EngineConfig::default()
        }
    };
    for (key, node) in entries.iter().filter(|(key, _)| key.value != BASE) {
        let Some(field) = FIELDS.iter().find(|field| field.name == key.value) else {
            let meant = closest(&key.value, FIELDS.iter().map(|field| field.name).chain([BASE]));
            let hint = meant.map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
            wrong.push(format!("line {}: there is no constant `{}`{hint}", key.span.line, key.value));
            continue;
        };
        if let Err(message) = field.set(&mut engine, &node.value) {
            wrong.push(format!("line {}: `{}` is {message}", node.span.line, field.name));
        }
    }
    if base.is_none() {
        let missing = FIELDS.iter().filter(|field| entries.iter().all(|(key, _)| key.value != field.name));
        let missing: Vec<String> = missing.map(|field| format!("`{}`", field.name)).collect();
        if !missing.is_empty() {
            let missing = missing.join(", ");
            wrong.push(format!("{missing} missing; give each, or the profile that has them as `{BASE}`"));
        }
    }
    if wrong.is_empty() { Ok(engine) } else { Err(ProfileError::File(wrong.join("; "))) }
}

/// The file of an engine, with `comment` before it, line by line. What is not a constant of a file (the model's name,
/// adapters, speed) is not in it.
#[must_use]
pub fn write(engine: &EngineConfig, comment: &str) -> String {
    let mut text = String::new();
    for line in comment.lines() {
        let _ = writeln!(text, "# {line}");
    }
    let mut engine = engine.clone();
    for field in FIELDS {
        let _ = match &field.kind {
            ValueKind::Count(_, of) => writeln!(text, "{}: {}", field.name, of(&mut engine)),
            ValueKind::Time(of) => writeln!(text, "{}: {}", field.name, show(*of(&mut engine))),
        };
    }
    text
}

/// A time as a file has it: to the nanosecond.
#[must_use]
pub fn show(time: Duration) -> String {
    let nanos = time.as_nanos() as f64;
    match time.as_nanos() {
        0..1_000 => format!("{nanos}ns"),
        1_000..1_000_000 => format!("{}us", nanos / 1e3),
        _ => format!("{}ms", nanos / 1e6),
    }
}

fn named(node: &Node) -> Result<EngineConfig, String> {
    let wrong = |message: String| format!("line {}: `{BASE}` is {message}", node.span.line);
    let Value::Text(name) = &node.value else {
        return Err(wrong(format!("{}; the name of a profile is allowed", node.value.describe())));
    };
    by_name(name).map_err(|error| wrong(format!("`{name}`: {error}")))
}

impl ProfileField {
    fn set(&self, engine: &mut EngineConfig, value: &Value) -> Result<(), String> {
        match &self.kind {
            ValueKind::Count(allowed, of) => {
                let given = if let Value::Int(number) = value { u32::try_from(*number).ok() } else { None };
                *of(engine) = given.filter(|number| allowed.contains(number)).ok_or_else(|| {
                    let (least, most) = (allowed.start(), allowed.end());
                    format!("{}; a whole number from {least} to {most} is allowed", value.describe())
                })?;
            }
            ValueKind::Time(of) => {
                let given = match value {
                    Value::Text(text) => parse_duration(text).ok(),
                    Value::Int(0) => Some(Duration::ZERO),
                    _ => None,
                };
                *of(engine) = given.filter(|time| *time <= LONGEST).ok_or_else(|| {
                    format!("{}; a time from 0 to an hour is allowed, as in `6ms`, `40us` or `49ns`", value.describe())
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profiles::PROFILES;

    #[test]
    fn every_profile_survives_its_file() {
        for profile in PROFILES {
            let text = write(&profile.config(), "what it is\nand whence");
            assert!(text.starts_with("# what it is\n# and whence\ngpus: "), "{text}");
            assert_eq!(read(text.as_bytes()).unwrap(), profile.config(), "{text}");
        }
        let odd = Duration::from_nanos(40_123);
        assert_eq!((show(odd).as_str(), parse_duration("40.123us")), ("40.123us", Ok(odd)));
        assert_eq!(show(Duration::from_micros(14_000)), "14ms");
    }

    #[test]
    fn a_base_fills_what_is_missing() {
        let engine = read(b"base: qwen3-32b-2xh100\nstepBase: 9.5ms\nperPrefillPair: 0\n").unwrap();
        let mut expected = by_name("qwen3-32b-2xh100").unwrap();
        expected.latency.step_base = Duration::from_micros(9_500);
        expected.latency.per_prefill_pair = Duration::ZERO;
        assert_eq!(engine, expected);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line_and_what_is_allowed() {
        for (text, part) in [
            ("", "it is no YAML"),
            ("- 1", "it is a list; a mapping"),
            ("base: 8b\n", "line 1: `base` is `8b`: unknown engine profile"),
            ("base: 8\n", "`base` is the number 8; the name of a profile"),
            ("base: 8b-h100\nstepbase: 6ms\n", "line 2: there is no constant `stepbase`; did you mean `stepBase`?"),
            ("base: 8b-h100\nstepBase: 6\n", "line 2: `stepBase` is the number 6; a time from 0"),
            ("base: 8b-h100\nstepBase: 2h\n", "a time from 0 to an hour"),
            ("base: 8b-h100\nblockSize: 0\n", "`blockSize` is the number 0; a whole number from 1 to 65536"),
            ("base: 8b-h100\nnumBlocks: many\n", "`numBlocks` is the text `many`; a whole number"),
            ("stepBase: 6ms\n", "`perReceivedToken` missing; give each, or the profile"),
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        let both = read(b"base: 8b-h100\nstepBase: 6\nblockSize: x\n").unwrap_err().to_string();
        assert!(both.contains("`stepBase`") && both.contains("`blockSize`"), "{both}");
    }
}
