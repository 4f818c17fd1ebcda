//! The reply that routes a request to its endpoint, with the other changes of the request's headers.

use super::Exchange;
use super::splitting::sidecar_headers;
use crate::mode::BodyMode;
use crate::{metadata, reply};
use attache_disagg::Mode;
use attache_picker::decide::Plan;
use attache_picker::hints::RANK_HEADER;
use attache_picker::tenant;
use attache_scheduling::router::Destination;
use attache_telemetry::trace::RequestSpan;
use attache_types::limits::ADDED_HEADERS;
use envoy_types::pb::envoy::config::core::v3::HeaderValueOption;
use envoy_types::pb::envoy::service::ext_proc::v3::{CommonResponse, HeaderMutation};
use envoy_types::pb::google::protobuf::Struct;

impl Exchange {
    /// The destination as header and as dynamic metadata, with the other changes of the request's headers.
    pub(super) fn destination(&self, plan: &Plan) -> (CommonResponse, Option<Struct>) {
        let picks = &plan.decision.picks;
        let value = match (plan.runtime.pool.destination, picks.as_slice()) {
            (Destination::Single, [first, ..]) | (_, [first]) => first.authority.to_string(),
            (_, all) => {
                let list: Vec<&str> = all.iter().map(|e| &*e.authority).collect();
                list.join(",")
            }
        };
        let names = &plan.runtime.pool.destination_names;
        let mut set_headers: Vec<HeaderValueOption> = Vec::with_capacity(2 + names.headers.len());
        set_headers.extend(names.headers.iter().map(|name| reply::set(name, value.as_str())));
        if let Some(name) = &names.strategy_header {
            set_headers.push(reply::set(name, &*plan.strategy_name));
        }
        // Envoy requires the right length in body modes that fix it, and removes the header in the others.
        if let Some(length) = plan.new_length(self.head.content_length()) {
            set_headers.push(reply::set("content-length", length.to_string()));
        }
        let mut remove_headers = self.untrusted_headers(|name| names.all_headers().any(|set| set == name));
        if let Some(Mode::Header { .. }) = plan.runtime.pool.disagg.as_deref() {
            sidecar_headers(&plan.decision, &mut set_headers, &mut remove_headers);
        }
        if plan.hints.drops_rank {
            remove_headers.push(RANK_HEADER.to_owned());
        }
        for (name, value) in plan.hints.headers() {
            // Envoy must not remove a header that Attaché sets.
            remove_headers.retain(|removed| removed != name);
            set_headers.push(reply::set(name, value));
        }
        if let Some(id) = &plan.request_id {
            set_headers.push(reply::set("x-request-id", &**id));
        }
        // It only helps to find the request. One header too many would make Envoy reject it.
        let most = self.config.limits.max_headers as usize + ADDED_HEADERS;
        if self.head.count() + set_headers.len() < most {
            let context = self.span.as_ref().and_then(RequestSpan::header);
            set_headers.extend(context.map(|context| reply::set("traceparent", context)));
        }
        // A compressed response can't be read. Envoy's own compressor may still compress it for the client. The header
        // replaces one of the client.
        let shows_response = self.modes().response != BodyMode::None;
        if shows_response && !self.config.settings.keep_accept_encoding && plan.reads_response(self.api) {
            set_headers.extend(self.head.accepted_encodings().map(|name| reply::set(name, "identity")));
        }
        let mut response = reply::common(HeaderMutation { set_headers, remove_headers });
        response.clear_route_cache = true;
        let explains = self.config.settings.explain.metadata;
        let scores = if explains { plan.decision.scores() } else { Vec::new() };
        (response, Some(metadata::destination(&names.metadata, &value, &scores)))
    }

    /// Headers of the request that must not reach the server, without those that Attaché sets (`is_set`).
    pub(super) fn untrusted_headers(&self, is_set: impl Fn(&str) -> bool) -> Vec<String> {
        let reserved = self.head.reserved(self.config.settings.trust_client_headers).filter(|name| !is_set(name));
        let mut headers: Vec<String> = reserved.map(str::to_owned).collect();
        headers.extend(tenant::untrusted(self.config.settings.tenant.as_ref(), &self.head));
        let of_other_pools = self.config.unshared_headers().iter().filter(|name| !is_set(name) && self.head.has(name));
        headers.extend(of_other_pools.map(|name| String::from(&**name)));
        headers
    }
}
