//! How fast an endpoint is, learned from its answers: how long a request would wait there for its first token, and how long a token takes.
//!
//! ```text
//! seconds to the first token = c · [1, kilotokens to compute first (others' and its own), mega-pairs of attention among them,
//!                                   requests that decode, requests that wait for something else, requests in a full cache, adapter to load]
//! seconds a further token    = d · [1, requests that decode, kilotokens being prefilled]
//! ```
//!
//! `c` and `d` are fitted online, for the pool as a whole, by [`fit`]: they are never negative, forget, and begin with a mid-size model on
//! a current accelerator. How many times slower or faster than its pool an endpoint is, is its own [`ratio`], believed as far as it is
//! significant. So a pool may be of any mix of hardware, equal servers stay equal, and nobody calibrates anything.
//!
//! What is on its way is counted from the moment of the decision by a [`Reservation`], which ends with the first token, so that a herd
//! can't form between two pages of metrics. Answers that come whole don't tell when their first token was: those reservations drain at
//! the endpoint's own speed.
//!
//! Called by `scheduling` (predictions) and by the exchange (what came of them). Source: the features of llm-d's latency predictor, for
//! which it runs gradient-boosted trees in a sidecar; Dynamo's prefill and decode load.

mod clearing;
mod demand;
mod fit;
mod lengths;
mod pace;
mod pending;
mod ratio;
mod reservation;
mod transfer;

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
use pace::{Pace, Step};
use parking_lot::Mutex;
use pending::Pending;
use ratio::Ratio;
pub use reservation::Reservation;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
pub use transfer::{TransferSpeed, Transfers};

/// Features of the time to the first token.
const FIRST: usize = 7;
/// Features of the time between tokens.
const NEXT: usize = 3;

/// What a pool is thought of before it has answered anything: 20 ms for the way and the scheduler, 25,000 prompt tokens a second, 1 ns a pair
/// of tokens (an 8B model on one H100), 0.2 ms for each request that decodes, 50 ms for each that waits, 100 ms for each in a full cache,
/// 200 ms to load an adapter.
const DEFAULT_FIRST: [f64; FIRST] = [0.02, 0.04, 0.001, 0.000_2, 0.05, 0.1, 0.2];
/// The size of each feature that makes it count.
const SCALE_FIRST: [f64; FIRST] = [1.0, 2.0, 10.0, 10.0, 1.0, 1.0, 0.3];
/// 8 ms a token alone, 0.05 ms more for each other, 1 ms more for each thousand tokens that are prefilled beside.
const DEFAULT_NEXT: [f64; NEXT] = [0.008, 0.000_05, 0.001];
const SCALE_NEXT: [f64; NEXT] = [1.0, 10.0, 2.0];
/// 30 s: what an endpoint showed counts half when it has answered nothing for so long. Without it one that was slow while it warmed up
/// would never be asked again.
const HALF_LIFE: f64 = 30.0;
/// 1 s: what was shown less than this ago counts whole (it would count 98 %), and need not be worked out.
const YOUNG: f64 = HALF_LIFE / 30.0;
/// Half: predictions for an endpoint that has answered nothing may be that far off.
const UNKNOWN_ERROR: f64 = 0.5;
/// The usual error of an endpoint's predictions is a mean of some 20 answers.
const ERROR_RATE: f64 = 0.05;
/// The mean ratio of a pool's endpoints, and the length of a usual answer, are means of some 100 answers.
const CENTRE_RATE: f64 = 0.01;
/// A cache this full admits nobody before somebody ends.
const FULL_CACHE: f32 = 0.95;

/// The speed of a pool as a whole, and how much it has to do.
#[derive(Debug)]
pub struct PoolSpeed {
    first: Mutex<Shape<FIRST>>,
    next: Mutex<Shape<NEXT>>,
    /// The coefficients, as readers take them, and what its endpoints have in common beside them.
    published: (Published<FIRST>, Published<NEXT>),
    centres: Factors,
    /// The coefficients come from answers.
    learned: AtomicBool,
    /// By [`Roles::kind`].
    demand: [Mutex<Demand>; Roles::KINDS],
    transfer: TransferSpeed,
    pace: Pace,
    /// Tokens of a usual answer; f32 bits.
    answer_tokens: AtomicU32,
    lengths: Mutex<Lengths>,
}

/// What the times of a pool's answers follow from.
#[derive(Debug)]
struct Shape<const N: usize> {
    fit: Fit<N>,
    /// The mean logarithm of what endpoints are slower than the fit: what all have in common is the pool's.
    centre: f64,
}

