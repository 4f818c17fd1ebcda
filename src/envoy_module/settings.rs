//! The settings of the module in Envoy's configuration.

use attache_ext_proc::exchange::GatewayCall;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::net::SocketAddr;
use std::path::PathBuf;

/// 30 s: how long Envoy's start waits for a picker by default.
const READY_TIMEOUT_SECONDS: u64 = 30;

/// `filter_config` of the HTTP filter: a `Struct`, or JSON in a `StringValue`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterSettings {
    /// The configuration file of `attache run`.
    pub config_file: PathBuf,
    /// The name that `match.authority` of a pool compares, as the `:authority` of an ext-proc call.
    #[serde(default, rename = "authority", deserialize_with = "to_authority")]
    pub call: GatewayCall,
    /// Whether requests without a decision are passed on. If not, they get the error responses of ext-proc.
    #[serde(default = "yes")]
    pub fail_open: bool,
    /// The address of the admin port, `ip:port`. Filters of one configuration file share it.
    #[serde(default)]
    pub admin: Option<SocketAddr>,
    /// The file to which requests and decisions are recorded, as by `--record`.
    #[serde(default)]
    pub record: Option<PathBuf>,
}

/// `extension_config` of the bootstrap extension.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootstrapSettings {
    /// The configuration file of `attache run`.
    pub config_file: PathBuf,
    /// Whether Envoy opens its listeners only when the pools are known.
    #[serde(default = "yes")]
    pub wait_until_ready: bool,
    /// How long it waits at most, in seconds.
    #[serde(default = "ready_timeout")]
    pub ready_timeout_seconds: u64,
    /// The address of the admin port, `ip:port`.
    #[serde(default)]
    pub admin: Option<SocketAddr>,
    /// The file to which requests and decisions are recorded, as by `--record`.
    #[serde(default)]
    pub record: Option<PathBuf>,
}

/// `cluster_config` of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSettings {
    /// The configuration file of `attache run`.
    pub config_file: PathBuf,
    /// The pool whose servers the cluster has. Only a file with one pool needs no name.
    #[serde(default)]
    pub pool: Option<String>,
    /// How long Envoy waits for the first servers at most, in seconds.
    #[serde(default = "ready_timeout")]
    pub ready_timeout_seconds: u64,
    /// The address of the admin port, `ip:port`.
    #[serde(default)]
    pub admin: Option<SocketAddr>,
    /// The file to which requests and decisions are recorded, as by `--record`.
    #[serde(default)]
    pub record: Option<PathBuf>,
}

/// What a picker opens beside its configuration.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// The admin port.
    pub admin: Option<SocketAddr>,
    /// The recording.
    pub record: Option<PathBuf>,
}

impl FilterSettings {
    /// What the picker opens.
    #[must_use]
    pub fn outputs(&self) -> Outputs {
        Outputs { admin: self.admin, record: self.record.clone() }
    }
}

impl BootstrapSettings {
    /// What the picker opens.
    #[must_use]
    pub fn outputs(&self) -> Outputs {
        Outputs { admin: self.admin, record: self.record.clone() }
    }
}

impl ClusterSettings {
    /// What the picker opens.
    #[must_use]
    pub fn outputs(&self) -> Outputs {
        Outputs { admin: self.admin, record: self.record.clone() }
    }
}

fn to_authority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GatewayCall, D::Error> {
    let text = String::deserialize(deserializer)?;
    let allowed = "allowed: a host name, or `host:port`";
    GatewayCall::to(&text).map_err(|error| D::Error::custom(format!("`authority` is {text:?} ({error}), {allowed}")))
}

fn yes() -> bool {
    true
}

fn ready_timeout() -> u64 {
    READY_TIMEOUT_SECONDS
}

/// Reads settings.
///
/// # Errors
/// If they are no JSON object with these keys.
pub fn read<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| format!("the module's configuration: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_defaults_and_refuse_unknown_keys() {
        let filter: FilterSettings = read(br#"{"config_file": "/a.yaml"}"#).unwrap();
        let (call, admin, record) = (GatewayCall::default(), None, None);
        assert_eq!(filter, FilterSettings { config_file: "/a.yaml".into(), call, fail_open: true, admin, record });
        let bootstrap: BootstrapSettings = read(br#"{"config_file": "/a.yaml", "admin": "127.0.0.1:9090"}"#).unwrap();
        assert!(bootstrap.wait_until_ready);
        assert_eq!((bootstrap.ready_timeout_seconds, bootstrap.admin), (30, Some(([127, 0, 0, 1], 9090).into())));
        let error = read::<FilterSettings>(br#"{"config_file": "/a.yaml", "fail_opne": false}"#).unwrap_err();
        assert!(error.contains("fail_opne"), "{error}");
        assert!(read::<FilterSettings>(b"").is_err(), "the file must be named");
        let named =
            |name: &str| read::<FilterSettings>(format!(r#"{{"config_file":"/a","authority":"{name}"}}"#).as_bytes());
        assert_eq!(named("llm.example.com:80").unwrap().call, GatewayCall::to("llm.example.com:80").unwrap());
        assert!(named("not a name").unwrap_err().contains("`authority` is \"not a name\""));
    }
}
