//! Open loop: requests that come when they come, in stages of a steady rate.

use super::parameters::{Parameter, Values};
use crate::draw;
use crate::names::{TextKind, name};
use crate::pace::{MAX_CV, MAX_RATE, seconds};
use crate::{PromptPart, Request, Speaker, TraceError, Workload};
use attache_sim::content::{Piece, mix};
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use attache_types::rng::{PickRng, for_request};
use std::sync::Arc;

/// A year and a bit: what is longer is a misprint.
const MAX_SECONDS: f64 = 4e7;
/// A stage for each hour of a year would be too many to write.
const MAX_STAGES: usize = 1_000;
/// So many gaps are drawn in a tenth of a second.
const MAX_COUNTED: f64 = 5e6;

/// When requests come; each workload puts its own default in place of the empty one.
pub(super) const STAGES: Parameter =
    Parameter { name: "stages", default: "", meaning: "QPSxSECONDS with / between them" };
/// The rate of one stage in place of the workload's own.
pub(super) const QPS: Parameter =
    Parameter { name: "qps", default: "", meaning: "requests a second: one stage of `seconds` in place of `stages`" };
/// How long that stage is.
pub(super) const SECONDS: Parameter =
    Parameter { name: "seconds", default: "60", meaning: "length of the one stage that `qps` asks for" };
/// How uneven the gaps are.
pub(super) const CV: Parameter = Parameter {
    name: "cv",
    default: "1",
    meaning: "deviation of the gaps over their mean: 0 is a metronome, 1 a Poisson process, more comes in bursts",
};

/// The moments at which requests come.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    /// Requests a second, and for how many seconds.
    stages: Vec<(f64, f64)>,
    /// Seconds of silence between two stages.
    pause: f64,
    cv: f64,
    rng: PickRng,
    stage: usize,
    /// Seconds from the start to the beginning of the stage.
    begin: f64,
    /// Time of the last arrival in the stage, seconds.
    clock: f64,
}

impl Arrivals {
    /// As `stages` (`QPSxSECONDS`, `/` between them), `qps`, `seconds` and `cv` say, with `pause`
    /// seconds of silence between stages.
    pub(super) fn read(values: &Values<'_>, pause: f64, seed: u64) -> Result<Self, ParamError> {
        let stages = if values.text(QPS.name).is_empty() {
            if values.is_given(SECONDS.name) {
                return Err(ParamError::new("`seconds` is given without `qps`; set both, or `stages`"));
            }
            read_stages(values.text("stages"))
        } else if values.is_given("stages") {
            return Err(ParamError::new("`qps` and `stages` are both given; one of them is allowed"));
        } else {
            let qps = values.number(QPS.name, 0.0..=MAX_RATE)?;
            Some(vec![(qps, values.number(SECONDS.name, 0.0..=MAX_SECONDS)?)])
        };
        let stages = stages.ok_or_else(|| {
            let allowed = "QPSxSECONDS with / between stages is allowed, as in 3x20/10x20";
            ParamError::value("stages", values.text("stages"), allowed)
        })?;
        let cv = values.number(CV.name, 0.0..=MAX_CV)?;
        // The texts' generators begin with the number of a request; this one is none of them.
        let rng = for_request(mix(seed), u64::MAX);
        Ok(Self { stages, pause, cv, rng, stage: 0, begin: 0.0, clock: 0.0 })
    }

    /// How many there will be, by drawing all gaps ahead; `None` when that would take long.
    fn total(&self) -> Option<u64> {
        let expected: f64 = self.stages.iter().map(|(rate, seconds)| rate * seconds).sum();
        (expected <= MAX_COUNTED).then(|| self.clone().count() as u64)
    }

    /// Seconds from the start to the end of the last stage.
    pub(super) fn duration(&self) -> f64 {
        let pauses = self.stages.len().saturating_sub(1) as f64 * self.pause;
        self.stages.iter().map(|(_, seconds)| seconds).sum::<f64>() + pauses
    }
}

impl Iterator for Arrivals {
    type Item = Timestamp;

    fn next(&mut self) -> Option<Timestamp> {
        while let Some((rate, length)) = self.stages.get(self.stage).copied() {
            if rate > 0.0 {
                self.clock += draw::gap(&mut self.rng, self.cv) / rate;
                // A metronome's last beat falls on the end, but for rounding.
                if self.clock <= length * (1.0 + 1e-9) {
                    return Some(seconds(self.begin + self.clock));
                }
            }
            self.stage += 1;
            self.begin += length + self.pause;
            self.clock = 0.0;
        }
        None
    }
}

fn read_stages(text: &str) -> Option<Vec<(f64, f64)>> {
    let number = |text: &str, most: f64| text.trim().parse().ok().filter(|n| (0.0..=most).contains(n));
    let stages = text.split('/').map(|stage| {
        let (rate, length) = stage.split_once('x')?;
        Some((number(rate, MAX_RATE)?, number(length, MAX_SECONDS)?))
    });
    stages.collect::<Option<Vec<_>>>().filter(|stages| stages.len() <= MAX_STAGES)
}

