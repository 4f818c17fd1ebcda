//! Checks of the cluster: rights of the picker, InferencePools, their pods, and the Service that each pool names.

mod objects;
mod rights;

use crate::Targets;
use crate::finding::{Check, Report};
use crate::picker::PickerView;
use attache_config::Settings;
use attache_config::settings::{KubernetesSource, PodsOf, PoolSearch};
use attache_discovery::kube::client::{connect, default_namespace};
use attache_discovery::kube::follow::{Setback, Subject, WatchUpdate};
use attache_discovery::kube::informer::Informers;
use attache_discovery::kube::objects::{Object, ObjectKind};
use attache_discovery::kube::table::ObjectChange;
use attache_pool::source::PoolGroup;
use kube::Client;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

static REACHABLE: Check = Check {
    id: "kubernetes-reachable",
    about: "the API server answers",
    why: "Without it, the picker keeps its last known endpoints, and after a start it has none.",
};
static KIND: Check = Check {
    id: "kubernetes-kind",
    about: "the CustomResourceDefinitions of InferencePool are installed in the version that is used",
    why: "The picker finds no pool, so it has no endpoints.",
};
static POOL: Check = Check {
    id: "kubernetes-pool",
    about: "the InferencePool exists and is valid",
    why: "Without it the picker has no endpoints for the pool.",
};

/// All checks of this module.
pub(crate) const CHECKS: &[&[&Check]] = &[&[&REACHABLE, &KIND, &POOL], rights::CHECKS, objects::CHECKS];

/// Limit of one request.
const ANSWER: Duration = Duration::from_secs(5);

/// An InferencePool that the picker uses.
struct UsedPool {
    namespace: String,
    name: String,
    object: Object,
}

/// Checks the cluster, if the configuration uses one.
pub(crate) async fn check(targets: &Targets, view: &PickerView) -> Report {
    let mut report = Report::default();
    let Some(settings) = targets.settings.as_ref().or(view.settings.as_ref()).filter(|settings| is_used(settings))
    else {
        return report;
    };
    let subject = "Kubernetes API server";
    let fix = "set `KUBECONFIG`, or run `attache check --live` in the pod of the picker";
    let client = match connect().await {
        Ok(client) => client,
        Err(error) => {
            report.push(REACHABLE.unknown(subject, format!("no cluster is configured here: {error}"), fix));
            return report;
        }
    };
    match timeout(ANSWER, client.apiserver_version()).await {
        Ok(Ok(version)) => {
            report.mark_reached();
            report.push(REACHABLE.ok(subject, format!("version {}", version.git_version)));
        }
        Ok(Err(error)) => {
            report.push(REACHABLE.error(subject, format!("does not answer: {error}"), fix));
            return report;
        }
        Err(_) => {
            report.push(REACHABLE.error(subject, format!("no answer within {ANSWER:?}"), fix));
            return report;
        }
    }
    rights::check(&client, settings, &mut report).await;
    let informers = Informers::new(client.clone());
    for source in settings.pools.iter().filter_map(|pool| pool.kubernetes.as_ref()) {
        of_source(&client, &informers, settings, source, &mut report).await;
    }
    for template in &settings.templates {
        of_search(&client, &informers, settings, &template.search, &mut report).await;
    }
    report
}

/// Whether any part of the configuration needs the API server.
fn is_used(settings: &Settings) -> bool {
    let pools = settings.pools.iter().any(|pool| pool.kubernetes.is_some());
    pools || !settings.templates.is_empty() || settings.server.leader_election || settings.server.metrics_auth
}

fn namespace_of(client: &Client, named: Option<&String>) -> String {
    named.cloned().unwrap_or_else(|| default_namespace(client))
}

/// All objects of a kind; the error is the failure of the list.
async fn list(informers: &Arc<Informers>, subject: &Subject) -> Result<Vec<Object>, Option<Setback>> {
    let mut updates = informers.listen(subject);
    let mut objects = Vec::new();
    let all = async {
        while let Some(update) = updates.recv().await {
            match update {
                WatchUpdate::Change(ObjectChange::Listed(object)) => objects.push(object),
                WatchUpdate::Change(ObjectChange::ListDone) => return Ok(()),
                WatchUpdate::Failed(setback) => return Err(Some(setback)),
                _ => {}
            }
        }
        Err(None)
    };
    timeout(ANSWER, all).await.unwrap_or(Err(None))?;
    Ok(objects)
}

