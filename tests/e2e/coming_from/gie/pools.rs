//! `InferencePool`.

use super::super::{Here, rows};
use super::*;
use crate::api::picks::{known, until_known};
use crate::api::{STABLE, pool};

rows! { ROWS;
    pods_of_the_selector_are_endpoints:
    "`spec.selector`", "a map of labels; pods of the namespace that have them are the pool's", Here::Same => {
        let (api, picker, _connection) = world(&[]).await;
        let mut elsewhere = pod("elsewhere", "vllm", "10.0.0.8");
        elsewhere["metadata"]["namespace"] = json!("another");
        let mut starting = pod("starting", "vllm", "10.0.0.7");
        starting["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
        for pod in [elsewhere, starting, pod("other", "other", "10.0.0.9"), pod("b", "vllm", "10.0.0.2")] {
            api.pod(pod);
        }
        until_known(&picker, &["a", "b"]).await;
        assert_eq!(known(&picker).await.len(), 2);
    }

    target_port_number_is_the_port_of_pods:
    "`spec.targetPortNumber`, `targetNumber` in the example", "the port of the model servers", Here::Same => {
        for field in ["targetPortNumber", "targetNumber"] {
            let api = cluster(&[]).await;
            let mut pool = proposed_pool("vllm");
            pool["spec"] = json!({"selector": {"app": "vllm"}, field: 8081});
            api.apply(EXPERIMENTAL, "inferencepools", pool);
            let (_picker, connection) = started(&api, &FLAGS).await;
            assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8081", "{field}");
        }
    }

    extension_ref_has_no_effect_on_the_picker:
    "`spec.extensionRef` with `group`, `kind`, `name`, `portNumber` and `failureMode`",
    "read by the gateway: where the picker is, and what happens while it does not answer", Here::Same => {
        let api = cluster(&[]).await;
        let mut pool = proposed_pool("vllm");
        pool["spec"]["extensionRef"] =
            json!({"group": "example.com", "kind": "Picker", "name": "other", "portNumber": 1, "failureMode": "FailOpen"});
        api.apply(EXPERIMENTAL, "inferencepools", pool);
        let (_picker, connection) = started(&api, &FLAGS).await;
        assert_eq!(pick(&connection, "m").await.destination(), "10.0.0.1:8080");
    }

    picker_writes_no_pool_conditions:
    "`status.parentRef` and the conditions `Accepted` and `ResolvedRefs` of a pool",
    "written by the gateway", Here::Same => {
        let (api, picker, connection) = world(&[("m", 1, json!({}))]).await;
        pick(&connection, "m").await.destination();
        picker.until_metric("attache_kube_status_writes_total", 1.0).await;
        assert_eq!(api.request_count("patch", "inferencepools") + api.request_count("update", "inferencepools"), 0);
    }

    new_pools_need_no_new_picker:
    "a picker for each pool", "a new ext-proc deployment is made with each InferencePool", Here::Differs {
        default: "you deploy a picker for a pool, by the Helm chart for example",
        exact: "`--pool-selector`: one deployment serves every pool with these labels, from the moment it is made",
    } => {
        let api = FakeApi::start().await;
        api.install("v1", "configmaps");
        let (_picker, connection) = started(&api, &["--pool-selector", "tier=gold", "--engine=none"]).await;
        let connection = connection.called("late-epp");
        assert_eq!(refused(pick(&connection, "m").await).0, 404);
        let mut late = pool("late", "late", &[8000]);
        late["metadata"]["labels"] = json!({"tier": "gold"});
        late["spec"]["endpointPickerRef"]["name"] = json!("late-epp");
        api.pod(pod("late", "late", "10.0.0.3"));
        api.apply(STABLE, "inferencepools", late);
        eventually("the pool to be served", || async {
            matches!(pick(&connection, "m").await, Picked::Endpoint { .. }).then_some(())
        })
        .await;
    }

    pool_without_models_accepts_all_unless_configured:
    "a pool without InferenceModels", "at least one InferenceModel is needed before a pool accepts traffic", Here::Differs {
        default: "all models are accepted, as GIE does since InferenceModels are optional",
        exact: "`rejectUnknownModels: true` of the pool: a model that no object names gets a 404",
    } => {
        let api = cluster(&[]).await;
        let (_picker, connection) = started(&api, &FLAGS).await;
        assert_eq!(target(&connection, "m").await, "m");
        let (_strict, connection) = configured(&api, "rejectUnknownModels: true").await;
        let (status, message) = refused(pick(&connection, "m").await);
        assert_eq!((status, &*message), (404, "the model `m` does not exist; known models: none"));
        apply_model(&api, "m", 1, json!({}));
        eventually("the model to be served", || async {
            matches!(pick(&connection, "m").await, Picked::Endpoint { .. }).then_some(())
        })
        .await;
    }
}
