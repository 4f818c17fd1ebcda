//! Speed of an endpoint, learned from its responses: the time to the first token that a request would have, and the
//! time per further token.
//!
//! ```text
//! seconds to the first token = c · [1, kilotokens to compute first (others' and its own), mega-pairs of attention,
//!                                   requests that decode, requests that wait for something else,
//!                                   requests in a full cache, adapter to load]
//! seconds per further token  = d · [1, requests that decode, kilotokens being prefilled]
//! ```
//!
//! [`fit`] fits `c` and `d` online for the pool as a whole. They are never negative, forget old observations, and start
//! with values of a mid-size model on a current accelerator. Each endpoint has its own [`ratio`] to the pool's speed,
//! applied as far as it is statistically significant. A pool may therefore mix hardware, equal servers stay equal, and
//! no calibration is needed.
//!
//! A [`Reservation`] counts a request from the decision to its first token, so that a burst between two scrapes does
//! not go to one endpoint. Responses that arrive whole do not show when their first token was computed: their
//! reservations drain at the endpoint's own speed.
//!
//! Called by `scheduling` (predictions) and by `ext_proc` (observations). Sources: the features of llm-d's latency
//! predictor, which uses gradient-boosted trees in a sidecar; Dynamo's prefill and decode load.

mod clearing;
mod demand;
mod fit;
mod lengths;
mod model;
mod pace;
mod pending;
mod published;
mod ratio;
mod recomputed;
mod reservation;
mod slowdown;
mod transfer;
mod values;

use super::ledger::EndpointLedger;
use super::metrics::Reported;
use super::role::Roles;
use attache_types::clock::Timestamp;
use clearing::next_features;
pub use clearing::{Bounds, Fits};
use demand::Demand;
pub use demand::Rates;
use fit::Fit;
use lengths::Lengths;
pub use model::SpeedModel;
use pace::{ComputedStep, Pace};
use parking_lot::Mutex;
use pending::Pending;
use published::{Factors, Published};
use ratio::Ratio;
pub use reservation::Reservation;
pub use slowdown::{Slowdown, slowdowns};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
pub use transfer::{TransferSpeed, Transfers};
pub use values::{Learned, Load, Prediction, Work};

/// Number of features of the time to the first token.
const FIRST: usize = 7;
/// Number of features of the time between tokens.
const NEXT: usize = 3;

/// Coefficients before any response: 20 ms for network and scheduler, 25,000 prompt tokens a second, 1 ns per pair of
/// tokens (an 8B model on one H100), 0.2 ms per decoding request, 50 ms per waiting request, 100 ms per request in a
/// full cache, 200 ms to load an adapter.
const DEFAULT_FIRST: [f64; FIRST] = [0.02, 0.04, 0.001, 0.000_2, 0.05, 0.1, 0.2];
/// Typical size of each feature, which scales the weight of its prior.
const SCALE_FIRST: [f64; FIRST] = [1.0, 2.0, 10.0, 10.0, 1.0, 1.0, 0.3];
/// Coefficients before any response: 8 ms per token alone, 0.05 ms for each other request, 1 ms for
/// each thousand tokens prefilled meanwhile.
const DEFAULT_NEXT: [f64; NEXT] = [0.008, 0.000_05, 0.001];
const SCALE_NEXT: [f64; NEXT] = [1.0, 10.0, 2.0];
/// Half-life of an endpoint's ratio without new responses, 30 s. Without it, a server that was slow while it warmed up
/// would never be used again.
const HALF_LIFE: f64 = 30.0;
/// Responses less than 1 s old count fully instead of 98 %, which saves the computation.
const YOUNG: f64 = HALF_LIFE / 30.0;
/// Relative error of predictions for an endpoint without responses.
const UNKNOWN_ERROR: f64 = 0.5;
/// Weight of one response in an endpoint's usual prediction error: a mean of some 20 responses.
const ERROR_RATE: f64 = 0.05;
/// Weight of one response in the pool's mean ratio and mean response length: means of some 100 responses.
const CENTRE_RATE: f64 = 0.01;
/// Largest mean length of a response that another picker may have, tokens.
const MAX_RESPONSE: f64 = 1e9;
/// KV cache usage from which on a server admits no request before another one ends.
const FULL_CACHE: f32 = 0.95;

