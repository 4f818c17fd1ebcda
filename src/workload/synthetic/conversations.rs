//! Closed loop: clients that hold conversations, one after the other. Every turn quotes all that was said before it.
//!
//! A prompt is, in this order: a volatile head (if asked for), the instructions and tools that all conversations share,
//! the instructions of this conversation, its earlier questions and answers, the new question. A conversation's texts,
//! lengths and pauses follow from its number alone; which client holds it follows from who was free first.

use super::arrivals::{system, user};
use super::parameters::{MAX_TOKENS, Parameter, Values};
use crate::draw::Spread;
use crate::names::{TextKind, name, name_of_pair};
use crate::pace::seconds;
use crate::{PromptPart, Request, Speaker, TraceError, Workload};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use attache_types::rng::{PickRng, for_request};
use std::collections::HashMap;
use std::time::Duration;

/// Names of turns have room for a million of them.
const MAX_TURNS: f64 = 1_000_000.0;
/// Tokens of a volatile head: Claude Code's billing header has some thirty.
const VOLATILE_TOKENS: u32 = 32;

// The parameters that all such workloads have. Where the default is empty, each puts the one of
// its source in its place.

/// How long the clients take to begin.
pub(super) const RAMP: Parameter =
    Parameter { name: "ramp", default: "", meaning: "seconds over which the clients begin" };
/// How many conversations there are.
pub(super) const CONVERSATIONS: Parameter = Parameter {
    name: "conversations",
    default: "0",
    meaning: "conversations that may begin, 0 for as many as `requests` take",
};
/// What all have in common.
pub(super) const SYSTEM: Parameter =
    Parameter { name: "system", default: "", meaning: "tokens that all conversations share" };
/// What each has for itself.
pub(super) const DYNAMIC: Parameter =
    Parameter { name: "dynamic", default: "", meaning: "tokens of each conversation's own instructions" };
/// Number of turns of a conversation.
pub(super) const TURNS: Parameter = Parameter { name: "turns", default: "", meaning: "turns of a conversation" };
/// Length of a user message, tokens.
pub(super) const INPUT: Parameter = Parameter { name: "input", default: "", meaning: "tokens of a question" };
/// Length of a response, tokens.
pub(super) const OUTPUT: Parameter = Parameter { name: "output", default: "", meaning: "tokens of an answer" };
/// How soon it goes on.
pub(super) const THINK: Parameter =
    Parameter { name: "think", default: "", meaning: "seconds from an answer to the next question" };
/// Where they end: the context of Llama 3.1.
pub(super) const CONTEXT: Parameter = Parameter {
    name: "context",
    default: "131072",
    meaning: "tokens that a model takes; a conversation that would need more is over",
};
/// Whether their heads change from request to request.
pub(super) const VOLATILE: Parameter =
    Parameter { name: "volatile", default: "false", meaning: "begin every prompt with 32 unique tokens" };

/// What the conversations of one workload are like.
struct ConversationShape {
    clients: u64,
    requests: u64,
    /// Conversations that may still begin.
    conversations: u64,
    /// Seconds over which the clients begin.
    ramp: f64,
    system: u32,
    dynamic: Spread,
    turns: Spread,
    input: Spread,
    output: Spread,
    /// Pause between a response and the next turn, seconds.
    think: Spread,
    context: u32,
    volatile: u32,
}

/// One that is under way.
struct OpenConversation {
    number: u64,
    turn: u64,
    turns: u64,
    /// All but the volatile head.
    said: Vec<PromptPart>,
    said_tokens: u32,
    answer: Piece,
    rng: PickRng,
}

/// Conversations of a closed or open loop, turn by turn.
pub(super) struct Conversations {
    shape: ConversationShape,
    seed: u64,
    /// Number of clients that have begun.
    clients: u64,
    /// Conversations that have begun so far.
    conversations: u64,
    /// Number of the next request.
    number: u64,
    /// By the number of the request that is on its way.
    open: HashMap<u64, OpenConversation>,
}

impl Conversations {
    /// Reads `clients`, `requests`, `conversations`, `ramp`, `system`, `dynamic`, `turns`, `input`, `output`, `think`,
    /// `context` and `volatile`.
    pub(super) fn read(values: &Values<'_>, seed: u64) -> Result<Self, ParamError> {
        let shape = ConversationShape {
            clients: values.whole("clients", 1..=1_000_000)?.into(),
            requests: values.whole("requests", 1..=1_000_000_000)?.into(),
            conversations: match values.whole("conversations", 0..=1_000_000_000)? {
                0 => u64::MAX,
                conversations => conversations.into(),
            },
            ramp: values.number("ramp", 0.0..=86_400.0)?,
            system: values.tokens("system", 0)?,
            dynamic: values.spread("dynamic", 0.0..=MAX_TOKENS)?,
            turns: values.spread("turns", 1.0..=MAX_TURNS)?,
            input: values.spread("input", 1.0..=MAX_TOKENS)?,
            output: values.spread("output", 1.0..=MAX_TOKENS)?,
            think: values.spread("think", 0.0..=86_400.0)?,
            context: values.tokens("context", 1)?,
            volatile: if values.flag("volatile")? { VOLATILE_TOKENS } else { 0 },
        };
        let turn = shape.input.ends().1 + shape.output.ends().1;
        let least = f64::from(shape.volatile) + f64::from(shape.system) + turn;
        if f64::from(shape.context) < least {
            let allowed = format!("at least {least} is allowed, so that the first turn fits");
            return Err(ParamError::value("context", shape.context, &allowed));
        }
        Ok(Self { shape, seed, clients: 0, conversations: 0, number: 0, open: HashMap::new() })
    }

