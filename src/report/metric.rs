//! The figures that can be asked for by name. Called by [`super::assertion`]. Pure.

use super::json::RunFigures;
use super::number::Unit;

/// One figure of a run.
pub struct Metric {
    /// Its name in `--assert`.
    pub name: &'static str,
    /// What it is, in one line.
    pub doc: &'static str,
    /// Unit of the value, which also decides how it is written.
    pub unit: Unit,
    /// Takes it from a run; `None` when the run has no such figure.
    pub of: fn(&RunFigures) -> Option<f64>,
}

impl std::fmt::Debug for Metric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

type Of = fn(&RunFigures) -> Option<f64>;

const fn metric(name: &'static str, unit: Unit, doc: &'static str, of: Of) -> Metric {
    Metric { name, doc, unit, of }
}

/// All metrics, in the order in which `--list` shows them.
pub const METRICS: &[Metric] = &[
    metric("ttft_mean", Unit::Seconds, "mean time to first token", |r| r.ttft.mean),
    metric("ttft_p50", Unit::Seconds, "median time to first token", |r| r.ttft.p50),
    metric("ttft_p90", Unit::Seconds, "90th percentile of the time to first token", |r| r.ttft.p90),
    metric("ttft_p95", Unit::Seconds, "95th percentile of the time to first token", |r| r.ttft.p95),
    metric("ttft_p99", Unit::Seconds, "99th percentile of the time to first token", |r| r.ttft.p99),
    metric("tpot_mean", Unit::Seconds, "mean time per output token, of answers of at least 8", |r| r.tpot.mean),
    metric("tpot_p50", Unit::Seconds, "median time per output token", |r| r.tpot.p50),
    metric("tpot_p90", Unit::Seconds, "90th percentile of the time per output token", |r| r.tpot.p90),
    metric("tpot_p95", Unit::Seconds, "95th percentile of the time per output token", |r| r.tpot.p95),
    metric("tpot_p99", Unit::Seconds, "99th percentile of the time per output token", |r| r.tpot.p99),
    metric("itl_mean", Unit::Seconds, "mean time between tokens, each gap counted once", |r| r.itl.mean),
    metric("itl_p50", Unit::Seconds, "median time between tokens", |r| r.itl.p50),
    metric("itl_p90", Unit::Seconds, "90th percentile of the time between tokens", |r| r.itl.p90),
    metric("itl_p95", Unit::Seconds, "95th percentile of the time between tokens", |r| r.itl.p95),
    metric("itl_p99", Unit::Seconds, "99th percentile of the time between tokens", |r| r.itl.p99),
    metric("latency_mean", Unit::Seconds, "mean time of whole requests", |r| r.latency.mean),
    metric("latency_p50", Unit::Seconds, "median time of whole requests", |r| r.latency.p50),
    metric("latency_p90", Unit::Seconds, "90th percentile of the time of whole requests", |r| r.latency.p90),
    metric("latency_p95", Unit::Seconds, "95th percentile of the time of whole requests", |r| r.latency.p95),
    metric("latency_p99", Unit::Seconds, "99th percentile of the time of whole requests", |r| r.latency.p99),
    metric("hit_rate", Unit::Share, "part of the prompt tokens that servers held", |r| r.hit_rate),
    metric("goodput", Unit::Share, "part of all requests that were answered within the targets", |r| r.goodput),
    metric("slo_met", Unit::Share, "part of the requests that met the targets of the pool's objective", |r| {
        r.objective?.slo?.share_met
    }),
    metric("weighted_mean", Unit::Seconds, "mean time of a response by the weights of the pool's objective", |r| {
        r.objective?.weighted_mean_seconds
    }),
    metric("error_rate", Unit::Share, "part of the requests that were rejected or lost", |r| r.error_rate),
    metric("answered", Unit::Plain, "requests that were answered", |r| Some(r.requests.answered as f64)),
    metric("refused", Unit::Plain, "requests that the picker or a server rejected", |r| {
        Some(r.requests.refused as f64)
    }),
    metric("lost", Unit::Plain, "requests whose server or connection died", |r| Some(r.requests.lost as f64)),
    metric("preemptions", Unit::Plain, "times that servers started requests over", |r| Some(r.preemptions as f64)),
    metric("imbalance", Unit::Plain, "largest share of prompt work by the mean one; 1 is even", |r| {
        r.imbalance.map(|i| i.max_over_mean)
    }),
    metric("imbalance_cv", Unit::Plain, "coefficient of variation of prompt work; 0 is even", |r| {
        r.imbalance.map(|i| i.cv)
    }),
    metric("jain", Unit::Plain, "Jain's index of prompt work; 1 is even", |r| r.imbalance.map(|i| i.jain)),
    metric("split_share", Unit::Share, "part of the requests that a prefill and a decode server shared", |r| {
        r.split?.share
    }),
    metric("transfer_mean", Unit::Seconds, "mean time from a prefill server's cache to a decode server's", |r| {
        r.split?.transfer_seconds
    }),
    metric("prefill_busy", Unit::Share, "part of the time in which prefill servers were busy", |r| {
        r.split?.prefill_busy
    }),
    metric("decode_busy", Unit::Share, "part of the time in which decode servers were busy", |r| r.split?.decode_busy),
    metric("wait_mean", Unit::Seconds, "mean wait for a turn of those that were let through", |r| {
        r.queue.as_ref()?.waited_seconds.mean
    }),
    metric("wait_p99", Unit::Seconds, "99th percentile of the wait for a turn", |r| {
        r.queue.as_ref()?.waited_seconds.p99
    }),
    metric("wait_max", Unit::Seconds, "longest wait for a turn", |r| r.queue.as_ref()?.waited_seconds.max),
    metric("turned_away", Unit::Plain, "requests that got no turn", |r| {
        r.queue.as_ref().map(|queue| queue.turns.turned_away() as f64)
    }),
    metric("program_mean", Unit::Seconds, "mean time of programs, pauses included", |r| {
        r.programs.as_ref()?.time_seconds.mean
    }),
    metric("program_p50", Unit::Seconds, "median time of programs", |r| r.programs.as_ref()?.time_seconds.p50),
    metric("program_p99", Unit::Seconds, "99th percentile of the time of programs", |r| {
        r.programs.as_ref()?.time_seconds.p99
    }),
    metric("ttft_first", Unit::Seconds, "mean time to first token of first requests of programs and sub-agents", |r| {
        r.programs.as_ref()?.ttft_first_seconds.mean
    }),
    metric("ttft_tool", Unit::Seconds, "mean time to first token after the result of a tool", |r| {
        r.programs.as_ref()?.ttft_tool_seconds.mean
    }),
    metric("ttft_person", Unit::Seconds, "mean time to first token after a message of a person", |r| {
        r.programs.as_ref()?.ttft_person_seconds.mean
    }),
    metric("ttft_long_pause", Unit::Seconds, "mean time to first token after a pause of at least 60 s", |r| {
        r.programs.as_ref()?.ttft_long_pause_seconds.mean
    }),
    metric("recomputed_tokens", Unit::Plain, "tokens of earlier prompts of a program that were computed again", |r| {
        r.programs.as_ref().map(|programs| programs.recomputed_tokens as f64)
    }),
    metric("moves", Unit::Plain, "mean number of times that a program's agents changed servers", |r| {
        r.programs.as_ref()?.moves
    }),
    metric("slowdown_mean", Unit::Plain, "mean slowdown of programs against each alone", |r| {
        r.programs.as_ref()?.slowdown.mean
    }),
    metric("slowdown_p99", Unit::Plain, "99th percentile of the slowdown of programs", |r| {
        r.programs.as_ref()?.slowdown.p99
    }),
    metric("slowdown_jain", Unit::Plain, "Jain's index of the slowdowns of programs; 1 is even", |r| {
        r.programs.as_ref()?.jain
    }),
    metric("throughput", Unit::PerSecond, "answers per second", |r| r.requests_per_second),
    metric("output_tokens", Unit::PerSecond, "tokens of answers per second", |r| r.output_tokens_per_second),
    metric("gpu_seconds_saved", Unit::Plain, "GPU seconds that cached prompt tokens did not take", |r| {
        Some(r.gpu_seconds_saved)
    }),
];

/// The metric called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}
