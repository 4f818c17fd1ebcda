//! Judges the metrics of a server: whether they are those of the configured engine, and what they say of its cache.

use super::probe::{MetricsPage, Probe};
use crate::finding::{Check, Report};
use attache_config::settings::PoolSettings;
use attache_http_client::FetchError;
use attache_pool::{EndpointMetrics, Engine};
use attache_scrape::engines::EngineMap;

static METRICS: Check = Check {
    id: "server-metrics",
    about: "the metrics page has the values that routing needs, by the names of the engine",
    why: "Without them the picker sees only its own requests: not the load of others, nor the size of the cache.",
};
static ENGINE: Check = Check {
    id: "server-engine",
    about: "the configured engine is the one whose metrics the server has",
    why: "No metric is found by the names of another engine, so scrapes fail.",
};
static BLOCK_SIZE: Check = Check {
    id: "server-block-size",
    about: "block size of the server against `prefixCache.blockSize`, if KV events are read",
    why: "Keys of other blocks match nothing, so cached prompts are not found.",
};
static PREFIX_CACHING: Check = Check {
    id: "server-prefix-caching",
    about: "the server caches prefixes",
    why: "The picker sends prompts where it expects cached blocks, and the server computes them again.",
};

pub(super) const CHECKS: &[&Check] = &[&METRICS, &ENGINE, &BLOCK_SIZE, &PREFIX_CACHING];

/// The name of an engine in configurations.
fn name(engine: Engine) -> String {
    serde_json::to_value(engine).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

pub(super) fn judge(probe: &Probe, pool: &PoolSettings, report: &mut Report) {
    let Some(page) = &probe.metrics else { return };
    let subject = &probe.member.subject;
    let configured = probe.member.spec.engine;
    if let Some(engine) = page.looks_like {
        report.push(ENGINE.error(
            subject,
            format!("`engine: {}` is configured, and the server has metrics of {}", name(configured), name(engine)),
            format!("set `engine: {}`", name(engine)),
        ));
        return;
    }
    if let Some(metrics) = judge_page(subject, page, configured, report) {
        report.push(ENGINE.ok(subject, format!("metrics of {}", name(configured))));
        block_size(subject, metrics, pool, report);
        prefix_caching(subject, page, report);
    }
}

/// Judges whether the page can be used; returns its values if so.
fn judge_page<'p>(
    subject: &str,
    page: &'p MetricsPage,
    engine: Engine,
    report: &mut Report,
) -> Option<&'p EndpointMetrics> {
    let url = &page.url;
    let address = "correct `metrics.port` and `metrics.path` of the endpoint, or set `engine: none` for a server without \
                   metrics";
    // The flag without which the engine has no metrics.
    let flag = match engine {
        Engine::Sglang => Some("start SGLang with `--enable-metrics`, or correct `metrics.path`"),
        Engine::TrtllmServe => Some("start trtllm-serve with `return_perf_metrics`, or correct `metrics.path`"),
        _ => None,
    };
    let reply = match &page.reply {
        Ok(reply) if reply.status == 200 => reply,
        Ok(reply) => {
            let fix = match reply.status {
                401 | 403 => "set `scrape.bearerTokenFile` to a file with the token that the server wants",
                _ => flag.unwrap_or(address),
            };
            report.push(METRICS.error(subject, format!("{url} has status {}", reply.status), fix));
            return None;
        }
        Err(error @ FetchError::Certificate(_)) => {
            report.push(super::health::unverified(subject, error));
            return None;
        }
        Err(error) => {
            report.push(METRICS.error(subject, format!("{url}: {error}"), address));
            return None;
        }
    };
    match page.read.as_ref()? {
        Ok(metrics) => {
            let missing = EngineMap::of(engine).map(|map| map.unreported(metrics)).unwrap_or_default();
            let names: Vec<String> = missing.iter().map(|name| format!("`{name}`")).collect();
            report.push(match names.is_empty() {
                true => METRICS.ok(subject, format!("{} bytes with all values that routing needs", reply.body.len())),
                false => METRICS.warning(
                    subject,
                    format!("{url} has no {}", names.join(", ")),
                    "let the server report them: flags that disable metrics, or a proxy that filters them, hide the size \
                     of the cache and restarts",
                ),
            });
            Some(metrics)
        }
        Err(error) => {
            report.push(METRICS.error(subject, format!("{url}: {error}"), flag.unwrap_or(address)));
            None
        }
    }
}

fn block_size(subject: &str, metrics: &EndpointMetrics, pool: &PoolSettings, report: &mut Report) {
    let Some(own) = metrics.block_size else { return };
    // Without events, blocks of the index need not be those of the server.
    let Some(wanted) = pool.prefix.block_size.filter(|_| pool.prefix.kv_events.is_some()) else {
        report.push(BLOCK_SIZE.ok(subject, format!("{own} tokens a block")));
        return;
    };
    report.push(match own == wanted {
        true => BLOCK_SIZE.ok(subject, format!("{own} tokens a block, as configured")),
        false => BLOCK_SIZE.error(
            subject,
            format!("the server has {own} tokens a block, `prefixCache.blockSize` is {wanted}"),
            format!("set `prefixCache.blockSize: {own}`, or `--block-size {wanted}` on the server"),
        ),
    });
}

fn prefix_caching(subject: &str, page: &MetricsPage, report: &mut Report) {
    match page.cache.prefix_caching.as_deref() {
        Some("False") => report.push(PREFIX_CACHING.warning(
            subject,
            "the server does not cache prefixes (`enable_prefix_caching=\"False\"`)",
            "start vLLM with `--enable-prefix-caching`; or use a strategy without prefixes, such as `least-request`",
        )),
        Some(_) => report.push(PREFIX_CACHING.ok(subject, "caches prefixes")),
        None => {}
    }
}
