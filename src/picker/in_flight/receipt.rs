//! The route receipt: a response header that says where the request went and why, for those who operate the pool.

use crate::decide::Plan;
use crate::split::PrefillOutcome;
use attache_pool::Endpoint;
use attache_types::ids::EndpointId;
use std::fmt::Write;
use std::time::Duration;

/// Response header with the receipt. Sent only with `exchange.routeHeader`, because it shows internal names.
pub(super) const ROUTE_HEADER: &str = "x-attache-route";
/// 256: most bytes of the receipt. A parameter that does not fit is left out.
const MAX_RECEIPT_BYTES: usize = 256;
/// 96: most bytes of a name or a reason, without escapes. Names of pods have up to 63.
const MAX_TEXT_BYTES: usize = 96;

/// What the receipt says about the decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouteReceipt {
    picked: EndpointId,
    cached_tokens: u32,
    prompt_tokens: u32,
    queued: Option<Duration>,
    reason: &'static str,
}

impl RouteReceipt {
    /// The receipt of the request of `plan`, which goes to `picked`.
    pub(super) fn of(plan: &Plan, picked: &Endpoint) -> Self {
        Self {
            picked: picked.id,
            cached_tokens: plan.matched_tokens,
            prompt_tokens: plan.prompt_tokens,
            queued: plan.queued,
            reason: plan.decision.split.as_ref().map_or(plan.decision.reason, |split| split.reason),
        }
    }

    /// The header's value, a dictionary of structured fields (RFC 9651) with one member: `endpoint="vllm-3";
    /// cached=1024; prompt=1500; queue_ms=3; reason="least predicted cost"`. `served` is the endpoint that responds.
    pub(super) fn show(&self, served: &Endpoint, prefill: Option<&PrefillOutcome>) -> String {
        let mut receipt = format!("endpoint={}", quoted(&served.spec.name));
        let mut add = |parameter: std::fmt::Arguments<'_>| {
            let before = receipt.len();
            let _ = write!(receipt, "; {parameter}");
            if receipt.len() > MAX_RECEIPT_BYTES {
                receipt.truncate(before);
            }
        };
        add(format_args!("cached={}", self.cached_tokens));
        add(format_args!("prompt={}", self.prompt_tokens));
        add(format_args!("queue_ms={}", self.queued.unwrap_or_default().as_millis()));
        if served.id != self.picked {
            add(format_args!("retried"));
        }
        add(format_args!("reason={}", quoted(self.reason)));
        if let Some(worker) = prefill.and_then(|outcome| outcome.prefill.as_ref()) {
            add(format_args!("prefill={}", quoted(&worker.spec.name)));
        }
        receipt
    }
}

/// `text` as a string of structured fields, cut after [`MAX_TEXT_BYTES`]. Characters that are not allowed become `?`.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars().take(MAX_TEXT_BYTES) {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            ' '..='~' => quoted.push(character),
            _ => quoted.push('?'),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::EndpointSpec;
    use std::sync::Arc;

    fn endpoint(id: u32, name: &str) -> Endpoint {
        let spec = EndpointSpec { name: name.into(), ..EndpointSpec::at(([10, 0, 0, 1], 8000 + id as u16).into()) };
        Endpoint::new(EndpointId(id), spec)
    }

    fn receipt() -> RouteReceipt {
        let (cached_tokens, prompt_tokens, queued) = (1_024, 1_500, Some(Duration::from_micros(3_400)));
        RouteReceipt { picked: EndpointId(0), cached_tokens, prompt_tokens, queued, reason: "least predicted cost" }
    }

    #[test]
    fn receipt_names_endpoint_cache_queue_and_reason() {
        let shown = receipt().show(&endpoint(0, "vllm-3"), None);
        let expected = "endpoint=\"vllm-3\"; cached=1024; prompt=1500; queue_ms=3; reason=\"least predicted cost\"";
        assert_eq!(shown, expected);
        let split = PrefillOutcome { prefill: Some(Arc::new(endpoint(1, "prefill-0"))), ..PrefillOutcome::default() };
        let shown = RouteReceipt { queued: None, ..receipt() }.show(&endpoint(2, "vllm-4"), Some(&split));
        let expected = "endpoint=\"vllm-4\"; cached=1024; prompt=1500; queue_ms=0; retried; \
                        reason=\"least predicted cost\"; prefill=\"prefill-0\"";
        assert_eq!(shown, expected);
    }

    #[test]
    fn names_are_escaped_and_the_receipt_is_short() {
        let shown = receipt().show(&endpoint(0, "a\"b\\c\r\nd\u{e9}"), None);
        assert!(shown.starts_with("endpoint=\"a\\\"b\\\\c??d?\"; cached=1024;"), "{shown}");
        for name in ["x".repeat(300), "\"".repeat(300), "\u{1f600}".repeat(300)] {
            let split = PrefillOutcome { prefill: Some(Arc::new(endpoint(1, &name))), ..PrefillOutcome::default() };
            let shown = receipt().show(&endpoint(0, &name), Some(&split));
            assert!(shown.len() <= MAX_RECEIPT_BYTES && shown.is_ascii(), "{} bytes: {shown}", shown.len());
            assert!(shown.contains("; cached=1024; prompt=1500; queue_ms=3"), "{shown}");
        }
    }
}
