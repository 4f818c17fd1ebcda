//! Token counts of a `usage` member in the spellings of all APIs.

use super::Usage;
use super::count::{Count, UnreadCount};
use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// The counts in the spellings of all APIs.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Counts {
    // OpenAI's completions and chat, and vLLM's.
    pub(super) prompt_tokens: Count,
    pub(super) completion_tokens: Count,
    #[serde(deserialize_with = "details")]
    prompt_tokens_details: Count,
    // A misspelling that some servers and gateways use.
    #[serde(deserialize_with = "details")]
    prompt_token_details: Count,
    // OpenAI's Responses API, and Anthropic's.
    input_tokens: Count,
    output_tokens: Count,
    #[serde(deserialize_with = "details")]
    input_tokens_details: Count,
    // Only Anthropic: `input_tokens` includes neither of these.
    cache_read_input_tokens: Count,
    cache_creation_input_tokens: Count,
    /// The object itself could not be read.
    #[serde(skip)]
    unread: Option<UnreadCount>,
}

impl Counts {
    /// Parses the value of a `usage` member: an object, or `null` where there are no counts yet.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        if value == b"null" {
            return None;
        }
        // Serde would accept an array in place of an object.
        let read = if value.starts_with(b"{") { serde_json::from_slice(value).ok() } else { None };
        Some(read.unwrap_or(Self { unread: Some(UnreadCount::Malformed), ..Self::default() }))
    }

    /// A stream may report its counts in parts (Anthropic's `message_start`, then `message_delta`) or
    /// repeatedly: the last value counts.
    pub(super) fn merge(&mut self, later: Counts) {
        for (count, later) in self.all_mut().into_iter().zip(later.all()) {
            count.merge(later);
        }
        self.unread = self.unread.or(later.unread);
    }

    fn all(&self) -> [Count; 9] {
        let mut counts = *self;
        counts.all_mut().map(|count| *count)
    }

    fn all_mut(&mut self) -> [&mut Count; 9] {
        [
            &mut self.prompt_tokens,
            &mut self.completion_tokens,
            &mut self.prompt_tokens_details,
            &mut self.prompt_token_details,
            &mut self.input_tokens,
            &mut self.output_tokens,
            &mut self.input_tokens_details,
            &mut self.cache_read_input_tokens,
            &mut self.cache_creation_input_tokens,
        ]
    }

    /// Why the object or one of its counts was not read; `None` if all were.
    pub(super) fn unread(&self) -> Option<UnreadCount> {
        self.unread.or_else(|| self.all().into_iter().find_map(Count::unread))
    }

    pub(super) fn total(&self) -> Option<Usage> {
        let uncounted = [self.cache_read_input_tokens, self.cache_creation_input_tokens]
            .map(|count| count.get().unwrap_or_default());
        let uncounted = uncounted.into_iter().fold(0, u64::saturating_add);
        let details = [self.prompt_tokens_details, self.prompt_token_details, self.input_tokens_details];
        let cached = details.into_iter().find_map(Count::get);
        let input = self.input_tokens.get().map(|tokens| tokens.saturating_add(uncounted));
        let usage = Usage {
            prompt_tokens: self.prompt_tokens.get().or(input),
            completion_tokens: self.completion_tokens.get().or(self.output_tokens.get()),
            cached_tokens: cached.or(self.cache_read_input_tokens.get()),
        };
        (usage != Usage::default()).then_some(usage)
    }
}

/// Reads `cached_tokens` of an object with details. A value that is no object has no count, and does not spoil the
/// counts beside it.
fn details<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Count, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Details {
        cached_tokens: Count,
    }

    struct DetailsVisitor;

    impl<'de> Visitor<'de> for DetailsVisitor {
        type Value = Count;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with `cached_tokens`")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Count, A::Error> {
            Details::deserialize(MapAccessDeserializer::new(map)).map(|details| details.cached_tokens)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Count, A::Error> {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(Count::Absent)
        }

        fn visit_unit<E>(self) -> Result<Count, E> {
            Ok(Count::Absent)
        }

        fn visit_bool<E>(self, _: bool) -> Result<Count, E> {
            Ok(Count::Absent)
        }

        fn visit_u64<E>(self, _: u64) -> Result<Count, E> {
            Ok(Count::Absent)
        }

        fn visit_i64<E>(self, _: i64) -> Result<Count, E> {
            Ok(Count::Absent)
        }

        fn visit_f64<E>(self, _: f64) -> Result<Count, E> {
            Ok(Count::Absent)
        }

        fn visit_str<E>(self, _: &str) -> Result<Count, E> {
            Ok(Count::Absent)
        }
    }

    deserializer.deserialize_any(DetailsVisitor)
}
