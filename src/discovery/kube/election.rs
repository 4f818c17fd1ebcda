//! Who leads, by a `Lease` that all replicas know.
//!
//! The rules are client-go's: a lease belongs to its holder until it has not changed for its duration, as seen by whoever wants it; nobody's
//! clock is compared with another's. A holder that could not renew it for a while leads no longer, before anybody else can. Pure.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// A lease that has not changed for so long is free, as controller-runtime has it.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Whoever could not renew for so long leads no longer.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// The lease is looked at this often.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// What a lease says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Who holds it; empty: nobody.
    pub holder: String,
    /// How long it is good for when it does not change, as its holder says.
    pub duration: Duration,
    /// When it was renewed last, as its holder says; only ever compared with what it said before.
    pub renewed: String,
    /// How often it has changed hands.
    pub transitions: i32,
}

/// What to do about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: it is another's.
    Wait,
    /// Write that it is ours.
    Take {
        /// It was another's before.
        changes_hands: bool,
    },
}

/// One replica's view of the lease.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    seen: Option<(Record, Timestamp)>,
    renewed: Option<Timestamp>,
    /// This replica was the last known holder.
    held_last: bool,
}

impl Election {
    /// A replica that has seen nothing yet; no other may have the same identity.
    #[must_use]
    pub fn new(identity: String) -> Self {
        Self { identity, seen: None, renewed: None, held_last: false }
    }

    /// Who we are.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// What to do about the lease that was found, `None` for one that does not exist.
    pub fn found(&mut self, lease: Option<&Record>, now: Timestamp) -> Step {
        let Some(lease) = lease else { return Step::Take { changes_hands: false } };
        let since = match &self.seen {
            Some((known, since)) if known == lease => *since,
            _ => {
                self.seen = Some((lease.clone(), now));
                now
            }
        };
        if lease.holder == self.identity {
            return Step::Take { changes_hands: false };
        }
        if !lease.holder.is_empty() && now.since(since) < lease.duration {
            // Whatever was written last, it is not ours any more.
            self.renewed = None;
            self.held_last = false;
            return Step::Wait;
        }
        Step::Take { changes_hands: true }
    }

    /// What was decided at `asked` has been written.
    pub fn written(&mut self, asked: Timestamp) {
        self.renewed = Some(asked);
        self.held_last = true;
    }

    /// The lease is given back.
    pub fn given_back(&mut self) {
        self.renewed = None;
        self.held_last = false;
    }

    /// Whether no other replica is known to have taken the lease since this one held it. It outlasts [`Election::leads`] while the lease can't be
    /// read.
    #[must_use]
    pub fn held_last(&self) -> bool {
        self.held_last
    }

    /// Whether this replica leads.
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

    fn record(holder: &str, renewed: u64) -> Record {
        Record { holder: holder.into(), duration: LEASE_DURATION, renewed: renewed.to_string(), transitions: 0 }
    }

    #[test]
    fn a_lease_is_its_holders_until_it_has_not_changed_for_its_duration() {
        let mut election = Election::new("b".into());
        assert_eq!(election.found(Some(&record("a", 0)), at(100)), Step::Wait, "seen for the first time");
        assert_eq!(election.found(Some(&record("a", 1)), at(114)), Step::Wait, "renewed");
        assert_eq!(election.found(Some(&record("a", 1)), at(128)), Step::Wait);
        assert_eq!(election.found(Some(&record("a", 1)), at(129)), Step::Take { changes_hands: true });
        assert_eq!(election.found(Some(&record("", 2)), at(129)), Step::Take { changes_hands: true }, "given back");
        assert_eq!(election.found(Some(&record("b", 2)), at(129)), Step::Take { changes_hands: false }, "our own");
        assert_eq!(election.found(None, at(130)), Step::Take { changes_hands: false });
    }

    #[test]
    fn who_can_not_renew_leads_no_longer() {
        let mut election = Election::new("a".into());
        assert!(!election.leads(at(0)));
        election.written(at(1));
        assert!(election.leads(at(10)) && !election.leads(at(11)));
        assert!(election.held_last(), "no other replica is known to have taken it");
        election.written(at(11));
        assert!(election.leads(at(12)));
        assert_eq!(election.found(Some(&record("b", 0)), at(12)), Step::Wait);
        assert!(!election.leads(at(12)) && !election.held_last(), "another has it");
        election.written(at(13));
        election.given_back();
        assert!(!election.leads(at(13)));
        assert!(!election.held_last());
    }

    proptest! {
        /// Three replicas, some of which can't reach the API server for a while: there is never more than one leader.
        #[test]
        fn never_two_leaders(looks in prop::collection::vec((0usize..3, 0u64..4_000, any::<bool>()), 1..200)) {
            let mut replicas = ["a", "b", "c"].map(|name| Election::new(name.into()));
            let (mut lease, mut now) = (None::<Record>, Timestamp(0));
            for (n, (who, pause, reaches)) in looks.into_iter().enumerate() {
                now = Timestamp(now.0 + pause * 1_000_000);
                if reaches {
                    let replica = &mut replicas[who];
                    if let Step::Take { .. } = replica.found(lease.as_ref(), now) {
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
