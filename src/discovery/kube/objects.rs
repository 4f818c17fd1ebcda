//! The watched kinds of objects, and the fields that Attaché reads of them.
//!
//! Parsing ignores fields that are not needed, so that objects of newer versions still work. A needed field with an
//! invalid value makes the whole object invalid, with a reason that names the field. Pure.

use super::conditions::{Condition, TYPES};
use attache_pool::source::PoolGroup;
use attache_pool::source::check_ports;
use attache_scheduling::router::RewriteTarget;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// GIE's API group for unstable kinds.
pub const GIE_EXPERIMENTAL: &str = "inference.networking.x-k8s.io";
/// llm-d's API group.
pub const LLM_D: &str = "llm-d.ai";
/// The priority of a model whose criticality is `Critical`: above 0, the default.
pub const CRITICAL_PRIORITY: i32 = 10;
/// The priority of a model whose criticality is `Sheddable`: below 0, so its requests are shed first.
pub const SHEDDABLE_PRIORITY: i32 = -10;

/// The condition of a pod that takes traffic.
const READY: &str = "Ready";

/// A kind of object that Attaché watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObjectKind {
    /// `Pod`.
    Pod,
    /// `InferencePool`.
    Pool(PoolGroup),
    /// `InferenceObjective` of llm-d's group or of GIE's.
    Objective(KindOrigin),
    /// `InferenceModelRewrite` of llm-d's group or of GIE's.
    Rewrite(KindOrigin),
    /// `InferenceModel`, which both replaced.
    Model,
    /// `ConfigMap`.
    ConfigMap,
}

/// The project that defines a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KindOrigin {
    /// llm-d. Where its kind is installed, GIE's is ignored.
    LlmD,
    /// GIE, the Gateway API inference extension.
    Gie,
}

/// The names of a kind in the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiNames {
    /// The API group, empty for the core group.
    pub group: &'static str,
    /// Version of the API group.
    pub version: &'static str,
    /// Name of the kind, as in manifests.
    pub kind: &'static str,
    /// The resource, as RBAC rules name it.
    pub plural: &'static str,
}

impl ObjectKind {
    /// The kinds that define rules for models.
    pub const OF_RULES: [Self; 5] = [
        Self::Objective(KindOrigin::LlmD),
        Self::Objective(KindOrigin::Gie),
        Self::Rewrite(KindOrigin::LlmD),
        Self::Rewrite(KindOrigin::Gie),
        Self::Model,
    ];

    /// The names of this kind in the API.
    #[must_use]
    pub fn naming(self) -> ApiNames {
        let of = |origin| if origin == KindOrigin::LlmD { LLM_D } else { GIE_EXPERIMENTAL };
        let (group, version, kind, plural) = match self {
            Self::Pod => ("", "v1", "Pod", "pods"),
            Self::Pool(group) => (group.as_str(), group.version(), "InferencePool", "inferencepools"),
            Self::Objective(o) => (of(o), "v1alpha2", "InferenceObjective", "inferenceobjectives"),
            Self::Rewrite(o) => (of(o), "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites"),
            Self::Model => (GIE_EXPERIMENTAL, "v1alpha2", "InferenceModel", "inferencemodels"),
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
        };
        ApiNames { group, version, kind, plural }
    }

    /// The RBAC rule that allows a picker to follow this kind.
    #[must_use]
    pub fn role_rule(self) -> String {
        let ApiNames { group, plural, .. } = self.naming();
        let group = if group.is_empty() { "\"\"" } else { group };
        format!("{{apiGroups: [{group}], resources: [{plural}], verbs: [list, watch]}}")
    }

    /// Whether the pool can't be served without this kind. It is then an error if it is not installed.
    #[must_use]
    pub fn is_needed(self) -> bool {
        matches!(self, Self::Pod | Self::Pool(_))
    }
}

/// The metadata of every object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Name of the object in its namespace.
    pub name: String,
    /// Unique among all objects over time, also of one name.
    pub uid: String,
    /// Time of creation, seconds since the Unix epoch; 0 if it is missing.
    pub created: i64,
    /// Counts the changes of the spec.
    pub generation: i64,
    /// Hash of the resource version: differs after any change. 0 for kinds where nothing reads it.
    pub version: u64,
    /// Whether its deletion was requested.
    pub deleting: bool,
    /// Labels of the object.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Annotations of the object.
    pub annotations: BTreeMap<String, String>,
}

