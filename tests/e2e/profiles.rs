//! AIBrix's SLO profiles in a real Redis, through real Envoy: changes take effect, the last valid profiles stay during
//! an outage, invalid ones affect no others, and a reload may name another Redis.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::redis::RedisProcess;
use serde_json::json;
use std::net::SocketAddr;

/// Requests of one sample of the routing.
const SAMPLE: usize = 10;

/// Two servers, each of its own deployment.
struct Fleet {
    a100: Echo,
    l40s: Echo,
}

impl Fleet {
    /// A configuration that reads the profiles from this Redis at this interval.
    fn configuration(&self, redis: &RedisProcess, every: &str) -> String {
        format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nredis: {{url: \"{}\", profileRefresh: {every}}}\npools:\n\
             - name: default\n  strategy: {{name: slo, parameters: {{profilesFromRedis: true}}}}\n  endpoints:\n  \
             - {{address: \"{}\", engine: none, labels: {{app.kubernetes.io/name: a100}}}}\n  \
             - {{address: \"{}\", engine: none, labels: {{app.kubernetes.io/name: l40s}}}}\n",
            redis.url(),
            self.a100.address,
            self.l40s.address
        )
    }

    /// Requests of each server so far.
    fn request_counts(&self) -> [usize; 2] {
        [self.a100.requests(), self.l40s.requests()]
    }

    /// Requests of one sample that each server gets.
    async fn sample_routing(&self, to: SocketAddr) -> [usize; 2] {
        let before = self.request_counts();
        for _ in 0..SAMPLE {
            ask(to).await;
        }
        let after = self.request_counts();
        [after[0] - before[0], after[1] - before[1]]
    }

    /// Waits until a request goes to the server with this index.
    async fn until(&self, to: SocketAddr, which: usize) {
        eventually("a request to go elsewhere", || async {
            let before = self.request_counts()[which];
            ask(to).await;
            (self.request_counts()[which] > before).then_some(())
        })
        .await;
    }
}

async fn ask(to: SocketAddr) {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let target = "/v1/chat/completions?kind=json&size=200";
    let request = client::request("POST", to, Http::H1, target, Payload::sized(body.into()));
    assert_eq!(client::send(to, Http::H1, request).await.expect("an answer").status, 200);
}

/// Writes the profile of a deployment that responds in `seconds`. The objective is five seconds.
fn write_profile(redis: &RedisProcess, deployment: &str, seconds: f64) {
    let profile = json!({
        "gpu": deployment, "cost": 1.0, "created": 1_725_000_000.0, "indexes": [[4], [128]], "tputs": [[1000.0]], "e2e": [[seconds]],
        "slos": {"percentile": 99, "e2e": 5.0},
    });
    assert_eq!(redis.say(&format!("SET aibrix:profile_m_{deployment} '{profile}'")), "+OK");
}

/// A series of the picker's metrics.
async fn series(picker: &AttacheProcess, name: &str) -> f64 {
    let page = client::get(picker.metrics, "/metrics").await.expect("the picker's metrics");
    let text = String::from_utf8_lossy(&page.body).into_owned();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.unwrap_or_else(|| panic!("no series {name}"))
}

async fn until_series(picker: &AttacheProcess, name: &str, value: f64) {
    eventually(&format!("{name} to be {value}"), || async { (series(picker, name).await == value).then_some(()) })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_profiles_follow_changes_and_survive_an_outage() {
    let fleet = Fleet { a100: Echo::start().await, l40s: Echo::start().await };
    let mut redis = RedisProcess::start().await;
    let picker = AttacheProcess::configured(&fleet.configuration(&redis, "50ms")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    const GOOD: &str = "attache_redis_slo_profiles{state=\"good\"}";
    const MALFORMED: &str = "attache_redis_slo_profiles{state=\"malformed\"}";
    const NO_PROFILE: &str = "attache_degraded_total{mode=\"no_profile\"}";
    picker.until_metric("attache_redis_connected", 1.0).await;
    ask(to).await;
    assert_eq!(series(&picker, NO_PROFILE).await, 1.0, "nothing is measured yet");

    write_profile(&redis, "a100", 0.5);
    write_profile(&redis, "l40s", 4.0);
    until_series(&picker, GOOD, 2.0).await;
    assert_eq!(fleet.sample_routing(to).await, [SAMPLE, 0]);

    // An invalid profile is counted and does not affect others; its last valid version stays.
    redis.say("SET aibrix:profile_m_l40s '{\"gpu\": \"l40s\"'");
    redis.say("SET aibrix:profile_other_b200 junk");
    redis.say("LPUSH aibrix:profile_list_b200 1");
    until_series(&picker, MALFORMED, 3.0).await;
    assert_eq!(series(&picker, GOOD).await, 2.0);
    let named = |key: &str| {
        let log = picker.process.stderr();
        log.lines().filter(|line| line.contains("SLO profile in Redis ignored") && line.contains(key)).count()
    };
    for key in ["aibrix:profile_m_l40s", "aibrix:profile_other_b200", "aibrix:profile_list_b200"] {
        assert_eq!(named(key), 1, "{key} is named, and once");
    }
    write_profile(&redis, "a100", 4.5);
    fleet.until(to, 1).await;
    assert_eq!(fleet.sample_routing(to).await, [0, SAMPLE], "by the profile of before");

    write_profile(&redis, "l40s", 0.5);
    redis.say("DEL aibrix:profile_other_b200 aibrix:profile_list_b200");
    until_series(&picker, MALFORMED, 0.0).await;
    redis.process.kill();
    picker.until_metric("attache_redis_connected", 0.0).await;
    eventually("a look that fails", || async {
        (picker.metric("attache_redis_slo_profile_failures_total").await > 0.0).then_some(())
    })
    .await;
    assert_eq!(fleet.sample_routing(to).await, [0, SAMPLE], "what was read last stays");
    let log = picker.process.stderr();
    assert_eq!(log.lines().filter(|line| line.contains("connection to Redis") && line.contains("WARN")).count(), 1);
    assert_eq!(series(&picker, NO_PROFILE).await, 1.0);

    let redis = RedisProcess::at(redis.address).await;
    write_profile(&redis, "a100", 0.5);
    write_profile(&redis, "l40s", 4.0);
    fleet.until(to, 0).await;
    until_series(&picker, GOOD, 2.0).await;
    assert_eq!(fleet.sample_routing(to).await, [SAMPLE, 0], "it came back by itself");

    // A deleted profile no longer has an effect.
    redis.say("DEL aibrix:profile_m_a100 aibrix:profile_m_l40s");
    until_series(&picker, GOOD, 0.0).await;
    let before = series(&picker, NO_PROFILE).await;
    ask(to).await;
    assert_eq!(series(&picker, NO_PROFILE).await, before + 1.0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_switches_redis_and_keeps_known_profiles_until_then() {
    let fleet = Fleet { a100: Echo::start().await, l40s: Echo::start().await };
    let (one, other) = (RedisProcess::start().await, RedisProcess::start().await);
    write_profile(&one, "a100", 0.5);
    write_profile(&one, "l40s", 4.0);
    let directory = scratch("profiles");
    let file = directory.path().join("attache.yaml");
    let write = |text: String| {
        let new = directory.path().join("new");
        std::fs::write(&new, text).expect("writing the configuration");
        std::fs::rename(&new, &file).expect("renaming it over the old one");
    };
    write(fleet.configuration(&one, "50ms"));
    let picker = AttacheProcess::with_file(&file, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    until_series(&picker, "attache_redis_slo_profiles{state=\"good\"}", 2.0).await;
    assert_eq!(fleet.sample_routing(to).await, [SAMPLE, 0]);

    // The refresh interval is now long, and known profiles stay.
    write(fleet.configuration(&one, "1h"));
    picker.until_metric("attache_config_reloads_total", 1.0).await;
    assert_eq!(fleet.sample_routing(to).await, [SAMPLE, 0]);

    write_profile(&other, "a100", 4.0);
    write_profile(&other, "l40s", 0.5);
    write(fleet.configuration(&other, "1h"));
    picker.until_metric("attache_config_reloads_total", 2.0).await;
    fleet.until(to, 1).await;
    assert_eq!(fleet.sample_routing(to).await, [0, SAMPLE], "the other is read as soon as there is a connection");
    picker.until_metric("attache_redis_connected", 1.0).await;
    assert_eq!(series(&picker, "attache_degraded_total{mode=\"no_profile\"}").await, 0.0);
}
