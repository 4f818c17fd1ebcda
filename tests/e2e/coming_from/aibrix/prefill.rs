//! AIBrix's `pd` strategy: prefill and decode on different servers.

use super::MANIFEST;
use super::configured::{PAIR, PLAIN, Variables, check, read, value};
use crate::coming_from::Here::{Differs, Same, Warns};
use crate::coming_from::rows;
use crate::disagg::{COURSE, PREFILL};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::client::{self, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::sim::SimProcess;
use attache_disagg::policy::Mode;
use attache_pool::ports::BOOTSTRAP_PORT_LABEL;
use attache_pool::{Endpoint, EndpointSpec, Roles};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

const PD: (&str, &str) = ("ROUTING_ALGORITHM", "pd");
const HEADER: (&str, &str) = ("routing-strategy", "pd");

/// A prefill and a decode server with AIBrix's labels, the picker and Envoy.
struct Stack {
    sim: SimProcess,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Stack {
    /// `labels` are added to the prefill worker's labels, and `of_pool` to the pool.
    async fn start(sim: &[&str], labels: &str, of_pool: &str, variables: Variables<'_>) -> Self {
        Self::behind("original-dst.yaml", sim, labels, of_pool, variables).await
    }

    /// The same with this file of Envoy's.
    async fn behind(file: &str, sim: &[&str], labels: &str, of_pool: &str, variables: Variables<'_>) -> Self {
        let sim = SimProcess::with_roles("prefill=1,decode=1", 2, &[&["--speed", "20"], sim].concat()).await;
        let [prefill, decode] = [sim.servers[0], sim.servers[1]];
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{prefillEndpointHeader: true}}\n\
             pools:\n- name: a\n  {of_pool}\n  endpoints:\n  \
             - {{address: '{prefill}', labels: {{{labels} roleset-name: s, role-name: prefill}}}}\n  \
             - {{address: '{decode}', labels: {{roleset-name: s, role-name: decode}}}}\n"
        );
        let picker = AttacheProcess::configured_with(&text, variables).await;
        let envoy = EnvoyProcess::start(&by_header(file, &picker)).await;
        Self { sim, picker, envoy }
    }

    async fn ask(&self, headers: &[(&'static str, &'static str)]) -> Reply {
        use crate::support::body::Payload;
        use crate::support::client::Http;
        let content = "A story of a fox and a dog. ".repeat(30);
        let body = json!({"model": "sim-8b", "max_tokens": 4, "messages": [{"role": "user", "content": content}]});
        let to = self.envoy.listener("inference");
        let mut request =
            client::request("POST", to, Http::H1, "/v1/chat/completions", Payload::sized(body.to_string().into()));
        for (name, value) in headers {
            request.headers_mut().insert(*name, http::HeaderValue::from_static(value));
        }
        client::send(to, Http::H1, request).await.expect("an answer")
    }

    /// The request was served, and the prefill worker computed its prompt.
    fn assert_split(&self, reply: &Reply) {
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        assert_eq!((reply.header(COURSE), reply.header(PREFILL)), ("split", &*self.sim.servers[0].to_string()));
    }

    async fn fail_prefills(&self) {
        let faults = json!({"refuse": true}).to_string();
        assert_eq!(
            client::post(self.sim.servers[0], "/sim/faults", faults.into()).await.expect("an answer").status,
            200
        );
    }
}

fn roles(labels: &[(&str, &str)]) -> Roles {
    let labels: BTreeMap<Arc<str>, Arc<str>> = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    Roles::of_labels(&labels)
}

/// The parameter of `pd` that a variable sets.
fn parameter(variable: &str, given: &str, name: &str) -> Value {
    value(PAIR, &[PD, (variable, given)], &format!("/strategy/parameters/{name}"))
}

