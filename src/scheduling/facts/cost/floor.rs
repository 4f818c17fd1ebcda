//! Lower bounds of costs.

use super::{Prices, Serving};
use crate::{Candidate, PickContext};
use attache_pool::speed::{SpeedModel, Work};

/// Computes a lower bound of [`super::whole`] for each candidate, in a fraction of its time. A decision about many
/// endpoints then predicts only for those that may be the cheapest.
///
/// ```text
/// ratio · (ttft · (first token + fixed price · own prefill) + requests · (ttft · least delay + tpot · own prefill))
///     + ratio · response
/// ```
///
/// Times are those of an endpoint without load, and the least delay is what each request adds to the first token at
/// least. The term `tpot · own prefill` counts only if one server serves the request and no price is fixed.
///
/// Each term of [`super::whole`] grows with the load and with the ratios, and none is below 0. The ratios here are
/// their lower bounds.
#[derive(Debug)]
pub struct CostFloor<'p> {
    prices: &'p Prices,
    model: SpeedModel,
    /// The floor of a candidate with ratio 1 that has cached nothing.
    uncached: Floor,
}

/// A lower bound at ratio 1, in seconds.
#[derive(Clone, Copy, Debug)]
struct Floor {
    /// Without requests.
    first: f64,
    /// For each request on the endpoint.
    per_request: f64,
    /// For the response.
    answer: f64,
}

impl<'p> CostFloor<'p> {
    /// 10^-9: more than rounding can change in a sum of a few products.
    const ROUNDING: f64 = 1e-9;

    /// `None` without candidates.
    #[must_use]
    pub fn of(cx: &PickContext<'_>, prices: &'p Prices) -> Option<Self> {
        let model = prices.model?;
        let uncached = Floor::of(work(cx.request.prompt_tokens, 0), &model, prices);
        Some(Self { prices, model, uncached })
    }

    /// The lower bound for `candidate`, in seconds.
    #[inline]
    #[must_use]
    pub fn floor(&self, cx: &PickContext<'_>, candidate: &Candidate<'_>) -> f64 {
        let floor = match candidate.cached.any {
            0 => self.uncached,
            cached => Floor::of(work(cx.request.prompt_tokens, cached), &self.model, self.prices),
        };
        let live = candidate.state.live();
        let [before, after] = live.speed.least_ratios(&self.model);
        let requests = f64::from(live.ledger.requests(candidate.reported()));
        (before * (floor.first + floor.per_request * requests) + after * floor.answer) * (1.0 - Self::ROUNDING)
    }
}

/// The work of a prompt of which `cached` tokens are cached, with an adapter that is loaded.
fn work(prompt_tokens: u32, cached: u32) -> Work {
    Work { prompt_tokens, uncached_tokens: prompt_tokens.saturating_sub(cached), adapter_cold: false }
}

impl Floor {
    fn of(work: Work, model: &SpeedModel, prices: &Prices) -> Self {
        let least = model.unloaded(work);
        let (own, objective) = (least.own_prefill, prices.objective);
        let (price, stalled) = match (prices.fixed_price, prices.serving) {
            (Some(price), _) => (price * own, 0.0),
            (None, Serving::OneOrTwoServers) => (0.0, 0.0),
            // Requests that decode, and those that wait, are delayed by the prompt.
            (None, Serving::OneServer) => (0.0, own),
        };
        Self {
            first: objective.ttft * (least.first_token + price),
            per_request: objective.ttft * model.least_delay() + objective.tpot * stalled,
            answer: prices.answer(&least),
        }
    }
}
