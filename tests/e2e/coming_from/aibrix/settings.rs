//! AIBrix's settings that do not belong to a strategy.

use super::configured::{PLAIN, assert_void, check, pool, read, value};
use crate::coming_from::Here::{Differs, Same, Warns};
use crate::coming_from::rows;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use attache_config::aibrix_env::AibrixEnv;
use serde_json::json;

/// All variables of AIBrix's gateway manifest with their values. Those of the pod's own fields have examples.
pub(crate) const MANIFEST: [(&str, &str); 11] = [
    ("REDIS_HOST", "aibrix-redis-master"),
    ("REDIS_PORT", "6379"),
    ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "50"),
    ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
    ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "16"),
    ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "2"),
    ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60"),
    ("AIBRIX_REDISSYNC_ENABLED", "false"),
    ("POD_NAME", "aibrix-gateway-plugins-0"),
    ("POD_NAMESPACE", "aibrix-system"),
];

/// Checks that a variable sets this parameter of the strategy `name`.
fn assert_parameter(name: &str, variable: &str, given: &str, parameter: &str, expected: &serde_json::Value) {
    let text = PLAIN.replace("name: a,", &format!("name: a, strategy: {name},"));
    let got = value(&text, &[(variable, given)], &format!("/strategy/parameters/{parameter}"));
    assert_eq!(&got, expected, "{variable}");
}

/// The plain pool; its servers do not exist, and a picker that can't reach any of those that it scrapes is not ready.
fn unscraped() -> String {
    let unscraped = |port: u16| format!("{{address: '127.0.0.1:{port}', engine: none}}");
    PLAIN.replace("'127.0.0.1:8000', '127.0.0.1:8001'", &format!("{}, {}", unscraped(8000), unscraped(8001)))
}

