//! `code-completion`: an editor asks for the next few tokens at every pause of a key. Prompts are a repository's
//! summary, the file and the lines around the cursor; answers have some sixteen tokens. Files fit into the caches of
//! all servers together, but not into those of each.
//!
//! Source: ours, after completion services, which quote the open file and answer within a few hundred milliseconds.

use super::arrivals::{Arrivals, CV, OpenLoop, QPS, RequestContent, SECONDS, STAGES, system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use super::{Built, Descriptor};
use crate::draw::Zipf;
use crate::names::{TextKind, name, name_of_pair};
use rand::RngExt;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "code-completion",
    summary: "60 completions a second of 16 tokens, in 40 repositories with 20 files of 2,500 tokens each.",
    source: "ours",
    is_closed: false,
    parameters: &[
        Parameter { name: "repositories", default: "40", meaning: "repositories, all asked for alike" },
        Parameter { name: "files", default: "20", meaning: "files of a repository" },
        Parameter { name: "zipf", default: "1", meaning: "how much more popular the first are; 0: all alike" },
        Parameter { name: "summary", default: "1000", meaning: "tokens that all prompts of a repository begin with" },
        Parameter { name: "file", default: "2500", meaning: "tokens of a file" },
        Parameter { name: "lines", default: "5..400~80~60", meaning: "tokens around the cursor, never the same" },
        Parameter { name: "output", default: "4..64~16~12", meaning: "tokens of a completion" },
        Parameter { default: "60x120", ..STAGES },
        QPS,
        SECONDS,
        CV,
    ],
    build,
};

fn build(values: &Values<'_>, seed: u64) -> Built {
    let repositories = values.whole("repositories", 1..=1_000_000)?;
    let files = values.whole("files", 1..=1_000_000)?;
    let popularity = Zipf::new(files, values.number("zipf", 0.0..=10.0)?);
    let summary = values.tokens("summary", 0)?;
    let file = values.tokens("file", 1)?;
    let lines = values.spread("lines", 1.0..=MAX_TOKENS)?;
    let output = values.spread("output", 1.0..=MAX_TOKENS)?;
    let arrivals = Arrivals::read(values, 0.0, seed)?;
    Ok(Box::new(OpenLoop::new(arrivals, seed, move |moment, rng| {
        let repository = rng.random_range(0..u64::from(repositories));
        let rank = popularity.draw(rng) as u64;
        let parts = [
            system(name(seed, TextKind::System, repository), summary),
            user(name_of_pair(seed, TextKind::Document, repository, rank), file),
            user(name(seed, TextKind::Prompt, moment.number), lines.draw_whole(rng, 1)),
        ];
        RequestContent::new(parts, output.draw_whole(rng, 1))
    })))
}
