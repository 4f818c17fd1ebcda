use super::*;
use proptest::prelude::*;
use std::sync::Arc;
use std::thread;

fn at(seconds: u64) -> Wall {
    Wall(Duration::from_secs(seconds))
}

fn tenant() -> Arc<str> {
    "a".into()
}

const NONE: Limits = Limits {
    requests_per_second: None,
    requests_per_minute: None,
    tokens_per_minute: None,
    concurrency: None,
    requests_per_day: None,
    tokens_per_day: None,
};

/// A request of `name` whose `tokens` are all reserved for the response.
fn claim(name: &Arc<str>, limits: &Limits, tokens: u64) -> Claim {
    Claim { name: name.clone(), limits: *limits, is_named: false, prompt: 0, answer: tokens }
}

#[test]
fn requests_per_minute_use_the_wall_clocks_minute() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { requests_per_minute: Some(2), ..NONE };
    let first = book.take(&claim(&a, &limits, 5), at(119)).unwrap();
    assert_eq!(first.used, Use { requests: 1, tokens: 5 });
    book.end(&a, &first, Had::AS_BOOKED, at(119));
    assert!(book.take(&claim(&a, &limits, 5), at(120)).is_ok(), "the next minute has begun");
    assert!(book.take(&claim(&a, &limits, 5), at(125)).is_ok());
    let refused = book.take(&claim(&a, &limits, 5), at(131)).unwrap_err();
    assert_eq!(refused, Refused { bound: Bound::RequestsPerMinute, limit: 2, retry_after: Duration::from_secs(49) });
    assert!(book.take(&claim(&"b".into(), &limits, 5), at(131)).is_ok(), "another tenant has its own quota");
    assert!(book.take(&claim(&a, &limits, 5), at(131).after(refused.retry_after)).is_ok(), "the retry succeeds");
}

impl Wall {
    fn after(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

#[test]
fn retry_after_is_never_too_early() {
    let moment = Wall(Duration::from_millis(59_999));
    assert_eq!(Bound::TokensPerMinute.retry_after(moment), Duration::from_secs(1));
    assert_eq!(Bound::RequestsPerDay.retry_after(at(0)), Duration::from_secs(86_400));
    assert_eq!(Bound::TokensPerDay.retry_after(at(86_399)), Duration::from_secs(1));
    assert_eq!(Bound::Concurrency.retry_after(at(7)), Duration::from_secs(1));
}

#[test]
fn tokens_are_reserved_before_and_settled_after() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { tokens_per_minute: Some(100), ..NONE };
    let one = book.take(&claim(&a, &limits, 80), at(0)).unwrap();
    assert_eq!(book.take(&claim(&a, &limits, 30), at(1)).unwrap_err().bound, Bound::TokensPerMinute);
    book.end(&a, &one, Had::Tokens(40), at(2));
    let two = book.take(&claim(&a, &limits, 60), at(3)).unwrap();
    assert_eq!(two.used.tokens, 100);
    assert!(book.take(&claim(&a, &limits, 0), at(3)).is_err(), "no quota is left, even for a request without tokens");
    book.end(&a, &two, Had::Nothing, at(4));
    assert_eq!(
        book.take(&claim(&a, &limits, 10), at(5)).unwrap().used,
        Use { requests: 2, tokens: 50 },
        "as if the request had not been made"
    );
}

#[test]
fn request_larger_than_the_limit_needs_all_of_a_minute() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { tokens_per_minute: Some(100), ..NONE };
    let small = book.take(&claim(&a, &limits, 1), at(0)).unwrap();
    assert!(book.take(&claim(&a, &limits, 5_000), at(1)).is_err());
    book.end(&a, &small, Had::Tokens(1), at(2));
    assert!(book.take(&claim(&a, &limits, 5_000), at(60)).is_ok(), "otherwise it would never be served");
    assert!(book.take(&claim(&a, &limits, 1), at(61)).is_err());
}

#[test]
fn response_that_ends_in_a_later_minute_is_charged_there_for_the_rest() {
    let taken = Taken::by(&claim(&tenant(), &NONE, 100), at(0).windows(), Use::default());
    let more = taken.change(Had::Tokens(130), at(61).windows());
    assert_eq!((more.minute_tokens, more.day_tokens), (30, 30));
    let less = taken.change(Had::Tokens(70), at(61).windows());
    assert_eq!((less.minute_tokens, less.day_tokens), (0, -30), "the minute is over and the day is not");
    let nothing = taken.change(Had::Nothing, at(86_400).windows());
    assert_eq!(nothing, Change::default());
}

