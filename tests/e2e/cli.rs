//! The `attache` binary: arguments in, exit codes and output out.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn attache(arguments: &[&str]) -> Output {
    attache_with(&[], arguments)
}

/// With these environment variables, and without the other `ATTACHE_` and `OTEL_` variables.
fn attache_with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    // Variables of the test's own environment must not affect the result.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ATTACHE_") || name.to_string_lossy().starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command.envs(variables.iter().copied()).args(arguments).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by a signal")
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn data(path: &str) -> String {
    root("tests/data/config").join(path).to_str().unwrap().to_owned()
}

#[test]
fn help_lists_commands_flags_and_examples() {
    let help = attache(&["--help"]);
    assert_eq!(code(&help), 0);
    for word in ["run", "check", "version", "completions", "Examples:", "attache run --endpoint 127.0.0.1:8000"] {
        assert!(out(&help).contains(word), "{word}: {}", out(&help));
    }
    let help = attache(&["run", "--help"]);
    assert_eq!(code(&help), 0);
    let flags = [
        "--grpc-port",
        "9002",
        "--grpc-health-port",
        "9003",
        "--metrics-port",
        "9090",
        "--secure-serving",
        "--cert-path",
        "--enable-cert-reload",
        "--client-ca-file",
        "--client-name",
        "--config-file",
        "--config-text",
        "--health-checking",
        "--refresh-metrics-interval",
        "--metrics-staleness-threshold",
        "--disable-endpoint-subset-filter",
        "--tracing",
        "-v",
        "ATTACHE_GRPC_PORT",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "--drain-deadline",
        "Examples:",
    ];
    for word in flags {
        assert!(out(&help).contains(word), "{word}: {}", out(&help));
    }
}

#[test]
fn version_is_printed_as_text_and_json() {
    assert_eq!(out(&attache(&["version"])), format!("attache {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(out(&attache(&["--version"])), format!("attache {}\n", env!("CARGO_PKG_VERSION")));
    let json: serde_json::Value = serde_json::from_slice(&attache(&["version", "--json"]).stdout).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(json["features"], serde_json::json!(["full"]));
}

#[test]
fn closed_pipes_end_no_command_with_a_panic() {
    let (good, bad) = (root("examples/configs/full.yaml"), data("bad/unknown-key.yaml"));
    let good = good.to_str().unwrap();
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let cases: &[(&[&str], i32)] = &[
        (&["check", "--output", "json", good], 0),
        (&["check", good], 0),
        (&["check", &bad], 78),
        (&["version"], 0),
        (&["version", "--json"], 0),
        (&["completions", "bash"], 0),
        (&["--help"], 0),
        (&["run"], 64),
        (&["run", "--config-file", &bad], 78),
        (&["explain", "/nonexistent"], 64),
        (&["top"], 64),
        (&["replay", "--list"], 0),
        (&["replay", "--trace", "/nonexistent"], 64),
    ];
    for (words, expected) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        let status = command.args(*words).stdout(closed()).stderr(closed()).status().unwrap();
        assert_eq!(status.code(), Some(*expected), "{words:?}");
        let output = Command::new(env!("CARGO_BIN_EXE_attache")).args(*words).stdout(closed()).output().unwrap();
        assert_eq!(output.status.code(), Some(*expected), "{words:?}: {}", err(&output));
        assert!(!err(&output).contains("panicked"), "{words:?}: {}", err(&output));
    }
    let full = std::fs::File::create("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_attache")).arg("version").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(70));
    assert!(err(&output).contains("can't write to standard output"), "{}", err(&output));
}

#[test]
fn log_filters_that_select_nothing_are_rejected() {
    for (filter, hint) in [("verbos", "is not a level"), ("atache=debug", "did you mean `attache`?")] {
        let output = attache(&["run", "--endpoint", "127.0.0.1:8000", "--log-level", filter]);
        assert_eq!(code(&output), 78, "{filter}");
        assert!(err(&output).contains("E212") && err(&output).contains(hint), "{}", err(&output));
    }
}

