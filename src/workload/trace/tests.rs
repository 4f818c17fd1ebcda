use super::*;
use crate::names::{TextKind, name, name_of_block};
use crate::{PromptPart, Speaker};
use attache_sim::content::Piece;
use attache_types::program::TurnCause;
use proptest::prelude::*;
use std::collections::HashSet;
use std::io::Cursor;

fn parsed(text: impl Into<Vec<u8>>) -> Result<Vec<Request>, TraceError> {
    let mut workload = read(Cursor::new(text.into()), &Options::default())?;
    let mut requests = Vec::new();
    while let Some(request) = workload.next()? {
        requests.push(request);
    }
    Ok(requests)
}

fn sample(file: &str) -> Vec<Request> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(file);
    let mut workload = open(&path, &Options::default()).unwrap();
    std::iter::from_fn(|| workload.next().unwrap()).collect()
}

fn seconds(requests: &[Request]) -> Vec<f64> {
    requests.iter().map(|request| request.at.0 as f64 / 1e9).collect()
}

fn lengths(requests: &[Request]) -> Vec<(u32, u32)> {
    requests.iter().map(|request| (request.prompt_tokens(), request.answer.tokens)).collect()
}

#[test]
fn mooncake_is_read_whole() {
    let requests = sample("conversation-2000.jsonl");
    assert_eq!(requests.len(), 2_000);
    let sum = |of: fn(&Request) -> u32| requests.iter().map(|r| u64::from(of(r))).sum::<u64>();
    assert_eq!(sum(Request::prompt_tokens), 27_441_774);
    assert_eq!(sum(|r| r.answer.tokens), 704_602);
    let blocks: Vec<u64> = requests.iter().flat_map(|r| r.prompt.iter().map(|part| part.piece.name)).collect();
    assert_eq!(blocks.len(), 54_559);
    assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), 38_788);
    assert_eq!(requests.last().unwrap().at, Timestamp(669_000 * 1_000_000));
    assert!(requests.iter().zip(0..).all(|(r, number)| r.number == number));
    let answers: HashSet<u64> = requests.iter().map(|r| r.answer.name).collect();
    assert_eq!(answers.len(), 2_000);
    assert!(blocks.iter().all(|block| !answers.contains(block)), "an answer is no block");
}

#[test]
fn a_mooncake_prompt_is_its_blocks_the_last_one_cut() {
    let row = r#"{"timestamp": 27.5, "input_length": 1030, "output_length": 0, "hash_ids": [0, 7, 18446744073709551615], "type": "x"}"#;
    let requests = parsed(format!("{row}\n{}", row.replace("27.5", "30"))).unwrap();
    let part = |role, id, tokens| PromptPart::text(role, Piece::new(name_of_block(id), tokens));
    let prompt = [part(Speaker::System, 0, 512), part(Speaker::User, 7, 512), part(Speaker::User, u64::MAX, 6)];
    assert_eq!(requests[0].prompt, prompt);
    assert_eq!(requests[1].prompt, prompt);
    assert_eq!(requests[0].answer, Piece::new(name(0, TextKind::Answer, 0), 1), "an answer has a token at least");
    assert_eq!(seconds(&requests), [0.0, 0.0025], "times count from the first row");
}

#[test]
fn another_block_size_can_be_set() {
    let row = r#"{"timestamp": 0, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]}"#;
    let options = Options { block_tokens: Some(16), ..Options::default() };
    let request = read(Cursor::new(row), &options).unwrap().next().unwrap().unwrap();
    assert_eq!(request.prompt.iter().map(|p| p.piece.tokens).collect::<Vec<_>>(), [16, 16, 1]);
    let error = read(Cursor::new(row), &Options { block_tokens: Some(0), ..options }).err().unwrap().to_string();
    let message = "the block size (`--trace-block-tokens`) is 0; a whole number from 1 to 65536 is allowed";
    assert_eq!(error, message);
    // The flag that the message names makes the row readable.
    for (row, advice) in [
        (row.to_owned(), "`--trace-block-tokens 16` fits this row"),
        (row.replace("33", "1000"), "`--trace-block-tokens 334` fits this row"),
        (row.replace("33", "2"), "no block size fits this row"),
    ] {
        let error = parsed(row).unwrap_err().to_string();
        assert!(error.ends_with(&format!("; {advice}")), "{error}");
    }
}

