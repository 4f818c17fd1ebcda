//! The shape of each object: Kubernetes' own kinds by their types in `k8s-openapi`, without unknown fields, and other
//! kinds by the schemas in tests/data/kubernetes.

use super::render::{Rendered, all, documents, list, text};
use attache_discovery::kube::objects::{FromObject, InferenceModel, InferencePool, Meta, Object, Objective, Rewrite};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;

const SCHEMAS: &str = include_str!("../../data/kubernetes/schemas.yaml");
const POOLS: &str = include_str!("../../data/kubernetes/inferencepools.yaml");
const EXPERIMENTAL: &str = include_str!("../../data/kubernetes/experimental.yaml");

/// The problem of an object, if any.
pub(crate) fn check(object: &Value) -> Result<(), String> {
    metadata(&object["metadata"])?;
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    match core(version, kind, object) {
        Some(result) => result,
        None => {
            let schema = schema(version, kind).ok_or_else(|| format!("{version} {kind} is not a known kind"))?;
            let known = ["apiVersion", "kind", "metadata", "spec"];
            for key in object.as_object().into_iter().flat_map(|o| o.keys()) {
                known.contains(&key.as_str()).then_some(()).ok_or_else(|| format!("{key} is unknown"))?;
            }
            by_schema("spec", &object["spec"], &schema)
        }
    }
}

fn metadata(metadata: &Value) -> Result<(), String> {
    let mut name = metadata["name"].clone();
    // Names of Roles and their bindings may have any characters of a URL path.
    name = name.as_str().map_or(name.clone(), |name| Value::from(name.replace(':', "-")));
    by_schema("metadata.name", &name, &serde_json::json!({"type": "string", "maxLength": 253, "pattern": "name"}))?;
    let labels = serde_json::json!({
        "type": "object", "additionalProperties": {"type": "string", "maxLength": 63, "pattern": "label"}
    });
    if metadata["labels"].is_null() { Ok(()) } else { by_schema("metadata.labels", &metadata["labels"], &labels) }
}

/// Checks a kind that is built into the API server.
fn core(version: &str, kind: &str, object: &Value) -> Option<Result<(), String>> {
    use k8s_openapi::api::{apps, autoscaling, core, networking, policy, rbac};
    Some(match (version, kind) {
        ("v1", "ConfigMap") => typed::<core::v1::ConfigMap>(object),
        ("v1", "Secret") => typed::<core::v1::Secret>(object),
        ("v1", "Service") => typed::<core::v1::Service>(object),
        ("v1", "ServiceAccount") => typed::<core::v1::ServiceAccount>(object),
        ("apps/v1", "Deployment") => typed::<apps::v1::Deployment>(object),
        ("apps/v1", "StatefulSet") => typed::<apps::v1::StatefulSet>(object),
        ("autoscaling/v2", "HorizontalPodAutoscaler") => typed::<autoscaling::v2::HorizontalPodAutoscaler>(object),
        ("networking.k8s.io/v1", "NetworkPolicy") => typed::<networking::v1::NetworkPolicy>(object),
        ("policy/v1", "PodDisruptionBudget") => typed::<policy::v1::PodDisruptionBudget>(object),
        ("rbac.authorization.k8s.io/v1", "Role") => typed::<rbac::v1::Role>(object),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => typed::<rbac::v1::RoleBinding>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => typed::<rbac::v1::ClusterRole>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => typed::<rbac::v1::ClusterRoleBinding>(object),
        _ => return None,
    })
}

/// Reads the object as its type and writes it again: lost fields are unknown ones.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let read: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    let again = serde_json::to_value(read).map_err(|error| error.to_string())?;
    check_nothing_lost("", object, &again)
}

fn check_nothing_lost(path: &str, given: &Value, read: &Value) -> Result<(), String> {
    match (given, read) {
        (Value::Object(given), Value::Object(read)) => given.iter().try_for_each(|(key, value)| {
            let path = format!("{path}.{key}");
            match read.get(key) {
                Some(read) => check_nothing_lost(&path, value, read),
                // Empty objects may be left out.
                None if value.as_object().is_some_and(serde_json::Map::is_empty) => Ok(()),
                None => Err(format!("{path} is unknown")),
            }
        }),
        (Value::Array(given), Value::Array(read)) if given.len() == read.len() => given
            .iter()
            .zip(read)
            .enumerate()
            .try_for_each(|(i, (g, r))| check_nothing_lost(&format!("{path}[{i}]"), g, r)),
        (given, read) if given == read => Ok(()),
        (given, read) => Err(format!("{path} is {given} and is read as {read}")),
    }
}

