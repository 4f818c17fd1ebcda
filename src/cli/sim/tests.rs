//! Unit tests of `sim.rs`.

use super::*;
use clap::Parser;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

fn parse(flags: &[&str]) -> Result<SimConfig, String> {
    let line = std::iter::once("sim").chain(flags.iter().copied());
    Cli::try_parse_from(line).map(|cli| cli.args.config()).map_err(|error| error.to_string())
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.server.engine.latency, LatencyModel::default());
    let expected = EngineConfig { model: config::DEFAULT_MODEL.into(), ..EngineConfig::default() };
    assert_eq!(config.server.engine, expected);
    assert_eq!((config.endpoints, config.port), (4, 8001));
}

#[test]
fn flags_reach_the_fleet() {
    let flags = [
        "--model=a,b",
        "--lora=x,y",
        "--step-base=1.5ms",
        "--weight-read=9ms",
        "--speed=100",
        "--max-num-queued-reqs=7",
    ];
    let config = parse(&flags).unwrap();
    assert_eq!(config.server.models, ["a", "b"]);
    assert_eq!(config.server.loras, ["x", "y"]);
    assert_eq!(&*config.server.engine.model, "a");
    assert_eq!(config.server.engine.latency.step_base, Duration::from_micros(1_500));
    assert_eq!(config.server.engine.latency.weight_read, Duration::from_millis(9));
    assert_eq!(config.server.engine.max_num_queued, Some(7));
}

#[test]
fn roles_define_the_fleet_and_pass_their_settings() {
    let config = parse(&["--role", "prefill=2,decode=1"]).unwrap();
    assert_eq!(
        (config.endpoints, config.roles),
        (3, vec![ServerRole::Prefill, ServerRole::Prefill, ServerRole::Decode])
    );
    assert_eq!(config.server.pd, PdConfig::default());
    let flags = "--kv-connector sglang --kv-lease 2s --bidirectional-kv --decoder-kv-ttl 3s --decoder-kv-clock \
                     unix --kv-load-failure-policy recompute --kv-load-failure-delay 4ms --bootstrap-timeout 5s";
    let config = parse(&flags.split_whitespace().collect::<Vec<_>>()).unwrap();
    let expected = PdConfig {
        connector: Connector::Sglang,
        lease: Duration::from_secs(2),
        bidirectional: true,
        decoder_ttl: Duration::from_secs(3),
        expiry_clock: ExpiryClock::Unix,
        load_failure: LoadFailure::Recompute,
        load_failure_delay: Duration::from_millis(4),
        bootstrap_timeout: Duration::from_secs(5),
    };
    assert_eq!((config.server.pd, config.roles), (expected, vec![]));
    assert!(parse(&["--role", "both=1", "--endpoints", "1"]).is_err());
    for wrong in ["prefill", "prefill=0", "prefil=1", "decode=x"] {
        assert!(parse(&["--role", wrong]).unwrap_err().contains("allowed are prefill=N"), "{wrong}");
    }
}

#[test]
fn kv_events_are_published_if_a_flag_enables_them() {
    assert_eq!(parse(&[]).unwrap().server.kv_events, None);
    let bound = parse(&["--kv-events-port", "5557"]).unwrap().server.kv_events;
    assert_eq!(bound, Some(KvEventsConfig { outlet: Outlet::Bind { port: 5557 }, ..KvEventsConfig::default() }));
    let flags = "--kv-events-connect tcp://127.0.0.1:5557 --kv-events-replay-port 0 --kv-events-replay-format \
                     legacy --kv-events-topic kv --kv-events-buffer-steps 9 --kv-events-encoding array \
                     --kv-events-hash bytes --kv-events-offload-blocks 7 --prefix-caching-hash-algo xxhash_cbor \
                     --hash-seed 42";
    let connected = parse(&flags.split_whitespace().collect::<Vec<_>>()).unwrap().server.kv_events;
    let expected = KvEventsConfig {
        outlet: Outlet::Connect { address: "tcp://127.0.0.1:5557".into() },
        replay_port: Some(0),
        topic: Some("kv".into()),
        buffer_steps: 9,
        encoding: EventEncoding::Array,
        hash: HashForm::Bytes,
        replay_format: ReplayFormat::Legacy,
        algorithm: HashAlgorithm::XxhashCbor,
        seed: "42".into(),
        offload_blocks: 7,
    };
    assert_eq!(connected, Some(expected));
    let error = parse(&["--kv-events-topic", "kv"]).unwrap_err();
    assert!(error.contains("--kv-events-port") && error.contains("--kv-events-connect"), "{error}");
    assert!(parse(&["--kv-events-port", "0", "--kv-events-connect", "tcp://h:1"]).is_err());
}

#[test]
fn invalid_values_rejected_with_allowed_values() {
    for (flags, expected) in [
        (["--speed", "0"], "0.000001 to 1e9"),
        (["--speed", "NaN"], "0.000001 to 1e9"),
        (["--step-base", "6"], "a number with a unit"),
        (["--step-base", "-6ms"], "a number with a unit"),
        (["--faults", r#"{"refuze":1}"#], "refuze"),
        (["--block-size", "0"], "1..=1024"),
        (["--endpoints", "0"], "1..=65535"),
        (["--prefix-caching-hash-algo", "md5"], "sha256_cbor"),
    ] {
        let flags = [&format!("{}={}", flags[0], flags[1])[..]];
        let error = parse(&flags).unwrap_err();
        assert!(error.contains(expected), "{flags:?}: {error}");
    }
}
