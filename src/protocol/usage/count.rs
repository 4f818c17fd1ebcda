//! One token count: a whole number, as servers write it and clients read it.
//!
//! Servers in languages with one type of number write `12.0` or `1.2e1`, and some gateways write `"12"`. The clients of
//! OpenAI accept all of these. They also accept nothing that is not a whole number of tokens, and so does Attaché.

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

attache_types::labels! {
    /// Why a reported token count was not read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum UnreadCount {
        /// The number is negative.
        Negative => "usage_negative",
        /// The number is not whole.
        Fraction => "usage_fraction",
        /// The number is infinite, not a number (`NaN`), or above 2^64.
        OutOfRange => "usage_out_of_range",
        /// The value is neither a number nor a text with one.
        NotANumber => "usage_not_a_number",
        /// The `usage` is no valid JSON object, or longer than 64 KiB.
        Malformed => "usage_malformed",
    }
}

/// One count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Count {
    /// The server reports none: there is no member, or it is `null`.
    #[default]
    Absent,
    Is(u64),
    Unread(UnreadCount),
}

impl Count {
    /// Parses a JSON value.
    pub(super) fn read(value: &[u8]) -> Self {
        serde_json::from_slice(value).unwrap_or(Self::Unread(UnreadCount::Malformed))
    }

    pub(super) fn get(self) -> Option<u64> {
        match self {
            Self::Is(count) => Some(count),
            Self::Absent | Self::Unread(_) => None,
        }
    }

    pub(super) fn unread(self) -> Option<UnreadCount> {
        match self {
            Self::Unread(reason) => Some(reason),
            Self::Absent | Self::Is(_) => None,
        }
    }

    /// Takes a later report of the same count. One that could not be read replaces no earlier one.
    pub(super) fn merge(&mut self, later: Self) {
        if matches!(later, Self::Is(_)) || self.get().is_none() && later != Self::Absent {
            *self = later;
        }
    }

    fn of_float(number: f64) -> Self {
        /// 2^64, the first float above the largest count.
        const END: f64 = 18_446_744_073_709_551_616.0;
        Self::Unread(match number {
            _ if !number.is_finite() || number >= END => UnreadCount::OutOfRange,
            _ if number < 0.0 => UnreadCount::Negative,
            _ if number.fract() != 0.0 => UnreadCount::Fraction,
            _ => return Self::Is(number as u64),
        })
    }

    fn of_text(text: &str) -> Self {
        let text = text.trim();
        let float = || text.parse().map_or(Self::Unread(UnreadCount::NotANumber), Self::of_float);
        text.parse().map_or_else(|_| float(), Self::Is)
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountVisitor)
    }
}

struct CountVisitor;

impl<'de> Visitor<'de> for CountVisitor {
    type Value = Count;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token count")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Count, E> {
        Ok(Count::Is(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Count, E> {
        Ok(u64::try_from(number).map_or(Count::Unread(UnreadCount::Negative), Count::Is))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Count, E> {
        Ok(Count::of_float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Count, E> {
        Ok(Count::of_text(text))
    }

    fn visit_unit<E>(self) -> Result<Count, E> {
        Ok(Count::Absent)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Count, E> {
        Ok(Count::Unread(UnreadCount::NotANumber))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Count, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Count::Unread(UnreadCount::NotANumber))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Count, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Count::Unread(UnreadCount::NotANumber))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_read_in_every_spelling() {
        for (value, expected) in [
            ("12", Count::Is(12)),
            ("0", Count::Is(0)),
            ("-0", Count::Is(0)),
            ("-0.0", Count::Is(0)),
            ("12.0", Count::Is(12)),
            ("1e2", Count::Is(100)),
            ("1.25E+2", Count::Is(125)),
            ("18446744073709551615", Count::Is(u64::MAX)),
            (r#""12""#, Count::Is(12)),
            (r#"" 12.0\n""#, Count::Is(12)),
            (r#""1e2""#, Count::Is(100)),
            ("null", Count::Absent),
            ("-1", Count::Unread(UnreadCount::Negative)),
            ("-1.5", Count::Unread(UnreadCount::Negative)),
            (r#""-7""#, Count::Unread(UnreadCount::Negative)),
            ("12.5", Count::Unread(UnreadCount::Fraction)),
            (r#""0.1""#, Count::Unread(UnreadCount::Fraction)),
            ("18446744073709551616", Count::Unread(UnreadCount::OutOfRange)),
            ("1e30", Count::Unread(UnreadCount::OutOfRange)),
            (r#""-inf""#, Count::Unread(UnreadCount::OutOfRange)),
            (r#""NaN""#, Count::Unread(UnreadCount::OutOfRange)),
            (r#""""#, Count::Unread(UnreadCount::NotANumber)),
            (r#""twelve""#, Count::Unread(UnreadCount::NotANumber)),
            ("true", Count::Unread(UnreadCount::NotANumber)),
            ("[12]", Count::Unread(UnreadCount::NotANumber)),
            (r#"{"count":12}"#, Count::Unread(UnreadCount::NotANumber)),
            ("NaN", Count::Unread(UnreadCount::Malformed)),
            ("Infinity", Count::Unread(UnreadCount::Malformed)),
            ("1e400", Count::Unread(UnreadCount::Malformed)),
            ("", Count::Unread(UnreadCount::Malformed)),
        ] {
            assert_eq!(Count::read(value.as_bytes()), expected, "{value}");
        }
    }

    #[test]
    fn last_count_that_was_read_stays() {
        let (absent, unread) = (Count::Absent, Count::Unread(UnreadCount::Negative));
        for (first, later, expected) in [
            (absent, Count::Is(1), Count::Is(1)),
            (Count::Is(1), Count::Is(2), Count::Is(2)),
            (Count::Is(1), absent, Count::Is(1)),
            (Count::Is(1), unread, Count::Is(1)),
            (unread, absent, unread),
            (unread, Count::Is(1), Count::Is(1)),
            (absent, unread, unread),
        ] {
            let mut count = first;
            count.merge(later);
            assert_eq!(count, expected, "{first:?} {later:?}");
        }
    }
}
