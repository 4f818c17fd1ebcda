//! Configurations and their diagnostics: each file under `tests/data/config` has its expected diagnostics beside it.
//!
//! After an intended change of wording, `ATTACHE_BLESS=1 cargo test --release --test in_process config` rewrites the
//! expectations. Review the diff.

use attache::plugins::registry;
use attache_config::aibrix_env::AibrixEnv;
use attache_config::diagnostic::{render_json, render_text};
use attache_config::document::MAX_CONFIG_BYTES;
use attache_config::flags::KeyValues;
use attache_config::settings::{PodsOf, PoolGroup, TlsSettings, TokenizerSettings};
use attache_config::{
    Code, ConfigText, Diagnostic, KubernetesFlags, Overrides, Settings, Sources, Surroundings, load, load_pool,
};
use attache_flow::PoolFlow;
use attache_pool::Engine;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn data(kind: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/config").join(kind);
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "yaml"));
    files.sort();
    assert!(!files.is_empty());
    files
}

fn sources(name: &str, bytes: &[u8]) -> Sources {
    let text = ConfigText { name: name.to_owned(), bytes: bytes.to_vec() };
    Sources {
        registry: registry(),
        text: Some(text),
        overrides: Overrides { endpoints_follow: true, ..Overrides::default() },
        surroundings: Surroundings { cores: 4, terminal: false },
    }
}

fn load_text(text: &str) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
    load(&sources("test.yaml", text.as_bytes()))
}

const MINIMAL: &str = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: a, endpoints: ['127.0.0.1:8000']}]\n";

fn compare(file: &Path, diagnostics: &[Diagnostic], sources: &Sources) {
    let text = sources.text.as_ref().unwrap();
    let got = render_text(diagnostics, Some((&text.name, text.text())), false);
    let expected = file.with_extension("txt");
    if std::env::var_os("ATTACHE_BLESS").is_some() {
        std::fs::write(&expected, &got).unwrap();
    }
    let want = std::fs::read_to_string(&expected).unwrap_or_else(|e| panic!("{}: {e}", expected.display()));
    assert_eq!(got, want, "{}", file.display());
}

#[test]
fn every_invalid_file_is_rejected_with_all_its_errors() {
    for file in data("bad") {
        let sources = sources(file.file_name().unwrap().to_str().unwrap(), &std::fs::read(&file).unwrap());
        let diagnostics = load(&sources).expect_err(&format!("{} was accepted", file.display()));
        assert!(diagnostics.iter().any(Diagnostic::is_error));
        compare(&file, &diagnostics, &sources);
    }
}

#[test]
fn every_questionable_file_is_accepted_with_warnings() {
    for file in data("warn") {
        let sources = sources(file.file_name().unwrap().to_str().unwrap(), &std::fs::read(&file).unwrap());
        let (_, diagnostics) = load(&sources).unwrap_or_else(|d| panic!("{}: {d:?}", file.display()));
        assert!(!diagnostics.is_empty());
        compare(&file, &diagnostics, &sources);
    }
}

/// Configuration files of tests and of users.
const FIXTURES: [&str; 4] =
    ["tests/data/config/bad", "tests/data/config/warn", "tests/data/endpoint_picker", "examples/configs"];

/// A change that only moves or renames code must keep this table. `ATTACHE_BLESS=1` rewrites it after a new key, check
/// or fixture, or a better position of an error.
#[test]
fn diagnostics_of_every_fixture_keep_their_codes_and_positions() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut got =
        "# File, code, line:column. Compared by tests/in_process/config.rs; see there when it may change.\n".to_owned();
    for folder in FIXTURES {
        let mut files: Vec<_> = std::fs::read_dir(root.join(folder)).unwrap().map(|e| e.unwrap().path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "yaml"));
        files.sort();
        assert!(!files.is_empty(), "{folder}");
        for file in files {
            let name = file.strip_prefix(root).unwrap().display().to_string();
            let loaded = load(&sources(&name, &std::fs::read(&file).unwrap()));
            let (verdict, diagnostics) = match loaded {
                Ok((_, warnings)) => ("accepted", warnings),
                Err(mistakes) => ("rejected", mistakes),
            };
            got += &format!("{name} {verdict}\n");
            for Diagnostic { code, span, .. } in diagnostics {
                let place = span.map_or("-".to_owned(), |span| format!("{}:{}", span.line, span.column));
                got += &format!("  {} {place}\n", code.as_str());
            }
        }
    }
    let table = root.join("tests/data/config/diagnostics.txt");
    if std::env::var_os("ATTACHE_BLESS").is_some() {
        std::fs::write(&table, &got).unwrap();
    }
    assert_eq!(got, std::fs::read_to_string(&table).unwrap());
}

