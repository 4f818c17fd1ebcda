//! What Attaché says of each `InferenceModel` in its status.
//!
//! Two conditions: `Accepted` of GIE v0.5 says whether the object has the name that it claims; `Ready` of the first proposal says whether requests
//! for that name are served. Each has a reason:
//!
//! | reason | `Accepted` | `Ready` | meaning |
//! |---|---|---|---|
//! | `Accepted`, `Ready` | `True` | `True` | the name is this object's, and requests are routed |
//! | `ModelNameInUse` | `False` | `False` | an older object has the name |
//! | `Invalid` | `False` | `False` | the object can't be read |
//! | `NoTargetModel` | `True` | `False` | the name is reserved: all weights are 0 |
//! | `TargetModelNotFound` | `True` | `False` | a model server has answered that it has no such model |
//!
//! (`Pending` is what an object begins with.) Pure; `status` writes it.

use super::objects::{InferenceModel, UnreadableModel};
use attache_scheduling::router::MissingTarget;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The type of the condition for the name.
pub const ACCEPTED: &str = "Accepted";
/// The type of the condition for its requests.
pub const READY: &str = "Ready";
/// The types that Attaché writes, in this order.
pub const TYPES: [&str; 2] = [ACCEPTED, READY];
/// An older object has the name.
pub const REASON_NAME_IN_USE: &str = "ModelNameInUse";
/// The object can't be read.
pub const REASON_INVALID: &str = "Invalid";
/// The name is reserved.
pub const REASON_NO_TARGET: &str = "NoTargetModel";
/// A model server does not have a target model.
pub const REASON_TARGET_NOT_FOUND: &str = "TargetModelNotFound";

/// A condition, as objects of Kubernetes carry it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it speaks of.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in one word.
    #[serde(default)]
    pub reason: String,
    /// Why, for people.
    #[serde(default)]
    pub message: String,
    /// The generation of the object that was looked at.
    #[serde(default)]
    pub observed_generation: i64,
    /// When `status` became what it is, RFC 3339.
    #[serde(default)]
    pub last_transition_time: String,
}

impl Condition {
    /// Says the same, whenever that became so.
    fn says(&self, other: &Self) -> bool {
        let words = |c: &Self| (c.status.clone(), c.reason.clone(), c.message.clone(), c.observed_generation);
        words(self) == words(other)
    }
}

/// What is to be said of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Its name.
    pub name: String,
    /// What tells it from another of the same name.
    pub uid: String,
    /// The object's version that was looked at.
    pub version: u64,
    /// The conditions as they should be, in the order of [`TYPES`]; their times are for whoever writes them.
    pub wanted: [Condition; 2],
    /// The conditions as they are.
    pub found: Vec<Condition>,
}

impl Report {
    /// The older object that has the name, in a sentence; `None` where this object has it.
    #[must_use]
    pub fn dispute(&self) -> Option<&str> {
        let [accepted, _] = &self.wanted;
        (accepted.reason == REASON_NAME_IN_USE).then_some(&*accepted.message)
    }

    fn found(&self, kind: &str) -> Option<&Condition> {
        self.found.iter().find(|condition| condition.kind == kind)
    }

    /// Whether the object says something else, or nothing.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.wanted.iter().any(|wanted| self.found(&wanted.kind).is_none_or(|found| !found.says(wanted)))
    }

    /// Whether writing it begins or ends that a target model is missing. Replicas differ in that: each knows its own requests.
    #[must_use]
    pub fn flips_denial(&self) -> bool {
        let [_, ready] = &self.wanted;
        let found = self.found(READY).is_some_and(|found| found.reason == REASON_TARGET_NOT_FOUND);
        found != (ready.reason == REASON_TARGET_NOT_FOUND)
    }

    /// The conditions to write at `now`: what has not changed became so before.
    #[must_use]
    pub fn conditions(&self, now: &str) -> [Condition; 2] {
        self.wanted.clone().map(|wanted| {
            let before = self.found(&wanted.kind).filter(|found| found.status == wanted.status);
            let since = before.map(|found| found.last_transition_time.as_str()).filter(|time| !time.is_empty());
            Condition { last_transition_time: since.unwrap_or(now).to_owned(), ..wanted }
        })
    }
}

/// What the status of an object says of its targets, whichever replica wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Identity of the object.
    pub uid: String,
    /// Another one whenever it says something new.
    pub word: String,
    /// The targets.
    pub targets: Vec<MissingTarget>,
    /// They are missing; else they are there.
    pub are_missing: bool,
}

/// What the status of `model` says of its targets; `None` when it says nothing of them, or of another spec.
#[must_use]
pub fn heard(model: &InferenceModel) -> Option<Heard> {
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
    Some(Heard {
        uid: model.uid.clone(),
        word: format!("{} {}", ready.status, ready.last_transition_time),
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

/// What is to be said of the objects of a pool, which come with the oldest first, where servers lack the targets `missing`.
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

/// Of one that has its name.
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

/// What is to be said of an object that can't be read.
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
