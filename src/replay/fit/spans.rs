//! Stretches of a server's time of which the work is known. Called by [`super`]; pure.
//!
//! An answer of `n` tokens goes on for `n - 1` steps behind its first. In each of them every other sequence that
//! decodes there gets one token too; how many of its tokens fall into a part of its time is read off the pace of
//! both. A prompt that fits into one step is computed in that which ends with its first token, a longer one since the
//! prompt before it was done.
//!
//! A step that computes prompts for longer than it reads weights and contexts hides the reading; any other step hides
//! the computing. Prompts whose first tokens come at one moment were computed in one step.

use super::answers::{MeasuredResponse, RecordedLoad};
use super::solve::{COLUMNS, FitRow};
use super::{BESIDE, CONTEXT, DECODE, PAIR, PREFILL, STEP, WEIGHTS};
use attache_sim::engine::EngineConfig;
use attache_types::clock::Timestamp;

/// Shorter answers are mostly edges.
const MIN_STEPS: u32 = 4;

/// What one answer did to its server, seconds.
#[derive(Clone, Copy, Debug)]
struct Stay {
    decided: f64,
    /// When its prompt began to be computed; the moment of the first token when that was one step.
    began: f64,
    first: f64,
    end: f64,
    /// Since any stay up to this one was last there, in the order of first tokens.
    last_end: f64,
    prompt: f64,
    computed: f64,
    cached: f64,
    steps: f64,
}

impl Stay {
    /// Tokens that it says in the part `from..until` of its time of decoding.
    fn said(&self, from: f64, until: f64) -> f64 {
        let whole = self.end - self.first;
        if whole > 0.0 { self.steps * (until - from) / whole } else { 0.0 }
    }

    /// A part of its prefill, with `budget` tokens in a step.
    fn prompts(&self, part: f64, budget: f64) -> PromptSpan {
        let pairs = self.computed * self.cached + self.computed * (self.computed + 1.0) / 2.0;
        let steps = (self.computed / budget).ceil();
        PromptSpan { first: self.first, steps: part * steps, computed: part * self.computed, pairs: part * pairs }
    }
}

/// When requests were there of which it is not known what they cost.
struct Busy {
    /// Their beginnings, ascending, each with the latest end up to it.
    from: Vec<(f64, f64)>,
}

impl Busy {
    fn of(spans: impl Iterator<Item = (f64, f64)>) -> Self {
        let mut from: Vec<(f64, f64)> = spans.collect();
        from.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut latest = f64::NEG_INFINITY;
        for (_, end) in &mut from {
            latest = latest.max(*end);
            *end = latest;
        }
        Self { from }
    }

    /// Whether one was there at any time between these.
    fn touches(&self, from: f64, until: f64) -> bool {
        let before = self.from.partition_point(|(begun, _)| *begun < until);
        before.checked_sub(1).and_then(|last| self.from.get(last)).is_some_and(|(_, latest)| *latest > from)
    }
}

/// Prompts that one step computes, or the steps that one long prompt takes.
#[derive(Clone, Copy, Default)]
struct PromptSpan {
    /// When the first token came of the first of them.
    first: f64,
    /// Number of steps in the stretch.
    steps: f64,
    computed: f64,
    pairs: f64,
}

impl PromptSpan {
    /// Whether computing them takes longer than reading the weights and `context` tokens in each of
    /// their steps, with these constants.
    fn outlast(&self, context: f64, costs: &[f64; COLUMNS]) -> bool {
        let [weights, _, prefill, per_context, _, pair, _] = costs;
        self.computed * prefill + self.pairs * pair > self.steps * (weights + context * per_context)
    }
}

/// What rows are made with.
#[derive(Clone, Copy)]
struct Setting<'c> {
    /// Token budget of a step.
    budget: f64,
    /// Two ends of steps that are nearer to each other than this, seconds, are one.
    grain: f64,
    /// Constants that decide whether a step computes or reads for longer.
    costs: &'c [f64; COLUMNS],
}