/// The speed of a pool as a whole, and its load.
#[derive(Debug)]
pub struct PoolSpeed {
    first: Mutex<Shape<FIRST>>,
    next: Mutex<Shape<NEXT>>,
    /// The coefficients, and the mean ratio of all endpoints to them, for readers.
    published: (Published<FIRST>, Published<NEXT>),
    centres: Factors,
    /// Whether the coefficients have learned from responses.
    learned: AtomicBool,
    /// Load by [`Roles::kind`].
    demand: [Mutex<Demand>; Roles::KINDS],
    transfer: TransferSpeed,
    pace: Pace,
    /// Mean length of a response in tokens; bits of an `f32`.
    answer_tokens: AtomicU32,
    lengths: Mutex<Lengths>,
    /// Share of recomputed blocks; bits of an `f32`.
    recomputed: AtomicU32,
}

/// The model of one of the two times.
#[derive(Debug)]
struct Shape<const N: usize> {
    fit: Fit<N>,
    /// Mean logarithm of the endpoints' ratios to the fit. What all endpoints have in common belongs to the pool.
    centre: f64,
}

/// What one picker has learned of a pool's mean endpoint, for another one.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeedExport {
    /// The fit of the time to the first token.
    pub first: Vec<f64>,
    /// The fit of the time per further token.
    pub next: Vec<f64>,
    /// Mean length of a response, tokens; 0 if unknown.
    pub response_tokens: f64,
}

impl<const N: usize> Shape<N> {
    /// Returns the fit of the mean endpoint.
    fn of_mean_endpoint(&self) -> Fit<N> {
        self.fit.scaled(self.centre.exp())
    }

    /// Takes over the fit of another picker's mean endpoint if it has more observations. False if not.
    fn replace(&mut self, fit: Fit<N>, published: &Published<N>) -> bool {
        if fit.count() <= self.fit.count() {
            return false;
        }
        published.set(fit.coefficients());
        (self.fit, self.centre) = (fit, 0.0);
        true
    }

    fn new(prior: [f64; N]) -> Self {
        Self { fit: Fit::new(prior), centre: 0.0 }
    }

    /// Adds a response of an endpoint and updates the endpoint's ratio.
    fn observe(&mut self, ratio: &mut Ratio, features: &[f64; N], seconds: f64, prior: &[f64; N], scale: &[f64; N]) {
        let relative = ratio.ln() - self.centre;
        ratio.observe(seconds, self.fit.predict(features));
        // The observation is scaled as if the server were as fast as the others: endpoints of one pool
        // differ by a factor only.
        self.fit.observe(features, seconds / relative.exp(), prior, scale);
        self.centre += (ratio.ln() - self.centre) * CENTRE_RATE;
    }
}

impl Default for PoolSpeed {
    fn default() -> Self {
        let pool = Self {
            first: Mutex::new(Shape::new(DEFAULT_FIRST)),
            next: Mutex::new(Shape::new(DEFAULT_NEXT)),
            published: (Published::default(), Published::default()),
            centres: Factors::default(),
            learned: AtomicBool::new(false),
            demand: Default::default(),
            transfer: TransferSpeed::default(),
            pace: Pace::default(),
            answer_tokens: AtomicU32::new(0),
            recomputed: AtomicU32::new(0),
            lengths: Mutex::default(),
        };
        pool.published.0.set(&DEFAULT_FIRST);
        pool.published.1.set(&DEFAULT_NEXT);
        pool
    }
}

impl PoolSpeed {
    /// Returns the learned times of KV cache transfers between servers.
    #[must_use]
    pub fn transfer(&self) -> &TransferSpeed {
        &self.transfer
    }

    fn sent(&self, to: Roles, seconds: f64, now: Timestamp) {
        if let Some(demand) = self.demand.get(to.kind()) {
            demand.lock().add(seconds, now);
        }
    }

    /// Returns the mean length of a response in tokens; 0 before the first.
    #[must_use]
    pub fn answer_tokens(&self) -> f64 {
        f64::from(f32::from_bits(self.answer_tokens.load(Relaxed)))
    }

    #[expect(clippy::cast_possible_truncation, reason = "thousands of tokens; f32 is precise enough")]
    fn answered(&self, prompt_tokens: u32, tokens: u64, now: Timestamp) {
        self.lengths.lock().ended(prompt_tokens, tokens, now);
        let usual = self.answer_tokens();
        let next = if usual == 0.0 { tokens as f64 } else { usual + (tokens as f64 - usual) * CENTRE_RATE };
        // Of two concurrent responses, one may be lost.
        self.answer_tokens.store((next as f32).to_bits(), Relaxed);
    }

