//! Headers that Attaché adds to the response.

use super::charges::Charges;
use super::fields::ResponseHead;
use super::prefill::PinnedBlocks;
use super::receipt::{ROUTE_HEADER, RouteReceipt};
use crate::settings::ExchangeSettings;
use attache_pool::Endpoint;
use attache_scheduling::Strategy;
use attache_scheduling::plugin::ResponseHeaders;
use std::borrow::Cow;
use std::sync::Arc;

/// Value of the conformance suite's response header if the gateway does not report the served endpoint, as in GIE's
/// `lwepp`.
const NO_SERVED_ENDPOINT: &str = "fail: missing envoy lb metadata";

/// What determines the headers to add, besides the response itself.
#[derive(Debug)]
pub(super) struct AddedHeaders {
    strategy: Arc<dyn Strategy>,
    profile: Option<Arc<str>>,
    /// Add those of the conformance suite.
    conformance: bool,
    /// Name the prefill worker.
    names_prefill: bool,
    /// The route receipt, if it is sent.
    receipt: Option<RouteReceipt>,
}

impl AddedHeaders {
    /// Those of the strategy, which `profile` selected, and those with addresses that `settings` enable.
    pub(super) fn new(
        strategy: Arc<dyn Strategy>,
        profile: Option<Arc<str>>,
        receipt: Option<RouteReceipt>,
        settings: &ExchangeSettings,
    ) -> Self {
        let (conformance, names_prefill) = (settings.conformance_headers, settings.prefill_endpoint_header);
        Self { strategy, profile, conformance, names_prefill, receipt }
    }

    /// The headers to add to a response of `endpoint`.
    pub(super) fn of(
        &self,
        head: &ResponseHead<'_>,
        endpoint: &Endpoint,
        charges: &Charges,
        blocks: &PinnedBlocks,
    ) -> ResponseHeaders {
        let mut set = ResponseHeaders::new();
        // No session affinity to an endpoint that just failed.
        if head.status < 500 {
            self.strategy.response_headers(endpoint, &mut set);
        }
        if let Some(profile) = &self.profile {
            set.push(("x-aibrix-config-profile".into(), profile.to_string()));
        }
        let named = |(name, value): (&'static str, String)| (Cow::Borrowed(name), value);
        set.extend(charges.headers().map(named));
        set.extend(blocks.outcome.iter().flat_map(|outcome| outcome.headers(self.names_prefill)).map(named));
        if let Some(receipt) = &self.receipt {
            set.push((ROUTE_HEADER.into(), receipt.show(endpoint, blocks.outcome.as_ref())));
        }
        if self.conformance {
            let served = head.reported.unwrap_or(NO_SERVED_ENDPOINT);
            set.push(("x-conformance-test-served-endpoint".into(), served.to_owned()));
            set.push(("x-went-into-resp-headers".into(), "true".to_owned()));
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::PrefillOutcome;
    use attache_pool::EndpointSpec;
    use attache_scheduling::{Candidate, PickContext, Ranking};
    use attache_types::ids::EndpointId;
    use attache_types::rng::PickRng;

    /// A strategy with session affinity.
    #[derive(Debug)]
    struct Sticky;

    impl Strategy for Sticky {
        fn rank(&self, _: &PickContext<'_>, _: &[Candidate<'_>], _: &mut PickRng, _: &mut Ranking) {}

        fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
            headers.push(("x-session".into(), endpoint.authority.to_string()));
        }
    }

    #[test]
    fn headers_depend_on_status_split_and_settings() {
        let endpoint = Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(([10, 0, 0, 1], 8000).into())));
        let outcome = PrefillOutcome { prefill: Some(endpoint.clone()), ..PrefillOutcome::default() };
        let shown = ExchangeSettings {
            conformance_headers: true,
            prefill_endpoint_header: true,
            ..ExchangeSettings::default()
        };
        for (status, settings, outcome, names) in [
            (200, ExchangeSettings::default(), None, &["x-session"][..]),
            (503, ExchangeSettings::default(), None, &[]),
            (503, ExchangeSettings::default(), Some(outcome), &["x-attache-disaggregation"]),
            (200, shown, None, &["x-session", "x-conformance-test-served-endpoint", "x-went-into-resp-headers"]),
        ] {
            let head = ResponseHead { status, ..ResponseHead::default() };
            let (charges, blocks) = (Charges(Default::default()), PinnedBlocks { outcome, release: None });
            let added =
                AddedHeaders::new(Arc::new(Sticky), None, None, &settings).of(&head, &endpoint, &charges, &blocks);
            assert_eq!(added.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), names);
        }
    }
}
