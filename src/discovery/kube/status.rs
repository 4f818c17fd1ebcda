//! Writes the conditions of `InferenceModel`s into their status.
//!
//! With leader election or `modelStatus: true` the replica that holds the lease writes, so there is one writer. By default every replica writes
//! what an object does not say yet: all replicas come to the same conditions, so the first of them writes and the others find it written. They
//! differ only in which target models are missing, since each knows its own requests. So each takes in what another has written of that
//! ([`super::conditions::heard`]), and changes it at most once a minute. Where the right is missing, that is logged once and tried again every ten
//! minutes.
//!
//! Server-side apply to the subresource `status`, with a field manager of our own: conditions of others stay. What an object says already is
//! not written again; what can't be written is tried again later, and keeps no other waiting.

use super::conditions::Report;
use super::follow::with_causes;
use super::objects::{Kind, Naming};
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

/// Whose fields these are, to the API server.
pub const FIELD_MANAGER: &str = "attache";
/// What could not be written is tried again after this time.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The same where nobody has asked for conditions and the right to write them is missing.
pub const RIGHTS_INTERVAL: Duration = Duration::from_secs(600);
/// An answer that takes longer counts as none.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a status was not written.
enum Failure {
    /// The API server says so of this object: an admission webhook, a validation.
    Refused(String),
    /// The right to write statuses is missing.
    Forbidden(String),
    /// Nobody has answered.
    NoAnswer(String),
}

/// Writes for the objects of one pool.
pub struct StatusWriter {
    api: Api<DynamicObject>,
    reports: watch::Receiver<Vec<Report>>,
    leads: watch::Receiver<bool>,
    /// An operator has asked for conditions: that they can't be written is a warning.
    asked: Arc<AtomicBool>,
    clock: Clock,
    stats: Arc<KubeStats>,
    /// What was written last, and which version of the object it stood in place of, by name: until the watch has told of another, it is not
    /// written again.
    written: HashMap<String, Report>,
    /// When this replica last wrote that a target model is missing, or is there again, by name.
    flipped: HashMap<String, Timestamp>,
    /// Objects whose last write came to nothing, which has been told.
    troubled: HashSet<String>,
    /// It has been told that the right is missing.
    told_rights: bool,
}

impl StatusWriter {
    /// Writes `reports` in `namespace` while `leads` says so.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        reports: watch::Receiver<Vec<Report>>,
        (leads, asked): (watch::Receiver<bool>, Arc<AtomicBool>),
        clock: Clock,
        stats: Arc<KubeStats>,
    ) -> Self {
        let Naming { group, version, kind, plural } = Kind::Model.naming();
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
            told_rights: false,
        }
    }

    /// Writes until `shutdown`, or until nobody reports any more.
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

    /// Writes what is due. When some of it has to be tried again, says after which time.
    async fn write_all(&mut self, reports: &[Report]) -> Option<Duration> {
        let is_due = |name: &String| reports.iter().any(|report| report.name == *name && report.is_due());
        self.written.retain(|name, _| is_due(name));
        self.flipped.retain(|name, _| reports.iter().any(|report| report.name == *name));
        self.troubled.retain(is_due);
        let mut again = None;
        for report in reports.iter().filter(|report| report.is_due()) {
            // Looked at before each of them: another may lead by now.
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
            let late = |_| Err(Failure::NoAnswer("no answer in time".to_owned()));
            match timeout(ANSWER_TIMEOUT, self.write(report)).await.unwrap_or_else(late) {
                Ok(()) => {
                    self.troubled.remove(&report.name);
                    self.stats.status_written(true);
                    self.written.insert(report.name.clone(), report.clone());
                    if flips {
                        self.flipped.insert(report.name.clone(), now);
                    }
                }
                Err(Failure::Forbidden(error)) if !self.asked.load(Relaxed) => {
                    self.not_allowed(&error);
                    return Some(RIGHTS_INTERVAL);
                }
                Err(Failure::Refused(error) | Failure::Forbidden(error)) => {
                    self.failed(report, &error);
                    again = Some(RETRY_INTERVAL);
                }
                // Nor would the others get one.
                Err(Failure::NoAnswer(error)) => {
                    self.failed(report, &error);
                    return Some(RETRY_INTERVAL);
                }
            }
        }
        again
    }

    /// Nobody has asked for conditions, and this replica may not write them.
    fn not_allowed(&mut self, error: &str) {
        if !std::mem::replace(&mut self.told_rights, true) {
            tracing::info!(
                error,
                "conditions of InferenceModels are not written: the service account lacks `patch` on `inferencemodels/status`; \
                 `--model-status=false` (`server.modelStatus`) disables them"
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

    async fn write(&self, report: &Report) -> Result<(), Failure> {
        let wall = self.clock.wall(self.clock.now());
        let now = jiff::Timestamp::try_from(wall).map_err(|e| Failure::NoAnswer(e.to_string()))?;
        // Whole seconds, as Kubernetes writes times.
        let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let Naming { group, version, kind, .. } = Kind::Model.naming();
        let body = json!({
            "apiVersion": format!("{group}/{version}"),
            "kind": kind,
            // Another object of the same name is none of this one's business.
            "metadata": {"name": report.name, "uid": report.uid},
            "status": {"conditions": report.conditions(&now)},
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        match self.api.patch_status(&report.name, &params, &Patch::Apply(&body)).await {
            Ok(_) => Ok(()),
            // It is gone, or another one by now: the watch tells, and there is nothing to write.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 403 && !status.message.contains("denied the request") => {
                Err(Failure::Forbidden(with_causes(&kube::Error::Api(status))))
            }
            Err(error @ kube::Error::Api(_)) => Err(Failure::Refused(with_causes(&error))),
            Err(error) => Err(Failure::NoAnswer(with_causes(&error))),
        }
    }
}