fn schema(version: &str, kind: &str) -> Option<Value> {
    let mut all = documents("schemas.yaml", SCHEMAS).into_iter();
    all.find(|schema| schema["apiVersion"] == version && schema["kind"] == kind).map(|schema| schema["spec"].clone())
}

/// Checks a value by the subset of OpenAPI that CRDs use.
pub(crate) fn by_schema(path: &str, value: &Value, schema: &Value) -> Result<(), String> {
    let right = match text(&schema["type"]) {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64(),
        "boolean" => value.is_boolean(),
        other => panic!("a schema of type {other}"),
    };
    right.then_some(()).ok_or_else(|| format!("{path} is not of type {}", text(&schema["type"])))?;
    match value {
        Value::Object(fields) => object(path, fields, schema),
        Value::Array(items) => {
            length(path, items.len(), &schema["minItems"], &schema["maxItems"])?;
            let different: BTreeSet<String> = items.iter().map(Value::to_string).collect();
            if schema["uniqueItems"] == true && different.len() < items.len() {
                return Err(format!("{path} has the same item twice"));
            }
            items
                .iter()
                .enumerate()
                .try_for_each(|(i, item)| by_schema(&format!("{path}[{i}]"), item, &schema["items"]))
        }
        Value::String(word) => string(path, word, schema),
        Value::Number(number) => {
            let (low, high) = (schema["minimum"].as_i64(), schema["maximum"].as_i64());
            let number = number.as_i64().unwrap_or_default();
            let inside = low.is_none_or(|low| number >= low) && high.is_none_or(|high| number <= high);
            let allowed = || format!("{path} is out of {} to {}", schema["minimum"], schema["maximum"]);
            inside.then_some(()).ok_or_else(allowed)
        }
        _ => Ok(()),
    }
}

fn object(path: &str, fields: &serde_json::Map<String, Value>, schema: &Value) -> Result<(), String> {
    length(path, fields.len(), &schema["minProperties"], &schema["maxProperties"])?;
    let (properties, others) = (&schema["properties"], schema.get("additionalProperties"));
    if let Some(key) = fields.keys().find(|key| others.is_none() && properties.get(key).is_none()) {
        return Err(format!("{path}.{key} is unknown"));
    }
    for required in list(&schema["required"]) {
        fields.get(text(required)).ok_or_else(|| format!("{path}.{} is missing", text(required)))?;
    }
    let service = fields.get("kind").is_none_or(|kind| kind == "Service");
    if schema["portUnlessOtherKind"] == true && service && !fields.contains_key("port") {
        return Err(format!("{path}.port is missing"));
    }
    fields.iter().try_for_each(|(key, value)| {
        let schema = properties.get(key).or(others);
        schema.map_or(Ok(()), |schema| by_schema(&format!("{path}.{key}"), value, schema))
    })
}

fn length(path: &str, length: usize, least: &Value, most: &Value) -> Result<(), String> {
    let length = length as u64;
    match (least.as_u64(), most.as_u64()) {
        (Some(least), _) if length < least => Err(format!("{path} has fewer than {least}")),
        (_, Some(most)) if length > most => Err(format!("{path} has more than {most}")),
        _ => Ok(()),
    }
}

fn string(path: &str, word: &str, schema: &Value) -> Result<(), String> {
    length(path, word.chars().count(), &schema["minLength"], &schema["maxLength"])?;
    let options = list(&schema["enum"]);
    if !options.is_empty() && !options.iter().any(|option| option == word) {
        return Err(format!("{path} is none of {options:?}"));
    }
    let Some(pattern) = schema["pattern"].as_str() else { return Ok(()) };
    let ends = |word: &str, inner: &str, edge: fn(char) -> bool| {
        word.chars().all(|c| edge(c) || inner.contains(c)) && word.starts_with(edge) && word.ends_with(edge)
    };
    let right = match pattern {
        "label" => word.is_empty() || ends(word, "-_.", |c| c.is_ascii_alphanumeric()),
        "name" => word.split('.').all(|part| ends(part, "-", |c| c.is_ascii_lowercase() || c.is_ascii_digit())),
        "duration" => {
            let number = word.trim_end_matches(['h', 'm', 's']);
            number.len() < word.len() && !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
        }
        other => panic!("a pattern called {other}"),
    };
    right.then_some(()).ok_or_else(|| format!("{path} does not look like a {pattern}: {word:?}"))
}