#[test]
fn completions_are_generated_for_bash_zsh_and_fish() {
    for shell in ["bash", "zsh", "fish"] {
        let output = attache(&["completions", shell]);
        assert_eq!(code(&output), 0);
        assert!(out(&output).contains("grpc-port"), "{shell}");
    }
}

#[test]
fn invalid_arguments_exit_64_with_a_hint() {
    let cases: &[(&[&str], &str)] = &[
        (&["run", "--grpc-prot", "1"], "--grpc-port"),
        (&["chekc"], "check"),
        (&["run", "--grpc-port", "90020"], "90020"),
        (&["run", "--drain-deadline", "5", "--endpoint", "127.0.0.1:1"], "5s"),
        (&["run", "--log-format", "yaml"], "json"),
        (&["run", "--config-file", "a", "--config-text", "b"], "cannot be used with"),
        (&["run", "--pool-name", "vllm", "--endpoint-selector=app=vllm"], "cannot be used with"),
        (&["check", "a.yaml", "--inside", "--admin", "http://127.0.0.1:1"], "cannot be used with"),
        (&["explain", "r.json", "--config-file", "a.yaml", "--strategy", "random"], "cannot be used with"),
        (&["run", "--engine", "vlm", "--pool-name", "vllm"], "trtllm-serve"),
        (&["check"], "<FILE>"),
        (&[], "Usage"),
    ];
    for (words, expected) in cases {
        let output = attache(words);
        assert_eq!(code(&output), 64, "{words:?}");
        assert!(err(&output).contains(expected), "{words:?}: {}", err(&output));
    }
}

#[test]
fn boolean_flags_accept_go_syntax_and_the_last_value_wins() {
    // An endpoint that is not an address ends the program before it serves.
    let run = |more: &[&str]| {
        let output = attache(&[&["run", "--endpoint", "vllm:8000"], more].concat());
        assert_eq!(code(&output), 78, "{more:?}: {}", err(&output));
        err(&output)
    };
    let on = "reloading has no effect without certificate files";
    for value in ["", "=1", "=t", "=T", "=TRUE", "=true", "=True"] {
        assert!(run(&[&format!("--enable-cert-reload{value}")]).contains(on), "{value}");
    }
    for value in ["0", "f", "F", "FALSE", "false", "False"] {
        assert!(!run(&[&format!("--enable-cert-reload={value}")]).contains(on), "{value}");
    }
    assert!(!run(&["--enable-cert-reload", "-enableCertReload=F"]).contains(on), "the last one counts");
    assert!(run(&["--enable-cert-reload=0", "--enable-cert-reload"]).contains(on), "the last one counts");
    assert!(run(&["--strategy=random", "--strategy", "lest-request"]).contains("did you mean `least-request`?"));
    assert!(!run(&["--strategy", "lest-request", "--strategy=random"]).contains("least-request"));
    let output = attache(&["run", "--enable-cert-reload=yes"]);
    assert_eq!(code(&output), 64);
    assert!(err(&output).contains("true and false are allowed"), "{}", err(&output));
}

#[test]
fn invalid_sampler_argument_is_only_a_warning() {
    let variable = "OTEL_TRACES_SAMPLER_ARG";
    for (value, flag, warning) in [
        ("", None, false),
        ("0.5", None, false),
        ("half", None, true),
        ("1.5", None, true),
        ("half", Some("--trace-ratio=0.5"), false),
    ] {
        let arguments = ["run", "--endpoint", "vllm:8000"].into_iter().chain(flag).collect::<Vec<_>>();
        let output = attache_with(&[(variable, value)], &arguments);
        assert_eq!(code(&output), 78, "only the endpoint is wrong: {}", err(&output));
        assert_eq!(err(&output).contains(&format!("`{variable}` has no effect")), warning, "{value}: {}", err(&output));
        assert!(err(&output).contains("1 error,"), "{}", err(&output));
    }
}

