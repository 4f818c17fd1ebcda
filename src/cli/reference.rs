//! Command lines of the reference pickers: the flags in Deployments of GIE and llm-d are converted to
//! those of [`super::flags`], so that their manifests run with only the image changed. Called before
//! the arguments are parsed. Pure.
//!
//! Four differences are handled. Go accepts a single dash, and old versions wrote `poolName` for `pool-name`.
//! GIE's chart passes some values with their quotes (`--model-server-metrics-path="/metrics"` as one argument,
//! which no shell has parsed). Some flags have another name in Attaché. And some have no effect; these are dropped
//! with a warning that states why.

use attache_config::flags::switch;
use attache_config::units::parse_duration;
use std::ffi::OsString;

/// How a flag of the reference pickers is handled that Attaché lacks under its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlagHandling {
    /// It has another name in Attaché.
    Renamed(&'static str),
    /// `json` and `console` select the format of logs.
    LogEncoder,
    /// A level of their logging library.
    LogLevel,
    /// The name of the header and of the metadata key with the destination.
    DestinationKey,
    /// The name of a metric, from which the engine follows.
    EngineByMetric,
    /// Time from SIGTERM until open streams are cut.
    DrainTimeout,
    /// A switch or a value without effect in Attaché.
    Void(&'static str),
}

/// Whether a flag may stand without a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlagShape {
    Switch,
    Value,
}

use FlagHandling::{DestinationKey, DrainTimeout, EngineByMetric, LogEncoder, LogLevel, Renamed, Void};
use FlagShape::{Switch, Value};

const NO_PPROF: &str = "there is no profiler in the process";
const BY_ENGINE: &str = "the names of metrics follow from the engine";
const PLAIN_METRICS: &str = "metrics are plain HTTP; keep their port from strangers by a NetworkPolicy";
const OWN_TLS: &str = "TLS 1.2 and 1.3 are spoken, with rustls's own choice of ciphers";
const OWN_LOGS: &str = "logs have one shape; see `--log-format` and `--log-level`";

const FLAGS: &[(&str, FlagShape, FlagHandling)] = &[
    ("zap-encoder", Value, LogEncoder),
    ("zap-log-level", Value, LogLevel),
    ("zap-devel", Switch, Void(OWN_LOGS)),
    ("zap-stacktrace-level", Value, Void(OWN_LOGS)),
    ("zap-time-encoding", Value, Void(OWN_LOGS)),
    ("drain-timeout", Value, DrainTimeout),
    ("total-queued-requests-metric", Value, EngineByMetric),
    ("total-running-requests-metric", Value, EngineByMetric),
    ("kv-cache-usage-percentage-metric", Value, EngineByMetric),
    ("lora-info-metric", Value, Void(BY_ENGINE)),
    ("cache-info-metric", Value, Void(BY_ENGINE)),
    ("refresh-prometheus-metrics-interval", Value, Void("pool metrics are computed when they are asked for")),
    ("metrics-cert-dir", Value, Void(PLAIN_METRICS)),
    ("metrics-client-ca-file", Value, Void(PLAIN_METRICS)),
    ("enable-pprof", Switch, Void(NO_PPROF)),
    ("tls-min-version", Value, Void(OWN_TLS)),
    ("tls-cipher-suites", Value, Void(OWN_TLS)),
    ("grpc-max-recv-msg-size", Value, Void("`limits.maxBodyBytes` in the file bounds bodies")),
    ("grpc-max-send-msg-size", Value, Void("replies are cut into pieces that every gateway takes")),
    ("enable-grpc-stream-metrics", Switch, Void("streams are always counted (`attache_streams_total`)")),
    ("allow-experimental-plugins", Switch, Void("no plugin needs a permission")),
    ("cert-dir", Value, Renamed("cert-path")),
    ("target-pod-header", Value, Renamed("destination-header")),
    ("target-endpoint-key", Value, DestinationKey),
    ("destination-endpoint-hint-key", Value, DestinationKey),
    ("destination-endpoint-hint-metadata-namespace", Value, Renamed("destination-metadata-namespace")),
];

/// The converted command line, and warnings about flags without effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Translated {
    /// The command line with Attaché's flags.
    pub(super) words: Vec<OsString>,
    /// Flags without effect, with the reason.
    pub(super) warnings: Vec<String>,
}