/// An object before its kind is parsed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Object {
    /// The metadata of every object.
    pub meta: Meta,
    /// `spec`; the data of a `ConfigMap`.
    pub spec: Value,
    /// `status` as the API server sent it.
    pub status: Value,
}

impl Object {
    /// Drops the parts that Attaché never reads of this kind: a pod's spec is the larger part of the object.
    #[must_use]
    pub fn trimmed(mut self, kind: ObjectKind) -> Self {
        if kind != ObjectKind::Model {
            self.meta.version = 0;
        }
        if kind == ObjectKind::Pod {
            self.spec = Value::Null;
            if let Value::Object(status) = &mut self.status {
                status.retain(|key, _| matches!(key.as_str(), "podIP" | "conditions"));
                if let Some(Value::Array(conditions)) = status.get_mut("conditions") {
                    conditions.retain(|condition| condition.get("type").is_some_and(|kind| kind == READY));
                }
            }
        }
        self
    }
}

/// A type that can be parsed from an object.
pub trait FromObject: Sized {
    /// Parses the object.
    ///
    /// # Errors
    /// The invalid field and why.
    fn from_object(object: Object) -> Result<Self, String>;
}

impl FromObject for Object {
    fn from_object(object: Object) -> Result<Self, String> {
        Ok(object)
    }
}

fn fields<T: DeserializeOwned>(value: Value, part: &str) -> Result<T, String> {
    let value = if value.is_null() { Value::Object(serde_json::Map::new()) } else { value };
    T::deserialize(value).map_err(|error| format!("`{part}`: {error}"))
}

/// The fields of a pod that discovery needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Name, UID, labels and annotations.
    pub meta: Meta,
    /// IP address, once the pod has one.
    pub ip: Option<IpAddr>,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
}

impl FromObject for Pod {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Status {
            #[serde(rename = "podIP")]
            pod_ip: Option<String>,
            conditions: Option<Vec<RawCondition>>,
        }
        #[derive(Deserialize)]
        struct RawCondition {
            #[serde(rename = "type")]
            kind: String,
            status: String,
        }
        let status: Status = fields(object.status, "status")?;
        let ip = status.pod_ip.filter(|ip| !ip.is_empty());
        let ip =
            ip.map(|ip| ip.parse().map_err(|_| format!("`status.podIP`: `{ip}` is not an address"))).transpose()?;
        let conditions = status.conditions.unwrap_or_default();
        let ready = conditions.iter().any(|c| c.kind == READY && c.status == "True");
        Ok(Self { meta: object.meta, ip, ready })
    }
}

/// The fields of an `InferencePool` of any version that discovery needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferencePool {
    /// Labels that select its pods.
    pub labels: BTreeMap<String, String>,
    /// The port of each rank, 1 to 8 ports.
    pub ports: Vec<u16>,
}

impl FromObject for InferencePool {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            selector: BTreeMap<String, Value>,
            target_ports: Vec<RawPort>,
            // The example of the first proposal uses `targetNumber`.
            #[serde(alias = "targetNumber")]
            target_port_number: Option<i64>,
        }
        #[derive(Deserialize)]
        struct RawPort {
            number: i64,
        }
        let mut spec: Spec = fields(object.spec, "spec")?;
        // v1 has the labels one level deeper than v1alpha2.
        let labels = match spec.selector.remove("matchLabels") {
            Some(labels) => fields(labels, "spec.selector.matchLabels")?,
            None => fields(Value::Object(spec.selector.into_iter().collect()), "spec.selector")?,
        };
        let labels: BTreeMap<String, String> = labels;
        if labels.is_empty() {
            return Err("`spec.selector` is empty: it must name at least one label".to_owned());
        }
        let (field, numbers) = match spec.target_port_number.filter(|_| spec.target_ports.is_empty()) {
            Some(number) => ("spec.targetPortNumber", vec![number]),
            None => ("spec.targetPorts", spec.target_ports.iter().map(|port| port.number).collect()),
        };
        let named = |error: String| format!("`{field}`: {error}");
        let read = |number: i64| {
            u16::try_from(number).map_err(|_| named(format!("got port {number}, 1 to 65535 are allowed")))
        };
        let ports = numbers.into_iter().map(read).collect::<Result<Vec<u16>, _>>()?;
        check_ports(&ports).map_err(named)?;
        Ok(Self { labels, ports })
    }
}

