//! AstrAI behind Attaché.

use super::super::{Here, rows};
use super::*;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;

fn pool(servers: &[SocketAddr], engine: &str, more: &str) -> String {
    let endpoints: Vec<String> =
        servers.iter().map(|server| format!("{{address: \"{server}\", engine: {engine}}}")).collect();
    let pool = format!("{{name: default, strategy: least-request, endpoints: [{}], {more}}}", endpoints.join(", "));
    format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{pool}]\n")
}

/// The scraped metrics of each server, by its address.
async fn loads(picker: &AttacheProcess) -> Vec<(String, Value)> {
    let text = |value: &Value| value.as_str().expect("an address").to_owned();
    picker.endpoints().await.iter().map(|e| (text(&e["address"]), e["metrics"].clone())).collect()
}

rows! { ROWS;
    request_without_model_needs_astrai_or_a_default_model:
    "no `model`", "optional", Here::Differs {
        default: "the same where all servers of the pool are `engine: astrai`; of the only pool with one known model it is that model; \
                  else 400, since the other engines' APIs ask for it",
        exact: "`defaultModel` of the pool",
    } => {
        let (sim, to) = actual().await;
        // Each configuration with the expected status.
        for (text, status) in [
            (pool(&sim.servers, "astrai", "scrape: {interval: 50ms}"), 200),
            (pool(&sim.servers, "vllm", "defaultModel: astrai"), 200),
            (pool(&sim.servers, "vllm", "match: {models: [astrai]}"), 200),
            (pool(&sim.servers, "vllm", "defaultModel: house, modelRewrites: [{model: house, targets: [{model: astrai}]}]"), 200),
            (pool(&sim.servers, "vllm", "match: {models: [astrai, other]}"), 400),
            (pool(&sim.servers, "vllm", ""), 400),
        ] {
            let picker = AttacheProcess::configured(&text).await;
            let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
            let reply = chat(envoy.listener("inference"), json!({})).await;
            assert_eq!(reply.status.as_u16(), status, "{text}: {}", String::from_utf8_lossy(&reply.body));
            assert_eq!(reply.json()["model"] == "astrai", status == 200, "{text}");
            let explained = post(picker.metrics, "/explain?path=/v1/chat/completions", hello(json!({}))).await;
            assert_eq!(explained.status.as_u16(), status, "{text}: {}", String::from_utf8_lossy(&explained.body));
        }
        assert_eq!(chat(to, json!({})).await.status, 200);
    }

    streams_of_astrai_pass_unchanged:
    "streams of AstrAI as it is", "events without blank lines between them, and an event that is nothing but the usage, which is counted", Here::Same => {
        let (sim, _) = actual().await;
        let picker = AttacheProcess::configured(&pool(&sim.servers, "astrai", "")).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let to = envoy.listener("inference");
        let streamed = chat(to, json!({"stream": true})).await;
        assert_eq!(events(&streamed).len(), 7, "{streamed:?}");
        picker.until_metric("attache_completion_tokens_total", 4.0).await;
        chat(to, json!({"max_tokens": 3})).await;
        picker.until_metric("attache_completion_tokens_total", 7.0).await;
        let (sim, _) = documented().await;
        let picker = AttacheProcess::configured(&pool(&sim.servers, "astrai", "")).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        chat(envoy.listener("inference"), json!({"stream": true})).await;
        picker.until_metric("attache_completion_tokens_total", 4.0).await;
    }

    load_is_read_from_stats:
    "`GET /stats` as the load of a server", "not used by a router", Here::Differs {
        default: "`engine: astrai` reads it every `scrape.interval`, by the names of the documentation and by those of the code",
        exact: "`engine: none` reads nothing",
    } => {
        for quirks in ["astrai", "astrai-documented"] {
            let slow = ["--model", "astrai", "--quirks", quirks, "--max-num-seqs", "1", "--step-base", "500ms"];
            let sim = SimProcess::start(2, &slow).await;
            let picker = AttacheProcess::configured(&pool(&sim.servers, "astrai", "")).await;
            let busy = sim.servers[0];
            let calls: Vec<_> = (0..3).map(|_| tokio::spawn(async move { chat(busy, json!({})).await })).collect();
            eventually(&format!("the load of {quirks}"), || async {
                let loads = loads(&picker).await;
                let of = |server: SocketAddr| loads.iter().find(|(at, _)| *at == server.to_string()).map(|(_, load)| load.clone());
                let (first, second) = (of(busy)?, of(sim.servers[1])?);
                let full = first["running"] == 1 && first["waiting"] == 2;
                (full && second["running"] == 0 && second["waiting"] == 0).then_some(())
            })
            .await;
            calls.iter().for_each(|call| call.abort());
        }
    }

    engine_flag_accepts_astrai:
    "the engine's name", "AstrAI", Here::Differs {
        default: "`engine: astrai`, `--engine=astrai`, and the value `astrai` of a pod's engine labels",
        exact: "the same names",
    } => {
        let (sim, _) = documented().await;
        let picker = AttacheProcess::start(&sim.servers, &["--engine=astrai"]).await;
        eventually("the server's load", || async { loads(&picker).await[0].1["running"].is_u64().then_some(()) }).await;
    }
}
