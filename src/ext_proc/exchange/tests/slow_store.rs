//! Quotas in a Redis that is slow or unreachable: how long a request waits, and which limits apply meanwhile.

use super::*;
use crate::redis_quotas::RedisQuotas;
use attache_picker::settings::{TenantRule, TenantSource};
use attache_quota as quota;
use attache_quota::{CountIn, OnStoreFailure, OnUnknownUser, UnknownPaths, UserRecordSettings};
use attache_redis_store::quota_store::RedisStore;
use attache_redis_store::quota_store::users::UserRecords;
use attache_redis_store::redis_link::RedisLink;
use parking_lot::Mutex;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

const PATIENCE: Duration = Duration::from_secs(60);
const TTL: Duration = Duration::from_secs(1);

/// The names of the commands that Redis has received.
type Heard = Arc<Mutex<Vec<String>>>;

/// A Redis that completes the handshake, returns `record` for the first lookup, and does not respond afterwards.
async fn silent_redis(record: &'static str) -> (Arc<RedisLink>, Heard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let heard = Heard::default();
    let hearing = heard.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, record, hearing.clone()));
        }
    });
    let link = RedisLink::start(&url, |_| {}).unwrap();
    link.connected().wait_for(|connected| *connected).await.unwrap();
    (link, heard)
}

async fn serve(stream: TcpStream, record: &'static str, heard: Heard) {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    while let Some(command) = command(&mut read).await {
        let is_first = !heard.lock().contains(&command);
        let answer = match command.as_str() {
            "GETRANGE" if is_first => Some(format!("${}\r\n{record}\r\n", record.len())),
            "CLIENT" => Some("+OK\r\n".to_owned()),
            _ => None,
        };
        heard.lock().push(command);
        if let Some(answer) = answer {
            write.write_all(answer.as_bytes()).await.unwrap();
        }
    }
}

/// The next command's first word.
async fn command(read: &mut (impl AsyncBufRead + Unpin)) -> Option<String> {
    let mut words = Vec::new();
    for _ in 0..length(read, '*').await? {
        let mut word = vec![0; length(read, '$').await? + 2];
        read.read_exact(&mut word).await.ok()?;
        words.push(String::from_utf8(word).unwrap().trim_end().to_owned());
    }
    words.into_iter().next()
}

async fn length(read: &mut (impl AsyncBufRead + Unpin), mark: char) -> Option<usize> {
    let mut line = String::new();
    read.read_line(&mut line).await.ok()?;
    line.trim_end().strip_prefix(mark)?.parse().ok()
}

fn settings(store: CountIn, user_records: Option<UserRecordSettings>) -> TenantSettings {
    let default = quota::Limits { concurrency: Some(1_000), ..quota::Limits::default() };
    TenantSettings {
        default,
        overrides: [].into(),
        answer_tokens: 50,
        unknown_paths: UnknownPaths::Estimate,
        unknown_path_tokens: 70,
        store,
        user_records,
    }
}

