//! `GET /v1/models` for the whole pool: Attaché responds itself, instead of one of the model servers.

use super::{Actions, Exchange};
use attache_picker::settings::ModelsAnswer;
use attache_protocol::Api;
use attache_protocol::api::decoded_path;
use attache_scheduling::router::RouteFacts;
use attache_types::clock::Timestamp;

/// Precedes the id of a model in the path.
const ONE: &str = "/models/";

impl Exchange {
    /// Responds to a request for the list of models, or for one model, with the models that all endpoints report.
    ///
    /// Returns false for other requests, if the configuration leaves the list to the model servers, or if no models
    /// are known yet. The request is then routed.
    pub(super) fn lists_models(&mut self, now: Timestamp, out: &mut Actions) -> bool {
        if self.api != Api::Models
            || self.config.settings.models != ModelsAnswer::Pool
            || self.head.method() != "GET"
            || self.head.is_upgrade()
        {
            return false;
        }
        let facts = RouteFacts { model: None, authority: self.head.authority(), called: self.call.authority() };
        let list = self.config.router.models(facts, |name| self.head.get(name));
        if list.is_empty() {
            return false;
        }
        let body = match model_id(self.head.path()) {
            None => list.to_json(),
            Some(id) => match list.get(&id) {
                Some(entry) => serde_json::Value::Object(entry.clone()),
                None => {
                    let error = self.config.router.unknown_model(&id);
                    self.refuse(&error, now, out);
                    return true;
                }
            },
        };
        self.answer_itself(body.to_string().into_bytes(), now, out);
        true
    }
}

/// The model id at the end of the path; `None` if the path is that of the list. Some clients write the slashes of an id
/// as `%2F`.
fn model_id(path: &str) -> Option<String> {
    let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let path = decoded_path(path);
    let (_, id) = path.split_once(ONE)?;
    (!id.is_empty()).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::model_id;

    #[test]
    fn paths_name_the_list_or_one_model() {
        for (path, id) in [
            ("/v1/models", None),
            ("/v1/models/", None),
            ("/v1/models?limit=3", None),
            ("/openai/v1/models/llama", Some("llama")),
            ("/v1/models/org/tiny/?x=/models/y", Some("org/tiny")),
            ("/v1/models/org%2Ftiny%2f", Some("org/tiny/")),
            ("/v1/models/100%", Some("100%")),
            ("/v1/models/%zz%4", Some("%zz%4")),
        ] {
            assert_eq!(model_id(path).as_deref(), id, "{path}");
        }
    }
}
