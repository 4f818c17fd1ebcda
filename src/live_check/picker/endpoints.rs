//! Judges what the picker knows of its pools and endpoints.

use super::pages::{EndpointPage, EndpointsPage, PoolPage, SlowdownPage};
use crate::finding::{Check, Report};
use attache_config::Settings;
use attache_config::settings::TokenizerSettings;
use attache_kv_events::{Doubt, EventUse, Trust};
use attache_pool::Engine;
use std::ops::RangeInclusive;

static POOL: Check = Check {
    id: "pool-endpoints",
    about: "the pool has endpoints",
    why: "Requests for a pool without endpoints are rejected.",
};
static POOL_TOKENIZER: Check = Check {
    id: "pool-tokenizer",
    about: "the tokenizer in use is the configured one",
    why: "Blocks of text match no KV events, so cached prompts are not found.",
};
static PROMPTS: Check = Check {
    id: "pool-prompts",
    about: "prompts without tokens, by model and reason",
    why: "These requests are routed by load, without their cached prefix.",
};
static HEALTH: Check = Check {
    id: "endpoint-health",
    about: "the picker sends requests to the endpoint: neither ejected nor unreachable",
    why: "Its share of requests goes to the other servers.",
};
static METRICS: Check = Check {
    id: "endpoint-metrics",
    about: "the picker has fresh metrics of the endpoint",
    why: "Without metrics, load of other clients and the size of the cache are unknown.",
};
static SPEED: Check = Check {
    id: "endpoint-speed",
    about: "learned speed: plausible, and near the median of the other servers in the role",
    why: "A server that takes half as long again fails objectives, and may have a wrong GPU or configuration.",
};
static KV_EVENTS: Check = Check {
    id: "endpoint-kv-events",
    about: "how far the picker trusts the KV events of the endpoint",
    why: "Its cache is estimated from routed requests, in whole or in part.",
};

pub(super) const CHECKS: &[&Check] = &[&POOL, &POOL_TOKENIZER, &PROMPTS, &HEALTH, &METRICS, &SPEED, &KV_EVENTS];

/// Plausible speeds of prefill, prompt tokens/s. A model with 8 billion parameters takes 16 GFLOP a token. A desktop
/// CPU computes some 50 tokens/s of it. The peak of eight H100 in FP8, 16 PFLOP/s, is 1,000,000 tokens/s.
const PREFILL: RangeInclusive<f64> = 50.0..=1e6;
/// Plausible times for a token of a request that runs alone, seconds. An H100 reads 0.7 GB of weights in 0.2 ms, less
/// than those of a model with a billion parameters. Usual times are 5 ms to 50 ms, so 5 s is a fault.
const TOKEN: RangeInclusive<f64> = 0.000_2..=5.0;

/// Adds findings for all pools.
pub(super) fn judge(page: &EndpointsPage, settings: Option<&Settings>, report: &mut Report) {
    for pool in &page.pools {
        let subject = format!("pool {}", pool.name);
        let configured = settings.and_then(|settings| settings.pools.iter().find(|p| *p.name == *pool.name));
        if pool.endpoints.is_empty() {
            let fix = "add `endpoints`, or look at `dns`, `endpointsFile` or the InferencePool of the pool";
            report.push(POOL.error(&subject, "no endpoint", fix));
        } else {
            report.push(POOL.ok(&subject, format!("{} endpoints", pool.endpoints.len())));
        }
        if let Some(configured) = configured {
            tokenizer(&subject, pool, &configured.prefix.tokenizer, report);
        }
        for unread in &pool.unread_prompts {
            let found =
                format!("{} prompts of model {} have no tokens: {}", unread.prompts, unread.model, unread.reason);
            let fix = "correct `prefixCache.tokenizer` of the pool, or the chat template of the model; prompts with media \
                       need nothing";
            report.push(PROMPTS.warning(&subject, found, fix));
        }
        for endpoint in &pool.endpoints {
            let subject = super::endpoint_subject(&endpoint.address, &pool.name);
            health(&subject, endpoint, report);
            metrics(&subject, endpoint, report);
            kv_events(&subject, endpoint, report);
            speed(&subject, endpoint, report);
        }
    }
}

fn tokenizer(subject: &str, pool: &PoolPage, wanted: &TokenizerSettings, report: &mut Report) {
    let name = match wanted {
        TokenizerSettings::Characters => "characters",
        TokenizerSettings::Tiktoken { .. } => "tiktoken",
        TokenizerSettings::HuggingFace { .. } => "huggingface",
        TokenizerSettings::Remote(_) => "remote",
    };
    // A pool whose strategy needs no prefix has no tokenizer.
    if pool.tokenizer == name || pool.tokenizer == "none" || pool.tokenizer.is_empty() {
        return;
    }
    report.push(POOL_TOKENIZER.error(
        subject,
        format!("`{name}` is configured, `{}` is in use", pool.tokenizer),
        "correct `prefixCache.tokenizer`, for example its `directory`; the log of the picker has the reason",
    ));
}

