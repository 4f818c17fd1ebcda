//! What the response adds to prefix caches: the blocks of its text, and those that the decode worker keeps for the next
//! turn of the conversation.

use crate::conversation::Conversation;
use crate::event::Observer;
use crate::lookup::guarded;
use crate::prefix::{PoolPrefix, Tail};
use attache_prefix::key::BlockKey;
use attache_protocol::answer::{AnswerFormat, AnswerText, DEFAULT_MAX_ANSWER_BYTES};
use attache_protocol::{Api, TransferScanner};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// Reads the text and the transfer parameters of a response, if anything is recorded from them.
#[derive(Debug)]
pub(super) struct ResponseLearning {
    api: Api,
    /// The incomplete last block of the prompt, which the response continues.
    tail: Option<(Arc<PoolPrefix>, Tail)>,
    /// The turn of the conversation, if another worker prefilled the prompt.
    conversation: Option<Box<Conversation>>,
    /// Set if the response is read for the conversation.
    transfer: Option<Box<TransferScanner>>,
    text: Option<Box<AnswerText>>,
}

impl ResponseLearning {
    pub(super) fn new(
        api: Api,
        tail: Option<(Arc<PoolPrefix>, Tail)>,
        conversation: Option<Box<Conversation>>,
    ) -> Self {
        Self { api, tail, conversation, transfer: None, text: None }
    }

    /// Prepares to read a response in this format. `learns_text`: the prefix cache can record the blocks of its text.
    pub(super) fn begin(&mut self, format: AnswerFormat, learns_text: bool) {
        let conversation = self.conversation.as_ref();
        self.transfer = conversation.and_then(|turn| turn.scanner(self.api, format)).map(Box::new);
        let turn_reads_text = self.transfer.is_some() && conversation.is_some_and(|turn| turn.reads_text());
        if turn_reads_text || self.tail.is_some() && learns_text {
            self.text = AnswerText::new(self.api, format, DEFAULT_MAX_ANSWER_BYTES).map(Box::new);
        }
    }

    /// Reads a chunk of the response body.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        if let Some(text) = &mut self.text {
            text.push(chunk);
        }
        if let Some(transfer) = &mut self.transfer {
            transfer.push(chunk);
        }
    }

    /// The response of `endpoint` is complete: records the blocks that it keeps for the next turn.
    pub(super) fn record_turn(
        &mut self,
        prompt_tokens: Option<u64>,
        endpoint: EndpointId,
        now: Timestamp,
        observer: &dyn Observer,
    ) {
        let text = self.text.as_ref().and_then(|text| text.finish());
        if let (Some(turn), Some(transfer)) = (self.conversation.take(), &self.transfer) {
            guarded(observer, || turn.learn(transfer, text, prompt_tokens, endpoint, now));
        }
    }

    /// The response is complete: appends the keys of its blocks to those of the prompt. False if it can't be encoded.
    pub(super) fn extend(&mut self, keys: &mut Vec<BlockKey>, observer: &dyn Observer) -> bool {
        let text = self.text.as_ref().and_then(|text| text.finish());
        let (Some((prefix, tail)), Some(text)) = (&mut self.tail, text) else { return false };
        guarded(observer, || prefix.extend(tail, self.api, text, keys)).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::tests::fixture::Parts;
    use crate::event::Unobserved;

    #[test]
    fn response_extends_the_prompt_only_if_its_text_was_read() {
        let text = "an answer that fills some blocks ".repeat(20);
        let chunk = serde_json::json!({"choices": [{"index": 0, "delta": {"content": text}}]});
        let added = |begins: Option<bool>| {
            let plan = Parts::default().build().chat("hello").unwrap();
            assert!(plan.tail.is_some());
            let mut learning = ResponseLearning::new(Api::ChatCompletions, plan.tail, None);
            begins.iter().for_each(|learns_text| learning.begin(AnswerFormat::Events, *learns_text));
            learning.push(format!("data: {chunk}\n\n").as_bytes());
            let mut keys = Vec::new();
            (learning.extend(&mut keys, &Unobserved), keys.len())
        };
        assert_eq!(added(None), (false, 0), "an error response");
        assert_eq!(added(Some(false)), (false, 0), "the engine reports its blocks itself");
        let (extended, blocks) = added(Some(true));
        assert!(extended && blocks >= text.len() / 64, "{blocks}");
    }
}
