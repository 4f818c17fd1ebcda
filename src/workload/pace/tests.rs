use super::*;
use crate::{PromptPart, Speaker};
use attache_sim::content::Piece;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A list of requests; after each answer there are `turns` more, `think` later.
struct List {
    requests: std::vec::IntoIter<Request>,
    number: u64,
    turns: u64,
    think: Duration,
    /// An error in place of the end.
    fails: bool,
}

fn request(number: u64, at: f64, session: Option<u64>) -> Request {
    let part = PromptPart::text(Speaker::User, Piece::new(number, 10));
    let answer = Piece::new(1_000_000 + number, 5);
    Request {
        number,
        at: seconds(at),
        prompt: vec![part],
        answer,
        adapter: None,
        session,
        tenant: None,
        priority: 0,
        headers: Vec::new(),
        turn: None,
    }
}

fn list(times: &[f64]) -> List {
    let requests: Vec<Request> = times.iter().zip(0..).map(|(at, number)| request(number, *at, None)).collect();
    let number = requests.len() as u64;
    List { requests: requests.into_iter(), number, turns: 0, think: Duration::ZERO, fails: false }
}

impl Workload for List {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        match self.requests.next() {
            None if self.fails => Err(TraceError::Format("broken".to_owned())),
            request => Ok(request),
        }
    }

    fn ended(&mut self, _: u64, now: Timestamp) -> Vec<Request> {
        let Some(turns) = self.turns.checked_sub(1) else { return Vec::new() };
        self.turns = turns;
        let number = self.number;
        self.number += 1;
        vec![Request { at: now.after(self.think), ..request(number, 0.0, None) }]
    }

    fn total(&self) -> Option<u64> {
        Some(self.requests.len() as u64)
    }
}

fn drained(workload: &mut dyn Workload) -> Vec<Request> {
    std::iter::from_fn(|| workload.next().unwrap()).collect()
}

fn times(requests: &[Request]) -> Vec<f64> {
    requests.iter().map(|request| request.at.0 as f64 / 1e9).collect()
}

#[test]
fn twice_the_speed_halves_gaps_and_think_times() {
    let mut inner = list(&[0.0, 1.0, 3.0]);
    (inner.turns, inner.think) = (1, Duration::from_secs(1));
    let mut scaled = Scaled::new(Box::new(inner), 2.0).unwrap();
    assert_eq!(scaled.total(), Some(3));
    assert_eq!(times(&drained(&mut scaled)), [0.0, 0.5, 1.5]);
    assert_eq!(times(&scaled.ended(0, seconds(10.0))), [10.5]);
    let mut same = Scaled::new(Box::new(list(&[0.123_456_789])), 1.0).unwrap();
    assert_eq!(drained(&mut same)[0].at, Timestamp(123_456_789));
    for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Scaled::new(Box::new(list(&[])), speed).err().unwrap().to_string();
        assert_eq!(error, format!("`speed` is {speed}; a number above 0 and at most 1000000 is allowed"));
    }
}

#[test]
fn a_limit_cuts_requests_and_time() {
    let inner = || Box::new(list(&[0.0, 1.0, 2.0, 3.0, 4.0]));
    let mut first = Limited::new(inner(), Some(3), None);
    assert_eq!(first.total(), Some(3));
    assert_eq!(times(&drained(&mut first)), [0.0, 1.0, 2.0]);
    let mut until = Limited::new(inner(), None, Some(Duration::from_secs(2)));
    assert_eq!(until.total(), None);
    assert_eq!(times(&drained(&mut until)), [0.0, 1.0]);
    assert!(until.next().unwrap().is_none());
    assert_eq!(drained(&mut Limited::new(inner(), None, None)).len(), 5);
}

/// A conversation of three turns a second apart for each request of the list, which is its session.
struct Chats {
    list: List,
    /// By the number of the request on its way: the conversation and its turn.
    open: HashMap<u64, (u64, u32)>,
}

impl Workload for Chats {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let request = self.list.next()?;
        self.open.extend(request.iter().map(|request| (request.number, (request.number, 1))));
        Ok(request.map(|request| Request { session: Some(request.number), ..request }))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        let (chat, turn) = self.open.remove(&number).expect("every number that has ended was given out");
        let mut requests = self.list.ended(number, now);
        requests.retain(|_| turn < 3);
        for request in &mut requests {
            self.open.insert(request.number, (chat, turn + 1));
            request.session = Some(chat);
        }
        requests
    }
}

#[test]
fn a_limit_leaves_no_gaps_in_the_numbers_of_conversations() {
    let mut list = list(&[0.0, 0.0, 0.0]);
    (list.turns, list.think) = (100, Duration::from_secs(1));
    let mut limited = Limited::new(Box::new(Chats { list, open: HashMap::new() }), None, Some(Duration::from_secs(5)));
    assert_eq!(drained(&mut limited).len(), 3);
    assert_eq!(limited.ended(0, seconds(4.5)), [], "it would come at 5.5 s");
    let shown = |requests: Vec<Request>| requests.first().map(|r| (r.number, r.session, r.at.0 / 1_000_000));
    assert_eq!(shown(limited.ended(1, seconds(1.0))), Some((3, Some(1), 2_000)));
    assert_eq!(shown(limited.ended(2, seconds(1.5))), Some((4, Some(2), 2_500)));
    assert_eq!(shown(limited.ended(3, seconds(2.5))), Some((5, Some(1), 3_500)));
    assert_eq!(shown(limited.ended(4, seconds(3.0))), Some((6, Some(2), 4_000)));
    assert_eq!(shown(limited.ended(5, seconds(3.6))), None, "three turns are over");
}

