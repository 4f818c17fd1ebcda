//! Multi-turn conversations, through real Envoy: decode workers keep the blocks, and the next prefill worker fetches
//! them.

use crate::disagg::{COURSE, Stack};
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};

/// A conversation of token ids, as clients of this feature send it.
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

    /// Sends one turn and returns how it was served. The response and new tokens are added to the history.
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
        let last_event: Value = serde_json::from_str(last.trim_start_matches("data: ")).expect("JSON");
        let answer = last_event.pointer("/choices/0/token_ids").and_then(Value::as_array).expect("token ids");
        assert_eq!(answer.len(), 40);
        self.tokens.extend(answer.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
        self.tokens.extend(ids_of(u32::try_from(self.tokens.len()).expect("few"), 60));
        assert_eq!(
            last_event["kv_transfer_params"]["do_remote_decode"], true,
            "the client sees what the server says: {last_event}"
        );
        reply.header(COURSE).to_owned()
    }
}

/// Token ids that differ for each `number`.
fn ids_of(number: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| 1_000 + (number * 7_919 + index * 31) % 90_000).collect()
}

/// A stack whose decode workers keep blocks, which the picker has already observed.
async fn keeping_stack(sim: &[&str]) -> Stack {
    keeping_stack_with(sim, "decider: always").await
}

async fn keeping_stack_with(sim: &[&str], disaggregation: &str) -> Stack {
    let stack = Stack::start(&[&["--bidirectional-kv"], sim].concat(), disaggregation).await;
    assert_eq!(Talk::begin(9_000, None, false).turn(&stack).await, "split");
    stack
}

#[tokio::test(flavor = "multi_thread")]
async fn next_turn_prefill_fetches_blocks_kept_by_decode_worker() {
    let stack = keeping_stack(&[]).await;
    for stream in [false, true] {
        let before = stack.count(stack.prefill(), "/pulls").await;
        let mut talk = Talk::begin(u32::from(stream), Some("mine"), stream);
        assert_eq!(talk.turn(&stack).await, "split");
        // The server keeps blocks for all but the last token of a response.
        assert_eq!(talk.turn(&stack).await, "split; carried=439");
        assert_eq!(talk.turn(&stack).await, "split; carried=539");
        assert_eq!(stack.count(stack.prefill(), "/pulls").await - before, 2);
    }
    assert_eq!(stack.failed_loads().await, 0);
    // Only blocks that no turn continued are still pinned: the first conversation, and the last turns of the two
    // others.
    assert_eq!(stack.count(stack.decode(), "/pinned/requests").await, 3);
    stack.picker.assert_settled().await;
    // The first conversation only showed that servers keep blocks: its prompt was not tracked token by token.
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
    let stack = keeping_stack(&[]).await;
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
    // Two requests continue one turn: the first gets the blocks, the other is prefilled.
    let mut branch = talk.clone();
    assert_eq!(talk.turn(&stack).await, "split; carried=439");
    assert_eq!(branch.turn(&stack).await, "split");
    assert_eq!((stack.count(stack.prefill(), "/pulls").await, stack.failed_loads().await), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_blocks_are_not_fetched_and_lost_ones_recomputed() {
    // An expiry in the server's monotonic clock is meaningless here. A Unix time is usable.
    for (clock, ttl) in [("monotonic", "decider: always, decoderBlocksTtl: 4s"), ("unix", "decider: always")] {
        let stack = keeping_stack_with(&["--decoder-kv-ttl", "4s", "--decoder-kv-clock", clock], ttl).await;
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

    let stack = keeping_stack(&[]).await;
    let mut talk = Talk::begin(1, None, false);
    talk.turn(&stack).await;
    // A server that lost its blocks fails the prefill, and another server computes the prompt.
    for decode in stack.decode() {
        client::post(*decode, "/sim/restart", Bytes::from_static(b"{}")).await.expect("an answer");
    }
    let course = talk.turn(&stack).await;
    assert!(course == "split" || course.starts_with("local"), "{course}");
    stack.picker.assert_settled().await;
}
