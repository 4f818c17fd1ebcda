//! `InferenceModel`: names and targets.

use super::super::{Here, rows};
use super::*;

rows! { ROWS;
    a_request_is_routed_by_the_name_of_its_model:
    "`spec.modelName`", "the `model` of requests; the examples of the proposal leave it to the object's name", Here::Same => {
        let (_api, _picker, connection) = world(&[
            ("sql-code-assist", 1, json!({})),
            ("object", 2, json!({"modelName": "npc-bot", "targetModels": [{"name": "npc-bot-v1"}]})),
        ])
        .await;
        assert_eq!(target(&connection, "sql-code-assist").await, "sql-code-assist");
        assert_eq!(target(&connection, "npc-bot").await, "npc-bot-v1");
        assert_eq!(refused(pick(&connection, "object").await).0, 404, "the object has another name");
    }

    targets_share_requests_by_their_weights:
    "`spec.targetModels` with `weight`", "requests are split between models or LoRA adapters of the same pool", Here::Same => {
        let targets = json!([{"name": "npc-bot-v1", "weight": 50}, {"name": "npc-bot-v2", "weight": 50}]);
        let canary = json!([{"name": "old", "weight": 1}, {"name": "new", "weight": 0}]);
        let (_api, _picker, connection) = world(&[
            ("npc-bot", 1, json!({"targetModels": targets})),
            ("canary", 2, json!({"targetModels": canary})),
        ])
        .await;
        let mut first = 0;
        for _ in 0..200 {
            first += usize::from(target(&connection, "npc-bot").await == "npc-bot-v1");
        }
        // Five standard deviations of 200 fair draws are 35.
        assert!((65..=135).contains(&first), "{first} of 200");
        for _ in 0..20 {
            assert_eq!(target(&connection, "canary").await, "old");
        }
    }

    model_name_is_the_target_by_default:
    "no `spec.targetModels`", "the target is the `modelName`", Here::Same => {
        let (_api, _picker, connection) = world(&[("m", 1, json!({"modelName": "llama", "targetModels": []}))]).await;
        assert_eq!(target(&connection, "llama").await, "llama");
    }

    model_without_an_object_is_rejected:
    "a model that no InferenceModel of the pool names", "the request is rejected", Here::Same => {
        let (_api, _picker, connection) = world(&[("m", 1, json!({}))]).await;
        let (status, message) = refused(pick(&connection, "n").await);
        assert_eq!((status, &*message), (404, "the model `n` does not exist; known models: m"));
    }

    oldest_object_owns_the_model_name:
    "two InferenceModels of one `modelName`", "the one with the oldest creation timestamp is retained", Here::Same => {
        let to = |target: &str| json!({"modelName": "m", "targetModels": [{"name": target}]});
        let (api, picker, connection) = world(&[("a", 9, to("young")), ("b", 2, to("old"))]).await;
        assert_eq!(target(&connection, "m").await, "old");
        until_logged(&picker, "the model name `m` is the older InferenceModel `b`'s").await;
        api.delete(EXPERIMENTAL, MODELS, "b");
        eventually("the next oldest", || async { (target(&connection, "m").await == "young").then_some(()) }).await;
    }

    reserved_name_has_its_own_error:
    "a name reserved by target models of weight 0", "an error says that no valid target model is found", Here::Same => {
        let reserved = json!({"targetModels": [{"name": "soon-v1", "weight": 0}]});
        let (_api, _picker, connection) = world(&[("soon", 1, reserved)]).await;
        let (status, message) = refused(pick(&connection, "soon").await);
        assert_eq!(status, 404);
        assert!(message.contains("no valid target model is found"), "{message}");
    }

    model_names_are_unique_per_pool:
    "`spec.poolRef.name`", "names are unique in a pool; other pools may use them again", Here::Same => {
        let to = |pool: &str, target: &str| {
            json!({"modelName": "m", "poolRef": {"name": pool}, "targetModels": [{"name": target}]})
        };
        let (_api, _picker, connection) = world(&[("a", 1, to("another", "theirs")), ("b", 2, to("vllm", "ours"))]).await;
        assert_eq!(target(&connection, "m").await, "ours");
    }

    object_for_another_api_group_has_no_effect:
    "`spec.poolRef.group`", "the API group of the pool; in GIE v1 an object for another group has no effect", Here::Same => {
        let to = |group: &str, target: &str| {
            json!({"modelName": "m", "poolRef": {"name": "vllm", "group": group}, "targetModels": [{"name": target}]})
        };
        let (_api, picker, connection) =
            world(&[("a", 1, to("inference.networking.k8s.io", "theirs")), ("b", 2, to(GROUP, "ours"))]).await;
        assert_eq!(target(&connection, "m").await, "ours");
        let line = until_logged(&picker, "names the pool in another API group").await;
        assert!(line.contains("\"object\":\"a\"") && line.contains("inference.networking.k8s.io"), "{line}");
    }

    pool_ref_kind_must_be_inference_pool:
    "`spec.poolRef.kind`", "`InferencePool`", Here::Same => {
        let service = json!({"modelName": "n", "poolRef": {"name": "vllm", "kind": "Service"}});
        let kind = json!({"modelName": "m", "poolRef": {"name": "vllm", "kind": "InferencePool"}});
        let (_api, picker, connection) = world(&[("a", 1, service), ("b", 2, kind)]).await;
        assert_eq!(target(&connection, "m").await, "m");
        assert_eq!(refused(pick(&connection, "n").await).0, 404);
        until_logged(&picker, "`spec.poolRef.kind`: got `Service`, only `InferencePool` is allowed").await;
    }

    objects_of_other_namespaces_have_no_effect:
    "the namespace of an InferenceModel", "its pool is in the same namespace", Here::Same => {
        let api = cluster(&[("m", 1, json!({}))]).await;
        let mut elsewhere = object("n", 1, json!({"poolRef": {"name": "vllm"}}));
        elsewhere["metadata"]["namespace"] = json!("another");
        api.apply(EXPERIMENTAL, MODELS, elsewhere);
        let (_picker, connection) = started(&api, &FLAGS).await;
        assert_eq!(target(&connection, "m").await, "m");
        assert_eq!(refused(pick(&connection, "n").await).0, 404);
    }
}
