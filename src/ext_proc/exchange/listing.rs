//! Which models there are, answered for the whole pool in place of one of its servers.

use super::*;
use crate::config::settings::ModelsAnswer;
use crate::scheduling::router::RouteFacts;

/// Where the id of one model follows.
const ONE: &str = "/models/";

impl Exchange {
    /// Answers a request for the list of models, or for one of them, from what all servers say. False where this is no such request, servers
    /// are to answer it themselves, or nothing is known: then it goes its way.
    pub(super) fn lists_models(&mut self, now: Timestamp, out: &mut Actions) -> bool {
        if self.api != Api::Models
            || self.live.exchange.models != ModelsAnswer::Pool
            || self.head.method() != "GET"
            || self.head.is_upgrade()
        {
            return false;
        }
        let facts = RouteFacts { model: None, authority: self.head.authority(), called: calling::name(&self.called) };
        let list = self.live.router.models(facts, |name| self.head.get(name));
        if list.is_empty() {
            return false;
        }
        let body = match model_id(self.head.path()) {
            None => list.to_json(),
            Some(id) => match list.get(&id) {
                Some(entry) => serde_json::Value::Object(entry.clone()),
                None => {
                    let error = self.live.router.unknown_model(&id);
                    self.refuse(&error, now, out);
                    return true;
                }
            },
        };
        // As after a refusal, whatever else comes of this request is nothing to us.
        self.request = RequestSide::Refused;
        self.settle(Outcome::Answered);
        if let Some(span) = self.span.take() {
            span.end(200, None, now);
        }
        out.push_back(reply::answer(body.to_string().into_bytes()));
        true
    }
}

/// The id at the end of the path, `None` where the path names the list.
fn model_id(path: &str) -> Option<String> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let (_, id) = path.split_once(ONE)?;
    let id = percent_decoded(id.trim_end_matches('/'));
    (!id.is_empty()).then_some(id)
}

/// Clients that build paths from parts write the slashes of an id as `%2F`.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = |digit: u8| char::from(digit).to_digit(16);
        let escaped = match (first, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).and_then(|(h, l)| u8::try_from(16 * h + l).ok()),
            _ => None,
        };
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
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
