//! What strategies and the Responses API record about requests of one picker, and the other one knows.

use super::*;
use crate::support::sim::SimProcess;
use http::HeaderValue;
use serde_json::json;

/// The choice that a picker explains for a request to `path`: its first endpoint, and the reason.
async fn explained(picker: &AttacheProcess, path: &str, body: &Value) -> (String, String) {
    let target = format!("/explain?path={path}");
    let reply = client::post(picker.metrics, &target, body.to_string().into()).await.expect("an explanation");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let choice = reply.json();
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("no text in {choice}")).to_owned();
    (text(&choice["picks"][0]), text(&choice["reason"]))
}

/// Sends a request as `user`. Returns the response, and the server that it came from.
async fn send(to: SocketAddr, path: &str, user: &'static str, body: &Value) -> (Value, String) {
    let payload = Payload::sized(body.to_string().into());
    let mut request = client::request("POST", to, Http::H1, path, payload);
    request.headers_mut().insert("user", HeaderValue::from_static(user));
    let reply = client::send(to, Http::H1, request).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let server = SocketAddr::new(to.ip(), reply.header("x-sim-server").parse().expect("a port"));
    (reply.json(), server.to_string())
}

fn chat_about(topic: u32, question: &str) -> Value {
    let rules: String = (0..100).map(|i| format!("Rule {i} of topic {topic}. ")).collect();
    let messages = json!([{"role": "system", "content": rules}, {"role": "user", "content": question}]);
    json!({"model": "sim-8b", "messages": messages, "max_tokens": 4})
}

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

#[tokio::test(flavor = "multi_thread")]
async fn prefix_affinity_knows_the_prefixes_that_the_other_picker_sent() {
    let (nats, sim) = (NatsProcess::start().await, SimProcess::start(4, &["--model", "sim-8b"]).await);
    let pair = Pair::start(&pool("prefix-affinity", &sim.servers), &nats.url()).await;
    pair.until_peers().await;
    for topic in 0..8 {
        let (_, server) = send(pair.to[0], CHAT, "a", &chat_about(topic, "What is the first rule?")).await;
        let next = chat_about(topic, "What is the second rule?");
        let expected = (server.clone(), "was sent the longest prefix".to_owned());
        eventually("the other picker to know the prefix", async || {
            (explained(&pair.pickers[1], CHAT, &next).await == expected).then_some(())
        })
        .await;
        assert_eq!(send(pair.to[1], CHAT, "a", &next).await.1, server, "{topic}");
    }
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_response_of_one_picker_is_continued_by_the_other() {
    let (nats, sim) = (NatsProcess::start().await, SimProcess::start(4, &["--model", "sim-8b"]).await);
    let pair = Pair::start(&pool("random", &sim.servers), &nats.url()).await;
    pair.until_peers().await;
    for turn in 0..6 {
        let first = json!({"model": "sim-8b", "input": format!("Tell me about ship {turn}.")});
        let (stored, server) = send(pair.to[turn % 2], RESPONSES, "a", &first).await;
        let next = json!({"model": "sim-8b", "input": "And then?", "previous_response_id": stored["id"]});
        let other = (turn + 1) % 2;
        let expected = (server.clone(), "holds the previous response".to_owned());
        eventually("the other picker to know where it is stored", async || {
            (explained(&pair.pickers[other], RESPONSES, &next).await == expected).then_some(())
        })
        .await;
        assert_eq!(send(pair.to[other], RESPONSES, "a", &next).await.1, server, "{turn}");
    }
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_of_many_tokens_is_steered_by_both_pickers() {
    let (nats, sim) = (NatsProcess::start().await, SimProcess::start(4, &["--model", "sim-8b"]).await);
    let pair = Pair::start(&pool("vtc-basic", &sim.servers), &nats.url()).await;
    pair.until_peers().await;
    let prompt = |words: usize| json!({"model": "sim-8b", "messages": [{"role": "user", "content": "word ".repeat(words)}], "max_tokens": 4});
    send(pair.to[1], CHAT, "light", &prompt(1)).await;
    send(pair.to[0], CHAT, "heavy", &prompt(5_000)).await;
    let last = sim.servers[3].to_string();
    eventually("the other picker to steer the user", async || {
        (send(pair.to[1], CHAT, "heavy", &prompt(1)).await.1 == last).then_some(())
    })
    .await;
    for _ in 0..6 {
        assert_eq!(send(pair.to[1], CHAT, "heavy", &prompt(1)).await.1, last);
    }
    pair.assert_settled().await;
}
