//! The checks of `objective`.

use crate::schema;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_scheduling::choice::{ModelRule, RequestSpec, StrategySpec};
use attache_scheduling::objective::{Objective, Slo};
use attache_scheduling::registry::Registry;

fn slo(file: &schema::Slo, path: &str, span: Span, sink: &mut Sink) -> Slo {
    if file.ttft.is_none() && file.tpot.is_none() {
        let message = "`slo` names no target: `ttft`, `tpot` or both are needed";
        sink.push(Diagnostic::new(Code::OutOfRange, path, message).at(span).help("write `slo: {ttft: 500ms}`"));
    }
    Slo { ttft: file.ttft.map(|at| at.value), tpot: file.tpot.map(|at| at.value), share: file.share() }
}

/// The objective of a pool; `None` if the file has none.
pub(super) fn objective(file: Option<&At<schema::Objective>>, path: &str, sink: &mut Sink) -> Option<Objective> {
    let At { value: file, span } = file?;
    let path = format!("{path}.objective");
    if file.ttft.is_none() && file.tpot.is_none() && file.slo.is_none() {
        let message = "`objective` says nothing: `ttft`, `tpot` or `slo` is needed";
        sink.push(Diagnostic::new(Code::OutOfRange, &path, message).at(*span).help("write `objective: {tpot: 2}`"));
    }
    let (ttft, tpot) = (file.ttft(), file.tpot());
    if ttft == 0.0 && tpot == 0.0 {
        let message =
            "`ttft` and `tpot` are both 0, so every server is as good as any other; give one of them a weight";
        sink.push(Diagnostic::new(Code::Contradiction, &path, message).at(*span));
    }
    let slo = file.slo.as_ref().map(|at| slo(&at.value, &format!("{path}.slo"), at.span, sink));
    Some(Objective { ttft, tpot, slo })
}

/// Warns about an objective that no strategy of the pool reads.
pub(super) fn check_read(
    file: Option<&At<schema::Objective>>,
    strategy: &StrategySpec,
    rules: &[ModelRule],
    by_request: Option<&RequestSpec>,
    path: &str,
    registry: &Registry,
    sink: &mut Sink,
) {
    let Some(file) = file else { return };
    let of_rule = |rule: &ModelRule| {
        rule.strategy.iter().chain(rule.profiles.iter().map(|profile| &profile.strategy)).cloned().collect::<Vec<_>>()
    };
    let chosen = by_request.iter().flat_map(|spec| spec.allowed.iter().cloned());
    let mut all = std::iter::once(strategy.clone()).chain(rules.iter().flat_map(of_rule)).chain(chosen);
    // A strategy that can't be built is reported where it is named.
    let reads = |spec: StrategySpec| registry.build(&spec.name, &spec.parameters).map_or(true, |s| s.reads().objective);
    if all.any(reads) {
        return;
    }
    let message = format!("strategy `{}` does not predict latency and ignores `objective`", strategy.name);
    let diagnostic = Diagnostic::new(Code::NoEffect, format!("{path}.objective"), message).at(file.span);
    sink.push(diagnostic.help("use the strategy `predicted-latency`, alone or in a sum"));
}
