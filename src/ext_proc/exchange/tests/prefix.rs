//! Requests that share a prefix go to one endpoint: while the first is in flight, after its end, and in the next turn.

use super::*;
use attache_picker::prefix::Fallback;
use attache_prefix::key::KeySpace;
use attache_prompt::blocks::TokenBlocks;
use attache_prompt::huggingface::HuggingFace;
use attache_prompt::memo::{Memo, SegmentCache};
use attache_prompt::tiktoken::{DEFAULT_ENCODING, Tables, Tiktoken};
use attache_prompt::{EncodeError, Encoder};
use attache_sim::{ServerConfig, SimConfig, serve};
use attache_tokenize::{RemotePool, RemoteSettings};

const CHAT: (&str, &str) = (":path", "/v1/chat/completions");

fn pool(servers: usize) -> World {
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    Setup { servers: vec![(0, 0.1, &[]); servers], parameters, ..Setup::default() }.build()
}

fn chat(messages: &[(&str, &str)]) -> String {
    let messages: Vec<_> = messages.iter().map(|(r, c)| serde_json::json!({"role": r, "content": c})).collect();
    serde_json::json!({"model": "m", "messages": messages}).to_string()
}

/// A text of about `words` words, different for each `name`.
pub(super) fn text(name: &str, words: usize) -> String {
    (0..words).map(|i| format!("{name}{i} ")).collect()
}

/// Sends a request and returns its endpoint.
fn ask(world: &World, sent: &str) -> (Exchange, String) {
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    (exchange, got.set[DESTINATION].clone())
}

fn answer(exchange: Exchange, status: &str, content: &str) {
    answer_with(exchange, status, content, serde_json::Value::Null);
}

fn answer_with(mut exchange: Exchange, status: &str, content: &str, usage: serde_json::Value) {
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", status)], false))));
    let message = serde_json::json!({
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}}], "usage": usage,
    });
    send(&mut exchange, request(Message::ResponseBody(body(message.to_string().as_bytes(), true))));
}

/// The estimated cached tokens of the last decision.
fn matched(world: &World) -> u32 {
    world.processor.decisions.snapshot().pop().unwrap().estimated_cached_tokens
}

#[test]
fn burst_of_equal_prompts_goes_to_one_endpoint_before_any_response() {
    let world = pool(16);
    let prompt = chat(&[("user", &text("burst", 300))]);
    let (first, to) = ask(&world, &prompt);
    let others: Vec<_> = (0..3).map(|_| ask(&world, &prompt)).collect();
    assert!(others.iter().all(|(_, other)| *other == to), "all at {to}");
    drop((first, others));
    let elsewhere: std::collections::BTreeSet<_> = (0..40).map(|_| ask(&world, &prompt).1).collect();
    assert!(elsewhere.len() > 1, "nothing was served, nothing is claimed any more: {elsewhere:?}");
    world.assert_books_closed(44);
}