fn health(subject: &str, endpoint: &EndpointPage, report: &mut Report) {
    let fix = "look at the log of the model server, and at its address and port";
    report.push(match endpoint.status.as_str() {
        "ejected" | "half-open" => {
            let found = match &endpoint.ejection {
                Some(ejection) => {
                    let seconds = ejection.returns_in_ms / 1_000;
                    format!("{} after `{}`; a request probes it in {seconds} s", endpoint.status, ejection.cause)
                }
                None => format!("{} after failures", endpoint.status),
            };
            HEALTH.error(subject, found, fix)
        }
        "unreachable" => HEALTH.error(subject, "the picker can't connect", fix),
        status => HEALTH.ok(subject, if status.is_empty() { "in use" } else { status }),
    });
}

fn metrics(subject: &str, endpoint: &EndpointPage, report: &mut Report) {
    if endpoint.engine == Engine::None || endpoint.status == "unreachable" {
        return;
    }
    let fix = "correct `engine`, `metrics.port` and `metrics.path` of the endpoint; servers without metrics need \
               `engine: none`";
    report.push(match (&endpoint.scrape_error, endpoint.metrics) {
        (Some(error), _) => METRICS.error(subject, format!("scrapes fail: {error}"), fix),
        (None, None) => METRICS.warning(subject, "no metrics yet", fix),
        (None, Some(metrics)) if metrics.stale => METRICS.warning(
            subject,
            format!("metrics are stale: {:.1} s old", seconds(metrics.age_ms)),
            "raise `scrape.staleAfter` above `scrape.interval`, or give the picker and the server more CPU time",
        ),
        (None, Some(metrics)) => METRICS.ok(subject, format!("metrics are {:.1} s old", seconds(metrics.age_ms))),
    });
}

#[expect(clippy::cast_precision_loss, reason = "ages are far below 2^52 ms")]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

fn kv_events(subject: &str, endpoint: &EndpointPage, report: &mut Report) {
    let Some(label) = endpoint.kv_events.as_deref() else { return };
    let Some(trust) = Trust::with_label(label) else {
        let (found, fix) =
            (format!("KV events are `{label}`"), "check with the version of Attaché that the picker has");
        report.push(KV_EVENTS.unknown(subject, found, fix));
        return;
    };
    let (meaning, fix) = match trust {
        Trust::Exact => ("all of them were received", ""),
        Trust::Uncounted => ("blocks were reported again without an origin", ""),
        Trust::Unknown => {
            ("no event has been read yet", "compare `kvEvents.port` with `--kv-events-config` of the server")
        }
        Trust::Syncing => ("a replay is running", "check again in a minute"),
        Trust::Incomplete => (
            "events were lost that no replay has",
            "add `kvEvents.replayPort` and `replay_endpoint`, or raise `prefixCache.maxBytes` if the log says that it is full",
        ),
        Trust::Suspect(Doubt::Interrupted) => {
            ("the connection is broken", "look at `kvEvents.port`, and at the network between both")
        }
        Trust::Suspect(Doubt::JoinedLate | Doubt::Gap) => {
            ("events are missing", "add `kvEvents.replayPort`, and `replay_endpoint` on the server")
        }
        Trust::Suspect(Doubt::ReplayFailed) => {
            ("the replay failed", "compare `kvEvents.replayPort` with `replay_endpoint` of the server")
        }
        Trust::Suspect(Doubt::Undecodable) => {
            ("events can't be decoded", "report the version of the server and the log line of the picker")
        }
        Trust::Suspect(Doubt::BlockSize) => {
            ("the server has another block size than most of the pool", "use one `--block-size` for the pool")
        }
        Trust::Suspect(Doubt::Ports) => {
            ("its ports can't be used", "correct the label `attache.dev/kv-events-port`; the log names it")
        }
    };
    let found = format!("KV events are `{label}`: {meaning}");
    report.push(match trust.event_use() {
        EventUse::Full => KV_EVENTS.ok(subject, found),
        EventUse::Pending => KV_EVENTS.unknown(subject, found, fix),
        EventUse::Partial | EventUse::Unused => KV_EVENTS.warning(subject, found, fix),
    });
}

