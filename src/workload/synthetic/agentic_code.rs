//! `agentic-code`: coding agents. Large tools and instructions in common, the code of a repository for each session,
//! many short turns with only a tool's run between them.
//!
//! The figures are those of llm-d's code generation study (dynamic system prompt of 3,000 to 100,000 tokens with mean
//! 55,000; 2 to 20 turns with mean 6; 100 to 10,000 tokens in with mean 1,500; 50 to 4,000 out with mean 800; 10 to 100
//! sessions, of which 60 were the knee of its best policy), with the shared part and the input's deviation of
//! `agentic_code_generation` and the tool latency of `guide_p2p_1`. Shapes and the other deviations are not published:
//! lognormal for lengths, normal for turns and instructions. `agentic_code_generation` itself, which few caches can
//! hold, has clients=40, dynamic=10000..990000~160000~233000, turns=normal:1..3000~540~500, output=50..10000~425~400
//! and context=1000000.

use super::Descriptor;
use super::conversations::{
    CONTEXT, CONVERSATIONS, Conversations, DYNAMIC, INPUT, OUTPUT, RAMP, THINK, TURNS, VOLATILE,
};
use super::parameters::Parameter;

pub(super) const WORKLOAD: Descriptor = Descriptor {
    name: "agentic-code",
    summary: "60 coding agents with 3,000 shared tokens of tools, 55,000 of their own, and 6 turns of 1,500.",
    source: "llm-d's sticky-until-saturated study and llm-d-benchmark `agentic_code_generation`",
    is_closed: true,
    parameters: &[
        Parameter {
            name: "clients",
            default: "60",
            meaning: "sessions at a time: the knee of the source's best policy",
        },
        Parameter { name: "requests", default: "1200", meaning: "20 for each client, about three sessions" },
        CONVERSATIONS,
        Parameter { default: "30", ..RAMP },
        Parameter {
            name: "system",
            default: "3000",
            meaning: "tokens that all conversations share: tools and instructions",
        },
        Parameter { default: "normal:3000..100000~55000~25000", ..DYNAMIC },
        Parameter { default: "normal:2..20~6~4", ..TURNS },
        Parameter { default: "100..10000~1500~1200", ..INPUT },
        Parameter { default: "50..4000~800~600", ..OUTPUT },
        Parameter { default: "1..2", ..THINK },
        CONTEXT,
        VOLATILE,
    ],
    build: |values, seed| Ok(Box::new(Conversations::read(values, seed)?)),
};
