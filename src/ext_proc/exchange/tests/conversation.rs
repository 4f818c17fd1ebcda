//! Turns of one conversation whose decode workers keep blocks: which of them the next prefill leg may fetch.

use super::splitting::{ROLES, direct, give_leg_result, good, reply};
use super::*;
use attache_disagg::{Failure, Mode};
use attache_picker::split::{DISAGGREGATION_HEADER, LegCall, LegResult};
use attache_pool::health::HealthOutcome;
use attache_scheduling::Decider;
use serde_json::{Value as Json, json};

/// Two prefill workers, two decode workers.
fn world(tokenizer: Option<Tokenizer>, connector: &str) -> World {
    let policy = SplitPolicy { decider: Decider::Always, together: Vec::new(), whole: true, required: false };
    Setup {
        servers: vec![(0, 0.0, &[]); 4],
        roles: ROLES,
        disagg: Some((policy, Mode::Direct(direct(connector)))),
        strategy: "predicted-latency",
        parameters: Json::Null,
        tokenizer,
        ..Setup::default()
    }
    .build()
}

/// Workers with these roles and rolesets; the strategy may choose any.
fn sets(roles: &'static [&'static str], sets: &[&str]) -> World {
    let policy =
        SplitPolicy { decider: Decider::Always, together: vec!["roleset-name".into()], whole: true, required: false };
    let world = Setup {
        servers: vec![(0, 0.0, &[]); roles.len()],
        roles,
        disagg: Some((policy, Mode::Direct(direct("nixl")))),
        strategy: "pipeline",
        parameters: json!({
            "scorers": [{"type": "prefix-cache-scorer", "weight": 1}],
            "picker": {"type": "random-picker"},
        }),
        ..Setup::default()
    }
    .build();
    let before = world.snapshot.load();
    let labelled = before.endpoints.iter().zip(sets).map(|(state, set)| {
        let mut spec = (*state.endpoint.spec).clone();
        spec.labels.insert("roleset-name".into(), (*set).into());
        state.clone().respecified(spec)
    });
    let labelled = labelled.collect();
    drop(before);
    world.snapshot.publish(PoolSnapshot::new(2, true, labelled));
    world.processor.picker.config().pools()[0].prefix.as_ref().unwrap().cache.carried().want();
    world
}

fn ids(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn completion(tokens: &[u32]) -> Json {
    json!({"model": "m", "prompt": tokens, "max_tokens": 9, "cache_salt": "s"})
}

/// Transfer parameters as in vLLM 0.32. Their time is that of vLLM's clock.
fn params(tokens: usize) -> String {
    format!(
        r#"{{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[4,5]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.3","remote_port":5600,"tp_size":1,"remote_num_tokens":{tokens},"remote_blocks_expiry_time":81234.5,"transfer_mode":"pull","new_in_2027":1.50}}"#
    )
}

/// Sends a request, and returns the call of its prefill leg.
fn asked(world: &World, path: &str, sent: &Json) -> (Exchange, LegCall) {
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[(":path", path), (":method", "POST")], false))));
    let out = send(&mut exchange, request(Message::RequestBody(body(sent.to_string().as_bytes(), true))));
    let mut asks = exchange.leg_calls();
    assert!(out.is_empty() && asks.len() == 1, "{asks:?}");
    (exchange, asks.remove(0))
}

