//! The conditions that Attaché writes to the status of each `InferenceModel`.
//!
//! Two conditions: `Accepted` of GIE v0.5 is whether the object owns the model name that it claims. `Ready` of the
//! first proposal is whether requests for that name are served. Each has a reason:
//!
//! | reason | `Accepted` | `Ready` | meaning |
//! |---|---|---|---|
//! | `Accepted`, `Ready` | `True` | `True` | the name is this object's, and requests are routed |
//! | `ModelNameInUse` | `False` | `False` | an older object has the name |
//! | `Invalid` | `False` | `False` | the object can't be read |
//! | `NoTargetModel` | `True` | `False` | the name is reserved: all weights are 0 |
//! | `TargetModelNotFound` | `True` | `False` | a model server has answered that it has no such model |
//!
//! (`Pending` is the initial state of an object.) Pure; `status` writes the conditions.

use super::objects::{InferenceModel, UnreadableModel};
use attache_scheduling::router::MissingTarget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Type of the condition about the model name.
pub const ACCEPTED: &str = "Accepted";
/// Type of the condition about requests for the model.
pub const READY: &str = "Ready";
/// The types of condition that Attaché writes, in this order.
pub const TYPES: [&str; 2] = [ACCEPTED, READY];
/// Reason: an older object has the model name.
pub const REASON_NAME_IN_USE: &str = "ModelNameInUse";
/// Reason: the object is invalid.
pub const REASON_INVALID: &str = "Invalid";
/// Reason: all target models have the weight 0.
pub const REASON_NO_TARGET: &str = "NoTargetModel";
/// Reason: a model server does not have a target model.
pub const REASON_TARGET_NOT_FOUND: &str = "TargetModelNotFound";

/// A condition in the status of a Kubernetes object.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition, for example `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Machine-readable reason in one fingerprint.
    #[serde(default)]
    pub reason: String,
    /// Human-readable explanation of the reason.
    #[serde(default)]
    pub message: String,
    /// Generation of the object that the condition is about.
    #[serde(default)]
    pub observed_generation: i64,
    /// Time of the last change of `status`, RFC 3339.
    #[serde(default)]
    pub last_transition_time: String,
}

impl Condition {
    /// Whether both conditions are equal apart from their times.
    fn says(&self, other: &Self) -> bool {
        let words = |c: &Self| (c.status.clone(), c.reason.clone(), c.message.clone(), c.observed_generation);
        words(self) == words(other)
    }
}

/// The conditions that one object has and should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the `InferenceModel`.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// Version of the object that the conditions were derived from.
    pub version: u64,
    /// The right conditions, in the order of [`TYPES`]; the writer sets their times.
    pub wanted: [Condition; 2],
    /// The conditions in the object's status.
    pub found: Vec<Condition>,
}

impl Report {
    /// A sentence about the older object that has the model name; `None` if this object has it.
    #[must_use]
    pub fn dispute(&self) -> Option<&str> {
        let [accepted, _] = &self.wanted;
        (accepted.reason == REASON_NAME_IN_USE).then_some(&*accepted.message)
    }

    fn found(&self, kind: &str) -> Option<&Condition> {
        self.found.iter().find(|condition| condition.kind == kind)
    }

    /// Whether the object's status differs from the wanted conditions.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.wanted.iter().any(|wanted| self.found(&wanted.kind).is_none_or(|found| !found.says(wanted)))
    }

    /// Whether a write would set or clear a missing target model. Replicas may disagree there, as each
    /// sees only its own requests.
    #[must_use]
    pub fn flips_denial(&self) -> bool {
        let [_, ready] = &self.wanted;
        let found = self.found(READY).is_some_and(|found| found.reason == REASON_TARGET_NOT_FOUND);
        found != (ready.reason == REASON_TARGET_NOT_FOUND)
    }

    /// The conditions to write at `now`. Unchanged ones keep their time.
    #[must_use]
    pub fn conditions(&self, now: &str) -> [Condition; 2] {
        self.wanted.clone().map(|wanted| {
            let before = self.found(&wanted.kind).filter(|found| found.status == wanted.status);
            let since = before.map(|found| found.last_transition_time.as_str()).filter(|time| !time.is_empty());
            Condition { last_transition_time: since.unwrap_or(now).to_owned(), ..wanted }
        })
    }
}