/// The connector of a prefill server with these labels.
fn connector(variables: Variables<'_>, labels: &[(&str, &str)]) -> &'static str {
    let (settings, _) = read(PAIR, &[&[PD], variables].concat()).expect("good");
    let Some(Mode::Direct(direct)) = settings.pools[0].disaggregation.as_ref().map(|d| &d.mode) else {
        panic!("no mode")
    };
    let mut spec = EndpointSpec::at("10.0.0.1:8000".parse().expect("an address"));
    spec.labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    direct.connector_of(Some(&Endpoint::new(attache_types::ids::EndpointId(0), spec))).name()
}

rows! { ROWS;
    by_environment: "`ROUTING_ALGORITHM=pd` alone, with labels on servers",
        "a prefill call, then the decode server", Same => {
        let stack = Stack::start(&[], "model.aibrix.ai/engine: vllm,", "deadlineAdmission: false", &[PD]).await;
        stack.assert_split(&stack.ask(&[]).await);
        stack.picker.assert_settled().await;
    }
    under_the_policy: "AIBrix's EnvoyExtensionPolicy: request bodies Buffered, `messageTimeout: 60s`",
        "the prefill call ends within the policy's time, or the client gets 504", Differs {
            default: "the prefill gets nine tenths of that time; then the decode server computes the prompt",
            exact: "",
        } => {
        let stack = Stack::behind("target-pod.yaml", &[], "", "deadlineAdmission: false", &[PD]).await;
        stack.assert_split(&stack.ask(&[]).await);
        let by_header = [&MANIFEST[..], &[("ROUTING_ALGORITHM", "random")]].concat();
        let stack = Stack::behind("target-pod.yaml", &[], "", "deadlineAdmission: false", &by_header).await;
        stack.assert_split(&stack.ask(&[HEADER]).await);
    }
    under_another_policy: "bodies in another mode than FULL_DUPLEX_STREAMED, without AIBrix's variables",
        "-", Differs {
            default: "no prefill call; a warning in the log, `attache_degraded_total`",
            exact: "`disaggregation: {messageTimeout: 60s}`, as Envoy's `message_timeout`",
        } => {
        const POOL: &str = "strategy: pd\n  destination: {headers: [target-pod], strategyHeader: routing-strategy}";
        let stack = Stack::behind("target-pod.yaml", &[], "", POOL, &[]).await;
        for _ in 0..3 {
            let whole = stack.ask(&[]).await;
            assert_eq!((whole.status.as_u16(), whole.header(COURSE)), (200, ""));
        }
        let log = stack.picker.process.stderr();
        assert_eq!(log.matches("prompts are not split between servers").count(), 1, "{log}");
        assert!(stack.picker.metric("attache_degraded_total{mode=\"no_time_to_split\"}").await >= 3.0);
        let split = format!("{POOL}\n  disaggregation: {{connector: by-label, decider: strategy, messageTimeout: 60s}}");
        let stack = Stack::behind("target-pod.yaml", &[], "", &split, &[]).await;
        stack.assert_split(&stack.ask(&[]).await);
    }
    by_header_alone: "header `routing-strategy: pd` alone",
        "the same for this request", Differs {
            default: "the same where requests may choose `pd`: under `ROUTING_ALGORITHM`, or with \
                `requestStrategy.allow`",
            exact: "`requestStrategy: {allow: [\"*\"]}`",
        } => {
        let stack = Stack::start(&[], "", "requestStrategy: {allow: [pd]}", &[]).await;
        stack.assert_split(&stack.ask(&[HEADER]).await);
        let whole = stack.ask(&[]).await;
        assert_eq!(
            (whole.status.as_u16(), whole.header(COURSE)),
            (200, ""),
            "the pool's own strategy splits nothing"
        );
    }
    sglang: "label `model.aibrix.ai/engine: sglang`",
        "both servers are asked at once, with `bootstrap_host`, `bootstrap_port`, `bootstrap_room`", Same => {
        let sim = ["--kv-connector", "sglang", "--bootstrap-timeout", "10000ms"];
        let stack = Stack::start(&sim, "model.aibrix.ai/engine: sglang,", "deadlineAdmission: false", &[PD]).await;
        stack.assert_split(&stack.ask(&[]).await);
        stack.picker.assert_settled().await;
    }
    engines: "label `model.aibrix.ai/engine`: `vllm`, `sglang`, `trtllm`",
        "names the connector", Same => {
        const ENGINE: &str = "model.aibrix.ai/engine";
        for (engine, name) in [("vllm", "shfs"), ("sglang", "sglang"), ("trtllm", "trtllm")] {
            assert_eq!(connector(&[], &[(ENGINE, engine)]), name);
        }
        assert_eq!(connector(&[], &[]), "shfs", "vLLM where no label says otherwise");
    }
    kv_connector_label: "label `model.aibrix.ai/kv-connector-type`: `shfs`, `nixl` (Neuron)",
        "`shfs` by default", Same => {
        const LABEL: &str = "model.aibrix.ai/kv-connector-type";
        assert_eq!(connector(&[], &[(LABEL, "shfs")]), "shfs");
        assert_eq!(connector(&[], &[(LABEL, "nixl")]), "neuron-nixl");
    }
    kv_connector_variable: "`AIBRIX_KV_CONNECTOR_TYPE`: `shfs`, `nixl`, `mooncake`",
        "`shfs` by default; `mooncake` does nothing", Differs {
            default: "`shfs` and `nixl` as there; `mooncake` is an error that says what to use",
            exact: "unset it for `mooncake`",
        } => {
        assert_eq!(connector(&[("AIBRIX_KV_CONNECTOR_TYPE", "nixl")], &[]), "neuron-nixl");
        let (good, said) = check(PAIR, &[PD, ("AIBRIX_KV_CONNECTOR_TYPE", "mooncake")]);
        assert!(!good && said.contains("shared-storage"), "{said}");
    }
    bootstrap_port: "annotation `model.aibrix.ai/sglang-bootstrap-port`",
        "8998 by default", Same => {
        let (settings, _) = read(PAIR, &[PD]).expect("good");
        let Some(Mode::Direct(direct)) = settings.pools[0].disaggregation.as_ref().map(|d| &d.mode) else {
            panic!("no mode")
        };
        let mut spec = EndpointSpec::at("10.0.0.1:8000".parse().expect("an address"));
        assert_eq!(direct.bootstrap_port_of(&Endpoint::new(attache_types::ids::EndpointId(0), spec.clone())), 8998);
        spec.labels.insert(BOOTSTRAP_PORT_LABEL.into(), "9100".into());
        assert_eq!(direct.bootstrap_port_of(&Endpoint::new(attache_types::ids::EndpointId(0), spec)), 9100);
        assert_eq!(BOOTSTRAP_PORT_LABEL, "model.aibrix.ai/sglang-bootstrap-port");
    }
    roles_of_labels: "labels `role-name: prefill`, `role-name: decode`",
        "the role of a server", Same => {
        assert_eq!(roles(&[("role-name", "prefill")]), Roles::PREFILL);
        assert_eq!(roles(&[("role-name", "decode")]), Roles::DECODE);
    }
    group_index: "label `stormservice.orchestration.aibrix.ai/pod-group-index`",
        "only the pod with 0 gets requests", Same => {
        const INDEX: &str = "stormservice.orchestration.aibrix.ai/pod-group-index";
        assert_eq!(roles(&[("role-name", "prefill"), (INDEX, "0")]), Roles::PREFILL);
        assert_eq!(roles(&[("role-name", "prefill"), (INDEX, "1")]), Roles::NONE);
    }
    rolesets: "label `roleset-name`",
        "prefill and decode servers of one set go together", Same => {
        assert_eq!(value(PAIR, &[PD], "/disaggregation/together/0"), "roleset-name");
    }
    unknown_roles: "a missing or unknown `role-name`",
        "the server gets nothing", Differs {
            default: "it counts as a decode server",
            exact: "`strategy: {name: pd, parameters: {compat: true}}`, or `ATTACHE_AIBRIX_COMPAT=true`",
        } => {
        assert_eq!(roles(&[("role-name", "worker")]), Roles::DECODE);
        assert_eq!(roles(&[]), Roles::DECODE);
        assert_eq!(value(PAIR, &[PD, ("ATTACHE_AIBRIX_COMPAT", "true")], "/strategy/parameters/compat"), true);
        let text = PAIR
            .replace("role-name: decode", "role-name: worker")
            .replace("', labels", "', engine: none, labels")
            .replace("name: a\n", "name: a\n  strategy: {name: pd, parameters: {compat: true}}\n");
        let picker = AttacheProcess::configured(&text).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
        let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", body.into())
            .await
            .expect("an answer");
        assert_eq!(reply.status, 503, "no server is left");
    }
    no_prefill: "`pd` without a prefill server",
        "503 for every request", Differs {
            default: "an error of the configuration that says what is missing; where servers come and go, the \
                decode server computes the prompt",
            exact: "`compat: true`: 503",
        } => {
        let (good, said) = check(PLAIN, &[PD]);
        assert!(
            !good && said.contains("`pd` has nothing to pair") && said.contains("role-name: prefill"),
            "{said}"
        );
        let (good, said) = check(PAIR, &[PD]);
        assert!(good, "{said}");
    }
    failed_prefill: "a prefill that fails",
        "503", Differs {
            default: "another prefill server, then the decode server computes the prompt",
            exact: "`disaggregation.fallback: fail`, or `compat: true`",
        } => {
        let stack = Stack::start(&[], "", "deadlineAdmission: false", &[PD]).await;
        stack.fail_prefills().await;
        let reply = stack.ask(&[]).await;
        assert!(
            reply.status == 200 && reply.header(COURSE).starts_with("local"),
            "{} {}",
            reply.status,
            reply.header(COURSE)
        );
    }
    failed_prefill_exactly: "a prefill that fails, with `ATTACHE_AIBRIX_COMPAT=true`",
        "503", Same => {
        let stack =
            Stack::start(&[], "", "deadlineAdmission: false", &[PD, ("ATTACHE_AIBRIX_COMPAT", "true")]).await;
        stack.assert_split(&stack.ask(&[]).await);
        stack.fail_prefills().await;
        assert_eq!(stack.ask(&[]).await.status, 503);
    }
    decode_choice: "the decode server",
        "release 0.4 draws it; later ones score", Differs {
            default: "scores, as later releases",
            exact: "`compat: true` draws it",
        } => {
        let compat = value(PAIR, &[PD, ("ATTACHE_AIBRIX_COMPAT", "true")], "/disaggregation/fallback");
        assert_eq!((compat, value(PAIR, &[PD], "/disaggregation/fallback")), (json!("fail"), json!("local")));
    }
    prefill_timeout: "`AIBRIX_PREFILL_REQUEST_TIMEOUT`",
        "seconds; 30 in the code, 60 in the manifest", Same => {
        let timeout = |variables: Variables<'_>| value(PAIR, variables, "/disaggregation/prefillTimeout");
        assert_eq!(
            (timeout(&[PD]), timeout(&[PD, ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60")])),
            (json!("30s"), json!("1m"))
        );
        let text = PAIR.replace("name: a\n", "name: a\n  disaggregation: {prefillTimeout: 5s}\n");
        assert_eq!(
            value(&text, &[PD, ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60")], "/disaggregation/prefillTimeout"),
            "5s",
            "the file counts"
        );
    }
    variables_without_pd: "`AIBRIX_PREFILL_REQUEST_TIMEOUT`, `AIBRIX_KV_CONNECTOR_TYPE` without `pd`",
        "ignored", Warns { instead: "`ROUTING_ALGORITHM=pd`, or `disaggregation` in the file" } => {
        let (good, said) =
            check(PLAIN, &[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "60"), ("AIBRIX_KV_CONNECTOR_TYPE", "shfs")]);
        assert!(good && said.contains("`AIBRIX_PREFILL_REQUEST_TIMEOUT` has no effect"), "{said}");
        assert!(said.contains("`AIBRIX_KV_CONNECTOR_TYPE` has no effect"), "{said}");
    }
    policies: "`AIBRIX_PREFILL_SCORE_POLICY`, `AIBRIX_DECODE_SCORE_POLICY`",
        "`prefix_cache` and `load_balancing` by default", Same => {
        assert_eq!(
            parameter("AIBRIX_PREFILL_SCORE_POLICY", "least_request", "prefillScorePolicy"),
            "least_request"
        );
        assert_eq!(parameter("AIBRIX_DECODE_SCORE_POLICY", "conductor", "decodeScorePolicy"), "conductor");
    }
    spreads: "`AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD`, `AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD`, \
        `AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD`, `AIBRIX_DECODE_SCORE_RATIO_THRESHOLD`",
        "16, 16, 2048, 1.5", Same => {
        for (variable, given, name, expected) in [
            ("AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD", "4", "prefillLoadImbalanceMinSpread", json!(4)),
            ("AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD", "4", "decodeLoadImbalanceMinSpread", json!(4.0)),
            (
                "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD",
                "100",
                "decodeThroughputImbalanceMinSpread",
                json!(100.0),
            ),
            ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", "2", "decodeScoreRatioThreshold", json!(2.0)),
        ] {
            assert_eq!(parameter(variable, given, name), expected, "{variable}");
        }
    }
    weights: "`AIBRIX_DECODE_LB_WEIGHT_RUNNING`, `AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT`",
        "1 each", Same => {
        assert_eq!(parameter("AIBRIX_DECODE_LB_WEIGHT_RUNNING", "2", "decodeLBWeightRunning"), 2.0);
        assert_eq!(parameter("AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", "3", "decodeLBWeightThroughput"), 3.0);
    }
    bucketing: "`AIBRIX_PROMPT_LENGTH_BUCKETING`",
        "off; servers take prompts of their lengths", Same => {
        assert_eq!(parameter("AIBRIX_PROMPT_LENGTH_BUCKETING", "true", "promptLengthBucketing"), true);
    }
    pd_deviation: "`AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR` with `pd`",
        "prefill servers above mean and deviations are skipped", Same => {
        assert_eq!(parameter("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "1", "standardDeviationFactor"), 1.0);
    }
}
