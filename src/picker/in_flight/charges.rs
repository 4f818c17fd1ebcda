//! The usage that a request is charged in the quotas of its tenant and its model.

use crate::event::End;
use crate::quotas::{Permit, Permits};
use attache_protocol::Usage;
use attache_quota::Had;
use std::sync::Arc;

/// The reservations of one request in quotas, until its usage is known. Dropping them charges nothing.
#[derive(Debug)]
pub(super) struct Charges(pub(super) Permits);

impl Charges {
    /// Response headers that show the tenant's usage.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.0.iter().flat_map(Permit::headers)
    }

    /// A server has answered the request, which was for this model.
    pub(super) fn answered(&self, model: &Arc<str>) {
        self.0.iter().for_each(|permit| permit.answered(model));
    }

    /// The request has ended: charges its usage. About `output` tokens of the response have arrived.
    pub(super) fn settle(&mut self, usage: &Usage, output: u32, status: u16, end: End) {
        let had = actual_usage(usage, output, status, end);
        self.0.drain(..).for_each(|permit| permit.settle(had));
    }
}

/// The usage to charge to the quotas of tenant and model. About `output` tokens of the response have arrived.
///
/// Counts that the model server reports before the end are lower bounds. If the client disconnects, at least the
/// reservation is charged, because disconnecting would otherwise be free. The same holds for a form that contradicts
/// itself. Other requests that Attaché ends cost nothing.
fn actual_usage(usage: &Usage, output: u32, status: u16, end: End) -> Had {
    let (prompt, answer) = (usage.prompt_tokens.unwrap_or(0), usage.completion_tokens.unwrap_or(0));
    match end {
        End::Aborted | End::Evicted => Had::Nothing,
        End::Complete if usage.prompt_tokens.or(usage.completion_tokens).is_some() => {
            Had::Tokens(prompt.saturating_add(answer))
        }
        _ if status >= 400 => Had::Tokens(0),
        _ => Had::AtLeast { prompt, answer: answer.max(output.into()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::tests::fixture::Parts;
    use crate::quotas::Store;
    use attache_quota::{Limits, Subject};

    #[test]
    fn usage_is_charged_once_and_dropped_reservations_are_returned() {
        let limits = Limits { tokens_per_minute: Some(1_000), ..Limits::default() };
        let fixture = Parts { limits: Some(limits), ..Parts::default() }.build();
        let quotas = fixture.picker.config().quotas[0].clone();
        let Store::Memory(book) = quotas.store() else { panic!("no store is shared") };
        let reserve = || {
            let claim = quotas.settings().claim(Subject::Tenant, "t".into(), 100, 50);
            Charges([quotas.take(book, &claim).unwrap()].into_iter().collect())
        };
        // Each reservation sees the usage before it and its own 150 tokens.
        let used = || reserve().headers().find(|(name, _)| *name == "x-update-tpm").unwrap().1;
        assert_eq!(used(), "150");
        let mut charges = reserve();
        let usage = Usage { prompt_tokens: Some(10), completion_tokens: Some(5), cached_tokens: None };
        charges.settle(&usage, 5, 200, End::Complete);
        assert_eq!(used(), "165");
        charges.settle(&usage, 5, 200, End::Complete);
        drop(charges);
        assert_eq!(used(), "165");
    }

    #[test]
    fn usage_of_incomplete_responses_is_a_lower_bound() {
        let usage = Usage { prompt_tokens: Some(10), completion_tokens: Some(5), cached_tokens: None };
        for (end, status, usage, had) in [
            (End::Complete, 200, usage, Had::Tokens(15)),
            (End::Complete, 200, Usage::default(), Had::AtLeast { prompt: 0, answer: 7 }),
            (End::Complete, 500, Usage::default(), Had::Tokens(0)),
            (End::ClientGone, 200, usage, Had::AtLeast { prompt: 10, answer: 7 }),
            (End::ClientGone, 0, Usage::default(), Had::AtLeast { prompt: 0, answer: 7 }),
            (End::Contradicted, 0, Usage::default(), Had::AtLeast { prompt: 0, answer: 7 }),
            (End::Evicted, 200, usage, Had::Nothing),
            (End::Aborted, 200, usage, Had::Nothing),
        ] {
            assert_eq!(actual_usage(&usage, 7, status, end), had, "{end:?} {status}");
        }
    }
}
