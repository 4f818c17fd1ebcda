//! AIBrix's tokenizers, its remote tokenizer pool, and their metrics.

use super::configured::{PLAIN, Variables, check, value};
use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::rows;
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::sim::SimProcess;
use attache_pool::SnapshotStore;
use attache_prompt::remote::TokenCall;
use attache_protocol::Api;
use attache_tokenize::{RemotePool, RemoteSettings};
use attache_types::clock::Clock;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;

/// AIBrix's variable that enables the remote tokenizer.
const REMOTE: (&str, &str) = ("AIBRIX_USE_REMOTE_TOKENIZER", "true");

/// The setting `key` of the tokenizer `remote` with these variables.
fn remote(variables: Variables<'_>, key: &str) -> Value {
    value(PLAIN, &[&[REMOTE], variables].concat(), &format!("/prefixCache/tokenizer/{key}"))
}

/// A pool of these servers.
fn serving(servers: &[SocketAddr]) -> String {
    let list: Vec<String> = servers.iter().map(|server| format!("'{server}'")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: a, strategy: prefix-cache, endpoints: [{}]}}\n",
        list.join(", ")
    )
}

/// Sends a long prompt twice through a picker with these variables. Returns the picker and Envoy.
async fn send_prompt_twice(
    servers: &[SocketAddr],
    model: &str,
    variables: Variables<'_>,
) -> (AttacheProcess, EnvoyProcess) {
    let picker = AttacheProcess::configured_with(&serving(servers), variables).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let content = "The quick brown fox jumps over the lazy dog. ".repeat(40);
    let body = json!({"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}).to_string();
    for _ in 0..2 {
        let path = "/v1/chat/completions?kind=json&size=200";
        let reply = client::post(envoy.listener("inference"), path, body.clone().into()).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    }
    picker.assert_settled().await;
    (picker, envoy)
}

rows! { ROWS;
    tokenizer_types: "`AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE`: `character`, `tiktoken`, `remote`",
        "`character` by default", Same => {
        let kind =
            |word| value(PLAIN, &[("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", word)], "/prefixCache/tokenizer/type");
        assert_eq!(
            (kind("character"), kind("tiktoken"), kind("remote")),
            (json!("characters"), json!("tiktoken"), json!("remote"))
        );
        assert_eq!(value(PLAIN, &[], "/prefixCache/tokenizer/type"), "characters");
        let (good, said) = check(PLAIN, &[("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "bert")]);
        assert!(!good && said.contains("character, tiktoken, remote"), "{said}");
    }
    tiktoken_encoding: "`AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE=tiktoken`: the encoding", "`cl100k_base` for all models",
        Differs {
            default: "by the model's name; `o200k_base` for models that tiktoken does not know",
            exact: "`ATTACHE_AIBRIX_COMPAT=true`, or `prefixCache: {tokenizer: {type: tiktoken, encoding: cl100k_base}}`",
        } => {
        const TIKTOKEN: (&str, &str) = ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tiktoken");
        let exact = [TIKTOKEN, ("ROUTING_ALGORITHM", "prefix-cache"), ("ATTACHE_AIBRIX_COMPAT", "true")];
        let encoding = |variables| value(PLAIN, variables, "/prefixCache/tokenizer/encoding");
        assert_eq!((encoding(&[TIKTOKEN]), encoding(&exact)), (json!(null), json!("cl100k_base")));
        use attache_prompt::tiktoken::Encoding;
        assert_eq!(Encoding::of_model("qwen3-8b"), Encoding::O200kBase);
    }
    enable_remote: "`AIBRIX_USE_REMOTE_TOKENIZER`, `AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER` (`EnableVLLMRemote`)",
        "servers are asked for tokens", Same => {
        for name in ["AIBRIX_USE_REMOTE_TOKENIZER", "AIBRIX_PREFIX_CACHE_USE_REMOTE_TOKENIZER"] {
            assert_eq!(value(PLAIN, &[(name, "true")], "/prefixCache/tokenizer/type"), "remote", "{name}");
            assert_eq!(value(PLAIN, &[(name, "false")], "/prefixCache/tokenizer/type"), "characters", "{name}");
        }
    }
    template: "`AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE`, `AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT` \
        (`EndpointTemplate`)",
        "`http://%s:8000`, with the address of a pod", Differs {
            default: "`http://{address}`, the endpoint's address and port; `%s` and `{ip}` stand for the address \
                alone",
            exact: "`AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE=http://%s:8000`, or `prefixCache.tokenizer.url`",
        } => {
        for name in ["AIBRIX_VLLM_TOKENIZER_ENDPOINT_TEMPLATE", "AIBRIX_PREFIX_CACHE_REMOTE_TOKENIZER_ENDPOINT"] {
            assert_eq!(remote(&[(name, "http://%s:8000")], "url"), "http://{ip}:8000", "{name}");
        }
        let text = PLAIN
            .replace("name: a,", "name: a, prefixCache: {tokenizer: {type: remote, url: 'http://{ip}:8000'}},");
        let (good, said) = check(&text, &[]);
        assert!(good, "{said}");
    }
    health_check_period: "`AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD` (`HealthCheckPeriod`)",
        "30 s; a value that is set overflows", Differs {
            default: "30 s, and a value that is set counts (`prefixCache.tokenizer.healthCheckPeriod`)",
            exact: "unset the variable",
        } => {
        assert_eq!(remote(&[], "healthCheckPeriod"), "30s");
        assert_eq!(remote(&[("AIBRIX_TOKENIZER_HEALTH_CHECK_PERIOD", "10s")], "healthCheckPeriod"), "10s");
    }
    ttl: "`AIBRIX_TOKENIZER_TTL` (`TokenizerTTL`)",
        "5 min; a value that is set overflows", Differs {
            default: "5 min, and a value that is set counts (`prefixCache.tokenizer.ttl`)",
            exact: "unset the variable",
        } => {
        assert_eq!(remote(&[], "ttl"), "5m");
        assert_eq!(remote(&[("AIBRIX_TOKENIZER_TTL", "60")], "ttl"), "1m");
    }
    max_tokenizers: "`AIBRIX_MAX_TOKENIZERS_PER_POOL` (`MaxTokenizersPerPool`)",
        "100 models", Same => {
        assert_eq!(remote(&[], "maxModels"), 100);
        assert_eq!(remote(&[("AIBRIX_MAX_TOKENIZERS_PER_POOL", "7")], "maxModels"), 7);
    }
    request_timeout: "`AIBRIX_TOKENIZER_REQUEST_TIMEOUT` (`Timeout`)",
        "5 s", Differs {
            default: "5 s for a call; a decision waits no longer than `prefixCache.tokenizer.timeout` (400 ms), \
                and the tokens count for the next turn",
            exact: "`timeout: 5s`",
        } => {
        assert_eq!((remote(&[], "requestTimeout"), remote(&[], "timeout")), (json!("5s"), json!("400ms")));
        assert_eq!(remote(&[("AIBRIX_TOKENIZER_REQUEST_TIMEOUT", "2")], "requestTimeout"), "2s");
    }
    pool_variables_without_remote: "variables of the tokenizer pool without the remote tokenizer",
        "ignored", Differs {
            default: "ignored, which a warning says",
            exact: "unset the variables",
        } => {
        let (good, said) = check(PLAIN, &[("AIBRIX_TOKENIZER_TTL", "60")]);
        assert!(
            good && said.contains("`AIBRIX_TOKENIZER_TTL` has no effect")
                && said.contains("AIBRIX_USE_REMOTE_TOKENIZER"),
            "{said}"
        );
    }
    model_service_map: "`ModelServiceMap`, a URL for a model's tokenizer",
        "a field without a variable", Differs {
            default: "`prefixCache.tokenizer.modelUrls`",
            exact: "name each model there",
        } => {
        let service = SimProcess::start(1, &[]).await;
        let tokenizer = "{type: remote, modelUrls: {m: 'http://127.0.0.1:9/'}}";
        let text = PLAIN.replace("name: a,", &format!("name: a, prefixCache: {{tokenizer: {tokenizer}}},"));
        assert_eq!(value(&text, &[], "/prefixCache/tokenizer/modelUrls/m"), "http://127.0.0.1:9");
        let model_urls = [("sim-8b".to_owned(), format!("http://{}", service.servers[0]))].into();
        let settings = RemoteSettings { model_urls, ..RemoteSettings::default() };
        let pool = Arc::new(
            RemotePool::new("a".into(), settings, Arc::new(SnapshotStore::default()), Clock::start(), 1)
                .expect("a pool"),
        );
        let tokens = |model: &'static str| {
            let pool = pool.clone();
            async move { pool.tokens(TokenCall { model, api: Api::Completions, body: br#"{"prompt":"hello"}"# }).await }
        };
        assert!(tokens("sim-8b").await.is_ok_and(|tokens| !tokens.is_empty()), "its own server is asked");
        assert!(tokens("other").await.is_err(), "the pool has no endpoints");
    }
    default_tokenizer: "`DefaultTokenizer`: what stands in when servers give no tokens",
        "`character`, or the one of `…_TOKENIZER_TYPE`", Differs {
            default: "the same under AIBrix's variables; else nothing: the request is routed by load",
            exact: "`prefixCache.tokenizer.fallback: characters` or `tiktoken`",
        } => {
        assert_eq!(remote(&[], "fallback"), "characters");
        assert_eq!(remote(&[("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tiktoken")], "fallback"), "tiktoken");
        let text = PLAIN.replace("name: a,", "name: a, prefixCache: {tokenizer: remote},");
        assert_eq!(value(&text, &[], "/prefixCache/tokenizer/fallback"), "none");
        let servers = [Echo::start().await, Echo::start().await];
        // Echo servers have no tokenizer.
        let (picker, _envoy) = send_prompt_twice(&servers.each_ref().map(|server| server.address), "m", &[REMOTE]).await;
        assert!(
            picker.metric("attache_prefix_matched_tokens_total").await > 100.0,
            "the second request finds the first"
        );
    }
    pool_metrics: "`TokenizerPoolMetrics`: creations, failures, active and unhealthy tokenizers, requests and \
        latency by model",
        "`aibrix_tokenizer_pool_…`", Differs {
            default: "`attache_tokenizer_creations_total`, `_call_failures_total`, `_call_seconds` by model; \
                `_active_models`, `_unhealthy_models`, `_requests_total` by pool",
            exact: "rename the series in dashboards",
        } => {
        let sim = SimProcess::start(1, &["--speed", "20"]).await;
        let (picker, _envoy) = send_prompt_twice(&sim.servers, "sim-8b", &[REMOTE]).await;
        let labels = "{pool=\"a\",model=\"sim-8b\"}";
        assert_eq!(picker.metric(&format!("attache_tokenizer_creations_total{labels}")).await, 1.0);
        assert_eq!(
            picker.metric(&format!("attache_tokenizer_call_seconds_count{labels}")).await,
            1.0,
            "the second is remembered"
        );
        assert_eq!(picker.metric("attache_tokenizer_active_models").await, 1.0);
        assert_eq!(picker.metric("attache_tokenizer_requests_total").await, 2.0);
        assert_eq!(picker.metric("attache_tokenizer_unhealthy_models").await, 0.0);
    }
    cache_metrics: "`PrefixCacheMetrics`: decisions by match percent, latency by model, status of the indexer",
        "`aibrix_prefix_cache_routing_decisions_total` (0, 1-25, 26-50, 51-75, 76-100), `…_latency_seconds`, \
            `aibrix_prefix_cache_indexer_status`",
        Differs {
            default: "`attache_model_prefix_decisions_total` with the same buckets, \
                `attache_model_decision_seconds`, `attache_prefix_indexer`",
            exact: "rename the series in dashboards",
        } => {
        let server = Echo::start().await;
        let text = serving(&[server.address])
            .replace("kind: Attache\n", "kind: Attache\ntelemetry: {labels: {models: {allow: [m]}}}\n");
        let picker = AttacheProcess::configured(&text).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let content = "The quick brown fox jumps over the lazy dog. ".repeat(40);
        let body = json!({"model": "m", "messages": [{"role": "user", "content": content}]}).to_string();
        for _ in 0..2 {
            client::post(
                envoy.listener("inference"),
                "/v1/chat/completions?kind=json&size=200",
                body.clone().into(),
            )
            .await
            .expect("an answer");
        }
        for (percent, count) in [("0", 1.0), ("76-100", 1.0), ("26-50", 0.0)] {
            let series = format!("attache_model_prefix_decisions_total{{model=\"m\",match_percent=\"{percent}\"}}");
            assert_eq!(picker.metric(&series).await, count, "{percent}");
        }
        assert_eq!(picker.metric("attache_model_decision_seconds_count{model=\"m\"}").await, 2.0);
        assert_eq!(picker.metric("attache_prefix_indexer{pool=\"a\",indexer=\"routed\"}").await, 1.0);
    }
}
