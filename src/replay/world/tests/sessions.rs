//! Sessions of agents in virtual time.

use super::*;
use attache_types::program::TurnCause;

/// A session of a main agent and two sub-agents. All prompts begin with 640 tokens of tools.
fn session() -> Box<dyn Workload> {
    let row = |at: f64, tokens: u32, rest: &str| {
        format!(
            r#"{{"at":{at},"session":7,"parts":[["system","tools",640],["user","a",{tokens}]],"answer":["x{at}",50]{rest}}}"#
        )
    };
    let rows = [
        "{\"format\":\"attache.trace.v1\",\"sessions\":true}".to_owned(),
        row(0.5, 3_000, ""),
        row(2.0, 100, r#","pause":1,"agent":1"#),
        row(2.5, 5_000, r#","pause":0.25,"agent":2"#),
        row(9.0, 3_333, r#","pause":2,"cause":"tool""#),
    ];
    trace::read(Cursor::new(rows.join("\n").into_bytes()), &trace::Options::default()).unwrap()
}

fn played(servers: usize) -> Vec<Served> {
    let (mut workload, mut observer) = (session(), Ended::default());
    let fleet = Fleet { roles: vec![None; servers], ..Fleet::default() };
    fleet.world(&mut *workload, &mut observer).run().unwrap();
    observer.0.sort_by_key(|served| served.pair);
    observer.0
}

#[test]
fn turns_follow_the_simulated_ends_of_what_they_wait_for() {
    let served = played(2);
    let end = |i: usize| served[i].at.after(served[i].total);
    assert_eq!(served.iter().map(|served| served.pair).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(served[0].at, seconds(0.5));
    assert_eq!(served[1].at, end(0).after(Duration::from_secs(1)));
    assert_eq!(served[2].at, end(0).after(Duration::from_millis(250)));
    assert_eq!(served[3].at, end(1).max(end(2)).after(Duration::from_secs(2)));
    let turns = served.iter().map(|served| served.turn.unwrap()).collect::<Vec<_>>();
    assert_eq!(turns.iter().map(|turn| turn.agent).collect::<Vec<_>>(), [0, 1, 2, 0]);
    assert_eq!(turns.iter().map(|turn| turn.known_tokens).collect::<Vec<_>>(), [0, 740, 3_640, 3_973]);
    assert_eq!((turns[2].cause, turns[3].cause), (TurnCause::Start, TurnCause::Tool));
}

#[test]
fn program_that_is_alone_takes_as_long_as_alone() {
    for served in played(1) {
        // The second sub-agent begins while the first response to the first one is under way, or the other way round.
        if [0, 3].contains(&served.pair) {
            assert_eq!(Some(served.total), served.alone, "{served:?}");
        }
    }
}
