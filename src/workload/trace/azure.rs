//! The inference traces of Azure's public data set, 2023 to 2025: CSV with the headings
//! `TIMESTAMP,ContextTokens,GeneratedTokens`, and `NumImages` in that of multimodal models.
//!
//! Timestamps are dates with up to nanoseconds (`2023-11-16 18:17:03.9799600`, in 2024 with `+00:00` behind). What the
//! prompts share is not known, so they share nothing. Images are part of the `ContextTokens`, as a prompt of 4,564 tokens
//! may have 16. How many tokens an image takes is not known: each is given [`IMAGE_TOKENS`], or as many as the text, if
//! the prompt is shorter. Source: Azure/AzurePublicDataset, `AzureLLMInferenceDataset2023.md` and `…2024.md`,
//! `AzureLMMInferenceDataset2025.md`.

use super::RowParser;
use super::fields::{columns, position, tokens, whole, wrong};
use crate::names::{TextKind, name};
use crate::{PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;

/// The columns that must be there.
pub const HEADINGS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

/// The column that may be there: how many images the prompt has.
pub(super) const IMAGES: &str = "NumImages";
/// 576 tokens for an image at most, a usual size (a square of 336 pixels in LLaVA).
pub const IMAGE_TOKENS: u32 = 576;
/// More images in a prompt are a misprint.
const MAX_IMAGES: u64 = 10_000;

/// The rule of the format.
#[derive(Debug)]
pub(super) struct Azure {
    /// Where [`HEADINGS`] stand.
    at: [usize; 3],
    images: Option<usize>,
}

/// Whether these are the headings of such a trace.
pub(super) fn is_header(columns: &[&str]) -> bool {
    HEADINGS.iter().all(|heading| position(columns, heading).is_some())
}

impl Azure {
    pub(super) fn new(heading: &str) -> Result<Self, TraceError> {
        let columns = columns(heading);
        let find = |name: &str| {
            position(&columns, name).ok_or_else(|| TraceError::Format(format!("there is no column `{name}`")))
        };
        let [time, context, generated] = HEADINGS;
        let images = position(&columns, IMAGES);
        Ok(Self { at: [find(time)?, find(context)?, find(generated)?], images })
    }
}

impl RowParser for Azure {
    const FROM_FIRST: bool = true;

    fn request(&mut self, row: &str, number: u64) -> Result<Request, String> {
        let columns = columns(row);
        let [time, context, generated] = self.at.map(|at| columns.get(at).copied());
        let at = time
            .and_then(date)
            .ok_or_else(|| wrong("TIMESTAMP", time, "a date from 1970 to 2069 such as 2023-11-16 18:17:03.9799600"))?;
        let context = tokens("ContextTokens", context, 1)?;
        let images = match self.images {
            // A prompt has a token of text at least, and each image has one.
            Some(at) => whole(IMAGES, columns.get(at).copied(), 0..=MAX_IMAGES.min(u64::from(context) - 1))?,
            None => 0,
        };
        let answer = tokens("GeneratedTokens", generated, 0)?.max(1);
        Ok(Request {
            number,
            at,
            prompt: prompt(number, context, u32::try_from(images).unwrap_or(0)),
            answer: Piece::new(name(0, TextKind::Answer, number), answer),
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        })
    }
}

/// A prompt of `context` tokens with this number of images, fewer than `context`. No other prompt has the same images.
fn prompt(number: u64, context: u32, images: u32) -> Vec<PromptPart> {
    let each = IMAGE_TOKENS.min(context / (images + 1)).max(1);
    let text = Piece::new(name(0, TextKind::Prompt, number), context - images * each);
    let image = |i| PromptPart::image(name(1 + u64::from(i), TextKind::Prompt, number), each);
    (0..images).map(image).chain([PromptPart::text(Speaker::User, text)]).collect()
}

/// Nanoseconds since 1970 of a date `2023-11-16 18:17:03.9799600+00:00`, where the fraction and
/// the zone may be missing.
fn date(text: &str) -> Option<Timestamp> {
    let (date, rest) = text.split_once([' ', 'T'])?;
    let (year, month_day) = date.split_once('-')?;
    let (month, day) = month_day.split_once('-')?;
    let (year, month, day) = (digits(year, 1970, 2069)?, digits(month, 1, 12)?, digits(day, 1, 31)?);
    let (time, zone) = match rest.find(['+', '-', 'Z']) {
        Some(at) => rest.split_at_checked(at)?,
        None => (rest, "Z"),
    };
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    if fraction.is_empty() {
        return None;
    }
    let (hour, minute_second) = clock.split_once(':')?;
    let (minute, second) = minute_second.split_once(':')?;
    let (hour, minute, second) = (digits(hour, 0, 23)?, digits(minute, 0, 59)?, digits(second, 0, 60)?);
    let fraction: u64 = digits(&format!("{:0<9.9}", fraction), 0, 999_999_999)?;
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3_600 + minute * 60 + second;
    let seconds = seconds.checked_add_signed(-offset(zone)?)?;
    Some(Timestamp(seconds * 1_000_000_000 + fraction))
}

/// A whole number of nothing but digits.
fn digits(text: &str, low: u64, high: u64) -> Option<u64> {
    let is_digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|n| is_digits && (low..=high).contains(n))
}