async fn of_source(
    client: &Client,
    informers: &Arc<Informers>,
    settings: &Settings,
    source: &KubernetesSource,
    report: &mut Report,
) {
    let namespace = namespace_of(client, source.namespace.as_ref());
    match &source.pods {
        PodsOf::Pool { name, group } => {
            let Some(pools) = pools(informers, &namespace, *group, report).await else { return };
            let subject = objects::subject(&namespace, name);
            let names: Vec<String> = pools.iter().map(|pool| pool.meta.name.clone()).collect();
            match pools.into_iter().find(|pool| pool.meta.name == *name) {
                Some(object) => {
                    let pool = UsedPool { namespace, name: name.clone(), object };
                    objects::check(client, settings, &pool, report).await;
                }
                None => {
                    let fix = match names.is_empty() {
                        true => format!(
                            "create the InferencePool {name} in the namespace {namespace}, or correct \
                                         `kubernetes.namespace`"
                        ),
                        false => format!("correct `kubernetes.pool`: the namespace has {}", names.join(", ")),
                    };
                    report.push(POOL.error(subject, format!("there is no InferencePool {name}"), fix));
                }
            }
        }
        PodsOf::Selector { selector, target_ports } => {
            let subject = format!("pods of {selector} in {namespace}");
            objects::pods(client, &namespace, selector, target_ports, &subject, report).await;
        }
    }
}

async fn of_search(
    client: &Client,
    informers: &Arc<Informers>,
    settings: &Settings,
    search: &PoolSearch,
    report: &mut Report,
) {
    let namespace = namespace_of(client, search.namespace.as_ref());
    let subject = Subject {
        kind: ObjectKind::Pool(search.group),
        namespace: namespace.clone(),
        labels: Some(search.selector.clone()).filter(|labels| !labels.is_empty()),
    };
    let Some(found) = judged(list(informers, &subject).await, informers, &namespace, search.group, report).await else {
        return;
    };
    if found.is_empty() {
        report.push(POOL.error(
            format!("InferencePools in {namespace}"),
            format!("the selector `{}` finds no InferencePool", search.selector),
            "correct `kubernetes.poolSelector`, or label the InferencePools",
        ));
    }
    for object in found {
        let pool = UsedPool { namespace: namespace.clone(), name: object.meta.name.clone(), object };
        objects::check(client, settings, &pool, report).await;
    }
}

/// The InferencePools of a namespace. A missing kind or right is a finding.
async fn pools(
    informers: &Arc<Informers>,
    namespace: &str,
    group: PoolGroup,
    report: &mut Report,
) -> Option<Vec<Object>> {
    let subject = Subject { kind: ObjectKind::Pool(group), namespace: namespace.to_owned(), labels: None };
    judged(list(informers, &subject).await, informers, namespace, group, report).await
}

async fn judged(
    listed: Result<Vec<Object>, Option<Setback>>,
    informers: &Arc<Informers>,
    namespace: &str,
    group: PoolGroup,
    report: &mut Report,
) -> Option<Vec<Object>> {
    let subject = format!("InferencePools in {namespace}");
    let kind = format!("{}/{}", group.as_str(), group.version());
    match listed {
        Ok(pools) => {
            report.push(KIND.ok(subject, format!("{kind} is installed")));
            Some(pools)
        }
        Err(Some(setback)) if setback.not_installed => {
            let other = PoolGroup::ALL.into_iter().find(|other| *other != group).unwrap_or_default();
            let wanted = Subject { kind: ObjectKind::Pool(other), namespace: namespace.to_owned(), labels: None };
            let fix = match list(informers, &wanted).await {
                Ok(found) if !found.is_empty() => {
                    format!("set `kubernetes.group: {}`, which is installed", other.as_str())
                }
                _ => {
                    format!("install the CustomResourceDefinitions of the Gateway API inference extension with {kind}")
                }
            };
            report.push(KIND.error(subject, format!("{kind} InferencePool is not installed"), fix));
            None
        }
        Err(Some(setback)) if setback.refused => {
            let rule = ObjectKind::Pool(group).role_rule();
            let fix = format!("add the rule `{rule}` to the Role of the service account");
            report.push(POOL.error(subject, "InferencePools may not be listed", fix));
            None
        }
        Err(_) => {
            report.push(POOL.unknown(subject, "the list of InferencePools failed", "look at the API server"));
            None
        }
    }
}