    /// A new one, when there may be more.
    fn begin(&mut self) -> Option<OpenConversation> {
        let number = self.conversations;
        if number >= self.shape.conversations {
            return None;
        }
        self.conversations += 1;
        let shape = &self.shape;
        let mut rng = for_request(self.seed, number);
        // Instructions that would leave no room for a turn are cut.
        let turn = (shape.input.ends().1 + shape.output.ends().1) as u32;
        let room = shape.context.saturating_sub(shape.system).saturating_sub(shape.volatile).saturating_sub(turn);
        let dynamic = shape.dynamic.draw_whole(&mut rng, 0).min(room);
        let said = [
            system(name(self.seed, TextKind::System, 0), shape.system),
            system(name(self.seed, TextKind::Dynamic, number), dynamic),
        ];
        let said: Vec<PromptPart> = said.into_iter().filter(|part| part.piece.tokens > 0).collect();
        let turns = shape.turns.draw_whole(&mut rng, 1).into();
        let answer = Piece::new(0, 0);
        Some(OpenConversation { number, turn: 0, turns, said, said_tokens: shape.system + dynamic, answer, rng })
    }

    /// The next turn of `conversation`, or the first one of a new conversation when that is over or its context full.
    fn ask(&mut self, mut conversation: OpenConversation, at: Timestamp) -> Option<Request> {
        if self.number >= self.shape.requests {
            return None;
        }
        if conversation.turn >= conversation.turns {
            conversation = self.begin()?;
        }
        let (mut input, mut output) = self.lengths(&mut conversation);
        if self.tokens_after(&conversation, input, output) > u64::from(self.shape.context) {
            conversation = self.begin()?;
            (input, output) = self.lengths(&mut conversation);
        }
        let request = self.number;
        self.number += 1;
        let named = |kind: TextKind| name_of_pair(self.seed, kind, conversation.number, conversation.turn);
        conversation.said.push(user(named(TextKind::Question), input));
        conversation.answer = Piece::new(named(TextKind::Answer), output);
        conversation.said_tokens = conversation.said_tokens.saturating_add(input);
        conversation.turn += 1;
        let mut prompt = Vec::with_capacity(conversation.said.len() + 1);
        if self.shape.volatile > 0 {
            prompt.push(system(name(self.seed, TextKind::Volatile, request), self.shape.volatile));
        }
        prompt.extend_from_slice(&conversation.said);
        let (answer, session) = (conversation.answer, Some(conversation.number));
        self.open.insert(request, conversation);
        Some(Request {
            number: request,
            at,
            prompt,
            answer,
            adapter: None,
            session,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        })
    }

    /// Of the next question and its answer.
    fn lengths(&self, conversation: &mut OpenConversation) -> (u32, u32) {
        let input = self.shape.input.draw_whole(&mut conversation.rng, 1);
        (input, self.shape.output.draw_whole(&mut conversation.rng, 1))
    }

    fn tokens_after(&self, conversation: &OpenConversation, input: u32, output: u32) -> u64 {
        [self.shape.volatile, conversation.said_tokens, input, output].into_iter().map(u64::from).sum()
    }
}

impl Workload for Conversations {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        if self.clients >= self.shape.clients {
            return Ok(None);
        }
        let at = seconds(self.shape.ramp * self.clients as f64 / self.shape.clients as f64);
        self.clients += 1;
        let conversation = self.begin();
        Ok(conversation.and_then(|conversation| self.ask(conversation, at)))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        let Some(mut conversation) = self.open.remove(&number) else { return Vec::new() };
        let answer = conversation.answer;
        conversation.said.push(PromptPart::text(Speaker::Assistant, answer));
        conversation.said_tokens = conversation.said_tokens.saturating_add(answer.tokens);
        let think = self.shape.think.draw(&mut conversation.rng);
        self.ask(conversation, now.after(Duration::from_secs_f64(think))).into_iter().collect()
    }

    /// That of the conversation: which turn of it comes when is the servers' doing.
    fn pair(&self, number: u64) -> u64 {
        self.open.get(&number).map_or(number, |conversation| conversation.number)
    }

    fn total(&self) -> Option<u64> {
        let ConversationShape { requests, conversations, system, volatile, .. } = self.shape;
        if conversations == u64::MAX {
            return Some(requests);
        }
        // Otherwise it is known only when all have as many turns, none of which the context cuts off.
        let (fewest, most) = self.shape.turns.ends();
        let [dynamic, input, output] =
            [&self.shape.dynamic, &self.shape.input, &self.shape.output].map(|spread| spread.ends().1);
        let longest = f64::from(system) + f64::from(volatile) + dynamic + most * (input + output);
        let is_known = fewest == most && longest <= f64::from(self.shape.context);
        is_known.then(|| requests.min(conversations.saturating_mul(most.round() as u64)))
    }
}
