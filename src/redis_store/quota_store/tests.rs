//! Writes of ends to a Redis that was unavailable or failed.

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
/// Number of words in a call before the arguments of a script with six keys.
const BEFORE_ARGUMENTS: usize = 9;

/// The arguments of the scripts that a Redis received.
type ReceivedArguments = Arc<Mutex<Vec<Vec<String>>>>;

/// How a Redis fails.
#[derive(Clone, Copy)]
enum Failure {
    /// It closes the connection.
    Breaks,
    /// It returns this error.
    Says(&'static str),
}

/// A Redis that fails for the first scripts in these ways, and runs those that follow.
async fn redis(listener: TcpListener, failures: &'static [Failure], received: ReceivedArguments) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve(stream, failures, received.clone()));
    }
}

async fn serve(stream: TcpStream, failures: &[Failure], received: ReceivedArguments) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    while let Some(words) = command(&mut read).await {
        let answer = match words[0].as_str() {
            "EVALSHA" => {
                let mut received = received.lock();
                received.push(words[BEFORE_ARGUMENTS..].to_vec());
                match failures.get(received.len() - 1) {
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

/// Reads the words of the next command.
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

/// Counters in a Redis that is not listening yet, and the number of ends that were given up.
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
async fn failed_write_is_repeated_completely_when_redis_is_back() {
    let (store, listener, lost) = store().await;
    store.end("a".into(), PLACE, CHANGE, AT);
    let mut written = Box::pin(store.written());
    for _ in 0..100 {
        assert!(written.as_mut().now_or_never().is_none(), "the write is pending");
        tokio::task::yield_now().await;
    }
    let received = ReceivedArguments::default();
    tokio::spawn(redis(listener, &[], received.clone()));
    written.await;
    // The second of the request is over.
    assert_eq!(*received.lock(), [["0", "-5", "-1", "-5", "0", &store.member(PLACE)]]);
    assert_eq!(lost.load(Relaxed), 0);
}

#[tokio::test]
async fn write_that_may_have_run_only_frees_the_slot_again() {
    let (store, listener, lost) = store().await;
    let received = ReceivedArguments::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], received.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    store.end("a".into(), PLACE, CHANGE, AT);
    store.written().await;
    let member = store.member(PLACE);
    assert_eq!(*received.lock(), [["0", "-5", "-1", "-5", "-1", &member], ["0", "0", "0", "0", "0", &member]]);
    assert_eq!(lost.load(Relaxed), 0);
}

#[tokio::test]
async fn rejected_script_is_repeated_and_a_partial_one_only_frees_the_slot() {
    const AGAIN: [&str; 5] = ["0", "-5", "-1", "-5", "0"];
    const PLACE_ONLY: [&str; 5] = ["0"; 5];
    let of = async |failures| {
        let (store, listener, lost) = store().await;
        let received = ReceivedArguments::default();
        tokio::spawn(redis(listener, failures, received.clone()));
        store.link.connected().wait_for(|is| *is).await.unwrap();
        store.end("a".into(), PLACE, CHANGE, AT);
        store.written().await;
        assert_eq!(lost.load(Relaxed), 0);
        let received = received.lock();
        assert_eq!(received.len(), 2, "{received:?}");
        received[1][..5].to_vec()
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
async fn end_without_changes_is_not_written_and_never_lost() {
    let (store, listener, lost) = store().await;
    let [mut counted, without_place] = [[false; Bound::ALL.len()], [true, true, true, true, true, false]];
    store.end("nothing".into(), Place { request: 1, counted }, CHANGE, AT);
    store.end("unchanged".into(), Place { request: 2, counted: without_place }, Change::default(), AT);
    // Requests of the second: it is over when the connection is there.
    counted[4] = true;
    store.end("over".into(), Place { request: 3, counted }, CHANGE, AT);
    store.written().await;
    let received = ReceivedArguments::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], received.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    assert_eq!((received.lock().len(), lost.load(Relaxed)), (0, 0));
    // The script may have run, and there is no slot to free.
    store.end("unheard".into(), Place { request: 4, counted: without_place }, CHANGE, AT);
    store.written().await;
    assert_eq!((received.lock().len(), lost.load(Relaxed)), (1, 0));
}

#[test]
fn pauses_between_attempts_double_up_to_30_seconds() {
    let millis: Vec<_> = ends::pauses().take(9).map(|pause| pause.as_millis()).collect();
    assert_eq!(millis, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
}

#[tokio::test]
async fn slot_that_may_have_been_given_is_freed() {
    let (store, listener, _) = store().await;
    let received = ReceivedArguments::default();
    tokio::spawn(redis(listener, &[Failure::Breaks], received.clone()));
    store.link.connected().wait_for(|is| *is).await.unwrap();
    let limits = Limits { concurrency: Some(1), ..Limits::default() };
    let claim = Claim { name: "a".into(), limits, is_named: false, prompt: 1, answer: 1 };
    assert!(store.take(&claim, AT).await.is_err());
    store.written().await;
    let received = received.lock();
    let [take, end] = received.as_slice() else { panic!("{received:?}") };
    assert_eq!((take.len(), end.len()), (10, 6), "a reservation and an end");
    assert_eq!((take.last(), &end[..5]), (end.last(), ["0"; 5].map(str::to_owned).as_slice()));
}

#[tokio::test]
async fn ends_over_the_limit_are_reported_as_lost() {
    let (store, _listener, lost) = store().await;
    for _ in 0..=ends::MAX_WAITING {
        store.end("a".into(), PLACE, CHANGE, AT);
    }
    while lost.load(Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(lost.load(Relaxed), 1);
}
