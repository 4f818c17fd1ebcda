//! Programs of agents: their times, and requests by what their agent had waited for. Called by [`super::Tally`]. Pure.

use super::latency::Latency;
use crate::served::{Ending, Served};
use attache_types::clock::Timestamp;
use attache_types::program::{ProgramTurn, TurnCause};
use std::collections::HashMap;
use std::time::Duration;

/// 60 s. A pause of at least this length is long: a person reads, or a build runs.
pub const LONG_PAUSE: Duration = Duration::from_secs(60);

/// A program whose requests have all ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedProgram {
    /// Number of its requests.
    pub turns: u32,
    /// From the arrival of its first request to the end of its last response.
    pub time: Duration,
    /// Sum of the durations of its requests, by the same sum if the program has a server for itself. `None` if that is
    /// not known.
    pub slowdown: Option<f64>,
}

/// A program with requests that have not ended.
#[derive(Clone, Debug)]
struct OpenProgram {
    first: Timestamp,
    last: Timestamp,
    ended: u32,
    unanswered: u32,
    /// Sum of the durations of its requests, and the same sum if it has a server for itself.
    busy: Duration,
    alone: Option<Duration>,
    /// By agent, the server of its last response.
    servers: Vec<Option<u32>>,
}

impl OpenProgram {
    fn new(first: Timestamp) -> Self {
        Self {
            first,
            last: first,
            ended: 0,
            unanswered: 0,
            busy: Duration::ZERO,
            alone: Some(Duration::ZERO),
            servers: Vec::new(),
        }
    }

    /// Notes the server of a response. Returns whether the agent had another one before.
    fn moves_to(&mut self, agent: u32, server: u32) -> bool {
        let agent = agent as usize;
        if self.servers.len() <= agent {
            self.servers.resize(agent + 1, None);
        }
        let before = self.servers.get_mut(agent).and_then(|last| last.replace(server));
        before.is_some_and(|before| before != server)
    }
}

/// Programs of one run. Memory grows with the number of programs, not with that of requests.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    open: HashMap<u64, OpenProgram>,
    finished: Vec<FinishedProgram>,
    incomplete: u64,
    started: u64,
    first: Latency,
    tool: Latency,
    person: Latency,
    long_pause: Latency,
    recomputed: u64,
    moves: u64,
}

impl Programs {
    /// Counts a request that has ended.
    pub(super) fn add(&mut self, served: &Served, turn: ProgramTurn) {
        self.add_first_token(served, turn);
        let started = &mut self.started;
        let program = self.open.entry(turn.program).or_insert_with(|| {
            *started += 1;
            OpenProgram::new(served.at)
        });
        program.first = program.first.min(served.at);
        program.last = program.last.max(served.at.after(served.total));
        program.ended += 1;
        if served.ending == Ending::Answered {
            program.busy += served.total;
            program.alone = program.alone.zip(served.alone).map(|(sum, alone)| sum + alone);
            self.recomputed += u64::from(turn.known_tokens.saturating_sub(served.cached_tokens));
            self.moves += u64::from(served.endpoint.is_some_and(|server| program.moves_to(turn.agent, server)));
        } else {
            program.unanswered += 1;
        }
        if program.ended == turn.turns
            && let Some(program) = self.open.remove(&turn.program)
        {
            self.finish(&program, turn.turns);
        }
    }

    fn add_first_token(&mut self, served: &Served, turn: ProgramTurn) {
        let Some(time) = served.first_token else { return };
        match turn.cause {
            TurnCause::Start => return self.first.add(time),
            TurnCause::Tool => self.tool.add(time),
            TurnCause::Person => self.person.add(time),
        }
        if turn.pause >= LONG_PAUSE {
            self.long_pause.add(time);
        }
    }

    fn finish(&mut self, program: &OpenProgram, turns: u32) {
        if program.unanswered > 0 {
            self.incomplete += 1;
            return;
        }
        let alone = program.alone.map(|alone| alone.as_secs_f64()).filter(|alone| *alone > 0.0);
        let slowdown = alone.map(|alone| program.busy.as_secs_f64() / alone);
        self.finished.push(FinishedProgram { turns, time: program.last.since(program.first), slowdown });
    }

    /// Programs whose requests were all answered, in the order of their ends.
    #[must_use]
    pub fn finished(&self) -> &[FinishedProgram] {
        &self.finished
    }

    /// Programs with a rejected or lost request.
    #[must_use]
    pub fn incomplete(&self) -> u64 {
        self.incomplete + self.open.values().filter(|program| program.unanswered > 0).count() as u64
    }

