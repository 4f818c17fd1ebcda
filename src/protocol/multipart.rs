//! Reads the text fields of a `multipart/form-data` body: `model`, and those that determine the amount of work.
//!
//! [`scanner`] takes the body in chunks of any size and skips files by their boundary, [`head`] reads the headers of
//! one part. Nothing is rejected here. A form that servers might read differently has no model, and the reason for it.

mod head;
mod scanner;

pub use scanner::{FormModel, FormScanner};

use super::{Model, Request};
use attache_types::limits::Limits;
use std::borrow::Cow;

/// The [`Request::unread_model`] of a form that ends before its last boundary.
pub const CUT_FORM: &str = "the form ends before its last boundary";

/// Reads a form, or the start of one.
#[must_use]
pub(crate) fn read<'a>(content_type: Option<&str>, body: &'a [u8], limits: &Limits) -> Request<'a> {
    let mut scanner = FormScanner::new(content_type, limits);
    scanner.push(body);
    let unread_model = match scanner.model() {
        FormModel::Named | FormModel::Absent => None,
        FormModel::Unreadable(why) => Some(why),
        FormModel::Pending => Some(CUT_FORM),
    };
    let span = scanner.model_span();
    let name = span.clone().and_then(|span| std::str::from_utf8(body.get(span)?).ok());
    let model = name.zip(span).map(|(name, span)| Model { name: Cow::Borrowed(name), span });
    let numbers = scanner.numbers();
    Request {
        model,
        unread_model,
        is_form: true,
        stream: numbers.stream,
        max_tokens: numbers.max_tokens,
        choices: numbers.choices.max(1),
        ..Request::default()
    }
}

/// Whether a content type is that of forms.
#[must_use]
pub fn is_form(content_type: Option<&str>) -> bool {
    let media_type = content_type.and_then(|value| value.split(';').next()).unwrap_or_default();
    media_type.trim().eq_ignore_ascii_case("multipart/form-data")
}

/// Returns `body`, a form without a model, with a part for this one before its first part. Unchanged if the form has
/// no part.
#[must_use]
pub fn insert_form_model(content_type: Option<&str>, body: &[u8], name: &str) -> Vec<u8> {
    let Some(boundary) = content_type.and_then(head::boundary) else { return body.to_vec() };
    let line = [b"--", boundary.as_slice()].concat();
    let begins_line = |at: &usize| *at == 0 || body.get(..*at).is_some_and(|before| before.ends_with(b"\r\n"));
    let Some(at) = memchr::memmem::find_iter(body, &line).find(begins_line) else { return body.to_vec() };
    let (before, after) = body.split_at(at);
    let part = b"\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n";
    [before, &line, part, name.as_bytes(), b"\r\n", after].concat()
}

#[cfg(test)]
mod tests;
