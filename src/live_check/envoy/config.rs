//! The configuration of an Envoy as one value, whether it came from a config dump or from a file: listeners with their
//! HTTP filters, routes and clusters.

use super::field::{at, flag, has, list, message_name, text};
use serde_json::Value;
use std::collections::BTreeMap;

/// The configuration of an Envoy.
#[derive(Debug, Default)]
pub(super) struct EnvoyConfig {
    /// The message `Bootstrap`.
    pub(super) bootstrap: Value,
    listeners: Vec<Value>,
    clusters: BTreeMap<String, Value>,
    /// Route configurations that listeners name.
    routes: BTreeMap<String, Value>,
    /// The messages `Secret` in view, by name. Envoy leaves out private keys.
    secrets: BTreeMap<String, Value>,
    /// Updates that Envoy refused: what, and the error.
    pub(super) rejected: Vec<(String, String)>,
}

impl EnvoyConfig {
    /// Reads the page `/config_dump`.
    pub(super) fn from_dump(dump: &Value) -> Self {
        let mut config = Self::default();
        for part in list(dump, "configs") {
            match message_name(part) {
                "BootstrapConfigDump" => config.bootstrap = at(part, "bootstrap").clone(),
                "ListenersConfigDump" => config.add_listeners(part),
                "ClustersConfigDump" => config.add_clusters(part),
                "RoutesConfigDump" => config.add_routes(part),
                "SecretsConfigDump" => config.add_secrets(part),
                _ => {}
            }
        }
        config
    }

    /// Reads a bootstrap file.
    pub(super) fn from_bootstrap(bootstrap: &Value) -> Self {
        let resources = at(bootstrap, "static_resources");
        let named = |field| list(resources, field).iter().map(|entry| (text(entry, "name").to_owned(), entry.clone()));
        Self {
            bootstrap: bootstrap.clone(),
            listeners: list(resources, "listeners").to_vec(),
            clusters: named("clusters").collect(),
            secrets: named("secrets").collect(),
            ..Self::default()
        }
    }

    fn add_listeners(&mut self, part: &Value) {
        self.listeners.extend(list(part, "static_listeners").iter().map(|entry| at(entry, "listener").clone()));
        for entry in list(part, "dynamic_listeners") {
            self.note_rejection("listener", text(entry, "name"), entry);
            if has(entry, "active_state.listener") {
                self.listeners.push(at(entry, "active_state.listener").clone());
            }
        }
    }

    fn add_clusters(&mut self, part: &Value) {
        for state in ["static_clusters", "dynamic_active_clusters", "dynamic_warming_clusters"] {
            for entry in list(part, state) {
                let cluster = at(entry, "cluster");
                self.note_rejection("cluster", text(cluster, "name"), entry);
                self.clusters.insert(text(cluster, "name").to_owned(), cluster.clone());
            }
        }
    }

    fn add_routes(&mut self, part: &Value) {
        for state in ["static_route_configs", "dynamic_route_configs"] {
            for entry in list(part, state) {
                let routes = at(entry, "route_config");
                self.note_rejection("route configuration", text(routes, "name"), entry);
                self.routes.insert(text(routes, "name").to_owned(), routes.clone());
            }
        }
    }

    fn add_secrets(&mut self, part: &Value) {
        for state in ["static_secrets", "dynamic_active_secrets"] {
            let entries = list(part, state).iter();
            self.secrets.extend(entries.map(|entry| (text(entry, "name").to_owned(), at(entry, "secret").clone())));
        }
    }

    fn note_rejection(&mut self, kind: &str, name: &str, entry: &Value) {
        if has(entry, "error_state.details") {
            self.rejected.push((format!("{kind} {name}"), text(entry, "error_state.details").to_owned()));
        }
    }

    /// The cluster with this name.
    pub(super) fn cluster(&self, name: &str) -> Option<&Value> {
        self.clusters.get(name)
    }

    /// The secret with this name.
    pub(super) fn secret(&self, name: &str) -> Option<&Value> {
        self.secrets.get(name)
    }

    /// All HTTP connection managers, listener by listener.
    pub(super) fn connection_managers(&self) -> Vec<ConnectionManager<'_>> {
        self.listeners.iter().flat_map(|listener| self.managers_of(listener)).collect()
    }

    fn managers_of<'a>(&'a self, listener: &'a Value) -> Vec<ConnectionManager<'a>> {
        let chains = list(listener, "filter_chains").iter().chain([at(listener, "default_filter_chain")]);
        let filters = chains.flat_map(|chain| list(chain, "filters")).map(|filter| at(filter, "typed_config"));
        let managers: Vec<&Value> = filters
            .chain([at(listener, "api_listener.api_listener")])
            .filter(|config| message_name(config) == "HttpConnectionManager")
            .collect();
        let several = managers.len() > 1;
        let named = |(number, message): (usize, &'a Value)| {
            let name = Some(text(listener, "name")).filter(|name| !name.is_empty()).unwrap_or("without a name");
            let chain = if several { format!(", filter chain {}", number + 1) } else { String::new() };
            let routes = match at(message, "route_config") {
                Value::Null => self.routes.get(text(message, "rds.route_config_name")),
                inline => Some(inline),
            };
            ConnectionManager { place: format!("listener {name}{chain}"), listener, message, routes }
        };
        managers.into_iter().enumerate().map(named).collect()
    }
}

/// An HTTP connection manager.
#[derive(Clone, Debug)]
pub(super) struct ConnectionManager<'a> {
    /// Its place, such as `listener inference`.
    pub(super) place: String,
    pub(super) listener: &'a Value,
    /// The message `HttpConnectionManager`.
    pub(super) message: &'a Value,
    /// The message `RouteConfiguration`, if it is known.
    pub(super) routes: Option<&'a Value>,
}

