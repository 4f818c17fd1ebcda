//! Conversations whose turns are kept by decode servers and fetched by the prefill server of the next turn, through
//! real Envoy.

use crate::disagg::{COURSE, Stack};
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};

/// A conversation of token ids, which is what clients of its kind send.
#[derive(Clone)]
struct Talk {
    tokens: Vec<u32>,
    salt: Option<&'static str>,
    stream: bool,
    tenant: &'static str,
}

impl Talk {
    fn begin(number: u32, salt: Option<&'static str>, stream: bool) -> Self {
        Self { tokens: ids_of(number, 400), salt, stream, tenant: "one" }
    }

    /// One turn: how it was served. What the server answers, and then something new, is the history of the next one.
    async fn turn(&mut self, stack: &Stack) -> String {
        let body = json!({
            "model": "sim-8b", "prompt": self.tokens, "max_tokens": 40, "stream": self.stream,
            "return_token_ids": true, "cache_salt": self.salt,
        });
        let body = Payload::sized(body.to_string().into());
        let mut request = client::request("POST", stack.to(), Http::H1, "/v1/completions", body);
        request.headers_mut().insert("x-tenant", HeaderValue::from_static(self.tenant));
        let reply = client::send(stack.to(), Http::H1, request).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        let text = String::from_utf8_lossy(&reply.body);
        let last = text.lines().rfind(|line| line.contains("\"finish_reason\":\"length\"")).expect("an end");
        let told: Value = serde_json::from_str(last.trim_start_matches("data: ")).expect("JSON");
        let answer = told.pointer("/choices/0/token_ids").and_then(Value::as_array).expect("token ids");
        assert_eq!(answer.len(), 40);
        self.tokens.extend(answer.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        self.tokens.extend(ids_of(u32::try_from(self.tokens.len()).expect("few"), 60));
        assert_eq!(
            told["kv_transfer_params"]["do_remote_decode"], true,
            "the client sees what the server says: {told}"
        );
        reply.header(COURSE).to_owned()
    }
}

/// Tokens that are like no others.
fn ids_of(number: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 1_000 + (number * 7_919 + index * 31) % 90_000).collect()
}

/// A stack whose decode servers keep conversations, as the picker has found out.
async fn keeping(sim: &[&str]) -> Stack {
    keeping_with(sim, "decider: always").await
}

async fn keeping_with(sim: &[&str], disaggregation: &str) -> Stack {
    let stack = Stack::start(&[&["--bidirectional-kv"], sim].concat(), disaggregation).await;
    assert_eq!(Talk::begin(9_000, None, false).turn(&stack).await, "split");
    stack
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_turns_prefill_fetches_what_the_decode_server_keeps() {
    let stack = keeping(&[]).await;
    for stream in [false, true] {
        let before = stack.count(stack.prefill(), "/pulls").await;
        let mut talk = Talk::begin(u32::from(stream), Some("mine"), stream);
        assert_eq!(talk.turn(&stack).await, "split");
        // All but the last token of an answer is kept.
        assert_eq!(talk.turn(&stack).await, "split; carried=439");
        assert_eq!(talk.turn(&stack).await, "split; carried=539");
        assert_eq!(stack.count(stack.prefill(), "/pulls").await - before, 2);
    }
    assert_eq!(stack.failed_loads().await, 0);
    // Only blocks that no turn continued are still kept: the first conversation, and the last turns of the two others.
    assert_eq!(stack.count(stack.decode(), "/pinned/requests").await, 3);
    stack.picker.assert_settled().await;
    // The first conversation only showed that servers keep any: its prompt was not known token by token.
    for (metric, expected) in [
        ("attache_carried_kept_turns_total", 6.0),
        ("attache_carried_given_turns_total", 4.0),
        ("attache_carried_given_tokens_total", 2.0 * (439.0 + 539.0)),
        ("attache_carried_turns", 2.0),
    ] {
        assert_eq!(stack.picker.metric(metric).await, expected, "{metric}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_are_no_prefix_of_the_prompt_are_not_fetched() {
    let stack = keeping(&[]).await;
    let mut talk = Talk::begin(1, Some("mine"), false);
    talk.turn(&stack).await;
    let mut others = Talk { salt: Some("another one's"), ..talk.clone() };
    assert_eq!(others.turn(&stack).await, "split");
    let mut unsalted = Talk { salt: None, ..talk.clone() };
    assert_eq!(unsalted.turn(&stack).await, "split");
    let mut tenants = Talk { tenant: "another", ..talk.clone() };
    assert_eq!(tenants.turn(&stack).await, "split", "the same tokens and salt, and another tenant");
    for edited in [0, 200, 438] {
        let mut history = talk.tokens.clone();
        history[edited] += 1;
        assert_eq!(Talk { tokens: history, ..talk.clone() }.turn(&stack).await, "split");
    }
    // Two requests continue one turn: the first gets its blocks, the other prefills.
    let mut branch = talk.clone();
    assert_eq!(talk.turn(&stack).await, "split; carried=439");
    assert_eq!(branch.turn(&stack).await, "split");
    assert_eq!((stack.count(stack.prefill(), "/pulls").await, stack.failed_loads().await), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_expired_or_is_gone_with_its_server_is_not_asked_for() {
    // A moment of the server's own clock says nothing here, one of the world's does.
    for (clock, ttl) in [("monotonic", "decider: always, decoderBlocksTtl: 4s"), ("unix", "decider: always")] {
        let stack = keeping_with(&["--decoder-kv-ttl", "4s", "--decoder-kv-clock", clock], ttl).await;
        let mut talk = Talk::begin(1, None, false);
        talk.turn(&stack).await;
        assert_eq!(talk.turn(&stack).await, "split; carried=439", "{clock}: it is kept until then");
        eventually("the decode servers to let go", || async {
            (stack.count(stack.decode(), "/pinned/requests").await == 0).then_some(())
        })
        .await;
        assert_eq!(talk.turn(&stack).await, "split", "{clock}");
        assert_eq!((stack.count(stack.prefill(), "/pulls").await, stack.failed_loads().await), (1, 0), "{clock}");
    }

    let stack = keeping(&[]).await;
    let mut talk = Talk::begin(1, None, false);
    talk.turn(&stack).await;
    // A server that has lost what it kept fails the prefill, and the prompt is computed elsewhere.
    for decode in stack.decode() {
        client::post(*decode, "/sim/restart", Bytes::from_static(b"{}")).await.expect("an answer");
    }
    let course = talk.turn(&stack).await;
    assert!(course == "split" || course.starts_with("local"), "{course}");
    stack.picker.assert_settled().await;
}