#[test]
fn served_prompts_are_recorded_and_failed_ones_are_not() {
    let world = pool(16);
    let prompt = chat(&[("system", &text("rules", 400)), ("user", "first")]);
    let (exchange, to) = ask(&world, &prompt);
    answer(exchange, "200", "fine");
    for question in ["second", "third"] {
        let (exchange, again) = ask(&world, &chat(&[("system", &text("rules", 400)), ("user", question)]));
        assert_eq!(again, to);
        answer(exchange, "200", "fine");
        assert!(matched(&world) > 400, "the system prompt was foretold: {}", matched(&world));
    }
    let config = world.processor.picker.config();
    let stats = config.pools()[0].prefix.as_ref().unwrap().cache.stats();
    let [lookups, prompts, found] = [&stats.lookups, &stats.prompt_tokens, &stats.matched_tokens]
        .map(|n| n.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!(lookups, 3, "each prompt is looked up once");
    assert!(found > 800 && prompts > found, "{found} of {prompts} tokens");
    let failing = chat(&[("system", &text("failing", 400))]);
    for _ in 0..5 {
        let (exchange, _) = ask(&world, &failing);
        answer(exchange, "500", "");
        assert_eq!(matched(&world), 0);
    }
}

#[test]
fn next_turn_matches_the_previous_response() {
    let world = pool(16);
    let (question, reply) = (text("question", 100), text("reply", 1_000));
    let (exchange, to) = ask(&world, &chat(&[("user", &question)]));
    answer(exchange, "200", &reply);
    let (exchange, again) = ask(&world, &chat(&[("user", &question), ("assistant", &reply), ("user", "go on")]));
    answer(exchange, "200", "fine");
    assert_eq!(again, to);
    let all = u32::try_from((question.len() + reply.len()) / 4).unwrap();
    assert!((all - 32..=all + 32).contains(&matched(&world)), "{} of {all}", matched(&world));
}

#[test]
fn requests_that_skip_the_cache_record_no_cached_tokens() {
    let world = pool(4);
    let plain = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text("same", 400)}]});
    let mut measured = plain.clone();
    measured["prompt_logprobs"] = 1.into();
    let usage = |cached: u32| {
        let details = serde_json::json!({"cached_tokens": cached});
        serde_json::json!({"prompt_tokens": 800, "completion_tokens": 1, "prompt_tokens_details": details})
    };
    let stats = || {
        let config = world.processor.picker.config();
        let stats = config.pools()[0].prefix.as_ref().unwrap().cache.stats();
        [&stats.foretold_tokens, &stats.reported_tokens].map(|n| n.load(std::sync::atomic::Ordering::Relaxed))
    };
    let (exchange, to) = ask(&world, &measured.to_string());
    answer_with(exchange, "200", "fine", usage(0));
    let (exchange, again) = ask(&world, &plain.to_string());
    assert_eq!(again, to, "it was cached all the same");
    answer_with(exchange, "200", "fine", usage(790));
    assert!(matched(&world) > 400);
    let [foretold, reported] = stats();
    assert!(foretold > 400 && reported == 790, "{foretold} {reported}");
    let (exchange, again) = ask(&world, &measured.to_string());
    assert_eq!(again, to);
    answer_with(exchange, "200", "fine", usage(0));
    assert_eq!(
        (matched(&world), stats()),
        (0, [foretold, reported]),
        "nothing is saved, and nothing is learned from that"
    );
}

#[test]
fn prompt_cut_by_the_server_is_routed_by_load() {
    let world = pool(4);
    let plain = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text("same", 400)}]});
    let mut cut = plain.clone();
    cut["truncate_prompt_tokens"] = 100.into();
    for body in [&plain, &cut, &cut] {
        let (exchange, _) = ask(&world, &body.to_string());
        answer(exchange, "200", "fine");
        assert_eq!(matched(&world), 0);
    }
    let config = world.processor.picker.config();
    let lookups =
        config.pools()[0].prefix.as_ref().unwrap().cache.stats().lookups.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(lookups, 1, "two were not looked up");
}