/// The `InferencePool` that a picker serves: its name, and its API group unless pods are selected by labels alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedPool<'a> {
    /// Name of the `InferencePool`.
    pub name: &'a str,
    /// API group of the `InferencePool`.
    pub group: Option<PoolGroup>,
}

/// The pool that an object refers to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PoolRef {
    /// The API group. CRDs have a default, so objects from an API server always name one.
    group: Option<String>,
    kind: Option<String>,
    name: String,
}

impl PoolRef {
    fn checked(self) -> Result<Self, String> {
        if let Some(kind) = self.kind.as_ref().filter(|kind| !kind.is_empty() && *kind != "InferencePool") {
            return Err(format!("`spec.poolRef.kind`: got `{kind}`, only `InferencePool` is allowed"));
        }
        if self.name.is_empty() { Err("`spec.poolRef.name` is missing".to_owned()) } else { Ok(self) }
    }

    /// Whether the reference means `pool`.
    #[must_use]
    pub fn means(&self, pool: ServedPool<'_>) -> bool {
        self.name == pool.name && self.foreign_group(pool).is_none()
    }

    /// The group in the reference if it differs from that of `pool` while the names are equal.
    #[must_use]
    pub fn foreign_group(&self, pool: ServedPool<'_>) -> Option<&str> {
        let group = self.group.as_deref().filter(|group| !group.is_empty() && self.name == pool.name)?;
        let known = PoolGroup::of(group);
        let same = known.is_some() && pool.group.is_none_or(|served| known == Some(served));
        (!same).then_some(group)
    }
}

/// The fields that are known of an invalid `InferenceModel`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableModel {
    /// The pool that it refers to.
    pub pool: PoolRef,
    /// Unique among all objects over time.
    pub uid: String,
    /// Counts the changes of its spec.
    pub generation: i64,
    /// Hash of the resource version.
    pub version: u64,
    /// The conditions in its status that Attaché writes.
    pub conditions: Vec<Condition>,
}

impl UnreadableModel {
    /// Parses the valid fields.
    #[must_use]
    pub fn of(object: &Object) -> Self {
        let pool = object.spec.get("poolRef").and_then(|pool| PoolRef::deserialize(pool).ok()).unwrap_or_default();
        let Meta { uid, generation, version, .. } = object.meta.clone();
        Self { pool, uid, generation, version, conditions: conditions(object.status.clone()) }
    }
}

/// The conditions of an `InferenceModel` that Attaché writes. Invalid ones are left out and written again.
fn conditions(status: Value) -> Vec<Condition> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Status {
        conditions: Vec<Value>,
    }
    let all = fields::<Status>(status, "status").unwrap_or_default().conditions;
    let read = all.into_iter().filter_map(|c| Condition::deserialize(c).ok());
    read.filter(|c| TYPES.contains(&c.kind.as_str())).collect()
}

/// The fields of an `InferenceObjective` that routing needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Objective {
    /// The pool that it refers to.
    pub pool: PoolRef,
    /// Priority of the requests: higher is served first, below 0 is shed.
    pub priority: i32,
}

impl FromObject for Objective {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            pool_ref: PoolRef,
            priority: Option<i32>,
        }
        let spec: Spec = fields(object.spec, "spec")?;
        Ok(Self { pool: spec.pool_ref.checked()?, priority: spec.priority.unwrap_or(0) })
    }
}

/// The fields of an `InferenceModelRewrite` that routing needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewrite {
    /// The pool that it refers to.
    pub pool: PoolRef,
    /// Time of creation, seconds: of two rules for one model the older object's is used.
    pub created: i64,
    /// Its rules, in their order.
    pub rules: Vec<RewriteRule>,
}