impl<'a> ConnectionManager<'a> {
    /// Its HTTP filters, in their order.
    pub(super) fn filters(&self) -> &'a [Value] {
        list(self.message, "http_filters")
    }

    /// Its routes to clusters.
    pub(super) fn routes(&self) -> Vec<Route<'a>> {
        let Some(configuration) = self.routes else { return Vec::new() };
        let hosts = list(configuration, "virtual_hosts").iter();
        let of_host = |host: &'a Value| {
            let routes = list(host, "routes").iter().enumerate().filter(|(_, route)| has(route, "route"));
            routes.map(move |(number, message)| Route { configuration, host, message, number })
        };
        hosts.flat_map(of_host).collect()
    }
}

/// A route to a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route<'a> {
    /// The message `RouteConfiguration`.
    pub(super) configuration: &'a Value,
    /// The message `VirtualHost`.
    pub(super) host: &'a Value,
    /// The message `Route`.
    pub(super) message: &'a Value,
    number: usize,
}

impl<'a> Route<'a> {
    /// Its name, or its virtual host and number.
    pub(super) fn name(&self) -> String {
        match text(self.message, "name") {
            "" => format!("{}/{}", text(self.host, "name"), self.number + 1),
            name => name.to_owned(),
        }
    }

    /// The message `RouteAction`.
    pub(super) fn action(&self) -> &'a Value {
        at(self.message, "route")
    }

    /// The names of its clusters; none if a header or a plugin selects the cluster.
    pub(super) fn clusters(&self) -> Vec<&'a str> {
        let weighted = list(self.action(), "weighted_clusters.clusters").iter().map(|cluster| text(cluster, "name"));
        let names = weighted.chain([text(self.action(), "cluster")]);
        names.filter(|name| !name.is_empty()).collect()
    }

    /// The settings of filter `name`, from the least to the most specific level, and whether the filter is switched
    /// off.
    pub(super) fn filter_overrides(&self, name: &str) -> (Vec<&'a Value>, Option<bool>) {
        let mut overrides = Vec::new();
        let mut disabled = None;
        for level in [self.configuration, self.host, self.message] {
            let settings = at(level, "typed_per_filter_config").get(name).unwrap_or(&Value::Null);
            let inner = if message_name(settings) == "FilterConfig" {
                disabled = Some(flag(settings, "disabled"));
                at(settings, "config")
            } else {
                settings
            };
            if has(inner, "@type") {
                disabled = Some(flag(inner, "disabled"));
                overrides.push(at(inner, "overrides"));
            }
        }
        (overrides, disabled)
    }
}

/// How Envoy finds the model server of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Steering<'a> {
    /// `ORIGINAL_DST`: one address in this header.
    Header(&'a str),
    /// `ORIGINAL_DST`: one address in dynamic metadata, the message `MetadataKey`.
    Metadata(&'a Value),
    /// Load balancing policy `override_host`: a list, from the sources of this message `OverrideHost`.
    List(&'a Value),
    /// Subsets of hosts by their metadata, the message `LbSubsetConfig`.
    Subset(&'a Value),
    /// `ORIGINAL_DST` without a header: the address that the client connected to.
    ClientAddress,
    /// By Envoy's own load balancing.
    Balanced,
}

/// The header that `ORIGINAL_DST` reads when none is named.
pub(super) const DEFAULT_HEADER: &str = "x-envoy-original-dst-host";

impl<'a> Steering<'a> {
    /// How `cluster` finds its server.
    pub(super) fn of(cluster: &'a Value) -> Self {
        let policies = list(cluster, "load_balancing_policy.policies").iter();
        let mut configs = policies.map(|policy| at(policy, "typed_extension_config.typed_config"));
        if let Some(policy) = configs.find(|config| message_name(config) == "OverrideHost") {
            return Self::List(policy);
        }
        if text(cluster, "type") == "ORIGINAL_DST" {
            let config = at(cluster, "original_dst_lb_config");
            return match () {
                () if flag(config, "use_http_header") => {
                    let header = text(config, "http_header_name");
                    Self::Header(if header.is_empty() { DEFAULT_HEADER } else { header })
                }
                () if has(config, "metadata_key") => Self::Metadata(at(config, "metadata_key")),
                () => Self::ClientAddress,
            };
        }
        if has(cluster, "lb_subset_config") { Self::Subset(at(cluster, "lb_subset_config")) } else { Self::Balanced }
    }

    /// Whether the picker can choose the server.
    pub(super) fn follows_picker(self) -> bool {
        !matches!(self, Self::ClientAddress | Self::Balanced)
    }

    /// Whether Envoy knows no servers itself: without an address from the picker, requests fail.
    pub(super) fn needs_address(self) -> bool {
        matches!(self, Self::Header(_) | Self::Metadata(_))
    }

    /// Whether the server is named in dynamic metadata.
    pub(super) fn reads_metadata(self) -> bool {
        match self {
            Self::Metadata(_) | Self::Subset(_) => true,
            Self::List(policy) => list(policy, "override_host_sources").iter().any(|source| has(source, "metadata")),
            Self::Header(_) | Self::ClientAddress | Self::Balanced => false,
        }
    }

    /// The headers in which the server is named.
    pub(super) fn headers(self) -> Vec<&'a str> {
        match self {
            Self::Header(name) => vec![name],
            Self::List(policy) => list(policy, "override_host_sources")
                .iter()
                .map(|source| text(source, "header"))
                .filter(|header| !header.is_empty())
                .collect(),
            _ => Vec::new(),
        }
    }
}
