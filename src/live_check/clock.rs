//! Clocks of servers and pickers against that of this machine, from the `date` of their responses.

use crate::finding::{Check, Report};
use crate::http::Reply;
use std::time::{Duration, SystemTime};

static CLOCK: Check = Check {
    id: "clock-difference",
    about: "clock of pickers and model servers against that of this machine",
    why: "Certificates, tokens, the times of KV events and of traces are compared between machines.",
};

pub(crate) const CHECKS: &[&Check] = &[&CLOCK];

/// Difference from which on it is reported, seconds.
const NOTICE: f64 = 3.0;

/// How far a clock differs from that of this machine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClockOffset {
    /// Whose clock it is.
    subject: String,
    /// Seconds; above 0 if that clock is ahead. 0 if it may be equal.
    seconds: f64,
}

/// The offset of the clock that made a response; `None` without a `date`.
pub(crate) fn offset(subject: &str, reply: &Reply) -> Option<ClockOffset> {
    let seconds = offset_seconds(reply.date?, reply.sent, reply.received);
    Some(ClockOffset { subject: subject.to_owned(), seconds })
}

/// The least difference that explains a `date`, which is cut to whole seconds and was made between both times.
fn offset_seconds(date: SystemTime, sent: SystemTime, received: SystemTime) -> f64 {
    let latest = date + Duration::from_secs(1);
    match (date.duration_since(received), sent.duration_since(latest)) {
        (Ok(ahead), _) if !ahead.is_zero() => ahead.as_secs_f64(),
        (_, Ok(behind)) => -behind.as_secs_f64(),
        _ => 0.0,
    }
}

/// Adds findings for clocks that differ, and one for all others.
pub(crate) fn judge(clocks: &[ClockOffset], report: &mut Report) {
    let mut equal = 0usize;
    for clock in clocks {
        if clock.seconds.abs() <= NOTICE {
            equal += 1;
            continue;
        }
        let direction = if clock.seconds > 0.0 { "ahead of" } else { "behind" };
        report.push(CLOCK.warning(
            &clock.subject,
            format!("its clock is {:.0} s {direction} that of this machine", clock.seconds.abs()),
            "synchronize both machines by NTP (`chronyc tracking`, `timedatectl`)",
        ));
    }
    if equal > 0 {
        report.push(CLOCK.ok("clocks", format!("{equal} clocks agree with that of this machine")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Severity;

    fn at(ms: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(ms)
    }

    #[test]
    fn date_within_its_second_and_the_round_trip_is_no_difference() {
        for (date, sent, received, seconds) in [
            (10_000, 10_000, 10_200, 0.0),
            (10_000, 10_990, 11_100, 0.0),
            (10_000, 9_900, 10_100, 0.0),
            (20_000, 10_000, 10_200, 9.8),
            (10_000, 21_000, 21_500, -10.0),
        ] {
            let found = offset_seconds(at(date), at(sent), at(received));
            assert!((found - seconds).abs() < 1e-9, "{date} {sent} {received}: {found}");
        }
    }

    #[test]
    fn only_clocks_that_differ_by_seconds_are_warnings() {
        let clock = |seconds| ClockOffset { subject: "s".into(), seconds };
        let mut report = Report::default();
        judge(&[clock(0.0), clock(-2.0), clock(7.0), clock(-60.0)], &mut report);
        let found: Vec<_> = report.findings().iter().map(|f| (f.severity, f.found.as_str())).collect();
        let warnings: Vec<_> = found.iter().filter(|(severity, _)| *severity == Severity::Warning).collect();
        assert_eq!(warnings.len(), 2, "{found:?}");
        assert!(warnings[0].1.contains("7 s ahead") && warnings[1].1.contains("60 s behind"), "{found:?}");
    }
}
