//! Finds the `model` field of a `multipart/form-data` body (audio uploads) in a prefix of limited size.
//!
//! The caller passes the bytes that have arrived so far; files are skipped and never stored. Nothing is rejected here:
//! without a readable field, the request has no model.

use super::{Model, Request};
use attache_types::limits::Limits;
use memchr::memmem;
use std::borrow::Cow;

/// Longest boundary that RFC 2046 allows, in bytes.
const MAX_BOUNDARY: usize = 70;

/// Reads `model` and `stream` from the bytes received so far, up to [`Limits::max_multipart_sniff_bytes`]. Two
/// different `model` fields count as none, because servers disagree on which one counts.
#[must_use]
pub(crate) fn sniff<'a>(content_type: Option<&str>, body: &'a [u8], limits: &Limits) -> Request<'a> {
    let mut request = Request::default();
    let Some(boundary) = content_type.and_then(boundary) else { return request };
    let window = body.get(..limits.max_multipart_sniff_bytes as usize).unwrap_or(body);
    let mut conflict = false;
    for (name, value) in FormFields::new(window, boundary) {
        match name {
            "model" => {
                let sound = !value.is_empty()
                    && value.len() <= limits.max_model_bytes as usize
                    && !value.chars().any(char::is_control);
                match &request.model {
                    Some(model) => conflict |= model.name != value,
                    None if sound => request.model = Some(Model { name: Cow::Borrowed(value), span: 0..0 }),
                    None => {}
                }
            }
            "stream" => request.stream = value.eq_ignore_ascii_case("true") || value == "1",
            _ => {}
        }
    }
    if conflict {
        request.model = None;
    }
    request
}

/// Returns the boundary named in a content type.
fn boundary(content_type: &str) -> Option<&str> {
    let mut parameters = content_type.split(';');
    let media_type = parameters.next()?.trim();
    if !media_type.eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    parameters
        .filter_map(|p| p.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("boundary"))
        .map(|(_, value)| value.trim().trim_matches('"'))
        .filter(|b| (1..=MAX_BOUNDARY).contains(&b.len()))
}

/// Iterates over the complete text fields of a form, in order; parts with a file name are skipped.
struct FormFields<'a> {
    rest: &'a [u8],
    delimiter: Vec<u8>,
}

impl<'a> FormFields<'a> {
    fn new(window: &'a [u8], boundary: &str) -> Self {
        let mut delimiter = b"\r\n--".to_vec();
        delimiter.extend_from_slice(boundary.as_bytes());
        // The first delimiter has no line end before it; a preamble ends with one.
        let first = delimiter.get(2..).unwrap_or_default();
        let rest = match window.strip_prefix(first) {
            Some(rest) => rest,
            None => after(window, &delimiter).unwrap_or_default(),
        };
        Self { rest, delimiter }
    }
}

impl<'a> Iterator for FormFields<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // A line end follows a delimiter, or `--` after the last part.
            let part = self.rest.strip_prefix(b"\r\n")?;
            let split = memmem::find(part, b"\r\n\r\n")?;
            let (headers, body) = (part.get(..split)?, part.get(split + 4..)?);
            let end = memmem::find(body, &self.delimiter)?;
            self.rest = body.get(end + self.delimiter.len()..)?;
            let field = std::str::from_utf8(headers).ok().and_then(field_name);
            if let (Some(name), Some(value)) = (field, body.get(..end).and_then(|v| std::str::from_utf8(v).ok())) {
                return Some((name, value));
            }
        }
    }
}

/// Returns the name of a text field, from the headers of its part.
fn field_name(headers: &str) -> Option<&str> {
    let disposition = headers.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    let mut parameters = disposition.split(';').map(str::trim);
    if !parameters.next()?.eq_ignore_ascii_case("form-data") {
        return None;
    }
    let mut field = None;
    for (name, value) in parameters.filter_map(|p| p.split_once('=')) {
        match name.trim() {
            n if n.eq_ignore_ascii_case("name") => field = Some(value.trim().trim_matches('"')),
            n if n.eq_ignore_ascii_case("filename") || n.eq_ignore_ascii_case("filename*") => return None,
            _ => {}
        }
    }
    field
}

fn after<'a>(haystack: &'a [u8], needle: &[u8]) -> Option<&'a [u8]> {
    memmem::find(haystack, needle).and_then(|at| haystack.get(at + needle.len()..))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=\"X-1\"";

    fn form(parts: &[(&str, &str)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (headers, value) in parts {
            body.extend_from_slice(format!("--X-1\r\n{headers}\r\n\r\n{value}\r\n").as_bytes());
        }
        body.extend_from_slice(b"--X-1--\r\n");
        body
    }

    fn named(name: &str) -> String {
        format!("Content-Disposition: form-data; name=\"{name}\"")
    }

    fn model(content_type: &str, body: &[u8]) -> Option<String> {
        sniff(Some(content_type), body, &Limits::default()).model.map(|m| m.name.into_owned())
    }

    #[test]
    fn model_is_found_before_or_after_a_file() {
        let file = ("content-disposition: form-data; name=\"file\"; filename=\"model\"", "RIFF\r\n--X-\r\n\0");
        let before = form(&[(&named("model"), "whisper"), file]);
        let after = form(&[file, (&named("model"), "whisper"), (&named("stream"), "true")]);
        assert_eq!(model(TYPE, &before).as_deref(), Some("whisper"));
        assert_eq!(model(TYPE, &after).as_deref(), Some("whisper"));
        assert_eq!(model("Multipart/Form-Data;charset=x;Boundary=X-1", &after).as_deref(), Some("whisper"));
        assert!(sniff(Some(TYPE), &after, &Limits::default()).stream);
        let mut preamble = b"ignored\r\n".to_vec();
        preamble.extend_from_slice(&before);
        assert_eq!(model(TYPE, &preamble).as_deref(), Some("whisper"));
    }

    #[test]
    fn ambiguous_model_counts_as_none() {
        let long = "m".repeat(257);
        let cases: &[&[(&str, &str)]] = &[
            &[],
            &[(&named("model"), "")],
            &[(&named("model"), &long)],
            &[(&named("model"), "a\u{7}")],
            &[(&named("model"), "a"), (&named("model"), "b")],
            &[("Content-Disposition: form-data; name=\"model\"; filename=\"m\"", "a")],
            &[("Content-Type: text/plain", "a")],
        ];
        for parts in cases {
            assert_eq!(model(TYPE, &form(parts)), None, "{parts:?}");
        }
        let body = form(&[(&named("model"), "a")]);
        assert_eq!(model("application/json", &body), None);
        assert_eq!(model("multipart/form-data", &body), None);
        assert_eq!(sniff(None, &body, &Limits::default()), Request::default());
    }

    #[test]
    fn model_is_found_once_complete_and_within_the_limit() {
        let body = form(&[(&named("language"), "en"), (&named("model"), "whisper"), (&named("x"), "y")]);
        let end = memmem::find(&body, b"whisper").map(|at| at + "whisper\r\n--X-1".len());
        for n in 0..=body.len() {
            let expected = (Some(n) >= end).then_some("whisper");
            assert_eq!(model(TYPE, body.get(..n).unwrap_or_default()).as_deref(), expected, "{n}");
        }
        let limits = Limits { max_multipart_sniff_bytes: 100, ..Limits::default() };
        assert_eq!(sniff(Some(TYPE), &body, &limits).model, None);
    }
}
