use super::*;
use crate::{Speaker, Workload};
use attache_sim::content::Piece;
use std::collections::BTreeMap;
use std::sync::Arc;

fn at(seconds: f64) -> Timestamp {
    Timestamp((seconds * 1e9) as u64)
}

/// A request at a time of its session: system text, and so many tokens of the text `name`.
fn request(seconds: f64, name: u64, tokens: u32) -> Request {
    Request {
        number: 0,
        at: at(seconds),
        prompt: vec![
            PromptPart::text(Speaker::System, Piece::new(1, 50)),
            PromptPart::text(Speaker::User, Piece::new(name, tokens)),
        ],
        answer: Piece::new(900 + name, 10),
        adapter: None,
        session: Some(name),
        tenant: None,
        priority: 0,
        headers: Vec::new(),
        turn: None,
    }
}

fn entry(seconds: f64, agent: u32, took: f64) -> Entry {
    let tokens = 100 + (seconds * 10.0) as u32;
    let (cause, took) = (TurnCause::Tool, Duration::from_secs_f64(took));
    Entry { request: request(seconds, 7 + u64::from(agent), tokens), agent, parent: 0, cause, took, pause: None }
}

/// A turn, two sub-agents of two and one requests, and a last turn that waits for both.
fn family() -> Session {
    let entries =
        vec![entry(0.0, 0, 2.0), entry(3.0, 1, 4.0), entry(10.0, 1, 5.0), entry(4.0, 2, 30.0), entry(36.0, 0, 1.0)];
    Session::new(None, link(entries))
}

fn player(sessions: Vec<Session>, options: SessionOptions) -> SessionPlayer {
    SessionPlayer::new(Arc::new(SessionTrace { sessions, id_header: None }), options)
}

/// Plays all; a response takes `took` seconds. Returns requests by their pair, with their times in seconds.
fn played(player: &mut SessionPlayer, took: f64) -> BTreeMap<u64, (f64, Request)> {
    let mut events: BTreeMap<(Timestamp, u64), Request> = BTreeMap::new();
    while let Some(request) = player.next().unwrap() {
        events.insert((request.at, request.number), request);
    }
    let mut seen = BTreeMap::new();
    while let Some(((start, number), request)) = events.pop_first() {
        seen.insert(player.pair(number), (start.0 as f64 / 1e9, request));
        // Requests that end later than others begin: ends are in the order of starts, as all take as long.
        for next in player.ended(number, start.after(Duration::from_secs_f64(took))) {
            events.insert((next.at, next.number), next);
        }
    }
    seen
}

fn times(played: &BTreeMap<u64, (f64, Request)>) -> Vec<f64> {
    played.values().map(|(at, _)| *at).collect()
}

#[test]
fn sub_agents_start_after_their_parent_which_then_waits_for_them() {
    let session = family();
    let after: Vec<Vec<u32>> = session.turns.iter().map(|turn| turn.after.to_vec()).collect();
    assert_eq!(after, [vec![], vec![0], vec![1], vec![0], vec![0, 2, 3]]);
    let pauses: Vec<u64> = session.turns.iter().map(|turn| turn.pause.as_secs()).collect();
    assert_eq!(pauses, [0, 1, 3, 2, 2], "the last pause is from the end of the second sub-agent");
    let causes: Vec<TurnCause> = session.turns.iter().map(|turn| turn.cause).collect();
    let (start, tool) = (TurnCause::Start, TurnCause::Tool);
    assert_eq!(causes, [start, start, tool, start, tool]);
}

#[test]
fn parent_does_not_wait_for_an_agent_that_works_on() {
    let background = vec![entry(0.0, 0, 2.0), entry(3.0, 1, 4.0), entry(5.0, 0, 1.0), entry(9.0, 1, 1.0)];
    let after: Vec<Vec<u32>> = link(background).iter().map(|turn| turn.after.to_vec()).collect();
    assert_eq!(after, [vec![], vec![0], vec![0], vec![1]]);
}

#[test]
fn closed_loop_sends_each_turn_its_pause_after_what_it_waits_for() {
    let mut player = player(vec![family()], SessionOptions::default());
    assert_eq!(player.total(), Some(5));
    let all = played(&mut player, 10.0);
    // Both sub-agents start after 10 s; the first needs two turns, until 34 s.
    assert_eq!(times(&all), [0.0, 11.0, 24.0, 12.0, 36.0]);
    let place = |pair: u64| all[&pair].1.turn.unwrap();
    assert_eq!((place(2).program, place(2).turns, place(2).agent), (0, 5, 1));
    assert_eq!(place(4).pause, Duration::from_secs(2));
    let numbers: Vec<u64> = all.values().map(|(_, request)| request.number).collect();
    assert_eq!(numbers, [0, 1, 3, 2, 4], "numbers are in the order of sending");
}

#[test]
fn open_loop_sends_at_recorded_times_whatever_responses_take() {
    let mut player = player(vec![family()], SessionOptions { open_loop: true, ..SessionOptions::default() });
    let all = played(&mut player, 1_000.0);
    assert_eq!(times(&all), [0.0, 3.0, 10.0, 4.0, 36.0]);
}

#[test]
fn long_pauses_are_cut_in_both_loops() {
    let session = || Session::new(None, link(vec![entry(0.0, 0, 1.0), entry(500.0, 0, 1.0), entry(503.0, 0, 1.0)]));
    let options = SessionOptions { max_pause: Duration::from_secs(60), ..SessionOptions::default() };
    assert_eq!(times(&played(&mut player(vec![session()], options), 5.0)), [0.0, 65.0, 72.0]);
    let open = SessionOptions { open_loop: true, ..options };
    assert_eq!(times(&played(&mut player(vec![session()], open), 5.0)), [0.0, 61.0, 64.0]);
}

