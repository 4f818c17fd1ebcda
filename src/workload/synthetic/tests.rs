use super::*;
use crate::{PromptPart, Request, Speaker};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::time::Duration;

fn built(spelling: &str) -> Box<dyn Workload> {
    build(spelling, 42).unwrap_or_else(|e| panic!("{spelling}: {e}"))
}

/// Plays at most `limit` requests, answered after 50 ms and 10 ms a token of the answer; in the order of time.
fn played(workload: &mut dyn Workload, limit: usize, most_in_flight: usize) -> Vec<Request> {
    let (mut ends, mut coming) = (BinaryHeap::new(), BinaryHeap::new());
    let mut waiting: HashMap<u64, Request> = HashMap::new();
    let mut played = Vec::new();
    let mut own = workload.next().unwrap();
    while played.len() < limit {
        let end = ends.peek().map(|Reverse((at, _))| *at);
        let follow = coming.peek().map(|Reverse((at, _))| *at);
        let begin = [own.as_ref().map(|r| r.at), follow].into_iter().flatten().min();
        match (begin, end) {
            (None, None) => break,
            (Some(at), end) if end.is_none_or(|end| at <= end) => {
                let request = if own.as_ref().is_some_and(|r| r.at == at) {
                    std::mem::replace(&mut own, workload.next().unwrap()).unwrap()
                } else {
                    let Some(Reverse((_, number))) = coming.pop() else { unreachable!() };
                    waiting.remove(&number).unwrap()
                };
                let length = Duration::from_millis(50 + 10 * u64::from(request.answer.tokens));
                ends.push(Reverse((at.after(length), request.number)));
                assert!(ends.len() <= most_in_flight, "{} at once", ends.len());
                played.push(request);
            }
            _ => {
                let Some(Reverse((now, number))) = ends.pop() else { unreachable!() };
                for request in workload.ended(number, now) {
                    assert!(request.at >= now, "{} before its cause", request.number);
                    coming.push(Reverse((request.at, request.number)));
                    waiting.insert(request.number, request);
                }
            }
        }
    }
    played
}

fn all(spelling: &str) -> Vec<Request> {
    played(&mut *built(spelling), usize::MAX, usize::MAX)
}

fn pieces(parts: &[PromptPart]) -> Vec<Piece> {
    parts.iter().map(|part| part.piece).collect()
}

fn mean(of: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = of.fold((0.0, 0_u32), |(sum, count), x| (sum + x, count + 1));
    sum / f64::from(count)
}

fn is_near(got: f64, wanted: f64, part: f64) -> bool {
    (got / wanted - 1.0).abs() < part
}

#[test]
fn the_table_is_in_order_and_says_what_everything_is() {
    let names: Vec<&str> = WORKLOADS.iter().map(|d| d.name).collect();
    assert!(names.is_sorted() && names.iter().collect::<HashSet<_>>().len() == names.len());
    for descriptor in WORKLOADS {
        let is_word = |c: char, between: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == between;
        assert!(descriptor.name.chars().all(|c| is_word(c, '-')), "{}", descriptor.name);
        assert!(descriptor.summary.ends_with('.') && !descriptor.source.is_empty(), "{}", descriptor.name);
        let parameters: HashSet<&str> = descriptor.parameters.iter().map(|p| p.name).collect();
        assert_eq!(parameters.len(), descriptor.parameters.len(), "{}", descriptor.name);
        for parameter in descriptor.parameters {
            assert!(parameter.name.chars().all(|c| is_word(c, '_')) && !parameter.meaning.is_empty());
        }
        assert!(workload(descriptor.name).is_some_and(|found| found.name == descriptor.name));
    }
}

#[test]
fn every_workload_builds_and_gives_requests_in_the_order_of_time() {
    for descriptor in WORKLOADS {
        let name = descriptor.name;
        let mut workload = built(name);
        let total = workload.total().unwrap();
        let requests = played(&mut *workload, 3_000, usize::MAX);
        assert!(requests.len() >= 100, "{name}: {}", requests.len());
        assert!(requests.len() as u64 == total || requests.len() == 3_000, "{name}: {} of {total}", requests.len());
        assert!(requests.is_sorted_by_key(|r| r.at), "{name}");
        let numbers: HashSet<u64> = requests.iter().map(|r| r.number).collect();
        assert_eq!(numbers.len(), requests.len(), "{name}");
        assert!(requests.iter().all(|r| r.answer.tokens > 0 && r.prompt_tokens() > 0), "{name}");
        assert!(requests.iter().all(|r| r.prompt.iter().all(|part| part.piece.tokens > 0)), "{name}");
        assert_eq!(descriptor.is_closed, requests.iter().any(|r| r.session.is_some()), "{name}");
    }
}