/// Missing or restored targets in the status of an object, whichever replica wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStatus {
    /// UID of the object.
    pub uid: String,
    /// Changes whenever the status says something new.
    pub fingerprint: String,
    /// The target models in question.
    pub targets: Vec<MissingTarget>,
    /// Whether the targets are missing; otherwise they are available.
    pub are_missing: bool,
}

/// The targets in the status of `model`; `None` if it has no such condition, or one of another generation of the spec.
#[must_use]
pub fn target_status(model: &InferenceModel) -> Option<TargetStatus> {
    let of_now = |c: &&Condition| c.kind == READY && c.observed_generation == model.generation;
    let ready = model.conditions.iter().find(of_now)?;
    let are_missing = ready.reason == REASON_TARGET_NOT_FOUND;
    if !are_missing && ready.status != "True" {
        return None;
    }
    let itself = Some(model.model.as_str()).filter(|_| model.targets.is_empty());
    let names = model.targets.iter().map(|target| &*target.model).chain(itself);
    let named = names.filter(|name| !are_missing || ready.message.contains(&format!("`{name}`")));
    let target = |name: &str| MissingTarget { model: model.model.clone(), target: name.to_owned() };
    Some(TargetStatus {
        uid: model.uid.clone(),
        fingerprint: format!("{} {}", ready.status, ready.last_transition_time),
        targets: named.map(target).collect(),
        are_missing,
    })
}

/// Status, reason and message.
type Words = (bool, &'static str, String);

fn wanted([accepted, ready]: [Words; 2], generation: i64) -> [Condition; 2] {
    let condition = |kind: &str, (status, reason, message): Words| Condition {
        kind: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: String::new(),
    };
    [condition(ACCEPTED, accepted), condition(READY, ready)]
}

/// The conditions of a pool's objects, ordered from the oldest, while servers lack the targets `missing`.
pub fn reports<'a>(
    oldest_first: impl IntoIterator<Item = (&'a str, &'a InferenceModel)>,
    missing: &[MissingTarget],
) -> Vec<Report> {
    let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
    let report = |(name, model): (&'a str, &'a InferenceModel)| {
        let claimed = model.model.as_str();
        let holder = *holders.entry(claimed).or_insert(name);
        let words = if holder == name { holding(model, missing) } else { disputed(claimed, holder) };
        Report {
            name: name.to_owned(),
            uid: model.uid.clone(),
            version: model.version,
            wanted: wanted(words, model.generation),
            found: model.conditions.clone(),
        }
    };
    oldest_first.into_iter().map(report).collect()
}

fn disputed(claimed: &str, holder: &str) -> [Words; 2] {
    let message = format!("the model name `{claimed}` is the older InferenceModel `{holder}`'s");
    [(false, REASON_NAME_IN_USE, message.clone()), (false, REASON_NAME_IN_USE, message)]
}

/// The conditions of an object that has its model name.
fn holding(model: &InferenceModel, missing: &[MissingTarget]) -> [Words; 2] {
    let claimed = &model.model;
    let accepted = (true, ACCEPTED, format!("the model name `{claimed}` is this object's"));
    if model.is_reserved() {
        let message = format!("the model name `{claimed}` is reserved: every target model has the weight 0");
        return [accepted, (false, REASON_NO_TARGET, message)];
    }
    let missing: Vec<String> =
        missing.iter().filter(|m| m.model == *claimed).map(|m| format!("`{}`", m.target)).collect();
    if !missing.is_empty() {
        let message = format!("a model server has answered that it has no model {}", missing.join(", "));
        return [accepted, (false, REASON_TARGET_NOT_FOUND, message)];
    }
    [accepted, (true, READY, format!("requests for the model `{claimed}` are routed"))]
}

/// The conditions of an invalid object.
#[must_use]
pub fn unreadable(name: &str, object: &UnreadableModel, reason: &str) -> Report {
    let invalid = || (false, REASON_INVALID, format!("this object can't be read: {reason}"));
    Report {
        name: name.to_owned(),
        uid: object.uid.clone(),
        version: object.version,
        wanted: wanted([invalid(), invalid()], object.generation),
        found: object.conditions.clone(),
    }
}
