//! Engines that have a name: what a model on certain cards costs, holds and takes into a step, each with
//! where its figures come from.
//!
//! Called by `replay` and by users of a simulated pool who have no servers of their own to measure; imports
//! `sim::engine`, `sim::latency` and `spelling`. Constants of one's own stand in a [`mod@file`]. The figures are
//! what data sheets and published runs say, put into the formula of [`crate::latency`]; they order policies well and
//! forecast no one's servers exactly. A profile leaves the model's name, adapters and queue bound as they are by default.
//!
//! What recurs in the derivations: a card reads at 3.35 TB/s and computes 989 TFLOP/s in bf16 (H100 SXM), of which a
//! prefill gets 40 %, attention 50 %, and the reading of weights, keys and values 80 % of the bandwidth; a token of a
//! sequence that decodes is computed like one of a prompt. A step's base is 1 ms and 15 us for each all-reduce. vLLM
//! keeps 90 % of a card's memory. Keys and values go from server to server at 40 GB/s (400 Gbit/s InfiniBand): a token
//! of 128 KiB takes 3.3 us, one of 320 KiB 8.2 us.

pub mod file;

use crate::engine::{DEFAULT_BLOCK_SIZE, EngineConfig};
use crate::latency::{DEFAULT_PER_RECEIVED_TOKEN, DEFAULT_STEP_BASE, DEFAULT_TRANSFER_SETUP, LatencyModel};
use attache_types::spelling::closest;
use std::time::Duration;

/// A prompt and its answer may have 131,072 tokens: the context of Llama 3.1 and 3.2, and room for every
/// prompt of the published traces.
pub const LONG_CONTEXT: u32 = 131_072;
/// 40,960 tokens: Qwen3-32B's own limit.
pub const QWEN3_CONTEXT: u32 = 40_960;

/// An engine with a name.
#[derive(Clone, Copy, Debug)]
pub struct EngineProfile {
    /// As it is asked for: lower case, with hyphens.
    pub name: &'static str,
    /// One line for a help text.
    pub about: &'static str,
    build: fn() -> EngineConfig,
}

/// Why there is no such engine.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// No profile has this name.
    #[error("unknown engine profile `{name}`{hint}; there are {}", names())]
    Unknown {
        /// The name that no profile has.
        name: String,
        /// The name that was probably meant, as a question; may be empty.
        hint: String,
    },
    /// Nothing goes at this speed.
    #[error("speed is {speed}, a number greater than 0 is needed")]
    Speed {
        /// The speed that is out of range.
        speed: f64,
    },
    /// A file's constants can't be used.
    #[error("{0}")]
    File(String),
}

/// All of them; the prompt tokens a second are those of a full first step of a prompt.
pub const PROFILES: &[EngineProfile] = &[
    EngineProfile {
        name: "8b-h100",
        about: "8B model on one H100: 22,600 prompt tokens/s, 27,000 blocks of 16",
        build: eight_billion,
    },
    EngineProfile {
        name: "70b-4xh100",
        about: "70B model on four H100: 10,700 prompt tokens/s, 26,000 blocks of 16",
        build: seventy_billion,
    },
    EngineProfile {
        name: "qwen3-32b-2xh100",
        about: "Qwen3-32B on two H100, as in llm-d's benchmark: 16,700 prompt tokens/s, 19,208 blocks of 16",
        build: qwen3_32b,
    },
    EngineProfile {
        name: "small-l40s",
        about: "3B model on one L40S: 21,500 prompt tokens/s, 18,900 blocks of 16, 2,048 tokens a step",
        build: small,
    },
    EngineProfile {
        name: "prefill-6000",
        about: "6,000 prompt tokens/s, 2,000 blocks of 512; contexts cost nothing: for comparing caches, not times \
         per token",
        build: prefill_bound,
    },
];

impl EngineProfile {
    /// What the engine is built with.
    #[must_use]
    pub fn config(&self) -> EngineConfig {
        (self.build)()
    }
}