#[test]
fn all_requests_are_given_and_numbers_have_no_gaps() {
    for (spelling, total) in [
        ("unique:qps=10,seconds=10,cv=0", 100),
        ("unique:stages=2x3/0x5/1x4,cv=0", 10),
        ("burst:bursts=3,size=7", 21),
        ("interactive-chat:requests=777", 777),
        ("multi-turn:conversations=9,clients=4", 90),
        ("multi-turn:conversations=9,clients=40,requests=50", 50),
        ("agentic-code:clients=5,requests=3", 3),
    ] {
        let mut workload = built(spelling);
        assert_eq!(workload.total(), Some(total), "{spelling}");
        let mut numbers: Vec<u64> = played(&mut *workload, usize::MAX, usize::MAX).iter().map(|r| r.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..total).collect::<Vec<_>>(), "{spelling}");
    }
}

#[test]
fn a_workload_without_end_builds_at_once() {
    let mut endless = built("unique:qps=1000000,seconds=40000000");
    assert_eq!(endless.total(), None);
    assert!(endless.next().unwrap().is_some());
}

#[test]
fn one_seed_gives_one_workload_and_another_seed_other_texts() {
    for descriptor in WORKLOADS {
        let run = |seed| played(&mut *build(descriptor.name, seed).unwrap(), 500, usize::MAX);
        let (first, again, other) = (run(1), run(1), run(2));
        assert_eq!(first, again, "{}", descriptor.name);
        let names = |requests: &[Request]| -> HashSet<u64> {
            requests.iter().flat_map(|r| r.prompt.iter().map(|p| p.piece.name).chain([r.answer.name])).collect()
        };
        assert!(names(&first).is_disjoint(&names(&other)), "{}", descriptor.name);
    }
}

#[test]
fn each_default_is_spelled_as_it_is_read() {
    for descriptor in WORKLOADS {
        let plain = played(&mut *built(descriptor.name), 200, usize::MAX);
        for parameter in descriptor.parameters.iter().filter(|p| !p.default.is_empty() && p.name != "seconds") {
            let spelling = format!("{}:{}={}", descriptor.name, parameter.name, parameter.default);
            assert_eq!(played(&mut *built(&spelling), 200, usize::MAX), plain, "{spelling}");
        }
    }
}

#[test]
fn misspelt_workloads_are_refused() {
    for (spelling, message) in [
        ("uniqe", "no workload is called `uniqe`; did you mean `unique`?"),
        ("", "no workload is called ``"),
        ("tool-agent", "no workload is called `tool-agent`; did you mean `tool-agents`?"),
        ("retreival", "no workload is called `retreival`; did you mean `retrieval`?"),
        ("retrieval:found=201", "`found` is 201; a whole number from 1 to 100 is allowed"),
        ("retrieval:documents=9", "`found` is 5; at most half of `documents` is allowed"),
        ("adapter-churn:active=65", "`active` is 65; at most as many as `adapters` are allowed"),
        (
            "floor-bursts:seconds=1000000",
            "`seconds` is 1000000; at most 1000000 requests in all are allowed, these are 6400000",
        ),
        (
            "unique:qpss=1",
            "`unique` does not take `qpss`; did you mean `qps`? (input, output, stages, qps, seconds, cv)",
        ),
        ("unique:qps", "`parameter` is `qps`; `key=value` is allowed"),
        ("unique:qps=1,qps=2", "`qps` is given twice; once is allowed"),
        ("unique:qps=fast", "`qps` is fast; a number from 0 to 1000000 is allowed"),
        ("unique:qps=NaN", "`qps` is NaN; a number from 0 to 1000000 is allowed"),
        ("burst:size=0", "`size` is 0; a whole number from 1 to 1000000 is allowed"),
        ("burst:prompt=-1", "`prompt` is -1; a whole number from 1 to 10000000 is allowed"),
        ("burst:within=16", "`within` is 16; a number from 0 to 15 is allowed"),
        ("multi-turn:volatile=maybe", "`volatile` is maybe; true or false is allowed"),
        ("multi-turn:context=1000", "`context` is 1000; at least 1600 is allowed, so that the first turn fits"),
        (
            "multi-turn:input=0..5",
            "`input` is 0..5; 300, 10..1000, 10..1000~300~150 or normal:10..1000~300~150 are spellings, \
             with values from 1 to 10000000",
        ),
        ("shared-prefix:groups=1000,prompts=1001", "`prompts` is 1001; a whole number from 1 to 1000 is allowed"),
    ] {
        assert_eq!(build(spelling, 1).err().unwrap().to_string(), message, "{spelling}");
    }
}

