//! Prompts that one picker routes, and the others know.

use super::*;
use crate::prefix::BY_PREFIX;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::json;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A chat about a topic: a long text that all chats about it begin with, and a question.
fn chat_about(topic: u64, question: &str) -> Bytes {
    let rules: String = (0..200).map(|i| format!("Rule {i} of topic {topic}: {}. ", topic * 7919 + i)).collect();
    let messages = json!([{"role": "system", "content": rules}, {"role": "user", "content": question}]);
    Bytes::from(json!({"model": "sim-8b", "messages": messages, "max_tokens": 4}).to_string())
}

/// Asks a question: the server that responds, and the prompt tokens that it had cached.
async fn ask(to: SocketAddr, topic: u64, question: &str) -> (String, u64) {
    let reply = client::post(to, "/v1/chat/completions", chat_about(topic, question)).await.expect("a response");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let server = SocketAddr::new(to.ip(), reply.header("x-sim-server").parse().expect("a port"));
    (server.to_string(), cached.unwrap_or_else(|| panic!("no cached tokens: {:?}", reply.json())))
}

/// The servers that hold most of a topic's text, as a picker believes.
async fn holders(picker: &AttacheProcess, topic: u64) -> Vec<String> {
    let body = chat_about(topic, "What does it say?");
    let reply = client::post(picker.metrics, "/explain?path=/v1/chat/completions", body).await.expect("an explanation");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let explained = reply.json();
    let all = explained["blocks"].as_array().expect("blocks").len() as u64;
    let endpoints = explained["endpoints"].as_array().expect("endpoints").iter();
    let holds = endpoints.filter(|endpoint| 2 * endpoint["blocks"].as_u64().expect("a number") > all);
    holds.map(|endpoint| endpoint["address"].as_str().expect("an address").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_of_one_picker_draws_the_next_request_of_the_other() {
    const TOPICS: std::ops::Range<u64> = 0..8;
    let (nats, sim) = (NatsProcess::start().await, SimProcess::start(4, &["--model", "sim-8b"]).await);
    let config = pool(BY_PREFIX, &sim.servers);
    let pair = Pair::start(&config, &nats.url()).await;
    let alone = AttacheProcess::configured(&config).await;
    pair.until_peers().await;
    let mut servers = Vec::new();
    for topic in TOPICS {
        let (server, cached) = ask(pair.to[0], topic, "What is the first rule?").await;
        assert_eq!(cached, 0, "{topic}");
        eventually("the other picker to know the prompt", async || {
            (holders(&pair.pickers[1], topic).await == [server.clone()]).then_some(())
        })
        .await;
        assert!(holders(&alone, topic).await.is_empty(), "a picker without `sync` can't know the prompt");
        servers.push(server);
    }
    for (topic, server) in TOPICS.zip(&servers) {
        let (chosen, cached) = ask(pair.to[1], topic, "What is the second rule?").await;
        assert_eq!(&chosen, server, "{topic}");
        assert!(cached > 500, "{cached} tokens of {topic}");
    }
    pair.assert_settled().await;
}

/// A server that is older than this is seen to restart.
const OLD: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn lost_cache_is_forgotten_by_all_pickers() {
    let (nats, sim) = (NatsProcess::start().await, SimProcess::start(2, &["--model", "sim-8b"]).await);
    let started = Instant::now();
    // The second picker scrapes nothing, so that it finds no restart itself.
    let config = pool(BY_PREFIX, &sim.servers);
    let unscraped = sim.servers.iter().fold(config.clone(), |config, server| {
        config.replace(&format!("\"{server}\""), &format!("{{address: \"{server}\", engine: none}}"))
    });
    let pickers = [picker(&config, "a", &nats.url()).await, picker(&unscraped, "b", &nats.url()).await];
    let pair = Pair::of(pickers).await;
    pair.until_peers().await;
    let (first, _) = ask(pair.to[0], 0, "What is the first rule?").await;
    let other = sim.servers.iter().find(|server| server.to_string() != first).expect("two servers");
    // The other server holds another topic, which stays known.
    let mut kept = 1;
    while ask(pair.to[1], kept, "What is the first rule?").await.0 != other.to_string() {
        kept += 1;
    }
    for picker in &pair.pickers {
        eventually("both prompts", async || {
            let known = (holders(picker, 0).await, holders(picker, kept).await);
            (known == (vec![first.clone()], vec![other.to_string()])).then_some(())
        })
        .await;
    }
    // Two start times that are this close are one.
    eventually("the server to be old enough", async || (started.elapsed() > OLD).then_some(())).await;
    let restarted: SocketAddr = first.parse().expect("an address");
    client::post(restarted, "/sim/restart", Bytes::from_static(b"{}")).await.expect("a restart");
    for picker in &pair.pickers {
        eventually("the prompt to be forgotten", async || holders(picker, 0).await.is_empty().then_some(())).await;
        assert_eq!(holders(picker, kept).await, [other.to_string()]);
    }
    pair.assert_settled().await;
}

/// Pickers behind one Envoy, which sends each request to any of them.
struct Replicas {
    _envoy: EnvoyProcess,
    to: SocketAddr,
    pickers: Vec<AttacheProcess>,
    _sim: SimProcess,
}

impl Replicas {
    /// With a NATS server, the pickers share state.
    async fn start(names: &[&str], nats: Option<&NatsProcess>) -> Self {
        let sim = SimProcess::start(4, &["--model", "sim-8b"]).await;
        let config = pool(BY_PREFIX, &sim.servers);
        let mut pickers = Vec::new();
        for name in names {
            pickers.push(match nats {
                Some(nats) => picker(&config, name, &nats.url()).await,
                None => AttacheProcess::configured(&config).await,
            });
        }
        let envoy = EnvoyProcess::start(&Self::bootstrap(&pickers)).await;
        Self { to: envoy.listener("inference"), _envoy: envoy, pickers, _sim: sim }
    }

    /// The shipped bootstrap with all pickers in its cluster.
    fn bootstrap(pickers: &[AttacheProcess]) -> String {
        let one = by_header("original-dst.yaml", &pickers[0]);
        let (_, endpoint) = one.split_once("      - lb_endpoints:\n").expect("the endpoints of the picker's cluster");
        let (grpc, health) = (pickers[0].grpc.port().to_string(), pickers[0].health.port().to_string());
        assert!(endpoint.contains(&grpc) && endpoint.contains(&health), "{endpoint}");
        let more = pickers[1..].iter().map(|picker| {
            let [from_grpc, from_health] = [&grpc, &health].map(|port| format!("port_value: {port}}}"));
            let [to_grpc, to_health] = [picker.grpc, picker.health].map(|to| format!("port_value: {}}}", to.port()));
            endpoint.replace(&from_grpc, &to_grpc).replace(&from_health, &to_health)
        });
        more.fold(format!("{}\n", one.trim_end()), |text, endpoint| text + &endpoint)
    }

    /// Envoy's workers use a picker up to a second after Envoy's statistics call it healthy: Envoy merges the results of
    /// health checks for that long (`update_merge_window`).
    async fn reach_all_pickers(&self) {
        eventually("Envoy to use all pickers", async || {
            ask(self.to, 0, "Hello").await;
            for picker in &self.pickers {
                if picker.assert_settled().await.opened == 0 {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// Holds conversations of several turns. Returns the share of prompt tokens that servers had cached, of all turns
    /// after the first.
    async fn converse(&self) -> f64 {
        const TURNS: usize = 6;
        let mut conversations = JoinSet::new();
        for topic in 0..16 {
            let to = self.to;
            conversations.spawn(async move {
                let (mut cached, mut all) = (0, 0);
                let mut question = String::new();
                for turn in 0..TURNS {
                    question += &format!("Question {turn} about {topic}: {} ", "why, and why not? ".repeat(20));
                    let body = chat_about(100 + topic, &question);
                    let reply = client::post(to, "/v1/chat/completions", body).await.expect("a response");
                    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
                    let usage = &reply.json()["usage"];
                    if turn > 0 {
                        cached += usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
                        all += usage["prompt_tokens"].as_u64().expect("a count");
                    }
                }
                (cached, all)
            });
        }
        let counts = conversations.join_all().await.into_iter();
        let (cached, all) = counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        cached as f64 / all as f64
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn four_pickers_find_more_cached_tokens_with_shared_state() {
    let (nats, names) = (NatsProcess::start().await, ["a", "b", "c", "d"]);
    let mut shares = Vec::new();
    for (names, nats) in [(&names[..1], None), (&names[..], None), (&names[..], Some(&nats))] {
        let replicas = Replicas::start(names, nats).await;
        for picker in &replicas.pickers {
            let known = if nats.is_some() { names.len() - 1 } else { 0 };
            eventually("all peers", async || (peers(picker).await.len() == known).then_some(())).await;
        }
        replicas.reach_all_pickers().await;
        shares.push(replicas.converse().await);
        for picker in &replicas.pickers {
            picker.assert_settled().await;
        }
    }
    let [one, apart, shared] = shares[..] else { panic!("{shares:?}") };
    println!("cached share of prompt tokens: one picker {one:.3}, four {apart:.3}, four with shared state {shared:.3}");
    assert!(shared > apart + 0.03, "{shares:?}");
}
