//! Unit tests of `aibrix_env.rs`.

use super::*;
use serde_json::json;

fn read(variables: &[(&str, &str)]) -> (AibrixDefaults, Vec<Diagnostic>) {
    let mut sink = Sink::default();
    let set = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let defaults = AibrixEnv::of(set).read(&crate::registry(), &mut sink);
    (defaults, sink.diagnostics)
}

#[test]
fn every_variable_of_the_table_is_taken() {
    for (name, meaning) in VARIABLES {
        let value = match meaning {
            Meaning::Strategy => "prefix-cache",
            Meaning::Exact => "true",
            Meaning::Tokenizer => "tiktoken",
            Meaning::BlockSize => "128",
            Meaning::TokenizerPool(PoolVariable::Use) => "true",
            Meaning::TokenizerPool(PoolVariable::Template) => "http://%s:8000",
            Meaning::KvConnector => "shfs",
            Meaning::Redis if *name == REDIS_PORT => "6379",
            Meaning::Redis => "redis",
            Meaning::BlockNumber | Meaning::TokenizerPool(_) | Meaning::PrefillTimeout => "60",
            Meaning::Parameter(_, "targetGPU", _) => "A6000",
            Meaning::Parameter(_, "timeUnit", _) => "seconds",
            Meaning::Parameter(_, "prefillScorePolicy" | "decodeScorePolicy", _) => "conductor",
            Meaning::Parameter(_, _, ParameterKind::Flag) => "True",
            Meaning::Parameter(..) => "7",
            Meaning::Nothing(_) => "true",
        };
        let (_, diagnostics) = read(&[(name, value), (REDIS_HOST, "redis")]);
        let codes: Vec<Code> = diagnostics.iter().map(|d| d.code).collect();
        let is_void = matches!(meaning, Meaning::Nothing(_));
        let expected = if is_void { vec![Code::NoEffect] } else { vec![] };
        assert_eq!(codes, expected, "{name}: {diagnostics:?}");
        assert!(!is_void || read(&[(name, "false")]).1.is_empty(), "{name}: off, as it is here");
    }
    let (defaults, _) = read(&[
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
        ("ROUTING_ALGORITHM", " prefix-cache "),
    ]);
    assert_eq!(defaults.tokenizer(), Some(TokenizerKind::Characters));
    assert_eq!(defaults.strategy.as_deref(), Some("prefix-cache"));
}

#[test]
fn invalid_value_is_an_error_naming_the_variable() {
    for (name, value, allowed) in [
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "many", "a whole number"),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "-1", "a whole number"),
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "NaN", "a number"),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "bert", "character, tiktoken, remote"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "0", "1 to 16384"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "0", "1 to"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "soon", "a number of seconds"),
        ("AIBRIX_KV_CONNECTOR_TYPE", "mooncake", "shfs, nixl"),
        ("AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE", "%s:8000", "an http or https URL"),
        ("AIBRIX_TOKENIZER_TTL", "0", "a number of seconds"),
        ("AIBRIX_MAX_TOKENIZERS_PER_POOL", "0", "1 to 10000"),
        ("AIBRIX_USE_REMOTE_TOKENIZER", "maybe", "true, false"),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", "hours", "`vtc-basic`"),
        ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", "0", "`vtc-basic`"),
        ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", "H100", "`prefix-cache-preble`"),
        ("AIBRIX_PREFILL_SCORE_POLICY", "token_load", "`pd`"),
        ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", "-1", "`pd`"),
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "maybe", "true, false"),
        ("REDIS_PORT", "many", "1 to 65535"),
    ] {
        let (_, diagnostics) = read(&[(name, value)]);
        let [error] = diagnostics.as_slice() else { panic!("{name}: {diagnostics:?}") };
        assert!(error.is_error() && error.message.contains(name) && error.message.contains(allowed), "{error:?}");
    }
    let (_, unknown) = read(&[("AIBRIX_ROUTER_VTC_BASIC_MAX_LOAD", "1"), ("AIBRIX_OTHER", "1"), ("PATH", "/")]);
    assert_eq!(unknown.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NoEffect; 2], "{unknown:?}");
    assert!(unknown.iter().any(|d| d.help.as_deref().is_some_and(|help| help.contains("_MAX_POD_LOAD"))));
    let services = [
        ("AIBRIX_REDIS_MASTER_SERVICE_HOST", "10.0.0.1"),
        ("AIBRIX_REDIS_MASTER_SERVICE_PORT_TCP_REDIS", "6379"),
        ("AIBRIX_REDIS_MASTER_PORT", "tcp://10.0.0.1:6379"),
        ("AIBRIX_REDIS_MASTER_PORT_6379_TCP_ADDR", "10.0.0.1"),
    ];
    assert!(read(&services).1.is_empty(), "Kubernetes sets them for a Service");
    assert!(read(&[("AIBRIX_ROUTER_PREBLE_TARGET_GPU", " ")]).1.is_empty(), "blank is not set");
}

#[test]
fn blocks_count_in_the_unit_of_the_tokenizer() {
    const TYPE: &str = "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE";
    for (variables, is_text, is_aibrix, tokens, codes) in [
        (&[(BLOCK_SIZE, "128")][..], true, false, Some(32), &[][..]),
        (&[(BLOCK_SIZE, "130")], true, false, Some(33), &[Code::Overridden]),
        (&[(BLOCK_SIZE, "16")], false, false, Some(16), &[]),
        (&[(BLOCK_SIZE, "5000")], false, false, Some(5000), &[Code::OutOfRange]),
        (&[(TYPE, "character")], true, true, Some(32), &[]),
        (&[(TYPE, "tiktoken")], false, true, Some(16), &[]),
        (&[(TYPE, "tiktoken")], true, false, None, &[]),
        (&[], true, true, Some(32), &[]),
        (&[], true, false, None, &[]),
        (&[(COMPAT, "true")], true, false, Some(32), &[]),
        (&[(COMPAT, "true")], false, false, Some(16), &[]),
    ] {
        let (defaults, diagnostics) = read(variables);
        assert!(diagnostics.is_empty());
        let mut sink = Sink::default();
        assert_eq!(defaults.block_size(is_text, is_aibrix, &mut sink), tokens, "{variables:?}");
        assert_eq!(sink.diagnostics.iter().map(|d| d.code).collect::<Vec<_>>(), codes, "{variables:?}");
    }
}

