//! An InferencePool, its pods, and the Service in its `endpointPickerRef`.

use super::{ANSWER, POOL, UsedPool};
use crate::finding::{Check, Report};
use attache_config::Settings;
use attache_discovery::kube::objects::{FromObject, InferencePool};
use k8s_openapi::api::core::v1::{Pod, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::timeout;

static PODS: Check = Check {
    id: "kubernetes-pods",
    about: "the selector of the pool finds pods, and they are ready",
    why: "Only ready pods are endpoints.",
};
static PORT: Check = Check {
    id: "kubernetes-port",
    about: "the target port of the pool is a port of its containers",
    why: "Requests and scrapes go to a port where nothing listens.",
};
static REFERENCE: Check = Check {
    id: "kubernetes-picker-reference",
    about: "`endpointPickerRef` names a Service and a port of the picker",
    why: "Gateways ask the picker there: without it, they reject requests or choose any pod.",
};
static FAILURE_MODE: Check = Check {
    id: "kubernetes-failure-mode",
    about: "`failureMode` of the pool against the number of pickers",
    why: "With `FailClose`, gateways reject every request while the only picker restarts.",
};

pub(super) const CHECKS: &[&Check] = &[&PODS, &PORT, &REFERENCE, &FAILURE_MODE];

/// How findings name an InferencePool.
pub(super) fn subject(namespace: &str, name: &str) -> String {
    format!("InferencePool {namespace}/{name}")
}

/// A selector of labels in the syntax of the API.
fn joined(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// Checks one InferencePool.
pub(super) async fn check(client: &Client, settings: &Settings, pool: &UsedPool, report: &mut Report) {
    let subject = subject(&pool.namespace, &pool.name);
    let read = match InferencePool::from_object(pool.object.clone()) {
        Ok(read) => read,
        Err(error) => {
            report.push(POOL.error(&subject, format!("it is not valid: {error}"), "correct this field of the object"));
            return;
        }
    };
    report.push(POOL.ok(&subject, "exists"));
    pods(client, &pool.namespace, &joined(&read.labels), &read.ports, &subject, report).await;
    reference(client, settings, pool, &subject, report).await;
}

async fn listed(client: &Client, namespace: &str, selector: &str) -> Result<Vec<Pod>, String> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let params = ListParams::default().labels(selector);
    let list = timeout(ANSWER, api.list(&params)).await.map_err(|_| format!("no answer within {ANSWER:?}"))?;
    list.map(|list| list.items).map_err(|error| error.to_string())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The ports that the containers of a pod declare, with their names.
fn container_ports(pod: &Pod) -> Vec<(Option<String>, i32)> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let ports = containers.flat_map(|container| container.ports.iter().flatten());
    ports.map(|port| (port.name.clone(), port.container_port)).collect()
}

/// Checks the pods that a selector finds, and their ports.
pub(super) async fn pods(
    client: &Client,
    namespace: &str,
    selector: &str,
    ports: &[u16],
    subject: &str,
    report: &mut Report,
) {
    let pods = match listed(client, namespace, selector).await {
        Ok(pods) => pods,
        Err(error) => {
            let fix = "give the account of this check the right to list pods";
            report.push(PODS.unknown(subject, format!("pods can't be listed: {error}"), fix));
            return;
        }
    };
    let waiting: Vec<String> = pods.iter().filter(|pod| !is_ready(pod)).map(ResourceExt::name_any).collect();
    let ready = pods.len() - waiting.len();
    let found = format!("{} pods match `{selector}`, {ready} of them are ready", pods.len());
    report.push(match (pods.len(), waiting.len()) {
        (0, _) => PODS.error(
            subject,
            format!("no pod in {namespace} matches `{selector}`"),
            "correct `spec.selector` of the InferencePool (or `kubernetes.selector`), or the labels of the pods",
        ),
        (_, 0) => PODS.ok(subject, found),
        (all, not_ready) if all == not_ready => PODS.error(
            subject,
            found,
            format!("look at the pods: `kubectl -n {namespace} describe pod {}`", waiting[0]),
        ),
        _ => PODS.warning(subject, found, format!("look at {} by `kubectl describe pod`", waiting.join(", "))),
    });
    let declared: BTreeSet<i32> = pods.iter().flat_map(container_ports).map(|(_, port)| port).collect();
    // Containers need not declare their ports.
    for port in ports.iter().filter(|_| !declared.is_empty()) {
        report.push(match declared.contains(&i32::from(*port)) {
            true => PORT.ok(subject, format!("containers have the port {port}")),
            false => PORT.error(
                subject,
                format!("the target port is {port}, containers have {declared:?}"),
                "correct `spec.targetPorts` of the InferencePool, or `containerPort` of the pods",
            ),
        });
    }
}

/// Checks the Service that the pool names as its endpoint picker.
async fn reference(client: &Client, settings: &Settings, pool: &UsedPool, subject: &str, report: &mut Report) {
    let reference = ["endpointPickerRef", "extensionRef"].into_iter().find_map(|key| pool.object.spec.get(key));
    let Some(reference) = reference else {
        let fix = "set `spec.endpointPickerRef` to the Service of the picker and its port";
        report.push(REFERENCE.warning(subject, "the pool names no picker", fix));
        return;
    };
    let name = reference.get("name").and_then(Value::as_str).unwrap_or_default();
    let number = reference.get("port").and_then(|port| port.get("number")).or_else(|| reference.get("portNumber"));
    let number = number.and_then(Value::as_i64).unwrap_or(9002);
    let api: Api<Service> = Api::namespaced(client.clone(), &pool.namespace);
    let service = match timeout(ANSWER, api.get_opt(name)).await {
        Ok(Ok(Some(service))) => service,
        Ok(Ok(None)) => {
            report.push(REFERENCE.error(
                subject,
                format!("`endpointPickerRef` names the Service {name}, which does not exist in {}", pool.namespace),
                "correct `spec.endpointPickerRef.name`: it is the name of the picker's Service",
            ));
            return;
        }
        Ok(Err(error)) => {
            let fix = "give the account of this check the right to get services";
            report.push(REFERENCE.unknown(subject, format!("the Service {name} can't be read: {error}"), fix));
            return;
        }
        Err(_) => return,
    };
    let spec = service.spec.unwrap_or_default();
    let ports = spec.ports.unwrap_or_default();
    let Some(port) = ports.iter().find(|port| i64::from(port.port) == number) else {
        let own: Vec<i32> = ports.iter().map(|port| port.port).collect();
        report.push(REFERENCE.error(
            subject,
            format!("`endpointPickerRef` names port {number} of the Service {name}, which has {own:?}"),
            "correct `spec.endpointPickerRef.port.number`, or add the port to the Service",
        ));
        return;
    };
    let selector = joined(&spec.selector.unwrap_or_default());
    let pickers = match listed(client, &pool.namespace, &selector).await {
        Ok(pods) => pods,
        Err(error) => {
            let fix = "give the account of this check the right to list pods";
            report.push(REFERENCE.unknown(subject, format!("the pods of {name} can't be listed: {error}"), fix));
            return;
        }
    };
    let ready = pickers.iter().filter(|pod| is_ready(pod)).count();
    let grpc = i32::from(settings.server.grpc_port);
    report.push(match (ready, target(port, &pickers)) {
        (0, _) => REFERENCE.error(
            subject,
            format!("the Service {name} has no ready pod (selector `{selector}`)"),
            "correct `spec.selector` of the Service, or look at the pods of the picker",
        ),
        (_, Some(target)) if target != grpc => REFERENCE.error(
            subject,
            format!("port {number} of the Service {name} leads to port {target}, the picker listens at {grpc}"),
            "correct `targetPort` of the Service, or `server.grpcPort` (`--grpc-port`)",
        ),
        _ => REFERENCE.ok(subject, format!("the Service {name}, port {number}, has {ready} ready pickers")),
    });
    failure_mode(subject, reference, ready, report);
}

/// The port of the pods that a port of a Service leads to; `None` if no pod names it.
fn target(port: &ServicePort, pods: &[Pod]) -> Option<i32> {
    match &port.target_port {
        None => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => {
            let mut ports = pods.iter().flat_map(container_ports);
            ports.find(|(own, _)| own.as_deref() == Some(name)).map(|(_, number)| number)
        }
    }
}

fn failure_mode(subject: &str, reference: &Value, pickers: usize, report: &mut Report) {
    // The API server fills in its default, `FailClose`.
    let mode = reference.get("failureMode").and_then(Value::as_str).unwrap_or("FailClose");
    report.push(match mode == "FailClose" && pickers < 2 {
        true => FAILURE_MODE.warning(
            subject,
            format!("`failureMode` is FailClose, with {pickers} ready pickers"),
            "set `failureMode: FailOpen` in `endpointPickerRef`, or run two pickers",
        ),
        false => FAILURE_MODE.ok(subject, format!("`failureMode` is {mode}, with {pickers} ready pickers")),
    });
}
