//! Attaché inside Envoy: that its library stays loaded, that its parts share a picker, and that Envoy can choose servers.

use super::field::{at, flag, list, message_name, text};
use super::traffic::Traffic;
use crate::finding::{Check, Report};
use serde_json::Value;

pub(super) const CHECKS: &[&Check] = &[&LOADED, &PICKERS, &TWICE, &POLICY];

static LOADED: Check = Check {
    id: "envoy-inside-loaded",
    about: "Envoy never unloads Attaché's library",
    why: "Envoy unloads it with the last filter that uses it, while its threads run, and crashes.",
};

static PICKERS: Check = Check {
    id: "envoy-inside-pickers",
    about: "filter, cluster and bootstrap extension share one picker",
    why: "Parts with different configuration files have a picker each, and neither knows the requests of the other.",
};

static TWICE: Check = Check {
    id: "envoy-inside-twice",
    about: "a listener with Attaché inside Envoy has no ext-proc filter of a picker",
    why: "Both decide about each request. Envoy follows the second one, so the first one counts requests on wrong servers.",
};

static POLICY: Check = Check {
    id: "envoy-inside-policy",
    about: "a cluster with servers from Attaché has a load balancing policy of Envoy",
    why: "Attaché gives the servers of the pool, and does not choose among them: all requests get 503.",
};

/// The filter of Attaché inside Envoy, as a listener has it.
#[derive(Debug)]
pub(super) struct InsideFilter<'a> {
    /// For findings: the Envoy, the listener and the filter.
    pub(super) subject: String,
    /// Its place among the HTTP filters.
    pub(super) position: usize,
    /// The HTTP filter.
    pub(super) message: &'a Value,
}

/// Whether an HTTP filter is Attaché.
pub(super) fn is_inside(filter: &Value) -> bool {
    let config = at(filter, "typed_config");
    message_name(config) == "DynamicModuleFilter" && is_library(config)
}

/// Whether the module that `config` names is Attaché, by its file name. Operators may rename it for an update.
fn is_library(config: &Value) -> bool {
    let module = at(config, "dynamic_module_config");
    [text(module, "name"), text(module, "module.local.filename")].iter().any(|name| name.contains("attache"))
}

/// A part of Attaché inside Envoy.
struct Part<'a> {
    /// For findings: the Envoy and the part.
    subject: String,
    /// The message that names the library.
    config: &'a Value,
    /// The `Any` with Attaché's own settings.
    settings: &'a Value,
}

impl<'a> Part<'a> {
    fn new(subject: String, config: &'a Value, settings: &str) -> Self {
        Self { subject, config, settings: at(config, settings) }
    }

    /// The configuration file; `None` if it is not in view.
    fn config_file(&self) -> Option<String> {
        let value = at(self.settings, "value");
        // A `StringValue` has JSON in it.
        let parsed: Option<Value> = value.as_str().and_then(|text| serde_json::from_str(text).ok());
        Some(text(parsed.as_ref().unwrap_or(value), "config_file").to_owned()).filter(|file| !file.is_empty())
    }
}

/// The parts in this Envoy: filters, the bootstrap extension, clusters.
fn parts<'a>(traffic: &Traffic<'a>) -> Vec<Part<'a>> {
    let filters = traffic.managers.iter().filter_map(|listener| listener.inside.as_ref());
    let filters = filters.map(|f| Part::new(f.subject.clone(), at(f.message, "typed_config"), "filter_config"));
    let extensions = list(&traffic.source.config.bootstrap, "bootstrap_extensions").iter();
    let extensions = extensions.map(|extension| at(extension, "typed_config")).filter(|config| is_library(config));
    let subject = format!("{}, bootstrap extension", traffic.source.name);
    let extensions = extensions.map(|config| Part::new(subject.clone(), config, "extension_config"));
    let clusters = traffic.model_clusters.iter().map(|(name, c)| (name, at(c, "cluster_type.typed_config")));
    let clusters = clusters.filter(|(_, config)| is_library(config));
    let clusters = clusters.map(|(name, config)| Part::new(traffic.cluster_subject(name), config, "cluster_config"));
    filters.chain(extensions).chain(clusters).collect()
}

pub(super) fn check(traffic: &Traffic<'_>, out: &mut Report) {
    let parts = parts(traffic);
    for part in &parts {
        out.push(if flag(part.config, "dynamic_module_config.do_not_close") {
            LOADED.ok(&part.subject, "the library stays loaded")
        } else {
            let fix = "set `do_not_close: true` in `dynamic_module_config`";
            LOADED.error(&part.subject, "Envoy may unload the library", fix)
        });
    }
    check_pickers(&parts, out);
    for listener in &traffic.managers {
        if let (Some(inside), true) = (&listener.inside, listener.filters.iter().any(|filter| !filter.is_disabled)) {
            let fix = "remove one of both filters";
            out.push(TWICE.error(&inside.subject, "the listener has an ext-proc filter of a picker, too", fix));
        }
    }
    for (name, cluster) in &traffic.model_clusters {
        if is_library(at(cluster, "cluster_type.typed_config")) {
            check_policy(&traffic.cluster_subject(name), cluster, out);
        }
    }
}

fn check_pickers(parts: &[Part<'_>], out: &mut Report) {
    let Some((first, others)) = parts.split_first() else { return };
    let Some(file) = first.config_file() else { return };
    let other = others.iter().find_map(|part| Some((part, part.config_file()?)).filter(|(_, other)| *other != file));
    out.push(match other {
        None => PICKERS.ok(&first.subject, format!("all parts have the configuration file {file}")),
        Some((part, other)) => PICKERS.error(
            &part.subject,
            format!("its configuration file is {other}, and that of the filter is {file}"),
            format!("set `config_file: {file}` in both"),
        ),
    });
}

fn check_policy(subject: &str, cluster: &Value, out: &mut Report) {
    out.push(if text(cluster, "lb_policy") == "CLUSTER_PROVIDED" {
        let fix = "replace `lb_policy` by the `load_balancing_policy` of `envoy/inside-cluster.yaml`";
        POLICY.error(subject, "lb_policy is CLUSTER_PROVIDED", fix)
    } else {
        POLICY.ok(subject, "Envoy's own policy chooses among the servers")
    });
}