#[test]
fn default_tokenizer_is_the_fallback_of_the_remote_one() {
    const USE: (&str, &str) = ("AIBRIX_USE_REMOTE_TOKENIZER", "true");
    const TYPE: &str = "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE";
    for (variables, fallback) in [
        (&[USE][..], Some(TokenizerFallback::Characters)),
        (&[USE, (TYPE, "tiktoken")], Some(TokenizerFallback::Tiktoken)),
        (&[(TYPE, "remote")], Some(TokenizerFallback::Characters)),
        (&[(TYPE, "tiktoken")], None),
    ] {
        let (defaults, diagnostics) = read(variables);
        assert!(diagnostics.is_empty());
        assert_eq!(defaults.remote.fallback, fallback, "{variables:?}");
    }
}

#[test]
fn compat_variable_reaches_every_strategy_that_has_an_exact_form() {
    let (defaults, diagnostics) = read(&[("ATTACHE_AIBRIX_COMPAT", "true")]);
    assert!(diagnostics.is_empty());
    for (strategy, parameter, _) in EXACT {
        let parameters = defaults.parameters(strategy, Value::Null);
        assert!(parameters.get(parameter).is_some(), "{strategy}: {parameters}");
        assert!(crate::registry().build(strategy, &parameters).is_ok(), "{strategy}: {parameters}");
    }
    let (off, diagnostics) = read(&[("ATTACHE_AIBRIX_COMPAT", "false")]);
    assert!(diagnostics.is_empty());
    assert_eq!(off.parameters("vtc-basic", Value::Null), Value::Null);
    assert!(read(&[("ATTACHE_AIBRIX_COMPAT", "yes")]).1.iter().any(Diagnostic::is_error));
}

/// The environment of AIBrix's published gateway manifest names no strategy.
#[test]
fn aibrix_environment_implies_its_documented_strategy() {
    let implied = |variables| {
        let (mut defaults, _) = read(variables);
        defaults.imply_strategy();
        (defaults.strategy, defaults.strategy_variable, defaults.is_implied)
    };
    let random = Some("random".to_owned());
    assert_eq!(implied(&[(TOKENIZER_TYPE, "character")]), (random, TOKENIZER_TYPE, true));
    let named = implied(&[(TOKENIZER_TYPE, "character"), ("ROUTING_ALGORITHM", "pd")]);
    assert_eq!(named, (Some("pd".to_owned()), "ROUTING_ALGORITHM", false));
    for of_others in [&[("REDIS_HOST", "redis")][..], &[("AIBRIX_NEW", "1")], &[("ATTACHE_AIBRIX_COMPAT", "true")]] {
        assert_eq!(implied(of_others), (None, "", false), "{of_others:?}");
    }
}

#[test]
fn both_variable_names_of_the_strategy_are_read() {
    for name in ["ROUTING_ALGORITHM", "AIBRIX_ROUTING_ALGORITHM"] {
        let (defaults, diagnostics) = read(&[(name, "vtc-basic")]);
        assert_eq!((defaults.strategy.as_deref(), defaults.strategy_variable), (Some("vtc-basic"), name));
        assert!(diagnostics.is_empty());
    }
    let both = |documented| read(&[("ROUTING_ALGORITHM", "random"), ("AIBRIX_ROUTING_ALGORITHM", documented)]);
    assert_eq!(both("pd").0.strategy.as_deref(), Some("random"), "the one that AIBrix reads");
    assert_eq!(both("pd").1.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NoEffect]);
    assert!(both("random").1.is_empty());
}

#[test]
fn zero_is_a_valid_value() {
    let (defaults, diagnostics) = read(&[("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "0")]);
    assert!(diagnostics.is_empty());
    assert_eq!(defaults.parameters("prefix-cache", Value::Null), json!({"imbalance": 0}));
}

#[test]
fn one_variable_may_be_a_parameter_of_two_strategies() {
    let (defaults, diagnostics) = read(&[("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "1")]);
    assert!(diagnostics.is_empty());
    assert_eq!(defaults.parameters("prefix-cache", Value::Null), json!({"deviations": 1.0}));
    assert_eq!(defaults.parameters("pd", Value::Null), json!({"standardDeviationFactor": 1.0}));
}

#[test]
fn file_outranks_environment_for_each_parameter() {
    let (defaults, _) = read(&[
        ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "3"),
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "4"),
    ]);
    for (name, given, expected) in [
        ("prefix-cache", Value::Null, json!({"deviations": 3.0, "imbalance": 4})),
        ("prefix-cache", json!({"imbalance": 9}), json!({"deviations": 3.0, "imbalance": 9})),
        ("random", Value::Null, Value::Null),
        ("random,least-request", Value::Null, Value::Null),
        ("prefix-cache", json!([1]), json!([1])),
        (
            "prefix-cache:2,least-request",
            json!({"prefix-cache": {"imbalance": 9}}),
            json!({"prefix-cache": {"deviations": 3.0, "imbalance": 9}}),
        ),
    ] {
        assert_eq!(defaults.parameters(name, given.clone()), expected, "{name} {given}");
    }
}
