//! `/api/nodes/scheduling` of LocalAI, on Attaché's admin port.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::localai::running::{Pool, check};
use crate::coming_from::rows;
use serde_json::{Value, json};

const PATH: &str = "/api/nodes/scheduling";

async fn pool(top: &str) -> Pool {
    Pool::with(1, top, "  strategy: prefix-affinity\n", &[]).await
}

async fn post(pool: &Pool, body: Value) -> (u16, Value) {
    let reply = pool.admin("POST", PATH, &body).await;
    (reply.status.as_u16(), reply.json())
}

rows! { ROWS;
    round_trip: "`POST`, `GET`, `GET :model`, `DELETE :model`", "set, list, show and delete the policy of a model",
        Same => {
            let pool = pool("").await;
            let set = json!({"model_name": "org/m", "balance_abs_threshold": 3, "min_prefix_match": 0.4});
            let (status, shown) = post(&pool, set).await;
            assert_eq!((status, &shown["balance_abs_threshold"]), (200, &json!(3)));
            assert_eq!(shown["min_prefix_match"], 0.4);
            assert_eq!(pool.admin("GET", PATH, &Value::Null).await.json(), json!([shown]));
            assert_eq!(pool.admin("GET", "/api/nodes/scheduling/org/m", &Value::Null).await.json(), shown);
            assert_eq!(pool.admin("DELETE", "/api/nodes/scheduling/org/m", &Value::Null).await.status, 204);
            assert_eq!(pool.admin("GET", "/api/nodes/scheduling/org/m", &Value::Null).await.status, 404);
        }
    merge: "fields that a `POST` leaves out", "the four fields of prefixes stay as they were",
        Same => {
            let pool = pool("").await;
            post(&pool, json!({"model_name": "m", "balance_abs_threshold": 3, "route_policy": "prefix_cache"})).await;
            let (_, shown) = post(&pool, json!({"model_name": "m", "min_replicas": 1})).await;
            assert_eq!((&shown["balance_abs_threshold"], &shown["route_policy"]), (&json!(3), &json!("prefix_cache")));
        }
    whole_body: "`node_selector`, `min_replicas`, `max_replicas`, `spread_all`",
        "say how many replicas a model has, and where",
        Differs {
            default: "taken and checked; the response names those that ask for something, under `without_effect`",
            exact: "none: scale with an autoscaler of the cluster",
        } => {
            let pool = pool("").await;
            let whole = json!({
                "model_name": "m", "node_selector": {"gpu": "a100"}, "min_replicas": 1, "max_replicas": 3,
                "spread_all": false, "route_policy": "prefix_cache", "balance_abs_threshold": 2, "balance_rel_threshold": 1.5,
                "min_prefix_match": 0.3,
            });
            let (status, shown) = post(&pool, whole).await;
            let named = json!(["max_replicas", "min_replicas", "node_selector"]);
            assert_eq!((status, &shown["without_effect"]), (200, &named));
        }
    bounds: "values out of bounds", "400 with an error that names the field",
        Same => {
            let pool = pool("").await;
            for (field, value) in [
                ("min_prefix_match", json!(2)),
                ("route_policy", json!("bogus")),
                ("balance_rel_threshold", json!(0.5)),
                ("balance_abs_threshold", json!(-1)),
                ("min_replicas", json!(4)),
            ] {
                let mut body = json!({"model_name": "m", "max_replicas": 3});
                body[field] = value;
                let (status, answer) = post(&pool, body).await;
                let message = answer["error"]["message"].as_str().unwrap_or_default();
                assert!(status == 400 && message.contains(field), "{field}: {status} {answer}");
            }
            let both = json!({"model_name": "m", "spread_all": true, "min_replicas": 1});
            assert_eq!(post(&pool, both).await.0, 400, "spread_all excludes the others");
        }
    zero: "a threshold of 0", "inherits the global value",
        Differs {
            default: "`min_prefix_match` and `balance_abs_threshold` of 0 are 0; `balance_rel_threshold` of 0 inherits",
            exact: "`null`, or `\"\"` for the policy, inherits",
        } => {
            let pool = pool("").await;
            let mut zeros = json!({"model_name": "m", "balance_abs_threshold": 0, "balance_rel_threshold": 0});
            zeros["min_prefix_match"] = json!(0);
            let (_, shown) = post(&pool, zeros).await;
            assert_eq!((&shown["min_prefix_match"], &shown["balance_abs_threshold"]), (&json!(0.0), &json!(0)));
            assert_eq!(shown["balance_rel_threshold"], Value::Null);
            let (_, shown) = post(&pool, json!({"model_name": "m", "min_prefix_match": null})).await;
            assert_eq!(shown["min_prefix_match"], Value::Null);
        }
    persistence: "where policies are kept", "in the database, which all frontends share",
        Differs {
            default: "`modelPolicies` of the configuration file, read at every start and reload; what the API changes reaches all \
                      pickers that share state by `sync`, and is kept until the last of them ends",
            exact: "write policies into the file, which all pickers read",
        } => {
            let top = "modelPolicies: [{model: m, minPrefixMatch: 0.5, balanceAbsThreshold: 4}]\n";
            let pool = pool(top).await;
            let shown = pool.admin("GET", "/api/nodes/scheduling/m", &Value::Null).await.json();
            assert_eq!((&shown["min_prefix_match"], &shown["balance_abs_threshold"]), (&json!(0.5), &json!(4)));
            let (_, changed) = post(&pool, json!({"model_name": "m", "min_prefix_match": 0.1})).await;
            assert_eq!((&changed["min_prefix_match"], &changed["balance_abs_threshold"]), (&json!(0.1), &json!(4)));
            assert_eq!(pool.admin("DELETE", "/api/nodes/scheduling/m", &Value::Null).await.status, 204);
            let again = pool.admin("GET", "/api/nodes/scheduling/m", &Value::Null).await.json();
            assert_eq!(again, shown, "what the file says holds again");
            let (good, said) = check("modelPolicies: [{model: m, minPrefixMatch: 2}]\n", "", &[]).await;
            assert!(!good && said.contains("minPrefixMatch") && said.contains("0 to 1"), "{said}");
        }
}