#[test]
fn bailian_has_blocks_of_16_tokens_seconds_and_conversations() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/traces/qwen-bailian.jsonl");
    let open_loop =
        Options { sessions: SessionOptions { open_loop: true, ..Default::default() }, ..Default::default() };
    let mut workload = open(&path, &open_loop).unwrap();
    let requests: Vec<Request> = std::iter::from_fn(|| workload.next().unwrap()).collect();
    assert_eq!(seconds(&requests), [0.0, 1.114, 59.5, 61.25]);
    assert_eq!(lengths(&requests), [(50, 700), (33, 90), (81, 40), (16, 1)]);
    assert_eq!(requests.iter().map(|r| r.session).collect::<Vec<_>>(), [Some(11), Some(12), Some(11), Some(14)]);
    let tokens = |r: &Request| r.prompt.iter().map(|part| part.piece.tokens).collect::<Vec<_>>();
    assert_eq!((tokens(&requests[0]), tokens(&requests[1])), (vec![16, 34], vec![16, 17]));
    assert_eq!(requests[2].turn.unwrap().known_tokens, 48, "the next turn begins with the first one");
    assert_eq!(requests[1].prompt[0], requests[0].prompt[0], "conversations may begin equally");
}

#[test]
fn bailian_turn_follows_the_response_to_its_parent() {
    let row = |chat: u64, parent: i64, at: f64| {
        format!(
            r#"{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {at}, "input_length": 16, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [{chat}]}}"#
        )
    };
    let rows = [row(1, -1, 5.0), row(2, -1, 6.0), row(3, 1, 9.0), row(4, 1, 10.0), row(5, 77, 11.0)].join("\n");
    let mut workload = read(Cursor::new(rows.clone()), &Options::default()).unwrap();
    let mut next = || workload.next().unwrap().map(|request| (request.number, request.at.0 / 1_000_000));
    assert_eq!([next(), next(), next(), next()], [Some((0, 0)), Some((1, 1_000)), Some((2, 6_000)), None]);
    let ends = |workload: &mut dyn Workload, number, at| -> Vec<_> {
        let requests = workload.ended(number, Timestamp(at)).into_iter();
        requests.map(|request| (request.session, request.at.0, request.turn.map(|turn| turn.cause))).collect()
    };
    let person = Some(TurnCause::Person);
    let both = [(Some(1), 24_000_000_000, person), (Some(1), 25_000_000_000, person)];
    assert_eq!(ends(&mut *workload, 0, 20_000_000_000), both);
    assert_eq!(ends(&mut *workload, 2, 21_000_000_000), []);
    let error = parsed(format!("{rows}\n{}", row(6, -1, 3.0))).unwrap_err().to_string();
    assert_eq!(error, "row 6: it comes 8 s before the row before it; rows must be in the order of time");
}