#[test]
fn malformed_files_get_specific_error_codes() {
    let code = |name: &str| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/config/bad").join(name);
        let diagnostics = load(&sources(name, &std::fs::read(file).unwrap())).unwrap_err();
        let first = diagnostics.first().unwrap().clone();
        assert!(first.span.is_some(), "{name} points nowhere");
        first.code
    };
    let cases = [
        ("port-out-of-range.yaml", Code::OutOfRange),
        ("tab-indent.yaml", Code::Tab),
        ("duplicate-key.yaml", Code::DuplicateKey),
        ("alias-bomb.yaml", Code::Bomb),
        ("wrong-version.yaml", Code::Version),
        ("empty.yaml", Code::Empty),
        ("binary.yaml", Code::NotText),
    ];
    for (name, want) in cases {
        assert_eq!(code(name), want, "{name}");
    }
    let huge = vec![b'a'; MAX_CONFIG_BYTES + 1];
    let diagnostics = load(&sources("huge.yaml", &huge)).unwrap_err();
    assert_eq!(diagnostics.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::TooLarge]);
}

#[test]
fn codes_are_unique_and_well_formed() {
    let mut seen = std::collections::BTreeSet::new();
    for code in Code::ALL {
        let text = code.as_str();
        assert!(seen.insert(text), "{text} twice");
        assert!(text.len() == 4 && matches!(&text[..2], "E1" | "E2" | "W3"), "{text}");
    }
}

#[test]
fn minimal_file_gets_the_documented_defaults() {
    let (settings, diagnostics) = load_text(MINIMAL).unwrap();
    assert_eq!(diagnostics, []);
    let s = &settings.server;
    assert_eq!((s.grpc_port, s.grpc_health_port, s.metrics_port, s.workers), (9002, 9003, 9090, 4));
    assert_eq!(s.tls, TlsSettings::SelfSigned);
    assert_eq!((s.drain_min_delay, s.drain_deadline), (Duration::from_secs(5), Duration::from_secs(120)));
    assert!(settings.telemetry.log_json && settings.telemetry.otlp_endpoint.is_none());
    let pool = &settings.pools[0];
    assert_eq!((&*pool.name, pool.strategy.as_str(), pool.endpoints.len()), ("a", "predicted-latency", 1));
    assert_eq!(pool.scrape.interval, Duration::from_millis(50));
    assert_eq!(pool.scrape.stale_after, Duration::from_secs(2));
    assert_eq!(settings.limits, attache_types::limits::Limits::default());
}

/// Values of flags, by the paths of their keys.
fn keys(values: &[(&str, &str)]) -> KeyValues {
    let mut keys = KeyValues::default();
    values.iter().for_each(|(path, value)| keys.set(path, [(*value).to_owned()]));
    keys
}

#[test]
fn flags_override_the_file_and_the_file_overrides_defaults() {
    let text = "apiVersion: attache.dev/v1\nkind: Attache\nserver: {grpcPort: 1, metricsPort: 2, tls: {mode: off}}\n\
                telemetry: {otlpEndpoint: 'http://c:4318', logLevel: debug}\n\
                pools: [{name: a, strategy: random, scrape: {interval: 70ms}, endpoints: ['127.0.0.1:8000']}]\n";
    let mut sources = sources("t", text.as_bytes());
    sources.overrides = Overrides {
        keys: keys(&[("server.grpcPort", "7")]),
        secure_serving: Some(true),
        tracing: Some(false),
        strategy: Some("round-robin".into()),
        endpoints: vec!["[::1]:9000".into()],
        ..Overrides::default()
    };
    let (settings, diagnostics) = load(&sources).unwrap();
    assert_eq!((settings.server.grpc_port, settings.server.metrics_port), (7, 2));
    assert_eq!(settings.server.tls, TlsSettings::SelfSigned);
    assert_eq!((settings.telemetry.otlp_endpoint, settings.telemetry.log_filter.as_str()), (None, "debug"));
    let pool = &settings.pools[0];
    assert_eq!((pool.strategy.as_str(), pool.scrape.interval), ("round-robin", Duration::from_millis(70)));
    assert_eq!(pool.endpoints.iter().map(|e| e.address.to_string()).collect::<Vec<_>>(), ["[::1]:9000"]);
    assert_eq!(diagnostics.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::Overridden]);
}

