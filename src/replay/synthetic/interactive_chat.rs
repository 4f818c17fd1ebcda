//! `interactive-chat`: people who chat with an assistant that has instructions in common and some of its own for each chat, and who think
//! between two turns.
//!
//! The figures are those of llm-d's profile of this name; where it gives a mean without a shape, the lengths and pauses are lognormal
//! (the pauses with a deviation as large as the mean) and the turns normal with a deviation of 3. Its stages of 10 to 50 chats at a
//! time, 300 requests each, are one stage of 50 here.

use super::Descriptor;
use super::conversations::Conversations;
use super::parameters::Parameter;

/// Registry entry.
pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "interactive-chat",
    summary: "50 chats with 1,000 shared tokens of instructions, 4,000 of their own, and pauses of 45 seconds.",
    source: "llm-d-benchmark `interactive-chat` (inference-perf conversation_replay)",
    is_closed: true,
    parameters: &[
        Parameter { name: "clients", default: "50", meaning: "chats at a time: the last of the source's stages" },
        Parameter { name: "requests", default: "1500", meaning: "300 in each of five stages at the source" },
        Parameter {
            name: "conversations",
            default: "0",
            meaning: "conversations that may begin, 0 for as many as `requests` take",
        },
        Parameter { name: "ramp", default: "45", meaning: "seconds over which the clients begin" },
        Parameter { name: "system", default: "1000", meaning: "tokens that all conversations share" },
        Parameter {
            name: "dynamic",
            default: "500..15000~4000~2500",
            meaning: "tokens of each conversation's own instructions",
        },
        Parameter { name: "turns", default: "normal:1..15~4~3", meaning: "turns of a conversation" },
        Parameter { name: "input", default: "10..1000~50~40", meaning: "tokens of a question" },
        Parameter { name: "output", default: "normal:10..1000~300~150", meaning: "tokens of an answer" },
        Parameter { name: "think", default: "5..300~45", meaning: "seconds from an answer to the next question" },
        Parameter {
            name: "context",
            default: "131072",
            meaning: "tokens that a model takes; a conversation that would need more is over",
        },
        Parameter {
            name: "volatile",
            default: "false",
            meaning: "begin every prompt with 32 tokens that nobody else has",
        },
    ],
    build: |values, seed| Ok(Box::new(Conversations::read(values, seed)?)),
};
