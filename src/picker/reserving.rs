//! Makes a reservation: the decision about a request that its client sends later. It is the live decision, with quotas,
//! queue and booking. Called by `app` for `POST /reservations`.

use super::Picker;
use super::active::ActiveConfig;
use super::decide::{self, Plan, RequestView, Step};
use super::explain::{ExplainQuery, request_view};
use super::quotas::Allowance;
use super::reservations::{MAX_RESERVATIONS, MAX_TIMEOUT, RESERVATION_HEADER, ReservationId, ReservedRequest};
use super::warming::Warming;
use crate::event::{Event, ReservationOutcome};
use attache_pool::Endpoint;
use attache_protocol::Api;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use serde::Serialize;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// A reservation that was made.
#[derive(Clone, Debug, Serialize)]
pub struct Reserved {
    /// The id: the request names it in the header `header`.
    pub reservation: String,
    /// Name of the header.
    pub header: &'static str,
    /// Time until the reservation ends, seconds.
    pub expires_in_seconds: f64,
    /// The pool of the request.
    pub pool: Arc<str>,
    /// Name of the model on the server.
    pub model: Arc<str>,
    /// The endpoint that gets the request, `ip:port`.
    pub endpoint: Arc<str>,
    /// The other endpoints in the order of preference, for retries of the gateway.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<Arc<str>>,
    /// The prefill worker of a split request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Arc<str>>,
    /// The encode workers of its images and audio.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub encode: Vec<Arc<str>>,
    /// Name of the strategy.
    pub strategy: Arc<str>,
    /// Why the endpoint was chosen.
    pub reason: &'static str,
    /// Length of the prompt, tokens, as it is booked.
    pub prompt_tokens: u32,
    /// Prompt tokens that the endpoint that computes the prompt is expected to have cached.
    pub cached_tokens: u32,
}

impl Reserved {
    fn of(plan: &Plan, id: ReservationId, timeout: Duration) -> Option<Self> {
        let address = |endpoint: &Arc<Endpoint>| endpoint.authority.clone();
        let (first, fallbacks) = plan.decision.picks.split_first()?;
        let split = plan.decision.split.as_ref();
        Some(Self {
            reservation: id.to_string(),
            header: RESERVATION_HEADER,
            expires_in_seconds: timeout.as_secs_f64(),
            pool: plan.runtime.pool.name.clone(),
            model: plan.target.clone(),
            endpoint: address(first),
            fallbacks: fallbacks.iter().map(address).collect(),
            prefill: split.and_then(|split| split.prefill.first()).map(address),
            encode: plan.decision.encode.iter().map(address).collect(),
            strategy: plan.strategy_name.clone(),
            reason: split.map_or(plan.decision.reason, |split| split.reason),
            prompt_tokens: plan.prompt_tokens,
            cached_tokens: plan.matched_tokens,
        })
    }
}

/// Decides and books the request of `query`, and holds the booking under `id` for at most `timeout`. `run` runs
/// background work, `clock` gives the present time. The caller expires the reservation after `timeout`.
///
/// # Errors
/// The error response that the request would get; `overloaded` if [`MAX_RESERVATIONS`] are open.
pub async fn reserve<F: Future<Output = ()>>(
    picker: &Picker,
    config: &ActiveConfig,
    query: ExplainQuery<'_>,
    (id, timeout): (ReservationId, Duration),
    clock: impl Fn() -> Timestamp,
    run: impl Fn(Warming) -> F,
) -> Result<Reserved, RequestError> {
    picker.expire_reservations(clock());
    if picker.reservations.is_full() {
        return Err(full(picker));
    }
    let (head, timeout) = (query.head(config), timeout.min(MAX_TIMEOUT));
    let (api, response_id) = Api::from_path(head.path());
    let view = request_view(&head, api, response_id.as_deref(), &query);
    let rng = picker.next_rng();
    let plan = decided(picker, config, view, &rng, &clock, run).await?;
    let no_endpoint = || RequestError::new(Reason::Internal, "the decision has no endpoint");
    let reserved = Reserved::of(&plan, id, timeout).ok_or_else(no_endpoint)?;
    let began = clock();
    let held = ReservedRequest::new(*plan, &head, api.name(), rng, (began, began.after(timeout)));
    picker.reservations.hold(id, Box::new(held)).map_err(|_| full(picker))?;
    picker.observer.event(Event::Reservation(ReservationOutcome::Made));
    Ok(reserved)
}

fn full(picker: &Picker) -> RequestError {
    picker.observer.event(Event::Reservation(ReservationOutcome::Refused));
    let message = format!("{MAX_RESERVATIONS} reservations are open, and no more are allowed");
    RequestError { retry_after: Some(Duration::from_secs(1)), ..RequestError::new(Reason::Overloaded, message) }
}

/// The decision about the request of `first`, after all that it waits for.
async fn decided<F: Future<Output = ()>>(
    picker: &Picker,
    config: &ActiveConfig,
    first: RequestView<'_>,
    rng: &PickRng,
    clock: &impl Fn() -> Timestamp,
    run: impl Fn(Warming) -> F,
) -> Result<Box<Plan>, RequestError> {
    let (mut allowance, mut admitted, mut warmed, mut made) = (Allowance::default(), None, false, None);
    loop {
        let made_prompt = made.as_deref();
        let (now, has_turn) = (clock(), admitted.is_some());
        let view = RequestView { now, last: warmed, made: made_prompt, may_wait: true, has_turn, ..first };
        match decide::decide(picker, config, &view, &mut allowance, &mut rng.clone())? {
            Step::Decided(mut plan) => {
                plan.permits = allowance.take();
                plan.admitted = admitted.or(plan.admitted.take());
                plan.admitted.iter_mut().for_each(|admitted| admitted.landed());
                return Ok(plan);
            }
            Step::Warm(warming, turn) => {
                admitted = turn.or(admitted);
                (made, warmed) = (warming.made(), true);
                run(warming).await;
            }
            Step::Allow(question) => run(question).await,
            Step::Queue(mut queued) => {
                let lost = || RequestError::new(Reason::Internal, "the queue lost the request");
                let left = queued.waiting().ok_or_else(lost)?.await.ok_or_else(lost)?;
                admitted = Some(match left {
                    Ok(admitted) => admitted,
                    Err(refusal) => {
                        let error = queued.refused(&refusal);
                        queued.settle();
                        return Err(error);
                    }
                });
                queued.settle();
            }
        }
    }
}
