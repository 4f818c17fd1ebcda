//! The conditions in the status of InferenceModels.

use super::super::{Here, rows};
use super::*;
use crate::support::grpc::message;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Event;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, HttpHeaders};

/// The condition of this type, `Null` where the object has none.
fn condition(api: &FakeApi, name: &str, kind: &str) -> Value {
    let object = api.get(EXPERIMENTAL, MODELS, name).unwrap_or_default();
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == kind).unwrap_or_default()
}

/// Waits until the condition of this type has this status and reason, and returns its message.
async fn until_condition(api: &FakeApi, name: &str, kind: &str, status: &str, reason: &str) -> String {
    eventually(&format!("{name} to have the condition {kind} {status} {reason}"), || async {
        let found = condition(api, name, kind);
        (found["status"] == status && found["reason"] == reason)
            .then(|| found["message"].as_str().unwrap_or("").to_owned())
    })
    .await
}

/// Sends a server's response to the request of `stream`.
async fn respond(stream: &mut Stream, status: &str, body: &str) {
    let header = HeaderValue { key: ":status".into(), raw_value: status.into(), ..HeaderValue::default() };
    let headers = Some(HeaderMap { headers: vec![header] });
    stream
        .send(&message(Event::ResponseHeaders(HttpHeaders { headers, ..HttpHeaders::default() })))
        .expect("sending headers");
    stream.answer().await.expect("an answer");
    let body = HttpBody { body: body.into(), end_of_stream: true, ..HttpBody::default() };
    stream.send(&message(Event::ResponseBody(body))).expect("sending the body");
    stream.answer().await.expect("an answer");
}

