//! Figures of a report, computed from its tallies. Called by `cli::replay` through [`Report::document`]. Pure.

use super::{
    Distribution, Document, EndpointFigures, FlowFigures, Imbalance, PointFigures, ProgramFigures, QueueFigures,
    RequestFigures, RunFigures, SCHEMA, SplitFigures, TokenFigures, TurnFigures, Versus,
};
use crate::compare::{Quantity, compare};
use crate::objective::ObjectiveFigures;
use crate::tally::latency::Latency;
use crate::tally::queueing::{FlowCounts, Queueing};
use crate::tally::{EndpointCounts, Tally, share};
use crate::{Report, RunResult, ServerFacts};
use attache_pool::Roles;

impl Report {
    /// All figures. Takes some milliseconds per run, for the intervals.
    #[must_use]
    pub fn document(&self) -> Document {
        let baseline = self.runs.get(self.baseline).map(|run| run.policy.clone()).unwrap_or_default();
        let base = |run: &RunResult| {
            let same = |other: &&RunResult| other.workload == run.workload && other.cell == run.cell;
            self.runs.iter().filter(same).find(|other| other.policy == baseline)
        };
        Document {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: self.command.clone(),
            seed: self.seed,
            config: self.config.clone(),
            runs: self
                .runs
                .iter()
                .map(|run| figures(run, base(run).filter(|base| !std::ptr::eq(*base, run))))
                .collect(),
            baseline,
        }
    }
}

fn figures(run: &RunResult, base: Option<&RunResult>) -> RunFigures {
    let tally = &run.tally;
    let (endings, tokens) = (tally.endings(), tally.tokens());
    RunFigures {
        policy: run.policy.clone(),
        workload: run.workload.clone(),
        cell: run.cell.clone(),
        decisions: format!("{:016x}", run.decisions),
        requests: RequestFigures {
            total: endings.total(),
            answered: endings.answered,
            refused: endings.refused,
            lost: endings.lost,
        },
        ttft: distribution(tally.first_token()),
        tpot: distribution(tally.per_token()),
        itl: distribution(tally.inter_token()),
        latency: distribution(tally.total()),
        tokens: TokenFigures {
            prompt: tokens.prompt,
            foretold: tokens.expected_cached,
            cached: tokens.cached,
            generated: tokens.generated,
        },
        hit_rate: tally.hit_rate(),
        error_rate: tally.error_rate(),
        goodput: tally.goodput(),
        preemptions: tally.preemptions(),
        imbalance: tally.spread().map(|spread| Imbalance {
            max_over_mean: spread.max_over_mean,
            cv: spread.variation,
            jain: spread.jain,
        }),
        requests_per_second: tally.throughput(),
        output_tokens_per_second: tally.output_rate(),
        gpu_seconds_saved: (tally.endpoints().iter().zip(&run.servers))
            .map(|(counts, server)| counts.cached_tokens as f64 * server.gpu_seconds_per_token)
            .sum(),
        duration_seconds: tally.duration().as_secs_f64(),
        simulated_seconds: run.simulated.as_secs_f64(),
        took_seconds: run.took.as_secs_f64(),
        objective: tally.objective().map(ObjectiveFigures::of),
        split: split(tally),
        queue: tally.queueing().map(queue),
        programs: tally.programs().map(ProgramFigures::of),
        endpoints: tally
            .endpoints()
            .iter()
            .enumerate()
            .map(|(i, counts)| endpoint(counts, run.servers.get(i)))
            .collect(),
        failures: run.failures.clone(),
        timeline: timeline(tally),
        versus_baseline: base.map(|base| versus(tally, &base.tally)),
    }
}

fn versus(tally: &Tally, base: &Tally) -> Versus {
    let (endings, before) = (tally.endings(), base.endings());
    let change = |quantity| {
        let change = compare(tally.batches(), base.batches(), quantity)?;
        Some(change.with_endings(endings, before))
    };
    Versus {
        ttft: change(Quantity::FirstToken),
        tpot: change(Quantity::PerToken),
        latency: change(Quantity::Total),
        unanswered: endings.unanswered().cast_signed() - before.unanswered().cast_signed(),
    }
}

/// Rounds to three decimals: a series has thousands of values, and more digits help no reader.
fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn endpoint(counts: &EndpointCounts, facts: Option<&ServerFacts>) -> EndpointFigures {
    EndpointFigures {
        name: facts.map(|facts| facts.name.clone()).unwrap_or_default(),
        requests: counts.requests,
        prompt_tokens: counts.prompt_tokens,
        cached_tokens: counts.cached_tokens,
        prefills: counts.prefills,
    }
}

fn split(tally: &Tally) -> Option<SplitFigures> {
    let counts = tally.split();
    tally.has_prefill_servers().then(|| SplitFigures {
        share: share(counts.requests, tally.endings().total()),
        fell_back: counts.fell_back,
        transfer_seconds: (counts.requests > 0).then(|| counts.transfer.as_secs_f64() / counts.requests as f64),
        received_tokens: counts.received_tokens,
        prefill_busy: tally.busy(Roles::PREFILL.kind()),
        decode_busy: tally.busy(Roles::DECODE.kind()),
    })
}

fn turns(turns: FlowCounts) -> TurnFigures {
    TurnFigures {
        passed: turns.passed,
        shed: turns.shed,
        full: turns.full,
        expired: turns.expired,
        evicted: turns.evicted,
        mean_seconds: turns.mean_wait(),
        longest_seconds: turns.longest.as_secs_f64(),
    }
}

fn queue(queueing: &Queueing) -> QueueFigures {
    let flow = |(priority, tenant, of): (i32, &str, FlowCounts)| FlowFigures {
        priority,
        tenant: tenant.to_owned(),
        turns: turns(of),
    };
    QueueFigures {
        waited_seconds: distribution(queueing.waited()),
        turns: turns(queueing.counts()),
        flows: queueing.flows().rev().map(flow).collect(),
    }
}

fn timeline(tally: &Tally) -> Vec<PointFigures> {
    let seconds = |at: attache_types::clock::Timestamp| at.0 as f64 / 1e9;
    let points = tally.timeline().points().iter().map(|point| PointFigures {
        from_seconds: seconds(point.from),
        until_seconds: seconds(point.until),
        hit_rate: point.hit_rate(),
        prefix_queries: point.queries(),
        prefix_hits: point.hits(),
        in_flight: point.endpoints.iter().map(|endpoint| thousandths(endpoint.mean_in_flight())).collect(),
        kv_usage: point.endpoints.iter().map(|endpoint| thousandths(endpoint.mean_kv_usage())).collect(),
    });
    points.collect()
}

/// The parts at which a distribution is written: each percent, and a tail that is finer and finer.
fn parts() -> impl Iterator<Item = f64> {
    let percents = (0..=98).map(|percent| f64::from(percent) / 100.0);
    percents.chain([0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 0.9999, 1.0])
}

fn distribution(latency: &Latency) -> Distribution {
    Distribution {
        count: latency.count(),
        mean: latency.mean(),
        p50: latency.quantile(0.5),
        p90: latency.quantile(0.9),
        p95: latency.quantile(0.95),
        p99: latency.quantile(0.99),
        max: latency.quantile(1.0),
        quantiles: parts().filter_map(|part| Some((part, latency.quantile(part)?))).collect(),
    }
}
