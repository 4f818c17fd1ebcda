//! `multi-turn`: chats without instructions and without pauses, as KubeAI measures its prefix hash with.
//!
//! KubeAI asks 8,000 questions in 800 ShareGPT conversations of 16 messages or more, 800 at a time: 6,656,338 prompt
//! tokens and 608,447 answered ones, that is 832 and 76 a request. Ten turns of 89 tokens with answers of 76 have
//! exactly that mean, since turn t quotes t - 1 of both. How the lengths are spread is not published; here they are
//! lognormal with a deviation as large as the mean.

use super::Descriptor;
use super::conversations::{CONTEXT, Conversations, DYNAMIC, INPUT, OUTPUT, RAMP, SYSTEM, THINK, TURNS, VOLATILE};
use super::parameters::Parameter;

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
        Parameter { default: "1", ..RAMP },
        Parameter { default: "0", ..SYSTEM },
        Parameter { default: "0", ..DYNAMIC },
        Parameter { default: "10", ..TURNS },
        Parameter { default: "4..800~89", ..INPUT },
        Parameter { default: "2..800~76", ..OUTPUT },
        Parameter { default: "0", ..THINK },
        Parameter { default: "16384", ..CONTEXT },
        VOLATILE,
    ],
    build: |values, seed| Ok(Box::new(Conversations::read(values, seed)?)),
};
