//! What a Redis is told of requests that have ended, though it was away or broke off.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use super::*;
use attache_quota::Limits;
use futures_util::FutureExt;
use parking_lot::Mutex;
use std::sync::atomic::AtomicUsize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const AT: Wall = Wall(Duration::from_secs(600));
const PLACE: Place = Place { request: 7, counted: [true; Bound::ALL.len()] };
const CHANGE: Change =
    Change { second_requests: -1, minute_requests: -1, minute_tokens: -5, day_requests: 0, day_tokens: -5 };
/// Words of a call before the arguments of a script of six keys.
const BEFORE_ARGUMENTS: usize = 9;

/// What was asked of a Redis: the arguments of scripts.
type Heard = Arc<Mutex<Vec<Vec<String>>>>;

/// How a Redis fails.
#[derive(Clone, Copy)]
enum Failure {
    /// It breaks off.
    Breaks,
    /// It answers with this error.
    Says(&'static str),
}

/// A Redis that fails so at the first scripts, and runs those that follow.
async fn redis(listener: TcpListener, failures: &'static [Failure], heard: Heard) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve(stream, failures, heard.clone()));
    }
}

async fn serve(stream: TcpStream, failures: &[Failure], heard: Heard) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    while let Some(words) = command(&mut read).await {
        let answer = match words[0].as_str() {
            "EVALSHA" => {
                let mut heard = heard.lock();
                heard.push(words[BEFORE_ARGUMENTS..].to_vec());
                match failures.get(heard.len() - 1) {
                    Some(Failure::Breaks) => return,
                    Some(Failure::Says(error)) => error,
                    None => ":0\r\n",
                }
            }
            "PING" => "+PONG\r\n",
            _ => "+OK\r\n",
        };
        write.write_all(answer.as_bytes()).await.unwrap();
    }
}

/// The next command's words.
async fn command(read: &mut (impl AsyncBufRead + Unpin)) -> Option<Vec<String>> {
    let mut words = Vec::new();
    for _ in 0..length(read, '*').await? {
        let mut word = vec![0; length(read, '$').await? + 2];
        read.read_exact(&mut word).await.ok()?;
        words.push(String::from_utf8(word).unwrap().trim_end().to_owned());
    }
    Some(words).filter(|words| !words.is_empty())
}

async fn length(read: &mut (impl AsyncBufRead + Unpin), mark: char) -> Option<usize> {
    let mut line = String::new();
    read.read_line(&mut line).await.ok()?;
    line.trim_end().strip_prefix(mark)?.parse().ok()
}

/// What counts in a Redis that is yet to be opened at the listener, and how many ends it was not told of.
async fn store() -> (Arc<RedisStore>, TcpListener, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let link = RedisLink::start(&format!("redis://{}", listener.local_addr().unwrap()), |_| {}).unwrap();
    let lost = Arc::new(AtomicUsize::new(0));
    let counted = lost.clone();
    let store = RedisStore::new(link, Subject::Tenant, 1, move || {
        counted.fetch_add(1, Relaxed);
    });
    (Arc::new(store), listener, lost)
}

#[tokio::test]
async fn what_could_not_be_told_is_told_as_a_whole_when_redis_is_there() {
    let (store, listener, lost) = store().await;
    store.end("a".into(), PLACE, CHANGE, AT);
    let mut told = Box::pin(store.told());
    for _ in 0..100 {
        assert!(told.as_mut().now_or_never().is_none(), "it is waited for");
        tokio::task::yield_now().await;
    }
    let heard = Heard::default();
    tokio::spawn(redis(listener, &[], heard.clone()));
    told.await;
    // Its second is over.
    assert_eq!(*heard.lock(), [["0", "-5", "-1", "-5", "0", &store.member(PLACE)]]);
    assert_eq!(lost.load(Relaxed), 0);
}

#[tokio::test]
async fn of_what_may_have_been_heard_only_the_place_is_given_back_again() {
    let (store, listener, lost) = store().await;
    let heard = Heard::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], heard.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    store.end("a".into(), PLACE, CHANGE, AT);
    store.told().await;
    let member = store.member(PLACE);
    assert_eq!(*heard.lock(), [["0", "-5", "-1", "-5", "-1", &member], ["0", "0", "0", "0", "0", &member]]);
    assert_eq!(lost.load(Relaxed), 0);
}

