//! The objects that are watched, and what is read of them.
//!
//! Read as tolerantly as the API allows: what is not needed is not looked at, so that an object of a newer version is still understood. What
//! is needed and is not as it must be makes the whole object unreadable, with a reason that names the field. Pure.

use super::conditions::{Condition, TYPES};
use crate::settings::PoolGroup;
use crate::settings::check_ports;
use attache_scheduling::router::RewriteTarget;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// The API group in which GIE keeps what is not stable.
pub const GIE_EXPERIMENTAL: &str = "inference.networking.x-k8s.io";
/// llm-d's API group.
pub const LLM_D: &str = "llm-d.ai";
/// The priority of a model whose criticality is `Critical`: above the 0 of all that says nothing.
pub const CRITICAL_PRIORITY: i32 = 10;
/// That of a `Sheddable` one: below 0, which is what is shed.
pub const SHEDDABLE_PRIORITY: i32 = -10;

/// The condition of a pod that serves.
const READY: &str = "Ready";

/// A kind of object that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `Pod`.
    Pod,
    /// `InferencePool`.
    Pool(PoolGroup),
    /// `InferenceObjective` of llm-d's group or of GIE's.
    Objective(Origin),
    /// `InferenceModelRewrite` of llm-d's group or of GIE's.
    Rewrite(Origin),
    /// `InferenceModel`, which both replaced.
    Model,
    /// `ConfigMap`.
    ConfigMap,
}

/// Whose definition of a kind it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// llm-d's. Where it is installed, GIE's is not looked at.
    LlmD,
    /// GIE's.
    Gie,
}

/// How the API server calls a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Naming {
    /// The API group, empty for the core.
    pub group: &'static str,
    /// The version.
    pub version: &'static str,
    /// The kind.
    pub kind: &'static str,
    /// The resource, as rules of RBAC name it.
    pub plural: &'static str,
}

impl Kind {
    /// The kinds that say something of models.
    pub const OF_RULES: [Self; 5] = [
        Self::Objective(Origin::LlmD),
        Self::Objective(Origin::Gie),
        Self::Rewrite(Origin::LlmD),
        Self::Rewrite(Origin::Gie),
        Self::Model,
    ];

    /// How the API server calls it.
    #[must_use]
    pub fn naming(self) -> Naming {
        let of = |origin| if origin == Origin::LlmD { LLM_D } else { GIE_EXPERIMENTAL };
        let (group, version, kind, plural) = match self {
            Self::Pod => ("", "v1", "Pod", "pods"),
            Self::Pool(group) => (group.as_str(), group.version(), "InferencePool", "inferencepools"),
            Self::Objective(o) => (of(o), "v1alpha2", "InferenceObjective", "inferenceobjectives"),
            Self::Rewrite(o) => (of(o), "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites"),
            Self::Model => (GIE_EXPERIMENTAL, "v1alpha2", "InferenceModel", "inferencemodels"),
            Self::ConfigMap => ("", "v1", "ConfigMap", "configmaps"),
        };
        Naming { group, version, kind, plural }
    }

    /// What a rule of a Role says that allows a picker to follow it.
    #[must_use]
    pub fn role_rule(self) -> String {
        let Naming { group, plural, .. } = self.naming();
        let group = if group.is_empty() { "\"\"" } else { group };
        format!("{{apiGroups: [{group}], resources: [{plural}], verbs: [get, list, watch]}}")
    }

    /// Nothing can be served without it: that it is not installed is a mistake.
    #[must_use]
    pub fn is_needed(self) -> bool {
        matches!(self, Self::Pod | Self::Pool(_))
    }
}

/// What every object has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Its name in the namespace.
    pub name: String,
    /// What tells it from others of the same name.
    pub uid: String,
    /// When it was made, seconds of the Unix epoch; 0 when nobody says.
    pub created: i64,
    /// Counts the changes of its spec.
    pub generation: i64,
    /// Another with whatever changes of it: a hash of what the API server calls its version. 0 where nobody reads it of the kind.
    pub version: u64,
    /// Somebody has asked for its end.
    pub deleting: bool,
    /// Labels.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// An object as it came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Object {
    /// What every object has.
    pub meta: Meta,
    /// What is wanted; a `ConfigMap`'s data.
    pub spec: Value,
    /// What is.
    pub status: Value,
}

