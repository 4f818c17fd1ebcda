//! How fast an endpoint is, learned from its answers: how long a request would wait there for its first token, and how long a token takes.
//!
//! ```text
//! seconds to the first token = c · [1, kilotokens to compute first (others' and its own), mega-pairs of attention among them,
//!                                   requests that decode, requests that wait for something else, requests in a full cache, adapter to load]
//! seconds a further token    = d · [1, requests that decode, kilotokens being prefilled]
//! ```
//!
//! `c` and `d` are fitted online, per endpoint, by [`fit`]: they are never negative, forget, and stay near those of the whole pool until
//! the endpoint has shown otherwise; those of the pool begin with a mid-size model on a current accelerator. So a pool may be of
//! any mix of hardware, and nobody calibrates anything.
//!
//! What is on its way is counted from the moment of the decision by a [`Reservation`], which ends with the first token, so that a herd
//! can't form between two pages of metrics. Answers that come whole don't tell when their first token was: those reservations drain at
//! the endpoint's own speed.
//!
//! Called by `scheduling` (predictions) and by the exchange (what came of them). Source: the features of llm-d's latency predictor, for
//! which it runs gradient-boosted trees in a sidecar; Dynamo's prefill and decode load.

mod fit;

use super::endpoint::Endpoint;
use super::ledger;
use super::metrics::EndpointMetrics;
use crate::clock::Timestamp;
use fit::Fit;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

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
/// 30 s: what an endpoint showed counts half of what its pool shows when it has answered nothing for so long. Without it one that was slow while
/// it warmed up would never be asked again.
const HALF_LIFE: f64 = 30.0;
/// A cache this full admits nobody before somebody ends.
const FULL_CACHE: f32 = 0.95;

/// The speed of a pool as a whole, which each of its endpoints starts from.
#[derive(Debug)]
pub struct PoolSpeed {
    first: Mutex<Fit<FIRST>>,
    next: Mutex<Fit<NEXT>>,
    /// The coefficients, as readers take them.
    published: (Published<FIRST>, Published<NEXT>),
}

impl Default for PoolSpeed {
    fn default() -> Self {
        let pool = Self {
            first: Mutex::new(Fit::new(DEFAULT_FIRST)),
            next: Mutex::new(Fit::new(DEFAULT_NEXT)),
            published: (Published::default(), Published::default()),
        };
        pool.published.0.set(&DEFAULT_FIRST);
        pool.published.1.set(&DEFAULT_NEXT);
        pool
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

    /// `None` before anything was set.
    fn get(&self) -> Option<[f64; N]> {
        let read = self.0.each_ref().map(|c| f64::from(f32::from_bits(c.load(Relaxed))));
        read.iter().any(|c| *c > 0.0).then_some(read)
    }
}

impl PoolSpeed {
    /// Takes an observation into one of the fits. Returns what was expected before, and the coefficients now.
    fn observe<const N: usize>(
        &self,
        fit: &Mutex<Fit<N>>,
        features: &[f64; N],
        seconds: f64,
        prior: &[f64; N],
        scale: &[f64; N],
    ) -> (f64, [f64; N]) {
        let mut fit = fit.lock();
        let expected = fit.predict(features);
        fit.observe(features, seconds, prior, scale);
        (expected, *fit.coefficients())
    }

