//! The replica that is picked for a prompt.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::localai::fleet::{Fleet, chat, completion};
use crate::coming_from::localai::running::Pool;
use crate::coming_from::rows;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// `prefix-affinity` with one-byte blocks, so that a test can set the length of a match.
fn by_bytes(compat: bool) -> Fleet {
    Fleet::of("prefix-affinity", &json!({"windowBytes": 1, "compat": compat}).to_string())
}

fn text(prompt: &str) -> Value {
    completion("m", prompt)
}

rows! { ROWS;
    hash_chain: "hash chain of a prompt",
        "xxHash64 of the model, then of the hash before and each of the first 64 blocks of 256 bytes",
        Same => {
            let fleet = Fleet::of("prefix-affinity", "{}");
            let chain = |model: &str, prompt: &str| fleet.trail(&completion(model, prompt), 0).map(|chain| chain.to_vec());
            assert_eq!(chain("m", "abc"), Some(vec![0xf725_79e7_baf1_aa6c]));
            assert_eq!(chain("m1", "abc"), Some(vec![0xba3e_6939_99a4_c072]));
            assert_eq!(chain("m2", "abc"), Some(vec![0xae99_ffe0_87bb_6bde]));
            for (bytes, blocks) in [(256, 1), (257, 2), (100_000, 64)] {
                assert_eq!(chain("m", &"x".repeat(bytes)).map(|c| c.len()), Some(blocks), "{bytes} bytes");
            }
        }
    prompt_source: "text of a conversation", "role, line break, content, line break, for each message",
        Same => {
            let fleet = Fleet::of("prefix-affinity", "{}");
            let system = json!({"role": "system", "content": "You are helpful."});
            let messages = [system, json!({"role": "user", "content": "Hi"})];
            let chain = fleet.trail(&json!({"model": "m", "messages": messages}), 0);
            assert_eq!(chain.map(|c| c.to_vec()), Some(vec![0xd035_f6c5_dfd1_9c6d]));
        }
    longest_match: "longest match", "the replica that was sent the longest beginning, from `min_prefix_match` 0.3 on",
        Same => {
            for compat in [false, true] {
                let fleet = by_bytes(compat);
                fleet.sent(&text("abcdefgh"), 1);
                assert_eq!(fleet.ask(&text("abcXXXX"), &[0, 0]).endpoint, 1, "3 of 7");
                assert_eq!(fleet.ask(&text("abXXXXXXXX"), &[0, 0]).endpoint, 0, "2 of 10");
            }
        }
    load_guard: "load guard",
        "in_flight <= least + `balance_abs_threshold` 2, and <= least x `balance_rel_threshold` 1.5 + 1",
        Same => {
            let fleet = by_bytes(true);
            fleet.sent(&text("abcd"), 1);
            for (least, most) in [(0, 1), (1, 2), (2, 4), (3, 5), (8, 10)] {
                assert_eq!(fleet.ask(&text("abcd"), &[least, most]).endpoint, 1, "{least} and {most}");
                let over = fleet.ask(&text("abcd"), &[least, most + 1]);
                assert_eq!((over.endpoint, over.diverted), (0, true), "{least} and {most} + 1");
            }
        }
    cold_placement: "prompt that nobody was sent", "the eligible replica that was sent the least of late, by model",
        Differs {
            default: "the same among idle endpoints; an idle endpoint goes before a busy one",
            exact: "`compat: true`",
        } => {
            for compat in [false, true] {
                let fleet = by_bytes(compat);
                fleet.sent(&completion("other", "long prompt of another model"), 1);
                fleet.sent(&text("abcd"), 0);
                assert_eq!(fleet.ask(&text("zz"), &[0, 0]).endpoint, 1, "weights are the model's own");
                assert_eq!(fleet.ask(&text("zz"), &[0, 1]).endpoint, u32::from(compat), "compat {compat}");
            }
        }
    floor: "floor: `route_policy: round_robin`, or no prompt to compare",
        "in_flight ascending, last_used ascending, available_vram descending",
        Differs {
            default: "the same order; free memory is the unused part of the KV cache, as the endpoint reports it",
            exact: "none: model servers report no free VRAM",
        } => {
            let more = "  strategy: {name: prefix-affinity, parameters: {routePolicy: round_robin}}\n";
            let pool = Pool::with(3, "", more, &[]).await;
            let idle = pool.ask(&chat("a")).await;
            let mut used = BTreeSet::from([idle.server]);
            // One server stays busy: the two idle servers alternate.
            let mut turns = Vec::new();
            for _ in 0..4 {
                turns.push(pool.pick(&chat("a")).await);
            }
            assert!(turns.iter().all(|server| *server != idle.server), "{turns:?} beside {}", idle.server);
            assert!(turns[0] == turns[2] && turns[1] == turns[3] && turns[0] != turns[1], "used longest ago: {turns:?}");
            used.extend(turns);
            assert_eq!(used.len(), 3);
        }
    floor_requests_are_not_remembered: "`round_robin` and the memory of prompts", "requests are not remembered",
        Same => {
            let fleet = Fleet::of("prefix-affinity", r#"{"routePolicy": "round_robin"}"#);
            assert_eq!(fleet.trail(&chat("abcd"), 0), None);
        }
    empty_prompt: "request without a prompt", "no preference: the floor decides",
        Same => {
            let fleet = by_bytes(false);
            assert_eq!(fleet.ask(&text(""), &[2, 1]).reason, "fewest requests, then used the longest ago");
        }
    owners: "replicas that hold the same beginning", "the last one to be sent it is the only one",
        Differs {
            default: "all are remembered, at most 8; the one with the fewest requests is preferred",
            exact: "`compat: true`",
        } => {
            for (compat, preferred) in [(false, 0), (true, 1)] {
                let fleet = by_bytes(compat);
                fleet.sent(&text("abcd"), 0);
                fleet.sent(&text("abcd"), 1);
                assert_eq!(fleet.ask(&text("abcd"), &[0, 1]).endpoint, preferred, "compat {compat}");
            }
        }
    absent_owner: "longest match on a replica that may not serve",
        "no preference, even where another replica holds less of it",
        Differs { default: "the longest match among the endpoints that may serve", exact: "`compat: true`" } => {
            for (compat, preferred) in [(false, 1), (true, 0)] {
                let mut fleet = by_bytes(compat);
                fleet.sent(&text("abcd"), 1);
                fleet.sent(&text("abcdefgh"), 2);
                fleet.candidates = vec![0, 1];
                assert_eq!(fleet.ask(&text("abcdefgh"), &[0, 0, 0]).endpoint, preferred, "compat {compat}");
            }
        }
    replicas_of_a_node: "two replicas on one node", "kept apart by replica index, which the released code reads as 0",
        Differs { default: "every address is an endpoint of its own", exact: "not offered: it is a fault" } => {
            let fleet = by_bytes(true);
            fleet.sent(&text("abcd"), 0);
            fleet.sent(&text("abxy"), 1);
            assert_eq!(["abcd", "abxy"].map(|prompt| fleet.ask(&text(prompt), &[0; 2]).endpoint), [0, 1]);
        }
    pressure: "pressure: a warm replica was passed over for its load",
        "counted by model over 1 minute; from 1 on the model gets another replica",
        Differs {
            default: "the gauge `attache_model_pressure` and the page `/api/pressure` have the count of the last minute by pool and model; Attaché starts no replicas",
            exact: "an autoscaler on `sum by (pool, model) (attache_model_pressure) >= 1`, which adds up all pickers; or a controller that reads `/api/pressure/{model}`, and deletes what it read once the replica has started",
        } => {
            let pool = Pool::with(2, "", "  strategy: prefix-affinity\n", &[]).await;
            let prompt = chat(&"a hot prompt ".repeat(60));
            let home = pool.pick(&prompt).await;
            let mut running = Vec::new();
            while running.last().is_none_or(|pending: &super::running::PendingRequest| pending.server == home) {
                assert!(running.len() < 6, "a hot prompt moves");
                running.push(pool.ask(&prompt).await);
            }
            assert_eq!(pool.picker.metric("attache_model_diverted_total{model=\"m\"}").await, 1.0);
            assert_eq!(pool.picker.metric("attache_diverted_total").await, 1.0);
            assert_eq!(pool.picker.metric("attache_model_pressure{pool=\"default\",model=\"m\"}").await, 1.0);
        }
    node_header: "response header `X-LocalAI-Node`", "names the node, where that is switched on",
        Differs {
            default: "the response has no such header; the admin page `/decisions` names the endpoint of each request",
            exact: "Envoy's `response_headers_to_add` with `%UPSTREAM_REMOTE_ADDRESS%`",
        } => {
            let pool = Pool::with(1, "", "  strategy: prefix-affinity\n", &[]).await;
            pool.pick(&chat("a")).await;
            let decisions = pool.admin("GET", "/decisions", &Value::Null).await;
            assert!(String::from_utf8_lossy(&decisions.body).contains("127.0.0.1:"), "the endpoint of the request");
        }
}
