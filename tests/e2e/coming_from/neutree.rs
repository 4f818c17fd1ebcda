//! Neutree's distribution of requests over the replicas of an endpoint.

use super::Here::{Differs, Same, Warns};
use super::Row;
use super::localai::fleet::{Fleet, chat, completion};
use super::localai::running::{Pool, check};
use super::rows;
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub(super) const TOPICS: &[(&str, &[Row])] = &[("names and parameters", NAMES), ("consistent hashing", HASHING)];

fn neutrees() -> Fleet {
    Fleet::of("consistent_hash", "{}")
}

/// The picked endpoint while all endpoints are idle.
fn home_endpoint(fleet: &Fleet, body: &Value, endpoints: usize) -> u32 {
    fleet.ask(body, &vec![0; endpoints]).endpoint
}

/// Requests of each endpoint after `times` requests with one prompt that all stay in flight.
fn requests_per_endpoint(fleet: &Fleet, endpoints: usize, times: usize) -> Vec<u32> {
    let mut requests = vec![0; endpoints];
    for _ in 0..times {
        let picked = fleet.ask(&chat("hot"), &requests).endpoint as usize;
        requests[picked] += 1;
    }
    requests
}

/// A conversation with these messages (role and text).
fn conversation(messages: &[(&str, &str)]) -> Value {
    let messages: Vec<Value> = messages.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
    json!({"model": "m", "messages": messages})
}

/// Whether two requests have the same home endpoint, compared over rings of many sizes.
fn share_a_home(fleet: &Fleet, one: &Value, other: &Value) -> bool {
    (3..23).all(|endpoints| home_endpoint(fleet, one, endpoints) == home_endpoint(fleet, other, endpoints))
}