/// A row for each stretch. `costs` are the constants that separate steps bound by compute from steps bound by memory.
pub(super) fn rows(load: &RecordedLoad, base: &EngineConfig, costs: &[f64; COLUMNS]) -> Vec<FitRow> {
    let mut servers: Vec<u32> = load.answers.iter().map(|answer| answer.server).collect();
    servers.sort_unstable();
    servers.dedup();
    let origin = load.answers.iter().map(|answer| answer.decided).min().unwrap_or_default();
    let [weights, step, ..] = costs;
    let budget = f64::from(base.max_num_batched_tokens.max(1));
    let setting = Setting { budget, grain: (weights + step) / 2.0, costs };
    servers.into_iter().flat_map(|server| rows_of(load, server, origin, setting)).collect()
}

fn rows_of(load: &RecordedLoad, server: u32, origin: Timestamp, setting: Setting<'_>) -> Vec<FitRow> {
    let seconds = |at: Timestamp| at.since(origin).as_secs_f64();
    let budget = setting.budget;
    let mut answers: Vec<&MeasuredResponse> = load.answers.iter().filter(|answer| answer.server == server).collect();
    answers.sort_by_key(|answer| (answer.first, answer.decided));
    let (mut stays, mut last_first, mut last_end) = (Vec::<Stay>::with_capacity(answers.len()), 0.0_f64, 0.0_f64);
    for answer in answers {
        let (decided, first, end) = (seconds(answer.decided), seconds(answer.first), seconds(answer.end));
        let computed = f64::from(answer.prompt_tokens.saturating_sub(answer.cached_tokens).max(1));
        last_end = last_end.max(end);
        stays.push(Stay {
            decided,
            began: if computed <= budget { first } else { decided.max(last_first).min(first) },
            first,
            end,
            last_end,
            prompt: f64::from(answer.prompt_tokens),
            computed,
            cached: f64::from(answer.cached_tokens),
            steps: f64::from(answer.generated_tokens - 1),
        });
        last_first = first;
    }
    let unmeasured =
        Busy::of(load.unmeasured.iter().filter(|u| u.server == server).map(|u| (seconds(u.decided), seconds(u.end))));
    let is_measured = |from: f64, until: f64| !unmeasured.touches(from, until);
    let mut rows = Vec::new();
    for (i, stay) in stays.iter().enumerate() {
        let others = beside(&stays, i);
        let alone = others.clone().all(|other| other.decided >= stay.first || other.end <= stay.decided);
        if alone && stay.first > stay.decided && is_measured(stay.decided, stay.first) {
            rows.push(prefill(stay, setting));
        }
        if stay.steps >= f64::from(MIN_STEPS) && stay.end > stay.first && is_measured(stay.first, stay.end) {
            rows.push(decode(stay, others, setting));
        }
    }
    rows
}

/// Those whose stay may touch that of number `i`.
fn beside(stays: &[Stay], i: usize) -> impl Iterator<Item = &Stay> + Clone {
    let (before, rest) = stays.split_at(i);
    let (own, after) = rest.split_first().map_or((None, rest), |(own, after)| (Some(own), after));
    let (decided, end) = own.map_or((0.0, 0.0), |own| (own.decided, own.end));
    let earlier = before.iter().rev().take_while(move |stay| stay.last_end > decided);
    // The prompts of those who come first behind its end may have been begun before it.
    let later = after.iter().scan(false, move |over, stay| {
        let was_over = std::mem::replace(over, stay.first > end && stay.decided > end);
        (!was_over).then_some(stay)
    });
    earlier.chain(later)
}

/// From the decision to the first token, of one that has the server for itself.
fn prefill(stay: &Stay, setting: Setting<'_>) -> FitRow {
    let mut times = [0.0; COLUMNS];
    let prompts = stay.prompts(1.0, setting.budget);
    times[STEP] = prompts.steps;
    if prompts.outlast(0.0, setting.costs) {
        times[PREFILL] = prompts.computed;
        times[PAIR] = prompts.pairs;
    } else {
        times[WEIGHTS] = prompts.steps;
    }
    times[BESIDE] = 1.0;
    FitRow { times, seen: stay.first - stay.decided }
}