/// Every flag of a key sets that key and no other one, beside what the file has in the same sections.
#[test]
fn each_flag_of_a_key_sets_its_key_alone() {
    let flags = attache_config::flags::all();
    let load_with = |values: KeyValues| {
        let mut sources = sources("t", include_bytes!("../data/config/flags.yaml"));
        sources.overrides.keys = values;
        let (settings, _) = load(&sources).unwrap_or_else(|diagnostics| panic!("{diagnostics:#?}"));
        settings.to_json()
    };
    let before = load_with(KeyValues::default());
    let changed = |flag: &str| match flag {
        "bind" => "127.0.0.3",
        "log-level" => "warn",
        "log-format" => "text",
        "otlp-endpoint" => "http://other:4318",
        "drain-min-delay" | "drain-deadline" => "77s",
        "sync-nats-url" => "nats://other:4222",
        "trace-ratio" => "0.75",
        "cert-path" | "client-ca-file" | "sync-name" | "admin-hosts" | "client-name" => "other",
        "health-checking" | "enable-cert-reload" | "trust-client-headers" => "false",
        "ha-enable-leader-election"
        | "model-status"
        | "metrics-endpoint-auth"
        | "conformance-headers"
        | "disable-endpoint-subset-filter"
        | "emit-endpoint-scores" => "true",
        _ => "77",
    };
    for flag in &flags {
        let name = flag.flag.name;
        let after = load_with(keys(&[(&flag.path, changed(name))]));
        let differences = differences(&before, &after, "");
        assert_eq!(differences.len(), 1, "{name}: {differences:?}");
    }
    assert!(flags.len() > 25, "{}", flags.len());
}

/// The paths at which two documents differ.
fn differences(one: &serde_json::Value, other: &serde_json::Value, path: &str) -> Vec<String> {
    match (one.as_object(), other.as_object()) {
        (Some(one), Some(other)) if one.keys().eq(other.keys()) => {
            one.iter().flat_map(|(key, value)| differences(value, &other[key], &format!("{path}.{key}"))).collect()
        }
        _ if one == other => Vec::new(),
        _ => vec![path.to_owned()],
    }
}

#[test]
fn value_of_a_flag_outside_its_range_is_reported_at_its_key() {
    let mut sources = sources("t", include_bytes!("../data/config/flags.yaml"));
    sources.overrides.keys = keys(&[("server.workers", "0"), ("telemetry.traceRatio", "2")]);
    let told = load(&sources).unwrap_err();
    let told: Vec<_> = told.iter().filter(|d| d.is_error()).map(|d| (d.code, d.path.as_str(), d.span)).collect();
    let expected = ["server.workers", "telemetry.traceRatio"];
    assert_eq!(told, expected.map(|path| (Code::OutOfRange, path, None)));
}

#[test]
fn flags_alone_make_a_pool_and_no_pool_is_an_error() {
    let mut sources = Sources { registry: registry(), ..Sources::default() };
    let diagnostics = load(&sources).unwrap_err();
    assert_eq!(diagnostics.iter().map(|d| d.code).collect::<Vec<_>>(), [Code::NothingToServe]);
    sources.overrides.endpoints = vec!["127.0.0.1:8000".into(), "10.0.0.1:8000".into()];
    let (settings, _) = load(&sources).unwrap();
    assert_eq!(settings.pools.len(), 1);
    assert_eq!(settings.pools[0].endpoints.len(), 2);
    sources.overrides.endpoints = vec!["host:8000".into(), "10.0.0.1:0".into()];
    sources.overrides.strategy = Some("lest-request".into());
    let diagnostics = load(&sources).unwrap_err();
    let text = render_text(&diagnostics, None, false);
    assert!(
        text.contains("did you mean `least-request`?") && text.contains("--endpoint") && text.contains("3 errors"),
        "{text}"
    );
}

/// Server flags apply to the endpoints that flags name. Without such endpoints, a warning is reported.
#[test]
fn server_flags_have_an_effect_or_a_warning() {
    let kubernetes = KubernetesFlags {
        engine: Some(Engine::Sglang),
        metrics_scheme: Some("https".into()),
        metrics_path: Some("/m".into()),
        metrics_port: Some(9100),
        ..KubernetesFlags::default()
    };
    let overrides = Overrides { endpoints: vec!["10.0.0.1:8000".into()], kubernetes, ..Overrides::default() };
    let mut sources = Sources { registry: registry(), overrides, ..Sources::default() };
    let (settings, diagnostics) = load(&sources).unwrap();
    let endpoint = &settings.pools[0].endpoints[0];
    assert_eq!((endpoint.engine, endpoint.metrics_url().as_deref()), (Engine::Sglang, Some("https://10.0.0.1:9100/m")));
    assert_eq!(diagnostics, []);

    let text = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
                - {name: a, match: {models: [a]}, endpoints: ['127.0.0.1:8000']}\n\
                - {name: b, dns: [{host: vllm, port: 8000}]}\n";
    sources.text = Some(ConfigText { name: "t".into(), bytes: text.into() });
    sources.overrides.endpoints.clear();
    sources.overrides.kubernetes.endpoint_target_ports = vec![8000];
    sources.overrides.keys = keys(&[("server.tls.directory", "/certs"), ("telemetry.traceRatio", "0.5")]);
    sources.overrides.secure_serving = Some(false);
    let (settings, diagnostics) = load(&sources).unwrap();
    assert_eq!(settings.pools[0].endpoints[0].engine, Engine::Vllm);
    let mut told: Vec<&str> =
        diagnostics.iter().filter(|d| d.code == Code::NoEffect).map(|d| d.path.as_str()).collect();
    told.sort_unstable();
    let once = [
        "--cert-path",
        "--endpoint-target-ports",
        "--engine",
        "--model-server-metrics-path",
        "--model-server-metrics-port",
        "--model-server-metrics-scheme",
        "--trace-ratio",
    ];
    assert_eq!(told, once, "each once, however many pools the file has");
}