#[test]
fn errors_name_the_flag_that_is_invalid() {
    let cases: &[(&[&str], &str)] = &[
        (&["--pool-name", "Vllm_Pool"], "`--pool-name` is `Vllm_Pool`"),
        (&["--pool-name", "vllm", "--pool-namespace", "N_"], "`--pool-namespace` is `N_`"),
        (&["--endpoint-selector", "app=vllm", "--pool-namespace", "N_"], "`--pool-namespace` is `N_`"),
        (&["--pool-name", "vllm", "--pool-group", "x"], "`--pool-group` is `x`"),
        (&["--endpoint-selector", "app in vllm"], "at: --endpoint-selector\n"),
        (
            &["--endpoint-selector", "app=vllm", "--endpoint-target-ports", "8000,8000"],
            "`--endpoint-target-ports`: port 8000 is named twice",
        ),
    ];
    for (flags, expected) in cases {
        let output = attache(&[&["run"], *flags].concat());
        assert_eq!(code(&output), 78, "{flags:?}: {}", err(&output));
        assert!(err(&output).contains(expected), "{flags:?}: {}", err(&output));
    }
}

#[test]
fn positive_objectives_warn_unless_client_headers_are_trusted() {
    let text = "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {objectives: {batch: -1, urgent: 1}}\n\
                pools: [{name: a, endpoints: [\"vllm:8000\"]}]\n";
    let warning = "`objectives` above 0 have no effect";
    assert!(err(&attache(&["run", "--config-text", text])).contains(warning));
    assert!(!err(&attache(&["run", "--config-text", text, "--trust-client-headers"])).contains(warning));
    let sheddable = text.replace(", urgent: 1", "");
    assert!(!err(&attache(&["run", "--config-text", &sheddable])).contains(warning), "a priority may be lowered");
    let trusting = text.replace("exchange: {", "exchange: {trustClientHeaders: true, ");
    assert!(!err(&attache(&["run", "--config-text", &trusting])).contains(warning));
    assert!(err(&attache(&["run", "--config-text", &trusting, "--trust-client-headers=false"])).contains(warning));
}

#[test]
fn run_without_endpoints_shows_two_example_commands() {
    let output = attache(&["run"]);
    assert_eq!(code(&output), 64);
    assert!(err(&output).contains("attache run --endpoint") && err(&output).contains("attache run --config-file"));
}

#[test]
fn run_rejects_invalid_configuration_before_serving() {
    let output = attache(&["run", "--config-file", &data("bad/unknown-key.yaml")]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("did you mean `weight`?"), "{}", err(&output));
    let output = attache(&["run", "--endpoint", "vllm:8000", "--strategy", "lest-request"]);
    assert_eq!(code(&output), 78);
    assert!(
        err(&output).contains("did you mean `least-request`?") && err(&output).contains("E205"),
        "{}",
        err(&output)
    );
    let output = attache(&["run", "--config-file", "/nonexistent/attache.yaml"]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("can't read /nonexistent/attache.yaml"), "{}", err(&output));
    let output = attache(&["run", "--endpoint", "127.0.0.1:8000", "--cert-path", "/nonexistent"]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("E209") && err(&output).contains("tls.crt"), "{}", err(&output));
}