#[test]
fn the_ladder_is_150_groups_of_5_in_one_random_order() {
    let requests = all("shared-prefix-ladder");
    // Σ QPS × seconds of the published stages.
    assert!(is_near(requests.len() as f64, 17_084.0, 0.03), "{}", requests.len());
    let key = |r: &Request| (r.prompt[0].piece.name, r.prompt[1].piece.name);
    let cycle: Vec<_> = requests[..750].iter().map(key).collect();
    assert_eq!(cycle.iter().collect::<HashSet<_>>().len(), 750);
    assert_eq!(cycle.iter().map(|(system, _)| system).collect::<HashSet<_>>().len(), 150);
    assert!(requests.iter().enumerate().all(|(i, r)| key(r) == cycle[i % 750]));
    assert!(requests.iter().all(|r| r.prompt_tokens() == 7_200 && r.answer.tokens == 1_000));
    assert_eq!((requests[0].prompt[0].role, requests[0].prompt[1].role), (Speaker::System, Speaker::User));
    let neighbours = cycle.windows(2).filter(|pair| pair[0].0 == pair[1].0).count();
    assert!(neighbours < 30, "groups are not asked one after the other: {neighbours}");
    // The stage of 60 a second is the last one.
    let last = requests.last().unwrap().at.0 as f64 / 1e9;
    let busy = requests.iter().filter(|r| r.at.0 as f64 / 1e9 > last - 20.0).count();
    assert!((1_080..1_320).contains(&busy), "{busy}");
}

#[test]
fn one_stage_can_take_the_place_of_the_ladder() {
    let requests = all("shared-prefix-ladder:groups=4,prompts=2,system=0,question=9,output=3,qps=30,seconds=25");
    assert!((650..850).contains(&requests.len()), "{}", requests.len());
    assert!(requests.iter().all(|r| r.prompt.len() == 1 && r.prompt_tokens() == 9 && r.at < Timestamp(25_000_000_001)));
    assert_eq!(requests.iter().map(|r| r.prompt[0].piece.name).collect::<HashSet<_>>().len(), 8);
}

#[test]
fn clients_of_a_closed_loop_wait_for_their_answers() {
    for (spelling, clients) in [
        ("multi-turn:clients=7,requests=400", 7),
        ("interactive-chat:clients=3,requests=200,think=0", 3),
        ("agentic-code:clients=1,requests=50", 1),
    ] {
        let requests = played(&mut *built(spelling), usize::MAX, clients);
        assert!(requests.len() >= 50);
    }
}

#[test]
fn a_turn_quotes_everything_before_it() {
    let requests = all("interactive-chat:clients=5,requests=300");
    let mut last: HashMap<u64, &Request> = HashMap::new();
    let mut turns = 0;
    for request in &requests {
        if let Some(before) = last.insert(request.session.unwrap(), request) {
            let quoted = &before.prompt[..];
            assert_eq!(&request.prompt[..quoted.len()], quoted);
            let [answer, question] = &request.prompt[quoted.len()..] else { panic!("{request:?}") };
            assert_eq!((answer.role, answer.piece), (Speaker::Assistant, before.answer));
            assert_eq!(question.role, Speaker::User);
            let pause = request.at.since(before.at);
            assert!(pause >= Duration::from_secs(5), "{pause:?}");
            turns += 1;
        } else {
            let roles: Vec<Speaker> = request.prompt.iter().map(|part| part.role).collect();
            assert_eq!(roles, [Speaker::System, Speaker::System, Speaker::User]);
        }
        assert_eq!(request.prompt[0], requests[0].prompt[0], "one shared part");
    }
    assert!(turns > 150, "{turns}");
    assert_eq!(requests.iter().map(|r| r.prompt[1].piece).collect::<HashSet<_>>().len(), last.len());
}

