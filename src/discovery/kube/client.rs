//! The client of the Kubernetes API.

use kube::Client;
use std::time::Duration;

/// 5 s: an unreachable API server should be reported before any task waits for it.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Environment variable with the namespace, as GIE's charts set it.
pub const NAMESPACE_VARIABLE: &str = "NAMESPACE";

/// A client of the cluster that this process runs in, or that the kubeconfig (`KUBECONFIG`, `~/.kube/config`) names.
/// It sends no request yet.
///
/// # Errors
/// If neither names an API server, or the settings are invalid.
pub async fn connect() -> Result<Client, kube::Error> {
    let mut config = kube::Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // A watch is silent while nothing changes. Callers have their own timeouts.
    config.read_timeout = None;
    // Callers retry and log by themselves.
    config.default_retry = false;
    Client::try_from(config)
}

/// The namespace of a pool that does not name one.
#[must_use]
pub fn default_namespace(client: &Client) -> String {
    let variable = std::env::var(NAMESPACE_VARIABLE).ok().filter(|namespace| !namespace.is_empty());
    variable.unwrap_or_else(|| client.default_namespace().to_owned())
}