/// The transfer parameters of a prefill leg, unless they are the default ones.
fn carried(ask: &LegCall) -> Option<String> {
    let text = std::str::from_utf8(&ask.body).unwrap();
    let params = text.split(r#""kv_transfer_params":"#).nth(1).unwrap().strip_suffix('}').unwrap();
    let usual = serde_json::from_str::<Json>(params).unwrap()["remote_host"].is_null();
    (!usual).then(|| params.to_owned())
}

/// A response with `params` in its middle. The client must get every byte of it.
fn answered(exchange: &mut Exchange, choice: &Json, usage: &Json, params: &str) -> String {
    passes(exchange, &format!(r#"{{"choices":[{choice}],"usage":{usage},"kv_transfer_params":{params}}}"#))
}

/// Sends a complete response, and returns its disaggregation header.
fn passes(exchange: &mut Exchange, whole: &str) -> String {
    let pairs = [(":status", "200"), ("content-type", "application/json")];
    let first = Answered::of(&send(exchange, request(Message::ResponseHeaders(headers(&pairs, false)))));
    let seen = Answered::of(&send(exchange, request(Message::ResponseBody(body(whole.as_bytes(), true)))));
    assert_eq!(seen.text(), whole);
    first.set[DISAGGREGATION_HEADER].clone()
}

fn answer_of(tokens: &[u32]) -> Json {
    json!({"index": 0, "text": "…", "finish_reason": "length", "token_ids": tokens})
}

/// One turn of token ids with a response of 9 tokens. Returns the transfer parameters of its prefill leg.
fn turn(world: &World, prompt: &[u32]) -> (Vec<u32>, Option<String>) {
    let (mut exchange, ask) = asked(world, "/v1/completions", &completion(prompt));
    give_leg_result(&mut exchange, 0, good(), 10);
    let answer = ids(90_000, 9);
    let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": 9});
    let prefill_outcome = answered(&mut exchange, &answer_of(&answer), &usage, &params(prompt.len() + 8));
    assert_eq!(prefill_outcome.contains("carried"), carried(&ask).is_some(), "{prefill_outcome}");
    (prompt.iter().chain(&answer).copied().collect(), carried(&ask))
}

fn go_on(history: &[u32]) -> Vec<u32> {
    history.iter().copied().chain(ids(50_000, 20)).collect()
}

/// A pool in which a decode worker has reported that it keeps blocks.
fn keeping() -> World {
    let world = world(None, "nixl");
    turn(&world, &ids(0, 40));
    assert!(kept(&world) == 0, "of the first turn the prompt's tokens were not known");
    world
}

fn kept(world: &World) -> usize {
    world.processor.picker.config().pools()[0].prefix.as_ref().unwrap().cache.carried().len()
}

#[test]
fn next_turn_fetches_kept_blocks_byte_for_byte_and_once() {
    let world = keeping();
    let (history, before) = turn(&world, &ids(100, 100));
    assert_eq!(before, None);
    let (history, carried) = turn(&world, &go_on(&history));
    assert_eq!(carried, Some(params(108)));
    let next = go_on(&history);
    assert_eq!(turn(&world, &next).1, Some(params(137)));
    let mut edited = next.clone();
    edited[136] += 1;
    assert_eq!(turn(&world, &edited).1, None);
    assert_eq!(turn(&world, &next).1, None, "it was given before");
    let mut other_salt = completion(&go_on(&turn(&world, &ids(100, 100)).0));
    other_salt["cache_salt"] = "t".into();
    let (_, ask) = asked(&world, "/v1/completions", &other_salt);
    assert_eq!(self::carried(&ask), None);
}

#[test]
fn kept_blocks_pass_to_next_attempt_only_if_worker_was_not_reached() {
    for (failure, again) in [
        (LegResult::Failed(Failure::Refused), true),
        (LegResult::Failed(Failure::Broken), false),
        (reply(500, "{}"), false),
        (reply(200, "{}"), false),
    ] {
        let world = keeping();
        let (history, _) = turn(&world, &ids(100, 100));
        let (mut exchange, first) = asked(&world, "/v1/completions", &completion(&go_on(&history)));
        assert!(carried(&first).is_some());
        give_leg_result(&mut exchange, 0, failure.clone(), 10);
        let second = exchange.leg_calls().remove(0);
        assert_ne!(second.url, first.url);
        assert_eq!(carried(&second).is_some(), again, "{failure:?}");
        give_leg_result(&mut exchange, 1, good(), 20);
        drop(exchange);
        world.assert_books_closed(3);
    }
}

#[test]
fn unreliable_token_counts_are_not_recorded_as_kept() {
    let prompt = ids(100, 100);
    let whole = answer_of(&ids(90_000, 9));
    let usage = json!({"prompt_tokens": 100});
    let stopped = json!({"index": 0, "text": "…", "finish_reason": "stop"});
    for (what, choice, usage, params) in [
        ("nothing is told", &whole, &usage, "null".to_owned()),
        ("for another decode", &whole, &usage, params(108).replace(r#"decode":true"#, r#"decode":false"#)),
        ("no host", &whole, &usage, params(108).replace("remote_host", "host")),
        ("pushed", &whole, &usage, params(108).replace("pull", "push")),
        ("other tokens than ours", &whole, &json!({"prompt_tokens": 101}), params(108)),
        ("more tokens than there are", &whole, &usage, params(109)),
        ("fewer", &whole, &usage, params(107)),
        ("a text that can not be encoded", &stopped, &usage, params(108)),
        ("already over", &whole, &usage, params(108).replace("81234.5", "1700000000.0")),
    ] {
        let world = keeping();
        let (mut exchange, _) = asked(&world, "/v1/completions", &completion(&prompt));
        give_leg_result(&mut exchange, 0, good(), 10);
        answered(&mut exchange, choice, usage, &params);
        assert_eq!(kept(&world), 0, "{what}");
    }
    // After a disconnect, the client's next turn can't contain the response.
    let world = keeping();
    let (mut exchange, _) = asked(&world, "/v1/completions", &completion(&prompt));
    give_leg_result(&mut exchange, 0, good(), 10);
    let pairs = [(":status", "200"), ("content-type", "application/json")];
    send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
    drop(exchange);
    assert_eq!(kept(&world), 0);
}

#[test]
fn kept_blocks_of_failing_workers_are_not_fetched() {
    let world = keeping();
    let (history, _) = turn(&world, &ids(100, 100));
    for state in &world.snapshot.load().endpoints[2..] {
        for _ in 0..20 {
            state.endpoint.health.record(HealthOutcome::ConnectFailure, NOW, &HealthPolicy::default());
        }
    }
    let (_, ask) = asked(&world, "/v1/completions", &completion(&go_on(&history)));
    assert_eq!((carried(&ask), kept(&world)), (None, 1), "it stays for when the server is back");
}

#[test]
fn only_paired_prefill_workers_fetch_and_none_from_itself() {
    for (world, may) in [
        (
            sets(&["prefill", "prefill", "decode", "decode"], &["a", "b", "a", "b"]),
            [("1", "3", true), ("2", "4", true), ("1", "4", false), ("2", "3", false)].as_slice(),
        ),
        (
            sets(&["both", "both"], &["a", "a"]),
            &[("1", "2", true), ("2", "1", true), ("1", "1", false), ("2", "2", false)],
        ),
    ] {
        let of = |url: &str| url.split("192.168.1.").nth(1).unwrap()[..1].to_owned();
        let mut seen = [false; 2];
        for number in 0..60 {
            let first = ids(number * 1_000, 100);
            let (mut exchange, _) = asked(&world, "/v1/completions", &completion(&first));
            let keeper = of(&give_leg_result(&mut exchange, 0, good(), 10).set[DESTINATION]);
            let answer = ids(90_000, 9);
            answered(&mut exchange, &answer_of(&answer), &json!({"prompt_tokens": 100}), &params(108));
            let history: Vec<u32> = first.into_iter().chain(answer).collect();
            let (_exchange, ask) = asked(&world, "/v1/completions", &completion(&go_on(&history)));
            let pair = (of(&ask.url), keeper);
            let (.., fetches) = may.iter().find(|(p, d, _)| (*p, *d) == (&*pair.0, &*pair.1)).unwrap();
            assert_eq!(carried(&ask).is_some(), *fetches, "{pair:?}");
            seen[usize::from(*fetches)] = true;
        }
        assert_eq!(seen, [true; 2], "both cases came up");
    }
}

#[test]
fn connectors_without_carry_fetch_nothing() {
    let world = world(None, "shfs");
    for _ in 0..2 {
        let (mut exchange, _) = asked(&world, "/v1/completions", &completion(&ids(100, 100)));
        give_leg_result(&mut exchange, 0, good(), 10);
        answered(&mut exchange, &answer_of(&ids(90_000, 9)), &json!({}), &params(108));
    }
    let config = world.processor.picker.config();
    let cache = &config.pools()[0].prefix.as_ref().unwrap().cache;
    assert!(!cache.carried().is_wanted() && cache.carried().is_empty());
}

mod chat {
    use super::*;
    use attache_prefix::key::KeySpace;
    use attache_prompt::Encoder;
    use attache_prompt::blocks::TokenBlocks;
    use attache_prompt::huggingface::HuggingFace;
    use attache_prompt::memo::{Cuts, Memo, SegmentCache};

    const CHAT: &str = "/v1/chat/completions";

    fn model() -> Arc<HuggingFace> {
        let read = |name: &str| {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_vectors");
            std::fs::read_to_string(folder.join(name)).unwrap()
        };
        let (tokenizer, template) = (read("tokenizer.json"), read("chat_template.jinja"));
        Arc::new(HuggingFace::from_parts(tokenizer.as_bytes(), None, Some(&template)).unwrap())
    }

    fn keeping() -> World {
        let model = model();
        let memo = Arc::new(Memo::new(model.clone(), b"tiny", Cuts::none(), Arc::new(SegmentCache::new(1 << 20, 7))));
        let blocks = TokenBlocks::new(KeySpace::new(7), memo.clone(), Cuts::none());
        let canonical = Characters::new(KeySpace::new(7));
        let world = world(Some(Tokenizer::HuggingFace { model, blocks, memo, canonical }), "nixl");
        world.processor.picker.config().pools()[0].prefix.as_ref().unwrap().cache.carried().want();
        world
    }

    fn sent(messages: &[(&str, &str)]) -> Json {
        let messages: Vec<_> = messages.iter().map(|(r, c)| json!({"role": r, "content": c})).collect();
        json!({"model": "m", "messages": messages, "max_tokens": 20})
    }

    fn rendered(messages: &[(&str, &str)]) -> usize {
        let all: String = messages.iter().map(|(r, c)| format!("<|im_start|>{r}\n{c}<|im_end|>\n")).collect();
        count(&(all + "<|im_start|>assistant\n"))
    }

    fn count(text: &str) -> usize {
        let mut ids = Vec::new();
        model().encode(text, &mut ids).unwrap();
        ids.len()
    }

    fn turn(world: &World, messages: &[(&str, &str)], choice: &Json, kept: usize) -> Option<String> {
        let (mut exchange, ask) = asked(world, CHAT, &sent(messages));
        give_leg_result(&mut exchange, 0, good(), 10);
        answered(&mut exchange, choice, &json!({"prompt_tokens": rendered(messages)}), &params(kept));
        carried(&ask)
    }

    /// The encoded text is accepted if it has as many tokens as the worker reports. The text of a response that
    /// stopped by itself does not contain its last token.
    #[test]
    fn response_text_is_encoded_if_token_count_matches() {
        let (question, reply) = ("what is an event loop? ".repeat(8), "It waits for events. ".repeat(8));
        let first = [("system", "Be brief."), ("user", &*question)];
        let second = [first[0], first[1], ("assistant", &*reply), ("user", "go on")];
        let edited = [first[0], first[1], ("assistant", "It waits for nothing. "), ("user", "go on")];
        let message = json!({"role": "assistant", "content": reply});
        let choice = |finish: &str| json!({"index": 0, "message": message, "finish_reason": finish});
        let both = rendered(&first) + count(&reply);
        for (finish, kept, found) in [
            ("stop", both, true),
            ("length", both - 1, true),
            ("stop", both + 1, false),
            ("stop", both - 1, false),
            ("length", both, false),
        ] {
            let world = keeping();
            assert_eq!(turn(&world, &first, &choice(finish), kept), None);
            assert_eq!(turn(&world, &edited, &choice(finish), 0), None);
            let carried = turn(&world, &second, &choice(finish), 0);
            assert_eq!(carried, found.then(|| params(kept)), "{finish} {kept} of {both}");
        }
    }

    /// The messages and responses APIs report no token ids, so the text and the finish reason are used.
    #[test]
    fn messages_and_responses_turns_are_kept_by_text() {
        let (question, reply) = ("what is an event loop? ".repeat(8), "It waits for events. ".repeat(8));
        let history = [("system", "Be brief."), ("user", &*question)];
        let both = rendered(&history) + count(&reply);
        let prompt = rendered(&history);
        let user = |text: &str| json!({"role": "user", "content": text});
        let messages = |turns: Json| json!({"model": "m", "max_tokens": 20, "system": "Be brief.", "messages": turns});
        let responses =
            |turns: Json| json!({"model": "m", "max_output_tokens": 20, "instructions": "Be brief.", "input": turns});
        let message = |stop: &str, kept: usize| {
            let usage = json!({
                "input_tokens": 3, "output_tokens": 9,
                "cache_read_input_tokens": prompt - 3, "cache_creation_input_tokens": 0,
            });
            format!(
                r#"{{"id":"x","type":"message","role":"assistant","content":[{{"type":"text","text":"{reply}"}}],"model":"m","stop_reason":"{stop}","usage":{usage},"kv_transfer_params":{}}}"#,
                params(kept)
            )
        };
        let response = |status: &str, kept: usize| {
            let usage = json!({"input_tokens": prompt, "output_tokens": 9});
            format!(
                r#"{{"id":"resp_1","object":"response","output":[{{"id":"msg_1","type":"message","role":"assistant","status":"completed","content":[{{"type":"output_text","text":"{reply}"}}]}}],"status":"{status}","usage":{usage},"kv_transfer_params":{}}}"#,
                params(kept)
            )
        };
        let said = json!({"role": "assistant", "content": reply});
        let next = json!([user(&question), said, user("go on")]);
        for (path, first, second, answer, ended, cut) in [
            (
                "/v1/messages",
                messages(json!([user(&question)])),
                messages(next.clone()),
                &message as &dyn Fn(&str, usize) -> String,
                "end_turn",
                "max_tokens",
            ),
            (
                "/v1/responses",
                responses(json!([user(&question)])),
                responses(next.clone()),
                &response,
                "completed",
                "incomplete",
            ),
        ] {
            for (finish, kept, found) in
                [(ended, both, true), (cut, both - 1, true), (ended, both - 1, false), (cut, both, false)]
            {
                let world = keeping();
                let (mut exchange, ask) = asked(&world, path, &first);
                assert_eq!(carried(&ask), None);
                give_leg_result(&mut exchange, 0, good(), 10);
                assert_eq!(passes(&mut exchange, &answer(finish, kept)), "split", "{path}");
                let (_, ask) = asked(&world, path, &second);
                assert_eq!(carried(&ask), found.then(|| params(kept)), "{path} {finish} {kept} of {both}");
            }
        }
    }

    #[test]
    fn turn_with_tool_calls_or_images_is_not_kept() {
        let world = keeping();
        let first = [("user", "hello")];
        let tools = json!({"index": 0, "finish_reason": "tool_calls", "message": {
            "role": "assistant", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        }});
        turn(&world, &first, &tools, rendered(&first) + count("hi"));
        assert_eq!(kept(&world), 0);
        let image = json!({"model": "m", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
        ]}]});
        let (mut exchange, _) = asked(&world, CHAT, &image);
        give_leg_result(&mut exchange, 0, good(), 10);
        let choice = json!({"index": 0, "finish_reason": "length", "token_ids": [1, 2]});
        answered(&mut exchange, &choice, &json!({}), &params(10));
        assert_eq!(kept(&world), 0);
    }
}
