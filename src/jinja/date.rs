//! `strftime_now`: the date that some templates put into the system prompt.

use crate::{Error, Result};
use jiff::Timestamp;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;

/// Directives that Python, in the C locale, and jiff write alike.
const DIRECTIVES: &str = "aAbBdDeFgGhHIjklmMnpRsStTuUVwWyYzZ%";

/// Python's `strftime` in the C locale and UTC. An unknown directive is an error.
pub(crate) fn strftime(format: &str, seconds: u64) -> Result<String> {
    let failed = || Error::failed(format!("strftime_now: unknown format {format:?}"));
    let mut directives = format.split('%').skip(1);
    while let Some(directive) = directives.next() {
        let known = |text: &str| text.strip_prefix('-').unwrap_or(text).starts_with(|c| DIRECTIVES.contains(c));
        // `%%`: an empty part, and the text behind it.
        let is_percent = directive.is_empty() && directives.next().is_some();
        if !is_percent && !known(directive) {
            return Err(failed());
        }
    }
    let now = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    let now = now.ok_or_else(failed)?.to_zoned(TimeZone::UTC);
    strtime::format(format, &now).map_err(|_| failed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_equal_those_of_python() {
        // (seconds, format, result of datetime.fromtimestamp(seconds, UTC).strftime(format))
        for (seconds, format, want) in [
            (0, "%d %b %Y", "01 Jan 1970"),
            (0, "%A, %B %d, %Y %H:%M:%S", "Thursday, January 01, 1970 00:00:00"),
            (0, "%Y-%m-%d %I:%M %p, day %j, %a %%", "1970-01-01 12:00 AM, day 001, Thu %"),
            (0, "%-d/%-m/%y %w %F %T", "1/1/70 4 1970-01-01 00:00:00"),
            (0, "%d %B %Y", "01 January 1970"),
            (0, "%e|%k|%l|%h|%D|%R", " 1| 0|12|Jan|01/01/70|00:00"),
            (0, "%u %U %W %V %G %g", "4 00 00 01 1970 70"),
            (0, "%s %z %Z", "0 +0000 UTC"),
            (0, "%n%t%%Y", "\n\t%Y"),
            (0, "%-H:%-M:%-S %-I %-j", "0:0:0 12 1"),
            (951_826_154, "%d %b %Y", "29 Feb 2000"),
            (951_826_154, "%A, %B %d, %Y %H:%M:%S", "Tuesday, February 29, 2000 12:09:14"),
            (951_826_154, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2000-02-29 12:09 PM, day 060, Tue %"),
            (951_826_154, "%-d/%-m/%y %w %F %T", "29/2/00 2 2000-02-29 12:09:14"),
            (951_826_154, "%d %B %Y", "29 February 2000"),
            (951_826_154, "%e|%k|%l|%h|%D|%R", "29|12|12|Feb|02/29/00|12:09"),
            (951_826_154, "%u %U %W %V %G %g", "2 09 09 09 2000 00"),
            (951_826_154, "%s %z %Z", "951826154 +0000 UTC"),
            (951_826_154, "%n%t%%Y", "\n\t%Y"),
            (951_826_154, "%-H:%-M:%-S %-I %-j", "12:9:14 12 60"),
            (1_735_689_599, "%d %b %Y", "31 Dec 2024"),
            (1_735_689_599, "%A, %B %d, %Y %H:%M:%S", "Tuesday, December 31, 2024 23:59:59"),
            (1_735_689_599, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2024-12-31 11:59 PM, day 366, Tue %"),
            (1_735_689_599, "%-d/%-m/%y %w %F %T", "31/12/24 2 2024-12-31 23:59:59"),
            (1_735_689_599, "%d %B %Y", "31 December 2024"),
            (1_735_689_599, "%e|%k|%l|%h|%D|%R", "31|23|11|Dec|12/31/24|23:59"),
            (1_735_689_599, "%u %U %W %V %G %g", "2 52 53 01 2025 25"),
            (1_735_689_599, "%s %z %Z", "1735689599 +0000 UTC"),
            (1_735_689_599, "%n%t%%Y", "\n\t%Y"),
            (1_735_689_599, "%-H:%-M:%-S %-I %-j", "23:59:59 11 366"),
            (1_735_689_600, "%d %b %Y", "01 Jan 2025"),
            (1_735_689_600, "%A, %B %d, %Y %H:%M:%S", "Wednesday, January 01, 2025 00:00:00"),
            (1_735_689_600, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2025-01-01 12:00 AM, day 001, Wed %"),
            (1_735_689_600, "%-d/%-m/%y %w %F %T", "1/1/25 3 2025-01-01 00:00:00"),
            (1_735_689_600, "%d %B %Y", "01 January 2025"),
            (1_735_689_600, "%e|%k|%l|%h|%D|%R", " 1| 0|12|Jan|01/01/25|00:00"),
            (1_735_689_600, "%u %U %W %V %G %g", "3 00 00 01 2025 25"),
            (1_735_689_600, "%s %z %Z", "1735689600 +0000 UTC"),
            (1_735_689_600, "%n%t%%Y", "\n\t%Y"),
            (1_735_689_600, "%-H:%-M:%-S %-I %-j", "0:0:0 12 1"),
            (4_107_542_400, "%d %b %Y", "01 Mar 2100"),
            (4_107_542_400, "%A, %B %d, %Y %H:%M:%S", "Monday, March 01, 2100 00:00:00"),
            (4_107_542_400, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2100-03-01 12:00 AM, day 060, Mon %"),
            (4_107_542_400, "%-d/%-m/%y %w %F %T", "1/3/00 1 2100-03-01 00:00:00"),
            (4_107_542_400, "%d %B %Y", "01 March 2100"),
            (4_107_542_400, "%e|%k|%l|%h|%D|%R", " 1| 0|12|Mar|03/01/00|00:00"),
            (4_107_542_400, "%u %U %W %V %G %g", "1 09 09 09 2100 00"),
            (4_107_542_400, "%s %z %Z", "4107542400 +0000 UTC"),
            (4_107_542_400, "%n%t%%Y", "\n\t%Y"),
            (4_107_542_400, "%-H:%-M:%-S %-I %-j", "0:0:0 12 60"),
            (1_798_761_599, "%d %b %Y", "31 Dec 2026"),
            (1_798_761_599, "%A, %B %d, %Y %H:%M:%S", "Thursday, December 31, 2026 23:59:59"),
            (1_798_761_599, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2026-12-31 11:59 PM, day 365, Thu %"),
            (1_798_761_599, "%-d/%-m/%y %w %F %T", "31/12/26 4 2026-12-31 23:59:59"),
            (1_798_761_599, "%d %B %Y", "31 December 2026"),
            (1_798_761_599, "%e|%k|%l|%h|%D|%R", "31|23|11|Dec|12/31/26|23:59"),
            (1_798_761_599, "%u %U %W %V %G %g", "4 52 52 53 2026 26"),
            (1_798_761_599, "%s %z %Z", "1798761599 +0000 UTC"),
            (1_798_761_599, "%n%t%%Y", "\n\t%Y"),
            (1_798_761_599, "%-H:%-M:%-S %-I %-j", "23:59:59 11 365"),
        ] {
            assert_eq!(strftime(format, seconds).unwrap(), want, "{seconds} {format}");
        }
    }

    #[test]
    fn unknown_directive_is_an_error() {
        for format in ["%Q", "100%", "%-", "%%%", "%c", "%Ez", "%5d"] {
            assert!(strftime(format, 0).is_err(), "{format}");
        }
        assert!(strftime("%Y", u64::MAX).is_err());
    }
}