/// One rule: the models that it applies to (all, if there are none) and their names on model servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewriteRule {
    /// Model names in requests.
    pub models: Vec<String>,
    /// Model names on the model servers, with weights.
    pub targets: Vec<RewriteTarget>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawTarget {
    // The field is called `name` in InferenceModel.
    #[serde(alias = "name")]
    model_rewrite: String,
    weight: Option<u32>,
}

fn targets(list: Vec<RawTarget>) -> Vec<RewriteTarget> {
    let read = |t: RawTarget| RewriteTarget { model: t.model_rewrite.into(), weight: t.weight.unwrap_or(1) };
    list.into_iter().map(read).collect()
}

impl FromObject for Rewrite {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            pool_ref: PoolRef,
            rules: Vec<RawRule>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct RawRule {
            matches: Option<Vec<Match>>,
            targets: Vec<RawTarget>,
        }
        #[derive(Deserialize)]
        struct Match {
            model: Option<ModelMatch>,
        }
        #[derive(Deserialize)]
        struct ModelMatch {
            #[serde(rename = "type")]
            kind: Option<String>,
            value: String,
        }
        let spec: Spec = fields(object.spec, "spec")?;
        let mut rules = Vec::with_capacity(spec.rules.len());
        for rule in spec.rules {
            let mut models = Vec::new();
            let matches = rule.matches.unwrap_or_default();
            let has_conditions = !matches.is_empty();
            for model in matches.into_iter().filter_map(|m| m.model) {
                if let Some(kind) = model.kind.filter(|kind| kind != "Exact") {
                    return Err(format!("`spec.rules.matches.model.type`: got `{kind}`, only `Exact` is allowed"));
                }
                models.push(model.value);
            }
            if has_conditions && models.is_empty() {
                // An unknown kind of condition: a rule for some requests must not apply to all.
                continue;
            }
            rules.push(RewriteRule { models, targets: targets(rule.targets) });
        }
        Ok(Self { pool: spec.pool_ref.checked()?, created: object.meta.created, rules })
    }
}

/// The fields of an `InferenceModel` that routing needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferenceModel {
    /// The pool that it refers to.
    pub pool: PoolRef,
    /// Time of creation, seconds: of two objects that claim one name the older has it.
    pub created: i64,
    /// Model name in requests.
    pub model: String,
    /// Model names on the model servers, with weights; if empty, the name stays as it is.
    pub targets: Vec<RewriteTarget>,
    /// Priority by its criticality; `None` if it has none.
    pub priority: Option<i32>,
    /// Unique among all objects over time.
    pub uid: String,
    /// Counts the changes of its spec.
    pub generation: i64,
    /// Hash of the resource version.
    pub version: u64,
    /// The conditions in its status that Attaché writes.
    pub conditions: Vec<Condition>,
}

impl InferenceModel {
    /// Whether the name is reserved and not served: all weights are 0.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        !self.targets.is_empty() && self.targets.iter().all(|t| t.weight == 0)
    }
}

impl FromObject for InferenceModel {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            pool_ref: PoolRef,
            model_name: Option<String>,
            criticality: Option<String>,
            target_models: Option<Vec<RawTarget>>,
        }
        let spec: Spec = fields(object.spec, "spec")?;
        let priority = match spec.criticality.as_deref() {
            None => None,
            Some("Critical") => Some(CRITICAL_PRIORITY),
            Some("Standard") => Some(0),
            Some("Sheddable") => Some(SHEDDABLE_PRIORITY),
            Some(other) => {
                let allowed = "`Critical`, `Standard` and `Sheddable` are allowed";
                return Err(format!("`spec.criticality`: got `{other}`, {allowed}"));
            }
        };
        Ok(Self {
            pool: spec.pool_ref.checked()?,
            created: object.meta.created,
            // The proposal's examples omit the model name, which is then the object's.
            model: spec.model_name.filter(|name| !name.is_empty()).unwrap_or(object.meta.name),
            targets: targets(spec.target_models.unwrap_or_default()),
            priority,
            uid: object.meta.uid,
            generation: object.meta.generation,
            version: object.meta.version,
            conditions: conditions(object.status),
        })
    }
}

#[cfg(test)]
mod tests;
