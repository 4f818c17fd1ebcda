//! Writes the conditions of `InferenceModel`s into their status.
//!
//! With leader election or `modelStatus: true`, only the replica that holds the lease writes. By default every replica
//! writes conditions that an object lacks. All replicas derive the same conditions, so one writes and the others find
//! it done. They may differ only in missing target models, since each sees only its own requests. So each replica
//! applies what another has written about them ([`super::conditions::target_status`]), and changes it at most once a
//! minute. A missing right is logged once and retried every ten minutes.
//!
//! Writes are server-side applies to the subresource `status` with an own field manager, so conditions of other writers
//! stay. Unchanged conditions are not written again. Failed writes are retried later and do not delay others.

use super::conditions::Report;
use super::follow::with_causes;
use super::objects::{ApiNames, ObjectKind};
use super::stats::KubeStats;
use attache_scheduling::router::MISSING_FOR;
use attache_types::clock::{Clock, Timestamp};
use k8s_openapi::jiff;
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Field manager of these fields at the API server.
pub const FIELD_MANAGER: &str = "attache";
/// Delay before a failed write is retried.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The same if no operator asked for conditions and the right to write them is missing.
pub const RIGHTS_INTERVAL: Duration = Duration::from_secs(600);
/// A write that takes longer counts as failed.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a status was not written.
enum WriteError {
    /// The API server rejects this object, by an admission webhook or a validation.
    Refused(String),
    /// The right to write statuses is missing.
    Forbidden(String),
    /// The API server did not answer.
    NoAnswer(String),
}

/// Writes the statuses of the objects of one pool.
pub struct StatusWriter {
    api: Api<DynamicObject>,
    reports: watch::Receiver<Vec<Report>>,
    leads: watch::Receiver<bool>,
    /// Whether an operator asked for conditions; then a failed write is a warning.
    asked: Arc<AtomicBool>,
    clock: Clock,
    stats: Arc<KubeStats>,
    /// The last written report by name, with the version of the object that it replaced. It is not written again until
    /// the watch has delivered another version.
    written: HashMap<String, Report>,
    /// When this replica last changed whether a target model is missing, by name.
    flipped: HashMap<String, Timestamp>,
    /// Objects whose last write failed, which was logged.
    troubled: HashSet<String>,
    /// Whether the missing right was logged.
    logged_rights: bool,
}

impl StatusWriter {
    /// Creates a writer of `reports` in `namespace`, active while `leads` is true.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        reports: watch::Receiver<Vec<Report>>,
        (leads, asked): (watch::Receiver<bool>, Arc<AtomicBool>),
        clock: Clock,
        stats: Arc<KubeStats>,
    ) -> Self {
        let ApiNames { group, version, kind, plural } = ObjectKind::Model.naming();
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        let api = Api::namespaced_with(client, namespace, &resource);
        Self {
            api,
            reports,
            leads,
            asked,
            clock,
            stats,
            written: HashMap::new(),
            flipped: HashMap::new(),
            troubled: HashSet::new(),
            logged_rights: false,
        }
    }

    /// Writes until `shutdown`, or until the sender of reports is gone.
    pub async fn run(mut self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.follow() => {}
        }
    }

    async fn follow(&mut self) {
        loop {
            let reports = self.reports.borrow_and_update().clone();
            self.leads.borrow_and_update();
            let again = self.write_all(&reports).await;
            let retry = async {
                match again {
                    Some(interval) => tokio::time::sleep(interval).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.reports.changed() => if changed.is_err() { return },
                changed = self.leads.changed() => if changed.is_err() { return },
                () = retry => {}
            }
        }
    }

    /// Writes what is due. Returns the delay after which some of it has to be retried.
    async fn write_all(&mut self, reports: &[Report]) -> Option<Duration> {
        let is_due = |name: &String| reports.iter().any(|report| report.name == *name && report.is_due());
        self.written.retain(|name, _| is_due(name));
        self.flipped.retain(|name, _| reports.iter().any(|report| report.name == *name));
        self.troubled.retain(is_due);
        let mut again = None;
        for report in reports.iter().filter(|report| report.is_due()) {
            // Checked before each write, since another replica may have become the leader.
            if !*self.leads.borrow() {
                return None;
            }
            if self.written.get(&report.name) == Some(report) {
                continue;
            }
            let (now, flips) = (self.clock.now(), report.flips_denial());
            let last = self.flipped.get(&report.name).filter(|_| flips);
            if let Some(left) = last.and_then(|last| MISSING_FOR.checked_sub(now.since(*last))).filter(|l| !l.is_zero())
            {
                again = Some(again.map_or(left, |again: Duration| again.min(left)));
                continue;
            }
            let late = |_| Err(WriteError::NoAnswer("no answer in time".to_owned()));
            match timeout(ANSWER_TIMEOUT, self.write(report)).await.unwrap_or_else(late) {
                Ok(()) => {
                    self.troubled.remove(&report.name);
                    self.stats.status_written(true);
                    self.written.insert(report.name.clone(), report.clone());
                    if flips {
                        self.flipped.insert(report.name.clone(), now);
                    }
                }
                Err(WriteError::Forbidden(error)) if !self.asked.load(Relaxed) => {
                    self.not_allowed(&error);
                    return Some(RIGHTS_INTERVAL);
                }
                Err(WriteError::Refused(error) | WriteError::Forbidden(error)) => {
                    self.failed(report, &error);
                    again = Some(RETRY_INTERVAL);
                }
                // The other writes would fail as well.
                Err(WriteError::NoAnswer(error)) => {
                    self.failed(report, &error);
                    return Some(RETRY_INTERVAL);
                }
            }
        }
        again
    }

    /// Handles a missing right if no operator asked for conditions.
    fn not_allowed(&mut self, error: &str) {
        if !std::mem::replace(&mut self.logged_rights, true) {
            tracing::info!(
                error,
                "conditions of InferenceModels are not written: the service account lacks `patch` on \
                 `inferencemodels/status`; `--model-status=false` (`server.modelStatus`) disables them"
            );
        }
    }

    fn failed(&mut self, report: &Report, error: &str) {
        self.stats.status_written(false);
        let name = &report.name;
        if self.troubled.insert(name.clone()) {
            tracing::warn!(
                name,
                error,
                "the status of an InferenceModel can't be written; `patch` on `inferencemodels/status` is needed"
            );
        }
    }

    async fn write(&self, report: &Report) -> Result<(), WriteError> {
        let wall = self.clock.wall(self.clock.now());
        let now = jiff::Timestamp::try_from(wall).map_err(|e| WriteError::NoAnswer(e.to_string()))?;
        // Whole seconds, as in all times of Kubernetes.
        let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let ApiNames { group, version, kind, .. } = ObjectKind::Model.naming();
        let body = json!({
            "apiVersion": format!("{group}/{version}"),
            "kind": kind,
            // The UID protects another object of the same name.
            "metadata": {"name": report.name, "uid": report.uid},
            "status": {"conditions": report.conditions(&now)},
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match self.api.patch_status(&report.name, &params, &Patch::Apply(&body)).await {
            Ok(_) => Ok(()),
            // The object was deleted or replaced. The watch reports that, so there is nothing to write.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 && !status.message.contains("denied the request") => {
                Err(WriteError::Forbidden(with_causes(&kube::Error::Api(status))))
            }
            Err(error @ kube::Error::Api(_)) => Err(WriteError::Refused(with_causes(&error))),
            Err(error) => Err(WriteError::NoAnswer(with_causes(&error))),
        }
    }
}