/// Seconds that a zone's clocks are ahead of UTC.
fn offset(zone: &str) -> Option<i64> {
    if zone == "Z" {
        return Some(0);
    }
    let (sign, zone) = match zone.split_at_checked(1)? {
        ("+", rest) => (1, rest),
        ("-", rest) => (-1, rest),
        _ => return None,
    };
    let (hours, minutes) = zone.split_once(':').unwrap_or((zone, "0"));
    let seconds = digits(hours, 0, 14)? * 3_600 + digits(minutes, 0, 59)? * 60;
    Some(sign * i64::try_from(seconds).ok()?)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar from 1970 on.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    // Years begin in March, so that the day that leap years add is the last one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let since_march = (153 * month + 2) / 5 + day - 1;
    365 * year + year / 4 - year / 100 + year / 400 + since_march - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn dates_are_read_to_the_nanosecond() {
        for (text, at) in [
            ("1970-01-01 00:00:00", 0),
            ("2000-02-29T12:00:00Z", 951_825_600_000_000_000),
            ("2023-11-16 18:17:03.9799600", 1_700_158_623_979_960_000),
            ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200_009_930_000),
            ("2024-05-10 02:00:00+02:00", 1_715_299_200_000_000_000),
            ("2024-05-09 23:30:00.5-00:30", 1_715_299_200_500_000_000),
        ] {
            assert_eq!(date(text), Some(Timestamp(at)), "{text}");
        }
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for text in [
            "",
            "2023-11-16",
            "16.11.2023 18:17",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:17",
            "1969-12-31 23:59:59",
            "2100-01-01 00:00:00",
            "1970-01-01 00:00:00+01:00",
            "2023-11-16 18:17:03.x",
            "2023-11-16 18:17:03.",
            "+023-11-16 18:17:03",
            "2023-11-16 18:17:03é",
        ] {
            assert_eq!(date(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_date_or_none(text in "\\PC{0,40}", shape in "[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.+Z-]{0,24}") {
            let _ = date(&text);
            let _ = date(&shape);
        }

        #[test]
        fn days_follow_each_other(day in 0_u64..36_000) {
            // Counted month by month from 1970; up to 2069 every fourth year is a leap year.
            let (mut year, mut month, mut left) = (1970, 1, day);
            let length = |year: u64, month: u64| match month {
                2 if year.is_multiple_of(4) => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            while left >= length(year, month) {
                left -= length(year, month);
                (year, month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
            }
            prop_assert_eq!(days_since_1970(year, month, left + 1), day);
        }
    }
}
