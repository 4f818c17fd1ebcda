//! The workloads that the flags of `attache replay` name: traces and synthetic ones.

use super::ReplayArgs;
use crate::cli::output::message;
use crate::workload::pace::{ClosedLoop, Limited, Resampled, Scaled};
use crate::workload::{Workload, synthetic, trace};
use anyhow::{Context, bail, ensure};
use std::fs::File;
use std::io::{BufReader, Cursor, Read};
use std::path::PathBuf;
use std::sync::Arc;

/// The workload to play: a trace or a synthetic one.
#[derive(Clone, Debug)]
pub(super) enum WorkloadSource {
    Trace(PathBuf),
    /// The bytes of standard input, which each policy plays from the beginning.
    Piped(Arc<[u8]>),
    MadeUp(String),
}

impl WorkloadSource {
    /// The name in reports.
    pub(super) fn name(&self) -> String {
        match self {
            WorkloadSource::Trace(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            WorkloadSource::Piped(_) => "-".to_owned(),
            WorkloadSource::MadeUp(spelling) => spelling.clone(),
        }
    }
}

/// All workloads to play. Names the fields of their traces that are not used.
///
/// # Errors
/// There is none, or standard input can't be read.
pub(super) fn sources(args: &ReplayArgs) -> anyhow::Result<Vec<WorkloadSource>> {
    let is_piped = |path: &&PathBuf| path.as_os_str() == "-";
    ensure!(
        args.trace.iter().filter(is_piped).count() <= 1,
        "--trace - is given twice; standard input can be read only once"
    );
    let mut sources = Vec::new();
    for path in &args.trace {
        sources.push(if is_piped(&path) {
            let mut all = Vec::new();
            std::io::stdin().read_to_end(&mut all).context("--trace -")?;
            WorkloadSource::Piped(all.into())
        } else {
            WorkloadSource::Trace(path.clone())
        });
    }
    for source in &sources {
        let unused = match source {
            // A file that can't be read is an error when it is played.
            WorkloadSource::Trace(path) => File::open(path).map(|file| trace::unused(BufReader::new(file))),
            WorkloadSource::Piped(all) => Ok(trace::unused(Cursor::new(all.clone()))),
            WorkloadSource::MadeUp(_) => continue,
        };
        if let Ok(Ok(unused)) = unused
            && !unused.is_empty()
        {
            message(format_args!("{}: not used: {}", source.name(), unused.join(", ")));
        }
    }
    sources.extend(args.workload.iter().cloned().map(WorkloadSource::MadeUp));
    ensure!(!sources.is_empty(), "nothing to play; give --trace FILE or --workload NAME (--list shows all)");
    Ok(sources)
}

/// Opens one workload at its beginning.
pub(super) fn workload(args: &ReplayArgs, source: &WorkloadSource, speed: f64) -> anyhow::Result<Box<dyn Workload>> {
    let options = trace::Options { block_tokens: args.trace_block_tokens };
    let mut workload = match source {
        WorkloadSource::Trace(path) => trace::open(path, &options).with_context(|| path.display().to_string())?,
        WorkloadSource::Piped(all) => trace::read(Cursor::new(all.clone()), &options).context("standard input")?,
        WorkloadSource::MadeUp(spelling) => {
            let workload = synthetic::build(spelling, args.seed).map_err(|e| anyhow::anyhow!("--workload: {e}"))?;
            let flags = [("--clients", args.clients.is_some()), ("--poisson", args.poisson.is_some())];
            let given = flags.into_iter().chain([("--bursty", args.bursty.is_some())]).find(|(_, given)| *given);
            if let Some((flag, _)) = given.filter(|_| synthetic::is_closed(spelling)) {
                bail!(
                    "{flag} does not go with `{spelling}`: its requests follow from responses, and have no other \
                     times; see its parameters in --list"
                );
            }
            workload
        }
    };
    if let Some(clients) = args.clients {
        workload = Box::new(ClosedLoop::new(workload, clients, args.think)?);
    } else if let Some(rate) = args.poisson {
        workload = Box::new(Resampled::poisson(workload, rate, args.seed)?);
    } else if let Some(bursty) = &args.bursty {
        let form = || format!("--bursty is `{bursty}`; a rate and a coefficient of variation are needed, as in `20,3`");
        let (rate, cv) = bursty.split_once(',').with_context(form)?;
        let number = |text: &str| text.trim().parse::<f64>().ok().with_context(form);
        workload = Box::new(Resampled::bursty(workload, number(rate)?, number(cv)?, args.seed)?);
    }
    if speed != 1.0 {
        workload = Box::new(Scaled::new(workload, speed)?);
    }
    if args.requests.is_some() || args.until.is_some() {
        workload = Box::new(Limited::new(workload, args.requests, args.until));
    }
    Ok(workload)
}