#[test]
fn longest_blocking_limit_is_reported() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits {
        requests_per_minute: Some(1),
        requests_per_day: Some(1),
        tokens_per_day: Some(10),
        concurrency: Some(1),
        ..NONE
    };
    book.take(&claim(&a, &limits, 1), at(0)).unwrap();
    assert_eq!(book.take(&claim(&a, &limits, 1), at(1)).unwrap_err().bound, Bound::RequestsPerDay);
    let by_tokens = Limits { requests_per_day: None, tokens_per_day: Some(1), ..limits };
    assert_eq!(book.take(&claim(&a, &by_tokens, 1), at(1)).unwrap_err().bound, Bound::TokensPerDay);
    let by_minute = Limits { requests_per_day: None, tokens_per_day: None, ..limits };
    assert_eq!(book.take(&claim(&a, &by_minute, 1), at(1)).unwrap_err().bound, Bound::RequestsPerMinute);
    assert_eq!(
        book.take(&claim(&a, &by_minute, 1), at(61)).unwrap_err().bound,
        Bound::Concurrency,
        "the request still runs"
    );
}

#[test]
fn limit_of_zero_admits_no_request() {
    for bound in Bound::ALL {
        let limits = match bound {
            Bound::RequestsPerDay => Limits { requests_per_day: Some(0), ..NONE },
            Bound::TokensPerDay => Limits { tokens_per_day: Some(0), ..NONE },
            Bound::RequestsPerMinute => Limits { requests_per_minute: Some(0), ..NONE },
            Bound::TokensPerMinute => Limits { tokens_per_minute: Some(0), ..NONE },
            Bound::RequestsPerSecond => Limits { requests_per_second: Some(0), ..NONE },
            Bound::Concurrency => Limits { concurrency: Some(0), ..NONE },
        };
        assert_eq!(Book::new(1).take(&claim(&tenant(), &limits, 0), at(0)).unwrap_err().bound, bound);
    }
}

#[test]
fn requests_per_second_use_the_wall_clocks_second() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { requests_per_second: Some(2), ..NONE };
    let first = book.take(&claim(&a, &limits, 1), at(7)).unwrap();
    book.take(&claim(&a, &limits, 1), at(7)).unwrap();
    let refused = book.take(&claim(&a, &limits, 1), Wall(Duration::from_millis(7_999))).unwrap_err();
    assert_eq!(refused, Refused { bound: Bound::RequestsPerSecond, limit: 2, retry_after: Duration::from_secs(1) });
    book.end(&a, &first, Had::Nothing, at(7));
    let third = book.take(&claim(&a, &limits, 1), at(7)).unwrap();
    assert!(book.take(&claim(&a, &limits, 1), at(7)).is_err(), "another request has used the returned quota");
    assert!(book.take(&claim(&a, &limits, 1), at(8)).is_ok());
    book.end(&a, &third, Had::Nothing, at(8));
    assert!(book.take(&claim(&a, &limits, 1), at(8)).is_ok());
    assert!(book.take(&claim(&a, &limits, 1), at(8)).is_err(), "quota returned after its second is lost");
}

#[test]
fn clock_set_back_slightly_starts_no_window_again() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { requests_per_minute: Some(1), ..NONE };
    let taken = book.take(&claim(&a, &limits, 1), at(600)).unwrap();
    assert!(book.take(&claim(&a, &limits, 1), at(590)).is_err());
    book.end(&a, &taken, Had::Nothing, at(590));
    assert!(book.take(&claim(&a, &limits, 1), at(590)).is_ok(), "the returned quota is available");
}

#[test]
fn clock_that_was_days_ahead_blocks_no_request_for_days() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { requests_per_minute: Some(1), requests_per_day: Some(1), ..NONE };
    book.take(&claim(&a, &limits, 1), at(9 * DAY)).unwrap();
    assert!(book.take(&claim(&a, &limits, 1), at(DAY)).is_ok(), "the clock was wrong");
    assert!(book.take(&claim(&a, &limits, 1), at(DAY)).is_err());
}

#[test]
fn reservations_stay_within_each_window_and_are_returned_exactly() {
    let (book, a) = (Book::new(10), tenant());
    let limits = Limits { tokens_per_minute: Some(100), tokens_per_day: Some(1_000), ..NONE };
    let huge = book.take(&claim(&a, &limits, u64::from(u32::MAX)), at(0)).unwrap();
    assert_eq!((huge.of_minute, huge.of_day, huge.used.tokens), (100, 1_000, 100));
    book.end(&a, &huge, Had::Tokens(300), at(61));
    assert_eq!(
        book.take(&claim(&a, &limits, 701), at(61)).unwrap_err().bound,
        Bound::TokensPerDay,
        "300 of 1,000 are used"
    );
    let other = book.take(&claim(&a, &limits, 700), at(61)).unwrap();
    assert_eq!(other.used.tokens, 100, "the reservation was charged to its own minute");
    book.end(&a, &other, Had::AS_BOOKED, at(61));
    assert_eq!(book.take(&claim(&a, &limits, 1), at(120)).unwrap_err().bound, Bound::TokensPerDay);
}