#[tokio::test]
async fn what_redis_refuses_as_a_whole_is_told_again_and_of_what_it_may_have_begun_only_the_place() {
    const AGAIN: [&str; 5] = ["0", "-5", "-1", "-5", "0"];
    const PLACE_ONLY: [&str; 5] = ["0"; 5];
    let of = async |failures| {
        let (store, listener, lost) = store().await;
        let heard = Heard::default();
        tokio::spawn(redis(listener, failures, heard.clone()));
        store.link.connected().wait_for(|is| *is).await.unwrap();
        store.end("a".into(), PLACE, CHANGE, AT);
        store.told().await;
        assert_eq!(lost.load(Relaxed), 0);
        let heard = heard.lock();
        assert_eq!(heard.len(), 2, "{heard:?}");
        heard[1][..5].to_vec()
    };
    assert_eq!(of(&[Failure::Says("-READONLY You can't write against a read only replica.\r\n")]).await, AGAIN);
    assert_eq!(of(&[Failure::Says("-MISCONF Errors writing to the AOF file\r\n")]).await, AGAIN);
    assert_eq!(of(&[Failure::Says("-LOADING Redis is loading the dataset in memory\r\n")]).await, AGAIN);
    assert_eq!(of(&[Failure::Says("-OOM command not allowed\r\n")]).await, AGAIN);
    assert_eq!(of(&[Failure::Says("-NOPERM this user has no permissions\r\n")]).await, AGAIN);
    assert_eq!(of(&[Failure::Says("-ERR value is not an integer or out of range\r\n")]).await, PLACE_ONLY);
    assert_eq!(of(&[Failure::Says("-WRONGTYPE Operation against a key\r\n")]).await, PLACE_ONLY);
}

#[tokio::test]
async fn an_end_that_changes_nothing_is_not_told_and_never_lost() {
    let (store, listener, lost) = store().await;
    let [mut counted, without_place] = [[false; Bound::ALL.len()], [true, true, true, true, true, false]];
    store.end("nothing".into(), Place { request: 1, counted }, CHANGE, AT);
    store.end("unchanged".into(), Place { request: 2, counted: without_place }, Change::default(), AT);
    // Requests of the second: it is over by the time that there is a connection.
    counted[4] = true;
    store.end("over".into(), Place { request: 3, counted }, CHANGE, AT);
    store.told().await;
    let heard = Heard::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], heard.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    assert_eq!((heard.lock().len(), lost.load(Relaxed)), (0, 0));
    // It may have been heard, and there is no place to be given back.
    store.end("unheard".into(), Place { request: 4, counted: without_place }, CHANGE, AT);
    store.told().await;
    assert_eq!((heard.lock().len(), lost.load(Relaxed)), (1, 0));
}

#[test]
fn pauses_between_tries_double_up_to_half_a_minute() {
    let millis: Vec<_> = ends::pauses().take(9).map(|pause| pause.as_millis()).collect();
    assert_eq!(millis, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
}

#[tokio::test]
async fn a_place_that_may_have_been_given_unheard_is_given_back() {
    let (store, listener, _) = store().await;
    let heard = Heard::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], heard.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    let limits = Limits { concurrency: Some(1), ..Limits::default() };
    let claim = Claim { name: "a".into(), limits, is_named: false, prompt: 1, answer: 1 };
    assert!(store.take(&claim, AT).await.is_err());
    store.told().await;
    let heard = heard.lock();
    let [take, end] = heard.as_slice() else { panic!("{heard:?}") };
    assert_eq!((take.len(), end.len()), (10, 6), "a booking, and an end");
    assert_eq!((take.last(), &end[..5]), (end.last(), ["0"; 5].map(str::to_owned).as_slice()));
}

#[tokio::test]
async fn what_is_too_much_to_be_kept_is_told_of() {
    let (store, _listener, lost) = store().await;
    for _ in 0..=ends::MAX_WAITING {
        store.end("a".into(), PLACE, CHANGE, AT);
    }
    while lost.load(Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(lost.load(Relaxed), 1);
}