/// Flags that stand before any verb.
const WITHOUT_VERB: [&str; 2] = ["help", "version"];

/// Converts the arguments of `attache run`; those of other verbs stay as they are. The reference pickers have no verbs,
/// so a flag in place of a verb means `run`.
pub(super) fn translate(words: Vec<OsString>) -> Translated {
    let mut out = Translated::default();
    let mut ours: Vec<(&'static str, String)> = Vec::new();
    let mut rest = words.into_iter();
    out.words.extend(rest.next());
    let first = rest.next();
    let name = first.as_ref().and_then(|word| flag(word.to_str()?)).map(|(name, _)| name);
    let names_none = name.is_some_and(|name| !WITHOUT_VERB.contains(&&*name));
    if !names_none && first.as_ref().is_none_or(|word| word != "run") {
        out.words.extend(first.into_iter().chain(rest));
        return out;
    }
    out.words.push("run".into());
    let mut rest = first.filter(|_| names_none).into_iter().chain(rest);
    let mut is_text = false;
    while let Some(word) = rest.next() {
        let Some((name, value)) = word.to_str().and_then(flag) else {
            let quoted = word.to_str().filter(|_| !is_text).and_then(unquoted).map(OsString::from);
            out.words.push(quoted.unwrap_or(word));
            continue;
        };
        // A configuration may itself begin and end with quotes.
        is_text = name == "config-text";
        let quoted = value.as_deref().filter(|_| !is_text).and_then(unquoted).map(str::to_owned);
        let value = quoted.or(value);
        match FLAGS.iter().find(|(known, ..)| *known == name) {
            // An empty value leaves their flag at its default.
            None if value.as_deref() == Some("") => {}
            None => out.words.push(spelled(&name, value.as_deref())),
            Some((_, shape, fate)) => {
                let next = || (*shape == Value).then(|| rest.next()?.into_string().ok()).flatten();
                let value = value.or_else(next).map(|value| unquoted(&value).map(str::to_owned).unwrap_or(value));
                out.give(&name, *fate, value.as_deref().unwrap_or("true"), &mut ours);
            }
        }
    }
    // Attaché's own flags outrank the converted ones.
    for (name, value) in ours {
        let flag = format!("--{name}");
        let begins = |word: &str| word == flag || word.strip_prefix(&flag).is_some_and(|rest| rest.starts_with('='));
        if !out.words.iter().filter_map(|word| word.to_str()).any(begins) {
            out.words.push(spelled(name, Some(&value)));
        }
    }
    out
}

impl Translated {
    fn give(&mut self, name: &str, fate: FlagHandling, value: &str, ours: &mut Vec<(&'static str, String)>) {
        match fate {
            Renamed(flag) => ours.push((flag, value.to_owned())),
            LogEncoder => ours.push(("log-format", if value == "json" { "json" } else { "text" }.to_owned())),
            LogLevel => ours.push(("log-level", level(value).to_owned())),
            DrainTimeout => {
                ours.push(("drain-deadline", value.to_owned()));
                // The drain delay must not exceed the deadline.
                if parse_duration(value).is_ok_and(|t| t < attache_config::schema::Drain::default().min_delay()) {
                    ours.push(("drain-min-delay", value.to_owned()));
                }
            }
            DestinationKey => {
                ours.push(("destination-header", value.to_owned()));
                ours.push(("destination-metadata-key", value.to_owned()));
            }
            EngineByMetric => {
                ours.extend(engine(value).map(|engine| ("engine", engine.to_owned())));
                self.warn(name, BY_ENGINE);
            }
            // Off is the default anyway.
            Void(_) if value.is_empty() || switch(value) == Ok(false) => {}
            Void(why) => self.warn(name, why),
        }
    }

    fn warn(&mut self, name: &str, why: &str) {
        self.warnings.push(format!("`--{name}` has no effect: {why}"));
    }
}

/// The name of a long flag, with dashes between words, and its value if it is in the same
/// argument. `None` for other arguments.
fn flag(word: &str) -> Option<(String, Option<String>)> {
    let text = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (text, None),
    };
    let good = name.len() > 1 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if !good || !name.starts_with(|c: char| c.is_ascii_lowercase()) {
        return None;
    }
    let mut dashed = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() {
            dashed.push('-');
        }
        dashed.push(c.to_ascii_lowercase());
    }
    Some((dashed, value))
}

