//! Checks of the Redis that holds quotas, records of tenants and SLO profiles.

use crate::Targets;
use crate::finding::{Check, Report};
use crate::picker::PickerView;
use attache_config::settings::RedisSettings;
use attache_redis_store::redis_probe::{ProbeError, RedisReport, probe};
use std::time::Duration;

static REACHABLE: Check = Check {
    id: "redis-reachable",
    about: "Redis accepts the connection",
    why: "Without Redis, limits are not shared, and with `onFailure: refuse` requests are rejected.",
};
static LOGIN: Check = Check {
    id: "redis-login",
    about: "Redis accepts the user and the password",
    why: "Limits are not shared without a login.",
};
static VERSION: Check =
    Check { id: "redis-version", about: "version of Redis", why: "Scripts that count limits use commands of Redis 6." };
static EVICTION: Check = Check {
    id: "redis-eviction",
    about: "`maxmemory-policy`, and memory in use",
    why: "Redis drops counters when it is full, and clients exceed their limits.",
};
static ROLE: Check = Check {
    id: "redis-role",
    about: "Redis takes writes: it is no read-only replica",
    why: "Counters can't be written to a replica.",
};
static SCRIPTS: Check =
    Check { id: "redis-scripts", about: "the user may run scripts", why: "Limits are counted by scripts." };
static LATENCY: Check = Check {
    id: "redis-latency",
    about: "time of a round trip against `redis.timeout`",
    why: "Requests that wait longer are handled as `redis.onFailure` says.",
};

pub(crate) const CHECKS: &[&Check] = &[&REACHABLE, &LOGIN, &VERSION, &EVICTION, &ROLE, &SCRIPTS, &LATENCY];

/// Limit of each step.
const ANSWER: Duration = Duration::from_secs(3);
/// First major version whose commands suffice.
const OLDEST: u32 = 6;
/// Part of `maxmemory` from which on it is reported.
const FULL: f64 = 0.9;

/// Checks Redis, if the configuration uses it.
pub(crate) async fn check(targets: &Targets, view: &PickerView) -> Report {
    let mut report = Report::default();
    let from_file = targets.settings.as_ref();
    let Some(redis) = from_file.or(view.settings.as_ref()).and_then(|settings| settings.redis.as_ref()) else {
        return report;
    };
    let subject = format!("Redis {}", shown(&redis.url));
    match probe(&redis.url, ANSWER).await {
        Ok(found) => {
            report.mark_reached();
            judge(&subject, redis, &found, &mut report);
        }
        Err(ProbeError::Login(error)) if from_file.is_none() => report.push(LOGIN.unknown(
            &subject,
            format!("{error}; the configuration of the picker is shown without passwords"),
            "name the configuration: `attache check FILE --live`",
        )),
        Err(error @ ProbeError::Login(_)) => {
            let fix = "correct the user and password in `redis.url`: `redis://user:password@host:6379/0`";
            report.push(LOGIN.error(&subject, error.to_string(), fix));
        }
        Err(error) => {
            let fix = "start Redis, or correct `redis.url`; check firewalls, NetworkPolicies and `rediss://`";
            report.push(REACHABLE.error(&subject, error.to_string(), fix));
        }
    }
    report
}

/// A URL without its user and password.
fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    format!("{scheme}://{}", rest.rsplit_once('@').map_or(rest, |(_, host)| host))
}

fn judge(subject: &str, redis: &RedisSettings, found: &RedisReport, report: &mut Report) {
    report.push(REACHABLE.ok(subject, "accepts connections"));
    let field = |name: &str| found.info.get(name).map(String::as_str);
    if let Some(version) = field("redis_version") {
        let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        report.push(match major.is_some_and(|major| major < OLDEST) {
            true => VERSION.warning(subject, format!("version {version}"), format!("use Redis {OLDEST} or newer")),
            false => VERSION.ok(subject, format!("version {version}")),
        });
    }
    memory(subject, field, report);
    if let Some(role) = field("role") {
        report.push(match role == "master" {
            true => ROLE.ok(subject, "takes writes"),
            false => ROLE.error(subject, format!("its role is `{role}`"), "name the primary in `redis.url`"),
        });
    }
    report.push(match &found.script_error {
        None => SCRIPTS.ok(subject, "runs scripts"),
        Some(error) => {
            SCRIPTS.error(subject, error, "allow `+eval +evalsha +script` and the keys of limits in the ACL")
        }
    });
    let time = format!("a round trip takes {:.1} ms, `redis.timeout` is {:?}", ms(found.round_trip), redis.timeout);
    report.push(match found.round_trip * 2 > redis.timeout {
        true => LATENCY.warning(subject, time, "run Redis near the pickers, or raise `redis.timeout`"),
        false => LATENCY.ok(subject, time),
    });
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn memory<'i>(subject: &str, field: impl Fn(&str) -> Option<&'i str>, report: &mut Report) {
    let number = |name: &str| field(name).and_then(|value| value.parse::<f64>().ok());
    let policy = field("maxmemory_policy").unwrap_or_default();
    let most = number("maxmemory").unwrap_or(0.0);
    let used = number("used_memory").unwrap_or(0.0);
    if policy.is_empty() {
        return;
    }
    let evicts = policy != "noeviction";
    let found = format!("`maxmemory-policy` is {policy}, `maxmemory` is {most:.0} bytes");
    report.push(match () {
        () if most > 0.0 && evicts => EVICTION.warning(subject, found, "set `maxmemory-policy noeviction` in Redis"),
        () if most > 0.0 && used > most * FULL => EVICTION.error(
            subject,
            format!("{used:.0} of {most:.0} bytes are used, and then Redis refuses writes"),
            "raise `maxmemory` of Redis",
        ),
        () => EVICTION.ok(subject, found),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;
    use attache_quota::OnStoreFailure;

    fn faults(info: &[(&str, &str)]) -> Vec<(&'static str, Severity)> {
        let settings = RedisSettings {
            url: "redis://user:secret@host:6379/0".into(),
            timeout: Duration::from_millis(50),
            on_failure: OnStoreFailure::Allow,
            profile_refresh: Duration::from_secs(10),
        };
        let info = info.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut report = Report::default();
        judge("redis", &settings, &RedisReport { info, ..RedisReport::default() }, &mut report);
        let findings = report.findings().iter().filter(|finding| finding.severity != Severity::Ok);
        findings.map(|finding| (finding.check.id, finding.severity)).collect()
    }

    #[test]
    fn redis_that_drops_keys_or_takes_no_writes_is_reported() {
        assert_eq!(faults(&[]), []);
        let evicts = [("maxmemory", "1000000"), ("maxmemory_policy", "allkeys-lru"), ("used_memory", "10")];
        assert_eq!(faults(&evicts), [("redis-eviction", Severity::Warning)]);
        let unlimited = [("maxmemory", "0"), ("maxmemory_policy", "allkeys-lru"), ("used_memory", "10")];
        assert_eq!(faults(&unlimited), []);
        let full = [("maxmemory", "1000"), ("maxmemory_policy", "noeviction"), ("used_memory", "950")];
        assert_eq!(faults(&full), [("redis-eviction", Severity::Error)]);
        assert_eq!(faults(&[("role", "slave")]), [("redis-role", Severity::Error)]);
        assert_eq!(faults(&[("redis_version", "5.0.14")]), [("redis-version", Severity::Warning)]);
    }

    #[test]
    fn password_is_not_shown() {
        assert_eq!(shown("redis://user:secret@host:6379/0"), "redis://host:6379/0");
    }
}
