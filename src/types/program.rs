//! The place of a request in the program of an agent: workloads give it, reports count by it.

use std::time::Duration;

/// What an agent waited for before it sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TurnCause {
    /// Nothing of its own: the first request of a program or of a sub-agent.
    Start,
    /// The result of a tool.
    Tool,
    /// A message of a person.
    Person,
}

/// The place of a request in a program: one task of an agent, with its sub-agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramTurn {
    /// Number of the program in its workload.
    pub program: u64,
    /// Requests of the program, those of its sub-agents included.
    pub turns: u32,
    /// Number of the agent in its program; 0 is the main agent.
    pub agent: u32,
    /// What the agent waited for.
    pub cause: TurnCause,
    /// From the end of the response before, or of the last sub-agent, to this request.
    pub pause: Duration,
    /// Tokens at the start of the prompt that earlier prompts of the program had too.
    pub known_tokens: u32,
}
