//! The workloads that the flags of `attache replay` name: traces and synthetic ones.

use super::ReplayArgs;
use crate::cli::output::message;
use anyhow::{Context, bail, ensure};
use attache_workload::pace::{ClosedLoop, Limited, Resampled, Scaled};
use attache_workload::sessions::{Arrival, DEFAULT_MAX_PAUSE, SessionOptions, SessionPlayer, SessionTrace};
use attache_workload::{Workload, synthetic, trace};
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::PathBuf;
use std::sync::Arc;

/// The workload to play: a trace or a synthetic one.
#[derive(Clone, Debug)]
pub(super) enum WorkloadSource {
    Trace(PathBuf),
    /// The bytes of standard input, which each policy plays from the beginning.
    Piped(Arc<[u8]>),
    /// A trace of sessions, by its name, read whole.
    Sessions(String, Arc<SessionTrace>),
    MadeUp(String),
}

impl WorkloadSource {
    /// The name in reports.
    pub(super) fn name(&self) -> String {
        match self {
            WorkloadSource::Trace(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            WorkloadSource::Piped(_) => "-".to_owned(),
            WorkloadSource::Sessions(name, _) | WorkloadSource::MadeUp(name) => name.clone(),
        }
    }
}

/// All workloads to play. Names the fields of their traces that are not used.
///
/// # Errors
/// There is none, standard input or a trace of sessions can't be read, or a flag for sessions has no sessions.
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
            WorkloadSource::Sessions(..) | WorkloadSource::MadeUp(_) => continue,
        };
        if let Ok(Ok(unused)) = unused
            && !unused.is_empty()
        {
            message(format_args!("{}: not used: {}", source.name(), unused.join(", ")));
        }
    }
    sources.extend(args.workload.iter().cloned().map(WorkloadSource::MadeUp));
    let sources = sources.into_iter().map(|source| with_sessions(args, source)).collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(!sources.is_empty(), "nothing to play; give --trace FILE or --workload NAME (--list shows all)");
    Ok(sources)
}

/// The source, with its sessions read if it is a trace of sessions.
fn with_sessions(args: &ReplayArgs, source: WorkloadSource) -> anyhow::Result<WorkloadSource> {
    let read = |open: &dyn Fn() -> io::Result<trace::Source>| trace::sessions(open, &options(args));
    let sessions = match &source {
        WorkloadSource::Trace(path) => {
            let open = || Ok(Box::new(BufReader::new(File::open(path)?)) as trace::Source);
            read(&open).with_context(|| path.display().to_string())?
        }
        WorkloadSource::Piped(all) => read(&|| Ok(Box::new(Cursor::new(all.clone())))).context("standard input")?,
        WorkloadSource::Sessions(..) | WorkloadSource::MadeUp(_) => None,
    };
    let name = source.name();
    let Some(sessions) = sessions else {
        let flags = [
            ("--sessions", args.sessions.is_some()),
            ("--session-interval", args.session_interval.is_some()),
            ("--max-pause", args.max_pause.is_some()),
            ("--max-context", args.max_context.is_some()),
            ("--open-loop", args.open_loop),
        ];
        return match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => bail!("{flag} needs a trace of sessions, and `{name}` is none"),
            None => Ok(source),
        };
    };
    let Some(most) = args.max_context else { return Ok(WorkloadSource::Sessions(name, Arc::new(sessions))) };
    let kept = sessions.within(most);
    ensure!(!kept.sessions.is_empty(), "--max-context {most} leaves no request of {name}");
    message(format_args!(
        "note: {name}: {} of {} requests have more than {most} tokens and are left out; {} of {} sessions remain",
        sessions.requests() - kept.requests(),
        sessions.requests(),
        kept.sessions.len(),
        sessions.sessions.len()
    ));
    Ok(WorkloadSource::Sessions(name, Arc::new(kept)))
}

/// How traces are read; sessions are played by [`player`].
fn options(args: &ReplayArgs) -> trace::Options {
    trace::Options { block_tokens: args.trace_block_tokens, ..trace::Options::default() }
}

/// Rate and coefficient of variation of `--bursty`.
fn bursts(spelling: &str) -> anyhow::Result<(f64, f64)> {
    let form = || format!("--bursty is `{spelling}`; a rate and a coefficient of variation are needed, as in `20,3`");
    let (rate, cv) = spelling.split_once(',').with_context(form)?;
    let number = |text: &str| text.trim().parse::<f64>().ok().with_context(form);
    Ok((number(rate)?, number(cv)?))
}

/// The sessions of a trace, before their first request.
fn player(args: &ReplayArgs, name: &str, trace: &Arc<SessionTrace>) -> anyhow::Result<SessionPlayer> {
    ensure!(
        args.clients.is_none(),
        "--clients does not go with `{name}`, a trace of sessions; --session-interval, --poisson and --bursty say when \
         sessions begin"
    );
    let arrival = match (args.session_interval, args.poisson, &args.bursty) {
        (Some(interval), ..) => Some(Arrival::Every(interval)),
        (None, Some(rate), _) => Some(Arrival::gaps(rate, 1.0)?),
        (None, None, Some(bursty)) => {
            let (rate, cv) = bursts(bursty)?;
            Some(Arrival::gaps(rate, cv)?)
        }
        (None, None, None) => None,
    };
    let ReplayArgs { sessions: count, open_loop, seed, .. } = *args;
    let max_pause = args.max_pause.unwrap_or(DEFAULT_MAX_PAUSE);
    Ok(SessionPlayer::new(trace.clone(), SessionOptions { count, arrival, max_pause, open_loop, seed }))
}

/// Opens one workload at its beginning.
pub(super) fn workload(args: &ReplayArgs, source: &WorkloadSource, speed: f64) -> anyhow::Result<Box<dyn Workload>> {
    let options = options(args);
    let mut workload = match source {
        WorkloadSource::Trace(path) => trace::open(path, &options).with_context(|| path.display().to_string())?,
        WorkloadSource::Piped(all) => trace::read(Cursor::new(all.clone()), &options).context("standard input")?,
        WorkloadSource::Sessions(name, trace) => Box::new(player(args, name, trace)?),
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
    if matches!(source, WorkloadSource::Sessions(..)) {
        // The player has placed the sessions in time.
    } else if let Some(clients) = args.clients {
        workload = Box::new(ClosedLoop::new(workload, clients, args.think)?);
    } else if let Some(rate) = args.poisson {
        workload = Box::new(Resampled::poisson(workload, rate, args.seed)?);
    } else if let Some(bursty) = &args.bursty {
        let (rate, cv) = bursts(bursty)?;
        workload = Box::new(Resampled::bursty(workload, rate, cv, args.seed)?);
    }
    if speed != 1.0 {
        workload = Box::new(Scaled::new(workload, speed)?);
    }
    if args.requests.is_some() || args.until.is_some() {
        workload = Box::new(Limited::new(workload, args.requests, args.until));
    }
    Ok(workload)
}
