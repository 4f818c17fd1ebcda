//! Token counts of a `usage` member in the spellings of all APIs.

use super::Usage;
use super::count::{Count, UnreadCount};
use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// A member with a count, in the spellings of all APIs.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum CountMember {
    // OpenAI's completions and chat, and vLLM's.
    PromptTokens,
    CompletionTokens,
    PromptTokensDetails,
    // A misspelling that some servers and gateways use.
    PromptTokenDetails,
    // OpenAI's Responses API, and Anthropic's.
    InputTokens,
    OutputTokens,
    InputTokensDetails,
    // Only Anthropic: `input_tokens` includes neither of these.
    CacheReadInputTokens,
    CacheCreationInputTokens,
    #[serde(other)]
    Other,
}

/// Number of members with a count.
const MEMBERS: usize = CountMember::Other as usize;

/// The counts of a `usage` member. Their values are apart from which of them were read, to be copied cheaply with each
/// response.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    values: [u64; MEMBERS],
    /// Bit `n` is set when value `n` was read.
    read: u16,
    /// Why the object or one of its counts was not read.
    unread: Option<UnreadCount>,
}

impl Counts {
    /// Parses the value of a `usage` member: an object, or `null` where there are no counts yet.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        if value == b"null" {
            return None;
        }
        let read = serde_json::from_slice(value).ok();
        Some(read.unwrap_or(Self { unread: Some(UnreadCount::Malformed), ..Self::default() }))
    }

    /// Takes a report of one count. One that could not be read replaces no earlier one.
    pub(super) fn set(&mut self, member: CountMember, count: Count) {
        match count {
            Count::Is(tokens) => {
                if let Some(value) = self.values.get_mut(member as usize) {
                    *value = tokens;
                    self.read |= 1 << member as u16;
                }
            }
            Count::Unread(reason) => self.unread = self.unread.or(Some(reason)),
            Count::Absent => {}
        }
    }

    /// A stream may report its counts in parts (Anthropic's `message_start`, then `message_delta`) or
    /// repeatedly: the last value counts.
    pub(super) fn merge(&mut self, later: &Counts) {
        for (member, (value, later_value)) in self.values.iter_mut().zip(&later.values).enumerate() {
            if later.read & (1 << member) != 0 {
                *value = *later_value;
            }
        }
        self.read |= later.read;
        self.unread = self.unread.or(later.unread);
    }

    fn get(&self, member: CountMember) -> Option<u64> {
        let read = self.read & (1 << member as u16) != 0;
        self.values.get(member as usize).copied().filter(|_| read)
    }

    /// Why the object or one of its counts was not read; `None` if all were.
    pub(super) fn unread(&self) -> Option<UnreadCount> {
        self.unread
    }

    pub(super) fn total(&self) -> Option<Usage> {
        use CountMember as Member;
        if self.read == 0 {
            return None;
        }
        let cache_read = self.get(Member::CacheReadInputTokens);
        let uncounted = cache_read.unwrap_or(0).saturating_add(self.get(Member::CacheCreationInputTokens).unwrap_or(0));
        let input = self.get(Member::InputTokens).map(|tokens| tokens.saturating_add(uncounted));
        let details = [Member::PromptTokensDetails, Member::PromptTokenDetails, Member::InputTokensDetails];
        let cached = details.into_iter().find_map(|member| self.get(member));
        let usage = Usage {
            prompt_tokens: self.get(Member::PromptTokens).or(input),
            completion_tokens: self.get(Member::CompletionTokens).or(self.get(Member::OutputTokens)),
            cached_tokens: cached.or(cache_read),
        };
        (usage != Usage::default()).then_some(usage)
    }
}

impl<'de> Deserialize<'de> for Counts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountsVisitor;

        impl<'de> Visitor<'de> for CountsVisitor {
            type Value = Counts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with token counts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Counts, A::Error> {
                let mut counts = Counts::default();
                while let Some(member) = map.next_key::<CountMember>()? {
                    let count = match member {
                        CountMember::Other => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                        CountMember::PromptTokensDetails
                        | CountMember::PromptTokenDetails
                        | CountMember::InputTokensDetails => map.next_value::<CachedTokens>()?.0,
                        _ => map.next_value()?,
                    };
                    counts.set(member, count);
                }
                Ok(counts)
            }
        }

        deserializer.deserialize_map(CountsVisitor)
    }
}

/// `cached_tokens` of an object with details. A value that is no object has no count, and does not spoil the counts
/// beside it.
struct CachedTokens(Count);

impl<'de> Deserialize<'de> for CachedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
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

        deserializer.deserialize_any(DetailsVisitor).map(Self)
    }
}