#[test]
fn what_a_conversation_says_does_not_depend_on_how_fast_it_is_answered() {
    let by_place = |requests: Vec<Request>| -> HashMap<(u64, usize), (Vec<_>, _)> {
        requests.into_iter().map(|r| ((r.session.unwrap(), r.prompt.len()), (r.prompt, r.answer))).collect()
    };
    let slow = by_place(all("multi-turn:clients=4,requests=200"));
    // Answered at once, in the order in which they were sent.
    let mut workload = built("multi-turn:clients=4,requests=200");
    let mut open: std::collections::VecDeque<Request> = std::iter::from_fn(|| workload.next().unwrap()).collect();
    let mut fast = Vec::new();
    while let Some(request) = open.pop_front() {
        open.extend(workload.ended(request.number, request.at));
        fast.push(request);
    }
    let fast = by_place(fast);
    let common: Vec<_> = slow.keys().filter(|place| fast.contains_key(place)).collect();
    assert!(common.len() > 150, "{}", common.len());
    assert!(common.iter().all(|place| slow[place] == fast[place]));
}

#[test]
fn a_volatile_head_is_new_in_every_prompt() {
    let requests = all("agentic-code:volatile=true,clients=4,requests=100");
    let heads: HashSet<u64> = requests.iter().map(|r| r.prompt[0].piece.name).collect();
    assert_eq!(heads.len(), 100);
    assert!(requests.iter().all(|r| r.prompt[0].piece.tokens == 32 && r.prompt[1] == requests[0].prompt[1]));
    let without = all("agentic-code:clients=4,requests=100");
    assert_eq!(without.len(), requests.len());
    let rest = |r: &Request| (r.session, pieces(&r.prompt[1..]));
    let bare: HashSet<_> = without.iter().map(|r| (r.session, pieces(&r.prompt))).collect();
    assert!(requests.iter().filter(|r| bare.contains(&rest(r))).count() > 90, "the rest is as without it");
}

#[test]
fn conversations_stay_within_the_context() {
    let requests = all("agentic-code:context=40000,clients=10,requests=500,turns=2..20");
    let most = requests.iter().map(|r| r.prompt_tokens() + r.answer.tokens).max().unwrap();
    assert!((30_000..=40_000).contains(&most), "{most}");
}

#[test]
fn multi_turn_has_the_published_means() {
    let requests = all("multi-turn");
    assert_eq!((requests.len(), built("multi-turn").total()), (8_000, Some(8_000)));
    assert_eq!(built("multi-turn:turns=5..15").total(), None);
    let prompt = mean(requests.iter().map(|r| r.prompt_tokens().into()));
    let answer = mean(requests.iter().map(|r| r.answer.tokens.into()));
    assert!(is_near(prompt, 832.0, 0.03), "{prompt}");
    assert!(is_near(answer, 76.0, 0.03), "{answer}");
    assert_eq!(requests.iter().map(|r| r.session).collect::<HashSet<_>>().len(), 800);
}

#[test]
fn profiles_have_the_published_means() {
    for (spelling, dynamic, turns, input, output) in [
        ("interactive-chat:clients=500,requests=30000,think=0", 4_000.0, 4.0, 50.0, 300.0),
        ("agentic-code:clients=500,requests=20000,context=1000000", 55_000.0, 6.0, 1_500.0, 800.0),
        (
            "agentic-code:clients=200,requests=100000,dynamic=10000..990000~160000~233000,output=50..10000~425~400,context=9000000",
            160_000.0,
            6.0,
            1_500.0,
            425.0,
        ),
    ] {
        let requests = all(spelling);
        let mut sessions: HashMap<u64, (u32, f64)> = HashMap::new();
        for request in &requests {
            let session = sessions.entry(request.session.unwrap()).or_default();
            *session = (session.0 + 1, request.prompt[1].piece.tokens.into());
        }
        // The last conversations are cut by the end.
        let begun = sessions.len() as u64;
        let whole = |session: &u64| *session < begun * 9 / 10;
        let got = mean(sessions.iter().filter(|(s, _)| whole(s)).map(|(_, (_, dynamic))| *dynamic));
        assert!(is_near(got, dynamic, 0.04), "{spelling}: dynamic {got}");
        let got = mean(sessions.iter().filter(|(s, _)| whole(s)).map(|(_, (turns, _))| f64::from(*turns)));
        assert!(is_near(got, turns, 0.08), "{spelling}: turns {got}");
        let got = mean(requests.iter().map(|r| r.prompt.last().unwrap().piece.tokens.into()));
        assert!(is_near(got, input, 0.03), "{spelling}: input {got}");
        let got = mean(requests.iter().map(|r| r.answer.tokens.into()));
        assert!(is_near(got, output, 0.03), "{spelling}: output {got}");
    }
}

