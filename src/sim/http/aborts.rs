//! Requests that can be ended by their id, as SGLang's `/abort_request` does it: those that wait for the other leg.

use super::body::{SimBody, full_response};
use super::error::ApiError;
use super::{Call, Server};
use bytes::Bytes;
use http::{Response, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use std::collections::HashMap;
use tokio_util::sync::CancellationToken;

/// Who waits, by request id.
#[derive(Debug, Default)]
pub(super) struct Aborts {
    waiting: Mutex<HashMap<String, CancellationToken>>,
}

#[derive(Debug, Deserialize)]
struct AbortRequest {
    rid: Option<String>,
    #[serde(default)]
    abort_all: bool,
}

/// A place in the register; it is left when this is dropped.
pub(super) struct Waiting<'a> {
    aborts: &'a Aborts,
    rid: String,
    token: CancellationToken,
}

impl Aborts {
    pub(super) fn register(&self, rid: &str) -> Waiting<'_> {
        let token = CancellationToken::new();
        self.waiting.lock().insert(rid.to_owned(), token.clone());
        Waiting { aborts: self, rid: rid.to_owned(), token }
    }
}

impl Waiting<'_> {
    pub(super) async fn cancelled(&self) {
        self.token.cancelled().await;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.aborts.waiting.lock().remove(&self.rid);
    }
}

/// 200 whether there is such a request or not, as in SGLang.
pub(super) fn abort(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: AbortRequest = call.json()?;
    for (rid, token) in server.aborts.waiting.lock().iter() {
        if request.abort_all || request.rid.as_ref() == Some(rid) {
            token.cancel();
        }
    }
    Ok(full_response(StatusCode::OK, None, Bytes::new()))
}