#[test]
fn every_rendered_object_is_valid() {
    for Rendered { name, objects } in all() {
        assert!(objects.len() >= 7, "{name}: only {} objects", objects.len());
        let mut seen = BTreeSet::new();
        for object in objects {
            let called = format!("{} {}", object["kind"], object["metadata"]["name"]);
            check(object).unwrap_or_else(|problem| panic!("{name}: {called}: {problem}"));
            assert!(seen.insert(called.clone()), "{name}: {called} twice");
        }
    }
}

/// Objects, each with its problem, if any.
fn cases() -> Vec<(Value, Option<String>)> {
    let read = |text: &str, version: &str| -> Vec<(Value, Option<String>)> {
        let cases: Vec<Value> = serde_saphyr::from_str(text).expect("cases");
        let case = |case: Value| {
            let kind = case["kind"].as_str().unwrap_or("InferencePool");
            let object = serde_json::json!({"apiVersion": version, "kind": kind, "metadata": {"name": "p"}, "spec": case["spec"]});
            (object, case["problem"].as_str().map(str::to_owned))
        };
        cases.into_iter().map(case).collect()
    };
    let mut all = read(POOLS, "inference.networking.k8s.io/v1");
    all.extend(read(EXPERIMENTAL, "inference.networking.x-k8s.io/v1alpha2"));
    all
}

#[test]
fn checks_find_the_problem_of_each_invalid_object() {
    let mut kinds = BTreeSet::new();
    for (object, problem) in cases() {
        kinds.insert((object["apiVersion"].to_string(), object["kind"].to_string(), problem.is_some()));
        let found = check(&object).err();
        match (&found, &problem) {
            (None, None) => {}
            (Some(found), Some(problem)) if found.starts_with(problem) => {}
            _ => panic!("{object}: {found:?} in place of {problem:?}"),
        }
    }
    assert_eq!(kinds.len(), 2 * 5, "of five kinds good ones and bad ones");
}

/// The picker accepts all objects that the CRDs allow. The API server rejects others, so the picker may accept more.
#[test]
fn picker_reads_every_object_that_the_crds_allow() {
    let good: Vec<Value> =
        cases().into_iter().filter(|(_, problem)| problem.is_none()).map(|(object, _)| object).collect();
    assert!(good.len() > 12);
    for given in good {
        let meta = Meta { name: "p".into(), ..Meta::default() };
        let object = Object { meta, spec: given["spec"].clone(), status: Value::Null };
        let read = match text(&given["kind"]) {
            "InferencePool" => InferencePool::from_object(object).map(drop),
            "InferenceObjective" => Objective::from_object(object).map(drop),
            "InferenceModelRewrite" => Rewrite::from_object(object).map(drop),
            "InferenceModel" => InferenceModel::from_object(object).map(drop),
            other => panic!("nobody reads {other}"),
        };
        assert_eq!(read, Ok(()), "{given}");
    }
}

#[test]
fn checks_find_misspelt_fields_of_known_kinds() {
    let service = |spec: Value| serde_json::json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": spec});
    let good = serde_json::json!({"ports": [{"port": 9002, "targetPort": "grpc"}]});
    assert_eq!(check(&service(good)), Ok(()));
    let misspelt = check(&service(serde_json::json!({"ports": [{"port": 9002, "targetport": "grpc"}]})));
    assert_eq!(misspelt, Err(".spec.ports[0].targetport is unknown".to_owned()));
    let wrong = check(&service(serde_json::json!({"ports": [{"port": "9002"}]})));
    assert!(wrong.is_err_and(|error| error.contains("invalid type")));
    let name = serde_json::json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "S_s"}});
    assert!(check(&name).is_err_and(|error| error.starts_with("metadata.name does not look like a name")));
    let unknown = serde_json::json!({"apiVersion": "v2", "kind": "Service", "metadata": {"name": "s"}});
    assert!(check(&unknown).is_err_and(|error| error.ends_with("is not a known kind")));
}