    /// An endpoint that has shown nothing yet.
    fn newcomer(&self) -> Own {
        Own {
            first: Fit::new(*self.first.lock().coefficients()),
            next: Fit::new(*self.next.lock().coefficients()),
            slower: [Slower::default(); 2],
            lately: [Slower::default(); 2],
        }
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
    /// Requests that decode.
    pub decoding: f64,
    /// Requests that wait for something that is not in `kilotokens`: other pickers' requests, seats.
    pub waiting: f64,
    /// Requests that wait in a cache without room, this one included; 0 while there is room.
    pub crowded: f64,
}

/// Features and what was predicted from them.
#[derive(Clone, Copy, Debug)]
struct Expectation {
    first: [f64; FIRST],
    decoding: f64,
    kilotokens: f64,
}

/// What one endpoint's answers have shown.
#[derive(Debug)]
struct Own {
    first: Fit<FIRST>,
    next: Fit<NEXT>,
    /// How many times slower than the pool it is all in all, before the first token and after it.
    slower: [Slower; 2],
    /// How many times slower than its fits it was of late, which follow a change of level slowly.
    lately: [Slower; 2],
}

/// A ratio of times (its logarithm), learned within a few answers: hardware scales everything, and so does what slows a server down.
#[derive(Clone, Copy, Debug, Default)]
struct Slower {
    ln: f64,
    count: f64,
}

/// A ratio is the mean of the last 20 answers or so.
const RATIO_ANSWERS: f64 = 20.0;
/// And it starts as if three answers had been as expected: the first ones of a new server are slow while it warms up.
const RATIO_PRIOR: f64 = 3.0;

impl Slower {
    /// What took `measured` seconds should have taken `expected`. Returns the ratio.
    fn observe(&mut self, measured: f64, expected: f64) -> f64 {
        self.count = (self.count + 1.0).min(RATIO_ANSWERS);
        let off = (measured / expected.max(1e-6)).max(1e-6).ln() - self.ln;
        self.ln = (self.ln + off.clamp(-2.0, 2.0) / (self.count + RATIO_PRIOR)).clamp(-5.0, 5.0);
        self.ln.exp()
    }
}

/// What is known of one endpoint's speed, and what is on its way there.
#[derive(Debug, Default)]
pub struct EndpointSpeed {
    pool: Arc<PoolSpeed>,
    own: Mutex<Option<Own>>,
    /// The coefficients, as readers take them; none before the endpoint has shown anything.
    first: Published<FIRST>,
    next: Published<NEXT>,
    /// When it last showed anything.
    answered: AtomicU64,
    /// Requests whose first token will be seen, and their prompts' tokens and thousands of pairs.
    pending: AtomicU32,
    pending_tokens: AtomicU64,
    pending_kilopairs: AtomicU64,
    /// When the first of them began to be computed.
    since: AtomicU64,
    /// Thousands of tokens of those whose first token won't be seen (f32 bits), and when that was so (ms): they drain.
    unseen: AtomicU64,
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

    fn first_coefficients(&self, now: Timestamp) -> [f64; FIRST] {
        self.aged(&self.first, &self.pool.published.0, now).unwrap_or(DEFAULT_FIRST)
    }

    fn next_coefficients(&self, now: Timestamp) -> [f64; NEXT] {
        self.aged(&self.next, &self.pool.published.1, now).unwrap_or(DEFAULT_NEXT)
    }

    /// What the endpoint showed, the more like what the pool shows the longer that is ago.
    fn aged<const N: usize>(&self, own: &Published<N>, pool: &Published<N>, now: Timestamp) -> Option<[f64; N]> {
        let Some(own) = own.get() else { return pool.get() };
        let age = now.since(Timestamp(self.answered.load(Relaxed))).as_secs_f64();
        // An endpoint that answers need not be aged at all, which most are at most times.
        if age < HALF_LIFE / 30.0 {
            return Some(own);
        }
        let pool = pool.get()?;
        let kept = (-age / HALF_LIFE).exp2();
        Some(std::array::from_fn(|i| match (own.get(i), pool.get(i)) {
            (Some(own), Some(pool)) => own * kept + pool * (1.0 - kept),
            _ => 0.0,
        }))
    }

    /// Requests whose first token is awaited and will be seen.
    #[must_use]
    pub fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }

    /// A new process: what the old one showed is void.
    pub fn reset(&self) {
        *self.own.lock() = None;
        self.first.set(&[0.0; FIRST]);
        self.next.set(&[0.0; NEXT]);
    }

    /// Seconds that `kilotokens` of prompt take to compute here, when there are no other costs.
    fn prefill_seconds(c: &[f64; FIRST], kilotokens: f64, mega_pairs: f64) -> f64 {
        let [_, per_kilotoken, per_mega_pair, ..] = c;
        kilotokens * per_kilotoken + mega_pairs * per_mega_pair
    }

