//! What is said of each `InferenceModel` in its status: whether it has the name that it claims.
//!
//! One condition, `Accepted`, with the reasons of GIE v0.5: `Accepted`, or `ModelNameInUse` where an older object has the name. (`Pending` is what
//! an object begins with, before anybody has looked at it.) Pure; `status` writes it.

use super::objects::InferenceModel;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The type of the condition.
pub const ACCEPTED: &str = "Accepted";
/// The object has its name.
pub const REASON_ACCEPTED: &str = "Accepted";
/// An older one has it.
pub const REASON_NAME_IN_USE: &str = "ModelNameInUse";

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
    /// The condition as it should be; its time is for whoever writes it.
    pub wanted: Condition,
    /// The condition as it is.
    pub found: Option<Condition>,
}

impl Report {
    /// Whether the object has the name that it claims.
    #[must_use]
    pub fn has_its_name(&self) -> bool {
        self.wanted.reason == REASON_ACCEPTED
    }

    /// Whether the object says something else, or nothing.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.found.as_ref().is_none_or(|found| !found.says(&self.wanted))
    }

    /// The condition to write at `now`: what has not changed became so before.
    #[must_use]
    pub fn condition(&self, now: &str) -> Condition {
        let before = self.found.as_ref().filter(|found| found.status == self.wanted.status);
        let since = before.map(|found| found.last_transition_time.as_str()).filter(|time| !time.is_empty());
        Condition { last_transition_time: since.unwrap_or(now).to_owned(), ..self.wanted.clone() }
    }
}

/// What is to be said of the objects of a pool, which come with the oldest first.
pub fn reports<'a>(oldest_first: impl IntoIterator<Item = (&'a str, &'a InferenceModel)>) -> Vec<Report> {
    let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
    let report = |(name, model): (&'a str, &'a InferenceModel)| {
        let claimed = model.model.as_str();
        let holder = *holders.entry(claimed).or_insert(name);
        let (status, reason, message) = if holder == name {
            ("True", REASON_ACCEPTED, format!("the model name `{claimed}` is this object's"))
        } else {
            (
                "False",
                REASON_NAME_IN_USE,
                format!("the model name `{claimed}` is the older InferenceModel `{holder}`'s"),
            )
        };
        Report {
            name: name.to_owned(),
            uid: model.uid.clone(),
            version: model.version,
            wanted: Condition {
                kind: ACCEPTED.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message,
                observed_generation: model.generation,
                last_transition_time: String::new(),
            },
            found: model.accepted.clone(),
        }
    };
    oldest_first.into_iter().map(report).collect()
}