impl<const N: usize> Shape<N> {
    fn new(prior: [f64; N]) -> Self {
        Self { fit: Fit::new(prior), centre: 0.0 }
    }

    /// Takes in an answer of an endpoint, whose ratio follows it.
    fn observe(&mut self, ratio: &mut Ratio, features: &[f64; N], seconds: f64, prior: &[f64; N], scale: &[f64; N]) {
        let relative = ratio.ln() - self.centre;
        ratio.observe(seconds, self.fit.predict(features));
        // Were the server as fast as the others: endpoints of one pool differ in scale, not in shape.
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
            lengths: Mutex::default(),
        };
        pool.published.0.set(&DEFAULT_FIRST);
        pool.published.1.set(&DEFAULT_NEXT);
        pool
    }
}

impl PoolSpeed {
    /// How long KV caches take from server to server.
    #[must_use]
    pub fn transfer(&self) -> &TransferSpeed {
        &self.transfer
    }

    fn sent(&self, to: Roles, seconds: f64, now: Timestamp) {
        if let Some(demand) = self.demand.get(to.kind()) {
            demand.lock().add(seconds, now);
        }
    }

    /// Tokens of a usual answer; 0 before the first.
    #[must_use]
    pub fn answer_tokens(&self) -> f64 {
        f64::from(f32::from_bits(self.answer_tokens.load(Relaxed)))
    }

    /// Tokens of the answer to a prompt of so many tokens, by what was seen of such; 1 where nothing was.
    #[must_use]
    pub fn expected_answer(&self, prompt_tokens: u32) -> u32 {
        self.lengths.lock().expected(prompt_tokens)
    }

    #[expect(clippy::cast_possible_truncation, reason = "thousands of tokens; f32 is precise enough")]
    fn answered(&self, prompt_tokens: u32, tokens: u64, now: Timestamp) {
        self.lengths.lock().ended(prompt_tokens, tokens, now);
        let usual = self.answer_tokens();
        let next = if usual == 0.0 { tokens as f64 } else { usual + (tokens as f64 - usual) * CENTRE_RATE };
        // Of two answers at one moment one may be forgotten.
        self.answer_tokens.store((next as f32).to_bits(), Relaxed);
    }

    /// What was sent of late to the servers of one [`Roles::kind`].
    #[must_use]
    pub fn demand(&self, kind: usize, now: Timestamp) -> Rates {
        self.demand.get(kind).map_or_else(Rates::default, |demand| demand.lock().rates(now))
    }
}

/// Coefficients that are read at every decision and written at every answer; f32 bits. A reader may see some from before a change and some
/// from after it.
#[derive(Debug)]
struct Published<const N: usize>([AtomicU32; N]);

impl<const N: usize> Default for Published<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl<const N: usize> Published<N> {
    #[expect(clippy::cast_possible_truncation, reason = "seconds per unit; f32 is precise enough")]
    fn set(&self, coefficients: &[f64; N]) {
        for (slot, c) in self.0.iter().zip(coefficients) {
            slot.store((*c as f32).to_bits(), Relaxed);
        }
    }

    fn get(&self) -> [f64; N] {
        self.0.each_ref().map(|c| f64::from(f32::from_bits(c.load(Relaxed))))
    }
}

/// How many times slower than the pool's fit, before the first token and after it; f32 bits, 0 for 1.
#[derive(Debug, Default)]
struct Factors([AtomicU32; 2]);

impl Factors {
    #[expect(clippy::cast_possible_truncation, reason = "factors of a few units; f32 is precise enough")]
    fn set(&self, which: usize, ln: f64) {
        if let Some(bits) = self.0.get(which) {
            bits.store((ln.exp() as f32).to_bits(), Relaxed);
        }
    }

    fn get(&self) -> [f32; 2] {
        self.0.each_ref().map(|bits| match bits.load(Relaxed) {
            0 => 1.0,
            bits => f32::from_bits(bits),
        })
    }

    fn reset(&self) {
        self.0.iter().for_each(|bits| bits.store(0, Relaxed));
    }
}

/// What one request would have an endpoint compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Those of them that are not cached there.
    pub uncached_tokens: u32,
    /// It needs an adapter that is not loaded there.
    pub adapter_cold: bool,
}

impl Work {
    /// The same when another server has computed the prompt.
    #[must_use]
    pub fn received(self) -> Self {
        Self { uncached_tokens: 0, ..self }
    }

    /// Pairs of a token to be computed and a token that it looks at, millions.
    fn mega_pairs(self) -> f64 {
        let (all, new) = (f64::from(self.prompt_tokens), f64::from(self.uncached_tokens.min(self.prompt_tokens)));
        new * (all - new / 2.0) / 1e6
    }
}