    /// Returns what was learned of the pool as a whole, for a picker that starts.
    #[must_use]
    pub fn export(&self) -> SpeedExport {
        let (first, next) = (self.first.lock(), self.next.lock());
        SpeedExport {
            first: first.of_mean_endpoint().values(),
            next: next.of_mean_endpoint().values(),
            response_tokens: self.answer_tokens(),
        }
    }

    /// Takes over what another picker has learned, as far as it has more observations. False if a value is not
    /// possible; then nothing changes.
    #[expect(clippy::cast_possible_truncation, reason = "thousands of tokens; f32 is precise enough")]
    pub fn import(&self, other: &SpeedExport) -> bool {
        let SpeedExport { first, next, response_tokens } = other;
        let Some((first, next)) = Fit::from_values(first).zip(Fit::from_values(next)) else { return false };
        if !(0.0..=MAX_RESPONSE).contains(response_tokens) {
            return false;
        }
        let is_first_newer = self.first.lock().replace(first, &self.published.0);
        let is_next_newer = self.next.lock().replace(next, &self.published.1);
        for which in [(0, is_first_newer), (1, is_next_newer)].into_iter().filter_map(|(at, new)| new.then_some(at)) {
            self.centres.set(which, 0.0);
        }
        self.learned.fetch_or(is_first_newer || is_next_newer, Relaxed);
        if self.answer_tokens() == 0.0 {
            self.answer_tokens.store((*response_tokens as f32).to_bits(), Relaxed);
        }
        true
    }

    /// Returns what all endpoints of the pool have in common in a prediction at `now`.
    #[must_use]
    pub fn model(&self, now: Timestamp) -> SpeedModel {
        let (first, next) = &self.published;
        let (centres, pace) = (self.centres.get(), f64::from(self.pace.get()));
        SpeedModel { first: first.get(), next: next.get(), centres, pace, now }
    }

    /// Returns the recent load of the servers of one [`Roles::kind`].
    #[must_use]
    pub fn demand(&self, kind: usize, now: Timestamp) -> Rates {
        self.demand.get(kind).map_or_else(Rates::default, |demand| demand.lock().rates(now))
    }
}

/// What the responses of one endpoint have shown.
#[derive(Debug)]
struct EndpointRates {
    /// Ratios to the pool, for the first token and for further tokens.
    ratios: [Ratio; 2],
    /// Relative errors of predictions of first tokens and of further tokens.
    errors: [f64; 2],
    /// The prompts of the engine step in progress.
    step: ComputedStep,
}

impl Default for EndpointRates {
    fn default() -> Self {
        Self { ratios: Default::default(), errors: [UNKNOWN_ERROR; 2], step: ComputedStep::default() }
    }
}

/// Learned speed of one endpoint, and its requests in flight.
#[derive(Debug, Default)]
pub struct EndpointSpeed {
    pool: Arc<PoolSpeed>,
    own: Mutex<Option<EndpointRates>>,
    /// The endpoint's ratios, for readers.
    slower: Factors,
    /// Time of the last observation; 0 before the first.
    answered: AtomicU64,
    /// Requests whose first token Attaché will observe.
    pending: Pending,
    /// Kilotokens of requests whose first token Attaché will not observe (bits of an `f32`), and the time of
    /// that value (ms). They drain.
    unseen: AtomicU64,
    /// Number of these requests at that time (bits of an `f32`); it drains with their tokens.
    unseen_requests: AtomicU32,
}

/// Approximates `usual · (own / usual)^counts` without a logarithm: exact at both ends and
/// close between them (first-order Padé).
fn between(usual: f32, own: f32, counts: f64) -> f64 {
    let (usual, own, less) = (f64::from(usual), f64::from(own), 1.0 - counts);
    usual * ((1.0 + counts) * own + less * usual) / (less * own + (1.0 + counts) * usual)
}

