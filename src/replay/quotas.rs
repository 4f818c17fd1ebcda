//! Quotas of tenants and models in virtual time.
//!
//! The counterpart of `picker::quotas` without a shared store: [`Book`] decides for both, by the same [`Claim`]s.
//! Minutes and days begin with the run. Called by [`super::world`]; pure.

use ahash::AHashMap;
use attache_quota::{Book, Claim, DEFAULT_MAX_TENANTS, Had, Subject, Taken, TenantSettings, Wall};
use attache_report::served::{Ending, Served};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use std::sync::Arc;
use std::time::Duration;

/// The limits that a replay checks.
#[derive(Clone, Debug, Default)]
pub struct QuotaSettings {
    /// Limits of tenants, and of models.
    pub limits: Vec<(Subject, TenantSettings)>,
    /// Requests have tenants; otherwise all count as one.
    pub has_tenants: bool,
}

/// The quotas of a run, and the reservations of its requests.
#[derive(Debug)]
pub(super) struct RunQuotas {
    quotas: Vec<(Subject, TenantSettings, Book)>,
    has_tenants: bool,
    /// By request number: the position in `quotas`, the name, and the reservation.
    reserved: AHashMap<u64, Vec<(usize, Arc<str>, Taken)>>,
}

impl RunQuotas {
    pub(super) fn new(QuotaSettings { limits, has_tenants }: QuotaSettings) -> Self {
        let quota = |(subject, settings)| (subject, settings, Book::new(DEFAULT_MAX_TENANTS));
        Self { quotas: limits.into_iter().map(quota).collect(), has_tenants, reserved: AHashMap::new() }
    }

    /// Reserves what a request for `model` needs; false if a limit is exceeded.
    pub(super) fn reserve(&mut self, request: &Request, model: &str, now: Timestamp) -> bool {
        let mut reserved = Vec::new();
        let mut within_limits = true;
        for (position, (subject, settings, book)) in self.quotas.iter().enumerate() {
            let name: Arc<str> = match subject {
                Subject::Model => model.into(),
                Subject::Tenant => request.tenant.clone().filter(|_| self.has_tenants).unwrap_or_default(),
            };
            let answer =
                u64::from(if request.answer.tokens > 0 { request.answer.tokens } else { settings.answer_tokens });
            let claim: Claim = settings.claim(*subject, name, request.prompt_tokens().into(), answer);
            if claim.limits.is_unlimited() {
                continue;
            }
            match book.take(&claim, wall(now)) {
                Ok(taken) => reserved.push((position, claim.name, taken)),
                Err(_) => {
                    within_limits = false;
                    break;
                }
            }
        }
        if within_limits {
            if !reserved.is_empty() {
                self.reserved.insert(request.number, reserved);
            }
        } else {
            self.end(reserved, Had::Nothing, now);
        }
        within_limits
    }

    /// Records the usage of a request that has ended.
    pub(super) fn settle(&mut self, served: &Served, now: Timestamp) {
        let Some(reserved) = self.reserved.remove(&served.number) else { return };
        let had = match served.ending {
            Ending::Answered => Had::Tokens(u64::from(served.prompt_tokens) + u64::from(served.generated_tokens)),
            Ending::Refused => Had::Nothing,
            Ending::Lost => Had::AS_BOOKED,
        };
        self.end(reserved, had, now);
    }

    fn end(&self, reserved: Vec<(usize, Arc<str>, Taken)>, had: Had, now: Timestamp) {
        for (position, name, taken) in reserved {
            if let Some((.., book)) = self.quotas.get(position) {
                book.end(&name, &taken, had, wall(now));
            }
        }
    }
}

fn wall(now: Timestamp) -> Wall {
    Wall(Duration::from_nanos(now.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_quota::Limits;
    use attache_sim::content::Piece;
    use attache_workload::{PromptPart, Speaker};

    fn request(number: u64, tenant: &str) -> Request {
        Request {
            number,
            at: Timestamp(0),
            prompt: vec![PromptPart { role: Speaker::User, piece: Piece::new(7, 100) }],
            answer: Piece::new(8, 20),
            adapter: None,
            session: None,
            tenant: Some(tenant.into()),
            priority: 0,
        }
    }

    fn served(number: u64, ending: Ending) -> Served {
        Served {
            number,
            pair: 0,
            at: Timestamp(0),
            endpoint: Some(0),
            prompt_tokens: 100,
            foretold_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 5,
            first_token: None,
            total: Duration::ZERO,
            preemptions: 0,
            ending,
            handover: None,
            fell_back: false,
        }
    }

    fn quotas(subject: Subject, limits: Limits) -> RunQuotas {
        let settings = TenantSettings {
            default: limits,
            overrides: Default::default(),
            answer_tokens: 100,
            unknown_paths: Default::default(),
            unknown_path_tokens: 0,
            store: Default::default(),
            user_records: None,
        };
        RunQuotas::new(QuotaSettings { limits: vec![(subject, settings)], has_tenants: true })
    }

    #[test]
    fn tokens_of_a_minute_are_limited_for_each_tenant_and_settled_by_actual_usage() {
        let limits = Limits { tokens_per_minute: Some(230), ..Limits::default() };
        let mut quotas = quotas(Subject::Tenant, limits);
        let mut allows = |number, tenant: &str, second: u64| {
            quotas.reserve(&request(number, tenant), "m", Timestamp(second * 1_000_000_000))
        };
        assert_eq!([allows(0, "a", 1), allows(1, "a", 2), allows(2, "b", 3)], [true, false, true]);
        assert!(allows(3, "a", 60), "another minute");
        quotas.settle(&served(3, Ending::Answered), Timestamp(61_000_000_000));
        // 105 tokens were used of the 120 that were reserved, so a second request fits.
        assert!(quotas.reserve(&request(4, "a"), "m", Timestamp(62_000_000_000)));
        assert!(!quotas.reserve(&request(5, "a"), "m", Timestamp(63_000_000_000)));
    }

    #[test]
    fn concurrent_requests_of_a_model_are_limited_until_they_end() {
        let mut quotas = quotas(Subject::Model, Limits { concurrency: Some(1), ..Limits::default() });
        for ending in [Ending::Answered, Ending::Refused, Ending::Lost] {
            assert!(quotas.reserve(&request(0, "a"), "m", Timestamp(0)));
            assert!(!quotas.reserve(&request(1, "b"), "m", Timestamp(0)), "tenants share the model");
            assert!(quotas.reserve(&request(2, "b"), "other", Timestamp(0)));
            quotas.settle(&served(0, ending), Timestamp(1));
            quotas.settle(&served(2, ending), Timestamp(1));
        }
    }
}