#[test]
fn partly_encoded_prompt_matches_its_start_only() {
    let (blocks, memo) = token_blocks(|encoder| Arc::new(encoder));
    let blocks = TokenBlocks { max_bytes: 4_000, ..blocks };
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    let tokenizer = Some(Tokenizer::Fields { blocks, memo });
    let world = Setup { servers: vec![(0, 0.1, &[]); 16], parameters, tokenizer, ..Setup::default() }.build();
    // Several texts: none that exceeds the limit is encoded in part.
    let turns: Vec<String> = (0..10).map(|i| text(&format!("turn{i}x"), 100)).collect();
    let prompt = chat(&turns.iter().map(|turn| ("user", &**turn)).collect::<Vec<_>>());
    let details = serde_json::json!({"cached_tokens": 4_900});
    let usage = serde_json::json!({"prompt_tokens": 5_000, "completion_tokens": 1, "prompt_tokens_details": details});
    let mut went = Vec::new();
    for _ in 0..3 {
        let (exchange, to) = ask(&world, &prompt);
        answer_with(exchange, "200", "fine", usage.clone());
        went.push((to, matched(&world) > 400));
    }
    let first = went[0].0.clone();
    assert_eq!(went, [(first.clone(), false), (first.clone(), true), (first, true)]);
    let config = world.processor.picker.config();
    let cache = &config.pools()[0].prefix.as_ref().unwrap().cache;
    let stats = cache.stats();
    let told = [&stats.foretold_tokens, &stats.reported_tokens].map(|n| n.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!(
        (told, cache.tokens_per_block()),
        ([0, 0], 16.0),
        "what is cached behind the beginning was not foretold"
    );
}

fn with_image(texts: [&str; 2], image: &str, reply: Option<&str>) -> String {
    let part = |text: &str| serde_json::json!({"type": "text", "text": text});
    let image =
        serde_json::json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{image}")}});
    let mut messages = vec![serde_json::json!({"role": "user", "content": [part(texts[0]), image, part(texts[1])]})];
    if let Some(reply) = reply {
        messages.push(serde_json::json!({"role": "assistant", "content": reply}));
        messages.push(serde_json::json!({"role": "user", "content": "go on"}));
    }
    serde_json::json!({"model": "m", "messages": messages}).to_string()
}

/// With every tokenizer, the next turn matches this turn with its image and response. With another image it matches
/// only the part before the image.
fn assert_images_are_told_apart(tokenizer: Tokenizer) {
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    let servers = vec![(0, 0.1, [].as_slice()); 16];
    let world = Setup { servers, parameters, tokenizer: Some(tokenizer), ..Setup::default() }.build();
    let (before, behind, reply) = (text("before", 200), text("behind", 200), text("reply", 200));
    let (exchange, to) = ask(&world, &with_image([&before, &behind], "AAAA", None));
    answer(exchange, "200", &reply);
    let (exchange, again) = ask(&world, &with_image([&before, &behind], "AAAA", Some(&reply)));
    answer(exchange, "200", "fine");
    let all = u32::try_from((before.len() + behind.len() + reply.len()) / 4).unwrap();
    assert!(again == to && (all - 32..=all + 32).contains(&matched(&world)), "{} of {all}", matched(&world));
    let (exchange, again) = ask(&world, &with_image([&before, &behind], "BBBB", Some(&reply)));
    answer(exchange, "200", "fine");
    let head = u32::try_from(before.len() / 4).unwrap();
    assert!(again == to && (head - 32..=head).contains(&matched(&world)), "{} of {head}", matched(&world));
}

#[test]
fn remote_tokens_are_not_fetched_for_prompts_with_images() {
    let (blocks, _) = token_blocks(|encoder| Arc::new(encoder));
    let clock = attache_types::clock::Clock::start();
    let pool = RemotePool::new("pool".into(), RemoteSettings::default(), Arc::default(), clock, 7).unwrap();
    let (pool, canonical) = (Arc::new(pool), Characters::new(KeySpace::new(7)));
    assert_images_are_told_apart(Tokenizer::Remote { pool: pool.clone(), blocks, canonical, fallback: Fallback::None });
    assert_eq!(pool.stats().requests(), 0);
}

#[test]
fn prompts_with_images_have_keys_with_any_template() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_vectors");
    let [tokenizer, template] =
        ["tokenizer.json", "chat_template.jinja"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    let model = HuggingFace::from_parts(tokenizer.as_bytes(), None, Some(&template)).unwrap();
    let (blocks, memo) = token_blocks(|encoder| Arc::new(encoder));
    let canonical = Characters::new(KeySpace::new(7));
    assert_images_are_told_apart(Tokenizer::HuggingFace { model: Arc::new(model), blocks, memo, canonical });
}

/// Requests to vLLM 0.32 with the tokens that it made of them, and one that is rendered in the background.
#[test]
fn prompt_length_is_the_count_of_the_models_own_tokenizer() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_vectors");
    let [tokenizer, template, vectors] = ["tokenizer.json", "chat_template.jinja", "vectors.json"]
        .map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    let model = Arc::new(HuggingFace::from_parts(tokenizer.as_bytes(), None, Some(&template)).unwrap());
    let memo = Arc::new(Memo::new(model.clone(), b"tiny", model.cuts(), Arc::new(SegmentCache::new(1 << 20, 7))));
    let blocks = TokenBlocks::new(KeySpace::new(7), memo.clone(), model.cuts());
    let canonical = Characters::new(KeySpace::new(7));
    let counts = |text: &str| {
        let mut ids = Vec::new();
        model.encode(text, &mut ids).unwrap();
        ids.len()
    };
    let long = text("long", 4_000);
    let rendered = format!("<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n");
    let mut cases = vec![("long".to_owned(), chat(&[("user", &long)]), counts(&rendered))];
    // The order of members counts, so requests are not parsed.
    type Vector<'v> = std::collections::BTreeMap<&'v str, &'v serde_json::value::RawValue>;
    for vector in serde_json::from_str::<Vec<Vector<'_>>>(&vectors).unwrap() {
        let sent = vector["request"].get().replacen('{', r#"{"model":"m","#, 1);
        let tokens: Vec<u32> = serde_json::from_str(vector["token_ids"].get()).unwrap();
        cases.push((vector["name"].get().to_owned(), sent, tokens.len()));
    }
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    let tokenizer = Some(Tokenizer::HuggingFace { model: model.clone(), blocks, memo, canonical });
    let world = Setup { parameters, tokenizer, ..Setup::default() }.build();
    for time in ["first", "second"] {
        for (name, sent, tokens) in &cases {
            let mut exchange = world.exchange();
            send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
            send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
            if let Some(warming) = exchange.warming() {
                compute(warming);
                exchange.on(Event::Warmed, NOW, &mut Actions::new()).unwrap();
            }
            // A wrong report of one server changes the estimates of texts, and no count.
            answer_with(exchange, "200", "fine", serde_json::json!({"prompt_tokens": 9_000}));
            let record = world.processor.decisions.snapshot().pop().unwrap();
            assert_eq!(record.estimated_prompt_tokens as usize, *tokens, "{name}, the {time} time");
        }
    }
}