rows! { ROWS;
    valid_model_is_accepted_and_ready:
    "`Accepted` and `Ready`", "the conditions of an InferenceModel", Here::Differs {
        default: "both, with a reason each, by every replica whose rights allow it (`patch` on `inferencemodels/status`)",
        exact: "`--model-status=true`: only the replica that holds a lease writes; `--model-status=false`: none does",
    } => {
        let (api, picker, _connection) = world(&[("m", 1, json!({}))]).await;
        until_condition(&api, "m", "Accepted", "True", "Accepted").await;
        until_condition(&api, "m", "Ready", "True", "Ready").await;
        picker.until_metric("attache_kube_status_writes_total", 1.0).await;
        let second = started(&api, &FLAGS).await.0;
        let silent = started(&api, &[&FLAGS[..], &["--model-status=false"]].concat()).await.0;
        apply_model(&api, "n", 2, json!({}));
        until_condition(&api, "n", "Ready", "True", "Ready").await;
        assert_eq!(silent.metric("attache_kube_status_writes_total").await, 0.0);
        assert!(second.metric("attache_kube_status_writes_total").await <= 1.0, "what is written already is not written again");
    }

    missing_patch_right_is_logged_once:
    "missing rights", "not defined", Here::Differs {
        default: "one line of the log names the right; requests are routed all the same",
        exact: "allow `patch` on `inferencemodels/status`",
    } => {
        let api = cluster(&[("m", 1, json!({})), ("n", 1, json!({}))]).await;
        api.forbid("patch", MODELS, true);
        let (picker, connection) = started(&api, &FLAGS).await;
        until_logged(&picker, "lacks `patch` on `inferencemodels/status`").await;
        assert_eq!(target(&connection, "m").await, "m");
        assert_eq!(api.request_count("patch", MODELS), 1, "it is not tried again at once");
    }

    a_younger_object_is_not_ready:
    "a younger InferenceModel of the same `modelName`", "its Ready status is False, with a reason", Here::Same => {
        let of = || json!({"modelName": "m"});
        let (api, _picker, _connection) = world(&[("old", 1, of()), ("young", 2, of())]).await;
        let message = until_condition(&api, "young", "Ready", "False", "ModelNameInUse").await;
        assert_eq!(message, "the model name `m` is the older InferenceModel `old`'s");
        until_condition(&api, "young", "Accepted", "False", "ModelNameInUse").await;
        until_condition(&api, "old", "Ready", "True", "Ready").await;
    }

    a_reserved_name_is_accepted_and_not_ready:
    "a reserved name", "not defined", Here::Differs {
        default: "`Accepted` is True and `Ready` is False with the reason `NoTargetModel`",
        exact: "give a target model a weight above 0",
    } => {
        let (api, _picker, _connection) = world(&[("soon", 1, json!({"targetModels": [{"name": "v1", "weight": 0}]}))]).await;
        until_condition(&api, "soon", "Accepted", "True", "Accepted").await;
        let message = until_condition(&api, "soon", "Ready", "False", "NoTargetModel").await;
        assert!(message.contains("every target model has the weight 0"), "{message}");
    }

    invalid_object_gets_conditions_that_name_the_field:
    "an InferenceModel that can't be read", "not defined", Here::Differs {
        default: "both conditions are False with the reason `Invalid`; the message names the field",
        exact: "correct the field: until then, what was known of the object stays in effect",
    } => {
        let (api, _picker, connection) = world(&[("m", 1, json!({"targetModels": [{"name": "v1"}]}))]).await;
        until_condition(&api, "m", "Ready", "True", "Ready").await;
        apply_model(&api, "m", 1, json!({"criticality": "Urgent", "targetModels": [{"name": "v2"}]}));
        let message = until_condition(&api, "m", "Ready", "False", "Invalid").await;
        assert!(message.contains("`spec.criticality`: got `Urgent`"), "{message}");
        assert_eq!(target(&connection, "m").await, "v1");
    }

    replicas_keep_a_condition_that_another_wrote:
    "a missing target of which one of several replicas knows", "not defined", Here::Differs {
        default: "the others keep the condition; it goes when servers have served the model through one of them for a minute",
        exact: "`--model-status=true`: one replica writes, and knows its own requests alone",
    } => {
        let (api, _picker, connection) = world(&[("m", 1, json!({"targetModels": [{"name": "m-v2"}]}))]).await;
        let (_second, other) = started(&api, &FLAGS).await;
        until_condition(&api, "m", "Ready", "True", "Ready").await;
        assert_eq!(target(&other, "m").await, "m-v2");
        let mut stream = sent(&connection, "m", &[], None).await;
        outcome(&mut stream).await.destination();
        respond(&mut stream, "404", r#"{"error":{"message":"The model `m-v2` does not exist.","code":404}}"#).await;
        until_condition(&api, "m", "Ready", "False", "TargetModelNotFound").await;
        let since = condition(&api, "m", "Ready")["lastTransitionTime"].clone();
        // Both replicas have seen these later objects, so they have written all their changes of `m`.
        for name in ["x", "y"] {
            apply_model(&api, name, 2, json!({}));
            until_condition(&api, name, "Ready", "True", "Ready").await;
            eventually("both to know it", || async { matches!(pick(&other, name).await, Picked::Endpoint { .. }).then_some(()) }).await;
        }
        let ready = condition(&api, "m", "Ready");
        assert_eq!((&ready["reason"], &ready["lastTransitionTime"]), (&json!("TargetModelNotFound"), &since), "{ready}");
    }

    missing_target_model_is_reported_in_the_status:
    "a target model that does not exist at request time", "the error is emitted on the status of the InferenceModel", Here::Same => {
        let (api, _picker, connection) = world(&[("m", 1, json!({"targetModels": [{"name": "m-v2"}]}))]).await;
        until_condition(&api, "m", "Ready", "True", "Ready").await;
        let denial = r#"{"error":{"message":"The model `m-v2` does not exist.","type":"NotFoundError","code":404}}"#;
        for (status, body) in [("404", r#"{"detail":"Not Found"}"#), ("500", denial), ("200", denial)] {
            let mut stream = sent(&connection, "m", &[], None).await;
            outcome(&mut stream).await.destination();
            respond(&mut stream, status, body).await;
        }
        let mut stream = sent(&connection, "m", &[], None).await;
        outcome(&mut stream).await.destination();
        assert_eq!(condition(&api, "m", "Ready")["status"], "True", "another path's 404 says nothing of the model");
        respond(&mut stream, "404", denial).await;
        let message = until_condition(&api, "m", "Ready", "False", "TargetModelNotFound").await;
        assert_eq!(message, "a model server has answered that it has no model `m-v2`");
        assert_eq!(condition(&api, "m", "Accepted")["status"], "True");
    }
}
