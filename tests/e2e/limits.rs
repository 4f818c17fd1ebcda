//! Tenant and model limits, through real Envoy: exact counts under a burst, tenants from verified claims, and limits
//! shared through a real Redis.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::redis::{RedisProcess, TlsFront};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderValue, Request};
use ring::hmac;
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, UNIX_EPOCH};

/// Concurrent requests of a burst.
const BURST: usize = 50;
/// Allowed requests per minute.
const RPM: usize = 20;
const TARGET: &str = "/v1/chat/completions?kind=json&size=200";

/// `limits` may be followed by other sections.
fn configuration(echo: &Echo, tenant: &str, limits: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange:\n  tenant: {tenant}\nlimits:\n  tenants: {limits}\n\
         pools:\n- name: default\n  endpoints: [{{address: \"{}\", engine: none}}]\n",
        echo.address
    )
}

fn chat(to: SocketAddr, target: &str, tenant: &str) -> Request<Payload> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(body.into()));
    request.headers_mut().insert("x-tenant", HeaderValue::from_str(tenant).expect("a header"));
    request
}

async fn ask(to: SocketAddr, tenant: &str) -> Reply {
    client::send(to, Http::H1, chat(to, TARGET, tenant)).await.expect("an answer")
}

/// Waits until enough of the minute is left for a burst, because counters follow the wall clock's minutes.
async fn early_in_a_minute() {
    let clock = attache_types::clock::Clock::start();
    let second = clock.wall(clock.now()).duration_since(UNIX_EPOCH).expect("a clock").as_secs() % 60;
    if second > 40 {
        tokio::time::sleep(Duration::from_secs(61 - second)).await;
    }
}

/// Sends a burst: the number of requests that passed, and of those that the limit rejected.
async fn burst(to: &[SocketAddr]) -> (usize, usize) {
    let mut clients = tokio::task::JoinSet::new();
    for to in to.iter().copied().cycle().take(BURST) {
        clients.spawn(async move { ask(to, "acme").await });
    }
    let replies = clients.join_all().await;
    let (passed, refused): (Vec<_>, Vec<_>) = replies.into_iter().partition(|reply| reply.status == 200);
    for reply in &refused {
        assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (429, "rpm_exceeded"));
        assert_eq!(reply.header("x-error-rpm-exceeded"), "true");
        let retry: u64 = reply.header("retry-after").parse().expect("seconds");
        assert!((1..=60).contains(&retry), "{retry}");
        let error = &reply.json()["error"];
        assert_eq!(error["message"], format!("user: acme has exceeded RPM: {RPM}"));
        assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rpm_exceeded")));
    }
    (passed.len(), refused.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn burst_passes_exactly_the_requests_per_minute() {
    let echo = Echo::start().await;
    let limits = format!("{{default: {{requestsPerMinute: {RPM}}}}}");
    let picker = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &limits)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    early_in_a_minute().await;
    assert_eq!(burst(&[to]).await, (RPM, BURST - RPM));
    assert_eq!(echo.requests(), RPM, "who is refused never reaches a server");
    let other = ask(to, "other").await;
    assert_eq!((other.status.as_u16(), other.header("x-update-rpm")), (200, "1"), "another tenant has its own");
    assert_eq!(picker.metric("attache_tenant_refusals_total").await, (BURST - RPM) as f64);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_frees_the_concurrency_slot() {
    let echo = Echo::start().await;
    let limits = "{default: {concurrency: 1}}";
    let picker = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", limits)).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let slow = "/v1/chat/completions?kind=sse&size=1000&events=400&pace_ms=100";
    let open = client::open(to, Http::H1, chat(to, slow, "acme")).await.expect("the beginning of an answer");
    let refused = ask(to, "acme").await;
    assert_eq!((refused.status.as_u16(), refused.header("x-attache-reason")), (429, "concurrency_exceeded"));
    assert_eq!(refused.header("retry-after"), "1");
    drop(open);
    eventually("the place to be free", || async { (ask(to, "acme").await.status == 200).then_some(()) }).await;
    picker.assert_settled().await;
}

const SECRET: &[u8] = b"a secret of this test, and of nobody else";

/// A signed token for `subject`.
fn token(subject: &str) -> String {
    let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!(
        "{}.{}",
        part(json!({"alg": "HS256", "kid": "k", "typ": "JWT"})),
        part(json!({"iss": "test", "sub": subject, "exp": 4_000_000_000u64}))
    );
    let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET), signed.as_bytes());
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