/// Both on the serving thread and in the background, the reason is kept for the log and the status page.
#[tokio::test]
async fn prompt_that_its_template_refuses_is_counted_with_model_and_reason() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_vectors");
    let tokenizer = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let model = HuggingFace::from_parts(&tokenizer, None, Some("{{ raise_exception('no such role') }}")).unwrap();
    let (blocks, memo) = token_blocks(|encoder| Arc::new(encoder));
    let canonical = Characters::new(KeySpace::new(7));
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    let tokenizer = Some(Tokenizer::HuggingFace { model: Arc::new(model), blocks, memo, canonical });
    let world = Setup { parameters, tokenizer, ..Setup::default() }.build();
    let (exchange, _) = ask(&world, &chat(&[("user", "short")]));
    answer(exchange, "200", "fine");
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
    let long = chat(&[("user", &text("long", 8_000))]);
    assert!(send(&mut exchange, request(Message::RequestBody(body(long.as_bytes(), true)))).is_empty());
    warmer::run(exchange.warming().expect("background work")).await;
    let mut out = Actions::new();
    exchange.on(Event::Warmed, NOW, &mut out).unwrap();
    assert!(Answered::of(&Vec::from(out)).set.contains_key(DESTINATION));
    answer(exchange, "200", "fine");
    let config = world.processor.picker.config();
    let kinds = config.pools()[0].prefix.as_ref().unwrap().cache.unread().kinds();
    let shown: Vec<_> = kinds.iter().map(|kind| (&*kind.reason, kind.prompts)).collect();
    assert_eq!(shown, [("the chat template failed: no such role (line 1)", 2)]);
    assert!(!kinds[0].model.is_empty());
    assert_eq!(world.processor.metrics.degraded.get(attache_picker::event::Degraded::Untokenized), 2);
}