#[test]
fn response_without_a_report_counts_received_and_at_least_claimed_tokens() {
    let limits = Limits { tokens_per_day: Some(10_000), ..NONE };
    let little = Claim { prompt: 100, ..claim(&tenant(), &limits, 500) };
    let all = Claim { prompt: 100, ..claim(&tenant(), &limits, 2_000) };
    let much = Had::AtLeast { prompt: 200, answer: 3_000 };
    for (claim, had, cost) in [
        (&little, Had::AS_BOOKED, 600),
        (&little, much, 3_200),
        (&little, Had::Nothing, 0),
        (&little, Had::Tokens(9_000), 9_000),
        (&all, Had::AS_BOOKED, 2_100),
        (&all, Had::AtLeast { prompt: 90, answer: 10 }, 2_100),
        (&all, much, 3_200),
        (&all, Had::Tokens(7), 7),
    ] {
        let book = Book::new(10);
        let taken = book.take(claim, at(0)).unwrap();
        book.end(&claim.name, &taken, had, at(0));
        let mut rest = Claim { prompt: 10_000 - cost, answer: 0, ..claim.clone() };
        assert!(book.take(&rest, at(0)).is_ok(), "{claim:?} {had:?}");
        rest.prompt = 1;
        assert!(book.take(&rest, at(0)).is_err(), "{claim:?} {had:?}");
    }
}

/// Tenants of a small book: ten for each lock.
const SMALL: usize = 160;

#[test]
fn accounts_with_the_smallest_usage_are_evicted_first() {
    let book = Book::new(SMALL);
    let limits = Limits { requests_per_day: Some(3), ..NONE };
    let had_all: Vec<Arc<str>> = (0..3).map(|i| format!("used{i}").into()).collect();
    for name in &had_all {
        for _ in 0..3 {
            let taken = book.take(&claim(name, &limits, 1), at(0)).unwrap();
            book.end(name, &taken, Had::AS_BOOKED, at(0));
        }
    }
    let named: Arc<str> = "named".into();
    let of_named = Claim { is_named: true, ..claim(&named, &limits, 1) };
    let taken = book.take(&of_named, at(0)).unwrap();
    book.end(&named, &taken, Had::AS_BOOKED, at(0));
    for i in 0..20_000u64 {
        let name: Arc<str> = format!("made up {i}").into();
        let taken = book.take(&claim(&name, &limits, 1), at(i / 100)).unwrap();
        book.end(&name, &taken, Had::AS_BOOKED, at(i / 100));
    }
    assert!(book.tenants() <= SMALL, "{}", book.tenants());
    for name in &had_all {
        let results = book.take(&claim(name, &limits, 1), at(300)).map_err(|refused| refused.bound);
        assert_eq!(results, Err(Bound::RequestsPerDay), "{name} has used its quota");
    }
    let results = [(), (), ()].map(|()| book.take(&of_named, at(300)).is_ok());
    assert_eq!(results, [true, true, false], "one of its three requests was used before");
}

#[test]
fn memory_is_limited_and_running_tenants_are_never_evicted() {
    let book = Book::new(SMALL);
    let limits = Limits { concurrency: Some(1), ..NONE };
    let kept: Vec<(Arc<str>, Taken)> = (0..20)
        .map(|i| {
            let name: Arc<str> = format!("kept{i}").into();
            let taken = book.take(&claim(&name, &limits, 1), at(0)).unwrap();
            (name, taken)
        })
        .collect();
    for i in 0..50_000u64 {
        let name: Arc<str> = format!("hostile{i}").into();
        let taken = book.take(&claim(&name, &limits, 1), at(i / 100)).unwrap();
        book.end(&name, &taken, Had::Tokens(1), at(i / 100));
    }
    assert!(book.tenants() <= SMALL + 20, "{}", book.tenants());
    for (name, taken) in &kept {
        assert_eq!(book.take(&claim(name, &limits, 1), at(600)).unwrap_err().bound, Bound::Concurrency);
        book.end(name, taken, Had::Nothing, at(600));
        assert!(book.take(&claim(name, &limits, 1), at(600)).is_ok());
    }
}

#[test]
fn tenants_of_the_day_before_are_removed() {
    let book = Book::new(DEFAULT_MAX_TENANTS);
    for i in 0..1_000 {
        let name: Arc<str> = format!("t{i}").into();
        let taken = book.take(&claim(&name, &NONE, 1), at(10)).unwrap();
        book.end(&name, &taken, Had::AS_BOOKED, at(10));
    }
    assert_eq!(book.tenants(), 1_000);
    for i in 0..1_000 {
        book.take(&claim(&format!("new{i}").into(), &NONE, 1), at(DAY + 10)).unwrap();
    }
    assert_eq!(book.tenants(), 1_000);
}