/// The shipped bootstrap with Envoy's JWT filter in front of the picker. Envoy forwards the claims to the picker.
fn with_tokens(picker: &AttacheProcess) -> String {
    let keys = json!({"keys": [{"kty": "oct", "kid": "k", "alg": "HS256", "k": URL_SAFE_NO_PAD.encode(SECRET)}]});
    let filter = format!(
        "          http_filters:\n\
         \x20         - name: envoy.filters.http.jwt_authn\n\
         \x20           typed_config:\n\
         \x20             \"@type\": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication\n\
         \x20             providers: {{test: {{issuer: test, payload_in_metadata: payload, local_jwks: {{inline_string: '{keys}'}}}}}}\n\
         \x20             rules: [{{match: {{prefix: /}}, requires: {{provider_name: test}}}}]\n"
    );
    let shown = "forwarding_namespaces: {untyped: [envoy.lb, ";
    let bootstrap = by_header("original-dst.yaml", picker);
    assert!(bootstrap.contains("          http_filters:\n") && bootstrap.contains(shown));
    let bootstrap = bootstrap.replacen("          http_filters:\n", &filter, 1);
    bootstrap.replacen(shown, "forwarding_namespaces: {untyped: [envoy.filters.http.jwt_authn, envoy.lb, ", 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_comes_from_the_token_not_from_client_headers() {
    let echo = Echo::start().await;
    let tenant = "{metadata: envoy.filters.http.jwt_authn, path: [payload, sub], header: x-tenant}";
    let limits = "{default: {requestsPerMinute: 2}}";
    let picker = AttacheProcess::configured(&configuration(&echo, tenant, limits)).await;
    let envoy = EnvoyProcess::start(&with_tokens(&picker)).await;
    let to = envoy.listener("inference");
    let send = |subject: Option<&'static str>, claims_to_be: &'static str| async move {
        let mut request = chat(to, "/v1/chat/completions?kind=json&size=200&tell=x-tenant,content-type", claims_to_be);
        if let Some(subject) = subject {
            let bearer = HeaderValue::from_str(&format!("Bearer {}", token(subject))).expect("a header");
            request.headers_mut().insert("authorization", bearer);
        }
        client::send(to, Http::H1, request).await.expect("an answer")
    };
    early_in_a_minute().await;
    assert_eq!(send(None, "acme").await.status, 401, "Envoy checks the token");
    for claims_to_be in ["one", "two"] {
        let reply = send(Some("acme"), claims_to_be).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("x-echo-told"), "content-type=application/json", "the server is not lied to");
    }
    let refused = send(Some("acme"), "three").await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["error"]["message"], "user: acme has exceeded RPM: 2");
    assert_eq!(send(Some("other"), "acme").await.status, 200);
    envoy.assert_picker_was_correct().await;
}