#[tokio::test]
async fn known_remote_tokens_are_counted_once_per_request() {
    let server = ServerConfig::default();
    let model = server.models[0].clone();
    let fleet = serve(&SimConfig { endpoints: 1, port: 0, server, ..SimConfig::default() }).unwrap();
    let store = Arc::new(SnapshotStore::default());
    let endpoint = Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(fleet.addresses()[0])));
    store.publish(PoolSnapshot::new(1, true, vec![EndpointState::new(endpoint, None)]));
    let settings = RemoteSettings { decision_timeout: Duration::from_secs(20), ..RemoteSettings::default() };
    let pool = RemotePool::new("pool".into(), settings, store, attache_types::clock::Clock::start(), 7).unwrap();
    let (blocks, _) = token_blocks(|encoder| Arc::new(encoder));
    let (pool, canonical) = (Arc::new(pool), Characters::new(KeySpace::new(7)));
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    let tokenizer = Some(Tokenizer::Remote { pool: pool.clone(), blocks, canonical, fallback: Fallback::None });
    let world = Setup { parameters, tokenizer, ..Setup::default() }.build();
    let prompt = serde_json::json!({"model": model, "messages": [{"role": "user", "content": text("same", 400)}]});
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
    assert!(send(&mut exchange, request(Message::RequestBody(body(prompt.to_string().as_bytes(), true)))).is_empty());
    warmer::run(exchange.warming().expect("a server is asked")).await;
    let mut out = Actions::new();
    exchange.on(Event::Warmed, NOW, &mut out).unwrap();
    assert!(Answered::of(&Vec::from(out)).set.contains_key(DESTINATION));
    let stats = pool.stats();
    assert_eq!((stats.requests(), stats.cache_hits(), stats.calls()), (1, 0, 1));
    for n in 1..=3 {
        let (exchange, _) = ask(&world, &prompt.to_string());
        answer(exchange, "200", "fine");
        assert_eq!((stats.requests(), stats.cache_hits(), stats.calls()), (1 + n, n, 1));
    }
    assert!(matched(&world) > 100, "{}", matched(&world));
}

#[tokio::test]
async fn missing_remote_tokens_use_the_fallback() {
    for which in ["none", "characters", "tiktoken"] {
        let clock = attache_types::clock::Clock::start();
        let pool = RemotePool::new("pool".into(), RemoteSettings::default(), Arc::default(), clock, 7).unwrap();
        let (blocks, _) = token_blocks(|encoder| Arc::new(encoder));
        let fallback = match which {
            "characters" => Fallback::Characters,
            "tiktoken" => Fallback::Fields(Box::new(token_blocks(|encoder| Arc::new(encoder)).0)),
            _ => Fallback::None,
        };
        let (pool, canonical) = (Arc::new(pool), Characters::new(KeySpace::new(7)));
        let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
        let tokenizer = Some(Tokenizer::Remote { pool, blocks, canonical, fallback });
        let world = Setup { parameters, tokenizer, ..Setup::default() }.build();
        for _ in 0..2 {
            let mut exchange = world.exchange();
            send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
            let prompt = chat(&[("user", &text("same", 400))]);
            assert!(send(&mut exchange, request(Message::RequestBody(body(prompt.as_bytes(), true)))).is_empty());
            warmer::run(exchange.warming().expect("servers are asked")).await;
            let mut out = Actions::new();
            exchange.on(Event::Warmed, NOW, &mut out).unwrap();
            assert!(Answered::of(&Vec::from(out)).set.contains_key(DESTINATION));
            answer(exchange, "200", "fine");
        }
        assert_eq!(matched(&world) > 100, which != "none", "{which}: {}", matched(&world));
    }
}

#[test]
fn tenants_share_prefixes_unless_isolated() {
    for isolate_tenants in [false, true] {
        let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
        let world = Setup { parameters, isolate_tenants, ..Setup::default() }.build();
        let prompt = chat(&[("user", &text("same", 400))]);
        let mut found = Vec::new();
        for tenant in ["a", "b", "a"] {
            let mut exchange = world.exchange();
            send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT, ("x-tenant", tenant)], false))));
            send(&mut exchange, request(Message::RequestBody(body(prompt.as_bytes(), true))));
            answer(exchange, "200", "fine");
            found.push(matched(&world) > 400);
        }
        assert_eq!(found, [false, !isolate_tenants, true]);
    }
}