#[test]
fn one_prefix_becomes_hot() {
    let requests = all("hot-prefix");
    let hot = crate::names::name(42, crate::names::TextKind::System, 0);
    let share = |requests: &[Request]| mean(requests.iter().map(|r| f64::from(r.prompt[0].piece.name == hot)));
    let tenth = requests.len() / 10;
    let (first, last) = (share(&requests[..tenth]), share(&requests[requests.len() - tenth..]));
    assert!(first < 0.08, "{first}");
    assert!((0.70..0.82).contains(&last), "{last}");
    assert!(is_near(share(&requests), 0.4, 0.08));
    assert!(all("hot-prefix:peak=0").iter().all(|r| r.prompt[0].piece.name != hot));
    let questions: HashSet<u64> = requests.iter().map(|r| r.prompt[1].piece.name).collect();
    assert_eq!(questions.len(), requests.len());
}

#[test]
fn unique_prompts_share_nothing() {
    for spelling in ["unique", "long-short"] {
        let requests = all(spelling);
        let names: HashSet<u64> = requests.iter().flat_map(|r| [r.prompt[0].piece.name, r.answer.name]).collect();
        assert_eq!(names.len(), 2 * requests.len(), "{spelling}");
    }
    let requests = all("long-short");
    let long = mean(requests.iter().map(|r| f64::from(r.prompt_tokens() == 100_000)));
    assert!((0.035..0.065).contains(&long), "{long}");
    assert!(requests.iter().all(|r| [500, 100_000].contains(&r.prompt_tokens())));
}

#[test]
fn adapters_are_as_popular_as_their_rank_says() {
    let requests = all("lora-mix");
    let share = |name: Option<&str>| mean(requests.iter().map(|r| f64::from(r.adapter.as_deref() == name)));
    // 1 / H(32) = 0.2464 of the nine tenths that go to adapters.
    assert!(is_near(share(Some("lora-0")), 0.222, 0.08), "{}", share(Some("lora-0")));
    assert!(is_near(share(Some("lora-1")), 0.111, 0.12), "{}", share(Some("lora-1")));
    assert!(is_near(share(None), 0.1, 0.15), "{}", share(None));
    let systems: HashSet<_> = requests.iter().map(|r| (r.adapter.clone(), r.prompt[0].piece)).collect();
    assert_eq!(systems.len(), 33, "each has its own system prompt");
}

#[test]
fn a_burst_is_equal_prompts_at_once() {
    let requests = all("burst:bursts=4,size=50,every=10,within=0.2");
    for (burst, requests) in requests.chunks(50).enumerate() {
        assert!(requests.iter().all(|r| r.prompt == requests[0].prompt));
        let begin = Timestamp(burst as u64 * 10_000_000_000);
        assert!(requests.iter().all(|r| r.at.since(begin) <= Duration::from_millis(200)));
        assert!(requests.last().unwrap().at.since(requests[0].at) > Duration::from_millis(100));
    }
    let prompts: HashSet<_> = requests.iter().map(|r| pieces(&r.prompt)).collect();
    assert_eq!(prompts.len(), 4);
}

#[test]
fn tool_agents_bring_little_that_is_new_and_say_little() {
    let requests = all("tool-agents:requests=2000");
    let shared = requests[0].prompt[0].piece;
    assert!(requests.iter().all(|r| r.prompt[0].piece == shared && shared.tokens == 12_000));
    let fresh = mean(requests.iter().map(|r| r.prompt.last().unwrap().piece.tokens.into()));
    let whole = mean(requests.iter().map(|r| r.prompt_tokens().into()));
    assert!(is_near(fresh, 1_200.0, 0.1) && fresh < 0.08 * whole, "{fresh} of {whole}");
    let answer = mean(requests.iter().map(|r| r.answer.tokens.into()));
    assert!(is_near(answer, 120.0, 0.1), "{answer}");
}

