//! What the servers of a pool say that they serve: their answers to `GET /v1/models`, and the union of them.
//!
//! Written by `scrape::models`, read by the router when a client asks for the list. Pure.

use arc_swap::{ArcSwap, Guard};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Models that are read of one server at most: a base model with a thousand adapters is on record, a hundred thousand are not.
pub const MAX_MODELS: usize = 4_096;

/// What is said of a model, in OpenAI's words (`id`, `object`, `created`, `owned_by`) and whatever the server adds to them.
pub type ModelEntry = Map<String, Value>;

/// A list of models, by their ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelList(BTreeMap<String, ModelEntry>);

/// An answer that is no list of models.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelListError {
    /// Not JSON.
    #[error("the list of models is not JSON: {0}")]
    Json(String),
    /// JSON of another shape.
    #[error("the answer has no list `data`")]
    NoData,
    /// Longer than is read.
    #[error("the server lists {0} models, {MAX_MODELS} are read")]
    TooMany(usize),
}

impl ModelList {
    /// Reads a server's answer. Elements without an `id` are passed over.
    ///
    /// # Errors
    /// See [`ModelListError`].
    pub fn read(answer: &[u8]) -> Result<Self, ModelListError> {
        let mut answer: Value = serde_json::from_slice(answer).map_err(|e| ModelListError::Json(e.to_string()))?;
        let Some(Value::Array(data)) = answer.get_mut("data").map(Value::take) else {
            return Err(ModelListError::NoData);
        };
        if data.len() > MAX_MODELS {
            return Err(ModelListError::TooMany(data.len()));
        }
        let entries = data.into_iter().filter_map(|element| {
            let Value::Object(entry) = element else { return None };
            let id = entry.get("id")?.as_str()?.to_owned();
            Some((id, entry))
        });
        Ok(Self(entries.collect()))
    }

    /// Adds the models of `other` that are not here yet.
    pub fn merge(&mut self, other: &Self) {
        for (id, entry) in &other.0 {
            if !self.0.contains_key(id) {
                self.0.insert(id.clone(), entry.clone());
            }
        }
    }

    /// Adds a model that clients know by another name than servers, with what is known of its targets: the first of them that is here. A name
    /// that is here already is what it was renamed from, so it becomes the target's.
    pub fn alias<'a>(&mut self, name: &str, targets: impl IntoIterator<Item = &'a str>, served: &Self) {
        let known = targets.into_iter().find_map(|target| served.0.get(target)).cloned();
        let mut entry = known.unwrap_or_else(|| {
            let fields = [("object", "model".into()), ("created", 0.into()), ("owned_by", "attache".into())];
            fields.map(|(key, value): (&str, Value)| (key.to_owned(), value)).into_iter().collect()
        });
        entry.insert("id".to_owned(), name.into());
        self.0.insert(name.to_owned(), entry);
    }

    /// Leaves only the models whose ids are wanted.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|id, _| wanted(id));
    }

    /// The model of this id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&ModelEntry> {
        self.0.get(id)
    }

    /// The ids.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// As OpenAI's API answers, by id.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let data = self.0.values().cloned().map(Value::Object).collect();
        Value::Object(
            [("object".to_owned(), "list".into()), ("data".to_owned(), Value::Array(data))].into_iter().collect(),
        )
    }
}

/// The union of now, replaced as a whole.
#[derive(Debug, Default)]
pub struct ModelStore(ArcSwap<ModelList>);

impl ModelStore {
    /// The union of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<ModelList>> {
        self.0.load()
    }

    /// Replaces it.
    pub fn store(&self, list: ModelList) {
        self.0.store(Arc::new(list));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(ids: &[(&str, &str)]) -> ModelList {
        let data: Vec<Value> = ids.iter().map(|(id, owner)| json!({"id": id, "owned_by": owner})).collect();
        ModelList::read(json!({"object": "list", "data": data}).to_string().as_bytes()).unwrap()
    }

    #[test]
    fn answers_that_are_no_lists_are_told_apart() {
        assert!(matches!(ModelList::read(b"<html>"), Err(ModelListError::Json(_))));
        for other in ["{}", "[]", r#"{"data":{}}"#, r#"{"error":"no"}"#, "null"] {
            assert_eq!(ModelList::read(other.as_bytes()), Err(ModelListError::NoData), "{other}");
        }
        let many: Vec<Value> = (0..=MAX_MODELS).map(|n| json!({"id": n.to_string()})).collect();
        let many = json!({ "data": many }).to_string();
        assert_eq!(ModelList::read(many.as_bytes()), Err(ModelListError::TooMany(MAX_MODELS + 1)));
        let odd = ModelList::read(br#"{"data":[1,{"id":2},{"object":"model"},{"id":"m","x":[1]}]}"#).unwrap();
        assert_eq!(odd.to_json(), json!({"object": "list", "data": [{"id": "m", "x": [1]}]}));
    }

    #[test]
    fn a_union_has_each_id_once_in_order_and_the_first_to_say_so_has_the_word() {
        let mut union = list(&[("b", "first"), ("c", "first")]);
        union.merge(&list(&[("c", "second"), ("a", "second")]));
        let data = json!([{"id": "a", "owned_by": "second"}, {"id": "b", "owned_by": "first"}, {"id": "c", "owned_by": "first"}]);
        assert_eq!(union.to_json()["data"], data);
    }

    #[test]
    fn an_alias_tells_what_is_known_of_its_target() {
        let served = list(&[("llama", "meta"), ("gpt", "openai")]);
        let mut shown = served.clone();
        shown.alias("fast", ["absent", "llama"], &served);
        shown.alias("gpt", ["llama"], &served);
        shown.alias("soon", ["absent"], &served);
        let owner = |id| shown.get(id).unwrap()["owned_by"].clone();
        assert_eq!((owner("fast"), owner("gpt"), owner("soon")), (json!("meta"), json!("meta"), json!("attache")));
        assert!(["fast", "gpt", "soon"].iter().all(|id| shown.get(id).unwrap()["id"] == *id));
        assert_eq!(shown.len(), 4);
    }
}
