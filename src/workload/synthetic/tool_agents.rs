//! `tool-agents`: agents that call tools. All share a long description of their tools; each turn brings a tool's output
//! and is answered with the next call. Almost all of a prompt was there in the turn before, so who moves an agent to
//! another server computes its history again.
//!
//! Lengths follow the published shape of such traffic (long inputs that are mostly cached, short answers, pauses
//! of a tool's run: Mooncake's `toolagent` trace has 8,600 tokens in and 182 out with 59 % to be cached). How
//! they are spread is ours.

use super::Descriptor;
use super::conversations::{
    CONTEXT, CONVERSATIONS, Conversations, DYNAMIC, INPUT, OUTPUT, RAMP, SYSTEM, THINK, TURNS, VOLATILE,
};
use super::parameters::Parameter;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "tool-agents",
    summary: "128 agents with 12,000 shared tokens of tools, and 20 turns of tool output of 1,200.",
    source: "Mooncake's `toolagent` trace in its means; figures ours",
    is_closed: true,
    parameters: &[
        Parameter { name: "clients", default: "128", meaning: "agents at a time: 16 for each of eight servers" },
        Parameter { name: "requests", default: "4000", meaning: "about 30 for each agent" },
        CONVERSATIONS,
        Parameter { default: "20", ..RAMP },
        Parameter { default: "12000", ..SYSTEM },
        Parameter { default: "200..4000~800~800", ..DYNAMIC },
        Parameter { default: "normal:3..60~20~10", ..TURNS },
        Parameter { default: "30..8000~1200~1500", ..INPUT },
        Parameter { default: "10..800~120~120", ..OUTPUT },
        Parameter { default: "0.1..30~2~3", ..THINK },
        CONTEXT,
        VOLATILE,
    ],
    build: |values, seed| Ok(Box::new(Conversations::read(values, seed)?)),
};