    /// All programs of which a request has ended.
    #[must_use]
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Time to first token of the first requests of programs and of sub-agents.
    #[must_use]
    pub fn first(&self) -> &Latency {
        &self.first
    }

    /// Time to first token of requests after the result of a tool.
    #[must_use]
    pub fn tool(&self) -> &Latency {
        &self.tool
    }

    /// Time to first token of requests after a message of a person.
    #[must_use]
    pub fn person(&self) -> &Latency {
        &self.person
    }

    /// Time to first token of requests after a pause of at least [`LONG_PAUSE`]; they are in the others too.
    #[must_use]
    pub fn long_pause(&self) -> &Latency {
        &self.long_pause
    }

    /// Prompt tokens that earlier prompts of the same program had and that were computed again.
    #[must_use]
    pub fn recomputed(&self) -> u64 {
        self.recomputed
    }

    /// Times that a response to an agent came from another server than the one before.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(program: u64, turns: u32, agent: u32, cause: TurnCause) -> ProgramTurn {
        ProgramTurn { program, turns, agent, cause, pause: Duration::from_secs(5), known_tokens: 600 }
    }

    /// A response of 2 s at a time, on a server; alone it takes 1 s.
    fn served(at: u64, server: u32, turn: ProgramTurn) -> Served {
        Served {
            number: at,
            pair: at,
            at: Timestamp(at * 1_000_000_000),
            endpoint: Some(server),
            prompt_tokens: 1_000,
            expected_cached_tokens: 0,
            cached_tokens: 400,
            generated_tokens: 10,
            first_token: Some(Duration::from_secs(1)),
            total: Duration::from_secs(2),
            preemptions: 0,
            ending: Ending::Answered,
            handover: None,
            fell_back: false,
            turn: Some(turn),
            alone: Some(Duration::from_secs(1)),
        }
    }

    fn counted(all: &[Served]) -> Programs {
        let mut programs = Programs::default();
        all.iter().for_each(|served| programs.add(served, served.turn.expect("each has one")));
        programs
    }

    #[test]
    fn program_lasts_from_its_first_request_to_its_last_response() {
        let (start, tool) = (TurnCause::Start, TurnCause::Tool);
        let programs = counted(&[
            served(10, 0, turn(0, 3, 0, start)),
            served(50, 1, turn(1, 1, 0, start)),
            served(20, 1, turn(0, 3, 0, tool)),
            served(30, 1, turn(0, 3, 1, start)),
        ]);
        let times: Vec<_> = programs.finished().iter().map(|p| (p.turns, p.time.as_secs(), p.slowdown)).collect();
        assert_eq!(times, [(1, 2, Some(2.0)), (3, 22, Some(2.0))]);
        assert_eq!((programs.started(), programs.incomplete()), (2, 0));
        assert_eq!(programs.moves(), 1, "the sub-agent began on another server, which is no move");
        assert_eq!(programs.recomputed(), 4 * 200);
    }

    #[test]
    fn program_with_an_unanswered_request_has_no_time() {
        let start = TurnCause::Start;
        let refused = Served { ending: Ending::Refused, first_token: None, ..served(1, 0, turn(0, 2, 0, start)) };
        let programs =
            counted(&[refused, served(9, 0, turn(0, 2, 0, TurnCause::Tool)), served(3, 0, turn(1, 2, 0, start))]);
        assert_eq!((programs.started(), programs.incomplete(), programs.finished().len()), (2, 1, 0));
        assert_eq!(counted(&[refused]).incomplete(), 1, "whether or not other requests of it were played");
    }

    #[test]
    fn slowdown_needs_the_duration_alone_of_all_requests() {
        let start = turn(0, 2, 0, TurnCause::Start);
        let unknown = Served { alone: None, ..served(1, 0, start) };
        let programs = counted(&[unknown, served(9, 0, start)]);
        assert_eq!(programs.finished()[0].slowdown, None);
    }

    #[test]
    fn first_tokens_are_counted_by_cause_and_long_pauses_also_apart() {
        let long = |cause| ProgramTurn { pause: LONG_PAUSE, ..turn(0, 9, 0, cause) };
        let programs = counted(&[
            served(1, 0, long(TurnCause::Start)),
            served(2, 0, turn(0, 9, 0, TurnCause::Tool)),
            served(3, 0, long(TurnCause::Tool)),
            served(4, 0, long(TurnCause::Person)),
        ]);
        let counts = [programs.first(), programs.tool(), programs.person(), programs.long_pause()].map(Latency::count);
        assert_eq!(counts, [1, 2, 1, 2]);
    }
}