#[test]
fn invalid_client_ca_or_name_is_rejected_before_serving() {
    let refused = |flags: &[&str], words: &[&str]| {
        let output = attache(&[&["run", "--endpoint", "127.0.0.1:8000"], flags].concat());
        assert_eq!(code(&output), 78, "{flags:?}");
        words.iter().for_each(|word| assert!(err(&output).contains(word), "{flags:?}: {word}: {}", err(&output)));
    };
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca.crt");
    let ca = ca.to_str().unwrap();
    refused(&["--client-ca-file", ca], &["E209", "server.tls.clientCaFile", "can't read", "ca.crt"]);
    std::fs::write(ca, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n").unwrap();
    refused(&["--client-ca-file", ca], &["E209", "there is none in it"]);
    let made = rcgen::generate_simple_self_signed(["ca".to_owned()]).unwrap();
    std::fs::write(ca, made.cert.pem()).unwrap();
    refused(&["--client-ca-file", ca, "--secure-serving=false"], &["E207", "TLS is off"]);
    refused(&["--client-ca-file", ca, "--client-name", "*"], &["E114", "server.tls.clientNames[0]"]);
    refused(&["--client-name", "gateway"], &["E113", "--client-ca-file"]);

    let file = directory.path().join("attache.yaml");
    let check = |ca: &str| {
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nserver: {{tls: {{clientCaFile: {ca}}}}}\n\
             pools: [{{name: a, endpoints: ['127.0.0.1:8000']}}]\n"
        );
        std::fs::write(&file, text).unwrap();
        attache(&["check", file.to_str().unwrap()])
    };
    assert_eq!(code(&check(ca)), 0);
    let output = check("/nonexistent/ca.crt");
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("E209") && err(&output).contains("/nonexistent/ca.crt"), "{}", err(&output));
}

#[test]
fn check_accepts_valid_and_rejects_invalid_files() {
    let output = attache(&["check", "-f", &data("bad/unknown-key.yaml")]);
    assert_eq!((code(&output), out(&output).as_str()), (78, ""));
    assert!(err(&output).contains("unknown-key.yaml:10:13"), "{}", err(&output));

    let output = attache(&["check", "-f", &data("warn/oddities.yaml")]);
    assert_eq!(code(&output), 0);
    assert!(err(&output).contains("0 errors, 5 warnings") && out(&output).contains("good"));
    assert_eq!(code(&attache(&["check", "-f", &data("warn/oddities.yaml"), "--deny-warnings"])), 78);

    let output = attache(&["check", "-f", &data("bad/weights.yaml"), "--format", "json"]);
    assert_eq!(code(&output), 78);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["errors"], 7);
    assert_eq!(json["diagnostics"].as_array().unwrap().len(), 7);
}

#[test]
fn endpoint_picker_config_takes_its_endpoints_from_flags() {
    let file = root("examples/configs/endpoint-picker-config.yaml");
    let file = file.to_str().unwrap();
    let output = attache(&["check", file]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(out(&output).contains("good (1 pool, 0 endpoints named)"), "{}", out(&output));
    let output = attache(&["run", "--config", file]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("E210") && err(&output).contains("--endpoint 127.0.0.1:8000"), "{}", err(&output));
    let text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorrer}]";
    let output = attache(&["run", "--config-text", text, "--endpoint", "127.0.0.1:8000"]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("--config-text:3:18"), "{}", err(&output));
    assert!(err(&output).contains("did you mean `queue-scorer`?"), "{}", err(&output));
}

#[test]
fn file_of_100_mb_is_rejected() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(100 << 20).unwrap();
    let output = attache(&["check", "-f", file.path().to_str().unwrap()]);
    assert_eq!(code(&output), 78);
    assert!(err(&output).contains("E102"), "{}", err(&output));
}

#[test]
fn every_example_passes_check_without_warnings() {
    let mut checked = 0;
    for entry in std::fs::read_dir(root("examples/configs")).unwrap() {
        let path = entry.unwrap().path();
        let output = attache(&["check", "--deny-warnings", "-f", path.to_str().unwrap()]);
        assert_eq!(code(&output), 0, "{}: {}", path.display(), err(&output));
        checked += 1;
    }
    assert!(checked >= 5, "{checked}");
}