fn in_redis(redis: &RedisProcess, limits: &str, more: &str) -> String {
    format!("{{default: {{{limits}}}, store: redis}}\nredis: {{url: \"{}\"{more}}}", redis.url())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pickers_share_tenant_limits_through_redis() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    let limits = in_redis(&redis, &format!("requestsPerMinute: {RPM}, concurrency: {BURST}"), ", timeout: 5s");
    let text = configuration(&echo, "{header: x-tenant}", &limits);
    let pickers = [AttacheProcess::configured(&text).await, AttacheProcess::configured(&text).await];
    for picker in &pickers {
        picker.until_metric("attache_redis_connected", 1.0).await;
    }
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &pickers[0])).await;
    let second = first.beside(&by_header("original-dst.yaml", &pickers[1])).await;
    let envoys = [&first, &second];
    let to = [envoys[0].listener("inference"), envoys[1].listener("inference")];
    early_in_a_minute().await;
    assert_eq!(burst(&to).await, (RPM, BURST - RPM));
    assert_eq!(echo.requests(), RPM);
    let keys = redis.say(
        "EVAL \"local k=redis.call('KEYS','aibrix:acme_RPM_CURRENT:*') return #k..':'..redis.call('GET',k[1])\" 0",
    );
    assert_eq!(keys, format!("1:{RPM}"), "under AIBrix's key");
    let kept = |pattern| redis.say(&format!("EVAL \"return #redis.call('KEYS','{pattern}')\" 0"));
    assert_eq!(kept("aibrix:acme_TPM_CURRENT:*"), ":1", "answers tell of it");
    assert_eq!(kept("attache:acme_*:*"), ":0", "days and seconds have no bound");
    eventually("all places to be free", || async { (redis.say("ZCARD attache:acme_RUNNING") == ":0").then_some(()) })
        .await;
    for (picker, envoy) in pickers.iter().zip(&envoys) {
        assert_eq!(picker.metric("attache_limit_store_failures_total").await, 0.0);
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_outage_allows_or_rejects_as_configured_and_recovers() {
    let echo = Echo::start().await;
    let mut redis = RedisProcess::start().await;
    let limits = |more: &str| in_redis(&redis, "requestsPerMinute: 1", more);
    let allows = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &limits(""))).await;
    let refuses = limits(", onFailure: refuse");
    let refuses = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &refuses)).await;
    for picker in [&allows, &refuses] {
        picker.until_metric("attache_redis_connected", 1.0).await;
    }
    let open = EnvoyProcess::start(&by_header("original-dst.yaml", &allows)).await;
    let closed = open.beside(&by_header("original-dst.yaml", &refuses)).await;
    let (open, closed) = (open.listener("inference"), closed.listener("inference"));

    redis.process.signal("STOP");
    // A client gives up after a minute, so a request that waited for Redis would fail here.
    assert_eq!(ask(open, "hung").await.status, 200, "nobody waits for a Redis that hangs");
    assert!(allows.metric("attache_limit_store_failures_total").await >= 1.0);
    let status_and_reason = ask(closed, "hung").await;
    assert_eq!(
        (status_and_reason.status.as_u16(), status_and_reason.header("x-attache-reason")),
        (503, "limits_unknown")
    );
    assert!(status_and_reason.header("retry-after").parse::<u64>().is_ok());
    redis.process.signal("CONT");

    redis.process.kill();
    for picker in [&allows, &refuses] {
        picker.until_metric("attache_redis_connected", 0.0).await;
    }
    let before = allows.metric("attache_limit_store_failures_total").await;
    for _ in 0..3 {
        assert_eq!(ask(open, "acme").await.status, 200);
    }
    assert_eq!(allows.metric("attache_limit_store_failures_total").await, before + 3.0);
    assert_eq!(ask(closed, "acme").await.status, 503);

    let _back = RedisProcess::at(redis.address).await;
    for picker in [&allows, &refuses] {
        picker.until_metric("attache_redis_connected", 1.0).await;
    }
    early_in_a_minute().await;
    assert_eq!(ask(open, "back").await.status, 200);
    assert_eq!(ask(closed, "back").await.status, 429, "the other picker had it");
    allows.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrency_slots_are_freed_after_redis_hung() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    let limits = in_redis(&redis, "requestsPerMinute: 100, concurrency: 1", ", timeout: 5s");
    let picker = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &limits)).await;
    picker.until_metric("attache_redis_connected", 1.0).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let slow = "/v1/chat/completions?kind=sse&size=1000&events=400&pace_ms=100";
    let open = client::open(to, Http::H1, chat(to, slow, "acme")).await.expect("the beginning of an answer");
    let places = |tenant: &str| redis.say(&format!("ZCARD attache:{tenant}_RUNNING"));
    assert_eq!(places("acme"), ":1");

    redis.process.signal("STOP");
    assert_eq!(ask(to, "late").await.status, 200, "whether it was counted nobody tells");
    drop(open);
    picker.assert_settled().await;
    picker.until_metric("attache_redis_connected", 0.0).await;
    redis.process.signal("CONT");
    eventually("what was asked for to be counted after all", || async {
        let counted = redis.say("EVAL \"return #redis.call('KEYS','aibrix:late_RPM_CURRENT:*')\" 0");
        (counted == ":1").then_some(())
    })
    .await;
    eventually("all places to be free", || async { (places("acme") == ":0" && places("late") == ":0").then_some(()) })
        .await;
    assert_eq!(ask(to, "acme").await.status, 200);
    assert_eq!(picker.metric("attache_limit_ends_lost_total").await, 0.0);
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Another picker or an operator may have written the counter.
#[tokio::test(flavor = "multi_thread")]
async fn full_or_invalid_redis_counters_hold_no_concurrency_slot() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    let limits = in_redis(&redis, "requestsPerMinute: 100, concurrency: 1", ", timeout: 5s");
    let picker = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &limits)).await;
    picker.until_metric("attache_redis_connected", 1.0).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    const MOST: u64 = 1 << 52;
    let every_minute = |tenant: &str, value: &str| {
        let key = format!("aibrix:{tenant}_TPM_CURRENT:");
        redis.say(&format!("EVAL \"for i=0,63 do redis.call('SET','{key}'..i,'{value}') end\" 0"));
    };
    let places = |tenant: &str| redis.say(&format!("ZCARD attache:{tenant}_RUNNING"));
    for (tenant, value) in [("full", "9223372036854775807"), ("near", "4503599627370495")] {
        every_minute(tenant, value);
        for _ in 0..3 {
            let reply = ask(to, tenant).await;
            assert_eq!(reply.status, 200, "{tenant}");
            let used: u64 = reply.header("x-update-tpm").parse().expect("tokens");
            assert!((MOST - 1..=MOST).contains(&used), "{tenant}: {used}");
            eventually("the place to be free", || async { (places(tenant) == ":0").then_some(()) }).await;
        }
    }
    every_minute("odd", "many");
    assert_eq!(ask(to, "odd").await.status, 200, "what can't be counted goes on, as when Redis is away");
    eventually("no place to be taken", || async { (places("odd") == ":0").then_some(()) }).await;
    every_minute("late", "1");
    let slow = "/v1/chat/completions?kind=sse&size=1000&events=400&pace_ms=100";
    let open = client::open(to, Http::H1, chat(to, slow, "late")).await.expect("the beginning of an answer");
    assert_eq!(places("late"), ":1");
    every_minute("late", "many");
    drop(open);
    eventually("the place to be free", || async { (places("late") == ":0").then_some(()) }).await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_records_in_redis_set_tenant_limits() {
    let echo = Echo::start().await;
    let mut redis = RedisProcess::start().await;
    redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":2,"tpm":0}'"#);
    redis.say("SET aibrix-users/broken '{\"rpm\": -1}'");
    redis.say("LPUSH aibrix-users/list 1");
    let limits = |unknown: &str, store: &str| {
        format!(
            "{{default: {{requestsPerMinute: 1}}, overrides: {{vip: {{requestsPerMinute: unlimited}}}}, store: {store}, \
             userRecords: {{unknown: {unknown}, ttl: 50ms}}}}\nredis: {{url: \"{}\", timeout: 5s}}",
            redis.url()
        )
    };
    let with = |unknown, store| configuration(&echo, "{header: x-tenant}", &limits(unknown, store));
    let strict = AttacheProcess::configured(&with("refuse", "redis")).await;
    let open = AttacheProcess::configured(&with("default", "memory")).await;
    for picker in [&strict, &open] {
        picker.until_metric("attache_redis_connected", 1.0).await;
    }
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &strict)).await;
    let second = first.beside(&by_header("original-dst.yaml", &open)).await;
    let (to_strict, to_open) = (first.listener("inference"), second.listener("inference"));
    let status_and_reason = async |to, tenant: &str| {
        let reply = ask(to, tenant).await;
        (reply.status.as_u16(), reply.header("x-attache-reason").to_owned())
    };
    early_in_a_minute().await;

    for to in [to_strict, to_open] {
        assert_eq!([status_and_reason(to, "acme").await.0, status_and_reason(to, "acme").await.0], [200, 200]);
        let refused = ask(to, "acme").await;
        assert_eq!(refused.json()["error"]["message"], "user: acme has exceeded RPM: 2");
        assert_eq!(
            [status_and_reason(to, "vip").await.0, status_and_reason(to, "vip").await.0],
            [200, 200],
            "the file has the word"
        );
        assert_eq!(
            [status_and_reason(to, "").await.0, status_and_reason(to, "").await.0],
            [200, 429],
            "who has no name has no record"
        );
    }
    for nobody in ["ghost", "broken", "list"] {
        let refused = ask(to_strict, nobody).await;
        assert_eq!((refused.status.as_u16(), refused.header("x-error-user")), (500, "true"), "{nobody}");
        assert_eq!(refused.header("x-attache-reason"), "unknown_user");
        assert_eq!(refused.json()["error"]["message"], format!("user: {nobody} is not known"));
        assert_eq!(
            [status_and_reason(to_open, nobody).await.0, status_and_reason(to_open, nobody).await.0],
            [200, 429],
            "{nobody}"
        );
    }

    redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":4}'"#);
    eventually("the new record to count", || async {
        (status_and_reason(to_open, "acme").await.0 == 200).then_some(())
    })
    .await;
    eventually("the new record to be used up", || async {
        (status_and_reason(to_open, "acme").await.0 == 429).then_some(())
    })
    .await;
    redis.say("DEL aibrix-users/acme");
    eventually("the record to be gone", || async {
        (status_and_reason(to_strict, "acme").await.0 == 500).then_some(())
    })
    .await;
    redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":4}'"#);
    eventually("it to be back", || async { (status_and_reason(to_strict, "acme").await.0 != 500).then_some(()) }).await;
    assert_eq!(status_and_reason(to_open, "acme").await, (429, "rpm_exceeded".to_owned()));

    redis.process.kill();
    for picker in [&strict, &open] {
        picker.until_metric("attache_redis_connected", 0.0).await;
    }
    assert_eq!(status_and_reason(to_open, "acme").await.0, 429, "what was read last counts");
    assert_eq!(status_and_reason(to_open, "newcomer").await.0, 200, "a tenant whose record was never read is served");
    assert_eq!(status_and_reason(to_open, "newcomer").await.0, 200, "uncounted");
    assert_eq!(open.metric("attache_limit_store_failures_total").await, 2.0);
    assert!(open.metric("attache_user_records_total").await > 5.0);
    first.assert_picker_was_correct().await;
    second.assert_picker_was_correct().await;
    strict.assert_settled().await;
    open.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_records_are_cached_for_the_configured_ttl() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":1}'"#);
    let limits =
        format!("{{userRecords: {{unknown: refuse, ttl: 1h}}}}\nredis: {{url: \"{}\", timeout: 5s}}", redis.url());
    let picker = AttacheProcess::configured(&configuration(&echo, "{header: x-tenant}", &limits)).await;
    picker.until_metric("attache_redis_connected", 1.0).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    early_in_a_minute().await;
    assert_eq!(ask(to, "acme").await.status, 200);
    assert_eq!(ask(to, "ghost").await.status, 500);
    redis.say(r#"SET aibrix-users/acme '{"name":"acme","rpm":100}'"#);
    redis.say(r#"SET aibrix-users/ghost '{"name":"ghost","rpm":100}'"#);
    for _ in 0..3 {
        assert_eq!(ask(to, "acme").await.status, 429);
        assert_eq!(ask(to, "ghost").await.status, 500, "that there is none was read too");
    }
    assert_eq!(picker.metric("attache_user_records_total").await, 2.0, "each was asked for once");
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pickers_share_model_limits_through_redis() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    let limits = format!(
        "{{default: {{requestsPerMinute: {BURST}}}}}\n  \
         models: {{overrides: {{m: {{requestsPerMinute: {RPM}, requestsPerSecond: {BURST}}}}}, store: redis}}\n\
         redis: {{url: \"{}\", timeout: 5s}}",
        redis.url()
    );
    let text = configuration(&echo, "{header: x-tenant}", &limits);
    let pickers = [AttacheProcess::configured(&text).await, AttacheProcess::configured(&text).await];
    for picker in &pickers {
        picker.until_metric("attache_redis_connected", 1.0).await;
    }
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &pickers[0])).await;
    let second = first.beside(&by_header("original-dst.yaml", &pickers[1])).await;
    let to = [first.listener("inference"), second.listener("inference")];
    early_in_a_minute().await;
    let mut clients = tokio::task::JoinSet::new();
    for (number, to) in to.into_iter().cycle().take(BURST).enumerate() {
        clients.spawn(async move { ask(to, &format!("tenant{number}")).await });
    }
    let replies = clients.join_all().await;
    let (passed, refused): (Vec<_>, Vec<_>) = replies.into_iter().partition(|reply| reply.status == 200);
    assert_eq!((passed.len(), refused.len(), echo.requests()), (RPM, BURST - RPM, RPM));
    for reply in &refused {
        assert_eq!(reply.json()["error"]["message"], format!("model: m has exceeded RPM: {RPM}"));
    }
    let mut refusals = 0.0;
    for picker in &pickers {
        refusals += picker.metric("attache_model_refusals_total").await;
        assert_eq!(picker.metric("attache_tenant_refusals_total").await, 0.0);
    }
    assert_eq!(refusals, (BURST - RPM) as f64);

    // Requests per second are counted under AIBrix's key, which also counts the requests of its gateway.
    redis.say("EVAL \"for i=0,63 do redis.call('SET','aibrix_model:m_MODEL_RPS_CURRENT:'..i,50) end return 0\" 0");
    redis.say("EVAL \"for i=0,63 do redis.call('DEL','attache_model:m_RPM_CURRENT:'..i) end return 0\" 0");
    let refused = ask(to[0], "late").await;
    assert_eq!((refused.status.as_u16(), refused.header("x-error-model-rps-exceeded")), (429, "true"));
    assert_eq!((refused.header("x-attache-reason"), refused.header("retry-after")), ("model_rps_exceeded", "1"));
    assert_eq!(refused.json()["error"]["message"], format!("model: m has exceeded RPS: {BURST}"));
    redis.say("EVAL \"for i=0,63 do redis.call('DEL','aibrix_model:m_MODEL_RPS_CURRENT:'..i) end return 0\" 0");
    assert_eq!(ask(to[0], "late").await.status, 200);
    eventually("all places to be free", || async {
        (redis.say("ZCARD attache_model:m_RUNNING") == ":0").then_some(())
    })
    .await;
    for (picker, envoy) in pickers.iter().zip([&first, &second]) {
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_over_tls_requires_a_trusted_certificate() {
    let echo = Echo::start().await;
    let redis = RedisProcess::start().await;
    let front = TlsFront::before(&redis).await;
    let limits = format!(
        "{{default: {{requestsPerMinute: 1}}, store: redis}}\nredis: {{url: \"{}\", timeout: 5s, onFailure: refuse}}",
        front.url()
    );
    let text = configuration(&echo, "{header: x-tenant}", &limits);
    let trusts = AttacheProcess::configured_with(&text, &[("SSL_CERT_FILE", &front.certificate)]).await;
    trusts.until_metric("attache_redis_connected", 1.0).await;
    let doubts = AttacheProcess::configured(&text).await;
    let first = EnvoyProcess::start(&by_header("original-dst.yaml", &trusts)).await;
    let second = first.beside(&by_header("original-dst.yaml", &doubts)).await;
    early_in_a_minute().await;
    assert_eq!(ask(first.listener("inference"), "acme").await.status, 200);
    assert_eq!(ask(first.listener("inference"), "acme").await.status, 429);
    assert_eq!(redis.say("EVAL \"return #redis.call('KEYS','aibrix:acme_RPM_CURRENT:*')\" 0"), ":1");
    eventually("the reason in the log", || async {
        let log = doubts.process.stderr();
        (log.contains("connection to Redis failed") && log.contains("certificate")).then_some(())
    })
    .await;
    assert_eq!(doubts.metric("attache_redis_connected").await, 0.0);
    assert_eq!(ask(second.listener("inference"), "acme").await.status, 503);
}