rows! { NAMES;
    consistent_hash: "`consistent_hash`", "consistent hashing with bounded loads",
        Same => {
            let more = "  strategy: {name: consistent_hash, parameters: {virtual_nodes_per_replica: 100, load_factor: 1.25}}\n";
            let (good, said) = check("", more, &[]).await;
            assert!(good && !said.contains("W3"), "{said}");
            let pool = Pool::with(3, "", more, &[]).await;
            let first = pool.pick(&chat("stay")).await;
            for _ in 0..3 {
                assert_eq!(pool.pick(&chat("stay")).await, first);
            }
        }
    roundrobin: "`roundrobin`, `round_robin`, `RoundRobin`", "replicas in rotation; in the static-nodes mode the code runs `pow2` under this name",
        Differs { default: "`round-robin`: in rotation, as documented", exact: "`pow2`" } => {
            let pool = Pool::with(3, "", "  strategy: roundrobin\n", &[]).await;
            let mut turns = Vec::new();
            for _ in 0..6 {
                turns.push(pool.pick(&chat("a")).await);
            }
            assert_eq!(turns[..3], turns[3..]);
            assert_eq!(turns.iter().collect::<BTreeSet<_>>().len(), 3);
            for spelling in ["round_robin", "RoundRobin"] {
                let (good, said) = check("", &format!("  strategy: {spelling}\n"), &[]).await;
                assert!(good && !said.contains("W3"), "{said}");
            }
        }
    leastconn: "`leastconn`", "the label of the router in the Kubernetes mode; what it does is not published",
        Differs { default: "`least-request`: the endpoint with the fewest requests", exact: "none" } => {
            let (good, said) = check("", "  strategy: leastconn\n", &[]).await;
            assert!(good && !said.contains("W3"), "{said}");
            assert_eq!(Fleet::of("leastconn", "{}").ask(&chat("a"), &[5, 1, 3]).endpoint, 1);
        }
    pow2: "`pow2`", "the less loaded of two replicas that are drawn",
        Same => {
            let fleet = Fleet::of("pow2", "{}");
            assert_eq!(fleet.ask(&chat("a"), &[5, 0]).endpoint, 1);
            assert!(check("", "  strategy: pow2\n", &[]).await.0);
        }
    static_hash: "`static_hash`", "MD5 of the payload modulo the number of replicas, whatever their load",
        Warns { instead: "`consistent-hash`, which it becomes: one payload stays on one endpoint until that is full" } => {
            let (good, said) = check("", "  strategy: static_hash\n", &[]).await;
            assert!(good && said.contains("static_hash") && said.contains("consistent-hash"), "{said}");
        }
    virtual_nodes: "`virtual_nodes_per_replica`, `virtual_nodes`", "points of each replica on the ring, 100",
        Same => {
            let keys: Vec<Value> = (0..40).map(|i| chat(&format!("k{i}"))).collect();
            let homes = |parameters: &str| -> Vec<u32> {
                let fleet = Fleet::of("consistent_hash", parameters);
                keys.iter().map(|key| home_endpoint(&fleet, key, 8)).collect()
            };
            let default = homes("{}");
            assert_eq!(homes(r#"{"virtual_nodes_per_replica": 100}"#), default);
            assert_eq!(homes(r#"{"virtual_nodes": 100}"#), default);
            assert_ne!(homes(r#"{"virtual_nodes_per_replica": 3}"#), default);
        }
    load_factor: "`load_factor`", "load relative to the average, 1.25",
        Same => {
            // With 3 of 12 requests on its home and an average of 13 / 4, the bound is 4.06 at 1.25, and 3.25 at 1.
            let fleet = |factor: &str| Fleet::of("consistent_hash", &format!(r#"{{"load_factor": {factor}}}"#));
            let at = home_endpoint(&fleet("1.25"), &chat("a"), 4);
            let requests: Vec<u32> = vec![3; 4];
            assert_eq!(fleet("1.25").ask(&chat("a"), &requests).reason, "first on the hash ring");
            assert_ne!(fleet("1").ask(&chat("a"), &requests).reason, "first on the hash ring");
            assert_eq!(fleet("1").ask(&chat("a"), &requests).endpoint, at, "nobody has room: the first again");
        }
    max_user_messages: "`max_user_messages_for_cache`", "user messages in the key, 2",
        Same => {
            let one = conversation(&[("user", "A"), ("user", "B"), ("user", "C")]);
            let other = conversation(&[("user", "A"), ("user", "B"), ("user", "D")]);
            let fleet = |n: u32| Fleet::of("consistent_hash", &format!(r#"{{"max_user_messages_for_cache": {n}}}"#));
            assert!(share_a_home(&neutrees(), &one, &other) && share_a_home(&fleet(2), &one, &other));
            assert!(!share_a_home(&fleet(3), &one, &other));
        }
    spelling_on_chwbl: "these parameters on `chwbl`", "no such name",
        Differs {
            default: "Neutree's spelling means Neutree's rule; camelCase means Attaché's bound",
            exact: "`consistent_hash`, Neutree's spelling, or `compat: true`",
        } => {
            let busiest = |parameters: &str| requests_per_endpoint(&Fleet::of("chwbl", parameters), 16, 16).into_iter().max();
            assert_eq!(busiest(r#"{"load_factor": 1.25}"#), Some(12));
            assert_eq!(busiest(r#"{"compat": true}"#), Some(12));
            assert!(busiest(r#"{"loadFactor": 1.25}"#) <= Some(4));
            assert!(busiest(r#"{"load_factor": 1.25, "margin": 2}"#) <= Some(4));
        }
    unknown_name: "an unknown name", "`pow2`",
        Differs { default: "an error that lists the strategies", exact: "`pow2`" } => {
            let (good, said) = check("", "  strategy: weighted_random\n", &[]).await;
            assert!(!good && said.contains("weighted_random") && said.contains("consistent-hash"), "{said}");
        }
    wrong_value: "a parameter out of its bounds", "not checked",
        Differs { default: "an error that names the parameter as it is written", exact: "none" } => {
            for (parameter, says) in [
                ("virtual_nodes_per_replica: 0", "`virtual_nodes_per_replica` is 0; 1 to 4096 is allowed"),
                ("load_factor: 0.5", "`load_factor` is 0.5; at least 1 is allowed"),
            ] {
                let more = format!("  strategy: {{name: consistent_hash, parameters: {{{parameter}}}}}\n");
                let (good, said) = check("", &more, &[]).await;
                assert!(!good && said.contains(says), "{said}");
            }
        }
}

rows! { HASHING;
    ring: "hash ring", "first 64 bits of MD5 of `replica:index`; the next point after the key's",
        Same => {
            // A replica that joins takes keys and moves none between the others.
            let fleet = neutrees();
            for i in 0..60 {
                let key = chat(&format!("k{i}"));
                let (before, after) = (home_endpoint(&fleet, &key, 5), home_endpoint(&fleet, &key, 6));
                assert!(after == before || after == 5, "{before} to {after}");
            }
        }
    key: "key of a chat", "the system prompt and the first user messages; the last system prompt before them counts",
        Same => {
            let fleet = neutrees();
            let one = conversation(&[("system", "S"), ("user", "A"), ("assistant", "x"), ("user", "B"), ("user", "C")]);
            let other = conversation(&[("system", "T"), ("system", "S"), ("user", "A"), ("user", "B")]);
            assert!(share_a_home(&fleet, &one, &other), "answers and later users are left out");
            assert!(!share_a_home(&fleet, &one, &conversation(&[("system", "T"), ("user", "A"), ("user", "B")])));
        }
    key_without_messages: "key of a request that is not a chat", "the full payload, sampling parameters included",
        Differs {
            default: "`chwbl`: all text of the prompt, so that equal prompts stay together whatever else is asked for",
            exact: "`consistent_hash`, or `compat: true`: the bytes of the body",
        } => {
            let plain = completion("m", "once upon");
            let mut hot = plain.clone();
            hot["temperature"] = json!(1);
            assert!(share_a_home(&Fleet::of("chwbl", "{}"), &plain, &hot));
            assert!(!share_a_home(&neutrees(), &plain, &hot));
            assert!(share_a_home(&neutrees(), &plain, &plain.clone()));
        }
    acceptance: "acceptance", "`load + 1 <= (total + 1) / replicas * load_factor`",
        Differs {
            default: "`chwbl`: the bound is rounded up and has a margin of two square roots of the average",
            exact: "`consistent_hash`, or `compat: true`",
        } => {
            let fleet = neutrees();
            let at = home_endpoint(&fleet, &chat("a"), 4) as usize;
            // 4 replicas with 4 requests each: 17 / 4 * 1.25 = 5.3, so that 5 are accepted and 6 are not.
            let mut requests = vec![4; 4];
            assert_eq!(fleet.ask(&chat("a"), &requests).endpoint as usize, at);
            requests[at] = 5;
            let next = fleet.ask(&chat("a"), &requests);
            assert!(next.endpoint as usize != at && next.diverted);
            assert_eq!(Fleet::of("chwbl", "{}").ask(&chat("a"), &requests).endpoint as usize, at);
        }
    next_replica: "home that is full", "the next replica on the ring that has room",
        Same => {
            let fleet = neutrees();
            let mut requests = vec![8; 4];
            let first = fleet.ask(&chat("a"), &requests).endpoint as usize;
            requests[first] = 20;
            let second = fleet.ask(&chat("a"), &requests).endpoint as usize;
            assert_ne!(first, second);
            assert_eq!(fleet.ask(&chat("a"), &requests).reason, "next on the hash ring below its bound");
            assert_eq!(fleet.ask(&chat("a"), &requests).endpoint as usize, second, "the same one each time");
        }
    no_replica_has_capacity: "no replica has room", "the first one on the ring",
        Same => {
            let requests = requests_per_endpoint(&neutrees(), 16, 16);
            assert_eq!((requests.iter().max(), requests.iter().filter(|r| **r == 0).count()), (Some(&12), 11));
        }
    hot_prompt: "hot prompt on an idle fleet",
        "no replica has room below `replicas / load_factor` requests: all stay on the first",
        Differs { default: "`chwbl`: spreads from the fourth request on", exact: "`consistent_hash`" } => {
            assert!(requests_per_endpoint(&Fleet::of("chwbl", "{}"), 16, 16).into_iter().max() <= Some(4));
        }
    average: "average load", "over all replicas, whether they may serve the request or not",
        Differs {
            default: "`chwbl`: over those that may serve it",
            exact: "`consistent_hash`, or `compat: true`",
        } => {
            for (name, wanted) in [("chwbl", false), ("consistent_hash", true)] {
                let mut fleet = Fleet::of(name, "{}");
                fleet.candidates = vec![0, 1];
                let reason = fleet.ask(&chat("x"), &[8, 8, 0, 0, 0, 0, 0, 0]).reason;
                assert_eq!(reason.ends_with("every endpoint is at its bound"), wanted, "{name}");
            }
        }
    load: "load of a replica", "the proxy's own view of its queue",
        Differs {
            default: "what the endpoint reports, corrected by the requests that were sent and ended since",
            exact: "`scrape` off: `engine: none` for the endpoints",
        } => {
            let fleet = neutrees();
            let at = home_endpoint(&fleet, &chat("a"), 2);
            let reported: Vec<u32> = (0..2).map(|id| if id == at { 30 } else { 2 }).collect();
            assert_ne!(fleet.ask(&chat("a"), &reported).endpoint, at);
        }
    without_content: "request without any text", "a random replica, by the request's id",
        Differs { default: "`chwbl`: the endpoint with the fewest requests", exact: "none" } => {
            let picked = Fleet::of("chwbl", "{}").ask(&completion("m", ""), &[2, 0, 1]);
            assert_eq!((picked.endpoint, picked.reason), (1, "fewest requests"));
        }
}