/// The engine of this name.
///
/// # Errors
/// When there is none; the message has the name that was probably meant, and all there are.
pub fn by_name(name: &str) -> Result<EngineConfig, ProfileError> {
    if let Some(profile) = PROFILES.iter().find(|profile| profile.name == name) {
        return Ok(profile.config());
    }
    let meant = closest(name, PROFILES.iter().map(|profile| profile.name));
    let hint = meant.map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
    Err(ProfileError::Unknown { name: name.to_owned(), hint })
}

/// The list for a help text, one profile a line.
#[must_use]
pub fn list() -> String {
    let width = PROFILES.iter().map(|profile| profile.name.len()).max().unwrap_or_default();
    PROFILES.iter().map(|EngineProfile { name, about, .. }| format!("{name:width$}  {about}\n")).collect()
}

fn names() -> String {
    PROFILES.iter().map(|profile| format!("`{}`", profile.name)).collect::<Vec<_>>().join(", ")
}

impl EngineConfig {
    /// The same engine, `speed` times as fast as it is.
    ///
    /// # Errors
    /// When `speed` is not a number greater than 0.
    pub fn scaled(mut self, speed: f64) -> Result<Self, ProfileError> {
        if !(speed.is_finite() && speed > 0.0) {
            return Err(ProfileError::Speed { speed });
        }
        self.latency.speed *= speed;
        Ok(self)
    }
}

/// The defaults, with the cache that an 80 GB card leaves: 72 GB less 16 GB of weights and a little work space are 56
/// GB, at 128 KiB a token (32 layers, 8 KV heads of 128, bf16) 27,000 blocks.
fn eight_billion() -> EngineConfig {
    EngineConfig { num_blocks: 27_000, max_model_len: LONG_CONTEXT, ..EngineConfig::default() }
}

/// Llama 3.1 70B in bf16, tensor parallel.
///
/// - base 3.4 ms: 160 all-reduces of 15 us and 1 ms.
/// - weights 13.2 ms: 141 GB at 80 % of 4 x 3.35 TB/s.
/// - a token 89 us: 141 GFLOP at 40 % of 4 x 989 TFLOP/s.
/// - a pair 1 ns: 2.6 MFLOP (4 x 80 layers x 8,192) at half of that is 1.3 ns, in whole nanoseconds.
/// - a context token 31 ns: 320 KiB (80 layers, 8 KV heads of 128) at 80 % of 13.4 TB/s.
/// - cache: 288 GB less weights and 10 GB of work space leave 137 GB, 26,000 blocks.
fn seventy_billion() -> EngineConfig {
    EngineConfig {
        num_blocks: 26_000,
        max_model_len: LONG_CONTEXT,
        gpus: 4,
        latency: LatencyModel {
            step_base: Duration::from_micros(3_400),
            weight_read: Duration::from_micros(13_200),
            per_prefill_token: Duration::from_micros(89),
            per_prefill_pair: Duration::from_nanos(1),
            per_decode_sequence: Duration::from_micros(89),
            per_context_token: Duration::from_nanos(31),
            transfer_setup: DEFAULT_TRANSFER_SETUP,
            per_received_token: Duration::from_nanos(8_192),
            speed: 1.0,
        },
        ..EngineConfig::default()
    }
}

