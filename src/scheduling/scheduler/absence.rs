//! Names why no prefill server may be asked for a request.

use super::{Scheduler, split};
use crate::plugin::PickContext;
use attache_pool::Roles;
use attache_types::error::{Reason, RequestError};
use std::collections::BTreeMap;

impl Scheduler {
    /// Why no prefill server of the pool may be asked, for people: how many there are, and what excludes them.
    #[must_use]
    pub fn absence(&self, cx: &PickContext<'_>) -> String {
        let known = cx.snapshot.endpoints.iter().filter(|state| state.endpoint.roles.has(Roles::PREFILL));
        let (mut count, mut reasons) = (0, BTreeMap::<&str, usize>::new());
        for state in known {
            count += 1;
            let reason = self.exclusion(cx, Roles::PREFILL, state);
            *reasons.entry(reason.unwrap_or("in no pair with the decode server")).or_default() += 1;
        }
        let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        match count {
            0 => "the pool has none".to_owned(),
            _ => format!("of {count}: {}", reasons.join(", ")),
        }
    }

    /// Error for a request that no endpoint serves whole, or that must be split, and for which there is no pair.
    pub(super) fn no_pair(&self, cx: &PickContext<'_>) -> RequestError {
        if !cx.splittable {
            return split::not_alone();
        }
        let help = match &self.split {
            Some(policy) if !policy.whole => "start one with the same labels, or an endpoint of `role: both`",
            _ => "start one with the same labels, or set `fallback: local`",
        };
        let message = format!("no prefill server is there for the request ({}); {help}", self.absence(cx));
        RequestError::new(Reason::NoPrefillEndpoint, message)
    }
}
