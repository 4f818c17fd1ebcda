//! Objects in the form of manifests.

use serde_json::{Value, json};

/// A ready pod of `app` at this address.
pub(crate) fn pod(name: &str, app: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": {"app": app, "pod-template-hash": "5d8f7c9b6d"},
            "managedFields": [{"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
                               "fieldsV1": {"f:status": {"f:podIP": {}}}}],
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "vllm", "image": "vllm/vllm-openai", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
        },
    })
}

/// An `InferencePool` of the stable version, over the pods of `app`.
pub(crate) fn pool(name: &str, app: &str, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|number| json!({"number": number})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": {"app": app}}, "targetPorts": ports,
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"},
        },
    })
}

/// Any object, created at this second of a day.
pub(crate) fn object(name: &str, second: u8, spec: Value) -> Value {
    let created = format!("2026-01-01T00:00:{second:02}Z");
    json!({"metadata": {"name": name, "creationTimestamp": created}, "spec": spec})
}