/// Writes a configuration and a request to files and runs `attache explain` on them.
fn explain(tokenizer: &str, body: &str, more: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let (config, request) = (directory.path().join("attache.yaml"), directory.path().join("request.json"));
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: default, strategy: pipeline, \
         requestStrategy: {{allow: [random]}}, endpoints: [\"127.0.0.1:1\"], \
         prefixCache: {{tokenizer: {tokenizer}}}}}\n"
    );
    std::fs::write(&config, text).unwrap();
    std::fs::write(&request, body).unwrap();
    let files = [request.to_str().unwrap(), "--config-file", config.to_str().unwrap()];
    attache(&[&["explain"], &files[..], more].concat())
}

const CHAT: &str = r#"{"model": "m", "messages": [
    {"role": "system", "content": "You answer in one word, always, whatever the question is about."},
    {"role": "user", "content": "Which sea lies between Europe and Africa?"}]}"#;

#[test]
fn explain_shows_blocks_scores_and_the_reason() {
    let explained = explain("characters", CHAT, &[]);
    assert_eq!(code(&explained), 0, "{}", err(&explained));
    for word in [
        "characters, blocks of 64 bytes",
        "about 26 tokens, 1 full block\n",
        "goes to    127.0.0.1:1",
        "(pipeline: greatest score)",
        "WHY",
        "queue-scorer × 2",
        "⟨role⟩system⟨text⟩You answer",
    ] {
        assert!(out(&explained).contains(word), "{word}: {}", out(&explained));
    }
    let output = explain("characters", CHAT, &["--header", "Routing-Strategy: random"]);
    assert!(out(&output).contains("goes to    127.0.0.1:1 (random: "), "headers count: {}", out(&output));
    let models = root("tests/data/chat_vectors");
    let tokenizer = format!("{{type: huggingface, directory: {}}}", models.display());
    let explained = explain(&tokenizer, CHAT, &["--json"]);
    let explained: serde_json::Value = serde_json::from_str(&out(&explained)).unwrap();
    assert_eq!((explained["tokenizer"].as_str(), explained["counted"].as_bool()), (Some("huggingface"), Some(true)));
    let (tokens, blocks) = (explained["prompt_tokens"].as_u64().unwrap(), explained["blocks"].as_array().unwrap());
    assert_eq!(blocks.len() as u64, tokens / 16);
    assert!(blocks.iter().all(|b| b["tokens"].as_array().unwrap().len() == 16), "{explained}");
    assert_eq!(explained["endpoints"][0]["blocks"], 0);
}

