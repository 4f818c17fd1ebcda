//! `spec.criticality`: shedding, dispatch order, and fair sharing of a pool between models.

use super::super::{Here, rows};
use super::*;
use std::time::Duration;

/// Flow control for a pool that takes one request at a time and dispatches each band in order of arrival.
const ONE_AT_A_TIME: &str = "flowControl: {enabled: true, defaultBand: {ordering: {name: fcfs}}, \
                             detector: {name: concurrency-detector, parameters: {maxConcurrency: 1}}}";

fn of(criticality: &str) -> Value {
    json!({"criticality": criticality})
}

/// The models of these requests in the order in which the picker dispatches them.
async fn dispatch_order(streams: Vec<(&'static str, Stream)>) -> Vec<&'static str> {
    let (dispatched, mut models) = tokio::sync::mpsc::unbounded_channel();
    for (model, mut stream) in streams {
        let dispatched = dispatched.clone();
        tokio::spawn(async move {
            outcome(&mut stream).await.destination();
            // The end of the stream frees its capacity.
            let _ = dispatched.send(model);
        });
    }
    drop(dispatched);
    let mut order = Vec::new();
    while let Some(model) = models.recv().await {
        order.push(model);
    }
    order
}

/// Sends one request for each model. Each is queued before the next is sent.
async fn queued_requests(
    picker: &AttacheProcess,
    connection: &Connection,
    models: &[&'static str],
) -> Vec<(&'static str, Stream)> {
    let mut streams = Vec::new();
    for model in models {
        streams.push((*model, sent(connection, model, &[], None).await));
        picker.until_metric("attache_queued_requests", streams.len() as f64).await;
    }
    streams
}

rows! { ROWS;
    sheddable_requests_are_rejected_first:
    "`criticality: Sheddable`", "shed before all others in constrained situations", Here::Same => {
        let models = [("batch", 1, of("Sheddable")), ("chat", 2, of("Standard"))];
        let api = cluster(&models).await;
        let by_flags = started(&api, &FLAGS).await;
        let by_file = configured(&api, "scrape: {staleAfter: 5s}").await;
        for (_picker, connection) in [by_flags, by_file] {
            assert_eq!(target(&connection, "batch").await, "batch", "the pool is idle");
            let open = unanswered(&connection, "chat", 6).await;
            let (status, message) = refused(pick(&connection, "batch").await);
            assert_eq!(status, 429, "{message}");
            drop(open);
            eventually("the pool to be idle", || async {
                matches!(pick(&connection, "batch").await, Picked::Endpoint { .. }).then_some(())
            })
            .await;
        }
    }

    standard_and_critical_requests_pass_without_queues:
    "`criticality: Standard` and `Critical` without queues", "shed after all Sheddable requests", Here::Differs {
        default: "never shed: they go on to the model servers",
        exact: "`flowControl: {enabled: true}`: they wait, and with `ttl` a request that waits longer gets a 503",
    } => {
        let models = [("chat", 1, of("Standard")), ("urgent", 2, of("Critical"))];
        let api = cluster(&models).await;
        let (_picker, connection) = started(&api, &FLAGS).await;
        let _open = unanswered(&connection, "chat", 6).await;
        for model in ["chat", "urgent"] {
            assert_eq!(target(&connection, model).await, model);
        }
        let (picker, connection) = configured(&api, &ONE_AT_A_TIME.replace("enabled: true", "enabled: true, ttl: 100ms")).await;
        let _open = unanswered(&connection, "chat", 1).await;
        assert_eq!(refused(pick(&connection, "chat").await).0, 503);
        drop(picker);
    }

    critical_requests_leave_the_queue_first:
    "`criticality: Critical` with queues", "shed last: Standard requests wait or are shed before it", Here::Differs {
        default: "no queues, so nobody waits",
        exact: "`flowControl: {enabled: true}`: of the requests that wait the most critical go first",
    } => {
        let models = [("batch", 1, of("Sheddable")), ("chat", 2, of("Standard")), ("urgent", 3, of("Critical"))];
        let api = cluster(&models).await;
        let (picker, connection) = configured(&api, ONE_AT_A_TIME).await;
        let open = unanswered(&connection, "chat", 1).await;
        let streams = queued_requests(&picker, &connection, &["batch", "chat", "urgent"]).await;
        drop(open);
        assert_eq!(dispatch_order(streams).await, ["urgent", "chat", "batch"]);
    }

    a_model_without_criticality_is_standard:
    "no `criticality`", "optional, without a default", Here::Differs {
        default: "as `Standard`: not shed, and after `Critical`",
        exact: "name the criticality",
    } => {
        let api = cluster(&[("plain", 1, json!({})), ("urgent", 2, of("Critical")), ("chat", 3, of("Standard"))]).await;
        let (picker, connection) = configured(&api, ONE_AT_A_TIME).await;
        let open = unanswered(&connection, "chat", 1).await;
        let streams = queued_requests(&picker, &connection, &["plain", "urgent"]).await;
        drop(open);
        assert_eq!(dispatch_order(streams).await, ["urgent", "plain"]);
    }

    models_of_equal_criticality_share_token_throughput:
    "InferenceModels of equal criticality", "fairly share resources over throughput of tokens", Here::Differs {
        default: "no queues, so nothing is shared",
        exact: "`flowControl: {enabled: true}`: each InferenceModel is a flow, and `vtc-fair` shares tokens between flows. \
                Requests with a tenant or a trusted fairness id are of that flow instead. \
                In a file of kind EndpointPickerConfig, name `vtc-fair`: its default is llm-d's `global-strict`",
    } => {
        let api = cluster(&[("busy", 1, json!({})), ("quiet", 2, json!({}))]).await;
        let fair = ONE_AT_A_TIME.replace("ordering:", "fairness: {name: vtc-fair}, ordering:");
        let (picker, connection) = configured(&api, &fair).await;
        let open = unanswered(&connection, "busy", 1).await;
        let streams = queued_requests(&picker, &connection, &["busy", "busy", "busy", "quiet"]).await;
        drop(open);
        let order = dispatch_order(streams).await;
        let at = order.iter().position(|model| *model == "quiet").expect("a turn");
        assert!(at <= 1, "{order:?}");
        tokio::time::timeout(Duration::from_secs(10), picker.until_metric("attache_queued_requests", 0.0)).await.expect("empty queues");
    }

    positive_objective_warns_without_trusted_client_headers:
    "a priority above 0 of an InferenceObjective, by the header `x-gateway-inference-objective` of a request",
    "GIE's later API: the request goes before others",
    Here::Warns { instead: "`--trust-client-headers`, where the gateway keeps strangers from setting the header. A priority below 0 always counts" } => {
        let api = cluster(&[]).await;
        api.install(EXPERIMENTAL, "inferenceobjectives");
        let objective = object("urgent", 1, json!({"poolRef": {"name": "vllm"}, "priority": 5}));
        api.apply(EXPERIMENTAL, "inferenceobjectives", objective);
        let (picker, connection) = started(&api, &FLAGS).await;
        assert_eq!(target(&connection, "m").await, "m");
        let line = until_logged(&picker, "InferenceObjectives with a priority above 0 have no effect").await;
        assert!(line.contains("--trust-client-headers"), "{line}");
    }

    unknown_criticality_is_logged_and_not_served:
    "another `criticality`", "not allowed by the CRD", Here::Same => {
        let (_api, picker, connection) = world(&[("m", 1, json!({})), ("odd", 2, of("Urgent"))]).await;
        assert_eq!(refused(pick(&connection, "odd").await).0, 404);
        until_logged(&picker, "`spec.criticality`: got `Urgent`").await;
    }
}
