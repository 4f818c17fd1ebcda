//! Decisions without a strategy: the endpoints in the conformance suite's header, and the endpoint that stores the
//! previous response of a conversation.

use super::active::ActiveConfig;
use super::decide::RequestView;
use super::head::Head;
use super::picker::Picker;
use attache_pool::{EndpointState, PoolSnapshot};
use attache_scheduling::Subset;
use attache_scheduling::decision::Ranking;
use attache_scheduling::{Decision, PickContext};
use attache_types::error::{Reason, RequestError};

/// The preset decision; `None` if the strategy decides.
///
/// # Errors
/// The conformance suite's header names no endpoint of the pool.
pub(super) fn preset(
    picker: &Picker,
    config: &ActiveConfig,
    q: &RequestView<'_>,
    cx: &PickContext<'_>,
    pool: &str,
    previous_response: Option<&str>,
) -> Result<Option<Decision>, RequestError> {
    if config.settings.conformance_headers
        && let Some(decision) = chosen_by_test(q.head, cx.snapshot)?
    {
        return Ok(Some(decision));
    }
    let Some(owner) = previous_response.and_then(|id| picker.responses.owner(pool, id)) else { return Ok(None) };
    let mut ranking = Ranking::new(1);
    ranking.because("holds the previous response");
    let holds = |s: &&EndpointState| {
        let spec = &s.endpoint.spec;
        s.endpoint.id == owner && !spec.draining && cx.allows(spec)
    };
    if let Some(state) = cx.snapshot.endpoints.iter().find(holds) {
        ranking.push(&state.endpoint);
    }
    Ok(ranking.decide())
}

fn chosen_by_test(head: &Head, snapshot: &PoolSnapshot) -> Result<Option<Decision>, RequestError> {
    let mut ranking = Ranking::new(snapshot.endpoints.len());
    ranking.because("named by test-epp-endpoint-selection");
    // As `lwepp` has it, an empty header is none: all pods may serve.
    let named = head.get_all("test-epp-endpoint-selection").flat_map(|v| v.split(','));
    let mut entries = named.filter(|entry| !entry.trim().is_empty()).peekable();
    if entries.peek().is_none() {
        return Ok(None);
    }
    for entry in entries {
        let mut named = Subset::default();
        named.add(entry);
        for state in snapshot.endpoints.iter().filter(|s| named.allows(s.endpoint.spec.address)) {
            ranking.push(&state.endpoint);
        }
    }
    let none = || RequestError::new(Reason::SubsetEmpty, "test-epp-endpoint-selection names no endpoint of the pool");
    ranking.decide().ok_or_else(none).map(Some)
}
