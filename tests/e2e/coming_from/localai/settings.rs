//! LocalAI's flags and environment variables.

use crate::coming_from::Here::{Differs, Same, Warns};
use crate::coming_from::localai::running::{Pool, check, in_force};
use crate::coming_from::rows;
use serde_json::{Value, json};

const AFFINITY: &str = "  strategy: prefix-affinity\n";

rows! { ROWS;
    prefix_cache_off: "`LOCALAI_DISTRIBUTED_PREFIX_CACHE=false`, `--distributed-prefix-cache=false`",
        "prompts decide nothing: the floor",
        Same => {
            let off = ("prefix-affinity".to_owned(), json!({"routePolicy": "round_robin"}));
            assert_eq!(in_force(&[], &[("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "false")]).await, off);
            let both = in_force(&["--distributed-prefix-cache=false"], &[("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "true")]);
            assert_eq!(both.await, off, "a flag outranks the variable");
        }
    prefix_cache_on: "`LOCALAI_DISTRIBUTED_PREFIX_CACHE=true`", "the default in the distributed mode",
        Differs {
            default: "without the variable: `predicted-latency`; with it: `prefix-affinity`, where the file names no strategy",
            exact: "the variable, or `strategy: prefix-affinity`",
        } => {
            let on = in_force(&[], &[("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "true")]).await;
            assert_eq!(on, ("prefix-affinity".to_owned(), json!({"routePolicy": "prefix_cache"})));
            assert_eq!(in_force(&["--distributed-prefix-cache"], &[]).await, on);
        }
    ttl: "`LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL`, `--distributed-prefix-cache-ttl`",
        "age at which entries are dropped, 5m",
        Same => {
            let on = ("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "1");
            let (name, parameters) = in_force(&[], &[on, ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "90s")]).await;
            assert_eq!((name.as_str(), &parameters["ttlSeconds"]), ("prefix-affinity", &json!(90)));
            let flag = ["--distributed-prefix-cache", "--distributed-prefix-cache-ttl=2m"];
            assert_eq!(in_force(&flag, &[]).await.1["ttlSeconds"], json!(120));
        }
    beside_the_file: "`ttlSeconds` and `routePolicy` of the file beside these variables and flags", "there is no file for them",
        Differs {
            default: "the file outranks them; a warning says so",
            exact: "leave the two parameters out of the file",
        } => {
            let file = "  strategy: {name: prefix-affinity, parameters: {ttlSeconds: 60}}\n";
            let (good, said) = check("", file, &[("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "2m")]).await;
            assert!(good && said.contains("--distributed-prefix-cache-ttl"), "{said}");
            assert!(said.contains("the file says `ttlSeconds: 60`, not `120`"), "{said}");
        }
    wrong_values: "values that can't be used", "a TTL of 0 fails the start",
        Same => {
            for (name, value) in [
                ("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "maybe"),
                ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "0s"),
                ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "soon"),
                ("LOCALAI_MODEL_SCHEDULING", "{"),
                ("LOCALAI_MODEL_SCHEDULING", r#"[{"model_name": "m", "route_policy": "bogus"}]"#),
            ] {
                let (good, said) = check("", AFFINITY, &[(name, value)]).await;
                assert!(!good && said.contains(name) && said.contains("allowed"), "{name}={value}: {said}");
            }
        }
    beside_another_strategy: "these variables beside another strategy in the file", "there is one way to route",
        Warns { instead: "`strategy: prefix-affinity`, or no `strategy`" } => {
            for name in ["LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "LOCALAI_DISTRIBUTED_PREFIX_CACHE"] {
                let value = if name.ends_with("TTL") { "1m" } else { "true" };
                let (good, said) = check("", "  strategy: random\n", &[(name, value)]).await;
                assert!(good && said.contains(name) && said.contains("prefix-affinity"), "{said}");
            }
        }
    model_scheduling: "`LOCALAI_MODEL_SCHEDULING`", "policies of models as a JSON list, written again at every start",
        Differs {
            default: "the four fields of prefixes are read; the file's `modelPolicies` outranks them; other fields warn",
            exact: "none: Attaché starts no replicas",
        } => {
            let list = r#"[{"model_name": "m", "route_policy": "round_robin", "min_replicas": 2}]"#;
            let pool = Pool::with(1, "", AFFINITY, &[("LOCALAI_MODEL_SCHEDULING", list)]).await;
            let shown = pool.admin("GET", "/api/nodes/scheduling/m", &Value::Null).await.json();
            assert_eq!(shown["route_policy"], "round_robin");
            assert!(pool.picker.process.stderr().contains("min_replicas"), "a warning names it");
        }
    model_scheduling_file: "`LOCALAI_MODEL_SCHEDULING_CONFIG`", "the same list as a file",
        Warns { instead: "`modelPolicies` of the configuration file" } => {
            let (_, said) = check("", AFFINITY, &[("LOCALAI_MODEL_SCHEDULING_CONFIG", "/etc/scheduling.yaml")]).await;
            assert!(said.contains("LOCALAI_MODEL_SCHEDULING_CONFIG") && said.contains("modelPolicies"), "{said}");
        }
    admission: "`LOCALAI_MAX_CONCURRENT_REQUESTS`, `LOCALAI_MODEL_LOAD_WAIT`",
        "bounds on requests and on waits for a model",
        Warns { instead: "`limits.models` and `flowControl`" } => {
            let variables = [("LOCALAI_MAX_CONCURRENT_REQUESTS", "9"), ("LOCALAI_MODEL_LOAD_WAIT", "60s")];
            let (_, said) = check("", AFFINITY, &variables).await;
            assert!(variables.iter().all(|(name, _)| said.contains(name)) && said.contains("flowControl"), "{said}");
        }
    other_variables: "every other `LOCALAI_` variable", "configures LocalAI's server, nodes and backends",
        Warns { instead: "what the warning says; Attaché routes to model servers and runs none" } => {
            let variables = [("LOCALAI_DISTRIBUTED", "true"), ("LOCALAI_NATS_URL", "nats://n:4222"), ("LOCALAI_F16", "1")];
            let (good, said) = check("", AFFINITY, &variables).await;
            assert!(good, "{said}");
            for (name, _) in variables {
                assert!(said.contains(&format!("`{name}` has no effect")), "{name}: {said}");
            }
        }
}
