use crate::sessions::{Session, SessionTrace};
use crate::trace::{Options, sessions};
use crate::{PromptPart, Speaker, TraceError};
use attache_types::program::TurnCause;
use std::io::Cursor;
use std::time::Duration;

fn read(text: &str) -> Result<SessionTrace, TraceError> {
    Ok(sessions(&|| Ok(Box::new(Cursor::new(text.to_owned()))), &Options::default())?
        .expect("rows with requests are sessions"))
}

/// A main agent with three requests and a sub-agent, in blocks of 16 tokens. All prompts begin with 40 tokens of tools
/// and system prompt.
const ROW: &str = concat!(
    r#"{"id":"a","block_size":16,"hash_id_scope":"local","tool_tokens":20,"system_tokens":20,"requests":["#,
    r#"{"t":0.0,"type":"n","model":"opus","in":70,"out":5,"hash_ids":[1,2,3,4],"input_types":["text"],"stop":"tool_use","api_time":2.5,"think_time":0.0},"#,
    r#"{"t":9.5,"type":"subagent","agent_id":"agent_001","duration_ms":6500,"tool_tokens":8,"system_tokens":8,"requests":["#,
    r#"{"t":0.0,"type":"s","model":"haiku","in":20,"out":3,"hash_ids":[9],"input_types":["text"],"stop":"tool_use","api_time":1.0},"#,
    r#"{"t":4.0,"type":"s","model":"haiku","in":33,"out":3,"hash_ids":[9,10],"stop":"end_turn","api_time":2.0}]},"#,
    r#"{"t":12.0,"type":"n","model":"opus","in":90,"out":0,"hash_ids":[1,2,3,4,11],"input_types":["tool_result"],"api_time":1.0,"think_time":9.0},"#,
    r#"{"t":100.0,"type":"n","model":"opus","in":80,"out":4,"hash_ids":[1,2,20,21,22],"input_types":["text"]}]}"#
);

fn session() -> Session {
    read(ROW).unwrap().sessions.remove(0)
}

#[test]
fn session_is_its_requests_with_pauses_and_causes() {
    let session = session();
    let turn = |i: usize| &session.turns[i];
    let seconds = |time: Duration| time.as_secs_f64();
    let times: Vec<f64> = session.turns.iter().map(|turn| turn.request.at.0 as f64 / 1e9).collect();
    assert_eq!(times, [0.0, 3.0, 7.0, 12.0, 100.0], "the sub-agent began 6.5 s before its `t`");
    let pauses: Vec<f64> = session.turns.iter().map(|turn| seconds(turn.pause)).collect();
    assert_eq!(pauses, [0.0, 0.5, 3.0, 3.0, 87.0]);
    let after: Vec<Vec<u32>> = session.turns.iter().map(|turn| turn.after.to_vec()).collect();
    assert_eq!(after, [vec![], vec![0], vec![1], vec![0, 2], vec![3]]);
    let causes: Vec<TurnCause> = session.turns.iter().map(|turn| turn.cause).collect();
    let (start, tool, person) = (TurnCause::Start, TurnCause::Tool, TurnCause::Person);
    assert_eq!(causes, [start, start, tool, tool, person], "without `input_types`, `stop` before decides");
    let answers: Vec<u32> = session.turns.iter().map(|turn| turn.request.answer.tokens).collect();
    assert_eq!(answers, [5, 3, 3, 1, 4], "a response has at least one token");
    assert_eq!(turn(0).request.headers, []);
    let header = &turn(1).request.headers[0];
    assert_eq!((&*header.0, &*header.1), ("x-claude-code-agent-id", "agent_001"));
}