/// Seconds from a time in nanoseconds until `now`; 0 when it is later.
fn seconds(from: u64, now: Timestamp) -> f64 {
    now.0.saturating_sub(from) as f64 / 1e9
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl EndpointSpeed {
    /// The speed of a new endpoint of a pool.
    #[must_use]
    pub fn of(pool: Arc<PoolSpeed>) -> Self {
        Self { pool, ..Self::default() }
    }

    /// Returns the coefficients of the endpoint, for the first token and for further tokens.
    fn coefficients(&self, now: Timestamp) -> ([f64; FIRST], [f64; NEXT]) {
        let model = self.pool.model(now);
        model.scaled(self.slower(&model))
    }

    /// Returns the endpoint's ratios to the pool's fit. They approach the pool's mean with the
    /// time since the last observation.
    fn slower(&self, model: &SpeedModel) -> [f64; 2] {
        let (own, usual) = (self.slower.get(), model.centres);
        let answered = self.answered.load(Relaxed);
        if own == usual || answered == 0 {
            return usual.map(f64::from);
        }
        let age = seconds(answered, model.now);
        if age < YOUNG {
            return own.map(f64::from);
        }
        let counts = model::halved(age / HALF_LIFE);
        let [before, after] = own;
        let [usual_before, usual_after] = usual;
        [between(usual_before, before, counts), between(usual_after, after, counts)]
    }

    /// Returns lower bounds of the endpoint's ratios to the pool's fit. They are cheaper than the ratios, since the
    /// time since the last observation does not count.
    #[inline]
    #[must_use]
    pub fn least_ratios(&self, model: &SpeedModel) -> [f64; 2] {
        let ([before, after], [usual_before, usual_after]) = (self.slower.get(), model.centres);
        [before.min(usual_before), after.min(usual_after)].map(f64::from)
    }

    /// Returns the speed of the whole pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PoolSpeed> {
        &self.pool
    }

    /// Returns the number of requests whose first token Attaché awaits.
    #[must_use]
    pub fn pending(&self) -> u32 {
        self.pending.count()
    }

    /// Returns the number of requests without a first token: those whose first token Attaché awaits, and the estimated
    /// number of others that are not computed yet.
    #[must_use]
    pub fn awaited(&self, now: Timestamp) -> f64 {
        let (c, _) = self.coefficients(now);
        f64::from(self.pending.count()) + self.unseen_requests(&c, now)
    }

    fn unseen_requests(&self, c: &[f64; FIRST], now: Timestamp) -> f64 {
        let (kilotokens, _) = unpack(self.unseen.load(Relaxed));
        let requests = f64::from(f32::from_bits(self.unseen_requests.load(Relaxed)));
        if kilotokens > 0.0 { requests * self.drained(c, now) / f64::from(kilotokens) } else { 0.0 }
    }

    /// Returns the seconds until the next request without an observable first token is estimated to be computed;
    /// `None` when none is left.
    #[must_use]
    pub fn computes_in(&self, now: Timestamp) -> Option<f64> {
        let (c @ [_, per_kilotoken, ..], _) = self.coefficients(now);
        let left = self.drained(&c, now);
        (left > 0.0).then(|| left * per_kilotoken / self.unseen_requests(&c, now).max(1.0))
    }

    /// Clears what was learned, after a restart of the server's process.
    pub fn reset(&self) {
        *self.own.lock() = None;
        self.slower.reset();
        self.answered.store(0, Relaxed);
    }

    /// Seconds to compute `kilotokens` of prompt here, without other costs.
    fn prefill_seconds(c: &[f64; FIRST], kilotokens: f64, mega_pairs: f64) -> f64 {
        let [_, per_kilotoken, per_mega_pair, ..] = c;
        kilotokens * per_kilotoken + mega_pairs * per_mega_pair
    }

    /// Returns the load ahead of a new request, and the prediction for it. `ledger` and `fresh` are the endpoint's own.
    #[must_use]
    pub fn forecast(
        &self,
        ledger: &EndpointLedger,
        fresh: Option<&Reported>,
        work: Work,
        now: Timestamp,
    ) -> (Load, Prediction) {
        self.forecast_by(&self.pool.model(now), ledger, fresh, work)
    }

    /// As [`EndpointSpeed::forecast`], with the `model` of the endpoint's pool: decisions read it once for all
    /// endpoints.
    #[must_use]
    pub fn forecast_by(
        &self,
        model: &SpeedModel,
        ledger: &EndpointLedger,
        fresh: Option<&Reported>,
        work: Work,
    ) -> (Load, Prediction) {
        let (first, next) = model.scaled(self.slower(model));
        let load = self.load(&first, ledger, fresh, model);
        let prediction = Prediction {
            first_token: dot(&first, &first_features(&load, work)),
            per_token: dot(&next, &next_features(&load)),
            own_prefill: Self::prefill_seconds(&first, f64::from(work.uncached_tokens) / 1e3, work.mega_pairs()),
        };
        (load, prediction)
    }

    #[expect(clippy::cast_precision_loss, reason = "tokens in flight stay far below 2^53")]
    fn load(&self, c: &[f64; FIRST], ledger: &EndpointLedger, fresh: Option<&Reported>, model: &SpeedModel) -> Load {
        let left = self.pending.left();
        let pending = left.count;
        let (mut kilotokens, mut mega_pairs) = (left.tokens as f64 / 1e3, left.kilopairs as f64 / 1e3);
        if pending > 0 {
            // The first prompt has been computed in part, and is not complete.
            let worked = seconds(left.since.0, model.now) / model.pace;
            let head =
                Self::prefill_seconds(c, f64::from(left.head.tokens) / 1e3, f64::from(left.head.kilopairs) / 1e3);
            let all = Self::prefill_seconds(c, kilotokens, mega_pairs).max(1e-9);
            let rest = (1.0 - worked.min(head) / all).max(0.0);
            kilotokens *= rest;
            mega_pairs *= rest;
        }
        let unseen = self.drained(c, model.now);
        let requests = ledger.requests(fresh);
        let waiting = fresh.map_or(0, |m| m.waiting).saturating_sub(pending);
        let crowded = fresh.is_some_and(|m| m.kv_usage >= FULL_CACHE);
        let kilotokens = kilotokens + unseen;
        Load {
            kilotokens,
            mega_pairs,
            prefill_seconds: Self::prefill_seconds(c, kilotokens, mega_pairs),
            decoding: f64::from(requests.saturating_sub(pending).saturating_sub(waiting)),
            waiting: f64::from(pending) + f64::from(waiting),
            crowded: if crowded { f64::from(pending + 1) } else { 0.0 },
        }
    }

    /// Adds a request whose first token Attaché will not observe. Two concurrent decisions may lose one of
    /// them, which would drain anyway.
    #[expect(clippy::cast_possible_truncation, reason = "requests, and thousands of tokens, in f32")]
    fn push_unseen(&self, c: &[f64; FIRST], tokens: u32, now: Timestamp) {
        let requests = self.unseen_requests(c, now) + 1.0;
        let add = |_: u64| Some(pack((self.drained(c, now) + f64::from(tokens) / 1e3) as f32, milliseconds(now)));
        let _ = self.unseen.fetch_update(Relaxed, Relaxed, add);
        self.unseen_requests.store((requests as f32).to_bits(), Relaxed);
    }

    /// Returns the kilotokens of requests without an observable first token that are not computed yet.
    fn drained(&self, c: &[f64; FIRST], now: Timestamp) -> f64 {
        let packed = self.unseen.load(Relaxed);
        let (kilotokens, at) = unpack(packed);
        if kilotokens <= 0.0 {
            return 0.0;
        }
        let [_, per_kilotoken, ..] = c;
        let seconds = f64::from(milliseconds(now).wrapping_sub(at)) / 1e3;
        (f64::from(kilotokens) - seconds / per_kilotoken.max(1e-6)).max(0.0)
    }

    /// Whether this endpoint or its pool has learned from any response.
    #[must_use]
    pub fn is_learned(&self) -> bool {
        self.pool.learned.load(Relaxed)
    }

    /// Returns the endpoint's ratios to the pool's fit, for the first token and for further tokens, after at least `least`
    /// responses. Without them it is the pool's mean; `None` if both are unknown.
    #[must_use]
    pub fn ratios(&self, least: f64) -> Option<[f32; 2]> {
        let known = self.own.lock().as_ref()?.ratios.map(|ratio| ratio.count() >= least);
        let ([first, next], [usual_first, usual_next]) = (self.slower.get(), self.pool.centres.get());
        let [knows_first, knows_next] = known;
        let ratios = [if knows_first { first } else { usual_first }, if knows_next { next } else { usual_next }];
        (knows_first || knows_next).then_some(ratios)
    }

    /// Returns the time of the last response that was learned from; `None` before the first.
    #[must_use]
    pub fn last_answer(&self) -> Option<Timestamp> {
        Some(Timestamp(self.answered.load(Relaxed))).filter(|at| at.0 > 0)
    }

    /// Returns the usual relative errors of predictions of a first token and of further tokens.
    #[must_use]
    pub fn errors(&self) -> [f64; 2] {
        self.own.lock().as_ref().map_or([UNKNOWN_ERROR; 2], |own| own.errors)
    }

    /// Returns what was learned about the endpoint; `None` before the first response.
    #[must_use]
    pub fn learned(&self) -> Option<Learned> {
        let [error, _] = self.own.lock().as_ref()?.errors;
        let at = Timestamp(self.answered.load(Relaxed));
        let ([_, per_kilotoken, ..], [per_token, ..]) = self.coefficients(at);
        Some(Learned {
            prefill_tokens_per_second: 1e3 / per_kilotoken.max(1e-9),
            seconds_per_token: per_token,
            first_token_error: error,
        })
    }

    /// Records that a prompt has been computed, and how long it was the first in the queue.
    fn computed(&self, prompt: pending::Prompt, time: Duration, now: Timestamp) {
        let (c, _) = self.coefficients(now);
        let thought = Self::prefill_seconds(&c, f64::from(prompt.tokens) / 1e3, f64::from(prompt.kilopairs) / 1e3);
        let ended = self.own.lock().get_or_insert_default().step.computed(thought, time.as_secs_f64());
        ended.into_iter().for_each(|step| self.pool.pace.observe(step));
    }

    fn observe_first(&self, features: &[f64; FIRST], seconds: f64, now: Timestamp) {
        let predicted = dot(&self.coefficients(now).0, features).max(1e-6);
        self.answered.store(now.0, Relaxed);
        let mut own = self.own.lock();
        let EndpointRates { ratios: [ratio, _], errors: [error, _], .. } = own.get_or_insert_default();
        observe_error(error, predicted, seconds);
        let mut shape = self.pool.first.lock();
        shape.observe(ratio, features, seconds, &DEFAULT_FIRST, &SCALE_FIRST);
        self.pool.published.0.set(shape.fit.coefficients());
        self.pool.learned.store(shape.fit.is_learned(), Relaxed);
        self.show(0, ratio.ln(), shape.centre);
    }

    fn observe_next(&self, features: &[f64; NEXT], seconds: f64, now: Timestamp) {
        let predicted = dot(&self.coefficients(now).1, features).max(1e-6);
        let mut own = self.own.lock();
        let EndpointRates { ratios: [_, ratio], errors: [_, error], .. } = own.get_or_insert_default();
        observe_error(error, predicted, seconds);
        let mut shape = self.pool.next.lock();
        shape.observe(ratio, features, seconds, &DEFAULT_NEXT, &SCALE_NEXT);
        self.pool.published.1.set(shape.fit.coefficients());
        self.show(1, ratio.ln(), shape.centre);
    }

    fn show(&self, which: usize, own: f64, centre: f64) {
        self.slower.set(which, own);
        self.pool.centres.set(which, centre);
    }
}

