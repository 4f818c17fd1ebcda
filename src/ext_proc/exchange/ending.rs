//! `POST /finish_session` through the gateway: Attaché responds itself. Trainers and agents send it to the router that
//! they know, which is the gateway.

use super::{Actions, Exchange, RequestSide};
use crate::reply;
use attache_picker::event::{DecisionRecord, End, SessionEnd, StreamOutcome};
use attache_protocol::Api;
use attache_protocol::api::decoded_path;
use attache_types::clock::Timestamp;
use reqwest::Url;
use serde_json::json;

/// The path of the call, as in vLLM's router.
const PATH: &str = "/finish_session";

impl Exchange {
    /// Ends the session that a `POST /finish_session` names, and responds. Returns false for other requests.
    pub(super) fn finishes_session(&mut self, now: Timestamp, out: &mut Actions) -> bool {
        let (method, path) = (self.head.method(), self.head.path());
        if self.api != Api::Other || method != "POST" || decoded_path(path) != PATH || self.head.is_upgrade() {
            return false;
        }
        let (id, tenant) = (session_id(path), self.head.tenant().name());
        let ended = match self.processor.picker.end_session(tenant, id.as_deref(), SessionEnd::Gateway, now) {
            Ok(ended) => ended,
            Err(error) => {
                self.refuse(&error, now, out);
                return true;
            }
        };
        // Clients do not learn the addresses of servers.
        let body = json!({
            "session_id": ended.session_id,
            "known": ended.known,
            "is_program": ended.was.is_program,
            "requests": ended.was.requests,
            "in_flight": ended.was.in_flight,
        });
        self.answer_itself(body.to_string().into_bytes(), now, out);
        true
    }

    /// Responds with this JSON. As after a rejection, Attaché ignores all later messages of this stream.
    pub(super) fn answer_itself(&mut self, body: Vec<u8>, now: Timestamp, out: &mut Actions) {
        self.request = RequestSide::Refused;
        self.settle(StreamOutcome::Answered);
        let end = End::Complete.label();
        self.end_trace(now, |exchange| DecisionRecord { status: 200, end, ..exchange.unrouted(now) });
        out.push_back(reply::answer(body));
    }
}

/// The query key `session_id` of this path.
fn session_id(path: &str) -> Option<String> {
    let url = Url::parse("http://gateway").ok()?.join(path).ok()?;
    url.query_pairs().find(|(key, _)| key == "session_id").map(|(_, id)| id.into_owned())
}

#[cfg(test)]
mod tests {
    use super::session_id;

    #[test]
    fn session_id_is_read_from_the_query() {
        for (path, id) in [
            ("/finish_session?session_id=a", Some("a")),
            ("/finish_session?x=1&session_id=a%20b%2Bc+d", Some("a b+c d")),
            ("/finish_session?session_id=a?b", Some("a?b")),
            ("/finish_session?session_id=", Some("")),
            ("/finish_session?session=a", None),
            ("/finish_session", None),
        ] {
            assert_eq!(session_id(path).as_deref(), id, "{path}");
        }
    }
}