rows! { ROWS;
    manifest: "the environment of the manifest `config/gateway`",
        "sets up the gateway", Same => {
        let picker = AttacheProcess::configured_with(&unscraped(), &MANIFEST).await;
        let dump = client::get(picker.metrics, "/config_dump").await.expect("a page").json();
        let pool = &dump["pools"][0];
        assert_eq!((&pool["strategy"]["name"], &pool["prefixCache"]["blockSize"]), (&json!("random"), &json!(32)));
        let allowed = pool["requestStrategy"]["allow"].as_array().expect("a list");
        let prefix_cache = allowed.iter().find(|strategy| strategy["name"] == "prefix-cache").expect("all strategies");
        assert_eq!(prefix_cache["parameters"], json!({"imbalance": 16, "deviations": 2.0}));
        assert_eq!(pool["destination"]["headers"], json!(["x-gateway-destination-endpoint", "target-pod"]));
        let log = picker.process.stderr();
        let void: Vec<&str> = log.lines().filter(|line| line.contains("has no effect")).collect();
        let named = ["AIBRIX_PREFILL_REQUEST_TIMEOUT", "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS"];
        let all = named.iter().all(|name| void.iter().any(|line| line.contains(&format!("`{name}` has no effect"))));
        assert!(all && void.len() == named.len(), "all others act: {log}");
    }
    unknown_variables: "any other variable that begins with `AIBRIX_`",
        "ignored", Warns { instead: "the warning names the nearest variable that is read" } => {
        assert_void("AIBRIX_SOMETHING_NEW", "it is not read");
        let (_, said) = check(PLAIN, &[("AIBRIX_PREFIX_CACHE_BLOCK_SIZES", "128")]);
        assert!(said.contains("did you mean `AIBRIX_PREFIX_CACHE_BLOCK_SIZE`?"), "{said}");
    }
    other_products: "variables that begin with `LOCALAI_`, `NEUTREE_`, `GIE_`, `EPP_`, \
        `ENABLE_EXPERIMENTAL_`, `LLM_D_`, `LLMD_`; GIE's `SD_` and llm-d's `LATENCY_` variables by their names",
        "not AIBrix's", Warns { instead: "the warning says what to use, where there is something" } => {
        for name in [
            "LOCALAI_X",
            "NEUTREE_X",
            "GIE_X",
            "EPP_X",
            "SD_QUEUE_DEPTH_THRESHOLD",
            "ENABLE_EXPERIMENTAL_X",
            "LLM_D_X",
            "LLMD_X",
            "LATENCY_MAX_SAMPLE_SIZE",
        ] {
            assert_void(name, "");
        }
        let (good, said) = check(PLAIN, &[("SD_MODEL", "xl"), ("LATENCY_TARGET_MS", "50")]);
        assert!(good && !said.contains("SD_MODEL") && !said.contains("LATENCY_TARGET_MS"), "another program's: {said}");
    }
    run_warns: "warnings of variables at start",
        "none", Differs {
            default: "`attache run` logs them, `attache check` prints them",
            exact: "unset the variables",
        } => {
        let picker = AttacheProcess::configured_with(&unscraped(), &[("AIBRIX_NEW", "1"), ("LOCALAI_NEW", "1")]).await;
        let log = picker.process.stderr();
        for name in ["AIBRIX_NEW", "LOCALAI_NEW"] {
            assert!(log.contains(&format!("`{name}` has no effect")), "{name}: {log}");
        }
    }
    service_variables: "variables that Kubernetes sets for a Service, such as `AIBRIX_REDIS_MASTER_SERVICE_HOST`",
        "ignored", Same => {
        let (good, said) = check(
            PLAIN,
            &[
                ("AIBRIX_REDIS_MASTER_SERVICE_HOST", "10.0.0.1"),
                ("AIBRIX_REDIS_MASTER_PORT_6379_TCP", "tcp://10.0.0.1:6379"),
            ],
        );
        assert!(good && !said.contains("AIBRIX_"), "{said}");
    }
    block_size_characters: "`AIBRIX_PREFIX_CACHE_BLOCK_SIZE` with the tokenizer `character`",
        "characters, counted as bytes of UTF-8", Differs {
            default: "the same; rounded up to a multiple of 4, which a warning says",
            exact: "give a multiple of 4",
        } => {
        let size = |bytes| value(PLAIN, &[("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", bytes)], "/prefixCache/blockSize");
        assert_eq!((size("128"), size("256")), (json!(32), json!(64)), "4 bytes to a token");
        let (good, said) = check(PLAIN, &[("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "130")]);
        assert!(good && said.contains("`AIBRIX_PREFIX_CACHE_BLOCK_SIZE` of 130 counts as 132"), "{said}");
    }
    block_size_tokens: "`AIBRIX_PREFIX_CACHE_BLOCK_SIZE` with the tokenizer `tiktoken`",
        "tokens by the documentation; the code counts 4 bytes to a token",
        Differs { default: "tokens, as documented", exact: "divide the value by 4" } => {
        let variables =
            [("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tiktoken"), ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "16")];
        assert_eq!(value(PLAIN, &variables, "/prefixCache/blockSize"), 16);
    }
    default_block_size: "block size by default",
        "128 characters, or 16 tokens with `tiktoken`", Differs {
            default: "64 bytes of text or 16 tokens; as in AIBrix where its variables name the strategy or the tokenizer",
            exact: "`compat: true` of `prefix-cache`, or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
        const TYPE: &str = "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE";
        for (variables, tokens) in [
            (&[][..], 16),
            (&[(TYPE, "character")], 32),
            (&[(TYPE, "tiktoken")], 16),
            (&[("ROUTING_ALGORITHM", "prefix-cache")], 32),
            (&[("AIBRIX_ROUTING_ALGORITHM", "prefix-cache"), (TYPE, "tiktoken")], 16),
        ] {
            assert_eq!(value(PLAIN, variables, "/prefixCache/blockSize"), tokens, "{variables:?}");
        }
        let by_file = PLAIN.replace("name: a,", "name: a, strategy: prefix-cache,");
        assert_eq!(value(&by_file, &[("ATTACHE_AIBRIX_COMPAT", "true")], "/prefixCache/blockSize"), 32);
        for (compat, tokens) in [(true, 32), (false, 16)] {
            let strategy = format!("name: a, strategy: {{name: prefix-cache, parameters: {{compat: {compat}}}}},");
            assert_eq!(value(&PLAIN.replace("name: a,", &strategy), &[], "/prefixCache/blockSize"), tokens);
        }
    }
    block_number: "`AIBRIX_PREFIX_CACHE_BLOCK_NUMBER`",
        "blocks in the prefix table, 200000 by default; the least recently used go first", Differs {
            default: "the same when it is set (`prefixCache.maxBlocks`); else as many as `prefixCache.maxBytes` \
                (256 MiB) holds, about 8 million",
            exact: "`AIBRIX_PREFIX_CACHE_BLOCK_NUMBER=200000`",
        } => {
        use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
        use attache_prefix::index::TenantId;
        use attache_prefix::key::BlockKey;
        let (settings, _) = read(PLAIN, &[("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "20")]).expect("good");
        let config = CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Bytes(64),
            max_bytes: 1 << 20,
            tenant_share: 1.0,
            claim_life: std::time::Duration::from_secs(1),
            seed: 1,
        };
        let cache = PrefixCache::new(&config).with_max_blocks(settings.pools[0].prefix.max_blocks);
        let holder = cache.index().add_holder();
        for prompt in 0..5u64 {
            let keys: Vec<BlockKey> =
                (0..8).map(|block| BlockKey((prompt << 32 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
            cache.index().record(holder, &keys, TenantId(0), attache_types::clock::Timestamp(prompt));
        }
        assert_eq!(cache.index().stats().blocks, 16, "two prompts of eight blocks");
    }
    eviction: "`AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS`, `AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS`",
        "blocks are forgotten after 20 min, looked for every second", Warns {
            instead: "`prefixCache.maxBytes` and `maxBlocks` bound the index; a server's own room and its \
                restarts end what is believed of it",
        } => {
        assert_void("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", "prefixCache.maxBytes");
        assert_void("AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS", "prefixCache.maxBytes");
    }
    kv_events: "`AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED`, `AIBRIX_KV_EVENT_SYNC_ENABLED`, \
        `…_KV_EVENT_PUBLISH_ADDR`, `…_KV_EVENT_SUBSCRIBE_ADDRS`",
        "KV events are read", Warns { instead: "`prefixCache: {kvEvents: {}}` in the file" } => {
        for name in [
            "AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED",
            "AIBRIX_KV_EVENT_SYNC_ENABLED",
            "AIBRIX_PREFIX_CACHE_KV_EVENT_PUBLISH_ADDR",
            "AIBRIX_PREFIX_CACHE_KV_EVENT_SUBSCRIBE_ADDRS",
        ] {
            assert_void(name, "under `prefixCache`");
        }
    }
    hash_seed: "`AIBRIX_PREFIX_CACHE_HASH_SEED`",
        "one seed on all gateways", Warns { instead: "nothing: the pickers of one `sync` agree on keys by themselves" } => {
        assert_void("AIBRIX_PREFIX_CACHE_HASH_SEED", "not shared by their hashes");
    }
    state_sync: "`AIBRIX_STATESYNC_ENABLED`, `AIBRIX_STATESYNC_SYNC_PERIOD`",
        "gateways share their prefix tables in Redis", Warns {
            instead: "`prefixCache.kvEvents`: every picker reads what servers hold; or `sync.nats.servers`: pickers share prompts",
        } => {
        assert_void("AIBRIX_STATESYNC_ENABLED", "`sync.nats.servers` or `--sync-nats-url`");
        assert_void("AIBRIX_STATESYNC_SYNC_PERIOD", "`sync.nats.servers`");
    }
    sync_limits: "`AIBRIX_SYNC_MAX_CONTEXTS`, `AIBRIX_SYNC_MAX_PREFIXES_PER_CONTEXT`, `AIBRIX_SYNC_EVICTION_…`",
        "bounds of the table of KV events", Warns { instead: "`prefixCache.maxBytes`" } => {
        for name in [
            "AIBRIX_SYNC_MAX_CONTEXTS",
            "AIBRIX_SYNC_MAX_PREFIXES_PER_CONTEXT",
            "AIBRIX_SYNC_EVICTION_INTERVAL_SECONDS",
            "AIBRIX_SYNC_EVICTION_DURATION_MINUTES",
        ] {
            assert_void(name, "prefixCache.maxBytes");
        }
    }
    scrape_interval: "`AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS`",
        "every server is scraped every 50 ms", Warns {
            instead: "`--refresh-metrics-interval` or `scrape.interval`: 50 ms for servers with requests, 1 s for \
                others",
        } => {
        assert_void("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "--refresh-metrics-interval");
        assert_eq!(value(PLAIN, &[], "/scrape/interval"), "50ms");
    }
    prometheus: "`AIBRIX_PROMETHEUS_QUERY_INTERVAL_MS`, `AIBRIX_PROMETHEUS_QUERY_TIMEOUT_MS`",
        "some figures come from Prometheus",
        Warns { instead: "nothing: the same figures come from servers' own metrics" } => {
        assert_void("AIBRIX_PROMETHEUS_QUERY_INTERVAL_MS", "Prometheus is not asked");
        assert_void("AIBRIX_PROMETHEUS_QUERY_TIMEOUT_MS", "Prometheus is not asked");
    }
    gateway: "`AIBRIX_AUTH_BEARER_TOKEN`, `AIBRIX_HTTPROUTE_CACHE_TTL`, `AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES`",
        "the gateway plugin checks clients, looks at routes and bounds messages",
        Warns { instead: "the gateway's own policies; `limits.maxBodyBytes`" } => {
        assert_void("AIBRIX_AUTH_BEARER_TOKEN", "the gateway checks");
        assert_void("AIBRIX_HTTPROUTE_CACHE_TTL", "routes are the gateway's");
        assert_void("AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES", "limits.maxBodyBytes");
    }
    ttft_threshold: "`AIBRIX_TTFT_THRESHOLD_S`",
        "slower first tokens are counted",
        Warns { instead: "the histogram `attache_time_to_first_byte_seconds`" } => {
        assert_void("AIBRIX_TTFT_THRESHOLD_S", "attache_time_to_first_byte_seconds");
    }
    trt_machine_id: "`AIBRIX_TRT_MACHINE_ID`",
        "part of the ids of TensorRT-LLM requests", Warns { instead: "nothing: the ids are random" } => {
        assert_void("AIBRIX_TRT_MACHINE_ID", "random");
    }
    preble_loop: "`AIBRIX_ROUTER_PREBLE_EVICTION_LOOP_INTERVAL`",
        "the window moves on every 1000 ms", Differs {
            default: "the same when it is set; else the window moves on with every decision",
            exact: "`AIBRIX_ROUTER_PREBLE_EVICTION_LOOP_INTERVAL=1000`",
        } => {
        assert_parameter(
            "prefix-cache-preble",
            "AIBRIX_ROUTER_PREBLE_EVICTION_LOOP_INTERVAL",
            "1000",
            "evictionLoopInterval",
            &json!(1000),
        );
    }
    file_outranks: "a value that the configuration file gives as well",
        "there is no file", Differs {
            default: "the file counts, parameter by parameter",
            exact: "leave the parameter out of the file",
        } => {
        let text =
            PLAIN.replace("name: a,", "name: a, strategy: {name: prefix-cache, parameters: {imbalance: 9}},");
        let variables = [
            ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "4"),
            ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "3"),
        ];
        assert_eq!(pool(&text, &variables)["strategy"]["parameters"], json!({"imbalance": 9, "deviations": 3.0}));
    }
    blank_values: "a variable that is set to nothing",
        "not set", Same => {
        assert_eq!(
            AibrixEnv::of([("AIBRIX_PREFIX_CACHE_BLOCK_SIZE".to_owned(), " ".to_owned())]),
            AibrixEnv::default()
        );
    }
    deployment_label: "`AIBRIX_POD_DEPLOYMENT_LABEL`",
        "the label that names the deployment of a profile", Same => {
        for name in ["slo", "slo-pack-load", "slo-least-load", "slo-least-load-pulling"] {
            assert_parameter(name, "AIBRIX_POD_DEPLOYMENT_LABEL", "gpu", "deploymentLabel", &json!("gpu"));
        }
    }
    slo_by_environment: "`ROUTING_ALGORITHM=slo` (`slo-pack-load`, `slo-least-load-pulling`) and `REDIS_HOST`, \
        `REDIS_PORT`, `REDIS_PASSWORD` alone",
        "profiles are read in Redis, and requests wait in a queue for each model", Differs {
            default: "the same, with a queue for each pool, where no file says otherwise",
            exact: "a pool for each model",
        } => {
        for name in ["slo", "slo-pack-load", "slo-least-load-pulling"] {
            let variables = [
                ("ROUTING_ALGORITHM", name),
                ("REDIS_HOST", "redis.local"),
                ("REDIS_PORT", "6380"),
                ("REDIS_PASSWORD", "a/b"),
            ];
            let (settings, _) = read(PLAIN, &variables).expect("good");
            assert_eq!(
                settings.redis.as_ref().map(|redis| &*redis.url),
                Some("redis://:a%2Fb@redis.local:6380/0"),
                "{name}"
            );
            let pool = &settings.to_json()["pools"][0];
            assert_eq!(pool["strategy"]["parameters"], json!({"profilesFromRedis": true}), "{name}");
            assert_eq!(pool["flowControl"]["detector"]["name"], "slo-load-detector", "{pool}");
            assert_eq!(pool["flowControl"]["defaultBand"]["ordering"]["name"], "slo-urgency", "{pool}");
        }
        let locked = PLAIN.replace("name: a,", "name: a, strategy: random,");
        let (settings, _) = read(&locked, &[("REDIS_HOST", "redis.local")]).expect("good");
        assert!(settings.redis.is_none(), "no request can come to a strategy that reads it");
        // A Redis in the file is used only by the settings that name it.
        let text = PLAIN
            .replace("kind: Attache\n", "kind: Attache\nredis: {url: 'redis://redis.local'}\n")
            .replace("name: a,", "name: a, strategy: slo,");
        let (good, said) = check(&text, &[]);
        assert!(good && said.contains("`slo` has no profiles") && said.contains("profilesFromRedis: true"), "{said}");
    }
    slo_push: "`ROUTING_ALGORITHM=slo-least-load`",
        "no request waits", Same => {
        let (settings, _) =
            read(PLAIN, &[("ROUTING_ALGORITHM", "slo-least-load"), ("REDIS_HOST", "redis.local")]).expect("good");
        let pool = &settings.to_json()["pools"][0];
        assert!(pool["flowControl"].is_null() || pool["flowControl"]["enabled"] == false, "{pool}");
        assert_eq!(pool["strategy"]["parameters"]["profilesFromRedis"], true);
    }
    slo_by_header: "header `routing-strategy: slo` alone",
        "profiles are read in Redis, and these requests wait in a queue of their own", Differs {
            default: "profiles are read where `REDIS_HOST` is set; a header starts no queue, which a warning says",
            exact: "`flowControl: {enabled: true, detector: slo-load-detector, defaultBand: {ordering: slo-urgency}}`",
        } => {
        let text = PLAIN.replace("name: a,", "name: a, strategy: random, requestStrategy: {allow: [slo]},");
        for (text, variables) in [
            (&*text, &[("REDIS_HOST", "redis.local")][..]),
            (PLAIN, &[("REDIS_HOST", "redis.local"), ("ROUTING_ALGORITHM", "random")]),
        ] {
            let (settings, _) = read(text, variables).expect("good");
            assert!(settings.pools[0].reads_redis());
            assert_eq!(settings.redis.as_ref().map(|redis| &*redis.url), Some("redis://redis.local:6379/0"));
            let (good, said) = check(text, variables);
            assert!(good && said.contains("do not wait: a request starts no queue"), "{said}");
        }
        let queue = "flowControl: {enabled: true, detector: slo-load-detector}, requestStrategy:";
        let (_, said) = check(&text.replace("requestStrategy:", queue), &[("REDIS_HOST", "redis.local")]);
        assert!(!said.contains("do not wait"), "{said}");
    }
}
