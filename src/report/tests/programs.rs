//! Figures of programs in all forms of a report.

use super::*;
use crate::metric::find;
use attache_types::program::{ProgramTurn, TurnCause};

/// Twelve programs of two requests, and one of seven. Responses take `seconds`, alone they take one second.
fn program_run(policy: &str, seconds: u64) -> RunResult {
    let mut tally = Tally::new(2);
    for program in 0..13 {
        let turns = if program == 12 { 7 } else { 2 };
        for i in 0..turns {
            let number = program * 10 + i;
            let cause = if i == 0 { TurnCause::Start } else { TurnCause::Tool };
            let (agent, pause) = (0, Duration::from_secs(60));
            let program = ProgramTurn { program, turns: turns as u32, agent, cause, pause, known_tokens: 500 };
            tally.add(&Served {
                number,
                pair: number,
                at: Timestamp((program.program * 1_000 + i * 100) * 1_000_000_000),
                endpoint: Some((i % 2) as u32),
                prompt_tokens: 1_000,
                expected_cached_tokens: 400,
                cached_tokens: 400,
                generated_tokens: 101,
                first_token: Some(Duration::from_millis(500)),
                total: Duration::from_secs(seconds),
                preemptions: 0,
                ending: Ending::Answered,
                handover: None,
                fell_back: false,
                turn: Some(program),
                alone: Some(Duration::from_secs(1)),
            });
        }
    }
    let RunResult { cell, servers, simulated, took, .. } = run(policy, "1.0", 1);
    RunResult {
        policy: policy.to_owned(),
        workload: "agents".to_owned(),
        cell,
        tally,
        decisions: 1,
        servers,
        failures: BTreeMap::new(),
        simulated,
        took,
    }
}

fn document() -> Document {
    let runs = vec![program_run("random", 4), program_run("least-request", 2)];
    Report { runs, ..report() }.document()
}

#[test]
fn table_of_programs_follows_that_of_requests() {
    let text = table::render(&document(), TableStyle::default());
    let programs = text.split("\n\n").nth(1).unwrap();
    assert_eq!(
        programs,
        "\
policy         program mean, s  p50  p99  2-6 turns  7-27  28+  ratio  TTFT first, s   tool  person  long pause  recomputed  moves  slowdown mean   p99  Jain  complete
random                     142  104  604        104   604    -   1.00          0.500  0.500       -       0.500      10.0 %   1.38           4.00  4.00  1.00  13 of 13
least-request              140  102  602        102   602    -  0.986          0.500  0.500       -       0.500      10.0 %   1.38           2.00  2.00  1.00  13 of 13
"
    );
}

#[test]
fn figures_of_programs_are_in_all_forms() {
    let document = document();
    let read: Document = serde_json::from_str(&document.to_json().unwrap()).unwrap();
    assert_eq!(read.runs[1].programs, document.runs[1].programs);
    let run = &document.runs[1];
    for (name, value) in [
        ("program_mean", 1_826.0 / 13.0),
        ("program_p50", 102.0),
        ("program_p99", 602.0),
        ("ttft_first", 0.5),
        ("ttft_tool", 0.5),
        ("ttft_long_pause", 0.5),
        ("recomputed_tokens", 3_100.0),
        ("moves", 18.0 / 13.0),
        ("slowdown_mean", 2.0),
        ("slowdown_jain", 1.0),
    ] {
        let got = (find(name).unwrap().of)(run).unwrap();
        assert!((got - value).abs() < 1e-9, "{name}: {got}");
    }
    assert_eq!((find("ttft_person").unwrap().of)(run), None);
    let lengths = run.programs.as_ref().unwrap().by_turns.iter().map(|l| (l.least_turns, l.time_seconds.count));
    assert_eq!(lengths.collect::<Vec<_>>(), [(2, 12), (7, 1), (28, 0)]);
    assert!(html::render(&document).contains("<summary>Programs of agents</summary>"));
    assert!(markdown::render(&document).contains("\nPrograms of agents:\n\n| policy | program mean, s |"));
}

#[test]
fn workload_without_programs_has_no_table_of_them() {
    let document = document_once();
    assert!(document.runs.iter().all(|run| run.programs.is_none()));
    assert!(!table::render(document, TableStyle::default()).contains("program"));
    assert!(!html::render(document).contains("Programs of agents"));
    assert!(!markdown::render(document).contains("Programs of agents"));
}