#[test]
fn full_file_is_applied_to_the_settings() {
    let text = "apiVersion: attache.dev/v1
kind: Attache
limits: {maxBodyBytes: 1MiB, requestTimeout: 5s}
exchange: {onUnparseable: fallback, trustClientHeaders: true, objectives: {critical: 10, batch: -1}}
pools:
  - name: p
    match: {models: [m], header: {name: X-Pool, value: a}, authority: LLM.example.com}
    strategy: {name: power-of-two, parameters: {}}
    destination: {mode: list, max: 2}
    rejectUnknownModels: true
    endpoints:
      - {address: '127.0.0.1:8002', name: b, labels: {zone: x}, engine: sglang, draining: true,
         metrics: {path: /m, port: 9000, scheme: https}}
    dns: [{host: vllm.default.svc, port: 8000, refresh: 7s, engine: none}]
    modelRewrites:
      - {model: gpt-4, targets: [{model: llama, weight: 70}, {model: qwen, weight: 30}]}
      - {targets: [{model: llama}]}
    health: {consecutiveFailures: 9, slowStart: 0}
";
    let (settings, diagnostics) =
        load_text(text).unwrap_or_else(|d| panic!("{}", render_text(&d, Some(("t", text)), false)));
    assert_eq!(diagnostics, []);
    assert_eq!((settings.limits.max_body_bytes, settings.limits.request_timeout), (1 << 20, Duration::from_secs(5)));
    assert_eq!(settings.exchange.objectives["batch"], -1);
    let pool = &settings.pools[0];
    assert_eq!(pool.matches.header, Some(("x-pool".into(), "a".into())));
    assert_eq!(pool.matches.authority.as_deref(), Some("llm.example.com"));
    let endpoint = &pool.endpoints[0];
    assert_eq!((&*endpoint.name, endpoint.draining), ("b", true));
    assert_eq!(endpoint.metrics_url().as_deref(), Some("https://127.0.0.1:9000/m"));
    assert_eq!(pool.dns[0].refresh, Duration::from_secs(7));
    assert_eq!(pool.rewrites.exact["gpt-4"].iter().map(|t| t.weight).collect::<Vec<_>>(), [70, 30]);
    assert_eq!(pool.rewrites.any[0].weight, 1);
    assert_eq!((pool.max_destinations, pool.health.consecutive_failures), (2, 9));
}

/// Each pool would conflict with each other one: half a million mistakes.
#[test]
fn many_pools_without_conditions_are_one_mistake_each_and_a_bounded_list() {
    let pools = |count: usize, more: &str| {
        let pool = |i: usize| format!("- {{name: p{i}, endpoints: ['127.0.0.1:8000'], {more}}}\n");
        format!("apiVersion: attache.dev/v1\nkind: Attache\npools:\n{}", (0..count).map(pool).collect::<String>())
    };
    let mistakes = |text: &str| load_text(text).unwrap_err();
    let of = |mistakes: &[Diagnostic], code| mistakes.iter().filter(|d| d.code.as_str() == code).count();
    assert_eq!(of(&mistakes(&pools(900, "")), "E204"), 899);
    let cut = mistakes(&pools(1_200, "match: {models: [m]}"));
    assert_eq!(cut.len(), 1_000);
    assert!(cut.last().unwrap().help.as_deref().unwrap_or_default().contains("199 further mistakes are not listed"));
    // Errors are listed first, so that no file with many warnings counts as valid.
    assert!(cut.iter().all(Diagnostic::is_error));
}

#[test]
fn default_queue_bytes_leave_memory_for_other_bodies() {
    let head = "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {maxBufferedBytes: 64MiB}\npools:\n";
    let pool = |name: &str, flow: &str| {
        let only = format!("{{models: [{name}]}}");
        format!("- {{name: {name}, match: {only}, endpoints: ['127.0.0.1:8000'], flowControl: {flow}}}\n")
    };
    let (on, off) = ("{enabled: true}", "{enabled: false}");
    for (flows, expected) in [
        (vec![on], vec![Some(32)]),
        (vec![on, on, off], vec![Some(16), Some(16), None]),
        (vec![on, "{enabled: true, maxBytes: 60MiB}"], vec![Some(16), Some(60)]),
    ] {
        let pools = ["a", "b", "c"].iter().zip(&flows).map(|(name, flow)| pool(name, flow));
        let (settings, diagnostics) = load_text(&format!("{head}{}", pools.collect::<String>())).unwrap();
        let got = settings.pools.iter().map(|p| p.flow.as_ref().map(|f| f.settings.max_bytes >> 20));
        assert_eq!(got.collect::<Vec<_>>(), expected, "{flows:?} {diagnostics:?}");
    }
}