/// Judges the learned speed of an endpoint against the others in its role.
fn speed(subject: &str, endpoint: &EndpointPage, report: &mut Report) {
    let Some(learned) = endpoint.learned else { return };
    let (prefill, decode) = (learned.prefill_tokens_per_second, learned.seconds_per_token);
    let found = format!("learned {prefill:.0} prompt tokens/s and {:.1} ms a token", decode * 1e3);
    report.push(match endpoint.slowdown {
        Some(SlowdownPage { first_token, per_token, slow: true }) => SPEED.warning(
            subject,
            format!(
                "first tokens take {first_token:.1} times as long as the median of the other servers in its role, further \
                 tokens {per_token:.1} times; {found}"
            ),
            "compare GPU, clock rate, tensor parallelism and flags of this server with the others; put other hardware into \
             a pool of its own",
        ),
        _ if prefill < *PREFILL.start() || decode > *TOKEN.end() => SPEED.warning(
            subject,
            format!("{found}: no usual server is that slow"),
            "look at the log of the model server, and whether it computes on its GPU",
        ),
        _ if prefill > *PREFILL.end() || decode < *TOKEN.start() => SPEED.warning(
            subject,
            format!("{found}: no usual server is that fast"),
            "check that a model server answers at this address, and no stub or cache of responses; prompts of a few \
             tokens alone also show no speed: send longer ones",
        ),
        _ => SPEED.ok(subject, found),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;
    use crate::picker::pages::{EjectionPage, LearnedPage, MetricsAge};
    use attache_types::labels::Listed;

    fn endpoint(change: impl FnOnce(&mut EndpointPage)) -> EndpointPage {
        let mut endpoint = EndpointPage {
            address: "10.0.0.1:8000".into(),
            status: "ready".into(),
            metrics: Some(MetricsAge { age_ms: 100, stale: false }),
            learned: Some(LearnedPage { prefill_tokens_per_second: 1e4, seconds_per_token: 0.01 }),
            ..EndpointPage::default()
        };
        change(&mut endpoint);
        endpoint
    }

    /// Ids of the findings that are not fine.
    fn wrong(endpoints: Vec<EndpointPage>) -> Vec<(&'static str, Severity)> {
        let pool = PoolPage { name: "a".into(), tokenizer: "characters".into(), endpoints, ..PoolPage::default() };
        let mut report = Report::default();
        judge(&EndpointsPage { pools: vec![pool], ..EndpointsPage::default() }, None, &mut report);
        let findings = report.findings().iter().filter(|finding| finding.severity != Severity::Ok);
        findings.map(|finding| (finding.check.id, finding.severity)).collect()
    }

    #[test]
    fn endpoints_in_use_have_no_findings_and_others_do() {
        assert_eq!(wrong(vec![endpoint(|_| ())]), []);
        let ejection = |e: &mut EndpointPage| {
            e.status = "ejected".into();
            e.ejection = Some(EjectionPage { cause: "connect_failure".into(), returns_in_ms: 2_000 });
        };
        assert_eq!(wrong(vec![endpoint(ejection)]), [("endpoint-health", Severity::Error)]);
        let failing = |e: &mut EndpointPage| e.scrape_error = Some("got status 404, want 200".into());
        assert_eq!(wrong(vec![endpoint(failing)]), [("endpoint-metrics", Severity::Error)]);
        let stale = |e: &mut EndpointPage| e.metrics = Some(MetricsAge { age_ms: 60_000, stale: true });
        assert_eq!(wrong(vec![endpoint(stale)]), [("endpoint-metrics", Severity::Warning)]);
        assert_eq!(wrong(Vec::new()), [("pool-endpoints", Severity::Error)]);
    }

    #[test]
    fn kv_events_that_are_used_in_part_or_not_at_all_are_a_warning() {
        let severity = |label: &str| wrong(vec![endpoint(|e| e.kv_events = Some(label.to_owned()))]).pop();
        for trust in Trust::values() {
            let expected = match trust.event_use() {
                EventUse::Full => None,
                EventUse::Pending => Some(Severity::Unknown),
                EventUse::Partial | EventUse::Unused => Some(Severity::Warning),
            };
            assert_eq!(severity(trust.label()), expected.map(|severity| ("endpoint-kv-events", severity)), "{trust:?}");
        }
        assert_eq!(severity("of_a_later_version"), Some(("endpoint-kv-events", Severity::Unknown)));
    }

    #[test]
    fn server_with_half_the_speed_of_the_others_is_a_warning() {
        let taking = |per_token: f64, slow: bool| {
            wrong(vec![endpoint(|e| e.slowdown = Some(SlowdownPage { first_token: 1.0, per_token, slow }))])
        };
        assert_eq!(taking(2.0, true), [("endpoint-speed", Severity::Warning)]);
        assert_eq!(taking(1.2, false), []);
    }

    #[test]
    fn implausible_speed_is_a_warning_without_another_server() {
        let learned = |prefill_tokens_per_second: f64, seconds_per_token: f64| {
            let learned = LearnedPage { prefill_tokens_per_second, seconds_per_token };
            wrong(vec![endpoint(|e| e.learned = Some(learned))])
        };
        for (prefill, token) in [(50.0, 5.0), (1e6, 0.000_2)] {
            assert_eq!(learned(prefill, token), [], "{prefill} {token}");
        }
        for (prefill, token) in [(3.0, 0.01), (1e12, 0.01), (1e4, 9.0), (1e4, 0.000_1)] {
            assert_eq!(learned(prefill, token), [("endpoint-speed", Severity::Warning)], "{prefill} {token}");
        }
    }
}