#[test]
fn explain_reports_why_it_fails() {
    let explained = explain("characters", r#"{"model": "m", "messages": []}"#, &[]);
    assert_eq!(code(&explained), 1);
    assert!(err(&explained).contains("would be rejected: invalid_messages"), "{}", err(&explained));
    let explained = explain("{type: huggingface, directory: /nowhere}", CHAT, &[]);
    assert_eq!(code(&explained), 78);
    assert!(err(&explained).contains("there is no tokenizer.json in /nowhere"), "{}", err(&explained));
    let explained = attache(&["explain", "/nowhere.json"]);
    assert_eq!(code(&explained), 64);
    assert!(err(&explained).contains("can't read /nowhere.json"), "{}", err(&explained));
    let explained = attache(&["explain", root("Cargo.toml").to_str().unwrap(), "--admin", "http://127.0.0.1:1"]);
    assert_eq!(code(&explained), 70);
    assert!(err(&explained).contains("no picker responds at http://127.0.0.1:1"), "{}", err(&explained));
    for (arguments, status, message) in [
        (
            &["--request", "r1", "--admin", "127.0.0.1:1"][..],
            70,
            "no picker responds at http://127.0.0.1:1; set `--admin`",
        ),
        (
            &["--request", "r1", "--admin", "https://127.0.0.1:1"],
            64,
            "invalid value 'https://127.0.0.1:1' for '--admin <URL>': allowed is `host:port` or `http://host:port`",
        ),
        (&["--request", "r1", "request.json"], 64, "cannot be used with '[FILE]'"),
        (&["--request", "r1", "--config-file", "a.yaml"], 64, "'--config-file <FILE>'"),
        (&["--request", "r1", "--strategy", "random"], 64, "--from-record <FILE>"),
        (&[], 64, "required arguments were not provided:\n  <FILE>"),
    ] {
        let explained = attache(&[&["explain"], arguments].concat());
        assert_eq!(code(&explained), status, "{arguments:?}: {}", err(&explained));
        assert!(err(&explained).contains(message), "{arguments:?}: {}", err(&explained));
    }
}

/// A picker that keeps the explanation of one request, and another one that keeps none.
#[test]
fn past_request_is_explained_by_the_running_picker() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = listener.local_addr().unwrap().to_string();
    let explanation = serde_json::json!({
        "request_id": "a b&c", "pool": "chat", "model": "m", "understood": true, "strategy": "least-request",
        "priority": 0, "waited_ms": 12.5, "prompt_tokens": 40,
        "endpoints": [{"address": "10.0.0.1:8000", "gpu_tokens": 16, "cached_tokens": 32, "requests": 3}],
        "choice": {"picks": ["10.0.0.1:8000"], "reason": "fewest requests", "parts": []},
    });
    let body = explanation.to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = String::new();
            std::io::BufRead::read_line(&mut std::io::BufReader::new(&stream), &mut line).unwrap();
            let (status, body) = match line.as_str() {
                "GET /explain?request_id=a%20b%26c HTTP/1.1\r\n" => ("200 OK", body.as_str()),
                "GET /explain?request_id=x HTTP/1.1\r\n" => ("404 Not Found", "this picker keeps no explanations\n"),
                _ => ("403 Forbidden", "only from loopback\n"),
            };
            let length = body.len();
            write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}").unwrap();
        }
    });
    let explain = |id: &str, more: &[&str]| attache(&[&["explain", "--request", id, "--admin", &admin], more].concat());
    let shown = explain("a b&c", &[]);
    assert_eq!(code(&shown), 0, "{}", err(&shown));
    for line in
        ["id         a b&c\npool       chat\n", "queued     12.5 ms\n", "goes to    10.0.0.1:8000 (least-request: "]
    {
        assert!(out(&shown).contains(line), "{line}: {}", out(&shown));
    }
    assert!(!out(&shown).contains("recorded") && !out(&shown).contains("of the recording"), "{}", out(&shown));
    let json: serde_json::Value = serde_json::from_str(&out(&explain("a b&c", &["--json"]))).unwrap();
    assert_eq!(json, explanation);
    let unknown = explain("x", &[]);
    assert!(code(&unknown) == 64 && err(&unknown).contains("keeps no explanations"), "{}", err(&unknown));
    let denied = explain("y", &[]);
    assert!(code(&denied) == 70 && err(&denied).contains("responds with 403 Forbidden: only from"), "{}", err(&denied));
}

