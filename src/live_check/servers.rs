//! Checks of each model server, and of the servers of a pool against each other.
//!
//! `members` lists the servers, `probe` asks each of them, and the other modules judge what came back.

mod consistency;
mod engine;
mod events;
mod health;
mod members;
mod probe;
mod roles;
mod tokens;

use crate::Targets;
use crate::clock::ClockOffset;
use crate::finding::{Check, Report};
use crate::http::Http;
use crate::picker::PickerView;
use attache_config::settings::PoolSettings;
use futures_util::StreamExt;
use futures_util::stream;
use members::Member;
use probe::Probe;
use std::sync::Arc;

/// All checks of this module.
pub(crate) const CHECKS: &[&[&Check]] =
    &[health::CHECKS, engine::CHECKS, events::CHECKS, tokens::CHECKS, roles::CHECKS, consistency::CHECKS];

/// Most servers of a pool that are asked at the same time.
const CONCURRENT: usize = 16;
/// Most pools whose servers are asked at the same time.
const CONCURRENT_POOLS: usize = 4;

/// Checks the servers of all pools: those that the picker knows, or else those that the configuration lists.
pub(crate) async fn check(http: &Http, targets: &Targets, view: &PickerView) -> (Report, Vec<ClockOffset>) {
    let mut report = Report::default();
    let Some(settings) = targets.settings.as_ref().or(view.settings.as_ref()) else {
        return (report, Vec::new());
    };
    let mut clocks = Vec::new();
    let pools = stream::iter(members::of(settings, view.endpoints.as_ref()));
    let pools = pools.map(|(pool, members)| check_pool(http, pool, members));
    for (found, offsets) in pools.buffered(CONCURRENT_POOLS).collect::<Vec<_>>().await {
        report.extend(found);
        clocks.extend(offsets);
    }
    (report, clocks)
}

async fn check_pool(http: &Http, pool: &PoolSettings, members: Vec<Member>) -> (Report, Vec<ClockOffset>) {
    let mut report = Report::default();
    let token = probe::token(pool);
    let tokenizer = Arc::new(tokens::LocalTokenizer::of(pool, &mut report));
    let probes = stream::iter(members).map(|member| {
        let (token, tokenizer) = (token.clone(), tokenizer.clone());
        async move {
            let probe = Probe::new(http, member, pool, token).await;
            let tokens = tokens::ask(&probe, pool, &tokenizer).await;
            (probe, tokens)
        }
    });
    let probes: Vec<_> = probes.buffered(CONCURRENT).collect().await;
    for (probe, tokens) in &probes {
        health::judge(probe, &mut report);
        if probe.is_reached() {
            report.mark_reached();
            engine::judge(probe, pool, &mut report);
            events::judge(probe, pool, &mut report);
            tokens::judge(probe, tokens, &mut report);
            roles::judge(probe, pool, &mut report);
        }
    }
    let probes: Vec<Probe> = probes.into_iter().map(|(probe, _)| probe).collect();
    roles::judge_pool(&probes, pool, &mut report);
    consistency::judge(&probes, pool, &mut report);
    (report, probes.into_iter().filter_map(|probe| probe.clock).collect())
}
