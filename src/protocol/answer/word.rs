//! The keys and type names that matter in a response; all others are one variant.

/// A key, or the `type` of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Word {
    #[default]
    Other,
    Choices,
    Content,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    Delta,
    FunctionCall,
    Index,
    Item,
    Message,
    Output,
    OutputItemAdded,
    OutputPartAdded,
    OutputText,
    OutputTextDelta,
    Part,
    Reasoning,
    ReasoningText,
    RedactedThinking,
    SummaryText,
    Text,
    TextDelta,
    Thinking,
    ToolCalls,
    Type,
}

impl Word {
    pub(super) fn of(bytes: &[u8]) -> Self {
        match bytes {
            b"choices" => Self::Choices,
            b"content" => Self::Content,
            b"content_block" => Self::ContentBlock,
            b"content_block_delta" => Self::ContentBlockDelta,
            b"content_block_start" => Self::ContentBlockStart,
            b"delta" => Self::Delta,
            b"function_call" => Self::FunctionCall,
            b"index" => Self::Index,
            b"item" => Self::Item,
            b"message" => Self::Message,
            b"output" => Self::Output,
            b"response.output_item.added" => Self::OutputItemAdded,
            b"response.content_part.added" => Self::OutputPartAdded,
            b"output_text" => Self::OutputText,
            b"response.output_text.delta" => Self::OutputTextDelta,
            b"part" => Self::Part,
            b"reasoning" => Self::Reasoning,
            b"reasoning_text" => Self::ReasoningText,
            b"redacted_thinking" => Self::RedactedThinking,
            b"summary_text" => Self::SummaryText,
            b"text" => Self::Text,
            b"text_delta" => Self::TextDelta,
            b"thinking" => Self::Thinking,
            b"tool_calls" => Self::ToolCalls,
            b"type" => Self::Type,
            _ => Self::Other,
        }
    }
}
