//! The models that the servers of a pool list at `GET /v1/models`, and the union of these lists.
//!
//! Written by `scrape::models`, read by the router when a client requests the list. No I/O.

use arc_swap::{ArcSwap, Guard};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most models that are read from one server. A base model with a thousand adapters occurs in practice,
/// a hundred thousand do not.
pub const MAX_MODELS: usize = 4_096;

/// Description of a model in OpenAI's fields (`id`, `object`, `created`, `owned_by`) and those that the server adds.
pub type ModelEntry = Map<String, Value>;

/// A list of models, sorted by id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelList(BTreeMap<String, ModelEntry>);

/// The reason for which a response is not a valid list of models.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelListError {
    /// The response is not valid JSON.
    #[error("the list of models is not JSON: {0}")]
    Json(String),
    /// The JSON has no array `data`.
    #[error("the response has no list `data`")]
    NoData,
    /// The list exceeds [`MAX_MODELS`].
    #[error("the server lists {0} models, {MAX_MODELS} are read")]
    TooMany(usize),
}

impl ModelList {
    /// Parses a server's response. Elements without an `id` are skipped.
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

    /// Adds the models of `other` that this list does not have.
    pub fn merge(&mut self, other: &Self) {
        for (id, entry) in &other.0 {
            if !self.0.contains_key(id) {
                self.0.insert(id.clone(), entry.clone());
            }
        }
    }

    /// Adds a model under a name that only clients use. It copies the description of the first target that
    /// `served` has. If the list has the name already, the existing entry describes the model before its rename,
    /// so it becomes the target's.
    pub fn alias<'a>(&mut self, name: &str, targets: impl IntoIterator<Item = &'a str>, served: &Self) {
        let known = targets.into_iter().find_map(|target| served.0.get(target)).cloned();
        let mut entry = known.unwrap_or_else(|| {
            let fields = [("object", "model".into()), ("created", 0.into()), ("owned_by", "attache".into())];
            fields.map(|(key, value): (&str, Value)| (key.to_owned(), value)).into_iter().collect()
        });
        entry.insert("id".to_owned(), name.into());
        self.0.insert(name.to_owned(), entry);
    }

    /// Keeps only the models for whose ids `wanted` returns true.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|id, _| wanted(id));
    }

    /// Returns the description of the model with this id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&ModelEntry> {
        self.0.get(id)
    }

    /// Returns the ids of all models.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Whether the list has no models.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of models.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the list in the format of OpenAI's API, sorted by id.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let data = self.0.values().cloned().map(Value::Object).collect();
        Value::Object(
            [("object".to_owned(), "list".into()), ("data".to_owned(), Value::Array(data))].into_iter().collect(),
        )
    }
}

/// The current union of a pool's lists, replaced as a whole.
#[derive(Debug, Default)]
pub struct ModelStore(ArcSwap<ModelList>);

impl ModelStore {
    /// Returns the current union.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<ModelList>> {
        self.0.load()
    }

    /// Replaces the union.
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
    fn responses_that_are_no_lists_are_distinguished() {
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
    fn union_has_each_id_once_and_the_first_description() {
        let mut union = list(&[("b", "first"), ("c", "first")]);
        union.merge(&list(&[("c", "second"), ("a", "second")]));
        let data = json!([
            {"id": "a", "owned_by": "second"},
            {"id": "b", "owned_by": "first"},
            {"id": "c", "owned_by": "first"},
        ]);
        assert_eq!(union.to_json()["data"], data);
    }

    #[test]
    fn alias_has_the_description_of_its_target() {
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