#[test]
fn salts_models_and_tools_separate_prompts() {
    let world = pool(16);
    let plain = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text("same", 400)}]});
    let (exchange, _) = ask(&world, &plain.to_string());
    answer(exchange, "200", "fine");
    for (key, value) in [
        ("cache_salt", serde_json::json!("s")),
        ("model", serde_json::json!("adapter")),
        ("tools", serde_json::json!([{"type": "function", "function": {"name": text("tool", 20)}}])),
    ] {
        let mut other = plain.clone();
        other[key] = value;
        let (exchange, _) = ask(&world, &other.to_string());
        answer(exchange, "200", "fine");
        assert_eq!(matched(&world), 0, "{key}");
    }
    let (exchange, _) = ask(&world, &plain.to_string());
    answer(exchange, "200", "fine");
    assert!(matched(&world) > 400);
}

/// A pool whose long prompts are encoded in the background.
pub(super) fn encoding_elsewhere(setup: Setup) -> Setup {
    encoding(setup, |encoder| Arc::new(encoder))
}

/// A pool that encodes prompts with the encoder that `encoder` returns.
fn encoding(setup: Setup, encoder: fn(Tiktoken) -> Arc<dyn Encoder>) -> Setup {
    let (blocks, memo) = token_blocks(encoder);
    let parameters = serde_json::json!({"scorers": [{"type": "prefix-cache-scorer"}]});
    Setup { parameters, tokenizer: Some(Tokenizer::Fields { blocks, memo }), ..setup }
}

fn token_blocks(encoder: fn(Tiktoken) -> Arc<dyn Encoder>) -> (TokenBlocks, Arc<Memo>) {
    let tiktoken = Tables::default().encoder(DEFAULT_ENCODING);
    let cuts = tiktoken.cuts().unwrap();
    let memory = Arc::new(SegmentCache::new(16 << 20, 7));
    let memo = Arc::new(Memo::new(encoder(tiktoken), b"test", cuts.clone(), memory));
    (TokenBlocks::new(KeySpace::new(7), memo.clone(), cuts), memo)
}

/// An encoder that panics for one text.
#[derive(Debug)]
struct Fragile(Tiktoken);

impl Encoder for Fragile {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        assert!(!text.contains("unbearable"));
        self.0.encode(text, out)
    }
}

#[test]
fn response_passes_although_the_tokenizer_panics() {
    let world = encoding(Setup::default(), |encoder| Arc::new(Fragile(encoder))).build();
    let (mut exchange, _) = ask(&world, &chat(&[("user", &text("question", 100))]));
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
    let message = r#"{"choices":[{"message":{"role":"assistant","content":"an unbearable answer"}}]}"#;
    let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(message.as_bytes(), true)))));
    assert_eq!((got.text(), got.ended), (message, 1));
    assert_eq!(world.processor.metrics.panics.get(), 1, "it was to be learned");
    assert_eq!(world.processor.decisions.snapshot().pop().unwrap().end, "complete");
    drop(exchange);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Routed), 1);
    world.assert_books_closed(1);
}

#[test]
fn long_new_conversation_is_looked_up_after_background_encoding() {
    for engines_tell in [false, true] {
        let world = encoding_elsewhere(Setup { engines_tell, ..Setup::default() }).build();
        // Each turn is short; together they exceed the limit of encoding on the serving thread.
        let turns: Vec<String> = (0..12).map(|i| text(&format!("turn{i}x"), 400)).collect();
        let prompt = chat(&turns.iter().map(|turn| ("user", &**turn)).collect::<Vec<_>>());
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[CHAT], false))));
        assert!(send(&mut exchange, request(Message::RequestBody(body(prompt.as_bytes(), true)))).is_empty());
        compute(exchange.warming().expect("it is encoded elsewhere"));
        let mut out = Actions::new();
        exchange.on(Event::Warmed, NOW, &mut out).unwrap();
        assert!(Answered::of(&Vec::from(out)).set.contains_key(DESTINATION));
        let config = world.processor.picker.config();
        let lookups =
            config.pools()[0].prefix.as_ref().unwrap().cache.stats().lookups.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(lookups, 1, "engines tell: {engines_tell}");
    }
}