#[test]
fn prompts_are_tools_system_blocks_and_a_rest_of_their_own() {
    let session = session();
    let parts = |i: usize| {
        let part = |part: &PromptPart| (part.role, part.piece.from, part.piece.tokens);
        session.turns[i].request.prompt.iter().map(part).collect::<Vec<_>>()
    };
    let (system, user) = (Speaker::System, Speaker::User);
    // 40 tokens of tools and system prompt are two whole blocks.
    assert_eq!(parts(0), [(system, 0, 20), (system, 0, 12), (user, 48, 32), (user, 0, 6)]);
    assert_eq!(parts(3), [(system, 0, 20), (system, 0, 12), (user, 48, 32), (user, 176, 16), (user, 0, 10)]);
    assert_eq!(parts(4), [(system, 0, 20), (system, 0, 12), (user, 320, 48)]);
    assert_eq!(parts(1), [(system, 0, 8), (system, 0, 8), (user, 0, 4)]);
    let prompt = |i: usize| &session.turns[i].request.prompt;
    assert_eq!(prompt(0)[..3], prompt(3)[..3]);
    assert_ne!(prompt(0)[3].piece.name, prompt(1)[2].piece.name, "rests are shared with nothing");
    assert_ne!(prompt(0)[0].piece.name, prompt(1)[0].piece.name, "another model has other tools");
}

#[test]
fn sessions_share_tools_and_system_prompt_of_equal_length_and_no_other_block() {
    let other = ROW.replace(r#""id":"a""#, r#""id":"b""#);
    let longer = other.replace(r#""system_tokens":20"#, r#""system_tokens":21"#);
    let global = other.replace("local", "global");
    let trace = read(&[ROW, &other, &longer, &global, &global].join("\n")).unwrap();
    let names = |session: usize| {
        let prompt = &trace.sessions[session].turns[0].request.prompt;
        [0, 1, 2].map(|part| prompt[part].piece.name)
    };
    assert_eq!((names(0)[..2] == names(1)[..2], names(0)[2] == names(1)[2]), (true, false));
    assert_eq!((names(0)[0] == names(2)[0], names(0)[1] == names(2)[1]), (true, false), "only the tools are shared");
    assert_eq!(names(3), names(4), "global ids are equal in all sessions");
    assert_ne!(trace.sessions[0].turns[0].request.session, trace.sessions[1].turns[0].request.session);
}

#[test]
fn bad_sessions_are_named_by_row_and_field() {
    let ids = "`requests[0].hash_ids` has 4 ids; 90 tokens are 5 whole blocks of 16, 6 with the last one";
    for (from, to, message) in [
        (r#""block_size":16"#, r#""block_size":0"#, "`block_size` is 0; a whole number from 1 to 65,536 is allowed"),
        ("\"local\"", "\"file\"", "`hash_id_scope` is \"file\"; \"local\" or \"global\" is allowed"),
        (
            r#""tool_tokens":8"#,
            r#""tool_tokens":-8"#,
            "`requests[1].tool_tokens` is -8; a whole number from 0 to 10,000,000 is allowed",
        ),
        (r#""in":70"#, r#""in":90"#, ids),
        (
            r#""t":4.0"#,
            r#""t":"x""#,
            "`requests[1].requests[1].t` is \"x\"; a number of seconds from 0 to 3,155,760,000 is allowed",
        ),
        (r#""t":12.0"#, r#""t":-1"#, "`requests[2].t` is -1; a number of seconds from 0 to 3,155,760,000 is allowed"),
        (r#""t":100.0"#, r#""t":11"#, "`requests[3].t` is 11; a time not before that of the request before is allowed"),
        (
            r#""type":"subagent""#,
            r#""type":"agent""#,
            "`requests[1].type` is \"agent\"; \"n\", \"s\" or \"subagent\" is allowed",
        ),
        (
            r#""duration_ms":6500,"#,
            "",
            "`requests[1].duration_ms` is missing; a number of milliseconds from 0 to 3,155,760,000,000 is allowed",
        ),
        (r#"["tool_result"]"#, "7", "`requests[2].input_types` is 7; a list of texts is allowed"),
        (
            r#""requests":[{"t":0.0,"type":"n""#,
            r#""requests":7,"x":[{"t":0.0,"type":"n""#,
            "`requests` is 7; a list of requests is allowed",
        ),
    ] {
        assert!(ROW.contains(from), "{from}");
        let error = read(&format!("{ROW}\n{}\n", ROW.replacen(from, to, 1))).unwrap_err().to_string();
        assert_eq!(error, format!("row 2: {message}"));
    }
    assert_eq!(read(r#"{"block_size":16,"requests":[]}"#).unwrap_err().to_string(), "the trace has no requests");
}
