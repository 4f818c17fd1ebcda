//! Forms that arrive in chunks: they are held until the model is known, and their files are passed on as they arrive.

use super::Exchange;
use crate::mode::BodyMode;
use attache_protocol as protocol;
use attache_protocol::{BodyFormat, FormModel, FormScanner};
use attache_scheduling::router::RouteFacts;
use attache_types::error::{Reason, RequestError};

/// 64 KiB: how much of a form is held if no rule depends on its model. Most clients send `model` within that.
const MAX_UNRULED_BYTES: u64 = 64 << 10;

/// A form during its upload.
#[derive(Debug)]
pub(super) struct FormUpload {
    scanner: FormScanner,
    /// A rule depends on the model, so a form without a readable one is rejected.
    needs_model: bool,
}

impl Exchange {
    /// The form that the request's headers announce. `None` if the body is no form, or if Envoy holds it itself.
    pub(super) fn form_upload(&self) -> Option<Box<FormUpload>> {
        let has_form = matches!(self.api.body_format(), BodyFormat::Multipart | BodyFormat::Unknown)
            && matches!(self.modes().request, BodyMode::FullDuplex | BodyMode::Streamed | BodyMode::Inside)
            && protocol::is_form(self.head.content_type());
        has_form.then(|| {
            let called = self.call.authority();
            let facts = RouteFacts { model: None, authority: self.head.authority(), called };
            let needs_model = self.config.depends_on_model(facts, |name| self.head.get(name));
            let scanner = FormScanner::new(self.head.content_type(), &self.config.limits);
            Box::new(FormUpload { scanner, needs_model })
        })
    }

    /// Reads a chunk of the body before it is buffered.
    pub(super) fn read_form(&mut self, chunk: &[u8]) {
        if let Some(form) = &mut self.form {
            form.scanner.push(chunk);
        }
    }

    /// Whether enough of a form has arrived to decide.
    pub(super) fn form_suffices(&self) -> bool {
        let Some(form) = &self.form else { return false };
        form.scanner.model() != FormModel::Pending || self.body.len() >= self.max_form_bytes(form)
    }

    fn max_form_bytes(&self, form: &FormUpload) -> u64 {
        let allowed = u64::from(self.config.limits.max_multipart_sniff_bytes);
        if form.needs_model { allowed } else { allowed.min(MAX_UNRULED_BYTES) }
    }

    /// The length to which the body of a queued request may grow.
    pub(super) fn max_held_bytes(&self) -> u64 {
        let form = self.form.as_ref().map(|form| self.max_form_bytes(form)).unwrap_or_default();
        form.max(self.config.limits.max_body_bytes)
    }

    /// The error for a form whose further parts contradict the model that was decided on. Servers differ in which of two
    /// parts counts. A form without rules for its model is not read any further.
    pub(super) fn contradiction_in_form(&mut self, chunk: &[u8]) -> Option<RequestError> {
        let form = self.form.as_mut().filter(|form| form.needs_model)?;
        form.scanner.push(chunk);
        let FormModel::Unreadable(why) = form.scanner.model() else { return None };
        let message = format!("the form contradicts the `model` that its request was routed by: {why}");
        Some(RequestError::new(Reason::InvalidModel, message).param("model"))
    }
}