#[test]
fn bailian_turn_whose_parent_is_not_in_the_trace_is_no_first_turn() {
    let row = |chat: u64, parent: i64, input: u32, turn: &str| {
        format!(
            r#"{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {chat}, "input_length": {input}, "output_length": 3, "type": "text"{turn}, "hash_ids": [{chat}]}}"#
        )
    };
    let later = r#", "turn": 5"#;
    let rows = [
        row(1, -1, 15, later),
        row(2, 77, 16, later),
        row(3, 2, 9, later),
        row(4, -1, 9, r#", "turn": 1"#),
        row(5, -1, 9, ""),
    ];
    let (start, person) = (TurnCause::Start, TurnCause::Person);
    let text = rows.join("\n");
    let trace = sessions(&|| Ok(Box::new(Cursor::new(text.clone()))), &Options::default()).unwrap().unwrap();
    let causes = |trace: &SessionTrace| -> Vec<Vec<TurnCause>> {
        trace.sessions.iter().map(|session| session.turns.iter().map(|turn| turn.cause).collect()).collect()
    };
    assert_eq!(causes(&trace), [vec![person], vec![person, person], vec![start], vec![start]]);
    // Without the longest request, the session of the second begins with its next turn.
    assert_eq!(causes(&trace.within(18)), [vec![person], vec![person], vec![start], vec![start]]);
    let bad = row(6, -1, 9, r#", "turn": -1"#);
    let error = parsed(format!("{text}\n{bad}")).unwrap_err().to_string();
    assert_eq!(error, "row 6: `turn` is -1; a whole number is allowed");
}

#[test]
fn native_sessions_are_played_in_a_closed_loop() {
    let row = |at: f64, rest: &str| {
        format!(r#"{{"at":{at},"parts":[["user","a",64]],"answer":["b",5],"session":"s"{rest}}}"#)
    };
    let rows = [
        "{\"format\":\"attache.trace.v1\",\"sessions\":true}".to_owned(),
        row(1.0, r#","headers":{"x-claude-code-session-id":"s"}"#),
        row(3.0, r#","pause":1,"agent":"explore""#),
        row(5.0, r#","pause":0.5,"agent":"explore","cause":"tool""#),
        row(9.0, r#","pause":2"#),
    ];
    let text = rows.join("\n");
    let mut workload = read(Cursor::new(text.clone()), &Options::default()).unwrap();
    let first = workload.next().unwrap().unwrap();
    assert_eq!((first.at, &*first.headers[0].1, first.turn.unwrap().turns), (Timestamp(1_000_000_000), "s", 4));
    assert_eq!(workload.next().unwrap(), None);
    let mut end = |number, at: u64| {
        let requests = workload.ended(number, Timestamp(at * 1_000_000_000)).into_iter();
        requests.map(|r| (r.at.0 / 100_000_000, r.turn.unwrap().agent, r.turn.unwrap().cause)).collect::<Vec<_>>()
    };
    assert_eq!(end(0, 10), [(110, 1, TurnCause::Start)]);
    assert_eq!(end(1, 20), [(205, 1, TurnCause::Tool)]);
    assert_eq!(end(2, 30), [(320, 0, TurnCause::Person)], "the main agent waits for the sub-agent");
    for (from, to, message) in [
        (r#","pause":2"#, "", "`pause` is missing; a number of seconds from 0 to 3,155,760,000 is allowed"),
        (r#","pause":2"#, r#","pause":2,"cause":"cron""#, "`cause` is \"cron\"; \"tool\" or \"person\" is allowed"),
        (
            r#","pause":2"#,
            r#","pause":2,"agent":"x","parent":"y""#,
            "`parent` is \"y\"; an agent of an earlier row of the session is allowed",
        ),
        (r#""at":9"#, r#""at":2"#, "it comes 3 s before the row before it; rows must be in the order of time"),
    ] {
        let error = parsed(text.replacen(from, to, 1)).unwrap_err().to_string();
        assert_eq!(error, format!("row 5: {message}"));
    }
    let without = text.replacen(r#","session":"s","pause":2"#, r#","pause":2"#, 1);
    let error = parsed(without).unwrap_err().to_string();
    assert_eq!(error, "row 5: `session` is missing; a whole number or text is allowed");
    let error = parsed(text.replacen(",\"sessions\":true", "", 1)).unwrap_err().to_string();
    assert_eq!(error, "row 3: `pause` is 1; it is allowed if the first row has \"sessions\":true");
    let error = parsed(text.replacen("\"sessions\":true", "\"sessions\":1", 1)).unwrap_err().to_string();
    assert_eq!(error, "`sessions` is 1; true or false is allowed");
}

#[test]
fn bad_bailian_rows_are_named() {
    let good = r#"{"chat_id": 3, "parent_chat_id": -1, "timestamp": 5.5, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2]}"#;
    for (from, to, message) in [
        ("\"chat_id\": 3", "\"chat_id\": -3", "`chat_id` is -3; a whole number is allowed"),
        ("-1", "-2", "`parent_chat_id` is -2; a whole number, or -1 for none, is allowed"),
        ("\"parent_chat_id\": -1, ", "", "`parent_chat_id` is missing; a whole number, or -1 for none, is allowed"),
        ("5.5", "-1.5", "`timestamp` is -1.5; a number of seconds from 0 to 3,155,760,000 is allowed"),
        (
            "[1, 2]",
            "[1]",
            "`hash_ids` has 1 ids, but 20 tokens are 2 blocks of 16; `--trace-block-tokens 32` fits this row",
        ),
    ] {
        let error = parsed(format!("{good}\n{}\n", good.replacen(from, to, 1))).unwrap_err().to_string();
        assert_eq!(error, format!("row 2: {message}"));
    }
}

#[test]
fn azure_images_are_parts_of_the_prompt() {
    let requests = sample("traces/azure-2025-images.csv");
    assert_eq!(seconds(&requests), [0.0, 1.25, 2.0, 2.5]);
    assert_eq!(lengths(&requests), [(1_300, 9), (400, 20), (950, 7), (9, 1)], "images are part of the context");
    let images = |r: &Request| r.images().iter().map(|image| image.tokens).collect::<Vec<_>>();
    assert_eq!(requests.iter().map(images).collect::<Vec<_>>(), [vec![576; 1], vec![], vec![237; 3], vec![1; 8]]);
    let names: HashSet<u64> = requests.iter().flat_map(|r| r.prompt.iter().map(|part| part.piece.name)).collect();
    assert_eq!(names.len(), 1 + 3 + 8 + 4, "nothing is shared");
    let row = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,9,9,4\n";
    let error = parsed(row).unwrap_err().to_string();
    assert_eq!(error, "row 2: `NumImages` is 9; a whole number from 0 to 8 is allowed");
}

#[test]
fn fields_that_no_loader_reads_are_named() {
    let unused = |text: &str| unused(Cursor::new(text.as_bytes().to_vec())).unwrap();
    let burstgpt = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n7,x,9,9,18,y\n";
    assert_eq!(unused(burstgpt), ["Model", "Total tokens", "Log Type"]);
    assert_eq!(unused("TIMESTAMP,numimages,ContextTokens,GeneratedTokens,Region,\n"), ["Region"]);
    let mooncake = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1], "delay": 3}"#;
    assert_eq!(unused(mooncake), ["delay"]);
    assert_eq!(unused(&mooncake.replace("delay", "chat_id")), Vec::<String>::new());
    assert_eq!(unused("{\"format\":\"attache.trace.v1\"}\n"), Vec::<String>::new());
    assert_eq!(unused(""), Vec::<String>::new());
}

#[test]
fn azure_of_both_years_is_read() {
    let requests = sample("traces/azure-2023.csv");
    assert_eq!(seconds(&requests), [0.0, 0.052, 0.098_189, 1.020_04]);
    assert_eq!(lengths(&requests), [(4808, 10), (3180, 8), (110, 27), (7433, 14)]);
    let names: HashSet<u64> = requests.iter().flat_map(|r| [r.prompt[0].piece.name, r.answer.name]).collect();
    assert_eq!(names.len(), 8, "nothing is shared");
    let requests = sample("traces/azure-2024.csv");
    assert_eq!(seconds(&requests), [0.0, 0.517_335, 0.517_335]);
    assert_eq!(lengths(&requests), [(2162, 5), (2399, 1), (76, 15)]);
}

#[test]
fn burstgpt_without_sessions_shares_nothing() {
    let requests = sample("traces/burstgpt.csv");
    assert_eq!(seconds(&requests), [0.0, 40.0, 113.0, 180.5]);
    assert_eq!(lengths(&requests), [(472, 18), (1087, 230), (417, 276), (1360, 1)]);
    assert!(requests.iter().all(|r| r.session.is_none() && r.prompt.len() == 1));
}

#[test]
fn burstgpt_sessions_quote_their_history() {
    let requests = sample("traces/burstgpt-sessions.csv");
    assert_eq!(
        lengths(&requests),
        [(100, 50), (30, 5), (190, 20), (60, 6), (300, 40), (80, 10)],
        "prompts are as long as the rows say"
    );
    assert_eq!(
        requests.iter().map(|r| r.session).collect::<Vec<_>>(),
        [Some(7), Some(8), Some(7), None, Some(7), Some(7)]
    );
    let shape = |r: &Request| r.prompt.iter().map(|p| (p.role, p.piece.tokens)).collect::<Vec<_>>();
    assert_eq!(shape(&requests[2]), [(Speaker::User, 100), (Speaker::Assistant, 50), (Speaker::User, 40)]);
    assert_eq!(requests[2].prompt[0], requests[0].prompt[0]);
    assert_eq!(requests[2].prompt[1].piece, requests[0].answer);
    assert_eq!(requests[4].prompt[..3], requests[2].prompt[..]);
    assert_eq!(requests[4].prompt[3].piece, requests[2].answer);
    // 80 tokens can't hold the 340 that were said.
    assert_eq!(shape(&requests[5]), [(Speaker::User, 80)]);
    assert_ne!(requests[5].prompt[0].piece.name, requests[0].prompt[0].piece.name);
}

#[test]
fn the_native_format_is_read() {
    let requests = sample("traces/native.jsonl");
    assert_eq!(requests.iter().map(|r| r.at.0).collect::<Vec<_>>(), [0, 250_000_001, 20_000_000_000]);
    assert_eq!(lengths(&requests), [(7200, 800), (8020, 7), (1, 1)]);
    let (first, second) = (&requests[0], &requests[1]);
    assert_eq!(first.prompt[..2], second.prompt[..2]);
    assert_eq!(first.prompt[1].piece, Piece::new(17, 1200));
    assert_eq!(second.prompt[2], PromptPart::text(Speaker::Assistant, first.answer));
    assert_eq!(second.prompt[3].piece.from, 100);
    assert_eq!(second.answer, Piece { name: 99, from: 5, tokens: 7 });
    assert_eq!(
        (first.adapter.as_deref(), first.session, first.tenant.as_deref()),
        (Some("sql"), Some(4), Some("shop"))
    );
    assert_eq!((requests[2].adapter.as_deref(), requests[2].session), (None, None));
}

/// Each with the good row before it, so that it is row 2 (row 3 where there is a heading).
#[test]
fn bad_mooncake_rows_are_named() {
    let good = r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}"#;
    let input = "a whole number from 1 to 10,000,000 is allowed";
    let output = "a whole number from 0 to 10,000,000 is allowed";
    let time = "a number of milliseconds from 0 to 3,155,760,000,000 is allowed";
    let ids = "a list of whole numbers is allowed";
    for (from, to, message) in [
        ("5,", "4,", "it comes 0.001 s before the row before it; rows must be in the order of time".to_owned()),
        ("\"timestamp\": 5, ", "", format!("`timestamp` is missing; {time}")),
        ("5,", "null,", format!("`timestamp` is missing; {time}")),
        ("5,", "-5,", format!("`timestamp` is -5; {time}")),
        ("5,", "1e300,", format!("`timestamp` is 1e300; {time}")),
        ("5,", "\"5\",", format!("`timestamp` is \"5\"; {time}")),
        ("\"input_length\": 600, ", "", format!("`input_length` is missing; {input}")),
        ("600", "-3", format!("`input_length` is -3; {input}")),
        ("600", "0", format!("`input_length` is 0; {input}")),
        ("600", "600.5", format!("`input_length` is 600.5; {input}")),
        ("600", "99999999999999999999999", format!("`input_length` is 99999999999999999999999; {input}")),
        ("600", "true", format!("`input_length` is true; {input}")),
        ("\"output_length\": 3, ", "", format!("`output_length` is missing; {output}")),
        ("3,", "-1,", format!("`output_length` is -1; {output}")),
        ("3,", "10000001,", format!("`output_length` is 10000001; {output}")),
        ("3,", "[3],", format!("`output_length` is [3]; {output}")),
        (", \"hash_ids\": [1, 2]", "", format!("`hash_ids` is missing; {ids}")),
        ("[1, 2]", "7", format!("`hash_ids` is 7; {ids}")),
        ("[1, 2]", "[1, -2]", format!("`hash_ids` is [1, -2]; {ids}")),
        ("[1, 2]", "[1, \"2\"]", format!("`hash_ids` is [1, \"2\"]; {ids}")),
        (
            "[1, 2]",
            "[1]",
            "`hash_ids` has 1 ids, but 600 tokens are 2 blocks of 512; `--trace-block-tokens 1024` fits this row"
                .to_owned(),
        ),
        (
            "[1, 2]",
            "[]",
            "`hash_ids` has 0 ids, but 600 tokens are 2 blocks of 512; no block size fits this row".to_owned(),
        ),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good);
        let error = parsed(format!("{good}\n{bad}\n")).unwrap_err().to_string();
        assert_eq!(error, format!("row 2: {message}"));
    }
    for broken in ["NaN", "{\"timestamp\": NaN}", "[]", "{", "{\"timestamp\": 5, \"timestamp\": 6}"] {
        let error = parsed(format!("{good}\n{broken}")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("row 2: it is {broken}: ")), "{error}");
    }
}

#[test]
fn bad_csv_rows_are_named() {
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,9,9\n";
    let date = "a date from 1970 to 2069 such as 2023-11-16 18:17:03.9799600 is allowed";
    let prompt = "a whole number from 1 to 10,000,000 is allowed";
    let answer = "a whole number from 0 to 10,000,000 is allowed";
    let burstgpt = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n7,x,9,9,18,y\n";
    let time = "a number of seconds from 0 to 3,155,760,000 is allowed";
    for (head, row, message) in [
        (
            azure,
            "2024-05-10 00:00:00,9,9",
            "it comes 1 s before the row before it; rows must be in the order of time".to_owned(),
        ),
        (azure, ",9,9", format!("`TIMESTAMP` is empty; {date}")),
        (azure, "yesterday,9,9", format!("`TIMESTAMP` is yesterday; {date}")),
        (azure, "2024-05-10 00:00:01", format!("`ContextTokens` is missing; {prompt}")),
        (azure, "2024-05-10 00:00:01,,9", format!("`ContextTokens` is empty; {prompt}")),
        (azure, "2024-05-10 00:00:01,0,9", format!("`ContextTokens` is 0; {prompt}")),
        (azure, "2024-05-10 00:00:01,NaN,9", format!("`ContextTokens` is NaN; {prompt}")),
        (azure, "2024-05-10 00:00:01,9", format!("`GeneratedTokens` is missing; {answer}")),
        (azure, "2024-05-10 00:00:01,9,-9", format!("`GeneratedTokens` is -9; {answer}")),
        (azure, "2024-05-10 00:00:01,9,1e9", format!("`GeneratedTokens` is 1e9; {answer}")),
        (
            burstgpt,
            "6,x,9,9,18,y",
            "it comes 1 s before the row before it; rows must be in the order of time".to_owned(),
        ),
        (burstgpt, "inf,x,9,9,18,y", format!("`Timestamp` is inf; {time}")),
        (burstgpt, "-8,x,9,9,18,y", format!("`Timestamp` is -8; {time}")),
        (burstgpt, "8", format!("`Request tokens` is missing; {prompt}")),
        (burstgpt, "8,x,nine,9,18,y", format!("`Request tokens` is nine; {prompt}")),
        (burstgpt, "8,x,9,99999999999,18,y", format!("`Response tokens` is 99999999999; {answer}")),
    ] {
        let error = parsed(format!("{head}{row}\n")).unwrap_err().to_string();
        assert_eq!(error, format!("row 3: {message}"), "{row}");
    }
}

#[test]
fn bad_native_rows_are_named() {
    let good = r#"{"at":5,"parts":[["user",1,2]],"answer":[3,4],"adapter":"a","session":6,"tenant":"t","priority":-7,"headers":{"x-a":"b"}}"#;
    let tokens = "a whole number from 1 to 10,000,000 is allowed";
    let time = "a number of seconds from 0 to 3,155,760,000 is allowed";
    let parts = "a list of [role, name, tokens] with at least one is allowed";
    let (roles, image) =
        (r#""system", "user", "assistant" or "image" is allowed"#, r#"["image", name, tokens] is allowed"#);
    let headers = "an object with header names in lower case and values of printable ASCII is allowed";
    for (from, to, message) in [
        ("5,", "4.5,", "it comes 0.5 s before the row before it; rows must be in the order of time".to_owned()),
        ("\"at\":5,", "", format!("`at` is missing; {time}")),
        ("5,", "-5,", format!("`at` is -5; {time}")),
        ("5,", "\"5\",", format!("`at` is \"5\"; {time}")),
        ("5,", "9e99,", format!("`at` is 9e99; {time}")),
        ("\"parts\":[[\"user\",1,2]],", "", format!("`parts` is missing; {parts}")),
        ("[[\"user\",1,2]]", "[]", format!("`parts` is []; {parts}")),
        ("[[\"user\",1,2]]", "7", format!("`parts` is 7; {parts}")),
        (
            "\"user\",1,2",
            "\"user\",1",
            "`parts` is [\"user\",1]; [role, name, tokens] or [role, name, tokens, from] is allowed".to_owned(),
        ),
        ("\"user\"", "\"tool\"", format!("`role` is \"tool\"; {roles}")),
        ("\"user\"", "7", format!("`role` is 7; {roles}")),
        ("\"user\",1,2", "\"image\",1,2,3", format!("`parts` is [\"image\",1,2,3]; {image}")),
        ("1,2", "-1,2", "`name` in `parts` is -1; a whole number or text is allowed".to_owned()),
        ("1,2", "1,0", format!("`tokens` in `parts` is 0; {tokens}")),
        ("1,2", "1,\"2\"", format!("`tokens` in `parts` is \"2\"; {tokens}")),
        ("1,2", "1,2,-1", "`from` in `parts` is -1; a whole number from 0 to 4,294,967,293 is allowed".to_owned()),
        (
            "[\"user\",1,2]",
            "[\"user\",1,9999999],[\"user\",1,9999999]",
            "`parts` has 19999998 tokens; at most 10000000 are allowed".to_owned(),
        ),
        (",\"answer\":[3,4]", "", "`answer` is missing; [name, tokens] or [name, tokens, from] is allowed".to_owned()),
        ("[3,4]", "[3]", "`answer` is [3]; [name, tokens] or [name, tokens, from] is allowed".to_owned()),
        ("[3,4]", "[3,0]", format!("`tokens` in `answer` is 0; {tokens}")),
        ("[3,4]", "[3.5,4]", "`name` in `answer` is 3.5; a whole number or text is allowed".to_owned()),
        ("\"a\"", "7", "`adapter` is 7; text is allowed".to_owned()),
        ("6", "-6", "`session` is -6; a whole number or text is allowed".to_owned()),
        ("\"t\"", "[]", "`tenant` is []; text is allowed".to_owned()),
        ("-7", "0.5", "`priority` is 0.5; a whole number of 32 bits is allowed".to_owned()),
        ("x-a", "X-A", format!("`headers` is {{\"X-A\":\"b\"}}; {headers}")),
        ("x-a", "", format!("`headers` is {{\"\":\"b\"}}; {headers}")),
        ("\"b\"", "\"\\n\"", format!("`headers` is {{\"x-a\":\"\\n\"}}; {headers}")),
        ("\"b\"", "1", format!("`headers` is {{\"x-a\":1}}; {headers}")),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good);
        let error = parsed(format!("{{\"format\":\"attache.trace.v1\"}}\n{good}\n{bad}\n")).unwrap_err().to_string();
        assert_eq!(error, format!("row 3: {message}"));
    }
    let unknown = good.replace("tenant", "user");
    let error = parsed(format!("{{\"format\":\"attache.trace.v1\"}}\n{unknown}")).unwrap_err().to_string();
    assert!(error.starts_with("row 2: it is {\"at\":5") && error.contains("unknown field `user`"), "{error}");
}

#[test]
fn traces_that_are_none_are_refused() {
    let known = "allowed are rows with `hash_ids` (Mooncake, Qwen-Bailian), rows with `requests` (sessions), a row with \"format\": \"attache.trace.v1\", and the headings \
                 TIMESTAMP,ContextTokens,GeneratedTokens (Azure) and Timestamp,Request tokens,Response tokens (BurstGPT)";
    for (text, message) in [
        ("", "the trace is empty".to_owned()),
        ("\n \n", "the trace is empty".to_owned()),
        ("hello\nworld", format!("the first row is hello; {known}")),
        ("{\"a\": 1}", format!("the first row is {{\"a\": 1}}; {known}")),
        (
            "{\"format\": \"attache.trace.v2\"}",
            "`format` is \"attache.trace.v2\"; \"attache.trace.v1\" and \"attache.record.v1\" are allowed".to_owned(),
        ),
        ("{\"format\": \"attache.trace.v1\"}\n", "the trace has no requests".to_owned()),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace has no requests".to_owned()),
    ] {
        assert_eq!(parsed(text).unwrap_err().to_string(), message);
    }
    let error = open(Path::new("/does/not/exist.jsonl"), &Options::default()).err().unwrap().to_string();
    assert_eq!(error, "No such file or directory (os error 2)", "the caller names the file");
}

fn piece() -> impl Strategy<Value = Piece> {
    (any::<u64>(), 0_u32..1 << 31, 1_u32..100_000).prop_map(|(name, from, tokens)| Piece { name, from, tokens })
}

prop_compose! {
    fn request()(
        gap in 0_u64..10_000_000_000,
        prompt in prop::collection::vec((prop::sample::select(vec![Speaker::System, Speaker::User, Speaker::Assistant]), piece()), 1..8),
        images in prop::collection::vec((any::<u64>(), 1_u32..10_000), 0..3),
        answer in piece(),
        adapter in prop::option::of("\\PC{0,12}"),
        session in prop::option::of(any::<u64>()),
        tenant in prop::option::of("[\\x00-\\x7f\u{2028}é\"\\\\]{0,8}"),
        priority in prop_oneof![Just(0), any::<i32>()],
        headers in prop::collection::btree_map("[a-z][a-z0-9-]{0,8}", "[ -~]{0,8}", 0..3),
    ) -> Request {
        let mut prompt: Vec<_> = prompt.into_iter().map(|(role, piece)| PromptPart::text(role, piece)).collect();
        prompt.extend(images.into_iter().map(|(name, tokens)| PromptPart::image(name, tokens)));
        let (adapter, tenant) = (adapter.map(Into::into), tenant.map(Into::into));
        let headers = headers.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let (number, at, turn) = (0, Timestamp(gap), None);
        Request { number, at, prompt, answer, adapter, session, tenant, priority, headers, turn }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(mut requests in prop::collection::vec(request(), 1..20)) {
        let mut at = 0;
        let mut writer = native::TraceWriter::new(Vec::new()).unwrap();
        for (request, number) in requests.iter_mut().zip(0..) {
            at += request.at.0;
            request.at = Timestamp(at);
            request.number = number;
            writer.write(request).unwrap();
        }
        prop_assert_eq!(parsed(writer.into_inner()).unwrap(), requests);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = parsed(bytes);
    }

    #[test]
    fn any_rows_are_read_or_refused(
        head in prop::sample::select(vec![
            "{\"format\":\"attache.trace.v1\"}",
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "Timestamp,Session ID,Request tokens,Response tokens",
            "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}",
            "{\"format\":\"attache.trace.v1\",\"sessions\":true}",
            "{\"block_size\":16,\"requests\":[]}",
        ]),
        rows in prop::collection::vec(
            prop_oneof![
                "[0-9.,eE+:TZ -]{0,40}",
                "\\{(\"(at|parts|answer|timestamp|hash_ids|session)\":(-?[0-9]{1,25}|\\[[0-9,]{0,9}\\]|\"x\"|null|1e999),?){0,4}\\}",
                "\\PC{0,60}",
            ],
            0..6,
        ),
    ) {
        if let Err(TraceError::Row { row, .. }) = parsed(format!("{head}\n{}", rows.join("\n"))) {
            prop_assert!(row >= 1 && row <= rows.len() as u64 + 1);
        }
    }

    #[test]
    fn sessions_of_any_lengths_keep_the_rows_lengths(
        rows in prop::collection::vec((0_u64..4, 1_u32..500, 0_u32..200), 1..60)
    ) {
        let mut text = "Timestamp,Session ID,Request tokens,Response tokens\n".to_owned();
        for (session, asked, answered) in &rows {
            text += &format!("1,{session},{asked},{answered}\n");
        }
        let requests = parsed(text).unwrap();
        let wanted: Vec<(u32, u32)> = rows.iter().map(|(_, asked, answered)| (*asked, (*answered).max(1))).collect();
        prop_assert_eq!(lengths(&requests), wanted);
        prop_assert!(requests.iter().all(|r| r.prompt.iter().all(|part| part.piece.tokens > 0)));
    }
}