/// A pod of llm-d's published benchmark "KV-cache wins you can see" (September 2025) and
/// its successors: Qwen3-32B, two H100.
///
/// - cache: 307,328 tokens, as published, 19,208 blocks.
/// - a token 51.3 us, a pair 2 ns (2.1 MFLOP, 4 x 64 layers x 8,192, at half of 2 x 989 TFLOP/s): a full step
///   of 8,192 prompt tokens then computes 16,700 tokens a second, between the 15,928 and the 20,480 that
///   llm-d measured as the peak.
/// - base 2.9 ms: 128 all-reduces of 15 us and 1 ms.
/// - weights 12.2 ms: 65.5 GB at 80 % of 2 x 3.35 TB/s.
/// - a context token 49 ns: 256 KiB (64 layers, 8 KV heads of 128) at 80 % of 6.7 TB/s. With 15 to 35 sequences of that
///   benchmark (8,200 tokens) a token takes 20 to 30 ms, as published.
fn qwen3_32b() -> EngineConfig {
    EngineConfig {
        num_blocks: 19_208,
        max_model_len: QWEN3_CONTEXT,
        gpus: 2,
        latency: LatencyModel {
            step_base: Duration::from_micros(2_900),
            weight_read: Duration::from_micros(12_200),
            per_prefill_token: Duration::from_nanos(51_300),
            per_prefill_pair: Duration::from_nanos(2),
            per_decode_sequence: Duration::from_nanos(51_300),
            per_context_token: Duration::from_nanos(49),
            transfer_setup: DEFAULT_TRANSFER_SETUP,
            per_received_token: Duration::from_nanos(6_554),
            speed: 1.0,
        },
        ..EngineConfig::default()
    }
}

/// Llama 3.2 3B in bf16 on one L40S (48 GB, 864 GB/s, 362 TFLOP/s).
///
/// - weights 9.3 ms: 6.4 GB at 80 % of 864 GB/s.
/// - a token 44 us: 6.4 GFLOP at 40 % of the card; a pair 2 ns: 0.34 MFLOP (4 x 28 layers x 3,072) at half of it.
/// - a context token 166 ns: 112 KiB (28 layers, 8 KV heads of 128) at 80 % of the bandwidth.
/// - cache: 43 GB less weights and 2 GB of work space leave 35 GB, 18,900 blocks.
/// - 2,048 tokens a step: vLLM's default for a server on cards with less than 70 GB.
fn small() -> EngineConfig {
    EngineConfig {
        num_blocks: 18_900,
        max_num_batched_tokens: 2_048,
        max_model_len: LONG_CONTEXT,
        latency: LatencyModel {
            step_base: DEFAULT_STEP_BASE,
            weight_read: Duration::from_micros(9_300),
            per_prefill_token: Duration::from_micros(44),
            per_prefill_pair: Duration::from_nanos(2),
            per_decode_sequence: Duration::from_micros(44),
            per_context_token: Duration::from_nanos(166),
            transfer_setup: DEFAULT_TRANSFER_SETUP,
            per_received_token: Duration::from_nanos(2_867),
            speed: 1.0,
        },
        ..EngineConfig::default()
    }
}

