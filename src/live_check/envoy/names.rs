//! What the configuration file of Attaché says about the exchange with Envoy.

use attache_config::Settings;
use attache_disagg::Mode;
use std::time::Duration;

/// The header of the destination by default.
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The header of the destination of AIBrix's gateway: `--destination-header target-pod`.
const TARGET_POD: &str = "target-pod";
/// The namespace of the metadata with the destination by default.
pub(super) const NAMESPACE: &str = "envoy.lb";

/// The names and limits that Envoy must agree with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names<'a> {
    settings: Option<&'a Settings>,
}

impl<'a> Names<'a> {
    pub(super) fn new(settings: Option<&'a Settings>) -> Self {
        Self { settings }
    }

    /// Headers in which the picker may name the destination: those of the file, and the usual ones, as flags and
    /// variables of the picker can name others than the file.
    pub(super) fn headers(&self) -> Vec<&'a str> {
        let pools = self.settings.iter().flat_map(|settings| &settings.pools);
        let named = pools.flat_map(|pool| pool.destination_names.headers.iter().map(|name| &**name));
        let mut headers = vec![DESTINATION, TARGET_POD];
        headers.extend(named);
        headers
    }

    /// Metadata with the destination, as namespace and key.
    pub(super) fn metadata(&self) -> Vec<(&'a str, &'a str)> {
        let pools = self.settings.iter().flat_map(|settings| &settings.pools);
        let named = pools.flat_map(|pool| &pool.destination_names.metadata);
        let mut keys = vec![(NAMESPACE, DESTINATION)];
        keys.extend(named.map(|(namespace, key)| (&**namespace, &**key)));
        keys
    }

    /// The longest `disaggregation.messageTimeout` of the pools.
    pub(super) fn message_timeout(&self) -> Option<Duration> {
        let pools = self.settings.iter().flat_map(|settings| &settings.pools);
        let timeout = |mode: &Mode| match mode {
            Mode::Direct(direct) => direct.message_timeout,
            Mode::Header { .. } => None,
        };
        pools.filter_map(|pool| timeout(&pool.disaggregation.as_ref()?.mode)).max()
    }
}