/// What stands before a request that comes now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Prompt tokens that are still to be computed, thousands.
    pub kilotokens: f64,
    /// Pairs of tokens that come with them, millions.
    pub mega_pairs: f64,
    /// Seconds that both take.
    pub prefill_seconds: f64,
    /// Requests that decode.
    pub decoding: f64,
    /// Requests that wait for their first token: ours, whose tokens are in `kilotokens`, and other pickers'. Each costs something of its
    /// own where seats, adapters' slots or blocks are short.
    pub waiting: f64,
    /// Requests that wait in a cache without room, this one included; 0 while there is room.
    pub crowded: f64,
}

/// What one endpoint's answers have shown.
#[derive(Debug)]
struct Own {
    /// How many times slower than the pool it is, before the first token and after it.
    ratios: [Ratio; 2],
    /// By how much predictions of its first tokens, and of its further tokens, were off, as a part of what was predicted.
    errors: [f64; 2],
    /// The prompts that it computed last.
    step: Step,
}

impl Default for Own {
    fn default() -> Self {
        Self { ratios: Default::default(), errors: [UNKNOWN_ERROR; 2], step: Step::default() }
    }
}

/// What is known of one endpoint's speed, and what is on its way there.
#[derive(Debug, Default)]
pub struct EndpointSpeed {
    pool: Arc<PoolSpeed>,
    own: Mutex<Option<Own>>,
    /// Its ratios, as readers take them.
    slower: Factors,
    /// When it last showed anything; 0 when it never has.
    answered: AtomicU64,
    /// Requests whose first token will be seen.
    pending: Pending,
    /// Thousands of tokens of those whose first token won't be seen (f32 bits), and when that was so (ms): they drain.
    unseen: AtomicU64,
    /// How many requests those were then (f32 bits): they go as their tokens do.
    unseen_requests: AtomicU32,
}

