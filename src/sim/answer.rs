//! What a simulated model says to a prompt, known before it starts: equal requests get equal
//! answers, on every server. Pure.

use crate::engine::{FinishReason, JobReport};
use crate::kv::{BlockHash, content_hash};
use crate::tokenizer::{BYTES_PER_TOKEN, answer_text};

/// 128 tokens: the length of a paragraph.
pub const DEFAULT_OUTPUT_TOKENS: u32 = 128;

/// What a request says about the length of its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerLimits {
    /// Upper bound of the response, tokens; none when `None`.
    pub max_tokens: Option<u32>,
    /// Lower bound of the response, tokens.
    pub min_tokens: u32,
    /// Go on to the limit.
    pub ignore_eos: bool,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// They are part of it after all.
    pub keeps_stop: bool,
}

/// One response, as text and tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedText {
    /// What its tokens follow from.
    pub seed: u64,
    /// Tokens after which the model is done by itself, if it ever is.
    pub stops_after: Option<u32>,
    /// The stop text that ends it, and the length in bytes of what is shown.
    stop: Option<(String, usize)>,
}

impl GeneratedText {
    /// What a prompt's answers follow from. Every choice (`n`) has its own, every adapter too.
    #[must_use]
    pub fn seed(model: &str, lora: Option<&str>, prompt: &[u32], choice: u32) -> u64 {
        BlockHash::root(model, lora, None).then(content_hash(prompt)).then(u64::from(choice)).0
    }

    /// The answer of `seed`: `output_tokens` long unless the request wants otherwise. `room` is what
    /// fits after the prompt, tokens.
    #[must_use]
    pub fn plan(seed: u64, limits: &AnswerLimits, output_tokens: u32, room: u32) -> Self {
        let by_itself = (!limits.ignore_eos).then_some(output_tokens.max(limits.min_tokens));
        let longest = by_itself.unwrap_or(room).min(limits.max_tokens.unwrap_or(room)).min(room);
        match first_stop(seed, longest, limits) {
            Some((text, start)) => {
                let end = start + text.len();
                let shown = if limits.keeps_stop { end } else { start };
                let tokens = u32::try_from(end.div_ceil(BYTES_PER_TOKEN));
                Self { seed, stops_after: tokens.ok(), stop: Some((text, shown)) }
            }
            None => Self { seed, stops_after: by_itself, stop: None },
        }
    }

    /// The text of token `index`: what lies before the stop text, mostly all of it.
    #[must_use]
    pub fn text(&self, index: u32) -> &'static str {
        let word = answer_text(self.seed, index);
        let visible = match &self.stop {
            Some((_, bytes)) => bytes.saturating_sub(index as usize * BYTES_PER_TOKEN).min(BYTES_PER_TOKEN),
            None => BYTES_PER_TOKEN,
        };
        word.get(..visible).unwrap_or(word)
    }

    /// The text of the first `tokens` tokens.
    #[must_use]
    pub fn whole(&self, tokens: u32) -> String {
        (0..tokens).map(|index| self.text(index)).collect()
    }

    /// The stop text that ended it.
    #[must_use]
    pub fn stop_text(&self, report: &JobReport) -> Option<&str> {
        let (text, _) = self.stop.as_ref().filter(|_| report.reason == FinishReason::Stop)?;
        Some(text)
    }
}

/// The stop text that is complete first, and where it begins.
fn first_stop(seed: u64, tokens: u32, limits: &AnswerLimits) -> Option<(String, usize)> {
    if limits.stop.iter().all(String::is_empty) {
        return None;
    }
    let text: String = (0..tokens).map(|index| answer_text(seed, index)).collect();
    let earliest = (limits.min_tokens as usize).saturating_mul(BYTES_PER_TOKEN).min(text.len());
    let found = limits.stop.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| {
        let start = earliest + text.get(earliest..)?.find(stop.as_str())?;
        Some((start + stop.len(), stop.clone(), start))
    });
    found.min().map(|(_, stop, start)| (stop, start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> AnswerLimits {
        AnswerLimits::default()
    }

    #[test]
    fn an_answer_ends_by_itself_unless_told_otherwise() {
        assert_eq!(GeneratedText::plan(1, &limits(), 10, 100).stops_after, Some(10));
        assert_eq!(GeneratedText::plan(1, &AnswerLimits { min_tokens: 20, ..limits() }, 10, 100).stops_after, Some(20));
        assert_eq!(GeneratedText::plan(1, &AnswerLimits { ignore_eos: true, ..limits() }, 10, 100).stops_after, None);
    }

    #[test]
    fn a_stop_text_is_cut_off_even_inside_a_token() {
        let plain = GeneratedText::plan(9, &limits(), 20, 100).whole(20);
        // Two bytes into the sixth token, across into the seventh.
        let stop = plain.get(22..26).unwrap().to_owned();
        let start = plain.find(&stop).unwrap();
        let answer =
            GeneratedText::plan(9, &AnswerLimits { stop: vec!["no such".into(), stop.clone()], ..limits() }, 20, 100);
        let tokens = answer.stops_after.unwrap();
        assert_eq!(tokens as usize, (start + 4).div_ceil(4));
        assert_eq!(answer.whole(tokens), plain[..start]);
        let kept = AnswerLimits { stop: vec![stop], keeps_stop: true, ..limits() };
        assert_eq!(GeneratedText::plan(9, &kept, 20, 100).whole(tokens), plain[..start + 4]);
    }

    #[test]
    fn choices_and_adapters_answer_differently_and_repeatably() {
        let seed = |lora, choice| GeneratedText::seed("m", lora, &[1, 2, 3], choice);
        assert_eq!(seed(None, 0), seed(None, 0));
        assert_ne!(seed(None, 0), seed(None, 1));
        assert_ne!(seed(None, 0), seed(Some("a"), 0));
    }
}
