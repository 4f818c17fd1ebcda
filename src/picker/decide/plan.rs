//! The outcome of a decision.

use crate::active::PoolRuntime;
use crate::ceiling::Ceiling;
use crate::conversation::Conversation;
use crate::event::SplitOutcome;
use crate::hints::Hints;
use crate::prefix::{PoolPrefix, Tail};
use crate::queues::AdmittedRequest;
use crate::quotas::Permits;
use crate::split::PrefillOutcome;
use attache_pool::health::ClientSlot;
use attache_protocol::Api;
use attache_record::Booked;
use attache_request::agent::AgentIdentity;
use attache_scheduling::{Decision, Strategy};
use std::sync::Arc;
use std::time::Duration;

/// A decision, with everything that the rest of the stream needs.
#[derive(Debug)]
pub struct Plan {
    /// The chosen endpoints.
    pub decision: Decision,
    /// The pool of the request.
    pub runtime: Arc<PoolRuntime>,
    /// The slot of the client, in which the health of endpoints counts its errors.
    pub client: ClientSlot,
    /// The agent that sent the request, if the request names it.
    pub agent: Option<Box<AgentIdentity>>,
    /// It is the last request of the agent's session.
    pub ends_session: bool,
    /// The strategy that chose them.
    pub strategy: Arc<dyn Strategy>,
    /// Name of the strategy, as configurations and headers spell it.
    pub strategy_name: Arc<str>,
    /// The profile that selected the strategy.
    pub profile: Option<Arc<str>>,
    /// The body was parsed, so the decision considers more than load.
    pub understood: bool,
    /// Estimated length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Limit of the response, tokens; `None` if the request sets none.
    pub(crate) max_tokens: Option<u32>,
    /// Priority of the request.
    pub(crate) priority: i32,
    /// Requested responses for each prompt.
    pub choices: u32,
    /// The most tokens that the request can cost.
    pub(crate) ceiling: Ceiling,
    /// Model name sent to the model server; empty if unknown.
    pub target: Arc<str>,
    /// Estimated prompt tokens in the cache of the server that computes the prompt, requests in flight included.
    pub matched_tokens: u32,
    /// The same in the cache of the first pick.
    pub pick_matched_tokens: u32,
    /// The booking on the first pick, and on encode workers.
    pub booked: Option<Booked>,
    /// The booking on the prefill worker, when the decision splits the request.
    pub prefill: Option<Box<Booked>>,
    /// A prefill and a decode worker may share the request.
    pub splittable: bool,
    /// How the prefill on another worker went, once that is known.
    pub prefill_outcome: Option<PrefillOutcome>,
    /// The request id for both workers, when the client sent none.
    pub request_id: Option<Box<str>>,
    /// State of the conversation between turns, when workers share it and decode workers keep blocks.
    pub conversation: Option<Box<Conversation>>,
    /// Headers for the model server besides the destination.
    pub hints: Hints,
    /// The end of the prompt's key chain, when keys of the response are recorded.
    pub tail: Option<(Arc<PoolPrefix>, Tail)>,
    /// The client's model name, when Attaché replaced it.
    pub renamed_from: Option<Arc<str>>,
    /// The body that replaces the seen part of the client's body.
    pub new_body: Option<Vec<u8>>,
    /// Length of the seen part of the client's body, bytes.
    pub seen: usize,
    /// Reservations in the quotas of its tenant and its model.
    pub permits: Permits,
    /// Time in the queue; `None` if the request was not queued.
    pub queued: Option<Duration>,
    /// The request's place among those that the queue has let through. Dropped last: the request that is dequeued by
    /// that must see all other bookings released.
    pub admitted: Option<AdmittedRequest>,
}

impl Plan {
    /// How the request was served, if it could be split.
    #[must_use]
    pub fn split_outcome(&self) -> Option<SplitOutcome> {
        match &self.prefill_outcome {
            Some(prefill_outcome) if prefill_outcome.failure.is_some() => Some(SplitOutcome::Local),
            Some(_) => Some(SplitOutcome::Split),
            None => self.splittable.then_some(SplitOutcome::Whole),
        }
    }

    /// Whether anything depends on the body of the response to this request of `api`: token counts, the model name.
    #[must_use]
    pub fn reads_response(&self, api: Api) -> bool {
        api.reports_usage() || self.renamed_from.is_some() || !self.permits.is_empty()
    }

    /// A prefill worker prefills the prompt.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.decision.split.is_some()
    }

    /// Both workers get the request at the same time, and the decode worker waits for the prefill worker.
    #[must_use]
    pub fn meets(&self) -> bool {
        let prefill = self.decision.split.as_ref().and_then(|split| split.prefill.first());
        prefill.is_some_and(|server| self.runtime.pool.disagg.as_deref().is_some_and(|mode| mode.meets(server)))
    }

    /// The length of the new body, bytes, where `announced` is the client's `content-length`. `None` when nothing
    /// changes.
    #[must_use]
    pub fn new_length(&self, announced: Option<u64>) -> Option<u64> {
        let new = self.new_body.as_ref()?.len() as u64;
        // The unseen rest of the client's body follows the new part.
        let unseen = announced.map_or(0, |a| a.saturating_sub(self.seen as u64));
        Some(new + unseen)
    }
}
