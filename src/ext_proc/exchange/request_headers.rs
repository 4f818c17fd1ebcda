//! The request headers of an exchange: client, tenant, API, limits, and whether they are enough to decide.

use super::{Actions, Exchange, ProtocolError, RequestSide};
use crate::metadata::{self, Attributes};
use crate::mode::BodyMode;
use crate::reply;
use attache_picker::body::too_large;
use attache_picker::event::Limit;
use attache_picker::head::Head;
use attache_picker::tenant::Tenant;
use attache_protocol::Api;
use attache_telemetry::trace::Step as TraceStep;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::{HeaderMutation, HttpHeaders};
use std::borrow::Cow;

impl Exchange {
    pub(super) fn on_request_headers(
        &mut self,
        message: HttpHeaders,
        metadata: Option<Metadata>,
        attributes: &Attributes,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        if self.request != RequestSide::Opened {
            return Err(ProtocolError("request headers twice"));
        }
        self.request = RequestSide::Collecting;
        self.connection = attributes.connection.map(f64::to_bits);
        self.take_subset(metadata.as_ref());
        self.head = Head::read(metadata::request_headers(message.headers));
        let claim = |namespace: &str, path: &[String]| metadata::claim(metadata.as_ref(), namespace, path);
        let tenant = Tenant::of(self.config.settings.tenant.as_ref(), &self.head, claim);
        self.head.belongs_to(tenant);
        self.head.identify_client(attributes.client_address.as_deref());
        let (api, id) = Api::from_path(self.head.path());
        self.response_id = id.map(Cow::into_owned);
        self.api = api;
        self.form = self.form_upload();
        self.begin_trace(now);
        if let Some(error) = self.refusal_by_headers() {
            self.refuse(&error, now, out);
            return Ok(());
        }
        if self.lists_models(now, out) || self.finishes_session(now, out) {
            return Ok(());
        }
        let modes = self.modes();
        if message.end_of_stream || modes.headers_first() || self.head.is_upgrade() {
            self.decide_at_headers(message.end_of_stream, now, out);
            return Ok(());
        }
        self.enter_step(TraceStep::Body, now);
        if matches!(modes.request, BodyMode::Buffered | BodyMode::Inside) {
            // In BUFFERED mode, Envoy sends the body only after this reply. The destination is in the reply to the
            // body. If that reply never comes and Envoy fails open, the client's own headers must not name a server.
            let mutation = HeaderMutation { remove_headers: self.untrusted_headers(|_| false), ..Default::default() };
            out.push_back(reply::request_headers(reply::common(mutation)));
        }
        Ok(())
    }

    fn refusal_by_headers(&self) -> Option<RequestError> {
        let limits = &self.config.limits;
        if self.head.bytes() > limits.max_header_bytes as usize {
            self.processor.metrics.limits.count(Limit::HeaderBytes);
            let got = self.head.bytes();
            let allowed = limits.max_header_bytes;
            return Some(RequestError::new(
                Reason::HeadersTooLarge,
                format!("the request's headers are {got} bytes, {allowed} are allowed"),
            ));
        }
        if self.head.count() > limits.max_headers as usize {
            self.processor.metrics.limits.count(Limit::Headers);
            let (got, allowed) = (self.head.count(), limits.max_headers);
            let message = format!("the request has {got} headers, {allowed} are allowed (`limits.maxHeaders`)");
            return Some(RequestError::new(Reason::HeadersTooLarge, message));
        }
        let announced = self.head.content_length().filter(|l| *l > limits.max_body_bytes && self.form.is_none())?;
        self.processor.metrics.limits.count(Limit::BodyBytes);
        Some(too_large(announced, limits.max_body_bytes))
    }

    pub(super) fn take_subset(&mut self, metadata: Option<&Metadata>) {
        if self.subset.is_some() || self.config.settings.disable_endpoint_subset_filter {
            return;
        }
        if let Some((subset, malformed)) = metadata.and_then(metadata::subset) {
            self.processor.metrics.subset_malformed.inc_by(malformed);
            self.subset = Some(subset);
        }
    }
}
