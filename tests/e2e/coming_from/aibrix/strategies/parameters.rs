//! Environment variables that set parameters of strategies.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::aibrix::library::{sets, settings};
use crate::coming_from::rows;
use serde_json::json;

/// The errors that these variables cause.
fn errors(variables: &[(&str, &str)]) -> Vec<String> {
    settings("", variables).expect_err("an error")
}

rows! { ROWS;
    imbalance: "`AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT`",
        "16 in the manifest and the documentation, 8 in the code",
        Differs { default: "16; 0 is allowed", exact: "set it to 8" } => {
            sets("prefix-cache", ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "8"), "imbalance", 8);
            sets("prefix-cache", ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "0"), "imbalance", 0);
        }
    deviations: "`AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR`",
        "2 in the manifest and the documentation, 1 in the code; whole",
        Differs { default: "2; fractions are allowed", exact: "set it to 1" } => {
            sets("prefix-cache", ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "1"), "deviations", 1.0);
            sets("prefix-cache", ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "1.5"), "deviations", 1.5);
        }
    time_unit: "`AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT`", "minutes, seconds or milliseconds; minutes", Same => {
        for unit in ["minutes", "seconds", "milliseconds"] {
            sets("vtc-basic", ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", unit), "timeUnit", unit);
        }
    }
    window_size: "`AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE`", "5", Same => {
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", "9"), "windowSize", 9);
    }
    tracked_tokens: "`AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS`, `…_MAX_TOKENS`", "1000 and 8000",
        Differs {
            default: "the least width of the scale; the maximum counts with `compat` only",
            exact: "`compat: true`",
        } => {
            sets("vtc-basic", ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS", "500"), "minTokens", 500.0);
            sets("vtc-basic", ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS", "9000"), "maxTokens", 9_000.0);
        }
    token_weights: "`AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT`, `…_OUTPUT_TOKEN_WEIGHT`", "1 and 2", Same => {
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT", "0.5"), "inputTokenWeight", 0.5);
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT", "3"), "outputTokenWeight", 3.0);
    }
    pod_load: "`AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD`", "100", Same => {
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", "50"), "maxPodLoad", 50.0);
    }
    score_weights: "`AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT`, `…_UTILIZATION_WEIGHT`", "1 and 1", Same => {
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_BASIC_FAIRNESS_WEIGHT", "2"), "fairnessWeight", 2.0);
        sets("vtc-basic", ("AIBRIX_ROUTER_VTC_BASIC_UTILIZATION_WEIGHT", "0"), "utilizationWeight", 0.0);
    }
    target_gpu: "`AIBRIX_ROUTER_PREBLE_TARGET_GPU`", "V100 or A6000; V100", Same => {
        sets("prefix-cache-preble", ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", "A6000"), "targetGPU", "A6000");
    }
    decoding_length: "`AIBRIX_ROUTER_PREBLE_DECODING_LENGTH`", "45 tokens", Same => {
        sets("prefix-cache-preble", ("AIBRIX_ROUTER_PREBLE_DECODING_LENGTH", "90"), "decodingLength", 90);
    }
    sliding_window: "`AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD`", "3 minutes", Same => {
        sets("prefix-cache-preble", ("AIBRIX_ROUTER_PREBLE_SLIDING_WINDOW_PERIOD", "1"), "slidingWindowPeriod", 1);
    }
    bad_values: "a value that cannot be used", "replaced by the default, silently",
        Differs {
            default: "the start fails and names the variable and what is allowed",
            exact: "unset the variable",
        } => {
            for (variable, value) in [
                ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "many"),
                ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT", "hours"),
                ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", "0"),
                ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", "H100"),
                ("ATTACHE_AIBRIX_COMPAT", "perhaps"),
            ] {
                let said = errors(&[("ROUTING_ALGORITHM", "random"), (variable, value)]);
                assert!(said.iter().any(|e| e.contains(variable) && e.contains(value)), "{variable}: {said:?}");
            }
        }
    weighted_parameters: "these variables with weighted strategies", "each strategy reads its own", Same => {
        let sum = "prefix-cache:2,least-request";
        let set = [("ROUTING_ALGORITHM", sum), ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "3")];
        let (settings, _) = settings("", &set).expect("good settings");
        assert_eq!(settings.pools[0].strategy_parameters, json!({"prefix-cache": {"deviations": 3.0}}));
    }
    header_parameters: "these variables for a strategy that a header names", "each strategy reads its own", Same => {
        let set = [("ROUTING_ALGORITHM", "random"), ("AIBRIX_ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE", "9")];
        let (settings, _) = settings("", &set).expect("good settings");
        let allowed = &settings.pools[0].by_request.as_ref().expect("what requests may choose").allowed;
        let vtc = allowed.iter().find(|spec| spec.name == "vtc-basic").expect("vtc-basic");
        assert_eq!(vtc.parameters, json!({"windowSize": 9}));
    }
}
