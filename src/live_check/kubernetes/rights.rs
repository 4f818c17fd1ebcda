//! The rights that the picker needs, by SelfSubjectAccessReview.

use super::{ANSWER, namespace_of};
use crate::finding::{Check, Report};
use attache_config::Settings;
use attache_config::settings::PodsOf;
use attache_discovery::kube::objects::{ApiNames, ObjectKind};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::Client;
use kube::api::{Api, PostParams};
use std::collections::BTreeSet;
use tokio::time::timeout;

static RIGHTS: Check = Check {
    id: "kubernetes-rights",
    about: "rights of the account that runs the check, for everything that the picker reads and writes",
    why: "Without a right, endpoints, rules or leadership are missing.",
};

pub(super) const CHECKS: &[&Check] = &[&RIGHTS];

/// A right that the picker uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    /// Empty for rights of the whole cluster.
    namespace: String,
    group: &'static str,
    /// With the subresource: `inferencemodels/status`.
    resource: &'static str,
    verb: &'static str,
    /// Whether something fails without it.
    is_needed: bool,
}

impl Right {
    fn rule(&self) -> String {
        let group = if self.group.is_empty() { "\"\"" } else { self.group };
        format!("{{apiGroups: [{group}], resources: [{}], verbs: [{}]}}", self.resource, self.verb)
    }
}

/// The rights that a picker with these settings uses.
fn used(client: &Client, settings: &Settings) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    let mut follows = |namespace: &str, kind: ObjectKind, is_needed: bool| {
        let ApiNames { group, plural, .. } = kind.naming();
        for verb in ["list", "watch"] {
            rights.insert(Right { namespace: namespace.to_owned(), group, resource: plural, verb, is_needed });
        }
    };
    let mut namespaces = BTreeSet::new();
    for source in settings.pools.iter().filter_map(|pool| pool.kubernetes.as_ref()) {
        let namespace = namespace_of(client, source.namespace.as_ref());
        if let PodsOf::Pool { group, .. } = &source.pods {
            follows(&namespace, ObjectKind::Pool(*group), true);
        }
        namespaces.insert(namespace);
    }
    for template in &settings.templates {
        let namespace = namespace_of(client, template.search.namespace.as_ref());
        follows(&namespace, ObjectKind::Pool(template.search.group), true);
        follows(&namespace, ObjectKind::ConfigMap, false);
        namespaces.insert(namespace);
    }
    for namespace in &namespaces {
        follows(namespace, ObjectKind::Pod, true);
        for kind in ObjectKind::OF_RULES {
            follows(namespace, kind, false);
        }
    }
    let mut add = |namespace: &str, group, resource, verbs: &[&'static str]| {
        for verb in verbs {
            rights.insert(Right { namespace: namespace.to_owned(), group, resource, verb, is_needed: true });
        }
    };
    let server = &settings.server;
    for namespace in &namespaces {
        if server.leader_election {
            add(namespace, "coordination.k8s.io", "leases", &["get", "create", "update"]);
        }
        if server.model_status == Some(true) {
            add(namespace, ObjectKind::Model.naming().group, "inferencemodels/status", &["patch"]);
        }
    }
    if server.metrics_auth {
        add("", "authentication.k8s.io", "tokenreviews", &["create"]);
        add("", "authorization.k8s.io", "subjectaccessreviews", &["create"]);
    }
    rights
}

/// Whether this account has the right.
async fn is_allowed(client: &Client, right: &Right) -> Result<bool, String> {
    let (resource, subresource) = match right.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (right.resource, None),
    };
    let attributes = ResourceAttributes {
        namespace: Some(right.namespace.clone()).filter(|namespace| !namespace.is_empty()),
        group: Some(right.group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        verb: Some(right.verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let spec =
        SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let params = PostParams::default();
    let answer =
        timeout(ANSWER, api.create(&params, &review)).await.map_err(|_| format!("no answer within {ANSWER:?}"))?;
    answer.map(|review| review.status.is_some_and(|status| status.allowed)).map_err(|error| error.to_string())
}

/// Adds a finding for each missing right, or one for all of them.
pub(super) async fn check(client: &Client, settings: &Settings, report: &mut Report) {
    let subject = "Kubernetes rights";
    let rights: Vec<Right> = used(client, settings).into_iter().collect();
    let asked = rights.iter().map(|right| is_allowed(client, right));
    let mut allowed = 0usize;
    for (right, answer) in rights.iter().zip(futures_util::future::join_all(asked).await) {
        let what = || {
            let place = if right.namespace.is_empty() { "the cluster" } else { &right.namespace };
            format!("{} {} in {place}", right.verb, right.resource)
        };
        match answer {
            Ok(true) => allowed += 1,
            Ok(false) if right.is_needed => report.push(RIGHTS.error(
                subject,
                format!("this account may not {}", what()),
                format!("add the rule `{}` to the Role of the picker's service account", right.rule()),
            )),
            Ok(false) => report.push(RIGHTS.warning(
                subject,
                format!("this account may not {}, so such objects have no effect", what()),
                format!("add the rule `{}` to the Role of the picker's service account", right.rule()),
            )),
            Err(error) => {
                let fix = "run `attache check --live` in the pod of the picker";
                report.push(RIGHTS.unknown(subject, format!("rights can't be asked for: {error}"), fix));
                return;
            }
        }
    }
    if allowed == rights.len() {
        report.push(RIGHTS.ok(subject, format!("all {allowed} rights that the picker uses")));
    }
}