/// A request of which the number and the time are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) number: u64,
    /// How far the workload has got, 0 to 1.
    pub(super) progress: f64,
}

/// What a request asks for.
pub(super) struct RequestContent {
    pub(super) prompt: Vec<PromptPart>,
    pub(super) answer_tokens: u32,
    pub(super) adapter: Option<Arc<str>>,
}

impl RequestContent {
    /// A prompt of these parts, without those that are empty, and the length of the answer.
    pub(super) fn new(parts: impl IntoIterator<Item = PromptPart>, answer_tokens: u32) -> Self {
        let prompt = parts.into_iter().filter(|part| part.piece.tokens > 0).collect();
        Self { prompt, answer_tokens, adapter: None }
    }
}

/// A system message with the text `name` of `tokens` tokens.
pub(super) fn system(name: u64, tokens: u32) -> PromptPart {
    PromptPart::text(Speaker::System, Piece::new(name, tokens))
}

/// A user message with the text `name` of `tokens` tokens.
pub(super) fn user(name: u64, tokens: u32) -> PromptPart {
    PromptPart::text(Speaker::User, Piece::new(name, tokens))
}

/// Requests at the moments of [`Arrivals`], each made from its number and a generator of its own.
pub(super) struct OpenLoop<M> {
    arrivals: Arrivals,
    duration: f64,
    total: Option<u64>,
    seed: u64,
    number: u64,
    make: M,
}

impl<M: FnMut(Moment, &mut PickRng) -> RequestContent + Send> OpenLoop<M> {
    pub(super) fn new(arrivals: Arrivals, seed: u64, make: M) -> Self {
        Self { duration: arrivals.duration(), total: arrivals.total(), arrivals, seed, number: 0, make }
    }
}

impl<M: FnMut(Moment, &mut PickRng) -> RequestContent + Send> Workload for OpenLoop<M> {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let Some(at) = self.arrivals.next() else { return Ok(None) };
        let number = self.number;
        self.number += 1;
        let progress = (at.0 as f64 / 1e9 / self.duration).min(1.0);
        let mut rng = for_request(self.seed, number);
        let RequestContent { prompt, answer_tokens, adapter } = (self.make)(Moment { number, progress }, &mut rng);
        let answer = Piece::new(name(self.seed, TextKind::Answer, number), answer_tokens);
        Ok(Some(Request {
            number,
            at,
            prompt,
            answer,
            adapter,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        }))
    }

    fn total(&self) -> Option<u64> {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::unique::WORKLOAD;

    fn arrivals(text: &str) -> Result<Vec<f64>, ParamError> {
        let arrivals = Arrivals::read(&Values::read(&WORKLOAD, text)?, 30.0, 1)?;
        Ok(arrivals.map(|at| at.0 as f64 / 1e9).collect())
    }

    #[test]
    fn a_metronome_beats_in_its_stages() {
        let times = arrivals("stages=2x2/0x5/1x3,cv=0").unwrap();
        assert_eq!(times, [0.5, 1.0, 1.5, 2.0, 68.0, 69.0, 70.0]);
        assert_eq!(arrivals("qps=45,seconds=120,cv=0").unwrap().len(), 5_400);
        assert!(arrivals("qps=0").unwrap().is_empty());
    }

    #[test]
    fn each_stage_has_its_rate() {
        let times = arrivals("stages=10x1000/40x500").unwrap();
        let first = times.iter().filter(|t| **t <= 1_000.0).count();
        assert!((9_600..10_400).contains(&first), "{first}");
        let second = times.iter().filter(|t| **t > 1_030.0).count();
        assert!((19_400..20_600).contains(&second), "{second}");
        assert_eq!(first + second, times.len(), "none in the pause");
        assert!(times.is_sorted());
    }

    #[test]
    fn other_spellings_are_refused() {
        for (text, message) in [
            ("stages=", "`stages` is ; QPSxSECONDS with / between stages is allowed, as in 3x20/10x20"),
            ("stages=3x", "`stages` is 3x; QPSxSECONDS with / between stages is allowed, as in 3x20/10x20"),
            ("stages=-1x3", "`stages` is -1x3; QPSxSECONDS with / between stages is allowed, as in 3x20/10x20"),
            ("stages=NaNx3", "`stages` is NaNx3; QPSxSECONDS with / between stages is allowed, as in 3x20/10x20"),
            ("qps=3,stages=3x3", "`qps` and `stages` are both given; one of them is allowed"),
            ("seconds=3", "`seconds` is given without `qps`; set both, or `stages`"),
            ("qps=2000000", "`qps` is 2000000; a number from 0 to 1000000 is allowed"),
            ("cv=-1", "`cv` is -1; a number from 0 to 100 is allowed"),
        ] {
            assert_eq!(arrivals(text).unwrap_err().to_string(), message);
        }
    }
}