#[test]
fn recorded_request_is_explained_with_what_another_strategy_would_do() {
    let recording = root("tests/in_process/virtual_time/frozen/aibrix.jsonl");
    let file = recording.to_str().unwrap();
    let output = attache(&["explain", "--from-record", file, "--request", "40", "--strategy", "predicted-latency"]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    for line in ["request    40, line ", "recorded   the same (", "instead    ", "\nWHY predicted-latency "] {
        assert!(out(&output).contains(line), "{line}: {}", out(&output));
    }
    // Picks are a list of fallbacks here; the runner-up is none of them.
    let kubernetes = root("tests/in_process/virtual_time/frozen/kubernetes.jsonl");
    let listed = attache(&["explain", "--from-record", kubernetes.to_str().unwrap(), "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&out(&listed)).unwrap();
    let (choice, endpoints) = (&listed["choice"], listed["endpoints"].as_array().unwrap());
    let candidates = endpoints.iter().filter(|endpoint| endpoint["excluded"].is_null()).count();
    let picks = choice["picks"].as_array().unwrap();
    assert_eq!(choice["runner_up"].is_string(), candidates > picks.len(), "{choice}");
    assert!(!picks.contains(&choice["runner_up"]), "{choice}");
    let output = attache(&["explain", "--from-record", file, "--json"]);
    let last: serde_json::Value = serde_json::from_str(&out(&output)).unwrap();
    assert_eq!(last["recorded"], last["choice"]["picks"]);
    for (more, message) in [
        (["--request", "400000"], "has no decision about request 400000"),
        (["--strategy", "nope"], "`--strategy nope`: no strategy is called `nope`"),
    ] {
        let output = attache(&[&["explain", "--from-record", file][..], &more].concat());
        assert_eq!(code(&output), 64);
        assert!(err(&output).contains(message), "{}", err(&output));
    }
}

/// A file with these pools, and more lines after them.
fn written(pools: &str, rest: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::with_suffix(".yaml").expect("a file");
    write!(file, "apiVersion: attache.dev/v1\nkind: Attache\npools: {pools}\n{rest}").expect("written");
    file
}

#[test]
fn envoy_config_names_what_a_bootstrap_cannot_have() {
    let run = |file: &tempfile::NamedTempFile| attache(&["envoy-config", "--inside", file.path().to_str().unwrap()]);
    for (pools, message) in [
        (
            "[{name: a, endpoints: ['127.0.0.1:1']}, {name: b, match: {models: [b]}, endpoints: ['127.0.0.1:2']}]",
            "2 pools",
        ),
        ("[{name: a, endpoints: []}]", "no `endpoints`"),
        (
            "[{name: a, destination: {metadata: [{namespace: n, key: k}]}, endpoints: ['127.0.0.1:1']}]",
            "`destination.metadata`",
        ),
    ] {
        let output = run(&written(pools, ""));
        assert!(code(&output) == 78 && err(&output).contains(message), "{pools}: {}", err(&output));
        assert_eq!(out(&output), "", "{pools}");
    }
    let output = run(&written("[{name: a, endpoints: ['127.0.0.1:1']}]", ""));
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert!(err(&output).contains("destination: {mode: list}"), "{}", err(&output));
    assert!(out(&output).contains("port_value: 1}"), "{}", out(&output));
    // Servers that the pool finds: Envoy gets them from Attaché.
    for source in ["dns: [{host: servers.example.com, port: 80}]", "endpointsFile: {path: /tmp/endpoints.yaml}"] {
        let output = run(&written(&format!("[{{name: a, {source}}}]"), ""));
        assert_eq!(code(&output), 0, "{}", err(&output));
        assert!(out(&output).contains("envoy.clusters.dynamic_modules"), "{}", out(&output));
    }
    let output = attache(&["envoy-config", "attache.yaml"]);
    assert!(code(&output) == 64 && err(&output).contains("--inside"), "{}", err(&output));
}

#[test]
fn check_inside_names_keys_without_effect() {
    let file = written("[{name: a, endpoints: ['127.0.0.1:1']}]", "server: {grpcPort: 9, drain: {minDelay: 1s}}\n");
    let check = |flags: &[&str]| attache(&[&["check", file.path().to_str().unwrap()], flags].concat());
    assert!(!err(&check(&[])).contains("Envoy"), "{}", err(&check(&[])));
    let output = check(&["--inside"]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    for key in ["server.grpcPort", "server.drain"] {
        assert!(err(&output).contains(&format!("`{key}` has no effect inside Envoy")), "{key}: {}", err(&output));
    }
    assert_eq!(code(&check(&["--inside", "--deny-warnings"])), 78);
    let nested = "exchange: {tenant: {metadata: envoy.filters.http.jwt_authn, path: [payload, sub]}}\n";
    let file = written("[{name: a, endpoints: ['127.0.0.1:1']}]", nested);
    let output = attache(&["check", "--inside", file.path().to_str().unwrap()]);
    assert!(code(&output) == 78 && err(&output).contains("`exchange.tenant.path` has 2 keys"), "{}", err(&output));
}
