//! Planted mistakes of NATS and Redis, with real servers.

use super::{Checked, closed};
use crate::support::attache::AttacheProcess;
use crate::support::nats::NatsProcess;
use crate::support::process::{eventually, scratch};
use crate::support::redis::RedisProcess;
use std::path::Path;

/// Checks a file with these keys, without a picker.
fn check(directory: &Path, keys: &str) -> Checked {
    let file = directory.join("attache.yaml");
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\n{keys}\npools: [{{name: a, endpoints: [\"{}\"]}}]\n",
        closed()
    );
    std::fs::write(&file, text).expect("writing");
    Checked::run(&[file.to_str().expect("a path"), "--admin", &closed().to_string()])
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_mistakes_of_nats_are_found_with_their_fix() {
    let directory = scratch("check-nats");
    let settings = directory.path().join("nats.conf");
    std::fs::write(
        &settings,
        "max_payload: 65536\nauthorization {users: [\n\
         {user: good, password: secret, permissions: {publish: [\"attache.sync.v2.>\"], subscribe: [\"attache.sync.v2.>\"]}},\n\
         {user: other, password: secret, permissions: {publish: [\"else.>\"], subscribe: [\"else.>\"]}}]}\n",
    )
    .expect("writing");
    let open = NatsProcess::start().await;
    let strict = NatsProcess::with_arguments(&["--config", settings.to_str().expect("a path")]).await;
    let sync = |url: &str| check(directory.path(), &format!("sync: {{name: a, nats: {{servers: [\"{url}\"]}}}}"));
    sync(&open.url()).assert_faults("open, on this machine", "nats", &[]);
    sync(&strict.url_for("good", "secret")).assert_faults(
        "small messages",
        "nats",
        &[("nats-max-payload", "max_payload")],
    );
    sync(&strict.url_for("good", "wrong")).assert_faults(
        "a wrong password",
        "nats",
        &[("nats-login", "sync.nats.servers")],
    );
    sync(&strict.url()).assert_faults("no password", "nats", &[("nats-login", "sync.nats.servers")]);
    sync(&strict.url_for("other", "secret")).assert_faults(
        "no rights",
        "nats",
        &[("nats-max-payload", "max_payload"), ("nats-permissions", "PREFIX.sync.v2.all.NAME")],
    );
    sync(&format!("nats://{}", closed())).assert_faults(
        "no server",
        "nats",
        &[("nats-reachable", "sync.nats.servers")],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_without_nats_and_silent_picker_are_found() {
    let mut nats = NatsProcess::start().await;
    let url = nats.url();
    let start = async |name: &str| {
        let endpoint = closed().to_string();
        let arguments = ["--endpoint", &endpoint, "--sync-nats-url", &url, "--sync-name", name];
        AttacheProcess::unready(&arguments.map(str::to_owned)).await
    };
    let (a, mut b) = (start("a").await, start("b").await);
    a.until_metric("attache_sync_connected", 1.0).await;
    eventually("both pickers to know each other", async || {
        (a.metric("attache_sync_peer_age_seconds").await > 0.0).then_some(())
    })
    .await;
    let admin = a.metrics.to_string();
    Checked::run(&["--admin", &admin]).assert_faults("two pickers", "picker-peers", &[]);
    b.process.kill();
    eventually("the picker to be silent", async || {
        (a.metric("attache_sync_peer_age_seconds").await > 3.0).then_some(())
    })
    .await;
    let silent = Checked::run(&["--admin", &admin]);
    silent.assert_faults("a silent picker", "picker-peers", &[("picker-peers", "sync.nats.servers")]);
    nats.stop();
    a.until_metric("attache_sync_connected", 0.0).await;
    let away = Checked::run(&["--admin", &admin]);
    away.assert_faults("no NATS", "picker-shared", &[("picker-shared-state", "sync.nats.servers")]);
    away.assert_faults("no NATS", "nats", &[("nats-reachable", "sync.nats.servers")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn planted_mistakes_of_redis_are_found_with_their_fix() {
    let directory = scratch("check-redis");
    let redis = RedisProcess::start().await;
    let at = |url: &str| check(directory.path(), &format!("redis: {{url: \"{url}\", timeout: 1s}}"));
    at(&redis.url()).assert_faults("nothing is wrong", "redis", &[]);
    redis.say("CONFIG SET maxmemory 100mb");
    redis.say("CONFIG SET maxmemory-policy allkeys-lru");
    at(&redis.url()).assert_faults("keys are dropped", "redis", &[("redis-eviction", "noeviction")]);
    redis.say("CONFIG SET maxmemory 0");
    redis.say(&format!("REPLICAOF 127.0.0.1 {}", closed().port()));
    at(&redis.url()).assert_faults("a replica", "redis", &[("redis-role", "primary")]);
    redis.say("REPLICAOF NO ONE");
    redis.say("CONFIG SET requirepass secret");
    at(&redis.url()).assert_faults("no password", "redis", &[("redis-login", "redis.url")]);
    at(&redis.url().replace("redis://", "redis://:secret@")).assert_faults("the password", "redis", &[]);
    at(&format!("redis://{}/0", closed())).assert_faults("no server", "redis", &[("redis-reachable", "redis.url")]);
}
