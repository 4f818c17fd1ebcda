//! The strategy that routes a request, and the endpoints that it may use.

use crate::coming_from::Here::{Differs, Same, Warns};
use crate::coming_from::aibrix::MANIFEST;
use crate::coming_from::aibrix::ask::{Pool, refused, started};
use crate::coming_from::aibrix::library::{settings, strategy, winners};
use crate::coming_from::rows;
use attache_pool::EndpointMetrics;
use serde_json::{Value, json};

/// Whether `session-affinity` routes a request with these headers: it returns a session id to the client.
async fn is_sticky(pool: &Pool, headers: &[(&str, &str)]) -> bool {
    let mut asked = pool.ask("hello", headers).await;
    assert!(asked.answer.is_ok(), "{headers:?}: {:?}", asked.answer);
    asked.response_headers().await.contains_key("x-session-id")
}

const STICKY: (&str, &str) = ("routing-strategy", "session-affinity");

rows! { ROWS;
    both_variables: "`ROUTING_ALGORITHM`, `AIBRIX_ROUTING_ALGORITHM`",
        "the strategy of requests that name none; the code reads the first name, the documentation has the second",
        Same => {
            for variable in ["ROUTING_ALGORITHM", "AIBRIX_ROUTING_ALGORITHM"] {
                let pool = Pool::with(2, "", &[(variable, "session-affinity")]).await;
                assert!(is_sticky(&pool, &[]).await, "{variable}");
            }
        }
    both_at_once: "both variables, with different values", "only `ROUTING_ALGORITHM` is read",
        Warns { instead: "set one of them" } => {
            let both = [("ROUTING_ALGORITHM", "random"), ("AIBRIX_ROUTING_ALGORITHM", "least-request")];
            let (settings, warnings) = settings("", &both).expect("good settings");
            assert_eq!(settings.pools[0].strategy, "random");
            assert!(warnings.iter().any(|w| w.starts_with("W307 AIBRIX_ROUTING_ALGORITHM")), "{warnings:?}");
        }
    beside_the_file: "the variable beside a `strategy` in the file, or beside `--strategy`", "there is no file",
        Warns { instead: "the file and the flag outrank the environment; remove one of the two" } => {
            let variable = [("ROUTING_ALGORITHM", "prefix-cache")];
            let (settings, warnings) = settings("  strategy: random\n", &variable).expect("good settings");
            assert_eq!(settings.pools[0].strategy, "random");
            assert!(warnings.iter().any(|w| w.starts_with("W303 ROUTING_ALGORITHM")), "{warnings:?}");
            assert!(started("  strategy: random\n", &variable).await.contains("ROUTING_ALGORITHM"));
        }
    prefix_aware: "`prefix-aware`", "the default that the documentation gives; another name of `prefix-cache`",
        Same => {
            assert_eq!(strategy(&[("AIBRIX_ROUTING_ALGORITHM", "prefix-aware")]).0, "prefix-cache");
            let pool = Pool::with(3, "", &[("AIBRIX_ROUTING_ALGORITHM", "prefix-aware")]).await;
            let prompt = "a long prompt ".repeat(40);
            let first = pool.pick(&prompt, &[]).await;
            assert_eq!(pool.picks(6, &prompt, &[]).await, [first].into());
            assert_eq!(pool.picks(6, &prompt, &[("routing-strategy", "prefix-aware")]).await, [first].into());
        }
    unknown_variable_value: "an unknown strategy in the variable", "random endpoints (0.4), or each request 400",
        Differs { default: "the start fails and names the known strategies", exact: "`random` by its name" } => {
            let said = refused("", &[("ROUTING_ALGORITHM", "prefix-cash")]).await;
            assert!(said.contains("E201") && said.contains("prefix-cache"), "{said}");
        }
    header_honoured: "header `routing-strategy`", "outranks the variable; the published manifest sets no variable",
        Differs {
            default: "the same where AIBrix's variables are set and the file names no strategy; a warning at the start \
                says that clients choose",
            exact: "where the file names the strategy: `requestStrategy: {allow: [\"*\"]}`",
        } => {
            for variables in [&[("ROUTING_ALGORITHM", "random")][..], &MANIFEST] {
                let pool = Pool::with(2, "", variables).await;
                assert!(is_sticky(&pool, &[STICKY]).await, "{variables:?}");
                assert!(!is_sticky(&pool, &[]).await, "{variables:?}");
                assert!(pool.picker.process.stderr().contains("requests may name their strategy"), "W304 at the start");
            }
            let by_file = Pool::with(2, "  strategy: random\n  requestStrategy: {allow: [\"*\"]}\n", &[]).await;
            assert!(is_sticky(&by_file, &[STICKY]).await);
        }
    header_absent: "a request without the header, where no variable names a strategy",
        "any endpoint by the documentation; the code leaves the request to the HTTPRoute of its model",
        Differs {
            default: "any endpoint (`random`); a warning at the start says so",
            exact: "",
        } => {
            assert_eq!(strategy(&MANIFEST), ("random".to_owned(), Value::Null));
            let pool = Pool::with(2, "", &MANIFEST).await;
            assert_eq!(pool.picks(40, "hello", &[]).await, [1, 2].into());
            assert!(pool.picker.process.stderr().contains("those that name none go to any endpoint"));
            assert_eq!(strategy(&[("REDIS_HOST", "redis.local")]).0, "predicted-latency", "no variable of AIBrix's");
        }
    header_ignored: "header `routing-strategy` where nothing allows it", "always honoured",
        Warns { instead: "`requestStrategy: {allow: [\"*\"]}`, or the variable; the first such request is logged" } => {
            let pool = Pool::with(2, "  strategy: random\n", &[]).await;
            for _ in 0..3 {
                assert!(!is_sticky(&pool, &[STICKY]).await);
            }
            let log = pool.picker.process.stderr();
            assert_eq!(log.matches("this pool does not let requests choose a strategy").count(), 1, "{log}");
        }
    header_switched_off: "switching the header off", "not possible",
        Differs { default: "clients choose, as in AIBrix", exact: "`requestStrategy: {allow: []}`" } => {
            let more = "  requestStrategy: {allow: []}\n";
            let pool = Pool::with(2, more, &[("ROUTING_ALGORITHM", "random")]).await;
            assert!(!is_sticky(&pool, &[STICKY]).await);
        }
    header_invalid: "an unknown strategy in the header", "400, and `x-error-invalid-routing-strategy` has the name",
        Same => {
            for variables in [&[("ROUTING_ALGORITHM", "random")][..], &MANIFEST] {
                let pool = Pool::with(2, "", variables).await;
                for named in ["no-such", "prefix-cash", "random:0.5,least-request", "random,least-request"] {
                    let refusal = pool.refusal(&[("routing-strategy", named)]).await;
                    let value = refusal.headers.get("x-error-invalid-routing-strategy");
                    assert_eq!((refusal.status, value.map(String::as_str)), (400, Some(named)));
                }
            }
        }
    header_empty: "an empty header", "400, and `x-error-invalid-routing-strategy` is empty",
        Differs { default: "400; the value of the header is `true`, because Envoy sends no empty one", exact: "" } => {
            let pool = Pool::with(2, "", &[("ROUTING_ALGORITHM", "random")]).await;
            for named in ["", "  "] {
                let refusal = pool.refusal(&[("routing-strategy", named)]).await;
                let value = refusal.headers.get("x-error-invalid-routing-strategy");
                assert_eq!((refusal.status, value.map(String::as_str)), (400, Some("true")));
            }
        }
    weighted_sums: "weighted strategies: `least-request:2,least-kv-cache:1`", "figures are normalised and added up",
        Same => {
            let cache = |used| Some(EndpointMetrics { kv_usage: used, ..EndpointMetrics::default() });
            let busy = |used, waiting| Some(EndpointMetrics { kv_usage: used, waiting, ..EndpointMetrics::default() });
            let sum = "least-request:2,least-kv-cache:1";
            assert_eq!(winners(sum, &Value::Null, &[busy(0.0, 9), busy(0.9, 0), busy(0.9, 9)]), [2].into());
            let sum = "least-request:1,least-kv-cache:2";
            assert_eq!(winners(sum, &Value::Null, &[busy(0.0, 9), busy(0.9, 0), busy(0.9, 9)]), [1].into());
            assert_eq!(winners("least-request,least-gpu-cache", &Value::Null, &[cache(0.5), cache(0.1)]), [2].into());
            assert_eq!(strategy(&[("ROUTING_ALGORITHM", sum)]).0, sum);
        }
    weights_checked: "weights", "whole, 0 to 1,000,000, 1 where none is given; a sum of which all are 0 is an error",
        Same => {
            for (sum, is_good) in [
                ("least-request", true), ("least-request,least-kv-cache", true),
                ("least-request: 6 , least-kv-cache:4", true),
                ("least-request:0,least-kv-cache:10", true), ("least-request:1000000,least-kv-cache", true),
                ("least-request,,least-kv-cache", false), ("least-request:1:2", false), ("least-request:0.5", false),
                ("least-request:-1", false), ("least-request:1000001", false),
                ("least-request:0,least-kv-cache:0", false),
            ] {
                assert_eq!(settings("", &[("ROUTING_ALGORITHM", sum)]).is_ok(), is_good, "aibrix 10.9: {sum}");
            }
        }
    exclusive_parts: "`pd`, `slo` and kin in a sum", "the first of them decides alone",
        Same => {
            use attache_scheduling::weighted::parse;
            let sums = [("least-request:2,pd:1,throughput:3", "pd"), ("slo-least-load,least-latency:2", "slo-least-load")];
            for (sum, alone) in sums {
                assert_eq!(parse(sum).expect("a sum").as_slice(), [(alone, 1)], "aibrix 10.9");
            }
        }
    tied_sums: "equal totals in a sum", "the first endpoint in a shuffled list",
        Differs { default: "a draw, which comes to the same", exact: "" } => {
            let equal = Some(EndpointMetrics::default());
            let sum = "least-request,least-kv-cache";
            assert_eq!(winners(sum, &Value::Null, &[equal.clone(), equal]), [1, 2].into());
        }
    external_filter: "header `external-filter`", "a label selector restricts the endpoints",
        Differs {
            default: "the same where a variable names the strategy",
            exact: "where the file names the strategy: `requestStrategy: {filterHeader: external-filter}`",
        } => {
            for (more, variables) in [
                ("", &[("ROUTING_ALGORITHM", "random")][..]),
                ("  strategy: random\n  requestStrategy: {filterHeader: external-filter}\n", &[]),
            ] {
                let pool = Pool::with(3, more, variables).await;
                assert_eq!(pool.picks(5, "hello", &[("external-filter", "pod=p2")]).await, [2].into());
                assert_eq!(pool.refusal(&[("external-filter", "pod=p9")]).await.status, 503);
            }
        }
    config_profile: "header `config-profile`, annotation `model.aibrix.ai/config`",
        "the annotation of the pods holds profiles; the header names one, or `auto` finds it by lengths",
        Differs {
            default: "the header is the same; profiles stand in the configuration, \
                      and a warning names a pod with the annotation",
            exact: "`strategies: [{profiles: {NAME: {strategy: …}}}]` with `requestStrategy`",
        } => {
            let more = "  strategy: random\n  requestStrategy: {allow: []}\n  \
                        strategies: [{profiles: {sticky: {strategy: session-affinity, promptTokensLt: 512}}}]\n";
            let pool = Pool::with(2, more, &[]).await;
            for named in ["sticky", "auto", " AUTO "] {
                assert!(is_sticky(&pool, &[("config-profile", named)]).await, "{named}");
            }
            assert!(!is_sticky(&pool, &[]).await);
            let mut asked = pool.ask("hello", &[("config-profile", "sticky")]).await;
            let told = asked.response_headers().await;
            assert_eq!(told.get("x-aibrix-config-profile").map(String::as_str), Some("sticky"));
        }
    locked_strategy: "`lockedRoutingStrategy`", "outranks the header",
        Differs { default: "a key of the configuration", exact: "`strategies: [{strategy: …, locked: true}]`" } => {
            let more = "  strategies: [{strategy: random, locked: true}]\n";
            let pool = Pool::with(2, more, &[("ROUTING_ALGORITHM", "least-request")]).await;
            assert!(!is_sticky(&pool, &[STICKY]).await);
        }
    single_endpoint: "a pool with one ready endpoint", "the strategy is not asked and learns nothing",
        Differs { default: "the strategy is asked, and knows the prompt when a second endpoint comes", exact: "" } => {
            let pool = Pool::with(1, "", &[("ROUTING_ALGORITHM", "session-affinity")]).await;
            assert!(is_sticky(&pool, &[]).await);
        }
    compat_variable: "deciding exactly as AIBrix", "-",
        Differs {
            default: "`compat: true` is a parameter of each strategy that has a variant of its own",
            exact: "`ATTACHE_AIBRIX_COMPAT=true` sets it for all",
        } => {
            for (algorithm, parameters) in [
                ("prefix-cache", json!({"compat": true})), ("prefix-cache-preble", json!({"compat": true})),
                ("vtc-basic", json!({"compat": true})), ("throughput", json!({"fallback": "random"})),
                ("least-latency", json!({"compat": true, "fallback": "random"})),
            ] {
                let set = [("ROUTING_ALGORITHM", algorithm), ("ATTACHE_AIBRIX_COMPAT", "true")];
                assert_eq!(strategy(&set), (algorithm.to_owned(), parameters));
            }
        }
}
