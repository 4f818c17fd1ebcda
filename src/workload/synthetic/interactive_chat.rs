//! `interactive-chat`: people who chat with an assistant that has instructions in common and some of its own for each
//! chat, and who think between two turns.
//!
//! The figures are those of llm-d's profile of this name; where it gives a mean without a shape, the lengths and pauses
//! are lognormal (the pauses with a deviation as large as the mean) and the turns normal with a deviation of 3. Its
//! stages of 10 to 50 chats at a time, 300 requests each, are one stage of 50 here.

use super::Descriptor;
use super::conversations::{
    CONTEXT, CONVERSATIONS, Conversations, DYNAMIC, INPUT, OUTPUT, RAMP, SYSTEM, THINK, TURNS, VOLATILE,
};
use super::parameters::Parameter;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "interactive-chat",
    summary: "50 chats with 1,000 shared tokens of instructions, 4,000 of their own, and pauses of 45 seconds.",
    source: "llm-d-benchmark `interactive-chat` (inference-perf conversation_replay)",
    is_closed: true,
    parameters: &[
        Parameter { name: "clients", default: "50", meaning: "chats at a time: the last of the source's stages" },
        Parameter { name: "requests", default: "1500", meaning: "300 in each of five stages at the source" },
        CONVERSATIONS,
        Parameter { default: "45", ..RAMP },
        Parameter { default: "1000", ..SYSTEM },
        Parameter { default: "500..15000~4000~2500", ..DYNAMIC },
        Parameter { default: "normal:1..15~4~3", ..TURNS },
        Parameter { default: "10..1000~50~40", ..INPUT },
        Parameter { default: "normal:10..1000~300~150", ..OUTPUT },
        Parameter { default: "5..300~45", ..THINK },
        CONTEXT,
        VOLATILE,
    ],
    build: |values, seed| Ok(Box::new(Conversations::read(values, seed)?)),
};
