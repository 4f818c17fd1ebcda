//! Parser of JSON bodies: from bytes to a [`Request`] in one pass.
//!
//! [`reader`] has JSON's tokens, [`walk`] the limits, [`fields`] the members of each API, [`prompts`] and [`messages`]
//! the forms of prompts, [`scalars`] single values.

mod embeddings;
mod fields;
mod messages;
mod prompts;
mod reader;
mod scalars;
mod walk;

use super::{Api, Request};
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use fields::RequestBody;
pub(crate) use scalars::{count, flag};
use walk::Walk;

/// The byte order mark of UTF-8.
const MARK: &[u8] = b"\xEF\xBB\xBF";

/// Parses the body of a known API. `named` means that it must name a model if its API requires one.
pub(super) fn read<'a>(
    api: Api,
    content_type: Option<&str>,
    body: &'a [u8],
    limits: &Limits,
    named: bool,
) -> Result<Request<'a>, RequestError> {
    if let Some(form) = content_type.map(media_type).filter(|t| is_form(t)) {
        let got = if form.starts_with(|c: char| c.eq_ignore_ascii_case(&'m')) { "a multipart body" } else { "a form" };
        let message = format!("content-type must be application/json, got {got}");
        return Err(RequestError::new(Reason::UnsupportedMediaType, message));
    }
    let unmarked = without_mark(body);
    let text = text(unmarked)?;
    let mut request =
        Walk::read(text, limits, RequestBody::new(api, limits, body.len(), named && api.requires_model()))?;
    if let Some(model) = &mut request.model {
        let mark = body.len() - unmarked.len();
        model.span = model.span.start + mark..model.span.end + mark;
    }
    Ok(request)
}

/// Returns a JSON body without its byte order mark, which Python's `json.loads` ignores as well.
pub(super) fn without_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(MARK).unwrap_or(body)
}

/// Inspects the body of an unknown API: known members are used, nothing is rejected.
pub(super) fn glance<'a>(body: &'a [u8], limits: &Limits) -> Request<'a> {
    read(Api::Other, None, body, limits, true).unwrap_or_default()
}

/// Returns the error for a body without a model.
pub(super) fn missing_model(limits: &Limits) -> RequestError {
    scalars::invalid_model(limits, "nothing")
}

/// Returns the body as text.
fn text(body: &[u8]) -> Result<&str, RequestError> {
    if body.is_empty() {
        return Err(RequestError::new(Reason::EmptyBody, "the body is empty, expected a JSON object"));
    }
    if matches!(body, [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] | [0, _, ..] | [_, 0, ..]) {
        let message = "invalid JSON: got UTF-16 or UTF-32, expected UTF-8";
        return Err(RequestError::new(Reason::InvalidJson, message));
    }
    std::str::from_utf8(body).map_err(|e| {
        let message = format!("invalid UTF-8 in the body at byte offset {}", e.valid_up_to());
        RequestError::new(Reason::InvalidUtf8, message)
    })
}

fn media_type(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

fn is_form(media_type: &str) -> bool {
    media_type.eq_ignore_ascii_case("application/x-www-form-urlencoded")
        || media_type.get(..10).is_some_and(|t| t.eq_ignore_ascii_case("multipart/"))
}

#[cfg(test)]
mod tests;