/// Long prompts are held back in pools of the default strategy, unless `flowControl` says what waits.
#[test]
fn default_strategy_holds_long_prompts_back() {
    let head = "apiVersion: attache.dev/v1\nkind: Attache\nlimits: {maxBufferedBytes: 64MiB}\npools:\n";
    let endpoints = "endpoints: ['127.0.0.1:8000']";
    for (pool, holds, sheds, queues) in [
        (endpoints.to_owned(), true, false, false),
        (format!("{endpoints}, strategy: predicted-latency"), true, false, false),
        ("kubernetes: {pool: vllm}".to_owned(), true, true, false),
        (format!("{endpoints}, strategy: prefix-cache"), false, false, false),
        ("kubernetes: {pool: vllm}, strategy: prefix-cache".to_owned(), false, true, false),
        (format!("{endpoints}, flowControl: {{enabled: false}}"), false, false, false),
        (format!("{endpoints}, flowControl: {{enabled: true}}"), false, false, true),
        (format!("{endpoints}, flowControl: {{enabled: true, queue: false}}"), false, true, false),
    ] {
        let (settings, _) = load_text(&format!("{head}- {{name: a, {pool}}}\n")).unwrap();
        let flow = settings.pools[0].flow.as_ref();
        let found = (
            flow.is_some_and(PoolFlow::holds_long_prompts),
            flow.is_some_and(|flow| flow.shedding.is_some()),
            flow.is_some_and(PoolFlow::queues_when_saturated),
        );
        assert_eq!(found, (holds, sheds, queues), "{pool}");
    }
    let pool = |name: &str| format!("- {{name: {name}, match: {{models: [{name}]}}, {endpoints}}}\n");
    let (settings, _) = load_text(&format!("{head}{}{}", pool("a"), pool("b"))).unwrap();
    let bytes: Vec<u64> = settings.pools.iter().map(|p| p.flow.as_ref().unwrap().settings.max_bytes >> 20).collect();
    assert_eq!(bytes, [8, 8], "both together leave three quarters for bodies that need not wait");
}