#[test]
fn concurrent_threads_get_exactly_the_available_quota() {
    let (book, a) = (Arc::new(Book::new(10)), tenant());
    let limits = Limits { requests_per_minute: Some(1_000), ..NONE };
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (book, a) = (book.clone(), a.clone());
            thread::spawn(move || (0..500).filter(|_| book.take(&claim(&a, &limits, 1), at(5)).is_ok()).count())
        })
        .collect();
    let through: usize = threads.into_iter().map(|t| t.join().unwrap()).sum();
    assert_eq!(through, 1_000);
}

/// One event of a random history.
#[derive(Clone, Debug)]
enum Act {
    /// A request with this number of tokens.
    Take(u64),
    /// The running request at this position ends.
    End(usize, Option<u64>, bool),
    /// This number of seconds passes.
    Pass(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => (0u64..400).prop_map(Act::Take),
        4 => (any::<usize>(), proptest::option::of(0u64..600), any::<bool>()).prop_map(|(i, t, b)| Act::End(i, t, b)),
        2 => (0u64..90).prop_map(Act::Pass),
        1 => (0u64..90_000).prop_map(Act::Pass),
    ]
}

proptest! {
    /// Compared with a model that stores every request: each window has the requests that were admitted in it and not
    /// returned, and never more than the limit; the same holds for running requests.
    #[test]
    fn no_history_admits_more_than_the_limits(
        acts in proptest::collection::vec(act(), 1..300),
        rpm in 1u64..8, tpm in 1u64..2_000, most in 1u64..5, rpd in 1u64..40, tpd in 1u64..20_000,
    ) {
        let limits = Limits {
            requests_per_minute: Some(rpm),
            tokens_per_minute: Some(tpm),
            concurrency: Some(most),
            requests_per_day: Some(rpd),
            tokens_per_day: Some(tpd),
            ..NONE
        };
        let (book, a) = (Book::new(10), tenant());
        let mut now = 1_000_000u64;
        // Minute, day, and the charges to a minute and a day that are not over.
        let mut served: Vec<(u64, u64)> = Vec::new();
        let mut charges: Vec<(u64, u64, i64, i64)> = Vec::new();
        let mut running: Vec<Taken> = Vec::new();
        for act in acts {
            let moment = at(now);
            let tokens_of = |charges: &[(u64, u64, i64, i64)]| {
                let minute: i64 = charges.iter().filter(|c| c.0 == moment.windows().minute).map(|c| c.2).sum();
                let day: i64 = charges.iter().filter(|c| c.1 == moment.windows().day).map(|c| c.3).sum();
                (u64::try_from(minute).unwrap(), u64::try_from(day).unwrap())
            };
            let (of_minute, of_day) = tokens_of(&charges);
            let count = |index: fn(&(u64, u64)) -> u64, now| served.iter().filter(|s| index(s) == now).count() as u64;
            let (minute, day) = (count(|s| s.0, moment.windows().minute), count(|s| s.1, moment.windows().day));
            match act {
                Act::Pass(seconds) => now += seconds,
                Act::Take(tokens) => {
                    let fits = minute < rpm && day < rpd && (running.len() as u64) < most
                        && of_minute < tpm && of_minute + tokens.min(tpm) <= tpm
                        && of_day < tpd && of_day + tokens.min(tpd) <= tpd;
                    let got = book.take(&claim(&a, &limits, tokens), moment);
                    prop_assert_eq!(got.is_ok(), fits, "{:?}", got);
                    match got {
                        Ok(taken) => {
                            let Windows { minute, day, .. } = taken.windows;
                            served.push((minute, day));
                            let booked = |most: u64| i64::try_from(tokens.min(most)).unwrap();
                            charges.push((minute, day, booked(tpm), booked(tpd)));
                            running.push(taken);
                        }
                        Err(refused) => prop_assert!(refused.retry_after >= Duration::from_secs(1)),
                    }
                }
                Act::End(place, tokens, lost) if !running.is_empty() => {
                    let taken = running.swap_remove(place % running.len());
                    let had = if lost { Had::Nothing } else { tokens.map_or(Had::AS_BOOKED, Had::Tokens) };
                    book.end(&a, &taken, had, moment);
                    let change = taken.change(had, moment.windows());
                    charges.push((moment.windows().minute, moment.windows().day, change.minute_tokens, change.day_tokens));
                    let entry = served.iter_mut().find(|s| **s == (taken.windows.minute, taken.windows.day)).unwrap();
                    entry.0 = if change.minute_requests < 0 { 0 } else { entry.0 };
                    entry.1 = if change.day_requests < 0 { 0 } else { entry.1 };
                }
                Act::End(..) => {}
            }
        }
    }
}
