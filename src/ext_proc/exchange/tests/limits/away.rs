//! The quota store is unreachable: after its failure, the request is allowed or rejected, as configured.

use super::*;
use crate::redis_quotas::RedisQuotas;
use attache_quota::OnStoreFailure;
use attache_quota::{OnUnknownUser, UserRecordSettings};
use attache_redis_store::quota_store::RedisStore;
use attache_redis_store::quota_store::users::UserRecords;
use attache_redis_store::redis_link::RedisLink;

fn world(on_failure: OnStoreFailure) -> World {
    let limits = tenants(quota::Limits { requests_per_minute: Some(1), ..NONE });
    away(TenantSettings { store: CountIn::Redis, ..limits }, on_failure)
}

fn away(settings: TenantSettings, on_failure: OnStoreFailure) -> World {
    let world = Setup { exchange: by_header(), ..Setup::default() }.build();
    // No server listens on this port.
    let link = RedisLink::start("redis://127.0.0.1:1", |_| {}).unwrap();
    let redis = Arc::new(RedisStore::new(link.clone(), Subject::Tenant, 1, || {}));
    let (store, redis) = match settings.store {
        CountIn::Redis => (Store::Shared, Some(redis)),
        CountIn::Memory => (Store::Memory(Arc::new(quota::Book::new(10))), None),
    };
    let users = Arc::new(UserRecords::new(link.clone()));
    let (metrics, observer) = (&world.processor.metrics, world.processor.picker.observer.clone());
    let (timeout, metrics) = (Duration::from_secs(5), metrics.clone());
    let shared = Arc::new(RedisQuotas { link, store: redis, users, timeout, on_failure, metrics });
    let quotas = Quotas::new(Subject::Tenant, settings, store, observer, noon).sharing(shared);
    let config = world.processor.picker.config();
    let again = ActiveConfig::new(config.pools().to_vec(), config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(again.with_quotas(vec![Arc::new(quotas)]), || serde_json::Value::Null);
    world
}

/// Sends all of `messages`, which get no reply, and returns the replies after the store has failed.
async fn after_waiting(world: &World, mode: BodySendMode, messages: Vec<Message>) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let protocol_config = Some(config(mode, BodySendMode::FullDuplexStreamed, false));
    for message in messages {
        let message = ProcessingRequest { protocol_config, ..request(message) };
        assert_eq!(send(&mut exchange, message), [], "it waits");
    }
    warmer::run(exchange.warming().expect("a call that is waited for")).await;
    let mut out = Actions::new();
    exchange.on(Event::Warmed, NOW, &mut out).unwrap();
    (exchange, Answered::of(out.make_contiguous()))
}

#[tokio::test]
async fn store_failure_allows_request_at_its_stage() {
    let world = world(OnStoreFailure::Allow);
    let start = |end| Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", "a")], end));
    let sent = completion("m", "p");
    let part = |end| Message::RequestBody(body(sent.as_bytes(), end));
    let duplex = BodySendMode::FullDuplexStreamed;

    let (exchange, told) = after_waiting(&world, BodySendMode::None, vec![start(false)]).await;
    assert!(exchange.is_routed());
    assert_eq!(told.kinds, ["request_headers"]);
    drop(exchange);

    let (exchange, told) = after_waiting(&world, duplex, vec![start(false), part(true)]).await;
    assert!(exchange.is_routed());
    assert_eq!((told.text(), told.ended), (&*sent, 1));
    drop(exchange);

    let trailers = Message::RequestTrailers(HttpTrailers::default());
    let (exchange, told) = after_waiting(&world, duplex, vec![start(false), part(false), trailers]).await;
    assert!(exchange.is_routed());
    assert_eq!((told.text(), told.ended), (&*sent, 0), "its end are the trailers");
    assert_eq!(told.kinds, ["request_headers", "request_body", "request_trailers"]);
    drop(exchange);
    world.assert_books_closed(3);
}

#[tokio::test]
async fn unreadable_tenant_record_allows_request() {
    let limits = tenants(quota::Limits { requests_per_minute: Some(1), ..NONE });
    let user_records = Some(UserRecordSettings { unknown: OnUnknownUser::Refuse, ttl: Duration::from_secs(1) });
    let settings = TenantSettings { user_records, ..limits };
    let message = |tenant| Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", tenant)], false));
    for (on_failure, goes_on) in [(OnStoreFailure::Allow, true), (OnStoreFailure::Refuse, false)] {
        let world = away(settings.clone(), on_failure);
        for _ in 0..2 {
            let (exchange, told) = after_waiting(&world, BodySendMode::None, vec![message("a")]).await;
            assert_eq!(
                (exchange.is_routed(), told.refused.map(|(status, _)| status)),
                (goes_on, (!goes_on).then_some(503))
            );
        }
        // Tenants in the configuration, and requests without a tenant, need no record.
        for known in ["vip", ""] {
            let mut exchange = world.exchange();
            let protocol_config = Some(config(BodySendMode::None, BodySendMode::FullDuplexStreamed, false));
            let told = send(&mut exchange, ProcessingRequest { protocol_config, ..request(message(known)) });
            assert!(exchange.is_routed() && exchange.warming().is_none(), "{known:?}: {told:?}");
        }
    }
}

#[tokio::test]
async fn store_failure_rejects_request_if_configured() {
    let world = world(OnStoreFailure::Refuse);
    let start = Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", "a")], false));
    let whole = Message::RequestBody(body(completion("m", "p").as_bytes(), true));
    let messages = vec![start, whole];
    let (exchange, told) = after_waiting(&world, BodySendMode::FullDuplexStreamed, messages).await;
    assert_eq!(exchange.outcome(), Some(StreamOutcome::Shed));
    assert_eq!(told.refused.unwrap().0, 503);
    assert_eq!(told.set.get("x-attache-reason").map(String::as_str), Some("limits_unknown"));
    drop(exchange);
    world.assert_books_closed(1);
}