#[test]
fn strategy_rules_are_applied_to_the_settings() {
    let text = "apiVersion: attache.dev/v1
kind: Attache
pools:
  - name: p
    endpoints: ['127.0.0.1:8002']
    strategy: {name: prefix-cache, parameters: {imbalance: 3}}
    strategies:
      - models: [a, b]
        strategy: 'prefix-cache:2,least-request'
        profiles: {long: {strategy: random, promptTokensGte: 100}, default: {strategy: round-robin}}
      - {strategy: random, locked: true}
    requestStrategy: {header: X-Strategy, filterHeader: External-Filter, allow: ['*', prefix-cache, {name: vtc-basic, parameters: {windowSize: 9}}]}
";
    let (settings, diagnostics) =
        load_text(text).unwrap_or_else(|d| panic!("{}", render_text(&d, Some(("t", text)), false)));
    assert_eq!(diagnostics, []);
    let pool = &settings.pools[0];
    let [named, others] = pool.rules.as_slice() else { panic!("{:?}", pool.rules) };
    assert_eq!((named.models.as_slice(), named.locked), (&["a".to_owned(), "b".to_owned()][..], false));
    assert_eq!(named.profiles.iter().map(|p| &*p.name).collect::<Vec<_>>(), ["long", "default"]);
    assert_eq!(named.profiles[0].when.prompt_tokens_gte, Some(100));
    assert!(others.models.is_empty() && others.locked);
    let request = pool.by_request.as_ref().unwrap();
    assert_eq!((&*request.header, &*request.profile_header), ("x-strategy", "config-profile"));
    assert_eq!(request.filter_header.as_deref(), Some("external-filter"));
    let allowed = |name: &str| request.allowed.iter().find(|s| s.name == name).map(|s| s.parameters.to_string());
    let queued = attache_scheduling::registry::QUEUED.len();
    let all = registry().strategies().len();
    assert_eq!(request.allowed.len(), all - queued, "those that need a queue are not there without one");
    assert_eq!(allowed("prefix-cache").as_deref(), Some(r#"{"imbalance":3}"#), "the pool's own");
    assert_eq!(allowed("vtc-basic").as_deref(), Some(r#"{"windowSize":9}"#));
    assert_eq!(allowed("random").as_deref(), Some("null"));
}

#[test]
fn flags_and_file_override_aibrix_variables() {
    let with = |text: &str, flag: Option<&str>, variables: &[(&str, &str)]| {
        let mut sources = sources("t", text.as_bytes());
        let set = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        sources.overrides.aibrix = AibrixEnv::of(set);
        sources.overrides.strategy = flag.map(str::to_owned);
        load(&sources)
    };
    let named = MINIMAL.replace("name: a,", "name: a, strategy: random,");
    let algorithm = ("ROUTING_ALGORITHM", "prefix-cache");
    for (text, flag, strategy) in [
        (MINIMAL, None, "prefix-cache"),
        (&*named, None, "random"),
        (&*named, Some("round-robin"), "round-robin"),
        (MINIMAL, Some("round-robin"), "round-robin"),
    ] {
        assert_eq!(with(text, flag, &[algorithm]).unwrap().0.pools[0].strategy, strategy);
    }
    let numbers = [
        algorithm,
        ("AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "5"),
        ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "256"),
        ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tiktoken"),
    ];
    let pool = &with(MINIMAL, None, &numbers).unwrap().0.pools[0];
    assert_eq!(pool.strategy_parameters.to_string(), r#"{"imbalance":5}"#);
    assert_eq!(
        (pool.prefix.block_size, &pool.prefix.tokenizer),
        (Some(256), &TokenizerSettings::Tiktoken { encoding: None })
    );
    let own = MINIMAL.replace("name: a,", "name: a, prefixCache: {blockSize: 8, tokenizer: characters},");
    let pool = &with(&own, None, &numbers).unwrap().0.pools[0];
    assert_eq!((pool.prefix.block_size, &pool.prefix.tokenizer), (Some(8), &TokenizerSettings::Characters));
    let wrong = with(MINIMAL, None, &[("ROUTING_ALGORITHM", "least-requests")]).unwrap_err();
    assert_eq!((wrong[0].code, &*wrong[0].path), (Code::UnknownStrategy, "ROUTING_ALGORITHM"));
    let wrong = with(MINIMAL, None, &[("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", "much")]).unwrap_err();
    assert!(wrong[0].message.contains("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD"), "{wrong:?}");
}

#[test]
fn any_number_of_comment_lines_is_skipped() {
    let comments = "# a line\n".repeat(5_000);
    let indented = "    # a line\n".repeat(5_000);
    for text in [
        format!("{comments}{MINIMAL}{comments}"),
        MINIMAL.replace("kind:", &format!("{comments}kind:")),
        MINIMAL.replace("[{name", &format!("\n{indented}  [{{name")),
        format!("{MINIMAL}server:\n{indented}  grpcPort: 1\n{indented}"),
    ] {
        let read = load_text(&text).map(|_| ()).map_err(|told| render_text(&told, None, false));
        assert_eq!(read, Ok(()));
    }
}

#[test]
fn reload_lists_the_settings_that_need_a_restart() {
    let (old, _) = load_text(MINIMAL).unwrap();
    let (same, _) = load_text(&format!("{MINIMAL}limits: {{maxMessages: 5}}\n")).unwrap();
    assert_eq!(old.restart_needed(&same), Vec::<String>::new());
    let (new, _) = load_text(&format!("{MINIMAL}server: {{grpcPort: 1, tls: {{mode: off}}}}\n")).unwrap();
    assert_eq!(old.restart_needed(&new), ["server.grpcPort", "server.tls.mode"]);
}

#[test]
fn client_names_reload_without_restart_but_client_ca_does_not() {
    let server = |tls: &str| load_text(&format!("{MINIMAL}server: {{tls: {{{tls}}}}}\n")).unwrap().0;
    let old = server("clientCaFile: /ca.crt, clientNames: [a.example.com]");
    let renamed = server("clientCaFile: /ca.crt, clientNames: ['*.example.com']");
    assert_eq!(old.restart_needed(&renamed), Vec::<String>::new());
    assert_eq!(old.server.reloaded(&renamed.server).client_auth, renamed.server.client_auth);
    for other in ["clientCaFile: /other.crt, clientNames: [b]", "mode: self-signed"] {
        assert_eq!(old.restart_needed(&server(other)), ["server.tls.clientCaFile"], "{other}");
    }
    let removed = old.server.reloaded(&server("mode: self-signed").server);
    assert_eq!(
        removed.client_auth, old.server.client_auth,
        "a picker never stops to ask for certificates without a restart"
    );
}

#[test]
fn client_flags_override_the_file_and_need_tls() {
    let text = format!("{MINIMAL}server: {{tls: {{clientCaFile: /ca.crt, clientNames: [a]}}}}\n");
    let mut sources = sources("t", text.as_bytes());
    sources.overrides.keys = keys(&[("server.tls.clientCaFile", "/flag.crt")]);
    sources.overrides.keys.set("server.tls.clientNames", ["spiffe://td/*".to_owned(), "b".to_owned()]);
    let auth = load(&sources).unwrap().0.server.client_auth.unwrap();
    assert_eq!(auth.ca_file, Path::new("/flag.crt"));
    assert_eq!(auth.names.iter().map(ToString::to_string).collect::<Vec<_>>(), ["spiffe://td/*", "b"]);
    sources.overrides.secure_serving = Some(false);
    let errors = load(&sources).unwrap_err();
    assert!(errors.iter().any(|error| error.code == Code::Contradiction && error.path == "server.tls.clientCaFile"));
}

#[test]
fn settings_dump_loads_to_the_same_settings() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/configs");
    let mut texts: Vec<(String, Vec<u8>)> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .map(|path| (path.display().to_string(), std::fs::read(path).unwrap()))
        .collect();
    assert!(texts.len() > 3, "{} examples", texts.len());
    let with = |pool: &str| (pool.to_owned(), MINIMAL.replace("name: a,", &format!("name: a, {pool},")).into_bytes());
    texts.extend(["disaggregation: {}", "flowControl: {enabled: true}", "prefixCache: {kvEvents: {}}"].map(with));
    for (name, text) in texts {
        let (settings, _) = load(&sources(&name, &text)).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let dump = settings.to_json();
        let text = dump.to_string();
        let (again, _) =
            load_text(&text).unwrap_or_else(|d| panic!("{name}: {}", render_text(&d, Some(("dump", &text)), false)));
        assert_eq!(again.to_json(), dump, "{name}");
        assert_eq!(settings.restart_needed(&again), Vec::<String>::new(), "{name}");
    }
}

const TEMPLATE: &str = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: found\n  strategy: round-robin\n  \
                        kubernetes: {poolSelector: 'serving=attache', namespace: llm, engine: sglang, metrics: {port: 9100}}\n\
                        - {name: named, match: {service: named-epp.llm}, endpoints: ['127.0.0.1:8000']}\n";

#[test]
fn found_pools_follow_their_template_or_own_configuration() {
    let (settings, diagnostics) = load_text(TEMPLATE).unwrap();
    assert_eq!((settings.pools.len(), settings.templates.len(), diagnostics), (1, 1, vec![]));
    let shown = serde_json::to_string(&settings.to_json()).unwrap();
    let (again, _) = load_text(&shown).unwrap();
    assert_eq!(again.templates[0].search, settings.templates[0].search);
    assert_eq!(again.to_json(), settings.to_json(), "the dump is a configuration");
    assert_eq!(again.pools[0].matches.service.as_deref(), Some("named-epp.llm"));

    let template = &settings.templates[0];
    let plain = template.instance("llama", "llama", Some("llama-epp.llm".into()), None);
    let source = plain.kubernetes.as_ref().unwrap();
    assert_eq!((&*plain.name, plain.strategy.as_str(), source.engine), ("llama", "round-robin", Engine::Sglang));
    assert_eq!(source.pods, PodsOf::Pool { name: "llama".into(), group: PoolGroup::Stable });
    assert_eq!((source.namespace.as_deref(), source.metrics.port), (Some("llm"), Some(9100)));
    assert_eq!(plain.matches.service.as_deref(), Some("llama-epp.llm"));

    let own = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: x, strategy: random, match: {models: [m]}}]\n";
    let (own, diagnostics) = load_pool(&sources("own", own.as_bytes())).unwrap();
    assert_eq!(diagnostics, [], "that it names no endpoints is as it should be");
    let special = template.instance("llm/llama", "llama", Some("llama-epp.llm".into()), Some(&own));
    assert_eq!(
        (&*special.name, special.strategy.as_str(), &special.kubernetes),
        ("llm/llama", "random", &plain.kubernetes)
    );
    assert_eq!((special.matches.models.as_slice(), special.matches.service), (&["m".to_owned()][..], None));
}

#[test]
fn pool_configuration_rejects_or_warns_of_foreign_settings() {
    let text = |more: &str, pools: &str| format!("apiVersion: attache.dev/v1\nkind: Attache\n{more}pools: [{pools}]\n");
    let load = |text: String| load_pool(&sources("own", text.as_bytes()));
    for (pools, said) in [
        ("{name: a, endpoints: ['127.0.0.1:8000']}", "`endpoints`"),
        ("{name: a, dns: [{host: vllm, port: 8000}]}", "`dns`"),
        ("{name: a, kubernetes: {pool: b}}", "`kubernetes`"),
        ("{name: a, kubernetes: {poolSelector: x=y}}, {name: b, match: {models: [b]}}", "got 2 pools"),
        ("{name: a, prefixCache: {tokenizer: remote, kvEvents: {bind: 'tcp://0.0.0.0:5557'}}}", "`bind`"),
        ("{name: a, strategie: random}", "unknown field"),
    ] {
        let diagnostics = load(text("", pools)).expect_err(pools);
        assert!(diagnostics.iter().any(|d| d.is_error() && d.message.contains(said)), "{pools}: {diagnostics:?}");
    }
    let (_, diagnostics) = load(text("limits: {}\nserver: {grpcPort: 1}\n", "{name: a}")).unwrap();
    let void: Vec<_> = diagnostics.iter().map(|d| (d.code, d.path.as_str())).collect();
    assert_eq!(void, [(Code::NoEffect, "limits"), (Code::NoEffect, "server")]);
    // The limit of all queues together belongs to the process: `limits` in a pool's configuration do not change it.
    for limits in ["", "limits: {maxBodyBytes: 10, maxBufferedBytes: 20}\n"] {
        let (pool, _) = load(text(limits, "{name: a, flowControl: {enabled: true}}")).unwrap();
        assert_eq!(pool.flow.unwrap().settings.max_bytes, u64::MAX, "{limits}");
    }
    // The users of `vtc-*` come from a header, because tenant rules belong to the process.
    let (pool, diagnostics) = load(text("", "{name: a, strategy: vtc-fair}")).unwrap();
    assert_eq!(pool.flow.unwrap().settings.user_header, Some("user"));
    assert!(diagnostics.iter().any(|d| d.code == Code::TrustsClients && d.message.contains("`vtc-fair`")));
    // Pool flags apply to these pools too. Process flags are ignored.
    let mut flags = sources("own", text("", "{name: a, strategy: random}").as_bytes());
    flags.overrides.strategy = Some("round-robin".into());
    flags.overrides.endpoints = vec!["10.0.0.1:8000".into()];
    flags.overrides.kubernetes.pool_selector = Some("x=y".into());
    flags.overrides.keys = keys(&[("server.tls.directory", "/certs")]);
    let (pool, _) = load_pool(&flags).unwrap();
    assert_eq!((pool.strategy.as_str(), pool.endpoints.len(), pool.kubernetes), ("round-robin", 0, None));
}

#[test]
fn diagnostics_render_as_json() {
    let text = MINIMAL.replace("kind: Attache", "kind: Attache\nsever: {}");
    let diagnostics = load_text(&text).unwrap_err();
    let json = render_json(&diagnostics, Some("f.yaml"));
    assert_eq!((json["file"].as_str(), json["errors"].as_u64()), (Some("f.yaml"), Some(1)));
    let first = &json["diagnostics"][0];
    assert_eq!((first["code"].as_str(), first["severity"].as_str()), (Some("E111"), Some("error")));
    assert_eq!((first["span"]["line"].as_u64(), first["span"]["column"].as_u64()), (Some(3), Some(1)));
    assert_eq!(first["help"].as_str(), Some("did you mean `server`?"));
}

mod hostile {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

        /// Any bytes either load or give diagnostics that can be rendered.
        #[test]
        fn any_bytes_load_or_give_diagnostics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let sources = sources("f", &bytes);
            if let Err(diagnostics) = load(&sources) {
                prop_assert!(!diagnostics.is_empty());
                let text = sources.text.as_ref().unwrap();
                let shown = render_text(&diagnostics, Some(("f", text.text())), true);
                prop_assert!(!shown.contains('\0'));
            }
        }

        /// A valid file with a part overwritten either loads or gives errors.
        #[test]
        fn damaged_files_load_or_give_errors(at in 0usize..90, junk in "[\\PC\\n\\t]{0,12}") {
            let mut text: Vec<char> = MINIMAL.chars().collect();
            let at = at.min(text.len());
            text.splice(at..(at + 3).min(text.len()), junk.chars());
            let text: String = text.into_iter().collect();
            if let Err(diagnostics) = load_text(&text) {
                prop_assert!(diagnostics.iter().any(Diagnostic::is_error));
                let _ = render_text(&diagnostics, Some(("f", &text)), false);
            }
        }
    }
}

#[test]
fn pool_configuration_rejects_process_settings() {
    let read = |pool: &str| {
        let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: a, {pool}}}]\n");
        attache_config::load_pool(&sources("ConfigMap a", text.as_bytes()))
    };
    assert!(read("match: {models: [llama]}, scrape: {interval: 1s}").is_ok());
    for (pool, path) in [
        ("match: {service: other-epp.b}", "pools[0].match.service"),
        (
            "scrape: {bearerTokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token}",
            "pools[0].scrape.bearerTokenFile",
        ),
        ("endpoints: ['127.0.0.1:8000']", "pools[0].endpoints"),
    ] {
        let mistakes = read(pool).unwrap_err();
        assert!(mistakes.iter().any(|mistake| mistake.path == path), "{pool}: {mistakes:?}");
    }
}