impl Object {
    /// Without what nobody reads of this kind: a pod's spec is the larger part of what comes of it.
    #[must_use]
    pub fn trimmed(mut self, kind: Kind) -> Self {
        if kind != Kind::Model {
            self.meta.version = 0;
        }
        if kind == Kind::Pod {
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

/// Something that can be read of an object.
pub trait FromObject: Sized {
    /// Reads it.
    ///
    /// # Errors
    /// The field that is not as it must be.
    fn from_object(object: Object) -> Result<Self, String>;
}

fn fields<T: DeserializeOwned>(value: Value, part: &str) -> Result<T, String> {
    let value = if value.is_null() { Value::Object(serde_json::Map::new()) } else { value };
    T::deserialize(value).map_err(|error| format!("`{part}`: {error}"))
}

/// What matters of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Name, UID, labels, annotations.
    pub meta: Meta,
    /// Its address, once it has one.
    pub ip: Option<IpAddr>,
    /// Its condition `Ready` is true.
    pub ready: bool,
}

impl FromObject for Pod {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Status {
            #[serde(rename = "podIP")]
            pod_ip: Option<String>,
            conditions: Option<Vec<Condition>>,
        }
        #[derive(Deserialize)]
        struct Condition {
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

/// What matters of an `InferencePool`, of any version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferencePool {
    /// Labels that its pods have.
    pub labels: BTreeMap<String, String>,
    /// The port of each rank, 1 to 8 of them.
    pub ports: Vec<u16>,
}

impl FromObject for InferencePool {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            selector: BTreeMap<String, Value>,
            target_ports: Vec<Port>,
            // `targetNumber` stands in the example of the first proposal.
            #[serde(alias = "targetNumber")]
            target_port_number: Option<i64>,
        }
        #[derive(Deserialize)]
        struct Port {
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

/// The `InferencePool` that a picker serves: its name, and its API group unless pods are selected by their labels alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedPool<'a> {
    /// The name.
    pub name: &'a str,
    /// The group.
    pub group: Option<PoolGroup>,
}

/// The pool that an object speaks of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PoolRef {
    /// The API group. CRDs have a default for it, so objects from an API server name one.
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

    /// Whether the object speaks of `pool`.
    #[must_use]
    pub fn means(&self, pool: ServedPool<'_>) -> bool {
        self.name == pool.name && self.foreign_group(pool).is_none()
    }

    /// The group that the object names in place of that of `pool`, where the names are equal.
    #[must_use]
    pub fn foreign_group(&self, pool: ServedPool<'_>) -> Option<&str> {
        let group = self.group.as_deref().filter(|group| !group.is_empty() && self.name == pool.name)?;
        let known = PoolGroup::of(group);
        let same = known.is_some() && pool.group.is_none_or(|served| known == Some(served));
        (!same).then_some(group)
    }
}

/// What is known of an `InferenceModel` that can't be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableModel {
    /// The pool that it names.
    pub pool: PoolRef,
    /// What tells it from others of the same name.
    pub uid: String,
    /// Counts the changes of its spec.
    pub generation: i64,
    /// Another with whatever changes of it.
    pub version: u64,
    /// What its status says, as far as Attaché writes it.
    pub conditions: Vec<Condition>,
}

impl UnreadableModel {
    /// Reads what can be read.
    #[must_use]
    pub fn of(object: &Object) -> Self {
        let pool = object.spec.get("poolRef").and_then(|pool| PoolRef::deserialize(pool).ok()).unwrap_or_default();
        let Meta { uid, generation, version, .. } = object.meta.clone();
        Self { pool, uid, generation, version, conditions: conditions(object.status.clone()) }
    }
}

/// The conditions of an `InferenceModel` that Attaché writes. What can't be read in a status is written anew.
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

/// What matters of an `InferenceObjective`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Objective {
    /// The pool that it is for.
    pub pool: PoolRef,
    /// Higher comes first; below 0 is shed.
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

/// What matters of an `InferenceModelRewrite`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewrite {
    /// The pool that it is for.
    pub pool: PoolRef,
    /// When it was made: of two rules for the same model the older one holds.
    pub created: i64,
    /// Its rules, in their order.
    pub rules: Vec<RewriteRule>,
}

/// One rule: the models that it speaks of (all, when there are none) and what servers call them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewriteRule {
    /// Names that clients use.
    pub models: Vec<String>,
    /// Names that servers know, with their shares.
    pub targets: Vec<RewriteTarget>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Target {
    // `name` in InferenceModel.
    #[serde(alias = "name")]
    model_rewrite: String,
    weight: Option<u32>,
}

fn targets(list: Vec<Target>) -> Vec<RewriteTarget> {
    let read = |t: Target| RewriteTarget { model: t.model_rewrite.into(), weight: t.weight.unwrap_or(1) };
    list.into_iter().map(read).collect()
}

impl FromObject for Rewrite {
    fn from_object(object: Object) -> Result<Self, String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            pool_ref: PoolRef,
            rules: Vec<Rule>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Rule {
            matches: Option<Vec<Match>>,
            targets: Vec<Target>,
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
                // Conditions of another kind, which this picker does not know: a rule for some requests must not become one for all.
                continue;
            }
            rules.push(RewriteRule { models, targets: targets(rule.targets) });
        }
        Ok(Self { pool: spec.pool_ref.checked()?, created: object.meta.created, rules })
    }
}

/// What matters of an `InferenceModel`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferenceModel {
    /// The pool that it is for.
    pub pool: PoolRef,
    /// When it was made: of two that claim a name the older one has it.
    pub created: i64,
    /// What clients call it.
    pub model: String,
    /// What servers call it, with their shares; empty: the same.
    pub targets: Vec<RewriteTarget>,
    /// How much its requests matter; `None` when it does not say.
    pub priority: Option<i32>,
    /// What tells it from others of the same name.
    pub uid: String,
    /// Counts the changes of its spec.
    pub generation: i64,
    /// Another with whatever changes of it.
    pub version: u64,
    /// What its status says, as far as Attaché writes it.
    pub conditions: Vec<Condition>,
}

impl InferenceModel {
    /// The name is taken, and nothing serves it: all weights are 0.
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
            target_models: Option<Vec<Target>>,
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
            // The examples of the proposal leave the name to the object's.
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