/// A world with the quotas of `subjects`; those in Redis use `link`.
fn world(
    setup: Setup,
    link: &Arc<RedisLink>,
    on_failure: OnStoreFailure,
    subjects: Vec<(Subject, TenantSettings, Arc<Book>)>,
) -> World {
    let rule = TenantRule { source: TenantSource::Header("x-tenant".to_owned()), strip: None };
    let exchange = ExchangeSettings { tenant: Some(rule), ..ExchangeSettings::default() };
    let world = Setup { exchange, ..setup }.build();
    let metrics = &world.processor.metrics;
    let users = Arc::new(UserRecords::new(link.clone()));
    let quotas = subjects.into_iter().map(|(subject, settings, book)| {
        let redis = Arc::new(RedisStore::new(link.clone(), subject, 1, || {}));
        let (store, redis) = match settings.store {
            CountIn::Redis => (Store::Shared, Some(redis)),
            CountIn::Memory => (Store::Memory(book), None),
        };
        let (link, users, metrics) = (link.clone(), users.clone(), metrics.clone());
        let shared = RedisQuotas { link, store: redis, users, timeout: PATIENCE, on_failure, metrics };
        let observer = world.processor.picker.observer.clone();
        Arc::new(Quotas::new(subject, settings, store, observer, noon).sharing(Arc::new(shared)))
    });
    let quotas = quotas.collect();
    let config = world.processor.picker.config();
    let again = ActiveConfig::new(config.pools().to_vec(), config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(again.with_quotas(quotas), || serde_json::Value::Null);
    world
}

fn book() -> Arc<Book> {
    Arc::new(Book::new(10))
}

/// A request that arrives at `at`, and its immediate replies.
fn ask(world: &World, at: Timestamp) -> (Exchange, Answered) {
    let mut exchange = Exchange::new(world.processor.clone(), at);
    let protocol_config = Some(config(BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed, false));
    let start = Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", "a")], false));
    let mut out = Actions::new();
    for message in [start, Message::RequestBody(body(completion("m", "p").as_bytes(), true))] {
        let message = ProcessingRequest { protocol_config, ..request(message) };
        exchange.on(Event::Message(Box::new(message)), at, &mut out).unwrap();
    }
    (exchange, Answered::of(out.make_contiguous()))
}

fn call(exchange: &mut Exchange) -> impl Future<Output = ()> {
    warmer::run(exchange.warming().expect("a call that is waited for"))
}

/// Sends the event that the background work of the request has run.
fn go_on(exchange: &mut Exchange, at: Timestamp) -> Answered {
    let mut out = Actions::new();
    exchange.on(Event::Warmed, at, &mut out).unwrap();
    Answered::of(out.make_contiguous())
}

#[tokio::test]
async fn request_waits_once_for_all_its_store_calls() {
    let (link, heard) = silent_redis("").await;
    let subjects = [Subject::Tenant, Subject::Model].map(|subject| (subject, settings(CountIn::Redis, None), book()));
    let world = world(Setup::default(), &link, OnStoreFailure::Allow, subjects.into());
    let (mut exchange, _) = ask(&world, NOW);
    drop(call(&mut exchange));
    let late = NOW.after(PATIENCE);
    go_on(&mut exchange, late);
    assert!(!exchange.is_routed(), "its model is asked for");
    let second = tokio::time::timeout(Duration::from_millis(700), call(&mut exchange)).await;
    assert!(second.is_ok(), "it has waited: {:?}", heard.lock());
    go_on(&mut exchange, late);
    assert!(exchange.is_routed());
    drop(exchange);
    world.assert_books_closed(1);
}

#[tokio::test]
async fn stale_record_applies_at_once_and_is_refreshed_once() {
    let (link, heard) = silent_redis(r#"{"name":"a","rpm":100}"#).await;
    let records = UserRecordSettings { unknown: OnUnknownUser::Refuse, ttl: TTL };
    let subjects = vec![(Subject::Tenant, settings(CountIn::Memory, Some(records)), book())];
    let world = world(Setup::default(), &link, OnStoreFailure::Refuse, subjects);
    let (mut first, _) = ask(&world, NOW);
    call(&mut first).await;
    go_on(&mut first, NOW);
    assert!(first.is_routed());
    for _ in 0..3 {
        let (exchange, told) = ask(&world, NOW.after(TTL));
        assert!(exchange.is_routed(), "it waits for nothing: {told:?}");
        assert_eq!(told.set.get("x-update-rpm"), None);
    }
    // After all commands that they have sent.
    let last = link.clone();
    tokio::spawn(async move { last.ask::<String>(redis::cmd("ECHO").arg("last")).await });
    while !heard.lock().iter().any(|command| command == "ECHO") {
        tokio::task::yield_now().await;
    }
    let reads = heard.lock().iter().filter(|command| *command == "GETRANGE").count();
    assert_eq!(reads, 2, "the first, and one for all that came when that was old");
}

#[tokio::test]
async fn request_is_served_by_the_model_it_was_counted_for() {
    // No server listens on this port.
    let link = RedisLink::start("redis://127.0.0.1:1", |_| {}).unwrap();
    let models = book();
    let subjects = vec![
        (Subject::Model, settings(CountIn::Memory, None), models.clone()),
        (Subject::Tenant, settings(CountIn::Redis, None), book()),
    ];
    let any = ["x", "y"].map(|model| RewriteTarget { model: model.into(), weight: 1 }).into();
    let setup = Setup { rewrites: ModelRewrites { any, ..ModelRewrites::default() }, ..Setup::default() };
    let world = world(setup, &link, OnStoreFailure::Allow, subjects);
    let mut served: HashMap<String, u64> = HashMap::new();
    let mut open = Vec::new();
    for _ in 0..32 {
        let (mut exchange, _) = ask(&world, NOW);
        call(&mut exchange).await;
        let told = go_on(&mut exchange, NOW);
        let sent: serde_json::Value = serde_json::from_str(told.text()).unwrap();
        *served.entry(sent["model"].as_str().unwrap().to_owned()).or_default() += 1;
        open.push(exchange);
    }
    assert_eq!(served.len(), 2, "{served:?}");
    for (model, count) in served {
        let may = |concurrency| {
            let limits = quota::Limits { concurrency: Some(concurrency), ..quota::Limits::default() };
            let name = model.as_str().into();
            let claim = quota::Claim { name, limits, is_named: false, prompt: 0, answer: 0 };
            models.take(&claim, quota::Wall(Duration::ZERO)).is_ok()
        };
        assert!(!may(count) && may(count + 1), "{count} of {model} are served, and others are counted");
    }
}
