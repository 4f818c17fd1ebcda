//! Who meets the picker: the routes of model servers, the ext-proc filter as each of them has it, and the clusters of
//! model servers and of the picker.

use super::config::{ConnectionManager, EnvoyConfig, Route, Steering};
use super::field::{at, flag, has, list, message_name, text};
use super::inside::{InsideFilter, is_inside};
use super::source::EnvoySource;
use serde_json::Value;
use std::collections::BTreeMap;

/// Requests of model servers, as they pass through an Envoy.
#[derive(Debug)]
pub(super) struct Traffic<'a> {
    pub(super) source: &'a EnvoySource,
    pub(super) managers: Vec<ModelListener<'a>>,
    /// Clusters of model servers, by name.
    pub(super) model_clusters: BTreeMap<&'a str, &'a Value>,
    /// Clusters of the picker, by name.
    pub(super) picker_clusters: BTreeMap<&'a str, &'a Value>,
    /// Whether any route leads to a cluster that follows the picker.
    pub(super) is_steered: bool,
}

/// A listener with routes to model servers.
#[derive(Debug)]
pub(super) struct ModelListener<'a> {
    /// For findings: the Envoy and the listener.
    pub(super) subject: String,
    pub(super) manager: ConnectionManager<'a>,
    /// Routes to model servers.
    pub(super) routes: Vec<Route<'a>>,
    pub(super) filters: Vec<PickerFilter<'a>>,
    /// The filter of Attaché inside Envoy.
    pub(super) inside: Option<InsideFilter<'a>>,
}

/// An ext-proc filter of the picker, as some routes have it.
#[derive(Debug)]
pub(super) struct PickerFilter<'a> {
    /// For findings: the Envoy, the listener and the filter, and the routes if others have the filter differently.
    pub(super) subject: String,
    /// Its place among the HTTP filters.
    pub(super) position: usize,
    /// The message `ExternalProcessor`, with the changes of the routes.
    pub(super) config: Value,
    /// Whether these routes switch it off.
    pub(super) is_disabled: bool,
    pub(super) routes: Vec<Route<'a>>,
}

impl PickerFilter<'_> {
    /// A mode of bodies, `request_body_mode` or `response_body_mode`; `NONE` is the default.
    pub(super) fn body_mode(&self, name: &str) -> &str {
        match text(at(&self.config, "processing_mode"), name) {
            "" => "NONE",
            mode => mode,
        }
    }

    /// Whether Envoy's message timeout can't fire: it doesn't while bodies are in full duplex.
    pub(super) fn is_duplex(&self) -> bool {
        self.body_mode("request_body_mode") == "FULL_DUPLEX_STREAMED"
    }

    /// The name of the picker's cluster; empty if the filter has none.
    pub(super) fn cluster(&self) -> &str {
        text(&self.config, "grpc_service.envoy_grpc.cluster_name")
    }
}

