//! Envoy and its picker, which is a process of its own or inside Envoy.

use super::attache::{AdminPages, AttacheProcess};
use super::envoy::{EnvoyProcess, shipped};
use super::inside::Inside;
use std::net::SocketAddr;
use std::ops::Deref;

/// Where the picker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ExtProc,
    Inside,
}

impl Way {
    pub(crate) const BOTH: [Self; 2] = [Self::ExtProc, Self::Inside];
}

/// A running Envoy, and the admin pages of its picker.
pub(crate) enum Gateway {
    ExtProc(EnvoyProcess, AttacheProcess),
    Inside(Inside),
}

impl Deref for Gateway {
    type Target = AdminPages;

    fn deref(&self) -> &AdminPages {
        match self {
            Self::ExtProc(_, picker) => picker,
            Self::Inside(inside) => inside,
        }
    }
}

impl Gateway {
    /// Starts both with the machine for this test alone. `configuration` has one pool, `default`, with these at most four
    /// servers.
    pub(crate) async fn alone(way: Way, configuration: &str, servers: &[SocketAddr]) -> Self {
        match way {
            Way::ExtProc => {
                let picker = AttacheProcess::configured(configuration).await;
                let ports = [(8080, 0), (9901, 0), (9002, picker.grpc.port()), (9003, picker.health.port())];
                Self::ExtProc(EnvoyProcess::alone(&shipped("original-dst.yaml", &ports)).await, picker)
            }
            Way::Inside => {
                let name = "- name: default\n";
                assert!(configuration.contains(name), "{configuration}");
                let listed = configuration.replace(name, &format!("{name}  destination: {{mode: list}}\n"));
                // The bootstrap has four servers. No process listens on the ports of those that are not in the pool.
                let servers = [0, 1, 2, 3].map(|at: u16| {
                    let absent = SocketAddr::from(([127, 0, 0, 1], 1 + at));
                    servers.get(usize::from(at)).copied().unwrap_or(absent)
                });
                Self::Inside(Inside::alone(&listed, servers).await)
            }
        }
    }

    fn envoy(&self) -> &EnvoyProcess {
        match self {
            Self::ExtProc(envoy, _) => envoy,
            Self::Inside(inside) => &inside.envoy,
        }
    }

    /// Where clients connect.
    pub(crate) fn clients(&self) -> SocketAddr {
        self.envoy().listener("inference")
    }
}