    /// What stands before a request that comes `now`, and what it can expect.
    #[must_use]
    pub fn forecast(
        &self,
        endpoint: &Endpoint,
        fresh: Option<&EndpointMetrics>,
        work: Work,
        now: Timestamp,
    ) -> (Load, Prediction) {
        let first = self.first_coefficients(now);
        let load = self.load(&first, endpoint, fresh, now);
        let decode = [1.0, load.decoding + 1.0, load.kilotokens];
        let prediction = Prediction {
            first_token: dot(&first, &first_features(&load, work)),
            per_token: dot(&self.next_coefficients(now), &decode),
            own_prefill: Self::prefill_seconds(&first, f64::from(work.uncached_tokens) / 1e3, work.mega_pairs()),
        };
        (load, prediction)
    }

    #[expect(clippy::cast_precision_loss, reason = "tokens in flight stay far below 2^53")]
    fn load(&self, c: &[f64; FIRST], endpoint: &Endpoint, fresh: Option<&EndpointMetrics>, now: Timestamp) -> Load {
        let pending = self.pending.load(Relaxed);
        let mut kilotokens = self.pending_tokens.load(Relaxed) as f64 / 1e3;
        let mut mega_pairs = self.pending_kilopairs.load(Relaxed) as f64 / 1e3;
        if pending > 0 {
            // The first of them has been worked on since then; how large it is nobody says, so it counts as the mean.
            let worked = now.since(Timestamp(self.since.load(Relaxed))).as_secs_f64();
            let cost = Self::prefill_seconds(c, kilotokens, mega_pairs).max(1e-9);
            let left = 1.0 - (worked / cost).min(1.0 / f64::from(pending));
            kilotokens *= left;
            mega_pairs *= left;
        }
        let unseen = self.drained(c, now);
        let requests = ledger::requests(endpoint, fresh);
        let waiting = fresh.map_or(0, |m| m.waiting).saturating_sub(pending);
        let crowded = fresh.is_some_and(|m| m.kv_usage >= FULL_CACHE);
        Load {
            kilotokens: kilotokens + unseen,
            mega_pairs,
            decoding: f64::from(requests.saturating_sub(pending).saturating_sub(waiting)),
            waiting: f64::from(waiting),
            crowded: if crowded { f64::from(pending + 1) } else { 0.0 },
        }
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
        self.first.get().is_some() || self.pool.first.lock().is_learned()
    }

    /// What was learned here; `None` before the first answer.
    #[must_use]
    pub fn learned(&self) -> Option<Learned> {
        let own = self.own.lock();
        let error = own.as_ref()?.first.error();
        drop(own);
        let at = Timestamp(self.answered.load(Relaxed));
        let ([_, per_kilotoken, ..], [per_token, ..]) = (self.first_coefficients(at), self.next_coefficients(at));
        Some(Learned {
            prefill_tokens_per_second: 1e3 / per_kilotoken.max(1e-9),
            seconds_per_token: per_token,
            first_token_error: error,
        })
    }

    fn observe_first(&self, features: &[f64; FIRST], seconds: f64, now: Timestamp) {
        self.answered.store(now.0, Relaxed);
        let (expected, pool) = self.pool.observe(&self.pool.first, features, seconds, &DEFAULT_FIRST, &SCALE_FIRST);
        self.pool.published.0.set(&pool);
        let mut own = self.own.lock();
        let Own { first, slower: [slower, _], lately: [lately, _], .. } =
            own.get_or_insert_with(|| self.pool.newcomer());
        let ratio = slower.observe(seconds, expected);
        let lately = lately.observe(seconds, first.predict(features));
        first.observe(features, seconds, &pool.map(|c| c * ratio), &SCALE_FIRST);
        self.first.set(&first.coefficients().map(|c| c * lately));
    }

