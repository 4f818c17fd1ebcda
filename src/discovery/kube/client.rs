//! The way to the API server.

use kube::Client;
use std::time::Duration;

/// 5 s: an API server that is not there should be known before anybody waits for it.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Names the namespace, as GIE's charts set it.
pub const NAMESPACE_VARIABLE: &str = "NAMESPACE";

/// A client of the cluster that this process runs in, or that its kubeconfig (`KUBECONFIG`, `~/.kube/config`) names. Nothing is asked yet.
///
/// # Errors
/// When neither says where an API server is, or what is said can't be used.
pub async fn connect() -> Result<Client, kube::Error> {
    let mut config = kube::Config::infer().await.map_err(kube::Error::InferConfig)?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // A watch is silent for as long as nothing changes. What is too slow is told by those who ask.
    config.read_timeout = None;
    // Those who ask repeat themselves, and say so.
    config.default_retry = false;
    Client::try_from(config)
}

/// The namespace of a pool that does not name one.
#[must_use]
pub fn default_namespace(client: &Client) -> String {
    let variable = std::env::var(NAMESPACE_VARIABLE).ok().filter(|namespace| !namespace.is_empty());
    variable.unwrap_or_else(|| client.default_namespace().to_owned())
}
