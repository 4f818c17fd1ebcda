//! CPU of pickers that share state over a real NATS server, beside one picker alone.

use crate::load::{self, Exchange};
use crate::measure::{cpu, median};
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::nats::NatsProcess;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Streams of each picker, as in the other rows.
const STREAMS: usize = 16;

/// Pickers that serve one load together.
struct Group {
    pickers: Vec<AttacheProcess>,
    _nats: Option<NatsProcess>,
}

impl Group {
    /// `count` pickers, which share state with `sync`.
    async fn start((count, sync): (usize, bool), upstreams: &[SocketAddr]) -> Self {
        let endpoints: String = upstreams.iter().map(|a| format!("  - {{address: \"{a}\"}}\n")).collect();
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  prefixCache: {{tokenizer: \
             characters}}\n  endpoints:\n{endpoints}"
        );
        let nats = if sync { Some(NatsProcess::start().await) } else { None };
        let mut pickers = Vec::new();
        for number in 0..count {
            let mut arguments = ["--config-text", &text, "--workers", "1"].map(str::to_owned).to_vec();
            if let Some(nats) = &nats {
                let name = format!("picker-{number}");
                arguments.extend(["--sync-nats-url", &nats.url(), "--sync-name", &name].map(str::to_owned));
            }
            pickers.push(AttacheProcess::with_arguments(&arguments).await);
        }
        Self { pickers, _nats: nats }
    }

    /// CPU microseconds of all pickers for a request.
    async fn measure(&self, exchanges: &[Arc<Exchange>], time: Duration) -> Result<f64, Error> {
        let used = || self.pickers.iter().map(|picker| cpu(picker.process.id())).sum::<Duration>();
        let before = used();
        let runs = self.pickers.iter().map(|picker| load::run(picker.grpc, exchanges, 2, STREAMS, time));
        let runs = futures_util::future::try_join_all(runs).await?;
        let requests: u64 = runs.iter().map(|run| run.exchanges).sum();
        Ok(used().saturating_sub(before).as_secs_f64() * 1e6 / requests as f64)
    }
}

/// The rows of the table.
pub(crate) async fn rows(
    upstreams: &[SocketAddr],
    exchanges: &[Arc<Exchange>],
    time: Duration,
    rounds: usize,
) -> Result<Vec<[String; 4]>, Error> {
    let mut groups = Vec::new();
    for count in [(1, false), (2, true), (4, false), (4, true)] {
        groups.push((Group::start(count, upstreams).await, Vec::new()));
    }
    for round in 0..=rounds {
        for (group, samples) in &mut groups {
            let one = group.measure(exchanges, time).await?;
            // The first round warms up.
            if round > 0 {
                samples.push(one);
            }
        }
    }
    let mut medians = Vec::new();
    for (group, samples) in groups {
        for picker in &group.pickers {
            picker.assert_settled().await;
        }
        medians.push(median(samples));
    }
    let [one, two, apart, four] = medians[..] else { return Err("four groups".into()) };
    Ok(vec![
        [
            "CPU a request, 16 KB conversation, 4 pickers with `sync`".to_owned(),
            format!("{four:.1} µs; without `sync` 4 pickers {apart:.1} µs, one picker {one:.1} µs"),
            format!("{:.2} × one picker", four / one),
            "≤ 1.10".to_owned(),
        ],
        [
            "requests of 2 pickers with `sync`, at equal CPU per picker".to_owned(),
            format!("{two:.1} µs, one picker without `sync` {one:.1} µs"),
            format!("{:.2} × one picker", 2.0 * one / two),
            "≥ 1.9".to_owned(),
        ],
    ])
}