/// Sessions of one request each, with texts 10, 11, ….
fn singles(count: u64) -> Vec<Session> {
    let turns = |i| link(vec![Entry { request: request(0.0, 10 + i, 100), ..entry(0.0, 0, 1.0) }]);
    (0..count).map(|i| Session::new(None, turns(i))).collect()
}

#[test]
fn seed_chooses_sessions_without_repeats_until_all_were_played() {
    let chosen = |seed, count| {
        let options = SessionOptions { count: Some(count), seed, ..SessionOptions::default() };
        let all = played(&mut player(singles(8), options), 1.0);
        all.values().map(|(_, request)| request.prompt[1].piece.name).collect::<Vec<_>>()
    };
    assert_eq!(chosen(1, 5), chosen(1, 5));
    assert_ne!(chosen(1, 5), chosen(2, 5));
    let mut first: Vec<u64> = chosen(3, 20);
    let (round, rest) = (first.drain(..8).collect::<HashSet<_>>(), first);
    assert_eq!(round, (10..18).collect());
    assert_eq!(rest.iter().collect::<HashSet<_>>().len(), 12, "a session that is played again has other texts");
    assert!(rest.iter().all(|name| !round.contains(name)));
}

#[test]
fn repeated_session_shares_only_its_system_text() {
    let options = SessionOptions { count: Some(2), ..SessionOptions::default() };
    let all = played(&mut player(singles(1), options), 1.0);
    let [first, second] = [0, 1].map(|pair| all[&pair].1.clone());
    assert_eq!(first.prompt[0], second.prompt[0]);
    assert_ne!(first.prompt[1], second.prompt[1]);
    assert!(first.answer != second.answer && first.session != second.session);
}

#[test]
fn sessions_begin_as_recorded_or_as_asked() {
    let begins = |at: Option<Timestamp>, arrival| {
        let sessions = singles(4).into_iter().map(|session| Session { at, ..session }).collect();
        times(&played(&mut player(sessions, SessionOptions { arrival, ..SessionOptions::default() }), 1.0))
    };
    assert_eq!(begins(None, None), [0.0, 30.0, 60.0, 90.0]);
    assert_eq!(begins(Some(at(7.5)), None), [7.5; 4]);
    assert_eq!(begins(Some(at(7.5)), Some(Arrival::Every(Duration::from_secs(2)))), [0.0, 2.0, 4.0, 6.0]);
    let gaps = begins(None, Some(Arrival::gaps(0.1, 1.0).unwrap()));
    assert!(gaps.windows(2).all(|pair| pair[0] < pair[1]) && gaps[3] < 400.0, "{gaps:?}");
    assert!(Arrival::gaps(0.0, 1.0).is_err() && Arrival::gaps(1.0, f64::NAN).is_err());
}

#[test]
fn clients_send_the_id_of_the_session_as_a_uuid() {
    let trace = SessionTrace { sessions: singles(2), id_header: Some("x-claude-code-session-id") };
    let mut player = SessionPlayer::new(Arc::new(trace), SessionOptions::default());
    let all = played(&mut player, 1.0);
    let ids: Vec<String> = all.values().map(|(_, request)| request.headers[0].1.to_string()).collect();
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.len() == 36 && &id[14..15] == "4"), "{ids:?}");
}

#[test]
fn what_waited_for_a_dropped_request_waits_for_what_that_waited_for() {
    assert_eq!(family().within(300).turns.len(), 4, "the last turn has 520 tokens");
    let mut long = family();
    long.turns[1].request.prompt.push(PromptPart::text(Speaker::User, Piece::new(5, 10_000)));
    let session = long.within(1_000);
    let after: Vec<Vec<u32>> = session.turns.iter().map(|turn| turn.after.to_vec()).collect();
    assert_eq!(after, [vec![], vec![0], vec![0], vec![0, 1, 2]]);
    assert_eq!(session.turns[1].cause, TurnCause::Start, "it is the first request of its agent now");
    assert_eq!(family().within(9), Session::default());
    let trace = SessionTrace { sessions: vec![family(), long], id_header: None };
    assert_eq!((trace.requests(), trace.within(1_000).requests(), trace.within(9).sessions.len()), (10, 9, 0));
}

#[test]
fn known_tokens_are_the_longest_start_that_an_earlier_prompt_had() {
    let prompt = |pieces: &[(u64, u32, u32)]| -> Vec<PromptPart> {
        let part = |(name, from, tokens): &(u64, u32, u32)| {
            PromptPart::text(Speaker::User, Piece { name: *name, from: *from, tokens: *tokens })
        };
        pieces.iter().map(part).collect()
    };
    let a = prompt(&[(1, 0, 100), (2, 0, 50)]);
    let b = prompt(&[(1, 0, 64), (1, 64, 36), (2, 0, 20), (3, 0, 9)]);
    assert_eq!((common_tokens(&a, &b), common_tokens(&b, &a), common_tokens(&a, &a)), (120, 120, 150));
    assert_eq!(common_tokens(&a, &prompt(&[(1, 1, 100)])), 0);
    assert_eq!(common_tokens(&a, &[]), 0);
    let turn = |seconds: f64, prompt: &[PromptPart]| {
        let entry = entry(seconds, 0, 1.0);
        Entry { request: Request { prompt: prompt.to_vec(), ..entry.request }, ..entry }
    };
    let session = Session::new(None, link(vec![turn(0.0, &a), turn(5.0, &prompt(&[(4, 0, 9)])), turn(9.0, &b)]));
    assert_eq!(session.known, [0, 0, 120]);
}