#[test]
fn retrieval_quotes_popular_documents_in_many_orders() {
    let quoted = |r: &Request| pieces(&r.prompt[1..r.prompt.len() - 1]);
    let requests = all("retrieval");
    let mut counts: HashMap<Piece, usize> = HashMap::new();
    for request in &requests {
        let documents = quoted(request);
        assert_eq!(documents.iter().collect::<HashSet<_>>().len(), 5, "no document comes twice");
        documents.iter().for_each(|document| *counts.entry(*document).or_default() += 1);
    }
    let mut counts: Vec<usize> = counts.into_values().collect();
    counts.sort_unstable_by_key(|count| Reverse(*count));
    assert!(counts.len() > 350 && counts[0] > 10 * counts[300], "{counts:?}");
    // Equal sets in equal orders are rarer than equal sets.
    let distinct = |requests: &[Request]| requests.iter().map(quoted).collect::<HashSet<_>>().len();
    let few = "documents=10,zipf=0,found=4";
    let (ranked, sorted) = (all(&format!("retrieval:{few}")), all(&format!("retrieval:{few},sorted=true")));
    assert_eq!(distinct(&sorted), 210, "each four of ten");
    assert!(distinct(&ranked) > 5 * distinct(&sorted));
}

#[test]
fn reasoning_has_short_questions_and_long_answers_of_unequal_lengths() {
    let requests = all("reasoning");
    let answers: Vec<f64> = requests.iter().map(|r| r.answer.tokens.into()).collect();
    let answer = mean(answers.iter().copied());
    assert!(is_near(answer, 3_000.0, 0.06), "{answer}");
    let long = mean(answers.iter().map(|tokens| f64::from(*tokens > 6_000.0)));
    assert!((0.05..0.2).contains(&long), "{long}");
    assert!(mean(requests.iter().map(|r| r.prompt_tokens().into())) < answer / 3.0);
}

#[test]
fn code_completion_quotes_files_of_repositories_and_says_a_line() {
    let requests = all("code-completion");
    let files: HashSet<(Piece, Piece)> = requests.iter().map(|r| (r.prompt[0].piece, r.prompt[1].piece)).collect();
    assert!((700..=800).contains(&files.len()), "{}", files.len());
    assert_eq!(files.iter().map(|(summary, _)| summary).collect::<HashSet<_>>().len(), 40);
    assert_eq!(files.iter().map(|(_, file)| file).collect::<HashSet<_>>().len(), files.len(), "each file is of one");
    assert!(requests.iter().all(|r| (4..=64).contains(&r.answer.tokens)));
    let fresh = mean(requests.iter().map(|r| r.prompt[2].piece.tokens.into()));
    assert!(is_near(fresh, 80.0, 0.05), "{fresh}");
}

#[test]
fn bursts_on_a_floor_share_prefixes_that_come_back() {
    let requests = all("floor-bursts:every=20,size=48,within=1,prefixes=3,seconds=120");
    let (burst, floor): (Vec<_>, Vec<_>) = requests.iter().partition(|r| r.prompt.len() == 2);
    assert_eq!(burst.len(), 6 * 48);
    for (number, requests) in burst.chunks(48).enumerate() {
        let begin = Timestamp(10_000_000_000 + number as u64 * 20_000_000_000);
        assert!(requests.iter().all(|r| r.prompt[0] == burst[48 * (number % 3)].prompt[0]), "burst {number}");
        assert!(requests.iter().all(|r| r.at >= begin && r.at.since(begin) <= Duration::from_secs(1)));
    }
    assert_eq!(burst.iter().map(|r| r.prompt[0].piece).collect::<HashSet<_>>().len(), 3);
    assert!((400..560).contains(&floor.len()), "four a second: {}", floor.len());
    assert_eq!(floor.iter().map(|r| r.prompt[0].piece).collect::<HashSet<_>>().len(), floor.len());
    assert!(all("floor-bursts:floor=0").iter().all(|r| r.prompt.len() == 2));
}

#[test]
fn active_adapters_change_a_few_at_a_time() {
    let requests = all("adapter-churn:share=1");
    let active = |from: u64| -> HashSet<_> {
        let inside = |r: &&Request| (from..from + 10).contains(&(r.at.0 / 1_000_000_000));
        requests.iter().filter(inside).filter_map(|r| r.adapter.clone()).collect()
    };
    let (first, next, later) = (active(0), active(10), active(40));
    assert_eq!((first.len(), next.len()), (12, 12));
    assert_eq!(first.intersection(&next).count(), 9, "three of twelve change");
    assert_eq!(first.intersection(&later).count(), 0, "after four changes all are others");
    let rest = all("adapter-churn");
    let names: HashSet<_> = rest.iter().filter(|r| r.at.0 < 10_000_000_000).filter_map(|r| r.adapter.clone()).collect();
    assert!(names.len() > 20, "some requests go to the others: {}", names.len());
}
