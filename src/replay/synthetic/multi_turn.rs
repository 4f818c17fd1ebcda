//! `multi-turn`: chats without instructions and without pauses, as KubeAI measures its prefix hash with.
//!
//! KubeAI asks 8,000 questions in 800 ShareGPT conversations of 16 messages or more, 800 at a time: 6,656,338 prompt tokens and 608,447
//! answered ones, that is 832 and 76 a request. Ten turns of 89 tokens with answers of 76 have exactly that mean, since turn t quotes
//! t - 1 of both. How the lengths are spread is not published; here they are lognormal with a deviation as large as the mean.

use super::Descriptor;
use super::conversations::Conversations;
use super::parameters::Parameter;

/// Registry entry.
pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "multi-turn",
    summary: "800 chats at a time, each turn quoting all before it, no pauses.",
    source: "KubeAI's benchmark of prefix-aware load balancing (8 × L4, Llama-3.1-8B, ShareGPT)",
    is_closed: true,
    parameters: &[
        Parameter { name: "clients", default: "800", meaning: "conversations at a time" },
        Parameter { name: "requests", default: "8000", meaning: "KubeAI's number of prompts" },
        Parameter {
            name: "conversations",
            default: "800",
            meaning: "conversations that may begin, 0 for as many as `requests` take; KubeAI's number",
        },
        Parameter { name: "ramp", default: "1", meaning: "seconds over which the clients begin" },
        Parameter { name: "system", default: "0", meaning: "tokens that all conversations share" },
        Parameter { name: "dynamic", default: "0", meaning: "tokens of each conversation's own instructions" },
        Parameter { name: "turns", default: "10", meaning: "turns of a conversation" },
        Parameter { name: "input", default: "4..800~89", meaning: "tokens of a question" },
        Parameter { name: "output", default: "2..800~76", meaning: "tokens of an answer" },
        Parameter { name: "think", default: "0", meaning: "seconds from an answer to the next question" },
        Parameter {
            name: "context",
            default: "16384",
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
