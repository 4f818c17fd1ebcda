//! The connection to Redis, and the parts that use it.

use super::*;
use anyhow::Context;
use attache_ext_proc::redis_quotas::RedisQuotas;
use attache_picker::quotas::SharedQuotas;
use attache_pool::slo_profile::RedisProfiles;
use attache_redis_store::quota_store::RedisStore;
use attache_redis_store::quota_store::users::UserRecords;
use attache_redis_store::redis_link::RedisLink;
use attache_redis_store::redis_profiles::{self, Look};
use attache_types::rng;
use std::time::Duration;

/// 1 s at shutdown to store ended requests in Redis: far more than needed, unless Redis is unreachable.
const PARTING: Duration = Duration::from_secs(1);

/// A connection to Redis, and the parts that use it.
#[derive(Clone, Debug)]
pub(in super::super) struct Redis {
    link: Arc<RedisLink>,
    tenants: Arc<RedisStore>,
    models: Arc<RedisStore>,
    users: Arc<UserRecords>,
    /// Where SLO profiles are published and how often they are read, if a strategy needs them.
    profiles: Option<(Arc<RedisProfiles>, Duration)>,
}

impl Redis {
    /// The Redis for `settings`: that of `before` if it is the same.
    pub(in super::super) fn of(
        settings: &Settings,
        before: Option<&Self>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(wanted) = &settings.redis else { return Ok(None) };
        let mut redis = match before.filter(|old| old.link.is_at(&wanted.url)) {
            Some(old) => old.clone(),
            None => {
                let connected = metrics.redis.connected.clone();
                let told = move |is: bool| {
                    if is {
                        connected.inc()
                    } else {
                        connected.dec()
                    };
                };
                let link = RedisLink::start(&wanted.url, told).context("`redis.url` can't be used")?;
                let store = |subject| {
                    let lost = metrics.redis.lost_ends.clone();
                    let lost = move || {
                        lost.inc();
                    };
                    Arc::new(RedisStore::new(link.clone(), subject, rng::system_seed(), lost))
                };
                Self {
                    tenants: store(Subject::Tenant),
                    models: store(Subject::Model),
                    users: Arc::new(UserRecords::new(link.clone())),
                    profiles: None,
                    link,
                }
            }
        };
        let every = wanted.profile_refresh;
        let known = before.and_then(|old| old.profiles.as_ref()).map(|(published, _)| published.load_full());
        redis.profiles = match redis.profiles {
            _ if !settings.pools.iter().any(|pool| pool.reads_redis()) => None,
            Some(kept) if kept.1 == every => Some(kept),
            _ => {
                let told = telling(metrics.clone());
                let followed = redis_profiles::follow(&redis.link, every, known.unwrap_or_default(), told);
                Some((followed, every))
            }
        };
        Ok(Some(redis))
    }

    /// Publishes SLO profiles to the strategies that read them.
    pub(in super::super) fn share_profiles(&self, choices: &Choices) {
        let Some((published, _)) = &self.profiles else { return };
        for profiles in choices.slo_profiles().into_iter().filter(|profiles| profiles.reads_redis()) {
            profiles.read_there(published.clone());
        }
    }

    /// Waits briefly until all ended requests are stored.
    pub(in super::super) async fn part(&self) {
        let told = async { tokio::join!(self.tenants.written(), self.models.written()) };
        if tokio::time::timeout(PARTING, told).await.is_err() {
            tracing::warn!("shut down before all ends of requests were written to Redis");
        }
    }

    /// How requests use Redis for the limits of `subject`, by `settings`.
    pub(in super::super) fn shared(
        &self,
        subject: Subject,
        settings: &Settings,
        metrics: &Arc<Metrics>,
    ) -> Option<Arc<dyn SharedQuotas>> {
        let wanted = settings.redis.as_ref()?;
        let store = match subject {
            Subject::Tenant => self.tenants.clone(),
            Subject::Model => self.models.clone(),
        };
        Some(Arc::new(RedisQuotas {
            link: self.link.clone(),
            store: Some(store),
            users: self.users.clone(),
            timeout: wanted.timeout,
            on_failure: wanted.on_failure,
            metrics: metrics.clone(),
        }))
    }
}

fn telling(metrics: Arc<Metrics>) -> impl Fn(Look) {
    let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    move |look| match look {
        Look::Read { good, malformed } => {
            metrics.redis.good_profiles.set(gauge(good));
            metrics.redis.malformed_profiles.set(gauge(malformed));
        }
        Look::Failed => {
            metrics.redis.failed_profile_looks.inc();
        }
    }
}