/// From the first token to the end.
fn decode<'s>(stay: &Stay, others: impl Iterator<Item = &'s Stay>, setting: Setting<'_>) -> FitRow {
    let Setting { budget, grain, costs } = setting;
    let mut prompts: Vec<PromptSpan> = Vec::new();
    let mut sequences = stay.steps;
    let mut context = stay.steps * (stay.prompt + (stay.steps - 1.0) / 2.0);
    for other in others {
        // Its own first token came at the end of a step: the first step behind that is the next one.
        let part = |from: f64, until: f64, at: f64| {
            if until - from < grain {
                return f64::from(at > stay.first + grain && at <= stay.end + grain);
            }
            ((until.min(stay.end) - from.max(stay.first)) / (until - from)).clamp(0.0, 1.0)
        };
        let part = part(other.began, other.first, other.first);
        if part > 0.0 {
            prompts.push(other.prompts(part, budget));
        }
        let (from, until) = (other.first.max(stay.first), other.end.min(stay.end));
        if until > from {
            let (theirs, ours) = (other.said(from, until), stay.said(from, until));
            let both = (theirs + ours) / 2.0;
            // A sequence that decodes all the time gets a token in each step.
            let tokens = if from == stay.first && until == stay.end {
                stay.steps
            } else if from == other.first && until == other.end {
                other.steps
            } else {
                both
            };
            sequences += tokens;
            context += tokens * (other.prompt + other.said(other.first, (from + until) / 2.0));
        }
    }
    let mut computing = PromptSpan::default();
    for step in together(prompts, grain) {
        if step.outlast(context / stay.steps, costs) {
            computing.steps += step.steps;
            computing.computed += step.computed;
            computing.pairs += step.pairs;
        }
    }
    let computes = (computing.steps / stay.steps).min(1.0);
    let mut times = [0.0; COLUMNS];
    times[STEP] = stay.steps;
    times[PREFILL] = computing.computed;
    times[PAIR] = computing.pairs;
    times[DECODE] = computes * sequences;
    times[WEIGHTS] = (1.0 - computes) * stay.steps;
    times[CONTEXT] = (1.0 - computes) * context;
    FitRow { times, seen: stay.end - stay.first }
}

/// The same, with those in one that were computed in one step.
fn together(mut prompts: Vec<PromptSpan>, grain: f64) -> Vec<PromptSpan> {
    prompts.sort_by(|a, b| a.first.total_cmp(&b.first));
    let mut steps: Vec<PromptSpan> = Vec::with_capacity(prompts.len());
    for next in prompts {
        match steps.last_mut().filter(|step| next.first - step.first < grain) {
            Some(step) => {
                step.steps = step.steps.max(next.steps);
                step.computed += next.computed;
                step.pairs += next.pairs;
            }
            None => steps.push(next),
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_of_one_moment_are_one_step_and_long_enough_ones_hide_what_it_reads() {
        let prompts = |first, computed| PromptSpan { first, steps: 1.0, computed, pairs: 0.0 };
        let steps = together(vec![prompts(2.0, 300.0), prompts(1.0, 100.0), prompts(1.001, 100.0)], 0.005);
        let found: Vec<_> = steps.iter().map(|step| (step.first, step.steps, step.computed)).collect();
        assert_eq!(found, [(1.0, 1.0, 200.0), (2.0, 1.0, 300.0)]);
        // 6 ms of weights and 40 us a token: 150 tokens; 49 ns a token of context.
        let costs = [6e-3, 1e-3, 40e-6, 49e-9, 40e-6, 1e-9, 0.0];
        assert!(prompts(0.0, 151.0).outlast(0.0, &costs) && !prompts(0.0, 149.0).outlast(0.0, &costs));
        assert!(!prompts(0.0, 151.0).outlast(10_000.0, &costs), "490 us more of context");
    }

    #[test]
    fn whoever_is_there_at_any_time_between_is_found() {
        let busy = Busy::of([(5.0, 6.0), (1.0, 9.0), (12.0, 13.0)].into_iter());
        for (from, until, is_touched) in [
            (0.0, 1.0, false),
            (0.0, 1.5, true),
            (7.0, 8.0, true),
            (9.0, 12.0, false),
            (9.5, 12.5, true),
            (13.0, 99.0, false),
        ] {
            assert_eq!(busy.touches(from, until), is_touched, "{from}..{until}");
        }
        assert!(!Busy::of(std::iter::empty()).touches(0.0, 1e9));
    }
}