#[test]
fn resampling_keeps_requests_and_replaces_times() {
    let all = vec![0.0; 40_000];
    for cv in [0.5, 1.0, 3.0] {
        let mut resampled = Resampled::bursty(Box::new(list(&all)), 20.0, cv, 9).unwrap();
        assert_eq!(resampled.total(), Some(40_000));
        let requests = drained(&mut resampled);
        assert!(requests.iter().zip(0..).all(|(r, number)| r.number == number && r.prompt[0].piece.name == number));
        let times = times(&requests);
        assert!(times.is_sorted());
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!((mean * 20.0 - 1.0).abs() < 0.04, "cv {cv}: mean {mean}");
        assert!((deviation / mean / cv - 1.0).abs() < 0.06, "cv {cv}: {}", deviation / mean);
    }
    let run = |seed| times(&drained(&mut Resampled::poisson(Box::new(list(&[0.0; 50])), 5.0, seed).unwrap()));
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    assert!(Resampled::poisson(Box::new(list(&[])), f64::NAN, 1).is_err());
    assert!(Resampled::bursty(Box::new(list(&[])), 1.0, 101.0, 1).is_err());
}

/// Answers every request after a time that depends on its texts; gives the requests in the order in which they were
/// sent, with the moments of their answers.
fn served(workload: &mut dyn Workload, most: usize) -> Vec<(Request, Timestamp)> {
    let mut coming: BinaryHeap<Reverse<(Timestamp, u64)>> = BinaryHeap::new();
    let mut requests: HashMap<u64, Request> = HashMap::new();
    let (mut sent, mut ends) = (Vec::new(), BinaryHeap::new());
    while let Some(request) = workload.next().unwrap() {
        coming.push(Reverse((request.at, request.number)));
        requests.insert(request.number, request);
    }
    loop {
        let next_end = ends.peek().map(|Reverse((at, _))| *at);
        match coming.peek().copied() {
            Some(Reverse((at, number))) if next_end.is_none_or(|end| at < end) => {
                coming.pop();
                let request = requests.remove(&number).unwrap();
                let end = at.after(Duration::from_millis(100 + request.prompt[0].piece.name * 37 % 900));
                ends.push(Reverse((end, number)));
                assert!(ends.len() <= most, "{} requests from {most} clients", ends.len());
                sent.push((request, end));
            }
            _ => {
                let Some(Reverse((now, number))) = ends.pop() else { return sent };
                for request in workload.ended(number, now) {
                    assert!(request.at >= now);
                    coming.push(Reverse((request.at, request.number)));
                    requests.insert(request.number, request);
                }
            }
        }
    }
}

#[test]
fn an_error_behind_the_first_requests_is_told_at_the_end() {
    let mut inner = list(&[0.0; 5]);
    inner.fails = true;
    let mut closed = ClosedLoop::new(Box::new(inner), 2, Duration::from_secs(1)).unwrap();
    let sent = served(&mut closed, 2);
    assert_eq!(sent.len(), 5);
    assert_eq!(closed.next().unwrap_err().to_string(), "broken");
    assert!(closed.next().unwrap().is_none());
}

#[test]
fn clients_think_after_their_answers() {
    let mut closed = ClosedLoop::new(Box::new(list(&[5.0; 4])), 1, Duration::from_secs(3)).unwrap();
    let first = closed.next().unwrap().unwrap();
    assert_eq!((first.number, first.at), (0, Timestamp(0)), "the trace's own times are not looked at");
    assert!(closed.next().unwrap().is_none());
    assert_eq!(times(&closed.ended(0, seconds(2.0))), [5.0]);
    assert_eq!(closed.ended(0, seconds(3.0)), [], "one answer to a request");
    let error = ClosedLoop::new(Box::new(list(&[])), 0, Duration::ZERO).err().unwrap().to_string();
    assert_eq!(error, "`clients` is 0; a whole number from 1 is allowed");
}

proptest! {
    #[test]
    fn a_closed_loop_sends_all_from_its_clients_and_sessions_in_order(
        sessions in prop::collection::vec(prop::option::of(0_u64..6), 0..80),
        clients in 1_u32..8,
        think in 0_u64..500,
    ) {
        let all: Vec<Request> = sessions.iter().zip(0..).map(|(session, number)| request(number, 0.0, *session)).collect();
        let total = all.len();
        let list = List { requests: all.into_iter(), number: 0, turns: 0, think: Duration::ZERO, fails: false };
        let mut closed = ClosedLoop::new(Box::new(list), clients, Duration::from_millis(think)).unwrap();
        let sent = served(&mut closed, clients as usize);
        let mut texts: Vec<u64> = sent.iter().map(|(request, _)| request.prompt[0].piece.name).collect();
        // Of one session: the next one is sent after the answer to the one before it, and in the order of the trace.
        let mut last: HashMap<u64, (u64, Timestamp)> = HashMap::new();
        for (request, end) in &sent {
            let text = request.prompt[0].piece.name;
            if let Some((before, ended)) = request.session.and_then(|s| last.insert(s, (text, *end))) {
                prop_assert!(before < text && request.at >= ended);
            }
        }
        texts.sort_unstable();
        prop_assert_eq!(texts, (0..total as u64).collect::<Vec<_>>());
        let mut numbers: Vec<u64> = sent.iter().map(|(request, _)| request.number).collect();
        numbers.sort_unstable();
        prop_assert_eq!(numbers, (0..total as u64).collect::<Vec<_>>());
    }
}