/// The text between two equal quotes; `None` if there are none.
fn unquoted(value: &str) -> Option<&str> {
    let between = |quote| value.strip_prefix(quote)?.strip_suffix(quote);
    between('"').or_else(|| between('\''))
}

fn spelled(name: &str, value: Option<&str>) -> OsString {
    match value {
        Some(value) => format!("--{name}={value}").into(),
        None => format!("--{name}").into(),
    }
}

/// Attaché's level for one of zap's: a word, or a number that grows with verbosity.
fn level(zap: &str) -> &'static str {
    match zap {
        "debug" => "debug",
        "warn" => "warn",
        "error" | "dpanic" | "panic" | "fatal" => "error",
        "1" | "2" | "info" => "info",
        "3" | "4" => "debug",
        other if other.parse::<u8>().is_ok() => "trace",
        _ => "info",
    }
}

/// The engine that uses this metric name, as charts pass it to older versions.
fn engine(metric: &str) -> Option<&'static str> {
    let begins = [
        ("vllm:", "vllm"),
        ("sglang:", "sglang"),
        ("nv_trt_llm_", "triton-tensorrt-llm"),
        ("nv_", "triton-tensorrt-llm"),
        ("trtllm_", "trtllm-serve"),
    ];
    begins.iter().find(|(prefix, _)| metric.starts_with(prefix)).map(|(_, engine)| *engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> (Vec<String>, Vec<String>) {
        let all = ["attache", "run"].iter().chain(words).map(OsString::from).collect();
        let Translated { words, warnings } = translate(all);
        (words.into_iter().skip(2).map(|w| w.into_string().unwrap()).collect(), warnings)
    }

    #[test]
    fn words_are_put_into_our_own_terms() {
        for (theirs, ours) in [
            (&["--pool-name", "a", "--v", "4"][..], &["--pool-name", "a", "--v", "4"][..]),
            (&["-poolName", "a", "-grpcPort", "9002"], &["--pool-name", "a", "--grpc-port", "9002"]),
            (&["-poolName=a", "-v", "4", "-v=3"], &["--pool-name=a", "-v", "4", "-v=3"]),
            (&["-refreshMetricsInterval=50ms"], &["--refresh-metrics-interval=50ms"]),
            (&["--zap-encoder", "json"], &["--log-format=json"]),
            (&["-targetPodHeader", "target-pod"], &["--destination-header=target-pod"]),
            (&["-targetEndpointKey=d"], &["--destination-header=d", "--destination-metadata-key=d"]),
            (
                &["-destinationEndpointHintKey=d", "--destination-endpoint-hint-metadata-namespace", "n"],
                &["--destination-header=d", "--destination-metadata-key=d", "--destination-metadata-namespace=n"],
            ),
            (&["--zap-encoder=console", "--zap-log-level=4"], &["--log-format=text", "--log-level=debug"]),
            (&["--drain-timeout=30s"], &["--drain-deadline=30s"]),
            (&["--drain-timeout=3s"], &["--drain-deadline=3s", "--drain-min-delay=3s"]),
            (
                &["--metrics-endpoint-auth=false", "--enable-pprof=F", "--zap-devel=0"],
                &["--metrics-endpoint-auth=false"],
            ),
            (&["--zap-encoder=json", "--log-format", "text"], &["--log-format", "text"]),
            (&["--endpoint", "10.0.0.1:8000", "-"], &["--endpoint", "10.0.0.1:8000", "-"]),
            (
                &["--model-server-metrics-path=\"/prometheus/metrics\"", "--pool-name", "'a'", "--pool-group=\"\""],
                &["--model-server-metrics-path=/prometheus/metrics", "--pool-name", "a"],
            ),
            (&["--config-text=\"a\"", "--config-text", "'a'"], &["--config-text=\"a\"", "--config-text", "'a'"]),
            (&["--pool-name=\"a", "--pool-name=\""], &["--pool-name=\"a", "--pool-name=\""]),
        ] {
            assert_eq!(run(theirs), (ours.iter().map(|w| (*w).to_owned()).collect(), vec![]), "{theirs:?}");
        }
    }

    #[test]
    fn what_has_no_effect_is_left_out_and_told() {
        let (words, warnings) = run(&["--enable-pprof", "--metrics-cert-dir=/certs", "--tls-min-version", "1.3"]);
        assert_eq!(words, Vec::<String>::new());
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[1].contains("NetworkPolicy"), "{warnings:?}");
        let (words, warnings) = run(&[
            "--total-queued-requests-metric",
            "sglang:num_queue_reqs",
            "--total-running-requests-metric=sglang:num_running_reqs",
            "--lora-info-metric",
            "",
        ]);
        assert_eq!(words, ["--engine=sglang"], "a value behind its flag goes along");
        for words in [
            &["--total-queued-requests-metric=\"sglang:num_queue_reqs\""][..],
            &["--total-queued-requests-metric", "\"sglang:num_queue_reqs\""],
        ] {
            assert_eq!(run(words).0, ["--engine=sglang"], "quotes that no shell has taken away");
        }
        assert_eq!(warnings.len(), 2, "{warnings:?}");
    }

    #[test]
    fn other_verbs_are_left_alone() {
        for words in [
            &["attache", "check", "-f", "x", "--enable-pprof"][..],
            &["attache", "--help"],
            &["attache", "-V"],
            &["attache"],
        ] {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            assert_eq!(translate(words.clone()), Translated { words, warnings: Vec::new() });
        }
    }

    #[test]
    fn flags_without_a_verb_are_those_of_run() {
        let words = ["attache", "-poolName", "a", "--enable-pprof"].map(OsString::from).to_vec();
        let Translated { words, warnings } = translate(words);
        assert_eq!(words, ["attache", "run", "--pool-name", "a"]);
        assert_eq!(warnings.len(), 1);
    }

    /// All flags of GIE's picker (v1.5) and of llm-d's (v0.10), as their Deployments pass them.
    #[test]
    fn command_lines_of_both_references_are_understood() {
        let gie = "--pool-name vllm --pool-namespace default --pool-group inference.networking.k8s.io --grpc-port \
                   9002 --grpc-health-port 9003 --metrics-port 9090 --health-checking=true --secure-serving=false \
                   --cert-path= --enable-cert-reload=false --disable-endpoint-subset-filter=false --config-file \
                   /config/default-plugins.yaml --ha-enable-leader-election=false --refresh-metrics-interval 50ms \
                   --refresh-prometheus-metrics-interval 5s --metrics-staleness-threshold 2s \
                   --metrics-endpoint-auth=true --tracing=false --enable-pprof=true --v 4 --zap-encoder json \
                   --zap-devel=false --zap-log-level 2 --zap-stacktrace-level error --zap-time-encoding rfc3339 \
                   --model-server-metrics-scheme http --model-server-metrics-path /metrics \
                   --model-server-metrics-port 0 --model-server-metrics-https-insecure-skip-verify=true \
                   --total-queued-requests-metric sglang:num_queue_reqs --total-running-requests-metric \
                   sglang:num_running_reqs --kv-cache-usage-percentage-metric sglang:token_usage \
                   --lora-info-metric= --cache-info-metric=";
        let llm_d = "--endpoint-selector app=vllm --endpoint-target-ports 8000,8001 --config-text {} \
                     --tls-min-version VersionTLS13 --tls-cipher-suites TLS_AES_128_GCM_SHA256 --metrics-cert-dir \
                     /certs --metrics-client-ca-file /ca.crt --drain-timeout 30s --grpc-max-recv-msg-size 4194304 \
                     --grpc-max-send-msg-size 4194304 --enable-grpc-stream-metrics --emit-endpoint-scores \
                     --allow-experimental-plugins --ha-enable-leader-election -v=5";
        let oldest = "-poolName vllm -poolNamespace default -v 4 --zap-encoder json -grpcPort 9002 -grpcHealthPort \
                      9003 -refreshMetricsInterval 50ms -secureServing=true -destinationEndpointHintKey \
                      x-gateway-destination-endpoint -destinationEndpointHintMetadataNamespace envoy.lb";
        for line in [gie, llm_d, oldest] {
            let words = ["attache", "run"].into_iter().chain(line.split_whitespace()).map(OsString::from).collect();
            let words = translate(words).words;
            if let Err(error) = <super::super::Cli as clap::Parser>::try_parse_from(&words) {
                panic!("{words:?}: {error}");
            }
        }
    }
}