/// No card: a server whose time goes into prompts, so that what a policy saves is what its caches save. Blocks of 512
/// tokens, as the published Mooncake traces tell prompts; 10 ms and 165 us a token, so that 6,000 tokens take a second
/// to the first token and full steps compute 6,016 tokens a second; no pairs and no contexts, so that a token costs
/// the same wherever it stands.
///
/// It is kept for comparison with figures of earlier versions. Its limits: nothing is read from memory, so a step in
/// which 20 sequences decode takes 10.6 ms whatever their contexts are. Its time per token measures how long answers
/// wait for the prompts of others, and nothing else. No published server has such constants: 6,000 tokens a second are
/// the prefill of an L4, and 10 ms a step are those of an H100.
fn prefill_bound() -> EngineConfig {
    EngineConfig {
        block_size: 32 * DEFAULT_BLOCK_SIZE,
        num_blocks: 2_000,
        max_model_len: LONG_CONTEXT,
        latency: LatencyModel {
            step_base: Duration::from_millis(10),
            weight_read: Duration::ZERO,
            per_prefill_token: Duration::from_micros(165),
            per_prefill_pair: Duration::ZERO,
            per_decode_sequence: Duration::from_micros(30),
            per_context_token: Duration::ZERO,
            transfer_setup: DEFAULT_TRANSFER_SETUP,
            per_received_token: DEFAULT_PER_RECEIVED_TOKEN,
            speed: 1.0,
        },
        ..EngineConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::StepWork;
    use std::collections::HashSet;

    /// Tokens a second of a full first step of a prompt.
    fn prefill_rate(config: &EngineConfig) -> f64 {
        let n = u64::from(config.max_num_batched_tokens);
        let work = StepWork { prefill_tokens: n, prefill_pairs: n * (n + 1) / 2, ..StepWork::default() };
        n as f64 / config.latency.step(work).as_secs_f64()
    }

    fn decode(config: &EngineConfig, sequences: u64, context: u64) -> Duration {
        let work = StepWork { decode_sequences: sequences, context_tokens: sequences * context, ..StepWork::default() };
        config.latency.step(work)
    }

    #[test]
    fn every_profile_has_a_name_of_its_own_and_can_be_built() {
        let names: HashSet<_> = PROFILES.iter().map(|profile| profile.name).collect();
        assert_eq!(names.len(), PROFILES.len());
        for profile in PROFILES {
            let config = by_name(profile.name).unwrap();
            assert!(config.max_request_tokens() > 16_384 && config.latency.speed == 1.0, "{}", profile.name);
            assert!(decode(&config, 1, 1_000) < decode(&config, 30, 1_000), "{}", profile.name);
            assert!(list().contains(profile.about) && !profile.about.is_empty());
        }
        assert_eq!(list().lines().count(), PROFILES.len());
    }

    #[test]
    fn a_misspelt_name_is_answered_with_the_one_that_was_meant() {
        let error = by_name("8B_H100").unwrap_err().to_string();
        assert!(
            error.starts_with("unknown engine profile `8B_H100`; did you mean `8b-h100`?; there are `8b-h100`, `70b")
        );
        let error = by_name("gpt").unwrap_err().to_string();
        assert!(error.starts_with("unknown engine profile `gpt`; there are `8b-h100`,"), "{error}");
    }

    #[test]
    fn figures_are_the_published_ones() {
        let qwen = by_name("qwen3-32b-2xh100").unwrap();
        assert_eq!(qwen.num_blocks * qwen.block_size, 307_328);
        assert!((15_928.0..20_480.0).contains(&prefill_rate(&qwen)), "{}", prefill_rate(&qwen));
        let published = Duration::from_millis(20)..Duration::from_millis(30);
        for sequences in [15, 35] {
            assert!(published.contains(&decode(&qwen, sequences, 8_200)), "{:?}", decode(&qwen, sequences, 8_200));
        }
        let small = by_name("8b-h100").unwrap();
        let [alone, many] = [1, 64].map(|sequences| decode(&small, sequences, 500).as_secs_f64());
        // A lone request has 60 to 70 % of the bandwidth for 16.06 GB of weights, and a batch of 64 costs
        // little more than one sequence.
        assert!((0.6..0.7).contains(&(16.06e9 / 3.35e12 / alone)), "{alone}");
        assert!(many < 1.3 * alone, "{many} beside {alone}");
        let bed = by_name("prefill-6000").unwrap();
        let prompt = StepWork { prefill_tokens: 6_000, prefill_pairs: 18_003_000, ..StepWork::default() };
        assert_eq!(bed.latency.step(prompt), Duration::from_secs(1));
        assert!((6_000.0..6_050.0).contains(&prefill_rate(&bed)), "{}", prefill_rate(&bed));
        assert_eq!(decode(&bed, 20, 100_000), Duration::from_micros(10_600), "contexts cost nothing there");
    }

    #[test]
    fn a_scaled_engine_goes_as_many_times_as_fast() {
        let config = by_name("prefill-6000").unwrap();
        let twice = config.clone().scaled(2.0).and_then(|config| config.scaled(2.0)).unwrap();
        assert_eq!(decode(&twice, 100, 0) * 4, decode(&config, 100, 0));
        for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = config.clone().scaled(speed).unwrap_err().to_string();
            assert_eq!(error, format!("speed is {speed}, a number greater than 0 is needed"));
        }
    }
}