impl<'a> Traffic<'a> {
    pub(super) fn of(source: &'a EnvoySource) -> Self {
        let config = &source.config;
        let managers = config.connection_managers();
        let processors: Vec<&Value> =
            managers.iter().flat_map(ConnectionManager::filters).filter(is_processor).collect();
        let chosen = choose(config, &processors);
        let steered = |route: &Route<'_>| {
            let clusters = route.clusters();
            clusters.iter().any(|name| config.cluster(name).is_some_and(|c| Steering::of(c).follows_picker()))
        };
        let is_steered = managers.iter().flat_map(ConnectionManager::routes).any(|route| steered(&route));
        let mut traffic = Self {
            source,
            managers: Vec::new(),
            model_clusters: BTreeMap::new(),
            picker_clusters: BTreeMap::new(),
            is_steered,
        };
        for manager in managers {
            let routes: Vec<_> = manager.routes().into_iter().filter(|route| !is_steered || steered(route)).collect();
            let filters = manager.filters().iter().enumerate();
            let own: Vec<_> = filters.filter(|(_, f)| chosen.iter().any(|c| std::ptr::eq(*c, *f))).collect();
            // Routes that come over RDS are unknown in a file.
            let is_unknown = manager.routes.is_none() && (!own.is_empty() || manager.filters().iter().any(is_inside));
            if !routes.is_empty() || is_unknown {
                traffic.add(manager.clone(), routes, &own);
            }
        }
        traffic.find_clusters(config);
        traffic
    }

    fn add(&mut self, manager: ConnectionManager<'a>, routes: Vec<Route<'a>>, own: &[(usize, &'a Value)]) {
        let subject = format!("{}, {}", self.source.name, manager.place);
        let filters = own.iter().flat_map(|(at, filter)| effective(&subject, *at, filter, &routes)).collect();
        let all: &'a [Value] = manager.filters();
        let inside = all.iter().enumerate().find(|(_, filter)| is_inside(filter)).map(|(position, message)| {
            let subject = format!("{subject}, filter {}", text(message, "name"));
            InsideFilter { subject, position, message }
        });
        self.managers.push(ModelListener { subject, manager, routes, filters, inside });
    }

    fn find_clusters(&mut self, config: &'a EnvoyConfig) {
        let names: Vec<String> = self.filters().map(|filter| filter.cluster().to_owned()).collect();
        let picker = |name: &str| names.iter().any(|picker| picker == name);
        let routes: Vec<Route<'a>> = self.managers.iter().flat_map(|manager| manager.routes.iter().copied()).collect();
        let of_routes = routes.iter().flat_map(Route::clusters).filter(|name| !picker(name));
        self.model_clusters = of_routes.filter_map(|name| Some((name, config.cluster(name)?))).collect();
        let found = names.iter().filter_map(|name| config.cluster(name));
        self.picker_clusters = found.map(|cluster| (text(cluster, "name"), cluster)).collect();
    }

    /// The picker's filters of all listeners.
    pub(super) fn filters(&self) -> impl Iterator<Item = &PickerFilter<'a>> {
        self.managers.iter().flat_map(|manager| &manager.filters)
    }

    /// How the clusters of these routes find their servers.
    pub(super) fn steering(&self, routes: &[Route<'a>]) -> Vec<Steering<'a>> {
        let names = routes.iter().flat_map(Route::clusters);
        names.filter_map(|name| self.model_clusters.get(name)).map(|cluster| Steering::of(cluster)).collect()
    }

    /// What findings about the cluster `name` name.
    pub(super) fn cluster_subject(&self, name: &str) -> String {
        format!("{}, cluster {name}", self.source.name)
    }
}

/// Whether an HTTP filter is of the kind ext-proc.
pub(super) fn is_processor(filter: &&Value) -> bool {
    message_name(at(filter, "typed_config")) == "ExternalProcessor"
}

/// The filters of the picker. If there are several kinds of ext-proc filters, those of the picker handle `envoy.lb` or have
/// a cluster that looks like a picker.
fn choose<'a>(config: &EnvoyConfig, processors: &[&'a Value]) -> Vec<&'a Value> {
    let cluster = |filter: &Value| text(filter, "typed_config.grpc_service.envoy_grpc.cluster_name").to_owned();
    let likely = |filter: &&&Value| {
        let namespaces = list(filter, "typed_config.metadata_options.receiving_namespaces.untyped");
        let name = cluster(filter);
        let has_port = config.cluster(&name).is_some_and(|cluster| cluster.to_string().contains("\"port_value\":9002"));
        let words = ["attache", "picker", "epp", "endpoint-picker"];
        namespaces.iter().any(|name| name == "envoy.lb") || has_port || words.iter().any(|word| name.contains(word))
    };
    let probable: Vec<&Value> = processors.iter().filter(likely).copied().collect();
    if probable.is_empty() { processors.to_vec() } else { probable }
}

/// The filter as each group of routes has it.
fn effective<'a>(subject: &str, position: usize, filter: &'a Value, routes: &[Route<'a>]) -> Vec<PickerFilter<'a>> {
    let name = text(filter, "name");
    let mut groups: Vec<PickerFilter<'a>> = Vec::new();
    let mut add = |config: Value, is_disabled: bool, route: Option<Route<'a>>| {
        let same = groups.iter_mut().find(|group| group.is_disabled == is_disabled && group.config == config);
        match same {
            Some(group) => group.routes.extend(route),
            None => groups.push(PickerFilter {
                subject: format!("{subject}, filter {name}"),
                position,
                config,
                is_disabled,
                routes: route.into_iter().collect(),
            }),
        }
    };
    let base = at(filter, "typed_config");
    let is_disabled = flag(filter, "disabled");
    if routes.is_empty() {
        add(base.clone(), is_disabled, None);
    }
    for route in routes {
        let (overrides, disabled) = route.filter_overrides(name);
        let mut config = base.clone();
        overrides.iter().for_each(|changes| apply(&mut config, changes));
        add(config, disabled.unwrap_or(is_disabled), Some(*route));
    }
    if groups.len() > 1 {
        for group in &mut groups {
            let names: Vec<String> = group.routes.iter().map(Route::name).collect();
            group.subject.push_str(&format!(", route {}", shorten(&names)));
        }
    }
    groups
}

/// The first names.
fn shorten(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// Applies the message `ExtProcOverrides`: each of its fields replaces that of the filter.
fn apply(config: &mut Value, changes: &Value) {
    const FIELDS: [&str; 6] = [
        "processing_mode",
        "request_attributes",
        "response_attributes",
        "grpc_service",
        "metadata_options",
        "failure_mode_allow",
    ];
    for field in FIELDS.into_iter().filter(|field| has(changes, field)) {
        config[field] = at(changes, field).clone();
    }
}
