//! The task that holds a `Lease`, or waits until it is free.

use super::election::{Election, LEASE_DURATION, LeaseRecord, LeaseStep, RETRY_PERIOD};
use attache_types::clock::Clock;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff;
use kube::Client;
use kube::api::{Api, PostParams};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

/// A response about the lease that takes longer counts as failed.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Name of the lease that the replicas of GIE's picker share, so that one can replace the other replica by replica.
#[must_use]
pub fn name(namespace: &str, pool: &str) -> String {
    format!("epp-{namespace}-{pool}.gateway-api-inference-extension.sigs.k8s.io")
}

/// Identity of this replica: the name of the pod or the host, and a random number.
#[must_use]
pub fn identity(seed: u64) -> String {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let name = variable("POD_NAME").or_else(|| variable("HOSTNAME")).unwrap_or_else(|| "attache".to_owned());
    format!("{name}_{seed:016x}")
}

/// A lease that several replicas compete for.
pub struct LeaseClaim {
    api: Api<Lease>,
    name: String,
    election: Election,
    clock: Clock,
    leads: watch::Sender<bool>,
    serves: watch::Sender<bool>,
    /// Whether the last access failed, which is logged once.
    troubled: bool,
}

impl LeaseClaim {
    /// A claim on the lease `name`. `leads` becomes whether this replica is the leader and may write. `serves`
    /// becomes whether it is the active replica, which lasts while the API server is away until another replica is
    /// known to hold the lease.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        name: String,
        identity: String,
        clock: Clock,
        leads: watch::Sender<bool>,
        serves: watch::Sender<bool>,
    ) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, name, election: Election::new(identity), clock, leads, serves, troubled: false }
    }

    /// Competes for the lease until `shutdown`, and then releases it.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut look = tokio::time::interval(RETRY_PERIOD);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = look.tick() => {}
            }
            let until = Instant::now() + ANSWER_TIMEOUT;
            let looked = tokio::select! {
                () = shutdown.cancelled() => break,
                looked = timeout_at(until, self.look()) => looked,
            };
            self.judge(looked.unwrap_or_else(|_| Err("no answer in time".to_owned())));
        }
        if self.election.leads(self.clock.now()) {
            self.leads.send_replace(false);
            // The next replica would otherwise wait for the lease to expire.
            let _ = timeout(ANSWER_TIMEOUT, self.give_back()).await;
        }
    }

    fn judge(&mut self, looked: Result<(), String>) {
        match looked {
            Ok(()) => self.troubled = false,
            Err(error) if !self.troubled => {
                self.troubled = true;
                tracing::warn!(lease = self.name, error, "lease can't be read or written");
            }
            Err(_) => {}
        }
        let serves = self.election.held_last();
        self.serves.send_if_modified(|before| std::mem::replace(before, serves) != serves);
        let leads = self.election.leads(self.clock.now());
        if self.leads.send_if_modified(|before| std::mem::replace(before, leads) != leads) {
            let identity = self.election.identity();
            if leads {
                tracing::info!(lease = self.name, identity, "this replica is the leader");
            } else {
                tracing::info!(lease = self.name, identity, "this replica lost leadership");
            }
        }
    }

    /// Reads the lease, and takes or renews it if allowed.
    async fn look(&mut self) -> Result<(), String> {
        let asked = self.clock.now();
        let found = self.api.get_opt(&self.name).await.map_err(|e| describe("get", &e))?;
        let record = found.as_ref().map(record);
        let LeaseStep::Take { changes_hands } = self.election.found(record.as_ref(), asked) else { return Ok(()) };
        let lease = self.ours(found, changes_hands)?;
        let (verb, written) = if lease.metadata.resource_version.is_some() {
            ("update", self.api.replace(&self.name, &PostParams::default(), &lease).await)
        } else {
            ("create", self.api.create(&PostParams::default(), &lease).await)
        };
        match written {
            Ok(_) => self.election.written(asked),
            // Another replica was faster; the next read returns its name.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(describe(verb, &error)),
        }
        Ok(())
    }

    /// The lease with this replica as its holder.
    fn ours(&self, found: Option<Lease>, changes_hands: bool) -> Result<Lease, String> {
        let wall = self.clock.wall(self.clock.now());
        let now = MicroTime(jiff::Timestamp::try_from(wall).map_err(|e| e.to_string())?);
        let is_new = found.is_none();
        let mut lease = found.unwrap_or_else(|| Lease {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            ..Lease::default()
        });
        let before = lease.spec.take().unwrap_or_default();
        let transitions = before.lease_transitions.unwrap_or(0).saturating_add(i32::from(changes_hands));
        let acquired = before.acquire_time.clone().filter(|_| !changes_hands && !is_new);
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.election.identity().to_owned()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            acquire_time: acquired.or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..before
        });
        Ok(lease)
    }

    async fn give_back(&mut self) -> Result<(), kube::Error> {
        self.election.given_back();
        let Some(mut lease) = self.api.get_opt(&self.name).await? else { return Ok(()) };
        let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_deref() == Some(self.election.identity()))
        else {
            return Ok(());
        };
        spec.holder_identity = Some(String::new());
        self.api.replace(&self.name, &PostParams::default(), &lease).await.map(|_| ())
    }
}

/// Describes an error, and for a refusal the missing right.
fn describe(verb: &str, error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => format!(
            "the API server refuses `{verb}` on `leases` (group `coordination.k8s.io`); the service account's Role \
             must allow get, create and update"
        ),
        error => error.to_string(),
    }
}

fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        duration: seconds.map_or(LEASE_DURATION, Duration::from_secs),
        renewed: spec.renew_time.map(|time| time.0.to_string()).unwrap_or_default(),
        transitions: spec.lease_transitions.unwrap_or(0),
    }
}