/// `usual · (own / usual)^counts`, without its logarithm: exact at both ends and nearly so between (Padé's approximation of first order).
fn between(usual: f32, own: f32, counts: f64) -> f64 {
    let (usual, own, less) = (f64::from(usual), f64::from(own), 1.0 - counts);
    usual * ((1.0 + counts) * own + less * usual) / (less * own + (1.0 + counts) * usual)
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl EndpointSpeed {
    /// An endpoint of a pool.
    #[must_use]
    pub fn of(pool: Arc<PoolSpeed>) -> Self {
        Self { pool, ..Self::default() }
    }

    fn coefficients(&self, now: Timestamp) -> ([f64; FIRST], [f64; NEXT]) {
        let [before, after] = self.slower(now);
        let (first, next) = &self.pool.published;
        (first.get().map(|c| c * before), next.get().map(|c| c * after))
    }

    /// How many times slower than the pool's fit it is, the nearer to what is usual the longer ago it showed anything.
    fn slower(&self, now: Timestamp) -> [f64; 2] {
        let (own, usual) = (self.slower.get(), self.pool.centres.get());
        let answered = self.answered.load(Relaxed);
        if own == usual || answered == 0 {
            return usual.map(f64::from);
        }
        let age = now.since(Timestamp(answered)).as_secs_f64();
        if age < YOUNG {
            return own.map(f64::from);
        }
        let counts = (-age / HALF_LIFE).exp2();
        let [before, after] = own;
        let [usual_before, usual_after] = usual;
        [between(usual_before, before, counts), between(usual_after, after, counts)]
    }

    /// The whole pool's.
    #[must_use]
    pub fn pool(&self) -> &PoolSpeed {
        &self.pool
    }

    /// Requests whose first token is awaited and will be seen.
    #[must_use]
    pub fn pending(&self) -> u32 {
        self.pending.count()
    }

    /// Requests whose first token is awaited: those of which it will be seen, and as many of the others as are thought not to be computed by now.
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

    /// Seconds until the next of those whose first token won't be seen is thought to be computed; `None` when none is left.
    #[must_use]
    pub fn computes_in(&self, now: Timestamp) -> Option<f64> {
        let (c @ [_, per_kilotoken, ..], _) = self.coefficients(now);
        let left = self.drained(&c, now);
        (left > 0.0).then(|| left * per_kilotoken / self.unseen_requests(&c, now).max(1.0))
    }

    /// A new process: what the old one showed is void.
    pub fn reset(&self) {
        *self.own.lock() = None;
        self.slower.reset();
        self.answered.store(0, Relaxed);
    }

    /// Seconds that `kilotokens` of prompt take to compute here, when there are no other costs.
    fn prefill_seconds(c: &[f64; FIRST], kilotokens: f64, mega_pairs: f64) -> f64 {
        let [_, per_kilotoken, per_mega_pair, ..] = c;
        kilotokens * per_kilotoken + mega_pairs * per_mega_pair
    }

    /// What stands before a request that comes `now`, and what it can expect. `ledger` and `fresh` are the endpoint's own.
    #[must_use]
    pub fn forecast(
        &self,
        ledger: &EndpointLedger,
        fresh: Option<&Reported>,
        work: Work,
        now: Timestamp,
    ) -> (Load, Prediction) {
        let (first, next) = self.coefficients(now);
        let load = self.load(&first, ledger, fresh, now);
        let prediction = Prediction {
            first_token: dot(&first, &first_features(&load, work)),
            per_token: dot(&next, &next_features(&load)),
            own_prefill: Self::prefill_seconds(&first, f64::from(work.uncached_tokens) / 1e3, work.mega_pairs()),
        };
        (load, prediction)
    }

    #[expect(clippy::cast_precision_loss, reason = "tokens in flight stay far below 2^53")]
    fn load(&self, c: &[f64; FIRST], ledger: &EndpointLedger, fresh: Option<&Reported>, now: Timestamp) -> Load {
        let left = self.pending.left();
        let pending = left.count;
        let (mut kilotokens, mut mega_pairs) = (left.tokens as f64 / 1e3, left.kilopairs as f64 / 1e3);
        if pending > 0 {
            // The first of them has been worked on since then, and has not come to its end.
            let worked = now.since(left.since).as_secs_f64() / f64::from(self.pool.pace.get());
            let head =
                Self::prefill_seconds(c, f64::from(left.head.tokens) / 1e3, f64::from(left.head.kilopairs) / 1e3);
            let all = Self::prefill_seconds(c, kilotokens, mega_pairs).max(1e-9);
            let rest = (1.0 - worked.min(head) / all).max(0.0);
            kilotokens *= rest;
            mega_pairs *= rest;
        }
        let unseen = self.drained(c, now);
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

    /// A request is on its way whose first token won't be seen. A race between two decisions loses one of them at worst, which drains anyway.
    #[expect(clippy::cast_possible_truncation, reason = "requests, and thousands of tokens, in f32")]
    fn push_unseen(&self, c: &[f64; FIRST], tokens: u32, now: Timestamp) {
        let requests = self.unseen_requests(c, now) + 1.0;
        let add = |_: u64| Some(pack((self.drained(c, now) + f64::from(tokens) / 1e3) as f32, milliseconds(now)));
        let _ = self.unseen.fetch_update(Relaxed, Relaxed, add);
        self.unseen_requests.store((requests as f32).to_bits(), Relaxed);
    }

    /// Thousands of tokens of answers that come whole and have not been computed by now.
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

    /// Whether any answer of this endpoint or of its pool has been learned from.
    #[must_use]
    pub fn is_learned(&self) -> bool {
        self.pool.learned.load(Relaxed)
    }

    /// When an answer was last learned from here; `None` before the first.
    #[must_use]
    pub fn last_answer(&self) -> Option<Timestamp> {
        Some(Timestamp(self.answered.load(Relaxed))).filter(|at| at.0 > 0)
    }

    /// By how much predictions are usually off, as a part of themselves: of a first token, and of further tokens.
    #[must_use]
    pub fn errors(&self) -> [f64; 2] {
        self.own.lock().as_ref().map_or([UNKNOWN_ERROR; 2], |own| own.errors)
    }

    /// What was learned here; `None` before the first answer.
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

    /// A prompt has been computed, and was the first for so long.
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
        let Own { ratios: [ratio, _], errors: [error, _], .. } = own.get_or_insert_default();
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
        let Own { ratios: [_, ratio], errors: [_, error], .. } = own.get_or_insert_default();
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

/// Something that was predicted to take `predicted` seconds took `seconds`.
fn observe_error(error: &mut f64, predicted: f64, seconds: f64) {
    // What is far out moves the usual error by no more than three times itself.
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

/// What an endpoint has shown, for people.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Learned {
    /// Prompt tokens that it computes in a second, attention apart.
    pub prefill_tokens_per_second: f64,
    /// Seconds for each token of a request that is alone.
    pub seconds_per_token: f64,
    /// By how much predictions of the first token are usually off, as a part of what was predicted.
    pub first_token_error: f64,
}

/// What a request can expect of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds to the first token.
    pub first_token: f64,
    /// Seconds for each further token.
    pub per_token: f64,
    /// Seconds of `first_token` that this request's own prompt takes to compute: nobody else's tokens come in that time.
    pub own_prefill: f64,
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
