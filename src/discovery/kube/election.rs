//! Leader election by a `Lease` that all replicas share.
//!
//! The rules are client-go's. A lease belongs to its holder until it has not changed for its duration, as observed by
//! the replica that wants it; clocks of different replicas are never compared. A leader that can't renew loses
//! leadership before another replica can take the lease. Pure.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// A lease that has not changed for this time is free, as in controller-runtime.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A leader that could not renew for this time loses leadership.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between two reads of the lease.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// The fields of a `Lease` that election uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Identity of the holder; empty if the lease is free.
    pub holder: String,
    /// Time for which the lease is valid without a renewal, as its holder wrote it.
    pub duration: Duration,
    /// Time of the last renewal, as its holder wrote it; only compared with earlier values.
    pub renewed: String,
    /// Number of changes of the holder.
    pub transitions: i32,
}

/// The next action on a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    /// Nothing, because another replica holds it.
    Wait,
    /// Write this replica as the holder.
    Take {
        /// Whether another replica held it before.
        changes_hands: bool,
    },
}

/// One replica's view of the lease.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    seen: Option<(LeaseRecord, Timestamp)>,
    renewed: Option<Timestamp>,
    /// Whether this replica was the last known holder.
    held_last: bool,
}

impl Election {
    /// The view of a replica before its first read; `identity` must be unique.
    #[must_use]
    pub fn new(identity: String) -> Self {
        Self { identity, seen: None, renewed: None, held_last: false }
    }

    /// Identity of this replica.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The next action for the lease that was read; `None` if it does not exist.
    pub fn found(&mut self, lease: Option<&LeaseRecord>, now: Timestamp) -> LeaseStep {
        let Some(lease) = lease else { return LeaseStep::Take { changes_hands: false } };
        let since = match &self.seen {
            Some((known, since)) if known == lease => *since,
            _ => {
                self.seen = Some((lease.clone(), now));
                now
            }
        };
        if lease.holder == self.identity {
            return LeaseStep::Take { changes_hands: false };
        }
        if !lease.holder.is_empty() && now.since(since) < lease.duration {
            // Another replica holds the lease, whatever this one wrote last.
            self.renewed = None;
            self.held_last = false;
            return LeaseStep::Wait;
        }
        LeaseStep::Take { changes_hands: true }
    }

    /// Records that the action that was decided at `asked` has been written.
    pub fn written(&mut self, asked: Timestamp) {
        self.renewed = Some(asked);
        self.held_last = true;
    }

    /// Records that this replica has released the lease.
    pub fn given_back(&mut self) {
        self.renewed = None;
        self.held_last = false;
    }

    /// Whether this replica held the lease last, as far as is known. Lasts longer than [`Election::leads`] while
    /// the lease can't be read.
    #[must_use]
    pub fn held_last(&self) -> bool {
        self.held_last
    }

    /// Whether this replica is the leader.
    #[must_use]
    pub fn leads(&self, now: Timestamp) -> bool {
        self.renewed.is_some_and(|at| now.since(at) < RENEW_DEADLINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * SECOND)
    }

    fn record(holder: &str, renewed: u64) -> LeaseRecord {
        LeaseRecord { holder: holder.into(), duration: LEASE_DURATION, renewed: renewed.to_string(), transitions: 0 }
    }

    #[test]
    fn lease_is_free_after_its_duration_without_change() {
        let mut election = Election::new("b".into());
        assert_eq!(election.found(Some(&record("a", 0)), at(100)), LeaseStep::Wait, "seen for the first time");
        assert_eq!(election.found(Some(&record("a", 1)), at(114)), LeaseStep::Wait, "renewed");
        assert_eq!(election.found(Some(&record("a", 1)), at(128)), LeaseStep::Wait);
        assert_eq!(election.found(Some(&record("a", 1)), at(129)), LeaseStep::Take { changes_hands: true });
        assert_eq!(
            election.found(Some(&record("", 2)), at(129)),
            LeaseStep::Take { changes_hands: true },
            "given back"
        );
        assert_eq!(election.found(Some(&record("b", 2)), at(129)), LeaseStep::Take { changes_hands: false }, "our own");
        assert_eq!(election.found(None, at(130)), LeaseStep::Take { changes_hands: false });
    }

    #[test]
    fn leader_without_renewal_loses_leadership() {
        let mut election = Election::new("a".into());
        assert!(!election.leads(at(0)));
        election.written(at(1));
        assert!(election.leads(at(10)) && !election.leads(at(11)));
        assert!(election.held_last(), "no other replica is known to have taken it");
        election.written(at(11));
        assert!(election.leads(at(12)));
        assert_eq!(election.found(Some(&record("b", 0)), at(12)), LeaseStep::Wait);
        assert!(!election.leads(at(12)) && !election.held_last(), "another has it");
        election.written(at(13));
        election.given_back();
        assert!(!election.leads(at(13)));
        assert!(!election.held_last());
    }

    proptest! {
        /// Three replicas, some of which can't reach the API server at times: there is never more than one leader.
        #[test]
        fn election_never_has_two_leaders(
            looks in prop::collection::vec((0usize..3, 0u64..4_000, any::<bool>()), 1..200),
        ) {
            let mut replicas = ["a", "b", "c"].map(|name| Election::new(name.into()));
            let (mut lease, mut now) = (None::<LeaseRecord>, Timestamp(0));
            for (n, (who, pause, reaches)) in looks.into_iter().enumerate() {
                now = Timestamp(now.0 + pause * 1_000_000);
                if reaches {
                    let replica = &mut replicas[who];
                    if let LeaseStep::Take { .. } = replica.found(lease.as_ref(), now) {
                        lease = Some(record(replica.identity(), n as u64));
                        replica.written(now);
                    }
                }
                let leaders = replicas.iter().filter(|r| r.leads(now)).count();
                prop_assert!(leaders <= 1, "{leaders} leaders");
            }
        }
    }
}
