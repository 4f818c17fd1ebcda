//! `attache envoy-config`: a bootstrap of Envoy for a configuration file.

use super::output::{colour, message, print};
use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_USAGE};
use attache_config::Settings;
use attache_config::settings::PoolSettings;
use attache_pool::{EndpointSpec, Roles};
use attache_scheduling::router::{DESTINATION, DESTINATION_NAMESPACE, Destination};
use clap::Args;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The shipped bootstrap of a pool that lists its servers: what is printed has other servers and another configuration file.
const BOOTSTRAP: &str = include_str!("../../envoy/inside.yaml");
/// That of a pool that finds servers: Envoy gets them from Attaché.
const CLUSTER_BOOTSTRAP: &str = include_str!("../../envoy/inside-cluster.yaml");
/// The configuration file in it.
const CONFIG_FILE: &str = "config_file: /etc/attache/config.yaml";
/// The beginning of a line with a server.
const SERVER: &str = "- endpoint: {address: ";

const EXAMPLES: &str = "\
Examples:
  attache envoy-config --inside /etc/attache/config.yaml > envoy.yaml
  ENVOY_DYNAMIC_MODULES_SEARCH_PATH=$(dirname \"$(attache envoy-module)\") envoy -c envoy.yaml

Exit codes: 0 when the file can be used so, 78 when it can't.";

/// Print a bootstrap of Envoy for a configuration file, with Attaché inside Envoy.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct EnvoyConfigArgs {
    /// With the library that runs Attaché inside Envoy. For the ext-proc service, change a file of `envoy/`
    #[arg(long)]
    inside: bool,
    /// Attaché's configuration file, where Envoy will read it, with one pool
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn envoy_config(args: &EnvoyConfigArgs) -> ExitCode {
    if !args.inside {
        message("error: `--inside` is missing; for the ext-proc service, change the ports in a file of `envoy/`");
        return ExitCode::from(EXIT_USAGE);
    }
    let reading = ReloadSource::of_file_alone(args.file.clone()).inside().read();
    message(reading.render(colour()));
    let Some(settings) = reading.settings else { return ExitCode::from(EXIT_CONFIG) };
    let printed = pool(&settings).and_then(|pool| Ok((bootstrap(&args.file, servers(pool)?)?, pool.destination)));
    match printed {
        Ok((bootstrap, destination)) => {
            if destination == Destination::Single {
                message("warning: with `destination: {mode: list}` in the pool, a retry takes Attaché's next choice");
            }
            print(bootstrap);
            ExitCode::SUCCESS
        }
        Err(error) => {
            message(format_args!("error: {}: {error}", args.file.display()));
            ExitCode::from(EXIT_CONFIG)
        }
    }
}

/// The pool of the bootstrap's cluster.
fn pool(settings: &Settings) -> Result<&PoolSettings, String> {
    match (&settings.pools[..], &settings.templates[..]) {
        ([pool], []) => Ok(pool),
        (pools, []) => Err(format!(
            "`pools` has {} pools, allowed: 1; a request without a decision would go to a server of any pool, so write \
             a cluster and a route for each one",
            pools.len()
        )),
        _ => Err("`pools` has a search for InferencePools, allowed: one pool".to_owned()),
    }
}

/// The servers that the bootstrap lists; `None`: Envoy gets them from Attaché.
fn servers(pool: &PoolSettings) -> Result<Option<Vec<SocketAddr>>, String> {
    let name = &pool.name;
    let are_found = !pool.dns.is_empty() || pool.file.is_some() || pool.kubernetes.is_some();
    if pool.endpoints.is_empty() && !are_found {
        return Err(format!("pool `{name}` has no `endpoints`, and Envoy must know its servers"));
    }
    let is_read =
        |(namespace, key): &(Box<str>, Box<str>)| **namespace == *DESTINATION_NAMESPACE && **key == *DESTINATION;
    if !pool.destination_names.metadata.iter().any(is_read) {
        return Err(format!(
            "pool `{name}` names the destination in other metadata than `{DESTINATION_NAMESPACE}`, `{DESTINATION}`, \
             which the bootstrap reads; add it to `destination.metadata`"
        ));
    }
    if are_found {
        return Ok(None);
    }
    // A request without a decision gets a whole response from its server.
    let serves = |endpoint: &&EndpointSpec| !endpoint.draining && Roles::of_labels(&endpoint.labels).has(Roles::DECODE);
    let servers: Vec<SocketAddr> = pool.endpoints.iter().filter(serves).map(|endpoint| endpoint.address).collect();
    if servers.is_empty() {
        return Err(format!("pool `{name}` has no endpoint that generates responses"));
    }
    Ok(Some(servers))
}

/// The shipped bootstrap with these servers and this file, without the comment at its head.
fn bootstrap(file: &Path, servers: Option<Vec<SocketAddr>>) -> Result<String, String> {
    let path = std::path::absolute(file).map_err(|error| format!("where is the file: {error}"))?;
    let path = path.to_str().ok_or("the path must be UTF-8, as Envoy's configuration is")?;
    let config_file = format!("config_file: {}", yaml_text(path));
    let (name, shipped) = match servers {
        Some(_) => ("inside.yaml", BOOTSTRAP),
        None => ("inside-cluster.yaml", CLUSTER_BOOTSTRAP),
    };
    let mut servers = servers.unwrap_or_default();
    let mut lines = vec![format!("# envoy/{name}, printed by `attache envoy-config --inside`.")];
    for line in shipped.lines().skip_while(|line| line.starts_with('#')) {
        match line.split_once(SERVER) {
            // The first one stands for all of them.
            Some((indent, _)) => lines.extend(servers.drain(..).map(|server| {
                let (ip, port) = (yaml_text(&server.ip().to_string()), server.port());
                format!("{indent}{SERVER}{{socket_address: {{address: {ip}, port_value: {port}}}}}}}")
            })),
            None => lines.push(line.replace(CONFIG_FILE, &config_file)),
        }
    }
    Ok(lines.join("\n"))
}

/// A text as YAML: plain if no character of it can mean something else.
fn yaml_text(text: &str) -> String {
    let is_plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-".contains(&b));
    if is_plain { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn bootstrap_of_the_shipped_servers_is_the_shipped_one() {
        let servers = addresses(&["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003", "127.0.0.1:8004"]);
        for (servers, shipped) in [(Some(servers), BOOTSTRAP), (None, CLUSTER_BOOTSTRAP)] {
            let text = bootstrap(Path::new("/etc/attache/config.yaml"), servers).unwrap();
            let shipped = shipped.split_once("\n\n").unwrap().1;
            assert_eq!(text.split_once("\n\n").unwrap().1, shipped.trim_end());
            assert!(shipped.starts_with("admin:"), "the comment at the head is left out");
        }
    }

    #[test]
    fn shipped_bootstraps_differ_only_in_the_source_of_servers() {
        let lines = |text: &'static str| text.split_once("\n\n").unwrap().1.lines();
        // Up to the type of the cluster, and from its time-out for connections to its servers.
        let until = |text, line: &'static str| lines(text).take_while(move |at| at.trim() != line).collect::<Vec<_>>();
        let note = "# Envoy waits for the first servers, for 30 s at most. Servers of prefill and those that drain are left out.";
        assert_eq!(until(BOOTSTRAP, "type: STATIC"), until(CLUSTER_BOOTSTRAP, note));
        let rest = |text| lines(text).skip_while(|at| at.trim() != "connect_timeout: 2s").collect::<Vec<_>>();
        let listed = rest(BOOTSTRAP).into_iter().take_while(|at| at.trim() != "load_assignment:").collect::<Vec<_>>();
        assert_eq!(listed, rest(CLUSTER_BOOTSTRAP));
    }

    #[test]
    fn servers_that_get_no_whole_requests_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("attache.yaml");
        let listed = |endpoints: &str| {
            let head = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: a\n  endpoints:\n";
            std::fs::write(&file, format!("{head}{endpoints}")).unwrap();
            let settings = ReloadSource::of_file_alone(file.clone()).inside().read().settings.unwrap();
            servers(&settings.pools[0])
        };
        let found = listed(
            "  - {address: '10.0.0.1:1', role: prefill}\n  - {address: '10.0.0.2:1', role: decode}\n  - '10.0.0.3:1'\n  \
             - {address: '10.0.0.4:1', draining: true}\n  - {address: '10.0.0.5:1', role: encode}\n",
        );
        assert_eq!(found, Ok(Some(addresses(&["10.0.0.2:1", "10.0.0.3:1"]))));
        assert!(listed("  - {address: '10.0.0.4:1', draining: true}\n").is_err());
    }

    #[test]
    fn servers_and_file_are_replaced() {
        let servers = addresses(&["10.0.0.1:80", "[fd00::1]:81"]);
        let text = bootstrap(Path::new("/a b/\"c\".yaml"), Some(servers)).unwrap();
        assert_eq!(text.matches(SERVER).count(), 2);
        assert!(text.contains("{address: 10.0.0.1, port_value: 80}") && !text.contains("800"), "{text}");
        assert!(text.contains("{address: \"fd00::1\", port_value: 81}"), "{text}");
        assert_eq!(text.matches(r#"config_file: "/a b/\"c\".yaml""#).count(), 2, "{text}");
        let text = bootstrap(Path::new("/a.yaml"), None).unwrap();
        assert_eq!(text.matches("config_file: /a.yaml").count(), 3, "of the extension, the filter and the cluster");
    }
}