    fn observe_next(&self, features: &[f64; NEXT], seconds: f64) {
        let (expected, pool) = self.pool.observe(&self.pool.next, features, seconds, &DEFAULT_NEXT, &SCALE_NEXT);
        self.pool.published.1.set(&pool);
        let mut own = self.own.lock();
        let Own { next, slower: [_, slower], lately: [_, lately], .. } =
            own.get_or_insert_with(|| self.pool.newcomer());
        let ratio = slower.observe(seconds, expected);
        let lately = lately.observe(seconds, next.predict(features));
        next.observe(features, seconds, &pool.map(|c| c * ratio), &SCALE_NEXT);
        self.next.set(&next.coefficients().map(|c| c * lately));
    }
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

/// A request on its way to an endpoint, from the decision to its end.
#[derive(Debug)]
pub struct Reservation {
    endpoint: Arc<Endpoint>,
    work: Work,
    expectation: Expectation,
    began: Timestamp,
    /// It stands in the endpoint's `pending`.
    pending: bool,
    first_token: Option<Timestamp>,
}

impl Reservation {
    /// Counts `work` on `endpoint` from `now` on. `streams` says that its first token will be seen.
    #[must_use]
    pub fn begin(
        endpoint: Arc<Endpoint>,
        fresh: Option<&EndpointMetrics>,
        work: Work,
        streams: bool,
        now: Timestamp,
    ) -> Self {
        let speed = &endpoint.speed;
        let c = speed.first_coefficients(now);
        let load = speed.load(&c, &endpoint, fresh, now);
        let expectation = Expectation {
            first: first_features(&load, work),
            decoding: load.decoding + 1.0,
            kilotokens: load.kilotokens,
        };
        if streams {
            if speed.pending.fetch_add(1, Relaxed) == 0 {
                speed.since.store(now.0, Relaxed);
            }
            speed.pending_tokens.fetch_add(u64::from(work.uncached_tokens), Relaxed);
            speed.pending_kilopairs.fetch_add(kilopairs(work), Relaxed);
        } else {
            #[expect(clippy::cast_possible_truncation, reason = "thousands of tokens in f32")]
            let add = |_: u64| {
                Some(pack((speed.drained(&c, now) + f64::from(work.uncached_tokens) / 1e3) as f32, milliseconds(now)))
            };
            // A race between two decisions loses one addition at worst, which drains anyway.
            let _ = speed.unseen.fetch_update(Relaxed, Relaxed, add);
        }
        Self { endpoint, work, expectation, began: now, pending: streams, first_token: None }
    }

    /// The first token came `now`. `tells` says that it was seen as it came, of an answer that is good.
    pub fn first_token(&mut self, tells: bool, now: Timestamp) {
        if self.release() {
            self.endpoint.speed.since.store(now.0, Relaxed);
            if tells {
                self.first_token = Some(now);
                self.endpoint.speed.observe_first(&self.expectation.first, now.since(self.began).as_secs_f64(), now);
            }
        }
    }

    /// The answer ended `now` after `tokens` tokens.
    pub fn ended(&mut self, tokens: Option<u64>, now: Timestamp) {
        // Of a few tokens the time between two is mostly chance.
        let (Some(first), Some(tokens @ 8..)) = (self.first_token.take(), tokens) else { return };
        let seconds = now.since(first).as_secs_f64() / (tokens - 1) as f64;
        let features = [1.0, self.expectation.decoding, self.expectation.kilotokens];
        self.endpoint.speed.observe_next(&features, seconds);
    }

    /// It was served elsewhere.
    pub fn move_to(&mut self, endpoint: Arc<Endpoint>, now: Timestamp) {
        let streams = self.release();
        *self = Self::begin(endpoint, None, self.work, streams, now);
    }

    fn release(&mut self) -> bool {
        let was = std::mem::take(&mut self.pending);
        if was {
            let speed = &self.endpoint.speed;
            speed.pending.fetch_sub(1, Relaxed);
            speed.pending_tokens.fetch_sub(u64::from(self.work.uncached_tokens), Relaxed);
            speed.pending_kilopairs.fetch_sub(kilopairs(self.work), Relaxed);
        }
        was
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and at most 2^63 / 1000")]
fn kilopairs(work: Work) -> u64 {
    (work.mega_pairs() * 1e3) as u64
}

#[cfg(test)]
mod tests;
