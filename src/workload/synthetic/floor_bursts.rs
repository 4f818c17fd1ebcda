//! `floor-bursts`: a quiet floor of ordinary requests, and on top of it a burst now and then that shares a prefix.
//! Between bursts every policy does well; in a burst those requests of the floor suffer whose servers take most of it.
//! Prefixes of bursts come back.
//!
//! Source: ours. `burst` has equal prompts and nothing between them.

use super::arrivals::{CV, RequestContent, SECONDS, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw::{self, Spread};
use crate::names::{TextKind, name};
use crate::pace::{MAX_CV, seconds};
use crate::{Request, TraceError, Workload};
use attache_sim::content::{Piece, mix};
use attache_types::params::ParamError;
use attache_types::rng::for_request;

/// A million requests are 16 MB of moments.
const MAX_REQUESTS: f64 = 1e6;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "floor-bursts",
    summary: "Four requests a second that share nothing, and every 20 seconds 48 within one that share a prefix.",
    source: "ours",
    is_closed: false,
    parameters: &[
        Parameter { default: "300", meaning: "how long", ..SECONDS },
        Parameter { name: "floor", default: "4", meaning: "requests a second between bursts" },
        CV,
        Parameter { name: "input", default: "100..4000~1000~800", meaning: "tokens of a prompt of the floor" },
        Parameter { name: "every", default: "20", meaning: "seconds from one burst to the next" },
        Parameter { name: "size", default: "48", meaning: "requests of a burst: six for each of eight servers" },
        Parameter { name: "within", default: "1", meaning: "seconds that a burst lasts" },
        Parameter { name: "prefixes", default: "8", meaning: "prefixes of bursts, one after the other" },
        Parameter { name: "prefix", default: "3000", meaning: "tokens that are equal within a burst" },
        Parameter { name: "question", default: "100", meaning: "tokens behind them, never the same" },
        Parameter { name: "output", default: "20..1000~200~150", meaning: "tokens of an answer" },
    ],
    build,
};

/// One request before it is made: when it comes, and of which prefix if it is part of a burst.
type Moment = (f64, Option<u64>);

struct FloorBursts {
    /// In ascending order of time.
    moments: std::iter::Enumerate<std::vec::IntoIter<Moment>>,
    total: u64,
    input: Spread,
    prefix: u32,
    question: u32,
    output: Spread,
    seed: u64,
}

fn build(values: &Values<'_>, seed: u64) -> Built {
    let length = values.number("seconds", 0.001..=1e6)?;
    let floor = values.number("floor", 0.0..=1e6)?;
    let cv = values.number("cv", 0.0..=MAX_CV)?;
    let every = values.number("every", 0.001..=1e6)?;
    let size = values.whole("size", 0..=1_000_000)?;
    let within = values.number("within", 0.0..=every)?;
    let prefixes = u64::from(values.whole("prefixes", 1..=1_000_000)?);
    let requests = length * (floor + f64::from(size) / every);
    if requests > MAX_REQUESTS {
        let allowed = format!("at most {MAX_REQUESTS:.0} requests in all are allowed, these are {requests:.0}");
        return Err(ParamError::value("seconds", length, &allowed));
    }
    let mut rng = for_request(mix(seed), u64::MAX);
    let mut moments: Vec<Moment> = Vec::new();
    let mut clock = 0.0;
    // Without a floor the first gap has no end.
    loop {
        clock += draw::gap(&mut rng, cv) / floor;
        if clock.is_nan() || clock > length {
            break;
        }
        moments.push((clock, None));
    }
    // The first burst comes when the floor has been alone for a while.
    let bursts = (length / every).floor() as u64;
    for burst in 0..bursts {
        let begin = (burst as f64 + 0.5) * every;
        let offsets = (0..size).map(|_| begin + draw::unit(&mut rng) * within);
        moments.extend(offsets.map(|at| (at, Some(burst % prefixes))));
    }
    moments.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    Ok(Box::new(FloorBursts {
        total: moments.len() as u64,
        moments: moments.into_iter().enumerate(),
        input: values.spread("input", 1.0..=MAX_TOKENS)?,
        prefix: values.tokens("prefix", 1)?,
        question: values.tokens("question", 1)?,
        output: values.spread("output", 1.0..=MAX_TOKENS)?,
        seed,
    }))
}

impl Workload for FloorBursts {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let Some((number, (at, prefix))) = self.moments.next() else { return Ok(None) };
        let number = number as u64;
        let mut rng = for_request(self.seed, number);
        let own = |tokens| user(name(self.seed, TextKind::Prompt, number), tokens);
        let parts = match prefix {
            Some(prefix) => vec![system(name(self.seed, TextKind::System, prefix), self.prefix), own(self.question)],
            None => vec![own(self.input.draw_whole(&mut rng, 1))],
        };
        let asked = RequestContent::new(parts, self.output.draw_whole(&mut rng, 1));
        Ok(Some(Request {
            number,
            at: seconds(at),
            prompt: asked.prompt,
            answer: Piece::new(name(self.seed, TextKind::Answer, number), asked.answer_tokens),
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        }))
    }

    fn total(&self) -> Option<u64> {
        Some(self.total)
    }
}