/// Records that a time predicted as `predicted` seconds was `seconds`.
fn observe_error(error: &mut f64, predicted: f64, seconds: f64) {
    // An outlier changes the usual error by at most three times its value.
    let off = ((seconds - predicted) / predicted.max(seconds * 0.1)).abs();
    *error += (off.min(3.0 * error.max(0.1)) - *error) * ERROR_RATE;
}

fn first_features(load: &Load, work: Work) -> [f64; FIRST] {
    [
        1.0,
        load.kilotokens + f64::from(work.uncached_tokens) / 1e3,
        load.mega_pairs + work.mega_pairs(),
        load.decoding,
        load.waiting,
        load.crowded,
        f64::from(u8::from(work.adapter_cold)),
    ]
}

#[expect(clippy::cast_possible_truncation, reason = "wraps after 49 days, which a difference survives")]
fn milliseconds(at: Timestamp) -> u32 {
    (at.0 / 1_000_000) as u32
}

fn pack(kilotokens: f32, at: u32) -> u64 {
    u64::from(kilotokens.to_bits()) << 32 | u64::from(at)
}

#[expect(clippy::cast_possible_truncation, reason = "the two halves")]
fn unpack(packed: u64) -> (f32, u32) {
    (f32::from_bits((packed >> 32) as u32), packed as u32)
}

#[cfg(test)]
mod tests;
