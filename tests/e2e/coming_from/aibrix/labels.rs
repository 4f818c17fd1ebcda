//! AIBrix's pod labels and annotations, and its user records.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::rows;
use attache_config::settings::{KubernetesSource, PodsOf};
use attache_discovery::kube::objects::{Meta, Object};
use attache_discovery::kube::state::Members;
use attache_discovery::kube::table::ObjectChange;
use attache_pool::{Endpoint, EndpointSpec, Engine, MetricsSource};
use attache_types::ids::EndpointId;
use serde_json::{Value, json};

/// The endpoints of a pod with these labels and annotations. `ready` is the status of its `Ready` condition.
fn endpoints(labels: &[(&str, &str)], annotations: &[(&str, &str)], ready: &str, deleted: bool) -> Vec<EndpointSpec> {
    let meta = Meta {
        name: "pod-1".into(),
        uid: "uid-1".into(),
        labels: [("app", "vllm")].iter().chain(labels).map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        annotations: annotations.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        deleting: deleted,
        ..Meta::default()
    };
    let status = json!({"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]});
    let mut members = Members::new(
        KubernetesSource {
            namespace: None,
            pods: PodsOf::Selector { selector: "app=vllm".into(), target_ports: Vec::new() },
            engine: Engine::default(),
            metrics: MetricsSource::default(),
            found: false,
        },
        false,
    );
    for change in [
        ObjectChange::ListBegun,
        ObjectChange::Listed(Object { meta, spec: Value::Null, status }),
        ObjectChange::ListDone,
    ] {
        members.pod(change).expect("a pod");
    }
    members.endpoints().expect("a list").iter().map(|spec| (**spec).clone()).collect()
}

fn endpoint(labels: &[(&str, &str)]) -> EndpointSpec {
    endpoints(labels, &[], "True", false).remove(0)
}

rows! { ROWS;
    port: "label `model.aibrix.ai/port`",
        "the port that serves, 8000 by default", Same => {
        assert_eq!(endpoint(&[]).address.port(), 8000);
        assert_eq!(endpoint(&[("model.aibrix.ai/port", "9000")]).address.port(), 9000);
    }
    metric_port: "label `model.aibrix.ai/metric-port`",
        "the port of the metrics", Differs {
            default: "the same; the port that serves by default, where AIBrix has 8000",
            exact: "set the label to 8000",
        } => {
        let url = |labels: &[(&str, &str)]| endpoint(labels).metrics_url();
        assert_eq!(
            url(&[("model.aibrix.ai/metric-port", "9100")]).as_deref(),
            Some("http://10.0.0.1:9100/metrics")
        );
        assert_eq!(url(&[("model.aibrix.ai/port", "9000")]).as_deref(), Some("http://10.0.0.1:9000/metrics"));
    }
    engine: "label `model.aibrix.ai/engine`",
        "`vllm` by default, `sglang`, `trtllm`, `xllm`", Same => {
        for (word, engine) in [
            ("vllm", Engine::Vllm),
            ("sglang", Engine::Sglang),
            ("trtllm", Engine::TrtllmServe),
            ("xllm", Engine::Xllm),
        ] {
            assert_eq!(endpoint(&[("model.aibrix.ai/engine", word)]).engine, engine, "{word}");
        }
        assert_eq!(endpoint(&[]).engine, Engine::Vllm);
    }
    annotations: "annotations that begin with `model.aibrix.ai/`",
        "read beside labels", Same => {
        let annotated =
            endpoints(&[], &[("model.aibrix.ai/sglang-bootstrap-port", "9200")], "True", false).remove(0);
        let port = annotated.labels.get("model.aibrix.ai/sglang-bootstrap-port").map(|value| value.to_string());
        assert_eq!(port.as_deref(), Some("9200"));
    }
    ready_pods: "a pod that is not ready, or is being deleted",
        "gets no request", Same => {
        assert_eq!(endpoints(&[], &[], "True", false).len(), 1);
        assert!(endpoints(&[], &[], "False", false).is_empty() && endpoints(&[], &[], "True", true).is_empty());
    }
    combined: "label `combined: \"true\"`",
        "the server does both stages, with prompt-length bucketing", Same => {
        let is_combined = |spec| Endpoint::new(EndpointId(0), spec).is_combined();
        assert!(is_combined(endpoint(&[("combined", "true")])) && !is_combined(endpoint(&[])));
    }
    users: "header `user`, records `aibrix-users/<name>` in Redis",
        "requests and tokens of a minute; 429 with `x-error-rpm-exceeded`, 500 with `x-error-user` for a user \
            without a record",
        Differs {
            default: "nobody is limited",
            exact: "`exchange.tenant: {header: user}`, and `limits.tenants: {store: redis, userRecords: {unknown: \
                refuse}}`",
        } => {
        {
            use crate::shipped::by_header;
            use crate::support::attache::AttacheProcess;
            use crate::support::body::Payload;
            use crate::support::client::{self, Http};
            use crate::support::echo::Echo;
            use crate::support::envoy::EnvoyProcess;
            use crate::support::redis::RedisProcess;
            let (echo, redis) = (Echo::start().await, RedisProcess::start().await);
            redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":1,"tpm":1000}'"#);
            let picker = AttacheProcess::configured(&format!(
                "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{tenant: {{header: user}}}}\n\
                     limits: {{tenants: {{store: redis, userRecords: {{unknown: refuse}}}}}}\n\
                     redis: {{url: \"{}\", timeout: 5s}}\npools:\n- {{name: a, endpoints: ['{}']}}\n",
                redis.url(),
                echo.address
            ))
            .await;
            picker.until_metric("attache_redis_connected", 1.0).await;
            let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
            let to = envoy.listener("inference");
            let ask = async |user: &'static str| {
                let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
                let target = "/v1/chat/completions?kind=json&size=200";
                let mut request = client::request("POST", to, Http::H1, target, Payload::sized(body.into()));
                request.headers_mut().insert("user", http::HeaderValue::from_static(user));
                client::send(to, Http::H1, request).await.expect("an answer")
            };
            // A minute may end between two of the requests.
            let replies = [ask("acme").await, ask("acme").await, ask("acme").await];
            assert_eq!(replies[0].status, 200);
            let refused = replies.iter().find(|reply| reply.status == 429).expect("a refusal");
            assert_eq!(refused.header("x-error-rpm-exceeded"), "true");
            let unknown = ask("nobody").await;
            assert_eq!((unknown.status.as_u16(), unknown.header("x-error-user")), (500, "true"));
        }
    }
}
