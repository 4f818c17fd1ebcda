//! Warnings that concern no single pool.

use super::Warning;
use crate::rates::Minute;

/// 5: failed handshakes of a minute from which on they are reported. Port checks and probes cause single ones.
const FAILED_HANDSHAKES: u64 = 5;
/// Share of the requests of a minute from which on a single tenant is reported while a pool is overloaded.
const FLOOD: f64 = 0.5;
/// How many times as many requests as the next tenant it must have.
const FLOOD_FACTOR: u64 = 3;
/// Requests of a minute that a flood has at least.
const FLOOD_REQUESTS: u64 = 20;

/// The warning that gateways do not reach the ext-proc port, with its most frequent cause.
pub(super) fn handshakes(minute: &Minute) -> Option<Warning> {
    let lasting = minute.handshakes.iter().filter(|(cause, _)| cause.is_lasting());
    let (cause, count) = lasting.max_by_key(|(_, count)| *count).filter(|(_, count)| *count >= FAILED_HANDSHAKES)?;
    Some(Warning {
        code: "tls_handshakes_fail",
        pool: None,
        message: format!(
            "gateways can't connect, so their requests get 500: {count} TLS handshakes failed in the last minute, cause \
             `{}`",
            cause.label()
        ),
        help: cause.help(),
    })
}

/// The warning about a tenant that sends most requests, while a pool is overloaded.
pub(super) fn flood(minute: &Minute, is_overloaded: bool) -> Option<Warning> {
    let total: u64 = minute.tenants.iter().map(|(_, requests)| requests).sum();
    let (name, most) = minute.tenants.iter().max_by_key(|(_, requests)| *requests)?;
    let next = minute.tenants.iter().filter(|(other, _)| other != name).map(|(_, requests)| *requests).max()?;
    let share = *most as f64 / total.max(1) as f64;
    let is_flood = share >= FLOOD && *most >= next.saturating_mul(FLOOD_FACTOR) && *most >= FLOOD_REQUESTS;
    (is_overloaded && is_flood).then(|| Warning {
        code: "tenant_flood",
        pool: None,
        message: format!(
            "tenant {name} has {:.0} % of the requests that servers got in the last minute, and a pool is overloaded",
            share * 100.0
        ),
        help: "limit the tenant in `limits.tenants`; `flowControl` gives each tenant its share of a full pool",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_serving::tls::FailureCause;

    #[test]
    fn flood_is_one_tenant_far_above_the_others_in_an_overloaded_pool() {
        let minute = |tenants: &[(&str, u64)]| Minute {
            seconds: 60.0,
            tenants: tenants.iter().map(|(name, requests)| ((*name).into(), *requests)).collect(),
            ..Minute::default()
        };
        let of_two = minute(&[("acme", 30), ("initech", 300)]);
        let found = flood(&of_two, true).unwrap();
        assert!(found.message.contains("tenant initech has 91 %"), "{}", found.message);
        assert_eq!(flood(&of_two, false), None, "no pool is overloaded");
        assert_eq!(flood(&minute(&[("acme", 150), ("initech", 300)]), true), None, "twice as many");
        assert_eq!(flood(&minute(&[("initech", 300)]), true), None, "the only tenant");
        assert_eq!(flood(&minute(&[("acme", 1), ("initech", 9)]), true), None, "a handful");
    }

    #[test]
    fn failed_handshakes_name_their_most_frequent_cause() {
        let minute =
            |handshakes: &[(FailureCause, u64)]| Minute { handshakes: handshakes.to_vec(), ..Minute::default() };
        let found = handshakes(&minute(&[(FailureCause::NotTls, 6), (FailureCause::Expired, 40)])).unwrap();
        assert!(found.message.contains("cause `expired`") && found.help.contains("client's certificate"), "{found:?}");
        assert_eq!(handshakes(&minute(&[(FailureCause::NotTls, FAILED_HANDSHAKES - 1)])), None, "a probe");
        assert_eq!(handshakes(&minute(&[(FailureCause::Closed, 100)])), None, "port checks");
    }
}
