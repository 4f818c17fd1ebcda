//! `strftime_now`: the date that some templates put into the system prompt.

use crate::{Error, Result};
use std::fmt::Write as _;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Python's `strftime` in the C locale and UTC. An unknown directive is an error.
pub(crate) fn strftime(format: &str, seconds: u64) -> Result<String> {
    let date = Date::of(seconds);
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = match chars.next() {
            Some('-') => chars.next().map(|c| (c, false)),
            other => other.map(|c| (c, true)),
        };
        if directive.is_none_or(|(d, padded)| date.write(&mut out, d, padded).is_err()) {
            return Err(Error::failed(format!("strftime_now: unknown format {format:?}")));
        }
    }
    Ok(out)
}

/// A time in the Gregorian calendar, UTC.
#[derive(Clone, Copy, Debug)]
struct Date {
    year: u64,
    /// Month of the year, 0 to 11.
    month: u64,
    /// Day of the month, 1 to 31.
    day: u64,
    /// Day of the year, 1 to 366.
    day_of_year: u64,
    /// Day of the week; 0 is Sunday.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Date {
    fn of(seconds: u64) -> Self {
        let (days, clock) = (seconds / 86_400, seconds % 86_400);
        let (mut year, mut rest) = (1970, days);
        // Any 400 years have 146,097 days; the rest is counted year by year.
        year += 400 * (rest / 146_097);
        rest %= 146_097;
        while rest >= days_in_year(year) {
            rest -= days_in_year(year);
            year += 1;
        }
        let day_of_year = rest + 1;
        let mut month = 0;
        while rest >= days_in_month(year, month) {
            rest -= days_in_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: rest + 1,
            day_of_year,
            // The epoch was a Thursday.
            weekday: (days + 4) % 7,
            hour: clock / 3_600,
            minute: clock / 60 % 60,
            second: clock % 60,
        }
    }

    /// Writes one directive; fails on an unknown one.
    fn write(&self, out: &mut String, directive: char, padded: bool) -> std::fmt::Result {
        let month = name(&MONTHS, self.month);
        let day = name(&DAYS, self.weekday);
        let half = |hour: u64| (hour + 11) % 12 + 1;
        let mut number = |value: u64, width: usize| {
            if padded { write!(out, "{value:0width$}") } else { write!(out, "{value}") }
        };
        match directive {
            'd' => number(self.day, 2),
            'm' => number(self.month + 1, 2),
            'y' => number(self.year % 100, 2),
            'Y' => number(self.year, 4),
            'H' => number(self.hour, 2),
            'I' => number(half(self.hour), 2),
            'M' => number(self.minute, 2),
            'S' => number(self.second, 2),
            'j' => number(self.day_of_year, 3),
            'w' => number(self.weekday, 1),
            'B' => out.write_str(month),
            'b' | 'h' => out.write_str(month.get(..3).unwrap_or(month)),
            'A' => out.write_str(day),
            'a' => out.write_str(day.get(..3).unwrap_or(day)),
            'p' => out.write_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => write!(out, "{:04}-{:02}-{:02}", self.year, self.month + 1, self.day),
            'T' => write!(out, "{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            '%' => out.write_str("%"),
            _ => Err(std::fmt::Error),
        }
    }
}

fn name(names: &[&'static str], index: u64) -> &'static str {
    usize::try_from(index).ok().and_then(|i| names.get(i)).copied().unwrap_or_default()
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: u64, month: u64) -> u64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_equal_those_of_python() {
        // (seconds, format, result of datetime.fromtimestamp(seconds, UTC).strftime(format))
        for (seconds, format, want) in [
            (0, "%d %b %Y", "01 Jan 1970"),
            (951_826_154, "%A, %B %d, %Y %H:%M:%S", "Tuesday, February 29, 2000 12:09:14"),
            (1_735_689_599, "%Y-%m-%d %I:%M %p, day %j, %a %%", "2024-12-31 11:59 PM, day 366, Tue %"),
            (1_735_689_600, "%-d/%-m/%y %w %F %T", "1/1/25 3 2025-01-01 00:00:00"),
            (4_107_542_400, "%d %B %Y", "01 March 2100"),
        ] {
            assert_eq!(strftime(format, seconds).unwrap(), want, "{seconds} {format}");
        }
    }

    #[test]
    fn unknown_directive_is_an_error() {
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("100%", 0).is_err());
    }
}
